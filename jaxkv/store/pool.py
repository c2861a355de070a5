"""The pool: one layer's store when its KV heads share a budget.

The layer holds P slots in all, head h the slots `offsets[h]` to `offsets[h + 1]`: segments of any length, side by side.
How many a head gets is data, P is static, so the bytes held are P whatever the split; nothing is padded to the largest
head.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxkv.sharding.attention import RotateAtRead, awaiting, ragged_decode
from jaxkv.sharding.layout import Layout, on_host
from jaxkv.store.beside import joined
from jaxkv.store.codecs import PLAIN_BOTH, Codecs
from jaxkv.store.entries import EMPTY, WORTH, Entries, blank, flattened, owners, put_all, taken
from jaxkv.store.slots import GROW
from jaxkv.store.store import Absorb, Choose, Store, Worth
from pallas_kernels.arguments import Judge, Line, Segments, Token
from pallas_kernels.partial import Partial
from pallas_kernels.ragged_decode.reference import first_empty, lowest
from pallas_kernels.ragged_decode.segments import mine, per_head, per_slot, segments

LOWEST = float(jnp.finfo(jnp.float32).min)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool(Store):
    """Entries `[B, P]` and the heads' borders `offsets`; slots outside them are nobody's (a row whose budget is smaller
    than another's).

    `next_slot` is each head's slot, of its own segment, that the next token will fill; `beside` is what the policy's
    rules hold beside the slots, by name.
    """

    entries: Entries
    offsets: Int[Array, "B Hk_1"]
    next_slot: Int[Array, "B Hk"]
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)
    codecs: Codecs = dataclasses.field(default=Codecs(), metadata={"static": True})

    equal: ClassVar[bool] = False  # heads have segments of any length

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

    def needed(self, held: Any) -> int:
        """Slots per KV head, on average over the heads, that hold the `held [B, Hk]` entries."""
        return on_average(held)

    def each(self, place: Any) -> "Pool":
        """The store with every array given to `place(array, *dims)`, with a name for what each dimension counts.

        The slots are divided wherever the heads' borders lie.
        """
        return self._each(place, "pool")

    def _each(self, place: Any, slots: str) -> "Pool":
        entries = put_all(place, self.entries, "rows", slots)
        few = put_all(place, (self.offsets, self.next_slot, self.beside), "rows")
        return dataclasses.replace(self, entries=entries, offsets=few[0], next_slot=few[1], beside=few[2])

    # ---- a block of the prompt

    def by_head(self, width: int | None = None) -> Entries:
        """The entries by KV head `[B, Hk, P]`, plain: Hk times their memory, for as long as a block of a prompt, or a
        score that compares a head's entries with each other, needs them. `width` slots of each head, where no segment
        has more."""
        return self.plain(self._wide(width))

    def _wide(self, width: int | None = None) -> Entries:
        """The same as they lie."""
        if not self.total:
            nothing = lambda x: jnp.zeros((x.shape[0], self.heads, *x.shape[1:]), x.dtype)  # noqa: E731
            return jax.tree.map(nothing, self.entries)
        at, inside = self._rectangle(width)
        rows = jnp.arange(at.shape[0])[:, None, None]
        return jax.tree.map(lambda x: x[rows, at], self.entries).masked(inside)

    def _rectangle(self, width: int | None = None) -> tuple[Int[Array, "B Hk W"], Bool[Array, "B Hk W"]]:
        """`width` slots of the pool (P) for every head, from its border on, and which of them are its own."""
        at = self.offsets[:, :-1, None] + jnp.arange(min(width or self.total, self.total))
        return jnp.minimum(at, self.total - 1), at < self.offsets[:, 1:, None]

    def in_time_order(self) -> "Pool":
        """Every segment's entries in time order behind its empty slots, which are shared out evenly."""
        return self.arranged(self.positions >= 0, self.offsets[:, -1] - self.offsets[:, 0])

    def rebuilt(
        self, entries: Entries, chosen: Bool[Array, "B Hk S"], slots: int, room: Int[Array, "B"], beside: dict[str, Any]
    ) -> "Pool":
        """The chosen ones of plain entries by head in a pool of `slots` per head, whose heads share `room [B]`."""
        kept = chosen.reshape(chosen.shape[0], -1)
        owner = owners(entries.positions).reshape(kept.shape)
        heads = entries.positions.shape[1]
        codes, beside = flattened(self.loosened(entries, self._wide())), self.renewed(beside, entries, chosen)
        return arranged(codes, owner, kept, heads * slots, room, heads, beside, self.codecs)

    def arranged(
        self,
        kept: Bool[Array, "B P"],
        room: Int[Array, "B"],
        beside: dict[str, Any] | None = None,
        total: int | None = None,
    ) -> "Pool":
        """The kept entries in `total` slots (as many as there are), with new borders."""
        beside, total = self.beside if beside is None else beside, self.total if total is None else total
        return arranged(self.entries, self.owner, kept, total, room, self.heads, beside, self.codecs)

    # ---- a decode step

    def scored(self, x: Shaped[Array, "B P"]) -> Shaped[Array, "B 1 P"]:
        """What is known of every slot, as of one long head."""
        return x[:, None]

    def unscored(self, x: Shaped[Array, "B 1 P"]) -> Shaped[Array, "B P"]:
        """The inverse of `scored`."""
        return x[:, 0]

    def compared(self, x: Shaped[Array, "B P"], width: int | None = None) -> Shaped[Array, "B Hk W"]:
        """What is known of every slot, by KV head as in `by_head`."""
        return x[jnp.arange(x.shape[0])[:, None, None], self._rectangle(width)[0]]

    def uncompared(self, x: Shaped[Array, "B Hk P"]) -> Shaped[Array, "B 1 P"]:
        """What was computed by KV head, in scored form (0 in nobody's slots)."""
        return jnp.where(self.owner < self.heads, self._flat(x), jnp.zeros((), x.dtype))[:, None]

    def of_heads(self, x: Bool[Array, "Hk"]) -> Bool[Array, "B 1 P"]:
        """Of every slot what is known of its head, in scored form."""
        return per_slot(jnp.broadcast_to(x, (self.positions.shape[0], self.heads)), self.owner)[:, None]

    def put(self, x: Any, new: Any, active: Bool[Array, "B"]) -> Any:
        """`x [B, P, ...]` with `new [B, Hk, ...]` in every head's next slot, in rows that are active."""
        at = (jnp.arange(active.shape[0])[:, None], jnp.where(active[:, None], self.next_slot, self.total))  # no slot
        return x.at[at].set(jnp.broadcast_to(new, (*self.next_slot.shape, *x.shape[2:])), mode="drop")

    def leaving(self, active: Bool[Array, "B"]) -> Entries:
        """The entry `[B, Hk, 1]` in every head's next slot, plain; position -1 where it is empty or the row is not
        active."""
        rows = jnp.arange(self.next_slot.shape[0])[:, None]
        gone = jax.tree.map(lambda x: x[rows, self.next_slot][:, :, None], self.entries)
        return self.plain(gone).masked(active[:, None, None])

    def step(
        self, layout: Layout, token: Token, judge: Judge, rotate: RotateAtRead | None, **softmax: Any
    ) -> tuple[Partial, "Pool"]:
        """Write the token into every head's next slot, attend over the heads' segments, choose the slots after it."""
        assert rotate is None, "heads that share a pool have no places in common"
        return self._ragged(layout, token, judge, **softmax)

    def _ragged(
        self,
        layout: Layout,
        token: Token,
        judge: Judge,
        *,
        line: Line | None = None,
        whole: bool = False,
        window: int | None,
        **softmax: Any,
    ) -> tuple[Partial, Any]:
        """The step, on a `line` where keys and values lie in one."""
        assert window is None, "layers with a sliding window have slots"
        weight, bias = (self.unscored(x) if isinstance(x, jax.Array) else x for x in (judge.weight, judge.bias))
        each = judge.rule and dataclasses.replace(judge.rule, heads="each")
        judge = judge._replace(weight=weight, bias=bias, rule=each)
        how = self.reading(layout, False, softmax["softcap"] is not None, softmax["with_mass"])
        bias, others = self.beside_codes(
            how, token, softmax["implementation"], softmax["scale"], None, softmax["softcap"]
        )
        lent = how.lent(self, lambda store: awaiting(layout, store, token.query))
        held = Segments(*lent, self.positions, self.offsets, line, bias)
        result = ragged_decode(layout, how.asked(token), held, self.next_slot, judge, whole=whole, **softmax)
        partial = joined(how.answered(token, result, softmax["scale"]), others, judge.group)
        mass = None if partial.mass is None else self.scored(partial.mass)
        return partial._replace(mass=mass), self.attended(how, result, token, softmax["implementation"])

    def laid(self, layout: Layout) -> "Pool":
        """The store after a step, which left it where it was."""
        return self

    def settled(self, output: Any) -> tuple[Any, "Pool"]:
        """The output, and the store to be cut or aimed after it: read before a move, or values would be copied."""
        return lax.optimization_barrier((output, self))

    def empty_slot(self, now: Int[Array, "B"], window: int | None) -> Int[Array, "B Hk"]:
        """Every head's first empty slot."""
        return first_empty(self.positions, self.offsets)

    def lowest(
        self, worth: Float[Array, "B 1 P"], limits: Int[Array, "B"], now: Int[Array, "B"], window: int | None
    ) -> Int[Array, "B Hk"]:
        """Every head's slot for the next token: its first empty one, else the one of lowest worth."""
        return lowest(self.unscored(worth), self.positions, self.offsets)

    def full(self, limits: Int[Array, "B"], every: int, now: Int[Array, "B"], window: int | None) -> Bool[Array, "B"]:
        """True for the rows in which a head has no empty slot left."""
        return jnp.min(self.sizes - self.held(), axis=-1) <= 0

    def packed_full(self) -> Bool[Array, "B"]:
        """True for the rows in which no head has an empty slot left."""
        return jnp.all((self.positions >= 0) | (self.owner == self.heads), axis=-1)

    def recut(
        self,
        due: Bool[Array, "B"],
        worth: Worth,
        choose: Choose,
        absorb: Absorb,
        *,
        each: Int[Array, "B"],
        room: Int[Array, "B"],
        now: Int[Array, "B"],
        window: int | None,
    ) -> "Pool":
        """The rows that are due with their `each [B]` best entries per head on average; so the borders move.

        `worth(store)` scores the slots, `choose(worth, positions, owner, each)` says which stay. What is freed, up to
        `room [B]`, is shared out evenly, and the next tokens go there.
        """

        def cut(_, store: Pool) -> Pool:
            value = store.unscored(worth(store))
            chosen = choose(value, store.positions, store.owner, each)
            if WORTH in store.stats:
                store = store.changed(stats={**store.stats, WORTH: value})
            entries, beside = store.absorbed(chosen, absorb)
            new = dataclasses.replace(store, entries=entries).arranged(chosen, room, beside)
            new = new.aimed(first_empty(new.positions, new.offsets))
            return jax.tree.map(lambda a, b: jnp.where(due.reshape(-1, *(1,) * (a.ndim - 1)), a, b), new, store)

        # A loop of no or one turn: its carry stays where it is; the branches of a cond would copy the pool every step
        return lax.fori_loop(0, jnp.any(due).astype(jnp.int32), cut, self)

    def absorbed(
        self, chosen: Bool[Array, "B P"], absorb: Absorb, width: int | None = None
    ) -> tuple[Entries, dict[str, Any]]:
        """The entries, and what is beside them, after those not chosen have left; `width` as of `by_head`."""
        if absorb is dropped:
            return self.entries, self.beside
        wide = self.by_head(width)
        stay = self.compared(chosen, width) & wide.filled
        new, beside = absorb(self.beside, wide, stay)
        if new is wide:
            return self.entries, beside
        mine = self.owner < self.heads

        def back(x: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(mine.reshape(*mine.shape, *(1,) * (old.ndim - 2)), self._flat(x), old)

        return jax.tree.map(back, self.loosened(new, self._wide(width)), self.entries), self.renewed(beside, new, stay)

    def _flat(self, x: Shaped[Array, "B Hk W *X"]) -> Shaped[Array, "B P *X"]:
        """What was computed by KV head, in the pool's own slots (anything in nobody's)."""
        owner, width = self.owner, x.shape[2]
        at = jnp.minimum(owner, self.heads - 1) * width + jnp.arange(self.total) - per_slot(self.offsets[:, :-1], owner)
        at = jnp.clip(at, 0, self.heads * width - 1).reshape(*at.shape, *(1,) * (x.ndim - 3))
        return jnp.take_along_axis(x.reshape(x.shape[0], -1, *x.shape[3:]), at, axis=1)

    # ---- room

    def sized(self, slots: int) -> "Pool":
        """The empty store with so many slots per KV head, on average."""
        return self.widened(slots)

    def grown(self, held: int, tokens: int, window: int | None, lacking: int = 0) -> "Pool":
        """The pool with slots for so many tokens more in every head, in steps of GROW."""
        more = self.lacking(tokens)
        return self.widened(more) if more else self

    def lacking(self, tokens: int) -> int:
        """Slots that every head needs besides its empty ones for so many tokens, a multiple of GROW."""
        return -(-max(tokens - int((on_host(self.sizes) - on_host(self.held())).min()), 0) // GROW) * GROW

    def widened(self, more: int) -> "Pool":
        """The pool with `more` empty slots behind those of every head."""
        offsets = self.offsets + more * jnp.arange(self.heads + 1, dtype=jnp.int32)
        of = segments(offsets, self.total + more * self.heads)
        back = jnp.arange(of.shape[1]) - per_slot(offsets[:, :-1], of)
        old = (of < self.heads) & (back < per_slot(self.sizes, of))
        source = jnp.where(old, per_slot(self.offsets[:, :-1], of) + back, EMPTY)
        wide = dataclasses.replace(self, entries=_at(self.entries, source), offsets=offsets)
        return wide.aimed(first_empty(wide.positions, wide.offsets))

    def divisible(self, parts: int) -> "Pool":
        """The pool as it is: its slots are divided as far as they can be."""
        return self


def on_average(held: Any) -> int:
    """The most entries per KV head that a row's heads hold on average, of `held [B, Hk]`, rounded up."""
    return int(-(-held.sum(axis=1) // held.shape[1]).max())


def dropped(beside: dict[str, Any], entries: Entries, chosen: Bool[Array, "B Hk S"]) -> tuple[Entries, dict]:
    """What leaves is dropped."""
    return entries, beside


def empty(
    batch: int,
    heads: int,
    head_dim: int,
    dtype: Any,
    stats: tuple[str, ...] = (),
    codecs: Codecs = PLAIN_BOTH,
    beside: dict[str, Any] | None = None,
    weighs: bool = False,
) -> Pool:
    """A pool without a slot, where a prompt begins; see `blank`."""
    keys, values = (codec.empty((batch, 0), head_dim, dtype) for codec in (codecs.keys, codecs.values))
    entries = blank((batch, 0), keys, values, stats, weighs)
    few = jnp.zeros((batch, heads), jnp.int32)
    return Pool(entries, jnp.zeros((batch, heads + 1), jnp.int32), few, beside or {}, codecs)


def arranged(
    entries: Entries,
    owner: Int[Array, "B N"],
    kept: Bool[Array, "B N"],
    total: int,
    room: Int[Array, "B"],
    heads: int,
    beside: dict[str, Any],
    codecs: Codecs,
) -> Pool:
    """The kept entries (of N slots, in codes) in a pool of `total` slots, of which a row's heads share `room [B]`.

    Every head gets what it keeps and an even share of what is left, the first heads one more where it does not come out
    even. A segment has its entries in time order behind its empty slots. Kept beyond `room` is lost.
    """
    group = jnp.where(kept, owner, heads)
    places = lax.broadcasted_iota(jnp.int32, owner.shape, 1)
    by_head = lax.sort((group, entries.positions, places), dimension=1, num_keys=2)[2]  # and then in time order
    held = per_head(kept, owner, heads)
    spare = jnp.maximum(room - jnp.sum(held, axis=-1), 0)[:, None]
    offsets = _borders(held + spare // heads + (jnp.arange(heads) < spare % heads).astype(jnp.int32))

    of = segments(offsets, total)
    before = _borders(held)[:, :-1]
    back = jnp.arange(total) - per_slot(offsets[:, 1:] - held, of)
    entry = (of < heads) & (back >= 0)
    at = jnp.clip(per_slot(before, of) + back, 0, by_head.shape[1] - 1)
    source = jnp.where(entry, jnp.take_along_axis(by_head, at, axis=1), EMPTY)
    return Pool(_at(entries, source), offsets, offsets[:, :-1], beside, codecs)


def compete(
    worth: Float[Array, "B N"],
    positions: Int[Array, "B N"],
    owner: Int[Array, "B N"],
    heads: int,
    keep: Int[Array, "B"],
    guard: Int[Array, "B"],
) -> tuple[Bool[Array, "B N"], Bool[Array, "B N"]]:
    """Which entries stay where heads compete, and which of them do because each head keeps its `guard [B]` best.

    The others of `keep [B]` are the best of all heads together. Ties go to the older token, then to the lower head;
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
        last = jnp.max(jnp.where(chosen[:, None] & mine(of, heads), place, -1), axis=-1)
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


def _at(entries: Entries, source: Int[Array, "B P"]) -> Entries:
    """The entries at `source`, with an empty slot where it is -1."""
    at = jnp.maximum(source, 0)
    return taken(entries, at, jnp.where(source < 0, EMPTY, jnp.take_along_axis(entries.positions, at, axis=1)))


def _borders(sizes: Int[Array, "B Hk"]) -> Int[Array, "B Hk_1"]:
    """Where segments of these sizes begin, and where the last one ends."""
    ends = jnp.cumsum(sizes, axis=-1, dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends], axis=-1)


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
