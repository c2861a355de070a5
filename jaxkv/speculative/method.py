"""What a method of speculation starts from."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jaxkv.errors import BadValue
from jaxkv.policies.policy import Policy
from jaxkv.run import Expected
from jaxkv.store import KVCache
from jaxkv.weights.params import Params


@dataclasses.dataclass(frozen=True)
class Start:
    """A call after its prompt: `rows` of token ids (None: it went on from a cache alone), each `samples` times; the
    first tokens sampled; the likeliest tokens after each prompt token; and `room` for new ones.

    `prefill(params, policy)` runs the rows through another model or policy, None where a cache was given.
    """

    params: Params
    rows: list[np.ndarray] | None
    samples: int
    pending: jax.Array
    expected: Expected | None
    room: int
    prefill: Callable[[Params, Policy], KVCache] | None

    def prefilled(self, params: Params, policy: Policy) -> KVCache:
        """The cache that the prompt leaves there. Raises `BadValue` where the prompt went on from a cache."""
        if self.prefill is None:
            raise BadValue("a draft model must read the whole text, and the tokens in cache= are not known any more")
        return self.prefill(params, policy)
