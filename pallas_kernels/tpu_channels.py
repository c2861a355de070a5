"""How the TPU kernels read integers with a scale and a low for each channel of a block of slots.

A scale of keys goes into the query, one of values into the output: a block of slots has queries of its own, and each
slot takes the product with its block's. Both are split into two numbers of 16 bits whose sum is exact to 16 bits, so
that a code of 8 bits loses nothing by its scale. Channels lie in a byte's order (`tpu_codes`), into which one product
with a matrix of ones and zeros brings the scales.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import tpu_blocks as blocks_of
from pallas_kernels.codes import ByChannel
from pallas_kernels.tpu_codes import FROM, Form, apart, for_groups, packed, product

PACKED = 16  # rows of scales that lie as one piece


def even_blocks(forms: list[Form], slots: int, most: int) -> tuple[int, int]:
    """(blocks, block size) as `tpu_blocks.even_blocks`, so that scales and lows come in whole pieces of memory: those
    of a block are some pieces, or one piece those of 2, 4, 8 and so on."""
    blocks, block = blocks_of.even_blocks(slots, most)
    if blocks == 1 or not forms:
        return blocks, block
    whole = size = math.lcm(blocks_of.LANES, *(form.tokens * _piece(form) for form in forms))
    least = math.lcm(blocks_of.LANES, *(form.tokens for form in forms))
    while size > most and size % (2 * least) == 0:
        size //= 2
    return blocks_of.even_blocks(slots, most, whole) if size == whole else (-(-slots // size), size)


def _piece(form: Form) -> int:
    """Blocks of slots whose scales lie in memory as one piece."""
    return blocks_of.LANES if form.across else PACKED


def fetched(form: Form, slots: int) -> int:
    """Blocks whose scales come with so many slots: the pieces of memory in which those are."""
    return blocks_of.round_up(slots // form.tokens, _piece(form))


def shares(form: Form, slots: int) -> int:
    """Of how many of the kernel's blocks the scales come together."""
    return max(_piece(form) // (slots // form.tokens), 1)


def operands(x: ByChannel, form: Form) -> tuple[list[jax.Array], jax.Array]:
    """Scales and lows as they lie, and the matrix that brings their channels into the order of the codes."""
    ranges = [jnp.swapaxes(y, -1, -2) if form.across else y for y in (x.scale, x.low)]
    channel = jnp.arange(form.dim).reshape(-1, form.parts).T.reshape(-1)
    return ranges, (jnp.arange(form.dim)[:, None] == channel).astype(form.dtype)


def specs(form: Form, heads: int, slots: int, at: Any) -> list[pl.BlockSpec]:
    """Those of `operands`, for a kernel's block of so many slots; `at` gives the row and the number of the block that
    is there in a step."""
    each = fetched(form, slots)

    def lie(*grid: Any) -> tuple:
        row, number = at(*grid)
        number = lax.div(number, shares(form, slots))
        return (row, 0, 0, number) if form.across else (row, 0, number, 0)

    shape = (1, heads, form.dim, each) if form.across else (1, heads, each, form.dim)
    return [pl.BlockSpec(shape, lie)] * 2 + [pl.BlockSpec((form.dim, form.dim), lambda *_: (0, 0))]


def vmem_bytes(form: Form, heads: int, slots: int) -> int:
    """On-chip memory of scales and lows: two blocks as they lie, and their numbers in the order of the codes."""
    dim, each = blocks_of.round_up(form.dim, blocks_of.LANES), fetched(form, slots)
    return heads * each * dim * (2 * 2 * 2 + 2 * 4)


def halved(x: jax.Array, dtype: Any, count: int = 2) -> list[jax.Array]:
    """Numbers that this dtype has, in float32, whose sum is x: of bfloat16 so many, each the nearest to what is
    left."""
    if jnp.dtype(dtype) == jnp.float32:
        return [x]
    parts = []
    for _ in range(count):
        bits = lax.bitcast_convert_type(x, jnp.int32)
        parts.append(lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32))
        x = x - parts[-1]
    return parts


class ByBlock:
    """Reads a kernel's block of `Form.numbers`, `[H, W, S]` or `[H, S, W]`, with scales and lows of each `form.tokens`
    slots: as `tpu_codes.Scales` does with those of each slot.

    A register's rows are the query heads of a set, for as many blocks of slots as they leave room for.
    """

    def __init__(self, form: Form, inputs: list, scratch: tuple[Any, Any], blocks: int, together: int, interpret: bool):
        """Takes `operands` from the inputs. `scratch` is for scales and lows of a kernel's block, `[H, F, D]` each;
        `blocks` of slots are there in all. The rows of so many sets come `together`."""
        self.form, self.blocks, self.together, self.interpret = form, blocks, together, interpret
        self.given, self.order = (inputs.pop(0), inputs.pop(0)), inputs.pop(0)
        self.scale, self.low = scratch
        self.first: Any = 0  # where those of the kernel's block begin

    def open(self, number: Any, slots: int) -> None:
        """Makes the numbers of scales and lows, in the order of the codes, for this one of the kernel's blocks, which
        have so many slots: 0 behind the last block of slots."""
        form, order, each = self.form, self.order[...], shares(self.form, slots)
        many = slots // form.tokens
        self.first = lax.rem(number, each) * many
        first = number * many - self.first
        for given, numbers in zip(self.given, (self.scale, self.low), strict=True):
            for head in range(numbers.shape[0]):
                x = blocks_of.halves(given[0, head])
                x = x.T if form.across else x
                x = jnp.where(first + lax.broadcasted_iota(jnp.int32, x.shape, 0) < self.blocks, x, 0.0)
                parts = [part.astype(order.dtype) for part in halved(x, order.dtype)]
                numbers[head] = functools.reduce(jnp.add, [blocks_of.product(part, order, 0) for part in parts])

    def tiles(self, slots: int) -> Iterator[tuple[slice, list[int]]]:
        """The slots of a block some at a time, and their blocks."""
        width = max(blocks_of.LANES, self.form.tokens)
        for start in range(0, slots, width):
            first = start // self.form.tokens
            yield slice(start, start + width), list(range(first, first + width // self.form.tokens))

    def ranges(self, ref: Any, blocks: list[int], rows: int) -> Float[Array, "H N D"]:
        """Scales or lows of some blocks of slots, each in so many rows."""
        at = [[(head, self.first + block) for block in blocks] for head in range(ref.shape[0])]
        wide = ref.shape[-1] > blocks_of.LANES  # of which the chip repeats no row as it loads it
        return blocks_of.for_sets(ref, at, rows, self.interpret or wide)

    def wide(self, x: Float[Array, "H N D"]) -> Float[Array, "H N W"]:
        """For all numbers of a slot."""
        return x if self.form.halves == 1 else jnp.concatenate([x, x], axis=2)

    def product(
        self, rows: Float[Array, "H N _"], numbers: jax.Array, tile: slice, over_slots: bool
    ) -> tuple[Float[Array, "H N _"], Float[Array, "H N _"]]:
        """The product of rows with the numbers of some slots, and the rows as they were multiplied: weights of codes of
        up to 4 bits are rounded to 16, as those of plain values are."""
        form = self.form
        numbers = numbers[:, :, tile] if form.columns else numbers[:, tile]
        parts = halved(rows, form.dtype, 1 if over_slots and form.bits != 8 else 2)
        whole = jnp.concatenate([part.astype(form.dtype) for part in parts], axis=1)
        found, size = product(whole, numbers, 1 if form.columns != over_slots else 2), rows.shape[1]
        found = functools.reduce(jnp.add, [found[:, n * size : (n + 1) * size] for n in range(len(parts))])
        return found, functools.reduce(jnp.add, parts)

    def logits(self, query: jax.Array, numbers: jax.Array, asked: Any) -> Float[Array, "K N S"]:
        """q . k of every query head and slot."""
        form, slots, members = self.form, numbers.shape[2 if self.form.columns else 1], query.shape[1] // self.together
        query, tiles = in_tiles(apart(query.astype(jnp.float32), self.together)), []
        size = query.shape[1]
        for tile, blocks in self.tiles(slots):
            asks = for_groups(query, len(blocks))
            found, rows = self.product(asks * self.wide(self.ranges(self.scale, blocks, size)), numbers, tile, False)
            level = asks[..., : form.dim] * self.ranges(self.low, blocks, size)
            if form.by_bits and form.halves == 1:
                level = jnp.sum(level - FROM * rows, axis=2, keepdims=True)
            else:
                level = jnp.sum(level, axis=2, keepdims=True)
                level = level - FROM * jnp.sum(rows, axis=2, keepdims=True) if form.by_bits else level
            found = found + level
            block = lax.div(lax.broadcasted_iota(jnp.int32, (1, 1, tile.stop - tile.start), 2), form.tokens)
            each = max(blocks_of.SUBLANES // size, 1)  # blocks in a register's rows
            own = found[:, : each * size]
            for n in range(each, len(blocks), each):
                own = jnp.where(block >= n, found[:, n * size : (n + each) * size], own)
            chosen = own[:, :size]
            for n in range(1, min(each, len(blocks))):
                chosen = jnp.where(lax.rem(block, each) == n, own[:, n * size : (n + 1) * size], chosen)
            tiles.append(chosen)
        return packed(jnp.concatenate(tiles, axis=2)[:, :members], self.together)

    def read(self, weights: jax.Array, numbers: jax.Array) -> tuple[Float[Array, "K N W"], None]:
        """The values by their weights."""
        form, slots, members = self.form, weights.shape[2], weights.shape[1] // self.together
        weights = in_tiles(apart(weights, self.together))
        size, total = weights.shape[1], jnp.zeros((), jnp.float32)
        for tile, blocks in self.tiles(slots):
            shape = 1, len(blocks) * size, tile.stop - tile.start
            own = lax.div(lax.broadcasted_iota(jnp.int32, shape, 2), form.tokens)
            own = own == lax.div(lax.broadcasted_iota(jnp.int32, shape, 1), size)
            some = jnp.where(own, for_groups(weights[:, :, tile], len(blocks)), 0.0)
            found, rows = self.product(some, numbers, tile, True)
            whole = jnp.sum(rows, axis=2, keepdims=True)
            found = found - FROM * whole if form.by_bits else found
            low = self.ranges(self.low, blocks, size) * whole
            if form.halves == 2:
                low = jnp.concatenate([low, jnp.zeros_like(low)], axis=2)
            total = total + found * self.wide(self.ranges(self.scale, blocks, size)) + low
        blocks = range(0, total.shape[1], size)
        return packed(functools.reduce(jnp.add, [total[:, n : n + members] for n in blocks]), self.together), None


def in_tiles(x: Float[Array, "H M N"]) -> Float[Array, "H _ N"]:
    """Rows with zeros behind them, up to as many as divide a register's or fill some."""
    rows = x.shape[1]
    few = 1 << (rows - 1).bit_length()
    more = (few if few < blocks_of.SUBLANES else blocks_of.round_up(rows, blocks_of.SUBLANES)) - rows
    return x if not more else jnp.concatenate([x, jnp.zeros((x.shape[0], more, x.shape[2]), x.dtype)], axis=1)
