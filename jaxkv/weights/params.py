"""The loaded model as one pytree."""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import numpy as np

from jaxkv.models import ModelConfig
from jaxkv.sharding.layout import ONE_DEVICE, Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Params:
    """Weights (data) with what they mean (static): the config, the tokenizer or None, and how devices share them.

    The tokenizer hashes and compares by identity, as transformers' tokenizers do.
    """

    weights: Any  # an nnx.State
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    tokenizer: Any = dataclasses.field(default=None, metadata={"static": True})
    layout: Layout = dataclasses.field(default=ONE_DEVICE, metadata={"static": True})

    @property
    def dtype(self) -> Any:
        """The dtype of the matrices, and so of the cache."""
        return self.weights["embed"][...].dtype

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the model that a cache was made by: its family and size, and a digest of config and last norm.

        The norm differs between any two trained models, and is float32 whatever the weights' dtype.
        """
        config = self.config
        norm = np.asarray(self.weights["norm"][...], np.float32)
        digest = hashlib.sha256(repr(config).encode() + norm.tobytes()).hexdigest()
        return f"{config.family}-{config.num_layers}x{config.hidden_size}-{digest[:12]}"
