"""Balance: a centre and a factor for each channel of a row's KV head, chosen once.

What is coded is (x - centre) * factor, so that channels that stand out do not take the range of a slot's integers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Balance:
    """Factors and, unless all are 0, centres, and in which rows they have been chosen; 1 and 0 until then. They belong
    to the head, not to its slots, so gathers and overwrites need not know."""

    factor: Float[Array, "B Hk D"]
    chosen: Bool[Array, "B"]
    centre: Float[Array, "B Hk D"] | None = None

    def applied(self, x: Float[Array, "B Hk S D"]) -> Float[Array, "B Hk S D"]:
        """(x - centre) * factor, float32."""
        wide = x.astype(jnp.float32)
        return (wide if self.centre is None else wide - self.centre[:, :, None]) * self.factor[:, :, None]

    def undone(self, x: Float[Array, "B Hk S D"]) -> Float[Array, "B Hk S D"]:
        """x / factor + centre, float32."""
        wide = x.astype(jnp.float32) / self.factor[:, :, None]
        return wide if self.centre is None else wide + self.centre[:, :, None]

    def ask(self, query: Float[Array, "B Hq D"]) -> Float[Array, "B Hq D"]:
        """query / factor, whose products with what is coded are the query's with x, but for its `level`; float32."""
        return query.astype(jnp.float32) / of_queries(self.factor, query)

    def level(self, query: Float[Array, "B Hq D"]) -> Float[Array, "B Hq"] | None:
        """query . centre, what the query's products with all x have in common; None without centres."""
        return None if self.centre is None else level(query, self.centre)

    def read(self, output: Float[Array, "B Hq D"]) -> Float[Array, "B Hq D"]:
        """What attention makes of x, given what it makes of what is coded: its weights sum to 1; float32."""
        wide = output.astype(jnp.float32) / of_queries(self.factor, output)
        return wide if self.centre is None else wide + of_queries(self.centre, output)

    def choosing(
        self, factor: Float[Array, "B Hk D"], there: Bool[Array, "B"], centre: Float[Array, "B Hk D"] | None = None
    ) -> "Balance":
        """With these factors and centres in the rows that are `there` and have none so far; where a factor is no number
        above 0, 1."""
        new = there & ~self.chosen
        sound = jnp.where((factor > 0) & jnp.isfinite(factor), factor, 1.0)
        of_rows = lambda chosen, before: jnp.where(new[:, None, None], chosen, before)  # noqa: E731
        centre = None if self.centre is None else of_rows(centre, self.centre)
        return Balance(of_rows(sound, self.factor), self.chosen | new, centre)


def of_queries(x: Shaped[Array, "B Hk N"], query: Float[Array, "B Hq _"]) -> Shaped[Array, "B Hq N"]:
    """What is known of each KV head, for its query heads."""
    return jnp.repeat(x, query.shape[1] // x.shape[1], axis=1)


def level(query: Float[Array, "B Hq D"], centre: Float[Array, "B Hk D"]) -> Float[Array, "B Hq"]:
    """query . centre of its KV head, float32."""
    wide = (query.astype(jnp.float32), of_queries(centre.astype(jnp.float32), query))
    return jnp.einsum("bhd,bhd->bh", *wide, precision=lax.Precision.HIGHEST)


def empty(batch: int, heads: int, head_dim: int, centred: bool = False) -> Balance:
    """None chosen so far; with centres, or without."""
    shape = (batch, heads, head_dim)
    centre = jnp.zeros(shape, jnp.float32) if centred else None
    return Balance(jnp.ones(shape, jnp.float32), jnp.zeros(batch, bool), centre)


def middle(x: Float[Array, "B H S D"], there: Bool[Array, "B #H S"]) -> Float[Array, "B H D"]:
    """The middle of each channel's range over the slots or tokens that are there; 0 where none is."""
    wide, some = x.astype(jnp.float32), there[..., None]
    low = jnp.min(jnp.where(some, wide, jnp.inf), axis=2, initial=jnp.inf)
    high = jnp.max(jnp.where(some, wide, -jnp.inf), axis=2, initial=-jnp.inf)
    return jnp.where(low <= high, (low + high) / 2, 0.0)


def reach(
    x: Float[Array, "B H S D"], there: Bool[Array, "B #H S"], centre: Float[Array, "B H D"]
) -> Float[Array, "B H D"]:
    """max |x - centre| of each channel over the n slots or tokens that are there, and at least 2/n of the mean over the
    channels: a few tokens may lie together in a channel by chance, and those that come later do not."""
    far = largest(x.astype(jnp.float32) - centre[:, :, None], there)
    count = jnp.maximum(jnp.sum(there, axis=2), 1).astype(jnp.float32)
    return jnp.maximum(far, 2 / count[..., None] * jnp.mean(far, axis=-1, keepdims=True))


def largest(x: Float[Array, "B H S D"], there: Bool[Array, "B #H S"]) -> Float[Array, "B H D"]:
    """max |x| of each channel over the slots or tokens that are there; 0 where none is."""
    size: Any = jnp.where(there[..., None], jnp.abs(x.astype(jnp.float32)), 0.0)
    return jnp.max(size, axis=2, initial=0.0)
