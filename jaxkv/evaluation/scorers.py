"""Scores of an answer against the references, from 0 to 1."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from jaxkv.errors import BadValue, unknown


def match_all(answer: str, references: Sequence[str]) -> float:
    """The share of the references that occur in the answer, in any case (RULER, arXiv 2404.06654: all but QA)."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def match_any(answer: str, references: Sequence[str]) -> float:
    """1 if any of the references occurs in the answer, in any case (RULER: QA)."""
    return float(any(reference.lower() in answer.lower() for reference in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """The best F1 of the words in common, without case, punctuation and articles (LongBench QA, after SQuAD)."""
    return max(_f1(_words(answer), _words(reference)) for reference in references)


def boxed(answer: str, references: Sequence[str]) -> float:
    r"""1 if the last \boxed{...} of the answer, else its last number, equals a reference (AIME, MATH)."""
    found = re.findall(r"\\boxed\{([^{}]*)\}", answer) or re.findall(r"-?\d+(?:\.\d+)?", answer)
    return float(bool(found) and any(_same(found[-1], reference) for reference in references))


def code(answer: str, references: Sequence[str]) -> float:
    """The best similarity of the answer's first line of code to a reference, 1 - distance / length by insertions and
    deletions (LongBench, arXiv 2308.14508, lcc and repobench-p: `fuzz.ratio` of the first line that is no comment and
    no fence). Raises `BadValue` where rapidfuzz is not installed.
    """
    try:
        from rapidfuzz import fuzz
    except ImportError:
        raise BadValue("the scorer 'code' needs rapidfuzz, which is not installed: pip install 'jaxkv[eval]'") from None
    lines = answer.lstrip("\n").split("\n")
    said = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return max(fuzz.ratio(said, reference) / 100 for reference in references)


def _same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one.strip() == other.strip()


def _words(text: str) -> list[str]:
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def _f1(said: list[str], wanted: list[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


SCORERS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "all": match_all,
    "any": match_any,
    "f1": f1,
    "boxed": boxed,
    "code": code,
}


def score(name: str, answer: str, references: Sequence[str]) -> float:
    """The named score. Raises `UnknownName` for one that there is not, `BadValue` without references."""
    if name not in SCORERS:
        raise unknown("scorer", name, SCORERS)
    if not references:
        raise BadValue("no reference answers to score against: expected at least one")
    return SCORERS[name](answer, references)
