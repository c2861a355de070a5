"""decode_attend_score in plain jnp: the meaning that every kernel must equal."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import Held, Judge, Token
from pallas_kernels.codes import coded, numbers, put
from pallas_kernels.decode_attend_score.victim import aim
from pallas_kernels.masking import biased, filled, masked_softmax, soft_cap, visible

GROUP = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max}  # and "each": as it is


class Attended(NamedTuple):
    """What one decode step of one layer gives back; no mass where nobody asked for it."""

    output: Float[Array, "B Hq D"]
    lse: Float[Array, "B Hq"]
    mass: Float[Array, "B Hk *G C"] | None
    keys: Any  # Float[Array, "B Hk C D"], Codes or ByChannel
    values: Any
    positions: Int[Array, "B Hk C"]
    next_slot: Int[Array, "B Hk"]


def decode_attend_score(
    token: Token,
    held: Held,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rotate: Callable | None = None,
    with_mass: bool = True,
) -> Attended:
    """Write the token into `slot`, then softmax(scale * q . k) over the filled slots.

    Keys and values that are codes count as the numbers that they stand for, the token's own as they are; its codes are
    what is written, and nothing where channels share scales (`ByChannel`).
    What `held.bias` has is added to the logits. A slot of C or more is another device's: nothing is written. `mass` is
    each slot's softmax weight, reduced over the G query heads of its KV head by the judge's `group`, float32
    (`[B, Hk, G, C]` where that is "each"); None without `with_mass`, where the judge weighs none.
    `next_slot` is the slot for the token after this one: an empty or expired slot while the row holds fewer than its
    limit, else the lowest weight * mass + bias under the rule; with no rule, the first empty or expired one. A row
    whose position is -1 changes nothing. `rotate(query, keys, positions)` turns query and keys at read time, for keys
    that do not lie as they are multiplied.
    """
    query, position = token.query, token.position
    keys, values, positions, bias = attended = exact(token, held, slot)
    lies = written(token, held, slot) if coded(held.keys, held.values) else attended
    batch, kv_heads, _, dim = keys.shape
    heads = query.shape[1]

    queries = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    queries, read = (queries, keys) if rotate is None else rotate(queries, keys, positions)
    logits = jnp.einsum("bhgd,bhcd->bhgc", queries, read, preferred_element_type=jnp.float32) * scale
    seen = visible(position[:, None, None], positions, window)
    bias = None if bias is None else bias[:, :, None]
    weights, lse = masked_softmax(biased(soft_cap(logits, softcap), bias), seen)
    output = jnp.einsum(
        "bhgc,bhcd->bhgd", weights.astype(values.dtype), filled(values, positions), preferred_element_type=jnp.float32
    )
    mass = (weights if judge.group == "each" else GROUP[judge.group](weights, axis=2)) if with_mass else None
    return Attended(
        output=output.astype(query.dtype).reshape(batch, heads, -1),
        lse=lse.reshape(batch, heads),
        mass=mass,
        keys=lies.keys,
        values=lies.values,
        positions=positions,
        next_slot=aim(mass, positions, position, slot, judge, window=window),
    )


def written(token: Token, held: Held, slot: Int[Array, "B Hk"]) -> Held:
    """The slots with the token in its own; a position of -1 or a slot of C or more writes nothing."""
    at = _at(held.positions, token.position, slot)
    keys, values = (put(old, at, new) for old, new in zip((held.keys, held.values), token.entry, strict=True))
    return Held(keys, values, placed(held.positions, token.position, slot), held.bias)


def exact(token: Token, held: Held, slot: Int[Array, "B Hk"]) -> Held:
    """What is attended to: the slots as numbers, the token's own as exact as they come."""
    plain = held._replace(keys=numbers(held.keys), values=numbers(held.values))
    return written(token._replace(key_code=None, value_code=None), plain, slot)


def placed(
    positions: Int[Array, "B Hk C"], position: Int[Array, "B"], slot: Int[Array, "B Hk"]
) -> Int[Array, "B Hk C"]:
    """The positions with the token's in its slots."""
    at = _at(positions, position, slot)
    return positions.at[at].set(jnp.broadcast_to(position[:, None], slot.shape), mode="drop")


def _at(positions: Int[Array, "B Hk C"], position: Int[Array, "B"], slot: Int[Array, "B Hk"]) -> tuple:
    """Where the token is written; out of range, so that it is dropped, for a position of -1."""
    batch, kv_heads, slots = positions.shape
    return jnp.arange(batch)[:, None], jnp.arange(kv_heads)[None, :], jnp.where(position[:, None] < 0, slots, slot)
