"""What was measured on a model beforehand (`jaxkv calibrate`), as files: found by the model's fingerprint."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from jaxkv.errors import BadWeights
from jaxkv.folders import appearing, cache_folder

ASKED_FOR = ("key_predictor", "value_predictor")  # large: `jaxkv calibrate` makes them with --predictors alone
Learned = Mapping[str, Any]  # name -> array [L, ...]


def file_name(fingerprint: str) -> str:
    """The file that holds what was measured on the model of this fingerprint."""
    return f"{fingerprint}.calibration.safetensors"


def find(fingerprint: str, folder: Path) -> Path | None:
    """The model's file beside it, in the cache folder, or among those that jaxkv carries; None without one."""
    shipped = Path(str(files("jaxkv.weights") / "calibrations"))
    places = (place / file_name(fingerprint) for place in (folder, cache_folder(), shipped))
    return next((path for path in places if path.is_file()), None)


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, float32. Raises `BadWeights` for one that is truncated or no such file."""
    try:
        return {name: array.astype(np.float32) for name, array in load_file(path).items()}
    except (SafetensorError, ValueError, OSError) as error:
        raise BadWeights(f"{path} can't be read ({error}): remove it, and run jaxkv calibrate again") from error


def write(learned: Learned, path: Path) -> None:
    """The arrays as a file, float16 where they fit in, else float32: it appears whole or not at all."""
    with appearing(path) as draft:
        draft.write_bytes(save({key: _small(np.asarray(value, np.float32)) for key, value in learned.items()}))


def _small(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16 if np.abs(array).max() < np.finfo(np.float16).max else np.float32)
