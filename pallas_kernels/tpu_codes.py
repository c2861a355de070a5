"""How the TPU kernels read codes: a block of them becomes numbers on the chip, in parts of its channels.

The codes of one byte are adjacent channels, so a block gives P parts, part p with the channels p, P + p, 2 P + p and
so on: what is multiplied with them is laid out so before (`spread`), what comes out is put back behind (`gathered`). No
part is put beside another. An entry is `scale * (number - added) + low`, which the kernel does to logits and weights:
`added` is what a form's numbers have more than the codes without their offset.

Where the slots lie along the lanes and the model computes in bfloat16, a nibble becomes a number by its bits: 0x4300 or
the code is 128 + code. Two lie in a word then, so that P is twice the codes in a byte.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.codes import Codes

EXPONENT, FROM = 0x43004300, 128  # of two numbers of 16 bits: those from 128 on, in steps of 1
WORD = 4  # bytes


@dataclasses.dataclass(frozen=True)
class Form:
    """How keys or values lie: `bits` of an integer (None: floats); what a slot has of scales and lows, G each."""

    dim: int
    columns: bool  # a block is [N, S], with the slots along the lanes
    dtype: str  # of the numbers that are multiplied
    bits: int | None = None
    coded: bool = False
    groups: int = 1
    scaled: bool = False
    lowered: bool = False
    offset: int = 0
    by_bits: bool = False

    @classmethod
    def of(cls, x: jax.Array | Codes, columns: bool, dtype: str) -> "Form":
        """That of keys or values. Raises `NotImplementedError` for codes that a block does not give apart."""
        dim = x.shape[-1]
        if not isinstance(x, Codes):
            return cls(dim, columns, str(x.dtype))
        integer = x.codes.dtype == jnp.uint8
        if integer and x.bits not in (8, 4, 2):
            raise NotImplementedError(f"codes of {x.bits} bits: 8, 4 or 2")
        by_bits = integer and columns and x.bits < 8 and dtype == "bfloat16" and x.codes.shape[-1] % (8 * WORD) == 0
        form = cls(
            dim, columns, dtype, x.bits if integer else None, True, x.groups, x.scale is not None, x.low is not None,
            x.offset, by_bits,
        )  # fmt: skip
        if form.width * form.parts != dim or form.width % form.groups:
            raise NotImplementedError(f"{form.groups} groups of {dim} channels in {x.bits} bits")
        return form

    @property
    def parts(self) -> int:
        """P."""
        return (8 // self.bits if self.bits else 1) * (2 if self.by_bits else 1)

    @property
    def width(self) -> int:
        """Channels of a part."""
        return self.dim // self.parts

    @property
    def added(self) -> int:
        """What the numbers of a block have more than codes without their offset."""
        return self.offset + (FROM if self.by_bits else 0)

    @property
    def middle(self) -> float:
        """The middle of a block's numbers: what the rounding of a weight is measured from."""
        return self.added - self.offset + (2**self.bits - 1) / 2 if self.bits else 0.0

    @property
    def rows(self) -> int:
        """Rows of scales and of lows for each set of slots."""
        return self.groups * (self.scaled + self.lowered)

    def numbers(self, block: jax.Array) -> list[jax.Array]:
        """The parts of a block `[H, N, S]`, or `[H, S, N]`."""
        if self.by_bits:
            words = pltpu.bitcast(block.reshape(-1, block.shape[-1]), jnp.int32)
            mask = (2**self.bits - 1) * 0x00010001
            numbers = (
                pltpu.bitcast(((words >> (self.bits * part)) & mask) | EXPONENT, jnp.bfloat16)
                for part in range(self.parts)
            )
            return [x.reshape(block.shape[0], -1, block.shape[-1]) for x in numbers]
        if self.bits is None:
            return [block.astype(self.dtype)]
        if self.bits == 8:
            return [block.astype(jnp.int32).astype(jnp.float32).astype(self.dtype)]
        wide = block.astype(jnp.int32)
        some = ((wide >> (self.bits * part)) & (2**self.bits - 1) for part in range(self.parts))
        return [x.astype(jnp.float32).astype(self.dtype) for x in some]

    def spread(self, x: Float[Array, "*n M D"], apart: bool) -> Float[Array, "*n P GM W"]:
        """Channels by parts, rows for each group: `apart` with that group's channels alone, else with all."""
        x = jnp.moveaxis(x.reshape(*x.shape[:-1], self.width, self.parts), -1, -3)  # [*n, P, M, W]
        if self.groups == 1:
            return x
        group = jnp.arange(self.width) // (self.width // self.groups)
        mine = group == jnp.arange(self.groups)[:, None, None]  # [G, 1, W]
        each = jnp.where(mine | (not apart), x[..., None, :, :], jnp.zeros((), x.dtype))
        return each.reshape(*x.shape[:-2], -1, self.width)

    def gathered(self, x: Float[Array, "*n P GM W"]) -> Float[Array, "*n M D"]:
        """The channels in their order, each from its group's rows."""
        lead, groups = x.shape[:-3], self.groups
        x = x.reshape(*lead, self.parts, groups, -1, groups, self.width // groups)
        x = jnp.stack([x[..., group, :, group, :] for group in range(groups)], axis=-2)  # [*n, P, M, G, W / G]
        return jnp.moveaxis(x, -4, -1).reshape(*lead, -1, self.dim)
