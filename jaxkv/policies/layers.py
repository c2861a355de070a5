"""The budget of every layer, in tokens per KV head, from the mean budget: fixed before anything runs."""

import dataclasses
import itertools
from typing import ClassVar

import numpy as np

from jaxkv.errors import BadValue
from jaxkv.policies.allocator import Allocate, Learned
from jaxkv.policies.needs import calibrated


@dataclasses.dataclass(frozen=True)
class Uniform(Allocate):
    """Every layer gets the budget."""

    kind: ClassVar[str] = "uniform"

    @property
    def equal(self) -> bool:
        return type(self).budgets is Allocate.budgets


@dataclasses.dataclass(frozen=True)
class Pyramid(Allocate):
    """Falls linearly from 2m - m/beta at the bottom layer to m/beta at the top, m being the mean budget.

    The largest is at most the tokens outside the window (then the smallest grows to keep the mean); where the window
    does not fit into the smallest, every layer gets m. Source: PyramidKV (arXiv 2406.02069), in kvpress' form.
    """

    beta: float = 20.0
    kind: ClassVar[str] = "pyramid"

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
class Erring(Allocate):
    """A layer gets `least` + its share, by the error that eviction makes in its output, of what that leaves of all.

    The errors are `eviction_error [L]`, as `jaxkv calibrate` found them. A layer gets `most` times the mean budget at
    most, and no more than the text has; single tokens that rounding and these bounds leave over or lack go to the
    layers by their error. A budget of `least` or below, or above the text, is every layer's. Source: CompressKV (arXiv
    2508.02401), in its release's form.
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


Layers = Uniform | Pyramid | Erring
KINDS = {part.kind: part for part in (Uniform, Pyramid, Erring)}
