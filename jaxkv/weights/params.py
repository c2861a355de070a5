"""What `load` gives back: the weights, and what they belong to."""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import numpy as np

from jaxkv.models import ModelConfig


class ByIdentity:
    """Holds a tokenizer so that it hashes and compares by identity, as a static field must."""

    def __init__(self, value: Any):
        self.value = value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    """A model's weights (an nnx.State, the only array leaves), its config, and its tokenizer (or None)."""

    weights: Any
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    holder: ByIdentity = dataclasses.field(default_factory=lambda: ByIdentity(None), metadata={"static": True})

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, with transformers' interface, or None for a model that came without one."""
        return self.holder.value

    @property
    def dtype(self) -> Any:
        """The weights' dtype."""
        return jax.tree.leaves(self.weights)[0].dtype

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the model: its config and its final norm's weights, hashed. Caches carry it."""
        norm = np.asarray(self.weights["norm"]["weight"][...], np.float32)
        return hashlib.sha256(repr(self.config).encode() + norm.tobytes()).hexdigest()[:16]
