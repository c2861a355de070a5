"""prefill_attend in plain jnp: the meaning that every kernel must equal."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.masking import filled, masked_softmax, soft_cap, visible

CHUNK = 512  # queries at a time: bounds the [queries, keys] array


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
) -> Float[Array, "B Hq T D"]:
    """softmax(scale * q . k) v over the keys at or before each query's position; position -1 is an empty slot."""
    batch, heads, length, dim = queries.shape
    kv_heads = keys.shape[1]
    values = filled(values, key_positions)

    def some(q, at):
        q = q.reshape(batch, kv_heads, heads // kv_heads, q.shape[2], dim)
        logits = jnp.einsum("bhgtd,bhsd->bhgts", q, keys, preferred_element_type=jnp.float32) * scale
        seen = visible(at[:, None, :], key_positions, window)[:, :, None]
        weights, _ = masked_softmax(soft_cap(logits, softcap), seen)
        out = jnp.einsum("bhgts,bhsd->bhgtd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return out.astype(queries.dtype).reshape(batch, heads, -1, dim)

    return by_chunks(some, queries, query_positions)


def by_chunks(function, queries: Float[Array, "B Hq T D"], positions: Int[Array, "B T"]) -> Float[Array, "B Hq T D"]:
    """`function` over runs of at most CHUNK queries, joined again: the same result with less memory."""
    length = queries.shape[2]
    if length <= CHUNK:
        return function(queries, positions)
    whole, rest = divmod(length, CHUNK)
    cut = whole * CHUNK
    q = jnp.moveaxis(queries[:, :, :cut].reshape(*queries.shape[:2], whole, CHUNK, -1), 2, 0)
    at = jnp.moveaxis(positions[:, :cut].reshape(-1, whole, CHUNK), 1, 0)
    out = jnp.moveaxis(lax.map(lambda pair: function(*pair), (q, at)), 0, 2).reshape(*queries.shape[:2], cut, -1)
    if rest:
        out = jnp.concatenate([out, function(queries[:, :, cut:], positions[:, cut:])], axis=2)
    return out
