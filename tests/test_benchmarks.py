"""What benchmarks refuse before they load a model, so that nothing that was measured is lost."""

import argparse
import importlib
import sys
import types
from pathlib import Path

import pytest
from letters import Letters

import jaxkv
from benchmarks import flat_cost, peer_kvpress
from benchmarks.arguments import cases_of, policies_at


class Loaded(Exception):
    """A model was loaded."""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("passkey --policies h2o h20", "--policies: unknown policy 'h20'; did you mean 'h2o'"),
        ("passkey --name no/such", "--name: 'no/such': expected the name of a file"),
        ("passkey --depths 3", "--depths: '3': expected a place in the text, from 0 to 1"),
        ("passkey --batch 0", "--batch: '0': expected a whole number, at least 1"),
        ("passkey --policies h2o --options foo=3", "unknown option of policy 'h2o' 'foo'"),
        ("family_cost --policies h2o h20", "unknown policy 'h20'"),
        ("family_cost --policies h2o --budget 2", "budget=2 of policy"),
        ("family_cost --rounds 0", "--rounds: '0'"),
        ("speculative --policy h20", "unknown policy 'h20'"),
        ("speculative --prompts 0", "--prompts: '0'"),
        ("versions --other . --policies h2o h20", "unknown policy 'h20'"),
        ("versions --other no/such", "--other 'no/such': expected the folder of another checkout"),
        ("throughput --implementation gpu", "invalid choice: 'gpu'"),
        ("throughput --share 0", "--share: '0': expected a share, above 0 and at most 1"),
        ("serving --rate 0", "--rate: '0': expected a number above 0"),
        ("kernels --sizes 8-64", "--sizes: '8-64': expected rows and slots, such as 8x4096"),
        ("peer_kvpress default --oracle-python no/python", "--oracle-python: 'no/python': no such program"),
        ("flat_cost --new-tokens 1", "--new-tokens: '1': expected a whole number, at least 2"),
        ("pod --only nope", "--only 'nope': no case has that in its name"),
        ("tpu_schedule --only nope --check", "--only 'nope': no case has that in its name"),
        ("tpu_programs --only nope", "--only 'nope': no case has that in its name"),
        ("tpu_programs --bounds --check --only nope", "--only 'nope': no case has that in its name"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(monkeypatch, capsys, command, words):
    def load(*_, **__):
        raise Loaded

    monkeypatch.setattr(jaxkv, "load", load)
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{sys.argv[0]}").main()
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_what_is_asked_for_is_found(capsys):
    parser = argparse.ArgumentParser()
    cases = [types.SimpleNamespace(name=name) for name in ("one v5e", "one v6e", "two v5e")]
    assert cases_of(parser, cases, [""]) == cases
    assert cases_of(parser, cases, ["two", "v6e"]) == cases[1:]
    with pytest.raises(SystemExit):
        cases_of(parser, cases, ["one", "three"])
    assert "'three'" in capsys.readouterr().err
    found = policies_at(parser, ["h2o", "full"], 64)
    assert [policy.budget for policy in found.values()] == [64, None]


class Numbers(Letters):
    """Every text is the same tokens."""

    def __call__(self, text, **_):
        return {"input_ids": list(range(3, 90))}


def test_the_loop_without_a_policy_has_its_slots(tiny):
    """Or it is said beforehand that it can't."""
    params = tiny("llama3")
    params = type(params)(params.weights, params.config, Numbers())
    for budget, new_tokens, length in ((64, 9, 48), (96, 33, 64), (256, 64, 192), (48, 2, 32), (200, 8, None)):
        assert flat_cost.slots_with(params, jaxkv.policy("h2o", budget=budget), budget) == budget
        assert flat_cost.prompt_for(budget, new_tokens) == length
    assert flat_cost.slots_with(params, jaxkv.policy("snapkv", budget=64), 64) is None
    assert flat_cost.without_policy(params, 48, 1, 4)() > 0  # says itself where its slots are others


def test_a_peer_that_does_not_start_begins_no_run(monkeypatch, tmp_path):
    def started(*_):
        raise RuntimeError("ended")

    monkeypatch.setattr(peer_kvpress, "started", started)
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: types.SimpleNamespace(fingerprint="x"))
    options = argparse.Namespace(run="default", oracle_python="x", out=str(tmp_path), threads=None, model=None)
    options.presses, options.every = [], 16
    with pytest.raises(RuntimeError, match="ended"):
        peer_kvpress.ask(options)
    assert not any(Path(tmp_path).iterdir())
