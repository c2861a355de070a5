"""Rotary position embedding, in the half-split layout."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Rope:
    """Base and scaling. `scaling` is "none", "linear" (angles / factor) or "llama3" (low frequencies / factor)."""

    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per position of each of the D/2 pairs, float32.

    Source: RoFormer (arXiv 2104.09864); "llama3" is the Llama 3.1 release's interpolation by wave length.
    """
    base = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.scaling == "linear":
        base = base / rope.factor
    elif rope.scaling == "llama3":
        wave = 2 * math.pi / base
        turns = rope.original_max_position / wave
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        base = (1 - smooth) * base / rope.factor + smooth * base
    return base.astype(np.float32)


def rotate(x: Float[Array, "*B T D"], positions: Int[Array, "*#B T"], rope: Rope) -> Float[Array, "*B T D"]:
    """Each pair (x[i], x[i + D/2]) turned by position * frequency[i]; angles in float32, the result in x's dtype."""
    angles = positions[..., None].astype(jnp.float32) * frequencies(rope, x.shape[-1])
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
