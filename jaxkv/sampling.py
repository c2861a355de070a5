"""From logits to the next token."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxkv.checks import check_arguments, plain_field

HEAD = 1024  # of the best tokens are looked at first: sorting a whole vocabulary takes a CPU twenty times as long
COLDEST = 1e-30  # below this temperature float32 cannot divide logits by it, and the best token has all the chance


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Greedy at temperature 0, else temperature, then top-k, top-p and min-p; the repetition penalty comes first.

    A temperature below 1e-30 is 0, and a top-p of 1 is none. The order and meaning of each are those of Hugging Face
    transformers' generate. Raises `BadValue` out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self):
        check_arguments(**{field.name: plain_field(self, field.name) for field in dataclasses.fields(self)})
        if self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_p is not None and self.top_p >= 1:  # which leaves out nothing, and would sort the vocabulary
            object.__setattr__(self, "top_p", None)

    def repeated(self, times: int) -> "Sampler":
        """What draws for so many copies of every row: itself."""
        return self

    def sample(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None, keys: Key[Array, "B"], at: Int[Array, "B"]
    ) -> Int[Array, "B"]:
        """The next token of each row; the draw depends on the row's key and the token's position `at` alone."""
        return self.draw(self.warped(logits, seen), keys, at)

    def warped(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None) -> Float[Array, "B V"]:
        """The logits that the draw is made from: after penalty, temperature and filters (greedy: the penalty alone)."""
        if self.repetition_penalty is not None and seen is not None:
            logits = penalised(logits, seen, jnp.float32(self.repetition_penalty))
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
            least = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None:
            logits = nucleus(logits, jnp.float32(self.top_p))
        return logits if self.min_p is None else likely(logits, jnp.float32(self.min_p))


NO_TOP_K = np.int32(2**31 - 1)  # what a row without the filter has, so that the filter changes nothing
NO_TOP_P = np.float32(2.0)  # 1 would leave out what the sum's rounding puts behind it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampler:
    """A `Sampler` of its own for every row, as data: one program draws for rows that differ, each as its own would.

    What a row does not ask for is not computed for it.
    """

    temperature: Float[Array, "*B"]
    top_k: Int[Array, "*B"]
    top_p: Float[Array, "*B"]
    min_p: Float[Array, "*B"]
    repetition_penalty: Float[Array, "*B"]

    @classmethod
    def of(cls, samplers: Sequence[Sampler]) -> "RowSampler":
        """The rows' samplers as arrays; what a sampler leaves out has the number that changes nothing."""
        missing = {"top_k": NO_TOP_K, "top_p": NO_TOP_P, "min_p": 0.0, "repetition_penalty": 1.0}

        def column(name: str) -> jax.Array:
            values = [getattr(sampler, name) for sampler in samplers]
            filled = [missing[name] if value is None else value for value in values]
            return jnp.asarray(
                np.array([min(x, NO_TOP_K) for x in filled], np.int32 if name == "top_k" else np.float32)
            )

        return cls(**{field.name: column(field.name) for field in dataclasses.fields(cls)})

    def repeated(self, times: int) -> "RowSampler":
        """What draws for so many copies of every row, next to each other."""
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), self)

    def sample(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None, keys: Key[Array, "B"], at: Int[Array, "B"]
    ) -> Int[Array, "B"]:
        """The next token of each row, as its own `Sampler.sample` gives it."""
        logits = self._penalised(logits, seen)
        best = _best(logits)
        rows = self, logits, keys, at, best
        return jax.lax.cond(jnp.any(self.temperature > 0), lambda: jax.lax.map(_row, rows), lambda: best)

    def warped(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None) -> Float[Array, "B V"]:
        """The logits that each row's draw is made from, as its own `Sampler.warped` gives them."""

        def of_row(row: tuple[RowSampler, Any]) -> Float[Array, "V"]:
            sampler, own = row
            return jax.lax.cond(sampler.temperature > 0, lambda: _warm(sampler, own), lambda: own)

        return jax.lax.map(of_row, (self, self._penalised(logits, seen)))

    def _penalised(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None) -> Float[Array, "B V"]:
        if seen is None:
            return logits
        penalty = self.repetition_penalty[:, None]
        wanted = jnp.any(penalty != 1)
        return jax.lax.cond(wanted, lambda x: penalised(x, seen, penalty), lambda x: x, logits)


def _row(row: tuple[RowSampler, Any, Any, Any, Any]) -> Int[Array, ""]:
    """The token of one row: its logits `[V]`, key and position, and the best token, which it has when greedy."""
    sampler, logits, key, at, best = row

    def drawn() -> Int[Array, ""]:
        warm = _warm(sampler, logits)
        return jax.random.categorical(jax.random.fold_in(key, at), warm).astype(jnp.int32)

    return jax.lax.cond(sampler.temperature > 0, drawn, lambda: best)


def _warm(sampler: RowSampler, logits: Float[Array, "V"]) -> Float[Array, "V"]:
    """One row's logits after its temperature, which is above 0, and its filters."""
    warm = logits / sampler.temperature
    for wanted, kept in (
        (sampler.top_k < logits.shape[0], lambda x: best_ones(x, sampler.top_k)),
        (sampler.top_p < NO_TOP_P, lambda x: nucleus(x, sampler.top_p)),
        (sampler.min_p > 0, lambda x: likely(x, sampler.min_p)),
    ):
        warm = jax.lax.cond(wanted, kept, lambda x: x, warm)
    return warm


def penalised(logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Any) -> Float[Array, "B V"]:
    """The logits with those of the tokens seen lowered by the penalty (a number, or `[B, 1]`)."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def best_ones(logits: Float[Array, "V"], top_k: Int[Array, ""]) -> Float[Array, "V"]:
    """The logits with -inf for those below the `top_k`-th best, a number that is data."""
    of_all = lambda: jnp.sort(logits, descending=True)[top_k - 1]  # noqa: E731
    best = jax.lax.top_k(logits, min(HEAD, logits.shape[0]))[0]
    least = jax.lax.cond(top_k <= best.shape[0], lambda: best[top_k - 1], of_all)
    return jnp.where(logits < least, -jnp.inf, logits)


def nucleus(logits: Float[Array, "*B V"], top_p: Any) -> Float[Array, "*B V"]:
    """The logits with -inf behind the best tokens whose chances add up to `top_p`; all are sorted only where a row
    needs more than the best `HEAD`."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def least(ordered: Float[Array, "*B N"]) -> tuple[Float[Array, "*B 1"], Bool[Array, ""]]:
        chance = jnp.exp(ordered - total)
        before = jnp.cumsum(chance, axis=-1) - chance
        last = jnp.maximum(jnp.sum(before < top_p, axis=-1, keepdims=True), 1) - 1
        return jnp.take_along_axis(ordered, last, axis=-1), jnp.all(before[..., -1] >= top_p)

    found, enough = least(jax.lax.top_k(logits, min(HEAD, logits.shape[-1]))[0])
    if logits.shape[-1] > HEAD:
        of_all = lambda: least(jnp.sort(logits, axis=-1, descending=True))[0]  # noqa: E731
        found = jax.lax.cond(enough, lambda: found, of_all)
    return jnp.where(logits < found, -jnp.inf, logits)


def likely(logits: Float[Array, "*B V"], min_p: Any) -> Float[Array, "*B V"]:
    """The logits with -inf for tokens that have less than `min_p` of the best one's chance."""
    chance = jax.nn.softmax(logits, axis=-1)
    best = jnp.max(chance, axis=-1, keepdims=True)
    return jnp.where(chance < min_p * best, -jnp.inf, logits)


def _best(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """argmax, the first of equals: as two plain minima and maxima XLA's CPU code is vectorised, as one argmax not."""
    token = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    best = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(best, token, logits.shape[-1] - 1), axis=-1)


def draws_of(texts: Sequence[bytes], samples: int, before: np.ndarray | None = None) -> Int[np.ndarray, "N"]:
    """Which random numbers each of `samples` copies of every row draws by: those of its number among equal texts.

    A row that goes on keeps the number that it drew by `before`, as far as no equal text has it already. No row's
    number depends on another text.
    """
    taken: dict[bytes, set[int]] = {}
    numbers = []
    for text, number in zip(texts, np.zeros(len(texts), int) if before is None else before, strict=True):
        used = taken.setdefault(text, set())
        for _ in range(samples):
            number = next(free for free in itertools.count(int(number)) if free not in used)
            used.add(number)
            numbers.append(number)
    return np.array(numbers, np.int32)


def row_keys(seed: int, draws: Int[np.ndarray, "N"]) -> Key[Array, "N"]:
    """A key for each row, from the seed and the number that it draws by."""
    key = key_of(jnp.asarray(halves(seed)))
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.asarray(draws))


def generator(seed: int) -> np.random.Generator:
    """NumPy's, which knows no seeds below 0: by the seed's 64 bits."""
    return np.random.default_rng(seed % 2**64)


def halves(seed: int) -> UInt32[np.ndarray, "2"]:
    """The low and the high half of the seed's 64 bits, for programs know no whole ones."""
    return np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)


def key_of(seed: UInt32[Array, "2"]) -> Key[Array, ""]:
    """The key of a seed's halves; that of the low one alone where the high one is 0."""
    low = jax.random.key(seed[0])
    return jnp.where(seed[1] == 0, low, jax.random.fold_in(low, seed[1]))
