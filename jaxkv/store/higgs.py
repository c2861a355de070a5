"""Higgs: numbers turned until they look drawn from a normal distribution, and the nearest points of its best grid."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float16, UInt8

from jaxkv.errors import BadValue
from jaxkv.store.codec import Codec, small
from jaxkv.store.integers import packed, turned
from pallas_kernels.codes import split, unpacked

LEVELS = (0.1284, 0.388, 0.6568, 0.9423, 1.2562, 1.618, 2.069, 2.7326)  # Lloyd and Max's, and their negatives
PLANE = (
    (-0.0055, 0.0014),
    (-0.4202, -0.7907),
    (0.8854, 0.0211),
    (-0.4696, 0.7608),
    (-0.9566, -0.0284),
    (0.5007, -0.8127),
    (0.4547, 0.84),
    (-1.4201, -1.209),
    (-0.2594, -1.8539),
    (1.7613, -0.6184),
    (1.7263, 0.6967),
    (-0.3405, 1.8337),
    (-1.4715, 1.1521),
    (-2.0039, -0.034),
    (1.0402, -1.7081),
    (0.9645, 1.7559),
)
INDEX_BITS = 4  # both grids have 16 points
TINY = float(jnp.finfo(jnp.float16).smallest_subnormal)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HiggsCode:
    """The numbers of the points, packed, and the length of what was coded; `dtype` is its own."""

    points: UInt8[Array, "*slots N"]
    length: Float16[Array, "*slots"]
    dtype: str = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Higgs(Codec):
    """x^ = |x| / sqrt(D) * H^T g, g the nearest points of a grid to sqrt(D) / |x| * H x, H a Hadamard matrix over the D
    channels. 2 bits: a point of 16 in the plane for every two numbers; 4 bits: one of 16 on the line for each.

    The grids are those of least mean square error for normal numbers: 0.108 and 0.0095 of x^2. The length is float16.
    Source: HIGGS (arXiv 2411.17525) as AQUA-KV uses it, whose 4 bits have 256 points in the plane, and which turns up
    to 1024 channels of several heads together, with random signs.
    """

    bits: int = 2
    kind: ClassVar[str] = "higgs"

    def __post_init__(self):
        if self.bits not in (2, 4):
            raise BadValue(f"bits={self.bits}: expected 2 or 4, for which codec 'higgs' has a grid")

    def check(self, head_dim: int) -> None:
        if head_dim % 4:
            raise BadValue(f"a head of {head_dim} channels has no whole bytes of points: expected a multiple of 4")

    @property
    def grid(self) -> np.ndarray:
        """The 16 points `[16, 2]` or `[16, 1]`, float32."""
        if self.bits == 2:
            return np.array(PLANE, np.float32)
        return np.array([*(-x for x in reversed(LEVELS)), *LEVELS], np.float32)[:, None]

    def encode(self, x: Float[Array, "*slots D"]) -> HiggsCode:
        wide = x.astype(jnp.float32)
        length = small(jnp.linalg.norm(wide, axis=-1))
        scale = np.sqrt(np.float32(x.shape[-1])) / jnp.maximum(length.astype(jnp.float32), TINY)
        unit = turned(wide) * scale[..., None]
        grid = jnp.asarray(self.grid)
        parts = split(unit, grid.shape[1])
        off = sum(jnp.square(parts[..., None, axis] - grid[:, axis]) for axis in range(grid.shape[1]))
        nearest = jnp.argmin(off, axis=-1).astype(jnp.uint8)
        return HiggsCode(packed(nearest, INDEX_BITS), length, str(x.dtype))

    def decode(self, code: HiggsCode) -> Float[Array, "*slots D"]:
        points = unpacked(code.points, INDEX_BITS).astype(jnp.int32)
        unit = jnp.asarray(self.grid)[points].reshape(*points.shape[:-1], points.shape[-1] * self.grid.shape[1])
        scale = code.length.astype(jnp.float32) / np.sqrt(np.float32(unit.shape[-1]))
        return (turned(unit, back=True) * scale[..., None]).astype(code.dtype)
