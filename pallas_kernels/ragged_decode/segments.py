"""Ragged segments: head h owns the slots `offsets[h]` to `offsets[h + 1]` of a pool."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


def segments(offsets: Int[Array, "B Hk_1"], slots: int) -> Int[Array, "B P"]:
    """The head that each of the slots belongs to; Hk for slots before the first border or behind the last."""
    place = jnp.arange(slots)
    owner = jnp.sum(place >= offsets[:, 1:, None], axis=1, dtype=jnp.int32)
    return jnp.where(place < offsets[:, :1], offsets.shape[1] - 1, owner)


def mine(owner: Int[Array, "B P"], heads: int) -> Bool[Array, "B Hk P"]:
    """True where a slot belongs to the head."""
    return owner[:, None] == jnp.arange(heads, dtype=owner.dtype)[:, None]


def per_head(mask: Bool[Array, "B P"], owner: Int[Array, "B P"], heads: int) -> Int[Array, "B Hk"]:
    """How many of each head's slots are True."""
    return jnp.sum(mask[:, None] & mine(owner, heads), axis=-1, dtype=jnp.int32)


def per_slot(x: Shaped[Array, "B Hk"], owner: Int[Array, "B P"]) -> Shaped[Array, "B P"]:
    """Each slot's head's `x` (the last head's for nobody's slots)."""
    return jnp.take_along_axis(x, jnp.minimum(owner, x.shape[-1] - 1), axis=-1)


def over_slots(x: Shaped[Array, "B Hk P"], owner: Int[Array, "B P"]) -> Shaped[Array, "B P"]:
    """Of every slot what its own head says of it; 0 for nobody's slots. A sum, so that nothing need be gathered."""
    return jnp.sum(jnp.where(mine(owner, x.shape[1]), x, jnp.zeros((), x.dtype)), axis=1)
