"""The threshold of similarity from which entries are merged: one number per row and layer."""

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Bool, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Threshold:
    """`tau`, a moving average of the similarities seen, and whether there has been any."""

    tau: Float[Array, "B"]
    begun: Bool[Array, "B"]

    attends: ClassVar[bool] = False

    @property
    def kv_bytes(self) -> int:
        """It holds no keys or values."""
        return 0
