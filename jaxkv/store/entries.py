"""Entries: everything that is indexed by slot, as one pytree, and the few pure operations on it.

A slot is empty exactly when its position is -1. The dimensions of the slots come first in every array: `[B, Hk, C]`
where each KV head has C slots, `[B, P]` where heads share P slots.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

EMPTY = -1
WORTH = "worth"  # the statistic of what an entry was last valued at, where somebody asks
NEVER = -jnp.inf  # priority of an empty slot: below every entry
PIECE = 8  # slots that a TPU's memory holds as one piece


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
    """Keys, values, text positions (-1: empty), the policy's float32 statistics of all slots, and perhaps a weight.

    `keys` and `values` are arrays `[*slots, D]`, or what a codec makes of them: arrays that begin with the slots'
    dimensions as well, so gathers and appends need not know. An entry of `weight` n stands for n tokens: log n is
    added to its logit. None where every entry is one token.
    """

    keys: Any
    values: Any
    positions: Int[Array, "*slots"]
    stats: dict[str, Float[Array, "*slots"]]
    weight: Float[Array, "*slots"] | None = None

    @property
    def bias(self) -> Float[Array, "*slots"] | None:
        """What is added to each slot's logit: log n of an entry that stands for n tokens; None where none does."""
        return None if self.weight is None else jnp.log(jnp.maximum(self.weight, 1.0))

    @property
    def filled(self) -> Bool[Array, "*slots"]:
        """True for slots that hold an entry."""
        return self.positions >= 0

    def masked(self, stay: Bool[Array, "*slots"]) -> "Entries":
        """The entries with the slots emptied where `stay` is False."""
        return dataclasses.replace(self, positions=jnp.where(stay, self.positions, EMPTY))

    def with_stats(self, **more: Float[Array, "*slots"]) -> "Entries":
        """The entries with more statistics, which move with them."""
        return dataclasses.replace(self, stats={**self.stats, **more})

    def keeping(self, names: tuple[str, ...]) -> "Entries":
        """The entries with these statistics alone."""
        return dataclasses.replace(self, stats={name: self.stats[name] for name in names})


def put_all(place: Any, tree: Any, *dims: str | None) -> Any:
    """Every array of the tree given to `place(array, *dims)`; dimensions behind the last named one count nothing."""
    return jax.tree.map(lambda x: place(x, *(*dims, *(None,) * x.ndim)[: x.ndim]), tree)


def in_pieces(slots: int, parts: int = 1) -> int:
    """So many slots, rounded up to whole pieces of memory for each of `parts` devices.

    An array of any other number of slots is laid out on TPU with the heads or the rows innermost, and copied whole
    wherever a kernel reads it slot by slot.
    """
    return -(-slots // (PIECE * parts)) * PIECE * parts


def blank(shape: tuple[int, ...], keys: Any, values: Any, stats: tuple[str, ...], weighs: bool = False) -> Entries:
    """Empty slots, with keys and values as they lie in empty ones and zeroed statistics of the given names; with
    weights, where entries may stand for several tokens."""
    zeros = {name: jnp.zeros(shape, jnp.float32) for name in stats}
    weight = jnp.ones(shape, jnp.float32) if weighs else None
    return Entries(keys, values, jnp.full(shape, EMPTY, jnp.int32), zeros, weight)


def appended(before: Entries, after: Entries) -> Entries:
    """The slots of both, behind each other in the last of the slots' dimensions."""
    axis = before.positions.ndim - 1
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=axis), before, after)


def taken(entries: Entries, source: Int[Array, "*slots"], positions: Int[Array, "*slots"]) -> Entries:
    """The entries out of the `source` slots (of the last of the slots' dimensions), at `positions`."""
    axis = source.ndim - 1

    def gathered(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, source.reshape(source.shape + (1,) * (x.ndim - source.ndim)), axis=axis)

    moved = jax.tree.map(gathered, (entries.keys, entries.values, entries.stats, entries.weight))
    keys, values, stats, weight = moved
    return Entries(keys, values, positions, stats, weight)


def chosen_at(entries: Entries, index: Int[Array, "*slots"]) -> Entries:
    """The entries at `index`, with an empty slot where it is -1."""
    source = jnp.maximum(index, 0)
    at = jnp.where(index < 0, EMPTY, jnp.take_along_axis(entries.positions, source, axis=-1))
    return taken(entries, source, at)


def picked(x: jax.Array, slot: Int[Array, "B Hk *R"], *, flat: bool) -> jax.Array:
    """What lies in one slot, or in R, of each KV head, `[B, Hk, *R, ...]`, of an array over slots; `flat` where heads
    share them."""
    rows, heads = (jnp.arange(slot.shape[n]).reshape(-1, *(1,) * (slot.ndim - 1 - n)) for n in range(2))
    return x[rows, slot] if flat else x[rows, heads, slot]


def placed_at(x: jax.Array, slot: Int[Array, "B Hk"], new: jax.Array, *, flat: bool) -> jax.Array:
    """The array over slots with `new [B, Hk, ...]` in one slot of each KV head; a slot past the last is nobody's."""
    rows = jnp.arange(slot.shape[0])[:, None]
    at = (rows, slot) if flat else (rows, jnp.arange(slot.shape[1])[None], slot)
    return x.at[at].set(new.astype(x.dtype), mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Change:
    """What one survivor of each KV head becomes as it takes up what a token overwrites: its slot (past the last where
    none does), its key and value, plain, and its weight where entries have one."""

    slot: Int[Array, "B Hk"]
    keys: Float[Array, "B Hk D"]
    values: Float[Array, "B Hk D"]
    weight: Float[Array, "B Hk"] | None = None


def flattened(entries: Entries) -> Entries:
    """The slots of all heads in one row, head after head: `[B, Hk, C]` becomes `[B, Hk C]`."""
    batch, heads, slots = entries.positions.shape
    return jax.tree.map(lambda x: x.reshape(batch, heads * slots, *x.shape[3:]), entries)


def owners(positions: Int[Array, "B Hk C"]) -> Int[Array, "B Hk C"]:
    """The KV head of every slot."""
    return lax.broadcasted_iota(jnp.int32, positions.shape, 1)


def in_time_order(entries: Entries, first: bool = False) -> Entries:
    """The slots of every head in time order, the empty ones first; or the entries `first`."""
    late = jnp.where(entries.positions < 0, jnp.iinfo(jnp.int32).max, entries.positions)
    order = jnp.argsort(late if first else entries.positions, axis=-1, stable=True)
    return taken(entries, order, jnp.take_along_axis(entries.positions, order, axis=-1))


def ranks(positions: Int[Array, "B Hk S"]) -> Int[Array, "B Hk S"]:
    """Each entry's place among the entries held, counted from 0 in time order; -1 for an empty slot."""
    order = jnp.argsort(jnp.argsort(positions, axis=-1, stable=True), axis=-1)
    empties = jnp.sum(positions < 0, axis=-1, keepdims=True, dtype=order.dtype)
    return jnp.where(positions < 0, EMPTY, order - empties).astype(jnp.int32)


def around(positions: Int[Array, "B Hk S"]) -> Int[Array, "B Hk S"]:
    """`ranks` of slots that are a ring: in time order from the oldest entry on, past the last slot to the first, with
    empty ones behind the newest. A cut and the tokens written since leave them so, and where slots are added for a
    mesh (`Slots.divisible`) they stay so. No sort, which a step would feel."""
    slots = positions.shape[-1]
    oldest = jnp.argmin(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions), axis=-1).astype(jnp.int32)
    place = (jnp.arange(slots, dtype=jnp.int32) - oldest[..., None]) % slots
    return jnp.where(positions < 0, EMPTY, place)


def counted(filled: Bool[Array, "B H S"]) -> Int[Array, "B H S"]:
    """`ranks` of slots in time order, with empty ones anywhere between: each filled one's number, from 0."""
    return jnp.where(filled, jnp.cumsum(filled, axis=-1, dtype=jnp.int32) - 1, EMPTY)


def gap_in(
    positions: Int[Array, "B Hk S"], window: int | None = None, first: Int[Array, "B"] | None = None
) -> Int[Array, "B Hk 1"]:
    """How many tokens are missing between the oldest entry of each head and its newest: newest - oldest - (count - 1).

    Who looks is the newest token, or those from position `first` on; what is out of their `window` counts for nothing,
    for it may have left in any order.
    """
    newest = jnp.max(positions, axis=-1, keepdims=True)
    filled = positions >= 0
    if window is not None:
        filled &= (newest if first is None else first[:, None, None]) - positions < window
    oldest = jnp.min(jnp.where(filled, positions, jnp.iinfo(jnp.int32).max), axis=-1, keepdims=True)
    count = jnp.sum(filled, axis=-1, keepdims=True, dtype=jnp.int32)
    return jnp.where(count > 0, newest - oldest + 1 - count, 0)


def before_gap(positions: Int[Array, "B Hk S"], sinks: int | None) -> Bool[Array, "B Hk S"]:
    """True for the first `sinks` tokens of the text; None: for as many as stand before the gap, wherever it is."""
    filled = positions >= 0
    if sinks is not None:
        return filled & (positions < sinks)
    newer = jnp.sum(filled, axis=-1, keepdims=True, dtype=jnp.int32) - ranks(positions)  # with the entry itself
    return filled & (jnp.max(positions, axis=-1, keepdims=True) - positions + 1 > newer)


def packed(chosen: Bool[Array, "B H S"], slots: int, first: bool = False) -> Int[Array, "B H C"]:
    """The indices of the chosen slots, at most `slots` of them, in order at the end of C places, and -1 before them;
    or `first`, and -1 behind them."""
    upto = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32)
    count = upto[..., -1:]
    number = jnp.arange(slots, dtype=jnp.int32) - (
        jnp.zeros_like(count) if first else slots - count
    )  # of the chosen, from 0
    at = jax.vmap(jax.vmap(jnp.searchsorted))(upto, number + 1)
    return jnp.where((number < 0) | (number >= count), EMPTY, at.astype(jnp.int32))


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


def best_of_each(
    worth: Float[Array, "B Hk S"], positions: Int[Array, "B Hk S"], count: Int[Array, "B"]
) -> Bool[Array, "B Hk S"]:
    """True for the `count[b]` entries of highest worth of each head. Ties go to the older token where slots are in time
    order. Empty slots are never chosen; every entry counts as at least the lowest finite float."""
    filled = positions >= 0
    worth = jnp.maximum(worth.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    return highest(jnp.where(filled, worth, NEVER), count) & filled
