"""allocate: the budget of every layer, in tokens per KV head, from the mean budget; and whether its heads share it."""

import dataclasses
from typing import ClassVar

from jaxkv.errors import BadValue
from jaxkv.policies.score import Score


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every layer gets the budget."""

    kind: ClassVar[str] = "uniform"
    pooled: ClassVar[bool] = False

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
    pooled: ClassVar[bool] = False

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
    layers: Uniform | Pyramid = Uniform()
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

    def budgets(self, budget: int, layers: int, tokens: int, window: int) -> tuple[int, ...]:
        """The layers' own, as means over their heads."""
        return self.layers.budgets(budget, layers, tokens, window)


Allocate = Uniform | Pyramid | Adaptive
KINDS = {part.kind: part for part in (Uniform, Pyramid, Adaptive)}
LAYERS = {part.kind: part for part in (Uniform, Pyramid)}
