"""From logits to the next token."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxkv.checks import check_arguments

COLDEST = 1e-30  # below this temperature float32 cannot divide logits by it, and the best token has all the chance


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Greedy at temperature 0, else temperature, then top-k, top-p and min-p; the repetition penalty comes first.

    A temperature below 1e-30 is 0. The order and meaning of each are those of Hugging Face transformers' generate.
    Raises `BadValue` out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self):
        check_arguments(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        if self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)

    def sample(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None, keys: Key[Array, "B"], at: Int[Array, "B"]
    ) -> Int[Array, "B"]:
        """The next token of each row; the draw depends on the row's key and the token's position `at` alone."""
        return self.draw(self.warped(logits, seen), keys, at)

    def warped(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None) -> Float[Array, "B V"]:
        """The logits that the draw is made from: after penalty, temperature and filters (greedy: the penalty alone)."""
        if self.repetition_penalty is not None and seen is not None:
            penalty = jnp.float32(self.repetition_penalty)
            logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
        return logits if self.temperature == 0 else self._filtered(logits / jnp.float32(self.temperature))

    def draw(self, logits: Float[Array, "B V"], keys: Key[Array, "B"], at: Int[Array, "B"]) -> Int[Array, "B"]:
        """A token by the warped logits: the best one when greedy."""
        if self.temperature == 0:
            return _best(logits)
        draw = jax.vmap(lambda key, position, row: jax.random.categorical(jax.random.fold_in(key, position), row))
        return draw(keys, at, logits).astype(jnp.int32)

    def _filtered(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """The logits with -inf for tokens that top-k, top-p or min-p leave out; the best token always stays."""
        if self.top_k is not None:
            best = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0]
            logits = jnp.where(logits < best[:, -1:], -jnp.inf, logits)
        if self.top_p is not None:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
            last = jnp.maximum(jnp.sum(before < self.top_p, axis=-1, keepdims=True), 1) - 1
            logits = jnp.where(logits < jnp.take_along_axis(ordered, last, axis=-1), -jnp.inf, logits)
        if self.min_p is not None:
            chance = jax.nn.softmax(logits, axis=-1)
            best = jnp.max(chance, axis=-1, keepdims=True)
            logits = jnp.where(chance < self.min_p * best, -jnp.inf, logits)
        return logits


def _best(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """argmax, the first of equals: as two plain minima and maxima XLA's CPU code is vectorised, as one argmax not."""
    token = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    best = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(best, token, logits.shape[-1] - 1), axis=-1)


def row_keys(seed: int, rows: Sequence[np.ndarray], samples: int) -> Key[Array, "B"]:
    """A key for each of `samples` copies of every row of tokens, from the seed and how often equal rows stood before.

    No row's key depends on the others' text.
    """
    times: dict[bytes, int] = {}
    numbers = []
    for row in rows:
        before = times.get(row.tobytes(), 0)
        numbers.extend(range(before, before + samples))
        times[row.tobytes()] = before + samples
    return jax.vmap(lambda number: jax.random.fold_in(jax.random.key(seed), number))(jnp.array(numbers))
