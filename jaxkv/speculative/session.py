"""One call's speculation on the host: what it starts from, its chunks, and what drafts brought."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxkv import run
from jaxkv.policies.policy import Policy
from jaxkv.speculative import gate as gates
from jaxkv.speculative.attend import check
from jaxkv.speculative.context import AASD, PromptLookup
from jaxkv.speculative.draft_model import DraftModel, SelfDraft
from jaxkv.speculative.method import Start
from jaxkv.speculative.rounds import Drafting, speculate
from jaxkv.speculative.verify import parse
from jaxkv.store import KVCache
from jaxkv.weights.params import Params

Speculative = PromptLookup | AASD | DraftModel | SelfDraft
ROUNDS = 4  # a chunk has one round for so many steps of plain decoding, and at least two


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


class Session:
    """Holds the drafter's device state beside the decode state. Raises `BadValue` for what cannot speculate."""

    def __init__(self, method: Any, params: Params, policy: Policy, cache: KVCache | None = None):
        check(policy, cache)
        self._method, self._drafter, self._extra = method, method.drafter(params), None
        self._chunks: list[tuple[dict[str, int], float]] = []
        self._pending: dict[str, int] | None = None
        self._expected = 1.0
        self.drafting: Drafting | None = None

    @property
    def top(self) -> int:
        """Tokens of the prefill distribution to keep per prompt token."""
        return self._method.top

    @property
    def limit(self) -> int:
        """Prompt tokens that drafts may come from."""
        return self._method.limit

    def begin(self, start: Start) -> None:
        """The drafter's state after the prompt and the first token sampled."""
        drafts, self._extra = self._method.begin(start)
        self._expected = gates.first_cost(start.pending.shape[0] * self._drafter.shape.nodes)
        self.drafting = Drafting(drafts, gates.opened(self._drafter.classes, self._expected))

    def chunk(self, weights: Any, state: run.DecodeState, steps: int, shared: dict) -> tuple[run.DecodeState, Any]:
        """Some rounds in one compiled loop; the state after them and each row's new tokens with gaps of -1."""
        assert self.drafting is not None
        method = self._method
        state, self.drafting, new, counts = speculate(
            weights, self._extra, state, self.drafting, rounds=max(2, -(-steps // ROUNDS)), drafter=self._drafter,
            verify=parse(method.verify), fallback=method.fallback, **shared,
        )  # fmt: skip
        self._pending = {field.name: int(getattr(counts, field.name)) for field in dataclasses.fields(counts)}
        return state, new

    def tally(self, seconds: float) -> None:
        """The last chunk counts, and took so long."""
        assert self._pending is not None and self.drafting is not None
        self._chunks.append((self._pending, seconds))
        cost = jnp.float32(self._cost())
        self.drafting = dataclasses.replace(self.drafting, gate=dataclasses.replace(self.drafting.gate, cost=cost))

    def _cost(self) -> float:
        timed = self._chunks[1:]  # the first may have compiled
        counts = [count for count, _ in timed]
        return gates.measured(
            [c["trees"] for c in counts],
            [c["steps"] for c in counts],
            [seconds for _, seconds in timed],
            self._expected,
        )

    def summary(self) -> Speculation:
        """The sum over all chunks."""
        total = {
            name: sum(counts[name] for counts, _ in self._chunks)
            for name in ("trees", "steps", "verified", "gained", "departed", "tokens", "passes")
        }
        return Speculation(
            trees=total["trees"],
            steps=total["steps"],
            acceptance_length=total["gained"] / max(total["verified"], 1),
            tokens_per_pass=total["tokens"] / max(total["passes"], 1),
            departed=total["departed"],
            cost=self._cost(),
        )
