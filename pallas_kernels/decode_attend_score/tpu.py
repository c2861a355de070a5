"""decode_attend_score for TPU: one walk over K and V per row, all query heads of all KV heads at once.

The grid is (rows, blocks of slots), the blocks innermost, so the compiler streams each block of K and V through on-chip
memory exactly once. Only logits stay there, [Hk, G, C]: when the row's last block has been seen they give mass, scores
and victim. The new key and value go into their slot inside the block that holds it, and from there the one tile around
it goes back to the cache, which is aliased from input to output and otherwise untouched.

XLA lays an array out in memory the way that pads least: [C, D] with D along the lanes where D is a multiple of 128, and
mostly with C along the lanes (`columns`) where it is not, such as 64. The kernel reads either as it lies.
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
from pallas_kernels.arguments import Held, Judge, Rule, Token
from pallas_kernels.decode_attend_score.reference import GROUP, Attended
from pallas_kernels.decode_attend_score.victim import HEADS
from pallas_kernels.masking import MASKED, soft_cap

BLOCK_BYTES = 2**20  # of K, and of V, at a time: long enough to hide the start of a copy
LAST = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class _Plan(blocks_of.Walk):
    """The numbers that the kernel is compiled for."""

    kv_heads: int
    scale: float
    window: int | None
    softcap: float | None
    group: str
    rule: Rule | None
    weight: float | None  # None: an array, which is an input then
    bias: float | None


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
    interpret: bool | pltpu.InterpretParams = False,
) -> Attended:
    """`reference.decode_attend_score`, K and V read once.

    Raises `NotImplementedError` for keys turned at read time (`rotate`), for a bias, for 4 slots or fewer, and
    where a row's logits, masses and positions do not fit in on-chip memory.
    """
    if rotate is not None:
        raise NotImplementedError("the TPU kernel reads keys as they lie in the cache: rotate= needs the reference")
    query, key, value, position = token
    keys, values, positions, bias = held
    if bias is not None:
        raise NotImplementedError("slots whose logits have a bias need the reference")
    batch, kv_heads, slots, dim = keys.shape
    heads = query.shape[1]
    if slots <= blocks_of.SUBLANES // 2:
        raise NotImplementedError(f"{slots} slots lie in memory in smaller pieces than the kernel writes")
    columns = blocks_of.slots_along_lanes(slots, dim)
    row_bytes = (
        kv_heads * blocks_of.round_up(dim, blocks_of.SUBLANES if columns else blocks_of.LANES) * keys.dtype.itemsize
    )
    blocks, block = blocks_of.even_blocks(slots, BLOCK_BYTES // row_bytes)
    both = (0.0, 0.0) if judge.rule is None else (judge.weight, judge.bias)
    factors = [factor for factor in both if not isinstance(factor, float)]
    plan = _Plan(
        slots, columns, block, blocks, kv_heads, scale, window, softcap, judge.group, judge.rule,
        *(factor if isinstance(factor, float) else None for factor in both),
    )  # fmt: skip
    width = plan.width
    vmem = _vmem_bytes(plan, heads, row_bytes, len(factors))
    if vmem > blocks_of.VMEM_BYTES:
        raise NotImplementedError(f"{slots} slots of {heads} query heads need {vmem} bytes of on-chip memory")

    finished = position[:, None] < 0
    at = (jnp.arange(batch)[:, None], jnp.arange(kv_heads)[None, :], jnp.where(finished, slots, slot))
    positions = positions.at[at].set(jnp.broadcast_to(position[:, None], slot.shape), mode="drop")

    def row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda b, j, *_: (b,) + (0,) * len(shape))

    if columns:
        keys, values, key, value = (jnp.swapaxes(x, -1, -2) for x in (keys, values, key, value))
        cache = pl.BlockSpec((1, kv_heads, dim, block), lambda b, j, *_: (b, 0, 0, j))
    else:
        cache = pl.BlockSpec((1, kv_heads, block, dim), lambda b, j, *_: (b, 0, j, 0))
    untouched = pl.BlockSpec(memory_space=pltpu.HBM)
    if interpret:
        keys, values = plan.whole(keys), plan.whole(values)
    line = row(kv_heads, width)
    group_size = heads // kv_heads
    call = pl.pallas_call(
        functools.partial(_kernel, plan),
        out_shape=(
            jax.ShapeDtypeStruct((batch, kv_heads, group_size, dim), query.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, group_size, 1), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, slots), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, 1), jnp.int32),
            pltpu.HBM(keys.shape, keys.dtype),  # else XLA takes a small cache on the chip first, and back behind
            pltpu.HBM(values.shape, values.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, blocks),
            in_specs=[
                row(kv_heads, group_size, dim),
                row(*key.shape[1:]),
                row(*value.shape[1:]),
                cache,
                cache,
                line,
                *(line for _ in factors),
            ],
            out_specs=[
                row(kv_heads, group_size, dim), row(kv_heads, group_size, 1), line, row(kv_heads, 1), untouched,
                untouched,
            ],
            scratch_shapes=[
                pltpu.VMEM((kv_heads, group_size, width), jnp.float32),
                pltpu.VMEM((kv_heads, group_size, 1), jnp.float32),
                pltpu.VMEM((kv_heads, group_size, 1), jnp.float32),
                pltpu.VMEM((kv_heads, group_size, dim), jnp.float32),
                pltpu.VMEM((kv_heads, 1), jnp.int32),
                pltpu.VMEM((2, kv_heads, *((dim, plan.tile) if columns else (plan.tile, dim))), keys.dtype),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={7: 4, 8: 5},  # the cache; the four scalars count
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=blocks_of.VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * slots * dim,
            transcendentals=2 * batch * heads * slots,
            bytes_accessed=keys.nbytes + values.nbytes + 4 * (2 + len(factors)) * positions.size
            + 2 * batch * (heads + kv_heads) * dim * keys.dtype.itemsize
            + 4 * batch * (heads + kv_heads) + 2 * batch * kv_heads * plan.tile * dim * keys.dtype.itemsize,
        ),
        name="decode_attend_score",
        interpret=interpret,
    )  # fmt: skip
    output, lse, mass, aim, keys, values = call(
        position, slot.reshape(-1), judge.limits, judge.recents,
        query.reshape(batch, kv_heads, group_size, dim), key, value, keys, values, positions,
        *factors,
    )  # fmt: skip
    if columns:
        keys, values = (jnp.swapaxes(x, -1, -2) for x in (keys, values))
    if interpret:
        keys, values = keys[:, :, :slots], values[:, :, :slots]
    return Attended(
        output=output.reshape(batch, heads, dim),
        lse=lse.reshape(batch, heads),
        mass=mass,
        keys=keys,
        values=values,
        positions=positions,
        next_slot=jnp.where(finished, slot, aim[..., 0]),
    )


def _vmem_bytes(plan: _Plan, heads: int, row_bytes: int, factors: int) -> int:
    """On-chip memory: two blocks each of K and V, a row's logits, and two each of its positions, masses, factors."""
    rows = blocks_of.round_up(plan.kv_heads, blocks_of.SUBLANES)
    width = plan.width
    group = heads // plan.kv_heads
    padded = (
        2 ** (group - 1).bit_length() if group < blocks_of.SUBLANES else blocks_of.round_up(group, blocks_of.SUBLANES)
    )
    return 4 * plan.block * row_bytes + 4 * width * (plan.kv_heads * padded + 2 * rows * (2 + factors)) + 2**22


def _kernel(plan: _Plan, position_ref, slot_ref, limits_ref, recents_ref, *refs):
    query, new_key, new_value, keys, values, positions, *refs = refs
    weight = refs.pop(0) if plan.weight is None else None
    bias = refs.pop(0) if plan.bias is None else None
    output, lse, mass, aim, keys_out, values_out, logits, top, total, context, held, tiles, copied = refs
    row, step = pl.program_id(0), pl.program_id(1)
    position = position_ref[row]

    @pl.when(step == 0)
    def _():
        top[...] = jnp.full(top.shape, MASKED, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        context[...] = jnp.zeros(context.shape, jnp.float32)
        held[...] = jnp.zeros(held.shape, jnp.int32)

    def each_head(act: Callable):
        """act(head, slot) for every KV head whose slot is in this block, if the row runs."""
        for head in range(plan.kv_heads):
            slot = slot_ref[row * plan.kv_heads + head]
            pl.when((position >= 0) & (lax.div(slot, plan.block) == step))(functools.partial(act, head, slot))

    def copies(head: int, slot):
        around = plan.around(slot)
        return [
            pltpu.make_async_copy(tiles.at[which, head], cache.at[row, head, *around], copied)
            for which, cache in enumerate((keys_out, values_out))
        ]

    def write(head: int, slot):
        around = plan.around(lax.rem(slot, plan.block))
        here = lax.broadcasted_iota(jnp.int32, tiles.shape[2:], int(plan.columns)) == lax.rem(slot, plan.tile)
        for which, (block, new) in enumerate(((keys, new_key), (values, new_value))):
            one = pl.ds(head, 1)
            new = (new[0, :, one] if plan.columns else new[0, one, :]).astype(jnp.float32)
            tile = jnp.where(here, new, block[0, head, *around].astype(jnp.float32)).astype(block.dtype)
            block[0, head, *around] = tile
            tiles[which, head] = tile
        for copy in copies(head, slot):
            copy.start()

    each_head(write)

    def columns_of(step):
        """Where block `step` lies in arrays over all slots, and the slots' indices [Hk, S]."""
        at = pl.ds(pl.multiple_of(step * plan.block, plan.block), plan.block)
        return at, step * plan.block + lax.broadcasted_iota(jnp.int32, (plan.kv_heads, plan.block), 1)

    def inputs(at, index):
        """Positions of a block's slots [Hk, S], and which of them the query sees."""
        place = jnp.where(index < plan.slots, positions[0, :, at], -1)
        seen = (place >= 0) & (place <= position)
        return place, seen if plan.window is None else seen & (position - place < plan.window)

    at, index = columns_of(step)
    place, seen = inputs(at, index)
    held[...] += jnp.sum(_alive(plan, place, position + 1).astype(jnp.int32), axis=1, keepdims=True)

    @pl.when(jnp.any(place < 0))
    def _():
        filled = (place >= 0).astype(jnp.float32)
        for head in range(plan.kv_heads):
            values[0, head] = blocks_of.zero_empty(values[0, head], filled[head : head + 1], plan.columns)

    @pl.when(jnp.any(seen))
    def _():
        some = _product(query[0], keys[0], contract=1 if plan.columns else 2) * plan.scale
        some = soft_cap(some, plan.softcap)
        logits[:, :, at] = some
        some = jnp.where(seen[:, None], some, MASKED)
        higher = jnp.maximum(top[...], jnp.max(some, axis=2, keepdims=True))
        shrink = jnp.exp(top[...] - higher)
        weights = jnp.where(seen[:, None], jnp.exp(some - higher), 0.0)
        top[...] = higher
        total[...] = total[...] * shrink + jnp.sum(weights, axis=2, keepdims=True)
        new = _product(weights.astype(values.dtype), values[0], contract=2 if plan.columns else 1)
        context[...] = context[...] * shrink + new

    @pl.when(step == plan.blocks - 1)
    def _():
        whole = jnp.where(total[...] > 0, total[...], 1.0)
        output[0] = (context[...] / whole).astype(output.dtype)
        lse[0] = jnp.where(total[...] > 0, top[...] + jnp.log(whole), -jnp.inf)

        def look_back(step, best):
            at, index = columns_of(step)
            place, seen = inputs(at, index)
            inside = index < plan.slots
            weights = jnp.where(seen[:, None], jnp.exp(logits[:, :, at] - top[...]) / whole, 0.0)
            weights = GROUP[plan.group](weights, axis=1)
            mass[0, :, at] = weights
            score = weights * (plan.weight if weight is None else weight[0, :, at])
            score = score + (plan.bias if bias is None else bias[0, :, at])
            worth, age = _worth(plan, score, place, position + 1, held[...], limits_ref[row], recents_ref[row])
            worth, age, index = (
                jnp.where(inside, x, last) for x, last in ((worth, jnp.inf), (age, LAST), (index, LAST))
            )
            return _lower(best, _lowest(worth, age, index))

        start = (jnp.full(held.shape, jnp.inf, jnp.float32), *(jnp.full(held.shape, LAST, jnp.int32) for _ in "ab"))
        aim[0] = lax.fori_loop(0, plan.blocks, look_back, start)[2]

    def wait(head: int, slot):
        for copy in copies(head, slot):
            copy.wait()

    each_head(wait)


def _product(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """One matrix product per head, [H, M, N], summed in float32: over the last axis of a and axis `contract` of b."""
    axes = (((2,), (contract,)), ((0,), (0,)))
    return lax.dot_general(a, b, axes, precision=blocks_of.exact(b.dtype), preferred_element_type=jnp.float32)


def _alive(plan: _Plan, place: jax.Array, now) -> jax.Array:
    """`victim.alive` for one row's block [Hk, S]."""
    return place >= 0 if plan.window is None else (place >= 0) & (place > now - plan.window)


def _worth(plan: _Plan, score: jax.Array, place: jax.Array, now, held: jax.Array, limit, recent):
    """What `victim.victim` compares: the lowest worth goes, the lowest age among those, the lowest index then."""
    live = _alive(plan, place, now)
    if plan.rule is None:  # the first empty or expired slot
        return live.astype(jnp.float32), jnp.zeros(place.shape, jnp.int32)
    if plan.rule.heads != "each":
        score = jnp.broadcast_to(HEADS[plan.rule.heads](score, axis=0, keepdims=True), score.shape)
    safe = (place < plan.rule.sinks) | (place >= now - recent)
    score = jnp.where(safe, jnp.inf, score)
    return jnp.where(live, score, jnp.where(held < limit, -jnp.inf, jnp.inf)), place


def _lowest(worth: jax.Array, age: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per head, the triple [Hk, 1] of lowest worth, then age, then index."""
    least = jnp.min(worth, axis=1, keepdims=True)
    oldest = jnp.min(jnp.where(worth == least, age, LAST), axis=1, keepdims=True)
    first = jnp.min(jnp.where((worth == least) & (age == oldest), index, LAST), axis=1, keepdims=True)
    return least, oldest, first


def _lower(a: tuple, b: tuple) -> tuple:
    """The lower of two triples, per head."""
    (wa, aa, ia), (wb, ab, ib) = a, b
    first = (wa < wb) | ((wa == wb) & ((aa < ab) | ((aa == ab) & (ia < ib))))
    return jnp.where(first, wa, wb), jnp.where(first, aa, ab), jnp.where(first, ia, ib)
