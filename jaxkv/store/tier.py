"""A second tier: slots of lower precision for the entries that leave the first, the best of them or the newest."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.sharding.attention import decode_attend_score
from jaxkv.sharding.layout import Layout
from jaxkv.store import balance
from jaxkv.store.aside import Aside
from jaxkv.store.balance import Balance
from jaxkv.store.codecs import Codecs
from jaxkv.store.entries import EMPTY, WORTH, Entries, appended, best_of_each, blank, chosen_at, packed
from jaxkv.store.reading import AsCodes
from pallas_kernels.arguments import Held, Judge, Token
from pallas_kernels.partial import Partial, attend_few

FINITE = float(jnp.finfo(jnp.float32).max)  # what was protected is worth so much


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tier(Aside):
    """N slots per KV head, coded by `codecs`. Of what comes in the N newest entries stay; or, where entries have the
    statistic `worth`, the N of highest worth, of equals the older. Keys and values may be balanced before."""

    entries: Entries  # [B, Hk, N]
    keys: Balance | None = None
    values: Balance | None = None
    codecs: Codecs = dataclasses.field(default=Codecs(), metadata={"static": True})

    @property
    def kv_bytes(self) -> int:
        """Bytes of the codes of keys and values, and of the factors and centres that balance them."""
        factors = [(x.factor, x.centre) for x in (self.keys, self.values) if x is not None]
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.entries.keys, self.entries.values, factors)))

    def coded(self, plain: Entries) -> Entries:
        """Plain entries in this tier's codes, with what it ranks them by."""
        stats = {name: jnp.clip(plain.stats[name], -FINITE, FINITE) for name in self.entries.stats}
        keys = plain.keys if self.keys is None else self.keys.applied(plain.keys).astype(plain.keys.dtype)
        values = plain.values if self.values is None else self.values.applied(plain.values).astype(plain.values.dtype)
        return Entries(self.codecs.keys.encode(keys), self.codecs.values.encode(values), plain.positions, stats)

    def decoded(self) -> tuple[Float[Array, "B Hk N D"], Float[Array, "B Hk N D"]]:
        """Keys and values as they were, but for what the codes leave out."""
        keys, values = self.codecs.keys.decode(self.entries.keys), self.codecs.values.decode(self.entries.values)
        keys = keys if self.keys is None else self.keys.undone(keys)
        return keys, values if self.values is None else self.values.undone(values)

    def with_many(self, lost: Entries) -> "Tier":
        """The tier after a cut: the best of its entries and the `lost [B, Hk, S]` ones, in time order."""
        slots = self.entries.positions.shape[-1]
        both = appended(self.entries, self.coded(lost))
        order = jnp.argsort(both.positions, axis=-1, stable=True)
        worth, positions = (jnp.take_along_axis(x, order, axis=-1) for x in (_worth(both), both.positions))
        stay = packed(best_of_each(worth, positions, jnp.full(positions.shape[:1], slots, jnp.int32)), slots)
        kept = jnp.where(stay < 0, EMPTY, jnp.take_along_axis(order, jnp.maximum(stay, 0), axis=-1))
        return dataclasses.replace(self, entries=chosen_at(both, kept))

    def with_one(self, lost: Entries) -> "Tier":
        """The tier after an overwrite: the `lost [B, Hk, 1]` entry (position -1: none) takes an empty slot, or the
        place of the worst one, unless it is worse itself."""
        held, new = self.entries, self.coded(lost)
        worth = jnp.where(held.filled, _worth(held), -jnp.inf)
        least = jnp.min(worth, axis=-1, keepdims=True)
        late = jnp.where(worth == least, held.positions, -2)
        slot, youngest = jnp.argmax(late, axis=-1), jnp.max(late, axis=-1, keepdims=True)
        own = _worth(new)
        comes = new.filled & ((own > least) | ((own == least) & (new.positions < youngest)))
        at = (
            jnp.arange(worth.shape[0])[:, None],
            jnp.arange(worth.shape[1])[None, :],
            jnp.where(comes[..., 0], slot, worth.shape[2]),  # out of range, so dropped
        )
        entries = jax.tree.map(lambda old, x: old.at[at].set(x[:, :, 0], mode="drop"), held, new)
        return dataclasses.replace(self, entries=entries)

    def attend(
        self, query: Float[Array, "B Hq T D"], position: Int[Array, "B T"], *, scale: float, softcap: float | None
    ) -> Partial:
        """Attention to the tier's entries alone, decoded as they are read."""
        seen = self.entries.filled[:, :, None] & (position >= 0)[:, None, :, None]
        keys, values = self.decoded()
        return attend_few(query, keys, values, seen, scale=scale, softcap=softcap)

    def step(
        self,
        layout: Layout,
        query: Float[Array, "B Hq D"],
        position: Int[Array, "B"],
        implementation: str | None,
        **softmax: Any,
    ) -> tuple[Partial, "Tier"]:
        """The attention of one token, which reads the codes where they lie if they are `readable`. What the balance of
        keys does, the query takes, and its level the log-sum-exp, unless logits are capped; that of values is undone
        behind."""
        level = None if self.keys is None else self.keys.level(query)
        if not self.codecs.readable or (softmax["softcap"] is not None and level is not None):
            return super().step(layout, query, position, implementation, **softmax)
        how, (batch, heads, slots) = AsCodes(self.codecs), self.entries.positions.shape
        none = jnp.zeros((batch, heads, query.shape[-1]), query.dtype)  # no token comes: its slot is out of range
        asked = query if self.keys is None else self.keys.ask(query).astype(query.dtype)
        token, nowhere = Token(asked, none, none, position), jnp.full((batch, heads), slots, jnp.int32)
        rows = jnp.zeros(batch, jnp.int32)
        held, nobody = Held(*how.lent(self), self.entries.positions), Judge(rows, rows)
        result = decode_attend_score(
            layout, how.asked(token), held, nowhere, nobody, rotate=None, window=None, implementation=implementation,
            with_mass=False, **softmax,
        )  # fmt: skip
        part = how.answered(token, result, softmax["scale"])
        output = part.output if self.values is None else self.values.read(part.output).astype(query.dtype)
        lse = part.lse if level is None else part.lse + softmax["scale"] * level
        keys, values = how.returned(self, result, token)
        entries = dataclasses.replace(self.entries, keys=keys, values=values)
        return Partial(output, lse), dataclasses.replace(self, entries=entries)


def _worth(entries: Entries) -> Float[Array, "B Hk S"]:
    """What entries are ranked by: their worth, where they have one, else their position."""
    return entries.stats.get(WORTH, entries.positions.astype(jnp.float32))


def empty(
    batch: int,
    heads: int,
    slots: int,
    head_dim: int,
    dtype: jnp.dtype,
    codecs: Codecs,
    *,
    ranked: bool = False,
    balanced: tuple[bool, bool] = (False, False),
    centred: bool = False,
) -> Tier:
    """A tier of empty slots, `ranked` by worth or by position, with keys and values `balanced` or not, around centres
    of their own or around 0. Raises `BadValue` where heads of this width have no code."""
    codecs.check(head_dim)
    shape = (batch, heads, slots)
    keys, values = (codec.empty(shape, head_dim, dtype) for codec in (codecs.keys, codecs.values))
    by_key, by_value = (balance.empty(batch, heads, head_dim, centred) if some else None for some in balanced)
    return Tier(blank(shape, keys, values, (WORTH,) if ranked else ()), by_key, by_value, codecs)
