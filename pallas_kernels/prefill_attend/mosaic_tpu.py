"""prefill_attend for TPU: blocks of queries against blocks of keys, the softmax carried along (flash attention).

Written here, because what each query sees depends on the positions of query and key, slot by slot, which the masks of
jax's own TPU attention (functions of the index, or segments) cannot say.
"""

import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tpu_blocks as blocks_of
from pallas_kernels.codes import Codes
from pallas_kernels.masking import MASKED, soft_cap
from pallas_kernels.tpu_blocks import SUBLANES
from pallas_kernels.tpu_codes import Lying, Scales, for_groups

ROWS = 512  # queries times query heads of a group, at a time
KEYS = 512  # keys at a time


def prefill_attend(
    queries: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"] | Codes,
    values: Float[Array, "B Hk S D"] | Codes,
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    own_keys_last: bool = False,
    with_lse: bool = False,
    bias: Float[Array, "B Hk S"] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B Hq T D"] | tuple[Float[Array, "B Hq T D"], Float[Array, "B Hq T"]]:
    """`reference.prefill_attend`, without a queries x keys array. Blocks that no query sees are not computed, and with
    `own_keys_last` those behind a block of queries are not even fetched. Codes become numbers on the chip.

    Raises `NotImplementedError` for codes of 3 bits, and for floats other than bfloat16 and float32.
    """
    blocks_of.check_floats(queries, *(x for x in (keys, values) if not isinstance(x, Codes)))
    batch, heads, length, dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    group = heads // kv_heads
    lies = of_keys, of_values = Lying.of(keys, queries.dtype), Lying.of(values, queries.dtype)
    grouped = queries.reshape(batch, kv_heads, group, length, dim)
    asked = of_keys.asked(grouped)
    form = of_values.form
    tiles, tile = blocks_of.even_blocks(length, ROWS // group, blocks_of.QUERIES)
    blocks, block = blocks_of.even_blocks(slots, KEYS)

    def last(i, least: Callable = jnp.minimum, divide: Callable = lax.div):
        """The last block of keys that a query of tile i may see."""
        return divide(slots - length + least((i + 1) * tile, length) - 1, block) if own_keys_last else blocks - 1

    def kernel(at_ref, place_ref, query_ref, key_ref, value_ref, *refs):
        refs = list(refs)
        asked_ref = refs.pop(0) if asked else None
        key_scales, value_scales = (Scales(each.form, refs) for each in lies)
        bias_ref = refs.pop(0) if bias is not None else None
        output, *lse, top, total, context, shift = refs
        i, j = pl.program_id(2), pl.program_id(3)

        @pl.when(j == 0)
        def _():
            top[...] = jnp.full(top.shape, MASKED, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            context[...] = jnp.zeros(context.shape, jnp.float32)
            shift[...] = jnp.zeros(shift.shape, jnp.float32)

        place = blocks_of.keys_at(place_ref, j, slots)
        at = blocks_of.queries_at(at_ref, i, length)
        filled = place >= 0

        @pl.when((j <= last(i)) & blocks_of.any_seen(at, place, window))
        def _():
            if form.bits is None:  # integers are no NaN: an empty slot's scale of 0 is enough

                @pl.when(jnp.any(place < 0))
                def _():
                    value_ref[0, 0] = blocks_of.zero_empty(value_ref[0, 0], filled.astype(jnp.float32), form.columns)

            query = query_ref[0, 0].reshape(1, -1, query_ref.shape[-1])
            sums = None if asked_ref is None else asked_ref[0, 0].reshape(1, -1, 1)
            logits = key_scales.logits(query, key_scales.form.numbers(key_ref[0]), sums)[0] * scale
            seen = blocks_of.sees(jnp.concatenate([at] * group), place, window)
            logits = blocks_of.added(soft_cap(logits, softcap), bias_ref)
            logits = jnp.where(seen, logits, MASKED)
            higher = jnp.maximum(top[...], jnp.max(logits, axis=1, keepdims=True))
            shrink = jnp.exp(top[...] - higher)
            weights = jnp.where(seen, jnp.exp(logits - higher), 0.0)
            top[...] = higher
            total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            new, more = value_scales.read(weights[None], value_scales.form.numbers(value_ref[0]), filled)
            shrink = for_groups(shrink[None], form.groups)[0]
            context[...] = context[...] * shrink + new[0]
            if form.shifts:
                shift[...] = shift[...] * shrink + more[0]

        @pl.when(j == blocks - 1)
        def _():
            whole = jnp.where(total[...] > 0, total[...], 1.0)
            found = context[...]
            if form.shifts:  # a code's numbers share what is added to it
                own = lax.broadcasted_iota(jnp.int32, found.shape, 1) < dim
                found = found + jnp.where(own, shift[...], 0.0)
            found = found / for_groups(whole[None], form.groups)[0]
            output[0, 0] = found.astype(output.dtype).reshape(output.shape[2:])
            if lse:
                found = jnp.where(total[...] > 0, top[...] + jnp.log(whole), -jnp.inf)
                lse[0][0, 0] = found.reshape(group, tile, 1)

    def block_at(b, h, i, j):
        return b, h, jnp.minimum(j, last(i))

    blocks_read = [each.specs(block, block_at) for each in lies]
    of_slots = pl.BlockSpec((1, 1, 1, block), lambda b, h, i, j: (b, h, 0, jnp.minimum(j, last(i))))
    spread = of_keys.spread(grouped)
    found = form.groups * group, form.width

    def rows_of(heads: int, size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, heads, tile, size), lambda b, h, i, j: (b, h, 0, i, 0))

    rows = group * tile
    read = sum(
        min((last(i, min, operator.floordiv) + 1) * block, slots) for i in range(tiles)
    )  # keys, over all tiles of queries
    shape = (batch, kv_heads, group, length)
    exact = queries.dtype if form.halves == 1 else jnp.float32  # or its two halves would be rounded apart
    outs = [
        jax.ShapeDtypeStruct((batch, kv_heads, found[0], length, found[1]), exact),
        jax.ShapeDtypeStruct((*shape, 1), jnp.float32),
    ]
    extra = [] if bias is None else [bias[:, :, None]]
    scales = [x for each in lies for x in each.scales]
    out, *lse = pl.pallas_call(
        kernel,
        out_shape=outs[: 1 + with_lse],
        grid=(batch, kv_heads, tiles, blocks),
        in_specs=[
            pl.BlockSpec((1, tile, 1), lambda b, h, i, j: (b, i, 0)),
            of_slots,
            rows_of(*spread.shape[2::2]),
            *(lie for lie, _ in blocks_read),
            *(rows_of(x.shape[2], 1) for x in asked),
            *(spec for _, some in blocks_read for spec in some),
            *[of_slots] * len(extra),
        ],
        out_specs=[rows_of(*found), rows_of(group, 1)][: 1 + with_lse],
        scratch_shapes=[
            pltpu.VMEM((rows, 1), jnp.float32),
            pltpu.VMEM((rows, 1), jnp.float32),
            pltpu.VMEM((found[0] * tile, found[1]), jnp.float32),
            pltpu.VMEM((found[0] * tile, 1) if form.shifts else (SUBLANES, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=blocks_of.VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * tile * read * dim,
            transcendentals=batch * heads * tile * read,
            bytes_accessed=sum(each.nbytes for each in lies) * read // slots
            + 2 * queries.dtype.itemsize * batch * dim * heads * length
            + 4 * batch * kv_heads * ((1 + len(extra)) * read + length)
            + 4 * batch * heads * length * with_lse,
        ),
        name="prefill_attend",
        interpret=interpret,
    )(
        query_positions[..., None],
        key_positions[:, :, None],
        spread,
        *(each.codes for each in lies),
        *asked,
        *scales,
        *extra,
    )
    out = of_values.gathered(out).astype(queries.dtype).reshape(batch, heads, length, dim)
    return (out, lse[0].reshape(batch, heads, length)) if with_lse else out
