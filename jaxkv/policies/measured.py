"""Shares of a layer's budget for its KV heads by what was measured on the model beforehand (`jaxkv calibrate`)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.errors import BadValue
from jaxkv.policies.allocator import Allocate, Choice, Contest, Learned
from jaxkv.policies.layers import Uniform, scaled
from jaxkv.policies.needs import calibrated
from jaxkv.policies.shared import Shared, spared
from jaxkv.store.pool import best
from pallas_kernels.ragged_decode.segments import per_head, per_slot

STEPS = 4095  # the finest share of a head, in whole numbers, so that the same budgets come out on every backend


@dataclasses.dataclass(frozen=True)
class Measured(Shared):
    """Heads share the layer's budget by what `jaxkv calibrate` found of them."""

    @property
    def fraction(self) -> float:
        """What of the budget beyond the protected entries every head keeps; one entry at least."""
        return 0.0

    def quotas(
        self,
        learned: Learned,
        total: Int[Array, "B"],
        guard: Int[Array, "B"],
        held: Int[Array, "B Hk"],
        tokens: Int[Array, "B"],
    ) -> Int[Array, "B Hk"]:
        """How many of the `held` entries each head keeps: `total` together, or all where they are no more.

        Every head keeps `guard [B]`, or what it has; `guard` times the heads is at most `total`. `tokens` is the
        length of the text so far.
        """
        raise NotImplementedError

    def guard(self, limits: Int[Array, "B"], phases: Sequence[Any]) -> Int[Array, "B"]:
        """What any phase protects and the fraction of the rest, or one entry."""
        least = spared(limits, phases)
        rest = jnp.floor((limits - least).astype(jnp.float32) * self.fraction).astype(jnp.int32)
        return jnp.minimum(least + jnp.maximum(rest, 1), limits)

    def choose(self, contest: Contest) -> Choice:
        """Each head keeps its quota of the best, a local one of the newest that are not protected."""
        held = per_head(contest.positions >= 0, contest.owner, contest.heads)
        tokens = jnp.max(contest.positions, axis=-1) + 1
        each = jnp.minimum(contest.each, contest.slots)
        quota = self.quotas(contest.learned, contest.heads * each, jnp.minimum(contest.guard, each), held, tokens)
        worth = contest.worth(None, quota)
        local = self.local(contest.learned, contest.heads)
        if local is not None:
            local = per_slot(jnp.broadcast_to(local, held.shape), contest.owner)
            worth = jnp.where(local & (worth < jnp.inf), contest.positions.astype(jnp.float32), worth)
        return Choice(best(worth, contest.positions, contest.owner, quota), worth)


@dataclasses.dataclass(frozen=True)
class Proportional(Measured):
    """The heads of all layers share one pool: a head gets (1 - 1/beta) of the mean budget and, by its score's part in
    the sum of all scores, of the pool that the 1/beta of all of them make.

    Both count what is kept beyond the protected entries; every head keeps one of those. A KV head's score is the mean
    of its query heads' in `reasoning [L, Hq]`, which `jaxkv calibrate` found. A layer's budget is what its heads get,
    whole tokens per head on average and no more than the text; what a head has no text for goes to the others of its
    layer. Source: HeadKV (arXiv 2410.19258), its retrieval-reasoning form. Its release scores query heads, rounds
    the pool's 1/beta of the budget down, and tries eight betas from 1.005 to 10; the default is ours, one of them.
    """

    beta: float = 1.2
    kind: ClassVar[str] = "proportional"
    needs: ClassVar[frozenset[str]] = frozenset({calibrated("reasoning")})

    def __post_init__(self):
        if self.beta < 1:
            raise BadValue(f"beta={self.beta}: expected at least 1, where a head's share is all it has")

    def prepared(self, learned: Learned, kv_heads: int) -> Learned:
        """With `parts [L, Hq]`: the scores by their mean over all heads of all layers (1 where all are 0)."""
        return {**learned, "parts": _parts(learned)}

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """Each layer's mean over its heads, from its part in the scores; their mean is `budget`."""
        if not window < budget < tokens:
            return (budget,) * layers
        parts = np.asarray(_parts(learned), np.float64)
        shares = 1 - 1 / self.beta + parts.mean(axis=-1) / self.beta
        return tuple((window + scaled(shares, layers * (budget - window), 1, tokens - window)).tolist())

    def quotas(
        self,
        learned: Learned,
        total: Int[Array, "B"],
        guard: Int[Array, "B"],
        held: Int[Array, "B Hk"],
        tokens: Int[Array, "B"],
    ) -> Int[Array, "B Hk"]:
        """What is protected for every head (`guard` is one entry more); the rest by the heads' parts."""
        spared = jnp.minimum(guard[:, None] - 1, held)
        parts = 1 - 1 / self.beta + jnp.mean(learned["parts"].reshape(held.shape[-1], -1), axis=-1) / self.beta
        most = jnp.maximum(jnp.max(parts), jnp.finfo(jnp.float32).tiny)
        shares = jnp.maximum(jnp.round(parts / most * STEPS).astype(jnp.int32), 1)
        least = jnp.minimum(1, held - spared)
        return spared + at_least(total - jnp.sum(spared, axis=-1), shares, least, held - spared)


def _parts(learned: Learned) -> Float[Array, "L Hq"]:
    scores = jnp.asarray(learned["reasoning"], jnp.float32)
    mean = jnp.mean(scores)
    return jnp.where(mean > 0, scores / jnp.where(mean > 0, mean, 1.0), 1.0)


@dataclasses.dataclass(frozen=True)
class Local(Measured):
    """Some of a layer's heads retrieve, and share what the others leave, as far as there is text; the others are local:
    `base` (a fraction of the budget beyond what is protected, or one entry), and what the retrieving heads have no text
    for, evenly. A local head holds what is protected and the newest entries, at decode too.
    """

    layers: Allocate = Uniform()
    base: float = 0.0

    def __post_init__(self):
        if not 0 <= self.base <= 1:
            raise BadValue(f"base={self.base}: expected a fraction of the budget, from 0 to 1")

    @property
    def fraction(self) -> float:
        """`base`."""
        return self.base

    @property
    def bounded(self) -> bool:
        return self.layers.bounded

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """The layers' own, as means over their heads."""
        return self.layers.budgets(budget, layers, tokens, window, learned)

    def local(self, learned: Learned, heads: int) -> Bool[Array, "Hk"]:
        """True for the heads that do not retrieve."""
        raise NotImplementedError

    def quotas(
        self,
        learned: Learned,
        total: Int[Array, "B"],
        guard: Int[Array, "B"],
        held: Int[Array, "B Hk"],
        tokens: Int[Array, "B"],
    ) -> Int[Array, "B Hk"]:
        """`guard` for every head; the rest for the retrieving heads evenly, then for the local ones."""
        given, local = jnp.minimum(guard[:, None], held), self.local(learned, held.shape[-1])
        for shares in ((~local).astype(jnp.int32), local.astype(jnp.int32)):
            given += poured(total - jnp.sum(given, axis=-1), shares, held - given)
        return given


@dataclasses.dataclass(frozen=True)
class Divided(Local):
    """The fraction `retrieval` of all heads of the model, those with the highest scores and at least one, retrieve.

    A layer may have none; then its heads share its budget evenly. A KV head's score is the mean of its query heads' in
    `retrieval [L, Hq]`, which `jaxkv calibrate` found, or that of the best of them (`of_group="max"`). Source:
    DuoAttention (arXiv 2410.10819), under a total that it lets grow with the text.
    """

    of_group: str = "mean"
    retrieval: float = 0.5
    kind: ClassVar[str] = "divided"

    def __post_init__(self):
        super().__post_init__()
        if self.of_group not in ("mean", "max"):
            raise BadValue(f"of_group={self.of_group!r}: expected 'mean' or 'max'")
        if not 0 < self.retrieval <= 1:
            raise BadValue(
                f"retrieval={self.retrieval}: expected the fraction of heads that retrieve, above 0, up to 1"
            )

    @property
    def needs(self) -> frozenset[str]:
        """What dividing the budget over heads and layers needs."""
        return self.layers.needs | {calibrated("retrieval")}

    def prepared(self, learned: Learned, kv_heads: int) -> Learned:
        """With `retrieves [L, Hk]`: which KV heads are among the best of all; ties go to the lower layer and head."""
        scores = jnp.asarray(learned["retrieval"], jnp.float32)
        group = scores.reshape(scores.shape[0], kv_heads, -1)
        scores = jnp.max(group, axis=-1) if self.of_group == "max" else jnp.mean(group, axis=-1)
        count = max(int(self.retrieval * scores.size + 0.5), 1)
        return {**learned, "retrieves": (_place(-scores.reshape(-1)) < count).reshape(scores.shape)}

    def local(self, learned: Learned, heads: int) -> Bool[Array, "Hk"]:
        """True for the heads that are not among the best."""
        return ~learned["retrieves"]


@dataclasses.dataclass(frozen=True)
class Repeating(Local):
    """Heads retrieve by how they look at a text that repeats itself: of all query heads of the model the fraction
    `induction` of those that look most at the tokens right behind earlier places of their own, and the fraction `echo`
    of those that look most at these places, at least one head each; and with a head its whole group.

    A layer may have none; then its heads share its budget evenly. The scores are `induction` and `echo [L, Hq]`, which
    `jaxkv calibrate` found. Source: RazorAttention (arXiv 2407.15891), its 14 and 1 of 100, under a total that it lets
    grow with the text.
    """

    induction: float = 0.14
    echo: float = 0.01
    kind: ClassVar[str] = "repeating"

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.induction <= 1 or not 0 <= self.echo <= 1:
            raise BadValue(
                f"induction={self.induction}, echo={self.echo}: expected fractions of the model's heads, from 0 to 1"
            )

    @property
    def needs(self) -> frozenset[str]:
        """What dividing the budget over heads and layers needs."""
        return self.layers.needs | {calibrated("induction"), calibrated("echo")}

    def prepared(self, learned: Learned, kv_heads: int) -> Learned:
        """With `repeats [L, Hq]`: which heads are among the best of all by either score; ties go to the lower head."""
        best: Any = False
        for name, share in (("induction", self.induction), ("echo", self.echo)):
            scores = jnp.asarray(learned[name], jnp.float32)
            count = max(int(share * scores.size + 0.5), 1)
            best = best | (_place(-scores.reshape(-1)) < count).reshape(scores.shape)
        return {**learned, "repeats": best}

    def local(self, learned: Learned, heads: int) -> Bool[Array, "Hk"]:
        """True for the heads of whose group none is among the best."""
        return ~jnp.any(learned["repeats"].reshape(heads, -1), axis=-1)


def at_least(
    total: Int[Array, "B"], shares: Int[Array, "*B Hk"], least: Int[Array, "B Hk"], held: Int[Array, "B Hk"]
) -> Int[Array, "B Hk"]:
    """`total` in proportion to the shares, none more than `held`; heads whose part is below `least` get that instead,
    and what the others cannot take is shared evenly."""

    def pour(low):
        fixed = jnp.where(low, least, 0)
        left = total - jnp.sum(fixed, axis=-1)
        return fixed + poured(left, jnp.where(low, 0, shares), held - fixed)

    low = lax.fori_loop(0, held.shape[-1], lambda _, low: low | (pour(low) < least), jnp.zeros(held.shape, bool))
    given = pour(low)
    return given + poured(total - jnp.sum(given, axis=-1), jnp.ones(held.shape[-1], jnp.int32), held - given)


def poured(left: Int[Array, "B"], shares: Int[Array, "*B Hk"], room: Int[Array, "B Hk"]) -> Int[Array, "B Hk"]:
    """`left [B]` entries given to heads in proportion to their `shares`, none more than its room.

    What a full head cannot take goes to the others; heads without a share get nothing. Whole numbers throughout (the
    largest remainders are rounded up, ties at the lower head), with products below 2^31 for up to 128 heads.
    """
    room = jnp.where(shares > 0, room, 0)

    def parts(full):
        rest = left - jnp.sum(jnp.where(full, room, 0), axis=-1)
        wanted = jnp.where(full, 0, shares)
        whole = jnp.maximum(jnp.sum(wanted, axis=-1, keepdims=True), 1)
        rounds, over = jnp.divmod(rest[:, None], whole)
        part, remainder = jnp.divmod(over * wanted, whole)
        return rest, rounds * wanted + part, remainder

    def fill(_, full):
        return full | (parts(full)[1] >= room)

    full = lax.fori_loop(0, room.shape[-1], fill, room <= 0)  # each turn fills a head, or none will be
    rest, part, remainder = parts(full)
    up = _place(-remainder) < (rest - jnp.sum(part, axis=-1))[:, None]
    return jnp.where(full, room, part + up.astype(part.dtype))


def _place(x: Float[Array, "*B Hk"] | Int[Array, "*B Hk"]) -> Int[Array, "*B Hk"]:
    """The place of each in ascending order, ties by the index."""
    return jnp.argsort(jnp.argsort(x, axis=-1, stable=True), axis=-1).astype(jnp.int32)
