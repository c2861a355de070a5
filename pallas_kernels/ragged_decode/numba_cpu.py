"""ragged_decode for CPUs, compiled by numba: every head reads its own segment, where it lies.

XLA's dot products on CPU take no operand at an offset that is data: a head multiplies with all slots of its layer and
keeps its own, and a layer that shares a line with others is copied out of it first. Here neither happens. K and V are
read once; the token's own key and value, for which the slot is meant, come from the arguments, so that a line need not
be written before it is read.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.arguments import Judge, Line, Segments, Token
from pallas_kernels.cpu_call import compiled, floats, integers, registered, size, supported, word
from pallas_kernels.decode_attend_score.reference import GROUP, Attended
from pallas_kernels.ragged_decode.reference import LAST, exact, written

REDUCE = {name: code for code, name in enumerate(GROUP)}
SUM, MAX = REDUCE["sum"], REDUCE["max"]
NO_MASS = len(GROUP)
NO_RULE = -1
# The buffers of a call, in order
QUERY, KEY, VALUE, SLOT, KEYS, VALUES, FIRST, POSITIONS, OFFSETS, POSITION, SOFTMAX, GROUPS, RECENTS = range(13)
WEIGHT, BIAS, ADDED, SINKS = range(13, 17)
OUTPUT, LSE, MASS, AIMED = range(4)
ORDER = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; infinities and NaN stay what they are


def ragged_decode(
    token: Token,
    held: Segments,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    scale: float,
    softcap: float | None = None,
    with_mass: bool = True,
) -> Attended:
    """`reference.ragged_decode`, K and V read once and only where they are filled; of a layer that shares a line, where
    they lie in it. Codes are decoded before.

    Raises `NotImplementedError` for dtypes other than float32, and where XLA cannot call what numba
    compiles.
    """
    query, key, value, position, *_ = token
    if {query.dtype, held.keys.dtype} != {jnp.dtype(jnp.float32)}:
        raise NotImplementedError(f"{query.dtype} and {held.keys.dtype}: float32")
    batch, kv_heads, dim = key.shape
    target = jnp.where(position[:, None] < 0, -1, slot)
    lies = written(held, *token.entry, position, slot)
    keys, values, positions, offsets, line, added = exact(token, held, slot) if token.coded else lies
    line = line or Line(keys, values, jnp.zeros_like(position))
    queries = query.reshape(batch, kv_heads, -1, dim)
    floating = queries.shape, queries.shape[:3], positions.shape
    by_slot = judge.weight, judge.bias, added
    out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in floating]
    output, lse, mass, aimed = jax.ffi.ffi_call(_attend(), [*out, jax.ShapeDtypeStruct(slot.shape, jnp.int32)])(
        queries, key, value, target, *line, positions, offsets, position,
        np.array([scale, softcap or 0.0], np.float32),
        np.array([REDUCE[judge.group] if with_mass else NO_MASS], np.int32), judge.recents,
        *(x if isinstance(x, jax.Array) else np.full((1, 1), x or 0.0, np.float32) for x in by_slot),
        np.array([NO_RULE if judge.rule is None else judge.rule.sinks], np.int32),
    )  # fmt: skip
    return Attended(
        output=output.reshape(query.shape),
        lse=lse.reshape(query.shape[:2]),
        mass=mass if with_mass else None,
        keys=lies.keys,
        values=lies.values,
        positions=positions,
        next_slot=jnp.where(position[:, None] < 0, slot, aimed),
    )


@functools.cache
def _attend() -> str:
    """The kernel's name; it is compiled when it is first called for."""
    supported()
    return registered("jaxkv_ragged_decode", _heads, _attend_head)


@compiled
def _heads(ins):
    """The heads of all rows."""
    return size(word(ins, QUERY), 0) * size(word(ins, QUERY), 1)


@compiled
def _attend_head(ins, outs, unit):
    """One head of one row: the parts of all buffers that are its own."""
    query, line, whole = word(ins, QUERY), word(ins, KEYS), word(ins, POSITIONS)
    batch, heads, groups, dim = size(query, 0), size(query, 1), size(query, 2), size(query, 3)
    total, slots = size(line, 1), size(whole, 1)
    b, h = unit // heads, unit % heads
    token = (batch, heads, dim)
    offsets = integers(word(ins, OFFSETS), (batch, heads + 1))[b]
    begin, end = max(offsets[h], 0), min(offsets[h + 1], slots)
    first = integers(word(ins, FIRST), (batch,))[b] + begin
    last = first + end - begin
    positions = integers(whole, (batch, slots))[b, begin:end]
    position = integers(word(ins, POSITION), (batch,))[b]
    settings = floats(word(ins, SOFTMAX), (2,))
    mass = floats(word(outs, MASS), (batch, slots))[b]
    mass[0 if h == 0 else begin : slots if h == heads - 1 else end] = 0  # nobody's too
    _attend_segment(
        floats(query, (batch, heads, groups, dim))[b, h],
        floats(word(ins, KEY), token)[b, h], floats(word(ins, VALUE), token)[b, h],
        integers(word(ins, SLOT), (batch, heads))[b, h] - begin,
        floats(line, (batch, total, dim))[b, first:last], floats(word(ins, VALUES), (batch, total, dim))[b, first:last],
        positions, _row(word(ins, ADDED), b, begin, end), position,
        settings[0], settings[1], integers(word(ins, GROUPS), (1,))[0],
        floats(word(outs, OUTPUT), (batch, heads, groups, dim))[b, h],
        floats(word(outs, LSE), (batch, heads, groups))[b, h], mass[begin:end],
    )  # fmt: skip
    weight, bias, sinks = word(ins, WEIGHT), word(ins, BIAS), integers(word(ins, SINKS), (1,))[0]
    aimed = integers(word(outs, AIMED), (batch, heads))
    recent = position + 1 - integers(word(ins, RECENTS), (batch,))[b]
    aimed[b, h] = begin + _aim(
        positions, mass[begin:end], _row(weight, b, begin, end), _row(bias, b, begin, end), sinks, recent,
    )  # fmt: skip


@compiled
def _row(buffer, row, begin, end):
    """A row's numbers from `begin` to `end`; the one number, where there is only one for all."""
    rows, columns = size(buffer, 0), size(buffer, 1)
    numbers = floats(buffer, (rows, columns))
    return numbers[0] if rows * columns == 1 else numbers[row, begin:end]


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


@compiled(fastmath=ORDER)
def _attend_segment(
    query, key, value, slot, keys, values, positions, added, position, scale, softcap, reduce, output, lse, mass
):
    """One KV head's softmax over its segment, for its G queries. The token's key and value are those of its slot."""
    groups, dim = query.shape
    slots, nothing = positions.shape[0], -np.float32(np.inf)
    by_slot = min(added.shape[0] - 1, 1)  # 0 where there is one number for all
    weights = np.empty((groups, slots), np.float32)
    for p in range(slots):
        if positions[p] < 0 or positions[p] > position:
            continue  # not read; masked below
        own = keys[p] if p != slot else key
        for g in range(groups):
            dot = np.float32(0)
            for d in range(dim):
                dot += query[g, d] * own[d]
            weights[g, p] = dot * scale
    for g in range(groups):
        top = nothing
        for p in range(slots):
            if positions[p] < 0 or positions[p] > position:
                weights[g, p] = nothing
            else:
                if softcap > 0:
                    weights[g, p] = softcap * math.tanh(weights[g, p] / softcap)
                weights[g, p] += added[p * by_slot]
            top = max(top, weights[g, p])
        total = np.float32(0)
        for p in range(slots):
            weights[g, p] = math.exp(weights[g, p] - top) if weights[g, p] > nothing else np.float32(0)
            total += weights[g, p]
        lse[g] = top + math.log(total) if total > 0 else nothing
        share = 1 / total if total > 0 else np.float32(0)
        for p in range(slots):
            weights[g, p] *= share
            if reduce == MAX:
                mass[p] = max(mass[p], weights[g, p])
            elif reduce != NO_MASS:
                mass[p] += weights[g, p] if reduce == SUM else weights[g, p] / groups
    output[:] = 0
    for p in range(slots):
        if positions[p] >= 0 and positions[p] <= position:
            own = values[p] if p != slot else value
            for g in range(groups):
                for d in range(dim):
                    output[g, d] += weights[g, p] * own[d]
