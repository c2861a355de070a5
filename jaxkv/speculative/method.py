"""What a method of speculation starts from."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jaxkv.policies.policy import Policy
from jaxkv.run import Expected
from jaxkv.store import KVCache
from jaxkv.weights.params import Params


@dataclasses.dataclass(frozen=True)
class Start:
    """A call after its prompt: each row's text before its `pending` token, the cache's in front as far as it is known,
    each `samples` times; the likeliest tokens after those that were run now, the text's last; and `room` for new ones.

    `prefill(params, policy)` runs the texts through another model or policy.
    """

    params: Params
    texts: list[np.ndarray]
    samples: int
    pending: jax.Array
    expected: Expected | None
    room: int
    prefill: Callable[[Params, Policy], KVCache]
