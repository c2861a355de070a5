"""What waits for something else: XLA for CPUs runs what it can as soon as it can, and holds all that comes of it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def awaiting(tree: Any, found: jax.Array) -> Any:
    """The same arrays, which on a CPU XLA takes to depend on what was `found`, though nothing is more than infinity.

    So what is made of them is made behind it: the next tile's logits, or the numbers of the next layer's codes. An
    `optimization_barrier` is gone before XLA for CPUs orders a program. Elsewhere XLA orders by memory itself.
    """
    if not found.size:
        return tree

    def later(tree: Any, found: jax.Array) -> Any:
        never = found > jnp.inf
        return jax.tree.map(lambda leaf: jnp.where(never, jnp.zeros_like(leaf), leaf), tree)

    return lax.platform_dependent(tree, found.ravel()[0], cpu=later, default=lambda tree, _: tree)
