"""One prefill for all policies gives what each of them gives alone, question by question; a stopped run goes on."""

import dataclasses
import json
import re

import numpy as np
import pytest
from letters import Letters
from small import SMALL

import jaxkv
from jaxkv.evaluation import jobs, one_prefill, runner, settings
from jaxkv.evaluation.results import Store
from jaxkv.policies.catalogue import catalogue

SAID = ("answer", "score", "prompt_tokens")


@pytest.fixture(scope="module")
def lettered(tiny):
    params = tiny("llama3")
    return type(params)(params.weights, params.config, Letters(), learned=params.learned)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two prompts of letters, of 50 and 60 tokens."""
    rng = np.random.default_rng(5)
    return _written(tmp_path_factory, [rng.integers(40, 120, length) for length in (50, 60)])


@pytest.fixture(scope="module")
def distinct(tmp_path_factory):
    """The same, with no letter twice."""
    rng = np.random.default_rng(5)
    return _written(tmp_path_factory, [40 + rng.permutation(80)[:length] for length in (50, 60)])


def _written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    texts = ["".join(map(chr, row)) for row in rows]
    path.write_text("".join(json.dumps({"context": text, "answers": ["a"]}) + "\n" for text in texts))
    return path


def run_of(data, *policies, **more) -> settings.Settings:
    task = {"file": str(data), "chat": False, "max_new_tokens": 8, "scorer": "any"}
    entries = [{"name": name, **SMALL.get(name, {})} for name in policies]
    return settings.from_dict(
        {"policies": ["full", *entries], "budgets": [24, 32], "tasks": [task], "batch": 2, **more}
    )


def answers(store: Store) -> dict[tuple, tuple]:
    """What each cell said to each question."""
    return {
        (r["policy"], r["budget"], r["example"]): tuple(r[name] for name in SAID)
        for r in store.records()
        if "skipped" not in r
    }


KINDS = (  # of store, flow, observer, codec, and of what decoding does; `-m slow` runs every other policy
    "adakv", "compactor", "dapq-longflow", "full", "global-h2o", "h2o", "keydiff", "kivi", "kvzip", "lacache", "lagkv",
    "laq", "laq-plus-plus", "quest", "razorattention", "subgen", "tiered-h2o", "tiered-laq",
)  # fmt: skip
NAMES = [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in sorted(catalogue())]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_says_what_each_policy_says_alone(lettered, data, distinct, tmp_path, name):
    # a letter that comes twice has the same keys before RoPE in the first layer, of which rounding chooses
    data = distinct if name == "leverage" else data
    run = run_of(data, name) if name != "full" else run_of(data)
    shared = runner.evaluate(lettered, run_of(data, *[name][: name != "full"], share_prefill=True), tmp_path / "shared")
    alone = runner.evaluate(lettered, run, tmp_path / "alone")
    assert answers(shared) == answers(alone)
    held = {record["key"]: record for record in alone.records()}
    for record in shared.records():
        assert record.get("kept") == pytest.approx(held[record["key"]].get("kept"), abs=0.01)


def test_the_plan_says_what_it_costs_and_who_needs_a_prefill_of_its_own(lettered, data):
    run = run_of(data, "snapkv", "fastkv", "epicache", share_prefill=True)
    policies = {cell.label.split(" ")[0]: cell.policy for cell in run.cells()}
    assert one_prefill.apart(policies["fastkv"], 60, 99) and not one_prefill.apart(policies["snapkv"], 2048, 99)
    assert "blocks of 2048" in one_prefill.apart(policies["snapkv"], 2049, 99)
    said = runner.cost(lettered, run)
    assert said.startswith("2 prompts run once each, 110 tokens in all, for ") and "fastkv" in said
    own = sum(not one_prefill.apart(cell.policy, 60, 99) for cell in run.cells())
    assert f"for {2 * own} answers side by side" in said
    assert re.search(rf"{2 * (len(run.cells()) - own)} more prefills of", said)


def test_longer_blocks_let_more_policies_share(data):
    usual, longer = run_of(data, "snapkv", "epicache"), run_of(data, "snapkv", "epicache", block=8192)
    blocks = [{cell.label.split(" ")[0]: cell.policy.block for cell in run.cells()} for run in (usual, longer)]
    assert blocks[0]["snapkv"] == 2048 and blocks[1]["snapkv"] == 8192
    assert blocks[0]["epicache"] == blocks[1]["epicache"] < 2048


@pytest.mark.long
def test_policies_that_decode_alike_stand_in_one_batch(lettered, data, tmp_path, monkeypatch):
    """snapkv, dapq and spans add tokens; dapq-longflow and longflow overwrite by the same rule."""
    batches = []
    said = one_prefill._said
    monkeypatch.setattr(one_prefill, "_said", lambda *args: batches.append(len(args[2])) or said(*args))
    run = run_of(data, "snapkv", "dapq", "spans", "longflow", "dapq-longflow", share_prefill=True, batch=16)
    store = runner.evaluate(lettered, run, tmp_path)
    assert sorted(batches) == [2, 8, 12], "two prompts: full; two that overwrite; three that add, each at two budgets"
    assert len(list(store.records())) == 2 * len(run.cells())
    apart = runner.evaluate(lettered, dataclasses.replace(run, batch=2), tmp_path / "apart")
    assert answers(store) == answers(apart), "one prompt at a time"


def test_many_policies_come_in_parts(lettered, data, monkeypatch):
    """All prompts for two of them, then for the others, so that no more programs are held than needed."""
    monkeypatch.setattr(jobs, "TOGETHER", 2)
    run = run_of(data, "snapkv", "h2o", "dapq", share_prefill=True)
    steps = runner.planned(lettered, run).steps
    assert [len(step.keys) for step in steps] == [3, 3, 4, 4], "full and snapkv; dapq, which decodes as snapkv, and h2o"
    keys = [key for step in steps for key in step.keys]
    assert len(keys) == len(set(keys)) == 2 * len(run.cells())
    assert runner.cost(lettered, run).startswith("2 prompts run 2 times, for as many parts of the policies, 220 tokens")
    monkeypatch.setattr(jobs, "TOGETHER", 3)
    parts = [len(list(jobs.parts(run_of(data, *names).cells()))) for names in (("snapkv", "h2o"), ("snapkv", "laq"))]
    assert parts == [1, 2], "three policies with full; laq's first pass counts as one more"


@pytest.mark.long
@pytest.mark.parametrize("names", [("snapkv", "h2o"), ("adakv", "d2o"), ("cake", "kivi"), ("laq", "longflow")])
def test_fidelity_is_that_of_each_alone(lettered, data, tmp_path, names):
    table = {"texts": 2, "prompt": 48, "continuation": 6}
    run = dataclasses.replace(run_of(data, *names), tasks=(), fidelity=settings.Fidelity(**table))
    both = [
        {(r["policy"], r["budget"]): r for r in runner.evaluate(lettered, each, tmp_path / str(number)).records()}
        for number, each in enumerate((run, dataclasses.replace(run, share_prefill=True)))
    ]
    assert both[0].keys() == both[1].keys() and len(both[0]) == len(run.cells())
    for cell, alone in both[0].items():
        for name in ("kl", "top1", "perplexity", "full_perplexity", "mass", "overlap"):
            np.testing.assert_allclose(both[1][cell][name], alone[name], atol=1e-4, rtol=1e-4, err_msg=f"{cell} {name}")


def test_what_is_said_of_a_policy_is_no_part_of_its_records_names(data):
    """Its title or what differs may be said better; another number makes it another policy."""
    cell = run_of(data, "lagkv").cells()[1]
    assert cell.policy is not None
    said = dataclasses.replace(cell, policy=dataclasses.replace(cell.policy, title="new", paper="new", fidelity="ours"))
    other = dataclasses.replace(cell, policy=dataclasses.replace(cell.policy, block=512))
    names = [jobs.key_of(each, "aware", "example-0") for each in (cell, said, other)]
    assert names[0] == names[1] != names[2]


@pytest.mark.long
def test_a_stopped_run_computes_only_what_is_missing(lettered, data, tmp_path, monkeypatch):
    run = run_of(data, "snapkv", "tova", share_prefill=True)
    whole = answers(runner.evaluate(lettered, run, tmp_path))
    store = Store(tmp_path)
    lines = store.path.read_text().splitlines(keepends=True)
    store.path.write_text("".join(lines[:7]) + lines[7][:30])  # in the second prompt
    heard, hear = [], one_prefill.hear
    monkeypatch.setattr(one_prefill, "hear", lambda params, ids: heard.append(len(ids)) or hear(params, ids))
    again = runner.evaluate(lettered, run, tmp_path)
    assert answers(again) == whole and heard == [60]
    assert len(store.path.read_text().splitlines()) == len(lines)


@pytest.mark.long
def test_policies_that_were_not_measured_on_the_model_are_said_so(tiny, data, tmp_path):
    params = tiny("llama3")
    params = type(params)(params.weights, params.config, Letters())
    run = run_of(data, "duo", "tova", share_prefill=True)
    assert "duo" in (said := runner.cost(params, run)) and "not measured on this model" in said
    records = list(runner.evaluate(params, run, tmp_path).records())
    assert {record["policy"].split(" ")[0] for record in records if record["score"] is None} == {"duo"}
    (cell,) = {jobs.measurable(params, cell).policy for cell in run.cells() if cell.label.startswith("duo")}
    assert cell is None


@pytest.mark.parametrize("scorer", ["code", "f1-line"])
def test_answers_end_where_nothing_more_counts(scorer):
    from jaxkv.evaluation.scorers import settled

    assert not settled(scorer, "") and not settled(scorer, "\n\nx = 1") and settled(scorer, "\nx = 1\n")
    assert not settled("all", "x\ny\n")


@pytest.mark.long
def test_pools_and_looks_are_served(lettered):
    """A pool, a line, a replayed prompt and pseudo tokens all cut one recording."""
    ids = np.arange(3, 43, dtype=np.int32)
    prompt = one_prefill.hear(lettered, ids)
    for name in ("adakv", "layer-defensivekv", "kvzip", "dapq"):
        policy = jaxkv.policy(name, budget=24, **SMALL.get(name, {}))
        (kept,) = one_prefill.keep(prompt, [policy], 8)
        alone = jaxkv.prefill(lettered, ids, policy=policy, room=8)
        cache = jaxkv.store.KVCache(kept.layers, alone.lengths, alone.limits, alone.pending)
        for one, other in zip(cache.views, alone.views, strict=True):
            one, other = (np.sort(np.asarray(each.by_head().positions), axis=-1) for each in (one, other))
            width = min(one.shape[-1], other.shape[-1])
            assert np.array_equal(one[..., -width:], other[..., -width:])
