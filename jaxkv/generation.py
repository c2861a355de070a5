"""What a call of `generate` gives back: the text, the cache to go on from, and what it cost."""

import dataclasses
from typing import Any

import numpy as np

from jaxkv.speculative.tally import Speculation
from jaxkv.store import KVCache


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a run cost. `seen`, `kept`, `evicted` are tokens per row; kept is the mean over layers and KV heads.

    `tokens_per_second` counts all rows' new tokens over the decode time, without the first chunk (which may compile)
    when there are more. `bounded` says whether decoding holds the cache to its budget, or only adds. `cache_bytes` are
    held, `read_bytes` are the keys and values that a decode step reads. `speculation` says what drafts brought.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    cache_bytes: int
    read_bytes: int
    seen: tuple[int, ...]
    kept: tuple[float, ...]
    bounded: bool
    speculation: Speculation | None = None

    @property
    def evicted(self) -> tuple[float, ...]:
        """Tokens per row that no KV head holds any more, on average over layers and KV heads."""
        return tuple(seen - kept for seen, kept in zip(self.seen, self.kept, strict=True))


@dataclasses.dataclass(frozen=True)
class Generation:
    """`text` (a string for one prompt, a list for several), `tokens [B, max_new_tokens]` padded with `pad` behind
    `lengths [B]` real ones, the `cache` to go on from, and `stats`.
    """

    text: Any
    tokens: np.ndarray
    lengths: np.ndarray
    cache: KVCache
    stats: Stats
