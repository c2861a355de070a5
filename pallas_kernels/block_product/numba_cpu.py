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


@compiled
def _panel(ins, outs, unit):
    """The outputs of one panel, for all rows."""
    count, inputs, panels = size(word(ins, ROWS), 0), size(word(ins, ROWS), 1), size(word(ins, CODES), 0)
    facts, scaled = integers(word(ins, FACTS), (2,)), size(word(ins, SCALE), 1)  # scales of an output
    length = min(GROUP, inputs // scaled)  # inputs of a group
    groups = inputs // length
    rows = floats(word(ins, ROWS), (count, inputs))
    out = floats(word(outs, 0), (panels, count, WIDTH))[unit]
    scale = carray(pointer(word(word(ins, SCALE), DATA)), (panels, scaled * WIDTH), np.int16)[unit]
    offset = carray(pointer(word(word(ins, OFFSET), DATA)), (panels, scaled * WIDTH), np.int16)[unit]
    each = length * WIDTH * facts[0] // 8  # bytes of a group's codes
    codes = carray(pointer(word(word(ins, CODES), DATA)), (panels, groups * each), np.uint8)[unit]
    own = new(OWN)
    scales, offsets = carray(pointer(own), (WIDTH,), np.float32), carray(pointer(own + PART), (WIDTH,), np.float32)
    matrix = carray(pointer(own + 2 * PART), (GROUP, WIDTH), np.float32)
    for o in range(WIDTH):
        offsets[o] = 0
        for row in range(count):
            out[row, o] = 0
    for group in range(groups):
        if group < scaled:  # each group has a scale of its own, or all have one
            _decoded(scale[group * WIDTH : (group + 1) * WIDTH], own, scales)
        if group < scaled and facts[1] != 0:
            _decoded(offset[group * WIDTH : (group + 1) * WIDTH], own + PART, offsets)
        own_codes, own_rows = codes[group * each : (group + 1) * each], rows[:, group * length : (group + 1) * length]
        if count == 1:
            _one_row(own_rows[0], own_codes, facts[0], scales, offsets, matrix[0], out[0])
        else:
            _numbers(own_codes, facts[0], scales, offsets, matrix[:length])
            _products(own_rows, matrix[:length], out)
    free(own)


@compiled
def _decoded(halves, address, found):
    """Float16 numbers as the float32 `found` at an address; by hand, as XLA's threads take subnormal ones for zero."""
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
def _one_row(row, codes, width, scales, offsets, sums, out):
    """A group's part of one row's outputs: the sums of row[i] * codes[i, o], times the scales, and what the offsets
    make of the group's inputs.
    """
    length = row.shape[0]
    half, total = length // 2, np.float32(0)
    for i in range(length):
        total += row[i]
    for o in range(WIDTH):
        sums[o] = 0
    if width == 8:
        signed = codes.view(np.int8).reshape((length, WIDTH))
        for i in range(0, length, 8):
            a, b, c, d = row[i], row[i + 1], row[i + 2], row[i + 3]
            e, f, g, h = row[i + 4], row[i + 5], row[i + 6], row[i + 7]
            for o in range(WIDTH):
                first = a * np.float32(signed[i, o]) + b * np.float32(signed[i + 1, o])
                second = c * np.float32(signed[i + 2, o]) + d * np.float32(signed[i + 3, o])
                third = e * np.float32(signed[i + 4, o]) + f * np.float32(signed[i + 5, o])
                fourth = g * np.float32(signed[i + 6, o]) + h * np.float32(signed[i + 7, o])
                sums[o] += (first + second) + (third + fourth)
    else:
        pairs = codes.reshape((half, WIDTH))
        for i in range(0, half, 4):
            a, b, c, d = row[i], row[i + 1], row[i + 2], row[i + 3]
            e, f, g, h = row[half + i], row[half + i + 1], row[half + i + 2], row[half + i + 3]
            for o in range(WIDTH):
                p, q = np.int32(pairs[i, o]), np.int32(pairs[i + 1, o])
                r, s = np.int32(pairs[i + 2, o]), np.int32(pairs[i + 3, o])
                first = a * np.float32(p & 15) + b * np.float32(q & 15)
                second = c * np.float32(r & 15) + d * np.float32(s & 15)
                third = e * np.float32(p >> 4) + f * np.float32(q >> 4)
                fourth = g * np.float32(r >> 4) + h * np.float32(s >> 4)
                sums[o] += (first + second) + (third + fourth)
    for o in range(WIDTH):
        out[o] += sums[o] * scales[o] + total * offsets[o]


@compiled(fastmath=ORDER)
def _numbers(codes, width, scales, offsets, matrix):
    """A group's codes * scale + offset, [GROUP, WIDTH]."""
    half = matrix.shape[0] // 2
    if width == 8:
        for i in range(matrix.shape[0]):
            for o in range(WIDTH):
                matrix[i, o] = np.float32(np.int8(codes[i * WIDTH + o])) * scales[o] + offsets[o]
    else:
        for i in range(half):
            for o in range(WIDTH):
                matrix[i, o] = np.float32(np.int32(codes[i * WIDTH + o]) & 15) * scales[o] + offsets[o]
            for o in range(WIDTH):
                matrix[half + i, o] = np.float32(np.int32(codes[i * WIDTH + o]) >> 4) * scales[o] + offsets[o]


@compiled(fastmath=ORDER)
def _products(rows, matrix, out):
    """A group's part of all rows' outputs."""
    for row in range(rows.shape[0]):
        x, y = rows[row], out[row]
        for i in range(0, matrix.shape[0], 8):
            a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
            e, f, g, h = x[i + 4], x[i + 5], x[i + 6], x[i + 7]
            for o in range(WIDTH):
                first = a * matrix[i, o] + b * matrix[i + 1, o] + c * matrix[i + 2, o] + d * matrix[i + 3, o]
                second = e * matrix[i + 4, o] + f * matrix[i + 5, o] + g * matrix[i + 6, o] + h * matrix[i + 7, o]
                y[o] += first + second
