"""A conversation on one bounded cache: what of the next turn has still to be run."""

from typing import Any

import numpy as np

from jaxkv.errors import BadValue

MARK = "(the answer that the cache holds)"  # stands for it while the template is rendered


def next_turn(tokenizer: Any, messages: list[Any], pending: int | None) -> np.ndarray:
    """Token ids to run for `messages`: what follows the last answer, for those before are in the cache already; all,
    where there is no cache: up to the end of an answer that is last, where a generated one would end.

    `pending` is the sampled token that the cache still has to run (-1: none, None: no cache): when it is the template's
    end of turn it is not written twice. The last assistant message must be what the model said. Ours: the chat
    template is rendered whole, and the part behind the last answer is taken, whatever it does to that answer (some
    leave out thoughts of earlier turns). Raises `BadValue` for a template that leaves out answers.
    """
    answered = messages[-1]["role"] == "assistant"
    if pending is None:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not answered)
        if answered:  # the next turn writes what ends it
            text = text.removesuffix(_behind_last(tokenizer, messages, asks=False) or "")
    else:
        text = _behind_last(tokenizer, messages, asks=True)
        if text is None:
            raise BadValue("the chat template writes no answers of earlier turns: give the whole conversation anew")
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has written its own
    if pending in ids:
        at = ids.index(pending)
        if not tokenizer.decode(ids[:at]).strip():  # some templates write a space before the end of turn
            ids = ids[at + 1 :]
    return np.asarray(ids, np.int32)


def _behind_last(tokenizer: Any, messages: list[Any], asks: bool) -> str | None:
    """What the template writes behind the last answer; None where it leaves that out."""
    last = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
    messages = [*messages[:last], {**messages[last], "content": MARK}, *messages[last + 1 :]]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
    _, found, behind = whole.rpartition(MARK)
    return behind if found else None
