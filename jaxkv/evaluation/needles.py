"""Tasks with needles in a haystack: RULER's four kinds, its variable tracking, and the passkey.

Every function gives `build(n)`: the example with n words of haystack, all else the same. The wording is ours.
"""

import itertools
import random
import string
from collections.abc import Callable

from jaxkv.evaluation import texts
from jaxkv.evaluation.example import Example, Question

Build = Callable[[int], Example]


def needles(task: str, rng: random.Random, haystack: str, depth: float, keys: int, values: int, asked: int) -> Build:
    """Sentences "The secret number of the KEY is VALUE.": `keys` keys with `values` numbers each, `asked` keys asked.

    Source: RULER (arXiv 2404.06654, section 3): single (1, 1, 1), multi-key (4, 1, 1), multi-value (1, 4, 1) and
    multi-query (4, 1, 4), 7 digits. The first key's first number lies at `depth`, the others anywhere.
    """
    names = texts.names(rng, keys)
    numbers = texts.numbers(rng, keys * values, digits=7)
    start = rng.randrange(1000)
    hidden, told = [], {name: numbers[row * values : (row + 1) * values] for row, name in enumerate(names)}
    for name in names:
        for number in told[name]:
            at = depth if not hidden else rng.random()
            hidden.append((at, f"The secret number of the {name} is {number}."))
    wanted = names[:asked]
    list_of = " and ".join([", ".join(f"the {name}" for name in wanted[:-1])] * (asked > 1) + [f"the {wanted[-1]}"])
    many = asked * values > 1
    question = Question(
        text=f"What {'are all the secret numbers' if many else 'is the secret number'} of {list_of} in the text?",
        answers=tuple(number for name in wanted for number in told[name]),
        prefix=f"The secret number{'s' if many else ''} of {list_of} in the text {'are' if many else 'is'}",
        depth=depth if not many else None,
    )
    opening = "Some secret numbers are hidden in the following text. Memorize them: you will be asked about them."

    def build(words: int) -> Example:
        text = texts.hide(haystack, words, start, hidden)
        return Example(task, f"{opening}\n\n{text}", (question,), "all", 64 if many else 24)

    return build


def passkey(task: str, rng: random.Random, haystack: str, depth: float) -> Build:
    """One key of 5 digits, said twice. Source: Mohtashami and Jaggi, Landmark Attention (arXiv 2305.16300)."""
    key = texts.numbers(rng, 1, digits=5)[0]
    start = rng.randrange(1000) if haystack == "prose" else 0
    opening = "There is an important pass key hidden inside a lot of irrelevant text. Find it and memorize it."
    question = Question("What is the pass key? Answer with the number only.", (key,), depth=depth)

    def build(words: int) -> Example:
        text = texts.hide(
            haystack, words, start, [(depth, f"The pass key is {key}. Remember it. {key} is the pass key.")]
        )
        return Example(task, f"{opening}\n\n{text}", (question,), "all", 24)

    return build


def variable_tracking(task: str, rng: random.Random, haystack: str, hops: int = 4) -> Build:
    """A chain VAR A = number, VAR B = VAR A, ...: which variables hold the number? `hops` + 1 answers.

    Source: RULER (arXiv 2404.06654), variable tracking with one chain of 4 hops.
    """
    names: list[str] = []
    while len(names) < hops + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    number = texts.numbers(rng, 1, digits=5)[0]
    lines = [f"VAR {names[0]} = {number}."]
    lines += [f"VAR {new} = VAR {old}." for old, new in itertools.pairwise(names)]
    depths = sorted(rng.random() for _ in lines)
    start = rng.randrange(1000)
    opening = "The following text hides a chain of variable assignments. Memorize it and track which value each has."
    question = Question(
        f"Which variables have the value {number}? List all {hops + 1} of them.",
        tuple(names),
        prefix=f"The variables with the value {number} are",
    )

    def build(words: int) -> Example:
        text = texts.hide(haystack, words, start, list(zip(depths, lines, strict=True)))
        return Example(task, f"{opening}\n\n{text}", (question,), "all", 32)

    return build
