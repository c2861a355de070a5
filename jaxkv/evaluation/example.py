"""What a task is made of: a context, questions about it, and the answers that count as right."""

import dataclasses
import hashlib
import json
from collections.abc import Callable

Message = tuple[str, str]  # role, content


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about a context. `prefix` is the start of the answer, given to the model; `depth` (0 first, 1 last)
    is where in the context the answer lies, if it lies in one place. `classes` are all that an answer may be, where it
    is one of a few.
    """

    text: str
    answers: tuple[str, ...]
    prefix: str = ""
    depth: int | float | None = None
    classes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Example:
    """A context with its questions, each asked on its own.

    `turns` are chat messages in front of the user's turn that holds context and question. `output` is text that the
    model is made to write before its answer, token by token under the policy. `scorer` is a name from `scorers`.
    Without `chat` the text goes to the model as it is.
    """

    task: str
    context: str
    questions: tuple[Question, ...]
    scorer: str
    max_new_tokens: int
    turns: tuple[Message, ...] = ()
    chat: bool = True
    output: str = ""
    haystack: str | None = None
    length: int | None = None
    depth: int | float | None = None
    seed: int = 0
    index: int = 0

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the SHA-256 of everything in it: the example's name."""
        content = dataclasses.asdict(self)
        if self.chat:  # what it was before there were others
            del content["chat"]
        for question in content["questions"]:
            if not question["classes"]:
                del question["classes"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def fitted(build: Callable[[int], Example], size: Callable[[Example], int], length: int) -> Example | None:
    """`build(n)` for the largest n with `size(build(n)) <= length`; None where not even `build(0)` fits.

    Doubles, then bisects: `size` must not fall as n grows, and n need not exceed `length`.
    """
    if size(build(0)) > length:
        return None
    low, high = 0, 16
    while high <= length and size(build(high)) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(build(middle)) <= length else (low, middle)
    return build(low)
