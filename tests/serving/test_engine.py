"""The engine: requests that come and go in the rows of one batch get the tokens that each gets alone."""

import numpy as np
import pytest

import jaxkv
from jaxkv.serving import Engine

FAMILY = "llama3"
pytestmark = pytest.mark.usefixtures("unchecked")  # programs are compiled ahead of time


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(3, 100, length).astype(np.int32)


SETTINGS = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 12, "seed": -(2**40)},
    {"temperature": 1.2, "top_p": 0.7, "seed": 5},
    {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 2**40},
    {"repetition_penalty": 1.4},
)
LENGTHS = (5, 40, 17, 90, 33, 64, 1, 130)


def requests(count, draw):
    """So many different requests: prompt and settings."""
    found = []
    for number in range(count):
        settings = dict(SETTINGS[number % len(SETTINGS)], max_new_tokens=int(draw.integers(1, 14)))
        if number % 3 == 1:
            settings["stop_tokens"] = tuple(map(int, draw.integers(3, 250, 8)))
        found.append((ids(LENGTHS[number % len(LENGTHS)], number), settings))
    return found


def alone(params, policy, prompt, settings):
    """What `generate` gives: the tokens up to the end."""
    out = jaxkv.generate(params, prompt, policy=policy, **settings)
    return out.tokens[0, : out.lengths[0]].tolist()


def run(engine, work, draw):
    """The answers to requests that arrive between turns."""
    answers, waiting = [], list(work)
    while waiting or not all(answer.ended for answer in answers):
        for _ in range(int(draw.integers(0, 3))):
            if waiting:
                prompt, settings = waiting.pop(0)
                answers.append(engine.submit(prompt, **settings))
        engine.turn()
    assert not engine.turn()
    return answers


@pytest.mark.parametrize("name, options", [("dapq-longflow", {"count": 6}), ("full", {}), ("snapkv", {"window": 6})])
def test_mixed_requests_get_what_each_gets_alone(tiny, name, options):
    params = tiny(FAMILY)
    policy = jaxkv.policy(name, **({"budget": 40} if name != "full" else {}), block=32, **options)
    engine = Engine(params, policy, rows=3, longest=140, max_new_tokens=16, steps=4)
    draw = np.random.default_rng(1)
    work = requests(12, draw)
    for (prompt, settings), answer in zip(work, run(engine, work, draw), strict=True):
        assert answer.tokens == alone(params, policy, prompt, settings), settings
        assert answer.finish == ("length" if len(answer.tokens) == settings["max_new_tokens"] else "stop")
