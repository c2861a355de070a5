"""All layers after a block of the prompt: what they keep together, where they share one budget.

Each layer that shares puts up its best entries, its ceiling at most. Where what a layer keeps can only fall as others
come, these join one line after each layer, which is cut to the whole budget at once; else all are divided when the
block ends. The same entries stay.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attend.aim import aimed
from jaxkv.attend.layer import LayerOut
from jaxkv.attend.leave import absorbed, leaving
from jaxkv.attend.prompt import finished
from jaxkv.models import AttentionSpec
from jaxkv.plan import Plan
from jaxkv.policies.allocator import Allocate, Division, Learned
from jaxkv.policies.needs import MASS
from jaxkv.policies.policy import Phase, Policy
from jaxkv.policies.score import ScoreInputs
from jaxkv.sharding.layout import Layout
from jaxkv.store.entries import WORTH, Entries, appended
from jaxkv.store.line import Place, joined, placed
from jaxkv.store.pool import Pool, arranged
from pallas_kernels.ragged_decode.segments import per_head


@dataclasses.dataclass(frozen=True)
class Sharing:
    """The layers that share one budget (`full`, by number), and what each row's may hold on average: `limits [B]`."""

    policy: Policy
    plan: Plan
    full: Sequence[int]
    limits: Int[Array, "B"]
    layout: Layout

    @property
    def looked(self) -> bool:
        """Whether the prompt's queries say what stays; else everything does."""
        return self.plan.look and self.policy.prefill is not None

    def cut(
        self, entries: Entries, owner: Int[Array, "B N"], heads: int, codecs: Any, profiles: Any
    ) -> tuple[Bool[Array, "B N"], Callable[[Entries], Pool]]:
        """Which candidates of all layers stay (`owner`: the head of each, of as many as all layers have), and the line
        that holds these once they are kept."""
        policy, total = self.policy, heads * sum(self.plan.slots[i] for i in self.full) // len(self.full)
        reserved = policy.prefill.reserved(self.limits) if self.looked and policy.prefill is not None else 0
        each = self.limits - reserved
        guard = jnp.minimum(policy.allocate.guard(self.limits, policy.phases), each)
        held = per_head(entries.filled, owner, heads)
        worth = entries.stats[WORTH]
        kept = policy.allocate.divide(
            Division(entries.positions, owner, worth, held, len(self.full), profiles, each, guard)
        )
        whole = jnp.full_like(self.limits, total)
        room = whole if policy.decode is None else jnp.minimum(heads * self.limits, whole)
        return kept, lambda entries: arranged(entries, owner, kept, total, room, heads, {}, codecs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gathered:
    """What the layers so far keep together, and what each said of itself; zeros for those to come."""

    line: Pool
    profiles: Float[Array, "L B _"] | None


def gathering(sharing: Sharing) -> Callable[..., tuple[Any, LayerOut]] | None:
    """The `fold` of a block through the layers: each one's candidates join the line of those below it, and all are cut
    to what they may hold so far. None where layers share nothing or are divided at the end.

    So the model holds that line, the candidates of one layer and, while they move, the line a second time.
    """
    share, full, count = sharing.policy.allocate, sharing.full, len(sharing.plan.slots)
    spares = not all(share.shares(layer, count) for layer in range(count))
    if not full or not share.cascades or spares or any(phase.evicted.acts for phase in sharing.policy.phases[:1]):
        return None
    number_of = np.searchsorted(full, np.arange(full[-1] + 1))

    def gathered(before: Gathered | None, layer: Any, spec: AttentionSpec, out: LayerOut) -> tuple[Any, LayerOut]:
        if spec.window is not None:
            return before, out
        pool, said, number = out.cache, out.notes.profile, jnp.asarray(number_of)[layer]
        heads = len(full) * pool.heads
        entries, owner = pool.entries, jnp.where(pool.owner < pool.heads, pool.owner + number * pool.heads, heads)
        if before is not None:
            entries = appended(before.line.entries, entries)
            owner = jnp.concatenate([before.line.owner, owner], axis=1)
        profiles = None
        if said is not None:
            none = jnp.zeros((len(full), *said.shape), said.dtype)
            profiles = (none if before is None or before.profiles is None else before.profiles).at[number].set(said)
        _, line = sharing.cut(entries, owner, heads, pool.codecs, profiles)
        beside, reach = pool.beside, pool.heads * sharing.plan.reach
        laid = sharing.layout.layer(Place(line(entries), 0, reach, pool.heads)).line
        return Gathered(laid, profiles), LayerOut(Place(None, 0, reach, pool.heads, beside))

    return gathered


def divided(
    sharing: Sharing,
    outs: Sequence[LayerOut],
    gathered: Gathered | None,
    now: Int[Array, "B"],
    learned: Callable[[int], Learned],
) -> tuple[Any, ...]:
    """The layers' stores after a block. Those that share hold candidates, or have been `gathered`; any other as the
    block left it."""
    stores, policy, full = [out.cache for out in outs], sharing.policy, sharing.full
    if not policy.allocate.divides or not full:
        return tuple(stores)
    pools, limit, looked = [stores[i] for i in full], sharing.limits, sharing.looked
    reach, scored = pools[0].heads * sharing.plan.reach, looked
    if gathered is not None:
        line, scored = gathered.line, looked and gathered.profiles is not None
    else:
        said = [p for p in (outs[i].notes.profile for i in full) if p is not None] if looked else None
        whole = joined(pools)
        profiles = None if said is None else jnp.stack(said)
        kept, line_of = sharing.cut(whole.entries, whole.owner, whole.heads, whole.codecs, profiles)
        if looked and policy.prefill is not None and policy.prefill.evicted.acts:
            width = sharing.plan.reach if policy.allocate.alike else None
            most = policy.allocate.widest(max(sharing.plan.slots[i] for i in full))
            pools = _left(policy, policy.prefill, pools, kept, now, limit, [learned(i) for i in full], width, most)
            whole = joined(pools)
        line = line_of(whole.entries)
    beside = [pool.beside for pool in pools]
    aim = functools.partial(_aimed, beside, reach)
    line = finished(policy, policy.allocate, line, now, None, limit, ScoreInputs(), scored, aim)
    left = dict(zip(full, placed(line, beside, reach), strict=True))
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
