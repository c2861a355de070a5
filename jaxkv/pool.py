"""The pool: one layer's cache when its KV heads share a budget.

The layer holds P slots in all, head h the slots `offsets[h]` to `offsets[h + 1]`: segments of any length, side by side.
How many a head gets is data, P is static, so the bytes held are P whatever the split; nothing is padded to the largest
head. `cache.py` is the same for heads that hold equally many.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cache import EMPTY, LayerCache
from jaxkv.rest import Rest
from pallas_kernels.ragged_decode.reference import first_empty
from pallas_kernels.ragged_decode.segments import per_head, per_slot, segments

LOWEST = float(jnp.finfo(jnp.float32).min)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """Keys and values of one layer in P slots, with the text position of each slot (-1: empty).

    `offsets` are the heads' borders; slots outside them are nobody's (a row whose budget is smaller than another's).
    `next_slot` is each head's slot, of its own segment, that the next token will fill. `rest` stands for what the heads
    have dropped, under a policy that compensates for it.
    """

    keys: Float[Array, "B P D"]
    values: Float[Array, "B P D"]
    positions: Int[Array, "B P"]
    offsets: Int[Array, "B Hk_1"]
    next_slot: Int[Array, "B Hk"]
    stats: dict[str, Float[Array, "B P"]]
    rest: Rest | None = None

    @property
    def heads(self) -> int:
        """Hk, the KV heads that share the pool."""
        return self.next_slot.shape[-1]

    @property
    def total(self) -> int:
        """P, the slots of all heads together."""
        return self.positions.shape[-1]

    @property
    def slots(self) -> int:
        """Slots per KV head, on average."""
        return self.total // self.heads

    @property
    def sizes(self) -> Int[Array, "B Hk"]:
        """Slots of each head."""
        return jnp.diff(self.offsets, axis=-1)

    @property
    def owner(self) -> Int[Array, "B P"]:
        """The head that each slot belongs to; Hk for nobody's."""
        return segments(self.offsets, self.total)

    def held(self) -> Int[Array, "B Hk"]:
        """Entries held by each KV head."""
        upto = jnp.cumsum(self.positions >= 0, axis=-1, dtype=jnp.int32)
        return jnp.diff(jnp.take_along_axis(jnp.pad(upto, ((0, 0), (1, 0))), self.offsets, axis=-1), axis=-1)


def build(cache: LayerCache | Pool, kept: Bool[Array, "B N"], slots: int, room: Int[Array, "B"]) -> Pool:
    """The kept entries (of the N slots, flat) in a pool of `slots`, of which a row's heads share `room [B]`.

    Every head gets what it keeps and an even share of the rest, the first heads one more where it does not come out
    even. A segment has its entries in time order behind its empty slots. Raises nothing: kept beyond `room` is lost.
    """
    heads, owner, flat = _heads(cache), owners(cache), flattened(cache)
    group = jnp.where(kept, owner, heads)
    line = lax.sort((group, flat.positions, _places(owner)), dimension=1, num_keys=2)[2]  # by head, then in time
    held = per_head(kept, owner, heads)
    spare = jnp.maximum(room - jnp.sum(held, axis=-1), 0)[:, None]
    offsets = _borders(held + spare // heads + (jnp.arange(heads) < spare % heads).astype(jnp.int32))

    of = segments(offsets, slots)
    before = _borders(held)[:, :-1]
    back = jnp.arange(slots) - per_slot(offsets[:, 1:] - held, of)
    entry = (of < heads) & (back >= 0)
    at = jnp.clip(per_slot(before, of) + back, 0, line.shape[1] - 1)
    return _taken(flat, jnp.where(entry, jnp.take_along_axis(line, at, axis=1), EMPTY), offsets)


def compete(
    worth: Float[Array, "B N"],
    positions: Int[Array, "B N"],
    owner: Int[Array, "B N"],
    heads: int,
    keep: Int[Array, "B"],
    guard: Int[Array, "B"],
) -> tuple[Bool[Array, "B N"], Bool[Array, "B N"]]:
    """Which entries stay where heads compete, and which of them do because each head keeps its `guard [B]` best.

    The rest of `keep [B]` goes to the best of all heads together. Ties go to the older token, then to the lower head;
    empty slots (position -1) never stay. `guard` times the heads is at most `keep`. Source: AdaKV (arXiv 2407.11550).
    """
    value = _ascending(worth, positions)
    value, at, of = lax.sort((value, positions, owner), dimension=1, num_keys=2, is_stable=True)  # the best first
    place = jnp.arange(at.shape[1])

    def safest(safe, head):
        mine = (of == head) & (at >= 0)
        return safe | (mine & (jnp.cumsum(mine, axis=1) <= guard[:, None])), None

    safe, _ = lax.scan(safest, jnp.zeros(at.shape, bool), jnp.arange(heads, dtype=of.dtype))
    free = (at >= 0) & ~safe
    left = keep - jnp.sum(safe, axis=1, dtype=jnp.int32)
    stays = safe | (free & (jnp.cumsum(free, axis=1) <= left[:, None]))

    def back(chosen):
        """The chosen ones, which are the best of each head, in the slots that they came from."""
        last = jnp.max(jnp.where(chosen[:, None] & (of[:, None] == _row(heads)), place, -1), axis=-1)
        lowest = jnp.take_along_axis(value, jnp.maximum(last, 0), axis=1)
        youngest = jnp.take_along_axis(at, jnp.maximum(last, 0), axis=1)
        return _up_to(worth, positions, owner, lowest, youngest, last >= 0)

    return back(stays), back(safe)


def best(
    worth: Float[Array, "B N"], positions: Int[Array, "B N"], owner: Int[Array, "B N"], quota: Int[Array, "B Hk"]
) -> Bool[Array, "B N"]:
    """Which entries are among the `quota [B, Hk]` best of their head. Ties go to the older token."""
    heads = quota.shape[-1]
    _, value, at = lax.sort((owner, _ascending(worth, positions), positions), dimension=1, num_keys=3)
    count = per_head(jnp.ones_like(owner, dtype=bool), owner, heads)
    quota = jnp.minimum(quota, count)
    last = jnp.maximum(_borders(count)[:, :-1] + quota - 1, 0)
    lowest, youngest = (jnp.take_along_axis(x, last, axis=1) for x in (value, at))
    return _up_to(worth, positions, owner, lowest, youngest, quota > 0)


def rectangle(pool: Pool) -> LayerCache:
    """The pool with P slots for every head: Hk times its memory, for as long as the next block of a prompt needs."""
    at = pool.offsets[:, :-1, None] + jnp.arange(pool.total)
    inside = at < pool.offsets[:, 1:, None]
    at = jnp.minimum(at, pool.total - 1)
    rows = jnp.arange(at.shape[0])[:, None, None]
    return LayerCache(
        keys=pool.keys[rows, at],
        values=pool.values[rows, at],
        positions=jnp.where(inside, pool.positions[rows, at], EMPTY),
        next_slot=jnp.zeros_like(pool.next_slot),
        stats={name: stat[rows, at] for name, stat in pool.stats.items()},
    )


def in_time_order(pool: Pool) -> Pool:
    """The pool with every segment's entries in time order behind its empty slots, which are shared evenly."""
    return build(pool, pool.positions >= 0, pool.total, pool.offsets[:, -1] - pool.offsets[:, 0])


def by_head(cache: LayerCache | Pool) -> LayerCache:
    """A layer with slots for each head: a pool's `rectangle`, any other as it is."""
    return rectangle(cache) if isinstance(cache, Pool) else cache


def from_rectangle(pool: Pool, x: Float[Array, "B Hk P"]) -> Float[Array, "B P"]:
    """What was computed on `rectangle(pool)`, in the pool's own slots (0 in nobody's)."""
    owner = pool.owner
    at = (
        jnp.minimum(owner, pool.heads - 1) * pool.total + jnp.arange(pool.total) - per_slot(pool.offsets[:, :-1], owner)
    )
    flat = jnp.take_along_axis(x.reshape(x.shape[0], -1), jnp.maximum(at, 0), axis=1)
    return jnp.where(owner < pool.heads, flat, jnp.zeros((), x.dtype))


def widened(pool: Pool, more: int) -> Pool:
    """The pool with `more` empty slots behind those of every head."""
    offsets = pool.offsets + more * jnp.arange(pool.heads + 1, dtype=jnp.int32)
    of = segments(offsets, pool.total + more * pool.heads)
    back = jnp.arange(of.shape[1]) - per_slot(offsets[:, :-1], of)
    old = (of < pool.heads) & (back < per_slot(pool.sizes, of))
    wide = _taken(pool, jnp.where(old, per_slot(pool.offsets[:, :-1], of) + back, EMPTY), offsets)
    return dataclasses.replace(wide, next_slot=first_empty(wide.positions, wide.offsets))


def next_to_go(pool: Pool) -> tuple[Float[Array, "B Hk D"], Float[Array, "B Hk D"], Int[Array, "B Hk"]]:
    """Key, value and position in every head's next slot, which the next token overwrites."""
    rows = jnp.arange(pool.next_slot.shape[0])[:, None]
    return pool.keys[rows, pool.next_slot], pool.values[rows, pool.next_slot], pool.positions[rows, pool.next_slot]


def owners(cache: LayerCache | Pool) -> Int[Array, "B N"]:
    """The head of each slot, flat."""
    if isinstance(cache, Pool):
        return cache.owner
    shape = cache.positions.shape
    return lax.broadcasted_iota(jnp.int32, shape, 1).reshape(shape[0], -1)


def flattened(cache: LayerCache | Pool) -> Pool:
    """A layer's slots in one line, head after head; a pool as it is."""
    if isinstance(cache, Pool):
        return cache
    batch, heads, slots = cache.positions.shape
    line = lambda x: x.reshape(batch, heads * slots, *x.shape[3:])  # noqa: E731
    return Pool(
        keys=line(cache.keys),
        values=line(cache.values),
        positions=line(cache.positions),
        offsets=jnp.broadcast_to(slots * jnp.arange(heads + 1, dtype=jnp.int32), (batch, heads + 1)),
        next_slot=cache.next_slot,
        stats={name: line(stat) for name, stat in cache.stats.items()},
    )


def _heads(cache: LayerCache | Pool) -> int:
    return cache.next_slot.shape[-1]


def _taken(pool: Pool, source: Int[Array, "B P"], offsets: Int[Array, "B Hk_1"]) -> Pool:
    """The pool's entries at `source` (-1: an empty slot) between new borders, the next slot the first of each head."""
    at = jnp.maximum(source, 0)
    return Pool(
        keys=jnp.take_along_axis(pool.keys, at[..., None], axis=1),
        values=jnp.take_along_axis(pool.values, at[..., None], axis=1),
        positions=jnp.where(source < 0, EMPTY, jnp.take_along_axis(pool.positions, at, axis=1)),
        offsets=offsets,
        next_slot=offsets[:, :-1],
        stats={name: jnp.take_along_axis(stat, at, axis=1) for name, stat in pool.stats.items()},
        rest=pool.rest,
    )


def _borders(sizes: Int[Array, "B Hk"]) -> Int[Array, "B Hk_1"]:
    """Where segments of these sizes begin, and where the last one ends."""
    ends = jnp.cumsum(sizes, axis=-1, dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends], axis=-1)


def _row(heads: int) -> Int[Array, "Hk 1"]:
    return jnp.arange(heads, dtype=jnp.int32)[:, None]


def _places(x: Int[Array, "B N"]) -> Int[Array, "B N"]:
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _ascending(worth: Float[Array, "B N"], positions: Int[Array, "B N"]) -> Float[Array, "B N"]:
    """What sorts the best entry first and the empty slots last; an entry is worth at least the lowest finite float."""
    return jnp.where(positions < 0, jnp.inf, -jnp.maximum(worth.astype(jnp.float32), LOWEST))


def _up_to(
    worth: Float[Array, "B N"],
    positions: Int[Array, "B N"],
    owner: Int[Array, "B N"],
    value: Float[Array, "B Hk"],
    at: Int[Array, "B Hk"],
    some: Bool[Array, "B Hk"],
) -> Bool[Array, "B N"]:
    """True for entries as good as their head's last one, which has this `value` and position, in heads with `some`."""
    mine = _ascending(worth, positions)
    value, at = per_slot(value, owner), per_slot(at, owner)
    return (positions >= 0) & per_slot(some, owner) & ((mine < value) | ((mine == value) & (positions <= at)))
