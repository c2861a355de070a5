"""order: entries side by side in time, whatever slots they lie in."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BIG = float(jnp.finfo(jnp.float32).max)  # above every score, below what is protected


@dataclasses.dataclass(frozen=True)
class InTime:
    """The slots of each head in time order, the filled ones first: `count [B, Hk]` of them."""

    index: Int[Array, "B Hk S"]
    back: Int[Array, "B Hk S"]
    count: Int[Array, "B Hk"]

    def put(self, x: jax.Array) -> jax.Array:
        """`x [B, Hk, S, ...]` with the oldest entry first."""
        return jnp.take_along_axis(x, self.index.reshape(self.index.shape + (1,) * (x.ndim - 3)), axis=2)

    def slots(self, x: jax.Array) -> jax.Array:
        """What stands in time order, back in its slots."""
        return jnp.take_along_axis(x, self.back.reshape(self.back.shape + (1,) * (x.ndim - 3)), axis=2)

    @property
    def filled(self) -> Bool[Array, "B Hk S"]:
        """True for the places that hold an entry."""
        return jnp.arange(self.index.shape[-1]) < self.count[..., None]


def in_time(positions: Int[Array, "B Hk S"]) -> InTime:
    """The order of the entries by position."""
    late = jnp.where(positions < 0, jnp.iinfo(positions.dtype).max, positions)
    index = jnp.argsort(late, axis=-1, stable=True)
    return InTime(index, jnp.argsort(index, axis=-1), jnp.sum(positions >= 0, axis=-1, dtype=jnp.int32))


def best_first(score: Float[Array, "B Hk S"], positions: Int[Array, "B Hk S"]) -> Int[Array, "B Hk S"]:
    """Each entry's place by score, 0 for the highest; of equals the older first, empty slots last."""
    late = jnp.where(positions < 0, jnp.iinfo(positions.dtype).max, positions)
    score = jnp.where(positions < 0, -jnp.inf, score)
    return jnp.argsort(jnp.lexsort((late, -score), axis=-1), axis=-1)


def count(mask: jax.Array, axis: int | tuple[int, ...], keepdims: bool = False) -> jax.Array:
    """How many are True, float32 and at least 1, to divide by."""
    return jnp.maximum(jnp.sum(mask, axis=axis, keepdims=keepdims, dtype=jnp.float32), 1.0)


def in_chunks(x: jax.Array, length: int) -> jax.Array:
    """`x [B, Hk, S, ...]` as `[B, Hk, n, length, ...]`, the end filled up with 0."""
    whole = -(-x.shape[2] // length)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, whole * length - x.shape[2])) + ((0, 0),) * (x.ndim - 3))
    return x.reshape(*x.shape[:2], whole, length, *x.shape[3:])
