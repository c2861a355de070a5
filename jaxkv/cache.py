"""The KV cache: fixed-shape slots per layer, and the few pure operations on them.

A slot is empty exactly when its position is -1. Slots need no order for attention; a gather (`keep`) leaves the kept
entries in time order behind the empty ones, an overwrite (`write`) leaves them where they are.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.errors import BadValue

EMPTY = -1
NEVER = -jnp.inf  # priority of an empty slot: below every entry


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer in C slots per KV head, with the text position of each slot (-1: empty).

    `stats` holds the policy's float32 statistics per slot; `next_slot` is the slot that the next token will fill
    (an empty one while there is one, then the policy's victim).
    """

    keys: Float[Array, "B Hk C D"]
    values: Float[Array, "B Hk C D"]
    positions: Int[Array, "B Hk C"]
    next_slot: Int[Array, "B Hk"]
    stats: dict[str, Float[Array, "B Hk C"]]

    @property
    def slots(self) -> int:
        """C, the number of slots per KV head."""
        return self.positions.shape[-1]

    def held(self) -> Int[Array, "B Hk"]:
        """Entries held by each KV head."""
        return jnp.sum(self.positions >= 0, axis=-1, dtype=jnp.int32)


@functools.partial(jax.tree_util.register_dataclass, drop_fields=("tokens",))
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The bounded cache of a batch, and where each row stands in its text.

    One `LayerCache` per layer, or one `pool.Pool` where the layer's heads share a budget, or its `model_pool.Share` of
    what all layers share; `views` are the layers whatever holds them.
    `lengths [B]` counts the tokens seen, so it is the position of the next token; `limits [L, B]` is each row's
    budget per layer; `pending [B]` is a token already sampled but not yet run through the model (-1: none).
    `policy` and `model` say under what the cache was made: another policy's statistics or another model's keys would
    be meaningless here.
    `tokens [B, N]` is the text itself: the `lengths[b]` tokens that row b has seen, -1 behind them; None where nobody
    knows. It stays on the host: no leaf of the tree, so no program is compiled for its length, and `jax.tree.map`
    gives a cache without it. No size below counts it.
    """

    layers: tuple[Any, ...]
    lengths: Int[Array, "B"]
    limits: Int[Array, "L B"]
    pending: Int[Array, "B"]
    policy: Any = dataclasses.field(default=None, metadata={"static": True})
    model: str = dataclasses.field(default="", metadata={"static": True})
    tokens: Int[np.ndarray, "B N"] | None = None

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return self.lengths.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, positions and statistics held."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.layers))

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held: what a budget bounds, and the means of what was dropped, if any."""
        lines = [getattr(layer, "line", layer) for layer in self.layers]  # layers that share have one line between them
        rests = [getattr(line, "rest", None) for line in lines]
        held = sum(line.keys.nbytes + line.values.nbytes for line in lines if line is not None)
        return held + sum(rest.kv_bytes for rest in rests if rest is not None)

    @property
    def views(self) -> tuple[Any, ...]:
        """Every layer as a `LayerCache` or a `Pool`."""
        return opened(self.layers)

    def texts(self) -> list[np.ndarray] | None:
        """Each row's text seen, int32 [lengths[b]]; None where it is not known."""
        return None if self.tokens is None else [row[row >= 0] for row in self.tokens]

    def held(self) -> Int[Array, "L B Hk"]:
        """Entries held per layer, row and KV head."""
        line = line_of(self.layers)
        of_line = None if line is None else line.held()
        return jnp.stack([layer.own(of_line) if hasattr(layer, "own") else layer.held() for layer in self.layers])


def opened(layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """The layers, those that share one line of slots as their views of it."""
    line = line_of(layers)
    return tuple(layer if line is None or not hasattr(layer, "view") else layer.view(line) for layer in layers)


def line_of(layers: tuple[Any, ...]) -> Any:
    """The line of the layers that share one, a `pool.Pool`; None where none does."""
    return next((layer.line for layer in layers if getattr(layer, "line", None) is not None), None)


def one_row(cache: KVCache, index: int) -> KVCache:
    """A row of the cache as a cache of its own."""
    row = slice(index, index + 1)
    return dataclasses.replace(
        cache,
        layers=jax.tree.map(lambda leaf: leaf[row], cache.layers),
        lengths=cache.lengths[row],
        limits=cache.limits[:, row],
        pending=cache.pending[row],
        tokens=None if cache.tokens is None else cache.tokens[row],
    )


def repeated(cache: KVCache, times: int) -> KVCache:
    """Every row of the cache `times` times, next to each other."""
    if times == 1:
        return cache
    repeat = lambda leaf: jnp.repeat(leaf, times, axis=0)  # noqa: E731
    return dataclasses.replace(
        cache,
        layers=jax.tree.map(repeat, cache.layers),
        lengths=repeat(cache.lengths),
        limits=jnp.repeat(cache.limits, times, axis=1),
        pending=repeat(cache.pending),
        tokens=None if cache.tokens is None else np.repeat(cache.tokens, times, axis=0),
    )


def branched(cache: KVCache, batch: int) -> KVCache:
    """The cache for `batch` rows: its own number, or one row repeated. Raises `BadValue` for other numbers of rows."""
    if cache.batch == batch:
        return cache
    if cache.batch != 1:
        raise BadValue(f"{batch} prompts on a cache of {cache.batch} rows: expected {cache.batch}, or a cache of 1 row")
    return repeated(cache, batch)


def empty(batch: int, heads: int, slots: int, head_dim: int, dtype, stats: tuple[str, ...] = ()) -> LayerCache:
    """A layer with `slots` empty slots per KV head and zeroed statistics of the given names."""
    shape = (batch, heads, slots)
    return LayerCache(
        keys=jnp.zeros((*shape, head_dim), dtype),
        values=jnp.zeros((*shape, head_dim), dtype),
        positions=jnp.full(shape, EMPTY, jnp.int32),
        next_slot=jnp.zeros((batch, heads), jnp.int32),
        stats={name: jnp.zeros(shape, jnp.float32) for name in stats},
    )


def append(
    layer: LayerCache,
    keys: Float[Array, "B Hk T D"],
    values: Float[Array, "B Hk T D"],
    positions: Int[Array, "B Hk T"],
    stats: Mapping[str, Float[Array, "B Hk T"]],
) -> LayerCache:
    """The layer with T more slots behind its own; `stats` has one array per statistic of the layer."""
    return dataclasses.replace(
        layer,
        keys=jnp.concatenate([layer.keys, keys], axis=2),
        values=jnp.concatenate([layer.values, values], axis=2),
        positions=jnp.concatenate([layer.positions, positions], axis=2),
        stats={name: jnp.concatenate([old, stats[name]], axis=2) for name, old in layer.stats.items()},
    )


def resize(layer: LayerCache, slots: int) -> LayerCache:
    """The layer with empty slots added behind its own, up to `slots` (never fewer than it has)."""
    batch, heads, held, dim = layer.keys.shape
    if slots <= held:
        return layer
    more = empty(batch, heads, slots - held, dim, layer.keys.dtype, tuple(layer.stats))
    return append(layer, more.keys, more.values, more.positions, more.stats)


def in_time_order(layer: LayerCache) -> LayerCache:
    """The layer with its slots in time order, the empty ones first."""
    order = jnp.argsort(layer.positions, axis=-1, stable=True)
    return _taken(layer, order, jnp.take_along_axis(layer.positions, order, axis=-1))


def ranks(positions: Int[Array, "B Hk S"]) -> Int[Array, "B Hk S"]:
    """Each entry's place among the entries held, counted from 0 in time order; -1 for an empty slot."""
    order = jnp.argsort(jnp.argsort(positions, axis=-1, stable=True), axis=-1)
    empties = jnp.sum(positions < 0, axis=-1, keepdims=True, dtype=order.dtype)
    return jnp.where(positions < 0, EMPTY, order - empties).astype(jnp.int32)


def around(positions: Int[Array, "B Hk S"]) -> Int[Array, "B Hk S"]:
    """`ranks` of slots that stand in time order from the oldest entry on, past the last slot to the first, with empty
    ones behind the newest: what a cut and the tokens written since leave. Without a sort, which costs a decode step."""
    slots = positions.shape[-1]
    oldest = jnp.argmin(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions), axis=-1).astype(jnp.int32)
    place = (jnp.arange(slots, dtype=jnp.int32) - oldest[..., None]) % slots
    return jnp.where(positions < 0, EMPTY, place)


def counted(filled: Bool[Array, "B H S"]) -> Int[Array, "B H S"]:
    """`ranks` of slots that stand in time order, with empty ones anywhere between: each filled one's number, from 0."""
    return jnp.where(filled, jnp.cumsum(filled, axis=-1, dtype=jnp.int32) - 1, EMPTY)


def packed(chosen: Bool[Array, "B H S"], slots: int) -> Int[Array, "B H C"]:
    """The indices of the chosen slots, at most `slots` of them, in order at the end of C places; -1 before them."""
    upto = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32)
    number = jnp.arange(slots, dtype=jnp.int32) - (slots - upto[..., -1:])  # of the chosen, from 0
    at = jax.vmap(jax.vmap(jnp.searchsorted))(upto, number + 1)
    return jnp.where(number < 0, EMPTY, at.astype(jnp.int32))


def highest(priority: Float[Array, "B H S"], count: Int[Array, "B"]) -> Bool[Array, "B H S"]:
    """True for the `count[b]` highest of each row and head; of equals the first stay.

    Without a sort, which TPU compilers take long to build: the lowest value that stays is found bit by bit.
    """
    bits, top = lax.bitcast_convert_type(priority, jnp.uint32), jnp.uint32(1 << 31)
    bits = jnp.where(bits <= top, bits | top, ~bits)  # in the order of the numbers; -0.0, which is `top`, as 0.0
    count = count[:, None, None]

    def step(least, bit):
        higher = least | bit
        enough = jnp.sum(bits >= higher, axis=-1, keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough, higher, least), None

    start = jnp.zeros((*bits.shape[:-1], 1), jnp.uint32)
    least, _ = lax.scan(step, start, lax.shift_right_logical(top, jnp.arange(32, dtype=jnp.uint32)))
    above, equal = bits > least, bits == least
    room = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room))


def keep(layer: LayerCache, priority: Float[Array, "B Hk S"], slots: int, limits: Int[Array, "B"]) -> LayerCache:
    """The `limits[b]` entries of highest priority of each head in `slots` slots, in time order behind the empty ones.

    The layer's slots stand in time order, with empty ones anywhere between (else `in_time_order` first). Ties go to
    the older token. Empty slots are never kept, whatever their priority; every entry counts as at least the lowest
    finite float, so that an entry always beats an empty slot.
    """
    filled = layer.positions >= 0
    priority = jnp.maximum(priority.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    chosen = highest(jnp.where(filled, priority, NEVER), jnp.minimum(limits, slots)) & filled
    index = packed(chosen, slots)
    source = jnp.maximum(index, 0)
    return _taken(layer, source, jnp.where(index < 0, EMPTY, jnp.take_along_axis(layer.positions, source, axis=-1)))


def _taken(layer: LayerCache, source: Int[Array, "B Hk C"], positions: Int[Array, "B Hk C"]) -> LayerCache:
    """The layer's entries out of the `source` slots, at `positions`."""
    return LayerCache(
        keys=jnp.take_along_axis(layer.keys, source[..., None], axis=2),
        values=jnp.take_along_axis(layer.values, source[..., None], axis=2),
        positions=positions,
        next_slot=layer.next_slot,
        stats={name: jnp.take_along_axis(stat, source, axis=-1) for name, stat in layer.stats.items()},
    )
