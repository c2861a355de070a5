"""A sketch of what has left: clusters of its keys, and a sample of its values, from which attention is estimated."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.store.aside import Aside
from pallas_kernels.masking import soft_cap
from pallas_kernels.partial import Partial

LATE = 2**31 - 1  # after every position


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sketch(Aside):
    """M clusters of keys with T members each, and S entries, per KV head.

    `counts` are the clusters' sizes (0: not there yet), `centres` their first keys, `members` T keys of each, drawn
    evenly with replacement; `keys` and `values` are entries drawn with odds ||v||^2, with replacement, and `mass` is
    the sum of ||v||^2 over all that has left. A draw is the place with the highest number of a hash: `member_draws` and
    `draws` are these numbers, below every other where nothing is drawn yet.
    """

    centres: Float[Array, "B Hk M D"]
    counts: Float[Array, "B Hk M"]
    members: Float[Array, "B Hk MT D"]
    member_draws: Float[Array, "B Hk MT"]
    keys: Float[Array, "B Hk S D"]
    values: Float[Array, "B Hk S D"]
    draws: Float[Array, "B Hk S"]
    mass: Float[Array, "B Hk"]

    @property
    def kv_bytes(self) -> int:
        """Bytes of its keys and values."""
        return sum(x.nbytes for x in (self.centres, self.members, self.keys, self.values))

    def added(
        self,
        keys: Float[Array, "B Hk N D"],
        values: Float[Array, "B Hk N D"],
        positions: Int[Array, "B Hk N"],
        member_draws: Float[Array, "B Hk N T"],
        draws: Float[Array, "B Hk N S"],
        radius: float,
    ) -> "Sketch":
        """The sketch with these entries in it, those at position -1 left out.

        While there is room, the entry farthest from all centres opens a cluster of its own, if it lies farther from
        them than `radius`; then every entry joins the cluster of the nearest centre.
        """
        lost = positions >= 0
        keys, values = (jnp.where(lost[..., None], x.astype(jnp.float32), 0.0) for x in (keys, values))
        centres, open_ = self._opened(keys, lost, positions, radius)
        gap = jnp.where(open_[:, :, None], _gaps(keys, centres), jnp.inf)
        joins = lost[..., None] & (jnp.argmin(gap, axis=-1)[..., None] == jnp.arange(open_.shape[-1]))
        many = self.member_draws.shape[-1] // open_.shape[-1]
        drawn = jnp.where(joins[..., None], member_draws[:, :, :, None], -1.0)  # [B, Hk, N, M, T]
        members, best = _drawn(self.members, self.member_draws, drawn.reshape(*lost.shape, -1), keys)
        size = jnp.sum(jnp.square(values), axis=-1)
        odds = jnp.where((lost & (size > 0))[..., None], draws / jnp.maximum(size, 1e-30)[..., None], -jnp.inf)
        own_keys, _ = _drawn(self.keys, self.draws, odds, keys)
        own_values, most = _drawn(self.values, self.draws, odds, values)
        assert many == member_draws.shape[-1]
        counts = self.counts + jnp.sum(joins, axis=2, dtype=jnp.float32)
        return Sketch(centres, counts, members, best, own_keys, own_values, most, self.mass + jnp.sum(size, axis=-1))

    def _opened(
        self,
        keys: Float[Array, "B Hk N D"],
        lost: Bool[Array, "B Hk N"],
        positions: Int[Array, "B Hk N"],
        radius: float,
    ) -> tuple[Float[Array, "B Hk M D"], Bool[Array, "B Hk M"]]:
        """The centres and which there are, after those that the lost entries open."""

        def farthest(centres, open_):
            gap = jnp.min(jnp.where(open_[:, :, None], _gaps(keys, centres), jnp.inf), axis=-1)
            gap = jnp.where(lost, gap, -1.0)
            most = jnp.max(gap, axis=-1)
            at = jnp.argmin(jnp.where(gap == most[..., None], positions, LATE), axis=-1)  # of equals the oldest
            return at, (most > radius**2) & ~jnp.all(open_, axis=-1)

        def one(carry):
            centres, open_, at, comes = carry
            new = comes[..., None] & (jnp.arange(open_.shape[-1]) == jnp.argmin(open_, axis=-1)[..., None])
            key = jnp.take_along_axis(keys, at[..., None, None], axis=2)
            centres = jnp.where(new[..., None], key, centres)
            return centres, open_ | new, *farthest(centres, open_ | new)

        open_ = self.counts > 0
        start = self.centres, open_, *farthest(self.centres, open_)
        centres, open_, *_ = lax.while_loop(lambda carry: jnp.any(carry[3]), one, start)
        return centres, open_

    def attend(
        self, query: Float[Array, "B Hq T D"], position: Int[Array, "B T"], *, scale: float, softcap: float | None
    ) -> Partial:
        """The estimate: sum_j mass / (S ||v_j||^2) exp(q . k_j) v_j over the S entries, and for the log-sum-exp
        log sum_i n_i / T sum_j exp(q . k_ij) over the clusters' members. All are older than every query."""
        batch, heads, length, dim = query.shape
        grouped = query.reshape(batch, self.keys.shape[1], -1, length, dim).astype(jnp.float32)

        def logits(keys):
            return soft_cap(jnp.einsum("bhgtd,bhsd->bhgts", grouped, keys) * scale, softcap)

        many = self.member_draws.shape[-1] // self.counts.shape[-1]
        sizes = jnp.repeat(self.counts / many, many, axis=-1)
        there = (sizes > 0)[:, :, None, None] & (position >= 0)[:, None, None, :, None]
        weighted = logits(self.members) + jnp.log(jnp.maximum(sizes, 1e-30))[:, :, None, None]
        lse = jax.nn.logsumexp(jnp.where(there, weighted, -jnp.inf), axis=-1)
        size = jnp.sum(jnp.square(self.values), axis=-1)
        odds = self.mass[..., None] / (jnp.maximum(size, 1e-30) * size.shape[-1])
        known = (self.draws > -jnp.inf)[:, :, None, None] & (lse > -jnp.inf)[..., None]
        share = logits(self.keys) + jnp.log(jnp.maximum(odds, 1e-30))[:, :, None, None]
        weights = jnp.where(known, jnp.exp(jnp.where(known, share - lse[..., None], 0.0)), 0.0)
        output = jnp.einsum("bhgts,bhsd->bhgtd", weights, self.values)
        return Partial(output.reshape(query.shape), lse.reshape(batch, heads, length))


def _gaps(keys: Float[Array, "B Hk N D"], centres: Float[Array, "B Hk M D"]) -> Float[Array, "B Hk N M"]:
    """||k - c||^2, by k^2 - 2 k c + c^2."""
    exact = lax.Precision.HIGHEST
    dot = jnp.einsum("bhnd,bhmd->bhnm", keys, centres, precision=exact)
    squares = (jnp.sum(jnp.square(x), axis=-1) for x in (keys, centres))
    of_keys, of_centres = squares
    return jnp.maximum(of_keys[..., None] - 2 * dot + of_centres[:, :, None], 0.0)


def _drawn(
    held: Float[Array, "B Hk S D"],
    best: Float[Array, "B Hk S"],
    draws: Float[Array, "B Hk N S"],
    x: Float[Array, "B Hk N D"],
) -> tuple[Float[Array, "B Hk S D"], Float[Array, "B Hk S"]]:
    """Of what is held and each of the `x` that with the highest draw, and that draw."""
    at, most = jnp.argmax(draws, axis=2), jnp.max(draws, axis=2)
    comes = most > best
    return jnp.where(comes[..., None], jnp.take_along_axis(x, at[..., None], axis=2), held), jnp.maximum(most, best)


def empty(batch: int, heads: int, clusters: int, members: int, sample: int, head_dim: int) -> Sketch:
    """Of nothing."""

    def full(value: float, *shape: int) -> Float[Array, "..."]:
        return jnp.full((batch, heads, *shape), value, jnp.float32)

    return Sketch(
        centres=full(0.0, clusters, head_dim),
        counts=full(0.0, clusters),
        members=full(0.0, clusters * members, head_dim),
        member_draws=full(-1.0, clusters * members),
        keys=full(0.0, sample, head_dim),
        values=full(0.0, sample, head_dim),
        draws=full(-jnp.inf, sample),
        mass=full(0.0),
    )
