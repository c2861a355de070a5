"""Policies from files, and parts of one's own: registered, run, saved, on the command line, in an evaluation."""

import dataclasses
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from letters import Letters

import jaxkv
from jaxkv import cli
from jaxkv.cli.options import Cut
from jaxkv.errors import BadCheckpoint, BadValue, UnknownName
from jaxkv.evaluation import settings
from jaxkv.evaluation.results import Store
from jaxkv.policies import MASS, Across, Attention, Evicted, Observer, Score, Uniform, load_parts, register
from jaxkv.policies.combine import Scaled
from jaxkv.policies.needs import learned_names
from jaxkv.policies.parts import PARTS
from jaxkv.policies.policy import from_dict, to_dict

OBSERVER = '''
import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jaxkv.policies import Observer, register


@register
@dataclasses.dataclass(frozen=True)
class Strided(Observer):
    """Of the last `window` tokens those at positions that `stride` divides look."""

    window: int = 8
    stride: int = 2
    kind: ClassVar[str] = "strided"

    def looking(self, positions, extra):
        last = positions[:, -self.window :]
        return jnp.where(last % self.stride == 0, last, -1)
'''
STRIDED = """
[prefill]
observe = { kind = "strided" }
score = { kind = "faded" }
select = { recent = "window" }

[decode]
observe = { kind = "current-query" }
score = { kind = "scaled", of = { kind = "faded", half_life = 16.0 } }
"""
FROZEN = dataclasses.dataclass(frozen=True)
PROMPT, NEW = 40, 4


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A folder with the files of docs/add-a-method.md and an observer, all registered while the tests here run."""
    folder = tmp_path_factory.mktemp("mine")
    text = (Path(__file__).parent.parent / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    for name, language in (("mine.py", "python"), ("mine.toml", "toml")):
        found = re.search(rf"```{language}\n(.*?)```", text, re.S)
        assert found is not None
        (folder / name).write_text(found[1])
    (folder / "look.py").write_text(OBSERVER)
    (folder / "strided.toml").write_text(STRIDED)
    before, modules = {id(kinds): (kinds.parts, dict(kinds.parts)) for kinds in PARTS.values()}, set(sys.modules)
    for name in ("mine.py", "look.py"):
        load_parts(folder / name)
    yield folder
    for parts, shipped in before.values():
        parts.clear()
        parts.update(shipped)
    for name in set(sys.modules) - modules:
        if name.startswith("jaxkv_parts_"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def lettered(tiny):
    params = tiny("llama3")
    return type(params)(params.weights, params.config, Letters())


def said(params, policy, **more):
    prompt = np.random.default_rng(0).integers(3, 90, PROMPT).astype(np.int32)
    return jaxkv.generate(params, prompt, policy=policy, max_new_tokens=NEW, stop_tokens=(), scan_layers=True, **more)


def positions(out):
    return [np.asarray(layer.positions).tolist() for layer in out.cache.layers]


@pytest.mark.long
def test_parts_of_ones_own_do_what_they_say(mine, lettered):
    """Without fading and without a stride they are the shipped ones; with them they keep other entries."""
    chosen = jaxkv.policy(mine / "strided.toml", budget=16)
    assert chosen.name == "strided" and chosen.needs == {MASS} and chosen.stats == ("value_l1",)
    assert from_dict(to_dict(chosen)) == chosen and hash(from_dict(to_dict(chosen))) == hash(chosen)
    plain = jaxkv.policy(mine / "strided.toml", budget=16, half_life=float("inf"), stride=1)
    table = {"observe": {"kind": "last-queries", "window": 8}, "score": {"kind": "attention"}}
    decode = {"observe": {"kind": "current-query"}, "score": {"kind": "scaled", "of": {"kind": "attention"}}}
    shipped = {"prefill": {**table, "select": {"recent": "window"}}, "decode": decode}
    same = from_dict({"name": "same", "budget": 16, **shipped})
    outs = [said(lettered, policy) for policy in (chosen, plain, same)]
    assert positions(outs[1]) == positions(outs[2]) and positions(outs[0]) != positions(outs[1])
    assert outs[1].tokens.tolist() == outs[2].tokens.tolist()


def test_a_saved_cache_needs_its_parts(mine, lettered, tmp_path, monkeypatch):
    out = said(lettered, jaxkv.policy(mine / "strided.toml", budget=16))
    jaxkv.save(out.cache, tmp_path / "cache")
    again = jaxkv.restore(tmp_path / "cache", lettered)
    assert again.policy == out.cache.policy
    on = [jaxkv.generate(lettered, cache=c, max_new_tokens=NEW, stop_tokens=()).tokens for c in (again, out.cache)]
    assert on[0].tolist() == on[1].tolist()
    monkeypatch.delitem(PARTS["observe"].parts, "strided")
    with pytest.raises(BadCheckpoint, match=r"'strided'.*register it first"):
        jaxkv.restore(tmp_path / "cache", lettered)


def test_the_command_line(mine, lettered, monkeypatch, capsys):
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: lettered)
    files = [str(mine / name) for name in ("mine.py", "look.py")]
    args = ["generate", "x" * PROMPT, "--policy", str(mine / "strided.toml"), "--max-new-tokens", str(NEW), "--json"]
    assert cli.main([*args, "--budget", "16", "--parts", *files]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["kept"] == [16.0]
    assert cli.main(["policies", str(mine / "mine.toml"), "--parts", files[0]]) == 0
    assert "faded half_life=128.0" in (told := capsys.readouterr().out) and told.startswith("mine\n")
    assert cli.main(["policies", str(mine / "strided.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strided"]["prefill"]["observe"] == {"kind": "strided"}
    assert cli.main([*args, "--parts", str(mine / "other.py")]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.long
def test_an_evaluation(mine, lettered, monkeypatch, capsys, tmp_path):
    """A run's files lie beside it; what stands in them is part of its settings."""
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: lettered)
    run = mine / "run.toml"
    run.write_text(
        'policies = ["strided.toml"]\nbudgets = [16]\nparts = ["mine.py", "look.py"]\n'
        "[fidelity]\ntexts = 1\nprompt = 32\ncontinuation = 2\n"
    )
    args = ["eval", str(run), "--out", str(tmp_path), "--no-report"]
    assert cli.main(args) == 0 and cli.main(args) == 0
    assert [record["policy"] for record in Store(tmp_path).records()] == ["strided"], "the second call had it already"
    about = Store(tmp_path).about()["settings"]
    assert about["policies"][0]["table"]["prefill"]["observe"] == {"kind": "strided"}
    assert [*about["parts"]] == ["mine.py", "look.py"] and "parts" not in settings.to_dict(
        settings.from_dict({"policies": ["full"]})
    )
    capsys.readouterr()
    (mine / "strided.toml").write_text(STRIDED.replace("16.0", "8.0"))
    try:
        assert cli.main(args) == 2 and "other settings" in capsys.readouterr().err
    finally:
        (mine / "strided.toml").write_text(STRIDED)
    entry = {"name": "mine.toml", "window": 8, "label": "short"}
    table = {"retention": {"policies": ["strided.toml"]}, "policies": [entry], "budgets": [16]}
    both = settings.from_dict(table, mine)
    assert both.retention.policies[0]["name"] == "strided" and table["retention"]["policies"] == ["strided.toml"]
    (cell,) = both.cells()
    assert (cell.label, cell.policy.name, cell.policy.prefill.observe.window) == ("short", "mine", 8)


def test_a_budget_may_stand_in_the_file(mine, tmp_path):
    path = tmp_path / "sized.toml"
    path.write_text('name = "small"\nbudget = 24\n' + (mine / "mine.toml").read_text())
    assert (jaxkv.policy(path).budget, jaxkv.policy(str(path)).name) == (24, "small")
    assert jaxkv.policy(path, ratio=0.5).budget is None
    assert Cut(policy=str(path)).build().budget == 24
    assert Cut(policy="tova").build().budget == 1024
    assert settings.from_dict({"policies": [str(path)]}).cells()[0].budget == 24


@pytest.mark.parametrize(
    "text, error, words",
    [
        (None, BadValue, "no such file"),
        ("prefill = ", BadValue, "not TOML"),
        ("x = " + "[" * 5000, BadValue, "not TOML"),
        ("[prefil]", UnknownName, "did you mean 'prefill'"),
        ("prefill = 3", BadValue, "prefill=3: expected a table"),
        ("[prefill]\nscore = 3", BadValue, "score=3: expected a table with its kind"),
        ('[prefill]\nscore = { kind = "fadet" }', UnknownName, "'fadet'.*register it first"),
        ('[prefill]\nscore = { kind = "scaled" }', BadValue, "'scaled' without of"),
        (
            '[prefill]\nscore = { kind = "random", seed = { kind = "x" } }',
            BadValue,
            "seed of score 'random' is a table",
        ),
        ('[prefill]\nselect = { sinks = "four" }', BadValue, "expected values of its fields' types"),
        ("budget = 0\n[prefill]", BadValue, "expected at least 1"),
    ],
)
def test_files_that_are_refused(tmp_path, text, error, words):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=words) as told:
        jaxkv.policy(path, budget=64)
    assert "mine.toml" in str(told.value)


def part(base=Score, decorate=FROZEN, **body):
    return decorate(type("Mine", (base,), {"kind": "mine", "factors": lambda *_: (0.0, 0.0), **body}))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: part(object), "extends one of"),
        (lambda: part(decorate=lambda cls: cls), "frozen dataclass"),
        (lambda: part(decorate=dataclasses.dataclass), "frozen dataclass"),
        (lambda: part(kind=""), "kind=''"),
        (lambda: part(kind="attention"), "has already"),
        (lambda: FROZEN(type("Mine", (Attention,), {})), "has already"),
        (lambda: part(__annotations__={"kind": str}), "annotate with ClassVar"),
        (lambda: part(factors=Score.factors), "a method factors or score"),
        (lambda: part(factors=Score.factors, score=lambda *_: 0), "is linear"),
        (lambda: part(stats=("mine",)), "expected enter"),
        (lambda: part(stats="mine", enter=lambda *_: {}), "expected a tuple of names"),
        (lambda: part(factors=lambda self, stats: (0.0, 0.0)), r"factors\(self, stats\).*positions, now$"),
        (lambda: part(observe=lambda self, stats, mass, now, more: {}), "missing a required argument: 'more'"),
        (lambda: part(needs={"mass"}), "frozenset"),
        (lambda: part(needs=frozenset({"hidden"})), "unknown need of part Mine 'hidden'"),
        (lambda: part(__annotations__={"first": float}, first=0.5), "another name"),
        (lambda: part(Observer, extra=3), "a method behind"),
        (lambda: part(Uniform), "a method budgets"),
        (lambda: part(Evicted, absorb=lambda *_: 0, state="mine"), "keeps the state 'mine': expected begin"),
        (lambda: part(Across, profile=lambda *_: 0), "a method quotas"),
    ],
)
def test_parts_that_are_refused(make, words):
    before = {name: dict(kinds.parts) for name, kinds in PARTS.items()}
    with pytest.raises((BadValue, UnknownName), match=words):
        register(make())
    assert before == {name: kinds.parts for name, kinds in PARTS.items()}


@pytest.mark.parametrize(
    "said, words",
    [
        ({}, "'mine' does not say whether it can be negative.*True, or False"),
        ({"signed": True}, "'mine' can be negative"),
        ({"signed": False}, None),
    ],
)
def test_a_score_says_whether_it_can_be_negative(mine, said, words):
    score = part(linear=False, score=lambda self, stats, inputs: -jnp.linalg.norm(inputs.k, axis=-1), **said)()
    with nullcontext() if words is None else pytest.raises(BadValue, match=words):
        jaxkv.policy("snapkv", budget=64, score=Scaled(score))
    jaxkv.policy("snapkv", budget=64, score=score)  # alone nobody asks


def least(self):
    if self.least < 0:
        raise ValueError("least is below 0")


def test_what_a_part_refuses_names_it(mine, monkeypatch, tmp_path, capsys):
    own = part(__annotations__={"least": int}, least=0, __post_init__=least)
    monkeypatch.setitem(PARTS["score"].parts, "mine", own)
    file = tmp_path / "own.toml"
    file.write_text('[prefill]\nscore = { kind = "mine" }')
    run = ["generate", "x", "--budget", "64", "--policy", str(file), "--option", "least=-1"]
    assert cli.main(run) == 2 and "mine: least is below 0" in capsys.readouterr().err
    file.write_text('[prefill]\nscore = { kind = "mine", least = -1 }')
    assert cli.main(run[:-2]) == 2 and "own.toml: mine: least is below 0" in capsys.readouterr().err


def asserts(self):
    assert self.least >= 0, "least must be 0 or more"


def bare(self):
    if self.least < 0:
        raise AssertionError


def stumbles(self):
    return {0: "none"}[self.least]


@pytest.mark.parametrize(
    "check, words",
    [
        (asserts, "^mine: least must be 0 or more$"),
        (bare, r"^mine: AssertionError \(line \d+ of test_open.py\); expected values that it takes"),
        (stumbles, r"^mine: KeyError: -1 \(line \d+ of test_open.py\); expected values that it takes"),
    ],
)
def test_a_part_may_refuse_by_any_error(check, words):
    own = part(__annotations__={"least": int}, least=0, __post_init__=check)
    assert own().least == 0
    with pytest.raises(BadValue, match=words):
        own(-1)


@pytest.mark.parametrize("value", [[1.0, 2.0], np.ones(2), jnp.ones(2), {"a": 1}])
def test_a_field_that_cannot_be_hashed_is_refused(value):
    own = part(__annotations__={"weights": object}, weights=None)
    with pytest.raises(BadValue, match=r"weights=.* of mine: expected what can be hashed"):
        own(value)


def test_a_state_says_what_it_is(lettered):
    rule = part(Evicted, absorb=lambda self, beside, kept, lost, facts: (kept, beside), state="mine")()
    policy = jaxkv.policy("h2o", budget=16, evicted=rule)
    with pytest.raises(BadValue, match="'mine' gives NoneType without attends and kv_bytes"):
        said(lettered, policy)


def test_a_calibration_that_nobody_measures(lettered):
    for name, words in (("retrievel", "did you mean 'retrieval'.*own"), ("key_predictor", "--predictors once")):
        own = part(needs=frozenset({f"calibrated:{name}"}))()
        with pytest.raises(BadValue, match=words):
            said(lettered, jaxkv.policy("h2o", budget=16, score=own))


def test_a_class_may_come_again(mine):
    again = PARTS["score"].parts["faded"]
    assert register(again) is again and PARTS["of"].parts["faded"] is again
    for name in ("allocate", "layers"):
        assert register(one := part(Uniform, kind="mine", budgets=lambda *_: ())) is one
        assert PARTS[name].parts["mine"] is one, "the newest definition of a class counts"
    with pytest.raises(BadValue, match="has already"):
        register(FROZEN(type("Other", (Score,), {"kind": "faded", "factors": lambda *_: (0.0, 0.0)})))


def test_files_run_once_and_say_where_they_fail(mine, tmp_path, monkeypatch):
    assert load_parts(mine / "mine.py") is load_parts(str(mine / "mine.py"))
    assert load_parts("jaxkv.policies") is sys.modules["jaxkv.policies"]
    for name, text, words in (
        ("a.py", "x = 1\ny = x / 0\n", "line 2: ZeroDivisionError"),
        ("b.py", "import no_such_module\n", "ModuleNotFoundError"),
        ("c.py", "def\n", "SyntaxError"),
        ("d.py", (mine / "mine.py").read_text().replace("Faded", "Paled"), "'faded'.*has already"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(BadValue, match=words):
            load_parts(tmp_path / name)
        assert not any(getattr(module, "__file__", None) == str(tmp_path / name) for module in sys.modules.values())
    with pytest.raises(BadValue, match="a module that is installed"):
        load_parts("no_such_module.parts")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "named_parts.py").write_text("")
    assert load_parts("named_parts") is load_parts(tmp_path / "named_parts.py"), "one module, whoever imported it"


def test_needs_are_united():
    table = {"name": "x", "prefill": {"observe": {"kind": "all-queries"}, "aggregate": {"best": 2, "weigh": "output"}}}
    scores = {"kind": "weighted", "first": {"kind": "attention"}, "second": {"kind": "query-direction"}}
    share = {"kind": "adaptive", "layers": {"kind": "error"}, "of": {"kind": "attention"}}
    policy = from_dict({**table, "prefill": {**table["prefill"], "score": scores}, "allocate": share})
    assert policy.learns == ("eviction_error", "query_direction", "retrieval") == learned_names(policy.needs)
    assert policy.needs - {f"calibrated:{name}" for name in policy.learns} == {MASS, "output", "hidden"}


class Here(Score):
    """Not a part: it has no kind."""

    stats: ClassVar[tuple[str, ...]] = ()


def test_a_kind_is_needed():
    with pytest.raises(BadValue, match=r"kind=None"):
        register(FROZEN(type("Mine", (Here,), {"factors": lambda *_: (0.0, 0.0)})))
