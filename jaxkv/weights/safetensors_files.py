"""Reading a Hugging Face folder's safetensors: one file, or several with an index."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.errors import BadWeights, MissingModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class SafeTensor:
    """One tensor of an open file."""

    file: Any
    name: str
    shape: tuple[int, ...]

    def read(self, rows: slice = slice(None), columns: slice = slice(None)) -> np.ndarray:
        """The values in the file's dtype (bfloat16 through ml_dtypes); only the asked for part is read."""
        index = (rows, columns)[: len(self.shape)]
        if all(part == slice(None) for part in index):
            return self.file.get_tensor(self.name)
        return self.file.get_slice(self.name)[index]


def read_safetensors(folder: Path) -> dict[str, SafeTensor]:
    """The tensors of a folder by name, none of them read yet.

    Raises `MissingModel` for a folder without safetensors, and `BadWeights` for a file that is missing from its index,
    truncated, or holds anything but floats.
    """
    from safetensors import SafetensorError, safe_open

    tensors = {}
    for path in _files(folder):
        try:
            file = safe_open(path, framework="numpy")
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(name)
                if part.get_dtype() not in FLOATS:
                    raise BadWeights(f"{path}: tensor {name} is {part.get_dtype()}: expected {', '.join(FLOATS)}")
                tensors[name] = SafeTensor(file, name, tuple(part.get_shape()))
        except SafetensorError as error:
            raise BadWeights(f"{path} is truncated or damaged ({error}): get it again") from error
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadWeights(f"{index} is no index of safetensors: expected JSON with a weight_map") from error
        lost = [name for name in names if not (folder / name).is_file()]
        if lost:
            raise BadWeights(f"{folder} lacks {', '.join(lost)}, which its index names: get the whole model again")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    found = sorted(set(folder.glob("*.safetensors")) - set(folder.glob("*.calibration.safetensors")))
    if not found:
        raise MissingModel(f"{folder} holds no *.safetensors: expected a Hugging Face folder with safetensors weights")
    return found
