"""Every policy keeps and generates what it did when `record_behaviour.py` last ran.

The contract compares the tiny model at one block size by default, together with its own rules.
"""

import behaviour
import pytest
from behaviour import CASES, SETTINGS

from jaxkv.policies import catalogue

KINDS = ("streaming-llm", "spans-longflow", "lagkv", "adakv-h2o", "global-h2o", "lu-kv")  # one of each
PARAMS = [
    pytest.param(*case, marks=() if case[0] == "smollm2" and case[1] in KINDS and case[2] == 128 else pytest.mark.slow)
    for case in CASES
]


@pytest.mark.long
@pytest.mark.parametrize("model, name, block", PARAMS)
def test_a_policy_does_what_it_did(model, name, block):
    found = behaviour.record(model, name, block)
    if found is None and model == "smollm2":
        pytest.skip("recorded on SmolLM2 are some of every kind")
    assert found is not None, f"nothing recorded: python tests/record_behaviour.py --model {model} --policies {name}"
    seed, before = found
    rows, chosen = behaviour.prompts(model, seed), behaviour.policy(model, name, block)
    behaviour.assert_same(behaviour.observed(behaviour.loaded(model), rows, chosen), before)


def test_every_policy_is_recorded_on_the_tiny_model():
    """Else: python tests/record_behaviour.py --model tiny --policies <name>."""
    assert _recorded("tiny") == {(name, str(block)) for name in catalogue() for block in SETTINGS["tiny"].blocks}


def test_each_kind_of_policy_is_recorded_on_smollm2():
    """Some of every kind of store, at every size of block; each takes a minute to record."""
    blocks = SETTINGS["smollm2"].blocks
    names = {name for name, _ in _recorded("smollm2")}
    assert _recorded("smollm2") == {(name, str(block)) for name in names for block in blocks}
    assert {catalogue()[name].allocate.store for name in names} == {"slots", "pool", "line"} and set(KINDS) <= names


def _recorded(model: str) -> set[tuple[str, ...]]:
    return {tuple(key.split("/")[:2]) for key in behaviour.stored(model)}
