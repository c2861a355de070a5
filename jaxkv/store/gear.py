"""Gear: integers of few bits, and what they miss: the outliers exactly, the rest by a matrix of low rank."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float16, Int, Shaped, UInt16

from jaxkv.errors import BadValue, unknown
from jaxkv.store.blocks import Blocks
from jaxkv.store.by_channel import IntByChannel
from jaxkv.store.codec import small
from jaxkv.store.integers import BITS
from jaxkv.store.integers import Int as IntCodec

BY = ("channel", "token")
LOOPS = 3  # of the power iteration


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Missed:
    """Of each block the outliers, where they stand among its T * D numbers, and the right side of the low rank."""

    ranges: Any
    outliers: Float[Array, "*n K"]
    at: UInt16[Array, "*n K"]
    right: Float16[Array, "*n D R"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    """Of each slot its integers, and its row of the low rank's left side."""

    codes: Any
    left: Float16[Array, "*n R"]


@dataclasses.dataclass(frozen=True)
class Gear(Blocks):
    """x^ = Q(x - S) + S + U V^T over blocks of `tokens`: S are of each channel of the block (`by="channel"`), or of
    each token (`by="token"`), the `outliers` / 2 largest and as many smallest numbers, one at least, which are exact; Q
    has integers of `bits`, with scale and offset for each channel of the block or for each token, for every `channels`
    of it (0: all); an outlier stands in it as the mean of its channel, or token. U V^T of `rank` is what power
    iteration finds of x - S - Q(x - S): it makes the error no larger. Source: GEAR (arXiv 2403.05527), whose release
    takes the outliers of a channel from a whole prompt, and those of a token from all heads.
    """

    bits: int = 2
    tokens: int = 64
    by: str = "channel"
    channels: int = 0
    rank: int = 2
    outliers: float = 0.02
    kind: ClassVar[str] = "gear"

    def __post_init__(self):
        if self.bits not in BITS or min(self.tokens, self.rank) < 1 or not 0 <= self.outliers < 1 or self.channels < 0:
            raise BadValue(
                f"bits={self.bits}, tokens={self.tokens}, rank={self.rank}, outliers={self.outliers}, "
                f"channels={self.channels}: expected 8, 4, 3 or 2 bits, at least 1 token and rank 1, a fraction that "
                "is exact, and how many channels share a scale (0: all of a head)"
            )
        if self.by not in BY:
            raise unknown("by of codec 'gear'", self.by, BY)

    @property
    def _integers(self) -> Any:
        if self.by == "channel":
            return IntByChannel(self.bits, self.tokens)
        return IntCodec(self.bits, self.channels)

    def check(self, head_dim: int) -> None:
        self._integers.check(head_dim)
        if self.tokens * head_dim > 2**16 or self.rank > min(self.tokens, head_dim):
            raise BadValue(
                f"tokens={self.tokens}, rank={self.rank} with heads of {head_dim} channels: expected at most 65536 "
                "numbers in a block, and a rank no larger than either side of it"
            )

    def coded(self, x: Float[Array, "*n T D"], filled: Bool[Array, "*n T"]) -> tuple[Own, Missed]:
        some = filled[..., None]
        given = jnp.where(some, x, jnp.zeros((), x.dtype))
        wide = given.astype(jnp.float32)
        outliers, at = self._extremes(given, filled)
        mean = self._mean(wide, some)
        rest = _put(wide, jnp.take_along_axis(_flat(mean), at, axis=-1), at)
        codes, ranges = self._quantised(rest, filled)
        near = self._restored(codes, ranges, outliers, at)
        left, right = low_rank(jnp.where(some, wide - near, 0.0), self.rank)
        return Own(codes, small(left)), Missed(ranges, outliers, at.astype(jnp.uint16), small(right))

    def numbers(self, slots: Own, blocks: Missed) -> Float[Array, "*n T D"]:
        near = self._restored(slots.codes, blocks.ranges, blocks.outliers, blocks.at.astype(jnp.int32))
        left, right = slots.left.astype(jnp.float32), blocks.right.astype(jnp.float32)
        return near + jnp.einsum("...tr,...dr->...td", left, right, precision=lax.Precision.HIGHEST)

    def _extremes(
        self, x: Float[Array, "*n T D"], filled: Bool[Array, "*n T"]
    ) -> tuple[Float[Array, "*n K"], Int[Array, "*n K"]]:
        """The largest and the smallest numbers of each channel, or token, in the filled slots, and where they stand; of
        equals the first. Where fewer are filled, 0 of an empty one."""
        tokens, channels = x.shape[-2:]
        long, lines = (tokens, channels) if self.by == "channel" else (channels, tokens)
        many = max(int(self.outliers / 2 * long), 1) if self.outliers else 0

        def top(side):
            given = jnp.where(filled[..., None], side, -jnp.inf)
            return lax.top_k(jnp.swapaxes(given, -1, -2) if self.by == "channel" else given, many)[1]

        wide, line = x.astype(jnp.float32), jnp.arange(lines, dtype=jnp.int32)[:, None]
        place = jnp.concatenate([top(wide), top(-wide)], axis=-1)
        at = _flat(place * lines + line if self.by == "channel" else line * long + place)
        return jnp.take_along_axis(_flat(x), at, axis=-1), at

    def _mean(self, x: Float[Array, "*n T D"], some: Bool[Array, "*n T 1"]) -> Float[Array, "*n T D"]:
        """Of each number the mean of its channel, or of its token."""
        if self.by == "token":
            mean = jnp.mean(x, axis=-1, keepdims=True)
        else:
            many = jnp.maximum(jnp.sum(some, axis=-2, keepdims=True), 1).astype(jnp.float32)
            mean = jnp.sum(x, axis=-2, keepdims=True) / many
        return jnp.where(some, jnp.broadcast_to(mean, x.shape), 0.0)

    def _quantised(self, x: Float[Array, "*n T D"], filled: Bool[Array, "*n T"]) -> tuple[Any, Any]:
        if self.by == "channel":
            return self._integers.coded(x, filled)
        return self._integers.encode(x), None

    def _restored(
        self, codes: Any, ranges: Any, outliers: Shaped[Array, "*n K"], at: Int[Array, "*n K"]
    ) -> Float[Array, "*n T D"]:
        x = self._integers.numbers(codes, ranges) if self.by == "channel" else self._integers.decode(codes)
        return _put(x.astype(jnp.float32), outliers.astype(jnp.float32), at)


def low_rank(x: Float[Array, "*n T D"], rank: int) -> tuple[Float[Array, "*n T R"], Float[Array, "*n D R"]]:
    """U with orthonormal columns and V = x^T U, such that U V^T is near to x: U spans (x x^T)^n x applied to a fixed
    start, so that it holds the directions of the largest singular values. |x - U V^T| <= |x| in the Frobenius norm."""
    right = jnp.broadcast_to(jnp.asarray(_start(x.shape[-1], rank)), (*x.shape[:-2], x.shape[-1], rank))
    times = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    left = jnp.zeros((*x.shape[:-1], rank), jnp.float32)
    for _ in range(LOOPS):
        left = jnp.linalg.qr(times("...td,...dr->...tr", x, right))[0]
        right = times("...td,...tr->...dr", x, left)
    return left, right


@functools.cache
def _start(width: int, rank: int) -> np.ndarray:
    return np.random.default_rng(0).random((width, rank), np.float32)


def _flat(x: Shaped[Array, "*n T D"]) -> Shaped[Array, "*n _"]:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _put(x: Float[Array, "*n T D"], new: Float[Array, "*n K"], at: Int[Array, "*n K"]) -> Float[Array, "*n T D"]:
    """x with the new numbers where they stand."""
    return jnp.put_along_axis(_flat(x), at, new, axis=-1, inplace=False).reshape(x.shape)
