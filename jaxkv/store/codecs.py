"""Codecs: how keys or values lie in a slot.

A codec turns an array `[*slots, D]` into its code, a pytree of arrays that begin with the slots' dimensions, and back.
Every slot's code is its own (no scale is shared between slots), so eviction, gathers and overwrites need not know.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxkv.checks import Checked
from jaxkv.errors import BadValue


class Codec(Checked):
    """The form of keys or values in a slot."""

    kind: ClassVar[str]
    plain: ClassVar[bool] = False  # the code is the array itself

    def encode(self, x: Float[Array, "*slots D"]) -> Any:
        """The code of every slot."""
        raise NotImplementedError

    def decode(self, code: Any) -> Float[Array, "*slots D"]:
        """The array that the code stands for."""
        raise NotImplementedError

    def check(self, head_dim: int) -> None:
        """Raises `BadValue` where heads of this width have no code."""

    def empty(self, shape: tuple[int, ...], head_dim: int, dtype: Any) -> Any:
        """The code of zeros in slots of this shape."""
        return self.encode(jnp.zeros((*shape, head_dim), dtype))


@dataclasses.dataclass(frozen=True)
class Plain(Codec):
    """As the model makes them."""

    kind: ClassVar[str] = "plain"
    plain: ClassVar[bool] = True

    def encode(self, x: Float[Array, "*slots D"]) -> Float[Array, "*slots D"]:
        return x

    def decode(self, code: Float[Array, "*slots D"]) -> Float[Array, "*slots D"]:
        return code


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IntCode:
    """Integers of `bits` bits in bytes (two of 4 bits in one), and the scale and the lowest value of each slot."""

    codes: UInt8[Array, "*slots N"]
    scale: Float[Array, "*slots"]
    low: Float[Array, "*slots"]


@dataclasses.dataclass(frozen=True)
class Int(Codec):
    """x^ = low + scale * code, low = min x and scale = (max x - min x) / (2^bits - 1) over the slot's D channels.

    `bits` is 8 or 4; scale and low have the model's dtype, so at D = 64 in bfloat16 a slot takes 68 or 36 bytes
    instead of 128. A slot whose channels are all equal decodes to their value. Source: the asymmetric quantiser per
    token that KIVI (arXiv 2402.02750) has for values.
    """

    bits: int = 8
    kind: ClassVar[str] = "int"

    def __post_init__(self):
        if self.bits not in (4, 8):
            raise BadValue(f"bits={self.bits}: expected 4 or 8")

    def check(self, head_dim: int) -> None:
        if self.bits == 4 and head_dim % 2:
            raise BadValue(f"a head of {head_dim} channels has no code of 4 bits, two to a byte: use bits=8")

    def encode(self, x: Float[Array, "*slots D"]) -> IntCode:
        levels = 2**self.bits - 1
        low, high = jnp.min(x, axis=-1), jnp.max(x, axis=-1)
        wide = high.astype(jnp.float32) - low.astype(jnp.float32)
        scale = (wide / levels).astype(x.dtype)
        step = jnp.where(scale > 0, scale, jnp.ones((), x.dtype)).astype(jnp.float32)[..., None]
        codes = jnp.round((x.astype(jnp.float32) - low.astype(jnp.float32)[..., None]) / step)
        codes = jnp.clip(codes, 0, levels).astype(jnp.uint8)
        if self.bits == 4:
            codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
        return IntCode(codes, scale, low)

    def decode(self, code: IntCode) -> Float[Array, "*slots D"]:
        codes = code.codes
        if self.bits == 4:
            codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
        low, scale = (x.astype(jnp.float32)[..., None] for x in (code.low, code.scale))
        return (low + scale * codes.astype(jnp.float32)).astype(code.scale.dtype)


PLAIN = Plain()
KINDS: dict[str, type[Codec]] = {codec.kind: codec for codec in (Plain, Int)}


@dataclasses.dataclass(frozen=True)
class Codecs(Checked):
    """The codec of the keys and that of the values."""

    keys: Codec = PLAIN
    values: Codec = PLAIN

    @property
    def plain(self) -> bool:
        """Whether both are as the model makes them."""
        return self.keys.plain and self.values.plain

    def check(self, head_dim: int) -> None:
        """Raises `BadValue` where heads of this width have no code."""
        self.keys.check(head_dim)
        self.values.check(head_dim)


PLAIN_BOTH = Codecs()
