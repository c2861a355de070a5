"""Prompts of every form -> rows of token ids, and rows -> a padded batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from jaxkv.chat import check_held, next_turn
from jaxkv.checks import fits, shown
from jaxkv.errors import BadValue, first_line, unknown
from jaxkv.stop_strings import FRONT
from jaxkv.store import EMPTY

ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython")  # whose messages templates take
Prompt = Any  # a string, strings, chat messages, conversations, token ids, or rows of token ids


def rows_of(
    prompt: Prompt,
    tokenizer: Any,
    vocab_size: int,
    pending: np.ndarray | None = None,
    texts: Sequence[np.ndarray] | None = None,
) -> tuple[list[np.ndarray], bool]:
    """One int32 array of ids per row, and whether the prompt was a single one.

    A list of messages (`{"role": ..., "content": ...}`) goes through the model's chat template. With `pending [B]` the
    prompt goes on from a cache whose rows have these tokens still to be run (-1: none): text gets none of the tokens
    that a model's texts begin with, and messages are a whole conversation, of which what follows the last answer is
    run. `texts` are what these rows have seen (None: not known). Raises `BadValue` for an empty prompt, ids outside the
    vocabulary, a wrong type, text without a tokenizer, and a conversation that the cache does not hold.
    """
    begins = pending is None
    if isinstance(prompt, str):
        return [_encode(prompt, tokenizer, vocab_size, begins)], True
    if isinstance(prompt, Tracer):
        raise BadValue(
            "the prompt is traced: call this outside of jit, vmap and the like; it compiles its own programs"
        )
    if hasattr(prompt, "dtype") and hasattr(prompt, "ndim"):
        return _array_rows(np.asarray(prompt), vocab_size)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise BadValue(f"prompt of type {type(prompt).__name__}: expected text, chat messages, or token ids")
    if len(prompt) == 0:
        raise BadValue("the prompt is empty: expected at least one token")
    first = prompt[0]
    if isinstance(first, Mapping):
        return [_chat(prompt, tokenizer, vocab_size, *_of_row(pending, texts, 0))], True
    if isinstance(first, str):
        return [_encode(text, tokenizer, vocab_size, begins, row) for row, text in enumerate(prompt)], False
    if isinstance(first, int | np.integer):
        return [_ids(prompt, vocab_size)], True
    if isinstance(first, Sequence) and first and isinstance(first[0], Mapping):
        return [
            _chat(each, tokenizer, vocab_size, *_of_row(pending, texts, row)) for row, each in enumerate(prompt)
        ], False
    if not all(isinstance(row, Sequence | np.ndarray) or hasattr(row, "__array__") for row in prompt):
        strange = next(row for row in prompt if not isinstance(row, Sequence) and not hasattr(row, "__array__"))
        raise BadValue(f"{shown(strange)} in a list of prompts: expected rows of token ids, or messages of a chat")
    return [_ids(row, vocab_size) for row in prompt], False


def _of_row(
    pending: np.ndarray | None, texts: Sequence[np.ndarray] | None, row: int
) -> tuple[int | None, np.ndarray | None]:
    """What the row has still to run, and what it has seen; a cache of one row is every prompt's. Other numbers of rows
    are refused later."""
    left = None if pending is None else int(pending[row % len(pending)])
    return left, None if texts is None else texts[row % len(texts)]


def are_messages(prompt: Prompt) -> bool:
    """Whether the prompt is the messages of one chat."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def fronts(prompt: Prompt, texts: Sequence[np.ndarray]) -> list[tuple[int, ...]]:
    """The last tokens of each row's text, the prompt's among them: its new tokens go on from these. None in front of a
    chat's answer, which is a text by itself unless the chat has begun it."""

    def begins(row: int) -> bool:
        one = prompt[row] if isinstance(prompt, Sequence) and not are_messages(prompt) else prompt
        return are_messages(one) and one[-1]["role"] != "assistant"

    return [() if begins(row) else tuple(text[-FRONT:].tolist()) for row, text in enumerate(texts)]


def left_padded(rows: list[np.ndarray], length: int, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and text positions `[B, length]`; padding in front has token 0 and position -1.

    Row b's first token has position `lengths[b]`.
    """
    tokens = np.zeros((len(rows), length), np.int32)
    positions = np.full((len(rows), length), EMPTY, np.int32)
    for index, row in enumerate(rows):
        tokens[index, length - len(row) :] = row
        positions[index, length - len(row) :] = lengths[index] + np.arange(len(row))
    return tokens, positions


def right_padded(rows: list[np.ndarray]) -> np.ndarray:
    """The rows as one int32 array `[B, N]`, -1 behind each."""
    tokens = np.full((len(rows), max(map(len, rows))), EMPTY, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return tokens


def _array_rows(array: np.ndarray, vocab_size: int) -> tuple[list[np.ndarray], bool]:
    if not np.issubdtype(array.dtype, np.integer):
        raise BadValue(f"token ids of dtype {array.dtype}: expected integers")
    if array.ndim not in (1, 2):
        raise BadValue(f"token ids of shape {array.shape}: expected [T] or [B, T]")
    if len(array) == 0:
        raise BadValue(f"token ids of shape {array.shape}: expected at least one row of at least one token")
    return [_ids(row, vocab_size) for row in np.atleast_2d(array)], array.ndim == 1


def _ids(row: Any, vocab_size: int) -> np.ndarray:
    try:
        ids = np.asarray(row)
    except (ValueError, TypeError, OverflowError):  # rows of unequal length where numbers should be
        raise BadValue(f"token ids {shown(row)}: expected a flat row of integers") from None
    if ids.size == 0:
        raise BadValue("the prompt is empty: expected at least one token")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise BadValue(f"token ids of shape {ids.shape} and dtype {ids.dtype}: expected a flat row of integers")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise BadValue(f"token id {ids.max() if ids.min() >= 0 else ids.min()}: expected 0 to {vocab_size - 1}")
    return ids.astype(np.int32)


def _encode(text: Any, tokenizer: Any, vocab_size: int, begins: bool, row: int | None = None) -> np.ndarray:
    if not isinstance(text, str):
        raise BadValue(f"prompt of type {type(text).__name__} in a list of text: expected str")
    if not text:
        which = "the prompt" if row is None else f"prompt {row} of the list"
        raise BadValue(f"{which} is empty: expected at least one token")
    _check_text(text)
    return _ids(_needed(tokenizer)(text, add_special_tokens=begins)["input_ids"], vocab_size)


def _check_text(text: str) -> None:
    """Raises `BadValue` for half a surrogate pair, which no text that can be written has."""
    if not fits(text, str):
        at = next(at for at, letter in enumerate(text) if "\ud800" <= letter <= "\udfff")
        raise BadValue(
            f"the prompt has half a surrogate pair, {text[at]!a}, at character {at}: expected text that UTF-8 can "
            "write; read it with errors='replace'"
        )


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages as chat templates take them, parts of a content `{"type": "text", "text": ...}` in a row. Raises
    `BadValue` for one without a role or content, for a role that is none of `ROLES`, and for a content that is no text;
    an assistant's that calls tools may have none."""
    plain = []
    for number, message in enumerate(messages):
        calls = isinstance(message, Mapping) and message.get("role") == "assistant" and bool(message.get("tool_calls"))
        good = isinstance(message, Mapping) and isinstance(message.get("role"), str) and ("content" in message or calls)
        if not good:
            raise BadValue(
                f"message {number} is {shown(message)}: expected each as {{'role': 'user', 'content': 'text'}}"
            )
        if message["role"] not in ROLES:
            raise BadValue(f"message {number}: {unknown('role', message['role'], ROLES)}")
        content = message.get("content")
        if isinstance(content, list | tuple):
            content = "".join(_text_of(part, number) for part in content)
        if isinstance(content, str):
            _check_text(content)
        elif content is not None or not calls:
            raise BadValue(
                f"message {number} ({message['role']}) has the content {shown(content)}: expected text, or a list of "
                "parts as {'type': 'text', 'text': '...'}"
            )
        plain.append({**message, "content": content})
    return plain


def _text_of(part: Any, number: int) -> str:
    if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
        raise BadValue(
            f"message {number} holds the part {shown(part)}: expected parts as {{'type': 'text', 'text': '...'}}, for "
            "jaxkv's models read text alone"
        )
    return part["text"]


def _chat(messages: Any, tokenizer: Any, vocab_size: int, pending: int | None, text: np.ndarray | None) -> np.ndarray:
    template = getattr(_needed(tokenizer), "chat_template", None)
    if not template:
        raise BadValue("chat messages, but the model's tokenizer has no chat template: give the prompt as text")
    messages = plain_messages(messages)
    if pending is not None and all(message["role"] != "assistant" for message in messages):
        raise BadValue(
            "chat messages without an answer of the model, on a cache: expected the whole conversation, of which what "
            "follows the last answer is run; or what is new as text; `jaxkv.about` asks about a text that a cache holds"
        )
    ids = templated(next_turn, tokenizer, messages, pending)
    if text is not None:
        check_held(tokenizer, messages, text, ids)
    return _ids(ids, vocab_size)


def templated(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What the call makes of messages by a chat template. Raises `BadValue` where the template, a program of the
    model's maker, raises anything."""
    try:
        return call(*args, **options)
    except Exception as error:
        raise BadValue(
            f"the model's chat template can't take these messages ({type(error).__name__}: {first_line(error)}): "
            "expected user and assistant in turn, each with text"
        ) from error


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise BadValue("the prompt is text, but these params have no tokenizer: give token ids")
    return tokenizer
