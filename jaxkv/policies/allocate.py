"""allocate: the budget of every layer, in tokens per KV head, from the mean budget."""

import dataclasses
from typing import ClassVar

from jaxkv.errors import BadValue


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every layer gets the budget."""

    kind: ClassVar[str] = "uniform"

    def budgets(self, budget: int, layers: int, tokens: int, window: int) -> tuple[int, ...]:
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

    def __post_init__(self):
        if self.beta < 1:
            raise BadValue(f"beta={self.beta}: expected at least 1, where every layer gets the same")

    def budgets(self, budget: int, layers: int, tokens: int, window: int) -> tuple[int, ...]:
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


Allocate = Uniform | Pyramid
KINDS = {part.kind: part for part in (Uniform, Pyramid)}
