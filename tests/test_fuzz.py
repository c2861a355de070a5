"""Whatever is given: a result or a `JaxkvError`, never another exception, and never a result that is silently wrong.

Every strategy mixes what is right with what is wrong, so that most cases come past the first check. What is quick runs
by default and draws the same cases each time; `pytest -m slow` draws many more.
"""

# pyright: reportArgumentType=false
import copy
import inspect
import json
import random
import resource
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf_models import writing
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from letters import Letters

import jaxkv
from jaxkv.errors import BadCheckpoint, JaxkvError
from jaxkv.evaluation import datasets, settings
from jaxkv.generate import Stream
from jaxkv.models import ModelConfig
from jaxkv.policies import catalogue
from jaxkv.policies.policy import Policy, from_dict, to_dict
from jaxkv.prefilling import Prefilling
from jaxkv.prompts import rows_of
from jaxkv.weights.fill import resolve
from jaxkv.weights.gguf_file import read_gguf
from jaxkv.weights.safetensors_files import read_safetensors
from jaxkv.weights.tables import GGUF, HF, shapes, wanted

pytestmark = pytest.mark.usefixtures("unchecked")  # the suite's own type checker would answer first
FAMILY = "llama3"


def fuzzed(test, cases, quick: int, slow: int):
    """Two tests of one: with `quick` cases, the same each time, by default, and with `slow` of them, ever others."""
    calm = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
    few = hypothesis(max_examples=quick, derandomize=True, **calm)(given(case=cases)(test))
    return few, pytest.mark.slow(hypothesis(max_examples=slow, **calm)(given(case=cases)(test)))


LONGEST, MOST = 10.0, 512  # seconds of one case, MiB that a test's cases may add to the process


def answered(call) -> object:
    """The result of the call, or the `JaxkvError`, which is one line that says something; neither takes long."""
    began = time.monotonic()
    try:
        return call()
    except JaxkvError as error:
        assert len(str(error)) > 10, repr(error)
        return error
    finally:
        assert time.monotonic() - began < LONGEST


@pytest.fixture(autouse=True)
def bounded_memory():
    """The most that the process has held grows little, whatever the cases ask for."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST * 1024


numbers = st.one_of(
    st.sampled_from([0, 1, -1, 2, 4, 16, 64, 2**20, 2**30, 2**31, 2**63, 2**64, 10**30, 10**400]),
    st.sampled_from([0.0, 0.5, 1.0, 1.5, 1e-46, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")]),
    st.integers(-10, 300),
    st.floats(),
)
words = st.one_of(
    st.sampled_from(["", "window", "none", "mean", "full", "snapkv", "text", "cache", "\ud800", "../x", "a" * 300]),
    st.text(max_size=8),
)
plain = st.one_of(numbers, words, st.booleans(), st.none())
anything = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))


def changed(tables: list, others: dict[str, st.SearchStrategy] | None = None) -> st.SearchStrategy:
    """One of the tables with some of its values, at any depth, replaced, left out or added to."""

    def places(value, path=()):
        found = [path] if path else []
        if isinstance(value, dict):
            return found + [place for key, each in value.items() for place in places(each, (*path, key))]
        if isinstance(value, list):
            return found + [place for at, each in enumerate(value) for place in places(each, (*path, at))]
        return found

    @st.composite
    def change(draw):
        table = copy.deepcopy(draw(st.sampled_from(tables)))
        for _ in range(draw(st.integers(1, 3))):
            options = places(table)
            if not options:
                break
            *path, last = draw(st.sampled_from(options))
            inside = table
            for step in path:
                inside = inside[step]
            what = draw(st.sampled_from(["value", "value", "value", "out", "more"]))
            if what == "out":
                del inside[last]
            elif what == "more" and isinstance(inside, dict):
                inside[draw(words)] = draw(anything)
            else:
                inside[last] = draw((others or {}).get(last, anything) if isinstance(last, str) else anything)
        return table

    return change()


# ---- policies

NAMES = sorted(catalogue())
OPTIONS = sorted(
    {"sinks", "recent", "window", "kernel", "every", "reserve", "allocate", "evicted", "store", "read", "flow"}
)
TABLES = [to_dict(policy) for policy in catalogue().values()]
options = st.dictionaries(st.sampled_from([*OPTIONS, "rope", "block", "decode_sinks", "nothing"]), anything, max_size=2)
asked = st.tuples(st.sampled_from([*NAMES, "snapvk", ""]), st.sampled_from(["budget", "ratio"]), anything, options)


def policy_by_name(case):
    name, size, value, options = case
    found = answered(lambda: jaxkv.policy(name, **{size: value}, **options))
    if isinstance(found, Policy):
        assert answered(lambda: from_dict(to_dict(found))) == found and found.floor >= 0


def policy_by_tables(case):
    found = answered(lambda: from_dict(case))
    if isinstance(found, Policy):
        assert from_dict(json.loads(json.dumps(to_dict(found)))) == found, "it can be written down"


test_policies, test_many_policies = fuzzed(policy_by_name, asked, 400, 4000)
test_tables, test_many_tables = fuzzed(policy_by_tables, changed(TABLES), 400, 4000)

# ---- calls

prompts = st.one_of(
    anything,
    st.lists(st.integers(-1, 200), max_size=6),
    st.lists(st.lists(st.integers(0, 90) | plain, max_size=4), max_size=3),
    st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), anything, max_size=3), max_size=3),
    st.binary(max_size=8),
    st.sampled_from([np.zeros((2, 3)), np.zeros((2, 3), np.int8), np.array(3), np.array(["a"]), range(4), {1, 2}]),
)
ARGUMENTS = ["max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "samples", "seed"]
ARGUMENTS += [
    "stop_tokens",
    "stop",
    "speculative",
    "implementation",
    "scan_layers",
    "sizes",
    "progress",
    "policy",
    "cache",
]
calls = st.tuples(
    st.sampled_from(["generate", "stream", "prefill"]),
    prompts,
    st.dictionaries(st.sampled_from(ARGUMENTS), anything, max_size=3),
)


@pytest.fixture(scope="module")
def lettered(tiny):
    params = tiny(FAMILY)
    return type(params)(params.weights, params.config, Letters())


@pytest.fixture
def stops_at_the_checks(monkeypatch):
    """`generate` up to where it would compile."""

    def begun(params, prompt, cache, request, execution):
        rows, _ = rows_of(prompt, params.tokenizer, params.config.vocab_size)
        return SimpleNamespace(run=lambda _: (), finish=lambda: request, tokens=rows)

    def prefilled(prefilling, rows, cache, pseudo):
        return SimpleNamespace(cache=prefilling.policy)

    monkeypatch.setattr(sys.modules["jaxkv.generate"], "_begin", begun)
    monkeypatch.setattr(Prefilling, "run", prefilled)


def call_of_generate(lettered, stops_at_the_checks, case):
    name, prompt, options = case
    call = getattr(jaxkv, name)
    takes = inspect.signature(call).parameters
    found = answered(lambda: call(lettered, prompt, **{key: options[key] for key in options if key in takes}))
    if not isinstance(found, JaxkvError | Stream):
        assert isinstance(hash(found), int), "programs are compiled for it"


test_calls, test_many_calls = fuzzed(call_of_generate, calls, 600, 6000)

# ---- configs of models

FAMILIES = ["gemma3_text", "llama3", "mistral", "qwen2", "qwen3"]
GOLDENS = Path(__file__).parent / "goldens" / "tiny"
CONFIGS = [json.loads((GOLDENS / family / "config.json").read_text()) for family in FAMILIES]


def config_of_a_model(case):
    found = answered(lambda: ModelConfig.from_hf(case))
    if isinstance(found, ModelConfig):
        assert len(found.specs) == found.num_layers and found.norm_eps >= 0
        assert all(0 < spec.rope.theta < float("inf") and spec.scale > 0 for spec in found.specs)


test_configs, test_many_configs = fuzzed(config_of_a_model, changed(CONFIGS), 400, 4000)

# ---- evaluations

RUNS = [
    {
        "policies": ["full", "snapkv", {"name": "tova", "sinks": 2}], "budgets": [80, 96], "ratios": [0.5], "batch": 2,
        "modes": ["aware"], "tasks": [{"name": "lookup", "lengths": [400], "depths": [0.5]}, {"file": "x.jsonl"}],
        "fidelity": {"texts": 2, "prompt": 96}, "retention": {"policies": ["h2o"], "budget": 48}, "seed": 3,
    },
]  # fmt: skip
ROWS = [
    {"context": "c", "question": "q", "answers": ["a", 5], "answer_prefix": "p", "max_new_tokens": 4, "task": "t"},
    {"input": "all of it", "outputs": ["a"]},
    {"problem": "one and one", "answer": 2},
]


def run_settings(case):
    found = answered(lambda: settings.from_dict(case))
    if isinstance(found, settings.Settings):
        assert json.dumps(settings.to_dict(found)) and found.cells()


def data_file(tmp_path_factory, case):
    file = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in case))
    found = answered(lambda: datasets.read(file))
    if isinstance(found, list):
        assert all(example.digest and example.questions and example.max_new_tokens >= 1 for example in found)


test_settings, test_many_settings = fuzzed(run_settings, changed(RUNS), 300, 3000)
lines = st.lists(st.one_of(changed(ROWS), st.binary(max_size=12)), min_size=1, max_size=3)
test_data, test_much_data = fuzzed(data_file, lines, 200, 3000)

# ---- files of weights, and saved caches


def damaged(whole: bytes, header: int, draw: random.Random) -> bytes:
    """The file with some bits of its header flipped, some of its bytes others, or cut off."""
    data = bytearray(whole)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(header)
        data[at] = draw.randrange(256) if draw.random() < 0.3 else data[at] ^ 1 << draw.randrange(8)
    return bytes(data[: draw.randrange(len(data))] if draw.random() < 0.2 else data)


def damaged_safetensors(goldens, folder, cases: range):
    whole = (goldens / "tiny" / FAMILY / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    config = ModelConfig.from_hf(CONFIGS[FAMILIES.index(FAMILY)])
    for case in cases:
        (folder / "model.safetensors").write_bytes(damaged(whole, header, random.Random(case)))
        answered(lambda: resolve(read_safetensors(folder), HF[config.family], config, "model"))


def gguf_bytes(path) -> tuple[bytes, int]:
    """A small model as GGUF, and how long its header is."""
    config = ModelConfig.from_hf(
        {**CONFIGS[FAMILIES.index(FAMILY)], "rope_parameters": {}, "tie_word_embeddings": True}
    )
    with writing(path, config) as writer:
        writer.add_custom_alignment(32)
        for target, layer in wanted(config):
            name = GGUF["llama"].name_of(target, layer)
            writer.add_tensor(name, np.zeros(shapes(config)[target], np.float32))
    read = read_gguf(path)
    return path.read_bytes(), min(tensor.offset for tensor in read.tensors.values())


def damaged_gguf(folder, cases: range):
    whole, header = gguf_bytes(folder / "whole.gguf")

    def opened():
        file = read_gguf(folder / "model.gguf")
        config = ModelConfig.from_gguf(file.fields, tied="output.weight" not in file.tensors)
        return resolve(file.tensors, GGUF[config.family], config, "model")

    (folder / "model.gguf").write_bytes(whole)
    assert isinstance(answered(opened), dict)
    for case in cases:
        (folder / "model.gguf").write_bytes(damaged(whole, header, random.Random(case)))
        answered(opened)


def damaged_caches(tiny, folder, cases: range):
    params = tiny(FAMILY)
    ids = np.random.default_rng(0).integers(3, 90, 40).astype(np.int32)
    cache = jaxkv.prefill(params, ids, policy=jaxkv.policy("h2o", budget=20))
    saved = jaxkv.save(cache, folder / "saved")
    files = sorted(file.relative_to(saved) for file in saved.rglob("*") if file.is_file() and file.stat().st_size)
    for case in cases:
        draw, place = random.Random(case), folder / "copy"
        shutil.copytree(saved, place)
        file = place / files[case % len(files)]
        file.write_bytes(damaged(whole := file.read_bytes(), len(whole), draw))
        changed = file.read_bytes() != whole
        found = answered(lambda place=place: jaxkv.restore(place, params))
        assert isinstance(found, BadCheckpoint) == changed, f"case {case}: {file.name}"
        shutil.rmtree(place)


def test_headers_of_safetensors(goldens, tmp_path):
    damaged_safetensors(goldens, tmp_path, range(150))


def test_headers_of_gguf(tmp_path):
    damaged_gguf(tmp_path, range(150))


def test_saved_caches(tiny, tmp_path):
    damaged_caches(tiny, tmp_path, range(40))


@pytest.mark.slow
def test_many_files(goldens, tiny, tmp_path):
    damaged_safetensors(goldens, tmp_path, range(3000))
    damaged_gguf(tmp_path, range(3000))
    damaged_caches(tiny, tmp_path, range(300))
