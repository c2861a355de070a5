"""Tensors of a file -> the model's weights: names resolved, shapes and values checked, parts joined, laid out."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.errors import BadValue, BadWeights
from jaxkv.models import ModelConfig, abstract_weights
from jaxkv.models.linear import packed, packed_table
from jaxkv.weights.tables import OUTSIDE_LAYERS, Table, shapes, wanted

SHOWN = 12  # problems listed in one error


@runtime_checkable
class Tensor(Protocol):
    """A tensor in a file: its shape in files' order, and how to read it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> np.ndarray: ...


Key = tuple[str, int | None]


def resolve(tensors: Mapping[str, Tensor], table: Table, config: ModelConfig, where: str) -> dict[Key, str]:
    """The name of every target's tensor. Raises `BadWeights` naming all missing, unexpected and misshapen tensors."""
    expected, needed = shapes(config), set(wanted(config))
    found: dict[Key, str] = {}
    problems = []
    for name, tensor in tensors.items():
        key = table.find(name)
        if key is None or key not in needed:
            tied = key is not None and key[0] == "head" and config.tie_embeddings
            if not tied and not table.ignores(name):
                problems.append(f"unexpected {name}")
            continue
        found[key] = name
        if tuple(tensor.shape) != expected[key[0]]:
            problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(expected[key[0]])}")
    missing = [f"missing {table.name_of(*key)}" for key in wanted(config) if key not in found]
    if missing or problems:
        listed = (missing + problems)[:SHOWN]
        more = len(missing) + len(problems) - len(listed)
        raise BadWeights(
            f"{where} does not hold a {config.family} model of {config.num_layers} layers: {'; '.join(listed)}"
            + (f"; and {more} more" if more > 0 else "")
            + ". Get the file that belongs to this config."
        )
    return found


def fill(
    tensors: Mapping[str, Tensor],
    table: Table,
    config: ModelConfig,
    *,
    dtype: Any,
    panels: bool,
    place: Callable[[np.ndarray], Any],
    where: str,
) -> Any:
    """The model's weights (an `nnx.State`), tensor by tensor, so that little more than the result is ever in memory.

    Matrices and biases are cast to `dtype`, norms stay float32; `place` puts an array on its devices. Raises
    `BadWeights` as `resolve` does, and for a tensor that holds NaN or infinity.
    """
    names = resolve(tensors, table, config, where)

    def read(target: str, layer: int | None) -> np.ndarray:
        name = names[target, layer]
        value = tensors[name].read()
        if not np.isfinite(value).all():
            raise BadWeights(f"{where}: tensor {name} holds NaN or infinity: the file is damaged, get it again")
        change = table.changes.get(target)
        return value if change is None else change(config, value)

    parts, filled = _parts(config), []
    for path, leaf in nnx.to_flat_state(abstract_weights(config, dtype, panels=panels)):
        target, layer = str(path[-1]), None if path[0] in OUTSIDE_LAYERS else int(str(path[1]))
        pieces = [read(part, layer) for part in parts[target]]
        value = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        value = _laid_out(target, value.astype(leaf.dtype), config, panels)
        assert value.shape == leaf.shape, (path, value.shape, leaf.shape)
        filled.append((path, leaf.replace(place(value))))
    return nnx.from_flat_state(filled)


def _parts(config: ModelConfig) -> dict[str, list[str]]:
    """The targets that are joined into each weight, in order."""
    joined: dict[str, list[str]] = {}
    for target in shapes(config):
        joined.setdefault(target.partition("#")[0], []).append(target)
    return joined


def _laid_out(target: str, value: np.ndarray, config: ModelConfig, panels: bool) -> np.ndarray:
    if value.ndim == 1:
        return value
    if target == "embed":
        return packed_table(value, panels and config.tie_embeddings)
    return packed(value, panels)


def check_dtype(dtype: Any) -> Any:
    """The dtype as jax knows it. Raises `BadValue` for any but float32, bfloat16 and float16."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise BadValue(f"dtype {dtype!r}: expected float32, bfloat16 or float16")
    return found
