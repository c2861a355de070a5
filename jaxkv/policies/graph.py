"""graph: what the chosen entries already say counts less in the others."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkv.errors import BadValue
from jaxkv.policies.by_keys import unit
from jaxkv.policies.combine import Combined
from jaxkv.policies.order import best_first, in_chunks
from jaxkv.policies.score import Score, ScoreInputs, Stats


@dataclasses.dataclass(frozen=True)
class Propagated(Combined):
    """Entries are nodes, the cosine of their keys the edges; the best tell their neighbours that they are there.

    In each of `rounds` the best `share` of the budget are sources; every other score is multiplied by 1 - strength *
    (largest positive cosine with a source). Source: GraphKV (arXiv 2509.00388), from its description; the numbers and
    the maximum over sources are ours.
    """

    of: Score
    share: float = 0.5
    strength: float = 0.5
    rounds: int = 1
    kind: ClassVar[str] = "propagated"
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if not (0 < self.share <= 1 and 0 <= self.strength <= 1 and self.rounds >= 1):
            raise BadValue(
                f"share={self.share}, strength={self.strength}, rounds={self.rounds}: expected fractions in (0, 1] and "
                "[0, 1], and at least 1 round"
            )
        if any(leaf.signed for leaf in self.of.leaves()):
            raise BadValue(f"score {self.of.kind!r} can be negative, and a decay would raise it")
        self._join(self.of)

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.protected is not None
        score, keys = self.of.score(stats, inputs), unit(inputs.k)
        count = jnp.maximum(inputs.goal.astype(jnp.float32) * self.share, 1.0).astype(jnp.int32)
        rows = jnp.moveaxis(in_chunks(keys, 256), 2, 0)  # at a time: there is never an S x S array
        for _ in range(self.rounds):
            source = inputs.live & (best_first(jnp.where(inputs.protected, jnp.inf, score), inputs.at) < count)

            def nearest(_, mine, source=source):
                cos = jnp.einsum("bhrd,bhsd->bhrs", mine, keys)
                return None, jnp.max(jnp.where(source[:, :, None], cos, 0.0), axis=-1)

            _, near = lax.scan(nearest, None, rows)
            near = jnp.moveaxis(near, 0, 2).reshape(*score.shape[:2], -1)[..., : score.shape[-1]]
            score = jnp.where(source, score, score * (1 - self.strength * jnp.clip(near, 0.0, 1.0)))
        return score
