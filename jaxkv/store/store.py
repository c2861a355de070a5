"""What every store has: the entries of one layer, where the next token goes, and what is held beside the slots.

A store is `Slots` (every KV head has as many), a `Pool` (the heads share the layer's), or a layer's `View` of the
model's line (the layers share). What a policy computes of every slot it computes in the store's *scored form*,
`[B, H, S]`: `[B, Hk, C]` of slots, `[B, 1, P]` of a pool, as of one long head.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv.store.codecs import Codecs
from jaxkv.store.entries import Entries
from pallas_kernels.arguments import Token

Worth = Callable[[Any], Float[Array, "B *S"]]  # of a store's slots
# of worth, positions and the KV head of every slot, and how many entries each head shall keep on average: which stay
Choose = Callable[[Float[Array, "B *S"], Int[Array, "B *S"], Int[Array, "B *S"], Int[Array, "B"]], Bool[Array, "B *S"]]
# of what is held beside the slots, plain entries by head, and which of them stay: the survivors, and what is beside
Absorb = Callable[[dict[str, Any], Entries, Bool[Array, "B Hk S"]], tuple[Entries, dict[str, Any]]]


class Store:
    """What the three kinds share."""

    entries: Entries
    next_slot: Int[Array, "B Hk"]
    beside: dict[str, Any]
    codecs: Codecs

    @property
    def positions(self) -> Int[Array, "B *S"]:
        """The text position of every slot, -1 where it is empty."""
        return self.entries.positions

    @property
    def stats(self) -> dict[str, Float[Array, "B *S"]]:
        """The policy's statistics of every slot."""
        return self.entries.stats

    @property
    def keys(self) -> Float[Array, "B *S D"]:
        """The keys, decoded where a codec holds them."""
        return self.codecs.keys.decode(self.entries.keys)

    @property
    def values(self) -> Float[Array, "B *S D"]:
        """The values, decoded where a codec holds them."""
        return self.codecs.values.decode(self.entries.values)

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
        for name, codec in (("keys", self.codecs.keys), ("values", self.codecs.values)):
            if name in fields:
                fields[name] = codec.encode(fields[name])
        return self.replaced(entries=dataclasses.replace(self.entries, **fields))

    def holding(self, entries: Entries, **fields: Any) -> Any:
        """The store with other entries, given plain."""
        return self.replaced(entries=self.encoded(entries), **fields)

    def keeping(self, names: tuple[str, ...]) -> Any:
        """The store with these statistics alone."""
        return self.replaced(entries=self.entries.keeping(names))

    def plain(self, entries: Entries) -> Entries:
        """Entries of this store with keys and values decoded."""
        keys, values = self.codecs.keys.decode(entries.keys), self.codecs.values.decode(entries.values)
        return dataclasses.replace(entries, keys=keys, values=values)

    def encoded(self, entries: Entries) -> Entries:
        """Plain entries in this store's codes."""
        keys, values = self.codecs.keys.encode(entries.keys), self.codecs.values.encode(entries.values)
        return dataclasses.replace(entries, keys=keys, values=values)

    def absorbing(self, entries: Entries, chosen: Bool[Array, "B Hk S"], absorb: Absorb) -> tuple[Entries, dict]:
        """Coded entries by head and what is beside the slots, after the entries not `chosen` have left."""
        plain = self.plain(entries)
        new, beside = absorb(self.beside, plain, chosen)
        return entries if new is plain else self.encoded(new), beside

    def attended(self, result: Any, token: Token) -> Any:
        """The store after an attention pass that wrote the token into plain keys and values."""
        keys, values = (
            getattr(result, name)
            if codec.plain
            else jax.tree.map(lambda x, new: self.put(x, new, token.position >= 0), code, codec.encode(new))
            for name, codec, code, new in (
                ("keys", self.codecs.keys, self.entries.keys, token.key),
                ("values", self.codecs.values, self.entries.values, token.value),
            )
        )
        entries = dataclasses.replace(self.entries, keys=keys, values=values, positions=result.positions)
        return self.replaced(entries=entries, next_slot=result.next_slot)

    def single(self, active: Bool[Array, "B"]) -> Any:
        """The store whose next slots stand for one token, in rows that are active, where entries have weights."""
        weight = self.entries.weight
        if weight is None:
            return self
        one = jnp.ones(self.next_slot.shape, jnp.float32)
        return self.replaced(entries=dataclasses.replace(self.entries, weight=self.put(weight, one, active)))

    def with_token(self, token: Token) -> Any:
        """The store with the token in every head's next slot, without attending; rows that have finished stay."""
        active = token.position >= 0
        put = lambda x, new: self.put(x, new, active)  # noqa: E731
        new = self.codecs.keys.encode(token.key), self.codecs.values.encode(token.value)
        keys, values = jax.tree.map(put, (self.entries.keys, self.entries.values), new)
        at = jnp.broadcast_to(token.position[:, None], self.next_slot.shape)
        entries = dataclasses.replace(self.entries, keys=keys, values=values, positions=put(self.positions, at))
        return self.replaced(entries=entries)

    def put(self, x: Any, new: Any, active: Bool[Array, "B"]) -> Any:
        """`x`, an array over the slots, with `new [B, Hk, ...]` in every head's next slot, in rows that are active."""
        raise NotImplementedError

    def aimed(self, slot: Int[Array, "B Hk"], rows: Bool[Array, "B"] | None = None) -> Any:
        """The store whose next tokens go to `slot`, in these rows."""
        chosen = slot if rows is None else jnp.where(rows[:, None], slot, self.next_slot)
        return self.replaced(next_slot=chosen)
