"""The tasks by name, and the examples that a list of lengths, depths and haystacks asks for."""

import dataclasses
import random
from collections.abc import Callable

from jaxkv.errors import BadValue, unknown
from jaxkv.evaluation import lists, needles, reading
from jaxkv.evaluation.example import Example, fitted

Build = Callable[[int], Example]


@dataclasses.dataclass(frozen=True)
class Place:
    """What a generator may look at: where the needle goes, in what, how long the text is, how many questions."""

    haystack: str
    depth: float
    length: int
    questions: int


@dataclasses.dataclass(frozen=True)
class Task:
    """A generator `make(task, rng, place) -> build(n)`, and which of haystack, depth and questions it depends on."""

    make: Callable[[str, random.Random, Place], Build]
    haystack: bool = False
    depth: bool = False
    questions: bool = False
    title: str = ""


def _needle(keys: int, values: int, asked: int, title: str) -> Task:
    make = lambda task, rng, at: needles.needles(task, rng, at.haystack, at.depth, keys, values, asked)  # noqa: E731
    return Task(make, haystack=True, depth=True, title=title)


TASKS: dict[str, Task] = {
    "passkey": Task(
        lambda task, rng, at: needles.passkey(task, rng, at.haystack, at.depth), True, True, title="passkey"
    ),
    "niah-single": _needle(1, 1, 1, "one needle"),
    "niah-multikey": _needle(4, 1, 1, "one needle of four"),
    "niah-multivalue": _needle(1, 4, 1, "four needles of one key"),
    "niah-multiquery": _needle(4, 1, 4, "four needles of four keys"),
    "variable-tracking": Task(
        lambda task, rng, at: needles.variable_tracking(task, rng, at.haystack), True, title="variable tracking"
    ),
    "common-words": Task(lambda task, rng, at: lists.common_words(task, rng), title="common words"),
    "frequent-words": Task(lambda task, rng, at: lists.frequent_words(task, rng), title="frequent words"),
    "reading": Task(
        lambda task, rng, at: reading.questions_on_text(task, rng, at.depth, at.questions),
        depth=True,
        questions=True,
        title="questions on prose",
    ),
    "lookup": Task(
        lambda task, rng, at: lists.lookup(task, rng, at.depth, at.questions),
        depth=True,
        questions=True,
        title="key-value lookup",
    ),
    "conversation": Task(
        lambda task, rng, at: reading.conversation(task, rng, at.depth, at.questions),
        depth=True,
        questions=True,
        title="multi-turn recall",
    ),
    "long-output": Task(lambda task, rng, at: reading.long_output(task, rng), title="long output"),
    "recite": Task(lambda task, rng, at: lists.recite(task, rng, at.length // 2), title="writing a list out again"),
}


def generate(
    name: str,
    size: Callable[[Example], int],
    *,
    lengths: tuple[int, ...],
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9),
    haystacks: tuple[str, ...] = ("noise", "prose"),
    examples: int = 1,
    questions: int = 1,
    max_new_tokens: int | None = None,
    seed: int = 0,
) -> list[Example]:
    """`examples` examples of the task for every length x depth x haystack that it depends on, in that order.

    `size(example)` is its tokens, prompt and forced output together, which come just under the length (half of it
    for "recite", whose output is as long again). The same seed gives the same examples: each draws from its own
    generator, seeded by task, seed, length, haystack, depth and number. Raises `UnknownName`, and `BadValue` for a
    length that the task does not fit in and a depth outside 0 to 1.
    """
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    task, out = TASKS[name], []
    for depth in depths:
        if not 0 <= depth <= 1:
            raise BadValue(f"depth {depth} of task {name!r}: expected 0 (the text's beginning) to 1 (its end)")
    for length in lengths:
        for haystack in haystacks if task.haystack else (None,):
            for depth in depths if task.depth else (None,):
                for index in range(examples):
                    rng = random.Random(f"{name}/{seed}/{length}/{haystack}/{depth}/{index}")
                    build = task.make(name, rng, Place(haystack or "prose", depth or 0.0, length, questions))
                    example = fitted(build, size, length // 2 if name == "recite" else length)
                    if example is None:
                        raise BadValue(f"length {length} of task {name!r}: not even its question fits; make it longer")
                    out.append(
                        dataclasses.replace(
                            example,
                            haystack=haystack,
                            length=length,
                            depth=depth,
                            seed=seed,
                            index=index,
                            max_new_tokens=max_new_tokens or example.max_new_tokens,
                        )
                    )
    return out
