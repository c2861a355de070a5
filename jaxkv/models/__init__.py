"""Models: one configurable decoder, used purely: `nnx.merge(graphdef(config), weights)` inside a jitted function.

The shapes and facts of models need no flax; it is imported with the first decoder.
"""

import functools
from typing import Any

import jax.numpy as jnp

from jaxkv.models.config import AttentionSpec as AttentionSpec
from jaxkv.models.config import ModelConfig as ModelConfig
from jaxkv.models.linear import FORMS, in_blocks, prefers_panels
from jaxkv.models.rope import Rope as Rope


def graphdef(config: ModelConfig) -> Any:
    """The decoder's structure (an `nnx.GraphDef`) without its weights; the same however these lie in memory."""
    return _split(config, "float32", prefers_panels())[0]


def abstract_weights(
    config: ModelConfig, dtype: Any = jnp.float32, *, panels: bool | None = None, weights: str | None = None
) -> Any:
    """Shapes and dtypes of the weights (an `nnx.State`), as `load` makes them.

    `panels` chooses how matrices lie in memory; None is what the default backend prefers. `weights` is the blocks that
    they are in, "int8" or "int4"; None: floats.
    """
    plain = _split(config, jnp.dtype(dtype).name, prefers_panels() if panels is None else panels)[1]
    if weights is None:
        return plain
    from flax import nnx

    def blocks(path: tuple, leaf: Any) -> Any:
        return leaf.replace(in_blocks(leaf.get_value(), FORMS[weights], inputs_axis(path, leaf)))

    return nnx.from_flat_state(
        (path, blocks(path, leaf) if leaf.ndim > 1 else leaf) for path, leaf in nnx.to_flat_state(plain)
    )


def inputs_axis(path: tuple, leaf: Any) -> int:
    """The axis of a matrix' inputs, from the end: the last one of a table `[V, M]`."""
    return -1 if str(path[-1]) == "embed" and leaf.ndim == 2 else -2


@functools.lru_cache(maxsize=64)
def _split(config: ModelConfig, dtype: str, panels: bool) -> tuple[Any, Any]:
    from flax import nnx

    from jaxkv.models.decoder import Decoder

    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype, panels=panels)))
