"""Strictness for every test, and the models that they share."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_nans", False)
jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, for meshes; everything else runs on the first

GOLDENS = Path(__file__).parent / "goldens"


def pytest_addoption(parser):
    parser.addoption("--large", action="store_true", help="run the tests that need the large model wheels")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--large"):
        return
    skip = pytest.mark.skip(reason="large models: opt in with --large")
    for item in items:
        if "large" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Where the oracles' results lie."""
    return GOLDENS


@pytest.fixture(scope="session")
def tiny():
    """`tiny(family)`: the tiny random model of a family, float32, loaded once."""
    import jaxkv

    loaded = {}

    def load(family: str):
        if family not in loaded:
            loaded[family] = jaxkv.load(GOLDENS / "tiny" / family)
        return loaded[family]

    return load


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32, from its wheel."""
    import jax.numpy as jnp

    import jaxkv

    return jaxkv.load("smollm2-135m", dtype=jnp.float32)
