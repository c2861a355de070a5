"""Sparse: each slot's channels of largest magnitude."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxkv.errors import BadValue
from jaxkv.store.codec import Codec
from jaxkv.store.integers import packed
from pallas_kernels.codes import unpacked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseCode:
    """The channels kept, in order, and a bit for each channel that says whether it is."""

    values: Float[Array, "*slots K"]
    kept: UInt8[Array, "*slots N"]


@dataclasses.dataclass(frozen=True)
class Sparse(Codec):
    """x^ = x in the D - int(sparsity * D) channels of largest |x| of the slot, 0 in the others; of equals the first.

    A slot takes the numbers kept and a bit for each channel. Source: Mustafar (arXiv 2505.22913), whose release keeps
    one channel more.
    """

    sparsity: float = 0.5
    kind: ClassVar[str] = "sparse"

    def __post_init__(self):
        if not 0 <= self.sparsity < 1:
            raise BadValue(f"sparsity={self.sparsity}: expected the fraction of channels dropped, from 0 to below 1")

    def check(self, head_dim: int) -> None:
        if head_dim % 8:
            raise BadValue(f"a head of {head_dim} channels has no whole bytes of bits: expected a multiple of 8")

    def encode(self, x: Float[Array, "*slots D"]) -> SparseCode:
        width = x.shape[-1]
        _, best = lax.top_k(jnp.abs(x), width - int(self.sparsity * width))
        channels = jnp.sort(best, axis=-1)
        kept = jnp.any(channels[..., None, :] == jnp.arange(width)[:, None], axis=-1)
        return SparseCode(jnp.take_along_axis(x, channels, axis=-1), packed(kept.astype(jnp.uint8), 1))

    def decode(self, code: SparseCode) -> Float[Array, "*slots D"]:
        kept = unpacked(code.kept, 1).astype(bool)
        place = jnp.maximum(jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - 1, 0)
        x = jnp.take_along_axis(code.values, place, axis=-1)
        return jnp.where(kept, x, jnp.zeros((), x.dtype))
