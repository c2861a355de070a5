"""What the options of the commands reach: nothing is loaded or run."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import types

import pytest

import jaxkv
from jaxkv import cli, evaluation, serving
from jaxkv.cli.options import DEFAULT_BUDGET, DEFAULT_POLICY, Load
from jaxkv.errors import BadValue
from jaxkv.policies.catalogue import named
from jaxkv.policies.policy import from_dict
from jaxkv.serving import serve
from jaxkv.speculative import AASD, PromptLookup

MODEL = "a model"


@pytest.fixture
def asked(monkeypatch, goldens):
    """What `jaxkv.load` and `jaxkv.generate` were given; the latter refuses to run."""
    found = {}

    def load(path, **options):
        found["load"] = {"path": path, **options}
        return MODEL

    def generate(params, prompt, **options):
        assert params == MODEL and callable(options.pop("progress"))
        found["generate"] = {"prompt": prompt, **options}
        raise BadValue("enough")

    monkeypatch.setattr(jaxkv, "load", load)
    monkeypatch.setattr(jaxkv, "generate", generate)
    monkeypatch.setattr("jaxkv.cli.entry.keep_programs", lambda: None)

    def run(*words):
        assert cli.main(["generate", "--model", str(goldens / "tiny" / "llama3"), *words]) == 2
        assert found["load"].pop("path") == goldens / "tiny" / "llama3"
        return found["generate"], found["load"]

    return run


def test_what_generate_is_given(asked):
    words = ["hello", "--policy", "full", "--temperature", "0.7", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.05",
             "--repetition-penalty", "1.3", "--seed", "11", "--stop", "one", "two", "--max-new-tokens", "17",
             "--speculative", "lookup", "--verify", "conditional",
             "--dtype", "bfloat16", "--weights", "int8-g16"]  # fmt: skip
    given, loaded = asked(*words)
    assert given == {
        "prompt": "hello", "policy": jaxkv.policy("full"), "speculative": PromptLookup(verify="conditional"),
        "scan_layers": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3,
        "seed": 11, "stop": ("one", "two"), "max_new_tokens": 17,
    }  # fmt: skip
    assert loaded == {"dtype": "bfloat16", "weights": "int8-g16", "mesh": None}


def test_what_generate_is_given_by_default(asked):
    given, loaded = asked("hello")
    assert given == {
        "prompt": "hello", "policy": jaxkv.policy(DEFAULT_POLICY, budget=DEFAULT_BUDGET), "speculative": None,
        "scan_layers": True, "temperature": 0.0, "top_k": None, "top_p": None, "min_p": None,
        "repetition_penalty": None, "seed": 0, "stop": (), "max_new_tokens": 128,
    }  # fmt: skip
    assert loaded == {"dtype": None, "weights": None, "mesh": None}


DRAWN = ["--temperature", "0.7", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.05", "--repetition-penalty", "1.3",
         "--seed", "11", "--stop", "one", "--max-new-tokens", "17"]  # fmt: skip
DRAWS = {
    "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "seed": 11,
    "stop": ("one",), "max_new_tokens": 17,
}  # fmt: skip


def a_chat(monkeypatch, *lines, refused=""):
    """What `jaxkv.stream` is given, turn by turn, in a chat in which these lines are said."""
    turns, said = [], iter(lines)

    class Pieces:
        def __init__(self, params, messages, **options):
            turns.append({"messages": [*messages], **options})
            if messages[-1]["content"] == refused:
                raise BadValue("more than the context")
            self.generation = types.SimpleNamespace(cache="a cache", text="hi", stats=None)

        def __iter__(self):
            return iter(("h", "i"))

    monkeypatch.setattr(jaxkv, "stream", Pieces)
    monkeypatch.setattr("jaxkv.cli.chat._ask", lambda: next(said, ""))
    monkeypatch.setattr("jaxkv.cli.chat.facts", lambda stats: {})
    model = types.SimpleNamespace(tokenizer=types.SimpleNamespace(chat_template="of turns"))
    monkeypatch.setattr(jaxkv, "load", lambda path, **options: model)
    return turns


def test_what_a_chat_is_given(asked, monkeypatch):
    """Its first turn, and the cache of that in the next."""
    turns = a_chat(monkeypatch, "hello", "and then?")
    words = ["--policy", "h2o", "--budget", "24", "--system", "be brief", "--speculative", "lookup", "--json", *DRAWN]
    assert cli.main(["chat", *words]) == 0
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    drafting = {"speculative": PromptLookup(), "scan_layers": True, **DRAWS}
    assert all(callable(turn.pop("progress")) for turn in turns)
    first, then = turns
    assert first == {"messages": said, "policy": jaxkv.policy("h2o", budget=24), "cache": None, **drafting}
    said += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and then?"}]
    assert then == {"messages": said, "policy": None, "cache": "a cache", **drafting}


@pytest.mark.parametrize("terminal", [True, False])
def test_a_chat_goes_on_behind_what_cannot_be_asked(asked, monkeypatch, capsys, terminal):
    """On a terminal; what is piped in ends with the error."""
    turns = a_chat(monkeypatch, "hello", "too long", "and then?", refused="too long")
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: terminal))
    assert cli.main(["chat", "--json"]) == (0 if terminal else 2)
    said = [[message["content"] for message in turn["messages"]] for turn in turns]
    assert said == [["hello"], ["hello", "hi", "too long"], ["hello", "hi", "and then?"]][: 2 + terminal]
    goes_on = "more than the context; the conversation goes on without this line"
    assert (goes_on in capsys.readouterr().err) == terminal


def test_what_is_piped_into_a_chat_and_is_no_text(asked, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hi \xff\xfe\n"), encoding="utf-8"))
    model = types.SimpleNamespace(tokenizer=types.SimpleNamespace(chat_template="of turns"))
    monkeypatch.setattr(jaxkv, "load", lambda path, **options: model)
    assert cli.main(["chat"]) == 2
    assert "jaxkv: standard input is not utf-8" in capsys.readouterr().err


def test_an_option_that_is_given_twice(asked, capsys):
    """Of those that take several values only the last would count; of the others it does, as anywhere."""
    for words in (["--option", "window=1000", "--option", "kernel=5"], ["--stop", "a", "--stop=b"]):
        assert cli.main(["generate", "hello", "--policy", "snapkv", *words]) == 2
        assert f"{words[0]} is given twice, and only the last would count" in capsys.readouterr().err
    given, _ = asked("hello", "--seed", "1", "--seed", "2")
    assert given["seed"] == 2


def test_a_prompt_that_looks_like_an_option(asked):
    given, _ = asked("--seed", "3", "--policy", "full", "--", "--hello")
    assert (given["prompt"], given["seed"]) == ("--hello", 3)


@pytest.mark.parametrize("words", [["info"], ["info", "--help"], ["policies"], ["policies", "--json"]])
def test_a_reader_that_goes(words):
    """Before anything is printed: no traceback, also where all is printed when Python ends."""
    run = f"import sys; from jaxkv.cli import main; sys.exit(main({words}))"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as ran:
        ran.stdout.close()
        said = ran.stderr.read().decode()
    assert ran.returncode == 141 and "Error" not in said


def test_a_reader_of_notes_that_goes(asked, monkeypatch, capsys):
    """The answer still comes."""

    def gone(*_, **__):
        print("the answer")
        raise BrokenPipeError

    monkeypatch.setattr(jaxkv, "generate", gone)
    assert cli.main(["generate", "hello"]) == 141
    assert capsys.readouterr().out == "the answer\n"


def test_policies_say_the_same_in_json(capsys):
    assert cli.main(["policies", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    facts = {"bounded": False, "query_aware": True, "calibration": ["retrieval"], "floor": 9}
    assert told["compresskv"]["facts"] == facts
    said = told["h2o"].pop("facts")
    assert said["bounded"] and said["calibration"] == []
    assert from_dict(told["h2o"]) == named("h2o"), "the rest is the policy"


def test_info_takes_the_sizes_of_generate(capsys):
    for words, budget in ((["--ratio", "0.5"], 4096), (["--bytes", str(2**22)], 88)):
        assert cli.main(["info", "--policy", "h2o", *words]) == 0
        assert f"cache bytes under h2o at budget {budget}" in capsys.readouterr().out
    assert cli.main(["info", "--ratio", "0.5"]) == 2
    assert "--ratio 0.5 without --policy: say of which policy" in capsys.readouterr().err


def test_info_counts_slots_alike_with_a_policy_and_without(capsys):
    """Rounded up to whole pieces of memory; and values stand below each other."""
    words = ["info", "--budget", "500", "--tokens", "1001", "--policy", "h2o"]
    assert cli.main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cache_bytes_at_budget_500"] == facts["keys_and_values_bytes_under_h2o_at_budget_500"]
    assert facts["full_cache_bytes_at_1001_tokens"] == 1008 * facts["cache_bytes_per_token"]
    assert cli.main(words) == 0
    lines = dict(zip(facts, capsys.readouterr().out.splitlines(), strict=True))
    width = max(map(len, facts))
    assert all(line[width] == " " != line[width + 1] for line in lines.values())


def test_info_says_why_a_kernel_does_not_run(capsys):
    assert cli.main(["info", "--kernels", "--dtype", "bfloat16", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["ragged_decode"]
    assert said == "reference, for numba_cpu does not run here: bfloat16: float32"


def test_what_a_warmup_is_given(asked, monkeypatch, capsys):
    given = []

    def warmup(params, lengths, **options):
        given.append((params, lengths, options))
        return dict.fromkeys(lengths, 1.5)

    monkeypatch.setattr(jaxkv, "warmup", warmup)
    words = ["--policy", "h2o", "--budget", "24", "--batch", "3", "--speculative", "aasd", *DRAWN]
    assert cli.main(["warmup", "48", "96", *words]) == 0
    options = {"policy": jaxkv.policy("h2o", budget=24), "speculative": AASD(), "scan_layers": True, "batch": 3}
    assert given == [(MODEL, (length,), options | DRAWS) for length in (48, 96)]
    assert capsys.readouterr().out.splitlines() == ["48 tokens: 1.5 s", "96 tokens: 1.5 s"]


def test_what_a_server_is_given(asked, monkeypatch, capsys, tmp_path):
    """The engine's sizes, the limits of a request, a text to branch from, and what prints its address: for the pipe
    too, where whoever starts it with --port 0 reads it."""
    found, file = {}, tmp_path / "facts.txt"
    file.write_text("facts", encoding="utf-8")

    class Engine:
        leads = False

        def __init__(self, params, policy, **options):
            found["engine"] = {"params": params, "policy": policy, **options}

        def store(self, name, cache):
            found["stored"] = name, cache

    monkeypatch.setattr(serving, "Engine", Engine)
    monkeypatch.setattr(serve, "serve", lambda engine, name, **options: found.update(served={"name": name, **options}))
    monkeypatch.setattr(jaxkv, "prefill", lambda params, text, policy: (text, policy.block))
    words = ["--policy", "h2o", "--budget", "24", "--rows", "3", "--longest", "96", "--max-new-tokens", "17",
             "--block", "48", "--queue", "5", "--prefix", f"known={file}", "--host", "0.0.0.0", "--host-names", "a.b",
             "--port", "8431", "--token", "secret", "--name", "mine", "--body", "4096", "--seconds", "9",
             "--grace", "2", "--speculative", "aasd"]  # fmt: skip
    assert cli.main(["serve", *words]) == 0
    chosen = dataclasses.replace(jaxkv.policy("h2o", budget=24), block=48)
    assert found["engine"] == {
        "params": MODEL, "policy": chosen, "rows": 3, "longest": 96, "max_new_tokens": 17, "queue": 5,
        "speculative": AASD(), "scan_layers": True,
    }  # fmt: skip
    assert found["stored"] == ("known", ("facts", 48))
    limits = found["served"].pop("limits")
    assert (limits.body, limits.seconds, limits.max_tokens) == (4096, 9.0, 17)
    found["served"].pop("listens")("http://[::1]:5")
    assert capsys.readouterr().out == "smollm2-135m under h2o, budget 24, 3 rows: http://[::1]:5\n"
    assert found["served"] == {
        "name": "mine", "host": "0.0.0.0", "host_names": ("a.b",), "port": 8431, "token": "secret", "grace": 2.0,
    }  # fmt: skip


def test_a_server_whose_line_nobody_reads(asked, monkeypatch):
    """It serves on, and the line is not in the way when it ends."""
    served = []

    def run(engine, name, *, listens, **_):
        listens("http://[::1]:5")
        served.append(name)

    monkeypatch.setattr(serving, "Engine", lambda *_, **__: None)
    monkeypatch.setattr(serve, "serve", run)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert cli.main(["serve", "--policy", "full", "--port", "0"]) == 0 and served == ["smollm2-135m"]


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (
            ["--budget", "24", "--option", "sinks=2", "prefill_recent=3"],
            {"budget": 24, "sinks": 2, "prefill_recent": 3},
        ),
        (["--ratio", "0.75"], {"ratio": 0.75}),
        (["--bytes", "100000"], {"bytes": 100_000}),
    ],
    ids=["budget", "ratio", "bytes"],
)
def test_the_size_of_the_policy_and_a_chat(asked, words, size):
    given, _ = asked("hello", "--policy", "h2o", "--chat", *words)
    assert given["policy"] == jaxkv.policy("h2o", **size)
    assert given["prompt"] == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("file", "options", "weights"),
    [
        ("model.gguf", {}, "file"),  # in its own blocks, unless told otherwise
        ("model.gguf", {"weights": "floats"}, None),
        ("model.gguf", {"dtype": "float32"}, None),
        ("folder", {}, None),
        ("folder", {"weights": "int4"}, "int4"),
    ],
    ids=str,
)
def test_how_the_weights_are_held(monkeypatch, tmp_path, file, options, weights):
    monkeypatch.setattr(jaxkv, "load", lambda path, **options: (path.name, options["weights"]))
    (tmp_path / file).touch()
    assert Load(model=str(tmp_path / file), **options).build() == (file, weights)


RUN = """
policies = ["tova", {name = "h2o", budgets = [8]}]
budgets = [64]
weights = "int8"
batch = 3
[[tasks]]
name = "passkey"
[[tasks]]
name = "lookup"
[[tasks]]
file = "some.jsonl"
"""


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The settings that a run has with these words, how its model is loaded, and where its results go."""
    found = []

    def load(model, **options):
        found.append((model, options))
        return MODEL

    def evaluate(params, settings, out, **_):
        assert params == MODEL
        found.append((settings, out))
        raise BadValue("enough")

    monkeypatch.setattr(jaxkv, "load", load)
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    monkeypatch.setattr("jaxkv.cli.entry.keep_programs", lambda: None)
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    (tmp_path / "some.jsonl").write_text(json.dumps({"context": "a", "question": "b", "answers": ["c"]}) + "\n")

    def run(*words):
        assert cli.main(["eval", str(tmp_path / "run.toml"), *words]) == 2
        (model, options), (settings, out) = found
        assert (model, options) == (settings.model, {"dtype": settings.dtype, "weights": settings.weights})
        return settings, out

    return run


def test_a_run_as_its_file_says(measured):
    settings, out = measured()
    assert settings.weights == "int8" and settings.dtype is None and settings.batch == 3 and out == "results/evaluation"
    assert settings.budgets == (64,) and settings.policies == ("tova", {"name": "h2o", "budgets": [8]})


@pytest.mark.parametrize(
    "sizes",
    [{"ratios": (0.5, 0.75)}, {"bytes": (100_000,)}, {"budgets": (16,), "ratios": (0.5,)}],
    ids=["ratios", "bytes", "both"],
)
def test_sizes_stand_in_place_of_the_runs(measured, sizes):
    """Of all kinds, and of single policies too; and floats in place of its weights."""
    words = [word for name, each in sizes.items() for word in (f"--{name}", *map(str, each))]
    settings, _ = measured(*words, "--weights", "floats")
    found = {name: getattr(settings, name) for name in ("budgets", "ratios", "bytes")}
    assert found == {"budgets": (), "ratios": (), "bytes": (), **sizes}
    assert settings.policies == ("tova", {"name": "h2o"}) and settings.weights is None


def test_what_else_stands_in_place_of_the_runs(measured, tmp_path):
    words = ["--model", "some/model", "--dtype", "bfloat16", "--weights", "int4", "--policies", "full", "snapkv",
             "--data", str(tmp_path), "--batch", "5", "--block", "512", "--share-prefill", "--out", "there",
             "--tasks", "passkey", "some", "--limit", "3", "--longest", "500", "--lengths", "128", "256"]  # fmt: skip
    settings, out = measured(*words)
    assert (settings.model, settings.dtype, settings.weights) == ("some/model", "bfloat16", "int4")
    assert (settings.policies, settings.data, settings.batch) == (("full", "snapkv"), str(tmp_path), 5)
    assert (settings.block, settings.share_prefill, out) == (512, True, "there")
    made, file = settings.tasks
    assert (made.name, made.lengths, made.limit, made.longest) == ("passkey", (128, 256), None, None)
    assert file.file.endswith("some.jsonl") and (file.limit, file.longest) == (3, 500)


@pytest.mark.parametrize(
    "run, task, says",
    [
        ("longbench", "lcc", "has no lcc.jsonl"),
        ("gsm8k", "gsm8k", r"has no test\*.jsonl"),
        ("longbench", "lcc", "no such folder"),
    ],
)
def test_data_that_is_not_there_is_told_before_the_model_is_loaded(monkeypatch, capsys, tmp_path, run, task, says):
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: pytest.fail("it was loaded"))
    folder = tmp_path / "nope" if "folder" in says else tmp_path
    assert cli.main(["eval", run, "--data", str(folder), "--tasks", task]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_plan_runs_nothing(measured, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: pytest.fail("it has run"))
    monkeypatch.setattr(evaluation, "cost", lambda params, settings: f"{params}, {settings.batch} at a time")
    assert cli.main(["eval", str(tmp_path / "run.toml"), "--plan", "--batch", "7"]) == 0
    assert capsys.readouterr().out == "a model, 7 at a time\n"
