"""Runs of slots on TPU: the piece of memory that holds one is copied to the chip, of every head at once.

Arrays lie as XLA lays them out, with the slots along the lanes or along the sublanes (`tpu_blocks.slots_along_lanes`).
A piece is as many slots as memory holds together, or a whole run where that is longer; the last of these may begin
before its run, to end where memory does.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int, Shaped

from pallas_kernels import tpu_blocks as blocks_of
from pallas_kernels.read_runs.reference import Run

CHIP_BYTES = 2**21  # of pieces on the chip at a time


@dataclasses.dataclass(frozen=True)
class Piece:
    """How the pieces of an array lie: `width` slots of `channels`, with the slots along the lanes if `columns`."""

    width: int
    run: int
    slots: int
    channels: int
    dtype: str
    columns: bool
    last: int  # where the last piece may begin
    early: int  # so many slots before its run

    @classmethod
    def of(cls, run: Run) -> "Piece":
        """Raises `NotImplementedError` for arrays without channels or with several kinds of them, for float16, and for
        runs that are neither a divisor nor a multiple of what memory holds together."""
        x = run.array
        if x.ndim != 4 or x.dtype == jnp.float16:
            raise NotImplementedError(f"{x.dtype} of {x.ndim} dimensions: 4, and no float16")
        slots, channels = x.shape[2:]
        columns = blocks_of.slots_along_lanes(slots, channels)
        together = blocks_of.tile(x.dtype, columns)
        if together % run.size and run.size % together:
            raise NotImplementedError(f"runs of {run.size} slots: a divisor or a multiple of {together}")
        width = min(max(together, run.size), slots)
        last = 0 if width == slots else blocks_of.round_up(slots, together) - width
        early = max((slots - 1) // width * width - last, 0)
        return cls(width, run.size, slots, channels, str(x.dtype), columns, last, early)

    @property
    def shape(self) -> tuple[int, int]:
        """That of a piece."""
        return (self.channels, self.width) if self.columns else (self.width, self.channels)

    @property
    def nbytes(self) -> int:
        """On-chip memory of a piece."""
        high, wide = self.shape
        size = jnp.dtype(self.dtype).itemsize
        return blocks_of.round_up(high, 32 // size) * blocks_of.round_up(wide, blocks_of.LANES) * size

    def lying(self, x: Shaped[Array, "B Hk S N"]) -> jax.Array:
        """The array, or pieces, as they lie; the inverse too."""
        return jnp.swapaxes(x, -1, -2) if self.columns else x

    def begins(self, first: Int[Array, "*heads"]) -> Int[Array, "*heads"]:
        """The slot in which the piece begins that holds a run."""
        begin = lax.div(first, self.width) * self.width
        return jnp.minimum(begin, self.last) if self.early else begin

    def moved(self, x: jax.Array, by: int, first: Int[Array, "B Hk"]) -> jax.Array:
        """The pieces or runs as they lie, those of the last run moved along their slots."""
        late = (first > self.last)[..., None, None]
        return jnp.where(late, jnp.roll(x, by, axis=3 if self.columns else 2), x) if self.early else x

    def picked(self, pieces: Shaped[Array, "B Hk _ _"], first: Int[Array, "B Hk"]) -> Shaped[Array, "B Hk R N"]:
        """The runs out of their pieces."""
        x = self.lying(self.moved(pieces, -self.early, first))
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -self.width % self.run), (0, 0)))
        x = x.reshape(*x.shape[:2], -1, self.run, self.channels)
        here = jnp.arange(x.shape[2]) == (first % self.width // self.run)[..., None]
        return jnp.sum(jnp.where(here[..., None, None], x, jnp.zeros((), x.dtype)), axis=2, dtype=x.dtype)

    def filled(self, new: Shaped[Array, "B Hk R N"], first: Int[Array, "B Hk"]) -> Shaped[Array, "B Hk _ _"]:
        """Pieces that have what is new in every run."""
        x = self.moved(self.lying(new), self.early, first)
        x = jnp.concatenate([x] * -(-self.width // self.run), axis=3 if self.columns else 2)
        return x[..., : self.width] if self.columns else x[:, :, : self.width]


def pieces(runs: tuple[Run, ...]) -> list[Piece]:
    """Those of every array."""
    return [Piece.of(run) for run in runs]


def read(some: list[Piece], runs: tuple[Run, ...], interpret: Any) -> tuple[Shaped[Array, "B Hk ..."], ...]:
    """The runs, out of the pieces that hold them."""
    batch, heads = runs[0].first.shape
    rows = _rows(some, batch, heads)

    def kernel(*refs):
        (firsts, given, out), copied = _by_array(refs, some)
        begin = pl.program_id(0) * rows

        def copies(row, head):
            at = begin + row
            for piece, first, x, to in zip(some, firsts, given, out, strict=True):
                yield pltpu.make_async_copy(_piece(piece, x, at, head, first[at, head]), to.at[row, head], copied)

        def start(row, head):
            for copy in copies(row, head):
                copy.start()

        def wait(row, head):
            for copy in copies(row, head):
                copy.wait()

        there = lambda row, head: begin + row < batch  # noqa: E731
        for act in (start, wait):
            _for_all(rows, heads, there, act)

    shapes = [jax.ShapeDtypeStruct((batch, heads, *piece.shape), piece.dtype) for piece in some]
    out = _call("read_runs", kernel, rows, some, runs, [], shapes, interpret)
    return tuple(piece.picked(x, run.first) for piece, x, run in zip(some, out, runs, strict=True))


def write(
    some: list[Piece], active: Bool[Array, "B Hk"], news: tuple[jax.Array, ...], runs: tuple[Run, ...], interpret: Any
) -> tuple[jax.Array, ...]:
    """The arrays with what is new in the runs of heads that are active."""
    batch, heads = runs[0].first.shape
    rows = _rows(some, batch, heads)
    runs = tuple(run._replace(first=jnp.where(active, run.first, -1)) for run in runs)

    def kernel(*refs):
        (firsts, news, given, after, held), copied = _by_array(refs, some)
        begin = pl.program_id(0) * rows

        def there(row, head):
            at = begin + row
            return (at < batch) & (firsts[0][jnp.minimum(at, batch - 1), head] >= 0)

        def each(row, head):
            at = begin + row
            for piece, first, *arrays in zip(some, firsts, news, given, after, held, strict=True):
                yield piece, at, first[at, head], arrays

        def fetched(row, head):
            for piece, at, first, (_, given, _, held) in each(row, head):
                yield pltpu.make_async_copy(_piece(piece, given, at, head, first), held.at[row, head], copied)

        def sent(row, head):
            for piece, at, first, (_, _, after, held) in each(row, head):
                yield pltpu.make_async_copy(held.at[row, head], _piece(piece, after, at, head, first), copied)

        def change(row, head):
            for piece, _, first, (new, _, _, held) in each(row, head):
                wide = jnp.int32 if jnp.issubdtype(held.dtype, jnp.integer) else jnp.float32
                place = lax.broadcasted_iota(jnp.int32, piece.shape, int(piece.columns))
                here = lax.div(piece.begins(first) + place, piece.run) == lax.div(first, piece.run)
                both = new[row, head].astype(wide), held[row, head].astype(wide)
                held[row, head] = jnp.where(here, *both).astype(held.dtype)

        def over(copies: Callable, act: str):
            def one(row, head):
                for copy in copies(row, head):
                    getattr(copy, act)()

            _for_all(rows, heads, there, one)

        over(fetched, "start")
        over(fetched, "wait")
        _for_all(rows, heads, there, change)
        over(sent, "start")
        over(sent, "wait")

    filled = [
        piece.filled(new.astype(piece.dtype), run.first) for piece, new, run in zip(some, news, runs, strict=True)
    ]
    out = _call("write_runs", kernel, rows, some, runs, filled, None, interpret)
    return tuple(piece.lying(x)[:, :, : piece.slots] for piece, x in zip(some, out, strict=True))


def _by_array(refs: tuple[Any, ...], some: list[Piece]) -> tuple[list[tuple[Any, ...]], Any]:
    """A kernel's references: of every kind one for each array; and the semaphore, which is the last."""
    many = len(some)
    return [refs[n : n + many] for n in range(0, len(refs) - 1, many)], refs[-1]


def _rows(some: list[Piece], batch: int, heads: int) -> int:
    """Rows whose pieces are on the chip at a time."""
    return max(min(CHIP_BYTES // (heads * sum(piece.nbytes for piece in some)), batch), 1)


def _piece(piece: Piece, ref: Any, row: Any, head: Any, first: Any) -> Any:
    """The piece of an array in memory that holds a slot: all of it, where it has no more slots."""
    if piece.width == piece.slots:
        return ref.at[row, head]
    multiple = math.gcd(piece.width, piece.last) if piece.early else piece.width
    some = pl.ds(pl.multiple_of(piece.begins(first), multiple), piece.width)
    return ref.at[(row, head, slice(None), some) if piece.columns else (row, head, some, slice(None))]


def _for_all(rows: int, heads: int, there: Callable, act: Callable) -> None:
    """act(row, head) for all heads of so many rows, where one is `there`."""

    def one(number, carry):
        row, head = lax.div(number, heads), lax.rem(number, heads)

        @pl.when(there(row, head))
        def _():
            act(row, head)

        return carry

    lax.fori_loop(0, rows * heads, one, 0)


def _call(
    name: str, kernel: Callable, rows: int, some: list[Piece], runs: tuple[Run, ...], news: list[jax.Array],
    shapes: list[Any] | None, interpret: Any,
) -> Any:  # fmt: skip
    """The kernel over all rows: it gives blocks of these shapes, or, without them, the arrays themselves."""
    batch, heads = runs[0].first.shape
    arrays = [piece.lying(run.array) for piece, run in zip(some, runs, strict=True)]
    if interpret:  # which reads no further than an array goes
        arrays = [_whole(piece, x) for piece, x in zip(some, arrays, strict=True)]
    else:
        arrays = [blocks_of.in_memory(x) for x in arrays]
    block = lambda piece: pl.BlockSpec((rows, heads, *piece.shape), lambda i, *_: (i, 0, 0, 0))  # noqa: E731
    untouched = pl.BlockSpec(memory_space=pltpu.HBM)
    scratch: list[Any] = [pltpu.SemaphoreType.DMA]
    if shapes is None:
        scratch = [pltpu.VMEM((rows, heads, *piece.shape), piece.dtype) for piece in some] + scratch
    moved = batch * heads * sum(math.prod(piece.shape) * jnp.dtype(piece.dtype).itemsize for piece in some)
    return pl.pallas_call(
        kernel,
        out_shape=[pltpu.HBM(x.shape, x.dtype) for x in arrays] if shapes is None else shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(some),
            grid=(-(-batch // rows),),
            in_specs=[block(piece) for piece, _ in zip(some, news, strict=False)] + [untouched] * len(some),
            out_specs=[untouched if shapes is None else block(piece) for piece in some],
            scratch_shapes=scratch,
        ),
        input_output_aliases={} if shapes is not None else {2 * len(some) + n: n for n in range(len(some))},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=(3 if shapes is None else 2) * moved),
        name=name,
        interpret=interpret,
    )(*(run.first for run in runs), *news, *arrays)


def _whole(piece: Piece, x: jax.Array) -> jax.Array:
    """An array filled up to what memory has."""
    axis = x.ndim - (1 if piece.columns else 2)
    more = [(0, (piece.last + piece.width - piece.slots) * (at == axis)) for at in range(x.ndim)]
    return jnp.pad(x, more)
