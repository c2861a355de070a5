"""What every store has: the entries of one layer, where the next token goes, and what is held beside the slots.

A store is `Slots` (every KV head has as many), a `Pool` (the heads share the layer's), or a layer's `View` of the
model's line (the layers share). What a policy computes of every slot it computes in the store's *scored form*,
`[B, H, S]`: `[B, Hk, C]` of slots, `[B, 1, P]` of a pool, as of one long head.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxkv.sharding.layout import Layout
from jaxkv.store.beside import Beside
from jaxkv.store.codec import alike, in_front
from jaxkv.store.codecs import Codecs
from jaxkv.store.entries import EMPTY, Change, Entries, owners, picked, placed_at
from jaxkv.store.few import numbers_at
from jaxkv.store.fit import FIT, Fit
from jaxkv.store.looks import LOOKS
from jaxkv.store.reading import Decoded, reading
from jaxkv.store.window import WINDOW, WINDOWS, apart
from pallas_kernels.arguments import Token
from pallas_kernels.dispatch import REFERENCE
from pallas_kernels.masking import MASKED
from pallas_kernels.partial import attend_few

Worth = Callable[[Any], Float[Array, "B *S"]]  # of a store's slots
# of worth, positions and the KV head of every slot, and how many entries each head shall keep on average: which stay
Choose = Callable[[Float[Array, "B *S"], Int[Array, "B *S"], Int[Array, "B *S"], Int[Array, "B"]], Bool[Array, "B *S"]]
# of what is held beside the slots, plain entries by head, and which of them stay: the survivors, and what is beside
Absorb = Callable[[dict[str, Any], Entries, Bool[Array, "B Hk S"]], tuple[Entries, dict[str, Any]]]


def taken_up(beside: dict[str, Any], positions: Int[Array, "B *S"], change: Change) -> dict[str, Any]:
    """What is beside slots of these positions, with survivors that lie in a window as they have become."""
    slots = positions.shape[-1]
    at = picked(positions, jnp.minimum(change.slot, slots - 1), flat=positions.ndim == 2)
    at = jnp.where(change.slot < slots, at, EMPTY)
    new = at, change.keys, change.values
    return {**beside, **{name: beside[name].changed_at(*new) for name in WINDOWS if name in beside}}


class Store:
    """What the three kinds share."""

    entries: Entries
    next_slot: Int[Array, "B Hk"]
    beside: dict[str, Any]
    codecs: Codecs
    equal: ClassVar[bool]  # whether every head has as many slots

    @property
    def positions(self) -> Int[Array, "B *S"]:
        """The text position of every slot, -1 where it is empty."""
        return self.entries.positions

    @property
    def stats(self) -> dict[str, Float[Array, "B *S"]]:
        """The policy's statistics of every slot."""
        return self.entries.stats

    @property
    def owner(self) -> Int[Array, "B *S"]:
        """The KV head of every slot."""
        raise NotImplementedError

    @property
    def keys(self) -> Float[Array, "B *S D"]:
        """The keys, decoded where a codec holds them."""
        return self._decoded("keys")

    @property
    def values(self) -> Float[Array, "B *S D"]:
        """The values, decoded where a codec holds them."""
        return self._decoded("values")

    def codec(self, name: str) -> Any:
        """The codec of the "keys" or "values", with what it has fitted: of arrays `[B, Hk, *, D]`."""
        return getattr(self._fitted, name)

    @property
    def _fitted(self) -> Codecs:
        """The codecs, with what they have fitted."""
        return self.codecs.fitted(self.beside[FIT]) if FIT in self.beside else self.codecs

    def codec_of_slots(self, name: str) -> Any:
        """The same of arrays over the slots."""
        codec = getattr(self.codecs, name)
        if FIT not in self.beside or self.positions.ndim == 3:
            return self.codec(name)
        rows, owner = jnp.arange(self.positions.shape[0])[:, None], jnp.minimum(self.owner, self.heads - 1)
        return codec.fitted(jax.tree.map(lambda x: x[rows, owner], getattr(self.beside[FIT], name)))

    def with_fit(self, fit: Fit, looks: bool) -> Any:
        """The store, which holds plain entries, in the codes of codecs that have fitted this. The last queries go,
        unless somebody `looks` with them."""
        beside = {name: state for name, state in self.beside.items() if looks or name != LOOKS}
        after = self.replaced(beside={**beside, FIT: fit})
        coded = {name: after.codec_of_slots(name) for name in ("keys", "values")}
        old = self.entries
        codes = {
            name: codec.encode_all(getattr(old, name), old.positions) if getattr(self.codecs, name).fits else code
            for (name, codec), code in zip(coded.items(), (old.keys, old.values), strict=True)
        }
        return after.replaced(entries=dataclasses.replace(old, **codes))

    def fitted(self, learned: Any, looks: bool) -> Any:
        """The store behind its first prompt: what its codecs fit is fitted to what is held; as it is, where that has
        been done. `looks` as of `with_fit`."""
        if FIT in self.beside or not self.codecs.fits:
            return self
        seen = self.beside.get(LOOKS)
        fit = self.codecs.fit(self.by_head(), None if seen is None else seen.queries, learned)
        return self.with_fit(fit, looks)

    def by_head(self) -> Entries:
        """The entries by KV head `[B, Hk, S]`, plain."""
        raise NotImplementedError

    def _decoded(self, name: str) -> Float[Array, "B *S D"]:
        return self._exact(name, self.by_codes(name), self.positions, self.owner)

    def by_codes(self, name: str) -> Float[Array, "B *S D"]:
        """The "keys" or "values" that the codes stand for, also of tokens that are read in full precision."""
        return self.codec_of_slots(name).decode(getattr(self.entries, name))

    def _exact(self, name: str, x: Any, positions: Int[Array, "B *S"], owner: Int[Array, "B *S"]) -> Any:
        """Decoded keys or values, with those of the residual window as the model made them."""
        codec = getattr(self.codecs, name)
        if codec.plain:
            return x
        for state in self._windows.values():
            x = state.over(name, x, positions, owner, whole=not codec.apart)
        return x

    @property
    def _windows(self) -> dict[str, Any]:
        """Of what is beside the slots the tokens that are read in full precision."""
        return {name: self.beside[name] for name in WINDOWS if name in self.beside}

    @property
    def heads(self) -> int:
        """Hk, the KV heads."""
        return self.next_slot.shape[-1]

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, as they lie in the slots and in what is held beside them."""
        held = sum(leaf.nbytes for leaf in jax.tree.leaves((self.entries.keys, self.entries.values)))
        return held + sum(state.kv_bytes for state in self.beside.values())

    def replaced(self, **fields: Any) -> Any:
        """The store with other fields."""
        return dataclasses.replace(cast(Any, self), **fields)

    def changed(self, **fields: Any) -> Any:
        """The store with other `keys`, `values` (plain arrays), `positions` or `stats`."""
        positions = fields.get("positions", self.positions)
        for name in ("keys", "values"):
            if name in fields:
                fields[name] = self.codec_of_slots(name).encode_all(fields[name], positions)
        return self.replaced(entries=dataclasses.replace(self.entries, **fields))

    def keeping(self, names: tuple[str, ...]) -> Any:
        """The store with these statistics alone."""
        return self.replaced(entries=self.entries.keeping(names))

    def loose(self) -> Entries:
        """The entries in a form in which each can be moved alone: in codes, but decoded where slots share theirs."""
        entries = self.entries
        if not self.codecs.keys.apart:
            entries = dataclasses.replace(entries, keys=self.keys)
        if not self.codecs.values.apart:
            entries = dataclasses.replace(entries, values=self.values)
        return entries

    def loosened(self, entries: Entries, held: Entries) -> Entries:
        """Plain entries by head in the form of `loose`. Those in front keep the codes that they come from, of the
        entries `held` in that form: what is coded again and again is worn down by some codecs."""

        def code(name: str) -> Any:
            codec, x, old = self.codec(name), getattr(entries, name), getattr(held, name)
            count = held.positions.shape[2]
            if codec.plain or not codec.apart:
                return x
            if not count:
                return codec.encode(x)
            same = alike(codec.decode(old), x[:, :, :count])
            return jax.tree.map(lambda old, new: in_front(same, old, new), old, codec.encode(x))

        return dataclasses.replace(entries, keys=code("keys"), values=code("values"))

    def settling(self, entries: Entries) -> Entries:
        """Entries in the form of `loose` as they lie in the slots."""
        keys, values = (
            x if codec.apart else codec.encode_again(old, x, entries.positions)
            for codec, old, x in (
                (self.codec("keys"), self.entries.keys, entries.keys),
                (self.codec("values"), self.entries.values, entries.values),
            )
        )
        return dataclasses.replace(entries, keys=keys, values=values)

    def plain(self, entries: Entries) -> Entries:
        """Entries by head, in the form of `loose`, as numbers."""
        owner = owners(entries.positions)
        keys, values = (
            self._exact(name, codec.decode(x), entries.positions, owner) if codec.apart else x
            for name, codec, x in (
                ("keys", self.codec("keys"), entries.keys),
                ("values", self.codec("values"), entries.values),
            )
        )
        return dataclasses.replace(entries, keys=keys, values=values)

    def renewed(self, beside: dict[str, Any], entries: Entries, chosen: Bool[Array, "B Hk S"]) -> dict[str, Any]:
        """What is beside the slots, with its windows filled from the chosen ones of plain entries by head."""
        windows = {name: beside[name].filled_from(entries, chosen) for name in WINDOWS if name in beside}
        return {**beside, **windows}

    def absorbing(self, entries: Entries, chosen: Bool[Array, "B Hk S"], absorb: Absorb) -> tuple[Entries, dict]:
        """Entries by head, in the form of `loose`, and what is beside the slots, after those not `chosen` have left."""
        plain = self.plain(entries)
        new, beside = absorb(self.beside, plain, chosen)
        return (entries, beside) if new is plain else (self.loosened(new, entries), self.renewed(beside, new, chosen))

    def reading(self, layout: Layout, rotates: bool, capped: bool, weighs: bool) -> Decoded:
        """How an attention pass reads keys and values, where it turns keys as it reads (`rotates`), where logits are
        `capped` and where it `weighs` entries by their mass. Masses are joined where every head has as many slots, on
        one device; otherwise, and where entries stand for several, one pass reads them all."""
        return reading(
            self._fitted, windows=bool(self._windows), rotates=rotates, capped=capped,
            at_once=self.entries.weight is not None or (weighs and not (self.equal and layout.mesh is None)),
            divided=layout.mesh is not None,
        )  # fmt: skip

    def beside_codes(
        self,
        how: Decoded,
        token: Token,
        implementation: str | None,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> tuple[Float[Array, "B *S"] | None, tuple[Beside, ...]]:
        """What a pass that reads so adds to the logits of every slot, and what lies beside it: where it reads codes,
        tokens of which key or value is read in full precision are a part of their own."""
        states = tuple(self._windows.values())
        if not how.codes or not (states or how.codecs.narrow):
            return self.entries.bias, ()
        active, none = token.position >= 0, jnp.full(self.next_slot.shape, EMPTY, jnp.int32)
        positions = self.seen_by_head(self.put(self.positions, none, active))  # as the token comes there
        left_out, slots = apart(states, positions, self.filled_by_head() & (positions >= 0))
        if self.positions.ndim == 2:
            left_out = jnp.any(left_out, axis=1)
        softmax = {"scale": scale, "softcap": softcap}
        of = {"keys": how.codecs.keys, "values": how.codecs.values}
        lies = {
            name: x
            for (name, codec), x in zip(of.items(), how.lent(self), strict=True)
            if codec.plain or not codec.apart
        }
        parts = []
        for state, at in zip(states, slots, strict=True):
            of_slots = {name: numbers_at(x, at, self.next_slot, implementation) for name, x in lies.items()}
            parts.append(Beside(state.read(token, at >= 0, of_slots, window=window, **softmax), at))
        if how.codecs.narrow:  # the token's own key and value are whole
            left_out = self.put(left_out, jnp.ones_like(none, bool), active)
            key, value, seen = token.key[:, :, None], token.value[:, :, None], active[:, None, None, None]
            part = attend_few(token.query[:, :, None], key, value, seen, group="each", **softmax).now()
            parts.append(Beside(part, jnp.where(active[:, None], self.next_slot, EMPTY)[..., None]))
        return jnp.where(left_out, MASKED, 0.0), tuple(parts)

    def attended(self, how: Decoded, result: Any, token: Token, implementation: str | None) -> Any:
        """The store after an attention pass of this implementation that read it so and wrote the token."""
        keys, values = how.returned(self, result, token)
        entries = dataclasses.replace(self.entries, keys=keys, values=values, positions=result.positions)
        after = self.replaced(entries=entries, next_slot=result.next_slot)
        after = after.seeing(token.key, token.value, token.position)
        return after.encoded(token.position, implementation if how.codes else REFERENCE)

    def written(self, name: str, new: Float[Array, "B Hk D"], position: Int[Array, "B"]) -> Any:
        """The code of keys or values with `new` in every head's next slot; as it is, where slots share theirs."""
        codec, code = self.codec(name), getattr(self.entries, name)
        if not codec.apart:
            return code
        return jax.tree.map(lambda x, new: self.put(x, new, position >= 0), code, codec.encode(new))

    def encoded(self, position: Int[Array, "B"], implementation: str | None = REFERENCE) -> Any:
        """The store after a token at this position, which its window holds. Where slots share their code, a window's
        tokens are encoded together when it has become full; other tokens in those blocks, as they were read before."""
        shared = [name for name in ("keys", "values") if not self.codec(name).apart]
        if not shared:
            return self
        newest = self.beside[WINDOW]
        full = (position >= 0) & ((position + 1) % newest.positions.shape[2] == 0)

        def due() -> Bool[Array, "B Hk C"]:
            return self.entries.filled & newest.holds(self.positions)

        def code(name: str) -> Any:
            def exact(slots, x):
                positions = jnp.take_along_axis(self.positions, slots, axis=2)
                for state in self._windows.values():
                    x = state.over(name, x, positions, owners(positions), whole=False)
                return x, positions >= 0

            return self.codec(name).encode_where(getattr(self.entries, name), full, due, exact, implementation)

        return self.replaced(entries=dataclasses.replace(self.entries, **{name: code(name) for name in shared}))

    def seeing(self, key: Float[Array, "B Hk D"], value: Float[Array, "B Hk D"], position: Int[Array, "B"]) -> Any:
        """The store with a token's exact key and value in its windows; -1 is the position of a row that has none."""
        windows = {name: state.with_token(key, value, position) for name, state in self._windows.items()}
        return self.replaced(beside={**self.beside, **windows})

    def single(self, active: Bool[Array, "B"]) -> Any:
        """The store whose next slots stand for one token, in rows that are active, where entries have weights."""
        weight = self.entries.weight
        if weight is None:
            return self
        one = jnp.ones(self.next_slot.shape, jnp.float32)
        return self.replaced(entries=dataclasses.replace(self.entries, weight=self.put(weight, one, active)))

    def with_token(self, token: Token) -> Any:
        """The store with the token in every head's next slot, without attending; rows that have finished stay."""
        keys, values = (
            self.written(name, new, token.position) for name, new in (("keys", token.key), ("values", token.value))
        )
        at = jnp.broadcast_to(token.position[:, None], self.next_slot.shape)
        positions = self.put(self.positions, at, token.position >= 0)
        entries = dataclasses.replace(self.entries, keys=keys, values=values, positions=positions)
        return self.replaced(entries=entries).seeing(token.key, token.value, token.position).encoded(token.position)

    @property
    def held_plain(self) -> Entries:
        """The entries where they lie, plain."""
        return dataclasses.replace(self.entries, keys=self.keys, values=self.values)

    def seen_by_head(self, x: Shaped[Array, "B *S"]) -> Shaped[Array, "B Hk _"]:
        """What is known of every slot, for each KV head that could own it."""
        return jnp.broadcast_to(x[:, None], (x.shape[0], self.heads, x.shape[1])) if x.ndim == 2 else x

    def filled_by_head(self) -> Bool[Array, "B Hk _"]:
        """Which of these slots are each KV head's own, and filled."""
        heads = jnp.arange(self.heads, dtype=jnp.int32)[:, None]
        return (self.seen_by_head(self.owner) == heads) & self.seen_by_head(self.entries.filled)

    def taking(self, change: Change) -> Any:
        """The store after survivors took up what a token overwrites: one slot of each head, where it lies."""
        flat = self.positions.ndim == 2
        old, code = self.entries, {}
        for name, new in (("keys", change.keys), ("values", change.values)):
            codec, lies = self.codec(name), getattr(old, name)
            put = lambda x, new: placed_at(x, change.slot, new, flat=flat)  # noqa: E731
            if codec.apart:
                code[name] = jax.tree.map(put, lies, codec.encode(new))
            else:
                code[name] = codec.encode_again(lies, put(getattr(self, name), new), self.positions)
        weight = old.weight
        if weight is not None and change.weight is not None:
            weight = placed_at(weight, change.slot, change.weight, flat=flat)
        entries = dataclasses.replace(old, weight=weight, **code)
        return self.replaced(entries=entries, beside=taken_up(self.beside, self.positions, change))

    def put(self, x: Any, new: Any, active: Bool[Array, "B"]) -> Any:
        """`x`, an array over the slots, with `new [B, Hk, ...]` in every head's next slot, in rows that are active."""
        raise NotImplementedError

    def aimed(self, slot: Int[Array, "B Hk"], rows: Bool[Array, "B"] | None = None) -> Any:
        """The store whose next tokens go to `slot`, in these rows."""
        chosen = slot if rows is None else jnp.where(rows[:, None], slot, self.next_slot)
        return self.replaced(next_slot=chosen)
