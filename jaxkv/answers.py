"""Facts hidden in prose, and what a model answers when asked for them: by that `calibrate` tells what its heads do."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv.evaluation.asking import ids
from jaxkv.generate import generate
from jaxkv.policies.catalogue import policy
from jaxkv.sampling import generator
from jaxkv.store.entries import EMPTY
from jaxkv.weights.params import Params

SAID = 16  # tokens of an answer, at most
FACTS = (
    ("The secret word of the old lighthouse is {}.", "What is the secret word of the old lighthouse?"),
    ("The blue door opens with the code {}.", "Which code opens the blue door?"),
    ("The captain's favourite number is {}.", "What is the captain's favourite number?"),
    ("The parcel for the baker has the label {}.", "Which label does the parcel for the baker have?"),
)
COMPARED = (  # a fact of either person, what they are compared by, and which of the two is asked for
    ("{name}'s code is {}.", "{name} is {size} years old.", "What is the code of the older one of {one} and {two}?"),
    ("{name}'s house has number {}.", "{name} has {size} sheep.", 
     "{one} or {two}: which number has the house of the one with more sheep?"),
    ("{name}'s boat has number {}.", "{name} won {size} races.", 
     "{one} or {two}: which number has the boat of the one who won more races?"),
    ("{name}'s parcel has label {}.", "{name} walked {size} miles.", 
     "{one} or {two}: which label has the parcel of the one who walked further?"),
)  # fmt: skip
NAMES = (("Anna", "Boris"), ("Clara", "David"), ("Emma", "Frank"), ("Greta", "Henry"))


class Answered(NamedTuple):
    """A prompt and its answer, of T tokens together: which keys say what is asked for, which queries have `told` a
    token of the answer, and how often the token that a query tells `stands` among those keys."""

    tokens: Int[np.ndarray, "T"]
    inside: Bool[np.ndarray, "T"]
    told: Bool[np.ndarray, "T"]
    stands: Float[np.ndarray, "T"]


class Hidden(NamedTuple):
    """A prompt that hides a fact: its tokens, which of them say it, and the answer, with and without a space before."""

    tokens: Int[np.ndarray, "P"]
    inside: Bool[np.ndarray, "P"]
    answer: tuple[list[int], list[int]]


def answered(params: Params, prompts: list[Hidden], length: int) -> list[Answered]:
    """What the model answers to prompts that hide a fact, each `length` tokens with its answer: those answers that are
    right. Greedy, up to the end of a line. Where none is right, the right answers are given instead."""
    plain = dataclasses.replace(params, tokenizer=None)  # tokens in, tokens out
    said = generate(plain, [each.tokens for each in prompts], policy=policy("full"), max_new_tokens=SAID).tokens
    ends = {EMPTY, *params.config.stop_tokens, *_ids(params, "a\nb")[1:-1]}  # however the tokenizer ends a line
    lines = [_until(row.tolist(), ends) for row in np.asarray(said)]
    right = [
        joined(prompt, one, length)
        for prompt, one in zip(prompts, lines, strict=True)
        if any(_within(answer, one) for answer in prompt.answer)
    ]
    return right or [joined(prompt, prompt.answer[0], length) for prompt in prompts]


def joined(prompt: Hidden, said: list[int], length: int) -> Answered:
    """The prompt and what was said, filled up with its last token: a token is told by the query before it."""
    said = said[: length - len(prompt.tokens)]
    tokens = np.concatenate([prompt.tokens, said, np.full(length - len(prompt.tokens) - len(said), prompt.tokens[-1])])
    inside = np.append(prompt.inside, np.zeros(length - len(prompt.tokens), bool))
    place, stands = np.arange(length), np.zeros(length, np.float32)
    told = (place >= len(prompt.tokens) - 1) & (place < len(prompt.tokens) - 1 + len(said))
    stands[told] = [np.count_nonzero(prompt.tokens[prompt.inside] == token) for token in said]
    return Answered(tokens.astype(np.int32), inside, told, stands)


def hidden(
    params: Params, text: str, length: int, count: int, seed: int, compared: bool = False
) -> tuple[list[Hidden], int]:
    """`count` prompts of `length` tokens: what the model's texts begin with, words of the text (over and over where
    there are too few), a fact at another depth in each, and the question at the end. And how many tokens the longest of
    them needs; those that need more than `length` are left out.

    With `compared` a prompt hides two facts of a kind, and a comparison between them says which is asked for.
    """
    rng = generator(seed)
    front, filler, out = ids(params.tokenizer, "", begins=True), _ids(params, " ".join(text.split())), []
    filler, least = np.resize(filler, max(len(filler), length)).tolist(), 0
    for number in range(count):
        answer = str(rng.integers(10_000, 100_000))
        before, fact, after, question = _compared(number, answer, rng) if compared else _alone(number, answer)
        around = [_ids(params, " " + text) if text else [] for text in (before, fact, after)]
        asked = _ids(params, f"\n\nQuestion: {question}\nAnswer:")
        room = length - len(front) - sum(map(len, around)) - len(asked)
        least, start = max(least, length + 1 - room), int(rng.integers(0, max(1, len(filler) - room)))
        if room < 1:
            continue
        at = int(room * (number + 0.5) / count)
        words = filler[start : start + room]
        begin = len(front) + at + len(around[0])
        place = np.arange(length)
        told = [*around[0], *around[1], *around[2]]
        tokens = np.asarray([*front, *words[:at], *told, *words[at:], *asked], np.int32)
        inside = (place >= begin) & (place < begin + len(around[1]))
        out.append(Hidden(tokens, inside, (_ids(params, f" {answer}"), _ids(params, answer))))
    return out, least


def _alone(number: int, answer: str) -> tuple[str, str, str, str]:
    """What stands before the fact, the fact, what stands behind it, and the question."""
    fact, question = FACTS[number % len(FACTS)]
    return "", fact.format(answer), "", question


def _compared(number: int, answer: str, rng: np.random.Generator) -> tuple[str, str, str, str]:
    """The same of two facts in either order, with the comparison behind them."""
    fact, size, question = COMPARED[number % len(COMPARED)]
    names = NAMES[number // len(COMPARED) % len(NAMES)]
    first = bool(rng.integers(2))  # whether the right one comes first
    right, other = names if first else names[::-1]
    more = int(rng.integers(50, 90))
    sizes = {right: more, other: int(rng.integers(10, 40))}
    wrong = fact.format(str(rng.integers(10_000, 100_000)), name=other)
    after = " ".join(size.format(name=name, size=sizes[name]) for name in names)
    before, behind = ("", f"{wrong} {after}") if first else (wrong, after)
    return before, fact.format(answer, name=right), behind, question.format(one=names[0], two=names[1])


def _until(said: list[int], ends: set[int]) -> list[int]:
    """The tokens before the first that ends the answer."""
    return list(itertools.takewhile(lambda token: token not in ends, said))


def _within(some: list[int], all_of: list[int]) -> bool:
    """Whether the tokens stand side by side among the others."""
    return any(all_of[at : at + len(some)] == some for at in range(len(all_of) - len(some) + 1))


def _ids(params: Params, text: str) -> list[int]:
    return list(params.tokenizer(text, add_special_tokens=False)["input_ids"])
