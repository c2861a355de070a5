"""allocate over layers: one budget for the whole model, of which each layer gets what the text at hand says.

Either all entries of all layers compete (`Global`), or each layer says something of itself as it looks at the prompt,
its `profile`, and the profiles divide the budget; a layer's heads then hold equally many.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.errors import BadValue
from jaxkv.policies.allocator import UNLIMITED, Choice, Contest, Division, Learned
from jaxkv.policies.by_queries import over_queries, window_attention
from jaxkv.policies.measured import STEPS, poured
from jaxkv.policies.needs import MASS, QUERIES
from jaxkv.policies.score import ScoreInputs
from jaxkv.policies.shared import Shared, safeguarded, spared
from jaxkv.store.entries import highest
from jaxkv.store.pool import best, compete


@dataclasses.dataclass(frozen=True)
class Across(Shared):
    """The layers share the model's budget: the mean over layers and KV heads is `budget`.

    Every head keeps at least the fraction `safeguard` of it, and what is protected. A layer gets at most `most` times
    the mean (0: as much as there is): so many slots it may read at every step. Layers with a sliding window stay
    uniform.
    """

    safeguard: float = 0.2
    most: float = 2.0
    store: ClassVar[str] = "line"
    alike: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({MASS})  # of the profile

    def __post_init__(self):
        if not 0 <= self.safeguard <= 1 or (self.most and self.most < 1):
            raise BadValue(
                f"safeguard={self.safeguard}, most={self.most}: expected a fraction of the budget, from 0 to 1, and at "
                "least 1 times the budget (0: no ceiling)"
            )

    def check(self, policy: Any) -> None:
        super().check(policy)
        where = f"policy {policy.name!r}, whose layers share the model's budget (allocate kind {self.kind!r})"
        if policy.decode is not None and not (policy.decode.keyless and policy.decode.every == 1):
            raise BadValue(
                f"{where}: at decode every token takes one slot of its own head; expected a decode score that reads "
                "attention and positions alone, every=1, or no decode phase"
            )
        if MASS in self.needs and policy.prefill is not None and MASS not in policy.prefill.needs:
            raise BadValue(f"{where}, goes by attention: expected a prefill score that looks, or kind 'global'")
        if not policy.flow.straight:
            raise BadValue(f"{where}, must see the whole prompt in each: expected flow kind 'straight'")

    def reach(self, slots: int, limit: int, layers: int, tokens: int) -> int:
        """Slots of an even share, and what a layer may have of the others'."""
        widest = self.most * limit if self.most else min(layers * limit, tokens)
        return slots + math.ceil(max(widest - limit, 0)) + 1

    def guard(self, limits: Int[Array, "B"], phases: Sequence[Any]) -> Int[Array, "B"]:
        """The safeguard, and at decode what is protected and one entry that can go."""
        return safeguarded(self.safeguard, limits, phases)

    def choose(self, contest: Contest) -> Choice:
        """The best entries of one layer, as many as its ceiling lets it keep: its candidates for the division."""
        worth = contest.worth(None, contest.each)
        place, profile = (contest.positions, contest.owner), None
        if contest.inputs is not None:
            by_head = contest.by_head(worth)
            profile = self.profile(contest.inputs, by_head, contest.slots)
            worth = self.worth(by_head, contest.by_head(contest.positions), profile).reshape(worth.shape)
        most = jnp.minimum(self.ceiling(contest.each), contest.slots)
        if self.alike:
            kept = best(worth, *place, jnp.repeat(most[:, None], contest.heads, axis=1))
        else:
            guard = jnp.minimum(contest.guard, most)
            kept, _ = compete(worth, *place, contest.heads, contest.heads * most, guard)
        return Choice(kept, worth, profile)

    def keeps_all(self, held: int, slots: int) -> bool:
        return self.alike and not self.most and held <= slots

    def divide(self, division: Division) -> Bool[Array, "B N"]:
        """What all layers keep of their candidates."""
        number, heads, each = division.layers, division.heads, division.each
        line = division.worth, division.positions, division.owner
        if division.profiles is None:
            return division.positions >= 0
        if not self.alike:
            total = number * heads
            return compete(*line, total, total * each, division.guard)[0]
        held = jnp.max(division.held.reshape(-1, number, heads), axis=-1).T
        quota = self.quotas(division.profiles, each, division.guard, self.ceiling(each), held)
        return best(*line, jnp.repeat(quota.T, heads, axis=1))

    def ceiling(self, each: Int[Array, "B"]) -> Int[Array, "B"]:
        """The most entries per head that a layer may hold."""
        if not self.most:
            return jnp.full_like(each, 2**30)
        return jnp.floor(each.astype(jnp.float32) * self.most).astype(jnp.int32)

    def profile(self, inputs: ScoreInputs, worth: Float[Array, "B Hk S"], ranks: int) -> Float[Array, "B _"]:
        """What a layer says of itself, whose entries are `worth` so much; `ranks` is the static ceiling."""
        raise NotImplementedError

    def quotas(
        self,
        profiles: Float[Array, "N B _"],
        each: Int[Array, "B"],
        guard: Int[Array, "B"],
        most: Int[Array, "B"],
        held: Int[Array, "N B"],
    ) -> Int[Array, "N B"]:
        """Entries per head of every layer: `each [B]` on average, from `guard` to `most`, no more than it has."""
        raise NotImplementedError

    def worth(
        self, worth: Float[Array, "B Hk S"], positions: Int[Array, "B Hk S"], profile: Float[Array, "B _"]
    ) -> Float[Array, "B Hk S"]:
        """What entries are worth inside a layer of this profile."""
        return worth


@dataclasses.dataclass(frozen=True)
class Global(Across):
    """The best entries of all layers and heads together stay, wherever they are.

    Source: DefensiveKV's layer-wise variant (arXiv 2510.13334) for its score; for others ours.
    """

    kind: ClassVar[str] = "global"
    alike: ClassVar[bool] = False
    cascades: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset()

    def profile(self, inputs: ScoreInputs, worth: Float[Array, "B Hk S"], ranks: int) -> Float[Array, "B _"]:
        return jnp.zeros((inputs.at.shape[0], 0), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Ranked(Across):
    """A layer's profile says what the n-th entry of its heads is worth, never more than the one before; the best of all
    layers stay, behind the `guard` first ones of each."""

    safeguard: float = 0.0
    most: float = 0.0

    def guard(self, limits: Int[Array, "B"], phases: Sequence[Any]) -> Int[Array, "B"]:
        """The safeguard, or what is protected."""
        return _floor(self.safeguard, limits, phases)

    def quotas(self, profiles, each, guard, most, held):
        rank = jnp.arange(profiles.shape[-1])
        worth = jnp.where(rank < guard[:, None], jnp.inf, jnp.where(rank < most[:, None], profiles, -jnp.inf))
        worth = jnp.where(rank < held[..., None], worth, -jnp.inf)
        layers, batch, ranks = worth.shape
        line = jnp.moveaxis(worth, 0, 1).reshape(batch, 1, layers * ranks)
        chosen = highest(line, layers * each) & (line > -jnp.inf)
        return jnp.moveaxis(jnp.sum(chosen.reshape(batch, layers, ranks), axis=-1, dtype=jnp.int32), 0, 1)


@dataclasses.dataclass(frozen=True)
class Prefix(Ranked):
    """Every layer keeps its best tokens up to the same share p of its attention; p is what the budget allows.

    F_l(n) = the share that the n best of all tokens hold, mean over the heads; n_l = what is protected + the number of
    ranks with F_l(n - 1) < p. Source: PrefixKV (arXiv 2412.03409) and its release's `obtain_cdf_num`, which counts the
    protected tokens in F too. It measures n_l on samples beforehand and keeps the means; here each text has its own,
    exact to the token, where the release stops its search for p within 5 tokens of the total and scales the rest.
    """

    kind: ClassVar[str] = "prefix"
    cascades: ClassVar[bool] = True

    def profile(self, inputs: ScoreInputs, worth: Float[Array, "B Hk S"], ranks: int) -> Float[Array, "B R"]:
        """-F(n - 1) of each further entry that a head keeps, 1 for those that are protected."""
        assert inputs.mass is not None and inputs.protected is not None
        safe = jnp.sum(inputs.protected & inputs.live, axis=-1, keepdims=True, dtype=jnp.int32)
        mass = jnp.where(inputs.live, inputs.mass, 0.0)
        total = jnp.maximum(jnp.sum(mass, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        share = -jnp.sort(-mass, axis=-1) / total
        before = jnp.cumsum(share, axis=-1) - share
        rank = jnp.arange(ranks) - safe
        before = jnp.take_along_axis(before, jnp.clip(rank, 0, before.shape[-1] - 1), axis=-1)
        return jnp.mean(jnp.where(rank < 0, 1.0, -before), axis=1)


@dataclasses.dataclass(frozen=True)
class Composite(Ranked):
    """The best composite tokens of all layers stay: a layer's n-th is the n-th best entry of each of its heads.

    It is worth the mean of what these are worth. The first layer counts by the largest of all layers at each n, so that
    none holds more. Source: KVCompose (arXiv 2509.05165), its structured form, as in kvpress.
    """

    kind: ClassVar[str] = "composite"
    needs: ClassVar[frozenset[str]] = frozenset()

    def profile(self, inputs: ScoreInputs, worth: Float[Array, "B Hk S"], ranks: int) -> Float[Array, "B R"]:
        """What the n-th composite token is worth, n up to `ranks`."""
        best_first = -jnp.sort(-jnp.where(inputs.live, worth, -jnp.inf), axis=-1)[..., :ranks]
        fill = ((0, 0), (0, 0), (0, max(ranks - best_first.shape[-1], 0)))
        return jnp.mean(jnp.pad(best_first, fill, constant_values=-jnp.inf), axis=1)

    def quotas(self, profiles, each, guard, most, held):
        return super().quotas(profiles.at[0].set(jnp.max(profiles, axis=0)), each, guard, most, held)


@dataclasses.dataclass(frozen=True)
class Weighed(Across):
    """Layers share what is above the guard in proportion to their weights, whole numbers, up to the ceiling."""

    spills: ClassVar[str] = "by-weight"  # how what a layer has no text for goes to the others; "even": to each as much

    def turns(self, profiles: Float[Array, "N B 1"]) -> tuple[Float[Array, "N B"], ...]:
        """Non-negative weights; what the first leave over goes by the next."""
        raise NotImplementedError

    def quotas(self, profiles, each, guard, most, held):
        given = jnp.minimum(guard, held)
        room = jnp.minimum(most, held)
        pour = jax.vmap(lambda left, shares, room: poured(left[None], shares, room[None])[0], (0, 1, 1), 1)
        for turn, weights in enumerate(self.turns(profiles)):
            top = jnp.maximum(jnp.max(weights, axis=0), jnp.finfo(jnp.float32).tiny)
            shares = jnp.round(weights / top * STEPS).astype(jnp.int32)
            left = len(held) * each - jnp.sum(given, axis=0)
            spills = self.spills == "even" and not turn
            free = jnp.broadcast_to(left, given.shape) if spills else room - given
            given += jnp.minimum(pour(left, shares, free), room - given)
        return given


@dataclasses.dataclass(frozen=True)
class Cake(Weighed):
    """weight = H^(1/tau1) V^(1/tau2) of the last `window` queries' attention to the tokens before them.

    H = -sum over heads, queries and keys of a ln a, V = the sum over heads and keys of the variance (W - 1) over the
    queries. What is protected comes first; the rest of the model's budget goes by weight, and what a layer has no text
    for to the others in even parts. Earlier layers are cut again after each later one. Source: CAKE (arXiv 2503.12491)
    and its release's `adjust_budgets`.
    """

    safeguard: float = 0.0
    most: float = 0.0
    window: int = 32
    tau1: float = 1.6
    tau2: float = 0.6
    kind: ClassVar[str] = "cake"
    cascades: ClassVar[bool] = True
    spills: ClassVar[str] = "even"
    needs: ClassVar[frozenset[str]] = frozenset({QUERIES})

    def __post_init__(self):
        super().__post_init__()
        if self.window < 2 or min(self.tau1, self.tau2) <= 0:
            raise BadValue(
                f"window={self.window}, tau1={self.tau1}, tau2={self.tau2}: expected at least 2 queries, for they have "
                "a variance, and temperatures above 0"
            )

    def guard(self, limits: Int[Array, "B"], phases: Sequence[Any]) -> Int[Array, "B"]:
        """The safeguard, or what is protected."""
        return _floor(self.safeguard, limits, phases)

    def profile(self, inputs: ScoreInputs, worth: Float[Array, "B Hk S"], ranks: int) -> Float[Array, "B 1"]:
        mass, real = window_attention(inputs, self.window)
        before = inputs.live & (inputs.at < (inputs.next - self.window)[:, None, None])
        mass = jnp.where(before[:, :, None, None], mass, 0.0)
        entropy = -jnp.sum(jnp.where(mass > 0, mass * jnp.log(jnp.maximum(mass, 1e-30)), 0.0), axis=(1, 2, 3, 4))
        spread = jnp.sum(over_queries(mass, real)[1], axis=(1, 2, 3))
        return (entropy ** (1 / self.tau1) * spread ** (1 / self.tau2))[:, None]

    def turns(self, profiles: Float[Array, "N B 1"]) -> tuple[Float[Array, "N B"], ...]:
        weights = profiles[..., 0]
        even = jnp.ones_like(weights)
        return jnp.where(jnp.max(weights, axis=0) > 0, weights, 1.0), even


def _floor(safeguard: float, limits: Int[Array, "B"], phases: Sequence[Any]) -> Int[Array, "B"]:
    """The fraction of the limits, what is protected, or one entry, whichever is most; at most the limits."""
    guard = jnp.floor(limits.astype(jnp.float32) * safeguard).astype(jnp.int32)
    return jnp.minimum(jnp.maximum(jnp.maximum(guard, spared(limits, phases)), 1), limits)


@dataclasses.dataclass(frozen=True)
class Density(Across):
    """Layers get in proportion to exp(-x), but for the first `spare` and the last `spare_last`, which hold the text.

    x = the mean over the query heads of (V_h - min V) / (max V - min V + 1e-6), V_h the variance over the keys of the
    attention that each was given: the evener a layer attends, the more it keeps, up to e times as much as another. What
    a layer has no text for goes to the others by weight; none gets less than the guard. Spared layers are bounded by no
    budget. Source: D2O (arXiv 2406.13035) in its release's form (`LlamaModel.forward`). There the exponentials are
    divided by those of all layers, and each layer's share is rounded down; here those that share have exactly the
    budget on average.
    """

    safeguard: float = 0.0
    most: float = 0.0
    spare: int = 0
    spare_last: int = 0
    kind: ClassVar[str] = "density"

    def __post_init__(self):
        super().__post_init__()
        for name in ("spare", "spare_last"):
            if isinstance(getattr(self, name), bool) or getattr(self, name) < 0:
                raise BadValue(f"{name}={getattr(self, name)}: expected a number of layers that evict nothing, 0: none")

    @property
    def bounded(self) -> bool:
        return not self.spare and not self.spare_last

    def shares(self, layer: int, layers: int) -> bool:
        return self.spare <= layer < layers - self.spare_last

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        return tuple(budget if self.shares(layer, layers) else UNLIMITED for layer in range(layers))

    def reach(self, slots: int, limit: int, layers: int, tokens: int) -> int:
        """All that there is: nothing leaves before the layers are divided, for what leaves is merged."""
        return super().reach(slots, limit, layers, tokens) if self.most else slots + max(tokens - limit, 0) + 1

    def widest(self, slots: int) -> int:
        return math.ceil(math.e * slots) + 1  # no weight is more than e times another

    def profile(self, inputs: ScoreInputs, worth: Float[Array, "B Hk S"], ranks: int) -> Float[Array, "B 1"]:
        assert inputs.by_query is not None
        live = jnp.repeat(inputs.live, inputs.by_query.shape[1] // inputs.live.shape[1], axis=1)
        count = jnp.maximum(jnp.sum(live, axis=-1, dtype=jnp.float32), 2.0)
        mean = jnp.sum(jnp.where(live, inputs.by_query, 0.0), axis=-1) / count
        apart = jnp.where(live, inputs.by_query - mean[..., None], 0.0)
        variance = jnp.sum(apart**2, axis=-1) / (count - 1)
        low, high = (f(variance, axis=1, keepdims=True) for f in (jnp.min, jnp.max))
        return jnp.mean((variance - low) / (high - low + 1e-6), axis=1)[:, None]

    def quotas(self, profiles, each, guard, most, held):
        weights = jax.nn.softmax(-profiles[..., 0], axis=0)
        return proportional(weights, len(held) * each, jnp.minimum(guard, held), jnp.minimum(most, held))


def proportional(
    weights: Float[Array, "N B"], total: Int[Array, "B"], least: Int[Array, "N B"], most: Int[Array, "N B"]
) -> Int[Array, "N B"]:
    """Whole numbers in proportion to the weights, all above 0, from `least` to `most`, that sum to `total` or to what
    these bounds allow: rounded down, and then one more for the largest remainders."""
    ends = jnp.zeros(total.shape, jnp.float32), jnp.max((most + 1).astype(jnp.float32) / weights, axis=0)

    def halved(_, ends):
        low, high = ends
        scale = (low + high) / 2
        over = jnp.sum(jnp.clip(jnp.floor(scale * weights).astype(jnp.int32), least, most), axis=0) > total
        return jnp.where(over, low, scale), jnp.where(over, scale, high)

    exact = lax.fori_loop(0, 48, halved, ends)[0] * weights
    whole = jnp.clip(jnp.floor(exact).astype(jnp.int32), least, most)
    left = total - jnp.sum(whole, axis=0)
    rest = jnp.where(whole < most, exact - whole.astype(jnp.float32), -jnp.inf)
    place = jnp.argsort(jnp.argsort(-rest, axis=0, stable=True), axis=0)
    return jnp.where((place < left) & (whole < most), whole + 1, whole)


@dataclasses.dataclass(frozen=True)
class Lazy(Weighed):
    """Layers whose queries look at the first `sinks` and the last `recent` tokens for more than `threshold` are lazy.

    Lazy ones hold the safeguard, sinks and the newest; the others share the rest evenly. With none or nothing but lazy
    layers, all are equal. `recent=0` stands for what the safeguard holds besides the sinks. Source: SimLayerKV (arXiv
    2410.13846), where the others hold everything, and lazy ones 4 + 1024 tokens.
    """

    threshold: float = 0.9
    sinks: int = 4
    recent: int = 0
    kind: ClassVar[str] = "lazy"

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.threshold <= 1 or self.sinks < 0 or self.recent < 0:
            raise BadValue(
                f"threshold={self.threshold}, sinks={self.sinks}, recent={self.recent}: expected a share of the "
                "attention, above 0 and up to 1, and numbers of tokens (recent=0: the safeguard's)"
            )

    def profile(self, inputs: ScoreInputs, worth: Float[Array, "B Hk S"], ranks: int) -> Float[Array, "B 1"]:
        assert inputs.mass is not None
        mass = jnp.where(inputs.live, inputs.mass, 0.0)
        assert inputs.limits is not None
        safe = jnp.floor(inputs.limits.astype(jnp.float32) * self.safeguard).astype(jnp.int32)
        recent = self.recent if self.recent else jnp.maximum(safe - self.sinks, 1)
        ends = (inputs.at < self.sinks) | (inputs.at >= (inputs.next - recent)[:, None, None])
        share = jnp.sum(jnp.where(ends, mass, 0.0), axis=-1) / jnp.maximum(jnp.sum(mass, axis=-1), 1e-30)
        return jnp.where(jnp.mean(share, axis=1) > self.threshold, 1.0, 0.0)[:, None]

    def turns(self, profiles: Float[Array, "N B 1"]) -> tuple[Float[Array, "N B"], ...]:
        lazy = profiles[..., 0]
        return 1 - lazy, jnp.ones_like(lazy)

    def worth(self, worth, positions, profile):
        lazy = (profile > 0)[..., None] & (worth < jnp.inf)
        return jnp.where(lazy, positions.astype(jnp.float32), worth)


KINDS = {part.kind: part for part in (Global, Prefix, Composite, Cake, Density, Lazy)}
