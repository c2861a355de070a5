"""Where model, cache and policy meet: the attention of one layer, over a block of the prompt or for one new token.

Both functions have the form that `models.Decoder` calls: they get query, key and value before RoPE and the layer's
cache, and give back the context and the new cache.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import attend_model, attend_pool
from jaxkv import cache as slots_of
from jaxkv import pool as pools
from jaxkv.cache import EMPTY, LayerCache
from jaxkv.model_pool import Token
from jaxkv.models import AttentionSpec
from jaxkv.models.rope import rotate
from jaxkv.policies.across import Across
from jaxkv.policies.needs import MASS, OUTPUT
from jaxkv.policies.policy import Phase, Policy, priority
from jaxkv.policies.propagate import Propagate
from jaxkv.policies.score import ScoreInputs
from jaxkv.pool import Pool
from jaxkv.sharding.attention import Turn, decode_attend_score, prefill_attend, prefill_attend_mass
from jaxkv.sharding.layout import Layout
from pallas_kernels.decode_attend_score.victim import Rule, alive, victim
from pallas_kernels.masking import filled
from pallas_kernels.ragged_decode.reference import Line


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "limits", "layer", "out", "learned", "chosen", "worth", "profile", "line", "token"],
    meta_fields=["slots", "look", "extra", "onward"],
)
@dataclasses.dataclass(frozen=True)
class LayerState:
    """One layer's cache, the slots it shall have after the block, each row's budget, and whether anybody looks.

    `extra` tokens behind the block's own are pseudo tokens; `out` is the layer's output matrix where a score needs it,
    and `learned` what was measured on the layer beforehand. `onward` tokens go on to deeper layers (0: all),
    the `chosen` ones, by their index in the block. `worth` is what the policy valued the entries of cache and block
    at, for the layers that keep the same; `profile` what the layer says of itself where layers share a budget.
    Where they do, `line` is where the layer's keys and values lie, and `token` what a decode step gives them to add.
    """

    cache: Any  # LayerCache or Pool
    slots: int
    limits: Int[Array, "B"]
    look: bool = True
    extra: int = 0
    layer: int | Int[Array, ""] = 0
    out: Float[Array, "Hq D M"] | None = None
    learned: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    onward: int = 0
    chosen: Int[Array, "B N"] | None = None
    worth: Float[Array, "B Hk S"] | None = None
    profile: Float[Array, "B _"] | None = None
    line: Line | None = None
    token: Token | None = None


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
    state: LayerState,
    sizes: Float[Array, "B T"] | None = None,
    lead: Float[Array, "B Hk S"] | None = None,
) -> tuple[Float[Array, "B T Hq D"], LayerState]:
    """Attend from a block over cache + block, score every entry, and cut the cache back to its slots.

    The cache's slots stand in time order, and so do those of cache + block: nothing need be sorted.
    The last `state.extra` of the T tokens are pseudo tokens, which look, and whose keys and values are not kept.
    Padding has position -1. `now [B]` is the position after the block's last prompt token. A pool's rest is part of
    the context, not of the mass. `sizes` are the norms of the tokens' hidden states, for a policy that asks for them;
    `lead` is an earlier layer's `worth`, which held the same entries, and this one then keeps what that one kept.
    """
    query, key, value = (jnp.swapaxes(layout.lay("heads", x), 1, 2) for x in (query, key, value))  # [B, H, T, D]
    each_head = jnp.broadcast_to(positions[:, None, :], key.shape[:3])
    rotation = functools.partial(_turned, spec)
    entered = policy.enter(  # before RoPE, so that a token's norm is the same wherever it stands
        key, value, queries=query, positions=positions, rotate=rotation, learned=state.learned
    )
    own = positions.shape[1] - state.extra
    inputs = ScoreInputs(
        queries=query[:, :, :own], query_positions=positions[:, :own], query_places=positions[:, :own],
        rotate=rotation, scale=spec.scale, layer=state.layer, out=state.out, learned=state.learned,
    )  # fmt: skip
    if policy.rope == "text":
        query = rotate(query, positions[:, None, :], spec.rope)
        key = rotate(key, positions[:, None, :], spec.rope)
    joined = layout.gathered(
        slots_of.append(pools.by_head(layout.gathered(state.cache)), key, value, each_head, entered)
    )

    read, places = joined.keys, joined.positions
    if policy.rope == "cache":
        places = slots_of.counted(joined.positions >= 0)
        read = rotate(joined.keys, places, spec.rope)
        mine = places[:, :, -positions.shape[1] :]
        query = rotate(query, jnp.repeat(mine, query.shape[1] // key.shape[1], axis=1), spec.rope)
        inputs = dataclasses.replace(inputs, query_places=mine[:, 0, :own])

    softmax = {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap, "implementation": implementation}
    rest = getattr(state.cache, "rest", None)
    dropped = {} if rest is None else {"rest": rest.arrays}
    context = prefill_attend(layout, query, read, joined.values, positions, joined.positions, **dropped, **softmax)

    chosen = None
    if state.onward and policy.propagate is not None:
        chosen = _go_on(policy.propagate, layout, query, read, positions, joined.positions, state, softmax)
    mass, lead = None, lead if spec.window is None else None
    if policy.prefill is not None and MASS in policy.prefill.needs and state.look and lead is None:
        mass = _prompt_mass(policy.prefill, layout, query, read, positions, joined, now, state, softmax, sizes)
    if state.extra:  # the pseudo tokens have looked: empty their slots
        joined = dataclasses.replace(joined, positions=joined.positions.at[:, :, -state.extra :].set(EMPTY))
    inputs = dataclasses.replace(inputs, keys=read, values=joined.values, places=places)
    cut = _cut_prompt(policy, joined, mass, now, spec.window, state, inputs, lead)
    cut = dataclasses.replace(cut, cache=layout.layer(cut.cache), chosen=chosen)
    return layout.lay("context", jnp.swapaxes(context, 1, 2)), cut


def _go_on(
    propagate: Propagate,
    layout: Layout,
    query: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    state: LayerState,
    softmax: dict,
) -> Int[Array, "B N"]:
    """The block's tokens that go on to deeper layers: those that its last queries attend to most."""
    own = query.shape[2] - state.extra
    last = slice(max(own - propagate.window, 0), own)
    looks = query[:, :, last], keys, query_positions[:, last], key_positions
    mass = prefill_attend_mass(layout, *looks, reduce="sum", **softmax)
    block = slice(mass.shape[-1] - query.shape[2], mass.shape[-1] - state.extra)
    return propagate.choose(jnp.mean(mass[:, :, block], axis=1), query_positions[:, :own], state.limits, state.onward)


def _prompt_mass(
    phase: Phase,
    layout: Layout,
    query: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"],
    query_positions: Int[Array, "B T"],
    joined: LayerCache,
    now: Int[Array, "B"],
    state: LayerState,
    softmax: dict,
    sizes: Float[Array, "B T"] | None,
) -> Float[Array, "B Hk S"]:
    """The attention mass of every entry from the phase's observing queries, pooled and reduced over the group."""
    observe, aggregate, key_positions = phase.observe, phase.aggregate, joined.positions
    at = observe.looking(query_positions, state.extra)
    query = query[:, :, -at.shape[1] :]
    if not getattr(observe, "own_keys", True):
        key_positions = key_positions.at[:, :, -at.shape[1] :].set(EMPTY)
    weights = None if sizes is None else 1 / jnp.maximum(sizes[:, -at.shape[1] :], 1e-12)
    mass = prefill_attend_mass(
        layout, query, keys, at, key_positions, reduce=aggregate.queries, weights=weights, **softmax
    )
    if OUTPUT in aggregate.needs and state.out is not None:
        mass = aggregate.by_output(mass, filled(joined.values, joined.positions), state.out)
    apart = phase.protects.recent_entries(key_positions, now, state.limits)
    mass = aggregate.along_text(mass, key_positions, apart)
    mass = aggregate.over_group(mass, keys.shape[1], state.learned)
    return aggregate.raised(mass, key_positions, apart)


def _cut_prompt(
    policy: Policy,
    joined: LayerCache,
    mass: Float[Array, "B Hk S"] | None,
    now: Int[Array, "B"],
    window: int | None,
    state: LayerState,
    inputs: ScoreInputs,
    lead: Float[Array, "B Hk S"] | None = None,
) -> LayerState:
    """The cache cut back to its slots, with the slot of the next token chosen."""
    live = alive(joined.positions, now, window)
    joined = dataclasses.replace(joined, positions=jnp.where(live, joined.positions, EMPTY))
    pooled = window is None and (policy.allocate.pooled or isinstance(state.cache, Pool))
    rest = getattr(state.cache, "rest", None)
    share = policy.allocate if window is None and isinstance(policy.allocate, Across) else None
    if policy.prefill is None or not state.look:
        rank = joined.positions.astype(jnp.float32)
        if share is not None:
            put_up = attend_model.candidates(share, joined, rank, state.slots, state.limits, state.limits)
            return dataclasses.replace(state, cache=put_up)
        if pooled:
            pool = attend_pool.cut(
                policy, joined, state.slots, state.limits, jnp.zeros_like(state.limits), lambda *_: rank, state.learned,
                rest,
            )  # fmt: skip
            return dataclasses.replace(state, cache=attend_pool.aim(policy, pool, None, now, state.limits, inputs))
        kept = slots_of.keep(joined, rank, state.slots, state.limits)
        return dataclasses.replace(state, cache=_aim(policy, kept, None, now, window, state.limits, inputs))

    reserved = jnp.broadcast_to(policy.prefill.reserved(state.limits), state.limits.shape)
    room = state.limits - reserved
    worth_of = lambda phase, kept: priority(  # noqa: E731
        phase, joined.stats, joined.positions, mass, now, state.limits, inputs, kept
    )
    carried = joined.stats if mass is None else {**joined.stats, "mass": mass}  # moves with its entries, then goes
    carrying = dataclasses.replace(joined, stats=carried)
    if share is not None:
        protected = policy.prefill.protects.protected(joined.positions, now, state.limits)
        facts = {
            "positions": joined.positions, "mass": mass, "now": now, "limits": state.limits, "protected": protected,
        }  # fmt: skip
        profile = share.profile(dataclasses.replace(inputs, **facts), state.slots)
        guard = attend_pool.guarded(policy, state.limits)
        worth = share.worth(worth_of(policy.prefill, room), joined.positions, profile)
        put_up = attend_model.candidates(share, carrying, worth, state.slots, room, guard)
        return dataclasses.replace(state, cache=put_up, profile=profile)
    if pooled:
        kept = attend_pool.cut(policy, carrying, state.slots, state.limits, reserved, worth_of, state.learned, rest)
    else:
        worth = worth_of(policy.prefill, room) if lead is None else lead
        state = dataclasses.replace(state, worth=worth if policy.reuse > 1 else None)
        kept = slots_of.keep(carrying, worth, state.slots, room)
    mass = kept.stats.get("mass")
    kept = dataclasses.replace(kept, stats={name: kept.stats[name] for name in policy.stats})
    if isinstance(kept, Pool):
        aimed = attend_pool.aim(policy, kept, mass, now, state.limits, inputs)
        stats = attend_pool.observe(policy, policy.prefill, kept.stats, mass, now)
        return dataclasses.replace(state, cache=dataclasses.replace(aimed, stats=stats))
    aimed = _aim(policy, kept, mass, now, window, state.limits, inputs)
    stats = policy.observe(policy.prefill, kept.stats, mass, now)
    return dataclasses.replace(state, cache=dataclasses.replace(aimed, stats=stats))


def _aim(
    policy: Policy,
    layer: LayerCache,
    mass: Float[Array, "B Hk C"] | None,
    now: Int[Array, "B"],
    window: int | None,
    limits: Int[Array, "B"],
    inputs: ScoreInputs,
) -> LayerCache:
    """The layer with `next_slot` set: an empty or expired slot, else the one that the decode phase values least.

    Its statistics are those before this mass; where nobody looked all are alike, so the oldest goes.
    """
    live = alive(layer.positions, now, window)
    phase = policy.decode
    if phase is None or phase.every > 1:  # there always is an empty or expired slot
        return dataclasses.replace(layer, next_slot=jnp.argmin(live, axis=-1).astype(jnp.int32))
    if mass is None:
        mass = jnp.zeros(layer.positions.shape, jnp.float32)
    worth = priority(phase, layer.stats, layer.positions, mass, now, limits, _decoding(policy, layer, inputs))
    return dataclasses.replace(layer, next_slot=victim(worth, layer.positions, live, limits))


def _decoding(policy: Policy, layer: LayerCache, inputs: ScoreInputs) -> ScoreInputs:
    """What a decode score may look at: the layer's own entries, and no queries."""
    keys, places = layer.keys, layer.positions
    if policy.rope == "cache" and inputs.rotate is not None:
        places = slots_of.ranks(layer.positions)
        keys = inputs.rotate(keys, places)
    return dataclasses.replace(
        inputs, keys=keys, values=layer.values, places=places, queries=None, query_positions=None, query_places=None
    )


def _turned(spec: AttentionSpec, x: Float[Array, "*lead D"], positions: Int[Array, "..."]) -> Float[Array, "*lead D"]:
    """`x` turned to its positions as the layer turns its queries and keys."""
    return rotate(x, positions, spec.rope)


def decode_layer(
    policy: Policy,
    position: Int[Array, "B"],
    layout: Layout,
    implementation: str | None,
    spec: AttentionSpec,
    query: Float[Array, "B 1 Hq D"],
    key: Float[Array, "B 1 Hk D"],
    value: Float[Array, "B 1 Hk D"],
    state: LayerState,
) -> tuple[Float[Array, "B 1 Hq D"], LayerState]:
    """Write one token into the next slot, attend over all slots, and choose the slot after it.

    A row whose position is -1 has finished: its cache stays as it is.
    """
    query, key, value = (layout.lay("heads", x)[:, 0] for x in (query, key, value))  # [B, H, D]
    layer, phase, limits = state.cache, policy.decode, state.limits
    active = position >= 0
    at_once = phase is not None and phase.every == 1
    rule = Rule(phase.aggregate.heads, phase.protects.sinks) if phase and at_once and phase.linear else None
    rotation = functools.partial(_turned, spec)
    inputs = ScoreInputs(rotate=rotation, scale=spec.scale, layer=state.layer, out=state.out, learned=state.learned)
    entered = policy.enter(
        key[:, :, None], value[:, :, None], positions=position[:, None], rotate=rotation, prompt=False,
        learned=state.learned,
    )  # fmt: skip
    if isinstance(layer, Pool):
        query, key = (rotate(x, position[:, None], spec.rope) for x in (query, key))
        output, pool = attend_pool.decode_pool(
            policy, layout, position, query, key, value, entered, layer, limits, inputs,
            scale=spec.scale, softcap=spec.softcap, line=state.line, implementation=implementation,
        )  # fmt: skip
        token = None if state.line is None else (key, value)
        return output[:, None], dataclasses.replace(state, cache=pool, line=None, token=token)
    stats = _write_stats(layer, entered, active)

    turn = None
    if policy.rope == "text":
        query, key = (rotate(x, position[:, None], spec.rope) for x in (query, key))
    else:
        in_turn = phase is not None and not at_once and spec.window is None  # expired slots are filled out of turn
        places = slots_of.around if in_turn else slots_of.ranks
        turn = Turn(places, functools.partial(_turn_by_place, spec, layer.slots))

    result = decode_attend_score(
        layout,
        query,
        key,
        value,
        position,
        layer.next_slot,
        layer.keys,
        layer.values,
        layer.positions,
        limits,
        *_score_of(phase, layer, stats, position, limits),
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        group=phase.aggregate.group if phase else "sum",
        rule=rule,
        turn=turn,
        implementation=implementation,
    )
    before, stats = stats, policy.observe(phase, stats, result.mass, position + 1) if phase else stats
    stats = {name: jnp.where(active[:, None, None], stat, layer.stats[name]) for name, stat in stats.items()}
    layer = LayerCache(result.keys, result.values, result.positions, result.next_slot, stats)
    if phase is not None and at_once and not phase.linear:
        scored = dataclasses.replace(layer, stats=before)
        aimed = _aim(policy, scored, result.mass, position + 1, spec.window, limits, inputs).next_slot
        layer = dataclasses.replace(layer, next_slot=jnp.where(active[:, None], aimed, layer.next_slot))
    if phase is not None and not at_once:
        layer = _cut_when_full(policy, phase, layer, before, result.mass, position, spec.window, state, inputs)
    return layout.lay("context", result.output[:, None]), dataclasses.replace(state, cache=layout.layer(layer))


def _score_of(
    phase: Phase | None, layer: LayerCache, stats: dict, position: Int[Array, "B"], limits: Int[Array, "B"]
) -> tuple:
    """Recent tokens protected, weight and bias of the score, as the attention of this step will need them."""
    if phase is None or not phase.linear:
        return (jnp.zeros_like(limits),)
    positions = jnp.where(_filling(layer, position >= 0), position[:, None, None], layer.positions)
    return (phase.protects.recents(limits), *phase.score.factors(stats, positions, position + 1))


def _write_stats(layer: LayerCache, entered: dict, active: Bool[Array, "B"]) -> dict:
    """The layer's statistics with those of the new token in its slot."""
    new = _filling(layer, active)
    return {name: jnp.where(new, entered[name], stat) for name, stat in layer.stats.items()}


def _filling(layer: LayerCache, active: Bool[Array, "B"]) -> Bool[Array, "B Hk C"]:
    """True for the slots that the rows' next tokens fill; nowhere in rows that have finished.

    A mask and not an index: where slots are divided over devices, each can tell its own.
    """
    slot = jnp.where(active[:, None], layer.next_slot, layer.slots)
    return lax.broadcasted_iota(jnp.int32, layer.positions.shape, 2) == slot[..., None]


def _turn_by_place(
    spec: AttentionSpec,
    slots: int,
    query: Float[Array, "B Hk G D"],
    keys: Float[Array, "B Hk C D"],
    places: Int[Array, "B Hk C"],
    place: Int[Array, "B Hk"],
) -> tuple[Float[Array, "B Hk G D"], Float[Array, "B Hk C D"]]:
    """Query and keys turned by their place among `slots` in the cache instead of the text."""
    return rotate(query, place[..., None], spec.rope), rotate(keys, places, spec.rope, below=slots)


def _cut_when_full(
    policy: Policy,
    phase: Phase,
    layer: LayerCache,
    before: dict,
    mass: Float[Array, "B Hk C"],
    position: Int[Array, "B"],
    window: int | None,
    state: LayerState,
    inputs: ScoreInputs,
) -> LayerCache:
    """Rows that have run `every` tokens over their budget are cut back to it, the others stay whole.

    The statistics `before` this mass score, as in the attention kernel.
    """
    now = position + 1
    live = alive(layer.positions, now, window)
    held = jnp.max(jnp.sum(live, axis=-1, dtype=jnp.int32), axis=-1)
    full = (position >= 0) & (held >= state.limits + phase.every)

    def cut(layer: LayerCache) -> LayerCache:
        seen = _decoding(policy, layer, inputs)
        worth = priority(phase, before, layer.positions, mass, now, state.limits, seen)
        positions, stats = jnp.where(live, layer.positions, EMPTY), {**layer.stats, "worth": worth}
        ordered = slots_of.in_time_order(dataclasses.replace(layer, positions=positions, stats=stats))
        limits = jnp.where(full, state.limits, layer.slots)
        kept = slots_of.keep(ordered, ordered.stats["worth"], layer.slots, limits)
        kept = dataclasses.replace(kept, stats={name: kept.stats[name] for name in layer.stats})
        return _aim(policy, kept, None, now, window, state.limits, inputs)

    return jax.lax.cond(jnp.any(full), cut, lambda layer: layer, layer)
