"""The budget of every layer, in tokens per KV head, from the mean budget: fixed before anything runs."""

import dataclasses
import itertools
from typing import Any, ClassVar

import numpy as np

from jaxkv.errors import BadValue
from jaxkv.policies.allocator import UNLIMITED, Allocate, Learned
from jaxkv.policies.needs import calibrated


@dataclasses.dataclass(frozen=True)
class Uniform(Allocate):
    """Every layer gets the budget, but for the first `spare`, which hold the whole text on top of it.

    So with `spare` the memory is bounded by no budget: L layers hold (L - spare) budget + spare (tokens of the text).
    Source of sparing: key norm's release (arXiv 2406.11430).
    """

    spare: int = 0
    kind: ClassVar[str] = "uniform"

    def __post_init__(self):
        if isinstance(self.spare, bool) or self.spare < 0:
            raise BadValue(f"spare={self.spare}: expected a number of layers that evict nothing, 0 for none")

    @property
    def equal(self) -> bool:
        return type(self).budgets is Uniform.budgets and not self.spare

    @property
    def bounded(self) -> bool:
        return not self.spare

    def check(self, policy: Any) -> None:
        if self.spare and policy.rope != "text":
            raise BadValue(
                f"policy {policy.name!r} spares {self.spare} layers, which hold the whole text: expected rope='text', "
                "for the places in them grow with it"
            )

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """One budget per layer, bottom first; what is spared is unlimited."""
        spared = min(self.spare, layers)
        return (UNLIMITED,) * spared + (budget,) * (layers - spared)


@dataclasses.dataclass(frozen=True)
class Pyramid(Allocate):
    """The window, and of what the mean budget m has besides it a share that falls linearly from layer to layer.

    From 2b - s at the bottom to s = b // beta at the top, b = m - window. The largest is at most the tokens outside the
    window (then the smallest grows to keep the mean). A text within the budget gives every layer m, and so does a
    window of m or more, and if `level` a text of fewer than 2b tokens. Source: PyramidKV (arXiv 2406.02069), in its
    release's form, but for steps between layers that are no whole numbers: the release rounds them down and so holds
    more than m. AdaKV's release of it has no `level`.
    """

    beta: float = 20.0
    level: bool = True
    kind: ClassVar[str] = "pyramid"

    def __post_init__(self):
        if self.beta < 1:
            raise BadValue(f"beta={self.beta}: expected at least 1, where every layer gets the same")

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """One budget per layer, bottom first; their mean is `budget` up to rounding."""
        apart = budget - window
        if layers == 1 or apart < 1 or tokens <= budget or (self.level and tokens < 2 * apart):
            return (budget,) * layers
        high = min(2 * apart - int(apart // self.beta), tokens - window)
        step = 2 * (high - apart) / (layers - 1)
        return tuple(window + round(high - layer * step) for layer in range(layers))


@dataclasses.dataclass(frozen=True)
class Erring(Allocate):
    """A layer gets `least` + its share, by the error that eviction makes in its output, of what that leaves of all.

    The errors are `eviction_error [L]`, as `jaxkv calibrate` found them. A layer gets `most` times the mean budget at
    most, and no more than the text has; single tokens that rounding and these bounds leave over or lack go to the
    layers by their error. A budget of `least` or below, or above the text, is every layer's; so is any where none errs.
    Source: CompressKV (arXiv 2508.02401), in its release's form.
    """

    least: int = 32
    most: float = 3.0
    kind: ClassVar[str] = "error"
    needs: ClassVar[frozenset[str]] = frozenset({calibrated("eviction_error")})

    def __post_init__(self):
        if self.least < 1 or self.most < 1:
            raise BadValue(f"least={self.least}, most={self.most}: expected at least 1 token and 1 times the budget")

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """One budget per layer, bottom first; their mean is `budget`."""
        least, most = max(self.least, window + 1), min(int(self.most * budget), tokens)
        error = np.asarray(learned["eviction_error"], np.float64)
        if not (least < budget <= most and error.sum() > 0):
            return (budget,) * layers
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
class Similar(Allocate):
    """A layer gets in proportion to (1 - s)^power, s being its similarity between 0 for the least of all layers and 1
    for the most; and a quarter of the mean at least.

    The similarities are `key_similarity [L]`, as `jaxkv calibrate` found them: a layer whose keys are the same without
    the text before keeps little. Source: EpiCache (arXiv 2509.17396), in its release's form (`allocate_layer_budget`,
    run with a power of 1.1); there the quarters come on top of the budget, here all are scaled to it.
    """

    power: float = 1.1
    kind: ClassVar[str] = "similarity"
    needs: ClassVar[frozenset[str]] = frozenset({calibrated("key_similarity")})

    def __post_init__(self):
        if self.power < 0:
            raise BadValue(f"power={self.power}: expected 0, where every layer gets the same, or more")

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """One budget per layer, bottom first; their mean is `budget`."""
        alike = np.asarray(learned["key_similarity"], np.float64)
        spread = float(np.ptp(alike))
        if not spread or budget >= tokens:
            return (budget,) * layers
        shares = (1 - (alike - alike.min()) / spread) ** self.power
        return tuple(scaled(shares, layers * budget, max(budget // 4, 1), tokens).tolist())


Layers = Uniform | Pyramid | Erring | Similar
KINDS = {part.kind: part for part in (Uniform, Pyramid, Erring, Similar)}


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
