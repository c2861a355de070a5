"""The KV cache of a batch: a store per layer, and where each row stands in its text."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxkv.errors import BadValue
from jaxkv.store.entries import EMPTY
from jaxkv.store.line import held_by, line_of, shared
from jaxkv.store.pairs import lent
from jaxkv.store.together import opened


@functools.partial(jax.tree_util.register_dataclass, drop_fields=("tokens", "draws"))
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The bounded cache of a batch, and where each row stands in its text.

    `layers` has a store per layer: `Slots`, a `Pool` where the layer's heads share a budget, or the layer's `Place` in
    a line where layers do; `views` are the layers wherever they lie.
    `lengths [B]` counts the tokens seen, so it is the position of the next token; `limits [L, B]` is each row's
    budget per layer; `pending [B]` is a token already sampled but not yet run through the model (-1: none).
    `policy` and `model` say under what the cache was made: another policy's statistics or another model's keys would
    be meaningless here.
    `tokens [B, N]` is the text itself: the `lengths[b]` tokens that row b has seen, -1 behind them; None where nobody
    knows. `draws [B]` tells rows of one text apart, such as samples of a prompt: each goes on drawing by its own random
    numbers; None where all have the first. Both stay on the host: no leaves of the tree, so no program is compiled for
    a text's length, and `jax.tree.map` gives a cache without them. No size below counts them.
    """

    layers: tuple[Any, ...]
    lengths: Int[Array, "B"]
    limits: Int[Array, "L B"]
    pending: Int[Array, "B"]
    policy: Any = dataclasses.field(default=None, metadata={"static": True})
    model: str = dataclasses.field(default="", metadata={"static": True})
    tokens: Int[np.ndarray, "B N"] | None = None
    draws: Int[np.ndarray, "B"] | None = None

    def __repr__(self) -> str:
        """One line, and no array."""
        name = "no policy" if self.policy is None else self.policy.name
        return f"KVCache({name}, {len(self.layers)} layers, lengths of shape {jnp.shape(self.lengths)})"

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return self.lengths.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, positions and statistics held, and of what is held beside them."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.layers))

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held: what a budget bounds, and what the policy's rules hold beside the slots."""
        return sum(layer.kv_bytes for layer in self.layers)

    @property
    def read_bytes(self) -> tuple[int, ...]:
        """Bytes of keys and values that a decode step reads of each layer, of what is beside them, and of an index."""
        return tuple(self.policy.read.bytes(layer, number) for number, layer in enumerate(lent(self.layers)))

    @property
    def views(self) -> tuple[Any, ...]:
        """Every layer as `Slots` or a `Pool`, alone."""
        return opened(self.layers)

    def texts(self) -> list[np.ndarray] | None:
        """Each row's text seen, int32 [lengths[b]]; None where it is not known."""
        return None if self.tokens is None else [row[row >= 0] for row in self.tokens]

    def held(self) -> Int[Array, "L B Hk"]:
        """Entries held per layer, row and KV head."""
        return held_by(self.layers)


def one_row(cache: KVCache, index: int) -> KVCache:
    """A row of the cache as a cache of its own."""
    return rows_at(cache, slice(index, index + 1))


def rows_at(cache: KVCache, row: slice | np.ndarray) -> KVCache:
    """A cache of these rows, by number; some may come again."""
    return dataclasses.replace(
        cache,
        layers=jax.tree.map(lambda leaf: leaf[row], cache.layers),
        lengths=cache.lengths[row],
        limits=cache.limits[:, row],
        pending=cache.pending[row],
        tokens=None if cache.tokens is None else cache.tokens[row],
        draws=None if cache.draws is None else cache.draws[row],
    )


def joined(caches: Sequence[KVCache], order: Int[np.ndarray, "B"]) -> KVCache:
    """The rows of caches of one form behind each other, and of these those of the numbers in `order`."""
    together = lambda *leaves: jnp.concatenate(leaves)[order]  # noqa: E731
    texts = [cache.tokens for cache in caches if cache.tokens is not None]
    draws = [cache.draws for cache in caches if cache.draws is not None]
    width = max((text.shape[1] for text in texts), default=0)
    padded = [np.pad(text, ((0, 0), (0, width - text.shape[1])), constant_values=EMPTY) for text in texts]
    return dataclasses.replace(
        caches[0],
        layers=jax.tree.map(together, *(cache.layers for cache in caches)),
        lengths=together(*(cache.lengths for cache in caches)),
        limits=jnp.concatenate([cache.limits for cache in caches], axis=1)[:, order],
        pending=together(*(cache.pending for cache in caches)),
        tokens=np.concatenate(padded)[order] if texts else None,
        draws=np.concatenate(draws)[order] if draws else None,
    )


def repeated(cache: KVCache, times: int) -> KVCache:
    """Every row of the cache `times` times, next to each other."""
    if times == 1:
        return cache
    repeat = lambda leaf: jnp.repeat(leaf, times, axis=0)  # noqa: E731
    return dataclasses.replace(
        cache,
        layers=jax.tree.map(repeat, cache.layers),
        lengths=repeat(cache.lengths),
        limits=jnp.repeat(cache.limits, times, axis=1),
        pending=repeat(cache.pending),
        tokens=None if cache.tokens is None else np.repeat(cache.tokens, times, axis=0),
        draws=None if cache.draws is None else np.repeat(cache.draws, times),
    )


def branched(cache: KVCache, batch: int) -> KVCache:
    """The cache for `batch` rows: its own number, or one row repeated. Raises `BadValue` for other numbers of rows."""
    if cache.batch == batch:
        return cache
    if cache.batch != 1:
        raise BadValue(f"{batch} prompts on a cache of {cache.batch} rows: expected {cache.batch}, or a cache of 1 row")
    return repeated(cache, batch)


def grown(
    layers: tuple[Any, ...], held: Any, tokens: Sequence[int], windows: tuple[int | None, ...]
) -> tuple[Any, ...]:
    """The layers with slots for so many `tokens [L]` more than the `held [L, B, Hk]` ones, on the host."""
    line = line_of(layers)
    lacking = 0 if line is None else line.lacking(max(shared(layers, tokens)))
    return tuple(
        layer.grown(int(of.max()), more, window, lacking)
        for layer, of, more, window in zip(layers, held, tokens, windows, strict=True)
    )
