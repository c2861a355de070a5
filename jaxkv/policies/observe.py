"""observe: whose queries look at the cache."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxkv.checks import Checked
from jaxkv.errors import BadValue
from jaxkv.store.entries import EMPTY

Encode = Callable[[str], Sequence[int]]


class Observer(Checked):
    """Whoever looks: the `extra` tokens behind the prompt if there are any, else the last `window`, else all.

    With `own_keys` False the keys of those that look stay out of the softmax.
    """

    kind: ClassVar[str]
    window: int = 0
    extra: int = 0
    own_keys: bool = True
    looks: ClassVar[bool] = True  # whether anybody does
    replays: ClassVar[bool] = False  # each block of the prompt is run again behind itself
    drafts: ClassVar[bool] = False  # the tokens that look come from a first pass
    ends: ClassVar[bool] = False  # a prompt's last block ends with those that look: nothing runs behind it
    draft_window: int = 0  # and that is SnapKV's, with this window,
    draft_times: float = 1.0  # at so many times the budget, and with this pool along the text
    draft_pool: str = "avg"
    draft_kernel: int = 5
    lead: int = 0  # tokens of the block before that tell where a block begins, for `between`

    @property
    def least(self) -> int:
        """The smallest budget under which it can look."""
        return 1

    @property
    def at_end(self) -> bool:
        """Whether those that look are the last of the prompt, or stand behind it."""
        return self.window > 0 or self.extra > 0

    def behind(self, prompt: np.ndarray, vocab_size: int, encode: Encode | None) -> np.ndarray:
        """The tokens `[N]` that run behind every block of one prompt `[T]`; `encode` turns text into tokens."""
        return np.zeros(0, np.int32)

    def between(self, before: np.ndarray, encode: Encode | None) -> np.ndarray:
        """The tokens `[N]` that run behind a block with others before it, of which the last `lead` ones are given."""
        raise NotImplementedError  # asked only where there is a lead

    def begins(self, ends: Int[Array, "B"], now: Int[Array, "B"]) -> Int[Array, "B"]:
        """The position of the first token behind a block that ends at `now`, of a text of `ends` tokens: that of the
        first token to be decoded."""
        return ends

    def looking(self, positions: Int[Array, "B T"], extra: int) -> Int[Array, "B N"]:
        """The positions of those that look, the last N of the T; `extra` tokens stand behind the prompt's own."""
        return positions[:, -(extra or self.window or positions.shape[1]) :]


@dataclasses.dataclass(frozen=True)
class NoQueries(Observer):
    """Nobody looks: for scores that need no attention (recency, key norm)."""

    kind: ClassVar[str] = "none"
    looks: ClassVar[bool] = False
    window: ClassVar[int] = 0
    extra: ClassVar[int] = 0


@dataclasses.dataclass(frozen=True)
class LastQueries(Observer):
    """The last `window` prompt tokens look. With `own_keys=False` the window's own keys stay out of the softmax.

    Source: SnapKV (arXiv 2404.14469, section 4); `own_keys=False` as in LongFlow's released prefill.
    """

    window: int = 64
    own_keys: bool = True
    kind: ClassVar[str] = "last-queries"
    extra: ClassVar[int] = 0

    def __post_init__(self):
        if self.window < 1:
            raise BadValue(f"window={self.window}: expected at least 1 query; use observe kind 'none' for no queries")


@dataclasses.dataclass(frozen=True)
class AllQueries(Observer):
    """Every prompt token looks (causally)."""

    kind: ClassVar[str] = "all-queries"
    window: ClassVar[int] = 0
    extra: ClassVar[int] = 0


@dataclasses.dataclass(frozen=True)
class CurrentQuery(Observer):
    """The token being decoded looks; in prefill, the last prompt token."""

    kind: ClassVar[str] = "current-query"
    window: ClassVar[int] = 1
    extra: ClassVar[int] = 0


@dataclasses.dataclass(frozen=True)
class PseudoQueries(Observer):
    """`count` synthetic tokens look, run through the whole model behind each block, at the first decode positions.

    Their keys and values are never kept. `content`: "prompt" repeats the first `prefix` (at most `count`) and the last
    `count - prefix` prompt tokens, "random" draws from the vocabulary by `seed`, "last" repeats the last `count`.
    With `own_keys=False` their own keys stay out of the softmax, and with `at="block"` they stand right behind each
    block, whatever follows it. Source: DapQ (arXiv 2603.11564): 32 tokens, 4 + 28; "random" and "last" are its ablation
    and ours; the last two options as in EpiCache (arXiv 2509.17396).
    """

    count: int = 32
    prefix: int = 4
    content: str = "prompt"
    seed: int = 0
    own_keys: bool = True
    at: str = "text"
    kind: ClassVar[str] = "pseudo-queries"
    window: ClassVar[int] = 0

    def __post_init__(self):
        if self.count < 1 or self.prefix < 0 or self.seed < 0:
            raise BadValue(
                f"count={self.count}, prefix={self.prefix}, seed={self.seed}: expected at least 1 token, and neither "
                "prefix nor seed below 0"
            )
        if self.content not in ("prompt", "random", "last"):
            raise BadValue(f"content={self.content!r}: expected 'prompt', 'random' or 'last'")
        if self.at not in ("text", "block"):
            raise BadValue(f"at={self.at!r}: expected 'text', behind the whole prompt, or 'block', behind each block")

    @property
    def extra(self) -> int:
        """Tokens run behind each block of the prompt."""
        return self.count

    def begins(self, ends: Int[Array, "B"], now: Int[Array, "B"]) -> Int[Array, "B"]:
        """The position behind the block, or behind the text."""
        return now if self.at == "block" else ends

    def behind(self, prompt: np.ndarray, vocab_size: int, encode: Encode | None) -> np.ndarray:
        """The pseudo tokens' ids `[count]` for one prompt `[T]`, a short one repeated as often as needed."""
        if self.content == "random":
            return np.random.default_rng(self.seed).integers(0, vocab_size, self.count).astype(np.int32)
        prefix = min(self.prefix, self.count) if self.content == "prompt" else 0
        suffix = self.count - prefix
        head = np.resize(prompt[:prefix], prefix)
        tail = prompt[len(prompt) - suffix :] if suffix <= len(prompt) else np.resize(prompt, suffix)
        return np.concatenate([head, tail]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Lookahead(Observer):
    """`count` tokens that the model itself goes on with look, run behind each block like `PseudoQueries`; and with them
    the block's own last `local` ones.

    They come from a first pass: the prompt under SnapKV (window `draft_window`; `draft_pool` none, avg or max along the
    text, over `draft_kernel` neighbours) at `draft_times` the budget, then `count` greedy tokens; on a cache that is
    already bounded, everything new is kept for that pass. Two prefills, bounded memory; none are drafted for a prompt
    that the budget holds whole and them behind it. With `own_keys=False` the keys of the new tokens stay out of the
    softmax, as in the release. Source: Lookahead Q-Cache (arXiv 2505.20334), which drafts at the budget, with a maximum
    of 7 as released, and keeps the first pass's queries and the whole prompt's cache in between; here the tokens run
    again behind the prompt. With `local` 8 its LAQ++.
    """

    count: int = 8
    draft_window: int = 32
    draft_times: float = 1.0
    draft_pool: str = "avg"
    draft_kernel: int = 5
    own_keys: bool = True
    local: int = 0
    kind: ClassVar[str] = "lookahead"
    window: ClassVar[int] = 0
    drafts: ClassVar[bool] = True

    def __post_init__(self):
        if self.count < 1 or self.draft_window < 1 or self.local < 0:
            raise BadValue(
                f"count={self.count}, draft_window={self.draft_window}, local={self.local}: expected at least 1 token "
                "each, and no local ones or more"
            )
        if not self.draft_times >= 1:
            raise BadValue(f"draft_times={self.draft_times}: expected 1 or more, of the budget")
        if self.draft_pool not in ("none", "avg", "max") or self.draft_kernel < 1 or self.draft_kernel % 2 == 0:
            raise BadValue(
                f"draft_pool={self.draft_pool!r}, draft_kernel={self.draft_kernel}: expected 'none', 'avg' or 'max', "
                "and an odd number, so that a pool has a middle"
            )

    @property
    def least(self) -> int:
        """The first pass holds a window of 1 and one entry that can be evicted."""
        return 1 if self.draft_times >= 2 else 2

    @property
    def extra(self) -> int:
        """Tokens run behind each block of the prompt."""
        return self.count

    def looking(self, positions: Int[Array, "B T"], extra: int) -> Int[Array, "B N"]:
        """The positions of the new tokens and of the `local` ones before them; nobody looks where none was drafted."""
        return jnp.where(positions[:, -extra, None] < 0, EMPTY, positions[:, -(extra + self.local) :])


@dataclasses.dataclass(frozen=True)
class Question(Observer):
    """The prompt's last `count` tokens look: from where they stand at the last block's end, and run once more behind
    every block before it.

    Source: FINCH (TACL 2024, 10.1162/tacl_a_00716), whose prompts are a context and a question, and which runs the
    question behind every chunk of the context.
    """

    count: int = 32
    kind: ClassVar[str] = "question"
    window: ClassVar[int] = 0
    ends: ClassVar[bool] = True

    def __post_init__(self):
        if self.count < 1:
            raise BadValue(f"count={self.count}: expected at least 1 token")

    @property
    def extra(self) -> int:
        """Tokens run behind each block of the prompt but the last."""
        return self.count

    def begins(self, ends: Int[Array, "B"], now: Int[Array, "B"]) -> Int[Array, "B"]:
        """The position behind the block."""
        return now

    def behind(self, prompt: np.ndarray, vocab_size: int, encode: Encode | None) -> np.ndarray:
        """The question's ids `[count]`; a prompt that is shorter is one block, and nothing runs behind it."""
        return np.resize(prompt[-self.count :], self.count).astype(np.int32)

    def looking(self, positions: Int[Array, "B T"], extra: int) -> Int[Array, "B N"]:
        """The positions of the block's last tokens, where nothing runs behind it, else of what does."""
        own = positions[:, -2 * extra : -extra] if positions.shape[1] >= 2 * extra else positions[:, :-extra]
        behind = positions[:, -extra:]
        last = behind[:, :1] < 0
        return jnp.concatenate([jnp.where(last, own, EMPTY), behind], axis=1)


@dataclasses.dataclass(frozen=True)
class Replay(Observer):
    """Every block of the prompt is run once more behind itself, behind an `instruction` (text), and that looks.

    The instruction of a block with others before it is `again`, and behind that the last `lead` tokens before the
    block, from where on it is to be said. What the model needs to say the block again is what it has to keep; prefill
    costs twice or more. The softmax is over all that is held. With a block as long as the prompt, that is the whole
    prompt. Source: KVzip (arXiv 2505.23416), whose blocks have 2000 tokens and look at themselves in an uncut cache.
    """

    instruction: str = "\n\nRepeat the previous context exactly."
    again: str = "\n\nRepeat the part of the previous context exactly, starting with "
    lead: int = 8
    kind: ClassVar[str] = "replay"
    window: ClassVar[int] = 0
    extra: ClassVar[int] = 0  # besides the block itself and the instruction
    replays: ClassVar[bool] = True

    def __post_init__(self):
        if self.lead < 0:
            raise BadValue(f"lead={self.lead}: expected a number of tokens, 0 for none")

    def begins(self, ends: Int[Array, "B"], now: Int[Array, "B"]) -> Int[Array, "B"]:
        """The position behind the block."""
        return now

    def behind(self, prompt: np.ndarray, vocab_size: int, encode: Encode | None) -> np.ndarray:
        """The instruction's tokens; none where there is no tokenizer."""
        return np.asarray(encode(self.instruction) if encode and self.instruction else (), np.int32)

    def between(self, before: np.ndarray, encode: Encode | None) -> np.ndarray:
        """The tokens of `again`, if there is a tokenizer, and the last ones before the block."""
        again = np.asarray(encode(self.again) if encode and self.again else (), np.int32)
        return np.concatenate([again, before[len(before) - min(self.lead, len(before)) :]])


KINDS: dict[str, type[Observer]] = {
    part.kind: part
    for part in (NoQueries, LastQueries, AllQueries, CurrentQuery, PseudoQueries, Lookahead, Question, Replay)
}
