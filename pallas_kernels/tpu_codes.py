"""How the TPU kernels read codes: a block of them becomes numbers on the chip.

The codes of one byte are adjacent channels, so a block gives P parts, part p with the channels p, P + p, 2 P + p and so
on. They are put behind each other, which moves nothing where a part fills whole registers, and what is multiplied with
them has its channels in that order (`spread`), as has what comes out (`gathered`). An entry is
`scale * (number - added) + low`, which the kernel does to logits and weights.

Where the slots lie along the lanes and the model computes in bfloat16, a number is made by its bits, two in a word at
a time: 0x4300 or a code below 16 is 128 + code. Codes of 8 bits are two such numbers, the upper of 16 times the weight.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import tpu_blocks as blocks_of
from pallas_kernels.codes import ByChannel, Codes, halves

EXPONENT, FROM = 0x43004300, 128  # of two numbers of 16 bits: those from 128 on, in steps of 1
TILE = 32  # rows of bytes that lie as one piece
NIBBLE = 16


@dataclasses.dataclass(frozen=True)
class Form:
    """How keys or values lie: `bits` of an integer (None: floats); what a slot has of scales and lows, G each; or how
    many `tokens` share a scale and a low for each channel (0: none), and whether those lie with blocks of slots along
    the lanes (`across`)."""

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
    tokens: int = 0
    across: bool = False

    @classmethod
    def of(cls, x: jax.Array | Codes | ByChannel, columns: bool, dtype: str) -> "Form":
        """That of keys or values. Raises `NotImplementedError` for codes that a block does not give apart, and for
        blocks of slots that do not fill registers evenly."""
        dim = x.shape[-1]
        if not isinstance(x, Codes | ByChannel):
            return cls(dim, columns, str(x.dtype))
        integer = x.codes.dtype == jnp.uint8
        if integer and x.bits not in (8, 4, 2):
            raise NotImplementedError(f"codes of {x.bits} bits: 8, 4 or 2")
        by_bits = integer and columns and dtype == "bfloat16" and x.codes.shape[-1] % TILE == 0
        if isinstance(x, ByChannel):
            if blocks_of.LANES % x.tokens and x.tokens % blocks_of.LANES:
                raise NotImplementedError(f"a scale for {x.tokens} slots: a divisor or a multiple of {blocks_of.LANES}")
            form = cls(
                dim, columns, dtype, x.bits, True, by_bits=by_bits, tokens=x.tokens,
                across=blocks_of.slots_along_lanes(*x.scale.shape[-2:]),
            )  # fmt: skip
        else:
            form = cls(
                dim, columns, dtype, x.bits if integer else None, True, x.groups, x.scale is not None,
                x.low is not None, x.offset, by_bits,
            )  # fmt: skip
        if dim % form.parts or (dim // form.groups) % form.parts:
            raise NotImplementedError(f"{form.groups} groups of {dim} channels in {x.bits} bits")
        return form

    @property
    def each(self) -> int:
        """Bits of a number: a nibble where a code of 8 is made of two."""
        return min(self.bits or 8, 4) if self.by_bits else self.bits or 8

    @property
    def halves(self) -> int:
        """Numbers that a code is made of."""
        return 2 if self.by_bits and self.bits == 8 else 1

    @property
    def parts(self) -> int:
        """P."""
        return 1 if self.bits is None else 8 // self.bits * (2 if self.by_bits else 1)

    @property
    def width(self) -> int:
        """Numbers of a slot."""
        return self.dim * self.halves

    @property
    def from_bits(self) -> int:
        """What a code is more by the way its number is made."""
        return 0 if not self.by_bits else FROM * (1 + NIBBLE * (self.halves - 1))

    @property
    def added(self) -> int:
        """What the numbers of a block have more than codes without their offset."""
        return self.offset + self.from_bits

    @property
    def middle(self) -> float:
        """The middle of a block's numbers: what the rounding of a weight is measured from."""
        return self.from_bits + (2**self.bits - 1) / 2 if self.bits else 0.0

    @property
    def shifts(self) -> bool:
        """Whether reading values by weights adds something to all channels: lows, or where the numbers begin."""
        return (self.bits is not None and not self.tokens) or self.lowered

    def numbers(self, block: jax.Array) -> jax.Array:
        """Those of a block `[H, N, S]`, or `[H, S, N]`, with the channels part after part."""
        if self.by_bits:
            words = pltpu.bitcast(block.reshape(-1, block.shape[-1]), jnp.int32)
            mask = (2**self.each - 1) * 0x00010001
            shifts = range(0, 16, self.each) if self.halves == 1 else (0, 8, 4, 12)
            parts = [pltpu.bitcast(((words >> shift) & mask) | EXPONENT, jnp.bfloat16) for shift in shifts]
            return jnp.concatenate([x.reshape(block.shape[0], -1, block.shape[-1]) for x in parts], axis=1)
        if self.bits is None:
            return block.astype(self.dtype)
        wide = block.astype(jnp.int32)
        if self.bits == 8:
            return wide.astype(jnp.float32).astype(self.dtype)
        some = [(wide >> shift) & (2**self.bits - 1) for shift in range(0, 8, self.bits)]
        return jnp.concatenate([x.astype(jnp.float32).astype(self.dtype) for x in some], axis=1 if self.columns else 2)

    def spread(self, x: Float[Array, "*n M D"], apart: bool = True, whole: bool = False) -> Float[Array, "*n GM W"]:
        """Channels in a block's order, rows for each group: `apart` with that group's channels alone, else with all.
        `whole`: with each code's weight in its first number, and 0 in the other."""
        channel = jnp.arange(self.dim)
        if self.groups > 1:
            mine = channel // (self.dim // self.groups) == jnp.arange(self.groups)[:, None, None]  # [G, 1, D]
            x = jnp.where(mine | (not apart), x[..., None, :, :], jnp.zeros((), x.dtype))
            x = x.reshape(*x.shape[:-3], -1, self.dim)
        x = jnp.swapaxes(x.reshape(*x.shape[:-1], -1, self.parts), -1, -2).reshape(x.shape)
        if self.halves == 1:
            return x
        return jnp.concatenate([x, jnp.zeros_like(x) if whole else NIBBLE * x], axis=-1)

    def gathered(self, x: Float[Array, "*n GM W"]) -> Float[Array, "*n M D"]:
        """The channels in their order, each from its group's rows."""
        if self.halves == 2:
            x = x[..., : self.dim] + NIBBLE * x[..., self.dim :]
        x = jnp.swapaxes(x.reshape(*x.shape[:-1], self.parts, -1), -1, -2)
        x = x.reshape(*x.shape[:-3], self.groups, -1, self.groups, self.dim // self.groups)
        x = jnp.stack([x[..., group, :, group, :] for group in range(self.groups)], axis=-2)  # [*n, M, G, D / G]
        return x.reshape(*x.shape[:-2], self.dim)


@dataclasses.dataclass(frozen=True)
class Lying:
    """Keys or values `[B, Hk, S, D]` as a block of a prompt reads them, a head at a time: as they lie, and their scales
    and lows."""

    form: Form
    codes: jax.Array  # [B, Hk, S, N], or [B, Hk, N, S]
    scales: tuple[Float[Array, "B Hk G S"], ...]

    @classmethod
    def of(cls, x: jax.Array | Codes, dtype: Any) -> "Lying":
        """Floats lie `[S, D]`, as XLA lays them out for it; codes lie where they lie."""
        if not isinstance(x, Codes):
            return cls(Form.of(x, False, str(dtype)), x, ())
        columns = blocks_of.slots_along_lanes(*x.codes.shape[-2:])
        both = (halves(jnp.swapaxes(y, -1, -2)) for y in (x.scale, x.low) if y is not None)
        codes = jnp.swapaxes(x.codes, -1, -2) if columns else x.codes
        return cls(Form.of(x, columns, str(dtype)), codes, tuple(both))

    def specs(self, block: int, at: Any) -> tuple[Any, list]:
        """Blocks of so many slots of the codes, and of scales and lows; `at` gives row, head and number of a block."""
        form, width = self.form, self.codes.shape[-2 if self.form.columns else -1]

        def lie(*grid: Any) -> tuple:
            row, head, number = at(*grid)
            return (row, head, 0, number) if form.columns else (row, head, number, 0)

        def beside(*grid: Any) -> tuple:
            row, head, number = at(*grid)
            return row, head, 0, number

        shape = (1, 1, width, block) if form.columns else (1, 1, block, width)
        return pl.BlockSpec(shape, lie), [pl.BlockSpec((1, 1, form.groups, block), beside)] * len(self.scales)

    def spread(self, x: Float[Array, "B Hk M T D"], **how: bool) -> Float[Array, "B Hk GM T W"]:
        """`Form.spread`, over the query heads of a KV head."""
        return jnp.swapaxes(self.form.spread(jnp.swapaxes(x, 2, 3), **how), 2, 3)

    def gathered(self, x: Float[Array, "B Hk GM T W"]) -> Float[Array, "B Hk M T D"]:
        """`Form.gathered`, over the query heads of a KV head."""
        return jnp.swapaxes(self.form.gathered(jnp.swapaxes(x, 2, 3)), 2, 3)

    def asked(self, x: Float[Array, "B Hk M T D"]) -> list[Float[Array, "B Hk GM T 1"]]:
        """The sums of queries that a low and what is added are multiplied with, where there are any."""
        if not self.form.coded:
            return []
        return [jnp.sum(self.spread(x.astype(jnp.float32), whole=True), axis=-1, keepdims=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and lows."""
        return self.codes.nbytes + sum(x.nbytes for x in self.scales)


class Scales:
    """Scales and lows of a block of keys or values, each `[H, S]`, and what is multiplied with the codes themselves."""

    def __init__(self, form: Form, inputs: list, one_set: bool = False):
        """Takes those that there are from the inputs; `one_set`: a block has one set of slots, and all its groups."""
        self.form, self.one_set = form, one_set
        self.scale = inputs.pop(0) if form.scaled else None
        self.low = inputs.pop(0) if form.lowered else None

    def of(self, ref: Any, group: int) -> jax.Array:
        """A group's; scales are never negative."""
        here = ref[0, 0, group : group + 1] if self.one_set else None
        x = here if here is not None else ref[0] if self.form.groups == 1 else ref[0, :, group]
        return blocks_of.halves(x, signed=ref is self.low) if x.dtype == jnp.int16 else x

    def logits(self, query: jax.Array, numbers: jax.Array, asked: Any) -> jax.Array:
        """q . k of every query head and slot of a block of `Form.numbers`, float32: queries by group, and `asked`."""
        form = self.form
        found = product(query, numbers, contract=1 if form.columns else 2)
        members = found.shape[1] // form.groups
        if form.added:
            found = found - form.added * asked[...]
        if self.scale is not None:
            found = found * self.of_rows(self.scale, members)
        if self.low is not None:
            found = found + self.of_rows(self.low, members) * asked[...]
        return functools.reduce(
            jnp.add, [found[:, group * members : (group + 1) * members] for group in range(form.groups)]
        )

    def read(self, weights: jax.Array, numbers: jax.Array, filled: jax.Array) -> tuple[jax.Array, Any]:
        """The values by their weights `[H, M, S]`, for each group, and what is added to all channels of the group, if
        anything is: from the lows, and from where the `Form.numbers` begin. The rounding of a weight counts from the
        middle of the numbers, as if they were around 0.
        """
        form = self.form
        rows, low = for_groups(weights, form.groups), None
        one = rows
        if self.scale is not None:
            one = rows * self.of_rows(self.scale, weights.shape[1], filled)
        if self.low is not None:
            low = rows * self.of_rows(self.low, weights.shape[1], filled)
        rounded = one.astype(numbers.dtype)
        if form.bits is not None:
            back = (form.middle - form.added) * one - form.middle * rounded.astype(jnp.float32)
            low = back if low is None else low + back
        found = product(rounded, numbers, contract=2 if form.columns else 1)
        return found, None if low is None else jnp.sum(low, axis=2, keepdims=True)

    def of_rows(self, ref: Any, members: int, filled: jax.Array | None = None) -> jax.Array:
        """Scales or lows for the rows of every group, `[H, G M, S]`; 0 in slots that are not `filled`."""
        every = []
        for group in range(self.form.groups):
            x = self.of(ref, group)
            x = (x if filled is None else jnp.where(filled, x, 0.0))[:, None]
            every.append(jnp.broadcast_to(x, (x.shape[0], members, x.shape[2])))
        return every[0] if len(every) == 1 else jnp.concatenate(every, axis=1)


def for_groups(x: jax.Array, groups: int) -> jax.Array:
    """What is known of every query head, for each group of channels."""
    return x if groups == 1 else jnp.concatenate([x] * groups, axis=1)


def product(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """One matrix product per set of slots, [H, M, N], in float32: over the last axis of a and axis `contract` of b."""
    axes = (((2,), (contract,)), ((0,), (0,)))
    return lax.dot_general(a, b, axes, precision=blocks_of.exact(b.dtype), preferred_element_type=jnp.float32)
