"""How an engine's rows draft: what its programs are compiled for."""

import dataclasses
from typing import Any

import numpy as np

from jaxkv.errors import BadValue
from jaxkv.policies.policy import Policy
from jaxkv.request import check_speculative
from jaxkv.speculative import gate as gates
from jaxkv.speculative.attend import check, check_expected, check_model
from jaxkv.speculative.gate import Gate
from jaxkv.speculative.session import Speculative
from jaxkv.speculative.verify import Verify, parse
from jaxkv.weights.params import Params


@dataclasses.dataclass(frozen=True)
class Drafts:
    """The drafter, how its drafts are verified, and the `columns` of a row's text: before what comes, and for that."""

    drafter: Any
    verify: Verify
    fallback: bool
    columns: tuple[int, int]
    cost: float

    @classmethod
    def of(
        cls,
        method: Speculative | None,
        params: Params,
        policy: Policy,
        rows: int,
        longest: int,
        room: int,
        steps: int,
    ) -> "Drafts | None":
        """What `speculative=` means for so many rows. Raises `BadValue` as `jaxkv.generate` does, and for drafts of a
        model, whose own cache each request would have to fill."""
        check_speculative(params.layout.mesh, method)
        if method is None:
            return None
        check(policy)
        check_model(policy, params.config)
        check_expected(policy, method.top)
        if not method.alone:
            raise BadValue(
                f"speculative={type(method).__name__}: its drafts come from a cache of their own, which every request "
                "would have to fill; an engine takes PromptLookup() and AASD(), which need the text alone"
            )
        drafter: Any = method.drafter(params)
        shape = drafter.shape
        columns = drafter.columns(longest, max(room, steps * (shape.depth + 1)))
        return cls(drafter, parse(method.verify), method.fallback, columns, gates.first_cost(rows, shape.nodes))

    @property
    def levels(self) -> int:
        """The most tokens that a pass gives a row."""
        return self.drafter.shape.depth + 1

    def row(self, text: np.ndarray) -> Any:
        """What a row drafts from, before the first token that comes."""
        return self.drafter.row(text, self.columns)

    def gate(self) -> Gate:
        """A gate that has seen nothing."""
        return self.drafter.gate(self.cost)
