"""A conversation on one bounded cache: what of the next turn has still to be run."""

from typing import Any

import numpy as np

from jaxkv.errors import BadValue

MARK = "(the answer that the cache holds)"  # stands for it while the template is rendered


def next_turn(tokenizer: Any, messages: list[Any], pending: int | None) -> np.ndarray:
    """Token ids to run for `messages`: what follows the last answer, for those before are in the cache already; all,
    where there is no cache.

    `pending` is the sampled token that the cache still has to run (-1: none, None: no cache): when it is the template's
    end of turn it is not written twice. The last assistant message must be what the model said. Ours: the chat
    template is rendered whole, and the part behind the last answer is taken, whatever it does to that answer (some
    leave out thoughts of earlier turns). Raises `BadValue` for a template that leaves out answers.
    """
    if pending is not None:
        last = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
        messages = [*messages[:last], {**messages[last], "content": MARK}, *messages[last + 1 :]]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if pending is not None:
        _, found, whole = whole.rpartition(MARK)
        if not found:
            raise BadValue("the chat template writes no answers of earlier turns: give the whole conversation anew")
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]  # the template has written its own
    if pending is not None and ids and ids[0] == pending:
        ids = ids[1:]
    return np.asarray(ids, np.int32)
