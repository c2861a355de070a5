"""Balance: a factor for each channel of a row's KV head, chosen once, by which numbers are multiplied before they are
coded and divided after: so that channels that stand out do not take the range of a slot's integers for themselves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Balance:
    """The factors, and in which rows they have been chosen; 1 until then. They belong to the head, not to its slots, so
    gathers and overwrites need not know."""

    factor: Float[Array, "B Hk D"]
    chosen: Bool[Array, "B"]

    def applied(self, x: Float[Array, "B Hk S D"]) -> Float[Array, "B Hk S D"]:
        """x * factor, float32."""
        return x.astype(jnp.float32) * self.factor[:, :, None]

    def undone(self, x: Float[Array, "B Hk S D"]) -> Float[Array, "B Hk S D"]:
        """x / factor, float32."""
        return x.astype(jnp.float32) / self.factor[:, :, None]

    def choosing(self, factor: Float[Array, "B Hk D"], there: Bool[Array, "B"]) -> "Balance":
        """With these factors in the rows that are `there` and have none so far; where one is no number above 0, 1."""
        new = there & ~self.chosen
        sound = jnp.where((factor > 0) & jnp.isfinite(factor), factor, 1.0)
        return Balance(jnp.where(new[:, None, None], sound, self.factor), self.chosen | new)


def empty(batch: int, heads: int, head_dim: int) -> Balance:
    """None chosen so far."""
    return Balance(jnp.ones((batch, heads, head_dim), jnp.float32), jnp.zeros(batch, bool))


def largest(x: Float[Array, "B H S D"], there: Bool[Array, "B #H S"]) -> Float[Array, "B H D"]:
    """max |x| of each channel over the slots or tokens that are there; 0 where none is."""
    size: Any = jnp.where(there[..., None], jnp.abs(x.astype(jnp.float32)), 0.0)
    return jnp.max(size, axis=2, initial=0.0)
