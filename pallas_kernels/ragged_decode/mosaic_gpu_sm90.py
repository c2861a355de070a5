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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels import gpu_blocks as blocks_of
from pallas_kernels.arguments import Judge, Segments, Token
from pallas_kernels.codes import Codes, check_slots
from pallas_kernels.decode_attend_score.reference import Attended
from pallas_kernels.gpu_blocks import per_key
from pallas_kernels.gpu_codes import Side, after, factors, lay, named, ordered, spread, write
from pallas_kernels.gpu_codes import fetch as fetch_side
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

    Raises `NotImplementedError` on GPUs other than Hopper, for what `check_slots` refuses, for dtypes other than
    bfloat16 and float16, for D above 256, for G above 16, for P that is no multiple of 8, and for a mass of each query
    head.
    """
    if judge.group == "each":
        raise NotImplementedError("group='each', which parts of a pool on a mesh have: 'sum', 'mean' or 'max'")
    check_slots(held.keys, held.values)
    query, position = token.query, token.position
    keys, values, positions, offsets, _, bias = held
    batch, slots, dim = keys.shape
    kv_heads, heads = slot.shape[1], query.shape[1] // slot.shape[1]
    if slots % 8:
        raise NotImplementedError(f"{slots} slots: a multiple of 8, as they are read by eights")
    dtype = next((x.dtype for x in (keys, values) if not isinstance(x, Codes)), query.dtype)
    plan = blocks_of.Decode.of(
        batch, slots, 0, dim, heads, dtype, scale=scale, softcap=softcap, biased=bias is not None,
        keys=Side.of(keys, dim, slots), values=Side.of(values, dim, slots),
    )  # fmt: skip
    count = plan.splits + kv_heads - 1
    given = named(plan, token, held, (batch, slots), (batch, kv_heads))
    given |= {"slot": slot, "offsets": offsets, "positions": jax.new_ref(positions)}
    given |= {} if bias is None else {"bias": bias}
    outputs = {
        "parts": jax.ShapeDtypeStruct((batch, count, plan.dim, plan.columns), jnp.float32),
        "sums": jax.ShapeDtypeStruct((batch, blocks_of.round_up(count, 8), 2, plan.columns), jnp.float32),
    }
    if with_mass:
        outputs["logits"] = jax.ShapeDtypeStruct((batch, plan.blocks * plan.block, plan.stored), jnp.float32)
    names = (*given, *outputs)

    def body(*refs: Any, **memory: Any) -> None:
        _attend_run(plan, dict(zip(names, refs, strict=True)), memory, **memory)

    parts, sums, *logits = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=plan.scratch(dim, given["query"].dtype),
        grid=(batch, plan.splits),
        grid_names=("row", "split"),
        interpret=interpret or None,
        kernel_name="ragged_decode",
    )(*given.values())
    positions = jax.freeze(given["positions"])
    lines = {
        name: jnp.broadcast_to(x, positions.shape)
        for name, x in (("weight", judge.weight), ("bias", judge.bias))
        if isinstance(x, jax.Array)
    }
    output, lse, mass, _, chosen = finish(
        plan, parts, sums, logits[0] if with_mass else None, positions, position, slot,
        judge._replace(**lines), offsets, heads=heads, dim=dim, dtype=query.dtype, interpret=interpret,
    )  # fmt: skip
    return Attended(
        output=ordered(output, plan.values, back=True),
        lse=lse,
        mass=mass,
        keys=after(keys, given, "keys"),
        values=after(values, given, "values"),
        positions=positions,
        next_slot=chosen,
    )


def _attend_run(
    plan: blocks_of.Decode, ref, mem, *, q_mem, k_mem, v_mem, w_mem, p_mem, key_mem, value_mem, logit_mem, out_mem,
    sum_mem, once, k_here, v_here, b_mem=None, **_,
) -> None:  # fmt: skip
    """One program: a run of a row's blocks from `first` on, under all heads whose segments meet it."""
    row, split = lax.axis_index("row"), lax.axis_index("split")
    position, slot, offsets, positions = (ref[name] for name in ("position", "slot", "offsets", "positions"))
    logits, kv_heads = ref.get("logits"), slot.shape[1]
    sides = (
        ("keys", plan.keys, ref["key"], key_mem, k_mem, k_here),
        ("values", plan.values, ref["value"], value_mem, v_mem, v_here),
    )
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

    def written(what):
        """Do it for the heads whose new tokens lie in this run."""

        def one(head, _):
            target = slot[row, head]
            pl.when((target >= begin) & (target < end))(lambda: what(head, target))

        lax.fori_loop(head_from, head_to, one, None)

    def write_new(head, target):
        for name, side, new, memory, _, _ in sides:
            if side is None:
                blocks_of.put(new.at[row, head], memory, ref[name].at[row, target], once)
        plgpu.wait_smem_to_gmem(0)  # in memory before the block around it is read

    if plan.keys is None or plan.values is None:
        written(write_new)

    def fetch(index):
        stage, start = lax.rem(index, plan.stages), (first + index) * plan.block
        some = pl.ds(start, plan.block)
        plgpu.copy_gmem_to_smem(positions.at[row, some], p_mem.at[stage], k_here.at[stage])
        if b_mem is not None:
            plgpu.copy_gmem_to_smem(ref["bias"].at[row, some], b_mem.at[stage], k_here.at[stage])
        for name, side, _, _, memory, here in sides:
            fetch_side(side, name, ref, mem, (row, some, all_dims), memory, stage, here)

    for index in range(plan.stages):
        pl.when(index < count)(functools.partial(fetch, jnp.int32(index)))

    def place_new(held, place):
        """Positions, with those of the new tokens."""
        for head in range(kv_heads):
            held = jnp.where(place == slot[row, head], now, held)
        return held

    def lay_new(new, exact, memory, place, start):
        """The new tokens of a block of codes as they are."""

        def one(head, target):
            @pl.when(lax.div(target, plan.block) * plan.block == start)
            def _lay():
                plgpu.copy_gmem_to_smem(new.at[row, head, all_dims], exact, once)
                plgpu.barrier_wait(once)
                lay(memory, place == target, exact)
                plgpu.commit_smem()  # everyone has read the token

        written(one)

    def attend(head, _):
        low, high = border(head), border(head + 1)
        plgpu.copy_gmem_to_smem(ref["query"].at[row, head, all_heads, all_dims], q_mem, once)
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
                if plan.values is None:
                    blocks_of.clear_empty(v_mem.at[stage], held)
                for name, side, new, exact, memory, _ in sides:
                    if side is not None:
                        full = held >= 0 if name == "values" else None
                        spread(side, name, mem, stage, memory.at[0], full)
                        lay_new(new, exact, memory.at[0], place, start)
                plgpu.commit_smem()

            held = plgpu.layout_cast(p_mem[stage], blocks_of.KEYS)
            mine, own = (place >= low) & (place < high), place == slot[row, head]
            added = None if b_mem is None else plgpu.layout_cast(b_mem[stage], blocks_of.KEYS)
            gain, lift = factors(plan.keys, "keys", mem, stage, own)
            keys = k_mem.at[stage if plan.keys is None else 0]
            scores, visible = plan.scores(keys, q_mem, mine & (held >= 0) & (held <= now), added, gain, lift)
            gain, lift = factors(plan.values, "values", mem, stage, own, mine & (held >= 0))
            top, weights, shrink = blocks_of.weigh(top, scores, visible, w_mem, gain)
            if logits is not None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                before = plgpu.layout_cast(logit_mem[...], blocks_of.SQUARE)
                logit_mem[...] = jnp.where(per_key(mine, scores.shape), scores, before)
            plgpu.commit_smem()  # and everyone has done with the stage of the block before

            if logits is not None:

                @pl.when((high >= start + plan.block) | (head == head_to - 1))
                def _leave():
                    some = pl.ds(start, plan.block)
                    plgpu.copy_smem_to_gmem(logit_mem, logits.at[row, some, all_heads])

            coming = index - 1 + plan.stages
            pl.when(fresh & (index > 0) & (coming < count))(functools.partial(fetch, coming))
            values = v_mem.at[stage if plan.values is None else 0].transpose((1, 0))
            output = blocks_of.add(output, shrink, blocks_of.product(values, w_mem.transpose((1, 0))))
            if lift is not None:
                lifted = jnp.sum(weights * per_key(lift, weights.shape), axis=0)
                output = output + blocks_of.per_query(lifted, output.shape)
            return top, blocks_of.add(total, shrink, weights), output

        start = jnp.maximum(lax.div(low, plan.block) - first, 0)
        stop = jnp.minimum(pl.cdiv(high, plan.block) - first, count)
        carry = lax.fori_loop(start, stop, step, plan.start())
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the part of the head before
        blocks_of.send(carry, out_mem, sum_mem, ref["parts"].at[row, head + split], ref["sums"].at[row, head + split])

    lax.fori_loop(head_from, head_to, attend, None)
    plgpu.wait_smem_to_gmem(0)

    def place(head, target):
        positions[row, target] = now
        for name, side, *_ in sides:
            if side is not None:
                write(side, name, ref, mem, (row, head), (row, target), once)

    written(place)  # other programs read nothing of this run, and this one has read it
