"""Residual slots: a few entries per KV head of which each is the mean of many that have left."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.store.aside import Aside
from jaxkv.store.entries import Entries
from pallas_kernels.partial import Partial, attend_few


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residue(Aside):
    """Means of the keys (as they lay in the cache) and values that M residual slots per KV head have taken up, and of
    how many they are (0: empty). Source: ZSMerge (arXiv 2503.10714)."""

    keys: Float[Array, "B Hk M D"]
    values: Float[Array, "B Hk M D"]
    count: Float[Array, "B Hk M"]
    share: float = dataclasses.field(default=1.0, metadata={"static": True})  # of log n that a logit gets

    @property
    def kv_bytes(self) -> int:
        """Bytes of its keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def added(self, lost: Entries) -> "Residue":
        """The slots with the `lost [B, Hk, S]` entries, which stand in time order, in them: divided over those that are
        empty, in equal runs, the first of them one longer where it does not come out even; where none is, each in the
        slot of the largest product of keys."""
        slots, gone = self.count.shape[-1], lost.filled
        keys, values = (jnp.where(gone[..., None], x.astype(jnp.float32), 0.0) for x in (lost.keys, lost.values))
        alike = jnp.einsum("bhsd,bhmd->bhsm", keys, self.keys, precision=lax.Precision.HIGHEST)
        target = jnp.argmax(alike, axis=-1).astype(jnp.int32)
        target = jnp.where(jnp.any(self.count == 0, axis=-1, keepdims=True), self._runs(lost), target)
        one = gone if lost.weight is None else jnp.where(gone, lost.weight, 0.0)
        joins = jax.nn.one_hot(jnp.where(gone, target, slots), slots) * one.astype(jnp.float32)[..., None]
        new = jnp.sum(joins, axis=2)
        count = self.count + new
        part = (new / jnp.maximum(count, 1.0))[..., None]

        def mean(old: Float[Array, "B Hk M D"], x: Float[Array, "B Hk S D"]) -> Float[Array, "B Hk M D"]:
            total = jnp.einsum("bhsm,bhsd->bhmd", joins, x, precision=lax.Precision.HIGHEST)
            return old + (total / jnp.maximum(new, 1.0)[..., None] - old) * part

        return dataclasses.replace(self, keys=mean(self.keys, keys), values=mean(self.values, values), count=count)

    def _runs(self, lost: Entries) -> Int[Array, "B Hk S"]:
        """The empty slot of each entry, by its place among those that leave."""
        empty, gone = self.count == 0, lost.filled
        free = jnp.maximum(jnp.sum(empty, axis=-1, keepdims=True, dtype=jnp.int32), 1)
        order = jnp.argsort(~empty, axis=-1, stable=True).astype(jnp.int32)
        place = jnp.cumsum(gone, axis=-1, dtype=jnp.int32) - 1
        size, longer = jnp.divmod(jnp.sum(gone, axis=-1, keepdims=True, dtype=jnp.int32), free)
        ahead = longer * (size + 1)
        run = jnp.where(place < ahead, place // (size + 1), longer + (place - ahead) // jnp.maximum(size, 1))
        return jnp.take_along_axis(order, jnp.clip(run, 0, order.shape[-1] - 1), axis=-1)

    def attend(
        self, query: Float[Array, "B Hq T D"], position: Int[Array, "B T"], *, scale: float, softcap: float | None
    ) -> Partial:
        """Attention to the residual slots alone, older than every query: `share` log n is added to each logit."""
        seen = (self.count > 0)[:, :, None] & (position >= 0)[:, None, :, None]
        return attend_few(query, self.keys, self.values, seen, self.count**self.share, scale=scale, softcap=softcap)


def empty(batch: int, heads: int, slots: int, head_dim: int, share: float) -> Residue:
    """Nothing taken up so far."""
    means = jnp.zeros((batch, heads, slots, head_dim), jnp.float32)
    return Residue(means, means, jnp.zeros((batch, heads, slots), jnp.float32), share)
