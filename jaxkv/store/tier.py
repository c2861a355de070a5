"""A second tier: slots of lower precision for the entries that leave the first, the newest of them."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.store.codecs import Codecs
from jaxkv.store.entries import Entries, appended, best_of_each, blank, chosen_at, packed
from pallas_kernels.partial import Partial, attend_few


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tier:
    """N slots per KV head, coded by `codecs`; of what comes in, the N newest entries stay."""

    entries: Entries  # [B, Hk, N]
    codecs: Codecs = dataclasses.field(metadata={"static": True})

    attends: ClassVar[bool] = True

    @property
    def kv_bytes(self) -> int:
        """Bytes of the codes of keys and values."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.entries.keys, self.entries.values)))

    def coded(self, keys: Float[Array, "B Hk S D"], values: Float[Array, "B Hk S D"], positions: Array) -> Entries:
        """Plain entries in this tier's codes."""
        return Entries(self.codecs.keys.encode(keys), self.codecs.values.encode(values), positions, {})

    def with_many(self, lost: Entries) -> "Tier":
        """The tier after a cut: the newest of its entries and the `lost [B, Hk, S]` ones, in time order."""
        slots = self.entries.positions.shape[-1]
        new = self.coded(lost.keys, lost.values, lost.positions)
        both = appended(self.entries, new)
        count = jnp.full(both.positions.shape[:1], slots, jnp.int32)
        stay = best_of_each(both.positions.astype(jnp.float32), both.positions, count)
        kept = chosen_at(both, packed(stay, slots))
        order = jnp.argsort(kept.positions, axis=-1, stable=True)
        return dataclasses.replace(self, entries=chosen_at(kept, order))

    def with_one(self, lost: Entries) -> "Tier":
        """The tier after an overwrite: the `lost [B, Hk, 1]` entry (position -1: none) takes the place of the oldest
        one, or an empty slot, unless it is older itself."""
        held = self.entries.positions
        slot = jnp.argmin(held, axis=-1)
        oldest = jnp.min(held, axis=-1)
        new = self.coded(lost.keys, lost.values, lost.positions)
        comes = (lost.positions[..., 0] > oldest) & (lost.positions[..., 0] >= 0)
        at = (
            jnp.arange(held.shape[0])[:, None],
            jnp.arange(held.shape[1])[None, :],
            jnp.where(comes, slot, held.shape[2]),  # out of range, so dropped
        )
        entries = jax.tree.map(lambda old, x: old.at[at].set(x[:, :, 0], mode="drop"), self.entries, new)
        return dataclasses.replace(self, entries=entries)

    def attend(
        self, query: Float[Array, "B Hq T D"], position: Int[Array, "B T"], *, scale: float, softcap: float | None
    ) -> Partial:
        """Attention to the tier's entries alone, all older than every query, decoded as they are read."""
        seen = self.entries.filled[:, :, None] & (position >= 0)[:, None, :, None]
        keys, values = self.codecs.keys.decode(self.entries.keys), self.codecs.values.decode(self.entries.values)
        return attend_few(query, keys, values, seen, scale=scale, softcap=softcap)


def empty(batch: int, heads: int, slots: int, head_dim: int, dtype: jnp.dtype, codecs: Codecs) -> Tier:
    """A tier of empty slots. Raises `BadValue` where heads of this width have no code."""
    codecs.check(head_dim)
    shape = (batch, heads, slots)
    keys, values = (codec.empty(shape, head_dim, dtype) for codec in (codecs.keys, codecs.values))
    return Tier(blank(shape, keys, values, ()), codecs)
