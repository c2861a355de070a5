"""Which slot the next token overwrites.

An entry's score is linear in the attention mass that it got in this step, weight * mass + bias. Weight and
bias are known before the attention runs, so that a kernel can score and choose in the same pass.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arguments import Judge

HEADS = {"sum": jnp.sum, "mean": jnp.mean}
Factor = Float[Array, "B Hk C"] | float


def linear(mass: Float[Array, "B Hk S"] | None, weight: Factor, bias: Factor) -> Float[Array, "B Hk S"]:
    """weight * mass + bias; the mass may be None where the weight is 0."""
    if isinstance(weight, float) and weight == 0 and isinstance(bias, jax.Array):
        return bias
    assert mass is not None, "nobody looked, and the score needs attention"
    scored = mass if isinstance(weight, float) and weight == 1 else jnp.multiply(mass, weight)
    return scored if isinstance(bias, float) and bias == 0 else jnp.add(scored, bias)


def alive(positions: Int[Array, "B Hk S"], now: Int[Array, "B"], window: int | None) -> Bool[Array, "B Hk S"]:
    """True for entries that the query at position `now` can see: filled, and not behind the sliding window."""
    filled = positions >= 0
    return filled if window is None else filled & (positions > (now - window)[:, None, None])


def over_heads(score: Float[Array, "B Hk S"], heads: str) -> Float[Array, "B Hk S"]:
    """The same score for every KV head of the layer, by `heads` ("sum", "mean"), unless "each" decides for itself."""
    return score if heads == "each" else jnp.broadcast_to(HEADS[heads](score, axis=1, keepdims=True), score.shape)


def protected(
    positions: Int[Array, "B Hk S"], now: Int[Array, "B"], sinks: int, recents: Int[Array, "B"]
) -> Bool[Array, "B Hk S"]:
    """True for the entries of the first `sinks` positions, and of the last `recents [B]` ones before `now`."""
    return (positions < sinks) | (positions >= (now - recents)[:, None, None])


def victim(
    score: Float[Array, "B Hk C"],
    positions: Int[Array, "B Hk C"],
    alive: Bool[Array, "B Hk C"],
    limits: Int[Array, "B"],
) -> Int[Array, "B Hk"]:
    """The slot to fill next: an empty one while the row holds fewer than its limit, else the lowest score.

    Ties go to the older token. `alive` is False for empty slots and for entries that no query will see again.
    """
    held = jnp.sum(alive, axis=-1, keepdims=True, dtype=jnp.int32)
    room = held < limits[:, None, None]
    score = jnp.where(alive, score.astype(jnp.float32), jnp.where(room, -jnp.inf, jnp.inf))
    slot = lax.broadcasted_iota(jnp.int32, score.shape, score.ndim - 1)

    lowest = score == jnp.min(score, axis=-1, keepdims=True)
    oldest = lowest & (positions == _least(positions, lowest)[..., None])
    return _least(slot, oldest)


def _least(x: Int[Array, "*lead S"], among: Bool[Array, "*lead S"]) -> Int[Array, "*lead"]:
    return jnp.min(jnp.where(among, x, jnp.iinfo(jnp.int32).max), axis=-1)


def aim(
    mass: Float[Array, "B Hk *G C"] | None,
    positions: Int[Array, "B Hk C"],
    position: Int[Array, "B"],
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    window: int | None,
) -> Int[Array, "B Hk"]:
    """The slot for the token after `position`, whose attention gave every slot its `mass` (None where it weighs none).

    An empty or expired slot while the row holds fewer than its limit, else the lowest weight * mass + bias under the
    rule; with no rule, whatever the mass, the first empty or expired slot. A row at position -1 keeps its `slot`.
    """
    now, rule = position + 1, judge.rule
    live = alive(positions, now, window)
    if rule is None:
        chosen = jnp.argmin(live, axis=-1).astype(jnp.int32)
    else:
        mass = jnp.zeros(positions.shape, jnp.float32) if mass is None else mass
        score = over_heads(linear(mass, judge.weight, judge.bias), rule.heads)
        score = jnp.where(protected(positions, now, rule.sinks, judge.recents), jnp.inf, score)
        chosen = victim(score, positions, live, judge.limits)
    return jnp.where(position[:, None] < 0, slot, chosen)
