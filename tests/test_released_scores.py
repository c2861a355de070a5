"""Methods against what their released code scores and keeps (goldens/policies, from scripts in oracle/)."""

import dataclasses

import jax
import numpy as np
import pytest
from archives import arrays
from ordered import heads_of, in_text_order

import jaxkv

RTOL = 5e-4  # the sharper the model, the more rounding shows


@pytest.fixture
def sharpened(tiny):
    """`sharpened(family, sharp)`: the tiny model with attention norms `sharp` times as large, as in the goldens."""

    def load(family, sharp):
        def scaled(path, leaf):
            return leaf * sharp if "attention_norm" in jax.tree_util.keystr(path) else leaf

        params = tiny(family)
        return dataclasses.replace(params, weights=jax.tree_util.tree_map_with_path(scaled, params.weights))

    return load


def masks(layer, length):
    """Which positions each head of row 0 holds: bool [Hk, length]."""
    out = np.zeros((len(heads_of(layer)), length), bool)
    for head, held in zip(out, heads_of(layer), strict=True):
        head[held[held >= 0]] = True
    return out


@pytest.mark.parametrize("ratio", ["0.5", "0.75"])
@pytest.mark.parametrize("name", ["defensivekv", "layer-defensivekv"])
def test_defensivekv_as_released(goldens, sharpened, scored, name, ratio):
    """Scores and kept entries of every head and layer: no head has a floor, and what holds 90 % of the attention comes
    first, at the same worth."""
    golden = arrays(goldens / "policies" / "defensivekv.npz")
    ids, window = golden["ids"][0], 4
    policy = jaxkv.policy(name, budget=int(len(ids) * (1 - float(ratio))), window=window)
    cache, worths = scored(sharpened("llama3", 3.0), ids, policy)
    for index, (layer, worth) in enumerate(zip(cache.views, worths, strict=True)):
        scores, kept = (golden[f"{name}/r{ratio}/layer{index}/{part}"] for part in ("scores", "kept_mask"))
        assert np.isposinf(worth[:, -window:]).all()
        np.testing.assert_allclose(worth[:, :-window], scores[:, :-window], rtol=RTOL)
        np.testing.assert_array_equal(masks(layer, len(ids)), kept)


def test_a2sf_as_released(goldens, sharpened, scored):
    """Scores and kept entries; and run in blocks, with room for all, each query is forgotten token by token as well."""
    golden = arrays(goldens / "policies" / "a2sf.npz")
    ids, params = golden["ids"][0], sharpened("llama3", 2.0)
    cache, worths = scored(params, ids, jaxkv.policy("a2sf", budget=40))
    roomy = jaxkv.prefill(params, ids, policy=jaxkv.policy("a2sf", budget=120, block=48))
    for index, (layer, worth) in enumerate(zip(cache.views, worths, strict=True)):
        scores, kept = (golden[f"layer{index}/{part}"] for part in ("scores", "kept"))
        np.testing.assert_allclose(worth[:, :-16], scores[:, :-16], rtol=RTOL)
        np.testing.assert_array_equal([np.sort(head[head >= 0]) for head in heads_of(layer)], kept)
        blocks = roomy.views[index]
        sums = in_text_order(blocks.stats["attention"][0], blocks.positions[0])
        np.testing.assert_allclose(sums, scores, rtol=RTOL, atol=1e-6)


def test_key_norm_spares_layers(goldens, tiny):
    """Spared layers hold the whole text, at decode and when a cache goes on too; the others what the release keeps:
    the ceil(ratio * n) keys of the smallest norm."""
    params, ids = tiny("llama3"), np.random.default_rng(0).permutation(100)[:40].astype(np.int32)
    assert jaxkv.policy("knorm", budget=8).allocate.spare == 2
    policy = jaxkv.policy("knorm", budget=8, spare=1)
    roomy = jaxkv.prefill(params, ids, policy=jaxkv.policy("full"))
    cache = jaxkv.prefill(params, ids, policy=policy)
    np.testing.assert_array_equal(np.asarray(cache.held())[:, 0], [[40, 40], [8, 8]])
    norms = np.linalg.norm(np.asarray(roomy.views[1].keys[0]), axis=-1)
    norms = in_text_order(norms, roomy.views[1].positions[0])  # of the first layer that evicts: it has seen no cut yet
    kept = np.sort(np.argsort(norms, axis=-1)[:, :8], axis=-1)
    np.testing.assert_array_equal([np.sort(head[head >= 0]) for head in heads_of(cache.views[1])], kept)
    begun = jaxkv.generate(params, ids, policy=policy, max_new_tokens=3, stop_tokens=()).cache
    after = jaxkv.generate(params, cache=begun, max_new_tokens=70, stop_tokens=()).cache
    for cache in (begun, after):  # 70 are more than the room that slots are rounded up to
        seen = int(cache.lengths[0])
        np.testing.assert_array_equal(np.asarray(cache.held())[:, 0], [[seen, seen], [8, 8]])
