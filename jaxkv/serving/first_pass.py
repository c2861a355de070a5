"""The first pass of a policy that looks ahead: its prompt under another policy, and a row of its own that goes on.

What that row says looks at the prompt from behind it, when the prompt is read a second time.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxkv.errors import BadValue
from jaxkv.policies.policy import Policy
from jaxkv.pseudo import first_pass
from jaxkv.sampling import Sampler
from jaxkv.serving.asked import Asked, asked, shapes_of
from jaxkv.serving.programs import Passed, Programs, Static
from jaxkv.serving.rows import Rows


class FirstPass:
    """Programs as an engine's own, for one row and as many steps as tokens look ahead.

    All of them score the prompt, also one that it keeps whole: so they are half as many. Those of prompts that go on
    from a stored prefix (`goes_on`) score nothing: they keep the prefix and all that follows it.
    """

    def __init__(self, whole: Static, longest: int, sizes: int, *, goes_on: bool = False):
        self.count, self._sizes, self._goes_on = self.drafted(whole.policy), sizes, goes_on
        policy = first_pass(whole.policy, goes_on)
        learned, context = whole.params.learned_for(policy.learns, policy.name), whole.params.config.max_position
        if policy.bound_to_text and longest > context - self.count:
            raise BadValue(
                f"longest={longest}: behind a prompt {self.count} tokens look ahead under {whole.policy.name!r}, and "
                f"the model's context has {context}: expected at most {context - self.count}"
            )
        if goes_on:  # slots for the prefix beside the prompt
            longest = min(longest + max(whole.shapes.slots), context - self.count)
        shapes = shapes_of(whole.params, policy, learned, longest, self.count, sizes)
        if not goes_on:
            later = shapes.later_looks and (True,)
            shapes = dataclasses.replace(shapes, whole=(), scored=whole.shapes.scored, later_looks=later)
        self._static = dataclasses.replace(
            whole,
            policy=policy,
            shapes=shapes,
            learned=learned,
            rows=1,
            steps=self.count,
            prefixes=goes_on,
            drafts=None,
        )
        self._programs = Programs(self._static)
        self._row: Rows | None = None
        self._adding = threading.Lock()

    @staticmethod
    def drafted(policy: Policy) -> int:
        """How many tokens the first pass drafts; none where there is no such pass."""
        return policy.extra if policy.prefill is not None and policy.prefill.observe.drafts else 0

    def make(self, short: Callable[[], Asked], wanted: Callable[[], bool]) -> None:
        """Compile what prompts wait for, as long as it is `wanted`; `short` gives any prompt of one block."""
        if self._row is None and wanted():
            self._row = self._programs.make(self._asked(short()))
        self._programs.add_missing(wanted)

    def add(self, short: Asked) -> None:
        """Compile what prompts behind the prefix of `short` wait for, as far as it is not there."""
        first = self._asked(short)
        assert first.prefix is not None
        with self._adding:
            if self._row is not None:
                self._programs.add(first.prefix)
            else:
                self._row = self._programs.make(first)
                self._programs.add_missing(lambda: True)

    def add_better(self, wanted: Callable[[], bool]) -> None:
        """As `Programs.add_better`."""
        self._programs.add_better(wanted)

    def ready(self, work: Asked) -> bool:
        """Whether the programs of this first pass are there."""
        return self._row is not None and self._programs.ready(work)

    @property
    def seconds(self) -> dict[str, float]:
        """What making each program took."""
        return {f"first pass, {name}": took for name, took in self._programs.seconds.items()}

    def before(self, work: Asked) -> Asked:
        """The request with its first pass in front, where anybody looks. Raises `BadValue` for a budget of its own that
        is as small as what that pass looks with."""
        return dataclasses.replace(work, first=self._asked(work)) if work.look else work

    def block(self, work: Asked, before: Passed | None, number: int) -> Passed:
        """As `Programs.block`, of the first pass."""
        return self._programs.block(work, before, number)

    def ahead(self, work: Asked, passed: Passed) -> np.ndarray:
        """The tokens `[1, N]` that the prompt goes on with, on the host."""
        assert self._row is not None  # made
        row, first = self._programs.begin(work, passed, 0)
        row = self._programs.insert(self._row, row, 0)
        self._row, told, _ = self._programs.chunk(row, np.zeros(1, bool), self.count, 1)
        later = np.asarray(told.token)[: self.count - 1, 0]
        return np.concatenate([np.asarray(first.token), later])[None].astype(np.int32)

    def _asked(self, work: Asked) -> Asked:
        static, policy = self._static, work.request.policy
        prefix, budget = work.prefix, None if self._goes_on else work.budget
        if prefix is not None:
            kept = tuple(layer.keeping(static.policy.stats) for layer in prefix.layers)
            prefix = dataclasses.replace(prefix, layers=kept)
        if budget is not None:
            own = first_pass(dataclasses.replace(policy, budget=budget))
            if dataclasses.replace(own, budget=static.policy.budget) != static.policy:
                raise BadValue(
                    f"budget={budget} of a request under policy {policy.name!r}: its first pass would look with "
                    "another window than this engine's programs; expected a larger one"
                )
            budget = own.budget
        greedy = dataclasses.replace(
            work.request, policy=static.policy, max_new_tokens=self.count, sampler=Sampler(), samples=1, seed=0,
            stop_tokens=(), stop=(),
        )  # fmt: skip
        nobody: Any = lambda *_: ()  # noqa: E731
        return asked(
            static.params, static.policy, static.learned, static.shapes, self._sizes, work.prompt, greedy, nobody,
            budget=budget, named=work.named, prefix=prefix, told=False, draw=0,
        )  # fmt: skip
