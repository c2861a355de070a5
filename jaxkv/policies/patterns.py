"""Scores that keep a pattern: rungs of a ladder, one of two neighbours, an even sample."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.errors import BadValue
from jaxkv.policies.needs import MASS
from jaxkv.policies.order import BIG, best_first, in_time
from jaxkv.policies.score import AccumulatedAttention, Score, ScoreInputs, Stats


@dataclasses.dataclass(frozen=True)
class Ladder(Score):
    """Behind the sinks every layer keeps other rungs: of each `rungs` neighbours, one, moved on from layer to layer.

    score = place + S where the place behind the sinks, less the layer's number, is divisible by `rungs`; so entries
    between the rungs go first, the oldest of them first, and each later cut thins the older part again.
    Source: LaCache (arXiv 2507.14204); its spans and cursor are simplified here to one rung a step.
    """

    rungs: int = 4
    kind: ClassVar[str] = "ladder"
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if self.rungs < 2:
            raise BadValue(f"rungs={self.rungs}: expected at least 2, of which one stays")

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        order, slots = in_time(inputs.at), inputs.at.shape[-1]
        place = jnp.arange(slots)
        rung = (place - inputs.sinks - inputs.layer) % self.rungs == 0
        worth = (place + jnp.where(rung, slots, 0)).astype(jnp.float32)
        return order.slots(jnp.broadcast_to(worth, inputs.at.shape))


@dataclasses.dataclass(frozen=True)
class Place(Score):
    """score = |place - (n - offset)|, the oldest entry at place 0, n the entries besides the newest: one place goes.

    So what lies before that place stays for good, and the newest entries slide. With n no more than `offset` it is the
    place in the middle, n // 2. Source: PrefixKV's release (`distance=-25`), where the new token is added first.
    """

    offset: int = 25
    kind: ClassVar[str] = "place"
    linear: ClassVar[bool] = False
    keyless: ClassVar[bool] = True

    def __post_init__(self):
        if self.offset < 1:
            raise BadValue(f"offset={self.offset}: expected at least 1 entry behind the place")

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        order, place = in_time(inputs.at), jnp.arange(inputs.at.shape[-1])
        older = order.count[..., None] - 1
        goes = jnp.where(older > self.offset, older - self.offset, older // 2)
        return order.slots(jnp.abs(place - goes).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Neighbours(AccumulatedAttention):
    """One of two neighbours goes, the one with less attention so far; the pair moves on with every token.

    So the past thins out like a tree, the farther the thinner, and no stretch of it is lost whole. From a prompt the
    loser of every pair goes first, the oldest first, then the oldest winners (ours).
    Source: TreeKV (arXiv 2501.04987), from its description.
    """

    average: bool = True
    kind: ClassVar[str] = "neighbours"
    linear: ClassVar[bool] = False

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        order, worth = in_time(inputs.at), super().score(stats, inputs)
        line, place = order.put(worth), jnp.arange(inputs.at.shape[-1])
        free = order.count - inputs.sinks
        left, right = line, jnp.roll(line, -1, axis=-1)
        loses = left < right  # to the entry after it; of equals the younger goes
        if inputs.queries is not None:
            first = (place - inputs.sinks) % 2 == 0
            gone = jnp.where(first, loses, jnp.roll(~loses, 1, axis=-1)) & (place >= inputs.sinks)
            alone = place == order.count[..., None] - 1
            gone = gone & ~(first & alone)
            return order.slots((place - jnp.where(gone, inputs.at.shape[-1], 0)).astype(jnp.float32))
        at = inputs.sinks + (inputs.next[:, None] % jnp.maximum(free - 1, 1))
        at = at[..., None]
        gone = jnp.where(jnp.take_along_axis(loses, at, axis=-1), place == at, place == at + 1)
        return order.slots(jnp.where(gone, -BIG, line))


@dataclasses.dataclass(frozen=True)
class Crush(Score):
    """A `share` of what is left of the budget beside the protected by attention summed over the heads; the rest an
    even sample of how heads behave.

    A token's pattern is a bit per KV head: whether it is in the half that this head attends to most, of what is not
    protected. The other tokens are ordered by the Hamming distance of their pattern to 0101..., then by age, and with n
    of them for m places, those at 0, n // m, 2 (n // m), ... stay, so that each kind of token is represented. All heads
    keep the same.
    Source: KVCrush (arXiv 2503.00022); halves and steps as in OpenVINO GenAI's form of it, which compares pages by the
    bits of their tokens.
    """

    share: float = 0.5
    kind: ClassVar[str] = "crush"
    together: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({MASS})
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise BadValue(f"share={self.share}: expected a fraction of the budget")

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.mass is not None and inputs.protected is not None
        at, live = inputs.at, inputs.live
        free = live & ~inputs.protected
        half = jnp.sum(free, axis=-1, keepdims=True, dtype=jnp.int32) // 2
        loved = best_first(inputs.mass, jnp.where(free, at, -1)) < half
        anchor = jnp.arange(at.shape[1])[:, None] % 2 == 1
        over_heads = lambda x: jnp.broadcast_to(jnp.sum(x, axis=1, keepdims=True, dtype=jnp.float32), at.shape)  # noqa: E731
        distance, total = over_heads(loved != anchor), over_heads(inputs.mass)
        kept = jnp.sum(live & inputs.protected, axis=-1, keepdims=True, dtype=jnp.int32)
        open_ = jnp.maximum(inputs.goal - kept, 0)
        chosen = jnp.floor(open_.astype(jnp.float32) * self.share).astype(jnp.int32)
        leads = free & (best_first(total, jnp.where(free, at, -1)) < chosen)
        rest = free & ~leads
        place = best_first(-distance, jnp.where(rest, at, -1))
        wanted = open_ - chosen
        step = jnp.maximum(jnp.sum(rest, axis=-1, keepdims=True, dtype=jnp.int32) // jnp.maximum(wanted, 1), 1)
        sampled = rest & (place % step == 0) & (place // step < wanted)
        return jnp.where(leads, BIG, jnp.where(sampled, 1.0, 0.0))
