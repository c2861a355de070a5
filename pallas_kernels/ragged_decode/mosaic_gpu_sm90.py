"""ragged_decode for Hopper GPUs: the pool divided evenly over programs, wherever in it one head's segment ends.

A row's slots are cut into runs of equally many blocks, one program each, so that heads may share a pool in any way: no
program waits for a head that owns nearly all of it, and none is started in vain for one that owns little. A program
walks over its run once, head by head of those whose segments meet it, and sends off what it found for each. A block
with a border in it stays in shared memory until the last of its heads has seen its own slots there: every block of K
and V that somebody owns is read once, P slots at most, whatever the split; behind the last border nothing is, nor in
rows that have finished. Borders only cost work on the chip, up to Hk - 1 blocks more per row.

Along a row's line either the head or the run goes up, so the sum of the two names a part: Hk - 1 more than there are
runs. XLA joins a head's parts, and turns logits into mass; the victims are found by the reference. Products, softmax,
and how K and V pass through shared memory are decode_attend_score's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import gpu_blocks as blocks_of
from pallas_kernels.arguments import Judge, Segments, Token
from pallas_kernels.codes import refuse_codes
from pallas_kernels.decode_attend_score.reference import GROUP, Attended
from pallas_kernels.gpu_blocks import per_key
from pallas_kernels.masking import MASKED
from pallas_kernels.ragged_decode.reference import aim
from pallas_kernels.ragged_decode.segments import segments


def ragged_decode(
    token: Token,
    held: Segments,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    scale: float,
    softcap: float | None = None,
    with_mass: bool = True,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> Attended:
    """`reference.ragged_decode`, K and V read once. Every head's `slot` lies in its own segment.

    Raises `NotImplementedError` on GPUs other than Hopper, for dtypes other than bfloat16 and float16,
    for D that is no multiple of 16 or above 256, for G above 16, and for P that is no multiple of 8.
    """
    refuse_codes(held.keys, held.values)
    query, key, value, position, *_ = token
    keys, values, positions, offsets, _, bias = held
    batch, slots, dim = keys.shape
    kv_heads, heads = key.shape[1], query.shape[1] // key.shape[1]
    if slots % 8:
        raise NotImplementedError(f"{slots} slots: a multiple of 8, as they are read by eights")
    plan = blocks_of.Decode.of(
        batch, slots, 0, dim, heads, keys.dtype, scale=scale, softcap=softcap, biased=bias is not None
    )
    width, count = plan.blocks * plan.block, plan.splits + kv_heads - 1

    finished = position[:, None] < 0
    at = (jnp.arange(batch)[:, None], jnp.where(finished, slots, slot))
    positions = positions.at[at].set(jnp.broadcast_to(position[:, None], slot.shape), mode="drop")
    owner = segments(offsets, slots)
    owned = jnp.where(owner < kv_heads, positions, -1)
    # From slot 0 on, so that every block before the last border is some head's; none is where the row has finished.
    borders = jnp.where(finished, 0, jnp.pad(offsets[:, 1:], ((0, 0), (1, 0))))

    queries = query.reshape(batch, kv_heads, heads, dim)
    cache = [jax.new_ref(x) for x in (keys, values)]
    kept = [jax.ShapeDtypeStruct((batch, width, plan.stored), jnp.float32)] if with_mass else []
    parts, sums, *logits = plgpu.kernel(
        functools.partial(_attend_run, plan),
        out_type=[
            jax.ShapeDtypeStruct((batch, count, plan.dim, plan.columns), jnp.float32),
            jax.ShapeDtypeStruct((batch, count, 2, plan.columns), jnp.float32),
            *kept,
        ],
        scratch_types=plan.scratch(dim, keys.dtype),
        grid=(batch, plan.splits),
        grid_names=("row", "split"),
        interpret=interpret or None,
        kernel_name="ragged_decode",
    )(
        jnp.pad(queries, ((0, 0), (0, 0), (0, plan.columns - heads), (0, 0))).astype(keys.dtype),
        key.astype(keys.dtype),
        value.astype(values.dtype),
        position,
        slot,
        borders,
        jnp.pad(owned, ((0, 0), (0, width - slots)), constant_values=-1),
        *cache,
        *(() if bias is None else (jnp.pad(bias, ((0, 0), (0, width - slots))),)),
    )
    output, lse = _joined(plan, parts[:, :, :dim, :heads], sums[..., :heads], borders)
    mass = None
    if with_mass:
        own = jnp.take_along_axis(lse, jnp.minimum(owner, kv_heads - 1)[..., None], axis=1)  # [B, P, G]
        seen = ((owned >= 0) & (owned <= position[:, None]))[..., None]
        mass = GROUP[judge.group](jnp.where(seen, jnp.exp(logits[0][:, :slots, :heads] - own), 0.0), axis=-1)
    return Attended(
        output=output.reshape(query.shape).astype(query.dtype),
        lse=lse.reshape(query.shape[:2]),
        mass=mass,
        keys=jax.freeze(cache[0]),
        values=jax.freeze(cache[1]),
        positions=positions,
        next_slot=aim(mass, positions, offsets, position, slot, judge),
    )


def _joined(
    plan: blocks_of.Decode,
    parts: Float[Array, "B parts D G"],
    sums: Float[Array, "B parts 2 G"],
    borders: Int[Array, "B Hk_1"],
) -> tuple[Float[Array, "B Hk G D"], Float[Array, "B Hk G"]]:
    """Output and log-sum-exp of every head, from the parts of the runs that its segment meets."""
    run = plan.each * plan.block
    begin = (np.arange(parts.shape[1]) - np.arange(borders.shape[1] - 1)[:, None]) * run  # [Hk, parts]
    met = (borders[:, 1:, None] > begin) & (borders[:, :-1, None] < begin + run)
    top, total = sums[:, None, :, 0], sums[:, None, :, 1]
    met, written = met[..., None], jnp.any(met, axis=1)[..., None, None]
    lse, share = blocks_of.join(jnp.where(met, top, MASKED), jnp.where(met, total, 0.0))
    share, parts = jnp.where(met, share, 0.0), jnp.where(written, parts, 0.0)
    return jnp.einsum("bndg,bhng->bhgd", parts, share, precision="highest"), lse


def _attend_run(
    plan: blocks_of.Decode, query, key, value, position, slot, borders, positions, keys, values, *refs,
    q_mem, k_mem, v_mem, w_mem, p_mem, key_mem, value_mem, logit_mem, out_mem, sum_mem, once, k_here, v_here,
    b_mem=None,
) -> None:  # fmt: skip
    """One program: a run of a row's blocks from `first` on, under all heads whose segments meet it."""
    bias, (parts, sums, *logits) = (refs[0], refs[1:]) if plan.biased else (None, refs)
    row, split = lax.axis_index("row"), lax.axis_index("split")
    kv_heads = key.shape[1]
    now, first = position[row], split * plan.each
    begin, end = first * plan.block, (first + plan.each) * plan.block
    count = jnp.maximum(jnp.minimum(plan.each, pl.cdiv(borders[row, kv_heads], plan.block) - first), 0)
    head_from = sum((borders[row, head + 1] <= begin).astype(jnp.int32) for head in range(kv_heads))
    head_to = sum((borders[row, head] < end).astype(jnp.int32) for head in range(kv_heads))
    # From a traced 0, so that the slice may reach past the array: the copy engine reads zeros there and writes nothing.
    zero = row * 0
    all_dims, all_heads = pl.ds(zero, plan.dim), pl.ds(zero, plan.columns)

    def write_new_token(head, _):
        target = slot[row, head]

        @pl.when((target >= begin) & (target < end))
        def _write():
            for new, memory, cache in ((key, key_mem, keys), (value, value_mem, values)):
                blocks_of.put(new.at[row, head], memory, cache.at[row, target], once)
            plgpu.wait_smem_to_gmem(0)  # in memory before the block around it is read

    lax.fori_loop(head_from, head_to, write_new_token, None)

    def fetch(index):
        stage, start = lax.rem(index, plan.stages), (first + index) * plan.block
        some = pl.ds(start, plan.block)
        plgpu.copy_gmem_to_smem(positions.at[row, some], p_mem.at[stage], k_here.at[stage])
        if bias is not None and b_mem is not None:
            plgpu.copy_gmem_to_smem(bias.at[row, some], b_mem.at[stage], k_here.at[stage])
        plgpu.copy_gmem_to_smem(keys.at[row, some, all_dims], k_mem.at[stage], k_here.at[stage])
        plgpu.copy_gmem_to_smem(values.at[row, some, all_dims], v_mem.at[stage], v_here.at[stage])

    for index in range(plan.stages):
        pl.when(index < count)(functools.partial(fetch, jnp.int32(index)))

    def attend(head, _):
        low, high = borders[row, head], borders[row, head + 1]
        plgpu.copy_gmem_to_smem(query.at[row, head, :, all_dims], q_mem, once)
        plgpu.barrier_wait(once)

        def step(index, carry):
            top, total, output = carry
            stage, start = lax.rem(index, plan.stages), (first + index) * plan.block
            fresh = low <= start  # else a head before has a part of this block too

            @pl.when(fresh)
            def _arrive():
                plgpu.barrier_wait(k_here.at[stage])
                plgpu.barrier_wait(v_here.at[stage])
                blocks_of.clear_empty(v_mem.at[stage], plgpu.layout_cast(p_mem[stage], blocks_of.KEYS))

            held = plgpu.layout_cast(p_mem[stage], blocks_of.KEYS)
            place = plgpu.layout_cast(lax.iota(jnp.int32, plan.block), blocks_of.KEYS) + start
            own = (place >= low) & (place < high)
            added = None if b_mem is None else plgpu.layout_cast(b_mem[stage], blocks_of.KEYS)
            scores, visible = plan.scores(k_mem.at[stage], q_mem, own & (held >= 0) & (held <= now), added)
            top, weights, shrink = blocks_of.weigh(top, scores, visible, w_mem)
            if logits:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                before = plgpu.layout_cast(logit_mem[...], blocks_of.SQUARE)
                logit_mem[...] = jnp.where(per_key(own, scores.shape), scores, before)
            plgpu.commit_smem()  # and everyone has done with the stage of the block before

            if logits:

                @pl.when((high >= start + plan.block) | (head == head_to - 1))
                def _leave():
                    some = pl.ds(start, plan.block)
                    plgpu.copy_smem_to_gmem(logit_mem, logits[0].at[row, some, all_heads])

            coming = index - 1 + plan.stages
            pl.when(fresh & (index > 0) & (coming < count))(functools.partial(fetch, coming))
            added = blocks_of.product(v_mem.at[stage].transpose((1, 0)), w_mem.transpose((1, 0)))
            return top, blocks_of.add(total, shrink, weights), blocks_of.add(output, shrink, added)

        start = jnp.maximum(lax.div(low, plan.block) - first, 0)
        stop = jnp.minimum(pl.cdiv(high, plan.block) - first, count)
        carry = lax.fori_loop(start, stop, step, plan.start())
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the part of the head before
        blocks_of.send(carry, out_mem, sum_mem, parts.at[row, head + split], sums.at[row, head + split])

    lax.fori_loop(head_from, head_to, attend, None)
    plgpu.wait_smem_to_gmem(0)
