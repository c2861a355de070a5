"""Made-up results of a calibration, for models that nobody would measure. NumPy alone: the oracles use them too."""

import numpy as np


def measured(layers: int, heads: int, kv_heads: int, dims: int) -> dict[str, np.ndarray]:
    """What `jaxkv.calibrate` gives, float32, from a fixed seed; the covariances are some queries' own."""
    rng = np.random.default_rng(7)
    queries = rng.standard_normal((layers, heads, 2 * dims, dims)).astype(np.float32)
    mean = queries.mean(axis=2)
    off = queries - mean[:, :, None]
    direction = rng.standard_normal((layers, kv_heads, dims)).astype(np.float32)
    return {
        "query_mean": mean,
        "query_covariance": np.einsum("lhtd,lhte->lhde", off, off) / np.float32(2 * dims - 1),
        "query_direction": direction / np.linalg.norm(direction, axis=-1, keepdims=True),
        "retrieval": rng.random((layers, heads)).astype(np.float32),
    }
