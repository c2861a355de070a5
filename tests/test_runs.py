"""Evaluations: settings that are none, data that changed, folders that broke, a run that was stopped."""

# pyright: reportArgumentType=false
import dataclasses
import io
import json
import re
import sys

import numpy as np
import pytest
from letters import Letters

import jaxkv
from benchmarks import tokens_or_bits
from jaxkv import cli
from jaxkv.configs import config_files
from jaxkv.errors import BadValue, UnknownName
from jaxkv.evaluation import datasets, jobs, plots, runner, settings, summary
from jaxkv.evaluation.fidelity import Fidelity
from jaxkv.evaluation.report import _gathered
from jaxkv.evaluation.results import Store
from jaxkv.policies import Policy
from jaxkv.policies.policy import to_dict

SIZES = {"policies": ["tova"], "budgets": [64]}


@pytest.fixture(scope="module")
def lettered(tiny):
    params = tiny("llama3")
    return type(params)(params.weights, params.config, Letters())


@pytest.fixture
def quick(monkeypatch):
    """Answers and fidelity that cost nothing: what is tested here is which of them are asked for."""
    asked = []

    def answers(params, settings, job):
        asked.extend(example.context for example, _ in job.rows)
        return [{**runner.about(job, row), "score": 1.0, "answer": "x"} for row in job.rows]

    def distance(params, policy, known):
        asked.append("fidelity")
        return Fidelity(*[np.zeros(1)] * 6)

    monkeypatch.setattr(runner, "_answers", answers)
    monkeypatch.setattr(runner, "reference", lambda *_: None)
    monkeypatch.setattr(runner, "fidelity", distance)
    return asked


def line(context: str, question: str = "Which?") -> str:
    return json.dumps({"context": context, "question": question, "answers": ["x"]}) + "\n"


def test_edited_data_is_measured_again(lettered, quick, tmp_path):
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text(line("one") + line("two"))
    run = settings.from_dict({"policies": ["full"], "batch": 1, "tasks": [{"file": str(data)}]})
    assert len(list(runner.evaluate(lettered, run, out).records())) == 2 and quick == ["one", "two"]
    data.write_text(line("one") + line("three"))
    said = []
    store = runner.evaluate(lettered, run, out, progress=lambda *step: said.append(step))
    assert quick == ["one", "two", "three"], "what stayed is not run again"
    assert len(list(store.records())) == 2 and said[0][0].startswith("1 records of data that has changed since")
    (stale,) = (out / "stale.jsonl").read_text().splitlines()
    assert json.loads(stale)["key"] not in {record["key"] for record in store.records()}


def test_an_edited_fidelity_file_is_measured_again(lettered, quick, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("some words to go on with")
    table = {"texts": 1, "prompt": 8, "continuation": 2, "file": str(text)}
    run = settings.from_dict({"policies": ["full"], "fidelity": table})
    marked = "\ufeffothers"  # with a byte order mark, which is no part of the text
    for words, times in ((text.read_text(), 1), (text.read_text(), 1), ("others", 2), (marked, 2)):
        text.write_text(words, encoding="utf-8")
        store = runner.evaluate(lettered, run, out)
        assert quick == ["fidelity"] * times and len(list(store.records())) == 1
    for content in (b"", b"\xff\xfe\xfa"):
        text.write_bytes(content)
        with pytest.raises(BadValue, match=r"text\.txt"):
            runner.evaluate(lettered, run, tmp_path / "other")


@pytest.mark.parametrize(
    "content, words",
    [
        ('{"context": 5, "question": "q", "answers": ["x"]}', "line 1: context is 5; expected text"),
        ('{"context": "c", "question": ["q"], "answers": ["x"]}', "question is"),
        ('{"context": "c", "question": "q", "answers": [{}]}', "answers are"),
        ('{"context": "c", "answers": ["x"], "max_new_tokens": "many"}', "max_new_tokens is 'many'"),
        ('{"context": "c\\ud800", "answers": ["x"]}', "context is"),
        ("[1]", "a list; expected an object"),
        ("[" * 100_000, "line 1: not JSON"),
        ("", "holds no examples"),
        (b"\xff\xfe", "line 1: not UTF-8"),
    ],
)
def test_broken_data(tmp_path, content, words):
    file = tmp_path / "data.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadValue, match=words):
        datasets.read(file)


def test_a_file_of_questions_lies_beside_the_run(tmp_path):
    """As an editor on Windows writes it, with a mark at its front."""
    tmp_path.joinpath("mine.jsonl").write_bytes(b'\xef\xbb\xbf{"context": "c", "question": "q", "answers": ["x"]}\n')
    tmp_path.joinpath("mine.toml").write_text(
        'model = "smollm2-135m"\npolicies = ["full"]\n[[tasks]]\nfile = "mine.jsonl"\n[fidelity]\nfile = "mine.jsonl"\n'
    )
    run = settings.load(tmp_path / "mine.toml")
    assert run.fidelity is not None and run.tasks[0].file == run.fidelity.file == str(tmp_path / "mine.jsonl")
    assert len(datasets.read(run.tasks[0].file)) == 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "table, words",
    [
        ({"tasks": {"name": "passkey"}}, r"write \[\[tasks\]\] above each, not \[tasks\]"),
        ({"tasks": ["passkey"]}, "expected a list of tables"),
        ({"fidelity": [{"texts": 1}]}, r"write \[fidelity\]"),
        ({"fidelity": {"texts": 1.5}}, "texts=1.5"),
        ({"policies": "snapkv"}, "policies='snapkv'"),
        ({"policies": [5]}, "policies has 5"),
        ({"policies": [{"window": 5}]}, "a table with a name"),
        ({"policies": [{"name": "tova", "budget": 5}], "budgets": [64]}, "sizes stand in"),
        ({"policies": [{"name": "tova", "bytes": 5}], "budgets": [64]}, "policies has bytes=5: expected a list"),
        ({"policies": [{"name": "tova", "bytes": [5]}, "h2o"], "budgets": [64]}, "'h2o' at 64 beside others in bytes"),
        ({"policies": [{"name": "tova", "budgets": 5}]}, "expected a list of sizes"),
        ({**SIZES, "budgets": ["64"]}, "budgets="),
        ({**SIZES, "budgets": [0]}, "at least 1"),
        ({**SIZES, "batch": 0}, "batch=0"),
        ({**SIZES, "seed": "x"}, "seed='x'"),
        ({**SIZES, "modes": 5}, "modes=5"),
        ({**SIZES, "tasks": [{"name": "passkey", "lengths": [0]}]}, "lengths="),
        ({**SIZES, "tasks": [{"name": "passkey", "depths": [2]}]}, "depths="),
        ({**SIZES, "retention": {"steps": 0}}, "steps=0"),
        ({**SIZES, "parts": 5}, "parts=5"),
    ],
)
def test_settings_that_are_none(table, words):
    with pytest.raises(BadValue, match=words):
        settings.from_dict(table)


def test_scorers_and_haystacks_are_known_before_a_run():
    for task in ({"file": "x", "scorer": "alll"}, {"name": "passkey", "haystacks": ["nois"]}):
        with pytest.raises(UnknownName, match="did you mean"):
            settings.from_dict({**SIZES, "tasks": [task]})


def test_toml_that_is_none(tmp_path):
    for content in (b"\xff", b"a = ", b"a = " + b"[" * 100_000):
        (tmp_path / "run.toml").write_bytes(content)
        with pytest.raises(BadValue, match=r"run\.toml"):
            settings.load(tmp_path / "run.toml")


def test_every_form_of_a_policy(tmp_path):
    """A name, a file, a `Policy`, its tables, and a name with options are all columns of a run."""
    table = to_dict(jaxkv.policy("tova", budget=32))
    (tmp_path / "mine.toml").write_text(
        '[prefill]\nobserve = { kind = "last-queries", window = 1 }\nscore = { kind = "attention" }\n'
    )
    policies = ["snapkv", tmp_path / "mine.toml", Policy("p", prefill=jaxkv.policy("tova", budget=32).prefill)]
    policies += [{**table, "name": "whole"}, {"name": "tova", "sinks": 2}]
    run = settings.from_dict({"policies": policies, "budgets": [80]})
    assert [cell.label for cell in run.cells()] == ["snapkv", "mine", "p", "whole", "tova sinks=2"]
    assert all(cell.policy is not None and cell.policy.budget == 80 for cell in run.cells())
    assert settings.from_dict(json.loads(json.dumps(settings.to_dict(run)))) == run


def test_a_policy_with_sizes_of_its_own():
    policies = ["h2o", {"name": "tova", "ratios": [0.5]}, {"name": "snapkv", "budgets": [90, 100], "window": 8}]
    run = settings.from_dict({"policies": policies, "budgets": [80]})
    sizes = [(cell.label, cell.budget, cell.ratio) for cell in run.cells()]
    assert sizes == [
        ("h2o", 80, None), ("tova", None, 0.5), ("snapkv window=8", 90, None), ("snapkv window=8", 100, None)
    ]  # fmt: skip
    assert settings.from_dict(json.loads(json.dumps(settings.to_dict(run)))) == run


def test_broken_folders(tmp_path):
    store = Store(tmp_path)
    for content in (b"{", b"[]", b"\xff", b"{}"):
        (tmp_path / "run.json").write_bytes(content)
        with pytest.raises(BadValue, match=r"run\.json"):
            store.open({}, "model")
    for content in (b'{"kind": "answer"}\n{}\n', b"[]\n{}\n", b"\xff\n{}\n"):
        store.path.write_bytes(content)
        with pytest.raises(BadValue, match="line 1"):
            list(store.records())


def test_the_command_line_answers_in_one_line(lettered, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: lettered)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "run")
    store.open({"name": "n", "model": "m"}, "model")
    store.add([{"key": "a", "kind": "answer"}])
    for args, words in (
        (["generate", "-", "--policy", "full"], "standard input is not utf-8"),
        (["generate", "a", "--policy", "full", "--temperature", "nan"], "temperature=nan"),
        (["generate", "a\udc00", "--policy", "full"], "surrogate"),
        (["report", str(store.folder), "--out", str(tmp_path / "file" / "out")], "cannot be written"),
        (["eval", "default", "--budgets", "0"], "expected at least 1"),
    ):
        assert cli.main(args) == 2
        said = capsys.readouterr().err
        assert words in said and said.startswith("jaxkv: ") and len(said.splitlines()) == 1


def test_two_runs_in_one_folder_count_once(tmp_path):
    store = Store(tmp_path)
    for _ in range(2):
        store.add([{"key": "a", "kind": "answer"}])
    assert [record["key"] for record in store.records()] == ["a"]


def test_other_numbers_are_another_run(tmp_path):
    """The same model held in other numbers does not go on in a run; a folder that says nothing of them does."""
    Store(tmp_path / "a").open({}, "m", "float32")
    with pytest.raises(BadValue, match=r"other weights .*'float32' there, 'bfloat16, int8' now"):
        Store(tmp_path / "a").open({}, "m", "bfloat16, int8")
    about = json.loads((tmp_path / "a" / "run.json").read_text())
    del about["weights"]
    (tmp_path / "a" / "run.json").write_text(json.dumps(about))
    assert Store(tmp_path / "a").open({}, "m", "float32") == set()


def test_a_new_calibration_is_measured_anew(lettered):
    """A record's name has what its policy knows of the model."""
    (cell,) = settings.from_dict({"policies": ["leank"], "budgets": [64]}).cells()
    shape = lettered.config.num_layers, lettered.config.num_kv_heads, lettered.config.head_dim

    def key(value):
        known = dataclasses.replace(lettered, learned={"key_channels": np.full(shape, value, np.float32)})
        return jobs.key_of(jobs.measurable(known, cell), "aware", "x")

    assert key(1) == key(1) != key(2)
    assert key(1) != jobs.key_of(jobs.measurable(lettered, cell), "aware", "x"), "not measured without"


def test_folders_are_drawn_together(tmp_path):
    """What stands in several counts once; two models keep apart, with their names; who was not measured is named."""
    one = {"kind": "answer", "source": "jaxkv", "policy": "tova", "budget": 64, "ratio": None, "mode": "aware"}
    one |= {"task": "t", "score": 1.0, "kept": 64.0, "cache_bytes": 1, "key": "a"}
    stores = [Store(tmp_path / name) for name in "abc"]
    for store, model in zip(stores, ("small", "small", "large"), strict=True):
        store.open({"model": model, "name": "n"}, f"{model}-1")
        store.add([one, {**one, "key": "b", "policy": "duo", "score": None, "skipped": "not measured"}])
    rows = lambda some: summary.quality(_gathered(some, [each.about() for each in some]))  # noqa: E731
    assert [(row["policy"], row["score"].count) for row in rows(stores[:2])] == [("tova", 1)]
    assert [row["policy"] for row in rows(stores)] == ["tova on small", "tova on large"]
    assert summary.not_run(stores[0].records()) == ["duo: not measured"]


def test_folders_that_differ_are_told_apart(tmp_path):
    """In the numbers of the model, in what came behind the text, and in the policies that stand under one name."""
    one = {
        "kind": "answer",
        "source": "jaxkv",
        "policy": "mine",
        "budget": 64,
        "ratio": None,
        "mode": "aware",
        "task": "t",
    }
    one |= {"score": 1.0, "kept": 64.0, "cache_bytes": 1, "key": "a"}

    def named(name, numbers, key="a", **settings):
        store = Store(tmp_path / name)
        store.open({"model": "m", "name": "n", **settings}, "m-1", numbers)
        store.add([{**one, "key": key}])
        return store

    def rows(*stores):
        found = summary.quality(_gathered(stores, [each.about() for each in stores]))
        return [(row["policy"], row["score"].count) for row in found]

    plain, again = named("a", "float32"), named("b", "float32")
    assert rows(plain, again) == [("mine", 1)]
    assert rows(plain, named("c", "int8", weights="int8")) == [("mine in floats", 1), ("mine in int8", 1)]
    assert rows(plain, named("d", "float32", after="full")) == [("mine, then policy", 1), ("mine, then full", 1)]
    tables = [{"policies": [{"name": "mine", "table": {"name": "mine", "rope": rope}}]} for rope in ("text", "cache")]
    edited = [named(f"e{at}", "float32", f"k{at}", **table) for at, table in enumerate(tables)]
    assert rows(*edited) == [("mine (e0)", 1), ("mine (e1)", 1)]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"tasks": [{"file": "d.jsonl"}, {"file": "d.jsonl", "scorer": "f1"}]}, "'d.jsonl' with scorer 'any' and 'f1'"),
        ({"retention": {"budget": 9}}, r"\[retention\] names no policies"),
        ({"budgets": [64], "fidelity": {"budgets": [99]}}, r"\[fidelity\] budgets=\[99\]: expected some of .*\[64\]"),
    ],
)
def test_what_would_measure_nothing_or_two_things_at_once(table, words):
    with pytest.raises(BadValue, match=words):
        settings.from_dict({"policies": ["tova"], "budgets": [64], **table})


def test_a_phase_of_a_catalogued_policy_is_an_option(tmp_path):
    """It keeps the rest of the method, as `jaxkv.policy(prefill=)` does."""
    phase = {"observe": {"kind": "last-queries", "window": 8}, "score": {"kind": "attention"}}
    entry = {"name": "tiered-h2o", "label": "mine", "prefill": phase}
    (cell,) = settings.from_dict({"budgets": [64], "policies": [entry]}).cells()
    assert cell.label == "mine" and cell.policy == jaxkv.policy("tiered-h2o", budget=64, prefill=phase)
    assert cell.policy.bounded


def test_a_run_goes_on_from_another_folder(tmp_path, monkeypatch):
    """The same file of data by another path is the same."""
    (tmp_path / "data.jsonl").write_text(line("one"))
    found = []
    for folder, path in ((tmp_path, "data.jsonl"), (tmp_path.parent, f"{tmp_path.name}/data.jsonl")):
        monkeypatch.chdir(folder)
        found.append(settings.to_dict(settings.from_dict({"policies": ["full"], "tasks": [{"file": path}]})))
    assert found[0] == found[1] and found[0]["tasks"][0]["file"] == str(tmp_path / "data.jsonl")


def test_a_report_that_is_stopped_keeps_the_run(lettered, quick, tmp_path, monkeypatch, capsys):
    (tmp_path / "data.jsonl").write_text(line("one"))
    (tmp_path / "run.toml").write_text('policies = ["full"]\n[[tasks]]\nfile = "data.jsonl"\n')
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: lettered)

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxkv.evaluation.report.report", stopped)
    monkeypatch.setattr(summary, "quality", lambda _: [])
    assert cli.main(["eval", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out"), "--json"]) == 130
    assert "stopped; 1 records are kept in" in capsys.readouterr().err


def test_a_table_without_evicting_policies_has_its_score():
    one = {"kind": "answer", "source": "jaxkv", "policy": "full", "mode": "aware", "task": "t", "score": 1.0}
    table = summary.text_table(summary.quality([one | {"kept": 9.0, "cache_bytes": 1}]))
    assert table.splitlines()[0].endswith("| all |") and table.splitlines()[2].endswith("| 100 (21-100) |")


def test_one_batch_has_no_speed_to_draw():
    record = {"kind": "answer", "source": "jaxkv", "policy": "tova", "budget": 64, "ratio": None, "mode": "aware"}
    record |= {"task": "lookup", "score": 1.0, "kept": 64.0, "cache_bytes": 2**20, "tokens_per_second": 9.0}
    (left,) = plots.cost_figure([record, record]).axes
    assert left.get_title() == "MiB of cache per sequence, 64 kept" and left.get_xlim()[0] == 0
    assert len(plots.cost_figure([record, {**record, "tokens_per_second": 12.0}]).axes) == 2


def test_stopping_says_how_to_go_on(lettered, quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: lettered)
    (tmp_path / "data.jsonl").write_text(line("one") + line("two"))
    (tmp_path / "run.toml").write_text(
        f'policies = ["full"]\nbatch = 1\n[[tasks]]\nfile = {json.dumps(str(tmp_path / "data.jsonl"))}\n'
    )
    answers = runner._answers

    def stopped(params, settings, job):
        if quick:
            raise KeyboardInterrupt
        return answers(params, settings, job)

    monkeypatch.setattr(runner, "_answers", stopped)
    args = ["eval", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out"), "--no-report"]
    assert cli.main(args) == 130
    assert "1 records are kept" in (said := capsys.readouterr().err) and "the same command goes on" in said
    assert len(list(Store(tmp_path / "out").records())) == 1


def test_the_help_names_every_shipped_run(capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    said = capsys.readouterr().out
    assert all(re.search(rf"\b{name}\b", said) for name in config_files("evals"))


def test_tokens_or_bits_of_two_runs_stand_in_one_row(tiny, tmp_path):
    """Bytes by hand: two layers of alike slots, so that shares are those of the slots. Sizes are a ratio here, a budget
    there; the answers of a run are of one measure each."""
    params = tiny("llama3")
    folders = [tmp_path / name for name in ("needles", "long")]
    tasks = (
        {"task": "passkey", "length": 64, "prompt_tokens": 64},
        {"task": "recite", "length": 128, "prompt_tokens": 64},
    )
    sizes = ({"ratios": [0.75, 0.5]}, {"budgets": [32]})
    for folder, task, size in zip(folders, tasks, sizes, strict=True):
        store = Store(folder)
        run = settings.from_dict({"policies": ["full", {"name": "tova", **size}], "tasks": [{"name": task["task"]}]})
        store.open(settings.to_dict(run), "tiny")
        store.add(
            {
                "key": f"{cell.label} {cell.budget} {cell.ratio} {number}", "kind": "answer", "source": "jaxkv",
                "policy": cell.label, "budget": cell.budget, "ratio": cell.ratio,
                "example": f"{number}", "question": 0, "score": float(number % 2), **task,
            }
            for cell in run.cells()
            for number in range(4)
        )  # fmt: skip
    found = tokens_or_bits.joined(tokens_or_bits.rows(params, folder) for folder in folders)
    said = [(row["policy"], row["size"], row["bytes"], row["count"]) for row in found]
    assert said == [
        ("full", None, 1.0, {"needles": 4, "long": 4}),
        ("tova", 0.75, 0.25, {"needles": 4, "long": 4}),
        ("tova", 0.5, 0.5, {"needles": 4}),
    ]
    assert tokens_or_bits.taken(found) == ["needles", "long"]
    assert tokens_or_bits.line(found[2], ("needles", "long")) == ("`tova`", "1/2", "0.500", "50 (15-85)", "-")
