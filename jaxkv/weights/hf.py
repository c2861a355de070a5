"""A Hugging Face folder -> config and tensors, without torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.errors import BadWeights, MissingModel
from jaxkv.models import ModelConfig, from_hf
from jaxkv.weights.tables import Read


def read_config(folder: Path) -> ModelConfig:
    """The model that config.json (and generation_config.json, for the stop tokens) describes."""
    file = folder / "config.json"
    if not file.is_file():
        raise MissingModel(f"{folder}: no config.json there; expected a Hugging Face model folder")
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        extra = folder / "generation_config.json"
        if extra.is_file():
            stops = json.loads(extra.read_text(encoding="utf-8")).get("eos_token_id")
            table = table if stops is None else {**table, "eos_token_id": stops}
    except json.JSONDecodeError as error:
        raise BadWeights(f"{file}: not readable as JSON ({error}); download it again") from error
    return from_hf(table)


def read_tensors(folder: Path) -> Iterator[tuple[str, Read]]:
    """Name and reader of every tensor in the folder's *.safetensors. Raises `BadWeights` for a truncated file."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise MissingModel(f"{folder}: no *.safetensors there; torch .bin checkpoints are not read, convert them")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise MissingModel(f"{folder}: {', '.join(missing)} named by the index but not there; download them")
        files = [file for file in files if file.name in named]
    for file in files:
        try:
            opened = safe_open(file, framework="numpy")
            names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise BadWeights(f"{file}: truncated or not safetensors ({error}); download it again") from error
        for name in names:
            yield name, lambda opened=opened, name=name, file=file: _read(opened, name, file)


def _read(opened: Any, name: str, file: Path) -> np.ndarray:
    import ml_dtypes  # noqa: F401  numpy knows bfloat16 once it is imported

    try:
        return opened.get_tensor(name)
    except Exception as error:
        raise BadWeights(f"{file}: tensor {name!r} cannot be read ({error}); download it again") from error


def read_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None where there is none."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))
