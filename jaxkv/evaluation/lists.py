"""Tasks on long lists: RULER's common and frequent words, key-value lookup, and writing a list out again.

Every function gives `build(n)`: the example with n words or lines, all else the same. The wording is ours.
"""

import random
import string
from collections.abc import Callable

from jaxkv.evaluation import texts
from jaxkv.evaluation.example import Example, Question

Build = Callable[[int], Example]
LINES = 8192  # the most lines that a list can have


def common_words(task: str, rng: random.Random, common: int = 10) -> Build:
    """A numbered list, half of it `common` words that are each repeated, half words that are hardly: which are common?

    Source: RULER (arXiv 2404.06654): 10 words 30 times against 3 times. Ours: the counts grow with the length, in that
    ratio of 10 to 1.
    """
    stock = rng.sample(texts.vocabulary(), len(texts.vocabulary()))
    often, rare = stock[:common], stock[common:]
    seed = rng.random()
    question = Question(
        f"What are the {common} words that are most common in the list?",
        tuple(often),
        prefix=f"The {common} most common words are",
    )

    def build(count: int) -> Example:
        order = random.Random(seed)
        times = max(2, count // (2 * common))
        words = often * times
        words += [rare[at // max(1, times // 10) % len(rare)] for at in range(max(0, count - len(words)))]
        order.shuffle(words)
        text = " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
        opening = "Below is a numbered list of words. Some words occur much more often than others. Memorize those."
        return Example(task, f"{opening}\n\n{text}", (question,), "all", 64)

    return build


def frequent_words(task: str, rng: random.Random, asked: int = 3, alpha: float = 2.0) -> Build:
    """Made-up words drawn with probability ~ rank^-alpha: which 3 are most frequent? Source: RULER, alpha 2."""
    words: list[str] = []
    while len(words) < 60:
        word = "".join(rng.choices(string.ascii_lowercase, k=6))
        if word not in words:
            words.append(word)
    weights = [(rank + 1) ** -alpha for rank in range(len(words))]
    seed = rng.random()
    question = Question(
        f"What are the {asked} words that are most frequent in the coded text?",
        tuple(words[:asked]),
        prefix=f"The {asked} most frequent words are",
    )

    def build(count: int) -> Example:
        # The expected counts, so that the answer is right whatever the draw; then shuffled.
        share = [weight / sum(weights) * count for weight in weights]
        drawn = [word for word, times in zip(words, share, strict=True) for _ in range(round(times))]
        random.Random(seed).shuffle(drawn)
        opening = "Read the following coded text and keep track of how often each word occurs."
        return Example(task, f"{opening}\n\n{' '.join(drawn)}", (question,), "all", 32)

    return build


def lookup(task: str, rng: random.Random, depth: float, questions: int = 1) -> Build:
    """A JSON object of names and 5-digit numbers: what is the number of a name?

    Source: Lost in the Middle (arXiv 2307.03172), key-value retrieval; short names and numbers in place of UUIDs are
    ours. The first name asked stands at `depth`, further ones evenly over the rest.
    """
    codes = rng.sample(range(900 * 90), LINES)
    pairs = [f"{texts.COLOURS[code % 30]}-{texts.THINGS[code // 30 % 30]}-{code // 900 + 10}" for code in codes]
    values = rng.sample(range(10_000, 100_000), LINES)
    depths = texts.spread(depth, questions)

    def build(count: int) -> Example:
        count = min(max(count, questions), LINES)
        places: list[int] = []
        for at in depths:  # the nearest line that has not been asked for
            free = [place for place in range(count) if place not in places]
            places.append(min(free, key=lambda place, at=at: abs(place - at * (count - 1))))
        lines = ",\n".join(f'"{pairs[at]}": {values[at]}' for at in range(count))
        asked = tuple(
            Question(
                f'What is the value of "{pairs[at]}" in the JSON object?',
                (str(values[at]),),
                prefix=f'The value of "{pairs[at]}" is',
                depth=share,
            )
            for at, share in zip(places, depths, strict=True)
        )
        return Example(task, f"Below is a JSON object.\n\n{{{lines}}}", asked, "all", 24)

    return build


def recite(task: str, rng: random.Random, length: int) -> Build:
    """Write out all lines of a register again: the share of right lines. Its output is as long as its prompt.

    Ours, for LongFlow's setting (arXiv 2603.11504): the answer depends on early lines all along a long output.
    """
    goods = [f"{rng.choice(texts.COLOURS)} {rng.choice(texts.THINGS)}" for _ in range(LINES)]
    amounts = rng.sample(range(100, 1000), 900)

    def build(count: int) -> Example:
        lines = [f"{at + 1}. {amounts[at % 900]} {goods[at]}" for at in range(min(max(count, 1), LINES))]
        question = Question(
            "Write out the whole register again, line by line, without leaving anything out.",
            tuple(line.partition(". ")[2] for line in lines),
            prefix="Here is the whole register:\n\n1.",
        )
        return Example(task, "Below is a register.\n\n" + "\n".join(lines), (question,), "all", length)

    return build
