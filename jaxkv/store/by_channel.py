"""Integers with a scale per channel of a block of tokens."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float16, Int, UInt8

from jaxkv.errors import BadValue
from jaxkv.store.codec import Shared
from jaxkv.store.integers import BITS, check_packing, numbered, packed, ranged, unpacked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCode:
    """Integers packed into bytes, and scale and lowest value of each channel of each of F blocks of slots.

    Blocks are counted from slot `start` of each head on, past the last slot to the first, so that a block is tokens
    that follow each other. `dtype` is that of what was encoded.
    """

    codes: UInt8[Array, "B Hk C N"]
    scale: Float16[Array, "B Hk F D"]
    low: Float16[Array, "B Hk F D"]
    start: Int[Array, "B Hk"]
    dtype: str = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class IntByChannel(Shared):
    """x^ = low + scale * code, low = min x and scale = (max x - min x) / (2^bits - 1) over each channel of a block of
    `tokens` that lie side by side: what KIVI (arXiv 2402.02750) does to keys.

    Where a slot is written its whole block is encoded anew; so are all blocks after a cut, with other neighbours. What
    the residual window holds is encoded from the exact numbers. |x - x^| <= scale / 2 each time. A block takes 4 bytes
    per channel besides its integers.
    """

    bits: int = 4
    tokens: int = 32
    kind: ClassVar[str] = "int-by-channel"

    def __post_init__(self):
        if self.bits not in BITS or self.tokens < 1:
            raise BadValue(
                f"bits={self.bits}, tokens={self.tokens}: expected 8, 4, 3 or 2 bits, and how many tokens share a "
                "channel's scale (at least 1)"
            )

    def check(self, head_dim: int) -> None:
        check_packing(self.bits, head_dim)

    @property
    def together(self) -> int:
        return self.tokens

    def encode_all(self, x: Float[Array, "B Hk C D"], positions: Int[Array, "B Hk C"]) -> BlockCode:
        slots, width = x.shape[2:]
        never = jnp.iinfo(jnp.int32).max
        oldest = jnp.where(positions < 0, never, positions)
        start = jnp.argmin(oldest, axis=-1).astype(jnp.int32) if slots else jnp.zeros(x.shape[:2], jnp.int32)
        blocks = -(-slots // self.tokens)
        at = _slots(start[..., None], jnp.arange(blocks * self.tokens), slots)
        inside = jnp.arange(blocks * self.tokens) < slots
        shape = (*x.shape[:2], blocks, self.tokens)
        rows = jnp.take_along_axis(x, at[..., None], axis=2).reshape(*shape, width)
        filled = (jnp.take_along_axis(positions, at, axis=2) >= 0) & inside
        codes, scale, low = self._block(rows, filled.reshape(shape))
        codes = codes.reshape(*x.shape[:2], blocks * self.tokens, codes.shape[-1])
        back = (jnp.arange(slots) - start[..., None]) % max(slots, 1)
        codes = jnp.take_along_axis(codes, back[..., None], axis=2)
        return BlockCode(codes, scale, low, start, str(x.dtype))

    def written(
        self,
        code: BlockCode,
        x: Float[Array, "B Hk C D"],
        positions: Int[Array, "B Hk C"],
        slot: Int[Array, "B Hk"],
        active: Bool[Array, "B"],
    ) -> BlockCode:
        slots, blocks = x.shape[2], code.scale.shape[2]
        number = ((slot - code.start) % slots) // self.tokens
        place = number[..., None] * self.tokens + jnp.arange(self.tokens)
        at, inside = _slots(code.start[..., None], place, slots), place < slots
        rows = jnp.take_along_axis(x, at[..., None], axis=2)
        filled = (jnp.take_along_axis(positions, at, axis=2) >= 0) & inside
        codes, scale, low = self._block(rows, filled)
        row, head = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])[None, :]
        live = active[:, None]
        to = jnp.where(inside & live[..., None], at, slots)  # out of range, so dropped
        number = jnp.where(live, number, blocks)
        return dataclasses.replace(
            code,
            codes=code.codes.at[row[..., None], head[..., None], to].set(codes, mode="drop"),
            scale=code.scale.at[row, head, number].set(scale, mode="drop"),
            low=code.low.at[row, head, number].set(low, mode="drop"),
        )

    def _block(
        self, x: Float[Array, "*n T D"], filled: Bool[Array, "*n T"]
    ) -> tuple[UInt8[Array, "*n T N"], Float16[Array, "*n D"], Float16[Array, "*n D"]]:
        """Integers, scale and lowest value of blocks of T slots, by those that are filled."""
        some, wide = filled[..., None], x.astype(jnp.float32)
        any_filled = jnp.any(some, axis=-2)
        low, high = (
            jnp.where(any_filled, most(jnp.where(some, wide, end), axis=-2), 0.0)
            for most, end in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf))
        )
        scale, low = ranged(low, high, self.bits)
        codes = numbered(jnp.where(some, wide, 0.0), scale[..., None, :], low[..., None, :], 2**self.bits - 1)
        return packed(jnp.where(some, codes, 0), self.bits), scale, low

    def decode(self, code: BlockCode) -> Float[Array, "B Hk C D"]:
        codes = unpacked(code.codes, self.bits).astype(jnp.float32)
        slots = codes.shape[2]
        block = ((jnp.arange(slots) - code.start[..., None]) % max(slots, 1)) // self.tokens
        scale, low = (
            jnp.take_along_axis(x, block[..., None], axis=2).astype(jnp.float32) for x in (code.scale, code.low)
        )
        return (low + scale * codes).astype(code.dtype)


def _slots(start: Int[Array, "*n 1"], place: Int[Array, "*#m T"], slots: int) -> Int[Array, "*n T"]:
    """The slots at these places from `start` on; places past the last slot give some slot."""
    return ((start + place) % max(slots, 1)).astype(jnp.int32)
