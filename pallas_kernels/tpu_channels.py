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
from pallas_kernels.tpu_codes import FROM, Form, product

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


def halved(x: jax.Array, dtype: Any) -> list[jax.Array]:
    """Numbers of this dtype whose sum is x, or in bfloat16 as near as 16 bits come to it."""
    if jnp.dtype(dtype) == jnp.float32:
        return [x]
    high = x.astype(dtype)
    return [high, (x - high.astype(jnp.float32)).astype(dtype)]


class ByBlock:
    """Reads a kernel's block of `Form.numbers`, `[H, W, S]` or `[H, S, W]`, with scales and lows of each `form.tokens`
    slots: as `tpu_codes.Scales` does with those of each slot."""

    def __init__(self, form: Form, inputs: list, scratch: tuple[Any, Any], blocks: int):
        """Takes `operands` from the inputs. `scratch` is for scales and lows of a kernel's block, `[H, F, D]` each;
        `blocks` of slots are there in all."""
        self.form, self.blocks = form, blocks
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
                parts = halved(x, order.dtype)
                numbers[head] = functools.reduce(jnp.add, [blocks_of.product(part, order, 0) for part in parts])

    def tiles(self, slots: int) -> Iterator[tuple[slice, list[tuple[int, jax.Array]]]]:
        """The slots of a block some at a time, and for each of their blocks its number and which of them are its."""
        form = self.form
        width = max(blocks_of.LANES, form.tokens)
        for start in range(0, slots, width):
            own = lax.div(lax.broadcasted_iota(jnp.int32, (1, 1, width), 2), form.tokens)
            blocks = [(start // form.tokens + n, own == n) for n in range(width // form.tokens)]
            yield slice(start, start + width), blocks

    def by_blocks(self, rows: list[jax.Array], numbers: jax.Array, some: slice, over_slots: bool) -> jax.Array:
        """Rows of some blocks of slots by the numbers of their slots, what the numbers begin with taken off."""
        form = self.form
        numbers = numbers[:, :, some] if form.columns else numbers[:, some]
        parts = halved(jnp.concatenate(rows, axis=1), numbers.dtype)
        many = parts[0].shape[1]
        contract = 1 if form.columns != over_slots else 2
        found = product(jnp.concatenate(parts, axis=1), numbers, contract)
        found = functools.reduce(jnp.add, [found[:, n * many : (n + 1) * many] for n in range(len(parts))])
        if not form.by_bits:
            return found
        whole = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])
        return found - FROM * jnp.sum(whole, axis=2, keepdims=True)

    def of(self, ref: Any, block: int) -> Float[Array, "H 1 D"]:
        """Scales or lows of a block of slots."""
        return ref[:, pl.ds(self.first + block, 1)]

    def scales(self, block: int) -> Float[Array, "H 1 W"]:
        """A block's scales of all numbers of a slot."""
        x = self.of(self.scale, block)
        return x if self.form.halves == 1 else jnp.concatenate([x, x], axis=2)

    def logits(self, query: jax.Array, numbers: jax.Array, asked: Any) -> Float[Array, "H M S"]:
        """q . k of every query head and slot."""
        dim, slots = self.form.dim, numbers.shape[2 if self.form.columns else 1]
        members, query = query.shape[1], in_tiles(query.astype(jnp.float32))
        tiles = []
        for some, blocks in self.tiles(slots):
            rows = [query * self.scales(block) for block, _ in blocks]
            level = [jnp.sum(query[..., :dim] * self.of(self.low, block), axis=2, keepdims=True) for block, _ in blocks]
            found = self.by_blocks(rows, numbers, some, False)
            size = query.shape[1]
            chosen: Any = 0.0
            for n, (_, own) in enumerate(blocks):
                chosen = jnp.where(own, found[:, n * size : (n + 1) * size] + level[n], chosen)
            tiles.append(chosen)
        return jnp.concatenate(tiles, axis=2)[:, :members]

    def read(self, weights: jax.Array, numbers: jax.Array, filled: Any) -> tuple[Float[Array, "H M W"], None]:
        """The values by their weights. What stands for a block without weight, and may be NaN, counts as 0."""
        members, slots, weights = *weights.shape[1:], in_tiles(weights)
        size, total = weights.shape[1], jnp.zeros((), jnp.float32)
        for some, blocks in self.tiles(slots):
            rows = [jnp.where(own, weights[:, :, some], 0.0) for _, own in blocks]
            found = self.by_blocks(rows, numbers, some, True)
            for n, ((block, _), row) in enumerate(zip(blocks, rows, strict=True)):
                whole = jnp.sum(row, axis=2, keepdims=True)
                low = self.of(self.low, block) * whole
                if self.form.halves == 2:
                    low = jnp.concatenate([low, jnp.zeros_like(low)], axis=2)
                one = found[:, n * size : (n + 1) * size] * self.scales(block) + low
                total = total + jnp.where(whole > 0, one, 0.0)
        return total[:, :members], None


def in_tiles(x: Float[Array, "H M N"]) -> Float[Array, "H _ N"]:
    """Rows with zeros behind them, up to whole registers."""
    more = -x.shape[1] % blocks_of.SUBLANES
    return x if not more else jnp.concatenate([x, jnp.zeros((x.shape[0], more, x.shape[2]), x.dtype)], axis=1)
