"""A conversation on one bounded cache: what of the next turn has still to be run."""

from typing import Any

import numpy as np

from jaxkv.checks import shown
from jaxkv.errors import BadValue

MARK = "(the answer that the cache holds)"  # stands for it while the template is rendered
EXPECTED = (
    "expected the conversation that the cache holds, its earlier messages as they were; or give the whole conversation "
    "anew, without the cache"
)


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


def check_held(tokenizer: Any, messages: list[Any], held: np.ndarray, new: np.ndarray) -> None:
    """Raises `BadValue` where the text that the cache has seen, `held`, is not that of the messages up to the last
    answer: a system or user message is not in it, or it has more turns.

    Users' messages are looked for in their order, a system message also in what is `new`: some templates write it in
    front of the last question. Turns are counted by what stands in front of that question. White space does not count.
    Answers are not looked for, which may have been cut, nor is what template or tokenizer write otherwise.
    """
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    begun = len(answers) > 1 and answers[-1] == len(messages) - 1
    known = messages[: answers[-2 if begun else -1] + 1]
    written = _packed(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))
    text, following = (_packed(tokenizer.decode(ids.tolist())) for ids in (held, new))
    at = 0
    for number, message in enumerate(known):
        role, said = message["role"], message["content"]
        if role not in ("system", "user") or not isinstance(said, str) or _packed(said) not in written:
            continue
        where, since = (text, at) if role == "user" else (text + following, 0)
        ids = tokenizer(said, add_special_tokens=False)["input_ids"]
        if getattr(tokenizer, "unk_token_id", None) in ids:
            continue
        forms = _packed(said), _packed(tokenizer.decode(ids))  # some tokenizers change letters
        ends = [begin + len(form) for form in forms if (begin := where.find(form, since)) >= 0]
        if not ends:
            raise BadValue(f"message {number} ({role}: {shown(said)}) is not in the text of this cache: {EXPECTED}")
        if role == "user":
            at = min(ends)

    asked = "" if len(known) == len(messages) else _packed(str(messages[len(known)]["content"]))
    said = tokenizer.apply_chat_template(known, tokenize=False, add_generation_prompt=False)
    before, asked = (
        _packed(tokenizer.decode(tokenizer(x, add_special_tokens=False)["input_ids"])) for x in (said, asked)
    )
    front = following.partition(asked)[0] if asked and asked in following else ""  # what begins a turn
    if front and text.count(front) > before.count(front):
        raise BadValue(f"this cache has seen more turns than these messages up to the last answer: {EXPECTED}")


def _packed(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())


def _behind(tokenizer: Any, messages: list[Any], answer: int, asks: bool) -> str | None:
    """What the template writes behind an answer; None where it leaves that out."""
    mark = MARK
    while any(mark in str(message["content"]) for message in messages):
        mark = f"({mark})"
    messages = [*messages[:answer], {**messages[answer], "content": mark}, *messages[answer + 1 :]]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
    _, found, behind = whole.rpartition(mark)
    return behind if found else None
