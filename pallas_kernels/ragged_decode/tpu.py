"""ragged_decode for TPU: one walk over a layer's pool per row, every query head meeting every block of slots.

The grid is (rows, blocks of slots), so each block of K and V passes through on-chip memory exactly once, wherever in it
one head's segment ends and the next begins: the borders are scalars, and a mask made of them lets each query head see
its own slots. That is Hk times the arithmetic of a uniform cache, in one matrix product that the memory hides. Logits
stay on the chip, [Hq, P]; after the last block they give the mass. The victims are found from it by the reference.

How K and V lie, and how a new token's tile goes back into the aliased cache, is decode_attend_score's. Heads whose new
tokens meet in one tile send it once.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels import tpu_blocks as blocks_of
from pallas_kernels.arguments import Judge, Segments, Token
from pallas_kernels.decode_attend_score.reference import Attended
from pallas_kernels.decode_attend_score.tpu import BLOCK_BYTES
from pallas_kernels.masking import MASKED, soft_cap
from pallas_kernels.ragged_decode.reference import aim


@dataclasses.dataclass(frozen=True)
class _Plan(blocks_of.Walk):
    """The numbers that the kernel is compiled for."""

    heads: int  # query heads
    kv_heads: int
    scale: float
    softcap: float | None
    group: str


def ragged_decode(
    token: Token,
    held: Segments,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    scale: float,
    softcap: float | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Attended:
    """`reference.ragged_decode`, K and V read once. Every head's `slot` lies in its own segment.

    Raises `NotImplementedError` for a bias, for 4 slots or fewer, and where a row's logits do not fit in on-chip
    memory.
    """
    query, key, value, position = token
    keys, values, positions, offsets, _, bias = held
    if bias is not None:
        raise NotImplementedError("slots whose logits have a bias need the reference")
    batch, slots, dim = keys.shape
    heads, kv_heads = query.shape[1], key.shape[1]
    if slots <= blocks_of.SUBLANES // 2:
        raise NotImplementedError(f"{slots} slots lie in memory in smaller pieces than the kernel writes")
    columns = blocks_of.slots_along_lanes(slots, dim)
    slot_bytes = blocks_of.round_up(dim, blocks_of.SUBLANES if columns else blocks_of.LANES) * keys.dtype.itemsize
    blocks, block = blocks_of.even_blocks(slots, BLOCK_BYTES // slot_bytes)
    plan = _Plan(slots, columns, block, blocks, heads, kv_heads, scale, softcap, judge.group)
    width = plan.width
    vmem = _vmem_bytes(plan, slot_bytes)
    if vmem > blocks_of.VMEM_BYTES:
        raise NotImplementedError(f"{slots} slots under {heads} query heads need {vmem} bytes of on-chip memory")

    at = (jnp.arange(batch)[:, None], jnp.where(position[:, None] < 0, slots, slot))
    positions = positions.at[at].set(jnp.broadcast_to(position[:, None], slot.shape), mode="drop")

    def row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda b, j, *_: (b,) + (0,) * len(shape))

    if columns:
        keys, values, key, value = (jnp.swapaxes(x, -1, -2) for x in (keys, values, key, value))
        cache = pl.BlockSpec((1, dim, block), lambda b, j, *_: (b, 0, j))
    else:
        cache = pl.BlockSpec((1, block, dim), lambda b, j, *_: (b, j, 0))
    untouched = pl.BlockSpec(memory_space=pltpu.HBM)
    if interpret:
        keys, values = plan.whole(keys), plan.whole(values)
    call = pl.pallas_call(
        functools.partial(_kernel, plan),
        out_shape=(
            jax.ShapeDtypeStruct((batch, heads, dim), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1), jnp.float32),
            jax.ShapeDtypeStruct((batch, 1, slots), jnp.float32),
            pltpu.HBM(keys.shape, keys.dtype),  # else XLA takes a small cache on the chip first, and back behind
            pltpu.HBM(values.shape, values.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, blocks),
            in_specs=[
                row(heads, dim), row(*key.shape[1:]), row(*value.shape[1:]), cache, cache, row(1, width),
            ],
            out_specs=[row(heads, dim), row(heads, 1), row(1, width), untouched, untouched],
            scratch_shapes=[
                pltpu.VMEM((heads, width), jnp.float32),
                pltpu.VMEM((heads, 1), jnp.float32),
                pltpu.VMEM((heads, 1), jnp.float32),
                pltpu.VMEM((heads, dim), jnp.float32),
                pltpu.VMEM((2, kv_heads, *((dim, plan.tile) if columns else (plan.tile, dim))), keys.dtype),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={6: 3, 7: 4},  # the cache; the three scalars count
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=blocks_of.VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * slots * dim,
            transcendentals=2 * batch * heads * slots,
            bytes_accessed=keys.nbytes + values.nbytes + 8 * positions.size
            + 2 * batch * (heads + kv_heads) * dim * keys.dtype.itemsize + 4 * batch * heads
            + 2 * batch * kv_heads * plan.tile * dim * keys.dtype.itemsize,
        ),
        name="ragged_decode",
        interpret=interpret,
    )  # fmt: skip
    output, lse, mass, keys, values = call(
        position, slot.reshape(-1), offsets.reshape(-1), query, key, value, keys, values, positions[:, None]
    )
    if columns:
        keys, values = (jnp.swapaxes(x, -1, -2) for x in (keys, values))
    if interpret:
        keys, values = keys[:, :slots], values[:, :slots]
    mass = mass[:, 0]
    aimed = aim(mass, positions, offsets, position, slot, judge)
    return Attended(output, lse[..., 0], mass, keys, values, positions, aimed)


def _vmem_bytes(plan: _Plan, slot_bytes: int) -> int:
    """On-chip memory: two blocks each of K and V, a row's logits, and two each of its positions and masses."""
    rows = blocks_of.round_up(plan.heads, blocks_of.SUBLANES)
    return 4 * plan.block * slot_bytes + 4 * plan.width * (rows + 4 * blocks_of.SUBLANES) + 2**22


def _kernel(plan: _Plan, position_ref, slot_ref, offsets_ref, *refs):
    query, new_key, new_value, keys, values, positions, *refs = refs
    output, lse, mass, keys_out, values_out, logits, top, total, context, tiles, copied = refs
    row, step = pl.program_id(0), pl.program_id(1)
    position = position_ref[row]

    @pl.when(step == 0)
    def _():
        top[...] = jnp.full(top.shape, MASKED, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        context[...] = jnp.zeros(context.shape, jnp.float32)

    def each_head(act: Callable, once_per_tile: bool):
        """act(head, slot) for every KV head whose slot is in this block, if the row runs."""
        before = None
        for head in range(plan.kv_heads):
            slot = slot_ref[row * plan.kv_heads + head]
            due = (position >= 0) & (lax.div(slot, plan.block) == step)
            if once_per_tile and before is not None:  # segments lie in the heads' order, so neighbours are enough
                due &= lax.div(slot, plan.tile) != lax.div(before, plan.tile)
            pl.when(due)(functools.partial(act, head, slot))
            before = slot

    def write(head: int, slot):
        around = plan.around(lax.rem(slot, plan.block))
        here = lax.broadcasted_iota(jnp.int32, tiles.shape[2:], int(plan.columns)) == lax.rem(slot, plan.tile)
        for block, new in ((keys, new_key), (values, new_value)):
            one = pl.ds(head, 1)
            new = (new[0, :, one] if plan.columns else new[0, one, :]).astype(jnp.float32)
            block[0, *around] = jnp.where(here, new, block[0, *around].astype(jnp.float32)).astype(block.dtype)

    def copies(head: int, slot):
        around = plan.around(slot)
        return [
            pltpu.make_async_copy(tiles.at[which, head], cache.at[row, *around], copied)
            for which, cache in enumerate((keys_out, values_out))
        ]

    def send(head: int, slot):
        for which, block in enumerate((keys, values)):
            tiles[which, head] = block[0, *plan.around(lax.rem(slot, plan.block))]
        for copy in copies(head, slot):
            copy.start()

    each_head(write, once_per_tile=False)
    each_head(send, once_per_tile=True)

    def inputs(step):
        """Where block `step` lies in arrays over all slots, its positions [1, S], and what each head sees [Hq, S]."""
        at = pl.ds(pl.multiple_of(step * plan.block, plan.block), plan.block)
        index = step * plan.block + lax.broadcasted_iota(jnp.int32, (1, plan.block), 1)
        place = jnp.where(index < plan.slots, positions[0, :, at], -1)
        first = row * (plan.kv_heads + 1) + 1
        owner = sum((index >= offsets_ref[first + head]).astype(jnp.int32) for head in range(plan.kv_heads))
        head = lax.div(lax.broadcasted_iota(jnp.int32, (plan.heads, plan.block), 0), plan.heads // plan.kv_heads)
        return at, place, (head == owner) & (place >= 0) & (place <= position)

    at, place, seen = inputs(step)

    @pl.when(jnp.any(place < 0))
    def _():
        values[0] = blocks_of.zero_empty(values[0], (place >= 0).astype(jnp.float32), plan.columns)

    @pl.when(jnp.any(seen))
    def _():
        some = blocks_of.product(query[0], keys[0], contract=0 if plan.columns else 1) * plan.scale
        some = soft_cap(some, plan.softcap)
        logits[:, at] = some
        some = jnp.where(seen, some, MASKED)
        higher = jnp.maximum(top[...], jnp.max(some, axis=1, keepdims=True))
        shrink = jnp.exp(top[...] - higher)
        weights = jnp.where(seen, jnp.exp(some - higher), 0.0)
        top[...] = higher
        total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        new = blocks_of.product(weights.astype(values.dtype), values[0], contract=1 if plan.columns else 0)
        context[...] = context[...] * shrink + new

    @pl.when(step == plan.blocks - 1)
    def _():
        whole = jnp.where(total[...] > 0, total[...], 1.0)
        output[0] = (context[...] / whole).astype(output.dtype)
        lse[0] = jnp.where(total[...] > 0, top[...] + jnp.log(whole), -jnp.inf)

        def look_back(step, carry):
            at, _, seen = inputs(step)
            weights = jnp.where(seen, jnp.exp(logits[:, at] - top[...]) / whole, 0.0)
            over = jnp.max if plan.group == "max" else jnp.sum  # the other heads' weights are 0
            each = over(weights, axis=0, keepdims=True)
            mass[0, :, at] = each / (plan.heads // plan.kv_heads) if plan.group == "mean" else each
            return carry

        lax.fori_loop(0, plan.blocks, look_back, 0)

    def wait(head: int, slot):
        for copy in copies(head, slot):
            copy.wait()

    each_head(wait, once_per_tile=True)
