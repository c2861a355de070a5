"""decode_attend_score for Hopper GPUs: flash decoding, split over the slots, that keeps every slot's logits.

One program takes one KV head of one row and a run of its slots. The copy engine streams K, V and positions through
several buffers of shared memory. The tensor cores take the slots as the rows of their products (64 at a time) and the
G query heads as the columns (8 or 16), so that nothing is spent on padding query heads to 64 rows:
logits [S, G] = K q and output [D, G] += V^T w. A running maximum keeps the softmax stable. What leaves a program is its
part of the output, its maximum and sum, and the logits (G floats per slot, beside the 2 D of K and V); XLA joins the
parts, and turns logits into mass, scores and victim.

Shapes: B rows, Hk KV heads, G query heads each, C slots, D head dim; H = B Hk, S slots at a time.
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
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import gpu_blocks as blocks_of
from pallas_kernels.arguments import Held, Judge, Token
from pallas_kernels.decode_attend_score.reference import GROUP, Attended
from pallas_kernels.decode_attend_score.victim import aim
from pallas_kernels.masking import visible


@dataclasses.dataclass(frozen=True)
class _Plan(blocks_of.Decode):
    """The numbers that the kernel is compiled for; a row is one KV head of a row of the batch."""

    window: int | None
    keeps_logits: bool


def decode_attend_score(
    token: Token,
    held: Held,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rotate: Callable | None = None,
    with_mass: bool = True,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> Attended:
    """`reference.decode_attend_score`, K and V read once; not those of blocks before the first and behind the last that
    the query sees.

    Raises `NotImplementedError` on GPUs other than Hopper, for keys turned at read time (`rotate`), for dtypes
    other than bfloat16 and float16, for D that is no multiple of 16 or above 256, for G above 16, and for
    B Hk C that is no multiple of 8. Where C itself is none, positions and logits take a detour; K and V do not.
    """
    if rotate is not None:
        raise NotImplementedError("the GPU kernel reads keys as they lie in the cache: rotate= needs the reference")
    query, key, value, position = token
    keys, values, positions, bias = held
    batch, kv_heads, slots, dim = keys.shape
    rows, heads = batch * kv_heads, query.shape[1] // kv_heads

    target = jnp.where(position[:, None] < 0, slots, slot)
    at = (jnp.arange(batch)[:, None], jnp.arange(kv_heads)[None, :], target)
    positions = positions.at[at].set(jnp.broadcast_to(position[:, None], slot.shape), mode="drop")

    output, lse, logits, keys, values = attend(
        query.reshape(rows, heads, dim),
        key.reshape(rows, dim),
        value.reshape(rows, dim),
        jnp.repeat(position, kv_heads),
        slot.reshape(rows),
        keys.reshape(rows, slots, dim),
        values.reshape(rows, slots, dim),
        positions.reshape(rows, slots),
        None if bias is None else bias.reshape(rows, slots),
        scale=scale,
        window=window,
        softcap=softcap,
        keeps_logits=with_mass,
        interpret=interpret,
    )
    mass = None
    if with_mass:
        seen = visible(position[:, None, None], positions, window).reshape(rows, slots, 1)
        weights = jnp.where(seen, jnp.exp(logits - lse[:, None, :]), 0.0)
        if judge.group == "each":
            mass = jnp.swapaxes(weights, -1, -2).reshape(batch, kv_heads, heads, slots)
        else:
            mass = GROUP[judge.group](weights, axis=-1).reshape(batch, kv_heads, slots)
    return Attended(
        output=output.reshape(query.shape).astype(query.dtype),
        lse=lse.reshape(query.shape[:2]),
        mass=mass,
        keys=keys.reshape(batch, kv_heads, slots, dim),
        values=values.reshape(batch, kv_heads, slots, dim),
        positions=positions,
        next_slot=aim(mass, positions, position, slot, judge, window=window),
    )


def attend(
    query: Float[Array, "H G D"],
    key: Float[Array, "H D"],
    value: Float[Array, "H D"],
    position: Int[Array, "H"],
    slot: Int[Array, "H"],
    keys: Float[Array, "H C D"],
    values: Float[Array, "H C D"],
    positions: Int[Array, "H C"],
    bias: Float[Array, "H C"] | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    keeps_logits: bool = True,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple:
    """The kernel: output [H, G, D] and lse [H, G] in float32, logits [H, C, G] (None unless kept), and the new cache.

    `positions` hold the new token's already. Logits of slots that are not seen say nothing.
    """
    rows, slots, dim = keys.shape
    heads = query.shape[1]
    plan = _plan(rows, slots, dim, heads, keys.dtype, scale, window, softcap, keeps_logits, bias is not None)
    width = plan.blocks * plan.block
    shift = np.arange(rows)[:, None] * slots % 8  # where a head begins within its eight slots

    def in_blocks(x: jax.Array, nothing: Any) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, width - slots)), constant_values=nothing)
        if slots % 8 == 0:
            return x
        place = np.arange(width) - shift
        return jnp.where((place >= 0) & (place < slots), jnp.take_along_axis(x, place % width, axis=1), nothing)

    held = in_blocks(positions, -1)
    seen = visible(position[:, None], held, window).reshape(rows, plan.blocks, plan.block)
    due, number = jnp.any(seen, axis=2), jnp.arange(plan.blocks, dtype=jnp.int32)
    reach = jnp.stack([jnp.min(jnp.where(due, number, plan.blocks), 1), jnp.max(jnp.where(due, number + 1, 0), 1)], 1)
    outputs = [
        jax.ShapeDtypeStruct((rows, plan.splits, plan.dim, plan.columns), jnp.float32),
        jax.ShapeDtypeStruct((rows, plan.splits, 2, plan.columns), jnp.float32),
    ]
    if keeps_logits:
        outputs.append(jax.ShapeDtypeStruct((rows, width, plan.stored), jnp.float32))
    whole = (1, rows * slots, dim) if slots % 8 else (rows, slots, dim)
    cache = [jax.new_ref(x.reshape(whole)) for x in (keys, values)]
    parts, sums, *logits = plgpu.kernel(
        functools.partial(_attend_block, plan),
        out_type=outputs,
        scratch_types=plan.scratch(dim, keys.dtype),
        grid=(rows, plan.splits),
        grid_names=("row", "split"),
        interpret=interpret or None,
        kernel_name="decode_attend_score",
    )(
        jnp.pad(query, ((0, 0), (0, plan.columns - heads), (0, 0))).astype(keys.dtype),
        key.astype(keys.dtype),
        value.astype(values.dtype),
        position,
        slot,
        reach,
        held,
        *cache,
        *(() if bias is None else (in_blocks(bias, 0.0),)),
    )
    lse, share = blocks_of.join(sums[:, :, 0, :heads], sums[:, :, 1, :heads])
    output = jnp.einsum("rsdg,rsg->rgd", parts[:, :, :dim, :heads], share, precision="highest")
    if keeps_logits:
        logits = logits[0][:, :, :heads]
        place = (np.arange(slots) + shift)[..., None]
        logits = jnp.take_along_axis(logits, place, axis=1) if slots % 8 else logits[:, :slots]
    return output, lse, logits if keeps_logits else None, *(jax.freeze(x).reshape(keys.shape) for x in cache)


def _attend_block(
    plan: _Plan, query, key, value, position, slot, reach, positions, keys, values, *refs,
    q_mem, k_mem, v_mem, w_mem, p_mem, key_mem, value_mem, logit_mem, out_mem, sum_mem, once, k_here, v_here,
    b_mem=None,
) -> None:  # fmt: skip
    """One program: the blocks of slots from `first` on, of one KV head of one row, as far as it reaches."""
    bias, (parts, sums, *logits) = (refs[0], refs[1:]) if plan.biased else (None, refs)
    row, split = lax.axis_index("row"), lax.axis_index("split")
    first = jnp.maximum(split * plan.each, reach[row, 0])
    count = jnp.maximum(jnp.minimum((split + 1) * plan.each, reach[row, 1]) - first, 0)
    now, target = position[row], slot[row]
    head, begin, shift = row, 0, 0
    if plan.slots % 8:
        # Slots are read by eights, so all heads' lie in one row, and a block may reach into those of the heads beside:
        # they are not seen, so it does not matter either that their programs may be writing there.
        head, begin = 0, row * plan.slots
        shift = lax.rem(begin, 8)
    # From a traced 0, so that the slice may reach past the array: the copy engine reads zeros there and writes nothing.
    zero = row * 0
    all_dims, all_heads = pl.ds(zero, plan.dim), pl.ds(zero, plan.columns)

    @pl.when((now >= 0) & (target < plan.slots) & (lax.div(target + shift, plan.block * plan.each) == split))
    def _write_new_token():
        for new, memory, cache in ((key, key_mem, keys), (value, value_mem, values)):
            blocks_of.put(new.at[row], memory, cache.at[head, begin + target], once)
        plgpu.wait_smem_to_gmem(0)  # in memory before the block around it is read

    def fetch(index):
        stage, start = lax.rem(index, plan.stages), (first + index) * plan.block
        some = pl.ds(pl.multiple_of(begin - shift + start, 8), plan.block)
        plgpu.copy_gmem_to_smem(positions.at[row, pl.ds(start, plan.block)], p_mem.at[stage], k_here.at[stage])
        if bias is not None and b_mem is not None:
            plgpu.copy_gmem_to_smem(bias.at[row, pl.ds(start, plan.block)], b_mem.at[stage], k_here.at[stage])
        plgpu.copy_gmem_to_smem(keys.at[head, some, all_dims], k_mem.at[stage], k_here.at[stage])
        plgpu.copy_gmem_to_smem(values.at[head, some, all_dims], v_mem.at[stage], v_here.at[stage])

    for index in range(plan.stages):
        pl.when(index < count)(functools.partial(fetch, jnp.int32(index)))
    plgpu.copy_gmem_to_smem(query.at[row, :, all_dims], q_mem, once)
    plgpu.barrier_wait(once)

    def step(index, carry):
        top, total, output = carry
        stage = lax.rem(index, plan.stages)
        plgpu.barrier_wait(k_here.at[stage])
        held = plgpu.layout_cast(p_mem[stage], blocks_of.KEYS)
        seen = (held >= 0) & (held <= now)
        if plan.window is not None:
            seen = seen & (now - held < plan.window)
        added = None if b_mem is None else plgpu.layout_cast(b_mem[stage], blocks_of.KEYS)
        scores, visible = plan.scores(k_mem.at[stage], q_mem, seen, added)
        top, weights, shrink = blocks_of.weigh(top, scores, visible, w_mem)
        if logits:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            logit_mem[...] = scores

        plgpu.barrier_wait(v_here.at[stage])
        blocks_of.clear_empty(v_mem.at[stage], held)
        plgpu.commit_smem()  # and everyone has done with the stage of the step before
        if logits:
            some = pl.ds((first + index) * plan.block, plan.block)
            plgpu.copy_smem_to_gmem(logit_mem, logits[0].at[row, some, all_heads])
        coming = index - 1 + plan.stages
        pl.when((index > 0) & (coming < count))(functools.partial(fetch, coming))
        added = blocks_of.product(v_mem.at[stage].transpose((1, 0)), w_mem.transpose((1, 0)))
        return top, blocks_of.add(total, shrink, weights), blocks_of.add(output, shrink, added)

    carry = lax.fori_loop(0, count, step, plan.start())
    blocks_of.send(carry, out_mem, sum_mem, parts.at[row, split], sums.at[row, split])
    plgpu.wait_smem_to_gmem(0)


def _plan(rows, slots, dim, heads, dtype, scale, window, softcap, keeps_logits, biased=False) -> _Plan:
    """The kernel's numbers; raises `NotImplementedError` for what it does not take."""
    if rows * slots % 8:
        raise NotImplementedError(f"{rows} x {slots} slots: a multiple of 8 in all, as they are read by eights")
    return _Plan.of(
        rows, slots, 7 if slots % 8 else 0, dim, heads, dtype, scale=scale, softcap=softcap, biased=biased,
        window=window, keeps_logits=keeps_logits,
    )  # fmt: skip
