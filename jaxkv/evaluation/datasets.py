"""Data sets that the person has on disk: JSONL files in the form of RULER, LongBench, AIME, or ours."""

from pathlib import Path
from typing import Any

from jaxkv.checks import MOST, fits, shown
from jaxkv.errors import BadValue
from jaxkv.evaluation.example import Example, Question
from jaxkv.evaluation.lines import rows
from jaxkv.evaluation.scorers import check_references


def read(
    path: str | Path, *, scorer: str = "any", max_new_tokens: int = 64, limit: int | None = None, chat: bool = True
) -> list[Example]:
    """One example per line, at most `limit`; lines with the same context become one example with many questions.

    Fields, under the names of each format: `context` (RULER: `input`, the whole prompt; MiniLongBench: `prompt`, the
    same); `question`, `input` beside a context (LongBench) or `problem` (AIME); `answers`, `outputs` or `answer`; and,
    where given, `answer_prefix`, `max_new_tokens`, `all_classes`, and `task`, `dataset` or the file's name. Without
    `chat` prompts go to the model as they stand. Raises `BadValue` naming the file and line.
    """
    path = Path(path).expanduser()
    found: dict[tuple, list[Question]] = {}
    for where, row in rows(path, limit):
        name, context, question = _parts(row, where, path.stem)
        try:
            check_references(scorer, question.answers)
        except BadValue as error:
            raise BadValue(f"{where}: {error}") from None
        tokens = row.get("max_new_tokens", max_new_tokens)
        if not fits(tokens, int) or not 1 <= tokens <= MOST:
            raise BadValue(f"{where}: max_new_tokens is {shown(tokens)}; expected a whole number of at least 1")
        found.setdefault((name, context, tokens), []).append(question)
    if not found:
        raise BadValue(f"{path} holds no examples: expected one object per line, with context, question and answers")
    return [
        Example(name, context, tuple(questions), scorer, tokens, index=index, chat=chat)
        for index, ((name, context, tokens), questions) in enumerate(found.items())
    ]


def _parts(row: Any, where: str, stem: str) -> tuple[str, str, Question]:
    """Name, context and question of one line."""
    if not isinstance(row, dict):
        raise BadValue(f"{where}: a {type(row).__name__}; expected an object")
    answers = row.get("answers", row.get("outputs", row.get("answer")))
    if answers is None or answers == []:
        raise BadValue(f"{where}: no answers; expected a field answers, outputs or answer")
    answers = answers if isinstance(answers, list) else [answers]
    if not all(fits(answer, str | float) for answer in answers):
        raise BadValue(f"{where}: the answers are {shown(answers)}; expected text or numbers")
    context = row.get("context", row.get("prompt", row.get("input", "")))
    text = row.get("question", row.get("problem", row.get("input", "") if "context" in row else ""))
    prefix = row.get("answer_prefix", "")
    named = {"context": context, "question": text, "answer_prefix": prefix}
    named |= {name: row[name] for name in ("task", "dataset") if row.get(name) is not None}
    for name, value in named.items():
        if not fits(value, str):
            raise BadValue(f"{where}: {name} is {shown(value)}; expected text")
    if not context and not text:
        raise BadValue(
            f"{where}: neither context nor question; expected a field context, prompt, input, question or problem"
        )
    name = str(row.get("task") or row.get("dataset") or stem)
    classes = row.get("all_classes") or []
    if not isinstance(classes, list) or not all(fits(each, str) for each in classes):
        raise BadValue(f"{where}: all_classes is {shown(classes)}; expected a list of texts")
    return name, context, Question(text, tuple(map(str, answers)), prefix, classes=tuple(classes))
