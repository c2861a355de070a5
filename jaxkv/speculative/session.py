"""One call's speculation on the host: what it starts from, its chunks, and what drafts brought."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxkv import run
from jaxkv.policies.policy import Policy
from jaxkv.sharding.hosts import measured_once
from jaxkv.speculative import gate as gates
from jaxkv.speculative.attend import check, check_model
from jaxkv.speculative.context import AASD, PromptLookup
from jaxkv.speculative.draft_model import DraftModel, SelfDraft
from jaxkv.speculative.method import Start
from jaxkv.speculative.rounds import Drafting, speculate
from jaxkv.speculative.tally import Speculation, Tally
from jaxkv.speculative.verify import parse
from jaxkv.store import KVCache
from jaxkv.weights.params import Params

Speculative = PromptLookup | AASD | DraftModel | SelfDraft
ROUNDS = 4  # a chunk has one round for so many steps of plain decoding, and at least two


class Session:
    """Holds the drafter's device state beside the decode state. Raises `BadValue` for what cannot speculate."""

    def __init__(self, method: Any, params: Params, policy: Policy, cache: KVCache | None = None):
        check(policy, cache)
        check_model(policy, params.config)
        self._params, self._method, self._drafter, self._extra = params, method, method.drafter(params), None
        self._tally, self._pending, self._chunks = Tally(1.0), None, 0
        self.drafting: Drafting | None = None

    @property
    def top(self) -> int:
        """Tokens of the prefill distribution to keep per prompt token."""
        return self._method.top

    @property
    def limit(self) -> int:
        """Prompt tokens that drafts may come from."""
        return self._method.limit

    def check_room(self, lengths: np.ndarray, room: int) -> None:
        """Raises `BadValue` where what drafts come from cannot hold texts of `lengths [B]` and `room` tokens more."""
        self._method.check_room(self._params, lengths, room)

    def begin(self, start: Start) -> None:
        """The drafter's state after the prompt and the first token sampled."""
        drafts, self._extra = self._method.begin(start)
        expected = gates.first_cost(start.pending.shape[0], self._drafter.shape.nodes)
        self._tally = Tally(expected)
        gate = jax.tree.map(self._params.layout.put, self._drafter.gate(expected))
        self.drafting = Drafting(drafts, gate)

    def chunk(
        self, weights: Any, state: run.DecodeState, steps: int, most: np.ndarray, shared: dict
    ) -> tuple[run.DecodeState, Any]:
        """Some rounds in one compiled loop, in which each row takes its `most` tokens at most; the state after them and
        each row's new tokens with gaps of -1."""
        assert self.drafting is not None
        method = self._method
        state, self.drafting, new, self._pending = speculate(
            weights, self._extra, state, self.drafting, rounds=max(2, -(-steps // ROUNDS)), drafter=self._drafter,
            verify=parse(method.verify), fallback=method.fallback, most=self._params.layout.put(most),
            layout=self._params.layout, **shared,
        )  # fmt: skip
        return state, new

    def tally(self, seconds: float | None) -> None:
        """The last chunk counts, and took so long (None: not known). Where drafts that are not exact may pass, measured
        times do not say when to draft: the same call gives the same text."""
        assert self._pending is not None and self.drafting is not None
        self._tally.add(self._pending, seconds if self._chunks else None)  # the first may have compiled
        self._chunks += 1
        if parse(self._method.verify) is not None:
            return
        cost = self._params.layout.put(np.float32(measured_once(self._tally.cost)))
        self.drafting = dataclasses.replace(self.drafting, gate=dataclasses.replace(self.drafting.gate, cost=cost))

    def summary(self) -> Speculation:
        """The sum over all chunks."""
        return self._tally.summary()
