"""Stop strings, which the host looks for in the decoded text: a text ends before the first of them."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class StopStrings:
    """The stop strings of a call and the tokenizer that makes text of tokens (None: no text, and no stop strings)."""

    strings: tuple[str, ...]
    tokenizer: Any

    def __bool__(self) -> bool:
        return bool(self.strings)

    def reached(self, tokens: list[int]) -> bool:
        """Whether the text of the tokens holds a stop string."""
        return bool(self.strings) and self._at(self._words(tokens)) is not None

    def count(self, tokens: list[int], new: np.ndarray) -> int:
        """How many of the `new` tokens (-1: none) behind `tokens` there are, up to the one that completes a string."""
        found = [int(token) for token in new[new >= 0]]
        if not self.reached(tokens + found):
            return len(found)
        return next((count for count in range(1, len(found)) if self.reached(tokens + found[:count])), len(found))

    def text(self, tokens: list[int], complete: bool = True) -> str:
        """The text before its stop string; while it still comes, without what may yet change."""
        text = self._words(tokens)
        at = self._at(text)
        if at is not None:
            return text[:at]
        if complete:
            return text
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # the first bytes of a character whose rest is still to come
        partial = [n for stop in self.strings for n in range(1, len(stop)) if text.endswith(stop[:n])]
        return text[: len(text) - max(partial, default=0)]

    def _words(self, tokens: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _at(self, text: str) -> int | None:
        """Where the first stop string begins in the text, if one is there."""
        found = [at for at in (text.find(stop) for stop in self.strings) if at >= 0]
        return min(found) if found else None
