"""A decode step in one layer: write the token, attend, score, choose the slot of the token after it.

It has the form that `models.Decoder` calls: it gets query, key and value before RoPE and the layer's store, and gives
back the context and the new store.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attend.aim import worth_at_decode
from jaxkv.attend.layer import LayerIn, LayerOut
from jaxkv.attend.leave import absorbed, leaving, room_of
from jaxkv.models import AttentionSpec
from jaxkv.models.rope import rotate
from jaxkv.policies.allocator import EACH_ITS_OWN, Allocate, Contest
from jaxkv.policies.evicted import Evicted
from jaxkv.policies.policy import Phase, Policy, sound
from jaxkv.policies.score import ScoreInputs
from jaxkv.sharding.attention import RotateAtRead, awaiting
from jaxkv.sharding.layout import Layout
from jaxkv.store.entries import WORTH, around, ranks
from jaxkv.store.looks import LOOKS
from jaxkv.store.pool import dropped
from jaxkv.store.sinks import TurnSinks
from pallas_kernels.arguments import Judge, Rule, Token
from pallas_kernels.partial import merge


def decode_layer(
    policy: Policy,
    position: Int[Array, "B"],
    layout: Layout,
    implementation: str | None,
    spec: AttentionSpec,
    query: Float[Array, "B 1 Hq D"],
    key: Float[Array, "B 1 Hk D"],
    value: Float[Array, "B 1 Hk D"],
    given: LayerIn,
) -> tuple[Float[Array, "B 1 Hq D"], LayerOut]:
    """Write one token into the next slots, attend over all slots and what lies beside them, choose the slots after it.

    What the token overwrites has gone to the decode phase's `evicted` rule before (`overwrite.py`). The mass is that of
    the slots alone. A row whose position is -1 has finished: its cache stays as it is.
    """
    query, key, value = (layout.lay("heads", x)[:, 0] for x in (query, key, value))  # [B, H, D]
    store, phase, limits, facts = given.cache, policy.decode, given.limits, given.facts
    share = policy.allocate if given.ask.shares else EACH_ITS_OWN
    active, now = position >= 0, position + 1
    rotation = functools.partial(rotate, rope=spec.rope)
    inputs = ScoreInputs(
        rotate=rotation, scale=spec.scale, layer=facts.layer, layers=facts.layers, out=facts.out,
        learned=facts.learned,
    )  # fmt: skip
    entered = policy.enter(
        key[:, :, None], value[:, :, None], positions=position[:, None], rotate=rotation, prompt=False,
        learned=facts.learned, out=facts.out,
    )  # fmt: skip
    if policy.rope != "cache":
        query, key = (rotate(x, position[:, None], spec.rope) for x in (query, key))
    at_read = _at_read(policy, spec, store.slots, rotation)

    if LOOKS in store.beside:
        seen = store.beside[LOOKS].with_one(query, active)
        store = dataclasses.replace(store, beside={**store.beside, LOOKS: seen})
        inputs = dataclasses.replace(inputs, looks=seen.queries)
    token = Token(query, key, value, position)
    stats = {name: store.put(stat, entered[name][..., 0], active) for name, stat in store.stats.items()}
    stats = {name: store.scored(stat) for name, stat in stats.items()}
    rule = phase.evicted if phase is not None and given.ask.shares else None
    allowed = limits  # a sliding window has its own
    if spec.window is None:
        allowed = policy.allowed(stats, store.scored(store.positions), position, limits)
    store = store.single(active)
    judge = _judge(phase, share, store, stats, position, limits, facts.learned)._replace(limits=allowed)
    softmax = {
        "scale": spec.scale, "window": spec.window, "softcap": spec.softcap, "implementation": implementation,
        "with_mass": policy.weighs_at_decode or judge.weighs,
    }  # fmt: skip
    if given.ask.everything:
        partial, after = store.step(layout, token, judge, at_read, **softmax)
    else:
        partial, after = policy.read.step(store, layout, token, judge, at_read, **softmax)
    aside = {
        name: state.step(layout, query, position, implementation, scale=spec.scale, softcap=spec.softcap)
        for name, state in store.beside.items()
        if state.attends
    }
    after = after.replaced(beside={**after.beside, **{name: state for name, (_, state) in aside.items()}})
    output, mass = merge(partial, *(part for part, _ in aside.values())).output, partial.mass

    before = stats
    if phase is not None:
        stats = policy.observe(phase, stats, mass, now)
    old = {name: store.scored(stat) for name, stat in store.stats.items()}
    stats = {name: jnp.where(active[:, None, None], stat, old[name]) for name, stat in stats.items()}
    after = after.changed(stats={name: store.unscored(stat) for name, stat in stats.items()})
    if phase is not None:
        output, after = after.settled(output)

        def worth(store: Any) -> Float[Array, "B H S"]:
            scored = store.changed(stats={name: store.unscored(stat) for name, stat in before.items()})
            return worth_at_decode(policy, share, scored, mass, now, limits, inputs)

        after = _evicted(
            policy, phase, share, after, worth, active, now, spec.window, limits, allowed, facts.learned, rule,
            rotation, layout, output,
        )  # fmt: skip
    return layout.lay("context", output[:, None]), LayerOut(after.laid(layout))


def _judge(
    phase: Phase | None,
    share: Allocate,
    store: Any,
    stats: dict,
    position: Int[Array, "B"],
    limits: Int[Array, "B"],
    learned: Any,
) -> Judge:
    """How the attention pass scores the slots and chooses, as far as it can: where the score is linear in the mass.

    Weight and bias are in the store's scored form.
    """
    group = phase.aggregate.group if phase is not None else "sum"
    if phase is None or not phase.linear or phase.every > 1:
        return Judge(limits, jnp.zeros_like(limits), group=group)
    positions = store.scored(store.put(store.positions, position[:, None], position >= 0))
    weight, bias = (
        sound(phase.score, factor, positions) for factor in phase.score.line(stats, positions, position + 1)
    )
    local = share.local(learned, store.heads)
    if local is not None:  # they let their oldest entry go
        by_age = store.of_heads(local)
        weight, bias = jnp.where(by_age, 0.0, weight), jnp.where(by_age, positions.astype(jnp.float32), bias)
    rule = Rule(phase.aggregate.heads, phase.protects.sinks)
    return Judge(limits, phase.protects.recents(limits), weight, bias, rule, group)


def _evicted(
    policy: Policy,
    phase: Phase,
    share: Allocate,
    store: Any,
    worth: Any,
    active: Bool[Array, "B"],
    now: Int[Array, "B"],
    window: int | None,
    limits: Int[Array, "B"],
    allowed: Int[Array, "B"],
    learned: Any,
    rule: Evicted | None,
    rotation: Any,
    layout: Layout,
    output: Float[Array, "B Hq D"],
) -> Any:
    """The store cut back where it has run `every` tokens over its budget, or aimed by a score that the attention pass
    could not compute; and its heads' borders moved, where the allocator moves them between cuts."""
    guard = share.guard(limits, policy.phases)
    room = room_of(policy, store, limits, store.slots)

    def choose(worth, positions, owner, each):
        flat = [x.reshape(x.shape[0], -1) for x in (worth, positions, owner)]
        contest = Contest(
            lambda *_: flat[0], flat[1], flat[2], store.heads, each, guard, store.slots, learned, prompt=False
        )  # fmt: skip
        return share.choose(contest).kept.reshape(positions.shape)

    takes = dropped
    if rule is not None and rule.acts:

        def takes(beside, entries, chosen):
            facts = leaving(policy, phase, learned, entries.positions, now, limits, rotation, share)
            return absorbed(rule, beside, entries, chosen, facts)

    def cut(store: Any, due: Bool[Array, "B"], each: Int[Array, "B"]) -> Any:
        after = store.recut(due, worth, choose, takes, each=each, room=room, now=now, window=window)
        index = policy.read.state
        if index not in after.beside:
            return after
        made = lax.cond(
            jnp.any(due), lambda: policy.read.indexed(after).beside[index], lambda: after.beside[index]
        )  # a cut moves entries to other slots
        return after.replaced(beside={**after.beside, index: made})

    if phase.every > 1:
        due = active & store.full(allowed, phase.every, now, window)
        return cut(store, awaiting(layout, due, output), allowed)  # once all is read, or the slots would be copied
    if policy.ranks or not phase.linear:
        value = worth(store)
        if policy.ranks:
            noted = jnp.where(active[:, None, None], value, store.scored(store.stats[WORTH]))
            store = store.changed(stats={**store.stats, WORTH: store.unscored(noted)})
        if not phase.linear:
            store = store.aimed(store.lowest(value, allowed, now, window), active)
    moves = share.moves(limits, now)
    if moves is None:
        return store
    each, due = moves
    return cut(store, active & store.packed_full() & due, jnp.maximum(each, guard))


def _at_read(policy: Policy, spec: AttentionSpec, slots: int, rotation: Any) -> RotateAtRead | TurnSinks | None:
    """How keys are turned as they are read, so that they stand where their place among the entries held is, instead of
    in the text; None where they stand in the text."""
    phase = policy.decode
    if policy.rope == "text":
        return None
    if policy.rope == "sinks":
        return TurnSinks(policy.sinks, rotation, spec.window)
    # a cut leaves a ring of slots, but where slots expire they are filled in any order
    ring = phase is not None and phase.every > 1 and spec.window is None

    def by_place(query, keys, places, place):
        return rotate(query, place[..., None], spec.rope), rotate(keys, places, spec.rope, below=slots)

    return RotateAtRead(around if ring else ranks, by_place)
