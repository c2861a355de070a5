"""load: a source -> params."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.errors import BadValue, BadWeights
from jaxkv.models import ModelConfig, abstract_weights
from jaxkv.models.decoder import PANEL
from jaxkv.weights import gguf, hf, sources, tables, tokenizer
from jaxkv.weights.params import ByIdentity, Params

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def load(source: str | os.PathLike, *, dtype: Any = None, mesh: Mesh | None = None) -> Params:
    """The model at `source`: a name in configs/models/, a Hugging Face folder, a .gguf file, or a hub name.

    `dtype` float32 or bfloat16; by default float32 on CPU and bfloat16 elsewhere. With a `mesh` every device holds
    all weights. Raises `MissingModel` with what to install, `BadWeights` for a truncated file, NaN, or tensors that
    do not fit the config.
    """
    dtype = _dtype(dtype)
    path = sources.find(source)
    if path.is_dir():
        config = hf.read_config(path)
        found, table, words = hf.read_tensors(path), tables.hugging_face(config), hf.read_tokenizer(path)
    elif path.suffix == ".gguf":
        reader = gguf.open_file(path)
        config = gguf.read_config(reader, str(path))
        found, table = gguf.read_tensors(reader, config, str(path)), tables.gguf(config)
        words = tokenizer.from_gguf(gguf.fields(reader), str(path))
    else:
        raise BadWeights(f"{path}: expected a Hugging Face folder or a .gguf file")

    expected = {name: leaf.shape for name, leaf in nnx.to_flat_state(abstract_weights(config, dtype))}
    arrays = tables.assemble(found, table, expected, dtype, str(path))
    place = NamedSharding(mesh, PartitionSpec()) if mesh is not None else None
    return Params(_state(config, arrays, dtype, place), config, ByIdentity(words))


def _dtype(dtype: Any) -> Any:
    if dtype is None:
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    if name not in DTYPES:
        raise BadValue(f"dtype={dtype!r}: expected float32 or bfloat16")
    return DTYPES[name]


def _state(config: ModelConfig, arrays: dict[tables.Path, np.ndarray], dtype: Any, place: Any) -> nnx.State:
    """The arrays as the model's state, laid out for where they are."""
    panels = jax.default_backend() == "cpu" and place is None
    flat = {}
    for name, array in arrays.items():
        if panels and (name == ("embedding",) or name[-1] == "weight"):
            array = _in_panels(array, rows=name == ("embedding",))
        flat[name] = nnx.Param(jax.device_put(array, place))
    return nnx.from_flat_state(flat)


def _in_panels(array: np.ndarray, rows: bool) -> np.ndarray:
    """[I, O] as [O/64, I, 64] (an embedding's rows are its outputs), where O is a multiple of 64: see `project`."""
    matrix = array.T if rows else array
    if matrix.ndim != 2 or matrix.shape[1] % PANEL:
        return array
    inputs, outputs = matrix.shape
    return np.ascontiguousarray(matrix.reshape(inputs, outputs // PANEL, PANEL).swapaxes(0, 1))
