"""Scores from the keys and values alone: which entries differ from the others. No attention is needed."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.errors import BadValue
from jaxkv.policies.needs import calibrated
from jaxkv.policies.order import best_first, count, in_chunks, in_time
from jaxkv.policies.score import Entering, Score, ScoreInputs, Stats
from pallas_kernels.decode_attend_score.victim import Factor


@dataclasses.dataclass(frozen=True)
class KeyDiff(Score):
    """score_j = -cos(k_j, mean_i k_i / ||k_i||): keep the keys that differ from the mean direction.

    Source: KeyDiff (arXiv 2504.15364).
    """

    kind: ClassVar[str] = "key-diff"
    signed: ClassVar[bool] = True
    linear: ClassVar[bool] = False

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        turned = unit(inputs.k)
        anchor = unit(jnp.sum(turned, axis=2) / count(inputs.live, -1, keepdims=True))
        return -jnp.einsum("bhsd,bhd->bhs", turned, anchor)


@dataclasses.dataclass(frozen=True)
class LagKV(Score):
    """Entries after the sinks in partitions of `lag`, each compared with the next partition.

    y = (x - min) / (max - min) by channel, minimum and maximum over the next partition; a token's score is the softmax
    over its partition of the standard deviation of y over the channels, for keys and values each, then their mean;
    with `cross=False` its rank in the partition / lag. The last whole partition and the rest score above all others,
    the newest highest. With fewer than 2 lag + sinks entries the newest stay. A channel that is constant in the next
    partition gives 0 (kvpress: infinite). Source: LagKV (arXiv 2504.04704).
    """

    lag: int = 128
    cross: bool = False
    kind: ClassVar[str] = "lag-kv"
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if self.lag < 2:
            raise BadValue(f"lag={self.lag}: expected at least 2 tokens to compare")

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        order, lag, slots = in_time(inputs.at), self.lag, inputs.at.shape[-1]
        rank = jnp.arange(slots)
        tail = 1.0 + rank / slots
        whole = (slots - inputs.sinks) // lag
        if whole < 2:
            return order.slots(jnp.broadcast_to(tail, inputs.at.shape).astype(jnp.float32))

        keys, values = (self._gaps(order.put(x)[:, :, inputs.sinks :], whole) for x in (inputs.k, inputs.v))
        gap = (keys + values) / 2
        if not self.cross:
            place = jnp.broadcast_to(jnp.arange(lag, dtype=jnp.int32), gap.shape)
            flat = (gap.shape[0], gap.shape[1] * gap.shape[2], lag)
            worst = lag - 1 - best_first(gap.reshape(flat), place.reshape(flat)).reshape(gap.shape)
            gap = worst.astype(jnp.float32) / lag
        gap = gap.reshape(*gap.shape[:2], -1)
        before = jnp.full((*gap.shape[:2], inputs.sinks), 2.0)  # sinks: protected by the phase
        after = jnp.zeros((*gap.shape[:2], slots - inputs.sinks - gap.shape[2]))
        scored = jnp.concatenate([before, gap, after], axis=-1)
        partitions = (order.count - inputs.sinks) // lag
        open_from = jnp.where(partitions < 2, 0, inputs.sinks + (partitions - 1) * lag)
        return order.slots(jnp.where(rank >= open_from[..., None], tail, scored).astype(jnp.float32))

    def _gaps(self, x: Float[Array, "B Hk R D"], whole: int) -> Float[Array, "B Hk P lag"]:
        """How unlike its next partition each token of the first P = whole - 1 partitions is."""
        x = x[:, :, : whole * self.lag].reshape(*x.shape[:2], whole, self.lag, x.shape[-1])
        low, high = jnp.min(x, axis=3)[:, :, 1:, None], jnp.max(x, axis=3)[:, :, 1:, None]
        wide = high > low
        y = jnp.where(wide, (x[:, :, :-1] - low) / jnp.where(wide, high - low, 1.0), 0.0)
        return jax.nn.softmax(jnp.std(y, axis=-1, ddof=1), axis=-1)


@dataclasses.dataclass(frozen=True)
class Cur(Score):
    """score = ||k||^2 * ||v||^2, each first divided by its sum over the entry's window of `window` neighbours.

    Source: CurDKV (arXiv 2509.15038), leverage of a CUR decomposition; the sum over all entries is 1.
    """

    local: int = 16
    kind: ClassVar[str] = "cur"
    linear: ClassVar[bool] = False

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        order = in_time(inputs.at)

        def share(x):
            size = order.put(jnp.sum(x * x, axis=-1))
            cells = in_chunks(size, self.local)
            total = jnp.sum(cells, axis=-1, keepdims=True)
            return (cells / jnp.where(total > 0, total, 1.0)).reshape(*size.shape[:2], -1)[..., : size.shape[-1]]

        both = order.slots(share(inputs.k) * share(inputs.v))
        total = jnp.sum(both, axis=-1, keepdims=True)
        return both / jnp.where(total > 0, total, 1.0)


@dataclasses.dataclass(frozen=True)
class Leverage(Score):
    """score = x^T (X^T X + 0.01 I)^-1 x of the centred keys before RoPE, through a Gaussian sketch, as z-scores.

    `sketch` 0 takes the keys themselves. The sketch is drawn by `seed`, the same for every row. Mean and deviation of
    the z-score are over the heads and entries of a row. What is protected is left out of all of them. Source:
    Compactor (arXiv 2507.08143).
    """

    sketch: int = 48
    seed: int = 0
    kind: ClassVar[str] = "leverage"
    signed: ClassVar[bool] = True
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if self.sketch < 0:
            raise BadValue(f"sketch={self.sketch}: expected the dims of the sketch, or 0 for none")

    def gaussian(self, heads: int, dims: int) -> Float[Array, "Hk D sketch"]:
        """The sketch, normal with variance 1 / sketch."""
        key = jax.random.key(self.seed)
        return jax.random.normal(key, (heads, dims, self.sketch), jnp.float32) * self.sketch**-0.5

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.places is not None
        free = inputs.free[..., None]
        keys = jnp.where(free, inputs.turned(inputs.k, -inputs.places), 0.0)
        x = jnp.where(free, keys - jnp.sum(keys, axis=2, keepdims=True) / count(free, 2, keepdims=True), 0.0)
        exact = lax.Precision.HIGHEST
        if self.sketch:
            sketch = self.gaussian(x.shape[1], x.shape[-1])
            x = jnp.einsum("bhsd,hdk->bhsk", x, sketch, precision=exact)
        gram = jnp.einsum("bhsk,bhsl->bhkl", x, x, precision=exact) + 0.01 * jnp.eye(x.shape[-1])
        solved = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(gram), True), jnp.swapaxes(x, -1, -2))
        return z_score(jnp.maximum(jnp.einsum("bhsk,bhks->bhs", x, solved), 0.0), inputs)


@dataclasses.dataclass(frozen=True)
class StretchLeverage(Score):
    """score = x^T (X^T X + `ridge` I)^-1 x, X being the keys before RoPE of one stretch of the prompt, centred and
    multiplied by a Gaussian sketch, as z-scores over the heads and tokens of the stretch.

    A block of the prompt has its stretches from its first token on; the last is as short as it is. All heads have the
    same sketch of `sketch` dims, drawn by `seed`. It is fixed as a token enters; a decoded one has 0. Source: the
    release of Compactor (arXiv 2507.08143).
    """

    sketch: int = 48
    stretch: int = 512
    ridge: float = 0.005
    seed: int = 0
    kind: ClassVar[str] = "stretch-leverage"
    signed: ClassVar[bool] = True
    stats: ClassVar[tuple[str, ...]] = ("stretch_leverage",)
    particular: ClassVar[bool] = True
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if self.sketch < 1 or self.stretch < 1 or not self.ridge > 0:
            raise BadValue(
                f"sketch={self.sketch}, stretch={self.stretch}, ridge={self.ridge}: expected at least 1 dim, at "
                "least 1 token and a number above 0"
            )

    def gaussian(self, dims: int) -> Float[Array, "D sketch"]:
        """The sketch, normal with variance 1 / sketch."""
        return jax.random.normal(jax.random.key(self.seed), (dims, self.sketch), jnp.float32) * self.sketch**-0.5

    def enter(self, new: Entering) -> Stats:
        if not new.prompt:
            return {"stretch_leverage": jnp.zeros(new.keys.shape[:-1], jnp.float32)}
        assert new.positions is not None
        exact, order = lax.Precision.HIGHEST, in_time(new.positions[:, None])  # behind padding: the first token first
        there = in_chunks(order.filled, self.stretch)[..., None]
        keys = order.put(new.keys.astype(jnp.float32))
        x = jnp.einsum("bhsd,dk->bhsk", keys, self.gaussian(keys.shape[-1]), precision=exact)
        x = jnp.where(there, in_chunks(x, self.stretch), 0.0)
        x = jnp.where(there, x - jnp.sum(x, axis=3, keepdims=True) / count(there, 3, keepdims=True), 0.0)
        gram = jnp.einsum("bhcsk,bhcsl->bhckl", x, x, precision=exact) + self.ridge * jnp.eye(self.sketch)
        inverse = inverted(jnp.linalg.cholesky(gram))
        hat = jnp.sum(jnp.einsum("bhcsk,bhclk->bhcsl", x, inverse, precision=exact) ** 2, axis=-1)
        worth = standard(hat, jnp.broadcast_to(there[..., 0], hat.shape), (1, 3), 0.0)
        worth = order.slots(worth.reshape(*worth.shape[:2], -1))
        return {"stretch_leverage": jnp.where((new.positions >= 0)[:, None], worth, 0.0)}

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        return stats["stretch_leverage"]


@dataclasses.dataclass(frozen=True)
class Redundancy(Score):
    """score = -softmax_j(mean_i cos(k_i, k_j)): keep the keys that have no near copy.

    Each key's newest copy above `threshold` counts 0, so that one of several copies stays (with no copy nothing is
    left out; the released code then leaves out the first key). Source: R-KV (arXiv 2505.24133).
    """

    threshold: float = 0.5
    kind: ClassVar[str] = "redundancy"
    signed: ClassVar[bool] = True
    linear: ClassVar[bool] = False

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        keys, at, live = unit(inputs.k), inputs.at, inputs.live
        slots = at.shape[-1]
        rows = 256  # at a time: there is never an S x S array
        blocks = in_chunks(keys, rows), in_chunks(at + 1, rows) - 1, in_chunks(jnp.arange(slots)[None, None], rows)

        def some(total, block):
            mine, when, slot = block
            cos = jnp.einsum("bhrd,bhsd->bhrs", mine, keys)
            self_too = slot[0, 0][:, None] == jnp.arange(slots)
            cos = jnp.where(self_too | (when < 0)[..., None], 0.0, cos)
            newest = jnp.max(jnp.where(cos > self.threshold, at[:, :, None], -1), axis=-1)
            cos = jnp.where((at[:, :, None] == newest[..., None]) & (newest >= 0)[..., None], 0.0, cos)
            return total + jnp.sum(cos, axis=2), None

        total = jnp.zeros(at.shape, jnp.float32)
        total, _ = lax.scan(some, total, tuple(jnp.moveaxis(block, 2, 0) for block in blocks))
        mean = total / count(live, -1, keepdims=True)
        return -jax.nn.softmax(jnp.where(live, mean, -jnp.inf), axis=-1)


def inverted(lower: Float[Array, "*lead k k"]) -> Float[Array, "*lead k k"]:
    """The inverse of small lower triangular matrices, a row at a time. On a CPU LAPACK's would be threaded, and its
    threads stand in the way of XLA's."""
    size = lower.shape[-1]

    def row(at, rows):
        own = jnp.take(lower, at, axis=-2)
        others = jnp.where(jnp.arange(size) < at, own, 0.0)
        known = jnp.einsum("...k,...kl->...l", others, rows, precision=lax.Precision.HIGHEST)
        unit = (jnp.arange(size) == at).astype(lower.dtype)
        return rows.at[..., at, :].set((unit - known) / jnp.take(own, at, axis=-1)[..., None])

    return lax.fori_loop(0, size, row, jnp.zeros_like(lower))


def z_score(x: Float[Array, "B Hk S"], inputs: ScoreInputs, apart: bool = True) -> Float[Array, "B Hk S"]:
    """(x - mean) / deviation over the heads and entries of each row: with `apart` over those that nothing protects, the
    deviation unbiased, else over all and biased."""
    return standard(x, inputs.free if apart else inputs.live, (1, 2), 1.0 if apart else 0.0)


def standard(
    x: Float[Array, "*all"], counted: Bool[Array, "*all"], axes: tuple[int, ...], less: float
) -> Float[Array, "*all"]:
    """(x - mean) / deviation over the axes, among what is `counted`, of whose number `less` is taken away under the
    squares' sum; 0 where the deviation is not above 1e-6, for that is rounding."""
    many = count(counted, axes, keepdims=True)
    mean = jnp.sum(jnp.where(counted, x, 0.0), axis=axes, keepdims=True) / many
    square = jnp.sum(jnp.where(counted, (x - mean) ** 2, 0.0), axis=axes, keepdims=True)
    deviation = jnp.sqrt(square / jnp.maximum(many - less, 1.0))
    return jnp.where(deviation > 1e-6, (x - mean) / jnp.maximum(deviation, 1e-6), 0.0)


def unit(x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
    """x / ||x||, 0 where x is 0."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


@dataclasses.dataclass(frozen=True)
class QueryDirection(Score):
    """score = k . u, u being the main direction of the KV head's queries, measured beforehand; k turned to its place
    in the text.

    kvpress' filters point the other way, so its score has a minus. Source: Q-Filters (arXiv 2503.02812).
    """

    kind: ClassVar[str] = "query-direction"
    signed: ClassVar[bool] = True
    stats: ClassVar[tuple[str, ...]] = ("along",)
    needs: ClassVar[frozenset[str]] = frozenset({calibrated("query_direction")})

    def enter(self, new: Entering) -> Stats:
        assert new.positions is not None and new.rotate is not None
        keys = new.rotate(new.keys.astype(jnp.float32), new.positions[:, None])
        return {"along": jnp.einsum("bhtd,hd->bht", keys, new.learned["query_direction"])}

    def factors(self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"]) -> tuple[Factor, Factor]:
        return 0.0, stats["along"]
