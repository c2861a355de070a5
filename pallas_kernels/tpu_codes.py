"""How the TPU kernels read codes: a block of them becomes numbers on the chip.

The codes of one byte are adjacent channels, so a block gives P parts, part p with the channels p, P + p, 2 P + p and so
on. They are put behind each other, which moves nothing where a part fills whole registers, and what is multiplied with
them has its channels in that order (`spread`), as has what comes out (`gathered`). An entry is
`scale * (number - added) + low`, which the kernel does to logits and weights.

Where the model computes in bfloat16, a decode step multiplies the codes as the integers of 8 bits that they are, four
in a word at a time: queries and weights become whole numbers of a few `DIGITS`, each row in a unit of its own.

Elsewhere, and of scales by channel, a number is made by its bits where the slots lie along the lanes, two in a word at
a time: 0x4300 or a code below 16 is 128 + code. Codes of 8 bits are two such numbers, the upper of 16 times the weight.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from pallas_kernels import tpu_blocks as blocks_of
from pallas_kernels.codes import ByChannel, Codes, halves

EXPONENT, FROM = 0x43004300, 128  # of two numbers of 16 bits: those from 128 on, in steps of 1
TILE = 16  # rows of bytes that become words of four: half of what lies as one piece
NIBBLE = 16
DIGITS, DIGIT = 2, 128  # of a query's numbers and of weights, where codes are multiplied as they are
NEAREST, NEAREST_BITS = 1.5 * 2.0**23, 0x4B400000  # a number with this added has the nearest integer as its last bits
LEAST = 1e-30  # a row of smaller numbers counts as 0: what is divided by these would be infinite
SIGNS = -0x7F7F7F80  # of four bytes: a code of 8 bits with its highest bit turned is the integer code - 128


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
    def of(cls, x: jax.Array | Codes | ByChannel, columns: bool, dtype: str, as_bytes: bool = False) -> "Form":
        """That of keys or values; codes may be multiplied `as_bytes`. Raises `NotImplementedError` for codes that a
        block does not give apart, and for blocks of slots that do not fill registers evenly."""
        dim = x.shape[-1]
        if not isinstance(x, Codes | ByChannel):
            return cls(dim, columns, str(x.dtype))
        integer = x.codes.dtype == jnp.uint8
        if integer and x.bits not in (8, 4, 2):
            raise NotImplementedError(f"codes of {x.bits} bits: 8, 4 or 2")
        by_bits = integer and columns and dtype == "bfloat16" and x.codes.shape[-1] % TILE == 0
        even = x.codes.shape[-1] % (TILE if columns else blocks_of.LANES) == 0
        if as_bytes and integer and isinstance(x, Codes) and dtype == "bfloat16" and even:
            dtype, by_bits = "int8", False
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
    def as_bytes(self) -> bool:
        """Whether the numbers are integers of 8 bits."""
        return self.dtype == "int8"

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
        if self.as_bytes:
            return -DIGIT if self.bits == 8 else 0
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
    def asks(self) -> bool:
        """Whether the logits of keys take the sums of queries, and these are none of their digits."""
        return bool((self.lowered or self.added) and not self.tokens and not self.as_bytes)

    @property
    def shifts(self) -> bool:
        """Whether reading values by weights adds something to all channels: lows, or where the numbers begin."""
        begins = bool(self.added) if self.as_bytes else self.bits is not None
        return (begins and not self.tokens) or self.lowered

    def numbers(self, block: jax.Array) -> jax.Array:
        """Those of a block `[H, N, S]`, or `[H, S, N]`, with the channels part after part."""
        if self.as_bytes:
            words = pltpu.bitcast(block.reshape(-1, block.shape[-1]), jnp.int32)
            mask = (2**self.each - 1) * 0x01010101
            some = [(words >> shift) & mask for shift in range(0, 8, self.each)] if self.each < 8 else [words ^ SIGNS]
            some = [pltpu.bitcast(x, jnp.int8).reshape(block.shape[0], -1, block.shape[-1]) for x in some]
            return jnp.concatenate(some, axis=1 if self.columns else 2)
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

    def _ordered(self, x: Float[Array, "*n D"], back: bool = False) -> Float[Array, "*n D"]:
        """Channels part after part, or `back` in their own order: by a product with ones and zeros, which is exact. For
        a transposition XLA would lay the rows out anew."""
        if self.parts == 1:
            return x
        ones = np.arange(self.dim)[:, None] == np.arange(self.dim).reshape(-1, self.parts).T.reshape(-1)
        ones = jnp.asarray(ones.T if back else ones, x.dtype)
        return jnp.matmul(x, ones, precision=lax.Precision.HIGHEST, preferred_element_type=x.dtype)

    def spread(self, x: Float[Array, "*n M D"], apart: bool = True, whole: bool = False) -> Float[Array, "*n GM W"]:
        """Channels in a block's order, rows for each group: `apart` with that group's channels alone, else with all.
        `whole`: with each code's weight in its first number, and 0 in the other."""
        channel = jnp.arange(self.dim)
        if self.groups > 1:
            mine = channel // (self.dim // self.groups) == jnp.arange(self.groups)[:, None, None]  # [G, 1, D]
            x = jnp.where(mine | (not apart), x[..., None, :, :], jnp.zeros((), x.dtype))
            x = x.reshape(*x.shape[:-3], -1, self.dim)
        x = self._ordered(x)
        if self.halves == 1:
            return x
        return jnp.concatenate([x, jnp.zeros_like(x) if whole else NIBBLE * x], axis=-1)

    def gathered(self, x: Float[Array, "*n GM W"]) -> Float[Array, "*n M D"]:
        """The channels in their order, each from its group's rows."""
        if self.halves == 2:
            x = x[..., : self.dim] + NIBBLE * x[..., self.dim :]
        x = self._ordered(x, back=True)
        x = x.reshape(*x.shape[:-2], self.groups, -1, self.groups, self.dim // self.groups)
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

    def __init__(
        self,
        form: Form,
        inputs: list,
        *,
        scratch: tuple[Any, ...] = (),
        together: int = 1,
        pooled: bool = False,
        interpret: bool = False,
    ):
        """Takes those that there are from the inputs: numbers `[1, 1, G, S]` of one set; or as they lie, and then
        `scratch` is for their numbers, `[H, G, S]` each, `[H, S]` of one group, which `open` makes for a block. Of a
        pool both lie `in_registers`: `[G, R, 128]`, or `[R, 128]`. What lies in empty slots becomes numbers like all
        others, and counts for nothing by its weight of 0. The rows of so many sets come `together`."""
        self.form, self.interpret, self.pooled = form, interpret, pooled
        self.come = together  # of several groups each set's rows fill registers by themselves
        self.together = together if form.groups == 1 else 1
        self.scale = inputs.pop(0) if form.scaled else None
        self.low = inputs.pop(0) if form.lowered else None
        given = [x for x in (self.scale, self.low) if x is not None]
        self.made = list(zip(given, scratch, strict=True)) if scratch else []

    def open(self) -> None:
        """Makes the numbers of a block's scales and lows; scales are never negative."""
        for ref, made in self.made:
            made[...] = blocks_of.halves(ref[0], signed=ref is self.low)

    def logits(self, query: jax.Array, numbers: jax.Array, asked: Any) -> jax.Array:
        """q . k of every query head and slot of a block of `Form.numbers`, float32: queries by group, and `asked`."""
        form, contract = self.form, 1 if self.form.columns else 2
        asked = None if asked is None else asked[...]
        if self.come != self.together:
            query = apart(query, self.come, form.groups)
            asked = None if asked is None else apart(asked, self.come, form.groups)
        if form.as_bytes:
            found, total = by_digits(query.astype(jnp.float32), numbers, contract, self.together)
            asked = total() if form.added or form.lowered else None
        else:
            found = of_own(product(repeated(query, self.together), numbers, contract), self.together)
        members = found.shape[1] // form.groups
        if form.added:
            found = found - form.added * asked
        if self.scale is not None:
            found = found * self.of_rows(self.scale, members)
        if self.low is not None:
            found = found + self.of_rows(self.low, members) * asked
        found = functools.reduce(
            jnp.add, [found[:, group * members : (group + 1) * members] for group in range(form.groups)]
        )
        return found if self.come == self.together else packed(found, self.come)

    def read(self, weights: jax.Array, numbers: jax.Array, filled: jax.Array | None = None) -> tuple[jax.Array, Any]:
        """The values by their weights `[H, M, S]`, for each group, and what is added to all channels of the group, if
        anything is: from the lows, and from where the `Form.numbers` begin. The rounding of a weight counts from the
        middle of the numbers, as if they were around 0.
        """
        form, contract = self.form, 2 if self.form.columns else 1
        weights = weights if self.come == self.together else apart(weights, self.come)
        rows, low = for_groups(weights, form.groups), None
        one = rows
        if self.scale is not None:
            one = rows * self.of_rows(self.scale, weights.shape[1], filled)
        if self.low is not None:
            low = jnp.sum(rows * self.of_rows(self.low, weights.shape[1], filled), axis=2, keepdims=True)
        if form.as_bytes:
            found, total = by_digits(one, numbers, contract, self.together)
            begins = -form.added * total() if form.added else None
        else:
            rounded = one.astype(numbers.dtype)
            found, begins = of_own(product(repeated(rounded, self.together), numbers, contract), self.together), None
            if form.bits is not None:
                back = (form.middle - form.added) * one - form.middle * rounded.astype(jnp.float32)
                begins = jnp.sum(back, axis=2, keepdims=True)
        low = begins if low is None else low if begins is None else low + begins
        if self.come == self.together:
            return found, low
        return packed(found, self.come, form.groups), None if low is None else packed(low, self.come, form.groups)

    def of_rows(self, ref: Any, members: int, filled: jax.Array | None = None) -> jax.Array:
        """Scales or lows for the rows of every group, `[H, G M, S]`; 0 in slots that are not `filled`."""
        made = next((made for given, made in self.made if given is ref), None)
        if made is not None and self.pooled:
            groups = [()] if made.ndim == 2 else [(group,) for group in range(self.form.groups)]
            lines = [blocks_of.along_lanes(made, group, self.interpret) for group in groups]
            return blocks_of.in_rows(lines, members)[None]
        if made is not None:
            sets = [range(first, first + self.together) for first in range(0, made.shape[0], self.together)]
            groups = range(self.form.groups)
            at = [
                [(head,) if made.ndim == 2 else (head, group) for group in groups for head in heads] for heads in sets
            ]
            return blocks_of.for_sets(made, at, members // self.together, self.interpret)
        every = []
        for group in range(self.form.groups):
            x = ref[0, 0, group : group + 1]
            x = (x if filled is None else jnp.where(filled, x, 0.0))[:, None]
            every.append(jnp.broadcast_to(x, (x.shape[0], members, x.shape[2])))
        return every[0] if len(every) == 1 else jnp.concatenate(every, axis=1)


def for_groups(x: jax.Array, groups: int) -> jax.Array:
    """What is known of every query head, for each group of channels."""
    if groups == 1:
        return x
    some = max(blocks_of.SUBLANES // x.shape[1], 1)
    if groups % some or (some * x.shape[1]) % blocks_of.SUBLANES:
        return jnp.concatenate([x] * groups, axis=1)
    tile = x if some == 1 else jnp.concatenate([x] * some, axis=1)  # a whole register, made once
    return jnp.concatenate([tile] * (groups // some), axis=1)


def by_digits(
    x: Float[Array, "K N _"], numbers: Array, contract: int, together: int = 1
) -> tuple[Float[Array, "K N _"], Callable[[], Float[Array, "K N 1"]]]:
    """The product of rows with integers of 8 bits, and the sum of each row if asked for, both of x as near as its
    digits come to it: whole numbers times a unit of the row's, the 127th part of its largest, and of each digit's 128th
    part. The rows of so many sets come `together`.

    The sums are exact: 127 x 128 fits 2^17 times into 32 bits.
    """
    rows = x.shape[1]
    few = 1 << (rows - 1).bit_length()
    padded = few if few <= blocks_of.SUBLANES else blocks_of.round_up(rows, blocks_of.SUBLANES)
    if padded > rows:
        more = jnp.zeros((x.shape[0], padded - rows, x.shape[2]), x.dtype)
        x = jnp.concatenate([x, more], axis=1)
    most = jnp.max(jnp.abs(x), axis=2, keepdims=True)
    unit = jnp.where(most > LEAST, most, 1.0) / (DIGIT - 1)
    rest, digits, bits = x * (1 / unit), [], []
    for _ in range(DIGITS):
        nearest = rest + NEAREST
        bits.append(lax.bitcast_convert_type(nearest, jnp.int32) - NEAREST_BITS)
        digits.append(nearest - NEAREST)
        rest = (rest - digits[-1]) * DIGIT
    whole = jnp.concatenate(bits, axis=1).astype(jnp.int8)
    found = of_own(product(repeated(whole, together), numbers, contract), together).astype(jnp.float32)

    def joined(each: list[jax.Array]) -> jax.Array:
        return (functools.reduce(lambda low, high: high + low / DIGIT, reversed(each)) * unit)[:, :rows]

    sums = [found[:, n * padded : (n + 1) * padded] for n in range(DIGITS)]
    return joined(sums), lambda: jnp.sum(joined(digits), axis=2, keepdims=True)


def apart(x: Shaped[Array, "K N _"], together: int, groups: int = 1) -> Shaped[Array, "H M _"]:
    """The rows of each set, for each group of channels, out of those of sets that come `together`."""
    if together == 1:
        return x
    size = x.shape[1] // (groups * together)
    each = []
    for n in range(x.shape[0] * together):
        first = [(group * together + n % together) * size for group in range(groups)]
        rows = [x[n // together, None, start : start + size] for start in first]
        each.append(rows[0] if groups == 1 else jnp.concatenate(rows, axis=1))
    return jnp.concatenate(each, axis=0)


def packed(x: Shaped[Array, "H M _"], together: int, groups: int = 1) -> Shaped[Array, "K N _"]:
    """The inverse."""
    if together == 1:
        return x
    size, each = x.shape[1] // groups, []
    for n in range(0, x.shape[0], together):
        starts = [(n + own, group * size) for group in range(groups) for own in range(together)]
        each.append(jnp.concatenate([x[own, None, start : start + size] for own, start in starts], axis=1))
    return jnp.concatenate(each, axis=0)


def repeated(x: Shaped[Array, "K N W"], together: int) -> Shaped[Array, "H N W"]:
    """Rows of some sets together, for each of these sets."""
    if together == 1:
        return x
    return jnp.concatenate([x[n // together, None] for n in range(x.shape[0] * together)], axis=0)


def of_own(x: Shaped[Array, "H N W"], together: int) -> Shaped[Array, "K N W"]:
    """Of the rows of sets that come `together`, of which each set has an equal part of a register, the own set's."""
    if together == 1:
        return x
    part = lax.broadcasted_iota(jnp.int32, x.shape[1:], 0) % blocks_of.SUBLANES
    each = []
    for first in range(0, x.shape[0], together):
        rows = x[first]
        for n in range(1, together):
            rows = jnp.where(part >= n * (blocks_of.SUBLANES // together), x[first + n], rows)
        each.append(rows[None])
    return each[0] if len(each) == 1 else jnp.concatenate(each, axis=0)


def product(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """One matrix product per set of slots, [H, M, N], in float32, of integers in int32: over the last axis of a and
    axis `contract` of b."""
    axes, sums = (((2,), (contract,)), ((0,), (0,))), jnp.int32 if b.dtype == jnp.int8 else jnp.float32
    return lax.dot_general(a, b, axes, precision=blocks_of.exact(b.dtype), preferred_element_type=sums)
