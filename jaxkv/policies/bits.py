"""A score from how precisely an entry must be held."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.errors import BadValue
from jaxkv.policies.needs import MASS
from jaxkv.policies.score import Score, ScoreInputs, Stats
from jaxkv.store.outliers import spread


@dataclasses.dataclass(frozen=True)
class NeededBits(Score):
    """score = b_k + b_v, the bits that an entry's key and value need: b = log2(r / (2 e) + 1), not rounded.

    r is max - min over the channels without the `outliers` share of them, and e the largest error allowed: of a key
    sqrt(12 / q ln(S^3 / (S - 1) t^2 + 1)), q being the queries' `norm`; of a value sqrt(12 / S) t / a, a being the
    attention on the entry. S are the tokens seen, t = `error`. Source: QAQ (arXiv 2403.04643), with the constants of
    its release, which rounds up and holds key and value in bits of their own.
    """

    error: float = 3.0
    norm: float = 300.0
    outliers: float = 0.01
    kind: ClassVar[str] = "needed-bits"
    needs: ClassVar[frozenset[str]] = frozenset({MASS})
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if not (self.error > 0 and self.norm > 0 and 0 <= self.outliers < 1):
            raise BadValue(
                f"error={self.error}, norm={self.norm}, outliers={self.outliers}: expected an error and a norm of the "
                "queries above 0, and the share of channels that stay exact, from 0 to below 1"
            )

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.mass is not None
        seen = inputs.next.astype(jnp.float32)[:, None, None]
        many = jnp.log(seen**3 / jnp.maximum(seen - 1, 1.0) * self.error**2 + 1)
        of_key = jnp.sqrt(12 / self.norm * many)
        per_mass = jnp.sqrt(12 / seen) * self.error
        steps = (
            spread(inputs.k, self.outliers) / (2 * of_key),
            spread(inputs.v, self.outliers) * inputs.mass / (2 * per_mass),
        )
        return jnp.log2(steps[0] + 1) + jnp.log2(steps[1] + 1)
