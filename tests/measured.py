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
        "reasoning": rng.random((layers, heads)).astype(np.float32),
        "echo": rng.random((layers, heads)).astype(np.float32),
        "induction": rng.random((layers, heads)).astype(np.float32),
        "key_similarity": rng.random(layers).astype(np.float32),
        "utility_curves": curves(layers, kv_heads),
        "key_products": products(rng, layers, kv_heads * dims),
        "value_products": products(rng, layers, kv_heads * dims),
        "key_channels": rng.random((layers, kv_heads, dims)).astype(np.float32),
        "key_predictor": predictor(rng, layers, kv_heads * dims, 1),
        "value_predictor": predictor(rng, layers, kv_heads * dims, 2),
    }


def products(rng: np.random.Generator, layers: int, channels: int) -> np.ndarray:
    """Mean outer products of vectors of few directions: upper triangles [L, N (N + 1) / 2]."""
    some = rng.standard_normal((layers, 2 * channels, channels)) * np.geomspace(1, 0.1, channels)
    rows, columns = np.triu_indices(channels)
    return (np.einsum("ltd,lte->lde", some, some) / (2 * channels))[:, rows, columns].astype(np.float32)


def predictor(rng: np.random.Generator, layers: int, channels: int, parts: int) -> np.ndarray:
    """Matrices [L, I + 1, N] that keep about the size of what they are given, and add little; 0 in the first layer."""
    drawn = rng.standard_normal((layers, parts * channels + 1, channels)) / np.sqrt(2 * parts * channels)
    drawn[0] = 0
    return drawn.astype(np.float32)


def curves(layers: int, kv_heads: int) -> np.ndarray:
    """Fractions kept [L, 99, Hk] when 1 to 99 % are removed; of 120 entries and 30, 50 or 75 % whole numbers, which
    heads and layers divide evenly, so that nobody rounds."""
    removed = np.arange(1, 100)[:, None] / 100
    turn = 1 - 2 * (np.arange(layers) % 2)
    turn[layers - layers % 2 :] = 0
    lean = turn[:, None] * (4 + 2 * np.arange(kv_heads) - (kv_heads - 1))  # entries more than the mean
    lean = lean[:, None] / 120 * np.minimum(1, 8 * np.minimum(removed, 1 - removed))
    return (1 - removed + lean).astype(np.float32)


def calibrated(params):
    """The params with such results, as `jaxkv.load` would have found them."""
    import jax.numpy as jnp

    config = params.config
    made_up = measured(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    return dataclasses.replace(params, learned={name: jnp.asarray(x) for name, x in made_up.items()})
