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

ROWS = 256  # keys whose cosines with all others are computed together


@dataclasses.dataclass(frozen=True)
class Propagated(Combined):
    """score = of * product over the sources i that have entry j as a neighbour of (1 - e_ij), `rounds` times.

    e_ij = the cosine of two keys. The sources are the best by `of`, a `share` of the budget; a source's neighbours are
    the `neighbours` entries most like it, other sources among them. What is protected is no node of this graph.
    Source: GraphKV (arXiv 2509.00388, sections 4.2 and 4.3), with its share of 0.3. Ours: the number of neighbours,
    which the paper adapts, and of rounds, of which it says that the first does most; negative cosines count as 0.
    """

    of: Score
    share: float = 0.3
    neighbours: int = 4
    rounds: int = 1
    kind: ClassVar[str] = "propagated"
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if not (0 < self.share <= 1 and self.neighbours >= 1 and self.rounds >= 1):
            raise BadValue(
                f"share={self.share}, neighbours={self.neighbours}, rounds={self.rounds}: expected a fraction in "
                "(0, 1], and at least 1 neighbour and 1 round"
            )
        if self.of.negative:
            raise BadValue(f"score {self.of.kind!r} can be negative, and a decay would raise it")
        self._join(self.of)

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.protected is not None
        score, keys, slots = self.of.each(stats, inputs), unit(inputs.k), inputs.at.shape[-1]
        nodes = inputs.live & ~inputs.protected
        count = jnp.maximum(inputs.goal.astype(jnp.float32) * self.share, 1.0).astype(jnp.int32)
        source = nodes & (best_first(score, jnp.where(nodes, inputs.at, -1)) < count)
        number = jnp.arange(slots).reshape(1, 1, slots, 1)
        rows = [
            jnp.moveaxis(in_chunks(x, ROWS), 2, 0) for x in (keys, source[..., None], number)
        ]  # never S x S at once

        def some(left, given):
            mine, sends, own = given
            cos = jnp.einsum("bhrd,bhsd->bhrs", mine, keys)
            cos = jnp.where(nodes[:, :, None] & (jnp.arange(slots) != own), jnp.clip(cos, 0.0, 1.0), -1.0)
            least = lax.top_k(cos, min(self.neighbours, slots))[0][..., -1:]
            reached = sends & (cos >= least) & (cos > 0)
            return left * jnp.prod(jnp.where(reached, 1 - cos, 1.0), axis=2), None

        left, _ = lax.scan(some, jnp.ones_like(score), tuple(rows))
        return score * left**self.rounds
