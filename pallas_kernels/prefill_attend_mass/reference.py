"""prefill_attend_mass in plain jnp: the meaning that every kernel must equal."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.codes import Codes, numbers
from pallas_kernels.masking import averaged
from pallas_kernels.prefill_attend.tiles import tiles


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
) -> Float[Array, "B Hq S"]:
    """Each key's softmax weight, summed over the queries ("sum"), averaged ("mean") or their maximum ("max"), float32.

    Queries at position -1 are padding: they give nothing and the mean does not count them. `own_keys_last` says that
    the last T keys are the queries' own, in order, so that none need look further. `weights` (positive) multiply what
    each query gives, before the sum or the maximum. `bias` is added to the logits of each key, after the soft cap. Keys
    that are codes count as the numbers that they stand for. `lse`, the queries' log-sum-exps over these keys, change
    nothing: they spare the kernels for CPUs and TPUs the pass that finds them.
    """
    batch, heads, slots = queries.shape[0], queries.shape[1], keys.shape[2]
    keys = numbers(keys)
    combine = jnp.maximum if reduce == "max" else jnp.add
    softmax = {"scale": scale, "window": window, "softcap": softcap, "own_keys_last": own_keys_last}
    softmax |= {} if bias is None else {"bias": bias}
    total = jnp.zeros((batch, heads, slots), jnp.float32)
    for start, end, given, _ in tiles(queries, keys, query_positions, key_positions, **softmax):
        given = given if weights is None else given * weights[:, None, None, start:end, None]
        some = jnp.max(given, axis=3) if reduce == "max" else jnp.sum(given, axis=3)
        some = lax.optimization_barrier(some.reshape(batch, heads, -1))  # else XLA makes one operation of all tiles'
        # sums, at the end, and holds every tile until then
        total = combine(total, jnp.pad(some, ((0, 0), (0, 0), (0, slots - some.shape[-1]))))
    return averaged(total, query_positions) if reduce == "mean" else total
