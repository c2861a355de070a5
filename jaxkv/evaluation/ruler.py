"""RULER's thirteen tasks (arXiv 2404.06654), in its own words and sizes, at any length in tokens.

Needles in noise, in essays and among other needles; variable tracking and common words with one worked example in
front; frequent words; questions on documents. As in the release, prompt and answer together fill the length. Ours: the
draws of the random numbers, and sentences that end where a full stop is followed by a space (the release asks nltk).
Essays and questions are the publishers' files, under the names that RULER's scripts give them: `PaulGrahamEssays.json`,
`squad.json` (SQuAD 2.0, dev) and `hotpotqa.json` (dev, distractor).
"""

import dataclasses
import functools
import itertools
import json
import random
import re
import string
import tomllib
import uuid
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import zeta

from jaxkv.errors import BadValue, first_line
from jaxkv.evaluation import texts
from jaxkv.evaluation.example import Example, Question, fitted

Build = Callable[[int], Example]
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int).tolist()  # per cent
LONG = 4096  # from this length on words are repeated as often as the paper says
NEEDLES: dict[str, tuple[str, str, str, int, int, int]] = {  # haystack, kind of key, of value; keys, values, asked
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
QUESTIONS = {"qa_1": "squad", "qa_2": "hotpotqa"}
NAMES = (*NEEDLES, "vt", "cwe", "fwe", *QUESTIONS)


@functools.cache
def prompts() -> dict[str, dict[str, Any]]:
    """Prompt, beginning of the answer and tokens of an answer, by family of tasks."""
    return tomllib.loads((files("jaxkv.evaluation") / "data" / "ruler.toml").read_text(encoding="utf-8"))


def make(
    task: str,
    size: Callable[[Example], int],
    *,
    length: int,
    examples: int = 1,
    seed: int = 0,
    folder: Path | None = None,
    prose: bool = False,
    chat: bool = True,
) -> list[Example]:
    """`examples` examples of the task whose `size` in tokens, answer included, is just under the length.

    With `prose` needles lie in jaxkv's own prose instead of essays. Raises `BadValue` for a file that is not in the
    folder, and for a length that the task does not fit in.
    """
    out = []
    for index in range(examples):
        rng = random.Random(f"ruler/{task}/{seed}/{length}/{index}")
        made = _build(task, rng, length, index, size, folder, prose)
        told = {"task": f"ruler/{task}", "length": length, "seed": seed, "index": index, "chat": chat}
        build = functools.partial(_told, made, told)
        tokens = build(0).max_new_tokens
        found = fitted(build, size, length - tokens)
        if found is None:
            raise BadValue(f"length {length} of task 'ruler/{task}': not even its question fits; make it longer")
        out.append(found)
    return out


def _told(build: Build, told: dict[str, Any], count: int) -> Example:
    return dataclasses.replace(build(count), **told)


def _build(
    task: str, rng: random.Random, length: int, index: int, size: Callable[[Example], int], folder: Path | None,
    prose: bool,
) -> Build:  # fmt: skip
    if task in NEEDLES:
        return _needles(rng, *NEEDLES[task], *_essay(task, folder, prose))
    if task == "vt":
        return _variables(rng, size)
    if task == "cwe":
        return _common_words(rng, length)
    if task == "fwe":
        return _frequent_words(rng, length)
    return _documents(rng, index, *_questions(QUESTIONS[task], folder))


def _example(
    family: str, context: str, answers: list[str], before: str = "", one: bool = False, **told: Any
) -> Example:
    """Prompt and beginning of the answer, filled in; the question begins behind the context. `one`: of one thing."""
    facts = prompts()[family]
    prompt, prefix = facts["prompt"], facts["prefix"]
    if one:
        prompt, prefix = (
            text.replace("Some", "A").replace("are all", "is").replace("are", "is") for text in (prompt, prefix)
        )
    head, _, tail = prompt.partition("{context}")
    question = Question(tail.format(**told), tuple(answers), prefix.format(**told))
    scorer = "any" if family == "qa" else "all"
    return Example("", before + head.format(**told) + context, (question,), scorer, facts["tokens"])


def _needles(
    rng: random.Random, haystack: str, of_key: str, of_value: str, keys: int, values: int, asked: int, essay: list[str],
    name: str,
) -> Build:  # fmt: skip
    """Sentences "One of the special magic numbers for KEY is: VALUE." among essays, noise, or their like."""

    def drawn(kind: str, rng: random.Random) -> str:
        if kind == "numbers":
            return str(rng.randint(10**6, 10**7 - 1))
        if kind == "words":
            return f"{rng.choice(_words_of('adjectives'))}-{rng.choice(_words_of('nouns'))}"
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    def said(key: str, value: str) -> str:
        return f"One of the special magic {of_value} for {key} is: {value}."

    told = {key: [drawn(of_value, rng) for _ in range(values)] for key in [drawn(of_key, rng) for _ in range(keys)]}
    needles = [said(key, value) for key, some in told.items() for value in some]
    rng.shuffle(needles)
    chosen = rng.sample(list(told), asked)
    query = chosen[0] if asked == 1 else ", ".join(chosen[:-1]) + ", and " + chosen[-1]
    depths, others, places = sorted(rng.sample(DEPTHS, len(needles))), rng.random(), rng.random()
    one = asked * values == 1

    def build(count: int) -> Example:
        if haystack == "essay":
            words = (essay * (count // len(essay) + 1))[:count]
            parts = [part for part in re.split(r"(?<=[.!?])\s+", " ".join(words)) if part]
            at, between = [int(len(parts) * depth / 100) for depth in depths], " "
        else:
            more = random.Random(others)
            parts = [
                texts.NOISE if haystack == "noise" else said(drawn(of_key, more), drawn(of_value, more))
                for _ in range(max(count, len(needles)))
            ]
            at, between = sorted(random.Random(places).sample(range(len(parts)), len(needles))), "\n"
        for place, needle in zip(reversed(at), reversed(needles), strict=True):
            parts.insert(place, needle)
        answers = [value for key in chosen for value in told[key]]
        kind = of_value[:-1] if one else of_value
        example = _example("niah", between.join(parts), answers, one=one, kind=kind, query=query)
        return dataclasses.replace(example, haystack=name if haystack == "essay" else haystack)

    return build


def _variables(rng: random.Random, size: Callable[[Example], int], hops: int = 4) -> Build:
    """A chain "VAR B = VAR A" in noise, behind a worked example of at most 500 tokens with names of 3 letters."""

    def chain(letters: int) -> tuple[list[str], str]:
        names: list[str] = []
        while len(names) < hops + 1:
            name = "".join(rng.choices(string.ascii_uppercase, k=letters))
            names += [name] * (name not in names)
        return names, str(rng.randint(10_000, 99_998))

    def hidden(names: list[str], number: str, places: float, count: int, before: str = "") -> Example:
        lines = [f"VAR {names[0]} = {number}", *(f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names))]
        parts = [texts.NOISE] * max(count, len(lines))
        for turn, place in enumerate(sorted(random.Random(places).sample(range(len(parts)), len(lines)))):
            parts.insert(place + turn, lines[turn])
        context = "\n".join(parts).replace(". \n", ".\n")
        return _example("vt", context, names, before, query=number, count=hops + 1)

    shown, places = chain(3), rng.random()
    worked = fitted(lambda count: hidden(*shown, places, count), size, 500)
    if worked is None:
        raise BadValue(
            "task 'ruler/vt' shows an example of 500 tokens, and with this tokenizer it has more: leave vt out"
        )
    question = worked.questions[0]
    before = f"{worked.context}{question.text}{question.prefix} {' '.join(question.answers)}\n\n"
    asked, places = chain(5), rng.random()
    return lambda count: hidden(*asked, places, count, before)


def _common_words(rng: random.Random, length: int, common: int = 10) -> Build:
    """A numbered list, 10 words 30 times and others 3 times (6 and 1 below 4096 tokens), behind a worked example."""
    stock, seed = rng.sample(_all_words(), len(_all_words())), rng.random()

    def listed(words: list[str], often: int, rarely: int) -> str:
        told = words[:common] * often + words[common:] * rarely
        random.Random(seed).shuffle(told)
        return " ".join(f"{number}. {word}" for number, word in enumerate(told, 1))

    shown = rng.sample(stock, 40 if length >= LONG else 20)
    worked = _example("cwe", listed(shown, *((10, 3) if length >= LONG else (3, 1))), shown[:common])
    answer = " ".join(f"{number}. {word}" for number, word in enumerate(shown[:common], 1))
    before = f"{worked.context}{worked.questions[0].text}{worked.questions[0].prefix} {answer}\n"

    def build(count: int) -> Example:
        words = stock[: max(count, common)]
        return _example("cwe", listed(words, *((30, 3) if length >= LONG else (6, 1))), words[:common], before)

    return build


def _frequent_words(rng: random.Random, length: int, alpha: float = 2.0) -> Build:
    """Made-up words, n rank^-2 / zeta(2) times each of `length` / 50; the most frequent is dots, and does not count."""
    tokens = prompts()["fwe"]["tokens"]
    count = max((length - tokens) // 50, 4)
    stock: list[str] = []
    while len(stock) < count:
        word = "".join(rng.choices(string.ascii_lowercase, k=6))
        stock += [word] * (word not in stock)
    stock[0], seed = "...", rng.random()

    def build(words: int) -> Example:
        times = (words * np.arange(1.0, count + 1) ** -alpha / zeta(alpha)).astype(int)
        drawn = [word for word, often in zip(stock, times.tolist(), strict=True) for _ in range(often)]
        random.Random(seed).shuffle(drawn)
        return _example("fwe", " ".join(drawn), stock[1:4])

    return build


def _documents(rng: random.Random, index: int, asked: list[dict[str, Any]], stock: list[str]) -> Build:
    """The documents of one question among others, those of the same article first."""
    one = asked[index % len(asked)]
    own, near = one["documents"], one["near"]
    known = {*own, *near}
    far = rng.sample([at for at in range(len(stock)) if at not in known], len(stock) - len(known))
    others, seed = [*rng.sample(near, len(near)), *far], rng.random()

    def build(count: int) -> Example:
        chosen = [*own, *others[: max(count - len(own), 0)]]
        random.Random(seed).shuffle(chosen)
        told = "\n\n".join(f"Document {number}:\n{stock[at]}" for number, at in enumerate(chosen, 1))
        return _example("qa", told, one["answers"], query=one["question"])

    return build


def _essay(task: str, folder: Path | None, prose: bool) -> tuple[list[str], str]:
    """The words of the essays that the task hides its needles in, and what they are called."""
    if NEEDLES[task][0] != "essay":
        return [], ""
    if prose:
        return texts.prose().split(), "prose"
    said = "with haystacks = ['prose'] the needles lie in jaxkv's own prose instead, which is not RULER's text"
    return re.split(r"\s+", _file(folder, "PaulGrahamEssays.json", said)["text"]), "essay"


def _questions(name: str, folder: Path | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Questions that have an answer, each with the numbers of its documents and of those near; and all documents."""
    data = _file(folder, f"{name}.json", "see scripts/data/synthetic/json in NVIDIA/RULER for where it is had")
    found: list[tuple[str, list[str], list[str], list[str]]] = []
    if name == "squad":
        for article in data["data"]:
            around = [part["context"] for part in article["paragraphs"]]
            found += [
                (ask["question"], [each["text"] for each in ask["answers"]], [part["context"]], around)
                for part in article["paragraphs"]
                for ask in part["qas"]
                if not ask["is_impossible"]
            ]
    else:
        for ask in data:
            own = [f"{title}\n{''.join(lines)}" for title, lines in ask["context"]]
            found.append((ask["question"], [ask["answer"]], own, []))
    stock = sorted({text for _, _, own, around in found for text in (*own, *around)})
    number = {text: at for at, text in enumerate(stock)}
    asked = [
        {
            "question": question,
            "answers": answers,
            "documents": [number[text] for text in own],
            "near": [number[text] for text in around if text not in own],
        }
        for question, answers, own, around in found
    ]
    return asked, stock


def _file(folder: Path | None, name: str, said: str) -> Any:
    """What a JSON file of the folder holds."""
    path = None if folder is None else next((p for p in (folder / name, folder / "ruler" / name) if p.is_file()), None)
    if path is None:
        raise BadValue(f"RULER's {name} is not in {folder or 'any folder (--data)'}: put it there; {said}")
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise BadValue(f"{path}: not JSON ({first_line(error)})") from None


@functools.cache
def _words_of(kind: str) -> list[str]:
    """The package's list of "nouns", "adjectives" or "verbs"."""
    try:
        import wonderwords
    except ImportError:
        raise BadValue("RULER's words are wonderwords's, which is not installed: pip install 'jaxkv[eval]'") from None
    return sorted(set(wonderwords.RandomWord().parts_of_speech[kind]))


@functools.cache
def _all_words() -> list[str]:
    return sorted({*_words_of("nouns"), *_words_of("adjectives"), *_words_of("verbs")})
