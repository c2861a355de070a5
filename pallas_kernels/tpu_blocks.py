"""What the TPU kernels share: sizes of blocks, and values of empty slots set to zero inside a block."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

LANES = 128  # a vector register holds 8 sublanes of 128 lanes
SUBLANES = 8
BEHIND = {1: (), 2: ((4, 2), (2, 1)), 4: ((2, 1), (4, 2)), 8: ()}
"""Bits of a row's number that change places, so that those of a set out of so many in a register come behind the
register's."""
QUERIES = 16  # a block of queries is a multiple of it: rows of bfloat16 lie packed in tiles of 16
VMEM_BYTES = 48 * 2**20  # of on-chip memory that a kernel may take: v5p has 64 MiB, v5e and v6e 128


def cores() -> int:
    """The cores of the chip that is compiled for, which share its memory: of the default device, or of the abstract one
    that is set; 2, as v5p has, where neither is a TPU.
    """
    try:
        return pltpu.get_tpu_info().num_cores
    except ValueError:
        return 2


def multiplies_bytes() -> bool:
    """Whether the matrix unit of the chip that is compiled for takes integers of 8 bits; also where neither the default
    device nor the abstract one is a TPU."""
    try:
        return pltpu.get_tpu_info().int8_ops_per_second > 0
    except ValueError:
        return True


def check_floats(*arrays: jax.Array) -> None:
    """Raises `NotImplementedError` for floats other than bfloat16 and float32: the chip has no others."""
    for x in arrays:
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            raise NotImplementedError(f"{x.dtype}: bfloat16 or float32")


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def even_blocks(size: int, most: int, multiple: int = LANES) -> tuple[int, int]:
    """(blocks, block size): as few as sizes up to `most` allow, of about equal size, a multiple of `multiple`."""
    blocks = -(-size // max(most // multiple * multiple, multiple))
    block = round_up(-(-size // blocks), multiple)
    return -(-size // block), block


def exact(dtype) -> lax.Precision | None:
    """The precision at which a product of this dtype loses nothing: the matrix unit rounds float32 to bfloat16 unless
    told otherwise.
    """
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def slots_along_lanes(slots: int, dim: int) -> bool:
    """Whether XLA lays out `[..., slots, dim]` with the slots along the lanes: where that pads less."""
    return round_up(slots, LANES) * round_up(dim, SUBLANES) < round_up(slots, SUBLANES) * round_up(dim, LANES)


def tile(dtype, columns: bool) -> int:
    """The slots that memory holds as one piece, along the lanes where `columns`: what is copied at a time."""
    return LANES if columns else SUBLANES * (4 if jnp.dtype(dtype).itemsize == 1 else 1)


def in_memory(x: jax.Array) -> jax.Array:
    """The array as a kernel takes it piece by piece: XLA would first take what is only read on the chip, all of it."""
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)


def around(slot, tile: int, columns: bool) -> tuple:
    """Indices of the tile that holds a slot."""
    some = pl.ds(pl.multiple_of(lax.div(slot, tile) * tile, tile), tile)
    return (slice(None), some) if columns else (some, slice(None))


def lines(ref, at: list[tuple], interpret: bool) -> list[jax.Array]:
    """Rows `[S]` of an array in on-chip memory, each in all rows of a register `[8, S]`, as a load gives them; the
    interpreter has no such load. The last index of each may be a number of the grid's."""
    if interpret:
        shape = SUBLANES, ref.shape[-1]
        return [jnp.broadcast_to(ref[(*lead, pl.ds(row, 1))], shape) for *lead, row in at]
    return [ref[(*lead, pl.ds(row, SUBLANES, stride=0))] for *lead, row in at]


def in_rows(lines: list[Shaped[Array, "8 S"]], each: int) -> Shaped[Array, "N S"]:
    """Each of the `lines` in so many rows, one line's behind the other's."""
    tiles, rows = [], len(lines) * each
    for start in range(0, rows, SUBLANES):
        shape = min(SUBLANES, rows - start), lines[0].shape[1]
        row = start + lax.broadcasted_iota(jnp.int32, shape, 0)
        first, last = start // each, (start + shape[0] - 1) // each
        tile = lines[first][: shape[0]]
        for line in range(first + 1, last + 1):
            tile = jnp.where(row >= line * each, lines[line][: shape[0]], tile)
        tiles.append(tile)
    return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, axis=0)


def for_sets(ref, sets: list[list[tuple]], each: int, interpret: bool) -> Shaped[Array, "K N S"]:
    """Of each set the rows at these places, in so many rows each."""
    found = [in_rows(lines(ref, at, interpret), each)[None] for at in sets]
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=0)


def in_registers(x: Shaped[Array, "*n S"], behind: int = 0) -> Shaped[Array, "*n R 128"]:
    """What slots have, 128 of them in a row, with this number behind the last: eight rows fill a register."""
    grow = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % LANES)]
    x = jnp.pad(x, grow, constant_values=behind)
    return x.reshape(*x.shape[:-1], -1, LANES)


def along_lanes(ref, lead: tuple, interpret: bool) -> Shaped[Array, "8 S"]:
    """What lies `in_registers`, one row behind the other, in all rows of a register."""
    return jnp.concatenate(lines(ref, [(*lead, row) for row in range(ref.shape[-2])], interpret), axis=1)


def as_rows(act: Callable, parts: list) -> Any:
    """Eight registers `[8, 128]`, or tuples of them, each joined by `act` over its rows, as the rows of one."""
    row = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)
    for step in (1, 2, 4):
        own = (row & step) == 0

        def pair(a: Any, b: Any, own: jax.Array = own, step: int = step) -> Any:
            here = jax.tree.map(lambda x, y: jnp.where(own, x, y), a, b)
            return act(here, jax.tree.map(lambda x, y: pltpu.roll(jnp.where(own, y, x), step, 0), a, b))

        parts = [pair(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def over_members(act: Callable, x: Float[Array, "K 8 S"], members: int) -> Float[Array, "H S"]:
    """The rows of each set joined by `act`, `members` of them one behind the other; for as many registers as that, or
    a multiple."""
    row = lax.broadcasted_iota(jnp.int32, x.shape[1:], 0)
    moved = lambda x, by: pltpu.roll(x, by % SUBLANES, 0)  # noqa: E731
    found = []
    for first in range(0, x.shape[0], members):
        parts, step = [x[first + n] for n in range(members)], 1
        while len(parts) > 1:  # a set's sum lands in its row whose lower bits are the register's number
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [jnp.where((row & step) == 0, act(a, moved(a, -step)), act(b, moved(b, step))) for a, b in pairs]
            step *= 2
        for high, low in BEHIND[SUBLANES // members]:
            bits, by = row & (high | low), high - low
            parts = [jnp.where(bits == high, moved(y, by), jnp.where(bits == low, moved(y, -by), y)) for y in parts]
        found.append(parts[0])
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=0)


def over_rows(act: Callable, x: Float[Array, "N S"]) -> Float[Array, "R 128"]:
    """All rows joined by `act`, of which 0 changes nothing, and what comes out `in_registers`."""
    more = -x.shape[0] % SUBLANES
    x = x if not more else jnp.concatenate([x, jnp.zeros((more, x.shape[1]), x.dtype)], axis=0)
    x = functools.reduce(act, [x[row : row + SUBLANES] for row in range(0, x.shape[0], SUBLANES)])
    parts = [x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)]
    found = [as_rows(act, parts[first : first + SUBLANES]) for first in range(0, len(parts), SUBLANES)]
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=0)


def zero_empty(block: jax.Array, filled: jax.Array, columns: bool) -> jax.Array:
    """The values `[S, D]` (`columns`: `[D, S]`) of a block, 0 in slots where `filled [1, S]` (float32) is 0, whatever
    lies there; all rows of `filled` may be there.
    """
    if not columns:
        width = round_up(block.shape[1], LANES)
        filled = jnp.broadcast_to(filled, (width, filled.shape[1])).T[:, : block.shape[1]]
    return jnp.where(filled > 0, block.astype(jnp.float32), 0.0).astype(block.dtype)


def product(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """The matrix product [M, N] over the last axis of a and axis `contract` of b, summed in float32."""
    axes = (((1,), (contract,)), ((), ()))
    return lax.dot_general(a, b, axes, precision=exact(b.dtype), preferred_element_type=jnp.float32)


def keys_at(place, step, slots: int) -> jax.Array:
    """Positions [1, S] of block `step` of the keys out of a window on them, with what lies behind the last as empty."""
    index = step * place.shape[-1] + lax.broadcasted_iota(jnp.int32, (1, place.shape[-1]), 1)
    return jnp.where(index < slots, place[0, 0], -1)


def queries_at(at, step, length: int) -> jax.Array:
    """Positions [T, 1] of block `step` of the queries, with what lies behind the last as padding."""
    index = step * at.shape[1] + lax.broadcasted_iota(jnp.int32, (at.shape[1], 1), 0)
    return jnp.where(index < length, at[0], -1)


def sees(at: jax.Array, place: jax.Array, window: int | None) -> jax.Array:
    """`masking.visible` inside a kernel, where queries lie along the sublanes: [T, 1] and [1, S] to [T, S]."""
    seen = (place >= 0) & (place <= at)
    return seen if window is None else seen & (at - place < window)


def added(logits: jax.Array, bias) -> jax.Array:
    """Logits [T, S] with what a window on the biases adds to each key's; as they are, where there is none."""
    return logits if bias is None else logits + bias[0, 0]


def any_seen(at: jax.Array, place: jax.Array, window: int | None) -> jax.Array:
    """False only where no query of the block sees a key of it: from the least and the greatest of either."""
    far = jnp.iinfo(jnp.int32).max
    seen = jnp.min(jnp.where(place < 0, far, place)) <= jnp.max(at)
    return seen if window is None else seen & (jnp.min(jnp.where(at < 0, far, at)) - jnp.max(place) < window)


def halves(bits: Int[Array, "..."], signed: bool = True) -> Float[Array, "..."]:
    """The float16 numbers of these bits, none of them negative if not `signed`, as float32, by hand: the chip has no
    float16."""
    half = bits.astype(jnp.int32)
    size = half & 0x7FFF if signed else half
    normal = (size << 13) + (112 << 23)
    small = lax.bitcast_convert_type(size.astype(jnp.float32) * 2.0**-24, jnp.int32)
    found = jnp.where(size < 0x400, small, normal)
    return lax.bitcast_convert_type(found | (half & -(2**31)) if signed else found, jnp.float32)
