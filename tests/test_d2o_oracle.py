"""The NumPy form of D2O against the release: what is kept, merged and dropped, the thresholds, the layers' ratios."""

import d2o_numpy as d2o
import numpy as np
import pytest
from archives import arrays

CASES = ("two", "two-again", "four", "grouped")
UNIT = 16  # inputs are stored as multiples of 1 / 16


@pytest.fixture(scope="module")
def golden(goldens):
    return arrays(goldens / "policies" / "d2o.npz")


def close(mine, theirs):
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def inputs(golden, case):
    """Queries, keys and values [L, Hq, S, D]; values are those of layers 2 to L - 2."""
    arrays = [golden[f"{case}/{name}"] / UNIT for name in "qkv"]
    group = arrays[0].shape[1] // arrays[1].shape[1]
    return arrays[0], *(array.repeat(group, 1) for array in arrays[1:])


def same(cache, lost, context, golden, layer, number, which, row):
    """One cut: what the release held after it, and what it took away."""
    np.testing.assert_array_equal(cache.positions, golden[f"{layer}/positions"][number])
    close(cache.keys, golden[f"{layer}/keys"][number])
    close(cache.values, golden[f"{layer}/values"][number])
    close(cache.tau, golden[f"{layer}/tau"][number])
    assert np.isinf(cache.scores[:, :4]).all() and np.isfinite(cache.scores[:, 4:]).all()
    close(np.minimum(cache.scores, np.finfo(np.float32).max), golden[f"{layer}/scores"][number])
    close(context, golden[f"{layer}/context"][number])
    np.testing.assert_array_equal(lost.positions, golden[f"{layer}/{which}_evicted"][:, row])
    np.testing.assert_array_equal(lost.targets, golden[f"{layer}/{which}_targets"][:, row])
    np.testing.assert_array_equal(lost.merged, golden[f"{layer}/{which}_merged"][row])
    close(lost.similarity, golden[f"{layer}/{which}_similarity"][:, row])


@pytest.mark.parametrize("layer", (2, 3))
@pytest.mark.parametrize("case", CASES)
def test_cuts_and_merges(golden, case, layer):
    queries, keys, values = inputs(golden, case)
    queries, keys, values = queries[layer], keys[layer], values[layer - 2]
    name = f"{case}/layer{layer}"
    heavy, recent = golden[f"{name}/sizes"]
    alpha, beta = golden[f"{case}/average"]
    count = len(golden[f"{name}/tau"])
    start = keys.shape[1] - count
    tau = golden.get(f"{name}/tau_before")
    assert (tau is not None) == (case == "two-again")
    first = slice(start + 1)
    cache, lost, context = d2o.first_cut(
        queries[:, first], keys[:, first], values[:, first], heavy, recent, alpha=alpha, beta=beta, tau=tau
    )
    same(cache, lost, context, golden, name, 0, "cut", slice(None))
    for number in range(1, count):
        at = start + number
        new = queries[:, at], keys[:, at], values[:, at]
        cache, lost, context = d2o.step(cache, *new, at, heavy, recent, alpha=alpha, beta=beta)
        same(cache, lost, context, golden, name, number, "step", slice(number - 1, number))


@pytest.mark.parametrize("case", CASES)
def test_layer_sizes(golden, case):
    queries, keys, _ = inputs(golden, case)
    prompt = keys.shape[2] - len(golden[f"{case}/layer2/tau"])
    scores = [d2o.attention(q[:, :prompt], k[:, :prompt]).sum(1) for q, k in zip(queries, keys, strict=True)]
    spreads = np.array([d2o.spread(layer) for layer in scores])
    close(spreads, golden[f"{case}/spread"])
    ratios = d2o.layer_ratios(spreads, *golden[f"{case}/ratio"])
    close(ratios, golden[f"{case}/ratios"])
    for layer in range(d2o.EXEMPT_FIRST, len(keys) - d2o.EXEMPT_LAST):
        np.testing.assert_array_equal(d2o.sizes(ratios, prompt)[:, layer], golden[f"{case}/layer{layer}/sizes"])


def test_layer_ratios(golden):
    queries, keys, spreads = (golden[f"ratios/{name}"] for name in ("q", "k", "spread"))
    scores = [d2o.attention(q / UNIT, k / UNIT).sum(1) for q, k in zip(queries, keys, strict=True)]
    close([d2o.spread(layer) for layer in scores], spreads)
    for pair, ratios in zip(golden["ratios/pairs"], golden["ratios/ratios"], strict=True):
        close(d2o.layer_ratios(spreads, *pair), ratios)
