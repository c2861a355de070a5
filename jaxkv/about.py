"""Questions about a text that is read once: the model's chat format, split where the text ends."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxkv.checks import shown
from jaxkv.errors import BadValue
from jaxkv.prompts import plain_messages, templated
from jaxkv.weights.params import Params

MARK = "\ue000\ue001\ue000"  # of a range for private use: no text holds it


@dataclasses.dataclass(frozen=True)
class About:
    """A text in the model's chat format, to be read before it is known what is asked.

    `context [T]` are the token ids up to where the text ends, `question("...")` those of a question and of what the
    format writes behind it. Each is tokenised by itself, so that they are the same after any context.
    """

    context: Int[np.ndarray, "T"]
    text: str
    turns: tuple[Mapping[str, Any], ...]
    tokenizer: Any = dataclasses.field(repr=False)

    def question(self, question: str, begins: str = "") -> Int[np.ndarray, "N"]:
        """int32 ids of the question, behind an empty line, and of the turn's end; the answer goes on from `begins`."""
        _check(question, "question")
        if begins != "":
            _check(begins, "begins")
        return ids(self.tokenizer, parted(self.tokenizer, self.turns, self.text, question)[1] + begins)


def about(params: Params, text: str, messages: Sequence[Mapping[str, Any]] = ()) -> About:
    """The text as the beginning of the last user's turn, behind `messages` (a system's, or a talk before).

    `jaxkv.prefill(params, about.context, policy=...)` reads it once, without a question, and
    `jaxkv.generate(params, about.question("..."), cache=cache, policy=jaxkv.policy("full"))` asks: as kvpress' pipeline
    does. A model without a chat template gets the plain text. Raises `BadValue` for an empty text, for messages that
    are none, and where there is no tokenizer.
    """
    if params.tokenizer is None:
        raise BadValue("a text to ask about, but these params have no tokenizer: give `prefill` token ids")
    _check(text, "text")
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise BadValue(f"messages={shown(messages)}: expected a list of those before the text, empty for none")
    turns = tuple(plain_messages(messages))
    before, _ = parted(params.tokenizer, turns, text, "?")
    template = getattr(params.tokenizer, "chat_template", None)
    return About(ids(params.tokenizer, before, begins=not template), text, turns, params.tokenizer)


def _check(text: Any, name: str) -> None:
    """Raises `BadValue` for what is no text, for none, and for letters that cannot be written or that split it."""
    if not isinstance(text, str) or not text:
        raise BadValue(f"{name}={shown(text)}: expected text, one letter at least")
    if MARK in text:
        raise BadValue(f"{name}={shown(text)}: {MARK!a} is where jaxkv splits the chat; leave these letters out")
    plain_messages([{"role": "user", "content": text}])


def parted(tokenizer: Any, turns: Sequence[Mapping[str, Any]], text: str, question: str) -> tuple[str, str]:
    """The chat up to where the text of its last turn ends, and the rest: the question and what the format writes behind
    it.

    Between text and question is an empty line, unless the question begins with a line of its own or there is none.
    Raises `BadValue` for what the template does not take, or changes.
    """
    between = "" if not question or question.startswith("\n") else "\n\n"
    if getattr(tokenizer, "chat_template", None):
        last = {"role": "user", "content": f"{text}{MARK}{between}{question}"}
        whole = templated(tokenizer.apply_chat_template, [*turns, last], tokenize=False, add_generation_prompt=True)
    else:
        talk = "".join(f"{turn['role']}: {turn['content'] or ''}\n" for turn in turns)
        whole = f"{talk}{text}{MARK}{between}{question}\n"
    if whole.count(MARK) != 1:
        raise BadValue(
            "the model's chat template does not write what a user says as it is: split the text yourself, and give "
            "`prefill` and `generate` token ids"
        )
    before, _, rest = whole.partition(MARK)
    return before, rest


def ids(tokenizer: Any, text: str, begins: bool = False) -> Int[np.ndarray, "T"]:
    """Token ids of text that may hold the chat format's special tokens; where it `begins` a prompt, behind what the
    model's texts begin with."""
    return np.asarray(tokenizer(text, add_special_tokens=begins)["input_ids"], np.int32)
