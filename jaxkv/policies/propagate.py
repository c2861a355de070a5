"""propagate: which tokens of the prompt the deeper layers get to see at all."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cache import NEVER, highest, packed
from jaxkv.errors import BadValue
from jaxkv.policies.aggregate import Aggregate


@dataclasses.dataclass(frozen=True)
class Propagate:
    """After one layer, only `keep` of a block's tokens go on: those that its last `window` queries attend to most, in
    the mean over the layer's query heads, pooled over `kernel` neighbours ("avg"), and the window itself.

    `after` is the layer's number from 0, or a share of the layers between 0 and 1. Source: FastKV (arXiv 2502.01068),
    where the layer is the 16th of 32 and `keep` 0.2. Ours: the choice is made in each block of a long prompt, and as
    many as the budget always go on, for deeper layers could not fill it otherwise.
    """

    after: int | float = 0.5
    keep: float = 0.2
    window: int = 8
    kernel: int = 7

    def __post_init__(self):
        whole = self.after == int(self.after)
        if self.after < 0 or (not whole and self.after > 1) or not 0 < self.keep <= 1:
            raise BadValue(
                f"after={self.after}, keep={self.keep}: expected a layer's number or a share of the layers, and "
                "a share of the tokens above 0 and up to 1"
            )
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise BadValue(f"window={self.window}, kernel={self.kernel}: expected window >= 1 and an odd kernel")

    def layer(self, layers: int) -> int:
        """The number of the layer after which fewer tokens go on."""
        share = 0 < self.after < 1
        return min(round(self.after * layers) - 1 if share else int(self.after), layers - 1)

    def count(self, tokens: int, budget: int) -> int:
        """How many of so many tokens go on, at most: never fewer than the window or the budget."""
        share = int(np.ceil(np.float32(tokens) * np.float32(self.keep)))  # rounded as `choose` does
        return min(max(share, self.window, budget), tokens)

    def choose(
        self, mass: Float[Array, "B T"], positions: Int[Array, "B T"], limits: Int[Array, "B"], slots: int
    ) -> Int[Array, "B N"]:
        """The indices of the tokens that go on, in time order and padded with -1: of each row as many as it alone
        would send, whatever its padding (position -1)."""
        real = positions >= 0
        tokens = jnp.sum(real, axis=-1, keepdims=True, dtype=jnp.int32)
        share = jnp.ceil(tokens.astype(jnp.float32) * jnp.float32(self.keep)).astype(jnp.int32)
        many = jnp.minimum(jnp.maximum(share, jnp.maximum(self.window, limits[:, None])), tokens)
        window = (jnp.arange(positions.shape[1]) >= positions.shape[1] - self.window) & real
        line = Aggregate(pool="avg", kernel=self.kernel)
        pooled = line.along_text(mass[:, None], positions[:, None], window[:, None])[:, 0]
        worth = jnp.where(real, jnp.where(window, jnp.inf, pooled), NEVER)[:, None]
        return packed(highest(worth, many[:, 0]) & real[:, None], slots)[:, 0]
