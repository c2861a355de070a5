"""prefill_attend_mass for TPU in two passes: each query's log-sum-exp over all keys, then each key's sum over all
queries of exp(logit - log-sum-exp). Neither holds a queries x keys array; K is read twice, or once where the
log-sum-exps are given.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tpu_blocks as blocks_of
from pallas_kernels.codes import Codes
from pallas_kernels.masking import MASKED, averaged, soft_cap
from pallas_kernels.tpu_codes import Lying, Scales

ROWS = 512  # queries times query heads of a group, at a time
KEYS = 512  # keys at a time


def prefill_attend_mass(
    queries: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"] | Codes,
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    reduce: str = "sum",
    own_keys_last: bool = False,
    weights: Float[Array, "B T"] | None = None,
    bias: Float[Array, "B Hk S"] | None = None,
    lse: Float[Array, "B Hq T"] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B Hq S"]:
    """`reference.prefill_attend_mass`, without a queries x keys array. Codes become numbers on the chip.

    Raises `NotImplementedError` for codes of 3 bits, and for floats other than bfloat16 and float32.
    """
    blocks_of.check_floats(queries, *([] if isinstance(keys, Codes) else [keys]))
    del own_keys_last  # a hint, which the blocks here do not need: they look at positions
    batch, heads, length, dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    group = heads // kv_heads
    lies = Lying.of(keys, queries.dtype)
    grouped = queries.reshape(batch, kv_heads, group, length, dim)
    asked, spread = lies.asked(grouped), lies.spread(grouped)
    tiles, tile = blocks_of.even_blocks(length, ROWS // group, blocks_of.QUERIES)
    blocks, block = blocks_of.even_blocks(slots, KEYS)
    rows = group * tile

    def masked_logits(i, j, at_ref, place_ref, query_ref, key_ref, *refs):
        """Logits [G*T, S] of a tile of queries over a block of keys, and who sees whom."""
        refs = list(refs)
        sums = refs.pop(0)[0, 0].reshape(1, -1, 1) if asked else None
        scales = Scales(lies.form, refs)
        bias_ref = refs.pop(0) if bias is not None else None
        at = jnp.concatenate([blocks_of.queries_at(at_ref, i, length)] * group)
        seen = blocks_of.sees(at, blocks_of.keys_at(place_ref, j, slots), window)
        query = query_ref[0, 0].reshape(1, -1, query_ref.shape[-1])
        logits = scales.logits(query, scales.form.numbers(key_ref[0]), sums)[0] * scale
        logits = blocks_of.added(soft_cap(logits, softcap), bias_ref)
        return jnp.where(seen, logits, MASKED), seen

    def met(i, j, at_ref, place_ref):
        at, place = blocks_of.queries_at(at_ref, i, length), blocks_of.keys_at(place_ref, j, slots)
        return blocks_of.any_seen(at, place, window)

    def lse_kernel(at_ref, place_ref, *refs):
        *inputs, lse, top, total = refs
        i, j = pl.program_id(2), pl.program_id(3)

        @pl.when(j == 0)
        def _():
            top[...] = jnp.full(top.shape, MASKED, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)

        @pl.when(met(i, j, at_ref, place_ref))
        def _():
            logits, seen = masked_logits(i, j, at_ref, place_ref, *inputs)
            higher = jnp.maximum(top[...], jnp.max(logits, axis=1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(logits - higher), 0.0)
            total[...] = total[...] * jnp.exp(top[...] - higher) + jnp.sum(weights, axis=1, keepdims=True)
            top[...] = higher

        @pl.when(j == blocks - 1)
        def _():
            whole = jnp.where(total[...] > 0, total[...], 1.0)  # a query that sees nothing is never asked for
            lse[0, 0] = (top[...] + jnp.log(whole)).reshape(group, tile, 1)

    def mass_kernel(at_ref, place_ref, *refs):
        *inputs, lse, mass = refs
        j, i = pl.program_id(2), pl.program_id(3)

        @pl.when(i == 0)
        def _():
            mass[...] = jnp.zeros(mass.shape, jnp.float32)

        @pl.when(met(i, j, at_ref, place_ref))
        def _():
            logits, seen = masked_logits(i, j, at_ref, place_ref, *inputs)
            weights = jnp.where(seen, jnp.exp(logits - lse[0, 0].reshape(rows, 1)), 0.0).reshape(group, tile, block)
            if reduce == "max":
                mass[0, 0] = jnp.maximum(mass[0, 0], jnp.max(weights, axis=1))
            else:
                mass[0, 0] += jnp.sum(weights, axis=1)

    def specs(order: str) -> list[pl.BlockSpec]:
        """Blocks of query positions, key positions, queries, keys, what codes have, the biases if there are any and
        log-sum-exp, and of mass, for a grid of (B, Hk, i, j) or (B, Hk, j, i).
        """

        def rows_of(heads: int, size: int) -> pl.BlockSpec:
            return spec((1, 1, heads, tile, size), lambda b, h, i, j: (b, h, 0, i, 0))

        read, scales = lies.specs(block, lambda b, h, i, j: (b, h, j) if order == "ij" else (b, h, i))

        def spec(shape, index):
            return pl.BlockSpec(shape, index if order == "ij" else lambda b, h, j, i: index(b, h, i, j))

        return [
            spec((1, tile, 1), lambda b, h, i, j: (b, i, 0)),
            spec((1, 1, 1, block), lambda b, h, i, j: (b, h, 0, j)),
            rows_of(*spread.shape[2::2]),
            read,
            *(rows_of(x.shape[2], 1) for x in asked),
            *scales,
            *[spec((1, 1, 1, block), lambda b, h, i, j: (b, h, 0, j))] * (bias is not None),
            spec((1, 1, group, tile, 1), lambda b, h, i, j: (b, h, 0, i, 0)),
            spec((1, 1, group, block), lambda b, h, i, j: (b, h, 0, j)),
        ]

    pairs, size = batch * heads * length * slots, queries.dtype.itemsize
    beside = 4 * (1 + (bias is not None))  # bytes of a key's position, and of its bias
    key_bytes = lies.nbytes + batch * kv_heads * slots * beside
    query_bytes = batch * heads * length * (size * dim + 4)
    call = functools.partial(
        pl.pallas_call,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=blocks_of.VMEM_BYTES,
        ),
        interpret=interpret,
    )
    arrays = (
        query_positions[..., None],
        key_positions[:, :, None],
        spread,
        lies.codes,
        *asked,
        *lies.scales,
        *([] if bias is None else [bias[:, :, None]]),
    )
    *inner, lse_block, _ = specs("ij")
    shape = (batch, kv_heads, group, length, 1)
    if lse is not None:
        found = jnp.where(lse == -jnp.inf, 0.0, lse).reshape(shape)  # it sees nothing: any number does
    else:
        found = call(
            lse_kernel,
            out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
            grid=(batch, kv_heads, tiles, blocks),
            in_specs=inner,
            out_specs=lse_block,
            scratch_shapes=[pltpu.VMEM((rows, 1), jnp.float32), pltpu.VMEM((rows, 1), jnp.float32)],
            cost_estimate=pl.CostEstimate(
                flops=2 * pairs * dim, transcendentals=pairs, bytes_accessed=query_bytes + tiles * key_bytes
            ),
            name="prefill_attend_lse",
        )(*arrays)
    if weights is not None:  # w exp(x - lse) = exp(x - (lse - log w))
        found = found - jnp.log(weights)[:, None, None, :, None]
    *inner, mass_block = specs("ji")
    mass = call(
        mass_kernel,
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, group, slots), jnp.float32),
        grid=(batch, kv_heads, blocks, tiles),
        in_specs=inner,
        out_specs=mass_block,
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * dim,
            transcendentals=pairs,
            bytes_accessed=key_bytes + blocks * query_bytes + 4 * batch * heads * slots,
        ),
        name="prefill_attend_mass",
    )(*arrays, found)
    mass = mass.reshape(batch, heads, slots)
    return averaged(mass, query_positions) if reduce == "mean" else mass
