"""Integers with a scale per channel of a block of tokens."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int16, UInt8

from jaxkv.errors import BadValue
from jaxkv.store.blocks import BlockCode, Blocks
from jaxkv.store.integers import BITS, check_packing, numbered, packed, ranged
from pallas_kernels.codes import ByChannel, bits_of, in_ranges


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ranges:
    """Scale and lowest value of each channel of a block: the bits of float16 numbers, as `Codes` has them."""

    scale: Int16[Array, "*n D"]
    low: Int16[Array, "*n D"]


@dataclasses.dataclass(frozen=True)
class IntByChannel(Blocks):
    """x^ = low + scale * code, low = min x and scale = (max x - min x) / (2^bits - 1) over each channel of a block of
    `tokens` that lie side by side: what KIVI (arXiv 2402.02750) does to keys.

    |x - x^| <= scale / 2 each time that a block is encoded. It takes 4 bytes per channel besides its integers.
    """

    bits: int = 4
    tokens: int = 32
    kind: ClassVar[str] = "int-by-channel"
    readable: ClassVar[bool] = True

    def __post_init__(self):
        if self.bits not in BITS or self.tokens < 1:
            raise BadValue(
                f"bits={self.bits}, tokens={self.tokens}: expected 8, 4, 3 or 2 bits, and how many tokens share a "
                "channel's scale (at least 1)"
            )

    def check(self, head_dim: int) -> None:
        check_packing(self.bits, head_dim)

    def coded(self, x: Float[Array, "*n T D"], filled: Bool[Array, "*n T"]) -> tuple[UInt8[Array, "*n T N"], Ranges]:
        some, wide = filled[..., None], x.astype(jnp.float32)
        any_filled = jnp.any(some, axis=-2)
        low, high = (
            jnp.where(any_filled, most(jnp.where(some, wide, end), axis=-2), 0.0)
            for most, end in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf))
        )
        scale, low = ranged(low, high, self.bits)
        codes = numbered(jnp.where(some, wide, 0.0), scale[..., None, :], low[..., None, :], 2**self.bits - 1)
        return packed(jnp.where(some, codes, 0), self.bits), Ranges(bits_of(scale), bits_of(low))

    def as_codes(self, code: BlockCode) -> ByChannel:
        return ByChannel(code.slots, code.blocks.scale, code.blocks.low, self.tokens, self.bits, code.dtype)

    def numbers(self, slots: UInt8[Array, "*n T N"], blocks: Ranges) -> Float[Array, "*n T D"]:
        return in_ranges(slots, blocks.scale[..., None, :], blocks.low[..., None, :], self.bits)
