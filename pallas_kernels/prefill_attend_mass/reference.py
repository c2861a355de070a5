"""prefill_attend_mass in plain jnp: the meaning that every kernel must equal."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.masking import masked_softmax, soft_cap, visible

CHUNK = 256  # queries at a time: there is never a T x T array


def prefill_attend_mass(
    queries: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    reduce: str = "sum",
) -> Float[Array, "B Hq S"]:
    """Each key's softmax weight, summed over the queries ("sum"), averaged ("mean") or their maximum ("max"), float32.

    Queries at position -1 are padding: they give nothing and the mean does not count them.
    """
    batch, heads, length, dim = queries.shape
    kv_heads = keys.shape[1]
    combine = jnp.maximum if reduce == "max" else jnp.add

    def mass(q, at):
        q = q.reshape(batch, kv_heads, heads // kv_heads, q.shape[2], dim)
        logits = jnp.einsum("bhgtd,bhsd->bhgts", q, keys, preferred_element_type=jnp.float32) * scale
        seen = visible(at[:, None, :], key_positions, window)[:, :, None]
        weights, _ = masked_softmax(soft_cap(logits, softcap), seen)
        total = jnp.max(weights, axis=3) if reduce == "max" else jnp.sum(weights, axis=3)
        return total.reshape(batch, heads, -1)

    whole, rest = divmod(length, CHUNK)
    total = jnp.zeros((batch, heads, keys.shape[2]), jnp.float32)
    if rest:
        total = mass(queries[:, :, whole * CHUNK :], query_positions[:, whole * CHUNK :])
    if whole:
        q = jnp.moveaxis(queries[:, :, : whole * CHUNK].reshape(batch, heads, whole, CHUNK, dim), 2, 0)
        at = jnp.moveaxis(query_positions[:, : whole * CHUNK].reshape(batch, whole, CHUNK), 1, 0)
        total, _ = lax.scan(lambda so_far, pair: (combine(so_far, mass(*pair)), None), total, (q, at))
    if reduce == "mean":
        count = jnp.sum(query_positions >= 0, axis=-1, dtype=jnp.float32)
        total = total / jnp.maximum(count, 1.0)[:, None, None]
    return total
