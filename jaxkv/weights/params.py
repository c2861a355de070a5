"""The loaded model as one pytree."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxkv.errors import BadValue, unknown
from jaxkv.models import ModelConfig
from jaxkv.sharding.layout import ONE_DEVICE, Layout
from jaxkv.weights.learned import ASKED_FOR, shapes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Params:
    """Weights (data) with what they mean (static): the config, the tokenizer or None, and how devices share them.

    `learned` is what was measured on the model beforehand, for the policies that need it. The tokenizer hashes and
    compares by identity, as transformers' tokenizers do.
    """

    weights: Any  # an nnx.State
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    tokenizer: Any = dataclasses.field(default=None, metadata={"static": True})
    layout: Layout = dataclasses.field(default=ONE_DEVICE, metadata={"static": True})
    learned: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # name -> [L, ...], by `jaxkv calibrate`

    def __repr__(self) -> str:
        config = self.config
        return f"Params({config.family}, {config.num_layers} layers, hidden size {config.hidden_size}, {self.dtype})"

    @property
    def dtype(self) -> Any:
        """The dtype of what is computed, and so of the cache: that of the matrices, or of what they are codes for."""
        return self.weights["embed"][...].dtype

    def learned_for(self, names: tuple[str, ...], policy: str) -> dict[str, Any]:
        """The named arrays of `learned`. Raises `BadValue` where one is missing."""
        lost, measured = [name for name in names if name not in self.learned], shapes(self.config)
        for name in (name for name in lost if name not in measured):
            raise BadValue(
                f"policy {policy!r}: {unknown('calibration', name, measured)}. An array of one's own, which jaxkv "
                "calibrate does not measure, has to be in the learned of these params"
            )
        if lost:
            more = " --predictors" if set(lost) & set(ASKED_FOR) else ""
            raise BadValue(
                f"policy {policy!r} needs {', '.join(lost)}, which was not measured on this model yet: run jaxkv "
                f"calibrate MODEL{more} once, and load it again"
            )
        return {name: self.layout.put(self.learned[name]) for name in names}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the model that a cache was made by: its family and size, and a digest of config and last norm.

        The norm differs between models that were trained whole, and is float32 whatever the weights' dtype. A model
        whose norms were left as they were, such as one with a merged adapter, has the name of the one it comes from.
        """
        config = self.config
        norm = np.asarray(self.weights["norm"][...], np.float32)
        digest = hashlib.sha256(repr(config).encode() + norm.tobytes()).hexdigest()
        return f"{config.family}-{config.num_layers}x{config.hidden_size}-{digest[:12]}"
