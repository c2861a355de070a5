"""Reading and writing a few slots of every head, so that devices which divide rows and heads take their own."""

import jax
from jaxtyping import Array, Int


def taken(held: Array, slots: Int[Array, "B Hk n"]) -> Array:
    """The entries in these slots of `held [B, Hk, C, ...]`; out of range: the last one's."""
    return jax.vmap(jax.vmap(lambda held, slots: held[slots]))(held, slots)


def put(held: Array, slots: Int[Array, "B Hk n"], new: Array) -> Array:
    """`held [B, Hk, C, ...]` with the new entries in these slots; out of range: dropped."""
    return jax.vmap(jax.vmap(lambda held, slots, new: held.at[slots].set(new, mode="drop")))(held, slots, new)
