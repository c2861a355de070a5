"""Scores that keep a pattern: rungs of a ladder, one of two neighbours, an even sample."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.errors import BadValue
from jaxkv.policies.needs import MASS
from jaxkv.policies.order import BIG, best_first, in_time
from jaxkv.policies.score import AccumulatedAttention, Entering, Score, ScoreInputs, Stats
from jaxkv.store.entries import EMPTY


@dataclasses.dataclass(frozen=True)
class Ladder(Score):
    """Ladders over the layers: of every `width` neighbours behind the sinks a layer keeps `steps`, side by side, and
    each layer's begin one place after those of the layer before it, round and round.

    steps = ceil(span / (span - overlap)), width = 1 + ceil((L - span) / (span - overlap)) and at least steps + 1. From
    the cursor on, as many ladders are made as entries have to go, but none of the L newest; when the cursor gets there
    it goes back to the sinks, and what is there is thinned again, by one wide ladder where one pass would not do. An
    entry between the rungs is worth its place, any other S + its place, so that the oldest goes first. The cursor
    stands where so many evictions one by one would have brought it.

    Source: LaCache (arXiv 2507.14204), its release's `LaCache.__call__`. Ours: that no more entries go than have to;
    the cursor after a prompt, which the release leaves where its last pass ended; and, where L entries are more than
    three quarters of what the sinks leave of the budget, that these stay newest.
    """

    span: int = 16
    overlap: int = 0
    kind: ClassVar[str] = "ladder"
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if self.span < 1 or not 0 <= self.overlap < self.span:
            raise BadValue(
                f"span={self.span}, overlap={self.overlap}: expected at least 1 layer, and an overlap from 0 up to but "
                "not including the span"
            )

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        order, slots, apart = in_time(inputs.at), inputs.at.shape[-1], self.span - self.overlap
        layers, layer = jnp.asarray(inputs.layers, jnp.int32), jnp.asarray(inputs.layer, jnp.int32)
        place, held, sinks = jnp.arange(slots, dtype=jnp.int32), order.count[..., None], inputs.sinks
        steps = math.ceil(self.span / apart)
        width = jnp.maximum(1 - (self.span - layers) // apart, steps + 1)
        fewer = width - steps
        behind = jnp.maximum(inputs.goal - sinks, 2)
        ladders = jnp.maximum((behind - jnp.minimum(layers, behind * 3 // 4)) // steps, 1)  # of a whole pass

        gone = jnp.maximum(inputs.next[:, None, None] - held, 0)
        done = (gone // fewer) % ladders  # of this pass
        over = jnp.maximum(held - inputs.goal, 0)
        wanted = -(-over // fewer)
        left = over - jnp.minimum(wanted, ladders - done) * fewer
        first = _ladders(place, sinks + done * steps, width, steps, jnp.minimum(wanted, ladders - done), layer, 1)
        times = jnp.maximum(-(-left // (ladders * fewer)), 1)
        wider = width + (times - 1) * (width - 1)
        rank = jnp.cumsum(first, axis=-1, dtype=jnp.int32) - 1
        number = -(-jnp.maximum(left, 0) // (wider - steps))
        rung = first & _ladders(rank, sinks, wider, steps, number, layer, times)
        return order.slots((place + jnp.where(rung, slots, 0)).astype(jnp.float32))


def _ladders(
    place: Int[Array, "..."],
    begin: Int[Array, "..."] | int,
    width: Int[Array, "..."],
    steps: int,
    number: Int[Array, "..."],
    layer: Int[Array, ""],
    apart: Int[Array, "..."] | int,
) -> Bool[Array, "B Hk S"]:
    """True for the places outside of so many ladders from `begin` on, and for their rungs: `steps` places `apart`."""
    at = (place - begin) % width - layer % (width - steps + 1)
    rung = (at >= 0) & (at % apart == 0) & (at < apart * steps)
    return rung | (place < begin) | (place >= begin + width * number)


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
class Neighbours(Score):
    """One of two neighbours goes, the one with less attention in the mean so far; the pair moves on with every token.

    So the past thins out like a tree, the farther the thinner, and no stretch of it is lost whole. In a prompt the same
    is done to blocks of `tokens` tokens, one after the other, by the mean attention that the observing queries give
    them, which counts as one query later. Of equals the older goes. Source: TreeKV (arXiv 2501.04987), its algorithm 1;
    the size of a block is ours.
    """

    tokens: int = 16
    kind: ClassVar[str] = "neighbours"
    stats: ClassVar[tuple[str, ...]] = ("attention", "seen")
    needs: ClassVar[frozenset[str]] = frozenset({MASS})
    remembers: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    keyless: ClassVar[bool] = True

    def __post_init__(self):
        if self.tokens < 1:
            raise BadValue(f"tokens={self.tokens}: expected at least 1 in a block")

    def enter(self, new: Entering) -> Stats:
        return {name: jnp.zeros(new.keys.shape[:-1], jnp.float32) for name in self.stats}

    def observe(self, stats: Stats, mass: Float[Array, "B Hk S"] | None, now: Int[Array, "B"] | None) -> Stats:
        if mass is None:
            return {}
        return {"attention": stats["attention"] + mass, "seen": stats["seen"] + 1}

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.protected is not None
        stats, order = {**stats, **self.observe(stats, inputs.mass, None)}, in_time(inputs.at)
        worth = order.put(stats["attention"] / jnp.maximum(stats["seen"], 1.0))
        apart = inputs.live & inputs.protected
        first = jnp.minimum(inputs.sinks, order.count[..., None])  # what is protected comes first and last in time
        free = (order.count - jnp.sum(apart, axis=-1, dtype=jnp.int32))[..., None]
        place = jnp.arange(inputs.at.shape[-1]) - first
        if inputs.queries is not None:
            room = inputs.goal - jnp.sum(apart, axis=-1, keepdims=True, dtype=jnp.int32)
            return order.slots(self.thinned(worth, place, free, room))
        left = (inputs.next[:, None, None] % jnp.maximum(free - 1, 1)) + first
        pair = jnp.take_along_axis(worth, left, axis=-1), jnp.take_along_axis(worth, left + 1, axis=-1)
        return order.slots(jnp.where(place + first == jnp.where(pair[0] > pair[1], left + 1, left), -BIG, worth))

    def thinned(
        self,
        worth: Float[Array, "B Hk S"],
        place: Int[Array, "B Hk S"],
        free: Int[Array, "B Hk 1"],
        room: Int[Array, "B _ 1"],
    ) -> Float[Array, "B Hk S"]:
        """When each of the `free` entries goes, counted in blocks, if its head has `room` for so many; what stays is
        worth most."""
        blocks = -(-worth.shape[-1] // self.tokens)
        inside = (place >= 0) & (place < free)
        group = jnp.where(inside, place // self.tokens, blocks)
        add = jax.vmap(jax.vmap(lambda x, at: jax.ops.segment_sum(x, at, blocks + 1)[:blocks]))
        mean = add(jnp.where(inside, worth, 0.0), group) / jnp.maximum(add(inside.astype(jnp.float32), group), 1.0)
        most, number = jnp.maximum(room // self.tokens, 1), jnp.arange(blocks)

        def come(state, block):
            stays, gone, at = state
            stays = stays | ((number == block) & (block * self.tokens < free))
            rank = jnp.cumsum(stays, axis=-1) - 1
            one, two = (stays & (rank == at + turn) for turn in (0, 1))
            of = lambda pair: jnp.sum(jnp.where(pair, mean, 0.0), axis=-1, keepdims=True)  # noqa: E731
            loses = jnp.where(of(one) > of(two), two, one) & (rank[..., -1:] >= most)
            at = jnp.where(rank[..., -1:] >= most, (at + 1) % most, at)
            return (stays & ~loses, jnp.where(loses, block, gone), at), None

        none = jnp.zeros(mean.shape, bool)
        state = none, jnp.full(mean.shape, blocks, jnp.int32), jnp.zeros((*mean.shape[:-1], 1), jnp.int32)
        (_, gone, _), _ = lax.scan(come, state, number)
        when = jnp.take_along_axis(gone, jnp.minimum(group, blocks - 1), axis=-1)
        return (when * self.tokens + place % self.tokens).astype(jnp.float32)  # in a block the younger stay


@dataclasses.dataclass(frozen=True)
class Chains(AccumulatedAttention):
    """One pivot of every run of neighbours with alike keys, the one with the most attention so far.

    A share `heavy` of the entries to keep goes to those with the most attention, which with what is protected stand
    apart. The others, in time order, are cut into as many runs as there are entries left to keep, where the cosines of
    adjacent keys are least. Source: KVMerger (arXiv 2407.08454), which cuts at a fixed cosine and so holds no budget.
    """

    heavy: float = 0.24
    kind: ClassVar[str] = "chains"
    linear: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.heavy < 1:
            raise BadValue(f"heavy={self.heavy}: expected a share of the entries to keep, from 0 up to but not 1")

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.protected is not None
        order, share = in_time(inputs.at), super().score(stats, inputs)
        worth, filled = order.put(share), order.filled
        rank = order.put(best_first(jnp.where(inputs.protected, -BIG, share), inputs.at))
        spared = order.put(inputs.protected) & filled
        heavy = jnp.floor(inputs.goal.astype(jnp.float32) * self.heavy).astype(jnp.int32)
        apart = spared | (filled & (rank < heavy))
        free, runs = filled & ~apart, inputs.goal - jnp.sum(apart, axis=-1, keepdims=True, dtype=jnp.int32)
        link = adjacent(order.put(inputs.k))
        forced = apart | jnp.roll(apart, 1, axis=-1)
        link = jnp.where(forced, -BIG, link).at[..., 0].set(-BIG)
        begins = free & (best_first(jnp.where(free, -link, -jnp.inf), jnp.where(free, 0, EMPTY)) < runs)
        run = jnp.where(free, jnp.cumsum(begins, axis=-1), 0)
        slots = run.shape[-1] + 1
        most = jax.vmap(jax.vmap(lambda x, at: jax.ops.segment_max(x, at, slots)[at]))(worth, run)
        best = free & (worth >= most)
        place = jnp.arange(run.shape[-1])
        first = jax.vmap(jax.vmap(lambda x, at: jax.ops.segment_min(x, at, slots)[at]))(
            jnp.where(best, place, run.shape[-1]), run
        )
        pivot = best & (place == first) & (run > 0)
        part = worth / (1 + jnp.maximum(worth, 0.0))  # below 1
        return order.slots(part + jnp.where(apart, 4.0, 0.0) + jnp.where(pivot, 2.0, 0.0))


def adjacent(keys: Float[Array, "B Hk S D"]) -> Float[Array, "B Hk S"]:
    """The cosine of each key with the one before it (of the first with the last)."""
    unit = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-30)
    return jnp.sum(unit * jnp.roll(unit, 1, axis=2), axis=-1)


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
