"""Stop strings, which the host looks for in the decoded text: a text ends before the first of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

BROKEN = "\N{REPLACEMENT CHARACTER}"  # of a character whose bytes are not all there
FRONT = 8  # tokens in front whose text is looked at: a character has four bytes


@dataclasses.dataclass(frozen=True)
class StopStrings:
    """The stop strings of a text, the tokenizer that makes it of tokens (None: no text, and no stop strings), and the
    tokens in `front`, from whose text it goes on."""

    strings: tuple[str, ...]
    tokenizer: Any
    front: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.strings)

    def reached(self, tokens: list[int]) -> bool:
        """Whether the text of the tokens holds a stop string."""
        return bool(self.strings) and self.within(self._words(tokens))

    def within(self, text: str) -> bool:
        """Whether the text holds a stop string."""
        return self._at(text) is not None

    def count(self, tokens: list[int], new: np.ndarray) -> int:
        """How many of the `new` tokens (-1: none) behind `tokens` there are, up to the one that completes a string."""
        found = [int(token) for token in new[new >= 0]]
        if not self.reached(tokens + found):
            return len(found)
        return next((count for count in range(1, len(found)) if self.reached(tokens + found[:count])), len(found))

    def text(self, tokens: list[int], complete: bool = True) -> str:
        """The text before its stop string; while it still comes, without what may yet change."""
        return self.shown(self._words(tokens), complete)

    def shown(self, text: str, complete: bool = True) -> str:
        """Of the whole text what `text` gives."""
        at = self._at(text)
        if at is not None:
            return text[:at]
        if complete:
            return text
        text = text.rstrip(BROKEN)  # the first bytes of a character whose rest is still to come
        return text[: len(text) - max((_begun(stop, text) for stop in self.strings), default=0)]

    def _words(self, tokens: list[int]) -> str:
        return decoded(self.tokenizer, tokens, self.front)

    def _at(self, text: str) -> int | None:
        """Where the first stop string begins in the text, if one is there."""
        found = [at for at in (text.find(stop) for stop in self.strings) if at >= 0]
        return min(found) if found else None


def _begun(stop: str, text: str) -> int:
    """How many letters at the end of a text, which does not hold the stop string, are the beginning of it.

    A beginning that the text ends with ends with the text's last letters: it reaches at least to where they first stand
    in the string, and is that part or a longer one.
    """
    found, count = 0, 1
    while count <= len(text) and (at := stop.find(text[-count:])) >= 0:
        count += at
        if text.endswith(stop[:count]):
            found = count
        count += 1
    return found


def decoded(tokenizer: Any, tokens: Sequence[int], front: Sequence[int] = ()) -> str:
    """The text of tokens as it goes on from that of the tokens in front; none where there is no tokenizer.

    By themselves tokens are the beginning of a text, where tokenizers such as Llama 2's leave out a space.
    """
    if tokenizer is None:
        return ""
    front = list(front[-FRONT:])
    before = _text(tokenizer, front)
    if before.endswith(BROKEN):  # the tokens may complete its last character
        return _text(tokenizer, tokens)
    return _text(tokenizer, [*front, *tokens])[len(before) :]


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    if not tokens:
        return ""
    return tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Growing:
    """The text of tokens that grow, behind that of the tokens in front; only the last ones are decoded again.

    A text is settled at a place where its two parts are the whole.
    """

    TAIL = 16  # tokens that may still change

    def __init__(self, tokenizer: Any, front: tuple[int, ...] = ()):
        self._tokenizer, self._front, self._settled, self._count = tokenizer, front, "", 0

    def text(self, tokens: list[int]) -> str:
        """The text of all tokens: those of the last call, and more."""
        rest = tokens[self._count :]
        text = decoded(self._tokenizer, rest, self._front)
        if len(rest) >= 2 * self.TAIL:
            first, last = rest[: -self.TAIL], rest[-self.TAIL :]
            left, right = decoded(self._tokenizer, first, self._front), decoded(self._tokenizer, last, first)
            if left + right == text and not left.endswith(BROKEN):
                self._settled, self._count, text = self._settled + left, len(tokens) - self.TAIL, right
                self._front = tuple(first[-FRONT:])
        return self._settled + text
