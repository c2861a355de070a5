"""allocate: the budget of every layer, in tokens per KV head, from the mean budget; and whether its heads share it.

Heads share it by what their entries are worth (`Adaptive`), or by what was measured on the model (`Measured`).
"""

import dataclasses
from typing import ClassVar

from jaxkv.errors import BadValue
from jaxkv.policies import layers
from jaxkv.policies.curves import Curves
from jaxkv.policies.layers import Layers, Learned, Uniform
from jaxkv.policies.measured import Divided, Proportional
from jaxkv.policies.score import Score


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
    layers: Layers = Uniform()
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
    def needs(self) -> frozenset[str]:
        """What dividing the budget over heads and layers needs."""
        return self.layers.needs if self.of is None else self.layers.needs | self.of.needs

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """The layers' own, as means over their heads."""
        return self.layers.budgets(budget, layers, tokens, window, learned)


Allocate = Layers | Adaptive | Proportional | Divided | Curves
KINDS = layers.KINDS | {part.kind: part for part in (Adaptive, Proportional, Divided, Curves)}
