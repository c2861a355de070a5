"""prefill_attend_mass in plain jnp: the meaning that every kernel must equal."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.masking import masked_softmax, soft_cap, visible

TILE = 256  # queries at a time, at least: bounds the [queries, keys] array and skips keys that come later
TILES = 8  # at most: each is unrolled


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
    own_keys_last: bool = False,
    weights: Float[Array, "B T"] | None = None,
) -> Float[Array, "B Hq S"]:
    """Each key's softmax weight, summed over the queries ("sum"), averaged ("mean") or their maximum ("max"), float32.

    Queries at position -1 are padding: they give nothing and the mean does not count them. `own_keys_last` says that
    the last T keys are the queries' own, in order, so that none need look further. `weights` (positive) multiply what
    each query gives, before the sum or the maximum.
    """
    batch, heads, length, dim = queries.shape
    kv_heads = keys.shape[1]
    combine = jnp.maximum if reduce == "max" else jnp.add

    def mass(q, at, far, each):
        q = q.reshape(batch, kv_heads, heads // kv_heads, q.shape[2], dim)
        logits = jnp.einsum("bhgtd,bhsd->bhgts", q, keys[:, :, :far], preferred_element_type=jnp.float32) * scale
        seen = visible(at[:, None, :], key_positions[:, :, :far], window)[:, :, None]
        given, _ = masked_softmax(soft_cap(logits, softcap), seen)
        given = given if each is None else given * each[:, None, None, :, None]
        total = jnp.max(given, axis=3) if reduce == "max" else jnp.sum(given, axis=3)
        return total.reshape(batch, heads, -1)

    size, slots = max(TILE, -(-length // TILES)), keys.shape[2]
    total = jnp.zeros((batch, heads, slots), jnp.float32)
    for start in range(0, length, size):
        end = min(start + size, length)
        far = slots - length + end if own_keys_last else slots
        each = None if weights is None else weights[:, start:end]
        some = mass(queries[:, :, start:end], query_positions[:, start:end], far, each)
        total = combine(total, jnp.pad(some, ((0, 0), (0, 0), (0, slots - far))))
    if reduce == "mean":
        count = jnp.sum(query_positions >= 0, axis=-1, dtype=jnp.float32)
        total = total / jnp.maximum(count, 1.0)[:, None, None]
    return total
