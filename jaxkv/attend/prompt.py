"""A block of the prompt in one layer: attend, score every entry, cut the store back to its slots.

It has the form that `models.Decoder` calls: it gets query, key and value before RoPE and the layer's store, and gives
back the context and the new store.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.attend.aim import aimed
from jaxkv.attend.layer import LayerIn, LayerOut, Notes
from jaxkv.attend.leave import absorbed, leaving, room_of
from jaxkv.models import AttentionSpec
from jaxkv.models.rope import rotate
from jaxkv.policies.allocator import EACH_ITS_OWN, Allocate, Choice, Contest
from jaxkv.policies.needs import MASS, OUTPUT
from jaxkv.policies.policy import Phase, Policy, priority
from jaxkv.policies.score import Score, ScoreInputs
from jaxkv.sharding.attention import awaiting, prefill_attend, prefill_attend_mass
from jaxkv.sharding.layout import Layout
from jaxkv.store.entries import EMPTY, WORTH, Entries, appended, counted, owners
from jaxkv.store.looks import LOOKS
from jaxkv.store.sinks import TurnSinks
from pallas_kernels.decode_attend_score.victim import alive
from pallas_kernels.masking import filled
from pallas_kernels.partial import merge
from pallas_kernels.prefill_attend_mass import spared_by_lse


def prefill_layer(
    policy: Policy,
    positions: Int[Array, "B T"],
    now: Int[Array, "B"],
    layout: Layout,
    implementation: str | None,
    spec: AttentionSpec,
    query: Float[Array, "B T Hq D"],
    key: Float[Array, "B T Hk D"],
    value: Float[Array, "B T Hk D"],
    given: LayerIn,
    sizes: Float[Array, "B T"] | None = None,
    lead: Float[Array, "B Hk S"] | None = None,
) -> tuple[Float[Array, "B T Hq D"], LayerOut]:
    """Attend from a block over cache + block, score every entry, and cut the cache back to its slots.

    Slots are in time order before and after the block is appended, so no sort is needed. The last `ask.extra` of the T
    tokens are pseudo tokens, which look, and whose keys and values are not kept. Padding has position -1. `now [B]` is
    the position after the block's last prompt token. What lies beside the slots is part of the context, not of the
    mass. `sizes` are the norms of the tokens' hidden states, for a policy that needs them; `lead` is what an earlier
    layer valued the same entries at, and this one then keeps what that one kept.
    """
    query, key, value = (jnp.swapaxes(layout.lay("heads", x), 1, 2) for x in (query, key, value))  # [B, H, T, D]
    ask, facts, store = given.ask, given.facts, layout.gathered(given.cache)
    rotation = functools.partial(rotate, rope=spec.rope)
    own = positions.shape[1] - ask.extra
    entered = policy.enter(  # before RoPE, so that a token's norm is the same wherever it stands
        key[:, :, :own],
        value[:, :, :own],
        queries=query[:, :, :own],
        positions=positions[:, :own],
        rotate=rotation,
        learned=facts.learned,
        out=facts.out,
    )
    entered = {name: jnp.pad(stat, ((0, 0), (0, 0), (0, ask.extra))) for name, stat in entered.items()}
    inputs = ScoreInputs(
        queries=query[:, :, :own], query_positions=positions[:, :own], query_places=positions[:, :own],
        rotate=rotation, scale=spec.scale, layer=facts.layer, layers=facts.layers, out=facts.out,
        learned=facts.learned,
    )  # fmt: skip
    if policy.rope != "cache":
        query = rotate(query, positions[:, None, :], spec.rope)
        key = rotate(key, positions[:, None, :], spec.rope)
    at = jnp.broadcast_to(positions[:, None, :], key.shape[:3])
    if LOOKS in store.beside:
        seen = store.beside[LOOKS].with_many(query[:, :, :own], positions[:, :own])
        store = dataclasses.replace(store, beside={**store.beside, LOOKS: seen})
        inputs = dataclasses.replace(inputs, looks=seen.queries)
    one = None if store.entries.weight is None else jnp.ones(at.shape, jnp.float32)
    block = Entries(key, value, at, {name: entered[name] for name in store.stats}, one)
    held = awaiting(layout, store, query)  # decoded and unfolded a layer at a time
    joined = layout.by_head(appended(held.by_head(), block))

    read, places = joined.keys, joined.positions
    if policy.rope == "cache":
        places = counted(joined.filled)
        read = rotate(joined.keys, places, spec.rope)
        mine = places[:, :, -positions.shape[1] :]
        query = rotate(query, jnp.repeat(mine, query.shape[1] // key.shape[1], axis=1), spec.rope)
        inputs = dataclasses.replace(inputs, query_places=mine[:, 0, :own])
    elif policy.rope == "sinks":
        first = jnp.min(jnp.where(positions >= 0, positions, now[:, None]), axis=1)
        sinks = TurnSinks(policy.sinks, rotation, spec.window, first)
        read = sinks.turned(joined.keys, sinks.how_far(joined.positions))

    softmax = {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap, "implementation": implementation}
    softmax |= {} if joined.bias is None else {"bias": joined.bias}
    beside = [
        state.attend(query, positions, scale=spec.scale, softcap=spec.softcap)
        for state in store.beside.values()
        if state.attends
    ]
    mass, lead, known = None, lead if spec.window is None else None, False
    weighs = policy.prefill is not None and MASS in policy.prefill.needs
    phase = policy.prefill if weighs and ask.look and lead is None else None
    if phase is not None:
        looking = phase.observe.looking(positions, ask.extra).shape[1]
        alike = ask.attends and phase.observe.own_keys  # it is there anyway, and they see what it saw
        known = alike and spared_by_lse(looking, positions.shape[1], implementation)
    looked = prefill_attend(
        layout, query, read, joined.values, positions, joined.positions, with_lse=bool(beside) or known, **softmax
    )
    context = merge(looked, *beside).output

    going = None
    if ask.going:
        going = _going(policy.flow, layout, query, read, positions, joined.positions, given, softmax)
    if phase is not None:
        lse = looked.lse if known else None
        mass, by_query = _mass(phase, layout, query, read, positions, joined, now, given, softmax, sizes, lse)
        inputs = dataclasses.replace(inputs, by_query=by_query)
    if ask.extra:  # the pseudo tokens have looked: empty their slots
        joined = dataclasses.replace(joined, positions=joined.positions.at[:, :, -ask.extra :].set(EMPTY))
    inputs = dataclasses.replace(inputs, keys=read, values=joined.values, places=places)
    cut = _cut(policy, store, joined, mass, now, spec.window, given, inputs, lead)
    cut = LayerOut(layout.layer(cut.cache), dataclasses.replace(cut.notes, going=going))
    return layout.lay("context", jnp.swapaxes(context, 1, 2)), cut


def _going(
    flow: Any,
    layout: Layout,
    query: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    given: LayerIn,
    softmax: dict,
) -> Int[Array, "B N"]:
    """The block's tokens that go on to deeper layers: those that its last queries attend to most."""
    ask = given.ask
    own = query.shape[2] - ask.extra
    last = slice(max(own - flow.window, 0), own)
    looks = query[:, :, last], keys, query_positions[:, last], key_positions
    mass = prefill_attend_mass(layout, *looks, reduce="sum", **softmax)
    block = slice(mass.shape[-1] - query.shape[2], mass.shape[-1] - ask.extra)
    assert given.most is not None  # of a prompt
    return flow.choose(mass[:, :, block], query_positions[:, :own], given.most, ask.going)


def _mass(
    phase: Phase,
    layout: Layout,
    query: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"],
    query_positions: Int[Array, "B T"],
    joined: Entries,
    now: Int[Array, "B"],
    given: LayerIn,
    softmax: dict,
    sizes: Float[Array, "B T"] | None,
    lse: Float[Array, "B Hq T"] | None,
) -> tuple[Float[Array, "B Hk S"], Float[Array, "B Hq S"]]:
    """The attention mass of every entry from the phase's observing queries, pooled and reduced over the group, and as
    each query head gave it. `lse` are the queries' log-sum-exps, where they look at what attention saw."""
    observe, aggregate, key_positions = phase.observe, phase.aggregate, joined.positions
    at = observe.looking(query_positions, given.ask.extra)
    query = query[:, :, -at.shape[1] :]
    softmax = softmax if lse is None else {**softmax, "lse": lse[:, :, -at.shape[1] :]}
    if not observe.own_keys:
        key_positions = key_positions.at[:, :, -(given.ask.extra or at.shape[1]) :].set(EMPTY)
    weights = aggregate.weights(at, now, None if sizes is None else sizes[:, -at.shape[1] :])
    mass = prefill_attend_mass(
        layout, query, keys, at, key_positions, reduce=aggregate.queries, weights=weights, **softmax
    )
    if OUTPUT in aggregate.needs and given.facts.out is not None:
        mass = aggregate.by_output(mass, filled(joined.values, joined.positions), given.facts.out)
    apart = phase.protects.recent_entries(key_positions, now, given.limits)
    return aggregate.by_kv_head(mass, key_positions, apart, given.facts.learned), mass


def _cut(
    policy: Policy,
    store: Any,
    joined: Entries,
    mass: Float[Array, "B Hk S"] | None,
    now: Int[Array, "B"],
    window: int | None,
    given: LayerIn,
    inputs: ScoreInputs,
    lead: Float[Array, "B Hk S"] | None,
) -> LayerOut:
    """The store cut back to its slots, with the slot of the next token chosen; candidates, where layers share."""
    joined = joined.masked(alive(joined.positions, now, window))
    looked = policy.prefill is not None and given.ask.look
    share = policy.allocate if given.ask.shares else EACH_ITS_OWN
    choice = _choice(policy, share, joined, mass, now, window, given, inputs, looked, lead)
    kept = choice.kept.reshape(joined.positions.shape)
    if share.divides or policy.ranks:
        joined = joined.with_stats(**{WORTH: choice.worth.reshape(kept.shape).astype(jnp.float32)})

    beside, moving = policy.begun(store.beside, joined, inputs) if given.ask.shares else store.beside, joined
    lossless = share.keeps_all(joined.positions.shape[-1], given.ask.slots)
    if policy.prefill is not None and looked and given.ask.shares and not lossless:
        phase, limits = policy.prefill, given.limits
        facts = leaving(policy, phase, given.facts.learned, joined.positions, now, limits, inputs.rotate, share)
        facts = dataclasses.replace(facts, most=given.ask.slots if store.equal else 0)
        seen = dataclasses.replace(joined, stats=policy.observe(phase, joined.stats, mass, now))
        moving, beside = absorbed(phase.evicted, beside, seen, kept, facts)
        moving = dataclasses.replace(moving, stats=joined.stats)
    if mass is not None:
        moving = moving.with_stats(mass=mass)  # moves with its entries, then goes
    room = room_of(policy, store, given.limits, given.ask.slots)
    room = jnp.full_like(room, store.heads * given.ask.slots) if share.divides else room
    cut = store.rebuilt(moving, kept, given.ask.slots, room, beside)
    if share.divides:
        return LayerOut(cut, Notes(profile=choice.profile))
    worth = choice.worth.reshape(kept.shape) if given.ask.leads else None
    return LayerOut(finished(policy, share, cut, now, window, given.limits, inputs, looked), Notes(worth=worth))


def _choice(
    policy: Policy,
    share: Allocate,
    joined: Entries,
    mass: Float[Array, "B Hk S"] | None,
    now: Int[Array, "B"],
    window: int | None,
    given: LayerIn,
    inputs: ScoreInputs,
    looked: bool,
    lead: Float[Array, "B Hk S"] | None,
) -> Choice:
    """What the allocator lets stay: by the prefill phase's score, an earlier layer's, or all, where nobody looked. A
    layer with a sliding window keeps nothing free for new tokens, whose places are those that leave the window."""
    flat = lambda x: x.reshape(x.shape[0], -1)  # noqa: E731
    limits, phase = given.limits, policy.prefill
    frees = phase.reserved(limits) if phase is not None and looked and window is None else 0
    reserved = jnp.broadcast_to(frees, limits.shape)

    def worth(score: Score | None, goal: Int[Array, "B *Hk"]) -> Float[Array, "B N"]:
        if phase is None or not looked:
            return flat(joined.positions.astype(jnp.float32))
        if lead is not None:
            return flat(lead)
        scored = phase if score is None else dataclasses.replace(phase, score=score)
        return flat(priority(scored, joined.stats, joined.positions, mass, now, limits, inputs, goal))

    facts = None
    if phase is not None and looked:
        protected = phase.protects.protected(joined.positions, now, limits)
        seen = None if mass is None else phase.aggregate.over_heads(mass)
        facts = dataclasses.replace(
            inputs, positions=joined.positions, mass=seen, now=now, limits=limits, protected=protected
        )
    guard = share.guard(limits, policy.phases)
    return share.choose(
        Contest(
            worth, flat(joined.positions), flat(owners(joined.positions)), joined.positions.shape[1],
            limits - reserved, guard, given.ask.slots, given.facts.learned, inputs=facts,
        )
    )  # fmt: skip


def finished(
    policy: Policy,
    share: Allocate,
    store: Any,
    now: Int[Array, "B"],
    window: int | None,
    limits: Int[Array, "B"],
    inputs: ScoreInputs,
    looked: bool,
    aim: Callable[..., Any] = aimed,
) -> Any:
    """A store after its cut: the next slot chosen (`aim`) from the statistics before the block's mass, then these
    brought up to date, and the index made that decode reads by. The mass is among the store's statistics, and goes."""
    mass = store.stats.get("mass")
    store = store.keeping(policy.stats)
    left = {name: store.unscored(store.uncompared(stat)) for name, stat in policy.left(store, now).items()}
    store = store.changed(stats={**store.stats, **left}) if left else store
    mass = None if mass is None else store.scored(mass)
    ready = aim(policy, share, store, mass, now, window, limits, inputs)
    if looked and policy.prefill is not None:
        stats = {name: store.scored(stat) for name, stat in store.stats.items()}
        stats = policy.observe(policy.prefill, stats, mass, now)
        ready = ready.changed(stats={name: store.unscored(stat) for name, stat in stats.items()})
    return policy.read.indexed(ready)
