"""Integers of 8, 4, 3 or 2 bits, packed, with a scale per slot or per group of its channels."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float16, Int16, Shaped, UInt8

from jaxkv.errors import BadValue
from jaxkv.store.codec import FEW, Codec, small
from pallas_kernels.codes import UNITS, Codes, bits_of, split

BITS = (8, 4, 3, 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IntCode:
    """Integers packed into bytes, the scale of each of G groups, and its lowest value (None: the scale is symmetric):
    float16 numbers, as the int16 of their bits.

    `dtype` is that of what was encoded.
    """

    codes: UInt8[Array, "*slots N"]
    scale: Int16[Array, "*slots G"]
    low: Int16[Array, "*slots G"] | None
    dtype: str = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Int(Codec):
    """x^ = low + scale * code, low = min x and scale = (max x - min x) / (2^bits - 1) over each run of `channels`
    adjacent channels of a slot (0: all D). `symmetric`: x^ = scale * code, scale = max |x| / (2^(bits - 1) - 1).

    |x - x^| <= scale / 2, for numbers up to 65504 (with `hadamard` up to 65504 / sqrt(D)); larger ones become what
    scale and low can reach. Both are float16, rounded outwards: a slot of D = 64 channels takes 68 bytes in 8 bits, 36
    in 4, 28 in 3 and 20 in 2, where bfloat16 takes 128. `hadamard`: x is multiplied by a Hadamard matrix over the
    channels before, and x^ by its inverse after, which spreads channels that stand out. `clip`: where a run has both
    signs, its least and largest are taken times that, and what is beyond becomes them. Source: the asymmetric quantiser
    per token that KIVI (arXiv 2402.02750) has for values; the matrix as in QuaRot (arXiv 2404.00456).
    """

    bits: int = 8
    channels: int = 0
    symmetric: bool = False
    hadamard: bool = False
    clip: float = 1.0
    kind: ClassVar[str] = "int"
    readable: ClassVar[bool] = True

    def __post_init__(self):
        if self.bits not in BITS or self.channels < 0:
            raise BadValue(
                f"bits={self.bits}, channels={self.channels}: expected 8, 4, 3 or 2 bits, and how many channels share "
                "a scale (0: all of a head)"
            )
        if not 0 < self.clip <= 1:
            raise BadValue(f"clip={self.clip}: expected the share of the range that is coded, above 0 and at most 1")

    def check(self, head_dim: int) -> None:
        check_packing(self.bits, head_dim)
        if head_dim % self.grouped(head_dim):
            raise BadValue(
                f"channels={self.channels}: expected a number that divides a head's {head_dim} channels, such as "
                f"{head_dim // 2}, or 0 for all of them"
            )

    def grouped(self, head_dim: int) -> int:
        """Channels that share a scale in a head of so many: at most all of them."""
        return min(self.channels or head_dim, head_dim)

    def encode(self, x: Float[Array, "*slots D"]) -> IntCode:
        wide = x.astype(jnp.float32)
        if self.hadamard:
            wide = turned(wide)
        groups = split(wide, self.grouped(wide.shape[-1]))
        if self.symmetric:
            most = 2 ** (self.bits - 1) - 1
            scale, low = outwards(self.clip * jnp.max(jnp.abs(groups), axis=-1), most), None
            codes = (jnp.clip(steps_of(groups, scale[..., None]), -most, most) + most).astype(jnp.uint8)
        else:
            least, largest = jnp.min(groups, axis=-1), jnp.max(groups, axis=-1)
            clip = jnp.where((least < 0) & (largest > 0), jnp.float32(self.clip), 1.0)
            scale, low = ranged(clip * least, clip * largest, self.bits)
            codes = numbered(groups, scale[..., None], low[..., None], 2**self.bits - 1)
        beside = bits_of(scale), None if low is None else bits_of(low)
        return IntCode(packed(codes.reshape(wide.shape), self.bits), *beside, str(x.dtype))

    def decode(self, code: IntCode) -> Float[Array, "*slots D"]:
        if not self.hadamard:
            return self.as_codes(code).numbers
        wide = dataclasses.replace(self.as_codes(code), dtype="float32").numbers
        return turned(wide, back=True).astype(code.dtype)

    def as_codes(self, code: IntCode) -> Codes:
        offset = 2 ** (self.bits - 1) - 1 if self.symmetric else 0
        return Codes(code.codes, code.scale, code.low, self.bits, offset, code.dtype)

    def of_codes(self, codes: Codes) -> IntCode:
        assert codes.scale is not None
        return IntCode(codes.codes, codes.scale, codes.low, codes.dtype)

    def turn(self, x: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        return turned(x.astype(jnp.float32)).astype(x.dtype) if self.hadamard else x

    def unturn(self, x: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        return turned(x.astype(jnp.float32), back=True).astype(x.dtype) if self.hadamard else x


def check_packing(bits: int, head_dim: int) -> None:
    """Raises `BadValue` where integers of so many bits do not fill whole bytes."""
    if head_dim % UNITS[bits][0]:
        raise BadValue(
            f"a head of {head_dim} channels has no code of {bits} bits, {UNITS[bits][0]} to {UNITS[bits][1]} byte(s): "
            "use bits=8"
        )


def ranged(
    low: Float[Array, "*n"], high: Float[Array, "*n"], bits: int
) -> tuple[Float16[Array, "*n"], Float16[Array, "*n"]]:
    """Scale and lowest value, in float16, of 2^bits steps that reach from low to high."""
    least = small(low)
    least = jnp.where(least.astype(jnp.float32) > low, lax.nextafter(least, jnp.full_like(least, -FEW)), least)
    return outwards(high - least.astype(jnp.float32), 2**bits - 1), least


def outwards(reach: Float[Array, "*n"], steps: int) -> Float16[Array, "*n"]:
    """The least float16 of which so many steps are at least `reach`; the largest where none is."""
    scale = small(reach / steps)
    return jnp.where(scale.astype(jnp.float32) * steps < reach, lax.nextafter(scale, jnp.full_like(scale, FEW)), scale)


def numbered(
    x: Float[Array, "*n"], scale: Float[Array, "*#n"], low: Float[Array, "*#n"], most: int
) -> UInt8[Array, "*n"]:
    """round((x - low) / scale) between 0 and `most`."""
    return jnp.clip(steps_of(x - low.astype(jnp.float32), scale), 0, most).astype(jnp.uint8)


def steps_of(x: Float[Array, "*n"], scale: Float[Array, "*#n"]) -> Float[Array, "*n"]:
    """round(x / scale), halves to the even; where the scale is 0, so is x, and the steps are 0."""
    return jnp.round(x / jnp.where(scale > 0, scale.astype(jnp.float32), 1.0))


def packed(codes: UInt8[Array, "*n D"], bits: int) -> UInt8[Array, "*n N"]:
    """The integers side by side in bytes, the first in the lowest bits: 3 bits lie 8 in 3 bytes."""
    many, width = UNITS[bits]
    words = split(codes, many).astype(jnp.uint32) << (bits * jnp.arange(many, dtype=jnp.uint32))
    words = jnp.sum(words, axis=-1, dtype=jnp.uint32, keepdims=True)
    out = (words >> (8 * jnp.arange(width, dtype=jnp.uint32))) & 255
    return out.astype(jnp.uint8).reshape(*codes.shape[:-1], codes.shape[-1] // many * width)


def turned(x: Shaped[Array, "*n D"], back: bool = False) -> Float[Array, "*n D"]:
    """x H, or x H^T: `hadamard_matrix`."""
    matrix = jnp.asarray(hadamard_matrix(x.shape[-1]))
    return jnp.einsum("...d,de->...e", x, matrix.T if back else matrix, precision=lax.Precision.HIGHEST)


@functools.cache
def hadamard_matrix(width: int) -> np.ndarray:
    """An orthonormal matrix `[D, D]` of Hadamard's blocks, each as wide as the largest power of two in D."""
    block = np.ones((1, 1), np.float32)
    while width % (2 * len(block)) == 0:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(width // len(block), dtype=np.float32), block / np.sqrt(np.float32(len(block))))
