"""The rest: one key and value per KV head that stand for many, joined to a softmax over slots by log-sum-exps."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.masking import soft_cap

Rest = tuple[Float[Array, "B Hk D"], Float[Array, "B Hk D"], Float[Array, "B Hk"]]  # keys, values, of how many


def with_rest(
    output: Float[Array, "B Hq *T D"],
    lse: Float[Array, "B Hq *T"],
    query: Float[Array, "B Hq *T D"],
    rest: Rest,
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B Hq *T D"]:
    """(n exp(q . k scale) v + exp(lse) output) / (n exp(q . k scale) + exp(lse)), with the rest's k, v and count n.

    Every query comes after all that the rest stands for. The output as it is where n is 0 and for a query that saw no
    slot, which is padding or of a row that has finished.
    """
    keys, values, count = rest
    by_head = lambda x: x.reshape(*count.shape, -1, *x.shape[lse.ndim :])  # noqa: E731
    slots, top, query = (by_head(x).astype(jnp.float32) for x in (output, lse, query))
    logits = soft_cap(jnp.einsum("bhnd,bhd->bhn", query, keys) * scale, softcap)
    above = logits + jnp.log(jnp.maximum(count, 1.0))[..., None] - top
    share, kept = jax.nn.sigmoid(above)[..., None], jax.nn.sigmoid(-above)[..., None]
    joined = (kept * slots + share * values[:, :, None]).astype(output.dtype)
    some = (count[..., None] > 0) & (top > -jnp.inf)
    return jnp.where(some.reshape(lse.shape)[..., None], joined.reshape(output.shape), output)
