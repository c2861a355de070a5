"""Low rank: of every KV head the directions that its keys or values take, the same ones in all slots."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float16, Int

from jaxkv.errors import BadValue, unknown
from jaxkv.store.codec import Codec, Fitting, small

BASES = {"prompt": "", "keys": "key_moment", "values": "value_moment"}  # and what is learned for them


@dataclasses.dataclass(frozen=True)
class LowRank(Fitting):
    """x^ = V V^T x, V the int(share * D) eigenvectors of largest eigenvalue of a KV head's mean x x^T, fitted once,
    when a prompt has been read. A slot holds V^T x.

    `basis` says whose mean: of the "prompt" (what is held of it), or of a text on which `jaxkv calibrate` has measured
    the "keys" or the "values", after RoPE. Each row holds its V `[D, R]` of every head, in float16. Source: the low
    rank of CSKV (arXiv 2409.10593), by the SVD of activations as in arXiv 2406.07056.
    """

    share: float = 0.5
    basis: str = "prompt"
    pooled: ClassVar[bool] = False
    kind: ClassVar[str] = "low-rank"

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise BadValue(f"share={self.share}: expected the fraction of directions kept, above 0 and at most 1")
        if self.basis not in BASES:
            raise unknown("basis of codec 'low-rank'", self.basis, BASES)

    @property
    def learns(self) -> tuple[str, ...]:
        name = BASES[self.basis]
        return (name,) if name else ()

    def rank(self, head_dim: int) -> int:
        """Directions kept of so many, at least one."""
        return max(int(self.share * head_dim), 1)

    def fit(
        self,
        x: Float[Array, "B Hk S D"],
        positions: Int[Array, "B Hk S"],
        queries: Float[Array, "B Hq W D"] | None,
        learned: Any,
    ) -> Float16[Array, "B Hk D R"]:
        if self.learns:
            moment = learned[self.learns[0]]
        else:
            wide = jnp.where((positions >= 0)[..., None], x.astype(jnp.float32), 0.0)
            moment = jnp.einsum("bhsd,bhse->bhde", wide, wide, precision=lax.Precision.HIGHEST)
        _, vectors = jnp.linalg.eigh(moment)
        best = small(vectors[..., ::-1][..., : self.rank(x.shape[-1])])
        return jnp.broadcast_to(best, (x.shape[0], *best.shape[-3:]))

    def unfit(self, batch: int, heads: int, head_dim: int) -> Float16[Array, "B Hk D R"]:
        return jnp.zeros((batch, heads, head_dim, self.rank(head_dim)), jnp.float16)

    def fitted(self, fit: Float16[Array, "*heads D R"]) -> Codec:
        return Projected(fit)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Projected(Codec):
    """V^T x for the `directions` V, which begin with the first of the slots' dimensions."""

    directions: Float16[Array, "*heads D R"]

    def encode(self, x: Float[Array, "*slots D"]) -> Float[Array, "*slots R"]:
        return self._times(x, self.directions)

    def decode(self, code: Float[Array, "*slots R"]) -> Float[Array, "*slots D"]:
        return self._times(code, jnp.swapaxes(self.directions, -1, -2))

    def _times(self, x: Float[Array, "*slots N"], matrix: Float16[Array, "*heads N M"]) -> Float[Array, "*slots M"]:
        lead = matrix.ndim - 2
        rows = x.reshape(*x.shape[:lead], -1 if x.size else 0, x.shape[-1]).astype(jnp.float32)
        out = jnp.einsum("...sn,...nm->...sm", rows, matrix.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        return out.reshape(*x.shape[:-1], matrix.shape[-1]).astype(x.dtype)
