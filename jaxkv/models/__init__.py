"""Models: one configurable decoder, used purely: `nnx.merge(graphdef(config), weights)` inside a jitted function."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxkv.models.config import AttentionSpec as AttentionSpec
from jaxkv.models.config import ModelConfig as ModelConfig
from jaxkv.models.decoder import Decoder as Decoder
from jaxkv.models.linear import prefers_panels
from jaxkv.models.rope import Rope as Rope


@functools.lru_cache(maxsize=64)
def graphdef(config: ModelConfig) -> Any:
    """The decoder's structure (an `nnx.GraphDef`) without its weights; the same for every dtype and memory layout."""
    return nnx.split(_abstract(config, jnp.float32, False))[0]


def abstract_weights(config: ModelConfig, dtype: Any = jnp.float32, *, panels: bool | None = None) -> Any:
    """Shapes and dtypes of the weights (an `nnx.State`), as `load` makes them.

    `panels` chooses how matrices lie in memory; None is what the default backend prefers.
    """
    return nnx.split(_abstract(config, dtype, prefers_panels() if panels is None else panels))[1]


def _abstract(config: ModelConfig, dtype: Any, panels: bool) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype, panels=panels))
