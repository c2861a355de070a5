"""The benchmark that shares one prefill between policies gives what each of them gives alone."""

import numpy as np
import pytest

import jaxkv
from benchmarks.one_prefill import ask, measurable, run_whole
from tests.small import SMALL

NAMES = ("dapq", "snapkv", "laq", "tova", "criticalkv", "lagkv", "chunkkv")


@pytest.fixture(scope="module")
def prompt(tiny):
    """A prompt of 40 tokens behind padding."""
    ids = np.random.default_rng(3).integers(3, 160, 40).astype(np.int32)
    return run_whole(tiny("llama3"), ids, 48, 5)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", NAMES)
def test_keeps_and_says_what_the_policy_does(prompt, name):
    """Kept positions of every layer, and greedy tokens where nothing is evicted while decoding."""
    policy = jaxkv.policy(name, budget=24, **SMALL.get(name, {}))
    kept = prompt.kept(policy, 30)
    alone = jaxkv.prefill(prompt.params, prompt.ids, policy=policy)
    for one, other in zip(kept, alone.layers, strict=True):
        assert [sorted(x[x >= 0]) for x in np.asarray(one.positions)[0]] == [
            sorted(x[x >= 0]) for x in np.asarray(other.positions)[0]
        ]
    said = ask(prompt, [policy, policy], 30, 3)
    if policy.decode is None:
        alone = jaxkv.generate(prompt.params, prompt.ids, policy=policy, max_new_tokens=6, stop_tokens=())
        assert np.array_equal(said, np.repeat(alone.tokens, 2, axis=0))


def test_says_which_policies_it_cannot_measure():
    """Pools, replays and layers that depend on each other are named."""
    for name in ("adakv-h2o", "kvzip", "fastkv"):
        assert measurable(jaxkv.policy(name, budget=24, **SMALL.get(name, {})), 40)
    assert not measurable(jaxkv.policy("dapq", budget=24), 40) and measurable(jaxkv.policy("dapq", budget=24), 9999)
