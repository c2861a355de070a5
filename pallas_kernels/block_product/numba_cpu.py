"""block_product for CPUs, compiled by numba: codes are read once and become numbers in registers or in a core's cache,
where XLA would write the matrix out in floats first.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped
from numba.np.numpy_support import carray

from pallas_kernels.block_product.reference import GROUP
from pallas_kernels.cpu_call import (
    DATA,
    compiled,
    floats,
    free,
    integers,
    new,
    pointer,
    registered,
    size,
    supported,
    word,
)

ROWS, CODES, SCALE, OFFSET, FACTS = range(5)  # the buffers of a call, in order
WIDTH = 64  # outputs of a panel: known ahead, so that loops over them have no rest
MOST_ROWS = 32  # above it arithmetic is the bound, and XLA's products are faster
ORDER = {"contract"}  # a product and a sum in one instruction
PART = 4 * WIDTH  # bytes of a row of floats
OWN = (2 + GROUP) * PART  # of a panel's own memory: scales, offsets and a group's numbers


def block_product(
    rows: Float[Array, "N I"],
    codes: Shaped[Array, "..."],
    scale: Int[Array, "..."],
    offset: Int[Array, "..."] | None,
    *,
    out_dtype=None,
) -> Float[Array, "N O"]:
    """`reference.block_product`, the codes read once.

    Raises `NotImplementedError` for rows that are not float32 or too many, codes that are not in panels of 64 with a
    multiple of 32 inputs, and where XLA cannot call what numba compiles.
    """
    if rows.dtype != jnp.dtype(jnp.float32) or not 0 < rows.shape[0] <= MOST_ROWS:
        raise NotImplementedError(f"{rows.shape[0]} rows of {rows.dtype}: up to {MOST_ROWS} of float32")
    if codes.ndim != 3 or codes.shape[2] != WIDTH or rows.shape[1] % GROUP:
        raise NotImplementedError(f"codes {codes.shape}: panels of {WIDTH} outputs and a multiple of {GROUP} inputs")
    each = rows.shape[1] // scale.shape[1]
    if scale.shape[1] > 1 and (each not in (GROUP, GROUP // 2) or (codes.dtype != jnp.int8 and each != GROUP)):
        raise NotImplementedError(f"scales for {each} inputs: for {GROUP}, in 8 bits also {GROUP // 2}, or for all")
    call = _product()
    shape = jax.ShapeDtypeStruct((codes.shape[0], rows.shape[0], WIDTH), jnp.float32)
    facts = np.array([8 if codes.dtype == jnp.int8 else 4, offset is not None], np.int32)
    out = jax.ffi.ffi_call(call, shape)(rows, codes, scale, scale if offset is None else offset, facts)
    return jnp.swapaxes(out, 0, 1).reshape(rows.shape[0], -1).astype(out_dtype or rows.dtype)


@functools.cache
def _product() -> str:
    """The kernel's name; it is compiled when it is first called for."""
    supported()
    return registered("jaxkv_block_product", _panels, _panel)


@compiled
def _panels(ins):
    """The matrix' panels."""
    return size(word(ins, CODES), 0)


def _panel(ins, outs, unit):
    """The outputs of one panel, for all rows."""
    count, inputs, panels = size(word(ins, ROWS), 0), size(word(ins, ROWS), 1), size(word(ins, CODES), 0)
    facts, scaled = integers(word(ins, FACTS), (2,)), size(word(ins, SCALE), 1)  # scales of an output
    length = min(GROUP, inputs // scaled)  # inputs of a group
    groups = inputs // length
    rows = floats(word(ins, ROWS), (count, inputs))
    out = floats(word(outs, 0), (panels, count, WIDTH))[unit]
    each = length * WIDTH * facts[0] // 8  # bytes of a group's codes
    halves = 2 * WIDTH  # bytes of a group's scales, and of its offsets
    scale = word(word(ins, SCALE), DATA) + unit * scaled * halves
    offset = word(word(ins, OFFSET), DATA) + unit * scaled * halves
    codes = word(word(ins, CODES), DATA) + unit * groups * each
    own = new(OWN)
    scales, offsets = carray(pointer(own), (WIDTH,), np.float32), carray(pointer(own + PART), (WIDTH,), np.float32)
    matrix = carray(pointer(own + 2 * PART), (GROUP, WIDTH), np.float32)
    for o in range(WIDTH):
        offsets[o] = 0
        for row in range(count):
            out[row, o] = 0
    for group in range(groups):
        if group < scaled:  # each group has a scale of its own, or all have one
            _decoded(scale + group * halves, own, scales)
        if group < scaled and facts[1] != 0:
            _decoded(offset + group * halves, own + PART, offsets)
        if count == 1:
            _one_row(rows, group * length, length, codes + group * each, facts[0], scales, offsets, matrix, out)
        else:
            _numbers(codes + group * each, length, facts[0], scales, offsets, matrix)
            _products(rows, group * length, length, matrix, out)
    free(own)


@compiled
def _decoded(lies, address, found):
    """Float16 numbers as the float32 `found` at an address; by hand, as XLA's threads take subnormal ones for zero."""
    halves = carray(pointer(lies), (WIDTH,), np.int16)
    bits = carray(pointer(address), (WIDTH,), np.int32)
    for o in range(WIDTH):
        half = np.int32(halves[o])
        bits[o] = ((half & 0x7FFF) << 13) + (112 << 23) | (half & 0x8000) << 16
    for o in range(WIDTH):
        half = np.int32(halves[o])
        small = np.float32(half & 0x3FF) * np.float32(2.0**-24)
        small = -small if half < 0 else small
        found[o] = small if half & 0x7C00 == 0 else found[o]


@compiled(fastmath=ORDER)
def _one_row(rows, begin, length, codes, width, scales, offsets, matrix, out):
    """A group's part of one row's outputs: the sums of row[i] * codes[i, o], times the scales, and what the offsets
    make of the group's inputs.
    """
    row, sums, half, total = rows[0], matrix[0], length // 2, np.float32(0)
    for i in range(length):
        total += row[begin + i]
    for o in range(WIDTH):
        sums[o] = 0
    if width == 8:
        signed = carray(pointer(codes), (length, WIDTH), np.int8)
        for i in range(0, length, 8):
            at = begin + i
            a, b, c, d = row[at], row[at + 1], row[at + 2], row[at + 3]
            e, f, g, h = row[at + 4], row[at + 5], row[at + 6], row[at + 7]
            for o in range(WIDTH):
                first = a * np.float32(signed[i, o]) + b * np.float32(signed[i + 1, o])
                second = c * np.float32(signed[i + 2, o]) + d * np.float32(signed[i + 3, o])
                third = e * np.float32(signed[i + 4, o]) + f * np.float32(signed[i + 5, o])
                fourth = g * np.float32(signed[i + 6, o]) + h * np.float32(signed[i + 7, o])
                sums[o] += (first + second) + (third + fourth)
    else:
        pairs = carray(pointer(codes), (half, WIDTH), np.uint8)
        for i in range(0, half, 4):
            at, after = begin + i, begin + half + i
            a, b, c, d = row[at], row[at + 1], row[at + 2], row[at + 3]
            e, f, g, h = row[after], row[after + 1], row[after + 2], row[after + 3]
            for o in range(WIDTH):
                p, q = np.int32(pairs[i, o]), np.int32(pairs[i + 1, o])
                r, s = np.int32(pairs[i + 2, o]), np.int32(pairs[i + 3, o])
                first = a * np.float32(p & 15) + b * np.float32(q & 15)
                second = c * np.float32(r & 15) + d * np.float32(s & 15)
                third = e * np.float32(p >> 4) + f * np.float32(q >> 4)
                fourth = g * np.float32(r >> 4) + h * np.float32(s >> 4)
                sums[o] += (first + second) + (third + fourth)
    for o in range(WIDTH):
        out[0, o] += sums[o] * scales[o] + total * offsets[o]


@compiled(fastmath=ORDER)
def _numbers(codes, length, width, scales, offsets, matrix):
    """A group's codes * scale + offset, [length, WIDTH]."""
    half = length // 2
    if width == 8:
        signed = carray(pointer(codes), (length, WIDTH), np.int8)
        for i in range(length):
            for o in range(WIDTH):
                matrix[i, o] = np.float32(signed[i, o]) * scales[o] + offsets[o]
    else:
        pairs = carray(pointer(codes), (half, WIDTH), np.uint8)
        for i in range(half):
            for o in range(WIDTH):
                matrix[i, o] = np.float32(np.int32(pairs[i, o]) & 15) * scales[o] + offsets[o]
            for o in range(WIDTH):
                matrix[half + i, o] = np.float32(np.int32(pairs[i, o]) >> 4) * scales[o] + offsets[o]


@compiled(fastmath=ORDER)
def _products(rows, begin, length, matrix, out):
    """A group's part of all rows' outputs."""
    for row in range(rows.shape[0]):
        x, y = rows[row], out[row]
        for i in range(0, length, 8):
            at = begin + i
            a, b, c, d = x[at], x[at + 1], x[at + 2], x[at + 3]
            e, f, g, h = x[at + 4], x[at + 5], x[at + 6], x[at + 7]
            for o in range(WIDTH):
                first = a * matrix[i, o] + b * matrix[i + 1, o] + c * matrix[i + 2, o] + d * matrix[i + 3, o]
                second = e * matrix[i + 4, o] + f * matrix[i + 5, o] + g * matrix[i + 6, o] + h * matrix[i + 7, o]
                y[o] += first + second
