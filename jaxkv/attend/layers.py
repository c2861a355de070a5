"""All layers after a block of the prompt: what they keep together, where they share one budget.

While a block runs, each layer that shares holds at most its ceiling; at the block's end all their candidates are
divided once, and one line of slots holds what stays.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv.attend.aim import aimed
from jaxkv.attend.layer import LayerOut
from jaxkv.attend.leave import absorbed, leaving
from jaxkv.attend.prompt import finished
from jaxkv.plan import Plan
from jaxkv.policies.allocator import Allocate, Division, Learned
from jaxkv.policies.needs import MASS
from jaxkv.policies.policy import Phase, Policy
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
    """The layers' stores after a block. Those of the `full` layers, which share, hold candidates where the allocator
    divides one budget over them; any other as the block left it."""
    stores = [out.cache for out in outs]
    if not policy.allocate.divides or not full:
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
        line, stay = joined(pools), pools
        kept = choose(line)
        if looked and policy.prefill is not None and policy.prefill.evicted.acts:
            width = plan.reach if policy.allocate.alike else None
            most = policy.allocate.widest(max(plan.slots[i] for i in full))
            stay = _left(policy, policy.prefill, pools, kept, now, limit, [learned(i) for i in full], width, most)
            line = joined(stay)
        total = heads * slots
        room = jnp.full_like(limit, total) if policy.decode is None else line.heads * limit
        line = line.arranged(kept, room, {}, total)
        beside = [pool.beside for pool in stay]
        aim = functools.partial(_aimed, beside, heads * plan.reach)
        line = finished(policy, policy.allocate, line, now, None, limit, ScoreInputs(), profiles is not None, aim)
        return placed(line, beside, heads * plan.reach)

    profiles = [p for p in (outs[i].notes.profile for i in full) if p is not None] if looked else None
    guard = jnp.minimum(policy.allocate.guard(limit, policy.phases), each)
    shared = policy.allocate.divide(Division(pools, profiles, each, guard, lined))
    left = dict(zip(full, shared or (), strict=True))
    return tuple(left.get(i, store) for i, store in enumerate(stores))


def _aimed(
    beside: list[dict[str, Any]], reach: int, policy: Policy, share: Allocate, line: Any, mass: Any, *rest: Any
) -> Any:
    """The line with its next slots, as `aimed` chooses them: of a score that compares a head's entries with each other
    layer by layer, for all heads of all layers side by side would be as many times the line."""
    if policy.decode is None or policy.decode.linear or not line.total:
        return aimed(policy, share, line, mass, *rest)
    marked = line if mass is None else line.changed(stats={**line.stats, MASS: line.unscored(mass)})
    slots = []
    for place in placed(marked, beside, reach):
        view = place.view(marked)
        own = None if mass is None else view.scored(view.stats[MASS])
        after = aimed(policy, share, view.keeping(policy.stats), own, *rest)
        slots.append(after.next_slot + place.start(marked)[:, None])
    return line.aimed(jnp.concatenate(slots, axis=1))


def _left(
    policy: Policy,
    phase: Phase,
    pools: Sequence[Any],
    kept: Bool[Array, "B N"],
    now: Int[Array, "B"],
    limit: Int[Array, "B"],
    learned: Sequence[Learned],
    width: int | None,
    most: int,
) -> list[Any]:
    """The layers' candidates, and what is beside each, after those that are not kept have left by the rule. No head has
    more than `width` of them, where their numbers are alike, nor more than `most` that stay (0: nobody knows)."""
    after = []
    for number, (pool, facts) in enumerate(zip(pools, learned, strict=True)):
        own = kept[:, number * pool.total : (number + 1) * pool.total]
        mass = pool.stats.get(MASS)
        stats = {name: pool.scored(stat) for name, stat in pool.stats.items()}
        stats = policy.observe(phase, stats, None if mass is None else pool.scored(mass), now)
        seen = pool.changed(stats={name: pool.unscored(stat) for name, stat in stats.items()})

        def takes(beside, entries, chosen, facts=facts):
            known = leaving(policy, phase, facts, entries.positions, now, limit)
            known = dataclasses.replace(known, most=most)
            return absorbed(phase.evicted, beside, entries, chosen, known)

        entries, beside = seen.absorbed(own, takes, width)
        after.append(pool.replaced(entries=dataclasses.replace(entries, stats=pool.stats), beside=beside))
    return after
