"""aggregate: over the observing queries, along the text, over the query heads of a group, over the KV heads."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.checks import Checked
from jaxkv.errors import BadValue
from jaxkv.policies.needs import HIDDEN, OUTPUT, calibrated
from jaxkv.policies.score import draws
from jaxkv.store.entries import counted, packed
from pallas_kernels.decode_attend_score.victim import over_heads

FADED = 1e-30  # what a query counts at least: the kernels take its logarithm
REDUCE = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max}


@dataclasses.dataclass(frozen=True)
class Aggregate(Checked):
    """`queries` (sum, mean, max), `pool` along the text (none, avg, max; odd `kernel`), `group` (sum, mean, max; before
    the pool with `pooled="groups"`) and `heads`: "each" KV head decides for itself, or all decide as one by their "sum"
    or "mean". With `best` only so many query heads of the layer speak, those that retrieve best by calibration, in the
    mean and for all KV heads (CompressKV, arXiv 2508.02401).

    `weigh="output"` multiplies each query's attention, before it is summed up, by the size of what the entry writes
    into the stream over the size of what the query was made of: A_ti ||v_i W_O||_2 / ||h_t||_2, W_O being the output
    matrix of the query's head and h_t the normed hidden state (KVzip+, arXiv 2601.07891, in kvpress' form).

    With a `decay` below 1 a query of the prompt counts decay^a, a being the number of the block's tokens behind it
    (A2SF, arXiv 2407.20485). With `probes` above 0 only that share of the text's queries counts, the last ones, and of
    those before them about as many, drawn by their positions (ZipCache, arXiv 2405.14256).

    With `common` above 0 each KV head gets that many times the mean over the layer's KV heads on top of its own, for
    slots in which all of them hold the same token, as they do in a prompt's new block (KVCompose, arXiv 2509.05165).
    """

    queries: str = "mean"
    pool: str = "none"
    kernel: int = 5
    group: str = "mean"
    heads: str = "each"
    best: int = 0
    weigh: str = "none"
    decay: float = 1.0
    pooled: str = "heads"
    probes: float = 0.0
    common: float = 0.0

    def __post_init__(self):
        for field, allowed in (
            ("queries", ("sum", "mean", "max")),
            ("pool", ("none", "avg", "max")),
            ("group", ("sum", "mean", "max")),
            ("heads", ("each", "sum", "mean")),
            ("weigh", ("none", "output")),
            ("pooled", ("heads", "groups")),
        ):
            if getattr(self, field) not in allowed:
                raise BadValue(f"aggregate {field}={getattr(self, field)!r}: expected one of {', '.join(allowed)}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise BadValue(f"kernel={self.kernel}: expected an odd number, so that a pool has a middle")
        if not 0 < self.decay <= 1:
            raise BadValue(f"decay={self.decay}: expected a number in (0, 1]; 1 forgets nothing")
        if not 0 <= self.probes <= 0.5:
            raise BadValue(f"probes={self.probes}: expected a share of the queries, up to 0.5; 0 for all of them")
        if self.best < 0:
            raise BadValue(f"best={self.best}: expected a number of query heads, or 0 for all")
        if not 0 <= self.common < float("inf"):
            raise BadValue(f"common={self.common}: expected how many times the mean of the heads counts, 0 for not")

    @property
    def needs(self) -> frozenset[str]:
        """What it reads besides the attention of the queries, by the names of `needs.py`."""
        best = {calibrated("retrieval")} if self.best else set[str]()
        return frozenset(best | {OUTPUT, HIDDEN} if self.weigh == "output" else best)

    def weights(
        self, at: Int[Array, "B T"], now: Int[Array, "B"], sizes: Float[Array, "B T"] | None
    ) -> Float[Array, "B T"] | None:
        """What the queries at these positions count, above 0; None where all count alike."""
        weights = None if sizes is None else 1 / jnp.maximum(sizes, 1e-12)
        if self.decay < 1:
            age = jnp.maximum(now[:, None] - 1 - at, 0).astype(jnp.float32)
            weights = jnp.maximum(self.decay**age, FADED) * (1.0 if weights is None else weights)
        if self.probes:
            last = at >= (now - jnp.ceil(self.probes * now.astype(jnp.float32)).astype(jnp.int32))[:, None]
            drawn = draws(at[:, None], 0, 1)[:, 0, :, 0] < self.probes / (1 - self.probes)
            weights = jnp.where(last | drawn, 1.0, FADED) * (1.0 if weights is None else weights)
        return weights

    def by_output(
        self, mass: Float[Array, "B Hq S"], values: Float[Array, "B Hk S D"], out: Float[Array, "Hq D M"]
    ) -> Float[Array, "B Hq S"]:
        """mass * ||v W_O||_2 by query heads, the norm from the D x D product W_O W_O^T; values are 0 in empty slots."""
        exact, kv_heads = lax.Precision.HIGHEST, values.shape[1]
        out, values = out.astype(jnp.float32), values.astype(jnp.float32)
        gram = jnp.einsum("hdm,hem->hde", out, out, precision=exact)
        gram = jnp.moveaxis(gram.reshape(kv_heads, -1, *gram.shape[1:]), 1, 0)

        def one(_, each):  # a head of each group at a time
            spread = jnp.einsum("bhsd,hde->bhse", values, each, precision=exact)
            return None, jnp.sqrt(jnp.maximum(jnp.sum(spread * values, axis=-1), 0.0))

        _, size = lax.scan(one, None, gram)
        return mass * jnp.moveaxis(size, 0, 2).reshape(mass.shape)

    def by_kv_head(
        self,
        mass: Float[Array, "B Hq S"],
        positions: Int[Array, "B Hk S"],
        apart: Bool[Array, "B Hk S"],
        learned: Mapping[str, Array] | None = None,
    ) -> Float[Array, "B Hk S"]:
        """Along the text and over the group, in the order that `pooled` says; then what is `common`."""
        if self.pooled == "groups":
            own = self.along_text(self.over_group(mass, positions.shape[1], learned), positions, apart)
        else:
            own = self.over_group(self.along_text(mass, positions, apart), positions.shape[1], learned)
        if not self.common:
            return own
        same = jnp.all(positions == positions[:, :1], axis=1, keepdims=True)
        return own + jnp.where(same, self.common * jnp.mean(own, axis=1, keepdims=True), 0.0)

    def over_group(
        self, mass: Float[Array, "B Hq S"], kv_heads: int, learned: Mapping[str, Array] | None = None
    ) -> Float[Array, "B Hk S"]:
        """Over the G query heads that share a KV head, or over the best of all."""
        batch, heads, slots = mass.shape
        if self.best:
            assert learned is not None
            _, which = lax.top_k(learned["retrieval"], min(self.best, heads))
            spoken = jnp.mean(jnp.take(mass, which, axis=1), axis=1, keepdims=True)
            return jnp.broadcast_to(spoken, (batch, kv_heads, slots))
        return REDUCE[self.group](mass.reshape(batch, kv_heads, heads // kv_heads, slots), axis=2)

    def over_heads(self, score: Float[Array, "B Hk S"]) -> Float[Array, "B Hk S"]:
        """The same score for every KV head of the layer, unless each decides for itself."""
        return over_heads(score, self.heads)

    def along_text(
        self, mass: Float[Array, "B Hq S"], positions: Int[Array, "B Hk S"], apart: Bool[Array, "B Hk S"]
    ) -> Float[Array, "B Hq S"]:
        """Pool each entry with its neighbours in time; entries set `apart` neither give nor count (as 0).

        The slots stand in time order, with empty ones anywhere between, as they do while a prompt is prefilled.
        The divisor of "avg" is always `kernel`, so the edges shrink, as in SnapKV's and kvpress' pooling.
        """
        if self.pool == "none":
            return mass
        group, slots = mass.shape[1] // positions.shape[1], positions.shape[-1]
        filled, apart = (jnp.repeat(x, group, axis=1) for x in (positions >= 0, apart))
        order = packed(filled, slots)
        line = jnp.take_along_axis(jnp.where(apart | ~filled, 0.0, mass), jnp.maximum(order, 0), axis=-1)
        line = jnp.where(order < 0, 0.0, line)
        reduce, start = (lax.add, 0.0) if self.pool == "avg" else (lax.max, -jnp.inf)
        half = self.kernel // 2
        line = lax.reduce_window(
            line, jnp.float32(start), reduce, (1, 1, self.kernel), (1, 1, 1), ((0, 0), (0, 0), (half, half))
        )
        if self.pool == "avg":
            line = line / self.kernel
        place = counted(filled) + slots - jnp.sum(filled, axis=-1, keepdims=True, dtype=jnp.int32)
        return jnp.where(filled, jnp.take_along_axis(line, jnp.maximum(place, 0), axis=-1), 0.0)
