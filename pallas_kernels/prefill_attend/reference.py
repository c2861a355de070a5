"""prefill_attend in plain jnp: the meaning that every kernel must equal."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.masking import filled, masked_softmax, soft_cap, visible

TILE = 128  # queries at a time, at least: bounds the [queries, keys] array and skips keys that come later
TILES = 8  # at most: each is unrolled


def prefill_attend(
    queries: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"],
    values: Float[Array, "B Hk S D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    own_keys_last: bool = False,
) -> Float[Array, "B Hq T D"]:
    """softmax(scale * q . k) v over the keys at or before each query's position; position -1 is an empty slot.

    `own_keys_last` says that the last T keys are the queries' own, in order, so that none need look further.
    """
    batch, heads, length, dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    group = heads // kv_heads
    values = filled(values, key_positions)
    grouped = queries.reshape(batch, kv_heads, group, length, dim)

    def some(start: int, end: int):
        far = slots - length + end if own_keys_last else slots
        q = grouped[:, :, :, start:end].reshape(batch, kv_heads, group * (end - start), dim)
        logits = jnp.einsum("bhqd,bhsd->bhqs", q, keys[:, :, :far], preferred_element_type=jnp.float32) * scale
        seen = visible(query_positions[:, None, start:end], key_positions[:, :, :far], window)[:, :, None]
        logits = soft_cap(logits, softcap).reshape(batch, kv_heads, group, end - start, far)
        weights, _ = masked_softmax(logits, seen)
        weights = weights.astype(values.dtype).reshape(batch, kv_heads, group * (end - start), far)
        out = jnp.einsum("bhqs,bhsd->bhqd", weights, values[:, :, :far], preferred_element_type=jnp.float32)
        return out.astype(queries.dtype).reshape(batch, kv_heads, group, end - start, dim)

    size = max(TILE, -(-length // TILES))
    tiles = [some(start, min(start + size, length)) for start in range(0, length, size)]
    return jnp.concatenate(tiles, axis=3).reshape(batch, heads, length, dim)
