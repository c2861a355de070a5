"""Integers of few bits beside the numbers of a slot that stand out, which stay as they are."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float16, Int, UInt8

from jaxkv.errors import BadValue
from jaxkv.store.codec import Codec, small
from jaxkv.store.integers import BITS, check_packing, packed, steps_of
from pallas_kernels.codes import unpacked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutlierCode:
    """Integers packed into bytes, scale and mean of what does not stand out, and the outliers with their channels."""

    codes: UInt8[Array, "*slots N"]
    scale: Float16[Array, "*slots"]
    mean: Float16[Array, "*slots"]
    outliers: Float[Array, "*slots K"]
    at: UInt8[Array, "*slots K"]


@dataclasses.dataclass(frozen=True)
class IntOutliers(Codec):
    """x^ = mean + scale * code, code = round((x - mean) / scale) between -2^(bits - 1) and 2^(bits - 1) - 1, scale =
    (max - min) / 2^bits, all over the channels of a slot without its outliers, which are exact: the smallest and the
    largest ones, half of the `outliers` share each, rounded up.

    Where the mean lies off the middle, what is far from it is cut off: |x - x^| <= (max - min) / 2 + scale. Source: QAQ
    (arXiv 2403.04643), uniform quantisation of its release, for each head by itself.
    """

    bits: int = 4
    outliers: float = 0.01
    kind: ClassVar[str] = "int-outliers"

    def __post_init__(self):
        if self.bits not in BITS or not 0 <= self.outliers < 1:
            raise BadValue(
                f"bits={self.bits}, outliers={self.outliers}: expected 8, 4, 3 or 2 bits, and the share of a slot's "
                "channels that stays exact, from 0 to below 1"
            )

    def check(self, head_dim: int) -> None:
        check_packing(self.bits, head_dim)
        low, high = tails(head_dim, self.outliers)
        if head_dim > 256 or low + high >= head_dim:
            raise BadValue(
                f"outliers={self.outliers} of heads with {head_dim} channels: expected at most 256 channels, of which "
                "some are no outliers"
            )

    def encode(self, x: Float[Array, "*slots D"]) -> OutlierCode:
        wide, half = x.astype(jnp.float32), 2 ** (self.bits - 1)
        at = outliers_of(wide, self.outliers)
        inner = ~_marked(at, x.shape[-1])
        low, high = inner_range(wide, inner)
        scale = small((high - low) / 2**self.bits)
        mean = small(jnp.sum(jnp.where(inner, wide, 0.0), axis=-1) / jnp.sum(inner, axis=-1).astype(jnp.float32))
        codes = steps_of(wide - mean.astype(jnp.float32)[..., None], scale[..., None])
        codes = (jnp.clip(codes, -half, half - 1) + half).astype(jnp.uint8)
        return OutlierCode(
            packed(codes, self.bits), scale, mean, jnp.take_along_axis(x, at, axis=-1), at.astype(jnp.uint8)
        )

    def decode(self, code: OutlierCode) -> Float[Array, "*slots D"]:
        steps = unpacked(code.codes, self.bits).astype(jnp.float32) - 2 ** (self.bits - 1)
        x = code.mean.astype(jnp.float32)[..., None] + code.scale.astype(jnp.float32)[..., None] * steps
        at = code.at.astype(jnp.int32)
        return jnp.put_along_axis(x.astype(code.outliers.dtype), at, code.outliers, axis=-1, inplace=False)


def tails(width: int, share: float) -> tuple[int, int]:
    """How many of the smallest and of the largest of so many numbers are outliers."""
    return math.ceil(share / 2 * width), width - math.floor((1 - share / 2) * width)


def outliers_of(x: Float[Array, "*slots D"], share: float) -> Int[Array, "*slots K"]:
    """The channels of the smallest numbers, then of the largest; of equals the first are the smaller."""
    low, high = tails(x.shape[-1], share)
    order = jnp.argsort(x, axis=-1, stable=True).astype(jnp.int32)
    return jnp.concatenate([order[..., :low], order[..., x.shape[-1] - high :]], axis=-1)


def _marked(at: Int[Array, "*slots K"], width: int) -> Bool[Array, "*slots D"]:
    """True for the channels named."""
    return jnp.any(at[..., None, :] == jnp.arange(width, dtype=jnp.int32)[:, None], axis=-1)


def inner_range(
    x: Float[Array, "*slots D"], inner: Bool[Array, "*slots D"]
) -> tuple[Float[Array, "*slots"], Float[Array, "*slots"]]:
    """The smallest and the largest number of a slot that are no outliers."""
    return jnp.min(jnp.where(inner, x, jnp.inf), axis=-1), jnp.max(jnp.where(inner, x, -jnp.inf), axis=-1)


def spread(x: Float[Array, "*slots D"], share: float) -> Float[Array, "*slots"]:
    """max - min of a slot without its outliers."""
    low, high = inner_range(x, ~_marked(outliers_of(x, share), x.shape[-1]))
    return high - low
