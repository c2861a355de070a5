"""attend.py for layers that share the model's pool: what each puts up of a block of the prompt, and what all keep.

While a block runs, each layer holds at most its ceiling, so the peak is `most` times the budget; at the block's end all
layers' entries are divided once, and one line of slots holds what stays.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv import attend_pool
from jaxkv import pool as pools
from jaxkv.cache import LayerCache
from jaxkv.model_pool import Share, joined, shared
from jaxkv.policies.across import Across
from jaxkv.policies.policy import Policy
from jaxkv.policies.score import ScoreInputs
from jaxkv.pool import Pool

WORTH = "worth"  # what the entries of a block were worth, until the layers have divided the budget


def candidates(
    share: Across,
    joined: LayerCache,
    worth: Float[Array, "B Hk S"],
    slots: int,
    each: Int[Array, "B"],
    guard: Int[Array, "B"],
) -> Pool:
    """The best entries of one layer, as many as its ceiling lets it keep, with their worth among the statistics.

    `slots` per head, of which `each [B]` are a layer's on average; every head puts up `guard [B]` at least.
    """
    heads, owner, line = joined.next_slot.shape[-1], pools.owners(joined), worth.reshape(worth.shape[0], -1)
    positions = pools.flattened(joined).positions
    most = jnp.minimum(share.ceiling(each), slots)
    if share.alike:
        kept = pools.best(line, positions, owner, jnp.repeat(most[:, None], heads, axis=1))
    else:
        kept, _ = pools.compete(line, positions, owner, heads, heads * most, jnp.minimum(guard, most))
    carrying = dataclasses.replace(joined, stats={**joined.stats, WORTH: worth.astype(jnp.float32)})
    return pools.build(carrying, kept, heads * slots, jnp.full_like(most, heads * slots))


def divided(
    policy: Policy,
    share: Across,
    layers: list[Pool],
    profiles: list[Float[Array, "B _"]] | None,
    slots: int,
    reach: int,
    now: Int[Array, "B"],
    limits: Int[Array, "B"],
    reserved: Int[Array, "B"],
) -> tuple[Share, ...]:
    """What all layers keep of what they put up, `limits - reserved [B]` per head on average, in one line of `slots`.

    The slots of the next tokens are chosen and the statistics brought up to date, as `attend` does for a single layer.
    Without profiles (nobody looked: everything fits) all stays. A layer reads `reach` slots.
    """
    number, heads = len(layers), layers[0].heads
    line = joined(layers)
    each, guard = limits - reserved, attend_pool.guarded(policy, limits)
    guard, owner = jnp.minimum(guard, each), line.owner
    if profiles is None:
        kept = line.positions >= 0
    elif share.alike:
        stacked = jnp.stack(profiles)
        held = jnp.max(line.held().reshape(-1, number, heads), axis=-1).T
        quota = share.quotas(stacked, each, guard, share.ceiling(each), held)
        kept = pools.best(line.stats[WORTH], line.positions, owner, jnp.repeat(quota.T, heads, axis=1))
    else:
        kept, _ = pools.compete(
            line.stats[WORTH], line.positions, owner, number * heads, number * heads * each, guard
        )  # fmt: skip
    room = jnp.full_like(each, slots) if policy.decode is None else number * heads * limits
    line = pools.build(line, kept, slots, room)
    mass = line.stats.get("mass")
    line = dataclasses.replace(line, stats={name: line.stats[name] for name in policy.stats})
    aimed = attend_pool.aim(policy, line, mass, now, limits, ScoreInputs())
    if policy.prefill is not None and profiles is not None:
        stats = attend_pool.observe(policy, policy.prefill, line.stats, mass, now)
        aimed = dataclasses.replace(aimed, stats=stats)
    return shared(aimed, number, reach)


def together(states: Any, shares: tuple[Share, ...]) -> tuple[Any, ...]:
    """The layers after a block: the shares where a layer put up a pool, any other as it is."""
    left = iter(shares)
    return tuple(next(left) if isinstance(state.cache, Pool) else state.cache for state in states)
