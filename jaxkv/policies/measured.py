"""Shares of a layer's budget for its KV heads by what was measured on the model beforehand (`jaxkv calibrate`)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
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
class Retrieving(Measured):
    """Heads share the layer's budget by `retrieval [L, Hq]`, what `jaxkv calibrate` found of each query head.

    A KV head's score is the mean of its query heads' (`of_group="mean"`) or that of the best of them ("max"). Every
    head keeps what the phases protect and, of the rest of the budget, the `fraction`, or one entry. The scores
    are compared within a layer only, whose total is `layers`' and static, so that each layer keeps as much as under
    any other policy; the papers share one total between the heads of all layers (the difference is ours).
    """

    of_group: str = "mean"
    layers: Allocate = Uniform()

    def __post_init__(self):
        if self.of_group not in ("mean", "max"):
            raise BadValue(f"of_group={self.of_group!r}: expected 'mean' or 'max'")

    @property
    def needs(self) -> frozenset[str]:
        """What dividing the budget over heads and layers needs."""
        return self.layers.needs | {calibrated("retrieval")}

    def turns(self, scores: Float[Array, "Hk"]) -> tuple[Int[Array, "Hk"], ...]:
        """Who takes of what is left, by whole shares: first in proportion to the first, then to the next."""
        raise NotImplementedError

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """The layers' own, as means over their heads."""
        return self.layers.budgets(budget, layers, tokens, window, learned)

    def scores(self, retrieval: Float[Array, "Hq"], heads: int) -> Float[Array, "Hk"]:
        """Each KV head's score from its query heads'."""
        group = retrieval.astype(jnp.float32).reshape(heads, -1)
        return jnp.max(group, axis=-1) if self.of_group == "max" else jnp.mean(group, axis=-1)

    def quotas(
        self,
        learned: Learned,
        total: Int[Array, "B"],
        guard: Int[Array, "B"],
        held: Int[Array, "B Hk"],
        tokens: Int[Array, "B"],
    ) -> Int[Array, "B Hk"]:
        """`guard` for every head; the rest is poured out in `turns`."""
        given = jnp.minimum(guard[:, None], held)
        for shares in self.turns(self.scores(learned["retrieval"], held.shape[-1])):
            given += poured(total - jnp.sum(given, axis=-1), shares, held - given)
        return given


@dataclasses.dataclass(frozen=True)
class Proportional(Retrieving):
    """A head's budget = (1 - 1/beta) of the mean one + its share, by score, of what that leaves of the layer's.

    Both count what is kept beyond the protected entries. Source: HeadKV (arXiv 2410.19258), with the retrieval scores
    of CompressKV's kind instead of its retrieval-reasoning ones. Its release tries eight betas from 1.005 to 10; the
    default is ours, one of them.
    """

    beta: float = 1.2
    kind: ClassVar[str] = "proportional"

    def __post_init__(self):
        super().__post_init__()
        if self.beta < 1:
            raise BadValue(f"beta={self.beta}: expected at least 1, where a head's share is all it has")

    @property
    def fraction(self) -> float:
        """1 - 1/beta."""
        return 1 - 1 / self.beta

    def turns(self, scores: Float[Array, "Hk"]) -> tuple[Int[Array, "Hk"], ...]:
        """All heads at once, in proportion to their scores."""
        most = jnp.maximum(jnp.max(scores), jnp.finfo(jnp.float32).tiny)
        return (jnp.maximum(jnp.round(scores / most * STEPS).astype(jnp.int32), 1),)


@dataclasses.dataclass(frozen=True)
class Divided(Retrieving):
    """The fraction `retrieval` of a layer's heads, those with the highest scores and at least one, share what the
    others leave, as far as there is text; the others are local: `base` (a fraction of the budget beyond what is
    protected, or one entry), and what the retrieval heads have no text for, evenly.

    A local head holds what is protected and the newest entries, at decode too. Source: DuoAttention (arXiv 2410.10819)
    and RazorAttention (arXiv 2407.15891), under a total that both let grow with the text.
    """

    retrieval: float = 0.5
    base: float = 0.0
    kind: ClassVar[str] = "divided"

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.retrieval <= 1 or not 0 <= self.base <= 1:
            raise BadValue(
                f"retrieval={self.retrieval}, base={self.base}: expected the fraction of heads that retrieve, above 0 "
                "and up to 1, and a fraction of the budget"
            )

    @property
    def fraction(self) -> float:
        """`base`."""
        return self.base

    def local(self, learned: Learned, heads: int) -> Bool[Array, "Hk"]:
        """True for all but the best heads; ties go to the lower head."""
        return self._local(self.scores(learned["retrieval"], heads))

    def _local(self, scores: Float[Array, "Hk"]) -> Bool[Array, "Hk"]:
        count = max(int(self.retrieval * len(scores) + 0.5), 1)
        return _place(-scores) >= count

    def turns(self, scores: Float[Array, "Hk"]) -> tuple[Int[Array, "Hk"], ...]:
        """The retrieval heads evenly, then the local ones."""
        local = self._local(scores)
        return (~local).astype(jnp.int32), local.astype(jnp.int32)


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
