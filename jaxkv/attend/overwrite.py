"""What a decode step overwrites, before it does: one entry per head goes to the rule that says what becomes of it.

That depends on no token of the step, so it is done for all layers first: those that share a line change it together.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv.attend.layer import LayerIn
from jaxkv.attend.leave import leaving
from jaxkv.models import AttentionSpec
from jaxkv.models.rope import rotate
from jaxkv.policies.allocator import Allocate
from jaxkv.policies.evicted import Evicted, Leaving, absorb_by, take_by
from jaxkv.policies.policy import Policy
from jaxkv.store.entries import Change
from jaxkv.store.line import taking


def overwritten(
    policy: Policy,
    layers: tuple[Any, ...],
    given: tuple[LayerIn, ...],
    specs: tuple[AttentionSpec, ...],
    position: Int[Array, "B"],
) -> tuple[Any, ...]:
    """The layers after the decode phase's rule has taken up what the token at `position [B]` overwrites (-1: a row that
    has finished). `given` has each layer's store as it is read."""
    phase = policy.decode
    if phase is None or not phase.evicted.acts or phase.every > 1:  # with every > 1 there always is an empty slot
        return layers
    after = [
        _layer(policy, phase.evicted, layer, each, spec, position) if each.ask.shares else (layer, None)
        for layer, each, spec in zip(layers, given, specs, strict=True)
    ]
    # What leaves is read before the token is written over it, or the cache would be copied
    layers, changes = map(tuple, zip(*jax.lax.optimization_barrier(after), strict=True))
    return tuple(
        layer if change is None else policy.read.widened(layer, change)
        for layer, change in zip(taking(layers, changes), changes, strict=True)
    )


def _layer(
    policy: Policy, rule: Evicted, layer: Any, given: LayerIn, spec: AttentionSpec, position: Int[Array, "B"]
) -> tuple[Any, Change | None]:
    """The layer with what its rule remembers, and what it changes of the survivors; or changed, where that is more."""
    store, learned, active = given.cache, given.facts.learned, position >= 0
    assert policy.decode is not None
    gone = store.leaving(active)
    share, old = policy.allocate, store.beside.get(rule.state)

    def remembering(state: Any) -> Any:
        if not rule.state:
            return layer
        return dataclasses.replace(layer, beside={**layer.beside, rule.state: state})

    if not rule.moves:
        _, state = absorb_by(rule, old, None, gone, Leaving(share.local(learned, store.heads)))
        return remembering(state), None
    stay = store.put(jnp.ones(store.positions.shape, bool), jnp.zeros(store.next_slot.shape, bool), active)
    turn = functools.partial(rotate, rope=spec.rope)
    if rule.single:
        takers = store.filled_by_head() & store.seen_by_head(stay)
        facts = _facts(policy, share, store.seen_by_head(store.positions), position, given, turn)
        change, state = take_by(rule, old, store.held_plain, takers, gone, facts)
        return remembering(state), change
    survivors = store.by_head().masked(store.compared(stay))
    facts = _facts(policy, share, survivors.positions, position, given, turn)
    moved, state = absorb_by(rule, old, survivors, gone, facts)
    assert moved is not None
    moved = dataclasses.replace(moved, positions=store.positions)
    return policy.read.indexed(remembering(state).holding(moved, moved.filled)), None


def _facts(
    policy: Policy, share: Allocate, positions: Int[Array, "B Hk S"], now: Any, given: LayerIn, rotate: Any
) -> Leaving:
    assert policy.decode is not None
    return leaving(policy, policy.decode, given.facts.learned, positions, now, given.limits, rotate, share)
