"""LongBench (arXiv 2308.14508): 21 tasks on long texts, with its own prompts and scores.

Reads the publisher's files (context, input, answers, all_classes) and those of MiniLongBench (arXiv 2505.19959), which
are LongBench's own samples with the whole prompt.
"""

import functools
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from jaxkv.checks import fits, shown
from jaxkv.errors import BadValue
from jaxkv.evaluation.example import Example, Question
from jaxkv.evaluation.lines import file_in, from_hub, rows

HUB = ("THUDM/LongBench", "data.zip")


@functools.cache
def tasks() -> dict[str, dict[str, Any]]:
    """Prompt, score, tokens of an answer and use of the chat format of every task."""
    return tomllib.loads((files("jaxkv.evaluation") / "data" / "longbench.toml").read_text(encoding="utf-8"))


def read(task: str, folder: Path | None = None, limit: int | None = None) -> list[Example]:
    """The examples of a task: from `TASK.jsonl` in the folder, or in its `longbench` or `data`, or from the hub.

    The whole prompt is the context, as LongBench has it, so that cutting it in the middle cuts where LongBench does.
    Raises `BadValue` for a folder without the file, and for rows that lack something.
    """
    facts = tasks()[task]
    if folder is None:
        found = from_hub(*HUB, f"data/{task}.jsonl", limit)
    else:
        path = file_in(folder, f"{task}.jsonl", f"longbench/{task}.jsonl", f"data/{task}.jsonl")
        if path is None:
            raise BadValue(f"{folder} has no {task}.jsonl: expected LongBench's files, or MiniLongBench's")
        found = list(rows(path, limit))
    out = []
    for index, (where, row) in enumerate(found):
        named = row if isinstance(row, dict) else {}
        answers, classes = named.get("answers"), named.get("all_classes") or []
        texts = [named.get("prompt")] if "prompt" in named else [named.get("context"), named.get("input")]
        if not all(fits(text, str) for text in texts) or not _texts(answers) or not answers or not _texts(classes):
            raise BadValue(
                f"{where}: {shown(row)}; expected prompt, or context and input, and lists of answers and all_classes"
            )
        prompt = named.get("prompt") or facts["prompt"].format(context=named["context"], input=named["input"])
        question = Question("", tuple(answers), classes=tuple(classes))
        out.append(
            Example(
                f"longbench/{task}", prompt, (question,), facts["scorer"], facts["max_new_tokens"],
                chat=facts.get("chat", True), index=index,
            )
        )  # fmt: skip
    return out


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(fits(each, str) for each in value)
