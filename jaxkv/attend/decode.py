"""attend.py for layers whose heads share a pool: the cut of a prompt, and a decode step.

What looks at one entry at a time reads the pool as one long head, `[B, 1, P]`. What compares a head's entries with each
other reads its rectangle, Hk times as large, for as long as that takes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxkv import pool as slots_of
from jaxkv import rest as rests
from jaxkv.cache import LayerCache
from jaxkv.policies.across import Across
from jaxkv.policies.allocate import Adaptive
from jaxkv.policies.layers import Learned
from jaxkv.policies.measured import Divided, Measured
from jaxkv.policies.policy import Phase, Policy, priority
from jaxkv.policies.score import ScoreInputs
from jaxkv.pool import Pool
from jaxkv.rest import Rest
from jaxkv.sharding.attention import ragged_decode
from jaxkv.sharding.layout import Layout
from pallas_kernels.decode_attend_score.victim import Rule
from pallas_kernels.ragged_decode.reference import first_empty, lowest
from pallas_kernels.ragged_decode.segments import mine, per_head, per_slot
from pallas_kernels.rest import with_rest

Worth = Callable[[Phase | None, Int[Array, "B *Hk"]], Float[Array, "B Hk S"]]


def cut(
    policy: Policy,
    joined: LayerCache,
    slots: int,
    limits: Int[Array, "B"],
    reserved: Int[Array, "B"],
    worth_of: Worth,
    learned: Learned,
    rest: Rest | None = None,
) -> Pool:
    """The entries that stay when the heads of the layer share its budget, in a pool of `slots` per head.

    `worth_of(phase, kept)` scores every entry, given how many are to stay per head (`[B]`, or `[B, Hk]`). A layer that
    became a pool under another policy stays one, each head keeping as much as any other would. `rest` stands for what
    was dropped before.
    """
    heads, share = joined.next_slot.shape[-1], policy.allocate
    split = share.of if isinstance(share, Adaptive) else None
    limits = jnp.minimum(limits, slots)
    each = limits - reserved
    total = slots * heads
    room = jnp.full_like(limits, total) if policy.decode is None else heads * (limits + _over(policy))
    owner, positions = slots_of.owners(joined), slots_of.flattened(joined).positions
    flat = lambda worth: worth.reshape(positions.shape)  # noqa: E731
    guard = jnp.minimum(guarded(policy, limits), each)
    if isinstance(share, Measured):
        quota = _quotas(share, learned, positions, owner, heads, each, guard)
        worth = _by_place(policy, learned, flat(worth_of(policy.prefill, quota)), positions, owner, heads)
        kept = slots_of.best(worth, positions, owner, quota)
        lost = ~kept.reshape(joined.positions.shape) & (joined.positions >= 0)
        rest = _compensated(share, learned, rest, joined.keys, joined.values, lost)
        return dataclasses.replace(slots_of.build(joined, kept, total, room), rest=rest)
    first = policy.prefill
    if split is not None and first is not None:
        first = dataclasses.replace(first, score=split)
    kept, safe = slots_of.compete(flat(worth_of(first, each)), positions, owner, heads, heads * each, guard)
    if split is not None:  # the shares are settled: inside each head the policy's own score decides
        quota = per_head(kept, owner, heads)
        worth = jnp.where(safe, jnp.inf, flat(worth_of(policy.prefill, quota)))
        kept = slots_of.best(worth, positions, owner, quota)
    return dataclasses.replace(slots_of.build(joined, kept, total, room), rest=rest)


def guarded(policy: Policy, limits: Int[Array, "B"]) -> Int[Array, "B"]:
    """Entries that every head keeps: the safeguard, and at decode what is protected and one that can go.

    Heads with measured shares keep what any phase protects and a share of the rest; heads that share nothing, all.
    """
    share = policy.allocate
    if isinstance(share, Measured):
        spared = [phase.protects.recents(limits) + phase.protects.sinks for phase in policy.phases]
        spared = jax.tree.reduce(jnp.maximum, spared)
        rest = jnp.floor((limits - spared).astype(jnp.float32) * share.fraction).astype(jnp.int32)
        return jnp.minimum(spared + jnp.maximum(rest, 1), limits)
    if not isinstance(share, Adaptive | Across):
        return limits
    guard = jnp.maximum(jnp.floor(limits.astype(jnp.float32) * share.safeguard).astype(jnp.int32), 1)
    if policy.decode is not None:
        protects = policy.decode.protects
        guard = jnp.maximum(guard, protects.recents(limits) + protects.sinks + 1)
    return jnp.minimum(guard, limits)


def _quotas(
    share: Measured,
    learned: Learned,
    positions: Int[Array, "B N"],
    owner: Int[Array, "B N"],
    heads: int,
    each: Int[Array, "B"],
    guard: Int[Array, "B"],
) -> Int[Array, "B Hk"]:
    """How many entries each head keeps by what was measured, `each [B]` on average over the heads."""
    held = per_head(positions >= 0, owner, heads)
    return share.quotas(learned, heads * each, guard, held, jnp.max(positions, axis=-1) + 1)


def _local_heads(share: Divided, learned: Learned, heads: int) -> Bool[Array, "Hk"]:
    """True for the heads that are local."""
    return share.local(share.scores(learned["retrieval"], heads))


def _local(share: Divided, learned: Learned, owner: Int[Array, "B N"], heads: int) -> Bool[Array, "B N"]:
    """True for the entries of local heads."""
    return per_slot(jnp.broadcast_to(_local_heads(share, learned, heads), (owner.shape[0], heads)), owner)


def _compensated(
    share: Any,
    learned: Learned,
    rest: Rest | None,
    keys: Float[Array, "B #Hk S D"],
    values: Float[Array, "B #Hk S D"],
    lost: Bool[Array, "B Hk S"],
) -> Rest | None:
    """The rest with what the local heads have lost, of a policy that compensates; of any other as it was."""
    if not (isinstance(share, Divided) and share.compensates):
        return rest
    batch, heads = lost.shape[:2]
    rest = rests.empty(batch, heads, keys.shape[-1]) if rest is None else rest
    return rests.added(rest, keys, values, lost & _local_heads(share, learned, heads)[:, None])


def _by_place(
    policy: Policy,
    learned: Learned,
    worth: Float[Array, "B N"],
    positions: Int[Array, "B N"],
    owner: Int[Array, "B N"],
    heads: int,
) -> Float[Array, "B N"]:
    """The worth of each entry, in local heads its position, unless it is protected."""
    if not isinstance(policy.allocate, Divided):
        return worth
    local = _local(policy.allocate, learned, owner, heads) & (worth < jnp.inf)
    return jnp.where(local, positions.astype(jnp.float32), worth)


def _over(policy: Policy) -> int:
    """Tokens per head that decode runs over the budget before it cuts."""
    return policy.decode.every if policy.decode is not None and policy.decode.every > 1 else 0


def aim(
    policy: Policy,
    pool: Pool,
    mass: Float[Array, "B P"] | None,
    now: Int[Array, "B"],
    limits: Int[Array, "B"],
    inputs: ScoreInputs,
) -> Pool:
    """The pool with every head's next slot: its first empty one, else the one that the decode phase values least."""
    if policy.decode is None or policy.decode.every > 1:  # there always is an empty one
        return dataclasses.replace(pool, next_slot=first_empty(pool.positions, pool.offsets))
    worth = worth_at_decode(policy, pool, pool.stats, mass, now, limits, inputs)
    return dataclasses.replace(pool, next_slot=lowest(worth, pool.positions, pool.offsets))


def worth_at_decode(
    policy: Policy,
    pool: Pool,
    stats: dict,
    mass: Float[Array, "B P"] | None,
    now: Int[Array, "B"],
    limits: Int[Array, "B"],
    inputs: ScoreInputs,
) -> Float[Array, "B P"]:
    """What the decode phase values each entry at, from the statistics before this mass; +inf for what it protects."""
    phase = policy.decode
    assert phase is not None
    if mass is None:
        mass = jnp.zeros(pool.positions.shape, jnp.float32)
    by_place = lambda worth: _by_place(policy, inputs.learned, worth, pool.positions, pool.owner, pool.heads)  # noqa: E731
    if phase.linear:
        return by_place(priority(phase, _line(stats), pool.positions[:, None], mass[:, None], now, limits)[:, 0])
    wide = slots_of.rectangle(dataclasses.replace(pool, stats={**stats, "mass": mass}))
    inputs = dataclasses.replace(
        inputs, keys=wide.keys, values=wide.values, places=wide.positions, queries=None, query_positions=None,
        query_places=None,
    )  # fmt: skip
    stats = {name: wide.stats[name] for name in stats}
    worth = priority(phase, stats, wide.positions, wide.stats["mass"], now, limits, inputs)
    return by_place(slots_of.from_rectangle(pool, worth))


def observe(
    policy: Policy, phase: Phase, stats: dict, mass: Float[Array, "B P"] | None, now: Int[Array, "B"]
) -> dict[str, Float[Array, "B P"]]:
    """The statistics after the phase's queries gave each entry this mass."""
    line = policy.observe(phase, _line(stats), None if mass is None else mass[:, None], now)
    return {name: stat[:, 0] for name, stat in line.items()}


def decode_pool(
    policy: Policy,
    layout: Layout,
    position: Int[Array, "B"],
    query: Float[Array, "B Hq D"],
    key: Float[Array, "B Hk D"],
    value: Float[Array, "B Hk D"],
    entered: dict[str, Float[Array, "B Hk 1"]],
    pool: Pool,
    limits: Int[Array, "B"],
    inputs: ScoreInputs,
    **softmax: Any,
) -> tuple[Float[Array, "B Hq D"], Pool]:
    """Write one token into every head's next slot, attend over the heads' segments, and choose the slots after them.

    `query` and `key` are turned already. A row whose position is -1 has finished: its pool stays as it is. What the
    token overwrites goes into the rest, which is attended to as well; the mass is that of the slots alone, for only
    retrieval heads evict by it, and they have no rest.
    """
    phase, active, now = policy.decode, position >= 0, position + 1
    at_once = phase is not None and phase.every == 1
    stats = {name: _put(pool, stat, entered[name][..., 0], active) for name, stat in pool.stats.items()}
    rule, recents, line = None, jnp.zeros_like(limits), ()
    if phase is not None and at_once and phase.linear:
        rule, recents = Rule("each", phase.protects.sinks), phase.protects.recents(limits)
        places = _put(pool, pool.positions, position[:, None], active)
        factors = phase.score.factors(_line(stats), places[:, None], now)
        line = tuple(x[:, 0] if isinstance(x, jax.Array) else x for x in factors)
        if isinstance(policy.allocate, Divided):
            local = _local(policy.allocate, inputs.learned, pool.owner, pool.heads)
            line = (jnp.where(local, 0.0, line[0]), jnp.where(local, places.astype(jnp.float32), line[1]))

    rest = pool.rest
    if rest is not None:
        gone, pool = jax.lax.optimization_barrier((slots_of.next_to_go(pool), pool))  # read before the write
        keys, values, places = (x[:, :, None] for x in gone)
        lost = (places >= 0) & active[:, None, None]
        rest = _compensated(policy.allocate, inputs.learned, rest, keys, values, lost)

    result = ragged_decode(
        layout, query, key, value, position, pool.next_slot, pool.keys, pool.values, pool.positions, pool.offsets,
        recents, *line, group=phase.aggregate.group if phase else "sum", rule=rule,
        whole=isinstance(policy.allocate, Across), **softmax,
    )  # fmt: skip
    before = stats
    if phase is not None:
        stats = observe(policy, phase, stats, result.mass, now)
    stats = {name: jnp.where(active[:, None], stat, pool.stats[name]) for name, stat in stats.items()}
    pool = Pool(result.keys, result.values, result.positions, pool.offsets, result.next_slot, stats, rest)
    output = result.output
    if rest is not None:
        scale, softcap = softmax["scale"], softmax["softcap"]
        output = with_rest(output, result.lse, query, rest.arrays, scale=scale, softcap=softcap)
    if phase is None:
        return output, pool

    output, pool = jax.lax.optimization_barrier((output, pool))  # read before a move, or values would be copied
    worth = lambda pool: worth_at_decode(policy, pool, before, result.mass, now, limits, inputs)  # noqa: E731
    if not at_once:
        full = jnp.min(pool.sizes - pool.held(), axis=-1) <= 0
        return output, _moved(policy, pool, worth, active & full, limits, limits, inputs.learned)
    if not phase.linear:
        aimed = lowest(worth(pool), pool.positions, pool.offsets)
        pool = dataclasses.replace(pool, next_slot=jnp.where(active[:, None], aimed, pool.next_slot))
    share = policy.allocate
    if isinstance(share, Adaptive) and share.interval:
        each = jnp.maximum(limits - share.shift, guarded(policy, limits))
        full = jnp.all((pool.positions >= 0) | (pool.owner == pool.heads), axis=-1)
        pool = _moved(policy, pool, worth, active & full & (now % share.interval == 0), limits, each, inputs.learned)
    return output, pool


def _moved(
    policy: Policy,
    pool: Pool,
    worth: Callable[[Pool], Float[Array, "B P"]],
    due: Bool[Array, "B"],
    limits: Int[Array, "B"],
    each: Int[Array, "B"],
    learned: Learned,
) -> Pool:
    """The rows that are due keep `each [B]` entries per head on average, the best of all heads; so the borders move.

    Where shares were measured, the best of each by its share. What that frees is shared evenly, and the next tokens go
    there.
    """

    def move(_, pool: Pool) -> Pool:
        guard = jnp.minimum(guarded(policy, limits), each)
        share, owner = policy.allocate, pool.owner
        if isinstance(share, Measured):
            quota = _quotas(share, learned, pool.positions, owner, pool.heads, each, guard)
            kept = slots_of.best(worth(pool), pool.positions, owner, quota)
        else:
            kept, _ = slots_of.compete(worth(pool), pool.positions, owner, pool.heads, pool.heads * each, guard)
        new = slots_of.build(pool, kept, pool.total, pool.heads * (limits + _over(policy)))
        lost = mine(owner, pool.heads) & (~kept & (pool.positions >= 0))[:, None]
        rest = _compensated(share, learned, pool.rest, pool.keys[:, None], pool.values[:, None], lost)
        new = dataclasses.replace(new, next_slot=first_empty(new.positions, new.offsets), rest=rest)
        return jax.tree.map(lambda a, b: jnp.where(due.reshape(-1, *(1,) * (a.ndim - 1)), a, b), new, pool)

    # A loop of no or one turn: its carry stays where it is; the branches of a cond would copy the pool at every step
    return jax.lax.fori_loop(0, jnp.any(due).astype(jnp.int32), move, pool)


def _line(stats: dict) -> dict:
    """The statistics of a pool, as of one long head."""
    return {name: stat[:, None] for name, stat in stats.items()}


def _put(
    pool: Pool, x: Shaped[Array, "B P"], new: Shaped[Array, "B Hk_or_1"], active: Bool[Array, "B"]
) -> Shaped[Array, "B P"]:
    """`x` with the new token's in every head's next slot, in rows that run."""
    at = (jnp.arange(active.shape[0])[:, None], jnp.where(active[:, None], pool.next_slot, pool.total))  # out of range
    return x.at[at].set(jnp.broadcast_to(new, pool.next_slot.shape), mode="drop")
