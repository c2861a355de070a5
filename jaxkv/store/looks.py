"""A layer's last queries, for scores that look with them at every cut."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LOOKS = "looks"  # the name under which they lie beside the slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Looks:
    """The queries of the last W tokens seen, turned to their positions, the newest last; 0 where there were fewer."""

    queries: Float[Array, "B Hq W D"]

    attends: ClassVar[bool] = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of the queries: they are held as keys are."""
        return self.queries.nbytes

    def with_many(self, queries: Float[Array, "B Hq T D"], positions: Int[Array, "B T"]) -> "Looks":
        """After a block of a prompt, whose padding (position -1) stands in front."""
        width, length = self.queries.shape[2], queries.shape[2]
        both = jnp.concatenate([self.queries, queries.astype(self.queries.dtype)], axis=2)
        real = jnp.sum(positions >= 0, axis=1, dtype=jnp.int32)[:, None]
        back = jnp.arange(width, 0, -1, dtype=jnp.int32)[None]  # 1: the newest
        at = width + length - back - jnp.where(back > real, length - real, 0)  # over the padding to what was there
        return Looks(jnp.take_along_axis(both, at[:, None, :, None], axis=2))

    def with_one(self, query: Float[Array, "B Hq D"], active: Bool[Array, "B"]) -> "Looks":
        """After a decode step of the rows that are active."""
        after = jnp.concatenate([self.queries[:, :, 1:], query[:, :, None].astype(self.queries.dtype)], axis=2)
        return Looks(jnp.where(active[:, None, None, None], after, self.queries))


def empty(batch: int, heads: int, width: int, head_dim: int, dtype: Any) -> Looks:
    """No queries yet."""
    return Looks(jnp.zeros((batch, heads, width, head_dim), dtype))
