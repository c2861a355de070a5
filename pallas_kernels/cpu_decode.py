"""A decode step on a CPU, compiled by numba: every head reads its own segment of slots, where they lie, once.

KV heads with as many slots each are segments of one length. Codes become numbers a slot at a time, in a core's cache,
where XLA would write out all of them; plain numbers are read in place, where XLA's products take no operand at an
offset that is data. The token's own key and value, for which the slot is meant, come from the arguments.

The numbers of a run of channels with one scale lie apart while they are used: first those that lie lowest in their
bytes, then the next. So do the query and the output. Where a block of slots has a scale for each channel, it goes once
into the query, or into what the block's values come to.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numba.np.numpy_support import carray

from pallas_kernels.arguments import Judge, Line, Segments, Token
from pallas_kernels.codes import ByChannel, Lying, check_widths
from pallas_kernels.cpu_call import (
    DATA,
    compiled,
    floats,
    free,
    integer,
    new,
    number,
    pointer,
    registered,
    set_integer,
    set_number,
    size,
    word,
)
from pallas_kernels.cpu_lanes import LANES, fused, half, lanes, load, store, total, unpacked
from pallas_kernels.decode_attend_score.reference import GROUP as GROUPS
from pallas_kernels.masking import MASKED
from pallas_kernels.ragged_decode.reference import LAST

REDUCE = {name: code for code, name in enumerate((*GROUPS, "each"))}
SUM, MEAN, MAX, EACH = REDUCE.values()
NO_MASS = len(REDUCE)
NO_RULE = -1
# The buffers of a call, in order; of keys and of values codes, scales and lows, and of slots their blocks
QUERY, KEY, VALUE, SLOT, POSITION, POSITIONS, OFFSETS, FIRST, ADDED, WEIGHT, BIAS, RECENTS, SOFTMAX, FACTS = range(14)
KEYS, VALUES = 14, 18
CODE, SCALE, LOW, BLOCK = range(4)
GROUP, WINDOW, SINKS, OF_KEYS, OF_VALUES = 0, 1, 2, 3, 5  # of the facts; of keys and values bits and offset
OUTPUT, LSE, MASS, AIMED = range(4)
BITS = 8, 4, 2  # of codes
PLAIN = 32  # bits of numbers as they are
LEAST = np.float32(MASKED / 2)  # what lies below it has no weight
ORDER = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; infinities and NaN stay what they are


class Step(NamedTuple):
    """What the kernel gives: with a mass for each query head, those of a KV head lie behind each other. Without a rule
    `next_slot` is the segment's first empty slot, or its first."""

    output: Float[Array, "B Hk G D"]
    lse: Float[Array, "B Hk G"]
    mass: Float[Array, "B P"]
    next_slot: Int[Array, "B Hk"]


def step(
    token: Token,
    held: Segments,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    with_mass: bool = True,
) -> Step:
    """`held`'s positions are those with the token; its keys and values may be those before it.

    Raises `NotImplementedError` for dtypes other than float32, for keys and values of unlike widths, for codes of
    floats, of 3 bits or without a scale, and where XLA cannot call what numba compiles.
    """
    query, key, value, position, *_ = token
    if query.dtype != jnp.dtype(jnp.float32):
        raise NotImplementedError(f"{query.dtype}: float32")
    batch, kv_heads, dim = key.shape
    if dim % LANES:
        raise NotImplementedError(f"{dim} channels: a multiple of {LANES}")
    line = held.line or Line(held.keys, held.values, jnp.zeros_like(position))
    check_widths(token.key, token.value)
    parts = [_parts(x, dim) for x in (line.keys, line.values)]
    queries = query.reshape(batch, kv_heads, -1, dim)
    heads, slots = queries.shape[2], held.positions.shape[1]
    group = REDUCE[judge.group] if with_mass else NO_MASS
    facts = [group, window or 0, NO_RULE if judge.rule is None else judge.rule.sinks]
    ints, wide = (functools.partial(jnp.asarray, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
    by_slot = (_each(x, held.positions.shape) for x in (held.bias, judge.weight, judge.bias))
    shapes = queries.shape, queries.shape[:3], (batch, slots * (heads if group == EACH else 1))
    out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return Step(*jax.ffi.ffi_call(_attend(), [*out, jax.ShapeDtypeStruct(slot.shape, jnp.int32)])(
        queries, wide(key), wide(value), ints(jnp.where(position[:, None] < 0, -1, slot)), ints(position),
        ints(held.positions), ints(held.offsets), ints(line.first), *by_slot, ints(judge.recents),
        np.array([scale, softcap or 0.0], np.float32),
        np.array([*facts, *(fact for of in parts for fact in of[1])], np.int32),
        *(array for of in parts for array in of[0]),
    ))  # fmt: skip


def _each(x: Any, shape: tuple[int, ...]) -> Any:
    """A float32 of each slot, or one for all: the kernel reads the bytes as such."""
    if x is None or isinstance(x, int | float):
        return np.full((1, 1), x or 0.0, np.float32)
    return jnp.broadcast_to(x, shape).astype(jnp.float32)


def _parts(x: jax.Array | Lying, dim: int) -> tuple[tuple[Any, ...], tuple[int, int]]:
    """Codes, scales, lows and blocks of keys or values as buffers, and their bits and offset."""
    none, apart = np.zeros((1, 0, 1), np.int16), np.zeros((1, 0), np.int32)  # of one run, and no slots
    if not isinstance(x, Lying):
        if x.dtype != jnp.dtype(jnp.float32):
            raise NotImplementedError(f"keys or values of {x.dtype}: float32")
        return (x, none, none, apart), (PLAIN, 0)
    if isinstance(x, ByChannel):
        if x.bits not in BITS or dim * x.bits % (8 * LANES):
            raise NotImplementedError(
                f"codes by channel of {dim} channels in {x.bits} bits: 8, 4 or 2, bytes by {LANES}"
            )
        return _in_a_row(x), (x.bits, 0)
    if x.codes.dtype != jnp.dtype(jnp.uint8) or x.bits not in BITS or x.scale is None:
        raise NotImplementedError(f"codes of {x.codes.dtype} in {x.bits} bits: integers of 8, 4 or 2 with a scale")
    if dim // x.groups * x.bits % (8 * LANES):
        raise NotImplementedError(f"a scale for {dim // x.groups} channels in {x.bits} bits: for bytes by {LANES}")
    return (x.codes, x.scale, none if x.low is None else x.low, apart), (x.bits, x.offset)


def _in_a_row(x: ByChannel) -> tuple[jax.Array, ...]:
    """Codes, scales and lows of a row, the heads behind each other, and the block of each slot among the row's."""
    heads, slots, blocks = *x.codes.shape[1:3], x.scale.shape[2]
    block = blocks * np.arange(heads)[:, None] + np.arange(slots) // x.tokens
    batch = x.codes.shape[0]
    arrays = (y.reshape(batch, -1, y.shape[-1]) for y in (x.codes, x.scale, x.low))
    return *arrays, jnp.broadcast_to(block.reshape(-1).astype(np.int32), (batch, heads * slots))


@functools.cache
def _attend() -> str:
    """The kernel's name; it is compiled when it is first called for."""
    return registered("jaxkv_decode", _heads, _head)


@compiled
def _heads(ins):
    """The KV heads of all rows."""
    return size(word(ins, QUERY), 0) * size(word(ins, QUERY), 1)


@compiled
def _at(buffer, index):
    """The address of a buffer's number of 32 bits."""
    return word(buffer, DATA) + 4 * index


@compiled
def _by_slot(buffer, row, begin, slots):
    """A row's numbers of these slots; the one number, where there is only one for all."""
    rows, columns = size(buffer, 0), size(buffer, 1)
    one = rows * columns == 1
    return floats(_at(buffer, 0 if one else row * columns + begin), (1 if one else slots,))


def _head(ins, outs, unit):
    """One head of one row: its segment, softmax, mass, output and next slot."""
    query = word(ins, QUERY)
    heads, groups, dim = size(query, 1), size(query, 2), size(query, 3)
    row, head, pool = unit // heads, unit % heads, size(word(ins, POSITIONS), 1)
    borders = row * (heads + 1) + head
    begin = max(integer(word(ins, OFFSETS), borders), 0)
    end = min(integer(word(ins, OFFSETS), borders + 1), pool)
    slots, slot = end - begin, integer(word(ins, SLOT), unit) - begin
    positions = carray(pointer(_at(word(ins, POSITIONS), row * pool + begin)), (slots,), np.int32)
    newest, window = integer(word(ins, POSITION), row), integer(word(ins, FACTS), WINDOW)
    oldest = max(newest - window + 1, 0) if window > 0 else 0
    start = integer(word(ins, FIRST), row) + begin
    masses = size(word(outs, MASS), 1) // pool  # one, or one for each query head
    mass = floats(_at(word(outs, MASS), masses * (row * pool + begin)), (masses, slots))
    before, behind = begin if head == 0 else 0, pool - end if head == heads - 1 else 0  # nobody's
    _clear(floats(_at(word(outs, MASS), masses * row * pool), (masses * before,)))
    _clear(floats(_at(word(outs, MASS), masses * (row * pool + end)), (masses * behind,)))

    own = new(4 * (groups * slots + max(slots, (2 * groups + 1) * dim + groups)))
    rest = own + 4 * groups * slots
    each = unit * groups * dim
    _logits(
        _lying(ins, KEYS, row, start, dim, integer(word(ins, FACTS), OF_KEYS)),
        integer(word(ins, FACTS), OF_KEYS + 1),
        _at(query, each), _at(word(ins, KEY), unit * dim), dim, slot,
        positions, oldest, newest, rest, own, groups,
    )  # fmt: skip
    _softmax(
        floats(own, (groups, slots)), positions, oldest, newest, _by_slot(word(ins, ADDED), row, begin, slots),
        floats(_at(word(ins, SOFTMAX), 0), (2,)), integer(word(ins, FACTS), GROUP), rest,
        floats(_at(word(outs, LSE), unit * groups), (groups,)), mass,
    )  # fmt: skip
    _values(
        _lying(ins, VALUES, row, start, dim, integer(word(ins, FACTS), OF_VALUES)),
        integer(word(ins, FACTS), OF_VALUES + 1),
        _at(word(outs, OUTPUT), each), _at(word(ins, VALUE), unit * dim), dim, slot,
        positions, oldest, newest, rest, own, groups,
    )  # fmt: skip
    free(own)
    weight, bias = _by_slot(word(ins, WEIGHT), row, begin, slots), _by_slot(word(ins, BIAS), row, begin, slots)
    recent = newest + 1 - integer(word(ins, RECENTS), row)
    aimed = _aim(positions, mass[0], weight, bias, integer(word(ins, FACTS), SINKS), recent)
    set_integer(word(outs, AIMED), unit, begin + aimed)


@compiled
def _clear(numbers):
    """Zeros."""
    for n in range(numbers.shape[0]):
        numbers[n] = 0


@compiled
def _lying(ins, which, row, start, dim, bits):
    """Of a row's keys or values from slot `start` on: their bits, runs with a scale of their own, and where codes,
    scales, lows and blocks begin; 0 for no lows, and for no blocks. Scales of blocks are the row's."""
    slots, lows, blocks = size(word(ins, which + CODE), 1), word(ins, which + LOW), word(ins, which + BLOCK)
    runs, shared = size(word(ins, which + SCALE), 2), size(blocks, 1) > 0
    first = row * slots + start
    at = 2 * (row * size(word(ins, which + SCALE), 1) * dim if shared else first * runs)
    return (
        bits, 1 if shared else runs,
        word(word(ins, which + CODE), DATA) + first * (dim * bits // 8),
        word(word(ins, which + SCALE), DATA) + at,
        word(lows, DATA) + at if size(lows, 1) > 0 else 0,
        word(blocks, DATA) + 4 * first if shared else 0,
    )  # fmt: skip


@compiled
def _block(lies, slot):
    """The block that a slot is in, where there are blocks."""
    return carray(pointer(lies[5] + 4 * slot), (1,), np.int32)[0]


@compiled
def _of_block(at, block, dim, many, own):
    """A block's scales or lows, apart, as numbers."""
    for j in range(many):
        for n in range(dim // many):
            set_number(own + 4 * (j * (dim // many) + n), half(at + 2 * (block * dim + n * many + j)))


@compiled
def _numbers(lies, offset, slot, dim, own):
    """The address of a slot's numbers, apart, which are written to `own`: of blocks without their scales; of plain
    ones, where they lie."""
    bits, runs, codes, scales, lows, blocks = lies
    if bits == PLAIN:
        return codes + 4 * dim * slot
    each = dim * bits // 8  # bytes of a slot
    part = each // runs
    for r in range(runs):
        at = 2 * (slot * runs + r)
        by, low = np.float32(1), np.float32(0)
        if not blocks:
            by, low = half(scales + at), half(lows + at) if lows else np.float32(0)
        step, least = lanes(by), lanes(low - by * np.float32(offset))
        for j in range(8 // bits):
            for n in range(r * part, (r + 1) * part, LANES):
                some = unpacked(codes + each * slot + n, bits * j, (1 << bits) - 1)
                store(own + 4 * (each * j + n), fused(some, step, least))
    return own


@compiled
def _dot(x, y, dim):
    """The product of the numbers at two addresses."""
    sums = lanes(np.float32(0))
    for d in range(0, 4 * dim, 4 * LANES):
        sums = fused(load(x + d), load(y + d), sums)
    return total(sums)


@compiled
def _add(sums, x, weight, dim):
    """Numbers at an address, by a weight, to those at another."""
    weights = lanes(weight)
    for d in range(0, 4 * dim, 4 * LANES):
        store(sums + d, fused(load(x + d), weights, load(sums + d)))


@compiled
def _turned(matrix, rows, columns, out):
    """A matrix of so many columns by rows, [columns, rows], as one of rows by columns."""
    for r in range(rows):
        for c in range(columns):
            set_number(out + 4 * (r * columns + c), number(matrix + 4 * (c * rows + r)))


@compiled
def _add_products(sums, x, y, dim):
    """The products of the numbers at two addresses, to those at another."""
    for d in range(0, 4 * dim, 4 * LANES):
        store(sums + d, fused(load(x + d), load(y + d), load(sums + d)))


@compiled
def _open(lies, block, dim, many, own, groups):
    """The queries by a block's scales, and behind them their products with its lows."""
    each = 4 * dim
    x, scaled = own + groups * each, own + (groups + 1) * each
    _clear(floats(scaled, (groups * dim,)))
    _of_block(lies[4], block, dim, many, x)
    for g in range(groups):
        set_number(scaled + groups * each + 4 * g, _dot(own + g * each, x, dim))
    _of_block(lies[3], block, dim, many, x)
    for g in range(groups):
        _add_products(scaled + g * each, own + g * each, x, dim)


@compiled
def _logits(lies, offset, query, key, dim, slot, positions, oldest, newest, own, weights, groups):
    """query . key of all slots that are seen, [groups, slots]."""
    slots, each, many, opened = positions.shape[0], 4 * dim, max(8 // lies[0], 1), -1
    shared = lies[5] != 0
    asked, level = own + ((groups + 1) * each if shared else 0), own + (2 * groups + 1) * each
    for g in range(groups):
        _turned(query + g * each, many, dim // many, own + g * each)
    for p in range(slots):
        if p == slot:
            for g in range(groups):
                set_number(weights + 4 * (g * slots + p), _dot(query + g * each, key, dim))
        elif oldest <= positions[p] and positions[p] <= newest:
            if shared and _block(lies, p) != opened:
                opened = _block(lies, p)
                _open(lies, opened, dim, many, own, groups)
            x = _numbers(lies, offset, p, dim, own + groups * each)
            for g in range(groups):
                logit = _dot(asked + g * each, x, dim)
                set_number(weights + 4 * (g * slots + p), logit + number(level + 4 * g) if shared else logit)


@compiled(fastmath=ORDER)
def _exponentials(row, top, own):
    """exp(x - top) of a row, none above 0, without a call for each: 2^n by its bits, and the rest by a polynomial."""
    slots = row.shape[0]
    bits, powers = carray(pointer(own), (slots,), np.int32), floats(own, (slots,))
    for p in range(slots):
        x = max(row[p] - top, np.float32(-87))
        n = np.floor(x * np.float32(1.442695041) + np.float32(0.5))
        bits[p] = (np.int32(n) + 127) << 23
        r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
        y = np.float32(1.9875691500e-4)
        y = y * r + np.float32(1.3981999507e-3)
        y = y * r + np.float32(8.3334519073e-3)
        y = y * r + np.float32(4.1665795894e-2)
        y = y * r + np.float32(1.6666665459e-1)
        y = y * r + np.float32(5.0000001201e-1)
        row[p] = (y * r * r + r + 1) if row[p] > top - 87 else np.float32(0)
    for p in range(slots):
        row[p] *= powers[p]


@compiled(fastmath=ORDER)
def _softmax(weights, positions, oldest, newest, added, settings, reduce, own, lse, mass):
    """Logits to weights, their log-sum-exp, and the mass of every slot."""
    groups, slots = weights.shape
    by_slot, nothing = min(added.shape[0] - 1, 1), -np.float32(np.inf)  # 0 where there is one number for all
    for g in range(mass.shape[0]):
        _clear(mass[g])
    for g in range(groups):
        row, top, total = weights[g], LEAST, np.float32(0)
        for p in range(slots):
            if positions[p] < oldest or positions[p] > newest:
                row[p] = nothing
                continue
            logit = row[p] * settings[0]
            if settings[1] > 0:
                logit = settings[1] * math.tanh(logit / settings[1])
            row[p] = logit + added[p * by_slot]
            top = max(top, row[p])
        _exponentials(row, top, own)
        for p in range(slots):
            total += row[p]
        lse[g] = top + math.log(total) if total > 0 else nothing
        share = 1 / total if total > 0 else np.float32(0)
        for p in range(slots):
            row[p] *= share
        if reduce == EACH:
            for p in range(slots):
                mass[g, p] = row[p]
        elif reduce == MAX:
            for p in range(slots):
                mass[0, p] = max(mass[0, p], row[p])
        elif reduce != NO_MASS:
            for p in range(slots):
                mass[0, p] += row[p] * (1 / np.float32(groups) if reduce == MEAN else np.float32(1))


@compiled
def _close(lies, block, dim, many, own, groups):
    """A block's sums by its scales, and its lows by the sums of its weights, to the sums of all; then none are left."""
    each = 4 * dim
    x, sums = own + groups * each, own + (groups + 1) * each
    _of_block(lies[3], block, dim, many, x)
    for g in range(groups):
        _add_products(own + g * each, x, sums + g * each, dim)
    _of_block(lies[4], block, dim, many, x)
    for g in range(groups):
        _add(own + g * each, x, number(sums + groups * each + 4 * g), dim)
    _clear(floats(sums, (groups * (dim + 1),)))


@compiled
def _values(lies, offset, output, value, dim, slot, positions, oldest, newest, own, weights, groups):
    """The values by their weights, [groups, slots]; of a block for itself, and so its weights."""
    slots, each, many, opened = positions.shape[0], 4 * dim, max(8 // lies[0], 1), -1
    shared = lies[5] != 0
    sums, total = own + ((groups + 1) * each if shared else 0), own + (2 * groups + 1) * each
    _clear(floats(own, ((2 * groups + 1) * dim + groups if shared else groups * dim,)))
    for p in range(slots):
        if p != slot and oldest <= positions[p] and positions[p] <= newest:
            if shared and _block(lies, p) != opened:
                if opened >= 0:
                    _close(lies, opened, dim, many, own, groups)
                opened = _block(lies, p)
            x = _numbers(lies, offset, p, dim, own + groups * each)
            for g in range(groups):
                weight = number(weights + 4 * (g * slots + p))
                _add(sums + g * each, x, weight, dim)
                if shared:
                    set_number(total + 4 * g, number(total + 4 * g) + weight)
    if opened >= 0:
        _close(lies, opened, dim, many, own, groups)
    for g in range(groups):
        _turned(own + g * each, dim // many, many, output + g * each)
        if slot >= 0 and slot < slots:
            _add(output + g * each, value, number(weights + 4 * (g * slots + slot)), dim)


@compiled
def _aim(positions, mass, weight, bias, sinks, recent):
    """A segment's first empty slot, else the oldest of the lowest weight * mass + bias, protected entries last; without
    a rule the first empty slot, else the first."""
    found, lowest, oldest = 0, np.float32(np.inf), LAST
    by_slot = min(weight.shape[0] - 1, 1), min(bias.shape[0] - 1, 1)  # 0 where there is one number for all
    for p in range(positions.shape[0]):
        if positions[p] < 0:
            return p
        if sinks == NO_RULE:
            continue
        worth = weight[p * by_slot[0]] * mass[p] + bias[p * by_slot[1]]
        if positions[p] < sinks or positions[p] >= recent:
            worth = np.float32(np.inf)
        if worth < lowest or (worth == lowest and positions[p] < oldest):
            found, lowest, oldest = p, worth, positions[p]
    return found
