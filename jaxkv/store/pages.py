"""An index of pages: the lowest and highest key of every page of adjacent slots, channel by channel.

Where pages lie beside them, a head's entries begin with the first slot: so a page holds the same entries, however many
slots there are for other rows, for tokens to come, or for a mesh to divide.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

PAGES = "pages"  # the name under which it lies beside the slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """`low` and `high` of the keys in each of P pages of `size` slots; +inf and -inf of an empty one. `group` query
    heads ask for those of a KV head.

    An overwrite only widens a page's range, so the bound of `score` holds whatever is evicted; after a cut, which moves
    entries to other pages, the index is made anew.
    """

    low: Float[Array, "B Hk P D"]
    high: Float[Array, "B Hk P D"]
    size: int = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})

    attends: ClassVar[bool] = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of the index."""
        return self.low.nbytes + self.high.nbytes

    def with_key(self, slot: Int[Array, "B Hk"], key: Float[Array, "B Hk D"], comes: Bool[Array, "B _"]) -> "Pages":
        """The index after a key went into each head's slot, where it `comes`."""
        pages = self.low.shape[2]
        rows, heads = jnp.arange(slot.shape[0])[:, None], jnp.arange(slot.shape[1])[None, :]
        at = (rows, heads, jnp.where(comes, slot // self.size, pages))  # out of range, so dropped
        low = self.low.at[at].min(key.astype(self.low.dtype), mode="drop")
        return dataclasses.replace(self, low=low, high=self.high.at[at].max(key.astype(self.high.dtype), mode="drop"))

    def covering(self, slots: int) -> "Pages":
        """The index of so many slots, of which those that are new lie behind the others and are empty."""
        more = ((0, 0), (0, 0), (0, -(-slots // self.size) - self.low.shape[2]), (0, 0))
        low, high = (jnp.pad(x, more, constant_values=end) for x, end in ((self.low, jnp.inf), (self.high, -jnp.inf)))
        return dataclasses.replace(self, low=low, high=high)

    def score(self, query: Float[Array, "B Hq D"]) -> Float[Array, "B Hk G P"]:
        """sum_d max(q_d low_d, q_d high_d) for each query head, which no key of the page exceeds in q . k. -inf for an
        empty page. Source: Quest (arXiv 2406.10774)."""
        batch, heads, _, dim = self.low.shape
        grouped = query.astype(jnp.float32).reshape(batch, heads, -1, 1, dim)
        some = jnp.isfinite(self.low[..., :1].astype(jnp.float32)) & (self.low[..., :1] <= self.high[..., :1])
        low, high = (jnp.where(some, x, jnp.zeros((), x.dtype)).astype(jnp.float32) for x in (self.low, self.high))
        bound = jnp.sum(jnp.maximum(grouped * low[:, :, None], grouped * high[:, :, None]), axis=-1)
        return jnp.where(some[:, :, None, :, 0], bound, -jnp.inf)

    def of(self, keys: Float[Array, "B Hk C D"], positions: Int[Array, "B Hk C"]) -> "Pages":
        """The index of these slots in its place; the last page may be shorter."""
        batch, heads, slots, dim = keys.shape
        more = -slots % self.size
        filled = jnp.pad(positions >= 0, ((0, 0), (0, 0), (0, more)))[..., None]
        keys = jnp.pad(keys, ((0, 0), (0, 0), (0, more), (0, 0)))
        paged = lambda x: x.reshape(batch, heads, (slots + more) // self.size, self.size, dim)  # noqa: E731
        ends = (jnp.asarray(end, keys.dtype) for end in (jnp.inf, -jnp.inf))
        low, high = (paged(jnp.where(filled, keys, end)) for end in ends)
        return dataclasses.replace(self, low=jnp.min(low, axis=3), high=jnp.max(high, axis=3))


def empty(batch: int, kv_heads: int, dim: int, dtype: Any, *, size: int, group: int) -> Pages:
    """The index of no slot."""
    none = jnp.zeros((batch, kv_heads, 0, dim), dtype)
    return Pages(none, none, size, group)
