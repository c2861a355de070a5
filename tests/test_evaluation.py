"""Evaluation: tasks pinned by hashes, scorers on hand-made cases, runs that resume, fidelity, reports."""

import dataclasses
import hashlib
import json
import re

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

import jaxkv
from jaxkv import cli
from jaxkv.calibrate import _looked
from jaxkv.errors import BadCheckpoint, BadValue, UnknownName
from jaxkv.evaluation import Example, Question, asking, datasets, jobs, runner, scorers, settings, summary, tasks
from jaxkv.evaluation.example import fitted
from jaxkv.evaluation.fidelity import fidelity, reference, shares
from jaxkv.evaluation.forced import follow
from jaxkv.evaluation.report import report
from jaxkv.evaluation.results import Store
from jaxkv.evaluation.retention import Retention, retained


class Letters:
    """A tokenizer whose token n is the character chr(n + 32); a line's end is token 95."""

    chat_template = "x"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [95 if letter == "\n" else min(ord(letter), 126) - 32 for letter in text]}

    def decode(self, tokens, **_):
        return "".join("\n" if token == 95 else chr(token + 32) for token in tokens)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<a>" * add_generation_prompt


@pytest.fixture(scope="module")
def lettered(tiny):
    params = tiny("llama3")
    return type(params)(params.weights, params.config, Letters())


def words(example: Example) -> int:
    """A size that needs no tokenizer."""
    turns = [content for _, content in example.turns]
    return len(" ".join([*turns, example.context, example.questions[0].text, example.output]).split())


def made(name: str, **options) -> list[Example]:
    return tasks.generate(name, words, **{"lengths": (350, 500), "depths": (0.2, 0.8), "questions": 2, **options})


def digest(examples: list[Example]) -> str:
    return hashlib.sha256("".join(example.digest for example in examples).encode()).hexdigest()[:16]


PINNED: dict[str, str] = {
    "common-words": "c53f1d07e11b91cf",
    "conversation": "da9e2f6764a1f207",
    "frequent-words": "6376f64f093d22fc",
    "long-output": "27c164200621cc22",
    "lookup": "6e982dad160c3c7b",
    "niah-multikey": "1e78def8253a95b6",
    "niah-multiquery": "4ccd0e5fa63cab5e",
    "niah-multivalue": "e1ab0de708d54325",
    "niah-single": "7bfc6faebe3b156e",
    "passkey": "4483cc051b646506",
    "reading": "ea49638857a52033",
    "recite": "35b760ef76a97155",
    "variable-tracking": "5735b95c61039d13",
}


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_tasks_are_pinned(name):
    assert digest(made(name)) == PINNED[name]
    assert digest(made(name, seed=1)) != PINNED[name]


def test_tasks_say_what_they_ask():
    """The answers stand in the text, at the depth asked for, and the size comes just under the length."""
    for name in tasks.TASKS:
        for example in made(name, haystacks=("prose",)):
            told = " ".join([*(content for _, content in example.turns), example.context, example.output]).lower()
            for question in example.questions:
                right = [answer.lower() in told for answer in question.answers]
                assert all(right) if example.scorer == "all" else any(right), (name, question)
            wanted = example.length // 2 if name == "recite" else example.length
            assert wanted - 30 < words(example) <= wanted, name
    for name in ("passkey", "niah-single", "lookup"):
        for depth in (0.0, 0.5, 1.0):
            example = made(name, depths=(depth,), lengths=(1000,), haystacks=("prose",), questions=1)[0]
            at = example.context.index(example.questions[0].answers[0]) / len(example.context)
            assert abs(at - depth) < 0.1, (name, depth, at)


def test_tasks_refuse_what_does_not_fit():
    with pytest.raises(UnknownName, match="niah-single"):
        made("niah-singel")
    with pytest.raises(BadValue, match="depth 1"):
        made("passkey", depths=(1.5,))
    with pytest.raises(BadValue, match="length 10"):
        made("passkey", lengths=(10,))
    with pytest.raises(UnknownName, match="unknown haystack"):
        made("passkey", haystacks=("hay",))


def test_fitted_is_the_largest_that_fits():
    build = lambda count: Example("t", "x" * count, (Question("", ("a",)),), "all", 1)  # noqa: E731
    for length in (0, 1, 15, 16, 17, 1000):
        example = fitted(build, lambda example: len(example.context), length)
        assert example is not None and len(example.context) == length
    assert fitted(build, lambda example: len(example.context) + 5, 4) is None


@pytest.mark.parametrize(
    ("name", "answer", "references", "expected"),
    [
        ("all", "They are 12, 34 and 56.", ("12", "34", "78"), 2 / 3),
        ("all", "amber RIVER", ("Amber", "river"), 1.0),
        ("all", "", ("x",), 0.0),
        ("any", "It was Ines Harrow.", ("Harrow", "Penn"), 1.0),
        ("any", "nobody", ("Harrow", "Penn"), 0.0),
        ("f1", "The red boat!", ("a red boat",), 1.0),
        ("f1", "red house", ("red boat", "blue"), 0.5),
        ("f1", "green", ("red boat",), 0.0),
        ("boxed", r"so \boxed{3} no, \boxed{42}", ("42",), 1.0),
        ("boxed", "it is 41, or rather 42.0", ("42",), 1.0),
        ("boxed", "none", ("42",), 0.0),
        ("boxed", r"\boxed{\frac{1}{2}}", (r"\frac{1}{2}",), 1.0),
        ("boxed", r"\boxed{1,234}", ("1234",), 1.0),
        ("boxed", r"\boxed{41} and \boxed{4", ("41",), 1.0),
        ("last-number", "so 1,234.", ("1,234",), 1.0),
        ("code", "\n# a comment\nreturn x + 1\nmore", ("return x + 1",), 1.0),
        ("code", "abcd", ("abxx", "zz"), 0.5),  # two of four letters each way: 1 - 4 / 8
        ("code", "# only a comment", ("x",), 0.0),
    ],
)
def test_scorers(name, answer, references, expected):
    assert scorers.score(name, answer, references) == pytest.approx(expected)


def test_scorers_refuse():
    with pytest.raises(UnknownName, match="boxed"):
        scorers.score("boxd", "", ("a",))
    with pytest.raises(BadValue, match="reference"):
        scorers.score("all", "x", ())


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (lambda answer, references: None, "gave None for the answer ''"),
        (lambda answer, references: 2.0, "gave 2.0 .* number from 0 to 1"),
        (lambda answer, references: np.float32("nan"), "gave nan"),
        (lambda answer, references: "1", "gave '1'"),
        (lambda answer: 1.0, "failed on the answer '' .TypeError: .* takes 1 positional"),
        (lambda answer, references: answer[0], "failed on the answer '' .IndexError: .*of the answer and a list"),
    ],
)
def test_a_scorer_of_ones_own_is_checked_before_the_model_runs(tmp_path, monkeypatch, lettered, own, words):
    monkeypatch.setitem(scorers.SCORERS, "own", own)
    with pytest.raises(BadValue, match=f"the scorer 'own' {words}"):
        scorers.score("own", "", ("a",))
    (tmp_path / "some.jsonl").write_text(json.dumps({"context": "c", "question": "q", "answer": "a"}))
    run = {"policies": ["full"], "tasks": [{"file": str(tmp_path / "some.jsonl"), "scorer": "own"}]}
    with pytest.raises(BadValue, match=f"the scorer 'own' {words}"):
        runner.planned(lettered, settings.from_dict(run))


@pytest.mark.parametrize("given", [np.float32(0.5), True, 1, np.bool_(False)])
def test_a_scorer_of_ones_own_may_give_any_number(monkeypatch, given):
    monkeypatch.setitem(scorers.SCORERS, "own", lambda answer, references: given)
    found = scorers.score("own", "x", ("a",))
    assert found == given and type(found) is float, "it is written down as JSON"


def test_answers_that_no_score_can_read_are_refused_with_the_data(tmp_path):
    for answer, scorer, words in (
        ("", "any", "every answer would be right"),
        ("7", "retrieval", "expected 'Paragraph"),
    ):
        (tmp_path / "some.jsonl").write_text(json.dumps({"context": "c", "question": "q", "answer": answer}))
        with pytest.raises(BadValue, match=f"line 1: .*{words}"):
            datasets.read(tmp_path / "some.jsonl", scorer=scorer)


def test_wilson_interval():
    """Against values from Wilson's formula worked by hand for 8 of 10 and 0 of 10."""
    mean = summary.wilson([1.0] * 8 + [0.0] * 2)
    assert (mean.value, mean.low, mean.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    mean = summary.wilson([0.0] * 10)
    assert (mean.low, mean.high) == pytest.approx((0.0, 0.2775), abs=1e-4)


def test_question_is_split_from_its_context(lettered):
    tokenizer = lettered.tokenizer
    example = Example("t", "ab", (Question("c?", ("x",), prefix="It is"),), "all", 1, turns=(("user", "hi"),))
    context, rest = asking.asked(tokenizer, example, example.questions[0])
    assert tokenizer.decode(context) == "<user>hi<user>ab"
    assert tokenizer.decode(rest) == "\n\nc?<a>It is"
    assert asking.size(tokenizer, example) == len(context) + len(rest)
    plain = Example("t", "ab\ncd", (Question("", ("x",)),), "code", 1, chat=False)
    context, rest = asking.asked(tokenizer, plain, plain.questions[0])
    assert (tokenizer.decode(context), tokenizer.decode(rest)) == ("ab\nc", "d"), "the text alone, split before its end"
    assert asking.shortened(tokenizer, plain, 3).context == "acd" and asking.shortened(tokenizer, plain, 5) is plain
    ids = asking.asked(
        lambda text, add_special_tokens: {"input_ids": [9] * add_special_tokens + [*map(ord, text)]},
        plain,
        plain.questions[0],
    )
    assert ids[0].tolist() == [9, *map(ord, "ab\nc")] and ids[1].tolist() == [ord("d")], (
        "behind what a text begins with"
    )
    with pytest.raises(BadValue, match="no tokenizer"):
        asking.asked(None, example, example.questions[0])


def test_local_data_sets(tmp_path):
    rows = [
        {"context": "C", "input": "q1", "answers": ["a", "b"], "dataset": "qasper"},
        {"context": "C", "input": "q2", "answers": ["c"], "dataset": "qasper"},
        {"input": "whole prompt", "outputs": ["1", "2"], "answer_prefix": "It is"},
        {"problem": "2 + 2", "answer": 4, "max_new_tokens": 9},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    first, second, third = datasets.read(path, scorer="f1")
    assert (first.task, first.context, [q.text for q in first.questions]) == ("qasper", "C", ["q1", "q2"])
    assert (second.task, second.context, second.questions[0].prefix) == ("data", "whole prompt", "It is")
    assert second.questions[0].answers == ("1", "2") and second.scorer == "f1"
    assert (third.context, third.questions[0].text, third.questions[0].answers) == ("", "2 + 2", ("4",))
    assert third.max_new_tokens == 9
    assert len(datasets.read(path, limit=1)) == 1
    path.write_text('{"task": "lcc", "prompt": "def f", "answers": ["():"]}')
    (whole,) = datasets.read(path, scorer="code", chat=False)
    assert (whole.task, whole.context, whole.questions[0].text, whole.chat) == ("lcc", "def f", "", False)
    for text, message in (("{", "line 1: not JSON"), ('{"context": "x"}', "no answers"), ("[]", "list")):
        path.write_text(text)
        with pytest.raises(BadValue, match=message):
            datasets.read(path)
    with pytest.raises(BadValue, match="no such file"):
        datasets.read(tmp_path / "other.jsonl")


def test_settings():
    for name in ("default", "needles", "retrieval", "ruler", "longbench", "gsm8k", "long-output", "dapq"):
        assert settings.load(name).tasks
    default = settings.load("default")
    names = ["full", "streaming-llm", "snapkv", "h2o", "tova", "knorm", "dapq", "longflow", "dapq-longflow"]
    names += ["spans", "spans-longflow"]
    assert [cell.label for cell in default.cells()] == ["full", *(name for name in names[1:] for _ in default.budgets)]
    assert len(default.cells()) == 1 + 10 * 3 and all(cell.policy for cell in default.cells())
    two = settings.from_dict({"policies": ["snapkv", {"name": "snapkv", "window": 16}], "budgets": [32]})
    one, other = two.cells()
    assert one.policy is None and "at least 33" in one.reason
    assert other.label == "snapkv window=16" and other.policy.prefill.observe.window == 16
    for table, error in (
        ({"polices": []}, UnknownName),
        ({"policies": ["snapvk"], "budgets": [64]}, UnknownName),
        ({"policies": ["snapkv"]}, BadValue),
        ({"policies": ["tova", "tova"], "budgets": [64]}, BadValue),
        ({"modes": ["blind"], "policies": ["full"]}, UnknownName),
        ({"tasks": [{"name": "passky"}]}, UnknownName),
        ({"tasks": [{"name": "passkey", "file": "x"}]}, BadValue),
        ({"tasks": [{"name": "passkey", "scorer": "rouge"}]}, BadValue),
        ({"tasks": [{"name": "longbench/lcc", "depths": [0.5]}]}, BadValue),
        ({"tasks": [{"file": "x", "lengths": [64]}]}, BadValue),
        ({"fidelity": {"texts": 0}}, BadValue),
        ({"policies": ["tova"], "budgets": [64], "bytes": [4096]}, BadValue),
        ({"policies": ["tova"], "bytes": [0]}, BadValue),
    ):
        with pytest.raises(error):
            settings.from_dict(table)
    with pytest.raises(UnknownName, match="default"):
        settings.load("defautl")


def test_what_no_task_reads_is_refused():
    run = settings.from_dict({"policies": ["full"], "tasks": [{"name": "passkey"}, {"file": "x"}]})
    made, read = settings.changed(run, {}, each={"limit": 3, "lengths": (64,)}).tasks
    assert (made.lengths, made.limit, read.lengths, read.limit) == ((64,), None, settings.Tasks(file="x").lengths, 3)
    with pytest.raises(BadValue, match="limit=3: none of the run's tasks reads it"):
        settings.changed(run, {}, ["passkey"], {"limit": 3})
    for task, field in (
        ("longbench/lcc", "examples"),
        ("gsm8k", "examples"),
        ("ruler/vt", "limit"),
        ("passkey", "questions"),
    ):
        with pytest.raises(BadValue, match=f"{field}=5 of the task {task!r}, which would not read it"):
            settings.Tasks(name=task, **{field: 5})
    with pytest.raises(BadValue, match="expected \\('prose',\\)"):
        settings.Tasks(name="ruler/vt", haystacks=("noise",))


def test_sizes_stand_in_place_of_all_others():
    run = settings.from_dict({"policies": ["h2o", {"name": "tova", "ratios": [0.5]}], "budgets": [64]})
    assert [cell.size for cell in run.cells()] == [64, 0.5]
    assert [cell.size for cell in settings.changed(run, {"budgets": (), "bytes": (40_000,)}).cells()] == [40_000] * 2


def test_a_question_within_its_context_is_not_compressed_first(lettered, tmp_path):
    (tmp_path / "whole.jsonl").write_text(json.dumps({"input": "A text. Which?", "outputs": ["x"]}))
    table = {"policies": ["full"], "modes": ["agnostic"], "tasks": [{"file": str(tmp_path / "whole.jsonl")}]}
    with pytest.raises(BadValue, match="its question within its context"):
        runner.planned(lettered, settings.from_dict(table))


def test_a_retention_that_cannot_be_drawn_is_told_first(lettered):
    table = {"policies": ["full"], "retention": {"policies": ["q-filters"], "budget": 64}}
    with pytest.raises(BadValue, match=r"\[retention\] of q-filters, 64 kept: query_direction: not measured"):
        runner.planned(lettered, settings.from_dict(table))


def test_a_run_that_measures_nothing(lettered, tmp_path):
    for run, says in (
        ({}, "measures nothing"),
        ({"tasks": [{"name": "passkey"}], "data": "/nowhere"}, "no such folder"),
    ):
        with pytest.raises(BadValue, match=says):
            runner.evaluate(lettered, settings.from_dict({"policies": ["full"], **run}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


INT4 = {"keys": {"kind": "int", "bits": 4}, "values": {"kind": "int", "bits": 4}}
BYTES = {"policies": ["full", "tova", {"name": "tova", "store": INT4, "label": "tova in 4 bits"}], "bytes": [40_000]}


@pytest.mark.long
def test_sizes_in_bytes_are_budgets_of_the_model(lettered):
    """The same bytes hold more entries of fewer bits; what they cannot hold is not measured, and said so."""
    full, whole, coded = (jobs.measurable(lettered, cell) for cell in settings.from_dict(BYTES).cells())
    assert full.size is None and whole.size == coded.size == 40_000
    for cell in (whole, coded):
        assert cell.policy.bytes is None and cell.policy.budget == cell.budget
        held = jaxkv.prefill(lettered, ids(1, 600), policy=cell.policy, room=1).kv_bytes
        assert 0.9 * 40_000 < held <= 40_000
    assert coded.budget > 2 * whole.budget
    (few,) = (jobs.measurable(lettered, cell) for cell in settings.from_dict({**BYTES, "bytes": [9]}).cells()[1:2])
    assert few.policy is None and "raise bytes=" in few.reason
    assert len({jobs.key_of(cell, "aware", "x") for cell in (whole, dataclasses.replace(whole, bytes=40_100))}) == 2


def test_sizes_in_words():
    """A ratio is what goes; the words say what stays."""
    words = [summary.in_words(size, [{"bytes": None}]) for size in (None, 0.890625, 0, 64)]
    assert words == ["all", "10.9 % kept", "100 % kept", "64 kept"]
    assert summary.in_words(4_000_000, [{"bytes": 4_000_000}]) == "4 MB"


@pytest.mark.long
def test_a_run_at_equal_bytes(lettered, tmp_path):
    run = {**RUN, **BYTES, "budgets": (), "retention": None, "bytes": [40_000, 60_000]}
    store = runner.evaluate(lettered, settings.from_dict(run), tmp_path, model="tiny")
    rows = summary.quality(store.records())
    assert [(row["policy"], row["budget"]) for row in rows if row["mode"] == "aware"] == [
        ("full", None), *((name, size) for name in ("tova", "tova in 4 bits") for size in (40_000, 60_000)),
    ]  # fmt: skip
    assert {record["bytes"] for record in store.records() if record["policy"] != "full"} == {40_000, 60_000}
    assert " 0.06 MB |" in summary.text_table(rows) and report([tmp_path]).exists()
    other = Store(tmp_path / "other")
    other.open(settings.to_dict(settings.from_dict(RUN)), "tiny")
    other.add({**record, "bytes": None} for record in store.records() if record["policy"] == "full")
    assert report([tmp_path, other.folder], tmp_path / "both").exists(), "what evicts nothing has no size"
    other.add([{"key": "x", "kind": "answer", "budget": 64, "ratio": None}])
    with pytest.raises(BadValue, match="in bytes, others in tokens"):
        report([tmp_path, other.folder])


def ids(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 95, (rows, length)).astype(np.int32)


@pytest.mark.long
def test_full_against_itself_is_exact_and_eviction_is_not(tiny):
    params = tiny("llama3")
    known = reference(params, ids(2, 72)[:, :64], ids(2, 72)[:, 64:])
    same = fidelity(params, jaxkv.policy("full"), known)
    assert (same.kl == 0).all() and (same.top1 == 1).all() and (same.perplexity == same.full_perplexity).all()
    assert (same.mass == 1).all() and (same.overlap == 1).all()
    assert known.mass.shape == (2, 2, 2, 64)
    # Each of the 8 continuation queries gives out a mass of 1, part of it to the continuation itself.
    assert (known.mass.sum(-1) < 8).all() and (known.mass.sum(-1) > 1).all()
    cut = fidelity(params, jaxkv.policy("h2o", budget=24), known)
    assert (cut.kl > 0.01).all() and (cut.mass < 1).all() and (cut.mass > 0).all() and (cut.overlap < 1).all()


def test_the_mass_of_a_window_is_what_it_saw(tiny):
    """Also of tokens that have fallen out of it since: against attention in one piece."""
    params, text = tiny("gemma3_text"), ids(2, 52)
    known = reference(params, text[:, :40], text[:, 40:])

    def look(spec, seen):
        given = seen.mass[:, :, 40:, :40].sum(axis=2)
        return given.reshape(2, spec.num_kv_heads, -1, 40).mean(axis=2)

    assert [spec.window for spec in params.config.specs] == [8, None, 8, None], "12 tokens are more than a window"
    np.testing.assert_allclose(
        known.mass, np.stack(_looked(params.weights, jnp.asarray(text), params.config, look)), atol=1e-5
    )
    same = fidelity(params, jaxkv.policy("full"), known)
    assert (same.mass == 1).all() and (same.overlap == 1).all()


@pytest.mark.long
def test_followed_tokens_give_what_generating_them_gives(tiny):
    """Teacher forcing of a policy's own greedy tokens finds exactly these most likely, and leaves the same cache."""
    params, prompt = tiny("llama3"), ids(2, 48)
    policy = jaxkv.policy("longflow", budget=40)
    out = jaxkv.generate(params, prompt, policy=policy, max_new_tokens=9, stop_tokens=())
    cache, logits = follow(params, jaxkv.prefill(params, prompt, policy=policy), out.tokens[:, :-1])
    np.testing.assert_array_equal(np.argmax(logits, axis=-1), out.tokens[:, 1:])
    for mine, theirs in zip(cache.layers, out.cache.layers, strict=True):
        np.testing.assert_array_equal(mine.positions, theirs.positions)
        np.testing.assert_array_equal(mine.keys, theirs.keys)
    short = np.concatenate([out.tokens[:1, :-1], np.where(np.arange(8) < 3, out.tokens[1:, :-1], -1)])
    part, _ = follow(params, jaxkv.prefill(params, prompt, policy=policy), short, logits=False)
    alone, _ = follow(params, jaxkv.prefill(params, prompt[1:], policy=policy), out.tokens[1:, :3])
    assert part.lengths.tolist() == [48 + 8, 48 + 3]  # a row that has ended stays as it is
    for mine, theirs in zip(part.layers, alone.layers, strict=True):
        np.testing.assert_array_equal(mine.positions[1], theirs.positions[0])
        np.testing.assert_allclose(mine.values[1], theirs.values[0], atol=1e-5)
    with pytest.raises(BadValue, match=r"\[B, N\]"):
        follow(params, cache, out.tokens[0])
    with pytest.raises(BadValue, match="sampled"):
        follow(params, out.cache, out.tokens)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[160, 6]], "id 160 in tokens: expected 0 to 159"),
        ([[-7, 6]], "id -7 in tokens"),
        (np.array([[5.9, 6.9]]), "dtype float64"),
        ([[5, -1, 6]], "behind a -1 in tokens"),
        ([[5, 6], [7]], r"tokens=\[\[5, 6\], \[7\]\]: expected integers"),
        ([[5], [6]], "B = 1"),
        (np.zeros((1, 0), int), "N >= 1"),
    ],
)
def test_ids_that_the_model_has_not_are_not_followed(tiny, tokens, words):
    params = tiny("llama3")
    cache = jaxkv.prefill(params, ids(1, 8), policy=jaxkv.policy("full"))
    with pytest.raises(BadValue, match=words):
        follow(params, cache, tokens)


def test_another_models_cache_is_not_followed(tiny):
    cache = jaxkv.prefill(tiny("llama3"), ids(1, 8), policy=jaxkv.policy("full"))
    with pytest.raises(BadCheckpoint, match="the cache was made by model llama"):
        follow(tiny("qwen2"), cache, np.array([[5]]))


def test_shares_by_hand():
    mass = np.array([4.0, 1.0, 3.0, 2.0], np.float32).reshape(1, 1, 1, 4)
    kept = np.array([True, True, False, False]).reshape(1, 1, 1, 4)
    share, overlap = shares(kept, mass)
    assert share.item() == pytest.approx(0.5) and overlap.item() == 0.5
    tied = np.ones((1, 1, 1, 4), np.float32)  # no two are better than the others
    assert shares(kept, tied)[1].item() == 1.0
    share, overlap = shares(~kept, 0 * mass)  # nothing to lose, and none better than another
    assert share.item() == 1.0 and overlap.item() == 1.0


def test_retention(tiny):
    params, prompt = tiny("llama3"), ids(1, 40)[0]
    picture = retained(params, prompt, jaxkv.policy("streaming-llm", budget=16), steps=12, every=5)
    assert picture.steps == (0, 5, 10, 12) and picture.kept.shape == (4, 2, 2, 53) and picture.prompt == 40
    for at, kept in zip(picture.steps, picture.kept, strict=True):
        expected = np.zeros(53, bool)
        expected[:4] = expected[40 + at - 12 : 40 + at] = True  # 4 sinks and the 12 newest
        np.testing.assert_array_equal(kept, np.broadcast_to(expected, kept.shape))
    again = Retention.from_dict(json.loads(json.dumps(picture.to_dict())))
    np.testing.assert_array_equal(again.kept, picture.kept)
    assert (again.steps, again.tokens, again.prompt) == (picture.steps, picture.tokens, picture.prompt)


RUN = {
    "name": "small",
    "policies": ["full", "dapq-longflow"],
    "budgets": [64],
    "modes": ["aware", "agnostic"],
    "batch": 2,
    "tasks": [
        {"name": "lookup", "lengths": [400], "depths": [0.5], "questions": 2, "max_new_tokens": 6},
        {"name": "long-output", "lengths": [500], "max_new_tokens": 6},
    ],
    "fidelity": {"texts": 2, "prompt": 96, "continuation": 4},
    "retention": {"policies": ["dapq-longflow"], "budget": 48, "prompt": 200, "steps": 8, "every": 4},
}


@pytest.fixture(scope="module")
def finished(lettered, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    seen = []
    store = runner.evaluate(
        lettered, settings.from_dict(RUN), folder, progress=lambda *step: seen.append(step), model="tiny"
    )
    return store, seen


@pytest.mark.long
def test_a_run_writes_every_record_once(finished):
    store, seen = finished
    records = list(store.records())
    assert len({record["key"] for record in records}) == len(records)
    kinds = [record["kind"] for record in records]
    assert (kinds.count("answer"), kinds.count("fidelity"), kinds.count("retention")) == (2 * (2 + 1 + 2), 2, 1)
    for record in records:
        if record["kind"] == "answer":
            assert 0 <= record["score"] <= 1 and record["prompt_tokens"] > 0
            assert record["kept"] <= 64 or record["policy"] == "full"
    full = next(record for record in records if record["kind"] == "fidelity" and record["policy"] == "full")
    assert full["kl"] == [0.0, 0.0]
    assert seen[0][1:] == (0, len(seen) - 1, None) and seen[-1][:3] == ("done", len(seen) - 1, len(seen) - 1)
    assert seen[1][3] > 0


def test_a_stopped_run_goes_on(finished, lettered, tmp_path, monkeypatch):
    """A run cut off inside a batch and a line computes only what is missing, and ends with the same answers."""
    store, _ = finished
    whole = store.path.read_text().splitlines(keepends=True)
    whole = [*whole[1:], whole[0]]  # the first answer of a batch of two
    other = Store(tmp_path)
    other.folder.joinpath("run.json").write_text((store.folder / "run.json").read_text())
    other.path.write_text("".join(whole[:-1]) + whole[-1][:50])
    computed = []
    add = Store.add
    monkeypatch.setattr(
        Store, "add", lambda self, records: add(self, computed.extend(records := list(records)) or records)
    )
    runner.evaluate(lettered, settings.from_dict(RUN), tmp_path, model="tiny")
    wanted = [json.loads(line) for line in whole]
    (again,) = computed
    assert (again["key"], again["answer"]) == (wanted[-1]["key"], wanted[-1]["answer"])
    assert [record["key"] for record in other.records()] == [record["key"] for record in wanted]
    short = {"name": "niah-multikey", "lengths": [8], "examples": 1}
    with pytest.raises(BadValue, match="not even its question fits"):
        runner.evaluate(lettered, settings.from_dict({**RUN, "tasks": [short]}), tmp_path / "none", model="tiny")
    assert not (tmp_path / "none").exists(), "the corrected run may take its place"
    with pytest.raises(BadValue, match=r"other settings \(seed: 0 there, 1 now\)"):
        runner.evaluate(lettered, settings.from_dict({**RUN, "seed": 1}), tmp_path, model="tiny")
    task = {**RUN["tasks"][0], "max_new_tokens": 5}
    with pytest.raises(BadValue, match=r"\(tasks\[0\]\.max_new_tokens: 6 there, 5 now\)"):
        runner.evaluate(
            lettered, settings.from_dict({**RUN, "tasks": [task, *RUN["tasks"][1:]]}), tmp_path, model="tiny"
        )
    with pytest.raises(BadValue, match="other model"):
        runner.evaluate(lettered, settings.from_dict(RUN), tmp_path, model="large")


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    store = Store(tmp_path)
    store.path.write_text('{"key": "a", "kind": "answer"}\n{"key"\n{"key": "b", "kind": "answer"}\n')
    with pytest.raises(BadValue, match="line 2"):
        list(store.records())


@pytest.mark.long
def test_answers_are_those_of_generate(finished, lettered):
    """The recorded answer of an aware question is what generate gives for the whole prompt."""
    store, _ = finished
    run = settings.from_dict(RUN)
    example = next(e for e in runner.examples_of(run, lettered.tokenizer) if e.task == "lookup")
    prompt = np.concatenate(asking.asked(lettered.tokenizer, example, example.questions[0]))
    policy = jaxkv.policy("dapq-longflow", budget=64)
    out = jaxkv.generate(lettered, prompt, policy=policy, max_new_tokens=6)
    (record,) = [
        r for r in store.records()
        if r.get("example") == example.digest and r["question"] == 0 and r["mode"] == "aware"
        and r["policy"] == "dapq-longflow"
    ]  # fmt: skip
    real = out.tokens[0, : out.lengths[0]]
    real = real[~np.isin(real, lettered.config.stop_tokens)]
    assert record["answer"] == lettered.tokenizer.decode(real)


@pytest.mark.long
def test_the_report_stands_alone(finished, tmp_path):
    store, _ = finished
    page = report([store.folder], tmp_path).read_text()
    names = {path.name for path in tmp_path.iterdir()}
    pictures = {"quality.png", "tasks.png", "needle.png", "cost.png", "fidelity.png", "heads.png", "retention-0.png"}
    assert pictures | {"retention-0-text.png", "results.csv", "results.parquet", "table.md"} <= names
    assert page.count("data:image/png;base64,") >= len(pictures)
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", page)
    assert (tmp_path / "results.csv").read_text().count("\n") > len(list(store.records()))
    for name in pictures:
        shade = matplotlib.image.imread(tmp_path / name)
        assert shade.shape[0] > 200 and shade.std() > 0.01, name
    with pytest.raises(BadValue, match="jaxkv eval"):
        report([tmp_path / "nothing"])


def test_the_command_line(finished, lettered, tmp_path, monkeypatch, capsys):
    store, _ = finished
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: lettered)
    toml = tmp_path / "run.toml"
    toml.write_text('policies = ["full"]\n[fidelity]\ntexts = 1\nprompt = 32\ncontinuation = 2\n')
    assert cli.main(["eval", str(toml), "--out", str(tmp_path / "out"), "--no-report"]) == 0
    (record,) = Store(tmp_path / "out").records()
    assert record["policy"] == "full" and record["kl"] == [0.0] and "| full |" in capsys.readouterr().out
    args = ["eval", str(toml), "--out", str(tmp_path / "shared"), "--no-report", "--share-prefill"]
    assert cli.main(args) == 0 and Store(tmp_path / "shared").about()["settings"]["share_prefill"]
    assert cli.main(["report", str(store.folder), "--out", str(tmp_path / "page")]) == 0
    assert capsys.readouterr().out.strip().endswith("report.html")
    assert cli.main(["eval", "no-such-run"]) == 2
    assert "no-such-run" in capsys.readouterr().err
