"""Drafts out of the text itself: what followed the last tokens where they stood before, and what the model expected.

`PromptLookup` drafts the continuation alone, `AASD` a tree with what the prefill's distribution held likelier.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jaxkv.checks import Checked
from jaxkv.errors import BadValue
from jaxkv.run import DecodeState, Expected
from jaxkv.sampling import Sampler
from jaxkv.sharding.layout import Layout, on_host
from jaxkv.speculative.gate import Gate, opened
from jaxkv.speculative.method import Start
from jaxkv.speculative.tree import ABSENT, Shape, Tree, check_depth
from jaxkv.speculative.verify import SIBLING, Conditional, parse
from jaxkv.weights.params import Params

ROUND, WIDE = 64, 512  # columns for new tokens and for the prompt are multiples, so that near lengths compile once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Text:
    """Prompt and output of every row, and the tokens that the model held likeliest after each prompt token.

    Rows end their prompt in the same column; `ends [B]` counts the columns filled, `top` and `chance` reach over the
    prompt's P columns (K = 0 where nobody asks; ABSENT where the model's view is not known).
    """

    tokens: Int[Array, "B H"]
    ends: Int[Array, "B"]
    top: Int[Array, "B P K"]
    chance: Float[Array, "B P K"]


def begun(texts: Sequence[np.ndarray], width: int, room: int, top: int) -> Text:
    """The last `width` tokens of each text, with columns for `room` more; nothing is known of what was likely."""
    tokens = np.full((len(texts), width + room), ABSENT, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        part = text[-width:]
        row[width - len(part) : width] = part
    likely = (len(texts), width, top)
    return Text(
        tokens=jnp.asarray(tokens),
        ends=jnp.asarray(np.full(len(texts), width, np.int32)),
        top=jnp.asarray(np.full(likely, ABSENT, np.int32)),
        chance=jnp.asarray(np.zeros(likely, np.float32)),
    )


def expecting(text: Text, expected: Expected) -> Text:
    """The text before its output, with what was likely after each token of some more of the prompt: the last of it."""
    columns = text.top.shape[1]
    behind = lambda x, more: jnp.concatenate([x, more.astype(x.dtype)], axis=1)[:, -columns:]  # noqa: E731
    return dataclasses.replace(text, top=behind(text.top, expected[0]), chance=behind(text.chance, expected[1]))


def slid(text: Text, more: int) -> Text:
    """The text with columns for so many `more` tokens in every row: where they are lacking, its oldest tokens go."""
    lacking = jnp.maximum(text.ends + more - text.tokens.shape[1], 0)

    def moved(x: Array, nothing: Any) -> Array:
        at = jnp.arange(x.shape[1], dtype=jnp.int32) + lacking[:, None]
        at, there = (y.reshape(*y.shape, *(1,) * (x.ndim - 2)) for y in (at, at < x.shape[1]))
        return jnp.where(there, jnp.take_along_axis(x, jnp.minimum(at, x.shape[1] - 1), axis=1), nothing)

    def shorter() -> Text:
        rest = moved(text.top, jnp.int32(ABSENT)), moved(text.chance, jnp.float32(0))
        return Text(moved(text.tokens, jnp.int32(ABSENT)), text.ends - lacking, *rest)

    return lax.cond(jnp.any(lacking > 0), shorter, lambda: text)


def extended(text: Text, tokens: Int[Array, "B n"]) -> Text:
    """The text with each row's new tokens (ABSENT: none) behind it."""
    new = tokens >= 0
    column = jnp.where(new, text.ends[:, None] + jnp.cumsum(new, axis=1, dtype=jnp.int32) - 1, text.tokens.shape[1])
    rows = jnp.arange(tokens.shape[0])[:, None]
    return dataclasses.replace(
        text,
        tokens=text.tokens.at[rows, column].set(tokens, mode="drop"),
        ends=text.ends + jnp.sum(new, axis=1, dtype=jnp.int32),
    )


def match(text: Text, longest: int) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """How many of the last tokens (at most `longest`) stood together before, and in which column they ended.

    The longest match wins, and of equals the latest. Length 0: the last token never stood there before.
    """
    columns = jnp.arange(text.tokens.shape[1], dtype=jnp.int32)
    alike = columns < text.ends[:, None] - 1
    length = jnp.zeros(text.tokens.shape, jnp.int32)
    for back in range(longest):
        last = jnp.take_along_axis(text.tokens, jnp.maximum(text.ends - 1 - back, 0)[:, None], axis=1)
        earlier = jnp.pad(text.tokens, ((0, 0), (back, 0)), constant_values=ABSENT)[:, : columns.size]
        alike &= (earlier == last) & (earlier >= 0)
        length += alike.astype(jnp.int32)
    column = jnp.argmax(length * columns.size + columns, axis=1).astype(jnp.int32)
    return jnp.max(length, axis=1), column


@dataclasses.dataclass(frozen=True)
class PromptLookup(Checked):
    """Draft what followed the last tokens where they stood before in the text; no model and no tree.

    The text is that of the cache gone on from, the prompt and the output; the last `limit` tokens of what was there
    before the output are searched.

    `depth` tokens are drafted after a match of `shortest` to `longest` tokens; the default is short for a CPU, where
    every further token of a pass costs. `verify`: "exact", "conditional" or a `Conditional`; `fallback` goes over to
    plain steps while drafts do not pay for the longer pass. Source: prompt lookup decoding (Saxena 2023).
    """

    depth: int = 5
    shortest: int = 1
    longest: int = 6
    limit: int = 8192
    verify: str | Conditional = "exact"
    fallback: bool = True
    alone: ClassVar[bool] = True

    def __post_init__(self):
        check_depth(self.depth)
        if not 1 <= self.shortest <= self.longest or self.limit < 1:
            raise BadValue(
                f"shortest={self.shortest}, longest={self.longest}, limit={self.limit}: expected numbers of at least "
                "1, and shortest <= longest"
            )
        parse(self.verify)

    @property
    def shape(self) -> Shape:
        """The shape of every tree."""
        return Shape((1,) * self.depth)

    @property
    def top(self) -> int:
        """K, the tokens of the prefill distribution to keep for every prompt token."""
        return 0

    def gate(self, cost: float) -> Gate:
        """A gate that has seen nothing, where a tree costs so many plain steps. Success is counted apart by the length
        of the match."""
        return opened(self.longest + 1, cost)

    def look(self, text: Text) -> tuple[Int[Array, "B"], Any]:
        """Each row's kind of draft (0: none), and what `draft` needs to know."""
        length, column = match(text, self.longest)
        return jnp.where(length >= self.shortest, length, 0), column

    def draft(self, extra, text: Text, kind: Int[Array, "B"], column: Any, state: DecodeState, sampler: Sampler):
        """The tree below each row's pending token; a text that ends goes on as if it repeated itself."""
        period = text.ends - 1 - column
        at = column[:, None] + 1 + jnp.arange(self.depth, dtype=jnp.int32) % jnp.maximum(period, 1)[:, None]
        trunk = jnp.take_along_axis(text.tokens, jnp.minimum(at, text.tokens.shape[1] - 1), axis=1)
        trunk = jnp.where(kind[:, None] > 0, trunk, ABSENT)
        return self._tree(text, trunk, at - 1, state), None, text

    def settle(self, extra, text: Text, tokens: Int[Array, "B n"]) -> Text:
        """The text with the tokens that were taken."""
        return extended(text, tokens)

    def laid(self, layout: Layout, text: Text) -> Text:
        """The text, everywhere on a mesh, inside a compiled program."""
        return jax.tree.map(layout.constrain, text)

    def passed(self, text: Text, tokens: Int[Array, "B n"]) -> Text:
        """The text with tokens that came without a draft."""
        return extended(text, tokens)

    def drafter(self, params: Params) -> "PromptLookup":
        """The compiled side: itself."""
        return self

    def check_room(self, params: Params, lengths: np.ndarray, room: int) -> None:
        """Nothing: a text of any length has columns."""

    def begin(self, start: Start) -> tuple[Text, None]:
        """The text before the pending token, and that token."""
        here = lambda x: jnp.asarray(on_host(x))  # noqa: E731
        text = begun(start.texts, *self.columns(max(map(len, start.texts)), start.room), self.top)
        if start.expected is not None:  # of the last tokens: a cache's own were not run now
            text = expecting(text, jax.tree.map(here, start.expected))
        text = jax.tree.map(lambda leaf: jnp.repeat(leaf, start.samples, axis=0), text)
        text = extended(text, here(start.pending)[:, None])
        return jax.tree.map(start.params.layout.put, text), None

    def columns(self, longest: int, room: int) -> tuple[int, int]:
        """Columns for texts of at most so many tokens, and for `room` new ones."""
        return min(-(-max(longest, 1) // WIDE) * WIDE, self.limit), -(-room // ROUND) * ROUND

    # ---- rows that come and go in one batch

    def row(self, text: np.ndarray, columns: tuple[int, int]) -> Text:
        """One row's text before what comes."""
        return begun([text], *columns, self.top)

    def expecting(self, text: Text, expected: Expected) -> Text:
        """The row's text with what the model held likely after some more of its prompt."""
        return expecting(text, expected)

    def roomy(self, text: Text, more: int) -> Text:
        """The texts with columns for so many `more` tokens."""
        return slid(text, more)

    # ---- trees

    def _tree(
        self, text: Text, trunk: Int[Array, "B depth"], before: Int[Array, "B depth"], state: DecodeState
    ) -> Tree:
        shape, root = self.shape, state.cache.pending
        tokens, parents = [root[:, None]], [jnp.zeros((root.shape[0], 1), jnp.int32)]
        for depth in range(1, shape.depth + 1):
            many = shape.widths[depth - 1]
            keys = _keys(state, depth)
            beside = self._siblings(text, trunk[:, depth - 1], before[:, depth - 1], many - 1, keys)
            tokens += [trunk[:, depth - 1 : depth], beside]
            parents.append(jnp.full((root.shape[0], many), shape.first(depth - 1), jnp.int32))
        return Tree(jnp.concatenate(tokens, axis=1), jnp.concatenate(parents, axis=1))

    def _siblings(
        self, text: Text, trunk: Int[Array, "B"], before: Int[Array, "B"], many: int, keys: Key[Array, "B"]
    ) -> Int[Array, "B many"]:
        return jnp.zeros((trunk.shape[0], many), jnp.int32)


def _keys(state: DecodeState, depth: int) -> Key[Array, "B"]:
    """A key for what is drawn beside the trunk at this depth; no draw of the text itself has it."""
    each = jax.vmap(jax.random.fold_in)(state.keys, state.cache.lengths + depth)
    return jax.vmap(jax.random.fold_in, (0, None))(each, SIBLING)


@dataclasses.dataclass(frozen=True)
class AASD(PromptLookup):
    """Draft what followed the last tokens, and beside it tokens drawn from what the model itself held likely there.

    Where the model's distribution after the retrieved context, kept from the prefill, gave the retrieved token less
    than `low`, tokens drawn from that distribution stand beside it, no two alike: at most `siblings` at every depth,
    or `siblings[d - 1]` at depth d. They have no children. Of each distribution the `kept` likeliest tokens are there
    to be drawn. Source: alignment sampling, arXiv 2505.13204; `verify="conditional"` is its verification, the default
    gives exactly the text of plain decoding. The match, `low`, `kept`, the numbers of siblings and that nothing hangs
    below them are ours (the paper's are not known). Where a longer pass costs much, as on CPUs,
    `PromptLookup` is faster.
    """

    siblings: int | tuple[int, ...] = 1
    low: float = 0.5
    kept: int = 8

    def __post_init__(self):
        super().__post_init__()
        beside = self.beside
        if len(beside) > self.depth or any(n < 0 for n in beside) or not 0 <= self.low <= 1:
            raise BadValue(
                f"siblings={self.siblings}, low={self.low}: expected a number for every depth, or at most one for each "
                f"({self.depth}), none below 0, and a probability"
            )
        if self.kept <= max(beside):
            raise BadValue(f"kept={self.kept}: expected more than the {max(beside)} siblings that are drawn from them")

    def drafter(self, params: Params) -> "AASD":
        """The compiled side: itself. Raises `BadValue` where the model has fewer tokens than are to be kept."""
        if self.kept > params.config.vocab_size:
            raise BadValue(
                f"kept={self.kept} for a model of {params.config.vocab_size} tokens: expected at most as many; take "
                "fewer"
            )
        return self

    @property
    def beside(self) -> tuple[int, ...]:
        """The most siblings at each depth."""
        if isinstance(self.siblings, tuple):
            return (*self.siblings, *(0,) * (self.depth - len(self.siblings)))
        return (self.siblings,) * self.depth

    @property
    def shape(self) -> Shape:
        """The shape of every tree."""
        return Shape(tuple(1 + n for n in self.beside))

    @property
    def top(self) -> int:
        """K, the tokens of the prefill distribution to keep for every prompt token."""
        return self.kept

    def _siblings(
        self, text: Text, trunk: Int[Array, "B"], before: Int[Array, "B"], many: int, keys: Key[Array, "B"]
    ) -> Int[Array, "B many"]:
        rows = jnp.arange(trunk.shape[0])
        width = text.top.shape[1]
        at = jnp.minimum(before, width - 1)
        top, chance = text.top[rows, at], text.chance[rows, at]  # [B, K]
        same = top == trunk[:, None]
        unlikely = jnp.sum(jnp.where(same, chance, 0.0), axis=1) < self.low
        known = (before < width) & (trunk >= 0) & unlikely
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (top.shape[1],)))(keys)
        drawn = jnp.where(same | (chance <= 0), -jnp.inf, jnp.log(chance) + noise)  # the highest are a draw, none twice
        order = jax.lax.top_k(drawn, many)[1]
        others = jnp.take_along_axis(top, order, axis=1)
        usable = known[:, None] & (jnp.take_along_axis(drawn, order, axis=1) > -jnp.inf)
        return jnp.where(usable, others, ABSENT)
