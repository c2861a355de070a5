"""Rotary position embedding (Su et al. 2021), in the layout whose two halves turn together."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.checks import Checked, finite
from jaxkv.errors import BadValue

FAR = 8192  # tokens; a float32 angle of a position beyond loses what a bfloat16 key would show


@dataclasses.dataclass(frozen=True)
class Rope(Checked):
    """Base and scaling of the rotary frequencies.

    `scaling`: "none"; "linear" (all divided by `factor`); "llama3" (low frequencies divided by `factor`, blended in
    between); "factors" (each divided by its own of `factors [D / 2]`).
    """

    theta: float
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self):
        if self.scaling not in ("none", "linear", "llama3", "factors"):
            raise BadValue(f"rope scaling={self.scaling!r}: expected 'none', 'linear', 'llama3' or 'factors'")
        numbers = {"theta": self.theta, "factor": self.factor, "original_max_position": self.original_max_position}
        for name, value in [*numbers.items(), *(("factors", each) for each in self.factors)]:
            if not (value > 0 and finite(value)):
                raise BadValue(f"rope {name}={value}: expected a number above 0")
        if self.scaling == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise BadValue(
                f"rope low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}: expected "
                "0 < low < high"
            )


@functools.lru_cache(maxsize=64)
def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per position of every pair of dims, float32 [D / 2]."""
    speed = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.scaling == "linear":
        speed = speed / rope.factor
    elif rope.scaling == "factors":
        speed = speed / np.asarray(rope.factors, np.float64)
    elif rope.scaling == "llama3":
        # turns over the original context: many -> kept, few -> slowed by factor, between -> a blend
        turns = rope.original_max_position * speed / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        speed = speed * (kept + (1 - kept) / rope.factor)
    speed = speed.astype(np.float32)
    speed.setflags(write=False)
    return speed


def angles(positions: Int[Array, "..."], speed: np.ndarray) -> Float[Array, "... F"]:
    """positions * speed in radians, float32; beyond FAR but for whole turns, so that it stays exact however far."""
    size, sign = jnp.abs(positions)[..., None], jnp.sign(positions)[..., None].astype(jnp.float32)
    near, far = size % FAR, size // FAR
    turns = jnp.asarray((FAR * speed.astype(np.float64) / (2 * math.pi)) % 1.0, jnp.float32)
    rest = far.astype(jnp.float32) * turns
    return sign * (near.astype(jnp.float32) * speed + 2 * math.pi * (rest - jnp.floor(rest)))


def rotate(
    x: Float[Array, "*lead D"], positions: Int[Array, "..."], rope: Rope, below: int | None = None
) -> Float[Array, "*lead D"]:
    """`x` turned to its positions, which broadcast to the leading dims; angles in float32, the result in x's dtype.

    An empty slot's position of -1 turns backwards by one: finite, and meant to be masked. `below` says that all
    positions are lower: a CPU then looks the angles' cosines up, which it computes slowly.
    """
    speed = frequencies(rope, x.shape[-1])

    def circle(positions):
        turned = angles(positions, speed)
        # the barrier keeps one table for all heads; without, XLA fuses the cosines into every use of them
        return lax.optimization_barrier((jnp.cos(turned), jnp.sin(turned)))

    def looked_up(positions):
        cos, sin = circle(jnp.arange(-1, below))
        return lax.optimization_barrier((cos[positions + 1], sin[positions + 1]))

    if below is None or math.prod(positions.shape) <= below:
        cos, sin = circle(positions)
    else:
        cos, sin = lax.platform_dependent(positions, cpu=looked_up, default=circle)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    signs = jnp.asarray([[-1.0], [1.0]], jnp.float32)  # (left, right) -> (left cos - right sin, right cos + left sin)
    turned = halves * cos[..., None, :] + halves[..., ::-1, :] * (signs * sin[..., None, :])
    return turned.reshape(x.shape).astype(x.dtype)
