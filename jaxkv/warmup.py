"""`warmup`: compile what later calls will need, before anybody waits for it."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.checks import check_arguments, shown
from jaxkv.errors import BadValue
from jaxkv.generate import generate
from jaxkv.request import sequence_of
from jaxkv.weights.params import Params

TRIES = 8  # texts, until one goes on


def warmup(params: Params, lengths: Sequence[int] = (256,), *, batch: int = 1, **asked: Any) -> dict[int, float]:
    """Seconds that each of the prompt `lengths` (tokens) took to get ready; afterwards `generate` starts at once.

    `asked` are the arguments of `generate` that will be used: the policy, `max_new_tokens`, how tokens are drawn, stop
    tokens, drafts. Prompts of near lengths share programs. With `keep_programs` later processes find them too.
    Raises `BadValue` for a length or batch below 1, and what `generate` raises.
    """
    check_arguments(batch=batch)
    lengths = sequence_of("lengths", lengths, int, "numbers of tokens, each at least 1")
    if not lengths or min(lengths) < 1:
        raise BadValue(f"lengths={shown(lengths)}: expected numbers of tokens, each at least 1")
    took = {}
    for length in lengths:
        started = time.perf_counter()
        for token in range(min(TRIES, params.config.vocab_size)):
            out = generate(params, np.full((batch, length), token, np.int32), **asked)
            if out.tokens.shape[1] == 1 or max(out.lengths) > 1:  # a text that ends with its first token is not decoded
                break
        took[length] = time.perf_counter() - started
    return took
