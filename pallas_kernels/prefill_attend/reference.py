"""prefill_attend in plain jnp: the meaning that every kernel must equal."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.codes import Codes, numbers
from pallas_kernels.masking import filled
from pallas_kernels.prefill_attend.tiles import tiles


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
) -> Float[Array, "B Hq T D"] | tuple[Float[Array, "B Hq T D"], Float[Array, "B Hq T"]]:
    """softmax(scale * q . k) v over the keys at or before each query's position; position -1 is an empty slot.

    `own_keys_last` says that the last T keys are the queries' own, in order, so that none need look further. `with_lse`
    gives the log-sum-exp of each query's logits too, for a merge with attention to other keys. `bias` is added to the
    logits of each key, after the soft cap. Keys and values that are codes count as the numbers that they stand for.
    """
    batch, heads, length, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    keys, values = numbers(keys), filled(numbers(values), key_positions)
    softmax = {"scale": scale, "window": window, "softcap": softcap, "own_keys_last": own_keys_last}
    softmax |= {} if bias is None else {"bias": bias}
    outs, lses = [], []
    for start, end, weights, lse in tiles(queries, keys, query_positions, key_positions, **softmax):
        far = weights.shape[-1]
        weights = weights.astype(values.dtype).reshape(batch, kv_heads, group * (end - start), far)
        out = jnp.einsum("bhqs,bhsd->bhqd", weights, values[:, :, :far], preferred_element_type=jnp.float32)
        outs.append(out.astype(queries.dtype).reshape(batch, kv_heads, group, end - start, dim))
        lses.append(lse)
    output = jnp.concatenate(outs, axis=3).reshape(batch, heads, length, dim)
    if not with_lse:
        return output
    return output, jnp.concatenate(lses, axis=3).reshape(batch, heads, length)
