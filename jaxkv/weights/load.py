"""`load`: a model's files -> `Params`."""

import dataclasses
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxkv.errors import BadValue, BadWeights, JaxkvError, MissingModel
from jaxkv.models import ModelConfig
from jaxkv.models.config import token_ids
from jaxkv.models.linear import FORMS, prefers_panels
from jaxkv.sharding.layout import Layout
from jaxkv.weights import learned
from jaxkv.weights.fill import STORED, Tensor, check_dtype, fill
from jaxkv.weights.gguf_file import read_gguf
from jaxkv.weights.params import Params
from jaxkv.weights.safetensors_files import read_safetensors
from jaxkv.weights.source import is_orbax, locate
from jaxkv.weights.tables import GGUF, HF, Table
from jaxkv.weights.tokenizer import described, from_folder, from_gguf

ROWS = 4096  # of two matrices that are compared


def load(
    source: str | os.PathLike, *, dtype: Any = None, mesh: Mesh | None = None, weights: str | None = None
) -> Params:
    """The model of a name ("smollm2-135m"), a folder (Hugging Face's, or `save_weights`'), a .gguf file, or a hub name
    ("org/name").

    `dtype` of the matrices and the cache: float32, bfloat16 or float16; by default float32 on CPU and bfloat16 on
    accelerators, whatever the file holds. `weights="int8"` holds matrices in 8 bits with a scale for each output,
    "int8-g16" with one for every 16 inputs of it (9 bits in all), "int4" in 4 with a scale and an offset for 32
    inputs (5 bits in all); "file" as a GGUF file does: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, with the
    scales of K formats as float16. They become numbers inside each product. With a `mesh` (`jaxkv.mesh`) the
    weights are divided over it, every host reading only the parts that its devices hold, and `generate` runs there.
    Raises `UnknownName` for an unknown name or family, `MissingModel` with the command that installs it,
    `BadWeights` for files that are truncated, incomplete, of wrong shapes or hold NaN, `BadValue` for a wrong dtype,
    weights or mesh or an unsupported feature.
    """
    dtype = check_dtype(default_dtype() if dtype is None else dtype)
    kinds = (*FORMS, STORED)
    if weights is not None and weights not in kinds:
        raise BadValue(f"weights={weights!r}: expected {', '.join(map(repr, kinds))}, or None for what the dtype says")
    path = locate(source)
    if weights == STORED and path.suffix != ".gguf":
        raise BadValue(f"weights={weights!r} keeps the blocks of a GGUF file, and {path} is none: give int8 or int4")
    if path.is_dir():
        return _with_learned(_load_folder(path, dtype, mesh, weights), path)
    if path.suffix != ".gguf":
        raise BadValue(f"{path} is neither a folder nor a .gguf file: expected one of these")
    return _with_learned(_load_gguf(path, dtype, mesh, weights), path.parent)


def _with_learned(params: Params, folder: Path) -> Params:
    """The params with what was measured on the model, if it was."""
    found = learned.find(params.fingerprint, folder)
    if found is None:
        return params
    arrays = learned.checked(learned.read(found), params.config, found)
    return dataclasses.replace(params, learned={name: params.layout.put(array) for name, array in arrays.items()})


def default_dtype() -> Any:
    """float32 on CPU, whose arithmetic it is; bfloat16 on accelerators."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def _filled(
    tensors: Mapping[str, Tensor],
    table: Table,
    config: ModelConfig,
    dtype: Any,
    mesh: Mesh | None,
    kept: str | None,
    where: Path,
) -> tuple[Any, Layout]:
    """The weights on their devices, and the layout that divides them; what is laid over a mesh stays plain."""
    layout = Layout.of(mesh, config)
    panels = prefers_panels() and mesh is None
    filled = fill(
        tensors, table, config, dtype=dtype, panels=panels, place=layout.weight, where=str(where), weights=kept
    )
    return filled, layout


def _load_folder(folder: Path, dtype: Any, mesh: Mesh | None, kept: str | None) -> Params:
    if is_orbax(folder):
        from jaxkv.weights import orbax_folder

        config, tokenizer = orbax_folder.config_of(folder), from_folder(folder)
        layout = Layout.of(mesh, config)
        weights = orbax_folder.read_weights(folder, config, dtype, layout, prefers_panels() and mesh is None, kept)
        return Params(weights, config, tokenizer, layout)
    config = config_of(folder)
    table, tensors = HF[config.family], _plainly_named(read_safetensors(folder))
    head, embed = (table.name_of(target, None) for target in ("head", "embed"))
    if config.tie_embeddings and embed not in tensors and head in tensors:  # of two names for one array, the other
        tensors[embed] = tensors.pop(head)
    if config.tie_embeddings and _has_own_head(tensors, table):
        config = dataclasses.replace(config, tie_embeddings=False)
    tokenizer = from_folder(folder)  # before the weights, which take longer to read
    weights, layout = _filled(tensors, table, config, dtype, mesh, kept, folder)
    return Params(weights, config, tokenizer, layout)


def _has_own_head(tensors: Mapping[str, Tensor], table: Table) -> bool:
    """Whether the files have an output matrix that is not the token table, whatever the config says (as transformers
    decides it)."""
    head, embed = (tensors.get(table.name_of(target, None)) for target in ("head", "embed"))
    if head is None or embed is None or head.shape != embed.shape:
        return False  # what is missing or misshapen is told by name later
    rows = head.shape[0]
    parts = (slice(at, min(at + ROWS, rows)) for at in range(0, rows, ROWS))
    return not all(np.array_equal(head.read(part), embed.read(part)) for part in parts)


def config_of(folder: Path) -> ModelConfig:
    """The config of a Hugging Face folder, with the stop tokens of its generation config, or of saved weights."""
    if is_orbax(folder):
        from jaxkv.weights import orbax_folder

        return orbax_folder.config_of(folder)
    facts = _json(folder / "config.json")
    if facts is None:
        raise MissingModel(f"{folder} has no config.json: expected a Hugging Face folder")
    try:
        config = ModelConfig.from_hf(facts)
    except JaxkvError as error:
        raise type(error)(f"{folder / 'config.json'}: {error}") from error
    more = folder / "generation_config.json"
    try:
        stops = token_ids(_json(more) or {}, "eos_token_id")
    except BadValue as error:
        raise BadValue(f"{more}: {error}") from error
    return dataclasses.replace(config, stop_tokens=tuple(dict.fromkeys(stops + config.stop_tokens)))


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadValue(f"{path} is not JSON ({error}): get it again") from error
    if not isinstance(facts, dict):
        raise BadValue(f"{path} holds a {type(facts).__name__}: expected an object")
    return facts


def _plainly_named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names in a text model: also those of a model for text and images, and of a model that was
    saved without its head, whose names lack the first part."""
    plain = {_without_wrapper(name): tensor for name, tensor in tensors.items()}
    if any(name.startswith("model.") for name in plain):
        return plain
    return {name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in plain.items()}


def _without_wrapper(name: str) -> str:
    """The name in the text model of a model for text and images."""
    for prefix, plain in (("model.language_model.", "model."), ("language_model.", "")):
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _load_gguf(path: Path, dtype: Any, mesh: Mesh | None, kept: str | None) -> Params:
    file = read_gguf(path)
    factors = file.tensors.get("rope_freqs.weight")
    try:
        config = ModelConfig.from_gguf(
            file.fields,
            tied="output.weight" not in file.tensors,
            rope_factors=None if factors is None else factors.read().tolist(),
        )
    except BadValue as error:
        raise BadWeights(f"{path}: {error}") from error
    described(file.fields)  # says so where the tokenizer cannot be built, before the weights are read
    with ThreadPoolExecutor(1) as aside:  # importing transformers takes as long as reading a small model
        tokenizer = aside.submit(from_gguf, file.fields)
        weights, layout = _filled(file.tensors, GGUF[config.family], config, dtype, mesh, kept, path)
        return Params(weights, config, tokenizer.result(), layout)
