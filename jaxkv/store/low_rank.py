"""Low rank: of every KV head, or of several together, the directions that keys or values take, the same ones in all
slots."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float16, Int

from jaxkv.errors import BadValue, unknown
from jaxkv.store.codec import Codec, Fitting, Narrow, small

BASES = {"prompt": "", "keys": "key_products", "values": "value_products"}  # and what is learned for them


@dataclasses.dataclass(frozen=True)
class LowRank(Fitting):
    """x^ = V V^T x, V the int(share * D) eigenvectors of largest eigenvalue of a KV head's mean x x^T, fitted once,
    when a prompt has been read. A slot holds V^T x.

    `heads`: so many adjacent KV heads have an x together, of `heads` * D channels, and `heads` times as many
    directions; all of a layer's, where `heads` is 0 or does not divide them. Each head's slot holds its part of
    V^T x, so that several must hold the same tokens. `basis` says whose mean: of the "prompt" (what is held of it), or
    of a text on which `jaxkv calibrate` has measured the "keys" or the "values", as they lie in the cache: keys after
    RoPE. Each row holds its V `[D, R]` of every head, in float16. Source: the low rank of CSKV (arXiv 2409.10593), by
    the SVD of activations; groups of heads as in "Effectively Compress KV Heads for LLM" (arXiv 2406.07056).
    """

    share: float = 0.5
    basis: str = "prompt"
    heads: int = 1
    pooled: ClassVar[bool] = False
    kind: ClassVar[str] = "low-rank"

    def __post_init__(self):
        if not 0 < self.share <= 1 or self.heads < 0:
            raise BadValue(
                f"share={self.share}, heads={self.heads}: expected the fraction of directions kept, above 0 and at "
                "most 1, and how many KV heads have them together (0: all of a layer)"
            )
        if self.basis not in BASES:
            raise unknown("basis of codec 'low-rank'", self.basis, BASES)

    @property
    def aligned(self) -> bool:
        return self.heads != 1

    def suits(self, name: str, codecs: Any, policy: Any) -> None:
        if self.basis in ("keys", "values") and self.basis != name:
            raise BadValue(
                f"policy {policy.name!r} with {name} in directions of basis={self.basis!r}: expected basis={name!r} or "
                "'prompt'"
            )

    @property
    def learns(self) -> tuple[str, ...]:
        name = BASES[self.basis]
        return (name,) if name else ()

    def rank(self, head_dim: int) -> int:
        """Numbers that each head's slot holds, of so many channels; at least one."""
        return max(int(self.share * head_dim), 1)

    def grouped(self, heads: int) -> int:
        """How many of a layer's KV heads have directions together."""
        return self.heads if self.heads and heads % self.heads == 0 else heads

    def fit(
        self,
        x: Float[Array, "B Hk S D"],
        positions: Int[Array, "B Hk S"],
        queries: Float[Array, "B Hq W D"] | None,
        learned: Any,
    ) -> Float16[Array, "B Hk D R"]:
        batch, heads, _, width = x.shape
        many = self.grouped(heads)
        if self.learns:
            moment = groups_of(learned[self.learns[0]], heads // many, many * width)
        else:
            wide = jnp.where((positions >= 0)[..., None], x.astype(jnp.float32), 0.0)
            wide = wide.reshape(batch, heads // many, many, *wide.shape[2:])
            moment = jnp.einsum("bgtsd,bguse->bgtdue", wide, wide, precision=lax.Precision.HIGHEST)
            moment = moment.reshape(batch, heads // many, many * width, many * width)
        _, vectors = jnp.linalg.eigh(moment)
        best = small(vectors[..., ::-1][..., : many * self.rank(width)])
        best = best.reshape(*best.shape[:-3], heads, width, best.shape[-1])
        return jnp.broadcast_to(best, (batch, *best.shape[-3:]))

    def unfit(self, batch: int, heads: int, head_dim: int) -> Float16[Array, "B Hk D R"]:
        return jnp.zeros((batch, heads, head_dim, self.grouped(heads) * self.rank(head_dim)), jnp.float16)

    def fitted(self, fit: Float16[Array, "B Hk D R"]) -> Codec:
        many = self.grouped(fit.shape[1])
        return Alone(fit) if many == 1 else Projected(fit, many)


def groups_of(products: Float[Array, "N"], groups: int, width: int) -> Float[Array, "g W W"]:
    """Of a symmetric matrix, the rows of whose upper triangle lie one behind the other, the blocks on its diagonal."""
    at = jnp.arange(groups * width, dtype=jnp.int32).reshape(groups, width)
    low, high = (most(at[:, :, None], at[:, None, :]) for most in (jnp.minimum, jnp.maximum))
    return products[low * (groups * width) - low * (low + 1) // 2 + high]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Projected(Codec):
    """V^T x for the `directions` V of every KV head's channels, which `heads` of them share: each holds a part."""

    directions: Float16[Array, "B Hk D R"]
    heads: int = dataclasses.field(default=1, metadata={"static": True})

    def encode(self, x: Float[Array, "B Hk *S D"]) -> Float[Array, "B Hk *S _"]:
        rows, matrix = self._split(x)
        out = jnp.einsum("bgtsd,bgtdr->bgsr", rows, matrix, precision=lax.Precision.HIGHEST)
        parts = jnp.moveaxis(out.reshape(*out.shape[:-1], self.heads, out.shape[-1] // self.heads), -2, 2)
        return parts.reshape(*x.shape[:-1], parts.shape[-1]).astype(x.dtype)

    def decode(self, code: Float[Array, "B Hk *S N"]) -> Float[Array, "B Hk *S _"]:
        parts, matrix = self._split(code)
        rows = jnp.moveaxis(parts, 2, -2)
        rows = rows.reshape(*rows.shape[:-2], matrix.shape[-1])
        out = jnp.einsum("bgsr,bgtdr->bgtsd", rows, matrix, precision=lax.Precision.HIGHEST)
        return out.reshape(*code.shape[:-1], matrix.shape[-2]).astype(code.dtype)

    def _split(self, x: Float[Array, "B Hk *S N"]) -> tuple[Float[Array, "B g t _ N"], Float[Array, "B g t D R"]]:
        """The rows and the directions by groups of heads, in float32."""
        batch, heads, *slots, width = x.shape
        shape = batch, heads // self.heads, self.heads
        matrix = self.directions.astype(jnp.float32).reshape(*shape, *self.directions.shape[2:])
        return x.astype(jnp.float32).reshape(*shape, math.prod(slots), width), matrix


class Alone(Narrow, Projected):
    """V^T x for the directions of each KV head's own channels: queries take them, and outputs give them back."""

    def ask(self, query: Float[Array, "B Hq D"]) -> Float[Array, "B Hq N"]:
        return self._of_heads(self.encode, query)

    def unturn(self, x: Float[Array, "B Hq N"]) -> Float[Array, "B Hq D"]:
        return self._of_heads(self.decode, x)

    def _of_heads(self, change: Callable, x: Float[Array, "B Hq _"]) -> Float[Array, "B Hq _"]:
        """A change of what the KV heads have, of their query heads."""
        batch, heads = self.directions.shape[:2]
        return change(x.reshape(batch, heads, -1, x.shape[-1])).reshape(*x.shape[:2], -1)
