"""The rest: the mean key and value of what a head has dropped, which takes part in the softmax for all of it."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from pallas_kernels import rest as kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rest:
    """Means of the keys (as they lay in the cache) and values dropped by each KV head, and of how many they are.

    The compensation token of RazorAttention (arXiv 2407.15891). The count is its weight in the softmax.
    """

    keys: Float[Array, "B Hk D"]
    values: Float[Array, "B Hk D"]
    count: Float[Array, "B Hk"]

    @property
    def arrays(self) -> kernel.Rest:
        """As the kernels take it."""
        return self.keys, self.values, self.count

    @property
    def kv_bytes(self) -> int:
        """Bytes of its keys and values."""
        return self.keys.nbytes + self.values.nbytes


def empty(batch: int, heads: int, head_dim: int) -> Rest:
    """Nothing dropped so far."""
    means = jnp.zeros((batch, heads, head_dim), jnp.float32)
    return Rest(means, means, jnp.zeros((batch, heads), jnp.float32))


def added(
    rest: Rest, keys: Shaped[Array, "B #Hk S D"], values: Shaped[Array, "B #Hk S D"], dropped: Bool[Array, "B Hk S"]
) -> Rest:
    """The rest with the dropped entries among these in it; as it was, where there are none.

    mean + (new mean - mean) m / (n + m), so that sums never grow with the text.
    """
    new = jnp.sum(dropped, axis=-1, dtype=jnp.float32)
    count = rest.count + new
    part = (new / jnp.maximum(count, 1.0))[..., None]

    def mean(old: Float[Array, "B Hk D"], x: Shaped[Array, "B #Hk S D"]) -> Float[Array, "B Hk D"]:
        total = jnp.sum(jnp.where(dropped[..., None], x.astype(jnp.float32), 0.0), axis=2)
        return old + (total / jnp.maximum(new, 1.0)[..., None] - old) * part

    return Rest(mean(rest.keys, keys), mean(rest.values, values), count)
