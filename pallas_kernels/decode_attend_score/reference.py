"""decode_attend_score in plain jnp: the meaning that every kernel must equal."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.decode_attend_score.victim import Factor, Rule, aim
from pallas_kernels.masking import filled, masked_softmax, soft_cap, visible

GROUP = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max}


class Attended(NamedTuple):
    """What one decode step of one layer gives back."""

    output: Float[Array, "B Hq D"]
    lse: Float[Array, "B Hq"]
    mass: Float[Array, "B Hk C"]
    keys: Float[Array, "B Hk C D"]
    values: Float[Array, "B Hk C D"]
    positions: Int[Array, "B Hk C"]
    next_slot: Int[Array, "B Hk"]


def decode_attend_score(
    query: Float[Array, "B Hq D"],
    key: Float[Array, "B Hk D"],
    value: Float[Array, "B Hk D"],
    position: Int[Array, "B"],
    slot: Int[Array, "B Hk"],
    keys: Float[Array, "B Hk C D"],
    values: Float[Array, "B Hk C D"],
    positions: Int[Array, "B Hk C"],
    limits: Int[Array, "B"],
    recents: Int[Array, "B"],
    weight: Factor = 1.0,
    bias: Factor = 0.0,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    group: str = "sum",
    rule: Rule | None = None,
    rotate: Callable | None = None,
) -> Attended:
    """Write (key, value, position) into `slot`, then softmax(scale * q . k) over the filled slots.

    `mass` is each slot's softmax weight, reduced over the G query heads of its KV head by `group`
    ("sum", "mean" or "max"), float32. `next_slot` is the slot for the token after this one: an empty or expired slot
    while the row holds fewer than `limits [B]`, else the lowest weight * mass + bias under the `rule`, which spares the
    last `recents [B]` tokens; with no rule, the first empty or expired one. A row whose position is -1 changes
    nothing. `rotate(query, keys, positions)` turns query and keys at read time, for caches that hold keys before RoPE.
    """
    batch, kv_heads, _, dim = keys.shape
    heads = query.shape[1]
    keys, values, positions = written(keys, values, positions, key, value, position, slot)

    queries = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    queries, read = (queries, keys) if rotate is None else rotate(queries, keys, positions)
    logits = jnp.einsum("bhgd,bhcd->bhgc", queries, read, preferred_element_type=jnp.float32) * scale
    seen = visible(position[:, None, None], positions, window)
    weights, lse = masked_softmax(soft_cap(logits, softcap), seen)
    output = jnp.einsum(
        "bhgc,bhcd->bhgd", weights.astype(values.dtype), filled(values, positions), preferred_element_type=jnp.float32
    )
    mass = GROUP[group](weights, axis=2)
    return Attended(
        output=output.astype(query.dtype).reshape(batch, heads, dim),
        lse=lse.reshape(batch, heads),
        mass=mass,
        keys=keys,
        values=values,
        positions=positions,
        next_slot=aim(mass, positions, position, slot, limits, recents, weight, bias, rule=rule, window=window),
    )


def written(
    keys: Float[Array, "B Hk C D"],
    values: Float[Array, "B Hk C D"],
    positions: Int[Array, "B Hk C"],
    key: Float[Array, "B Hk D"],
    value: Float[Array, "B Hk D"],
    position: Int[Array, "B"],
    slot: Int[Array, "B Hk"],
) -> tuple[Float[Array, "B Hk C D"], Float[Array, "B Hk C D"], Int[Array, "B Hk C"]]:
    """Keys, values and positions with the token in its slot; a position of -1 or a slot of C writes nothing."""
    target = jnp.where(position[:, None] < 0, keys.shape[2], slot)  # out of range, so dropped
    at = (jnp.arange(keys.shape[0])[:, None], jnp.arange(keys.shape[1])[None, :], target)
    return (
        keys.at[at].set(key, mode="drop"),
        values.at[at].set(value, mode="drop"),
        positions.at[at].set(jnp.broadcast_to(position[:, None], slot.shape), mode="drop"),
    )
