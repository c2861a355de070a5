"""Which keys a query sees, and the masked softmax: shared by every reference."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite, so that a row that sees nothing stays finite


def visible(
    query_positions: Int[Array, "*#B T"], key_positions: Int[Array, "*#B S"], window: int | None
) -> Bool[Array, "*B T S"]:
    """True where key position p >= 0 (the slot is filled), p <= q, and q - p < window when there is one."""
    q, p = query_positions[..., :, None], key_positions[..., None, :]
    seen = (p >= 0) & (p <= q)
    return seen if window is None else seen & (q - p < window)


def soft_cap(logits: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """cap * tanh(logits / cap), or the logits themselves when there is no cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def biased(logits: Float[Array, "..."], bias: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """The logits with what is added to each key's, if anything is."""
    return logits if bias is None else logits + bias


def masked_softmax(
    logits: Float[Array, "... S"], seen: Bool[Array, "... S"]
) -> tuple[Float[Array, "... S"], Float[Array, "..."]]:
    """Stable softmax over the seen keys, exactly 0 elsewhere (everywhere, for a row that sees nothing), and its lse."""
    logits = jnp.where(seen, logits, MASKED)
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), MASKED / 2)  # exp(MASKED - top) is 0, seen or not
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)
    return weights / safe, lse[..., 0]


def filled(values: Float[Array, "*B S D"], positions: Int[Array, "*B S"]) -> Float[Array, "*B S D"]:
    """The values with empty slots as 0, so that whatever lies there cannot leak through 0 * NaN."""
    return jnp.where(positions[..., None] >= 0, values, jnp.zeros((), values.dtype))


def averaged(sums: Float[Array, "B Hq S"], query_positions: Int[Array, "B T"]) -> Float[Array, "B Hq S"]:
    """What all queries give each key, by how many they are; those at position -1 are padding and don't count."""
    count = jnp.sum(query_positions >= 0, axis=-1, dtype=jnp.float32)
    return sums / jnp.maximum(count, 1.0)[:, None, None]
