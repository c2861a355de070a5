"""Where the next token goes: an empty slot, else the one that the decode phase values least."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.policies.allocator import Allocate
from jaxkv.policies.policy import Policy, priority
from jaxkv.policies.score import ScoreInputs
from jaxkv.store.entries import WORTH, ranks

NO_PROMPT: dict[str, Any] = dict.fromkeys(("queries", "query_positions", "query_places", "by_query"))
NO_KEYS: dict[str, Any] = dict.fromkeys(("keys", "values", "places"))  # a score linear in the mass looks at none


def aimed(
    policy: Policy,
    share: Allocate,
    store: Any,
    mass: Float[Array, "B H S"] | None,
    now: Int[Array, "B"],
    window: int | None,
    limits: Int[Array, "B"],
    inputs: ScoreInputs,
) -> Any:
    """The store with its next slots: empty or expired ones, else those that the decode phase values least.

    Its statistics are those before this mass; where nobody looked all are alike, so the oldest goes.
    """
    phase = policy.decode
    if phase is None or phase.every > 1:  # there always is an empty or expired slot
        return store.aimed(store.empty_slot(now, window))
    worth = worth_at_decode(policy, share, store, mass, now, limits, inputs)
    if policy.ranks:
        store = store.changed(stats={**store.stats, WORTH: store.unscored(worth)})
    return store.aimed(store.lowest(worth, limits, now, window))


def worth_at_decode(
    policy: Policy,
    share: Allocate,
    store: Any,
    mass: Float[Array, "B H S"] | None,
    now: Int[Array, "B"],
    limits: Int[Array, "B"],
    inputs: ScoreInputs,
) -> Float[Array, "B H S"]:
    """What the decode phase values each slot at, from the store's statistics before this mass, in scored form; +inf
    for what it protects. Entries of local heads are worth their position."""
    phase, positions = policy.decode, store.scored(store.positions)
    assert phase is not None
    if mass is None:
        mass = jnp.zeros(positions.shape, jnp.float32)
    if phase.linear:
        stats = {name: store.scored(stat) for name, stat in store.stats.items()}
        seen = dataclasses.replace(inputs, **NO_PROMPT, **NO_KEYS)
        worth = priority(phase, stats, positions, mass, now, limits, seen)
    else:
        wide = store.by_head()
        stats = {name: store.compared(stat) for name, stat in store.stats.items()}
        seen = _entries_alone(policy, wide, inputs)
        wide_mass = store.compared(store.unscored(mass))
        worth = store.uncompared(priority(phase, stats, wide.positions, wide_mass, now, limits, seen))
    local = share.local(inputs.learned, store.heads)
    if local is None:
        return worth
    by_age = store.of_heads(local) & (worth < jnp.inf)
    return jnp.where(by_age, positions.astype(jnp.float32), worth)


def _entries_alone(policy: Policy, entries: Any, inputs: ScoreInputs) -> ScoreInputs:
    """What a decode score may look at: the layer's own entries, and no queries."""
    keys, places = entries.keys, entries.positions
    if policy.rope == "cache" and inputs.rotate is not None:
        places = ranks(entries.positions)
        keys = inputs.rotate(keys, places)
    return dataclasses.replace(inputs, keys=keys, values=entries.values, places=places, **NO_PROMPT)
