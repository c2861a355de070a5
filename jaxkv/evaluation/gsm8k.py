"""GSM8K (arXiv 2110.14168): school problems in words, whose answer is the last number.

"gsm8k" asks in the model's chat format; "gsm8k-8-shot" puts the first 8 training problems with their solutions in
front, without a chat format, in the words of lm-evaluation-harness.
"""

from pathlib import Path

from jaxkv.checks import fits, shown
from jaxkv.errors import BadValue
from jaxkv.evaluation.example import Example, Question
from jaxkv.evaluation.lines import Row, file_in, from_hub, rows

SHOTS = {"gsm8k": 0, "gsm8k-8-shot": 8}
TOKENS = {"gsm8k": 400, "gsm8k-8-shot": 256}
HUB = "openai/gsm8k"
ASK = "Solve this problem step by step. Write the answer, a number, at the end."  # ours


def read(task: str, folder: Path | None = None, limit: int | None = None) -> list[Example]:
    """The problems of the test set: from `test*.jsonl` (and `train*.jsonl`) in the folder or its `gsm8k`, or the hub.

    The reference is the number behind "####", without commas. Raises `BadValue` for missing files and broken rows.
    """
    shots = [_problem(row) for row in _rows(folder, "train", SHOTS[task])] if SHOTS[task] else []
    if len(shots) < SHOTS[task]:
        raise BadValue(f"{len(shots)} training problems in {folder}: {task} needs {SHOTS[task]}")
    before = "".join(f"Question: {question}\nAnswer: {solution}\n\n" for question, solution in shots)
    out = []
    for index, row in enumerate(_rows(folder, "test", limit)):
        question, solution = _problem(row)
        number = solution.rpartition("####")[2].strip().replace(",", "")
        if shots:
            asked = (before + f"Question: {question}\n", Question("Answer:", (number,)))
        else:
            asked = (question, Question(ASK, (number,)))
        out.append(
            Example(task, asked[0], (asked[1],), "last-number", TOKENS[task], chat=not shots, index=index)
        )  # fmt: skip
    return out


def _rows(folder: Path | None, part: str, limit: int | None) -> list[Row]:
    if folder is None:
        return from_hub(HUB, f"main/{part}-00000-of-00001.parquet", limit=limit)
    path = file_in(folder, f"{part}*.jsonl", f"gsm8k/{part}*.jsonl")
    if path is None:
        raise BadValue(f"{folder} has no {part}*.jsonl: expected GSM8K's files, one problem per line")
    return list(rows(path, limit))


def _problem(row: Row) -> tuple[str, str]:
    """Question and solution."""
    where, said = row
    named = said if isinstance(said, dict) else {}
    question, answer = named.get("question"), named.get("answer")
    if not fits(question, str) or not fits(answer, str) or "####" not in str(answer):
        raise BadValue(f"{where}: {shown(said)}; expected question and answer, with #### before its number")
    return str(question), str(answer)
