"""Merging: what leaves lives on in a survivor.

Which survivor takes an entry up, how alike the two must be, by what weights they are averaged, and whether an entry
that has taken others up counts for as many in the softmax: each is a choice of its own, and a method is a row of them.
`docs/merging.md` has the table.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.errors import BadValue
from jaxkv.policies.evicted import Evicted, Leaving
from jaxkv.policies.order import in_time
from jaxkv.policies.score import drawn
from jaxkv.store.entries import Change, Entries, packed, picked, placed_at
from jaxkv.store.threshold import Threshold

SEARCHED = 256  # leaving entries whose nearest survivors are looked for together
UNLIKE = -2.0  # the similarity of what is no survivor: below every cosine
LAST = jnp.iinfo(jnp.int32).max

INTO = ("nearest", "product", "neighbour", "next", "chain")
BY = ("equal", "similarity", "norm", "gaussian", "attention", "mean-attention", "pivot")
WHAT = ("both", "values")
ATTENTION = "attention"  # the statistic in which scores add the attention up


@dataclasses.dataclass(frozen=True)
class Merge(Evicted):
    """x_c <- (n_c w_c x_c + sum n_e w_e x_e) / N over the entries e that survivor c takes up, n the tokens of each.

    `into`: the survivor of largest cosine of keys ("nearest") or of largest product ("product"); the nearest by
    position ("neighbour": of two as near the older); the next by position ("next", the one before where there is none);
    or of the survivors on both sides the one in whose run of neighbours it stands ("chain": between two survivors the
    run breaks where adjacent keys have the least cosine).
    `alike`: the cosine with that survivor from which an entry is taken up, else it is dropped; -1 takes up all.
    "average" is D2O's: m are the cosines of a cut, tau their mean the first time, later alpha tau + beta mean(m), and
    the e-th entries that the heads lose, in time order, are taken up where the mean of their m is at least tau.
    `by`: w_c = 1, and w_e = 1 ("equal"), the cosine m_e ("similarity"), max(m_e, 0) |v_e| / (|v_e| + |v_c|) ("norm"),
    exp(-|k_e - k_c|^2 / (2 sigma^2)) ("gaussian"); or n w is the attention that an entry has had ("attention"), per
    token that could see it ("mean-attention"); "pivot": each (x_e + x_c) / 2 counts as one, as does x_c.
    `divide`: N is the "sum" of the weights, or the "count" of entries, n_c + sum n_e, as D2O has it.
    `what`: keys and values ("both") or "values" alone. With `turned` keys are averaged as they are multiplied; without,
    each is first turned by RoPE to its survivor's position, so that fast channels don't cancel. `direction`: of keys
    the directions are averaged, and the survivor keeps its norm. `counts`: an entry that stands for n has log n added
    to its logit. `spares`: what the phase protects takes nothing up.

    Source: D2O (arXiv 2406.13035) in its release's form, with the defaults; tau begins anew with every text, unlike
    there. Others: KVMerger (2407.08454), KeepKV (2504.09936), WeightedKV (2503.01330), LOOK-M (2406.18139), Elastic
    Cache (2407.18121), ZSMerge (2503.10714), kvpress' MergingPress ("norm").
    """

    into: str = "nearest"
    alike: float | str = "average"
    by: str = "similarity"
    divide: str = "count"
    what: str = "both"
    turned: bool = True
    direction: bool = False
    counts: bool = False
    spares: bool = False
    alpha: float = 0.5
    beta: float = 0.5
    sigma: float = 5.0
    kind: ClassVar[str] = "merge"
    moves: ClassVar[bool] = True
    single: ClassVar[bool] = True

    def __post_init__(self):
        choices = (("into", INTO), ("by", BY), ("divide", ("sum", "count")), ("what", WHAT))
        for name, known in choices:
            if getattr(self, name) not in known:
                raise BadValue(f"{name}={getattr(self, name)!r} of evicted kind 'merge': expected one of {known}")
        if self.alike != "average" and (isinstance(self.alike, str) or not -1 <= self.alike <= 1):
            raise BadValue(f"alike={self.alike!r}: expected a cosine from -1 (take up all) to 1, or 'average'")
        if not 0 <= self.alpha <= 1 or not 0 <= self.beta <= 1:
            raise BadValue(f"alpha={self.alpha}, beta={self.beta}: expected weights of a moving average from 0 to 1")
        if self.sigma <= 0:
            raise BadValue(f"sigma={self.sigma}: expected a width above 0")

    @property
    def state(self) -> str:
        """A moving average is remembered, under this name."""
        return "threshold" if self.alike == "average" else ""

    @property
    def weighs(self) -> bool:
        return self.counts

    @property
    def attentive(self) -> bool:
        return "attention" in self.by

    def check(self, policy: Any) -> None:
        if self.attentive and ATTENTION not in policy.stats:
            raise BadValue(
                f"policy {policy.name!r} merges by={self.by!r}, the attention so far, which none of its scores adds "
                "up: use score kind 'accumulated-attention', or another by="
            )
        if not self.turned and policy.allocate.divides:
            raise BadValue(
                f"policy {policy.name!r} turns keys back before it merges them (turned=false), and its layers share a "
                "budget, where they are merged without what the model knows of RoPE: expected turned=true"
            )

    def begin(self, batch: int, heads: int, head_dim: int, dtype: Any) -> Threshold:
        return Threshold(jnp.zeros(batch, jnp.float32), jnp.zeros(batch, bool))

    def absorb(self, beside, kept, lost, facts):
        assert kept is not None
        if lost.positions.shape[-1] == 1:
            return self._overwritten(beside, kept, lost, facts)
        takers = kept if not self.spares or facts.spared is None else kept.masked(~facts.spared)
        target, near = self._targets(lost, kept, takers, facts.most)
        gone = lost.filled & jnp.any(takers.filled, axis=-1, keepdims=True)
        joins, beside = self._joining(beside, gone, near)
        return self._merged(kept, lost, joins, jnp.where(joins, target, kept.positions.shape[-1]), near, facts), beside

    def take(self, beside, held, takers, gone, facts):
        flat, slots = held.positions.ndim == 2, takers.shape[-1]
        if self.spares and facts.spared is not None:
            takers = takers & ~facts.spared
        slot, near = self._of_one(held, takers, gone, flat)
        some = gone.filled & jnp.any(takers, axis=-1, keepdims=True)
        joins, beside = self._joining(beside, some, near[..., None])
        one = lambda x: picked(x, slot, flat=flat)[:, :, None]  # noqa: E731
        stats = {name: one(stat) for name, stat in held.stats.items()}
        weight = None if held.weight is None else one(held.weight)
        kept = Entries(one(held.keys), one(held.values), one(held.positions), stats, weight)
        new = self._merged(kept, gone, joins, jnp.where(joins, 0, 1), near[..., None], facts)
        weight = None if new.weight is None else new.weight[..., 0]
        return Change(jnp.where(joins[..., 0], slot, slots), new.keys[:, :, 0], new.values[:, :, 0], weight), beside

    def _overwritten(self, beside: Any, kept: Entries, lost: Entries, facts: Leaving) -> tuple[Entries, Any]:
        """`take` of entries by head."""
        change, beside = self.take(beside, kept, kept.filled, lost, facts)
        put = lambda x, new: x if new is None else placed_at(x, change.slot, new, flat=False)  # noqa: E731
        names = ("keys", "values", "weight")
        return dataclasses.replace(kept, **{n: put(getattr(kept, n), getattr(change, n)) for n in names}), beside

    def _joining(
        self, beside: Any, gone: Bool[Array, "B Hk E"], near: Float[Array, "B Hk E"]
    ) -> tuple[Bool[Array, "B Hk E"], Any]:
        """Which entries are taken up, by how alike they are to their survivors."""
        if isinstance(self.alike, str):
            return self._alike_together(beside, gone, near)
        return gone & (near >= self.alike) if self.alike > -1 else gone, beside

    @property
    def _looks_alike(self) -> bool:
        """Whether it asks for the cosine with a survivor that is found otherwise."""
        return self.alike != -1 or self.by in ("similarity", "norm")

    def _targets(
        self, lost: Entries, kept: Entries, takers: Entries, most: int
    ) -> tuple[Int[Array, "B Hk E"], Float[Array, "B Hk E"]]:
        """The slot of each leaving entry's survivor, and the cosine of the two keys."""
        if self.into in ("nearest", "product"):
            near, target = nearest(lost, takers, self.into == "nearest", most)
            if self.into == "nearest":
                return target, near
        else:
            target = self._at_a_cut(lost, kept, takers)
        if not self._looks_alike:
            return target, jnp.zeros(target.shape, jnp.float32)
        return target, cosine(lost.keys, _at(kept.keys, target))

    def _of_one(
        self, held: Entries, takers: Bool[Array, "B Hk S"], gone: Entries, flat: bool
    ) -> tuple[Int[Array, "B Hk"], Float[Array, "B Hk"]]:
        """The survivor of one leaving entry per head, where they lie, and the cosine of the two keys."""
        key = gone.keys[:, :, 0].astype(jnp.float32)
        if self.into in ("nearest", "product"):
            alike = products(key, held.keys, takers, cosine=self.into == "nearest")
            near, slot = highest_at(alike)
            if self.into == "nearest":
                return slot, near
        else:
            at = held.positions[:, None] if flat else held.positions
            slot = self._beside(jnp.where(takers, at, -1), gone.positions, held.keys, key, flat)
        if not self._looks_alike:
            return slot, jnp.zeros(slot.shape, jnp.float32)
        return slot, cosine(key, picked(held.keys, slot, flat=flat))

    def _at_a_cut(self, lost: Entries, kept: Entries, takers: Entries) -> Int[Array, "B Hk E"]:
        """By position, of entries that lie where the survivors lie."""
        order = in_time(jnp.maximum(lost.positions, kept.positions))
        place = jnp.broadcast_to(jnp.arange(order.index.shape[-1], dtype=jnp.int32), order.index.shape)
        takes, at = order.put(takers.filled), order.put(jnp.maximum(lost.positions, kept.positions))
        before = lax.cummax(jnp.where(takes, place, -1), axis=2)
        after = lax.cummin(jnp.where(takes, place, LAST), axis=2, reverse=True)
        chosen = _one_of(before, after)
        both = (before >= 0) & (after < LAST)
        safe = lambda x: jnp.clip(x, 0, place.shape[-1] - 1)  # noqa: E731
        if self.into == "neighbour":
            back, ahead = (jnp.take_along_axis(at, safe(x), axis=-1) for x in (before, after))
            chosen = jnp.where(both & (at - back <= ahead - at), before, chosen)
        if self.into == "chain":
            keys = order.put(jnp.where(lost.filled[..., None], lost.keys, kept.keys))
            link = cosine(keys, jnp.roll(keys, 1, axis=2))  # with the entry before
            apart = order.put(kept.filled & ~takers.filled)  # what is spared breaks every run
            link = jnp.where(apart | jnp.roll(apart, 1, axis=-1), UNLIKE, link)
            backwards = _least_since(link, takes)
            forwards = _least_until(link, takes)
            chosen = jnp.where(both & (forwards < backwards), before, chosen)
        return order.slots(jnp.take_along_axis(order.index, safe(chosen), axis=-1)).astype(jnp.int32)

    def _beside(
        self,
        held: Int[Array, "B Hk S"],
        at: Int[Array, "B Hk 1"],
        keys: Float[Array, "B *S D"],
        key: Float[Array, "B Hk D"],
        flat: bool,
    ) -> Int[Array, "B Hk"]:
        """By position, of one leaving entry per head: no sort, which a step would feel."""
        before = jnp.argmax(jnp.where(held < at, held, -1), axis=-1)
        after = jnp.argmin(jnp.where(held > at, held, LAST), axis=-1)
        older, younger = (jnp.any(x, axis=-1) for x in ((held >= 0) & (held < at), held > at))
        back, ahead = (jnp.take_along_axis(held, x[..., None], axis=-1)[..., 0] for x in (before, after))
        first, at = ~younger, at[..., 0]
        if self.into == "neighbour":
            first = first | (older & (at - back <= ahead - at))
        if self.into == "chain":
            with_both = [cosine(key, picked(keys, x, flat=flat)) for x in (before, after)]
            first = first | (older & (with_both[1] < with_both[0]))
        return jnp.where(first, before, after).astype(jnp.int32)

    def _alike_together(
        self, state: Threshold, gone: Bool[Array, "B Hk E"], near: Float[Array, "B Hk E"]
    ) -> tuple[Bool[Array, "B Hk E"], Threshold]:
        """Which entries are taken up by the moving average of all heads, and that average after them."""
        place = jnp.where(gone, jnp.cumsum(gone, axis=-1, dtype=jnp.int32) - 1, gone.shape[-1])  # of those that leave
        near = jnp.where(gone, near, 0.0)
        total, count = (_over_heads(x, place) for x in (near, gone.astype(jnp.float32)))
        many = jnp.sum(count, axis=-1)
        mean = jnp.sum(total, axis=-1) / jnp.maximum(many, 1.0)
        moved = jnp.where(state.begun, self.alpha * state.tau + self.beta * mean, mean)
        state = Threshold(jnp.where(many > 0, moved, state.tau), state.begun | (many > 0))
        alike = total / jnp.maximum(count, 1.0) >= state.tau[:, None]
        if gone.shape[-1] == 1:
            return gone & alike[:, None], state
        return gone & jnp.take_along_axis(alike[:, None], jnp.minimum(place, gone.shape[-1] - 1), axis=-1), state

    def _merged(
        self,
        kept: Entries,
        lost: Entries,
        joins: Bool[Array, "B Hk E"],
        targets: Int[Array, "B Hk E"],
        near: Float[Array, "B Hk E"],
        facts: Leaving,
    ) -> Entries:
        """The survivors with what they take up; a target past the last survivor is nobody's."""
        slots = kept.positions.shape[-1]
        add = jax.vmap(jax.vmap(lambda x, at: jax.ops.segment_sum(x, at, slots + 1)[:slots]))
        if slots == 1:  # one leaves, and is 0 where it is not taken up: no scatter, which a step would feel
            add = lambda x, at: x  # noqa: E731
        own, theirs = self._weights(kept, lost, jnp.minimum(targets, slots - 1), near, facts)
        one = lambda entries: jnp.ones(entries.positions.shape) if entries.weight is None else entries.weight  # noqa: E731
        n, more = one(kept), jnp.where(joins, one(lost), 0.0)
        stands = n + add(more, targets)
        if self.by == "pivot":
            own = own + 0.5 * add(more, targets) / n
        if "attention" in self.by:  # of all tokens that an entry stands for
            own, theirs = own, jnp.where(joins, theirs, 0.0)
        else:
            own, theirs = n * own, more * jnp.where(joins, theirs, 0.0)
        whole = stands if self.divide == "count" else own + add(theirs, targets)
        taken = (stands > n) & (whole > 0)
        whole = jnp.where(taken, whole, 1.0)

        def mean(x: jax.Array, gone: jax.Array) -> jax.Array:
            gone = jnp.where(joins[..., None], gone.astype(jnp.float32), 0.0)
            wide = x.astype(jnp.float32)
            new = (own[..., None] * wide + add(gone * theirs[..., None], targets)) / whole[..., None]
            return jnp.where(taken[..., None], new, wide).astype(x.dtype)

        weight = None if kept.weight is None else jnp.where(kept.filled, jnp.where(taken, stands, n), 1.0)
        kept = dataclasses.replace(kept, values=mean(kept.values, lost.values), weight=weight)
        if self.what == "values":
            return kept
        keys = lost.keys
        if not self.turned and facts.rotate is not None:
            there = jnp.take_along_axis(kept.positions, jnp.minimum(targets, slots - 1), axis=-1)
            keys = facts.rotate(keys, jnp.where(joins, there - lost.positions, 0))
        if not self.direction:
            return dataclasses.replace(kept, keys=mean(kept.keys, keys))
        norm = jnp.linalg.norm(kept.keys.astype(jnp.float32), axis=-1, keepdims=True)
        new = unit(mean(unit(kept.keys), unit(keys))) * norm
        return dataclasses.replace(kept, keys=jnp.where(taken[..., None], new.astype(kept.keys.dtype), kept.keys))

    def _weights(
        self, kept: Entries, lost: Entries, target: Int[Array, "B Hk E"], near: Float[Array, "B Hk E"], facts: Leaving
    ) -> tuple[Float[Array, "B Hk C"], Float[Array, "B Hk E"]]:
        """w of the survivors, and of what leaves."""
        ones = jnp.ones(kept.positions.shape, jnp.float32)
        if "attention" in self.by:
            both = []
            for entries in (kept, lost):
                seen = entries.stats[ATTENTION]
                if self.by == "mean-attention":
                    assert facts.now is not None
                    seen = seen / jnp.maximum(facts.now[:, None, None] - entries.positions, 1).astype(jnp.float32)
                both.append(seen)
            return both[0], both[1]
        if self.by == "similarity":  # a sum of weights must not come near 0
            return ones, jnp.maximum(near, 0.0) if self.divide == "sum" else near
        if self.by == "norm":
            size = lambda x: jnp.linalg.norm(x.astype(jnp.float32), axis=-1)  # noqa: E731
            own = size(lost.values)
            return ones, jnp.maximum(near, 0.0) * own / (own + size(_at(kept.values, target)) + 1e-6)
        if self.by == "gaussian":
            apart = lost.keys.astype(jnp.float32) - _at(kept.keys, target).astype(jnp.float32)
            return ones, jnp.exp(-jnp.sum(apart**2, axis=-1) / (2 * self.sigma**2))
        half = 0.5 if self.by == "pivot" else 1.0
        return ones, jnp.full(lost.positions.shape, half, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Spread(Evicted):
    """A value that leaves is spread over the next `over` survivors by position: with probability p, v_e / m is added to
    each of the m <= `over` that there are. Its key goes.

    p = min(a_e / mean a, 1), a the attention that an entry has had so far and the mean that of the m; drawn from
    position, head and seed. Source: CaM (ICML 2024, openreview LCTmppB165), in the form of its release for streaming,
    where v / m has m = `over` always.
    """

    over: int = 32
    seed: int = 0
    kind: ClassVar[str] = "spread"
    moves: ClassVar[bool] = True
    reads_keys: ClassVar[bool] = False
    attentive: ClassVar[bool] = True

    def __post_init__(self):
        if self.over < 1:
            raise BadValue(f"over={self.over}: expected at least 1 survivor over which a value is spread")

    def check(self, policy: Any) -> None:
        if ATTENTION not in policy.stats:
            raise BadValue(
                f"policy {policy.name!r} spreads values by the attention so far, which none of its scores adds up: "
                "use score kind 'accumulated-attention'"
            )

    def absorb(self, beside, kept, lost, facts):
        assert kept is not None
        slots = kept.positions.shape[-1]
        order = in_time(kept.positions)
        at = jnp.where(order.filled, order.put(kept.positions), LAST)
        first = jax.vmap(jax.vmap(lambda a, e: jnp.searchsorted(a, e).astype(jnp.int32)))(at, lost.positions)
        count = order.count[..., None]
        last = jnp.minimum(first + self.over, count)
        many = jnp.maximum(last - first, 0).astype(jnp.float32)
        upto = jnp.cumsum(jnp.where(order.filled, order.put(kept.stats[ATTENTION]), 0.0), axis=-1)
        upto = jnp.pad(upto, ((0, 0), (0, 0), (1, 0)))
        ahead = jnp.take_along_axis(upto, last, axis=-1) - jnp.take_along_axis(upto, jnp.minimum(first, slots), axis=-1)
        mean = ahead / jnp.maximum(many, 1.0)
        chance = jnp.where(mean > 0, lost.stats[ATTENTION] / jnp.where(mean > 0, mean, 1.0), 1.0)
        joins = lost.filled & (many > 0) & (drawn(lost.positions, self.seed) < chance)
        value = jnp.where(joins[..., None], lost.values.astype(jnp.float32), 0.0) / jnp.maximum(many, 1.0)[..., None]
        add = jax.vmap(jax.vmap(lambda x, at: jax.ops.segment_sum(x, at, slots + 1)))
        more = jnp.cumsum(add(value, jnp.minimum(first, slots)) - add(value, last), axis=2)[:, :, :slots]
        more = order.slots(jnp.where(order.filled[..., None], more, 0.0))
        values = (kept.values.astype(jnp.float32) + more).astype(kept.values.dtype)
        return dataclasses.replace(kept, values=jnp.where(kept.filled[..., None], values, kept.values)), beside


def unit(x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
    """The direction, float32; 0 of 0."""
    x = x.astype(jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-30)


def cosine(x: Float[Array, "*lead D"], y: Float[Array, "*lead D"]) -> Float[Array, "*lead"]:
    """Of each pair."""
    return jnp.sum(unit(x) * unit(y), axis=-1)


def nearest(
    lost: Entries, kept: Entries, cosine: bool = True, most: int = 0
) -> tuple[Float[Array, "B Hk E"], Int[Array, "B Hk E"]]:
    """The largest cosine (or product) of each leaving key with a survivor's of its head, and the first survivor that
    has it.

    Some leaving entries at a time, so that there is no array of all by all. What is no survivor comes last. `most`
    survivors a head has (0: nobody knows).
    """
    size = unit if cosine else (lambda x: x.astype(jnp.float32))
    there, keys, index = kept.filled, kept.keys, None
    if 0 < most < there.shape[-1]:  # side by side, in their order
        index = packed(there, most)
        there, index = index >= 0, jnp.maximum(index, 0)
        keys = _at(keys, index)
    keys = size(jnp.where(there[..., None], keys, jnp.zeros((), keys.dtype)))
    rows = size(jnp.where(lost.filled[..., None], lost.keys, jnp.zeros((), lost.keys.dtype)))

    def some(rows: Float[Array, "B Hk N D"]) -> tuple[jax.Array, jax.Array]:
        alike = jnp.einsum("bhnd,bhcd->bhnc", rows, keys, precision=lax.Precision.HIGHEST)
        alike = jnp.where(there[:, :, None], alike, UNLIKE if cosine else -jnp.inf)
        return highest_at(alike)

    count = rows.shape[2]
    step = -(-count // -(-count // SEARCHED))
    parts = jnp.pad(rows, ((0, 0), (0, 0), (0, -count % step), (0, 0)))
    parts = jnp.moveaxis(parts.reshape(*rows.shape[:2], -1, step, rows.shape[-1]), 2, 0)
    found = lax.map(some, parts)
    near, target = (jnp.moveaxis(x, 0, 2).reshape(*rows.shape[:2], -1)[..., :count] for x in found)
    return near, target if index is None else jnp.take_along_axis(index, target, axis=-1)


def highest_at(x: Float[Array, "*lead C"]) -> tuple[Float[Array, "*lead"], Int[Array, "*lead"]]:
    """The highest of each row, and the first place that has it: as `argmax`, in two reductions that are vectorised."""
    top = jnp.max(x, axis=-1)
    place = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    first = jnp.min(jnp.where(x == top[..., None], place, LAST), axis=-1)
    return top, jnp.minimum(first, x.shape[-1] - 1)


def products(
    key: Float[Array, "B Hk D"], keys: Float[Array, "B *S D"], among: Bool[Array, "B Hk S"], *, cosine: bool
) -> Float[Array, "B Hk S"]:
    """The product, or the cosine, of one key per head with those `among` the slots, wherever they lie: K is read once.
    Below every other where a slot is not."""
    key = unit(key) if cosine else key
    lies, keys = "bhsd" if keys.ndim == 4 else "bsd", keys.astype(jnp.float32)
    alike = jnp.einsum(f"bhd,{lies}->bhs", key, keys, precision=lax.Precision.HIGHEST)
    if cosine:
        size = jnp.sqrt(jnp.sum(keys * keys, axis=-1))
        alike = alike / jnp.maximum(size if keys.ndim == 4 else size[:, None], 1e-30)
    return jnp.where(among, alike, UNLIKE if cosine else -jnp.inf)


def _at(x: Float[Array, "B Hk C D"], target: Int[Array, "B Hk E"]) -> Float[Array, "B Hk E D"]:
    return jnp.take_along_axis(x, target[..., None], axis=2)


def _one_of(before: Int[Array, "B Hk S"], after: Int[Array, "B Hk S"]) -> Int[Array, "B Hk S"]:
    """The place of the next one that takes, or of the last one before where there is none."""
    return jnp.where(after < LAST, after, before)


def _least_since(link: Float[Array, "B Hk S"], takes: Bool[Array, "B Hk S"]) -> Float[Array, "B Hk S"]:
    """The least link on the way from each entry back to the last one before it that takes."""

    def join(a, b):
        return a[0] | b[0], jnp.where(b[0], b[1], jnp.minimum(a[1], b[1]))

    begins = jnp.roll(takes, 1, axis=-1).at[..., 0].set(True)
    return lax.associative_scan(join, (begins, link), axis=2)[1]


def _least_until(link: Float[Array, "B Hk S"], takes: Bool[Array, "B Hk S"]) -> Float[Array, "B Hk S"]:
    """The least link on the way from each entry on to the next one that takes."""

    def join(a, b):
        return a[0] | b[0], jnp.where(b[0], b[1], jnp.minimum(a[1], b[1]))

    onwards = jnp.roll(link, -1, axis=-1)  # from each entry to the one after it
    ends = jnp.roll(takes, -1, axis=-1).at[..., -1].set(True)
    return lax.associative_scan(join, (ends, onwards), axis=2, reverse=True)[1]


def _over_heads(x: Float[Array, "B Hk E"], place: Int[Array, "B Hk E"]) -> Float[Array, "B E"]:
    """The sum over the heads of what stands at the same place among those that leave; places past the end are none, and
    0 stands there."""
    if x.shape[-1] == 1:
        return jnp.sum(x, axis=1)
    rows = jnp.arange(x.shape[0])[:, None, None]
    return jnp.zeros((x.shape[0], x.shape[2]), x.dtype).at[rows, place].add(x, mode="drop")


KINDS: dict[str, type[Evicted]] = {rule.kind: rule for rule in (Merge, Spread)}
