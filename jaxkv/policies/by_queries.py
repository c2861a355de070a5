"""Scores from what queries are like, without their attention: the prompt's (at prefill only), or calibrated ones."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.errors import BadValue
from jaxkv.policies.aggregate import Aggregate
from jaxkv.policies.by_keys import z_score
from jaxkv.policies.needs import QUERIES, calibrated
from jaxkv.policies.order import count, in_chunks, in_time
from jaxkv.policies.score import Entering, Score, ScoreInputs, Stats

ROWS = 64  # queries that look together
TILE = 64  # queries of a chunk that the release of Compactor loads together


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(Score):
    """The attention that a normal distribution of future queries gives, in closed form, over all but the sinks.

    z_j = mu . k_j scale + k_j^T Sigma k_j scale^2 / 2 per query head, with mean and covariance (1/N) of the block's
    queries before RoPE, both turned by the mean rotation of the next `future` positions; score = mean over the group
    of softmax_j(z_j). `scaled` by ||v||, with its epsilon, it is the published score. Source: Expected Attention (arXiv
    2510.00636).
    """

    future: int = 512
    covariance: bool = True
    kind: ClassVar[str] = "expected-attention"
    linear: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({QUERIES})

    def __post_init__(self):
        if self.future < 1:
            raise BadValue(f"future={self.future}: expected at least 1 position ahead")

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        queries, seen = _queries(inputs)
        many = count(seen, -1)[:, None, None]
        mean, spread = jnp.sum(queries, axis=2) / many, None
        if self.covariance:
            off = jnp.where(seen[:, None, :, None], queries - mean[:, :, None], 0.0)
            spread = jnp.einsum("bhtd,bhte->bhde", off, off) / many[..., None]
        assert inputs.query_places is not None
        turn = _mean_rotation(inputs, jnp.max(inputs.query_places, axis=1), self.future)
        return _expected(inputs, mean, spread, turn)


@dataclasses.dataclass(frozen=True)
class CalibratedAttention(Score):
    """`ExpectedAttention` with mean and covariance of the queries from `jaxkv calibrate` instead of the prompt's.

    It looks at no query, so it scores at decode too. Source: Expected Attention (arXiv 2510.00636), in the form of
    kvpress' ExpectedAttentionStats.
    """

    future: int = 512
    covariance: bool = True
    kind: ClassVar[str] = "calibrated-attention"
    linear: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({calibrated("query_covariance"), calibrated("query_mean")})

    def __post_init__(self):
        if self.future < 1:
            raise BadValue(f"future={self.future}: expected at least 1 position ahead")

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.places is not None
        rows = inputs.places.shape[0]
        mean, spread = (
            jnp.repeat(inputs.learned[name][None], rows, axis=0) for name in ("query_mean", "query_covariance")
        )
        last = jnp.max(jnp.where(inputs.live, inputs.places, -1), axis=(1, 2))
        turn = _mean_rotation(inputs, last, self.future)
        return _expected(inputs, mean, spread if self.covariance else None, turn)


@dataclasses.dataclass(frozen=True)
class Capacity(Score):
    """score_j = w_j v_j^T A^-1 v_j with A = I + sum_j (w_j + epsilon) v_j v_j^T, w_j = exp(tau (c_j - max c)).

    c_j is the cosine of k_j and the mean query before RoPE turned by the mean rotation of the next `future` positions;
    mean over the group; sinks stay outside. Source: CapKV (arXiv 2604.25975), in kvpress' form.
    """

    tau: float = 5.0
    future: int = 512
    epsilon: float = 1e-6
    kind: ClassVar[str] = "capacity"
    linear: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({QUERIES})

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        keys, values = inputs.k, inputs.v
        queries, seen = _queries(inputs)
        mean = jnp.sum(queries, axis=2) / count(seen, -1)[:, None, None]
        assert inputs.query_places is not None
        turn = _mean_rotation(inputs, jnp.max(inputs.query_places, axis=1), self.future)
        anchor = jnp.einsum("bij,bhj->bhi", turn, mean)
        anchor, free = _grouped(anchor, keys.shape[1]), (inputs.live & (inputs.at >= inputs.sinks))[:, :, None]
        size = jnp.linalg.norm(anchor, axis=-1)[..., None] * jnp.linalg.norm(keys, axis=-1)[:, :, None]
        cos = jnp.clip(jnp.einsum("bhgd,bhsd->bhgs", anchor, keys) / jnp.maximum(size, 1e-12), -1.0, 1.0)
        top = jnp.max(jnp.where(free, cos, -1.0), axis=-1, keepdims=True)
        weight = jnp.where(free, jnp.exp(self.tau * (cos - top)), 0.0)
        more = jnp.where(free, weight + self.epsilon, 0.0)
        exact = lax.Precision.HIGHEST
        heavy = more[..., None] * values[:, :, None]
        gram = jnp.einsum("bhgsd,bhse->bhgde", heavy, values, precision=exact) + jnp.eye(values.shape[-1])
        turned = jnp.broadcast_to(jnp.swapaxes(values, 2, 3)[:, :, None], (*gram.shape[:4], values.shape[2]))
        solved = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(gram), True), turned)
        return jnp.mean(weight * jnp.einsum("bhsd,bhgds->bhgs", values, solved), axis=2)


@dataclasses.dataclass(frozen=True)
class NonCausal(Score):
    """The block in chunks of `mutual` tokens; inside each every query sees every key, earlier or later.

    score = z-score of sum_i softmax_j(q_i . k_j), mean over the group; there is no scale in that softmax. It is fixed
    as a token enters. Every key of a last chunk that is too short gets 1 / `mutual` for each query that is missing to
    the next multiple of 64. With `by_value` the sum is multiplied by ||v_j||, and `neighbours` is the odd number of
    sums, its own in the middle, that it is the mean of. With `apart` the sinks and the newest tokens that the phase
    protects look at themselves alone, chunks begin behind the sinks, and the last chunk is as short as it is. Source:
    the release of Compactor (arXiv 2507.08143); chunks of 256, `neighbours` 3, `by_value` and `apart` are kvpress'
    (whose padding leaks into the last chunk).
    """

    mutual: int = 128
    neighbours: int = 1
    by_value: bool = False
    apart: bool = False
    kind: ClassVar[str] = "non-causal"
    signed: ClassVar[bool] = True
    stats: ClassVar[tuple[str, ...]] = ("non_causal",)
    particular: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({QUERIES})

    def __post_init__(self):
        if self.mutual < 1:
            raise BadValue(f"mutual={self.mutual}: expected at least 1 token")
        if self.neighbours < 1 or self.neighbours % 2 == 0:
            raise BadValue(f"neighbours={self.neighbours}: expected an odd number, 1 for the token alone")

    def enter(self, new: Entering) -> Stats:
        if not new.prompt:
            return {"non_causal": jnp.zeros(new.keys.shape[:-1], jnp.float32)}
        assert new.queries is not None and new.positions is not None and new.rotate is not None
        positions, length, kv_heads = new.positions, new.positions.shape[1], new.keys.shape[1]
        sinks = (positions >= 0) & (positions < new.sinks) & self.apart
        newest = ~sinks & (positions > positions[:, -1:] - new.recent) & self.apart
        part = jnp.where(positions < 0, 0, jnp.where(sinks, 1, jnp.where(newest, 3, 2)))  # 0: no token
        before = jnp.sum(part < 2, axis=1, dtype=jnp.int32)  # chunks begin behind them, and they come last
        shift = (jnp.arange(length)[None] + before[:, None]) % length
        undo = (jnp.arange(length)[None] - before[:, None]) % length

        def chunks(x):
            x = jnp.where((positions >= 0)[:, None, :, None], x.astype(jnp.float32), 0.0)
            return in_chunks(jnp.take_along_axis(x, shift[:, None, :, None], axis=2), self.mutual)

        query, key = (chunks(new.rotate(x, positions[:, None])) for x in (new.queries, new.keys))
        belongs = in_chunks(jnp.take_along_axis(part, shift, axis=1)[:, None], self.mutual)[:, 0]

        def one(_, each):
            query, key, belongs = each
            sees = (belongs[:, :, None] == belongs[:, None]) & (belongs[:, :, None] > 0)
            sees = sees[:, None, None]
            logits = jnp.where(sees, jnp.einsum("bhgtd,bhsd->bhgts", _grouped(query, kv_heads), key), -1e30)
            weight = jnp.where(sees, jax.nn.softmax(logits, axis=-1), 0.0)
            total = jnp.mean(jnp.sum(weight, axis=3), axis=2)
            if self.apart:
                return None, total
            lacks = -jnp.sum(belongs > 0, axis=1, dtype=jnp.int32) % min(TILE, self.mutual)
            return None, total + lacks[:, None, None].astype(jnp.float32) / self.mutual

        each = jnp.moveaxis(query, 2, 0), jnp.moveaxis(key, 2, 0), jnp.moveaxis(belongs, 1, 0)
        _, total = lax.scan(one, None, each)
        total = jnp.moveaxis(total, 0, 2).reshape(*new.keys.shape[:2], -1)[:, :, :length]
        total = jnp.take_along_axis(total, undo[:, None], axis=2)
        total = jnp.where((positions >= 0)[:, None], total, 0.0)
        if self.by_value:
            total = total * jnp.linalg.norm(new.values.astype(jnp.float32), axis=-1)
        half = self.neighbours // 2
        around = total
        for step in (step for step in range(-half, half + 1) if step):
            alike = part == jnp.roll(part, step, axis=1)  # neighbours of one part
            alike &= (jnp.arange(length) >= step) & (jnp.arange(length) < length + step)
            around = around + jnp.where(alike[:, None], jnp.roll(total, step, axis=2), 0.0)
        return {"non_causal": around / self.neighbours}

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        return z_score(stats["non_causal"], inputs, self.apart)


@dataclasses.dataclass(frozen=True)
class QuestionAttention(Score):
    """The mean attention of the prompt's last `window` queries, each weighted by how many earlier keys it sees.

    The window's own keys stay in the softmax and are not counted. Source: Finch (TACL 2024, 10.1162/tacl_a_00716),
    where the window is the question behind the context.
    """

    question: int = 32
    kind: ClassVar[str] = "question-attention"
    aware: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({QUERIES})

    def __post_init__(self):
        if self.question < 1:
            raise BadValue(f"question={self.question}: expected at least 1 token")

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        weight, _ = window_attention(inputs, self.question)
        before = inputs.live & (inputs.at < (inputs.next - self.question)[:, None, None])
        earlier = jnp.sum(before, axis=-1, dtype=jnp.float32)[:, :, None, None, None]
        weight = jnp.where(before[:, :, None, None], weight, 0.0)
        length = weight.shape[3]
        weight = weight * (earlier + jnp.arange(length, dtype=jnp.float32)[:, None])
        return jnp.mean(jnp.sum(weight, axis=3), axis=2) / length


@dataclasses.dataclass(frozen=True)
class Glimpse(Score):
    """score = the most that any of the block's last queries attends to the entry, each query by the mean of its heads.

    `share` of the prompt's tokens look, rounded down, at least one (of each block, where a prompt is longer than one).
    All heads keep the same. Source: MPCache (arXiv 2501.06807), whose look-once half keeps what passes a threshold set
    per task; under a budget that is the best by this order. Its release leaves out the causal mask and the scale of the
    logits; here they are the model's own.
    """

    share: float = 0.2
    kind: ClassVar[str] = "glimpse"
    aware: ClassVar[bool] = True
    together: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({QUERIES})

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise BadValue(f"share={self.share}: expected a fraction of the prompt above 0 and up to 1")

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.queries is not None and inputs.query_positions is not None and inputs.query_places is not None
        at, share = inputs.query_positions, np.float32(self.share)
        tokens = jnp.sum(at >= 0, axis=1, keepdims=True, dtype=jnp.int32)
        many = jnp.maximum(jnp.floor(tokens.astype(jnp.float32) * share).astype(jnp.int32), 1)
        most = max(int(np.floor(np.float32(at.shape[1]) * share)), 1)  # as the row's own, rounded alike
        looks = jnp.where(jnp.arange(most) >= most - many, at[:, -most:], -1)
        fill = ((0, 0), (-most % ROWS, 0))
        looks, place = (jnp.pad(x, fill, constant_values=-1) for x in (looks, inputs.query_places[:, -most:]))
        query = jnp.pad(inputs.queries[:, :, -most:].astype(jnp.float32), (fill[0], *fill, fill[0]))
        heads, keys = inputs.at.shape[1], inputs.k

        def some(peak, first):
            """The peak after ROWS more queries: there is never a queries x S array of all."""
            mine, its, where = (
                lax.dynamic_slice_in_dim(x, first, ROWS, a) for x, a in ((looks, 1), (place, 1), (query, 2))
            )
            turned = _grouped(inputs.turned(where, its[:, None]), heads)
            logits = jnp.einsum("bhgtd,bhsd->bhgts", turned, keys) * inputs.scale
            sees = (inputs.live[:, :, None] & (inputs.at[:, :, None] <= mine[:, None, :, None]))[:, :, None]
            mass = jnp.where(sees, jax.nn.softmax(jnp.where(sees, logits, -1e30), axis=-1), 0.0)
            return jnp.maximum(peak, jnp.max(jnp.mean(mass, axis=(1, 2)), axis=1)), None

        nothing = jnp.zeros((at.shape[0], keys.shape[2]), jnp.float32)
        peak, _ = lax.scan(some, nothing, jnp.arange(0, query.shape[2], ROWS))
        return jnp.broadcast_to(peak[:, None], inputs.at.shape)


@dataclasses.dataclass(frozen=True)
class ShiftingAttention(Score):
    """score = mean + gamma * variance (W - 1) of the last `window` queries' attention.

    Averaged over `kernel` neighbours and the group. What is looked at now and then is worth more than what always gets
    the same.

    Source: CAKE (arXiv 2503.12491), its eviction indicator.
    """

    window: int = 32
    gamma: float = 200.0
    kernel: int = 5
    kind: ClassVar[str] = "shifting-attention"
    aware: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({QUERIES})

    def __post_init__(self):
        if self.window < 2 or self.kernel < 1 or self.kernel % 2 == 0:
            raise BadValue(
                f"window={self.window}, kernel={self.kernel}: expected at least 2 queries, for they have a variance, "
                "and an odd number"
            )

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        mass, real = window_attention(inputs, self.window)
        mean, variance = over_queries(mass, real)
        worth = mean + self.gamma * variance
        worth = worth.reshape(worth.shape[0], -1, worth.shape[-1])  # by query heads
        apart = inputs.at >= (inputs.next - self.window)[:, None, None]
        aggregate = Aggregate(pool="avg", kernel=self.kernel)
        return aggregate.by_kv_head(worth, inputs.at, apart)


@dataclasses.dataclass(frozen=True)
class WorstAttention(Score):
    """score_j = max(a_j, mean_i a_i), a_j = the largest attention to j of the last `window` queries of the group.

    The attention of each query to the tokens before the window is averaged over `kernel` neighbours first, and scaled
    to the sum that it had. The mean is over the head's entries before the window: what few queries of the window asked
    for may still be wanted later. Source: DefensiveKV (arXiv 2510.13334).
    """

    window: int = 32
    kernel: int = 5
    kind: ClassVar[str] = "worst-attention"
    aware: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({QUERIES})

    def __post_init__(self):
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise BadValue(f"window={self.window}, kernel={self.kernel}: expected at least 1 query, and an odd number")

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        mass, real = window_attention(inputs, self.window)
        before = inputs.live & (inputs.at < (inputs.next - self.window)[:, None, None])
        mass = jnp.where(before[:, :, None, None] & real[:, None, None, :, None], mass, 0.0)
        rows = mass.reshape(mass.shape[0], -1, mass.shape[-1])  # a query of a head each
        even = Aggregate(pool="avg", kernel=self.kernel).along_text(rows, inputs.at, ~before).reshape(mass.shape)
        even = jnp.where(before[:, :, None, None], even, 0.0)
        total, now = (jnp.sum(x, axis=-1, keepdims=True) for x in (mass, even))
        worst = jnp.max(even / jnp.where(now > 0, now, 1.0) * total, axis=(2, 3))
        mean = jnp.sum(worst, axis=-1, keepdims=True) / count(before, -1, keepdims=True)
        return jnp.where(before, jnp.maximum(worst, mean), 0.0)


@dataclasses.dataclass(frozen=True)
class WindowAttention(Score):
    """The mean over the layer's last `window` queries q of softmax_j(max_g q_g . k_j scale), j over the entries before
    the window and g over the group; then the largest of `kernel` neighbours.

    While decoding too: the queries lie beside the slots. Source: R-KV's release (arXiv 2505.24133).
    """

    window: int = 8
    kernel: int = 7
    kind: ClassVar[str] = "window-attention"
    aware: ClassVar[bool] = True
    linear: ClassVar[bool] = False

    def __post_init__(self):
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise BadValue(f"window={self.window}, kernel={self.kernel}: expected at least 1 query, and an odd number")
        object.__setattr__(self, "looks", self.window)

    def score(self, stats: Stats, inputs: ScoreInputs) -> Float[Array, "B Hk S"]:
        assert inputs.looks is not None, "this score needs the layer's last queries"
        order = in_time(inputs.at)
        at, keys = order.put(inputs.at), order.put(inputs.k)
        query = _grouped(inputs.looks[:, :, -self.window :].astype(jnp.float32), keys.shape[1])
        logits = jnp.max(jnp.einsum("bhgtd,bhsd->bhgts", query, keys), axis=2) * inputs.scale
        before = (at >= 0) & (at < (inputs.next - self.window)[:, None, None])
        real = jnp.arange(self.window) >= self.window - inputs.next[:, None]  # of a text that is shorter
        sees = before[:, :, None] & real[:, None, :, None]
        mass = jnp.where(sees, jax.nn.softmax(jnp.where(sees, logits, -1e30), axis=-1), 0.0)
        mean = jnp.sum(mass, axis=2) / count(real, -1)[:, None, None]
        return order.slots(Aggregate(pool="max", kernel=self.kernel).along_text(mean, at, ~before))


def window_attention(inputs: ScoreInputs, window: int) -> tuple[Float[Array, "B Hk G W S"], Bool[Array, "B W"]]:
    """The attention of the block's last `window` queries to every entry (0 for padding), and which of them are real."""
    assert inputs.queries is not None and inputs.query_positions is not None
    assert inputs.query_places is not None
    at, place = (x[:, -window:] for x in (inputs.query_positions, inputs.query_places))
    query = inputs.turned(inputs.queries[:, :, -window:].astype(jnp.float32), place[:, None])
    logits = jnp.einsum("bhgtd,bhsd->bhgts", _grouped(query, inputs.at.shape[1]), inputs.k) * inputs.scale
    sees = (inputs.live[:, :, None] & (inputs.at[:, :, None] <= at[:, None, :, None]))[:, :, None]
    return jnp.where(sees, jax.nn.softmax(jnp.where(sees, logits, -1e30), axis=-1), 0.0), at >= 0


def over_queries(
    mass: Float[Array, "B Hk G W S"], real: Bool[Array, "B W"]
) -> tuple[Float[Array, "B Hk G S"], Float[Array, "B Hk G S"]]:
    """Mean and variance (W - 1) of the attention over the real queries, of which there are at least two."""
    many = jnp.maximum(jnp.sum(real, axis=-1), 2).astype(jnp.float32)[:, None, None, None]
    mean = jnp.sum(mass, axis=3) / many
    off = jnp.where(real[:, None, None, :, None], mass - mean[:, :, :, None], 0.0)
    return mean, jnp.sum(off * off, axis=3) / (many - 1)


def _queries(inputs: ScoreInputs) -> tuple[Float[Array, "B Hq T D"], Bool[Array, "B T"]]:
    """The block's queries before RoPE, float32, 0 where they don't count: padding and sinks."""
    assert inputs.queries is not None and inputs.query_positions is not None, "this score needs the prompt's queries"
    seen = inputs.query_positions >= inputs.sinks
    return jnp.where(seen[:, None, :, None], inputs.queries.astype(jnp.float32), 0.0), seen


def _expected(
    inputs: ScoreInputs,
    mean: Float[Array, "B Hq D"],
    spread: Float[Array, "B Hq D D"] | None,
    turn: Float[Array, "B D D"],
) -> Float[Array, "B Hk S"]:
    """The mean over the group of softmax_j(mu . k_j scale + k_j^T Sigma k_j scale^2 / 2), mu and Sigma turned."""
    keys = inputs.k
    ahead = _grouped(jnp.einsum("bij,bhj->bhi", turn, mean), keys.shape[1])
    z = jnp.einsum("bhgd,bhsd->bhgs", ahead, keys) * inputs.scale
    if spread is not None:
        spread = _grouped(jnp.einsum("bij,bhjk,blk->bhil", turn, spread, turn), keys.shape[1])
        spent = jnp.einsum("bhsd,bhgde->bhgse", keys, spread)
        z = z + jnp.einsum("bhgse,bhse->bhgs", spent, keys) * inputs.scale**2 / 2
    free = (inputs.live & (inputs.at >= inputs.sinks))[:, :, None]
    weight = jnp.where(free, jax.nn.softmax(jnp.where(free, z, -1e30), axis=-1), 0.0)
    return jnp.mean(weight, axis=2)


def _mean_rotation(inputs: ScoreInputs, last: Int[Array, "B"], future: int) -> Float[Array, "B D D"]:
    """The mean over the `future` positions after `last` of the matrix that turns a vector to that position."""
    dims = inputs.k.shape[-1]
    halves = jnp.concatenate([jnp.ones(dims // 2), jnp.zeros(dims - dims // 2)])  # turns to [cos, sin]
    ahead = last[:, None] + 1 + jnp.arange(future, dtype=jnp.int32)
    turned = inputs.turned(jnp.broadcast_to(halves, (*ahead.shape, dims)), ahead)
    cos, sin = jnp.split(jnp.mean(turned, axis=1), 2, axis=-1)
    eye = jnp.eye(dims // 2)
    cos, sin = cos[..., None] * eye, sin[..., None] * eye
    return jnp.concatenate([jnp.concatenate([cos, -sin], axis=-1), jnp.concatenate([sin, cos], axis=-1)], axis=-2)


def _grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """`[B, Hq, ...]` as `[B, Hk, G, ...]`."""
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])
