"""recurrence: when an entry will be attended to again."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.errors import BadValue
from jaxkv.policies.needs import MASS
from jaxkv.policies.score import Entering, Score, ScoreInputs, Stats


@dataclasses.dataclass(frozen=True)
class Recurrence(Score):
    """Keep what is due to be attended to again: 2 sigmoid(-(t - TS) / max(MRI, 1)) + 2 sigmoid(1 - max(MRI, 1)).

    TS is when the entry last got more than `threshold` of the attention (at first, when it came); MRI the longest time
    between two such moments (0: there were none, then the second term is left out). The published second term rises
    with MRI against its stated purpose, so it falls here; threshold and division guard are ours.
    Source: LazyEviction (arXiv 2506.15969).
    """

    threshold: float = 1e-3
    kind: ClassVar[str] = "recurrence"
    stats: ClassVar[tuple[str, ...]] = ("last_seen", "longest_gap")
    needs: ClassVar[frozenset[str]] = frozenset({MASS})
    remembers: ClassVar[bool] = True
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 <= self.threshold < 1:
            raise BadValue(f"threshold={self.threshold}: expected a share of the attention, in [0, 1)")

    def enter(self, new: Entering) -> Stats:
        assert new.positions is not None
        came = jnp.broadcast_to(new.positions[:, None], new.keys.shape[:-1]).astype(jnp.float32)
        return {"last_seen": came, "longest_gap": jnp.zeros(came.shape, jnp.float32)}

    def observe(self, stats: Stats, mass: Float[Array, "B Hk S"] | None, now: Int[Array, "B"] | None) -> Stats:
        if mass is None:
            return {}
        assert now is not None
        hit, when = mass > self.threshold, (now[:, None, None] - 1).astype(jnp.float32)
        gap = jnp.maximum(stats["longest_gap"], when - stats["last_seen"])
        return {
            "last_seen": jnp.where(hit, when, stats["last_seen"]),
            "longest_gap": jnp.where(hit, gap, stats["longest_gap"]),
        }

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        stats = {**stats, **self.observe(stats, inputs.mass, inputs.next)}
        gap = jnp.maximum(stats["longest_gap"], 1.0)
        idle = (inputs.next[:, None, None] - 1).astype(jnp.float32) - stats["last_seen"]
        again = jnp.where(stats["longest_gap"] > 0, 2 * jax.nn.sigmoid(1 - gap), 0.0)
        return 2 * jax.nn.sigmoid(-idle / gap) + again
