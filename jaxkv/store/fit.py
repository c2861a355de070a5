"""What the codecs of a layer have fitted to the text or to the model: it lies beside the slots."""

import dataclasses
from typing import Any, ClassVar

import jax

FIT = "fit"  # the name under which it lies beside the slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fit:
    """What the codec of the keys and that of the values have fitted: arrays that begin with `[B, Hk]`, or None."""

    keys: Any
    values: Any

    attends: ClassVar[bool] = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of both."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.keys, self.values)))
