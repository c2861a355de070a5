"""cover: entries whose keys stand for all the others, and a sample of the values by their size."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.errors import BadValue
from jaxkv.policies.order import BIG
from jaxkv.policies.score import Entering, Score, ScoreInputs, Stats, drawn

LATE = 2**31 - 1  # after every position


@dataclasses.dataclass(frozen=True)
class Cover(Score):
    """A `share` of the slots that nothing protects holds cluster centres of the keys, the rest a sample of the values.

    Centres by greedy k-center: the oldest entry, then again and again the entry whose key is farthest (L2) from the
    nearest centre so far. The sample is drawn without replacement with odds in proportion to ||v||_2^2: an entry's
    score is log(u) / ||v||^2 (Efraimidis and Spirakis 2006), u in (0, 1) by its position, head and `seed`. It is fixed
    as a token enters, so that a cut of what an earlier cut left goes on with the same sample of the whole text.
    Source: SubGen (arXiv 2402.06082). Ours: that there are as many centres as slots and not as a radius asks for, and
    the shares. Not here: the paper's estimate weighs each sampled value by its odds and each cluster by its size; what
    is kept here goes through plain attention, and a cluster is its centre alone.
    """

    share: float = 0.5
    seed: int = 0
    kind: ClassVar[str] = "cover"
    signed: ClassVar[bool] = True
    stats: ClassVar[tuple[str, ...]] = ("sampled",)
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise BadValue(f"share={self.share}: expected a fraction of the slots")

    def enter(self, new: Entering) -> Stats:
        assert new.positions is not None
        at = jnp.broadcast_to(new.positions[:, None], new.keys.shape[:-1])
        u = jnp.maximum(drawn(at, self.seed), 2.0**-25)  # the logarithm of 0 would be no number
        size = jnp.sum(jnp.square(new.values.astype(jnp.float32)), axis=-1)
        return {"sampled": jnp.log(u) / jnp.maximum(size, 1e-30)}

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.protected is not None
        kept = jnp.sum(inputs.live & inputs.protected, axis=-1, dtype=jnp.int32)
        room = jnp.maximum(inputs.goal[..., 0] - kept, 0).astype(jnp.float32)
        count = jnp.floor(room * jnp.float32(self.share)).astype(jnp.int32)
        centres = _centres(inputs, inputs.live & ~inputs.protected, count)
        return jnp.where(centres, BIG, jnp.where(inputs.live, stats["sampled"], -BIG))


def _centres(inputs: ScoreInputs, free: Bool[Array, "B Hk S"], count: Int[Array, "B Hk"]) -> Bool[Array, "B Hk S"]:
    """True for the `count` centres of each head, among its `free` entries."""
    keys = inputs.k

    def one(number, carry):
        chosen, gap = carry
        farthest = jnp.max(jnp.where(free & ~chosen, gap, -1.0), axis=-1, keepdims=True)
        tied = jnp.where(free & ~chosen & (gap == farthest), inputs.at, LATE)
        at = jnp.argmin(tied, axis=-1)[..., None]  # of equals the oldest
        key = jnp.take_along_axis(keys, at[..., None], axis=2)
        new = (jnp.arange(keys.shape[2]) == at) & (farthest >= 0) & (number < count)[..., None]
        return chosen | new, jnp.minimum(gap, jnp.sum(jnp.square(keys - key), axis=-1))

    start = jnp.zeros(free.shape, bool), jnp.full(free.shape, BIG)
    return lax.fori_loop(0, jnp.max(count), one, start)[0]
