"""A block of queries on a CPU, compiled by numba: softmax and mass without a logit that leaves a core's cache.

Some queries of one KV head look at some of its keys at a time, the largest logit and the sum so far are kept beside
what the values come to, and these are scaled down where a larger logit comes: the softmax that XLA would make of all
keys at once, whose logits it would write out. Keys that none of the queries sees are passed over, and where all see
all, nothing is compared.

Products take four queries by two registers of outputs. The keys lie so that those of two registers are side by side,
channel by channel.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numba.np.numpy_support import carray

from pallas_kernels.codes import Codes, numbers
from pallas_kernels.cpu_call import (
    DATA,
    compiled,
    free,
    integer,
    new,
    number,
    pointer,
    registered,
    set_number,
    size,
    word,
)
from pallas_kernels.cpu_lanes import (
    WIDE,
    between,
    capped,
    exponential,
    fused,
    larger,
    largest,
    load_wide,
    plus,
    store,
    times,
    total,
    wide,
)
from pallas_kernels.masking import MASKED, averaged, filled

REDUCE = {"sum": 0, "mean": 0, "max": 1}
MAX = 1
ROWS, KEYS = 96, 256  # queries of all heads, and keys, that are multiplied at a time: their logits fit into a cache
PANEL = 2 * WIDE  # keys that lie side by side
BYTES, LINE = 4 * WIDE, 64  # of a register, and of a line of the cache
FEWEST = 64  # queries of a KV head's group: of fewer XLA makes the products before all keys are laid out here
FAR = 2**40  # behind all positions
LEAST = np.float32(MASKED / 2)  # what lies below it has no weight
NOTHING = np.float32(np.inf)  # in place of the log-sum-exp of a query that sees nothing
# The buffers of a call, in order
QUERY, PANELS, VALUES, AT, POSITIONS, BIAS, SOFTMAX, FACTS = range(8)
LSES, WEIGHTS = VALUES, 8  # of the mass
WINDOW, OWN, GIVES = range(3)  # of the facts: the window, the slots where the own keys are last, what is asked for
OUTPUT, LSE = range(2)


class Asked(NamedTuple):
    """What attention and mass have in common: the buffers of queries and keys, and facts of which keys are seen."""

    queries: Float[Array, "B Hk G T D"]
    panels: Float[Array, "B Hk P D W"]
    query_positions: Int[Array, "B T"]
    key_positions: Int[Array, "B Hk C"]
    bias: Float[Array, "_ _ _"]
    softmax: Float[np.ndarray, "2"]
    facts: list[int]


def attended(
    queries: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"] | Codes,
    values: Float[Array, "B Hk S D"] | Codes,
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    **softmax: Any,
) -> tuple[Float[Array, "B Hq T D"], Float[Array, "B Hq T"]]:
    """What the values come to, and the log-sum-exps."""
    asked = _asked(queries, keys, query_positions, key_positions, **softmax)
    out, lse = _attended(asked, _padded(filled(numbers(values), key_positions), asked.key_positions.shape[2]))
    return out.reshape(queries.shape).astype(queries.dtype), lse.reshape(queries.shape[:3])


def massed(
    queries: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"] | Codes,
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    reduce: str,
    weights: Float[Array, "B T"] | None,
    lse: Float[Array, "B Hq T"] | None,
    **softmax: Any,
) -> Float[Array, "B Hq S"]:
    """Each key's weights, by those of the queries, summed or their largest. The log-sum-exps are found first where they
    are not given."""
    asked = _asked(queries, keys, query_positions, key_positions, **softmax)
    batch, kv_heads, group, length, _ = asked.queries.shape
    slots, padded = keys.shape[2], asked.key_positions.shape[2]
    lses = _attended(asked, None)[1] if lse is None else lse.reshape(batch, kv_heads, group, length)
    lses = jnp.where(lses == -jnp.inf, NOTHING, lses)
    weights = jnp.broadcast_to(1.0 if weights is None else weights, (batch, length)).astype(jnp.float32)
    facts = np.array([*asked.facts, REDUCE[reduce]], np.int32)
    shape = jax.ShapeDtypeStruct((batch, kv_heads, group, padded), jnp.float32)
    mass = jax.ffi.ffi_call(_mass(), shape, vmap_method="sequential")(*asked[:2], lses, *asked[2:-1], facts, weights)
    mass = mass[..., :slots].reshape(*queries.shape[:2], slots)
    return averaged(mass, query_positions) if reduce == "mean" else mass


def _attended(
    asked: Asked, values: Float[Array, "B Hk C D"] | None
) -> tuple[Float[Array, "B Hk G T _"], Float[Array, "B Hk G T"]]:
    """What the values come to, and the log-sum-exps; without values only these, and nothing of the first."""
    *shape, dim = asked.queries.shape
    facts = np.array([*asked.facts, values is not None], np.int32)
    beside = jnp.zeros((1, 1, 1, 1), jnp.float32) if values is None else values
    outs = [(*shape, 0 if values is None else dim), tuple(shape)]
    shapes = [jax.ShapeDtypeStruct(out, jnp.float32) for out in outs]
    call = jax.ffi.ffi_call(_attend(), shapes, vmap_method="sequential")
    output, lse = call(*asked[:2], beside, *asked[2:-1], facts)
    return output, lse


def _asked(
    queries: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"] | Codes,
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    own_keys_last: bool,
    bias: Float[Array, "B Hk S"] | None,
) -> Asked:
    """The keys in panels, slots with them, and the rest as it is, numbers in float32. Raises `NotImplementedError` for
    few queries, for channels that fill no registers, and where XLA cannot call what numba compiles."""
    batch, heads, length, dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    if dim % WIDE:
        raise NotImplementedError(f"{dim} channels: a multiple of {WIDE}")
    if length * (heads // kv_heads) < FEWEST:
        raise NotImplementedError(f"{length} queries of {heads // kv_heads} heads for each KV head: {FEWEST} together")
    padded = slots + -slots % PANEL
    more = ((0, 0), (0, 0), (0, padded - slots))
    panels = _padded(numbers(keys), padded).reshape(batch, kv_heads, -1, PANEL, dim)
    by_slot = lambda x, kind: jnp.broadcast_to(x, (batch, kv_heads, slots)).astype(kind)  # noqa: E731
    added = np.zeros((1, 1, 1), np.float32) if bias is None else jnp.pad(by_slot(bias, jnp.float32), more)
    return Asked(
        queries.astype(jnp.float32).reshape(batch, kv_heads, heads // kv_heads, length, dim),
        jnp.swapaxes(panels, 3, 4),
        jnp.broadcast_to(query_positions, (batch, length)).astype(jnp.int32),
        jnp.pad(by_slot(key_positions, jnp.int32), more, constant_values=-1),
        jnp.asarray(added),
        np.array([scale, softcap or 0.0], np.float32),
        [window or 0, slots if own_keys_last else 0],
    )


def _padded(x: Float[Array, "B H S D"], slots: int) -> Float[Array, "B H C D"]:
    """As many slots as panels have, in float32."""
    return jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0)))


@functools.cache
def _attend() -> str:
    """The name of the kernel that attends; it is compiled when it is first called for."""
    return registered("jaxkv_prefill", _parts, _part)


@functools.cache
def _mass() -> str:
    """The name of the kernel that sums what keys weigh; it is compiled when it is first called for."""
    return registered("jaxkv_prefill_mass", _stretches, _stretch)


@compiled
def _at_a_time(ins):
    """How many queries of each head are done together."""
    return max(ROWS // size(word(ins, QUERY), 2), 1)


@compiled
def _parts(ins):
    """The parts of the queries of all KV heads of all rows."""
    query, many = word(ins, QUERY), _at_a_time(ins)
    return size(query, 0) * size(query, 1) * ((size(query, 3) + many - 1) // many)


@compiled
def _stretches(ins):
    """The stretches of the keys of all KV heads of all rows."""
    query, slots = word(ins, QUERY), size(word(ins, POSITIONS), 2)
    return size(query, 0) * size(query, 1) * ((slots + KEYS - 1) // KEYS)


@compiled
def _part(ins, outs, unit):
    """Some queries of one KV head of one row: all its keys, a stretch at a time."""
    query, many = word(ins, QUERY), _at_a_time(ins)
    kv_heads, group, length, dim = size(query, 1), size(query, 2), size(query, 3), size(query, 4)
    slots, gives = size(word(ins, POSITIONS), 2), integer(word(ins, FACTS), GIVES)
    each = (length + many - 1) // many
    head, first = unit // each, unit % each * many  # of all rows' KV heads
    count = min(many, length - first)
    rows = group * count
    width = dim if gives else 0
    own = new(LINE + 4 * (_even(rows) * (dim + width + KEYS) + 2 * rows))
    asked = _aligned(own)
    sums = asked + 4 * _even(rows) * dim
    logits = sums + 4 * _even(rows) * width
    tops = logits + 4 * _even(rows) * KEYS
    wholes = tops + 4 * rows
    _gather(ins, head, first, count, asked)
    for at in range(sums, logits, BYTES):
        store(at, wide(np.float32(0)))
    for row in range(rows):
        set_number(tops + 4 * row, LEAST)
        set_number(wholes + 4 * row, np.float32(0))
    places = word(word(ins, AT), DATA) + 4 * (head // kv_heads * length + first)
    values = word(word(ins, VALUES), DATA) + 4 * head * slots * dim
    end = _last(ins, first + count)
    for begin in range(0, end, KEYS):
        keys = min(KEYS, slots - begin)
        seen = _seen(ins, head, begin, keys, places, count)
        if seen == 0:
            continue
        _logits(ins, head, begin, keys, places, count, rows, seen, asked, logits)
        for row in range(rows):
            _weigh(logits + 4 * row * KEYS, keys, tops + 4 * row, wholes + 4 * row, sums + 4 * row * width, width)
        _product(logits, 4 * KEYS, values + 4 * begin * dim, 4 * dim, sums, 4 * width, rows, keys, width, True)
    for row in range(rows):
        g, t = row // count, first + row % count
        to = (head * group + g) * length + t
        whole = number(wholes + 4 * row)
        lse = number(tops + 4 * row) + math.log(whole) if whole > 0 else -NOTHING
        set_number(word(word(outs, LSE), DATA) + 4 * to, lse)
        share = wide(1 / whole if whole > 0 else np.float32(0))
        for d in range(0, 4 * width, BYTES):
            store(
                word(word(outs, OUTPUT), DATA) + 4 * to * width + d, times(load_wide(sums + 4 * row * width + d), share)
            )
    free(own)


@compiled
def _aligned(own):
    """The first address from here on where a line of the cache begins."""
    return (own + LINE - 1) // LINE * LINE


@compiled
def _even(rows):
    """As many rows as products take: a multiple of four."""
    return (rows + 3) // 4 * 4


@compiled
def _gather(ins, head, first, count, asked):
    """The queries of a KV head from the `first` on, one head's behind another's, by the scale; then zeros."""
    query = word(ins, QUERY)
    group, length, dim = size(query, 2), size(query, 3), size(query, 4)
    scale = wide(number(word(word(ins, SOFTMAX), DATA)))
    for g in range(group):
        lies = word(query, DATA) + 4 * ((head * group + g) * length + first) * dim
        for at in range(0, 4 * count * dim, BYTES):
            store(asked + 4 * g * count * dim + at, times(load_wide(lies + at), scale))
    for at in range(4 * group * count * dim, 4 * _even(group * count) * dim, BYTES):
        store(asked + at, wide(np.float32(0)))


@compiled
def _last(ins, end):
    """How many of the slots the queries before the `end` may see, by what is known of their order."""
    own, slots = integer(word(ins, FACTS), OWN), size(word(ins, POSITIONS), 2)
    return own - size(word(ins, QUERY), 3) + end if own > 0 else slots


@compiled
def _seen(ins, head, begin, keys, places, count):
    """0 where none of the queries sees any of the keys, 2 where all see all, else 1."""
    window = integer(word(ins, FACTS), WINDOW)
    first, last, empty = _bounds(_positions(ins, head, begin), keys)
    oldest, newest, blank = _bounds(places, count)
    if first > newest or (window > 0 and oldest - last >= window):
        return 0
    return 2 if not (empty or blank) and last <= oldest and (window <= 0 or newest - first < window) else 1


@compiled
def _bounds(lies, count):
    """The first and the last of so many positions, and whether some are empty; -1 as the last where all are."""
    positions = carray(pointer(lies), (count,), np.int32)
    first, last, empty = np.int64(FAR), np.int64(-1), False
    for p in range(count):
        at = np.int64(positions[p])
        last, empty = max(last, at), empty or at < 0
        first = min(first, at if at >= 0 else np.int64(FAR))
    return first, last, empty


@compiled
def _positions(ins, head, begin):
    """Where the positions of a head's slots lie, from slot `begin` on."""
    return word(word(ins, POSITIONS), DATA) + 4 * (head * size(word(ins, POSITIONS), 2) + begin)


@compiled
def _logits(ins, head, begin, keys, places, count, rows, seen, asked, logits):
    """query . key as the softmax takes them, minus infinity where a key is not seen."""
    dim, slots = size(word(ins, QUERY), 4), size(word(ins, POSITIONS), 2)
    panels = word(word(ins, PANELS), DATA) + 4 * (head * slots + begin) * dim
    for at in range(0, keys, PANEL):
        _product(asked, 4 * dim, panels + 4 * at * dim, 4 * PANEL, logits + 4 * at, 4 * KEYS, rows, dim, PANEL, False)
    cap, window = number(word(word(ins, SOFTMAX), DATA) + 4), integer(word(ins, FACTS), WINDOW)
    lies, now = _positions(ins, head, begin), carray(pointer(places), (count,), np.int32)
    biased = size(word(ins, BIAS), 2) > 1
    bias = word(word(ins, BIAS), DATA) + (4 * (head * slots + begin) if biased else 0)
    if seen == 2 and not biased and cap <= 0:
        return
    for row in range(rows):
        high = np.int64(now[row % count])
        low = max(high - window, -1) if window > 0 else -1
        to = logits + 4 * row * KEYS
        for at in range(0, 4 * keys, BYTES):
            x = load_wide(to + at)
            if cap > 0:
                x = capped(x, cap)
            if biased:
                x = plus(x, load_wide(bias + at))
            store(to + at, between(x, lies + at, low, high))


@compiled
def _weigh(logits, keys, top, whole, sums, width):
    """A query's logits to weights relative to the largest so far, which they are added to; what was there before, to
    the same measure."""
    most = wide(number(top))
    for at in range(0, 4 * keys, BYTES):
        most = larger(load_wide(logits + at), most)
    before, now = number(top), largest(most)
    level, found = wide(-now), wide(np.float32(0))
    for at in range(0, 4 * keys, BYTES):
        weight = exponential(plus(load_wide(logits + at), level))
        store(logits + at, weight)
        found = plus(found, weight)
    if now == before:
        set_number(whole, number(whole) + total(found))
        return
    less = np.float32(math.exp(before - now))
    set_number(top, now)
    set_number(whole, number(whole) * less + total(found))
    for d in range(0, 4 * width, BYTES):
        store(sums + d, times(load_wide(sums + d), wide(less)))


@compiled
def _product(a, across, b, down, c, to, rows, inner, columns, adds):
    """Rows of `a` by a matrix `b` of so many columns, to `c` or in its place; the strides are in bytes."""
    for column in range(0, 4 * columns, 2 * BYTES):
        two = column + BYTES < 4 * columns
        for row in range(0, rows, 4):
            w, y = a + row * across, c + row * to + column
            if two:
                _four_by_two(w, across, b + column, down, y, to, inner, adds)
            else:
                _four_by_one(w, across, b + column, down, y, to, inner, adds)


@compiled
def _four_by_two(w, across, x, down, y, to, inner, adds):
    """Four rows by two registers of columns."""
    p, q, r = w + across, w + 2 * across, w + 3 * across
    a = b = c = d = e = f = g = h = wide(np.float32(0))
    if adds:
        a, b, c, d = load_wide(y), load_wide(y + BYTES), load_wide(y + to), load_wide(y + to + BYTES)
        e, f = load_wide(y + 2 * to), load_wide(y + 2 * to + BYTES)
        g, h = load_wide(y + 3 * to), load_wide(y + 3 * to + BYTES)
    for i in range(inner):
        first, second = load_wide(x + i * down), load_wide(x + i * down + BYTES)
        s, t, u, v = wide(number(w + 4 * i)), wide(number(p + 4 * i)), wide(number(q + 4 * i)), wide(number(r + 4 * i))
        a, b, c, d = fused(s, first, a), fused(s, second, b), fused(t, first, c), fused(t, second, d)
        e, f, g, h = fused(u, first, e), fused(u, second, f), fused(v, first, g), fused(v, second, h)
    store(y, a)
    store(y + BYTES, b)
    store(y + to, c)
    store(y + to + BYTES, d)
    store(y + 2 * to, e)
    store(y + 2 * to + BYTES, f)
    store(y + 3 * to, g)
    store(y + 3 * to + BYTES, h)


@compiled
def _four_by_one(w, across, x, down, y, to, inner, adds):
    """Four rows by one register of columns."""
    p, q, r = w + across, w + 2 * across, w + 3 * across
    a = b = c = d = wide(np.float32(0))
    if adds:
        a, b, c, d = load_wide(y), load_wide(y + to), load_wide(y + 2 * to), load_wide(y + 3 * to)
    for i in range(inner):
        some = load_wide(x + i * down)
        a, b = fused(wide(number(w + 4 * i)), some, a), fused(wide(number(p + 4 * i)), some, b)
        c, d = fused(wide(number(q + 4 * i)), some, c), fused(wide(number(r + 4 * i)), some, d)
    store(y, a)
    store(y + to, b)
    store(y + 2 * to, c)
    store(y + 3 * to, d)


@compiled
def _stretch(ins, outs, unit):
    """Some keys of one KV head of one row: what all queries give them, a part at a time."""
    query, many = word(ins, QUERY), _at_a_time(ins)
    kv_heads, group, length, dim = size(query, 1), size(query, 2), size(query, 3), size(query, 4)
    slots, largest_one = size(word(ins, POSITIONS), 2), integer(word(ins, FACTS), GIVES) == MAX
    each = (slots + KEYS - 1) // KEYS
    head, begin = unit // each, unit % each * KEYS
    keys = min(KEYS, slots - begin)
    out = word(word(outs, 0), DATA) + 4 * (head * group * slots + begin)
    for g in range(group):
        for at in range(0, 4 * keys, BYTES):
            store(out + 4 * g * slots + at, wide(np.float32(0)))
    own = new(LINE + 4 * _even(group * many) * (dim + KEYS))
    asked = _aligned(own)
    logits = asked + 4 * _even(group * many) * dim
    for first in range(0, length, many):
        count = min(many, length - first)
        rows = group * count
        places = word(word(ins, AT), DATA) + 4 * (head // kv_heads * length + first)
        if begin >= _last(ins, first + count):
            continue
        seen = _seen(ins, head, begin, keys, places, count)
        if seen == 0:
            continue
        _gather(ins, head, first, count, asked)
        _logits(ins, head, begin, keys, places, count, rows, seen, asked, logits)
        for row in range(rows):
            g, t = row // count, first + row % count
            level = wide(-number(word(word(ins, LSES), DATA) + 4 * ((head * group + g) * length + t)))
            by = wide(number(word(word(ins, WEIGHTS), DATA) + 4 * (head // kv_heads * length + t)))
            to = out + 4 * g * slots
            for at in range(0, 4 * keys, BYTES):
                weight = exponential(plus(load_wide(logits + 4 * row * KEYS + at), level))
                if largest_one:
                    store(to + at, larger(times(weight, by), load_wide(to + at)))
                else:
                    store(to + at, fused(weight, by, load_wide(to + at)))
    free(own)
