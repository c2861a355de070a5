"""Keys or values as codes: what an operation takes in place of floats, and reads without writing the floats out.

A slot's numbers are `low + scale * (code - offset)`, with a scale and perhaps a low for each run of D / G adjacent
channels. So a scale of keys multiplies the logit of its run, and low adds low * (the sum of the query over the run); of
values it multiplies the weight, and the output gets the sum of weight * low. Scales and lows are float16 numbers, held
as the int16 of their bits: TPUs have no float16, and their kernels read the bits where they lie.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float16, Float32, Int, Int16, Shaped, UInt8

UNITS = {8: (1, 1), 4: (2, 1), 3: (8, 3), 2: (4, 1), 1: (8, 1)}  # so many integers lie in so many bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Codes:
    """Keys or values as codes of `bits`: low + scale * (code - offset), by slot and by run of D / G channels.

    Integers lie in bytes, the first channel in the lowest bits: in 4 bits byte n has channel 2n low and 2n + 1 high.
    `codes` of a float of 8 bits are themselves numbers. No scale is 1, no low 0. Scales are never negative: TPU's
    kernels read their bits without a sign. `dtype` is that of what was encoded.
    """

    codes: Shaped[Array, "*slots N"]
    scale: Int16[Array, "*slots G"] | None
    low: Int16[Array, "*slots G"] | None = None
    bits: int = dataclasses.field(default=8, metadata={"static": True})
    offset: int = dataclasses.field(default=0, metadata={"static": True})
    dtype: str = dataclasses.field(default="float32", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the numbers, `[*slots, D]`."""
        *slots, width = self.codes.shape
        return (*slots, width * 8 // self.bits)

    @property
    def groups(self) -> int:
        """G, the runs of channels that have a scale."""
        return 1 if self.scale is None else self.scale.shape[-1]

    @property
    def numbers(self) -> Float[Array, "*slots D"]:
        """The floats that the codes stand for."""
        integers = self.codes.dtype == jnp.uint8
        x = split(
            (unpacked(self.codes, self.bits) if integers else self.codes).astype(jnp.float32),
            self.shape[-1] // self.groups,
        )
        if self.offset:
            x = x - self.offset
        if self.scale is not None:
            x = halves(self.scale)[..., None] * x
        if self.low is not None:
            x = halves(self.low)[..., None] + x
        return x.reshape(self.shape).astype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByChannel:
    """Keys or values as integers of `bits`, packed as in `Codes`: low + scale * code, by channel of a block of slots.

    Block f are the slots from `f * tokens` on, of F blocks. A slot's code cannot be written alone.
    """

    codes: UInt8[Array, "*heads C N"]
    scale: Int16[Array, "*heads F D"]
    low: Int16[Array, "*heads F D"]
    tokens: int = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the numbers, `[*heads, C, D]`."""
        return (*self.codes.shape[:-1], self.scale.shape[-1])

    @property
    def numbers(self) -> Float[Array, "*heads C D"]:
        """The floats that the codes stand for."""
        scale, low = (jnp.repeat(x, self.tokens, axis=-2)[..., : self.shape[-2], :] for x in (self.scale, self.low))
        return in_ranges(self.codes, scale, low, self.bits).astype(self.dtype)

    def at(self, slots: Int[Array, "*heads R"]) -> Float[Array, "*heads R D"]:
        """The floats of some slots of each head."""
        block = slots // self.tokens
        own = zip((self.codes, self.scale, self.low), (slots, block, block), strict=True)
        codes, scale, low = (jnp.take_along_axis(x, at[..., None], axis=-2) for x, at in own)
        return in_ranges(codes, scale, low, self.bits).astype(self.dtype)


Lying = Codes | ByChannel  # what is no array of numbers


def numbers(x: Float[Array, "*slots D"] | Lying) -> Float[Array, "*slots D"]:
    """Keys or values as floats."""
    return x.numbers if isinstance(x, Lying) else x


def bits_of(x: Float16[Array, "*n"]) -> Int16[Array, "*n"]:
    """The bits of float16 numbers, as scales and lows are held."""
    return lax.bitcast_convert_type(x, jnp.int16)


def halves(bits: Int16[Array, "*n"]) -> Float32[Array, "*n"]:
    """The float16 numbers of these bits, as float32."""
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def in_ranges(
    codes: UInt8[Array, "*n N"], scale: Int16[Array, "*#n D"], low: Int16[Array, "*#n D"], bits: int
) -> Float32[Array, "*n D"]:
    """low + scale * code, by the bits of scales and lows."""
    return halves(low) + halves(scale) * unpacked(codes, bits).astype(jnp.float32)


def coded(*arrays: jax.Array | Lying) -> bool:
    """Whether one of the arrays is codes."""
    return any(isinstance(x, Lying) for x in arrays)


def refuse_codes(*arrays: jax.Array | Lying) -> tuple[Any, ...]:
    """The arrays. Raises `NotImplementedError` where one is codes: for an implementation that reads none."""
    if coded(*arrays):
        raise NotImplementedError("it reads no codes")
    return arrays


def check_slots(keys: jax.Array | Lying, values: jax.Array | Lying) -> None:
    """Raises `NotImplementedError` for what few of Pallas' kernels take: scales by channel, and unlike widths of keys
    and values."""
    if isinstance(keys, ByChannel) or isinstance(values, ByChannel):
        raise NotImplementedError("scales by channel of a block of slots: it reads those that each slot has")
    check_widths(keys, values)


def check_widths(keys: jax.Array | Lying, values: jax.Array | Lying) -> None:
    """Raises `NotImplementedError` for keys and values of unlike widths."""
    if keys.shape[-1] != values.shape[-1]:
        raise NotImplementedError(f"keys of {keys.shape[-1]} numbers, values of {values.shape[-1]}: as many of both")


def unpacked(codes: UInt8[Array, "*n N"], bits: int) -> UInt8[Array, "*n D"]:
    """The integers of so many bits that lie side by side in bytes, the first in the lowest bits: 3 bits lie 8 in 3
    bytes."""
    many, width = UNITS[bits]
    words = split(codes, width).astype(jnp.uint32) << (8 * jnp.arange(width, dtype=jnp.uint32))
    words = jnp.sum(words, axis=-1, dtype=jnp.uint32, keepdims=True)
    out = (words >> (bits * jnp.arange(many, dtype=jnp.uint32))) & (2**bits - 1)
    return out.astype(jnp.uint8).reshape(*codes.shape[:-1], codes.shape[-1] // width * many)


def split(x: Shaped[Array, "*n D"], width: int) -> Shaped[Array, "*n _ _"]:
    """The last dimension in pieces of so many."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // width, width)


def put(held: jax.Array | Lying, at: tuple[Int[Array, "..."], ...], new: jax.Array | Codes) -> jax.Array | Lying:
    """What is held, with the token's at these indices of the slots; those out of range are dropped. With scales by
    channel it stays as it is: who holds them writes a block."""
    if isinstance(held, ByChannel):
        return held
    return jax.tree.map(lambda x, y: x.at[at].set(y, mode="drop"), held, new)
