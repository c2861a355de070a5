"""What the TPU kernels share: sizes of blocks, and values of empty slots set to zero inside a block."""

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128  # a vector register holds 8 sublanes of 128 lanes
SUBLANES = 8
VMEM_BYTES = 48 * 2**20  # of on-chip memory that a kernel may take


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def even_blocks(size: int, most: int, multiple: int = LANES) -> tuple[int, int]:
    """(blocks, block size): as few blocks as sizes up to `most` allow, of about equal size, a multiple of `multiple`."""
    blocks = -(-size // max(most, multiple))
    block = round_up(-(-size // blocks), multiple)
    return -(-size // block), block


def exact(dtype) -> lax.Precision | None:
    """The precision at which a product of this dtype loses nothing: the matrix unit rounds float32 to bfloat16 unless
    told otherwise.
    """
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def slots_along_lanes(slots: int, dim: int) -> bool:
    """Whether XLA lays out `[..., slots, dim]` with the slots along the lanes: where that pads less."""
    return round_up(slots, LANES) * round_up(dim, SUBLANES) < round_up(slots, SUBLANES) * round_up(dim, LANES)


def zero_empty(block: jax.Array, filled: jax.Array, columns: bool) -> jax.Array:
    """The values `[S, D]` (`columns`: `[D, S]`) of a block, 0 in slots where `filled [1, S]` (float32) is 0, whatever
    lies there.
    """
    if not columns:
        width = round_up(block.shape[1], LANES)
        filled = jnp.broadcast_to(filled, (width, filled.shape[1])).T[:, : block.shape[1]]
    return jnp.where(filled > 0, block.astype(jnp.float32), 0.0).astype(block.dtype)
