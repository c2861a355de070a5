"""Made-up results of a calibration, for models that nobody would measure. NumPy alone: the oracles use them too."""

import dataclasses

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
        "eviction_error": rng.random(layers).astype(np.float32),
    }


def calibrated(params):
    """The params with such results, as `jaxkv.load` would have found them."""
    import jax.numpy as jnp

    config = params.config
    made_up = measured(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    return dataclasses.replace(params, learned={name: jnp.asarray(x) for name, x in made_up.items()})
