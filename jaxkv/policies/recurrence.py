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
    """Keep what is due to be attended to again: 2 sigmoid(-1 - (t - TS) / (MRI + 1e-5)) + 2 sigmoid(1 - MRI).

    TS is the step at which the entry last got at least `threshold` of the attention: at first the one before it came,
    of a prompt's tokens the prompt's end. MRI is the longest time between two such steps; while it is 0 the second term
    is left out. Source: LazyEviction (arXiv 2506.15969), its release's `update_kv_in_decoding` and `record_recurrence`.
    """

    threshold: float = 5e-4
    kind: ClassVar[str] = "recurrence"
    stats: ClassVar[tuple[str, ...]] = ("last_seen", "longest_gap")  # TS + 1, 0 until a step after the prompt; MRI
    needs: ClassVar[frozenset[str]] = frozenset({MASS})
    remembers: ClassVar[bool] = True
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 <= self.threshold < 1:
            raise BadValue(f"threshold={self.threshold}: expected a share of the attention, in [0, 1)")

    def enter(self, new: Entering) -> Stats:
        assert new.positions is not None
        before = jnp.zeros_like(new.positions) if new.prompt else new.positions
        before = jnp.broadcast_to(before[:, None], new.keys.shape[:-1]).astype(jnp.float32)
        return {"last_seen": before, "longest_gap": jnp.zeros(before.shape, jnp.float32)}

    def observe(self, stats: Stats, mass: Float[Array, "B Hk S"] | None, now: Int[Array, "B"] | None) -> Stats:
        if mass is None:
            return {}
        assert now is not None
        last, longest, at = stats["last_seen"], stats["longest_gap"], now[:, None, None].astype(jnp.float32)
        steps = jnp.any(last > 0, axis=(1, 2), keepdims=True)  # what a prompt's queries say counts for nothing
        since = jnp.where(last > 0, last, at - 1)
        hit = mass >= self.threshold
        gap = jnp.maximum(longest, jnp.where(hit, at - since, 0.0))
        return {
            "last_seen": jnp.where(steps, jnp.where(hit, at, since), last),
            "longest_gap": jnp.where(steps, gap, longest),
        }

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        stats = {**stats, **self.observe(stats, inputs.mass, inputs.next)}
        gap, idle = stats["longest_gap"], inputs.next[:, None, None].astype(jnp.float32) - stats["last_seen"]
        again = jnp.where(gap > 0, 2 * jax.nn.sigmoid(1 - gap), 0.0)
        return 2 * jax.nn.sigmoid(-1 - idle / (gap + 1e-5)) + again
