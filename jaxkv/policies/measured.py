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
from jaxkv.policies.layers import Uniform
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
    of its query heads' in `retrieval [L, Hq]`, which `jaxkv calibrate` found. A layer's budget is what its heads get,
    whole tokens per head on average and no more than the text; what a head has no text for goes to the others of its
    layer. Source: HeadKV (arXiv 2410.19258), with scores of CompressKV's kind. Its release scores query heads, rounds
    the pool's 1/beta of the budget down, and tries eight betas from 1.005 to 10; the default is ours, one of them.
    """

    beta: float = 1.2
    kind: ClassVar[str] = "proportional"
    needs: ClassVar[frozenset[str]] = frozenset({calibrated("retrieval")})

    def __post_init__(self):
        if self.beta < 1:
            raise BadValue(f"beta={self.beta}: expected at least 1, where a head's share is all it has")

    def prepared(self, learned: Learned) -> Learned:
        """With `parts [L, Hq]`: the scores by their mean over all heads of all layers (1 where all are 0)."""
        scores = jnp.asarray(learned["retrieval"], jnp.float32)
        mean = jnp.mean(scores)
        return {**learned, "parts": jnp.where(mean > 0, scores / jnp.where(mean > 0, mean, 1.0), 1.0)}

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """Each layer's mean over its heads, from its part in the scores; their mean is `budget`."""
        if not window < budget < tokens:
            return (budget,) * layers
        parts = np.asarray(self.prepared(learned)["parts"], np.float64)
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


@dataclasses.dataclass(frozen=True)
class Divided(Measured):
    """The fraction `retrieval` of a layer's heads, those with the highest scores and at least one, share what the
    others leave, as far as there is text; the others are local: `base` (a fraction of the budget beyond what is
    protected, or one entry), and what the retrieval heads have no text for, evenly.

    A KV head's score is the mean of its query heads' in `retrieval [L, Hq]`, or that of the best of them
    (`of_group="max"`). A local head holds what is protected and the newest entries, at decode too. Source:
    DuoAttention (arXiv 2410.10819) and RazorAttention (arXiv 2407.15891), under a total that both let grow with the
    text.
    """

    of_group: str = "mean"
    layers: Allocate = Uniform()
    retrieval: float = 0.5
    base: float = 0.0
    kind: ClassVar[str] = "divided"

    def __post_init__(self):
        if self.of_group not in ("mean", "max"):
            raise BadValue(f"of_group={self.of_group!r}: expected 'mean' or 'max'")
        if not 0 < self.retrieval <= 1 or not 0 <= self.base <= 1:
            raise BadValue(
                f"retrieval={self.retrieval}, base={self.base}: expected the fraction of heads that retrieve, above 0 "
                "and up to 1, and a fraction of the budget"
            )

    @property
    def needs(self) -> frozenset[str]:
        """What dividing the budget over heads and layers needs."""
        return self.layers.needs | {calibrated("retrieval")}

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
        """True for all but the best heads; ties go to the lower head."""
        count = max(int(self.retrieval * heads + 0.5), 1)
        group = learned["retrieval"].astype(jnp.float32).reshape(heads, -1)
        scores = jnp.max(group, axis=-1) if self.of_group == "max" else jnp.mean(group, axis=-1)
        return _place(-scores) >= count

    def quotas(
        self,
        learned: Learned,
        total: Int[Array, "B"],
        guard: Int[Array, "B"],
        held: Int[Array, "B Hk"],
        tokens: Int[Array, "B"],
    ) -> Int[Array, "B Hk"]:
        """`guard` for every head; the rest for the retrieval heads evenly, then for the local ones."""
        given, local = jnp.minimum(guard[:, None], held), self.local(learned, held.shape[-1])
        for shares in ((~local).astype(jnp.int32), local.astype(jnp.int32)):
            given += poured(total - jnp.sum(given, axis=-1), shares, held - given)
        return given


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


def scaled(shares: np.ndarray, total: int, least: int, most: int) -> np.ndarray:
    """Whole numbers from `least` to `most` that sum to `total`, in proportion to `shares [L]` but for these bounds.

    `total` lies between L times `least` and L times `most`. The largest remainders are rounded up.
    """
    low, high = 0.0, most / max(float(shares.min()), 1e-9)
    for _ in range(100):  # the scale at which the bounded parts sum to the total, by halving
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(shares * scale, least, most).sum() < total else (low, scale)
    exact = np.clip(shares * high, least, most)
    whole = np.floor(exact + 1e-6).astype(int)
    order = np.argsort(whole - exact, kind="stable")
    whole[order[: total - whole.sum()]] += 1
    return whole
