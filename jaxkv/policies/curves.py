"""Budgets of all layers and KV heads by curves of what each keeps, for every fraction removed of the whole."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.errors import BadValue
from jaxkv.policies.allocator import Learned
from jaxkv.policies.measured import STEPS, Measured, at_least, scaled
from jaxkv.policies.needs import calibrated


@dataclasses.dataclass(frozen=True)
class Curves(Measured):
    """Layers and heads keep what `utility_curves [L, 99, Hk]` say: the fraction of its entries that a head keeps when
    1 to 99 % of all is removed, as `jaxkv calibrate` found it.

    A layer's budget is the mean over its heads, scaled so that all layers together have the mean budget; it is no less
    than `least` and no more than the text. Inside the layer the heads share it by the fractions of the curve whose mean
    is nearest to what the layer keeps of the text so far. Every head keeps what the phases protect and one entry.
    Source: LU-KV (arXiv 2602.08585), in kvpress' form, which lets a head go down to one entry.
    """

    least: int = 6
    kind: ClassVar[str] = "curves"
    needs: ClassVar[frozenset[str]] = frozenset({calibrated("utility_curves")})

    def __post_init__(self):
        if self.least < 1:
            raise BadValue(f"least={self.least}: expected at least 1 token")

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """One budget per layer, bottom first; their mean is `budget`."""
        least = max(self.least, window + 1)
        if not least < budget < tokens:
            return (budget,) * layers
        row = round(100 * (1 - budget / tokens)) - 1
        shares = np.asarray(learned["utility_curves"], np.float64)[:, np.clip(row, 0, 98)].mean(axis=-1)
        return tuple(scaled(shares, layers * budget, least, tokens).tolist())

    def quotas(
        self,
        learned: Learned,
        total: Int[Array, "B"],
        guard: Int[Array, "B"],
        held: Int[Array, "B Hk"],
        tokens: Int[Array, "B"],
    ) -> Int[Array, "B Hk"]:
        """`total` in proportion to the curve's fractions; heads whose part is below `guard` get that instead."""
        shares = _shares(learned["utility_curves"], total / jnp.maximum(held.shape[-1] * tokens, 1))
        return at_least(total, shares, jnp.minimum(guard[:, None], held), held)


def _shares(curves: Float[Array, "99 Hk"], kept: Float[Array, "B"]) -> Int[Array, "B Hk"]:
    """Whole shares of the heads, by the curve whose mean is nearest to the fraction `kept`."""
    curves = curves.astype(jnp.float32)
    fractions = curves[jnp.argmin(jnp.abs(jnp.mean(curves, axis=-1) - kept[:, None]), axis=-1)]
    most = jnp.maximum(jnp.max(fractions, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return jnp.maximum(jnp.round(fractions / most * STEPS).astype(jnp.int32), 1)


def best_split(gains: np.ndarray) -> np.ndarray:
    """Which fraction of its N entries each of H heads keeps, [99, H], when 1 to 99 % of all are removed.

    `gains [H, N]` are what the entries are worth, in the order in which the head would keep them. The sum of what is
    kept is the largest, but that a head's gains are first smoothed so that they fall: its cumulative gain is replaced
    by the least concave curve above it. Source: LU-KV's relaxation and greedy choice.
    """
    from scipy.optimize import isotonic_regression

    heads, entries = gains.shape
    falling = np.stack([isotonic_regression(each, increasing=False).x for each in gains.astype(np.float64)])
    best = np.argsort(-falling.ravel(), kind="stable") // entries
    kept = [round(heads * entries * (1 - removed / 100)) for removed in range(1, 100)]
    return np.stack([np.bincount(best[:count], minlength=heads) for count in kept]) / entries
