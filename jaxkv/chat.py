"""A conversation on one bounded cache: what of the next turn has still to be run."""

from typing import Any

import numpy as np


def next_turn(tokenizer: Any, messages: list[Any], pending: int | None) -> np.ndarray:
    """Token ids to run for `messages`: what follows the last answer, for those before are in the cache already; all,
    where there is no cache.

    `pending` is the sampled token that the cache still has to run (-1: none, None: no cache): when it is the template's
    end of turn it is not written twice. The last assistant message must be what the model said. Ours: the chat
    template is rendered whole, and the part behind the last answer is taken.
    """
    render = lambda turns, prompt: tokenizer.apply_chat_template(  # noqa: E731
        turns, tokenize=False, add_generation_prompt=prompt
    )
    whole = render(messages, True)
    if pending is not None:
        last = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
        said = messages[: last + 1]
        before = render(said[:-1], True) + said[-1]["content"]
        whole = whole[len(before) :] if whole.startswith(before) else whole[len(render(said, False)) :]
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]  # the template has written its own
    if pending is not None and ids and ids[0] == pending:
        ids = ids[1:]
    return np.asarray(ids, np.int32)
