"""A conversation on one bounded cache: what of the next turn has still to be run."""

from typing import Any

import numpy as np

from jaxkv.errors import BadValue

MARK = "(the answer that the cache holds)"  # stands for it while the template is rendered


def next_turn(tokenizer: Any, messages: list[Any], pending: int | None) -> np.ndarray:
    """Token ids to run for `messages`: what follows the last answer, for those before are in the cache already; all,
    where there is no cache. An answer that is last is begun, and goes on where a generated one would end; behind one
    that the cache holds it is run as well.

    `pending` is the sampled token that the cache still has to run (-1: none, None: no cache): when it is the template's
    end of turn it is not written twice. The answer before must be what the model said. Ours: the chat
    template is rendered whole, and the part behind that answer is taken, whatever it does to it (some
    leave out thoughts of earlier turns). Raises `BadValue` for a template that leaves out answers.
    """
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    begun = bool(answers) and answers[-1] == len(messages) - 1 and (pending is None or len(answers) > 1)
    if pending is None:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not begun)
    else:
        text = _behind(tokenizer, messages, answers[-2 if begun else -1], asks=not begun)
        if text is None:
            raise BadValue("the chat template writes no answers of earlier turns: give the whole conversation anew")
    if begun:  # the next turn writes what ends it
        text = text.removesuffix(_behind(tokenizer, messages, answers[-1], asks=False) or "")
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has written its own
    if pending in ids:
        at = ids.index(pending)
        if not tokenizer.decode(ids[:at]).strip():  # some templates write a space before the end of turn
            ids = ids[at + 1 :]
    return np.asarray(ids, np.int32)


def _behind(tokenizer: Any, messages: list[Any], answer: int, asks: bool) -> str | None:
    """What the template writes behind an answer; None where it leaves that out."""
    mark = MARK
    while any(mark in str(message["content"]) for message in messages):
        mark = f"({mark})"
    messages = [*messages[:answer], {**messages[answer], "content": mark}, *messages[answer + 1 :]]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
    _, found, behind = whole.rpartition(mark)
    return behind if found else None
