"""Published data sets: LongBench's prompts and scores, GSM8K's number, RULER's tasks, from files as users have them."""

import json
import random
import zipfile
from pathlib import Path

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from letters import Letters

from jaxkv.errors import BadValue, UnknownName
from jaxkv.evaluation import asking, gsm8k, longbench, published, ruler, runner, scorers, settings
from jaxkv.evaluation.example import Example

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "longbench.json").read_text(encoding="utf-8"))
WITHOUT_FILES = [
    task for task in ruler.NAMES if task not in ruler.QUESTIONS and ruler.NEEDLES.get(task, "x")[0] != "essay"
]


def words(example: Example) -> int:
    """A size that needs no tokenizer."""
    question = example.questions[0]
    return len(f"{example.context} {question.text} {question.prefix}".split())


@pytest.mark.parametrize("task", sorted({case["task"] for case in GOLDEN["cases"]}))
def test_scores_are_those_of_the_release(task):
    cases = [case for case in GOLDEN["cases"] if case["task"] == task]
    for case in cases:
        classes = GOLDEN["classes"]
        mine = scorers.score(longbench.tasks()[task]["scorer"], case["prediction"], case["references"], classes)
        assert mine == pytest.approx(case["score"], abs=1e-9), case
    assert len(cases) == 40


@pytest.mark.parametrize("name", sorted(scorers.SETTLED))
def test_a_settled_score_stays(name):
    """Whatever follows an answer that is said to be settled, its score is the same."""
    rng = random.Random(1)
    pieces = [
        "x = 1",
        "# no",
        "\n",
        "\n\n",
        "`",
        "The answer is 12",
        " ",
        "Question: 7",
        "Date",
        "return y // 2",
        "City",
    ]
    seen = 0
    for _ in range(600):
        answer = "".join(rng.choices(pieces, k=rng.randint(1, 6)))
        if scorers.settled(name, answer):
            seen += 1
            more = answer + "".join(rng.choices(pieces, k=3))
            both = [scorers.score(name, text, ["x = 1", "12", "Date"], ["Date", "City"]) for text in (answer, more)]
            assert both[0] == both[1], (answer, more)
    assert seen > 10


def test_longbench_has_its_own_prompts(tmp_path):
    assert len(longbench.tasks()) == 21
    row = {"input": "Who?", "context": "A {text} of braces.", "answers": ["x"], "all_classes": None, "length": 3}
    (tmp_path / "longbench").mkdir()
    (tmp_path / "longbench" / "repobench-p.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "trec.jsonl").write_text(json.dumps({"prompt": "P {x}", "answers": ["a"], "all_classes": ["a", "b"]}))
    (example,) = published.read("longbench/repobench-p", words, folder=str(tmp_path))
    assert example.context == "Please complete the code given below. \nA {text} of braces.Who?Next line of code:\n"
    assert (example.chat, example.max_new_tokens, example.scorer) == (False, 64, "code")
    (example,) = published.read("longbench/trec", words, folder=str(tmp_path))
    assert example.context == "P {x}" and example.questions[0].classes == ("a", "b") and not example.chat
    plain = {task for task, facts in longbench.tasks().items() if not facts.get("chat", True)}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


def test_a_whole_prompt_in_chat_has_no_empty_line_behind(tmp_path):
    (tmp_path / "qasper.jsonl").write_text(json.dumps({"prompt": "Why?", "answers": ["a"]}))
    (example,) = published.read("longbench/qasper", words, folder=str(tmp_path))
    context, rest = asking.asked(Letters(), example, example.questions[0])
    assert Letters().decode([*context, *rest]) == "<user>Why?<a>"


@pytest.mark.parametrize(
    "row", [[1], {"prompt": 3, "answers": ["a"]}, {"prompt": "x", "answers": []}, {"context": "x", "answers": ["a"]}]
)
def test_broken_rows_are_named(tmp_path, row):
    (tmp_path / "lcc.jsonl").write_text(json.dumps(row))
    with pytest.raises(BadValue, match=r"lcc\.jsonl, line 1"):
        published.read("longbench/lcc", words, folder=str(tmp_path))
    with pytest.raises(BadValue, match=r"no trec\.jsonl"):
        published.read("longbench/trec", words, folder=str(tmp_path))
    with pytest.raises(BadValue, match=r"no trec\.jsonl"):
        published.read("longbench/trec", words, folder=str(tmp_path / "other"))


def test_gsm8k(tmp_path):
    problem = lambda n: {"question": f"How many is {n}?", "answer": f"It is <<{n}={n}>>{n}.\n#### {n},000"}  # noqa: E731
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps(problem(n)) for n in range(3)))
    chat = published.read("gsm8k", words, folder=str(tmp_path), limit=2)
    assert [each.questions[0].answers for each in chat] == [("0000",), ("1000",)] and chat[0].chat
    with pytest.raises(BadValue, match="train"):
        gsm8k.read("gsm8k-8-shot", tmp_path)
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(problem(n)) for n in range(9)))
    shot = published.read("gsm8k-8-shot", words, folder=str(tmp_path))[1]
    assert (
        not shot.chat and shot.context.count("Question: ") == 9 and shot.context.endswith("Question: How many is 1?\n")
    )
    assert shot.questions[0].text == "Answer:" and "#### 7,000\n\nQuestion" in shot.context
    for answer, right in (
        ("so it is $1,000.", 1), ("1000", 1), ("1000 or 5", 0), ("#### 1000.00", 1), ("none", 0), ("-1000", 0),
        ("5-1000", 1), ("1,000\n\nQuestion: How many is 7?", 1),
    ):  # fmt: skip
        assert scorers.score("last-number", answer, shot.questions[0].answers) == right, answer


@pytest.mark.parametrize("task", WITHOUT_FILES)
def test_ruler_fills_the_length(task):
    """Prompt and answer are at most the length, and hardly less; the answer stands in the prompt; a seed is a seed."""
    length = 4096 if task == "cwe" else 1200
    one, two = ruler.make(task, words, length=length, examples=2)
    again = ruler.make(task, words, length=length, examples=2)
    assert (one, two) == tuple(again) and one.context != two.context
    for example in (one, two):
        assert length - 130 <= words(example) + example.max_new_tokens <= length
        text = f"{example.context} {example.questions[0].text}"
        assert all(answer in example.context for answer in example.questions[0].answers)
        assert "{" not in text + example.questions[0].prefix and example.task == f"ruler/{task}"
    assert len(one.questions[0].answers) == {"vt": 5, "cwe": 10, "fwe": 3}.get(task, 1)


def test_rulers_words():
    (one,) = ruler.make("niah_single_1", words, length=600)
    key = one.questions[0].prefix.split(" for ")[1].split(" mentioned")[0]
    value = one.questions[0].answers[0]
    assert f"One of the special magic numbers for {key} is: {value}." in one.context
    assert one.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it."
    )
    assert one.questions[0].text == f"\nWhat is the special magic number for {key} mentioned in the provided text?"
    assert one.questions[0].prefix == f" The special magic number for {key} mentioned in the provided text is"
    (one,) = ruler.make("cwe", words, length=4096)
    said = one.context.rpartition("answer")[2].split("\n")[-1].split()[1::2]
    assert {said.count(word) for word in one.questions[0].answers} == {30}
    assert {said.count(word) for word in set(said) - set(one.questions[0].answers)} == {3}


def test_sets_come_from_the_hub_without_a_folder(tmp_path, monkeypatch):
    """LongBench's zip and GSM8K's Parquet, as their publishers keep them; where they can't be had, what to do."""
    row = {"input": "", "context": "x = 1\n", "answers": ["y"], "all_classes": None}
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/lcc.jsonl", json.dumps(row) + "\n")
    problems = [{"question": f"Q{n}", "answer": f"#### {n}"} for n in range(9)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(problems), tmp_path / "problems")
    asked = []

    def download(repository, file, repo_type):
        asked.append((repository, file, repo_type))
        return str(tmp_path / ("data.zip" if file == "data.zip" else "problems"))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    (example,) = published.read("longbench/lcc", words)
    assert example.context == "Please complete the code given below. \nx = 1\nNext line of code:\n"
    shots = published.read("gsm8k-8-shot", words, limit=3)
    assert len(shots) == 3 and shots[2].questions[0].answers == ("2",)
    assert asked == [
        ("THUDM/LongBench", "data.zip", "dataset"),
        ("openai/gsm8k", "main/train-00000-of-00001.parquet", "dataset"),
        ("openai/gsm8k", "main/test-00000-of-00001.parquet", "dataset"),
    ]

    def unreachable(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(BadValue, match=r"no network.*--data"):
        published.read("gsm8k", words)


def test_ruler_says_which_files_it_needs(tmp_path):
    for task in ("niah_single_2", "qa_1", "qa_2"):
        with pytest.raises(BadValue, match=r"\.json is not in"):
            published.read(f"ruler/{task}", words, folder=str(tmp_path), lengths=(600,))
    (prose,) = published.read("ruler/niah_multivalue", words, lengths=(600,), haystacks=("prose",))
    assert prose.haystack == "prose" and len(prose.questions[0].answers) == 4
    (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": "It rains. " * 50}))
    (essay,) = published.read("ruler/niah_multiquery", words, folder=str(tmp_path), lengths=(600,))
    assert essay.haystack == "essay" and essay.context.count("It rains.") > 100
    squad = {"data": [{"paragraphs": [
        {"context": f"Text {n}.", "qas": [{"question": "Q?", "is_impossible": n == 0, "answers": [{"text": f"A{n}"}]}]}
        for n in range(6)
    ]}]}  # fmt: skip
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    one, two = published.read("ruler/qa_1", words, folder=str(tmp_path), lengths=(120,), examples=2)
    assert one.questions[0].answers == ("A1",) and "Text 1." in one.context and two.questions[0].answers == ("A2",)
    hotpot = [{"question": f"Q{n}", "answer": f"A{n}", "context": [[f"T{n}", ["One. ", "Two."]]]} for n in range(5)]
    (tmp_path / "hotpotqa.json").write_text(json.dumps(hotpot))
    (one,) = published.read("ruler/qa_2", words, folder=str(tmp_path), lengths=(120,))
    assert "T0\nOne. Two." in one.context and one.scorer == "any"


def test_a_run_of_some_tasks(tmp_path):
    (tmp_path / "lcc.jsonl").write_text(json.dumps({"prompt": "x" * 50, "answers": ["y"]}))
    run = settings.changed(settings.load("longbench"), {"data": str(tmp_path)}, ["lcc"], {"longest": 20})
    assert [task.name for task in run.tasks] == ["longbench/lcc"]
    (example,) = runner.examples_of(run, Letters())
    assert example.context == "x" * 20
    with pytest.raises(UnknownName, match="task of this run"):
        settings.changed(run, {}, ["lccc"])
