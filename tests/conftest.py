"""Strictness for every test, and the models that they share."""

import gc
import itertools
import os
import random
import shutil
import tempfile
import zlib
from pathlib import Path

if not any(Path("/dev").glob("accel*")) and not any(Path("/dev").glob("vfio/*")):
    # no TPU here: libtpu, where it is installed for its compiler, would look for one at length and complain
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # test workers side by side
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault(
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1"
    )  # of CUDA there is at most the plugin, for its compiler

# most of the suite's time is XLA's compiler at work on programs that run once: a third less without LLVM's passes
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# a program that one worker has compiled is read by the others, and by the processes that tests start
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAXKV_TESTS_PROGRAMS"] = tempfile.mkdtemp(prefix="jaxkv-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["JAXKV_TESTS_PROGRAMS"]
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax
import jaxtyping
import pytest

gc.set_threshold(100_000, 50, 50)  # tracing makes many objects that stay: looking for garbage among them takes long
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_nans", False)
jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, for meshes; everything else runs on the first

GOLDENS = Path(__file__).parent / "goldens"


def pytest_addoption(parser):
    parser.addoption("--large", action="store_true", help="run the tests that need the large model wheels")
    parser.addoption("--part", default="0/1", help="K/N: of the tests, those whose names fall into part K of N")


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.get("JAXKV_TESTS_PROGRAMS", ""), ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(config, items):
    for _, cases in itertools.groupby(items, lambda item: item.nodeid.split("[")[0]):
        run = [case for case in cases if not {"slow", "large", "long"} & {*case.keywords}]
        some = run and run[0].get_closest_marker("some")
        if some:
            chosen = random.Random(run[0].nodeid.split("[")[0]).sample(run, min(some.args[0], len(run)))
            for case in run:
                if case not in chosen:
                    case.add_marker(pytest.mark.long)
    part, parts = map(int, config.getoption("--part").split("/"))
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part % parts]
    if config.getoption("--large"):
        return
    skip = pytest.mark.skip(reason="large models: opt in with --large")
    for item in items:
        if "large" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def unchecked():
    """Lowering makes caches of shapes, and of jax's own descriptions: no arrays, which the shape check would refuse."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session", autouse=True)
def when_called():
    """Programs are compiled when they are called: ahead of it they are lowered with forms in place of arrays, which the
    shape check refuses."""
    from jaxkv import prefilling

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefilling, "foreseeable", lambda arrays: False)
        yield


@pytest.fixture(autouse=True)
def few_programs():
    """Forgets all compiled programs, the tests' own too, before jaxkv would forget its own in the middle of a test."""
    yield
    from jaxkv import programs

    if programs.crowded(0.8):
        jax.clear_caches()


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Where the oracles' results lie."""
    return GOLDENS


@pytest.fixture(scope="session")
def tiny():
    """`tiny(family)`: the tiny random model of a family, float32, loaded once, with a made-up calibration."""
    from measured import calibrated

    import jaxkv

    loaded = {}

    def load(family: str):
        if family not in loaded:
            loaded[family] = calibrated(jaxkv.load(GOLDENS / "tiny" / family))
        return loaded[family]

    return load


@pytest.fixture(scope="session")
def as_in_kvpress(tiny):
    """`as_in_kvpress(family)`: the tiny model as kvpress saw it: Mistral without its window."""
    import dataclasses
    import json

    from jaxkv.models import ModelConfig

    def load(family: str):
        if family != "mistral":
            return tiny(family)
        facts = json.loads((GOLDENS / "tiny" / family / "config-full.json").read_text())
        return dataclasses.replace(tiny(family), config=ModelConfig.from_hf(facts))

    return load


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32, from its wheel."""
    import jax.numpy as jnp

    import jaxkv

    return jaxkv.load("smollm2-135m", dtype=jnp.float32)


@pytest.fixture
def scored(monkeypatch):
    """`scored(params, ids, policy)`: the cache of a prefill, and per layer what the policy valued the prompt at.

    A worth is [Hk, S] in the order of the text. Nothing is compiled, so that the values can be looked at.
    """
    from ordered import in_text_order

    import jaxkv
    from jaxkv.attend import aim, prompt

    priority = prompt.priority

    def scored_prefill(params, ids, policy):
        worths = []

        def recorded(phase, stats, positions, *rest):
            value = priority(phase, stats, positions, *rest)
            if positions.shape[-1] >= len(ids):  # the prompt before its cut; the decode phase looks at what is left
                worths.append(in_text_order(value[0], positions[0]))
            return value

        with monkeypatch.context() as patched, jax.disable_jit():
            for module in (prompt, aim):
                patched.setattr(module, "priority", recorded)
            cache = jaxkv.prefill(params, ids, policy=policy)
        assert len(worths) == params.config.num_layers
        return cache, worths

    return scored_prefill
