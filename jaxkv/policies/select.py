"""select: entries that stay whatever their score."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv.errors import BadValue
from pallas_kernels.decode_attend_score.victim import protected


@dataclasses.dataclass(frozen=True)
class Select:
    """Protects the first `sinks` tokens of the text and the `recent` last ones.

    `recent` is a number of tokens, a fraction of the budget when it lies strictly between 0 and 1, or "window": as
    many as the phase's observation window has.
    """

    sinks: int = 0
    recent: int | float | str = 0

    def __post_init__(self):
        recent = 0 if self.recent == "window" else self.recent
        if isinstance(recent, str) or self.sinks < 0 or recent < 0 or (recent > 1 and recent != int(recent)):
            raise BadValue(
                f"sinks={self.sinks}, recent={self.recent!r}: expected counts of at least 0; recent may also be a "
                "fraction of the budget or 'window'"
            )

    def resolved(self, window: int) -> "Select":
        """With "window" replaced by the number of tokens of the observation window."""
        return dataclasses.replace(self, recent=window) if self.recent == "window" else self

    @property
    def is_fraction(self) -> bool:
        """Whether `recent` is a share of the budget."""
        return not isinstance(self.recent, str) and 0 < self.recent < 1

    def floor(self) -> int:
        """Tokens that must fit besides one that can be evicted: sinks + recent + 1."""
        return self.sinks + (0 if self.is_fraction else int(self.recent)) + 1

    def recents(self, limits: Int[Array, "B"]) -> Int[Array, "B"]:
        """The number of recent tokens protected, per row."""
        if self.is_fraction:
            return jnp.floor(limits.astype(jnp.float32) * jnp.float32(self.recent)).astype(jnp.int32)
        return jnp.full_like(limits, int(self.recent))

    def recent_entries(
        self, positions: Int[Array, "B Hk S"], now: Int[Array, "B"], limits: Int[Array, "B"]
    ) -> Bool[Array, "B Hk S"]:
        """True for the entries of the last `recent` positions before `now`."""
        return positions >= (now - self.recents(limits))[:, None, None]

    def protected(
        self, positions: Int[Array, "B Hk S"], now: Int[Array, "B"], limits: Int[Array, "B"]
    ) -> Bool[Array, "B Hk S"]:
        """True for sinks and recent entries."""
        return protected(positions, now, self.sinks, self.recents(limits))
