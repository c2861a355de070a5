"""ragged_decode for Hopper GPUs: the pool divided evenly over programs, wherever in it one head's segment ends.

A row's slots are cut into runs of equally many blocks, one program each, so that heads may share a pool in any way: no
program waits for a head that owns nearly all of it, and none is started in vain for one that owns little. A program
walks over its run once, head by head of those whose segments meet it, and sends off what it found for each. A block
with a border in it stays in shared memory until the last of its heads has seen its own slots there: every block of K
and V that somebody owns is read once, P slots at most, whatever the split; behind the last border nothing is, nor in
rows that have finished. Borders only cost work on the chip, up to Hk - 1 blocks more per row.

Along a row's line either the head or the run goes up, so the sum of the two names a part: Hk - 1 more than there are
runs. `gpu_finish` joins a head's parts, turns logits into mass, and chooses. Products, softmax, and how K and V pass
through shared memory are decode_attend_score's.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels import gpu_blocks as blocks_of
from pallas_kernels.arguments import Judge, Segments, Token
from pallas_kernels.codes import refuse_codes
from pallas_kernels.decode_attend_score.reference import Attended
from pallas_kernels.gpu_blocks import per_key
from pallas_kernels.gpu_finish import finish


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

    queries = query.reshape(batch, kv_heads, heads, dim)
    cache = [jax.new_ref(x) for x in (positions, keys, values)]
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
        queries.astype(keys.dtype),
        key.astype(keys.dtype),
        value.astype(values.dtype),
        position,
        slot,
        offsets,
        *cache,
        *(() if bias is None else (bias,)),
    )
    positions, keys, values = (jax.freeze(x) for x in cache)
    factors = {
        name: jnp.broadcast_to(x, positions.shape)
        for name, x in (("weight", judge.weight), ("bias", judge.bias))
        if isinstance(x, jax.Array)
    }
    output, lse, mass, _, chosen = finish(
        plan, parts, sums, logits[0] if with_mass else None, positions, position, slot,
        judge._replace(**factors), offsets, heads=heads, dim=dim, dtype=query.dtype, interpret=interpret,
    )  # fmt: skip
    return Attended(
        output=output,
        lse=lse,
        mass=mass,
        keys=keys,
        values=values,
        positions=positions,
        next_slot=chosen,
    )


def _attend_run(
    plan: blocks_of.Decode, query, key, value, position, slot, offsets, positions, keys, values, *refs,
    q_mem, k_mem, v_mem, w_mem, p_mem, key_mem, value_mem, logit_mem, out_mem, sum_mem, once, k_here, v_here,
    b_mem=None,
) -> None:  # fmt: skip
    """One program: a run of a row's blocks from `first` on, under all heads whose segments meet it."""
    bias, (parts, sums, *logits) = (refs[0], refs[1:]) if plan.biased else (None, refs)
    row, split = lax.axis_index("row"), lax.axis_index("split")
    kv_heads = key.shape[1]
    now, first = position[row], split * plan.each
    begin, end = first * plan.block, (first + plan.each) * plan.block

    def border(head):
        """Where a head begins; from slot 0 on, so that every block before the last border is some head's; none is where
        the row has finished."""
        return jnp.where((now < 0) | (head == 0), 0, offsets[row, head])

    count = jnp.maximum(jnp.minimum(plan.each, pl.cdiv(border(kv_heads), plan.block) - first), 0)
    head_from = sum((border(head + 1) <= begin).astype(jnp.int32) for head in range(kv_heads))
    head_to = sum((border(head) < end).astype(jnp.int32) for head in range(kv_heads))
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

    def place_new(held, place):
        """Positions, with those of the new tokens."""
        for head in range(kv_heads):
            held = jnp.where(place == slot[row, head], now, held)
        return held

    def attend(head, _):
        low, high = border(head), border(head + 1)
        plgpu.copy_gmem_to_smem(query.at[row, head, all_heads, all_dims], q_mem, once)
        plgpu.barrier_wait(once)

        def step(index, carry):
            top, total, output = carry
            stage, start = lax.rem(index, plan.stages), (first + index) * plan.block
            fresh = low <= start  # else a head before has a part of this block too

            place = plgpu.layout_cast(lax.iota(jnp.int32, plan.block), blocks_of.KEYS) + start

            @pl.when(fresh)
            def _arrive():
                plgpu.barrier_wait(k_here.at[stage])
                plgpu.barrier_wait(v_here.at[stage])
                held = place_new(plgpu.layout_cast(p_mem[stage], blocks_of.KEYS), place)
                held = jnp.where((place >= offsets[row, 0]) & (place < offsets[row, kv_heads]), held, -1)
                p_mem.at[stage][...] = held
                plgpu.commit_smem()
                blocks_of.clear_empty(v_mem.at[stage], held)

            held = plgpu.layout_cast(p_mem[stage], blocks_of.KEYS)
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

    def place(head, _):
        target = slot[row, head]

        @pl.when((target >= begin) & (target < end))
        def _place():
            positions[row, target] = now

    lax.fori_loop(head_from, head_to, place, None)  # other programs read no positions of this run
