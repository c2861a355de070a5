"""Slots: C slots for every KV head of a layer.

Attention needs no order among the slots. A cut leaves the kept entries in time order behind the empty ones, or before
them where slots share their code, or are read in pages, so that blocks and pages begin with the first slot. An
overwrite leaves entries where they are.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxkv.sharding.attention import RotateAtRead, awaiting, decode_attend_score
from jaxkv.sharding.layout import Layout
from jaxkv.store.beside import joined
from jaxkv.store.codecs import PLAIN_BOTH, Codecs
from jaxkv.store.entries import (
    EMPTY,
    WORTH,
    Entries,
    appended,
    blank,
    chosen_at,
    in_pieces,
    in_time_order,
    owners,
    packed,
    put_all,
    taken,
)
from jaxkv.store.pages import PAGES
from jaxkv.store.sinks import TurnSinks, read_apart
from jaxkv.store.store import Absorb, Choose, Store, Worth
from pallas_kernels.arguments import Held, Judge, Token
from pallas_kernels.decode_attend_score.victim import aim, alive, victim
from pallas_kernels.partial import Partial

GROW = 64  # slots added at a time where new tokens are only added: going on step by step compiles once per so many


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots(Store):
    """Entries `[B, Hk, C]`; `next_slot` is the slot that the next token will fill (an empty one while there is one,
    then the policy's victim); `beside` is what the policy's rules hold beside the slots, by name.
    """

    entries: Entries
    next_slot: Int[Array, "B Hk"]
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)
    codecs: Codecs = dataclasses.field(default=Codecs(), metadata={"static": True})

    equal: ClassVar[bool] = True  # every head has as many slots

    @property
    def slots(self) -> int:
        """C, the number of slots per KV head."""
        return self.positions.shape[-1]

    @property
    def owner(self) -> Int[Array, "B Hk C"]:
        """The KV head of every slot."""
        return owners(self.positions)

    def held(self) -> Int[Array, "B Hk"]:
        """Entries held by each KV head."""
        return jnp.sum(self.positions >= 0, axis=-1, dtype=jnp.int32)

    def needed(self, held: Any) -> int:
        """Slots per KV head that hold the `held [B, Hk]` entries."""
        return int(held.max())

    def each(self, place: Any) -> "Slots":
        """The store with every array given to `place(array, *dims)`, with a name for what each dimension counts."""
        entries = put_all(place, self.entries, "rows", "heads", "slots")
        few = put_all(place, (self.next_slot, self.beside), "rows", "heads")
        return dataclasses.replace(self, entries=entries, next_slot=few[0], beside=few[1])

    # ---- a block of the prompt

    def by_head(self) -> Entries:
        """The entries by KV head `[B, Hk, C]`, plain."""
        return self.plain(self.loose())

    def in_time_order(self) -> "Slots":
        """The slots in time order, the empty ones first; last where `_entries_first`."""
        return dataclasses.replace(self, entries=self.settling(in_time_order(self.loose(), self._entries_first)))

    @property
    def _entries_first(self) -> bool:
        """Whether a cut puts the entries before the empty slots."""
        return not self.codecs.apart or PAGES in self.beside

    def holding(
        self, entries: Entries, chosen: Bool[Array, "B Hk S"], slots: Int[Array, "B Hk C"] | None = None
    ) -> "Slots":
        """The store with plain entries, at `slots` of them if given, of which the chosen ones are held."""
        loose = self.loosened(entries, self.loose())
        coded = self.settling(loose if slots is None else chosen_at(loose, slots))
        return dataclasses.replace(self, entries=coded, beside=self.renewed(self.beside, entries, chosen))

    def rebuilt(
        self, entries: Entries, chosen: Bool[Array, "B Hk S"], slots: int, room: Int[Array, "B"], beside: dict[str, Any]
    ) -> "Slots":
        """The chosen ones of plain entries, which stand in time order, in `slots` slots behind the empty ones, or
        before them where `_entries_first`."""
        index = packed(chosen, slots, self._entries_first)
        return dataclasses.replace(self, beside=beside).holding(entries, chosen, index)

    # ---- a decode step

    def scored(self, x: Shaped[Array, "B Hk C"]) -> Shaped[Array, "B Hk C"]:
        """What is known of every slot, in scored form."""
        return x

    def unscored(self, x: Shaped[Array, "B Hk C"]) -> Shaped[Array, "B Hk C"]:
        """The inverse of `scored`."""
        return x

    def compared(self, x: Shaped[Array, "B Hk C"]) -> Shaped[Array, "B Hk C"]:
        """What is known of every slot, by KV head as in `by_head`."""
        return x

    def uncompared(self, x: Shaped[Array, "B Hk C"]) -> Shaped[Array, "B Hk C"]:
        """What was computed by KV head, in scored form."""
        return x

    def of_heads(self, x: Bool[Array, "Hk"]) -> Bool[Array, "B Hk C"]:
        """Of every slot what is known of its head, in scored form."""
        return jnp.broadcast_to(x[:, None], self.positions.shape)

    def put(self, x: Any, new: Any, active: Bool[Array, "B"]) -> Any:
        """`x [B, Hk, C, ...]` with `new [B, Hk, ...]` in every head's next slot, in rows that are active.

        A mask and not an index: where slots are divided over devices, each can tell its own.
        """
        slot = jnp.where(active[:, None], self.next_slot, self.slots)
        here = lax.broadcasted_iota(jnp.int32, self.positions.shape, 2) == slot[..., None]
        return jnp.where(here.reshape(here.shape + (1,) * (x.ndim - 3)), new[:, :, None], x)

    def leaving(self, active: Bool[Array, "B"]) -> Entries:
        """The entry `[B, Hk, 1]` in every head's next slot, plain; position -1 where it is empty or the row is not
        active."""
        at = self.next_slot[..., None]
        gone = taken(self.loose(), at, jnp.take_along_axis(self.positions, at, axis=-1))
        return self.plain(gone).masked(active[:, None, None])

    def step(
        self, layout: Layout, token: Token, judge: Judge, rotate: RotateAtRead | TurnSinks | None, **softmax: Any
    ) -> tuple[Partial, "Slots"]:
        """Write the token into the next slots, attend over all slots, choose the slots after it."""
        weighs, implementation, window = (softmax[name] for name in ("with_mass", "implementation", "window"))
        sinks = None
        if isinstance(rotate, TurnSinks):  # their keys are turned alone, or with all others
            facts = {"windows": bool(self._windows), "weighs": weighs, "on_mesh": layout.mesh is not None}
            sinks, rotate = (rotate, None) if read_apart(rotate.count, **facts) else (None, rotate.everywhere)
        how = self.reading(layout, rotate is not None, softmax["softcap"] is not None, weighs)
        bias, others = self.beside_codes(how, token, implementation, softmax["scale"], window, softmax["softcap"])
        if sinks is not None:
            left_out = sinks.left_out(self, token)
            bias = left_out if bias is None else bias + left_out
        lent = how.lent(self, lambda store: awaiting(layout, store, token.query))
        held, asked = Held(*lent, self.positions, bias), how.asked(token)
        apart = bool(others or sinks) and weighs  # the masses are of one softmax: they are joined, and then compared
        alone = judge._replace(rule=None, group="each") if apart else judge
        result = decode_attend_score(layout, asked, held, self.next_slot, alone, rotate=rotate, **softmax)
        after = self.attended(how, result, token, implementation)
        if sinks is not None:
            others = *others, sinks.beside(after, token, softmax["scale"], window, softmax["softcap"])
        part = joined(how.answered(token, result, softmax["scale"]), others, judge.group)
        if apart:
            after = after.aimed(aim(part.mass, after.positions, token.position, self.next_slot, judge, window=window))
        return part, after

    def laid(self, layout: Layout) -> "Slots":
        """The store after a step, divided over the layout's devices."""
        return layout.layer(self)

    def settled(self, output: Any) -> tuple[Any, "Slots"]:
        """The output, and the store to be cut or aimed after it."""
        return output, self

    def empty_slot(self, now: Int[Array, "B"], window: int | None) -> Int[Array, "B Hk"]:
        """Every head's first slot that is empty or whose entry no query will see again."""
        return jnp.argmin(alive(self.positions, now, window), axis=-1).astype(jnp.int32)

    def lowest(
        self, worth: Float[Array, "B Hk C"], limits: Int[Array, "B"], now: Int[Array, "B"], window: int | None
    ) -> Int[Array, "B Hk"]:
        """Every head's slot for the next token: an empty or expired one below the limit, else the lowest worth."""
        return victim(worth, self.positions, alive(self.positions, now, window), limits)

    def full(self, limits: Int[Array, "B"], every: int, now: Int[Array, "B"], window: int | None) -> Bool[Array, "B"]:
        """True for the rows that have run `every` tokens over their limit."""
        live = alive(self.positions, now, window)
        return jnp.max(jnp.sum(live, axis=-1, dtype=jnp.int32), axis=-1) >= limits + every

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
    ) -> "Slots":
        """The rows that are due with their `each [B]` best entries per head, the others with all.

        `worth(store)` scores the slots, `choose(worth, positions, owner, each)` says which stay.
        """

        def cut(_, store: Slots) -> Slots:
            live = alive(store.positions, now, window)
            ordered = in_time_order(store.loose().masked(live).with_stats(**{WORTH: worth(store)}))
            count = jnp.where(due, each, store.slots)
            chosen = choose(ordered.stats[WORTH], ordered.positions, owners(ordered.positions), count)
            entries, beside = store.absorbing(ordered.keeping(tuple(store.stats)), chosen, absorb)
            kept = store.settling(chosen_at(entries, packed(chosen, store.slots, store._entries_first)))
            kept = dataclasses.replace(store, entries=kept, beside=beside)
            return kept.aimed(kept.empty_slot(now, window))

        # a loop of no or one turn: its carry stays where it is; the branches of a cond would copy the slots every step
        return lax.fori_loop(0, jnp.any(due).astype(jnp.int32), cut, self)

    # ---- room

    def resized(self, slots: int) -> "Slots":
        """The store with empty slots added behind its own, up to `slots` (never fewer than it has)."""
        batch, heads, held = self.positions.shape
        if slots <= held:
            return self
        own, count = self.entries, slots - held
        keys, values = self.codec("keys").behind(own.keys, count), self.codec("values").behind(own.values, count)
        more = blank((batch, heads, count), keys, values, tuple(self.stats), own.weight is not None)
        pages = {PAGES: self.beside[PAGES].covering(slots)} if PAGES in self.beside else {}
        return dataclasses.replace(self, entries=appended(own, more), beside={**self.beside, **pages})

    def sized(self, slots: int) -> "Slots":
        """The empty store with so many slots per KV head."""
        return self.resized(slots)

    def grown(self, held: int, tokens: int, window: int | None, lacking: int = 0) -> "Slots":
        """The store with slots for `tokens` more than the `held` ones (or its window's), in steps of GROW; the next
        token goes to the first new slot, or behind the entries where `_entries_first`."""
        more, tokens = tokens, held + tokens
        slots = -(-tokens // GROW) * GROW
        slots = slots if window is None else min(slots, in_pieces(window))
        if self.slots >= min(tokens, slots):
            return self._aimed_at_room() if more else self
        if self._entries_first:
            return self.in_time_order().resized(slots).aimed(self.held())
        return self.resized(slots).aimed(jnp.full(self.next_slot.shape, self.slots, jnp.int32))

    def _aimed_at_room(self) -> "Slots":
        """The store with its next slots at empty ones where there are any: slots may have come behind those that a mesh
        divides, when all were filled."""
        empty = self.positions < 0
        room = jnp.take_along_axis(empty, self.next_slot[..., None], axis=-1)[..., 0] | ~jnp.any(empty, axis=-1)
        return self.aimed(jnp.where(room, self.next_slot, jnp.argmax(empty, axis=-1).astype(jnp.int32)))

    def divisible(self, parts: int) -> "Slots":
        """The store with empty slots added until `parts` devices can have equally many: before the next slot, where a
        ring (`around`) has its empty ones. Where `_entries_first` nothing goes round: they come behind the others."""
        more = in_pieces(self.slots, parts) - self.slots
        if not more or self._entries_first:
            return self.resized(self.slots + more)
        here, slot = jnp.arange(self.slots + more, dtype=jnp.int32), self.next_slot[..., None]
        index = jnp.where(here < slot, here, jnp.where(here < slot + more, EMPTY, here - more))
        filled = jnp.take_along_axis(self.positions, slot, axis=-1)[..., 0] >= 0  # it moves with its entry
        wide = dataclasses.replace(self, entries=chosen_at(self.entries, index))
        return wide.aimed(jnp.where(filled, self.next_slot + more, self.next_slot))


def empty(
    batch: int,
    heads: int,
    slots: int,
    head_dim: int,
    dtype: Any,
    stats: tuple[str, ...] = (),
    codecs: Codecs = PLAIN_BOTH,
    beside: dict[str, Any] | None = None,
    weighs: bool = False,
) -> Slots:
    """A layer with `slots` empty slots per KV head and zeroed statistics of the given names; see `blank`."""
    shape = (batch, heads, slots)
    keys, values = (codec.empty(shape, head_dim, dtype) for codec in (codecs.keys, codecs.values))
    return Slots(blank(shape, keys, values, stats, weighs), jnp.zeros((batch, heads), jnp.int32), beside or {}, codecs)
