"""Every policy keeps and generates what it did when `record_behaviour.py` last ran.

The contract compares the tiny model at one block size by default, together with its own rules.
"""

import behaviour
import pytest
from behaviour import CASES, SETTINGS

from jaxkv.policies import catalogue

DEFAULT = ("streaming-llm", "dapq-longflow", "lagkv", "adakv-h2o", "global-h2o", "razorattention")  # one of each kind
PARAMS = [
    pytest.param(
        *case, marks=() if case[1] in DEFAULT and case[0] == "smollm2" and case[2] == 128 else pytest.mark.slow
    )
    for case in CASES
]


@pytest.mark.parametrize("model, name, block", PARAMS)
def test_a_policy_does_what_it_did(model, name, block):
    found = behaviour.record(model, name, block)
    assert found is not None, f"nothing recorded: python tests/record_behaviour.py --model {model} --policies {name}"
    seed, before = found
    rows, chosen = behaviour.prompts(model, seed), behaviour.policy(model, name, block)
    behaviour.assert_same(behaviour.observed(behaviour.loaded(model), rows, chosen), before)


@pytest.mark.parametrize("model", SETTINGS)
def test_every_policy_is_recorded(model):
    """Else: python tests/record_behaviour.py --policies <name>."""
    cases = {tuple(key.split("/")[:2]) for key in behaviour.stored(model)}
    assert cases == {(name, str(block)) for name in catalogue() for block in SETTINGS[model].blocks}
