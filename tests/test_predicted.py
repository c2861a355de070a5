"""AQUA-KV: layers hold what the layer below does not say of their keys and values, at the points of HIGGS' grids."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from going_on import gone_on_with, ids
from held import ONE_HEAD
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import calibrated
from scipy.special import ndtr

import jaxkv
from jaxkv.calibrate import DAMP, SKIP, _predictors
from jaxkv.errors import BadValue, UnknownName
from jaxkv.policies import Higgs, Predicted
from jaxkv.run import decode_logits
from jaxkv.sizes import size_of
from jaxkv.store.fit import FIT
from jaxkv.store.integers import hadamard_matrix

FAMILY, HEADS, DIM = "llama3", 2, 16
SMALL = {"residual": 8, "initial": 2}


def nearest(x, bits):
    """A head's numbers [D] as points of the grid say them, in float64."""
    grid, size = np.float64(Higgs(bits).grid), np.float64(np.float16(np.linalg.norm(x)))
    if size == 0:
        return np.zeros_like(x)
    turn = np.float64(hadamard_matrix(len(x)))
    unit = (np.float64(x) @ turn * np.sqrt(len(x)) / size).reshape(-1, grid.shape[1])
    points = [min(range(16), key=lambda i: ((grid[i] - two) ** 2).sum()) for two in unit]
    return grid[points].reshape(-1) @ turn.T * size / np.sqrt(len(x))


@pytest.mark.long
@given(seed=st.integers(0, 999), bits=st.sampled_from([2, 4]), scale=st.sampled_from([0.0, 1e-3, 1.0, 300.0]))
@settings(max_examples=25, deadline=None)
def test_points_by_an_independent_form(seed, bits, scale):
    """Each row is its own code; a row of zeros stays one, and NaN stays in its row."""
    x = (scale * np.random.default_rng(seed).standard_normal((5, DIM))).astype(np.float32)
    x[3] = np.nan
    codec = Higgs(bits)
    code = codec.encode(jnp.asarray(x))
    assert code.points.shape == (5, DIM * bits // 8) and code.length.dtype == jnp.float16
    got = np.asarray(codec.decode(code))
    for row in (0, 1, 2, 4):
        errors = [np.linalg.norm(each - x[row]) for each in (got[row], nearest(x[row], bits))]
        assert errors[0] == pytest.approx(errors[1], rel=2e-3, abs=1e-6)  # which of two equally near points is rounding


def test_grids_are_those_of_least_error():
    """Every level is the mean of the normal numbers that are nearest to it, and every point, to the third decimal; the
    errors are those known of the best grids."""
    line = np.float64(Higgs(4).grid)[:, 0]
    edges = np.concatenate([[-np.inf], (line[1:] + line[:-1]) / 2, [np.inf]])
    density = np.exp(-(edges**2) / 2) / np.sqrt(2 * np.pi)
    means = (density[:-1] - density[1:]) / np.diff(ndtr(edges))
    np.testing.assert_allclose(line, means, atol=2e-3)
    axis = np.arange(-5, 5, 0.02) + 0.01
    plane, grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2), np.float64(Higgs(2).grid)
    weight = np.exp(-(plane**2).sum(-1) / 2)
    weight /= weight.sum()
    best = (plane @ grid.T - (grid**2).sum(-1) / 2).argmax(-1)
    mass = np.bincount(best, weight, 16)
    means = np.stack([np.bincount(best, weight * x, 16) for x in plane.T], axis=-1) / mass[:, None]
    np.testing.assert_allclose(grid, means, atol=3e-3)
    assert (weight * ((plane - grid[best]) ** 2).sum(-1)).sum() / 2 == pytest.approx(0.10758, abs=2e-4)
    x = np.random.default_rng(0).standard_normal((2000, 64)).astype(np.float32)
    for bits, error in ((2, 0.1076), (4, 0.0095)):
        back = np.asarray(Higgs(bits).decode(Higgs(bits).encode(jnp.asarray(x))))
        assert np.mean((back - x) ** 2) / np.mean(x**2) == pytest.approx(error, rel=0.06)


# ---- what predicts a layer


@pytest.mark.long
def test_predictors_are_those_of_least_squares(tiny):
    """Of the second layer, from what a cache has of the first: least squares with a row for each input that is small,
    in NumPy, on keys and values that a cache without codes holds."""
    params, rng = tiny(FAMILY), np.random.default_rng(0)
    stretches = [rng.integers(0, 100, 90).astype(np.int32) for _ in range(2)]
    found = _predictors(params, stretches, lambda: None)
    plain = jaxkv.policy("full", rope="cache")
    held = [jaxkv.prefill(params, tokens, policy=plain).layers for tokens in stretches]
    low, up = (
        [np.concatenate(each) for each in zip(*(skipped(layers[number]) for layers in held), strict=True)]
        for number in range(2)
    )
    near = [np.stack([of_heads(row, 4) for row in x]) for x in low]

    def ridge(given, x):
        wide = np.concatenate([given, np.ones((len(given), 1))], axis=1)
        damp = np.sqrt(DAMP * np.mean(np.sum(wide**2, axis=0))) * np.eye(wide.shape[1])
        return np.linalg.lstsq(np.concatenate([wide, damp]), np.concatenate([x, np.zeros((len(damp), x.shape[1]))]))[0]

    want = ridge(near[0], up[0])
    guess = np.concatenate([near[0], np.ones((len(up[0]), 1))], axis=1) @ want
    own = guess + np.stack([of_heads(row, 2) for row in up[0] - guess])
    last = ridge(np.concatenate([own, near[1]], axis=1), up[1])
    for name, matrix in (("key", want), ("value", last)):
        assert not found[f"{name}_predictor"][0].any()
        got = found[f"{name}_predictor"][1]
        assert np.linalg.norm(got - matrix) < 0.05 * np.linalg.norm(matrix)  # points that are equally near


def skipped(layer):
    """What `in_order` gives, without the tokens that a calibration leaves out."""
    return [x[SKIP:] for x in in_order(layer)]


# ---- the chain of layers


def in_order(layer):
    """Keys and values [T, Hk * D] of the first row in the order of the text, as they lie before RoPE."""
    at = np.argsort(np.asarray(layer.positions)[0], axis=-1)[:, -int((layer.positions[0, 0] >= 0).sum()) :, None]
    each = (np.take_along_axis(np.asarray(x)[0], at, 1) for x in (layer.keys, layer.values))
    return [np.concatenate(list(x), axis=-1).astype(np.float64) for x in each]


def of_heads(x, bits):
    """All heads' numbers [N] as points say them, head by head."""
    return np.concatenate([nearest(head, bits) for head in x.reshape(HEADS, DIM)])


def chained(exact, learned):
    """What layers hold of the exact keys and values of each, token by token."""
    below, out = None, []
    for layer, (keys, values) in enumerate(exact):
        if below is None:
            near = [np.stack([of_heads(row, 4) for row in x]) for x in (keys, values)]
        else:
            key_weights, value_weights = (
                np.float64(np.float16(learned[f"{name}_predictor"][layer])) for name in ("key", "value")
            )
            one = np.ones((len(keys), 1))
            guess = np.concatenate([below[0], one], axis=-1) @ key_weights
            own = guess + np.stack([of_heads(row, 2) for row in keys - guess])
            guess = np.concatenate([own, below[1], one], axis=-1) @ value_weights
            near = [own, guess + np.stack([of_heads(row, 2) for row in values - guess])]
        out.append(near)
        below = near
    return out


@pytest.mark.long
def test_layers_by_an_independent_form(tiny):
    """A prompt, some steps, another prompt of two blocks and steps behind it: what was coded once stays as it is, and
    what is new is coded from what the layer made; first and newest tokens are exact."""
    params = calibrated(tiny(FAMILY))
    bare = jaxkv.policy("aquakv", residual=0, initial=0, block=20)
    plain = jaxkv.policy("full", rope="cache", block=20)
    cache = jaxkv.generate(params, ids(30), policy=bare, max_new_tokens=6, stop_tokens=()).cache
    exact = in_order(jaxkv.prefill(params, cache.texts()[0], policy=plain).layers[0])
    want = np.stack([[of_heads(row, 4) for row in x] for x in exact])  # nothing stands between the text and layer 0
    before = [in_order(layer) for layer in cache.views]
    np.testing.assert_allclose(before[0], want, atol=0.05 * np.abs(want).max())
    assert np.mean(np.abs(before[0] - want) > 1e-3) < 0.02
    more = jaxkv.generate(params, ids(31, 4), cache=cache, max_new_tokens=3, stop_tokens=()).cache
    for old, new in zip(before, map(in_order, more.views), strict=True):
        for one, other in zip(old, new, strict=True):
            np.testing.assert_allclose(other[: len(one)], one, atol=1e-5)


def test_the_second_layer_by_an_independent_form(tiny):
    """Both layers behind a prompt, which is read before anything is coded, in NumPy."""
    params = calibrated(tiny(FAMILY))
    cache = jaxkv.prefill(params, ids(30), policy=jaxkv.policy("aquakv", residual=0, initial=0))
    plain = jaxkv.prefill(params, ids(30), policy=jaxkv.policy("full", rope="cache"))
    want = chained([in_order(layer) for layer in plain.layers], params.learned)
    for got, near in zip(map(in_order, cache.views), want, strict=True):
        for one, other in zip(got, near, strict=True):
            assert np.mean(np.abs(one - other) > 1e-3 * np.abs(other).max()) < 0.03  # two points equally near


def test_first_and_newest_are_exact(tiny):
    params = calibrated(tiny(FAMILY))
    cache = jaxkv.prefill(params, ids(30), policy=jaxkv.policy("aquakv", **SMALL))
    plain = jaxkv.prefill(params, ids(30), policy=jaxkv.policy("full", rope="cache"))
    for mine, theirs in zip(map(in_order, cache.views), map(in_order, plain.views), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            same = np.abs(one - other).max(axis=-1) < 1e-4 * np.abs(other).max()
            assert same.tolist() == [at < 2 or at >= 22 for at in range(30)]


@pytest.mark.long
@pytest.mark.parametrize("block", [20, 2048])
def test_saved_and_gone_on_with(tiny, tmp_path, block):
    gone_on_with(calibrated(tiny(FAMILY)), jaxkv.policy("aquakv", block=block, **SMALL), tmp_path)


@pytest.mark.long
def test_a_step_leaves_finished_rows(tiny):
    """Codes of a row that has finished are bit for bit what they were."""
    params = calibrated(tiny(FAMILY))
    cache = jaxkv.prefill(params, [ids(9), ids(12, 1)], policy=jaxkv.policy("aquakv", **SMALL), room=8)
    chosen = cache.policy
    pending = dataclasses.replace(cache, pending=jnp.array([3, 4], jnp.int32))
    running = jnp.array([True, False])
    learned = params.learned_for(chosen.learns, chosen.name)
    after, _ = jax.jit(decode_logits, static_argnums=(3, 4))(
        params.weights, pending, running, params.config, chosen, learned=learned
    )
    for before, now in zip(cache.layers, after.layers, strict=True):
        for old, new in zip(jax.tree.leaves(before.entries), jax.tree.leaves(now.entries), strict=True):
            assert np.array_equal(np.asarray(old)[1], np.asarray(new)[1], equal_nan=True)
            assert old.shape == new.shape and old.dtype == new.dtype


def test_bytes_of_a_chain(tiny):
    """2 bits a number and a length a head, 4 bits in the lowest layer, which has no predictors; `info` reckons the
    same."""
    params = calibrated(tiny(FAMILY))
    chosen = jaxkv.policy("aquakv", **SMALL)
    cache = jaxkv.prefill(params, ids(90), policy=chosen)
    window = HEADS * 2 * 10 * DIM * 4
    for number, layer in enumerate(cache.layers):
        bits, width = (2, HEADS * DIM) if number else (4, 0)
        codes = HEADS * 2 * layer.slots * (DIM * bits // 8 + 2)
        predictors = 2 * (3 * width * width + 2 * width)
        assert layer.kv_bytes == codes + window + predictors
    size = size_of(chosen, params.config, params.dtype, [layer.slots for layer in cache.layers])
    assert size.keys_values == cache.kv_bytes
    assert size.all == sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))


def test_bytes_are_its_bits():
    """Of 10 layers with heads of 64 channels: within 3 % of bits / 16 and lengths, without windows and predictors."""
    config = dataclasses.replace(ONE_HEAD, num_layers=10, layer_types=("full",) * 10)
    chosen = jaxkv.policy("aquakv")
    alone, more = (size_of(chosen, config, "bfloat16", [slots] * 10).keys_values for slots in (0, 4096))
    assert (more - alone) / (10 * 4096 * 2 * 64 * 2) == pytest.approx((2 + 2 / 10 + 16 / 64) / 16, rel=0.03)
    weights = 9 * 2 * (3 * 64 * 64 + 2 * 64)
    assert alone == pytest.approx(10 * 2 * (128 + 4) * 64 * 2 + weights, rel=0.03)


@pytest.mark.long
def test_layers_under_a_window_hold_everything(tiny):
    """Of Gemma's layers those with a sliding window are left out of the chain."""
    params = calibrated(tiny("gemma3_text"))
    cache = jaxkv.generate(
        params, ids(30), policy=jaxkv.policy("aquakv", **SMALL), max_new_tokens=4, stop_tokens=()
    ).cache
    roles = [layer.beside[FIT].keys.role for layer in cache.layers]
    full = [i for i, spec in enumerate(params.config.specs) if spec.window is None]
    assert [i for i, role in enumerate(roles) if role] == full and roles[full[0]] == "first"
    for i, layer in enumerate(cache.layers):
        assert (i in full) == (not isinstance(layer.entries.keys, jax.Array))


@pytest.mark.parametrize(
    "made, error, says",
    [
        (lambda: Higgs(3), BadValue, "bits=3"),
        (lambda: Higgs().check(6), BadValue, "multiple of 4"),
        (lambda: Predicted(basis="queries"), UnknownName, "queries"),
        (lambda: jaxkv.policy("aquakv", rope="text"), BadValue, "before RoPE"),
        (lambda: jaxkv.policy("full", rope="cache", store={"keys": {"kind": "predicted"}}), BadValue, "together"),
        (lambda: jaxkv.policy("h2o", budget=64, store=jaxkv.policy("aquakv").store), BadValue, "evicts nothing"),
    ],
)
def test_what_does_not_go_together(made, error, says):
    with pytest.raises(error, match=says):
        made()


def test_a_model_without_predictors(tiny):
    with pytest.raises(BadValue, match="jaxkv calibrate MODEL --predictors once"):
        jaxkv.prefill(dataclasses.replace(tiny(FAMILY), learned={}), ids(9), policy=jaxkv.policy("aquakv"))
