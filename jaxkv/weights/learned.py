"""What was measured on a model beforehand (`jaxkv calibrate`), as files: found by the model's fingerprint."""

import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from jaxkv.errors import BadWeights
from jaxkv.folders import appearing, cache_folder
from jaxkv.models import ModelConfig

ASKED_FOR = ("key_predictor", "value_predictor")  # large: `jaxkv calibrate` makes them with --predictors alone
Learned = Mapping[str, Any]  # name -> array [L, ...]


def file_name(fingerprint: str) -> str:
    """The file that holds what was measured on the model of this fingerprint."""
    return f"{fingerprint}.calibration.safetensors"


def find(fingerprint: str, folder: Path) -> Path | None:
    """The model's file beside it, in the cache folder, or among those that jaxkv carries; None without one."""
    shipped = Path(str(files("jaxkv.weights") / "calibrations"))
    places = (place / file_name(fingerprint) for place in (folder, cache_folder(), shipped))
    return next((path for path in places if os.path.isfile(path)), None)  # False where a folder may not be read


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, float32. Raises `BadWeights` for one that is truncated or no such file."""
    try:
        return {name: array.astype(np.float32) for name, array in load_file(path).items()}
    except (SafetensorError, ValueError, OSError) as error:
        raise BadWeights(f"{path} can't be read ({error}): remove it, and run jaxkv calibrate again") from error


def checked(found: Mapping[str, np.ndarray], config: ModelConfig, path: Path) -> Mapping[str, np.ndarray]:
    """The arrays of a file, if they are numbers of the model's shapes. Raises `BadWeights`."""
    expected = shapes(config)
    for name, array in found.items():
        shape = expected.get(name, (config.num_layers, *array.shape[1:]))
        if array.shape != shape or not np.isfinite(array).all():
            what = f"has the shape {array.shape}, expected {shape}" if array.shape != shape else "holds NaN or infinity"
            raise BadWeights(f"{path}: {name} {what}; remove the file, and run jaxkv calibrate again")
    return found


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Those of all that `jaxkv.calibrate` measures."""
    layers, heads, kv_heads, dim = config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
    wide = kv_heads * dim
    by_head = dict.fromkeys(("retrieval", "reasoning", "echo", "induction"), (layers, heads))
    by_layer = dict.fromkeys(("eviction_error", "key_similarity"), (layers,))
    products = dict.fromkeys(("key_products", "value_products"), (layers, wide * (wide + 1) // 2))
    channels = dict.fromkeys(("query_direction", "key_channels"), (layers, kv_heads, dim))
    return (
        by_head
        | by_layer
        | products
        | channels
        | {
            "query_mean": (layers, heads, dim),
            "query_covariance": (layers, heads, dim, dim),
            "utility_curves": (layers, 99, kv_heads),
            "key_predictor": (layers, wide + 1, wide),
            "value_predictor": (layers, 2 * wide + 1, wide),
        }
    )


def write(learned: Learned, path: Path) -> None:
    """The arrays as a file, float16 where they fit in, else float32: it appears whole or not at all."""
    with appearing(path) as draft:
        draft.write_bytes(save({key: _small(np.asarray(value, np.float32)) for key, value in learned.items()}))


def _small(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16 if np.abs(array).max() < np.finfo(np.float16).max else np.float32)
