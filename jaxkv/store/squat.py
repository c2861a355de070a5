"""Squat: integers by channel, whose errors are turned away from the directions of the queries."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float16, Int, UInt8

from jaxkv.errors import BadValue
from jaxkv.store.blocks import BlockCode, Blocks
from jaxkv.store.by_channel import IntByChannel, Ranges
from jaxkv.store.codec import Fitting, small
from pallas_kernels.codes import ByChannel


@dataclasses.dataclass(frozen=True)
class Squat(Fitting):
    """Integers as `int-by-channel` has them, of `channels` channels after others: when a run of them has the error
    e = x^ - x, the channels r behind it become x_r - P_rr^-1 P_re e before they are coded.

    P = I + `strength` * Q^T Q, where Q are the `rank` first right singular vectors of a KV head's queries times their
    singular values: of the last `window` queries of the prompt, after RoPE. So |x^ - x|^2 + strength * |Q (x^ - x)|^2
    is kept small, channel run by channel run. Where `channels` are all of a head there is nothing to turn. Source:
    SQuat (arXiv 2503.24358), whose queries are the whole prompt's.
    """

    bits: int = 2
    tokens: int = 32
    channels: int = 64
    rank: int = 20
    strength: float = 1e-3
    window: int = 512
    apart: ClassVar[bool] = False
    kind: ClassVar[str] = "squat"

    def __post_init__(self):
        if min(self.channels, self.rank, self.window) < 1 or self.strength < 0:
            raise BadValue(
                f"channels={self.channels}, rank={self.rank}, window={self.window}, strength={self.strength}: expected "
                "at least 1 channel, direction and query, and a strength of 0 or more"
            )
        IntByChannel(self.bits, self.tokens)  # which checks its numbers

    @property
    def _integers(self) -> IntByChannel:
        return IntByChannel(self.bits, self.tokens)

    @property
    def together(self) -> int:
        return self.tokens

    @property
    def looks(self) -> int:
        return self.window

    def suits(self, name: str, codecs: Any, policy: Any) -> None:
        if name == "values":
            raise BadValue(
                f"policy {policy.name!r} with values in codec 'squat', whose directions are queries': keys only"
            )

    def check(self, head_dim: int) -> None:
        self._integers.check(head_dim)
        if head_dim % min(self.channels, head_dim):
            raise BadValue(
                f"channels={self.channels}: expected a number that divides a head's {head_dim} channels, such as "
                f"{head_dim // 2}"
            )

    def fit(
        self,
        x: Float[Array, "B Hk S D"],
        positions: Int[Array, "B Hk S"],
        queries: Float[Array, "B Hq W D"] | None,
        learned: Any,
    ) -> tuple[Float16[Array, "B Hk _ _"], ...]:
        width = x.shape[-1]
        assert queries is not None  # of keys
        grouped = queries[:, :, -self.window :].astype(jnp.float32).reshape(*x.shape[:2], -1, width)
        gram = jnp.einsum("bhqd,bhqe->bhde", grouped, grouped, precision=lax.Precision.HIGHEST)
        sizes, vectors = jnp.linalg.eigh(gram)
        first = max(width - self.rank, 0)
        few = vectors[..., first:] * jnp.sqrt(jnp.maximum(sizes[..., None, first:], 0.0))
        weight = jnp.eye(width) + self.strength * jnp.einsum(
            "bhdr,bher->bhde", few, few, precision=lax.Precision.HIGHEST
        )
        return tuple(
            small(-jnp.linalg.solve(weight[..., end:, end:], weight[..., end:, end - self.channels : end]))
            for end in range(self.channels, width, self.channels)
        )

    def unfit(self, batch: int, heads: int, head_dim: int) -> tuple[Float16[Array, "B Hk _ _"], ...]:
        ends = range(self.channels, head_dim, self.channels)
        return tuple(jnp.zeros((batch, heads, head_dim - end, self.channels), jnp.float16) for end in ends)

    def fitted(self, fit: Any) -> "Turned":
        return Turned(fit, self.tokens, self._integers, self.channels)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turned(Blocks):
    """`integers` of which each run of `channels` hands its error on to the channels behind it, by `turns`."""

    turns: tuple[Float16[Array, "B Hk _ _"], ...]
    tokens: int = dataclasses.field(metadata={"static": True})
    integers: IntByChannel = dataclasses.field(metadata={"static": True})
    channels: int = dataclasses.field(metadata={"static": True})
    readable: ClassVar[bool] = True

    def as_codes(self, code: BlockCode) -> ByChannel:
        return self.integers.as_codes(code)

    def coded(self, x: Float[Array, "*n T D"], filled: Bool[Array, "*n T"]) -> tuple[UInt8[Array, "*n T N"], Ranges]:
        left = jnp.where(filled[..., None], x.astype(jnp.float32), 0.0)
        for number, turn in enumerate(self.turns):
            done = slice(number * self.channels, (number + 1) * self.channels)
            error = self._near(left, filled)[..., done] - left[..., done]
            turn = turn.reshape(*turn.shape[:2], *(1,) * (x.ndim - 4), *turn.shape[2:]).astype(jnp.float32)
            moved = jnp.einsum("...td,...ed->...te", error, turn, precision=lax.Precision.HIGHEST)
            left = left.at[..., done.stop :].add(jnp.where(filled[..., None], moved, 0.0))
        return self.integers.coded(left, filled)

    def _near(self, x: Float[Array, "*n T D"], filled: Bool[Array, "*n T"]) -> Float[Array, "*n T D"]:
        return self.numbers(*self.integers.coded(x, filled))

    def numbers(self, slots: UInt8[Array, "*n T N"], blocks: Ranges) -> Float[Array, "*n T D"]:
        return self.integers.numbers(slots, blocks)
