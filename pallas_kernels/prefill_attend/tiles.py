"""The softmax weights of a block of queries, a tile of queries at a time: what both prefill references are made of.

Both write the same expressions, so that XLA computes them once where one program asks for attention and mass. A tile
begins when the one before it is done: XLA would hold the weights of all at once.
"""

from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.masking import biased, masked_softmax, soft_cap, visible
from pallas_kernels.order import awaiting

TILE = 128  # queries at a time, at least: bounds the [queries, keys] array and skips keys that come later
TILES = 8  # at most: each is unrolled


def tiles(
    queries: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    own_keys_last: bool,
    bias: Float[Array, "B Hk S"] | None = None,
) -> Iterator[tuple[int, int, Float[Array, "B Hk G N F"], Float[Array, "B Hk G N"]]]:
    """First and last of some queries, their weights on the first F keys (those behind are seen by none), and their
    log-sum-exps.
    """
    batch, heads, length, dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    group = heads // kv_heads
    grouped = queries.reshape(batch, kv_heads, group, length, dim)
    size, before = max(TILE, -(-length // TILES)), None
    for start in range(0, length, size):
        end = min(start + size, length)
        far = slots - length + end if own_keys_last else slots
        first = start if before is None else awaiting(jnp.int32(start), before)
        q = lax.dynamic_slice_in_dim(grouped, first, end - start, axis=3)
        q = q.reshape(batch, kv_heads, group * (end - start), dim)
        logits = jnp.einsum("bhqd,bhsd->bhqs", q, keys[:, :, :far], preferred_element_type=jnp.float32) * scale
        seen = visible(query_positions[:, None, start:end], key_positions[:, :, :far], window)[:, :, None]
        logits = soft_cap(logits, softcap).reshape(batch, kv_heads, group, end - start, far)
        logits = biased(logits, None if bias is None else bias[:, :, None, None, :far])
        weights, before = masked_softmax(logits, seen)
        yield start, end, weights, before
