"""score: how much each entry is worth, higher = keep, float32 [B, Hk, S].

Every score has the same functions. `enter` computes an entry's own statistics once, as it enters the cache; `observe`
updates the statistics from an observation's attention mass. Most scores are linear in that mass: `factors` gives
weight and bias of score = weight * mass + bias, from the statistics before the observation, so that the attention
kernel itself can score. One that is not linear (it compares the entries with each other, say) has `linear` False
and a `score` of its own, which is computed after the attention. `now [B]` is the position of the next token.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv.checks import Checked, foreign, shown
from jaxkv.errors import BadValue
from jaxkv.policies.needs import MASS
from jaxkv.policies.order import BIG
from jaxkv.store.entries import ranks
from pallas_kernels.decode_attend_score.victim import Factor, linear
from pallas_kernels.masking import filled

Stats = dict[str, Float[Array, "B Hk S"]]


def of_entries(kind: str, value: Any, positions: Int[Array, "B Hk S"]) -> Any:
    """What a score of this kind said of the entries: a float, or a float32 of each entry. Raises `BadValue`."""
    shape, dtype = _form(value)
    try:
        fits = np.broadcast_shapes(shape, positions.shape) == positions.shape and len(shape) in (0, positions.ndim)
    except ValueError:
        fits = False
    if not fits or not _floats(dtype):
        raise BadValue(
            f"score {kind!r} gave {dtype} {shape}: expected a float32 for each of the entries, "
            f"{positions.shape} (row, KV head, slot)"
        )
    return value if isinstance(value, float) else jnp.broadcast_to(value, positions.shape).astype(jnp.float32)


def of_tokens(score: "Score", said: Any, shape: tuple[int, ...]) -> Stats:
    """The statistics, by name, that a score said of each token of (row, KV head, token). Raises `BadValue`."""
    if not isinstance(said, Mapping) or not said.keys() <= set(score.stats):
        raise BadValue(
            f"score {score.kind!r} gave the statistics {shown(said if not isinstance(said, Mapping) else list(said))}: "
            f"expected a dictionary with none but those that its `stats` names, {list(score.stats)}"
        )
    for name, stat in said.items():
        found, dtype = _form(stat)
        if found != shape or not _floats(dtype):
            raise BadValue(
                f"score {score.kind!r} gave the statistic {name!r} as {dtype} {found}: "
                f"expected a float32 for each of the tokens, {shape} (row, KV head, token)"
            )
    return dict(said)


def _form(value: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of what a score said; no dtype of nothing."""
    return ((), None) if value is None else (jnp.shape(value), jnp.result_type(value))


def _floats(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


Rotate = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Entering:
    """Tokens as they enter a layer's cache: keys and queries before RoPE, and how RoPE turns them to positions.

    `prompt` tells prefill from decode; `learned` is what was measured on the layer beforehand; `out` is the layer's
    output matrix by query heads, where the phase that runs needs OUTPUT. The phase protects the text's first `sinks`
    tokens and the `recent` last ones of a prompt's block (0 where that is a fraction of the budget).
    """

    keys: Float[Array, "B Hk T D"]
    values: Float[Array, "B Hk T D"]
    queries: Float[Array, "B Hq T D"] | None = None
    positions: Int[Array, "B T"] | None = None
    rotate: Rotate | None = None
    prompt: bool = True
    learned: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    out: Float[Array, "Hq D M"] | None = None
    sinks: int = 0
    recent: int = 0


@dataclasses.dataclass(frozen=True)
class ScoreInputs:
    """What a score that is not linear in the mass may look at: a layer's entries, and at prefill the block's queries.

    `keys` are turned to `places` (text or cache positions, by the policy's rope), `queries` are before RoPE.
    `limits` is the number of entries to keep, per row or per head; `protected` marks those that stay whatever their
    score. `layer` is the layer's number, of `layers`. `out` is its output matrix by query heads, for scores that need
    OUTPUT; `by_query` is the prompt's mass before the query heads of a KV head are one. `looks` are the layer's last
    queries, turned, for scores that look with them; `learned` holds, by name, what was measured on the layer
    beforehand, for scores that need something `calibrated`.
    """

    keys: Float[Array, "B Hk S D"] | None = None
    values: Float[Array, "B Hk S D"] | None = None
    places: Int[Array, "B Hk S"] | None = None
    queries: Float[Array, "B Hq T D"] | None = None
    query_positions: Int[Array, "B T"] | None = None
    query_places: Int[Array, "B T"] | None = None
    rotate: Rotate | None = None
    scale: float = 1.0
    layer: int | Int[Array, ""] = 0
    layers: int | Int[Array, ""] = 1
    out: Float[Array, "Hq D M"] | None = None
    positions: Int[Array, "B Hk S"] | None = None
    mass: Float[Array, "B Hk S"] | None = None
    by_query: Float[Array, "B Hq S"] | None = None
    now: Int[Array, "B"] | None = None
    limits: Int[Array, "B *Hk"] | None = None
    protected: Bool[Array, "B Hk S"] | None = None
    sinks: int = 0
    looks: Float[Array, "B Hq W D"] | None = None
    learned: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)

    @property
    def live(self) -> Bool[Array, "B Hk S"]:
        """True for slots that hold an entry."""
        return self.at >= 0

    @property
    def free(self) -> Bool[Array, "B Hk S"]:
        """True for the entries that the score decides on: those that nothing protects."""
        return self.live if self.protected is None else self.live & ~self.protected

    @property
    def at(self) -> Int[Array, "B Hk S"]:
        """The entries' positions in the text, -1 for an empty slot."""
        assert self.positions is not None
        return self.positions

    @property
    def goal(self) -> Int[Array, "B Hk_or_1 1"]:
        """The number of entries to keep, to compare with places in a head."""
        assert self.limits is not None
        return self.limits.reshape(self.limits.shape[0], -1, 1)

    @property
    def next(self) -> Int[Array, "B"]:
        """The position of the next token."""
        assert self.now is not None
        return self.now

    @property
    def k(self) -> Float[Array, "B Hk S D"]:
        """The keys in float32, 0 in empty slots."""
        assert self.keys is not None, "this score needs the keys"
        return filled(self.keys.astype(jnp.float32), self.at)

    @property
    def v(self) -> Float[Array, "B Hk S D"]:
        """The values in float32, 0 in empty slots."""
        assert self.values is not None, "this score needs the values"
        return filled(self.values.astype(jnp.float32), self.at)

    def turned(self, x: Float[Array, "*lead D"], positions: Int[Array, "..."]) -> Float[Array, "*lead D"]:
        """`x` turned by RoPE to the positions, which broadcast to its leading dims."""
        assert self.rotate is not None
        return self.rotate(x, positions)


class Score(Checked):
    """The defaults: no statistics of its own, linear in the mass."""

    kind: ClassVar[str]
    stats: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[frozenset[str]] = frozenset()  # of `needs.py`: with QUERIES it scores at prefill only
    remembers: ClassVar[bool] = False  # its statistics depend on past attention mass
    forgets: ClassVar[float] = 1.0  # what they are multiplied with for each token that has passed since
    particular: ClassVar[bool] = False  # its statistics depend on its numbers
    linear: ClassVar[bool] = True  # linear in the mass: the attention kernel can score
    keyless: ClassVar[bool] = False  # not linear, and yet it reads no keys or values
    signed: ClassVar[bool] = False  # may be negative
    newest: ClassVar[bool] = False  # the newest tokens are worth most
    aware: ClassVar[bool] = False  # the prompt's last tokens decide, whoever observes
    looks: ClassVar[int] = 0  # how many of the layer's last queries it looks with, at prefill and at decode
    together: ClassVar[bool] = False  # sums over the KV heads, which must hold the same tokens
    parts: ClassVar[tuple["Score", ...]] = ()  # the scores it is made of
    grows: ClassVar[bool] = False  # at decode the new tokens do not get their part at once: `grown`
    placed: ClassVar[bool] = False  # its statistics say of an entry where a prompt's cut has left it: `left`

    def enter(self, new: Entering) -> Stats:
        return {}

    def observe(self, stats: Stats, mass: Float[Array, "B Hk S"] | None, now: Int[Array, "B"] | None) -> Stats:
        return {}

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        raise NotImplementedError

    def line(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        """`factors`, each one number or one of each entry. Raises `BadValue` while the program is made otherwise."""
        found = self.factors(stats, positions, now)
        if not isinstance(found, tuple) or len(found) != 2:
            raise BadValue(
                f"score {self.kind!r} gave the factors {shown(found)}: expected two, the weight and the bias of "
                "weight * mass + bias"
            )
        weight, bias = (of_entries(self.kind, factor, positions) for factor in found)
        return weight, bias

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        return linear(inputs.mass, *self.line(stats, inputs.at, inputs.next))

    def each(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        """`score`, one of each entry. Raises `BadValue` while the program is made otherwise."""
        return jnp.broadcast_to(of_entries(self.kind, self.score(stats, inputs), inputs.at), inputs.at.shape)

    def entered(self, new: Entering) -> Stats:
        """`enter`, one of each token. Raises `BadValue` while the program is made otherwise."""
        return of_tokens(self, self.enter(new), new.keys.shape[:-1])

    def observed(self, stats: Stats, mass: Float[Array, "B Hk S"] | None, now: Int[Array, "B"] | None) -> Stats:
        """`observe`, one of each entry. Raises `BadValue` while the program is made otherwise."""
        shape = next((stat.shape for stat in stats.values()), ())
        return of_tokens(self, self.observe(stats, mass, now), shape)

    def left(self, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> Stats:
        """The statistics of a score that is `placed`, of the entries that a prompt's cut has left."""
        raise NotImplementedError

    def grown(
        self,
        stats: Stats,
        positions: Int[Array, "B Hk S"],
        now: Int[Array, "B"],
        recents: Int[Array, "B"],
        prompt: Int[Array, "B"],
    ) -> Int[Array, "B"]:
        """New tokens per head that a score that `grows` lets rows keep after the one at position `now`, where so many
        of a `prompt` stay."""
        raise NotImplementedError

    @property
    def negative(self) -> bool:
        """Whether it may be negative, or one that it is made of. Raises `BadValue` for one of one's own that does not
        say so."""
        said = any("signed" in vars(each) for each in (self, *type(self).__mro__) if each is not Score)
        if foreign(self) and not said:
            raise BadValue(
                f"score {self.kind!r} does not say whether it can be negative, and here it may not be: write "
                "signed: ClassVar[bool] = True, or False, in its class"
            )
        return self.signed or any(part.negative for part in self.parts)

    def leaves(self) -> tuple["Score", ...]:
        """The score itself, or those that it is made of."""
        return tuple(leaf for part in self.parts for leaf in part.leaves()) if self.parts else (self,)


def still(score: Score) -> str:
    """The option under which a score that `grows` does not."""
    return f"grow={str(type(getattr(score, 'grow', 0))()).lower()}"


@dataclasses.dataclass(frozen=True)
class Recency(Score):
    """score = position: keep the newest. Source: StreamingLLM (arXiv 2309.17453)."""

    kind: ClassVar[str] = "recency"
    newest: ClassVar[bool] = True

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        return 0.0, positions.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class KeyNorm(Score):
    """score = -||k||_2^power (RoPE keeps it; taken before RoPE). Source: Devoto et al. (arXiv 2406.11430), power 1."""

    power: int = 1
    kind: ClassVar[str] = "key-norm"
    signed: ClassVar[bool] = True
    stats: ClassVar[tuple[str, ...]] = ("key_norm",)

    def __post_init__(self):
        if self.power < 1:
            raise BadValue(f"power={self.power}: expected 1 or more")

    def enter(self, new: Entering) -> Stats:
        return {"key_norm": jnp.linalg.norm(new.keys.astype(jnp.float32), axis=-1)}

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        return 0.0, -(stats["key_norm"] if self.power == 1 else stats["key_norm"] ** self.power)


@dataclasses.dataclass(frozen=True)
class Attention(Score):
    """score = the attention mass of this observation. Source: SnapKV, TOVA, DapQ."""

    kind: ClassVar[str] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({MASS})

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        return 1.0, 0.0


@dataclasses.dataclass(frozen=True)
class NormalizedAttention(Score):
    """score = attention mass / (n - position), n being the position of the next token: over the tokens that could give
    an entry attention, so that those that came early are not ahead for that. Source: ZipCache (arXiv 2405.14256)."""

    kind: ClassVar[str] = "normalized-attention"
    needs: ClassVar[frozenset[str]] = frozenset({MASS})

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        return 1 / jnp.maximum(now[:, None, None] - positions, 1).astype(jnp.float32), 0.0


@dataclasses.dataclass(frozen=True)
class AccumulatedAttention(Score):
    """score = sum over all observations so far of decay^age * attention mass, the age in tokens.

    The queries of one observation weigh alike, but where the phase's aggregate has the same `decay`.
    `average=True` divides by the number of queries that could see the entry (kvpress' ObservedAttention).
    Source: H2O (arXiv 2306.14048), decay 1; A2SF's forgetting factor (arXiv 2407.20485) is a decay below 1.
    """

    decay: float = 1.0
    average: bool = False
    kind: ClassVar[str] = "accumulated-attention"
    stats: ClassVar[tuple[str, ...]] = ("attention",)
    needs: ClassVar[frozenset[str]] = frozenset({MASS})
    remembers: ClassVar[bool] = True

    def __post_init__(self):
        if not 0 < self.decay <= 1:
            raise BadValue(f"decay={self.decay}: expected a number in (0, 1]; 1 forgets nothing")
        if self.decay < 1:
            object.__setattr__(self, "stats", (*self.stats, "attended_at"))  # the next position at that time
        object.__setattr__(self, "forgets", self.decay)

    def enter(self, new: Entering) -> Stats:
        return {name: jnp.zeros(new.keys.shape[:-1], jnp.float32) for name in self.stats}

    def observe(self, stats: Stats, mass: Float[Array, "B Hk S"] | None, now: Int[Array, "B"] | None) -> Stats:
        if mass is None:
            return {}
        if self.decay == 1:
            return {"attention": stats["attention"] + mass}
        assert now is not None
        at = jnp.broadcast_to(now[:, None, None].astype(jnp.float32), mass.shape)
        return {"attention": self.faded(stats, now) + mass, "attended_at": at}

    def faded(self, stats: Stats, now: Int[Array, "B"]) -> Float[Array, "B Hk S"]:
        """What is left at `now` of the attention so far."""
        if self.decay == 1:
            return stats["attention"]
        return stats["attention"] * self.decay ** (now[:, None, None].astype(jnp.float32) - stats["attended_at"])

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        past = self.faded(stats, now)
        if not self.average:
            return 1.0, past
        seen = jnp.maximum(now[:, None, None] - positions, 1).astype(jnp.float32)
        return 1 / seen, past / seen


@dataclasses.dataclass(frozen=True)
class AttentionValue(Score):
    """score = attention mass * ||v||_1, the size of the entry's part in the output. Source: LongFlow (2603.11504)."""

    kind: ClassVar[str] = "attention-value"
    stats: ClassVar[tuple[str, ...]] = ("value_l1",)
    needs: ClassVar[frozenset[str]] = frozenset({MASS})

    def enter(self, new: Entering) -> Stats:
        return {"value_l1": jnp.sum(jnp.abs(new.values.astype(jnp.float32)), axis=-1)}

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        return stats["value_l1"], 0.0


@dataclasses.dataclass(frozen=True)
class Random(Score):
    """score = a pseudo-random number in [0, 1) of position, head and seed: the control for every other score."""

    seed: int = 0
    kind: ClassVar[str] = "random"

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        return 0.0, drawn(positions, self.seed)


def drawn(positions: Int[Array, "B Hk S"], seed: int) -> Float[Array, "B Hk S"]:
    """A pseudo-random number in [0, 1) of position, head and seed, whatever the slot."""
    return draws(positions, seed, 1)[..., 0]


def draws(positions: Int[Array, "B Hk S"], seed: int, count: int) -> Float[Array, "B Hk S N"]:
    """As many of them, of the seeds from `seed` on."""
    head = jnp.arange(positions.shape[1], dtype=jnp.uint32)[:, None]
    x = positions.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + head * jnp.uint32(0x85EBCA77)
    seeds = jnp.uint32(seed % 2**32) + jnp.arange(count, dtype=jnp.uint32)
    x = x[..., None] + seeds * jnp.uint32(0xC2B2AE3D)
    for shift, times in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # mixes every bit into every other
        x = (x ^ (x >> shift)) * jnp.uint32(times)
    x = x ^ (x >> 16)
    return (x >> 8).astype(jnp.float32) / jnp.float32(2**24)


@dataclasses.dataclass(frozen=True)
class FixedPlace(Score):
    """score = position, but of what a prompt leaves all except its last `offset` entries stay: the entry at one place
    of the cache goes, ahead of it the start of the text, behind it the newest.

    With `grow`, after t new tokens the cache holds ceil(P t / S) entries more than the P that a prompt of S tokens
    left, up to the budget; leave them room with `reserve` in the prefill phase. Source: Elastic Cache (arXiv
    2407.18121) in its release's form (`ElasticCache`), whose cache grows for ever.
    """

    offset: int = 25
    grow: bool = True
    kind: ClassVar[str] = "fixed-place"
    stats: ClassVar[tuple[str, ...]] = ("held_since",)  # of an entry that stays: the prompt's length, else 0
    particular: ClassVar[bool] = True
    placed: ClassVar[bool] = True

    def __post_init__(self):
        if self.offset < 1:
            raise BadValue(f"offset={self.offset}: expected at least 1 entry behind the place that is freed")
        object.__setattr__(self, "grows", self.grow)

    def enter(self, new: Entering) -> Stats:
        return {"held_since": jnp.zeros(new.keys.shape[:-1], jnp.float32)}

    def left(self, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> Stats:
        place, held = ranks(positions), jnp.sum(positions >= 0, axis=-1, keepdims=True, dtype=jnp.int32)
        stays = (place >= 0) & (place < jnp.maximum(held - self.offset, 1))
        return {"held_since": jnp.where(stays, now[:, None, None], 0).astype(jnp.float32)}

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        return 0.0, jnp.where(stats["held_since"] > 0, BIG, positions.astype(jnp.float32))

    def grown(self, stats, positions, now, recents, prompt):
        length = jnp.max(jnp.where(positions >= 0, stats["held_since"], 0.0), axis=(1, 2)).astype(jnp.int32)
        new, held = jnp.maximum(now + 1 - length, 0), jnp.minimum(prompt, length)
        return -(-held * new // jnp.maximum(length, 1))


@dataclasses.dataclass(frozen=True)
class PeakAttention(Score):
    """score = the largest attention mass of any observation so far. Source: KVzip (arXiv 2505.23416), as a part."""

    kind: ClassVar[str] = "peak-attention"
    stats: ClassVar[tuple[str, ...]] = ("peak",)
    needs: ClassVar[frozenset[str]] = frozenset({MASS})
    remembers: ClassVar[bool] = True
    linear: ClassVar[bool] = False

    def enter(self, new: Entering) -> Stats:
        return {"peak": jnp.zeros(new.keys.shape[:-1], jnp.float32)}

    def observe(self, stats: Stats, mass: Float[Array, "B Hk S"] | None, now: Int[Array, "B"] | None) -> Stats:
        return {} if mass is None else {"peak": jnp.maximum(stats["peak"], mass)}

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        return stats["peak"] if inputs.mass is None else jnp.maximum(stats["peak"], inputs.mass)
