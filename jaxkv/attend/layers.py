"""All layers after a block of the prompt: what they keep together, where they share one budget.

While a block runs, each layer that shares holds at most its ceiling; at the block's end all their candidates are
divided once, and one line of slots holds what stays.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv.attend.layer import LayerOut
from jaxkv.attend.leave import absorbed
from jaxkv.attend.prompt import finished
from jaxkv.plan import Plan
from jaxkv.policies.allocator import Division, Learned
from jaxkv.policies.evicted import Leaving
from jaxkv.policies.policy import Policy
from jaxkv.policies.score import ScoreInputs
from jaxkv.store.line import joined, placed


def divided(
    policy: Policy,
    outs: Sequence[LayerOut],
    full: Sequence[int],
    plan: Plan,
    now: Int[Array, "B"],
    limits: Int[Array, "L B"],
    learned: Callable[[int], Learned],
) -> tuple[Any, ...]:
    """The layers' stores after a block. Those of the `full` layers, without a sliding window, hold candidates where the
    allocator divides one budget over them; any other as the block left it."""
    stores = [out.cache for out in outs]
    if not policy.allocate.divides:
        return tuple(stores)
    pools, limit = [stores[i] for i in full], limits[full[0]]
    looked = plan.look and policy.prefill is not None
    reserved = jnp.zeros_like(limit)
    if looked:
        assert policy.prefill is not None
        reserved += policy.prefill.reserved(limit)
    each = limit - reserved
    heads, slots = pools[0].heads, sum(plan.slots[i] for i in full)

    def lined(choose: Callable[[Any], Bool[Array, "B N"]]) -> tuple[Any, ...]:
        line = joined(pools)
        kept = choose(line)
        beside, some = [pool.beside for pool in pools], pools
        if looked and policy.prefill is not None and policy.prefill.evicted.state:
            rule, total = policy.prefill.evicted, pools[0].total
            after = [
                pool.absorbed(
                    kept[:, i * total : (i + 1) * total],
                    lambda beside, entries, stay, i=i, pool=pool: absorbed(
                        rule, beside, entries, stay, Leaving(policy.allocate.local(learned(full[i]), pool.heads))
                    ),
                )
                for i, pool in enumerate(pools)
            ]
            beside = [state for _, state in after]
            some = [dataclasses.replace(pool, entries=entries) for pool, (entries, _) in zip(pools, after, strict=True)]
            line = joined(some)
        total = heads * slots
        room = jnp.full_like(limit, total) if policy.decode is None else line.heads * limit
        line = line.arranged(kept, room, {}, total)
        line = finished(policy, policy.allocate, line, now, None, limit, ScoreInputs(), profiles is not None)
        return placed(line, beside, heads * plan.reach)

    profiles = [p for p in (outs[i].notes.profile for i in full) if p is not None] if looked else None
    guard = jnp.minimum(policy.allocate.guard(limit, policy.phases), each)
    shared = policy.allocate.divide(Division(pools, profiles, each, guard, lined))
    left = dict(zip(full, shared or (), strict=True))
    return tuple(left.get(i, store) for i, store in enumerate(stores))
