"""A summary of what was dropped: its mean key and value, which take part in the softmax for all of it."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxkv.store.aside import Aside
from pallas_kernels.partial import Partial, attend_few


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summary(Aside):
    """Means of the keys (as they lay in the cache) and values dropped by each KV head, and of how many they are.

    The compensation token of RazorAttention (arXiv 2407.15891). The count is its weight in the softmax.
    """

    keys: Float[Array, "B Hk D"]
    values: Float[Array, "B Hk D"]
    count: Float[Array, "B Hk"]

    @property
    def kv_bytes(self) -> int:
        """Bytes of its keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def added(
        self, keys: Shaped[Array, "B #Hk S D"], values: Shaped[Array, "B #Hk S D"], dropped: Float[Array, "B Hk S"]
    ) -> "Summary":
        """The summary with the dropped entries among these in it, each for as many tokens as it stands for (0: not
        dropped); as it was, where there are none.

        mean + (new mean - mean) m / (n + m), so that sums never grow with the text.
        """
        new = jnp.sum(dropped, axis=-1)
        count = self.count + new
        part = (new / jnp.maximum(count, 1.0))[..., None]

        def mean(old: Float[Array, "B Hk D"], x: Shaped[Array, "B #Hk S D"]) -> Float[Array, "B Hk D"]:
            times = dropped[..., None]
            total = jnp.sum(jnp.where(times > 0, times * x.astype(jnp.float32), 0.0), axis=2)
            return old + (total / jnp.maximum(new, 1.0)[..., None] - old) * part

        return Summary(mean(self.keys, keys), mean(self.values, values), count)

    def attend(
        self, query: Float[Array, "B Hq T D"], position: Int[Array, "B T"], *, scale: float, softcap: float | None
    ) -> Partial:
        """Attention to it alone: one key that stands for `count` tokens, all older than every query."""
        seen = (self.count[..., None, None] > 0) & (position >= 0)[:, None, :, None]
        one = self.keys[:, :, None], self.values[:, :, None]
        return attend_few(query, *one, seen, self.count[..., None], scale=scale, softcap=softcap)


def empty(batch: int, heads: int, head_dim: int) -> Summary:
    """Nothing dropped so far."""
    means = jnp.zeros((batch, heads, head_dim), jnp.float32)
    return Summary(means, means, jnp.zeros((batch, heads), jnp.float32))
