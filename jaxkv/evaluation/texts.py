"""The words that tasks are made of: repeated noise, the prose that jaxkv carries, and lists of plain words."""

import functools
import random
import re
from collections.abc import Sequence
from importlib.resources import files

from jaxkv.errors import unknown

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HAYSTACKS = ("noise", "prose")

COLOURS = (
    "amber",
    "ashen",
    "azure",
    "bronze",
    "cobalt",
    "copper",
    "coral",
    "crimson",
    "ebony",
    "emerald",
    "golden",
    "hazel",
    "indigo",
    "ivory",
    "jade",
    "lilac",
    "maroon",
    "olive",
    "pearl",
    "purple",
    "ruby",
    "russet",
    "saffron",
    "scarlet",
    "silver",
    "tawny",
    "teal",
    "umber",
    "violet",
    "walnut",
)
THINGS = (
    "anchor",
    "basket",
    "beacon",
    "bridge",
    "candle",
    "cellar",
    "chimney",
    "compass",
    "cradle",
    "curtain",
    "engine",
    "feather",
    "fiddle",
    "garden",
    "hammer",
    "harbour",
    "kettle",
    "ladder",
    "lantern",
    "market",
    "mirror",
    "needle",
    "orchard",
    "paddle",
    "pillow",
    "ribbon",
    "saddle",
    "teapot",
    "tunnel",
    "window",
)


@functools.cache
def prose() -> str:
    """The text of data/prose.txt, 14 paragraphs written for jaxkv (same licence)."""
    return (files("jaxkv.evaluation") / "data" / "prose.txt").read_text(encoding="utf-8")


@functools.cache
def calibration() -> str:
    """The text of data/calibration.txt, written for jaxkv as well: what is measured on a model is measured on this, and
    no evaluation reads it."""
    return (files("jaxkv.evaluation") / "data" / "calibration.txt").read_text(encoding="utf-8")


def paragraphs() -> list[str]:
    """The paragraphs of the prose."""
    return [part.strip() for part in prose().split("\n\n") if part.strip()]


def sentences(haystack: str) -> list[str]:
    """The sentences of a haystack ("noise" or "prose"), in order. Raises `UnknownName` for any other name."""
    if haystack not in HAYSTACKS:
        raise unknown("haystack", haystack, HAYSTACKS)
    text = NOISE if haystack == "noise" else " ".join(prose().split())
    return re.findall(r"[^.!?]+[.!?]+", text)


def stream(haystack: str, words: int, start: int) -> list[str]:
    """Sentences of the haystack from number `start` on, over and over, the last one cut at `words` words in all."""
    stock, out = [sentence.split() for sentence in sentences(haystack)], []
    while words > 0:
        sentence = stock[start % len(stock)][:words]
        out.append(" ".join(sentence))
        words -= len(sentence)
        start += 1
    return out


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """The distinct lower-case words of at least 4 letters in the prose, sorted."""
    return tuple(sorted({word for word in re.findall(r"[a-z]+", prose()) if len(word) >= 4}))


def hide(haystack: str, words: int, start: int, needles: Sequence[tuple[float, str]]) -> str:
    """`words` words of the haystack with each (depth, text) put between two sentences at its share of the text."""
    text = stream(haystack, words, start)
    places = [(round(depth * len(text)), order, needle) for order, (depth, needle) in enumerate(needles)]
    for at, _, needle in sorted(places, reverse=True):
        text.insert(at, needle)
    return " ".join(text)


def names(rng: random.Random, count: int) -> list[str]:
    """`count` different names of two words, such as "amber-anchor"."""
    pairs = [f"{colour}-{thing}" for colour in COLOURS for thing in THINGS]
    return rng.sample(pairs, count)


def numbers(rng: random.Random, count: int, digits: int) -> list[str]:
    """`count` different numbers of so many digits."""
    low = 10 ** (digits - 1)
    return [str(number) for number in rng.sample(range(low, 10 * low), count)]


def spread(depth: float, count: int) -> list[float]:
    """`count` depths, `depth` first and the others evenly after it, round the text's end to its beginning."""
    return [depth, *(round((depth + turn / count) % 1.0, 3) for turn in range(1, count))]
