"""What the GPU kernels share: what they take, how operands lie in shared memory, products and masks of a block, and how
a decode kernel's work is divided. `gpu_finish` joins its parts.

Keys are the rows of a block's scores [S, N] and queries the columns, so that a product with the values, [D, S] [S, N],
needs no more than the weights written back to shared memory.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.masking import MASKED

MULTIPROCESSORS = {"9.0": 132}  # by compute capability, where no device says: an H100's
SHARED = 228 * 1024  # bytes of shared memory that a multiprocessor's programs have between them
RESERVED = 6144  # and what each takes of it beside its own: its barriers, reductions, and what the system keeps
SLOTS = {64: 128, 128: 64, 192: 64, 256: 64}  # slots at a time, by head dim filled up to 64s: about 16 KiB of K
SCAN = 192  # positions that a program looks at at a time, to find the blocks that it must read
KEYS = plgpu.Layout.WGMMA.reduce(1)  # how a number per key (row of scores) lies in registers
QUERIES = plgpu.Layout.WGMMA.reduce(0)  # and a number per query (column)
SQUARE = plgpu.Layout.WGMMA


def gpu() -> Any | None:
    """The GPU that is traced for: jax's default device, if it is one."""
    device = jax.config.jax_default_device
    device = jax.devices()[0] if device is None or isinstance(device, str) else device
    return device if device.platform in ("gpu", "cuda") else None


def multiprocessors() -> int:
    """Of the GPU that is traced for, or of a usual Hopper GPU."""
    device = gpu()
    return MULTIPROCESSORS["9.0"] if device is None else device.core_count


def check(dim: int, dtype) -> None:
    """Raises `NotImplementedError` for GPUs, head dims and dtypes that the kernels do not take."""
    device = gpu()
    if device is not None and str(device.compute_capability) != "9.0":
        raise NotImplementedError(f"{device.device_kind}: the kernel is for Hopper GPUs (compute capability 9.0)")
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"{dtype} cache: the tensor cores would round it; bfloat16 or float16")
    if dim % 16 or dim > 256:
        raise NotImplementedError(f"head dim {dim}: a multiple of 16, for the tensor cores, up to 256")


def tile_width(dim: int) -> int:
    """64, 32 or 16, whichever divides D: the tensor cores' operands lie in tiles of 8 rows by so many columns."""
    return next(width for width in (64, 32, 16) if dim % width == 0)


def operand(width: int, dtype):
    """`operand(width, dtype)(shape)`: shared memory for an operand of the tensor cores."""
    swizzle = width * jnp.dtype(dtype).itemsize
    tiles = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return lambda *shape: plgpu.SMEM(shape, dtype, transforms=tiles)


def round_up(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple


def columns_of(heads: int) -> int:
    """Query heads of a KV head as arrays have them: up to 8, or 16. Tiles of an operand are 8 rows, of which an array
    has less than one or whole ones."""
    return heads if heads <= 8 else round_up(heads, 8)


def product(a, b):
    """a @ b on the tensor cores, both in shared memory, in float32."""

    def multiply(total):
        plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def per_key(x, shape):
    """x [S] over the scores' columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def per_query(x, shape):
    """x [N] over the scores' rows."""
    return lax.broadcast_in_dim(x, shape, [1])


def scores_of(keys, queries, key_positions, query_positions, scale, window, softcap):
    """Scores [S, N] of a block of keys, `masking.MASKED` where a query does not see a key, and where it does.

    Keys [S, D] and queries [N, D] are operands in shared memory, positions [S] and [N] in registers.
    """
    scores = product(keys, queries.transpose((1, 0))) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    at, now = per_key(key_positions, scores.shape), per_query(query_positions, scores.shape)
    seen = (at >= 0) & (at <= now)
    if window is not None:
        seen = seen & (now - at < window)
    return jnp.where(seen, scores, MASKED), seen


def clear_empty(values, key_positions):
    """Zero the rows of values [S, D], in shared memory, whose slots are empty: 0 * NaN is NaN."""

    @pl.when(jnp.min(key_positions) < 0)
    def _clear():
        block = plgpu.layout_cast(values[...], SQUARE)
        values[...] = jnp.where(per_key(key_positions >= 0, block.shape), block, jnp.zeros((), block.dtype))


@dataclasses.dataclass(frozen=True)
class Decode:
    """The numbers that a decode kernel is compiled for, and what its programs do alike.

    A program walks over blocks of S slots with the N queries of a KV head and carries their maximum [N], their weights
    summed over the blocks [S, N], and the output [D, N].
    """

    slots: int  # of a row: C or P
    dim: int  # D, filled up to a multiple of 64 with zeros that the copy engine makes
    columns: int  # G, filled up to 8 or 16
    stored: int  # G, filled up to a multiple of 4: a row of logits in memory is whole 16 bytes
    block: int  # slots at a time
    stages: int  # blocks in shared memory
    each: int  # blocks per program
    blocks: int  # blocks per row
    scale: float
    softcap: float | None
    biased: bool = dataclasses.field(default=False, kw_only=True)  # the logits, by a number for each slot
    keys: Any = dataclasses.field(default=None, kw_only=True)  # `gpu_codes.Side`s, where they are codes
    values: Any = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def of(cls, rows: int, slots: int, beside: int, dim: int, heads: int, dtype, **more: Any):
        """The plan for `heads` queries to a KV head, and for `beside` slots more than a row has.

        Raises `NotImplementedError` for what no decode kernel takes.
        """
        check(dim, dtype)
        if heads > 16:
            raise NotImplementedError(f"{heads} query heads to a KV head: up to 16")
        wide = round_up(dim, 64)
        block = SLOTS[wide]
        blocks = -(-(slots + beside) // block)
        whole = cls(slots, wide, round_up(heads, 8), round_up(heads, 4), block, 3, blocks, blocks, **more)
        plan = next((x for x in (whole, dataclasses.replace(whole, stages=2)) if x.programs(dim, dtype) > 1), whole)
        if plan.programs(dim, dtype) < 1:
            plan = dataclasses.replace(plan, stages=2)
        splits = _splits(rows, blocks, multiprocessors() * plan.programs(dim, dtype))
        return dataclasses.replace(plan, each=-(-blocks // splits))

    def programs(self, dim: int, dtype) -> int:
        """How many run on a multiprocessor at a time, two at most: one copies while the other computes."""
        memory = (x for x in (self.scratch(dim, dtype) | self.scan()).values() if hasattr(x, "dtype"))
        used = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in memory)
        return min(2, SHARED // (used + RESERVED))

    @property
    def splits(self) -> int:
        """Programs per row."""
        return -(-self.blocks // self.each)

    def scratch(self, dim: int, dtype) -> dict[str, Any]:
        """Shared memory and barriers of a program."""
        sides = {name: side for name, side in (("keys", self.keys), ("values", self.values)) if side is not None}
        pieces = max((side.pieces for side in sides.values()), default=1)  # in which operands are written
        tiled = operand(tile_width(dim // pieces), dtype)
        coded = [side.scratch(name, self.stages, self.block, self.dim, dim) for name, side in sides.items()]
        blocks = {name: self.stages if side is None else 1 for name, side in (("k", self.keys), ("v", self.values))}
        parts = {name: 1 if side is None else len(side.parts) for name, side in (("k", self.keys), ("v", self.values))}
        return {
            "q_mem": tiled(self.columns, self.dim),
            "k_mem": tiled(blocks["k"], self.block, self.dim),
            "v_mem": tiled(blocks["v"], self.block, self.dim),
            "w_mem": tiled(self.columns, self.block),
            "p_mem": plgpu.SMEM((self.stages, self.block), jnp.int32),
            "key_mem": plgpu.SMEM((dim if self.keys is None else self.dim,), dtype),
            "value_mem": plgpu.SMEM((dim if self.values is None else self.dim,), dtype),
            "logit_mem": plgpu.SMEM((self.block, self.columns), jnp.float32),
            "out_mem": plgpu.SMEM((self.dim, self.columns), jnp.float32),
            "sum_mem": plgpu.SMEM((2, self.columns), jnp.float32),
            "once": plgpu.Barrier(),
            "k_here": plgpu.Barrier(num_arrivals=1 + parts["k"] + self.biased, num_barriers=self.stages),
            "v_here": plgpu.Barrier(num_arrivals=parts["v"], num_barriers=self.stages),
            **({"b_mem": plgpu.SMEM((self.stages, self.block), jnp.float32)} if self.biased else {}),
            **{name: memory for side in coded for name, memory in side.items()},
        }

    def start(self):
        """What a program carries before its first block."""
        start = (
            jnp.full((self.columns,), MASKED, jnp.float32),
            jnp.zeros((self.block, self.columns), jnp.float32),
            jnp.zeros((self.dim, self.columns), jnp.float32),
        )
        return tuple(plgpu.layout_cast(x, layout) for x, layout in zip(start, (QUERIES, SQUARE, SQUARE), strict=True))

    @staticmethod
    def scan() -> dict[str, Any]:
        """Shared memory and barriers for `reach`."""
        return {"scan_mem": plgpu.SMEM((2, SCAN), jnp.int32), "scanned": plgpu.Barrier(num_barriers=2)}

    def reach(self, positions, split, seen, now, memory, here) -> tuple:
        """The first block of a program's run in which something is seen, and how many there are to the last one.

        `seen(held, start)` says what of the positions from a place on is seen, behind its first two results.
        """
        start, stop = split * self.each * self.block, jnp.minimum((split + 1) * self.each, self.blocks) * self.block
        count = jnp.where(now < 0, 0, pl.cdiv(stop - start, SCAN))

        def fetch(index):
            @pl.when(index < count)
            def _fetch():
                stage = lax.rem(index, 2)
                some = positions.at[pl.ds(start + index * SCAN, SCAN)]
                plgpu.copy_gmem_to_smem(some, memory.at[stage], here.at[stage])

        def look(index, carry):
            least, most = carry
            stage = lax.rem(index, 2)
            plgpu.barrier_wait(here.at[stage])
            place, _, there = seen(plgpu.layout_cast(memory[stage], KEYS), start + index * SCAN)
            there = there & (place < stop)
            plgpu.commit_smem()  # everyone has done with the stage
            fetch(index + 2)
            return jnp.where(there, jnp.minimum(least, place), least), jnp.where(there, place, most)

        for index in range(2):
            fetch(jnp.int32(index))
        nothing = jnp.full((SCAN,), self.blocks * self.block, jnp.int32), jnp.full((SCAN,), -1, jnp.int32)
        least, most = lax.fori_loop(0, count, look, tuple(plgpu.layout_cast(x, KEYS) for x in nothing))
        first = lax.div(jnp.min(least), self.block)
        return first, jnp.maximum(lax.div(jnp.max(most) + self.block, self.block) - first, 0)

    def scores(self, keys, queries, seen, bias=None, gain=None, low=None):
        """Scores [S, N] with the `bias [S]` of each key, `masking.MASKED` for keys that are not `seen [S]`, and `seen`
        over the queries. Keys are taken times `gain [S]`, and `low [S]` is added to them."""
        scores = product(keys, queries.transpose((1, 0)))
        if gain is not None:
            scores = scores * per_key(gain, scores.shape)
        if low is not None:
            whole = jnp.sum(plgpu.layout_cast(queries.transpose((1, 0))[...], SQUARE).astype(jnp.float32), axis=0)
            scores = scores + per_key(low, scores.shape) * per_query(whole, scores.shape)
        scores = scores * self.scale
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + per_key(bias, scores.shape)
        visible = per_key(seen, scores.shape)
        return jnp.where(visible, scores, MASKED), visible


def weigh(top, scores, visible, memory, gain=None):
    """The maximum with these scores, their weights under it, and the factor of what was before; to `memory` go the
    weights, times the `gain [S]` of the values."""
    higher = jnp.maximum(top, jnp.max(scores, axis=0))
    weights = jnp.where(visible, jnp.exp(scores - per_query(higher, scores.shape)), 0.0)
    given = weights if gain is None else weights * per_key(gain, scores.shape)
    memory.transpose((1, 0))[...] = given.astype(memory.dtype)
    return higher, weights, jnp.exp(top - higher)


def add(so_far, shrink, new):
    """so_far * shrink + new, the factor per query."""
    return so_far * per_query(shrink, so_far.shape) + new


def put(new, memory, slot, once):
    """Send a new token's key or value to its slot, by way of shared memory."""
    plgpu.copy_gmem_to_smem(new, memory, once)
    plgpu.barrier_wait(once)
    plgpu.copy_smem_to_gmem(memory, slot)


def send(carry, out_mem, sum_mem, part, sums):
    """Send off what a program carried: output [D, N], and maximum and sum [2, N]."""
    top, total, output = carry
    out_mem[...] = output
    sum_mem.at[0][...] = top
    sum_mem.at[1][...] = jnp.sum(total, axis=0)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_mem, part)
    plgpu.copy_smem_to_gmem(sum_mem, sums)


def _splits(rows: int, blocks: int, at_once: int) -> int:
    """Programs per row: the fewest of at least 2 blocks that keep nine tenths of the chip busy, else the busiest."""

    def busy(splits: int) -> float:
        programs = rows * -(-blocks // -(-blocks // splits))
        return programs / round_up(programs, at_once)

    choices = range(1, max(1, blocks // 2) + 1)
    return next((splits for splits in choices if busy(splits) >= 0.9), max(choices, key=busy))
