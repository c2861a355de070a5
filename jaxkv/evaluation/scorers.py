"""Scores of an answer against the references, from 0 to 1."""

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxkv.checks import fits, shown
from jaxkv.errors import BadValue, first_line, unknown

CHINESE_MARKS = (  # LongBench's list
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"  # noqa: RUF001
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)


NUMBER = r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?"
NUMBERED = r"(?:Paragraph |段落)(\d+)"


def match_all(answer: str, references: Sequence[str]) -> float:
    """The share of the references that occur in the answer, in any case (RULER, arXiv 2404.06654: all but QA)."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def match_any(answer: str, references: Sequence[str]) -> float:
    """1 if any of the references occurs in the answer, in any case (RULER: QA)."""
    return float(any(reference.lower() in answer.lower() for reference in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """The best F1 of the words in common, without case, punctuation and articles (LongBench QA, after SQuAD)."""
    return max(_f1(_words(answer), _words(reference)) for reference in references)


def f1_chinese(answer: str, references: Sequence[str]) -> float:
    """The best F1 of the words in common, as jieba cuts them, without case and punctuation (LongBench)."""
    return max(_f1(_chinese_words(answer), _chinese_words(reference)) for reference in references)


def rouge(answer: str, references: Sequence[str]) -> float:
    """The best F of ROUGE-L, by the package `rouge`; 0 without words (LongBench's English summaries)."""
    scorer = _needed("rouge", "rouge").Rouge(metrics=["rouge-l"])
    return max(_rouge(scorer, answer, reference) for reference in references)


def rouge_chinese(answer: str, references: Sequence[str]) -> float:
    """ROUGE-L of the texts with a space between words, as jieba cuts them (LongBench: dureader, vcsum)."""
    return rouge(" ".join(_cut(answer)), [" ".join(_cut(reference)) for reference in references])


def classification(answer: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 / the number of classes that the answer's first line names, if the right one is among them (LongBench: trec,
    lsht). A class that is part of the right one does not count: as the release does it, which passes over the one that
    follows each it leaves out."""
    said, best = _first_line(answer), 0.0
    for reference in references:
        named = [name for name in classes if name in said]
        for name in named:  # the list shrinks under the loop, in the release too
            if name in reference and name != reference:
                named.remove(name)
        best = max(best, 1 / len(named) if reference in named else 0.0)
    return best


def retrieval(answer: str, references: Sequence[str]) -> float:
    """The share of the answer's numbers that are the reference's, "Paragraph 7" or "段落7" (LongBench)."""
    return max(_counted(answer, re.findall(NUMBERED, reference)[0]) for reference in references)


def count(answer: str, references: Sequence[str]) -> float:
    """The share of the answer's numbers that are the reference (LongBench: passage_count)."""
    return max(_counted(answer, reference) for reference in references)


def boxed(answer: str, references: Sequence[str]) -> float:
    r"""1 if the last \boxed{...} of the answer, else its last number, equals a reference (AIME, MATH)."""
    found = _boxes(answer) or re.findall(NUMBER, answer)
    return float(bool(found) and any(_same(found[-1], reference) for reference in references))


def _boxes(answer: str) -> list[str]:
    r"""What stands in each \boxed{...}, which may hold braces itself."""
    out = []
    for begin in (found.end() for found in re.finditer(r"\\boxed\{", answer)):
        deep, end = 1, begin
        while end < len(answer) and deep:
            deep, end = deep + {"{": 1, "}": -1}.get(answer[end], 0), end + 1
        out += [answer[begin : end - 1]] * (not deep)
    return out


def last_number(answer: str, references: Sequence[str]) -> float:
    """1 if the answer's last number, without commas between its digits, equals a reference (GSM8K). What follows the
    beginning of another question does not count."""
    numbers = re.findall(NUMBER, answer.partition("\nQuestion:")[0])
    return float(bool(numbers) and any(_same(numbers[-1], reference) for reference in references))


def code(answer: str, references: Sequence[str]) -> float:
    """The best similarity of the answer's first line of code to a reference, 1 - distance / length by insertions and
    deletions (LongBench, arXiv 2308.14508, lcc and repobench-p: `fuzz.ratio` of the first line that is no comment and
    no fence, a whole percentage). Raises `BadValue` where rapidfuzz is not installed.
    """
    fuzz = _needed("rapidfuzz.fuzz", "rapidfuzz")
    said = next(_code_lines(answer.lstrip("\n").split("\n")), "")
    return max(round(fuzz.ratio(said, reference)) / 100 for reference in references)


def _code_lines(lines: Sequence[str]) -> Iterator[str]:
    """The lines that are neither comment nor fence."""
    return (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))


def _first_line(answer: str) -> str:
    return answer.lstrip("\n").split("\n")[0]


def _needed(module: str, package: str) -> Any:
    """The module. Raises `BadValue` where its package is not installed."""
    import importlib

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jieba's own, of old forms that Python still reads
            return importlib.import_module(module)
    except ImportError:
        raise BadValue(f"this score needs {package}, which is not installed: pip install 'jaxkv[eval]'") from None


def _rouge(scorer: Any, answer: str, reference: str) -> float:
    """The package's F; 0 where it finds no words, or too many for Python's stack, as LongBench has it."""
    try:
        return scorer.get_scores(answer, reference)[0]["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0


def _cut(text: str) -> list[str]:
    jieba = _needed("jieba", "jieba")
    jieba.setLogLevel("ERROR")  # it tells how long its dictionary took
    return jieba.lcut(text)


def _same(one: str, other: str) -> bool:
    """Whether both are the same number, with or without commas between digits, or else the same text."""
    try:
        return float(one.replace(",", "")) == float(other.replace(",", ""))
    except ValueError:
        return one.strip() == other.strip()


def _counted(answer: str, right: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def _words(text: str) -> list[str]:
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _chinese_words(text: str) -> list[str]:
    marks = set(string.punctuation + CHINESE_MARKS)
    words = ("".join(letter for letter in word.lower() if letter not in marks) for word in _cut(text))
    return [bare for word in words if (bare := "".join(word.split()))]


def _f1(said: list[str], wanted: list[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


SCORERS: dict[str, Callable[..., float]] = {
    "all": match_all,
    "any": match_any,
    "f1": f1,
    "f1-line": lambda answer, references: f1(_first_line(answer), references),
    "f1-chinese": f1_chinese,
    "rouge": rouge,
    "rouge-line": lambda answer, references: rouge(_first_line(answer), references),
    "rouge-chinese": rouge_chinese,
    "classification": classification,
    "retrieval": retrieval,
    "count": count,
    "boxed": boxed,
    "last-number": last_number,
    "code": code,
}
CHOOSING = ("classification",)  # of classes
SETTLED: dict[str, Callable[[str], bool]] = {  # whether an answer's score stays, whatever follows
    "f1-line": lambda answer: "\n" in answer.lstrip("\n"),
    "rouge-line": lambda answer: "\n" in answer.lstrip("\n"),
    "classification": lambda answer: "\n" in answer.lstrip("\n"),
    "code": lambda answer: any(True for _ in _code_lines(answer.lstrip("\n").split("\n")[:-1])),
    "last-number": lambda answer: "\nQuestion:" in answer,
}


def score(name: str, answer: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The named score. Raises `UnknownName` for one that there is not, `BadValue` without references or `classes` where
    it needs them, and for a scorer of one's own that fails or gives no number from 0 to 1."""
    if name not in SCORERS:
        raise unknown("scorer", name, SCORERS)
    if not references:
        raise BadValue("no reference answers to score against: expected at least one")
    if name in CHOOSING and not classes:
        raise BadValue(f"the score {name!r} needs all classes: expected a field all_classes in the data")
    try:
        found = SCORERS[name](answer, references, *((classes,) if name in CHOOSING else ()))
    except BadValue:
        raise
    except Exception as error:  # of a scorer of one's own
        raise BadValue(
            f"the scorer {name!r} failed on the answer {shown(answer)} ({type(error).__name__}: {first_line(error)}): "
            "expected a function of the answer and a list of references that gives a number from 0 to 1"
        ) from error
    if not (fits(found, float | bool) and 0 <= found <= 1):
        given = shown(found.item() if isinstance(found, np.generic) else found)
        raise BadValue(
            f"the scorer {name!r} gave {given} for the answer {shown(answer)}: expected a number from 0 to 1, also for "
            "an answer that is wrong"
        )
    return float(found)


def check_references(name: str, references: Sequence[str]) -> None:
    """Raises `BadValue` for a reference that any answer would meet, or that the named score cannot read."""
    for reference in references:
        if not reference.strip():
            raise BadValue(f"the answer {reference!r}: every answer would be right; expected words or a number")
        if name == "retrieval" and not re.search(NUMBERED, reference):
            raise BadValue(f"the answer {reference!r} for the score 'retrieval': expected 'Paragraph 7' or '段落7'")


def settled(name: str, answer: str) -> bool:
    """Whether the named score of an answer that begins like this is the same, whatever follows."""
    return name in SETTLED and SETTLED[name](answer)
