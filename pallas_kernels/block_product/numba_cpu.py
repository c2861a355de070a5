"""block_product for CPUs, compiled by numba: codes are read once and become numbers in registers or in a core's cache,
where XLA would write the matrix out in floats first.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.block_product.reference import GROUP
from pallas_kernels.cpu_call import DATA, compiled, free, integer, new, number, registered, size, word
from pallas_kernels.cpu_lanes import LANES, fused, halves, lanes, load, plus, signed, store, unpacked

ROWS, CODES, SCALE, OFFSET, FACTS = range(5)  # the buffers of a call, in order
WIDTH = 64  # outputs of a panel: known ahead, so that loops over them have no rest
MOST_ROWS = 128  # above it XLA's products are as fast
PART, BYTES = 4 * WIDTH, 4 * LANES  # bytes of a panel's numbers, and of those at a time


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
    return registered("jaxkv_block_product", _panels, _panel)


@compiled
def _panels(ins):
    """The matrix' panels."""
    return size(word(ins, CODES), 0)


def _panel(ins, outs, unit):
    """The outputs of one panel, for all rows."""
    count, inputs = size(word(ins, ROWS), 0), size(word(ins, ROWS), 1)
    bits, offsets, scaled = integer(word(ins, FACTS), 0), integer(word(ins, FACTS), 1), size(word(ins, SCALE), 1)
    length = min(GROUP, inputs // scaled)  # inputs of a group
    groups = inputs // length
    rows, out = word(word(ins, ROWS), DATA), word(word(outs, 0), DATA) + unit * count * PART
    each, scales = length * WIDTH * bits // 8, 2 * WIDTH  # bytes of a group's codes, and of its scales or offsets
    scale = word(word(ins, SCALE), DATA) + unit * scaled * scales
    offset = word(word(ins, OFFSET), DATA) + unit * scaled * scales
    codes = word(word(ins, CODES), DATA) + unit * groups * each
    own = new((3 + GROUP) * PART)  # a group's scales, offsets and numbers, and a row
    matrix = own + 2 * PART
    for at in range(0, count * PART, BYTES):
        store(out + at, lanes(np.float32(0)))
    for at in range(0, PART, BYTES):
        store(own + PART + at, lanes(np.float32(0)))
    for group in range(groups):
        if group < scaled:  # each group has a scale of its own, or all have one
            _decoded(scale + group * scales, own)
        if group < scaled and offsets != 0:
            _decoded(offset + group * scales, own + PART)
        begin, lies = rows + 4 * group * length, codes + group * each
        if count == 1:
            _one_row(begin, length, lies, bits, own, out)
            continue
        _numbers(lies, length, bits, own, matrix)
        for row in range(0, count, 2):
            alone = row + 1 == count  # then its twin goes nowhere
            other = row if alone else row + 1
            twin = matrix + GROUP * PART if alone else out + other * PART
            _two_rows(begin + 4 * row * inputs, begin + 4 * other * inputs, length, matrix, out + row * PART, twin)
    free(own)


@compiled
def _decoded(lies, found):
    """The float16 numbers of a group's scales or offsets, as float32."""
    for o in range(0, WIDTH, LANES):
        store(found + 4 * o, halves(lies + 2 * o))


@compiled
def _one_row(row, length, codes, bits, scales, out):
    """A group's part of one row's outputs: the sums of row[i] * codes[i, o], times the scales, and what the offsets
    make of the group's inputs.
    """
    half, whole = length // 2, np.float32(0)
    for i in range(length):
        whole += number(row + 4 * i)
    for o in range(0, WIDTH, LANES):
        a, b, c, d = lanes(np.float32(0)), lanes(np.float32(0)), lanes(np.float32(0)), lanes(np.float32(0))
        if bits == 8:
            for i in range(0, length, 4):
                x, lies = row + 4 * i, codes + WIDTH * i + o
                a = fused(lanes(number(x)), signed(lies), a)
                b = fused(lanes(number(x + 4)), signed(lies + WIDTH), b)
                c = fused(lanes(number(x + 8)), signed(lies + 2 * WIDTH), c)
                d = fused(lanes(number(x + 12)), signed(lies + 3 * WIDTH), d)
        else:
            for i in range(0, half, 2):
                x, y, lies = row + 4 * i, row + 4 * (half + i), codes + WIDTH * i + o
                a = fused(lanes(number(x)), unpacked(lies, 0, 15), a)
                b = fused(lanes(number(y)), unpacked(lies, 4, 15), b)
                c = fused(lanes(number(x + 4)), unpacked(lies + WIDTH, 0, 15), c)
                d = fused(lanes(number(y + 4)), unpacked(lies + WIDTH, 4, 15), d)
        at = 4 * o
        sums = fused(plus(plus(a, b), plus(c, d)), load(scales + at), load(out + at))
        store(out + at, fused(lanes(whole), load(scales + PART + at), sums))


@compiled
def _numbers(codes, length, bits, scales, matrix):
    """A group's codes * scale + offset, [length, WIDTH]."""
    half = length // 2
    for o in range(0, WIDTH, LANES):
        scale, offset = load(scales + 4 * o), load(scales + PART + 4 * o)
        if bits == 8:
            for i in range(length):
                store(matrix + PART * i + 4 * o, fused(signed(codes + WIDTH * i + o), scale, offset))
        else:
            for i in range(half):
                lies, to = codes + WIDTH * i + o, matrix + PART * i + 4 * o
                store(to, fused(unpacked(lies, 0, 15), scale, offset))
                store(to + PART * half, fused(unpacked(lies, 4, 15), scale, offset))


@compiled
def _two_rows(row, other, length, matrix, out, twin):
    """A group's part of two rows' outputs, from its numbers."""
    for o in range(0, PART, 4 * BYTES):
        at, to = out + o, twin + o
        a, b, c, d = load(at), load(at + BYTES), load(at + 2 * BYTES), load(at + 3 * BYTES)
        e, f, g, h = load(to), load(to + BYTES), load(to + 2 * BYTES), load(to + 3 * BYTES)
        for i in range(length):
            x, y, lies = lanes(number(row + 4 * i)), lanes(number(other + 4 * i)), matrix + PART * i + o
            first, second = load(lies), load(lies + BYTES)
            third, fourth = load(lies + 2 * BYTES), load(lies + 3 * BYTES)
            a, b, c, d = fused(x, first, a), fused(x, second, b), fused(x, third, c), fused(x, fourth, d)
            e, f, g, h = fused(y, first, e), fused(y, second, f), fused(y, third, g), fused(y, fourth, h)
        store(at, a)
        store(at + BYTES, b)
        store(at + 2 * BYTES, c)
        store(at + 3 * BYTES, d)
        store(to, e)
        store(to + BYTES, f)
        store(to + 2 * BYTES, g)
        store(to + 3 * BYTES, h)
