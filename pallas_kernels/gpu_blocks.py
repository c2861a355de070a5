"""What the GPU kernels share: what they take, how operands lie in shared memory, products and masks of a block.

Keys are the rows of a block's scores [S, N] and queries the columns, so that a product with the values, [D, S] [S, N],
needs no more than the weights written back to shared memory.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.masking import MASKED

KEYS = plgpu.Layout.WGMMA.reduce(1)  # how a number per key (row of scores) lies in registers
QUERIES = plgpu.Layout.WGMMA.reduce(0)  # and a number per query (column)
SQUARE = plgpu.Layout.WGMMA


def check(dim: int, dtype) -> None:
    """Raises `NotImplementedError` for GPUs, head dims and dtypes that the kernels do not take."""
    device = jax.devices()[0]
    if device.platform == "gpu" and str(device.compute_capability) != "9.0":
        raise NotImplementedError(f"{device.device_kind}: the kernel is for Hopper GPUs (compute capability 9.0)")
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"{dtype} cache: the tensor cores would round it; bfloat16 or float16")
    if dim % 16 or dim > 256:
        raise NotImplementedError(f"head dim {dim}: a multiple of 16, for the tensor cores, up to 256")


def tile_width(dim: int) -> int:
    """64, 32 or 16, whichever divides D: the tensor cores' operands lie in tiles of 8 rows by so many columns."""
    return next(width for width in (64, 32, 16) if dim % width == 0)


def operand(width: int, dtype):
    """`operand(width, dtype)(shape)`: shared memory for an operand of the tensor cores."""
    tiles = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)  # pyright: ignore[reportAbstractUsage]
    return lambda *shape: plgpu.SMEM(shape, dtype, transforms=tiles)


def round_up(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple


def product(a, b):
    """a @ b on the tensor cores, both in shared memory, in float32."""

    def multiply(total):
        plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def per_key(x, shape):
    """x [S] over the scores' columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def per_query(x, shape):
    """x [N] over the scores' rows."""
    return lax.broadcast_in_dim(x, shape, [1])


def scores_of(keys, queries, key_positions, query_positions, scale, window, softcap):
    """Scores [S, N] of a block of keys, `masking.MASKED` where a query does not see a key, and where it does.

    Keys [S, D] and queries [N, D] are operands in shared memory, positions [S] and [N] in registers.
    """
    scores = product(keys, queries.transpose((1, 0))) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    at, now = per_key(key_positions, scores.shape), per_query(query_positions, scores.shape)
    seen = (at >= 0) & (at <= now)
    if window is not None:
        seen = seen & (now - at < window)
    return jnp.where(seen, scores, MASKED), seen


def clear_empty(values, key_positions):
    """Zero the rows of values [S, D], in shared memory, whose slots are empty: 0 * NaN is NaN."""

    @pl.when(jnp.min(key_positions) < 0)
    def _clear():
        block = plgpu.layout_cast(values[...], SQUARE)
        values[...] = jnp.where(per_key(key_positions >= 0, block.shape), block, jnp.zeros((), block.dtype))
