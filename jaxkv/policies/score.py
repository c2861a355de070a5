"""score: how much each entry is worth, higher = keep, float32 [B, Hk, S].

Every score has the same three functions. `enter` computes an entry's own statistics once, as it enters the cache;
`line` gives weight and bias of score = weight * mass + bias, from the statistics before an observation and its
attention mass (a straight line, so that the attention kernel itself can score); `observe` updates the statistics from
that mass. `now [B]` is the position of the next token.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.errors import BadValue
from pallas_kernels.decode_attend_score.victim import Factor

Stats = dict[str, Float[Array, "B Hk S"]]


class _Score:
    """The defaults: no statistics of its own."""

    stats: ClassVar[tuple[str, ...]] = ()
    looks: ClassVar[bool] = False  # needs attention mass
    remembers: ClassVar[bool] = False  # its statistics depend on past attention mass

    def enter(self, keys: Float[Array, "B Hk T D"], values: Float[Array, "B Hk T D"]) -> Stats:
        return {}

    def observe(self, stats: Stats, mass: Float[Array, "B Hk S"] | None) -> Stats:
        return {}

    def line(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Recency(_Score):
    """score = position: keep the newest. Source: StreamingLLM (arXiv 2309.17453)."""

    kind: ClassVar[str] = "recency"

    def line(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        return 0.0, positions.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class KeyNorm(_Score):
    """score = -||k||_2 (RoPE keeps it; taken before RoPE). Source: Devoto et al. (arXiv 2406.11430)."""

    kind: ClassVar[str] = "key-norm"
    stats: ClassVar[tuple[str, ...]] = ("key_norm",)

    def enter(self, keys: Float[Array, "B Hk T D"], values: Float[Array, "B Hk T D"]) -> Stats:
        return {"key_norm": jnp.linalg.norm(keys.astype(jnp.float32), axis=-1)}

    def line(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        return 0.0, -stats["key_norm"]


@dataclasses.dataclass(frozen=True)
class Attention(_Score):
    """score = the attention mass of this observation. Source: SnapKV, TOVA, DapQ."""

    kind: ClassVar[str] = "attention"
    looks: ClassVar[bool] = True

    def line(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        return 1.0, 0.0


@dataclasses.dataclass(frozen=True)
class AccumulatedAttention(_Score):
    """score = sum over all observations so far of decay^age * attention mass.

    `average=True` divides by the number of queries that could see the entry (kvpress' ObservedAttention).
    Source: H2O (arXiv 2306.14048), decay 1; A2SF's forgetting factor is a decay below 1.
    """

    decay: float = 1.0
    average: bool = False
    kind: ClassVar[str] = "accumulated-attention"
    stats: ClassVar[tuple[str, ...]] = ("attention",)
    looks: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    def __post_init__(self):
        if not 0 < self.decay <= 1:
            raise BadValue(f"decay={self.decay}: expected a number in (0, 1]; 1 forgets nothing")

    def enter(self, keys: Float[Array, "B Hk T D"], values: Float[Array, "B Hk T D"]) -> Stats:
        return {"attention": jnp.zeros(keys.shape[:-1], jnp.float32)}

    def observe(self, stats: Stats, mass: Float[Array, "B Hk S"] | None) -> Stats:
        return {} if mass is None else {"attention": stats["attention"] * self.decay + mass}

    def line(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        past = stats["attention"] * self.decay
        if not self.average:
            return 1.0, past
        seen = jnp.maximum(now[:, None, None] - positions, 1).astype(jnp.float32)
        return 1 / seen, past / seen


@dataclasses.dataclass(frozen=True)
class AttentionValue(_Score):
    """score = attention mass * ||v||_1, the size of the entry's part in the output. Source: LongFlow (2603.11504)."""

    kind: ClassVar[str] = "attention-value"
    stats: ClassVar[tuple[str, ...]] = ("value_l1",)
    looks: ClassVar[bool] = True

    def enter(self, keys: Float[Array, "B Hk T D"], values: Float[Array, "B Hk T D"]) -> Stats:
        return {"value_l1": jnp.sum(jnp.abs(values.astype(jnp.float32)), axis=-1)}

    def line(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        return stats["value_l1"], 0.0


Score = Recency | KeyNorm | Attention | AccumulatedAttention | AttentionValue
KINDS = {part.kind: part for part in (Recency, KeyNorm, Attention, AccumulatedAttention, AttentionValue)}
