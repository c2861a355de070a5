"""What drafts brought, counted on the host, and what a pass over a tree costs, measured there."""

import dataclasses
from collections import Counter, deque

from jaxkv.speculative import gate as gates
from jaxkv.speculative.rounds import Counts

LATEST = 256  # chunks that the cost is measured from


@dataclasses.dataclass(frozen=True)
class Speculation:
    """What drafts brought: passes of the model over the batch with a tree (`trees`) and without (`steps`).

    `acceptance_length` is the tokens that a row got from a pass with drafts, the model's own one included;
    `tokens_per_pass` the same over all passes, those without a draft as well; `departed` of the tokens are not those
    of exact verification (none unless it is conditional); `cost` is one tree's pass in plain steps, as measured.
    """

    trees: int
    steps: int
    acceptance_length: float
    tokens_per_pass: float
    departed: int
    cost: float


class Tally:
    """The sums over chunks, from a cost that is `expected` until it has been measured."""

    def __init__(self, expected: float):
        self._expected = expected
        self._total: Counter[str] = Counter()
        self._timed: deque[tuple[int, int, float]] = deque(maxlen=LATEST)

    def add(self, counts: Counts, seconds: float | None) -> None:
        """A chunk counts, and took so long (None: unknown, or it may have compiled)."""
        found = {field.name: int(getattr(counts, field.name)) for field in dataclasses.fields(counts)}
        self._total.update(found)
        if seconds is not None:
            self._timed.append((found["trees"], found["steps"], seconds))

    @property
    def cost(self) -> float:
        """One tree's pass in plain steps."""
        trees, steps, seconds = (list(each) for each in zip(*self._timed, strict=True)) if self._timed else ([], [], [])
        return gates.measured(trees, steps, seconds, self._expected)

    def summary(self) -> Speculation:
        """The sum over all chunks."""
        total = self._total
        return Speculation(
            trees=total["trees"],
            steps=total["steps"],
            acceptance_length=total["gained"] / max(total["verified"], 1),
            tokens_per_pass=total["tokens"] / max(total["passes"], 1),
            departed=total["departed"],
            cost=self.cost,
        )
