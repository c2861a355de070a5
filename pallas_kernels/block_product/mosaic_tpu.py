"""block_product for TPU: codes become numbers on the chip, tile by tile; XLA would write the matrix out in floats.

For blocks with a scale for some of the inputs. Those with one for each output need no kernel: XLA converts the codes
inside its product.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels import tpu_blocks as blocks_of
from pallas_kernels.block_product.reference import GROUP

ROWS = 256  # rows at a time
OUTPUTS = 512  # outputs at a time
CODES = 2048  # rows of codes at a time
MULTIPLE = 16 * GROUP  # of them: so that their scales fill tiles of 16 rows


def block_product(
    rows: Float[Array, "N I"],
    codes: Shaped[Array, "..."],
    scale: Int[Array, "..."],
    offset: Int[Array, "..."] | None,
    *,
    out_dtype=None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "N O"]:
    """`reference.block_product`; codes are read once for every 256 rows. What an offset adds is that of the sum of its
    inputs, so `codes * scale` alone is rounded to the dtype of the rows.

    Raises `NotImplementedError` for panels, for a scale that more than 32 inputs share, and for rows other than
    bfloat16 and float32.
    """
    blocks_of.check_floats(rows)
    if codes.ndim != 2 or rows.shape[1] // scale.shape[0] > GROUP:
        raise NotImplementedError(f"codes {codes.shape}, scales {scale.shape}: plain, with scales for some inputs")
    count, dtype = rows.shape[0], jnp.dtype(out_dtype or rows.dtype)
    height, outputs = codes.shape
    each = height // scale.shape[0]  # rows of codes that share a scale
    parts = _parts(rows, packed=codes.dtype == jnp.uint8)
    whole = [size for size in range(MULTIPLE, CODES + 1, MULTIPLE) if height % size == 0]
    tall = height if height <= CODES else max(whole, default=CODES)
    steps, some, wide = -(-height // tall), min(count, ROWS), min(outputs, OUTPUTS)
    sums = _sums(rows, scale.shape[0], tall // each, steps)

    def kernel(row_ref, sum_ref, code_ref, scale_ref, *refs):
        (offset_ref, output, total) = refs if offset is not None else (None, *refs)
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            total[...] = jnp.zeros(total.shape, jnp.float32)

        code = code_ref[...].astype(jnp.int32)
        expanded = jnp.broadcast_to(blocks_of.halves(scale_ref[...])[:, None], (tall // each, each, wide)).reshape(
            tall, wide
        )
        left = height - step * tall  # rows of codes that there are
        for number in range(parts.shape[0]):
            here = code if parts.shape[0] == 1 else code & 15 if number == 0 else code >> 4
            value, row = here.astype(jnp.float32) * expanded, row_ref[number]
            if height % tall:
                value = jnp.where(lax.broadcasted_iota(jnp.int32, value.shape, 0) < left, value, 0.0)
                there = lax.broadcasted_iota(jnp.int32, row.shape, 1) < left  # in float32: bfloat16 of few rows fails
                row = jnp.where(there, row.astype(jnp.float32), 0.0).astype(row.dtype)
            total[...] += blocks_of.product(row, value.astype(row.dtype), 0)
        if offset_ref is not None:
            more = blocks_of.halves(offset_ref[...])
            if height % tall:
                more = jnp.where(lax.broadcasted_iota(jnp.int32, more.shape, 0) * each < left, more, 0.0)
            total[...] += blocks_of.product(sum_ref[0], more, 0)

        @pl.when(step == steps - 1)
        def _():
            output[...] = total[...].astype(output.dtype)

    scales = pl.BlockSpec((tall // each, wide), lambda n, o, i: (i, o))
    given = [x for x in (scale, offset) if x is not None]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((count, outputs), dtype),
        grid=(-(-count // some), -(-outputs // wide), steps),
        in_specs=[
            pl.BlockSpec((parts.shape[0], some, tall), lambda n, o, i: (0, n, i)),
            pl.BlockSpec((1, some, tall // each), lambda n, o, i: (i, n, 0)),
            pl.BlockSpec((tall, wide), lambda n, o, i: (i, o)),
            *[scales] * len(given),
        ],
        out_specs=pl.BlockSpec((some, wide), lambda n, o, i: (n, o)),
        scratch_shapes=[pltpu.VMEM((some, wide), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=blocks_of.VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * count * rows.shape[1] * outputs,
            transcendentals=0,
            bytes_accessed=-(-count // some) * (codes.nbytes + sum(x.nbytes for x in given))
            + -(-outputs // wide) * (parts.nbytes + sums.nbytes)
            + count * outputs * dtype.itemsize,
        ),
        name="block_product",
        interpret=interpret,
    )(parts, sums, codes, *given)


def _parts(rows: Float[Array, "N I"], packed: bool) -> Float[Array, "P N H"]:
    """The inputs that a row of codes stands for: one, or in 4 bits one in the low bits and one in the high ones."""
    if not packed:
        return rows[None]
    pairs = rows.reshape(rows.shape[0], -1, 2, GROUP // 2)
    return jnp.moveaxis(pairs, 2, 0).reshape(2, rows.shape[0], -1)


def _sums(rows: Float[Array, "N I"], groups: int, each: int, steps: int) -> Float[Array, "K N S"]:
    """The sums of the inputs that share a scale, `each` of them for every step."""
    sums = rows.astype(jnp.float32).reshape(rows.shape[0], groups, -1).sum(-1)
    filled = jnp.pad(sums, ((0, 0), (0, steps * each - groups)))
    return jnp.swapaxes(filled.reshape(rows.shape[0], steps, each), 0, 1)
