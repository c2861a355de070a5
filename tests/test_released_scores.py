"""Methods against what their released code scores and keeps (goldens/policies, from scripts in oracle/)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from ordered import heads_of, in_text_order

import jaxkv
from jaxkv.policies import StretchLeverage

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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_r_kv_as_released(goldens, sharpened, scored):
    """Scores and kept entries of a prompt: the maximum over the group comes before the softmax, which leaves the window
    out."""
    golden = arrays(goldens / "policies" / "r-kv.npz")
    ids, window = golden["ids"][0], 8
    cache, worths = scored(sharpened("llama3", 2.0), ids, jaxkv.policy("r-kv", budget=60))
    for index, (layer, worth) in enumerate(zip(cache.views, worths, strict=True)):
        np.testing.assert_allclose(worth[:, :-window], golden[f"layer{index}/scores"], rtol=RTOL, atol=1e-7)
        np.testing.assert_array_equal(masks(layer, len(ids)), golden[f"layer{index}/kept_mask"])


@pytest.mark.long
def test_the_last_queries_lie_beside_the_slots(tiny):
    """R-KV's last eight queries after a prompt in blocks and some steps are those of one prefill of the whole text, for
    rows of any length; a row of six tokens has no more."""
    params, rng = tiny("llama3"), np.random.default_rng(5)
    prompts = [rng.integers(0, 100, length).astype(np.int32) for length in (45, 30, 3)]
    policy = jaxkv.policy("r-kv", budget=64, block=20)
    out = jaxkv.generate(params, prompts, policy=policy, max_new_tokens=4, stop_tokens=())
    texts = [np.append(row, new[:3]) for row, new in zip(prompts, np.asarray(out.tokens), strict=True)]
    for row, text in enumerate(texts):
        whole = jaxkv.prefill(params, text, policy=policy)
        for ours, theirs in zip(out.cache.views, whole.views, strict=True):
            held, wanted = (np.asarray(layer.beside["looks"].queries) for layer in (ours, theirs))
            np.testing.assert_allclose(held[row], wanted[0], rtol=1e-3, atol=1e-4)
            assert (np.abs(wanted[0]).max(axis=(0, 2)) > 0).sum() == min(len(text), 8)


@pytest.mark.long
def test_r_kv_cuts_with_the_last_queries(tiny):
    """A cut while decoding, by loops over what the slots and the queries beside them held just before."""
    params, ids = tiny("llama3"), np.random.default_rng(6).integers(0, 100, 40).astype(np.int32)
    given = {"budget": 24, "every": 4}
    policy, roomy = jaxkv.policy("r-kv", **given), jaxkv.policy("r-kv", budget=24, every=5)
    steps = {"max_new_tokens": 5, "stop_tokens": ()}  # the last of them is not run: four are
    before = jaxkv.generate(params, ids, policy=roomy, **steps).cache
    after = jaxkv.generate(params, ids, policy=policy, **steps).cache
    scale = params.config.attention_spec(0).scale
    for full, cut in zip(before.views, after.views, strict=True):
        queries = np.asarray(full.beside["looks"].queries[0], np.float64)
        for head, at in enumerate(np.asarray(full.positions[0])):
            order = np.argsort(at)[(at < 0).sum() :]
            keys, at = np.asarray(full.keys[0, head], np.float64)[order], at[order]
            group = queries.reshape(len(full.positions[0]), -1, *queries.shape[1:])[head]
            logits = np.max(group @ keys.T, axis=0)[:, :-8] * scale
            shares = np.exp(logits - logits.max(-1, keepdims=True))
            mean = (shares / shares.sum(-1, keepdims=True)).mean(0)
            pooled = np.array([mean[max(i - 3, 0) : i + 4].max() for i in range(len(mean))])
            unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
            alike = unit @ unit.T
            np.fill_diagonal(alike, 0.0)
            for row in alike:
                if (row > 0.5).any():
                    row[np.flatnonzero(row > 0.5)[-1]] = 0.0
            mean = np.exp(alike.mean(0))
            worth = 0.07 * pooled - 0.93 * (mean / mean.sum())[:-8]
            best = np.sort(np.append(at[:-8][np.argsort(-worth)[: 24 - 8]], at[-8:]))
            held = np.asarray(cut.positions[0, head])
            np.testing.assert_array_equal(np.sort(held[held >= 0]), best)


@pytest.mark.parametrize(
    "name, window, pool, kernel",
    [
        ("snapkv", 32, "avg", 5),  # its release's own default; FasterDecoding/SnapKV e216ddc
        ("pyramidkv", 8, "max", 7),  # its release's runs; Zefan-Cai/KVCache-Factory c97f9d7
        ("adakv", 32, "max", 7),  # FFY0/AdaKV efe4e2e
        ("ada-pyramidkv", 32, "max", 7),
        ("criticalkv", 32, "avg", 5),  # SnapKVPress in FFY0/DefensiveKV 9251b95, which its runs take
        ("critical-adakv", 32, "avg", 5),
        ("compresskv", 8, "avg", 5),  # TUDa-HWAI/CompressKV 6919c45
        ("fastkv", 8, "max", 7),  # its release's runs; dongwonjo/FastKV b978769
    ],
)
def test_windows_as_released(name, window, pool, kernel):
    """The numbers of the releases, and that what they select on is SnapKV's score with them (plain NumPy)."""
    policy = jaxkv.policy(name, budget=99)
    phase = policy.prefill
    assert phase is not None and phase.protects.recent == window
    assert (phase.observe.window, phase.aggregate.pool, phase.aggregate.kernel) == (window, pool, kernel)
    if name == "fastkv":
        assert (policy.flow.window, policy.flow.pool, policy.flow.kernel) == (window, pool, kernel)


@pytest.mark.long
@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "adakv", "fastkv"])
def test_snapkv_scores_by_loops(tiny, scored, name):
    """With the released pool and kernel and a window of 8: pooled by query head, then summed (AdaKV: summed first)."""
    params, ids = tiny("llama3"), np.random.default_rng(2).permutation(100)[:60].astype(np.int32)
    even = {"pyramidkv": {"beta": 1.0}, "fastkv": {"keep": 1.0}}.get(name, {})  # every layer sees and keeps as much
    policy = jaxkv.policy(name, budget=24, window=8, **even)
    roomy = jaxkv.prefill(params, ids, policy=jaxkv.policy("r-kv", budget=99, window=8))  # with its last queries
    _, worths = scored(params, ids, policy)
    queries = np.asarray(roomy.views[0].beside["looks"].queries[0], np.float64)
    aggregate, scale = policy.prefill.aggregate, params.config.attention_spec(0).scale
    reach, heads = aggregate.kernel // 2, roomy.views[0].heads
    for head in range(heads):
        keys = np.asarray(roomy.views[0].keys[0, head], np.float64)[-60:]
        masses = []
        for query in queries.reshape(heads, -1, *queries.shape[1:])[head]:
            logits = query @ keys.T * scale
            shares = np.where(np.arange(60) <= np.arange(52, 60)[:, None], np.exp(logits - logits.max()), 0.0)
            masses.append((shares / shares.sum(-1, keepdims=True)).sum(0)[:-8])
        total = 0
        for mass in [sum(masses)] if aggregate.pooled == "groups" else masses:
            near = [mass[max(i - reach, 0) : i + reach + 1] for i in range(len(mass))]
            total += np.array([x.max() if aggregate.pool == "max" else x.sum() / aggregate.kernel for x in near])
        worth = worths[0][head, :-8]
        np.testing.assert_allclose(worth / worth.sum(), total / total.sum(), rtol=RTOL)


@pytest.mark.long
@pytest.mark.parametrize("budget", [100, 130])
@pytest.mark.parametrize("stretch", [512, 80])
def test_compactor_as_released(goldens, sharpened, scored, monkeypatch, stretch, budget):
    """Leverage, the scores of what nothing protects, and what the heads of a layer keep of a prompt of 200 tokens, of
    which the last chunk of 128 lacks 56."""
    golden = arrays(goldens / "policies" / "compactor.npz")
    monkeypatch.setattr(StretchLeverage, "gaussian", lambda self, dims: jnp.asarray(golden["phi"]))
    ids = golden["ids"][0]
    cache, worths = scored(sharpened("llama3", 2.0), ids, jaxkv.policy("compactor", budget=budget, stretch=stretch))
    for index, (layer, worth) in enumerate(zip(cache.views, worths, strict=True)):
        where = f"stretch{stretch}/layer{index}"
        np.testing.assert_allclose(worth[:, 16:-64], golden[f"{where}/scores"], rtol=RTOL, atol=RTOL)
        kept = golden[f"{where}/b{budget}/kept_mask"]
        np.testing.assert_array_equal(masks(layer, len(ids)), kept)
        own, filled = layer.by_head().stats["stretch_leverage"][0], np.asarray(layer.by_head().positions)[0] >= 0
        for head, leverage in enumerate(golden[f"{where}/leverage"]):
            np.testing.assert_allclose(own[head][filled[head]], leverage[kept[head]], rtol=RTOL, atol=RTOL)
