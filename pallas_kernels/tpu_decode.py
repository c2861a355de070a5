"""A decode step on TPU: one walk over K and V per row, for KV heads with as many slots each and for segments of a pool.

The blocks of slots are innermost in the grid (`tpu_walk`), so the compiler streams each block of K and V through
on-chip memory exactly once; blocks in which the row holds nothing are not fetched, nor any of a row that has finished.
Logits and positions alone stay on the chip, and what is known when a row's last block has been seen (mass, scores,
victim) is computed under the blocks of the row after it, so that memory does not wait: step (row, block) attends to
that block and looks back at the same block of the row before. Behind the last row memory has nothing to do: all of it
is looked back at in one step. Masses and weights come and go a row at a time for that, where the chip has room for
them. Under a sliding window, and where the chip has no room for them, positions are fetched again.

The new key and value go into their slot inside the block that holds it, and from there the one tile around it goes back
to the cache, which is aliased from input to output and otherwise untouched. Heads of a pool whose new tokens meet in
one tile send it once.

XLA lays an array out in memory the way that pads least: [S, D] with D along the lanes where D is a multiple of 128, and
mostly with S along the lanes (`columns`) where it is not, such as 64. The kernel reads either as it lies. Where S is no
multiple of 8 XLA may have the heads or the rows innermost, and copies the cache for the kernel.

Of codes (`tpu_codes`) a block of numbers is made on the chip; a scale of keys multiplies the logits, one of values the
weights. The token itself, which counts as exact as it comes, is what the softmax begins with, and its slot counts as
empty. Where channels of several slots share a scale (`tpu_channels`) codes are only read.

A pool is one set of slots, in which each query head sees its own segment. Heads go through a block a few at a time, as
many as fill the sublanes of a register, and those whose segments do not meet the block are left out. What slots have
comes with 128 of them in a row, which fills registers where `[1, S]` would use one row of eight, and which XLA need not
lay out anew. H are the sets of slots: Hk, or 1 for a pool; M the query heads of a set.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int16

from pallas_kernels import tpu_blocks as blocks_of
from pallas_kernels import tpu_channels, tpu_choice, tpu_plan, tpu_runs
from pallas_kernels.arguments import Judge, Token
from pallas_kernels.codes import ByChannel, Codes, Lying
from pallas_kernels.masking import MASKED, biased, soft_cap
from pallas_kernels.read_runs.reference import Run
from pallas_kernels.tpu_codes import Form, Scales, for_groups
from pallas_kernels.tpu_plan import Plan

BLOCK_BYTES = 2**20  # of K, and of V, at a time: long enough to hide the start of a copy
MOST_STEPS = 2**17  # of the grid: which block is there in each lies in scalar memory, 4 bytes each
EMPTY, NOBODY = -(2**31), -1  # in place of a slot's head: it is empty, or nobody sees it
ALL = slice(None)


class Step(NamedTuple):
    """What the kernel gives: mass is None where nobody asked for it."""

    output: Float[Array, "B H M D"]
    lse: Float[Array, "B H M"]
    mass: Float[Array, "B H *M S"] | None
    keys: Float[Array, "B H S D"] | Lying
    values: Float[Array, "B H S D"] | Lying
    next_slot: Int[Array, "B Hk"]


def step(
    token: Token,
    keys: Float[Array, "B H S D"] | Lying,
    values: Float[Array, "B H S D"] | Lying,
    positions: Int[Array, "B H S"],
    slot: Int[Array, "B Hk"],
    judge: Judge,
    offsets: Int[Array, "B Hk_1"] | None = None,
    logit_bias: Float[Array, "B H S"] | None = None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    with_mass: bool,
    interpret: bool | pltpu.InterpretParams,
) -> Step:
    """Write key and value into their slots, attend, and choose the next ones; `positions` hold the new token already.

    Keys or values `ByChannel` stay as they are. With `offsets` H is 1, and head h's slots are those between its
    borders. `logit_bias` is added to the logits of each slot, after a soft cap. `judge.weight` and `.bias` are numbers
    or `[B, H, S]`. Raises `NotImplementedError` for 4 slots or fewer, for keys of numbers that are no multiple of 8,
    for floats other than bfloat16 and float32, and for what does not fit on the chip.
    """
    query, key, value, position, *_ = token
    batch, sets, slots, dim = keys.shape
    heads, kv_heads = query.shape[1], key.shape[1]
    if slots <= blocks_of.SUBLANES // 2:
        raise NotImplementedError(f"{slots} slots lie in memory in smaller pieces than the kernel writes")
    if dim % blocks_of.SUBLANES:
        raise NotImplementedError(f"keys of {dim} numbers: a multiple of {blocks_of.SUBLANES}")
    blocks_of.check_floats(query, *(x for x in (keys, values) if not isinstance(x, Lying)))
    lies = tuple(x.codes if isinstance(x, Lying) else x for x in (keys, values))
    columns = tuple(blocks_of.slots_along_lanes(slots, x.shape[-1]) for x in lies)
    for x, along, own in zip(lies, columns, token.entry, strict=True):
        if isinstance(own, Codes) and along and x.shape[-1] % 4:
            raise NotImplementedError(
                f"codes of {x.shape[-1]} bytes a slot: a multiple of 4, as they are written by words"
            )
    as_bytes = blocks_of.multiplies_bytes()
    forms = tuple(
        Form.of(x, along, str(query.dtype), as_bytes) for x, along in zip((keys, values), columns, strict=True)
    )
    row_bytes = sets * max(
        blocks_of.round_up(x.shape[-1], blocks_of.SUBLANES if along else blocks_of.LANES) * x.dtype.itemsize
        for x, along in zip(lies, columns, strict=True)
    )
    wide = sets * sum(form.width * jnp.dtype(form.dtype).itemsize for form in forms)  # bytes of a slot's numbers
    wide = wide if any(form.coded for form in forms) else 0
    least = dim * query.dtype.itemsize if offsets is not None else 0  # larger blocks of a pool's codes meet more heads
    most = BLOCK_BYTES // max(row_bytes, wide // 8, least)
    shared = [form for form in forms if form.tokens]
    if offsets is None:
        blocks, block = tpu_channels.even_blocks(shared, slots, most)
    else:
        blocks, block = blocks_of.even_blocks(slots, most, blocks_of.SUBLANES * blocks_of.LANES)
    both = (0.0, 0.0) if judge.rule is None else (judge.weight, judge.bias)
    factors = [factor for factor in both if not isinstance(factor, float)]
    weight, bias = (factor if isinstance(factor, float) else None for factor in both)
    plan = Plan(
        slots, block, blocks, batch, min(blocks_of.cores(), batch), sets, heads // sets, kv_heads,
        offsets is not None, scale, window, softcap, judge.group, judge.rule, weight, bias, logit_bias is not None,
        with_mass, *forms, together=tpu_plan.together(offsets is not None, sets, heads // sets),
    )  # fmt: skip
    more = [] if logit_bias is None else [logit_bias]
    vmem = tpu_plan.vmem_bytes(plan, row_bytes, len(factors) + len(more)) + 2 * block * wide
    vmem += sum(tpu_channels.vmem_bytes(form, sets, block) for form in shared)
    vmem += sum(8 * block * plan.held_rows(form.groups) for form in forms if form.scaled)  # scales, and lows
    places = 4 * plan.buffers * plan.width * plan.held_rows(1)
    if window is None and vmem + places <= blocks_of.VMEM_BYTES:  # else a block that nobody sees may have entries
        plan, vmem = dataclasses.replace(plan, keeps_places=True), vmem + places
    at_once = dataclasses.replace(plan, at_once=True)
    more_bytes = tpu_plan.line_bytes(at_once, len(factors)) - tpu_plan.line_bytes(plan, len(factors))
    if vmem + more_bytes <= blocks_of.VMEM_BYTES:
        plan = at_once
    if vmem > blocks_of.VMEM_BYTES:
        raise NotImplementedError(f"{slots} slots of {heads} query heads need {vmem} bytes of on-chip memory")
    if plan.parts * (plan.rows + 1) * blocks_of.round_up(blocks, blocks_of.LANES) > MOST_STEPS:
        raise NotImplementedError(f"{batch} rows of {blocks} blocks: their numbers need more than scalar memory has")

    def attended(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda p, t, *_: (plan.here(p, plan.place(t)[0])[0],) + (0,) * len(shape))

    def there(p, t, table):
        """The row and the block that are on the chip in a step."""
        r, j = plan.place(t)
        entry = table[plan.at(p, r), j]
        return plan.row_of(entry), plan.block_of(entry)

    def looked(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda p, t, *_: (plan.before(p, plan.place(t)[0])[0],) + (0,) * len(shape))

    def block_before(p, t, *_):
        r, j = plan.place(t)
        row, own = plan.before(p, r)
        j = jnp.where(own, j, jnp.where(r > 0, blocks - 1, 0))  # where there is none, the one that is there
        return (row, j, 0) if plan.pooled else (row, 0, j)

    def cache_block(along, p, t, *scalars):
        row, at = there(p, t, scalars[-1])
        return (row, 0, 0, at) if along else (row, 0, at, 0)

    def place_block(p, t, *scalars):
        row, at = there(p, t, scalars[-1])
        return (row, at, 0) if plan.pooled else (row, 0, at)

    def scale_block(*grid):
        row, *at = place_block(*grid)
        return row, 0, *at

    def by_slot(x: Any, behind: int = 0) -> Array:
        return blocks_of.in_registers(x[:, 0], behind) if plan.pooled else x

    some = (plan.packs, plan.each)
    queries = forms[0].spread(query.reshape(batch, *some, dim))  # [B, H, G M, W]
    first: list[jax.Array] = []  # what the softmax begins with, and what a low of keys multiplies
    if plan.coded:
        wide_query = query.reshape(batch, kv_heads, -1, dim).astype(jnp.float32)
        alone = jnp.sum(wide_query * key.astype(jnp.float32)[:, :, None], axis=-1) * scale
        alone = soft_cap(alone, softcap)
        if logit_bias is not None:
            alone = alone + logit_bias[_in_slots(slot, sets)][..., None]
        here = (slot < slots)[..., None]  # else it is another device's
        given = jnp.where(here, value.astype(jnp.float32), 0.0).reshape(batch, plan.packs, -1, dim)
        given = forms[1].spread(given, apart=False, whole=True)
        alone = jnp.where(here, alone, MASKED).reshape(batch, *some, 1)
        first = [alone, _by_query_head(given, forms[1].groups, plan.each)]
        if forms[0].asks:
            asked = forms[0].spread(wide_query.reshape(batch, *some, dim), whole=True)
            first.append(jnp.sum(asked, axis=-1, keepdims=True))
    written = [not form.tokens for form in forms]  # those in whose slots the token's are put
    new = [_entry(x, along) for x, along, own in zip(token.entry, columns, written, strict=True) if own]
    lies = tuple(jnp.swapaxes(x, -1, -2) if along else x for x, along in zip(lies, columns, strict=True))
    untouched = pl.BlockSpec(memory_space=pltpu.HBM)
    table = plan.table(positions, position, window)
    if interpret:
        lies = tuple(plan.whole(x, along) for x, along in zip(lies, columns, strict=True))
    else:
        lies = tuple(x if own else blocks_of.in_memory(x) for x, own in zip(lies, written, strict=True))
    coded = [
        _scales(x, code, position, slot, interpret) for x, code in ((keys, token.key_code), (values, token.value_code))
    ]
    scales = []
    for x, form, found in zip((keys, values), forms, coded, strict=True):
        if isinstance(x, ByChannel):
            at = lambda p, t, *scalars: there(p, t, scalars[-1])  # noqa: E731
            ranges, order = tpu_channels.operands(x, form)
            ranges = ranges if interpret else [blocks_of.in_memory(y) for y in ranges]
            scales += zip((*ranges, order), tpu_channels.specs(form, sets, block, at), strict=True)
        else:
            spec = pl.BlockSpec((1, *plan.beside(form.groups)), scale_block if form.groups > 1 else place_block)
            scales += [(by_slot(y), spec) for y in found.values()]
    now = pl.BlockSpec((1, *plan.of_slots), place_block)
    line = looked(*plan.of_row) if plan.at_once else pl.BlockSpec((1, *plan.of_slots), block_before)
    lanes = (kv_heads, blocks_of.SUBLANES, blocks_of.LANES) if plan.pooled else (kv_heads, blocks_of.LANES)
    tiles = [
        (width, blocks_of.tile(lie.dtype, along)) if along else (blocks_of.tile(lie.dtype, along), width)
        for lie, along, width in (
            (x, along, x.shape[-2 if along else -1]) for x, along in zip(lies, columns, strict=True)
        )
    ]
    shape = (pl.cdiv(slots, blocks_of.LANES), blocks_of.LANES) if plan.pooled else (sets, slots)
    masses = [(jax.ShapeDtypeStruct((batch, *shape), jnp.float32), line)] if with_mass else []
    if with_mass and judge.group == "each" and plan.pooled:
        members = heads // kv_heads
        by_block = pl.BlockSpec(
            (1, members, *plan.of_slots), lambda *at: (block_before(*at)[0], 0, *block_before(*at)[1:])
        )
        each = looked(members, *plan.of_row) if plan.at_once else by_block
        masses = [(jax.ShapeDtypeStruct((batch, members, *shape), jnp.float32), each)]
    elif with_mass and judge.group == "each":
        by_block = pl.BlockSpec((1, *some, block), lambda *at: (*block_before(*at)[:2], 0, block_before(*at)[2]))
        each = looked(*some, plan.width) if plan.at_once else by_block
        masses = [(jax.ShapeDtypeStruct((batch, *some, slots), jnp.float32), each)]
    into = [n for n in range(2) if written[n]]
    found = (plan.packs, forms[1].groups * plan.each, forms[1].width)
    exact = query.dtype if forms[1].halves == 1 else jnp.float32  # or its two halves would be rounded apart
    outs = [
        (jax.ShapeDtypeStruct((batch, *found), exact), attended(*found)),
        (jax.ShapeDtypeStruct((batch, *some, 1), jnp.float32), attended(*some, 1)),
        (jax.ShapeDtypeStruct((batch, kv_heads, 1), jnp.int32), looked(kv_heads, 1)),
        *masses,
        *((pltpu.HBM(lies[n].shape, lies[n].dtype), untouched) for n in into),  # else XLA takes a small one on the chip
    ]
    scratch: dict[str, Any] = {
        "top": pltpu.VMEM((*some, 1), jnp.float32),
        "total": pltpu.VMEM((*some, 1), jnp.float32),
        "context": pltpu.VMEM(found, jnp.float32),
        "held": pltpu.VMEM((plan.buffers, sets, blocks_of.LANES), jnp.int32),
        "worth": pltpu.VMEM(lanes, jnp.float32),
        "age": pltpu.VMEM(lanes, jnp.int32),
        "index": pltpu.VMEM(lanes, jnp.int32),
    }
    if plan.keeps_places:
        scratch["places"] = pltpu.VMEM((plan.buffers, *plan.of_row), jnp.int32)
    if plan.together > 1 or plan.pooled:
        scratch["seen"] = pltpu.VMEM(plan.of_slots, jnp.int32)
    for name, form, lie, tile in zip(("key", "value"), forms, lies, tiles, strict=True):
        if not form.tokens:
            scratch[f"{name}_tiles"] = pltpu.VMEM((kv_heads, *tile), lie.dtype)
            shape = plan.beside(form.groups)
            scratch |= {f"{name}_{what}": pltpu.VMEM(shape, jnp.float32) for what in _beside(form)}
        else:
            each = (sets, tpu_channels.fetched(form, block), dim)
            scratch |= {f"{name}_{what}": pltpu.VMEM(each, jnp.float32) for what in ("scales", "lows")}
    scratch["copied"] = pltpu.SemaphoreType.DMA
    for name, form in zip(("key_numbers", "value_numbers"), forms, strict=True):
        if plan.pooled and form.coded and not form.as_bytes:  # made once for all heads that meet the block
            shape = (form.width, block) if form.columns else (block, form.width)
            scratch[name] = pltpu.VMEM((sets, *shape), form.dtype)
    if forms[1].shifts:
        scratch["shift"] = pltpu.VMEM((*found[:2], 1), jnp.float32)
    if with_mass:
        scratch |= {
            "logits": pltpu.VMEM((plan.buffers, *some, plan.width), jnp.float32),
            "normal": pltpu.VMEM((plan.buffers, *some, 1), jnp.float32),
        }
    slot_here = jnp.where(slot < slots, slot, plan.width)  # of no block, where it is another device's
    scalars = (position, slot_here, judge.limits, judge.recents, *(() if offsets is None else (offsets,)), table)
    caches = [
        pl.BlockSpec(
            (1, sets, *((x.shape[-2], block) if along else (block, x.shape[-1]))), functools.partial(cache_block, along)
        )
        for x, along in zip(lies, columns, strict=True)
    ]
    inputs = (
        (queries, attended(*queries.shape[1:])),
        *((x, attended(*x.shape[1:])) for x in new),
        *zip(lies, caches, strict=True),
        *((by_slot(positions, -1), at) for at in ((now,) if plan.keeps_places else (now, line))),
        *((x, attended(*x.shape[1:])) for x in first),
        *scales,
        *((by_slot(factor), line) for factor in factors),
        *((by_slot(added), now) for added in more),
    )
    call = pl.pallas_call(
        functools.partial(_kernel, plan, len(outs), tuple(scratch), bool(interpret)),
        out_shape=[shape for shape, _ in outs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=plan.steps,
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outs],
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases={
            len(scalars) + 1 + len(new) + n: len(outs) - len(into) + at for at, n in enumerate(into)
        },  # the cache
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=blocks_of.VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * slots * dim,
            transcendentals=(1 + with_mass) * batch * heads * slots,
            bytes_accessed=sum(x.nbytes for x in lies) + 2 * sum(x.size for x, _ in scales)
            + 4 * (2 - plan.keeps_places + len(factors) + len(more)) * positions.size
            + sum(4 * shape.size for shape, _ in masses)
            + queries.nbytes + sum(x.nbytes for x in (*new, *first))
            + math.prod(outs[0][0].shape) * outs[0][0].dtype.itemsize
            + 4 * batch * (heads + kv_heads)
            + sum(batch * kv_heads * math.prod(tiles[n]) * lies[n].dtype.itemsize for n in into),
        ),
        name="ragged_decode" if plan.pooled else "decode_attend_score",
        interpret=interpret,
    )  # fmt: skip
    output, lse, aim, *rest = call(*scalars, *(x for x, _ in inputs))
    mass, after = rest[: len(masses)], [keys, values]
    for n, x in zip(into, rest[len(masses) :], strict=True):
        x, before = (jnp.swapaxes(x, -1, -2) if columns[n] else x)[:, :, :slots], after[n]
        beside = {name: _by_slot(scale) for name, scale in coded[n].items()}
        after[n] = dataclasses.replace(before, codes=x, **beside) if isinstance(before, Codes) else x
    output = forms[1].gathered(output).astype(query.dtype).reshape(batch, sets, -1, dim)
    keys, values = after
    chosen = jnp.where(position[:, None] < 0, slot, jnp.minimum(aim[..., 0], slots - 1))
    lse = lse.reshape(batch, sets, -1)
    if plan.pooled:
        mass = [x.reshape(batch, -1, math.prod(x.shape[-2:]))[..., :slots] for x in mass]
    mass = [x if x.ndim == 3 else x.reshape(batch, sets, -1, slots) for x in mass]
    return Step(output, lse, mass[0] if mass else None, keys, values, chosen)


def _kernel(
    plan: Plan, outs: int, names: tuple[str, ...], interpret: bool, position_ref, slot_ref, limits_ref, recents_ref,
    *refs,
) -> None:  # fmt: skip
    offsets: Any = refs[0] if plan.pooled else None
    table_ref, *refs = refs[1:] if plan.pooled else refs
    scratch, refs = dict(zip(names, refs[-len(names) :], strict=True)), refs[: -len(names)]
    written = [n for n, form in enumerate((plan.keys, plan.values)) if not form.tokens]
    query, *refs = refs
    new, (keys, values, places, *refs) = refs[: len(written)], refs[len(written) :]
    outputs, inputs = refs[-outs:], list(refs[:-outs])
    fetched_again = None if plan.keeps_places else inputs.pop(0)
    first: list[Any] = [inputs.pop(0) for _ in range(2)] if plan.coded else [None] * 2
    alone, given = first
    asked = inputs.pop(0) if plan.keys.asks else None

    def side(name: str, form: Form) -> Scales | tpu_channels.ByBlock:
        if not form.tokens:
            made = tuple(scratch[f"{name}_{what}"] for what in _beside(form))
            return Scales(form, inputs, scratch=made, together=plan.together, pooled=plan.pooled, interpret=interpret)
        both = scratch[f"{name}_scales"], scratch[f"{name}_lows"]
        return tpu_channels.ByBlock(form, inputs, both, -(-plan.slots // form.tokens), plan.together, interpret)

    of_keys, of_values = side("key", plan.keys), side("value", plan.values)
    weight = inputs.pop(0) if plan.weight is None else None
    bias = inputs.pop(0) if plan.bias is None else None
    added = inputs.pop(0) if plan.biased else None
    output, lse, aim, *mass = outputs[: len(outputs) - len(written)]
    caches = outputs[len(outputs) - len(written) :]
    top, total, context, copied = (scratch[name] for name in ("top", "total", "context", "copied"))
    shift = scratch.get("shift")
    lies = tuple(
        ((keys, values)[n], one, scratch[f"{('key', 'value')[n]}_tiles"], (plan.keys, plan.values)[n], cache)
        for n, one, cache in zip(written, new, caches, strict=True)
    )
    best = tuple(scratch[name] for name in ("worth", "age", "index"))
    part, (own, block) = pl.program_id(0), plan.place(pl.program_id(1))
    row, there = plan.here(part, own)
    before, looks = plan.before(part, own)
    position, position_before = position_ref[row], position_ref[before]
    buffer, buffer_before = lax.rem(own, plan.buffers), lax.rem(own + plan.buffers - 1, plan.buffers)
    runs = there & (position >= 0)

    def entry(own, block):
        """What is on the chip at a block of a row."""
        return table_ref[plan.at(part, own), block]

    def slots_of(block) -> Any:
        """Of a block, among those of a row."""
        return pl.ds(pl.multiple_of(block * plan.block, plan.block), plan.block)

    def in_row(block) -> tuple:
        """Where a block is in what is `of_row`."""
        rows = plan.of_slots[0]
        return (pl.ds(pl.multiple_of(block * rows, rows), rows), ALL) if plan.pooled else (ALL, slots_of(block))

    def places_of(buffer, block) -> Any:
        """Where a row's positions at a block are kept."""
        return scratch["places"].at[(buffer, *in_row(block))]

    def indices() -> jax.Array:
        """Of the block's slots, `[H, S]`, or 128 of a pool in a row."""
        index = block * plan.block + lax.broadcasted_iota(jnp.int32, plan.of_slots, 1)
        if plan.pooled:
            index = index + blocks_of.LANES * lax.broadcasted_iota(jnp.int32, plan.of_slots, 0)
        return index

    @pl.when(block == 0)
    def _():
        if plan.coded:
            top[...] = jnp.where(runs, alone[0], MASKED)
            total[...] = jnp.where(runs, (alone[0] > MASKED).astype(jnp.float32), 0.0)
            context[...] = jnp.where(runs, given[0], 0.0)
        else:
            top[...] = jnp.full(top.shape, MASKED, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            context[...] = jnp.zeros(context.shape, jnp.float32)
        if shift is not None:
            shift[...] = jnp.zeros(shift.shape, jnp.float32)
        for each, last in zip(best, (jnp.inf, tpu_choice.LAST, tpu_choice.LAST), strict=True):
            each[...] = jnp.full(each.shape, last, each.dtype)

    @pl.when(there & (block == 0))
    def _():
        scratch["held"][buffer] = jnp.zeros((plan.sets, blocks_of.LANES), jnp.int32)

    def each_band(row, block, act: Callable):
        """act(band) for the KV heads that go through a block together, if a segment of theirs meets it."""
        for band in plan.bands:
            if offsets is None:
                act(band)
            else:
                first, behind = offsets[row, band[0]], offsets[row, band[1] + 1]
                meets = (first < (block + 1) * plan.block) & (behind > block * plan.block)
                pl.when(meets)(functools.partial(act, band))

    def inside(row, head, index):
        """Which slots, at these indices, are in the segment of a head."""
        return (index >= offsets[row, head]) & (index < offsets[row, head + 1])

    def owner(row, index):
        """The head of each slot, at these indices: less than 0, or behind the last, of none."""
        begun = [(index >= offsets[row, head]).astype(jnp.int32) for head in range(plan.kv_heads + 1)]
        return functools.reduce(jnp.add, begun) - 1

    # ---- the row's block: the new token, and attention

    slots = [slot_ref[row, head] for head in range(plan.kv_heads)]
    begin = block * plan.block
    due = [runs & (slot >= begin) & (slot < begin + plan.block) for slot in slots]

    def each_head(act: Callable, once_per_tile: bool = False):
        """act(head, slot) for every KV head whose slot is in this block, if the row runs."""
        for head, (slot, here) in enumerate(zip(slots, due, strict=True)):
            for lie in lies:
                there = here
                if once_per_tile and plan.pooled and head:  # segments lie in the heads' order, so neighbours are enough
                    tile = blocks_of.tile(lie[0].dtype, lie[3].columns)
                    there &= lax.div(slot, tile) != lax.div(slots[head - 1], tile)
                pl.when(there)(functools.partial(act, head, slot, *lie))

    def set_of(head: int) -> int:
        return 0 if plan.pooled else head

    def bits_of(new: jax.Array, bits: int) -> jax.Array:
        if new.dtype == jnp.uint32:
            return new
        words = pltpu.bitcast(new.astype(jnp.float32), jnp.uint32)
        return words if bits == 32 else words | (words >> 16)  # bfloat16 is the upper half

    def write(head: int, slot, old, new, tiles, form, _):
        tile, place = blocks_of.tile(old.dtype, form.columns), lax.rem(slot, plan.block)
        around = (0, set_of(head), *blocks_of.around(place, tile, form.columns))
        words = pltpu.bitcast(old[around], jnp.uint32)
        at, here = lax.rem(slot, tile), lax.broadcasted_iota(jnp.int32, words.shape, int(form.columns))
        if form.columns:
            words = jnp.where(here == at, pltpu.bitcast(new[0, :, pl.ds(head, 1)], jnp.uint32), words)
        else:  # several slots' numbers are in a word
            some = tile // words.shape[0]
            own = jnp.uint32(2 ** (32 // some) - 1) << (32 // some * lax.rem(at, some)).astype(jnp.uint32)
            own = jnp.where(here == lax.div(at, some), own, jnp.uint32(0))
            words = (words & ~own) | (bits_of(new[0, pl.ds(head, 1), :], 32 // some) & own)
        old[around] = pltpu.bitcast(words, old.dtype)
        if not plan.pooled:
            tiles[head] = pltpu.bitcast(words, old.dtype)

    def copies(head: int, slot, old, tiles, form, cache):
        around = blocks_of.around(slot, blocks_of.tile(old.dtype, form.columns), form.columns)
        return pltpu.make_async_copy(tiles.at[head], cache.at[row, set_of(head), *around], copied)

    def send(head: int, slot, old, _, tiles, form, cache):
        if plan.pooled:
            around = blocks_of.around(lax.rem(slot, plan.block), blocks_of.tile(old.dtype, form.columns), form.columns)
            tiles[head] = old[0, 0, *around]
        copies(head, slot, old, tiles, form, cache).start()

    def put(*at: Any):
        write(*at)
        send(*at)

    def wait(head: int, slot, old, _, tiles, form, cache):
        copies(head, slot, old, tiles, form, cache).wait()

    any_due = functools.reduce(jnp.logical_or, due)

    @pl.when(any_due)
    def _():
        if plan.pooled:  # heads' tokens may meet in a tile
            each_head(write)
            each_head(send, once_per_tile=True)
        else:
            each_head(put)

    def of_rows(ref: Any, rows: int, *lead: Any) -> jax.Array:
        """What each slot of a set has, `[H, S]`, in so many rows for its query heads."""
        if plan.pooled:
            return blocks_of.in_rows([blocks_of.along_lanes(ref, lead, interpret)], rows)[None]
        if plan.together == 1:
            return ref[(*lead, ALL)][:, None]
        sets = range(0, plan.sets, plan.together)
        heads = [[(*lead, first + n) for n in range(plan.together)] for first in sets]
        return blocks_of.for_sets(ref, heads, plan.members, interpret)

    here = entry(own, block)
    is_fetched, has_empty = plan.fetched(here, row, block), (here & 1) == 1

    @pl.when(runs & is_fetched)
    def _attend():
        index = indices()
        place = jnp.where(index < plan.slots, places[0], -1)
        if plan.keeps_places:
            places_of(buffer, block)[...] = place
        seen = (place >= 0) & (place <= position)
        if plan.window is not None:
            seen = seen & (position - place < plan.window)
        if not plan.pooled:
            alive = place >= 0 if plan.window is None else (place >= 0) & (place > position + 1 - plan.window)
            scratch["held"][buffer] += tpu_choice.over_lanes(jnp.add, alive.astype(jnp.int32))

        own = place == position  # of codes: attended to already, as exact as it came
        if plan.coded:
            seen = seen & ~own
        if plan.pooled:  # each slot's head, the token's as NOBODY - 1 - head
            head = owner(row, index)
            head = jnp.where(seen, head, jnp.where(own, NOBODY - 1 - head, NOBODY) if plan.coded else NOBODY)
            scratch["seen"][...] = jnp.where(place >= 0, head, EMPTY)
        elif plan.together > 1:
            scratch["seen"][...] = jnp.where(seen, 1, jnp.where(own, 2, 0))

        if plan.values.bits is None:  # integers are no NaN: an empty slot's scale of 0 is enough

            @pl.when(has_empty)
            def _():
                for one in range(plan.sets):
                    if plan.pooled:
                        width = blocks_of.round_up(plan.values.width, 1 if plan.values.columns else blocks_of.LANES)
                        filled = of_rows(scratch["seen"], width)[0] > EMPTY
                    else:
                        filled = place[one : one + 1] >= 0
                    filled = filled.astype(jnp.float32)
                    values[0, one] = blocks_of.zero_empty(values[0, one], filled, plan.values.columns)

        for lying in (of_keys, of_values):
            if isinstance(lying, tpu_channels.ByBlock):
                lying.open(block, plan.block)
            else:
                lying.open()

        sides = {"key_numbers": (plan.keys, keys), "value_numbers": (plan.values, values)}
        for name, (form, lying) in sides.items():
            if name in scratch:
                scratch[name][...] = form.numbers(lying[0])

        def numbers(name: str) -> jax.Array:
            form, lying = sides[name]
            return scratch[name][...] if name in scratch else form.numbers(lying[0])

        def who_sees(band, rows: int) -> tuple[Any, Any]:
            """Which rows see a slot, and whose slot is the token's."""
            if plan.pooled:
                head = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
                head = band[0] + lax.div(head, plan.members // plan.kv_heads)
                slots = of_rows(scratch["seen"], rows)
                return slots == head, slots == NOBODY - 1 - head
            if plan.together == 1:
                return seen[:, None], own[:, None]
            slots = of_rows(scratch["seen"], plan.members)
            return slots == 1, slots == 2

        def through(band):
            rows = plan.rows_of(band)
            sums = None if asked is None else _rows(asked, rows, plan.keys.groups)
            some = of_keys.logits(_rows(query, rows, plan.keys.groups), numbers("key_numbers"), sums) * plan.scale
            sees, owns = who_sees(band, some.shape[1])
            some = biased(soft_cap(some, plan.softcap), None if added is None else of_rows(added, some.shape[1], 0))
            some = jnp.where(sees, some, MASKED)
            if plan.with_mass:
                kept = some
                if alone is not None:
                    kept = jnp.where(owns, alone[0, :, rows], some)
                scratch["logits"][buffer, :, rows, slots_of(block)] = kept
            higher = jnp.maximum(top[:, rows], jnp.max(some, axis=2, keepdims=True))
            shrink = jnp.exp(top[:, rows] - higher)
            weights = jnp.where(sees, jnp.exp(some - higher), 0.0)
            top[:, rows] = higher
            total[:, rows] = total[:, rows] * shrink + jnp.sum(weights, axis=2, keepdims=True)
            new, more = of_values.read(weights, numbers("value_numbers"))
            for group in range(plan.values.groups):
                here, found = (_of_group(x, group, size) for x, size in ((rows, plan.each), (ALL, some.shape[1])))
                context[:, here] = context[:, here] * shrink + new[:, found]
                if shift is not None and more is not None:
                    shift[:, here] = shift[:, here] * shrink + more[:, found]

        each_band(row, block, through)

    if plan.keeps_places:

        @pl.when(runs & ~is_fetched)  # there is no entry in it
        def _():
            places_of(buffer, block)[...] = jnp.full(plan.of_slots, -1, jnp.int32)

    @pl.when(there & (block == plan.blocks - 1))
    def _finish():
        whole = jnp.where(total[...] > 0, total[...], 1.0)
        found = context[...]
        if shift is not None:  # a code's numbers share what is added to it
            first = lax.broadcasted_iota(jnp.int32, found.shape, 2) < plan.values.dim
            found = found + jnp.where(first, shift[...], 0.0)
        output[0] = (found / for_groups(whole, plan.values.groups)).astype(output.dtype)
        lse[0] = jnp.where(total[...] > 0, top[...] + jnp.log(whole), -jnp.inf)
        if plan.with_mass:
            scratch["normal"][buffer] = jnp.where(total[...] > 0, top[...] + jnp.log(whole), jnp.inf)

    # ---- the same block of the row before, or all of them: its mass, and the next slots

    runs_before = looks & (position_before >= 0)

    def look_back(block, _) -> None:
        def line(ref: Any) -> Any:
            """What the block's slots have, of what is there of the row."""
            lead = (0,) + (ALL,) * (len(ref.shape) - 3)
            return ref.at[(*lead, *in_row(block))] if plan.at_once else ref.at[0]

        masses: Any = line(mass[0]) if plan.with_mass else None
        if plan.with_mass:
            looked = runs_before & plan.fetched(entry(jnp.maximum(own - 1, 0), block), before, block)

            @pl.when(looked)
            def _weigh():
                join = jnp.maximum if plan.reduce == "max" else jnp.add
                each = plan.members * plan.sets // plan.kv_heads if plan.reduce == "mean" else 1
                if plan.pooled:
                    masses[...] = jnp.zeros(masses.shape, jnp.float32)

                def of(band):
                    rows = plan.rows_of(band)
                    weights = jnp.exp(
                        scratch["logits"][buffer_before, :, rows, slots_of(block)]
                        - scratch["normal"][buffer_before, :, rows]
                    )
                    if plan.pooled and plan.reduce == "each":
                        group = plan.members // plan.kv_heads
                        member = lax.broadcasted_iota(jnp.int32, weights.shape[1:], 0) % group
                        for n in range(group):
                            own = jnp.where(member == n, weights[0], 0.0)
                            masses[n] = masses[n] + blocks_of.over_rows(jnp.add, own)
                        return
                    if plan.pooled:  # the other heads' are 0
                        masses[...] = join(masses[...], blocks_of.over_rows(join, weights[0]) / each)
                        return
                    if plan.reduce != "each":
                        weights = _over_members(plan, join, weights) / each
                    masses[...] = weights

                each_band(before, block, of)

            @pl.when(looks & ~looked)
            def _():
                masses[...] = jnp.zeros(masses.shape, jnp.float32)

        @pl.when(runs_before)
        def _choose():
            before_here = places_of(buffer_before, block) if fetched_again is None else line(fetched_again)
            room: Any = True
            if not plan.pooled:
                room = jnp.sum(scratch["held"][buffer_before], axis=1, keepdims=True) < limits_ref[before]

            def of(rows: Any, lanes: Any, index: jax.Array):
                """Worth, age and index of some of the block's slots."""
                place = before_here[rows, lanes]
                score = None
                if plan.rule is not None:
                    with_mass = plan.with_mass and plan.weight != 0
                    score = masses[rows, lanes] if with_mass else jnp.zeros(place.shape, jnp.float32)
                    if plan.weight != 0:
                        score = score * ((plan.weight or 0.0) if weight is None else line(weight)[rows, lanes])
                    score = score + ((plan.bias or 0.0) if bias is None else line(bias)[rows, lanes])
                return *tpu_choice.worth(plan, score, place, position_before + 1, room, recents_ref[before]), index

            def of_lanes(start: int):
                """Of a register's lanes."""
                index = block * plan.block + start + lax.broadcasted_iota(jnp.int32, (plan.sets, blocks_of.LANES), 1)
                worth, *rest = of(ALL, pl.ds(start, blocks_of.LANES), index)
                return jnp.where(index < plan.slots, worth, jnp.nan), *rest

            def of_band(band):
                """Of a pool's heads, each in registers of its own."""
                shape = blocks_of.SUBLANES, blocks_of.LANES
                index = lax.broadcasted_iota(jnp.int32, shape, 1)
                index = index + blocks_of.LANES * lax.broadcasted_iota(jnp.int32, shape, 0)
                heads = range(band[0], band[1] + 1)
                lowest = {head: tuple(ref[head] for ref in best) for head in heads}
                for row in range(0, plan.of_slots[0], blocks_of.SUBLANES):
                    at = block * plan.block + blocks_of.LANES * row + index
                    worth, *rest = of(pl.ds(row, blocks_of.SUBLANES), ALL, at)
                    for head in heads:
                        own = jnp.where(inside(before, head, at), worth, jnp.nan)
                        lowest[head] = tpu_choice.lower(lowest[head], (own, *rest))
                for head in heads:
                    for ref, one in zip(best, lowest[head], strict=True):
                        ref[head] = one

            if plan.pooled:
                each_band(before, block, of_band)
                return
            lowest = tpu_choice.in_runs(tpu_choice.lower, of_lanes, plan.block, tuple(ref[...] for ref in best))
            for ref, one in zip(best, lowest, strict=True):
                ref[...] = one

        @pl.when(looks & (block == plan.blocks - 1))
        def _():
            found = [ref[...] for ref in best]
            aim[0] = tpu_choice.lowest(*(tpu_choice.head_in_row(*found) if plan.pooled else found))

    lax.fori_loop(*plan.looked_at(own, block), look_back, None)

    @pl.when(any_due)
    def _():
        each_head(wait, once_per_tile=True)


def _of_group(rows: slice, group: int, members: int) -> slice:
    """Some of the rows of a group of channels, of which each has so many."""
    first, behind, _ = rows.indices(members)
    return slice(group * members + first, group * members + behind)


def _rows(ref: Any, rows: slice, groups: int) -> jax.Array:
    """Some query heads' rows `[1, H, G M, _]` of every group of channels."""
    every = [ref[0, :, _of_group(rows, group, ref.shape[2] // groups)] for group in range(groups)]
    return every[0] if groups == 1 else jnp.concatenate(every, axis=1)


def _beside(form: Form) -> list[str]:
    """What a slot's codes have beside them."""
    return [what for what, there in (("scales", form.scaled), ("lows", form.lowered)) if there]


def _entry(x: jax.Array | Codes, columns: bool) -> jax.Array:
    """A new key or value `[B, Hk, N]` as the kernel takes it: [B, N, Hk] where slots lie along the lanes; else each
    byte of a code four times, in a word."""
    if columns:
        return jnp.swapaxes(x.codes if isinstance(x, Codes) else x, -1, -2)
    if not isinstance(x, Codes):
        return x
    return lax.bitcast_convert_type(x.codes, jnp.uint8).astype(jnp.uint32) * jnp.uint32(0x01010101)


def _in_slots(slot: Int[Array, "B Hk"], sets: int) -> tuple[jax.Array, ...]:
    """Row, set and slot of every KV head."""
    heads = jnp.arange(slot.shape[1]) if sets == slot.shape[1] else jnp.zeros(slot.shape[1], jnp.int32)
    return jnp.arange(slot.shape[0])[:, None], heads[None], slot


def _by_query_head(x: Float[Array, "B H _ W"], groups: int, members: int) -> Float[Array, "B H _ W"]:
    """Rows of KV heads, for each group, as rows of their query heads, `members` in a group."""
    batch, sets, rows, width = x.shape
    x = x.reshape(batch, sets, rows, 1, width)
    return jnp.broadcast_to(x, (batch, sets, rows, groups * members // rows, width)).reshape(batch, sets, -1, width)


def _over_members(plan: Plan, join: Callable, x: Float[Array, "K N S"]) -> Float[Array, "H S"]:
    """The query heads of each set joined."""
    if plan.each == blocks_of.SUBLANES and plan.packs % plan.members == 0:
        return blocks_of.over_members(join, x, plan.members)
    reduce = jnp.max if plan.reduce == "max" else jnp.sum
    sets = [reduce(x[:, plan.rows_of_set(n)], axis=1) for n in range(plan.together)]
    return sets[0] if len(sets) == 1 else _in_turns(sets)


def _in_turns(parts: list[Float[Array, "K S"]]) -> Float[Array, "H S"]:
    """The first row of each part, then the second of each, and so on."""
    return jnp.concatenate([part[n : n + 1] for n in range(parts[0].shape[0]) for part in parts], axis=0)


def _by_group(x: Int16[Array, "B H S G"]) -> Int16[Array, "B H *G S"]:
    """Scales or lows as they lie in memory, without the dimension of the groups where there is one."""
    return x[..., 0] if x.shape[-1] == 1 else jnp.swapaxes(x, -1, -2)


def _by_slot(x: Int16[Array, "B H *G S"]) -> Int16[Array, "B H S G"]:
    """The inverse."""
    return x[..., None] if x.ndim == 3 else jnp.swapaxes(x, -1, -2)


def _scales(
    held: jax.Array | Lying, new: Codes | None, position: Int[Array, "B"], slot: Int[Array, "B Hk"], interpret: Any
) -> dict[str, jax.Array]:
    """The scales and lows that there are, `_by_group`, with the token's."""
    if not isinstance(held, Codes) or new is None:
        return {}
    sets, slots = held.codes.shape[1:3]
    row, of, at = _in_slots(jnp.where(position[:, None] < 0, slots, slot), sets)

    def written(x: jax.Array, one: Int16[Array, "B Hk G"]) -> jax.Array:
        x = _by_group(x)
        if x.ndim == 3:
            return x.at[row, of, at].set(one[..., 0], mode="drop")
        here = jnp.arange(slots) == at[..., None]  # masks: for an index XLA would lay the groups out anew, and back
        for head in range(slot.shape[1]):
            x = jnp.where(here[:, head, None, None], one[:, head, None, :, None], x)
        return x

    both = {"scale": (held.scale, new.scale), "low": (held.low, new.low)}
    both = {name: (x, one) for name, (x, one) in both.items() if x is not None and one is not None}
    if held.groups > 1 and sets == slot.shape[1]:  # where they lie: for an index XLA would lay the groups out anew
        runs = tuple(Run(x, slot, 1) for x, _ in both.values())
        news = tuple(one[:, :, None] for _, one in both.values())
        here = (position[:, None] >= 0) & (slot < slots)
        after = tpu_runs.write(tpu_runs.pieces(runs), here, news, runs, interpret)
        return {name: _by_group(x) for name, x in zip(both, after, strict=True)}
    return {name: written(x, one) for name, (x, one) in both.items()}
