"""Scores made of other scores."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.errors import BadValue
from jaxkv.policies.aggregate import Aggregate
from jaxkv.policies.needs import OUTPUT
from jaxkv.policies.order import BIG, best_first, count, in_time
from jaxkv.policies.score import Entering, Score, ScoreInputs, Stats, still
from pallas_kernels.decode_attend_score.victim import Factor


class Combined(Score):
    """What all of them share: everything that their parts need."""

    def _join(self, *parts: Score) -> None:
        for part in parts:
            if part.grows:
                raise BadValue(
                    f"score {part.kind!r} lets the cache grow, which a score that is made of others does not: expected "
                    f"it by itself, or {still(part)}"
                )
        names = tuple(dict.fromkeys(name for part in parts for name in part.stats))
        needs = frozenset[str]().union(*(part.needs for part in parts))
        remembers = any(part.remembers for part in parts)
        for name, value in {"parts": parts, "stats": names, "needs": needs, "remembers": remembers}.items():
            object.__setattr__(self, name, value)  # derived, not fields

    def enter(self, new: Entering) -> Stats:
        return {name: stat for part in self.parts for name, stat in part.entered(new).items()}


@dataclasses.dataclass(frozen=True)
class Scaled(Combined):
    """score = (of + epsilon) * size of the value: ||v||_1, ||v||_2, or the mean over the group of ||v W_O||_1.

    `by`: "value-l1", "value-l2", "output-l1", or "output-share": output-l1 over its sum over the layer's KV heads, of
    the same token. Only for scores that are never negative. All but "output-l1" are fixed as a token enters; that is
    computed from the values at every cut, for it reads the layer's output matrix. Where only the prefill phase reads
    the matrix, a decoded token's share is that of equal heads.
    Source: VATP (arXiv 2406.12335) with value-l1; CriticalKV (arXiv 2502.03805) with output-l1; DefensiveKV's release
    (arXiv 2510.13334) with output-share.
    """

    of: Score
    by: str = "value-l1"
    epsilon: float = 0.0
    kind: ClassVar[str] = "scaled"

    def __post_init__(self):
        if self.by not in ("value-l1", "value-l2", "output-l1", "output-share"):
            raise BadValue(f"by={self.by!r}: expected 'value-l1', 'value-l2', 'output-l1' or 'output-share'")
        if self.of.negative:
            raise BadValue(f"score {self.of.kind!r} can be negative, and scaling would turn its order around")
        self._join(self.of)
        projects = self.by == "output-l1"
        object.__setattr__(self, "stats", self.stats if projects else (*self.stats, self.name))
        object.__setattr__(self, "linear", self.of.linear and not projects)
        object.__setattr__(self, "needs", self.needs | {OUTPUT} if "output" in self.by else self.needs)

    @property
    def name(self) -> str:
        """The statistic that holds the size."""
        return self.by.replace("-", "_")

    def enter(self, new: Entering) -> Stats:
        values, more = new.values.astype(jnp.float32), super().enter(new)
        if self.by == "output-l1":
            return more
        if self.by == "output-share":
            if new.out is None:  # a token that is decoded, where only the prefill phase reads the matrix
                return {**more, self.name: jnp.full(values.shape[:-1], 1 / values.shape[1], jnp.float32)}
            size = _output_size(values, new.out)
            total = jnp.sum(size, axis=1, keepdims=True)
            return {**more, self.name: size / jnp.where(total > 0, total, 1.0)}
        size = jnp.sum(jnp.abs(values), axis=-1) if self.by == "value-l1" else jnp.linalg.norm(values, axis=-1)
        return {**more, self.name: size}

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        weight, bias = self.of.line(stats, positions, now)
        size = stats[self.name]
        none = isinstance(weight, float) and weight == 0
        return 0.0 if none else jnp.multiply(size, weight), jnp.multiply(size, jnp.add(bias, self.epsilon))

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        if self.by == "output-l1":
            assert inputs.out is not None, "this score needs the output matrix"
            size = _output_size(inputs.v, inputs.out)
        else:
            size = stats[self.name]
        return (self.of.each(stats, inputs) + self.epsilon) * size


@dataclasses.dataclass(frozen=True)
class Weighted(Combined):
    """score = first_weight * first + second_weight * second, each `scale`d before: "none", "unit" or "rank".

    "unit" runs from 0 for the lowest entry of a head to 1 for the highest, "rank" counts places. A weight "ratio" is
    the fraction of the row's entries that has to go. Source: ours; Compactor's blend, R-KV's trade-off.
    """

    first: Score
    second: Score
    first_weight: float | str = 0.5
    second_weight: float | str = 0.5
    scale: str = "none"
    kind: ClassVar[str] = "weighted"

    def __post_init__(self):
        _check_scale(self.scale)
        if any(isinstance(weight, str) and weight != "ratio" for weight in (self.first_weight, self.second_weight)):
            raise BadValue(f"weights {self.first_weight!r}, {self.second_weight!r}: expected numbers or 'ratio'")
        self._join(self.first, self.second)
        weights = (self.first_weight, self.second_weight)
        object.__setattr__(self, "signed", any(not isinstance(weight, str) and weight < 0 for weight in weights))
        plain = self.scale == "none" and "ratio" not in (self.first_weight, self.second_weight)
        object.__setattr__(self, "linear", plain and self.first.linear and self.second.linear)
        counts = [part for part, weight in zip((self.first, self.second), weights, strict=True) if weight != 0]
        newest = bool(counts) and all(part.newest for part in counts) and not self.signed and plain
        object.__setattr__(self, "newest", newest)

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        (a, b), (c, d) = (part.line(stats, positions, now) for part in (self.first, self.second))
        x, y = float(self.first_weight), float(self.second_weight)

        def both(one: Factor, two: Factor) -> Factor:
            if isinstance(one, float) and isinstance(two, float):
                return x * one + y * two
            return jnp.add(jnp.multiply(one, x), jnp.multiply(two, y))

        return both(a, c), both(b, d)

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        parts = ((self.first, self.first_weight), (self.second, self.second_weight))
        one, two = (_scaled(part.each(stats, inputs), inputs, self.scale) * _weight(w, inputs) for part, w in parts)
        return one + two


@dataclasses.dataclass(frozen=True)
class Maximum(Combined):
    """score = the larger of the two, each `scale`d before ("none", "unit", "rank"): either reason is enough. Ours."""

    first: Score
    second: Score
    scale: str = "rank"
    kind: ClassVar[str] = "max"
    linear: ClassVar[bool] = False

    def __post_init__(self):
        _check_scale(self.scale)
        self._join(self.first, self.second)

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        return jnp.maximum(
            _scaled(self.first.each(stats, inputs), inputs, self.scale),
            _scaled(self.second.each(stats, inputs), inputs, self.scale),
        )


@dataclasses.dataclass(frozen=True)
class Then(Combined):
    """A `share` of the budget goes to the best by `first` (what is protected counts), the rest to the best by `second`.

    Source: CriticalKV's two stages (arXiv 2502.03805).
    """

    first: Score
    second: Score
    share: float = 0.5
    kind: ClassVar[str] = "then"
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise BadValue(f"share={self.share}: expected a fraction of the budget")
        self._join(self.first, self.second)

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.protected is not None
        first = jnp.where(inputs.protected, jnp.inf, self.first.each(stats, inputs))
        chosen = jnp.floor(inputs.goal.astype(jnp.float32) * self.share).astype(jnp.int32)
        if self.share > 0:
            chosen = jnp.maximum(chosen, 1)
        leads = best_first(first, inputs.at) < chosen
        return jnp.where(leads, BIG, self.second.each(stats, inputs))


@dataclasses.dataclass(frozen=True)
class Until(Combined):
    """Of each head the best by `first`, as long as they hold less than `share` of its sum, come before all others of
    the layer; what is left goes by `second`, which is never negative.

    What is protected is not in the sum, comes on top, and leaves the others the rest of the budget. `share` is lessened
    by what the `window` entries before the last `window` have of `first`, in the mean over the heads. The release means
    the last `window` themselves, it seems; this is what it computes.
    Source: DefensiveKV's release (arXiv 2510.13334), its form of CriticalKV's two stages.
    """

    first: Score
    second: Score
    share: float = 0.9
    window: int = 32
    kind: ClassVar[str] = "until"
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 <= self.share <= 1 or self.window < 0:
            raise BadValue(
                f"share={self.share}, window={self.window}: expected a fraction of the attention, from 0 to 1, and a "
                "number of tokens"
            )
        if self.first.negative or self.second.negative:
            raise BadValue(f"scores {self.first.kind!r} and {self.second.kind!r}: expected two that are never negative")
        self._join(self.first, self.second)

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.protected is not None
        at, free = inputs.at, inputs.live & ~inputs.protected
        first, second = (jnp.where(free, part.each(stats, inputs), 0.0) for part in (self.first, self.second))
        age = inputs.next[:, None, None] - at
        near = (age > self.window) & (age <= 2 * self.window)
        less = jnp.mean(jnp.sum(jnp.where(near, first, 0.0), axis=-1), axis=1)[:, None, None]
        total = jnp.sum(first, axis=-1, keepdims=True)
        place = best_first(first, jnp.where(free, at, -1))
        order = jnp.argsort(place, axis=-1)
        upto = jnp.cumsum(jnp.take_along_axis(first, order, axis=-1), axis=-1)
        few = jnp.sum(upto < (self.share - less) * total, axis=-1, keepdims=True, dtype=jnp.int32)
        room = inputs.goal - jnp.sum(inputs.live & inputs.protected, axis=-1, keepdims=True, dtype=jnp.int32)
        top = jnp.max(second, axis=(1, 2), keepdims=True)
        return jnp.where(free & (place < jnp.minimum(few, room)), jnp.nextafter(top, jnp.float32(jnp.inf)), second)


@dataclasses.dataclass(frozen=True)
class Pooled(Combined):
    """score = the mean of `of` over `kernel` neighbours in time; what is protected neither gives nor counts (as 0).

    The divisor is always `kernel`, so the edges shrink. Source: CAKE's release at decode.
    """

    of: Score
    kernel: int = 5
    kind: ClassVar[str] = "pooled"
    linear: ClassVar[bool] = False
    keyless: ClassVar[bool] = True

    def __post_init__(self):
        Aggregate(pool="avg", kernel=self.kernel)  # refuses a kernel without a middle
        self._join(self.of)

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.protected is not None
        over, order = Aggregate(pool="avg", kernel=self.kernel), in_time(inputs.at)
        line, at, apart = map(order.put, (self.of.each(stats, inputs), inputs.at, inputs.protected))
        return order.slots(over.along_text(line, at, apart))


@dataclasses.dataclass(frozen=True)
class PromptFirst(Combined):
    """What the prompt left is never evicted at decode; the new tokens compete among themselves by `of`.

    Leave them room with `reserve` in the prefill phase. With `grow` they do not get all of it at once: after t of them
    as many stay as are protected as recent, and one more for every `grow` of the t, up to the budget. The prompt's
    last token, which tells how many there are, must stay. Source: SCOPE (arXiv 2412.13649), its sliding form, and its
    adaptive one with `grow` (15 in its release).
    """

    of: Score
    grow: int = 0
    kind: ClassVar[str] = "prompt-first"

    def __post_init__(self):
        if self.grow < 0:
            raise BadValue(f"grow={self.grow}: expected a number of tokens, or 0 for the whole budget at once")
        self._join(self.of)
        object.__setattr__(self, "grows", self.grow > 0)
        object.__setattr__(self, "stats", (*self.stats, "prompt"))
        object.__setattr__(self, "linear", self.of.linear)

    def enter(self, new: Entering) -> Stats:
        mark = jnp.full(new.keys.shape[:-1], 1.0 if new.prompt else 0.0, jnp.float32)
        return {**super().enter(new), "prompt": mark}

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        weight, bias = self.of.line(stats, positions, now)
        return weight, jnp.where(stats["prompt"] > 0, BIG, bias)

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        return jnp.where(stats["prompt"] > 0, BIG, self.of.each(stats, inputs))

    def grown(self, stats, positions, now, recents, prompt):
        last = jnp.max(jnp.where(stats["prompt"] > 0, positions, -1), axis=(1, 2))
        return recents + (now - last - 1) // self.grow


def _output_size(values: Float[Array, "B Hk S D"], out: Float[Array, "Hq D M"]) -> Float[Array, "B Hk S"]:
    """The mean over the group of ||v W_O||_1."""
    out = out.astype(jnp.float32).reshape(values.shape[1], -1, *out.shape[1:])
    group = out.shape[1]

    def one(total, matrix):  # a head of each group at a time, or v W_O would take Hq times its memory
        return total + jnp.sum(jnp.abs(jnp.einsum("bhsd,hdm->bhsm", values, matrix)), axis=-1), None

    total, _ = lax.scan(one, jnp.zeros(values.shape[:-1], jnp.float32), jnp.moveaxis(out, 1, 0))
    return total / group


def _check_scale(scale: str) -> None:
    if scale not in ("none", "unit", "rank"):
        raise BadValue(f"scale={scale!r}: expected 'none', 'unit' or 'rank'")


def _weight(weight: float | str, inputs: ScoreInputs) -> Float[Array, "..."]:
    """The number, or the fraction of each row's entries that has to go `[B, 1, 1]`."""
    if not isinstance(weight, str):
        return jnp.float32(weight)
    held = jnp.max(count(inputs.live, -1), axis=-1)[:, None, None]
    return jnp.maximum(1 - inputs.goal.astype(jnp.float32) / held, 0.0)


def _scaled(score: Float[Array, "B Hk S"], inputs: ScoreInputs, scale: str) -> Float[Array, "B Hk S"]:
    """The score on a common scale, among the entries that are not protected."""
    if scale == "none":
        return score
    assert inputs.protected is not None
    free = inputs.live & ~inputs.protected
    if scale == "rank":
        place = best_first(score, jnp.where(free, inputs.at, -1))
        return 1 - place.astype(jnp.float32) / count(free, -1, keepdims=True)
    low = jnp.min(jnp.where(free, score, jnp.inf), axis=-1, keepdims=True)
    high = jnp.max(jnp.where(free, score, -jnp.inf), axis=-1, keepdims=True)
    return jnp.where(free, (score - low) / jnp.where(high > low, high - low, 1.0), 0.0)
