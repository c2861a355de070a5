"""What every cut shares, of a prompt and while decoding: what becomes of what leaves, and the room that is left."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv.policies.allocator import Allocate
from jaxkv.policies.evicted import Leaving, absorb_by
from jaxkv.policies.policy import Phase, Policy
from jaxkv.store.entries import Entries


def leaving(
    policy: Policy,
    phase: Phase,
    learned: Any,
    positions: Int[Array, "B Hk S"],
    now: Int[Array, "B"],
    limits: Int[Array, "B"],
    rotate: Any = None,
    share: Allocate | None = None,
) -> Leaving:
    """What a rule may know of entries at `positions`, of which some leave."""
    local = (share or policy.allocate).local(learned, positions.shape[1])
    spared = phase.protects.protected(positions, now, limits)
    return Leaving(local, spared, now, None if policy.rope == "cache" else rotate)


def absorbed(rule: Any, beside: dict[str, Any], entries: Entries, kept: jax.Array, facts: Leaving) -> Any:
    """The entries and what is beside the slots, after those that are not `kept` have left."""
    stay, gone = entries.masked(kept), entries.masked(~kept)
    survivors, state = absorb_by(rule, beside.get(rule.state), stay, gone, facts)
    if survivors is not stay:  # in their slots; what left lies where it lay, and is not kept
        entries = dataclasses.replace(survivors, positions=entries.positions)
    return entries, beside if not rule.state else {**beside, rule.state: state}


def room_of(policy: Policy, store: Any, limits: Int[Array, "B"], slots: int) -> Int[Array, "B"]:
    """The slots that a layer's heads may share: the row's budget and what decode runs over it, or all where tokens are
    only added."""
    if policy.decode is None:
        return jnp.full_like(limits, store.heads * slots)
    over = policy.decode.every if policy.decode.every > 1 else 0
    return store.heads * (jnp.minimum(limits, slots) + over)
