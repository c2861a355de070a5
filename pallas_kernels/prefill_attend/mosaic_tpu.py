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
from pallas_kernels.codes import Codes, refuse_codes
from pallas_kernels.masking import MASKED, soft_cap

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
    `own_keys_last` those behind a block of queries are not even fetched.
    """
    refuse_codes(keys, values)
    batch, heads, length, dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    group = heads // kv_heads
    tiles, tile = blocks_of.even_blocks(length, ROWS // group, blocks_of.QUERIES)
    blocks, block = blocks_of.even_blocks(slots, KEYS)

    def last(i, least: Callable = jnp.minimum, divide: Callable = lax.div):
        """The last block of keys that a query of tile i may see."""
        return divide(slots - length + least((i + 1) * tile, length) - 1, block) if own_keys_last else blocks - 1

    def kernel(at_ref, place_ref, query_ref, key_ref, value_ref, *refs):
        bias_ref = refs[0] if bias is not None else None
        output, *lse, top, total, context = refs[bias is not None :]
        i, j = pl.program_id(2), pl.program_id(3)

        @pl.when(j == 0)
        def _():
            top[...] = jnp.full(top.shape, MASKED, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            context[...] = jnp.zeros(context.shape, jnp.float32)

        place = blocks_of.keys_at(place_ref, j, slots)
        at = blocks_of.queries_at(at_ref, i, length)
        filled = place >= 0

        @pl.when((j <= last(i)) & blocks_of.any_seen(at, place, window))
        def _():
            @pl.when(jnp.any(place < 0))
            def _():
                value_ref[0, 0] = blocks_of.zero_empty(value_ref[0, 0], filled.astype(jnp.float32), columns=False)

            query = query_ref[0, 0].reshape(group * tile, dim)
            logits = blocks_of.product(query, key_ref[0, 0], 1) * scale
            seen = blocks_of.sees(jnp.concatenate([at] * group), place, window)
            logits = blocks_of.added(soft_cap(logits, softcap), bias_ref)
            logits = jnp.where(seen, logits, MASKED)
            higher = jnp.maximum(top[...], jnp.max(logits, axis=1, keepdims=True))
            shrink = jnp.exp(top[...] - higher)
            weights = jnp.where(seen, jnp.exp(logits - higher), 0.0)
            top[...] = higher
            total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            new = blocks_of.product(weights.astype(value_ref.dtype), value_ref[0, 0], 0)
            context[...] = context[...] * shrink + new

        @pl.when(j == blocks - 1)
        def _():
            whole = jnp.where(total[...] > 0, total[...], 1.0)
            output[0, 0] = (context[...] / whole).astype(output.dtype).reshape(group, tile, dim)
            if lse:
                found = jnp.where(total[...] > 0, top[...] + jnp.log(whole), -jnp.inf)
                lse[0][0, 0] = found.reshape(group, tile, 1)

    def keys_block(b, h, i, j):
        return b, h, jnp.minimum(j, last(i)), 0

    some = pl.BlockSpec((1, 1, block, dim), keys_block)
    of_slots = pl.BlockSpec((1, 1, 1, block), lambda b, h, i, j: (b, h, 0, jnp.minimum(j, last(i))))
    mine, one = (pl.BlockSpec((1, 1, group, tile, size), lambda b, h, i, j: (b, h, 0, i, 0)) for size in (dim, 1))
    rows = group * tile
    read = sum(
        min((last(i, min, operator.floordiv) + 1) * block, slots) for i in range(tiles)
    )  # keys, over all tiles of queries
    shape = (batch, kv_heads, group, length)
    outs = [jax.ShapeDtypeStruct((*shape, dim), queries.dtype), jax.ShapeDtypeStruct((*shape, 1), jnp.float32)]
    extra = [] if bias is None else [bias[:, :, None]]
    out, *lse = pl.pallas_call(
        kernel,
        out_shape=outs[: 1 + with_lse],
        grid=(batch, kv_heads, tiles, blocks),
        in_specs=[
            pl.BlockSpec((1, tile, 1), lambda b, h, i, j: (b, i, 0)),
            of_slots,
            mine,
            some,
            some,
            *[of_slots] * len(extra),
        ],
        out_specs=[mine, one][: 1 + with_lse],
        scratch_shapes=[
            pltpu.VMEM((rows, 1), jnp.float32),
            pltpu.VMEM((rows, 1), jnp.float32),
            pltpu.VMEM((rows, dim), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=blocks_of.VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * tile * read * dim,
            transcendentals=batch * heads * tile * read,
            bytes_accessed=2 * keys.dtype.itemsize * batch * dim * (kv_heads * read + heads * length)
            + 4 * batch * kv_heads * ((1 + len(extra)) * read + length)
            + 4 * batch * heads * length * with_lse,
        ),
        name="prefill_attend",
        interpret=interpret,
    )(
        query_positions[..., None],
        key_positions[:, :, None],
        queries.reshape(batch, kv_heads, group, length, dim),
        keys,
        values,
        *extra,
    )
    out = out.reshape(batch, heads, length, dim)
    return (out, lse[0].reshape(batch, heads, length)) if with_lse else out
