"""decode_attend_score for Hopper GPUs: flash decoding, split over the slots, that keeps every slot's logits.

One program takes one KV head of one row and a run of its slots. The copy engine streams K, V and positions through
several buffers of shared memory. The tensor cores take the slots as the rows of their products (64 at a time) and the
G query heads as the columns (8 or 16), so that nothing is spent on padding query heads to 64 rows:
logits [S, G] = K q and output [D, G] += V^T w. A running maximum keeps the softmax stable. What leaves a program is its
part of the output, its maximum and sum, and the logits (G floats per slot, beside the 2 D of K and V). `gpu_finish`
joins the parts, turns logits into mass and score, and chooses the next slot.

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
from jaxtyping import Array, Int

from pallas_kernels import gpu_blocks as blocks_of
from pallas_kernels.arguments import Held, Judge, Token
from pallas_kernels.codes import Lying, check_widths
from pallas_kernels.decode_attend_score.reference import Attended, placed
from pallas_kernels.gpu_codes import Side, after, factors, lay, named, ordered, spread, write
from pallas_kernels.gpu_codes import fetch as fetch_side
from pallas_kernels.gpu_finish import finish


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

    Raises `NotImplementedError` on GPUs other than Hopper, for keys turned at read time (`rotate`), for codes that
    `gpu_codes.Side` does not know, for keys and values of unlike widths, for the mass of each query head, for dtypes
    other than bfloat16 and float16, for D above 256, for G above 16, and for B Hk C that is no multiple of 8. Where C
    itself is none, positions and logits take a detour; K and V do not.
    """
    if rotate is not None:
        raise NotImplementedError("the GPU kernel reads keys as they lie in the cache: rotate= needs the reference")
    check_widths(held.keys, held.values)
    query, position = token.query, token.position
    if judge.group == "each":
        raise NotImplementedError(
            "the GPU kernel sums the mass of a group: that of each query head needs the reference"
        )
    keys, values, positions, bias = held
    batch, kv_heads, slots, dim = keys.shape
    rows, heads = batch * kv_heads, query.shape[1] // kv_heads
    sides = {"keys": Side.of(keys, dim, slots), "values": Side.of(values, dim, slots)}
    dtype = next((x.dtype for x in (keys, values) if not isinstance(x, Lying)), query.dtype)
    plan = _plan(rows, slots, dim, heads, dtype, scale, window, softcap, with_mass, bias is not None, **sides)

    shift = np.arange(rows).reshape(batch, kv_heads) * slots % 8  # where a head begins within its eight slots
    line = _lines(plan, rows)
    target = slot + shift if slots % 8 else slot
    given = named(plan, token, held, (1, rows * slots) if slots % 8 else (rows, slots), (rows,))
    given |= {"slot": target.reshape(rows), "positions": line(positions, -1)}
    given |= {} if bias is None else {"bias": line(bias, 0.0)}
    parts, sums, *logits = attend(plan, given, interpret)
    keys, values = (after(x, given, name) for name, x in (("keys", keys), ("values", values)))
    factors = {
        name: line(jnp.broadcast_to(x, positions.shape), 0.0)
        for name, x in (("weight", judge.weight), ("bias", judge.bias))
        if isinstance(x, jax.Array)
    }
    output, lse, mass, begun, chosen = finish(
        plan, parts, sums, logits[0] if with_mass else None, line(positions, -1), position, target,
        judge._replace(**factors), heads=heads, dim=dim, dtype=query.dtype, window=window, interpret=interpret,
    )  # fmt: skip
    if slots % 8:
        begun, chosen = placed(positions, position, slot), chosen - shift
        place = (np.arange(slots) + shift.reshape(rows, 1)).astype(np.int32)
        mass = None if mass is None else jnp.take_along_axis(mass, place, axis=1)
    return Attended(
        output=ordered(output, plan.values, back=True),
        lse=lse,
        mass=None if mass is None else mass.reshape(positions.shape),
        keys=keys,
        values=values,
        positions=begun.reshape(positions.shape),
        next_slot=chosen,
    )


def _lines(plan: _Plan, rows: int) -> Callable:
    """`_lines(plan, rows)(x, nothing)`: numbers of slots as one line for each head.

    Where slots are no multiple of 8, heads begin anywhere within their first eight slots, and the line around them is
    `nothing`: K and V are read by eights, and stay where they are.
    """
    slots = plan.slots
    width = plan.blocks * plan.block
    shift = np.arange(rows)[:, None] * slots % 8

    def line(x: jax.Array, nothing: Any) -> jax.Array:
        x = x.reshape(rows, slots)
        if slots % 8 == 0:
            return x
        place = (np.arange(width) - shift).astype(np.int32)
        x = jnp.pad(x, ((0, 0), (0, width - slots)), constant_values=nothing)
        return jnp.where((place >= 0) & (place < slots), jnp.take_along_axis(x, place % width, axis=1), nothing)

    return line


def attend(plan: _Plan, given: dict[str, Any], interpret: bool | plgpu.InterpretGPUParams = False) -> list:
    """The attention kernel: parts of the output, their maxima and sums, and the logits [H, blocks * S, G] if they are
    kept. Logits of slots that are not seen say nothing. Keys and values get the new token.
    """
    rows, _, dim = given["query"].shape
    outputs = {
        "parts": jax.ShapeDtypeStruct((rows, plan.splits, plan.dim, plan.columns), jnp.float32),
        "sums": jax.ShapeDtypeStruct((rows, blocks_of.round_up(plan.splits, 8), 2, plan.columns), jnp.float32),
    }
    if plan.keeps_logits:
        outputs["logits"] = jax.ShapeDtypeStruct((rows, plan.blocks * plan.block, plan.stored), jnp.float32)
    names = (*given, *outputs)

    def body(*refs: Any, **memory: Any) -> None:
        _attend_block(plan, dict(zip(names, refs, strict=True)), memory, **memory)

    return plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=plan.scratch(dim, given["query"].dtype) | plan.scan(),
        grid=(rows, plan.splits),
        grid_names=("row", "split"),
        interpret=interpret or None,
        kernel_name="decode_attend_score",
    )(*given.values())


def _attend_block(
    plan: _Plan, ref, mem, *, q_mem, k_mem, v_mem, w_mem, p_mem, key_mem, value_mem, logit_mem, out_mem, sum_mem, once,
    k_here, v_here, scan_mem, scanned, b_mem=None, **_,
) -> None:  # fmt: skip
    """One program: a run of blocks of slots of one KV head of one row, from the first in which it sees something to the
    last."""
    row, split = lax.axis_index("row"), lax.axis_index("split")
    position, slot, positions, logits = ref["position"], ref["slot"], ref["positions"], ref.get("logits")
    now, target = position[lax.div(row, slot.shape[0] // position.shape[0])], slot[row]
    head, begin, shift = row, 0, 0
    if plan.slots % 8:
        # Slots are read by eights, so all heads' lie in one row, and a block may reach into those of the heads beside:
        # they are not seen, so it does not matter either that their programs may be writing there.
        head, begin = 0, row * plan.slots
        shift = lax.rem(begin, 8)
    sides = (
        ("keys", plan.keys, ref["key"], key_mem, k_mem, k_here),
        ("values", plan.values, ref["value"], value_mem, v_mem, v_here),
    )
    comes = (now >= 0) & (target < shift + plan.slots)  # else nobody's, or another device's
    writes = comes & (lax.div(target, plan.block * plan.each) == split)
    # From a traced 0, so that the slice may reach past the array: the copy engine reads zeros there and writes nothing.
    zero = row * 0
    all_dims, all_heads = pl.ds(zero, plan.dim), pl.ds(zero, plan.columns)

    for name, side, new, memory, _, _ in sides:
        if side is None:

            @pl.when(writes)
            def _write_new_token(name=name, new=new, memory=memory):
                blocks_of.put(new.at[row], memory, ref[name].at[head, begin - shift + target], once)
                plgpu.wait_smem_to_gmem(0)  # in memory before the block around it is read

    def seen(held, start):
        """Positions of slots from `start` on, with the new token's, and which of them it sees."""
        place = plgpu.layout_cast(lax.iota(jnp.int32, held.shape[0]), blocks_of.KEYS) + start
        held = jnp.where((place == target) & comes, now, held)
        there = (held >= 0) & (held <= now) & (place < positions.shape[1])
        return place, held, there if plan.window is None else there & (now - held < plan.window)

    first, count = plan.reach(positions.at[row], split, seen, now, scan_mem, scanned)

    def fetch(index):
        stage, start = lax.rem(index, plan.stages), (first + index) * plan.block
        some = pl.ds(pl.multiple_of(begin - shift + start, 8), plan.block)
        plgpu.copy_gmem_to_smem(positions.at[row, pl.ds(start, plan.block)], p_mem.at[stage], k_here.at[stage])
        if b_mem is not None:
            plgpu.copy_gmem_to_smem(ref["bias"].at[row, pl.ds(start, plan.block)], b_mem.at[stage], k_here.at[stage])
        for name, side, _, _, memory, here in sides:
            fetch_side(side, name, ref, mem, (head, some, all_dims), memory, stage, here)

    def read(side, name, new, exact, memory, stage, index, own, held=None):
        """A block as an operand; codes are brought to where the block before was."""
        if side is None:
            return memory.at[stage]
        spread(side, name, mem, stage, memory.at[0], None if held is None else held >= 0)

        @pl.when(comes & (lax.div(target, plan.block) == first + index))
        def _lay():
            plgpu.copy_gmem_to_smem(new.at[row, all_dims], exact, once)
            plgpu.barrier_wait(once)
            lay(memory.at[0], own, exact)

        return memory.at[0]

    for index in range(plan.stages):
        pl.when(index < count)(functools.partial(fetch, jnp.int32(index)))
    plgpu.copy_gmem_to_smem(ref["query"].at[row, all_heads, all_dims], q_mem, once)
    plgpu.barrier_wait(once)

    def step(index, carry):
        top, total, output = carry
        stage = lax.rem(index, plan.stages)
        plgpu.barrier_wait(k_here.at[stage])
        held = plgpu.layout_cast(p_mem[stage], blocks_of.KEYS)
        place, held, there = seen(held, (first + index) * plan.block)
        own = (place == target) & comes
        gain, low = factors(plan.keys, "keys", mem, stage, own)
        keys = read(plan.keys, "keys", ref["key"], key_mem, k_mem, stage, index, own)
        if plan.keys is not None:
            plgpu.commit_smem()
        added = None if b_mem is None else plgpu.layout_cast(b_mem[stage], blocks_of.KEYS)
        scores, visible = plan.scores(keys, q_mem, there, added, gain, low)
        if plan.values is not None:
            plgpu.barrier_wait(v_here.at[stage])
        gain, low = factors(plan.values, "values", mem, stage, own, held >= 0)
        top, weights, shrink = blocks_of.weigh(top, scores, visible, w_mem, gain)
        if logits is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            logit_mem[...] = scores

        if plan.values is None:
            plgpu.barrier_wait(v_here.at[stage])
            blocks_of.clear_empty(v_mem.at[stage], held)
        # Of codes everyone has done with the operand: the maximum over the keys waited for all.
        values = read(plan.values, "values", ref["value"], value_mem, v_mem, stage, index, own, held)
        plgpu.commit_smem()  # and everyone has done with the stage of the step before
        if logits is not None:
            some = pl.ds((first + index) * plan.block, plan.block)
            plgpu.copy_smem_to_gmem(logit_mem, logits.at[row, some, all_heads])
        coming = index - 1 + plan.stages
        pl.when((index > 0) & (coming < count))(functools.partial(fetch, coming))
        output = blocks_of.add(output, shrink, blocks_of.product(values.transpose((1, 0)), w_mem.transpose((1, 0))))
        if low is not None:
            lifted = jnp.sum(weights * blocks_of.per_key(low, weights.shape), axis=0)
            output = output + blocks_of.per_query(lifted, output.shape)
        return top, blocks_of.add(total, shrink, weights), output

    carry = lax.fori_loop(0, count, step, plan.start())
    blocks_of.send(carry, out_mem, sum_mem, ref["parts"].at[row, split], ref["sums"].at[row, split])
    plgpu.wait_smem_to_gmem(0)
    for name, side, *_ in sides:
        if side is not None:  # when the program has read all: it knows the token's own as it is
            pl.when(writes)(functools.partial(write, side, name, ref, mem, (row,), (row, target), once))


def _plan(rows, slots, dim, heads, dtype, scale, window, softcap, keeps_logits, biased=False, **sides) -> _Plan:
    """The kernel's numbers; raises `NotImplementedError` for what it does not take."""
    if rows * slots % 8:
        raise NotImplementedError(f"{rows} x {slots} slots: a multiple of 8 in all, as they are read by eights")
    return _Plan.of(
        rows, slots, 7 if slots % 8 else 0, dim, heads, dtype, scale=scale, softcap=softcap, biased=biased,
        window=window, keeps_logits=keeps_logits, **sides,
    )  # fmt: skip
