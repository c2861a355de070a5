"""decode_attend_score for CPUs, compiled by numba: codes become numbers a slot at a time, in a core's cache, where XLA
would write out all of them.

The numbers of a run of channels with one scale lie apart while they are used: first those that lie lowest in their
bytes, then the next. So do the query and the output. Scale and lowest value of a key go to its logit, those of a value
to its weight.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numba.np.numpy_support import carray

from pallas_kernels.arguments import Held, Judge, Token
from pallas_kernels.codes import UNITS, Codes
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
from pallas_kernels.decode_attend_score.reference import GROUP as GROUPS
from pallas_kernels.decode_attend_score.reference import Attended, written
from pallas_kernels.decode_attend_score.victim import aim
from pallas_kernels.masking import MASKED

REDUCE = {name: code for code, name in enumerate((*GROUPS, "each"))}
SUM, MEAN, MAX, EACH = REDUCE.values()
NO_MASS = len(REDUCE)
# The buffers of a call, in order; of keys and of values codes, scales and lows
QUERY, KEY, VALUE, SLOT, POSITION, POSITIONS, BIAS, SOFTMAX, FACTS = range(9)
KEYS, VALUES = 9, 12
CODE, SCALE, LOW = range(3)
GROUP, WINDOW, OF_KEYS, OF_VALUES = 0, 1, 2, 4  # of the facts; of keys and values bits and offset
OUTPUT, LSE, MASS = range(3)
PLAIN = 32  # bits of numbers as they are
LEAST = np.float32(MASKED / 2)  # what lies below it has no weight
ORDER = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; infinities and NaN stay what they are


def decode_attend_score(
    token: Token,
    held: Held,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rotate: Callable | None = None,
    with_mass: bool = True,
) -> Attended:
    """`reference.decode_attend_score` on codes, read once.

    Raises `NotImplementedError` where neither keys nor values are codes of integers, for dtypes other than float32, for
    keys that are turned as they are read, and where XLA cannot call what numba compiles.
    """
    query, key, value, position, *_ = token
    if not token.coded or rotate is not None:
        raise NotImplementedError("keys and values as they are" if rotate is None else "keys turned as they are read")
    if query.dtype != jnp.dtype(jnp.float32):
        raise NotImplementedError(f"{query.dtype}: float32")
    batch, kv_heads, dim = key.shape
    lies = written(token, held, slot)
    parts = [_parts(x, dim) for x in (lies.keys, lies.values)]
    queries = query.reshape(batch, kv_heads, -1, dim)
    heads = queries.shape[2]
    slots = lies.positions.shape[-1]
    group = REDUCE[judge.group] if with_mass else NO_MASS
    by_slot = (batch, kv_heads, heads if group == EACH else 1, slots)
    out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (queries.shape, queries.shape[:3], by_slot)]
    facts = [group, window or 0, *(fact for of in parts for fact in of[1])]
    output, lse, mass = jax.ffi.ffi_call(_attend(), out)(
        queries, key, value, jnp.where(position[:, None] < 0, -1, slot), position, lies.positions,
        np.zeros((1, 1, 1), np.float32) if lies.bias is None else lies.bias,
        np.array([scale, softcap or 0.0], np.float32), np.array(facts, np.int32),
        *(array for of in parts for array in of[0]),
    )  # fmt: skip
    mass = None if not with_mass else mass if group == EACH else mass[:, :, 0]
    return Attended(
        output=output.reshape(query.shape),
        lse=lse.reshape(query.shape[:2]),
        mass=mass,
        keys=lies.keys,
        values=lies.values,
        positions=lies.positions,
        next_slot=aim(mass, lies.positions, position, slot, judge, window=window),
    )


def _parts(x: jax.Array | Codes, dim: int) -> tuple[tuple, tuple[int, int]]:
    """Codes, scales and lows of keys or values as buffers, and their bits and offset."""
    none = np.zeros((1, 1, 0, 1), np.int16)  # of one run, and no slots
    if not isinstance(x, Codes):
        if x.dtype != jnp.dtype(jnp.float32):
            raise NotImplementedError(f"{x.dtype} beside codes: float32")
        return (x, none, none), (PLAIN, 0)
    if x.codes.dtype != jnp.dtype(jnp.uint8) or UNITS[x.bits][1] > 1 or x.scale is None:
        raise NotImplementedError(f"codes of {x.codes.dtype} in {x.bits} bits: integers of 8, 4, 2 or 1 with a scale")
    if dim // x.groups % (8 // x.bits):
        raise NotImplementedError(f"a scale for {dim // x.groups} channels in {x.bits} bits: for whole bytes")
    return (x.codes, x.scale, none if x.low is None else x.low), (x.bits, x.offset)


@functools.cache
def _attend() -> str:
    """The kernel's name; it is compiled when it is first called for."""
    supported()
    return registered("jaxkv_decode_attend_score", _heads, _head)


@compiled
def _heads(ins):
    """The KV heads of all rows."""
    return size(word(ins, KEY), 0) * size(word(ins, KEY), 1)


@compiled
def _head(ins, outs, unit):
    """One KV head of one row."""
    query = word(ins, QUERY)
    batch, heads, groups, dim = size(query, 0), size(query, 1), size(query, 2), size(query, 3)
    slots, b, h = size(word(ins, POSITIONS), 2), unit // heads, unit % heads
    queries = floats(query, (batch, heads, groups, dim))[b, h]
    positions = integers(word(ins, POSITIONS), (batch, heads, slots))[b, h]
    position = integers(word(ins, POSITION), (batch,))[b]
    slot = integers(word(ins, SLOT), (batch, heads))[b, h]
    settings, facts = floats(word(ins, SOFTMAX), (2,)), integers(word(ins, FACTS), (6,))
    biases = size(word(ins, BIAS), 2)
    bias = floats(word(ins, BIAS), (size(word(ins, BIAS), 0) * size(word(ins, BIAS), 1), biases))
    bias = bias[unit if biases > 1 or bias.shape[0] > 1 else 0]
    token = (batch, heads, dim)
    oldest = max(position - facts[WINDOW] + 1, 0) if facts[WINDOW] > 0 else 0
    own = new(4 * (groups * slots + max(slots, (groups + 1) * (dim + 1))))
    weights, rest = carray(pointer(own), (groups, slots), np.float32), own + 4 * groups * slots
    _logits(
        ins, unit, queries, floats(word(ins, KEY), token)[b, h], positions, oldest, position, slot, facts[OF_KEYS],
        facts[OF_KEYS + 1], rest, weights,
    )  # fmt: skip
    masses = size(word(outs, MASS), 2)
    mass = floats(word(outs, MASS), (batch, heads, masses, slots))[b, h]
    lse = floats(word(outs, LSE), (batch, heads, groups))[b, h]
    _softmax(weights, positions, oldest, position, bias, settings, facts[GROUP], rest, lse, mass)
    _values(
        ins, unit, weights, floats(word(ins, VALUE), token)[b, h], positions, oldest, position, slot, facts[OF_VALUES],
        facts[OF_VALUES + 1], rest, floats(word(outs, OUTPUT), (batch, heads, groups, dim))[b, h],
    )  # fmt: skip
    free(own)


@compiled
def _float(half):
    """A float16 number by its bits; by hand, as XLA's threads take subnormal ones for zero."""
    sign, power = np.float32(-1 if half < 0 else 1), (half >> 10) & 31
    if power == 0:
        return sign * np.float32(half & 1023) * np.float32(2.0**-24)
    if power == 31:
        return np.float32(np.nan) if half & 1023 else sign * np.float32(np.inf)
    return sign * np.float32(1024 + (half & 1023)) * np.float32(2.0 ** (power - 25))


@compiled
def _lying(ins, which, unit, slots, dim, bits):
    """Of a head's keys or values: runs with a scale of their own, channels of a run, bytes of a slot, and where codes,
    scales and lows begin; 0 for no lows."""
    lows, each = word(ins, which + LOW), dim * bits // 8
    runs = size(word(ins, which + SCALE), 3)
    entries = unit * slots
    return (
        runs, dim // runs, each,
        word(word(ins, which + CODE), DATA) + entries * each,
        word(word(ins, which + SCALE), DATA) + 2 * entries * runs,
        word(lows, DATA) + 2 * entries * runs if size(lows, 2) > 0 else 0,
    )  # fmt: skip


@compiled(fastmath=ORDER)
def _numbers(codes, bits, address, out):
    """The integers of one slot's run, or its numbers, apart, as the float32 `out` at an address."""
    run = out.shape[0]
    if bits == PLAIN:
        numbers = carray(pointer(codes), (run,), np.float32)
        for d in range(run):
            out[d] = numbers[d]
    elif bits == 8:
        lies = carray(pointer(codes), (run,), np.uint8)
        for d in range(run):
            out[d] = np.float32(np.int32(lies[d]))
    else:
        each, mask = run * bits // 8, np.int32((1 << bits) - 1)
        lies = carray(pointer(codes), (each,), np.uint8)
        for j in range(8 // bits):
            part, by = carray(pointer(address + 4 * j * each), (each,), np.float32), np.int32(bits * j)
            for n in range(each):
                part[n] = np.float32((np.int32(lies[n]) >> by) & mask)


@compiled
def _affine(scales, lows, at, bits, offset):
    """Scale and lowest value of one slot's run."""
    if bits == PLAIN:
        return np.float32(1), np.float32(0)
    by = _float(carray(pointer(scales + 2 * at), (1,), np.int16)[0])
    low = _float(carray(pointer(lows + 2 * at), (1,), np.int16)[0]) if lows else np.float32(0)
    return by, low - by * np.float32(offset)


@compiled(fastmath=ORDER)
def _logits(ins, unit, query, key, positions, oldest, newest, slot, bits, offset, own, weights):
    """query . key of all slots that are seen."""
    groups, dim = query.shape
    slots, many = positions.shape[0], max(8 // bits, 1)
    runs, run, each, codes, scales, lows = _lying(ins, KEYS, unit, slots, dim, bits)
    x, apart = carray(pointer(own), (run,), np.float32), carray(pointer(own + 4 * run), (groups, run), np.float32)
    sums = carray(pointer(own + 4 * (groups + 1) * run), (groups,), np.float32)
    for r in range(runs):
        for g in range(groups):
            sums[g] = 0
            for j in range(many):
                for n in range(run // many):
                    part = query[g, r * run + n * many + j]
                    apart[g, j * (run // many) + n] = part
                    sums[g] += part
        for p in range(slots):
            if positions[p] < oldest or positions[p] > newest:
                continue
            _numbers(codes + p * each + r * each // runs, bits, own, x)
            by, at = _affine(scales, lows, p * runs + r, bits, offset)
            for g in range(groups):
                row, dot = apart[g], np.float32(0)
                for d in range(run):
                    dot += row[d] * x[d]
                weights[g, p] = by * dot + at * sums[g] + (weights[g, p] if r > 0 else np.float32(0))
    if 0 <= slot < slots:
        for g in range(groups):
            row, dot = query[g], np.float32(0)
            for d in range(dim):
                dot += row[d] * key[d]
            weights[g, slot] = dot


@compiled(fastmath=ORDER)
def _exponentials(row, top, own):
    """exp(x - top) of a row, none above 0, without a call for each: 2^n by its bits, and the rest by a polynomial."""
    slots = row.shape[0]
    bits, powers = carray(pointer(own), (slots,), np.int32), carray(pointer(own), (slots,), np.float32)
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
def _softmax(weights, positions, oldest, newest, bias, settings, reduce, own, lse, mass):
    """Logits to weights, their log-sum-exp, and the mass of every slot."""
    groups, slots = weights.shape
    by_slot, nothing = min(bias.shape[0] - 1, 1), -np.float32(np.inf)  # 0 where there is one number for all
    for g in range(mass.shape[0]):
        for p in range(slots):
            mass[g, p] = 0
    for g in range(groups):
        row, top, total = weights[g], LEAST, np.float32(0)
        for p in range(slots):
            if positions[p] < oldest or positions[p] > newest:
                row[p] = nothing
                continue
            logit = row[p] * settings[0]
            if settings[1] > 0:
                logit = settings[1] * math.tanh(logit / settings[1])
            row[p] = logit + bias[p * by_slot]
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


@compiled(fastmath=ORDER)
def _values(ins, unit, weights, value, positions, oldest, newest, slot, bits, offset, own, output):
    """The values by their weights."""
    groups, dim = output.shape
    slots, many = positions.shape[0], max(8 // bits, 1)
    runs, run, each, codes, scales, lows = _lying(ins, VALUES, unit, slots, dim, bits)
    x, apart = carray(pointer(own), (run,), np.float32), carray(pointer(own + 4 * run), (groups, run), np.float32)
    base = carray(pointer(own + 4 * (groups + 1) * run), (groups,), np.float32)
    for r in range(runs):
        for g in range(groups):
            base[g] = 0
            for d in range(run):
                apart[g, d] = 0
        for p in range(slots):
            if positions[p] < oldest or positions[p] > newest or p == slot:
                continue
            _numbers(codes + p * each + r * each // runs, bits, own, x)
            by, at = _affine(scales, lows, p * runs + r, bits, offset)
            for g in range(groups):
                row, share = apart[g], weights[g, p] * by
                base[g] += weights[g, p] * at
                for d in range(run):
                    row[d] += share * x[d]
        for g in range(groups):
            for n in range(run // many):
                for j in range(many):
                    output[g, r * run + n * many + j] = apart[g, j * (run // many) + n] + base[g]
    if 0 <= slot < slots:
        for g in range(groups):
            for d in range(dim):
                output[g, d] += weights[g, slot] * value[d]
