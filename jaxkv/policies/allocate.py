"""allocate: the budget of every layer, in tokens per KV head, from the mean budget; and whether its heads share it.

Heads share it by what their entries are worth (`Adaptive`), or by how well they retrieve, which was measured on the
model beforehand (`Proportional`, `Divided`).
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.errors import BadValue
from jaxkv.policies.score import Score

Learned = Mapping[str, Any]  # name -> array [L, ...], by `jaxkv calibrate`
STEPS = 4095  # the finest share of a head, in whole numbers, so that the same budgets come out on every backend


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every layer gets the budget."""

    kind: ClassVar[str] = "uniform"
    pooled: ClassVar[bool] = False
    learns: ClassVar[tuple[str, ...]] = ()

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """`budget`, `layers` times."""
        return (budget,) * layers


@dataclasses.dataclass(frozen=True)
class Pyramid:
    """Falls linearly from 2m - m/beta at the bottom layer to m/beta at the top, m being the mean budget.

    The largest is at most the tokens outside the window (then the smallest grows to keep the mean); where the window
    does not fit into the smallest, every layer gets m. Source: PyramidKV (arXiv 2406.02069), in kvpress' form.
    """

    beta: float = 20.0
    kind: ClassVar[str] = "pyramid"
    pooled: ClassVar[bool] = False
    learns: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        if self.beta < 1:
            raise BadValue(f"beta={self.beta}: expected at least 1, where every layer gets the same")

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """One budget per layer, bottom first; their mean is `budget` up to rounding."""
        low = budget / self.beta
        high = 2 * budget - low
        if high >= tokens - window:
            high = tokens - window
            low = 2 * budget - high
        if layers == 1 or not tokens >= high >= low >= max(window, 1):
            return (budget,) * layers
        step = (high - low) / (layers - 1)
        return tuple(round(high - layer * step) for layer in range(layers))


@dataclasses.dataclass(frozen=True)
class Erring:
    """A layer gets `least` + its share, by the error that eviction makes in its output, of what that leaves of all.

    The errors are `eviction_error [L]`, as `jaxkv calibrate` found them. A layer gets `most` times the mean budget at
    most, and no more than the text has; single tokens that rounding and these bounds leave over or lack go to the
    layers by their error. A budget of `least` or below, or above the text, is every layer's. Source: CompressKV (arXiv
    2508.02401), in its release's form.
    """

    least: int = 32
    most: float = 3.0
    kind: ClassVar[str] = "error"
    pooled: ClassVar[bool] = False
    learns: ClassVar[tuple[str, ...]] = ("eviction_error",)

    def __post_init__(self):
        if self.least < 1 or self.most < 1:
            raise BadValue(f"least={self.least}, most={self.most}: expected at least 1 token and 1 times the budget")

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """One budget per layer, bottom first; their mean is `budget`."""
        least, most = max(self.least, window + 1), min(int(self.most * budget), tokens)
        if not least < budget <= most:
            return (budget,) * layers
        error = np.asarray(learned["eviction_error"], np.float64)
        shares = error / error.sum()
        each = np.clip(least + np.round(shares * (layers * (budget - least))), least, most).astype(int)
        left = layers * budget - int(each.sum())
        step = 1 if left > 0 else -1
        order = itertools.cycle(np.argsort(-step * shares, kind="stable").tolist())
        while left:
            layer = next(order)
            if least <= each[layer] + step <= most:
                each[layer] += step
                left -= step
        return tuple(each.tolist())


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """The KV heads of a layer compete for its budget: the best entries of all heads stay, wherever they are.

    Every head keeps at least its best `safeguard` (a fraction of the budget). With `of`, the heads' shares come from
    that score, and inside each head the policy's own decides. `layers` gives each layer its budget. At decode the
    borders between the heads move every `interval` steps (0: never): the lowest `shift` entries per head on average, of
    all heads together, make room for as many new ones in every head. A decode phase with `every` > 1 moves the borders
    whenever it cuts. The cache is a pool of exactly the budget.
    Layers with a sliding window stay uniform. Source: AdaKV (arXiv 2407.11550) in kvpress' form; the moves are ours.
    """

    safeguard: float = 0.2
    of: Score | None = None
    layers: Uniform | Pyramid | Erring = Uniform()
    interval: int = 0
    shift: int = 1
    kind: ClassVar[str] = "adaptive"
    pooled: ClassVar[bool] = True

    def __post_init__(self):
        if not 0 <= self.safeguard <= 1:
            raise BadValue(f"safeguard={self.safeguard}: expected a fraction of the budget, from 0 to 1")
        if self.interval < 0 or self.shift < 1:
            raise BadValue(
                f"interval={self.interval}, shift={self.shift}: expected at least 0 steps (0: never) and 1 entry"
            )

    @property
    def learns(self) -> tuple[str, ...]:
        """What dividing the budget over the layers needs of `jaxkv calibrate`."""
        return self.layers.learns

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """The layers' own, as means over their heads."""
        return self.layers.budgets(budget, layers, tokens, window, learned)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Heads share the layer's budget by `retrieval [L, Hq]`, what `jaxkv calibrate` found of each query head.

    A KV head's score is the mean of its query heads' (`of_group="mean"`) or that of the best of them ("max"). Every
    head keeps what the phases protect and, of the rest of the budget, the fraction `least`, or one entry. The scores
    are compared within a layer only, whose total is `layers`' and static, so that each layer keeps as much as under
    any other policy; the papers share one total between the heads of all layers (the difference is ours).
    """

    of_group: str = "mean"
    layers: Uniform | Pyramid | Erring = Uniform()
    pooled: ClassVar[bool] = True

    def __post_init__(self):
        if self.of_group not in ("mean", "max"):
            raise BadValue(f"of_group={self.of_group!r}: expected 'mean' or 'max'")

    @property
    def learns(self) -> tuple[str, ...]:
        """What dividing the budget over heads and layers needs of `jaxkv calibrate`."""
        return ("retrieval", *self.layers.learns)

    @property
    def least(self) -> float:
        """The fraction of the budget beyond what is protected that every head keeps."""
        raise NotImplementedError

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
        self, scores: Float[Array, "Hk"], total: Int[Array, "B"], guard: Int[Array, "B"], held: Int[Array, "B Hk"]
    ) -> Int[Array, "B Hk"]:
        """How many of the `held` entries each head keeps: `total` together, or all where they are no more.

        Every head keeps `guard [B]`, or what it has; the rest is poured out in `turns`. `guard` times the heads is at
        most `total`.
        """
        given = jnp.minimum(guard[:, None], held)
        for shares in self.turns(scores):
            given += poured(total - jnp.sum(given, axis=-1), shares, held - given)
        return given


@dataclasses.dataclass(frozen=True)
class Proportional(Measured):
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
    def least(self) -> float:
        """1 - 1/beta."""
        return 1 - 1 / self.beta

    def turns(self, scores: Float[Array, "Hk"]) -> tuple[Int[Array, "Hk"], ...]:
        """All heads at once, in proportion to their scores."""
        most = jnp.maximum(jnp.max(scores), jnp.finfo(jnp.float32).tiny)
        return (jnp.maximum(jnp.round(scores / most * STEPS).astype(jnp.int32), 1),)


@dataclasses.dataclass(frozen=True)
class Divided(Measured):
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
    def least(self) -> float:
        """`base`."""
        return self.base

    def local(self, scores: Float[Array, "Hk"]) -> Bool[Array, "Hk"]:
        """True for all but the best heads; ties go to the lower head."""
        count = max(int(self.retrieval * len(scores) + 0.5), 1)
        return _place(-scores) >= count

    def turns(self, scores: Float[Array, "Hk"]) -> tuple[Int[Array, "Hk"], ...]:
        """The retrieval heads evenly, then the local ones."""
        local = self.local(scores)
        return (~local).astype(jnp.int32), local.astype(jnp.int32)


def poured(left: Int[Array, "B"], shares: Int[Array, "Hk"], room: Int[Array, "B Hk"]) -> Int[Array, "B Hk"]:
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


Allocate = Uniform | Pyramid | Erring | Adaptive | Proportional | Divided
KINDS = {part.kind: part for part in (Uniform, Pyramid, Erring, Adaptive, Proportional, Divided)}
LAYERS = {part.kind: part for part in (Uniform, Pyramid, Erring)}
