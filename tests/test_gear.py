"""Outliers, low rank and clipped ranges: codes in a second form, as released, and what is read exactly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from held import bytes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codecs import FAMILY, by_channel, exact_of, ids, integers, layer_of

import jaxkv
from jaxkv.errors import BadValue, UnknownName
from jaxkv.policies import Codecs, Gear, Int
from jaxkv.store.gear import low_rank
from pallas_kernels.codes import halves

# ---- GEAR


def geared(x, filled, codec):
    """What a block [T, D] stands for without its low rank: outliers exact, the others by integers among whom an outlier
    stands as the mean of its channel or token."""
    rest, flat, axis, out = x.copy(), x.ravel(), 0 if codec.by == "channel" else 1, []
    inside, many = np.arange(x.size).reshape(x.shape)[filled], max(int(codec.outliers / 2 * x.shape[axis]), 1)
    for line in inside.T if axis == 0 else inside:
        out += sorted(line, key=lambda at: (-flat[at], at))[:many] + sorted(line, key=lambda at: (flat[at], at))[:many]
    for at in out:
        row, column = divmod(at, x.shape[1])
        rest[row, column] = (x[filled] if axis == 0 else x).mean(axis=axis)[column if axis == 0 else row]
    back = np.zeros_like(x)
    if axis == 0:
        found = by_channel(rest, np.where(filled, np.arange(len(x)), -1), len(x), codec.bits)
        for row, numbers in found.items():
            back[row] = numbers
    else:
        for row in np.flatnonzero(filled):
            back[row] = integers(rest[row], Int(codec.bits, min(codec.channels, x.shape[1])))[1]
    for at in out:
        back[divmod(at, x.shape[1])] = flat[at]
    return back


@pytest.mark.some(1)
@pytest.mark.parametrize("by", ["channel", "token"])
@given(seed=st.integers(0, 999), bits=st.sampled_from([4, 2]), held=st.integers(0, 8), kind=st.sampled_from("nkz"))
@settings(max_examples=15, deadline=None)
def test_a_block_by_an_independent_form(by, seed, bits, held, kind):
    """Empty slots hold NaN. The low rank makes the error no larger, and no rank makes it smaller than the singular
    values that are left; constants and zeros are exact."""
    rng = np.random.default_rng(seed)
    x = {"n": rng.standard_normal((8, 16)) * 3, "k": np.full((8, 16), 1.5), "z": np.zeros((8, 16))}[kind]
    x, filled = x.astype(np.float32), np.arange(8) >= 8 - held
    x[~filled] = np.nan
    codec = Gear(bits, tokens=8, by=by, rank=2, outliers=0.1)
    positions = jnp.where(filled, jnp.arange(8, dtype=jnp.int32), -1)[None, None]
    code = codec.encode_all(jnp.asarray(x)[None, None], positions)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(code))
    back = np.asarray(codec.decode(code))[0, 0][filled]
    want, x = geared(np.nan_to_num(x), filled, codec)[filled], x[filled]
    before, after = np.linalg.norm(x - want), np.linalg.norm(x - back)
    assert after <= before * 1.001 + 1e-5
    if held > 2 and before > 0:
        assert after >= np.sqrt((np.linalg.svd(x - want)[1][2:] ** 2).sum()) * 0.99 - 1e-3
    near = np.linalg.svd(back - want, compute_uv=False) if held else np.zeros(1)
    assert (near[2:] < 1e-2 * max(near[0], 1e-3)).all()  # it differs from the integers by a matrix of rank 2
    if kind != "n":
        np.testing.assert_allclose(back, x, atol=1e-6)


def test_low_rank_of_a_matrix_that_has_it():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 12, 2)) @ rng.standard_normal((3, 2, 10))
    left, right = low_rank(jnp.asarray(x, jnp.float32), 2)
    np.testing.assert_allclose(left @ np.swapaxes(right, -1, -2), x, atol=1e-4)
    np.testing.assert_allclose(np.swapaxes(left, -1, -2) @ left, np.broadcast_to(np.eye(2), (3, 2, 2)), atol=1e-5)


@pytest.mark.some(3)
@pytest.mark.parametrize("by", ["channel", "token"])
@pytest.mark.parametrize("bits", [2, 4])
def test_blocks_as_released(goldens, by, bits):
    """GEAR's own quantisers and power iteration on a block, without outliers: as near to the numbers, and to theirs."""
    golden = arrays(goldens / "policies" / "precision.npz")
    x, back, near = (golden[f"gear/{part}"] for part in ("x", f"{by}/{bits}/back", f"{by}/{bits}/near"))
    store = jaxkv.policy("gear", bits=bits, outliers=0.0).store
    codec = store.keys if by == "channel" else store.values
    mine = np.asarray(codec.decode(codec.encode_all(jnp.asarray(x), jnp.arange(64, dtype=jnp.int32)[None, None])))
    theirs = np.linalg.norm(x - back - near)
    assert np.linalg.norm(x - mine) == pytest.approx(theirs, rel=0.02)
    assert theirs < 0.97 * np.linalg.norm(x - back)


@pytest.mark.parametrize("by", ["channel", "token"])
@pytest.mark.parametrize("bits", [2, 4])
def test_outliers_as_released(goldens, by, bits):
    """The largest and the smallest number of each channel, or token, exactly, and the integers of the others; a number
    half way between two may go to either, for scales are float16 here."""
    golden = arrays(goldens / "policies" / "precision.npz")
    x, spared = golden["gear/x"], golden[f"gear/{by}/{bits}/spared"].astype(np.float32)
    store = jaxkv.policy("gear", bits=bits, outliers=0.04).store
    codec = store.keys if by == "channel" else store.values
    own, missed = codec.coded(jnp.asarray(x), jnp.ones(x.shape[:-1], bool))
    alone = dataclasses.replace(missed, right=jnp.zeros_like(missed.right))
    mine, axis = np.asarray(codec.numbers(own, alone)), 2 if by == "channel" else 3
    assert np.isclose(mine, spared, rtol=2e-3, atol=0.05).mean() > 0.99
    for ends in (x.argmax(axis=axis), x.argmin(axis=axis)):
        ends = np.expand_dims(ends, axis)
        exact, ours, theirs = (np.take_along_axis(each, ends, axis=axis) for each in (x, mine, spared))
        assert np.array_equal(exact, ours) and np.array_equal(exact.astype(np.float16), theirs.astype(np.float16))


@pytest.mark.long
@pytest.mark.parametrize("ends", [17, 24, 30])
def test_a_cache_of_blocks(tiny, ends):
    """Of a text's first layer the first eights are blocks of the exact keys, what came after them is exact."""
    params = tiny(FAMILY)
    chosen = jaxkv.policy("gear", tokens=8, residual=8, outliers=0.1)
    cache = jaxkv.generate(params, ids(13), policy=chosen, max_new_tokens=ends - 12, stop_tokens=()).cache
    exact, layer, whole = exact_of(params, cache), cache.layers[0], ends // 8 * 8
    for head in range(2):
        at = np.asarray(layer.positions)[0, head]
        both = chosen.store.keys, chosen.store.values
        for x, rows, codec in zip((layer.keys, layer.values), exact[:, head], both, strict=True):
            lie = np.asarray(x)[0, head][np.argsort(at)][-ends:]
            np.testing.assert_allclose(lie[whole:], rows[whole:], atol=2e-5)
            for first in range(0, whole, 8):
                block, all_of_it = rows[first : first + 8], np.ones(8, bool)
                integers_alone = np.linalg.norm(block - geared(block, all_of_it, codec))
                off = np.linalg.norm(block - lie[first : first + 8])
                assert 0 < off <= integers_alone * 1.01


def test_bytes_of_gear():
    """Bits a number: 2, and of 64 x 64: 0.5 of ranges, 1 of outliers (one at each end of 64), 1 of rank 2."""
    store = jaxkv.policies.catalogue()["gear"].store
    alone = bytes_of(store, 4096) - bytes_of(store, 0)
    assert alone * 8 / (4096 * 2 * 64) == pytest.approx(2 + 0.5 + 2 / 64 * 32 + 1, rel=0.03)


# ---- RotateKV


@pytest.mark.parametrize("bits, clip", [(2, 0.8), (4, 1.0)])
def test_ranges_as_rotatekv_clips_them(goldens, bits, clip):
    """By the release's function, whose offset is a whole number of steps: no further off than that, and as near."""
    golden = arrays(goldens / "policies" / "precision.npz")
    x, back = golden["rotatekv/x"], golden[f"rotatekv/{bits}"]
    codec = jaxkv.policy("rotatekv", bits=bits, channels=64, clip=clip, hadamard=False).store.keys
    code = codec.encode(jnp.asarray(x))
    mine, step = np.asarray(codec.decode(code)), np.repeat(np.asarray(halves(code.scale)), 64, axis=-1)
    assert (np.abs(mine - back) <= 1.51 * step).all() and (np.abs(mine - back) > 1.01 * step).mean() < 0.02
    assert np.abs(mine - x).mean() <= 1.02 * np.abs(back - x).mean()


@given(row=st.lists(st.floats(-100, 100, width=32, allow_subnormal=False), min_size=16, max_size=16))
@settings(max_examples=30, deadline=None)
def test_a_clipped_range(row):
    """Inside it numbers are half a step off at most, beyond it they are its ends; one sign alone is not clipped."""
    x = np.float32(row)
    codec = Int(4, clip=0.8)
    code = codec.encode(jnp.asarray(x))
    clip = 0.8 if x.min() < 0 < x.max() else 1.0
    near, step = np.clip(x, clip * x.min(), clip * x.max()), float(halves(code.scale[0]))
    assert (np.abs(np.asarray(codec.decode(code)) - near) <= 0.51 * step + 1e-5 * np.abs(x).max()).all()


# ---- the first tokens


@pytest.mark.long
@given(seed=st.integers(0, 999), initial=st.integers(1, 9), residual=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_the_first_are_read_as_they_came(seed, initial, residual):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 2, 12, 8)).astype(np.float32)
    positions = np.sort(rng.permuted(np.tile(np.arange(-6, 30), (2, 2, 1)), axis=-1)[..., :12], axis=-1)
    positions = np.where(positions < 0, -1, positions).astype(np.int32)
    coded, plain = (layer_of(Codecs(Int(2), Int(2), *exact), positions, x) for exact in ((residual, initial), ()))
    newest = positions.max(axis=(1, 2))[:, None, None]
    whole = ((positions > newest - residual) | (positions < initial)) & (positions >= 0)
    for name, exact in (("keys", x), ("values", -x)):
        got, codes = np.asarray(getattr(coded, name)), np.asarray(getattr(plain, name))
        np.testing.assert_array_equal(got[whole], exact[whole])
        np.testing.assert_array_equal(got[~whole & (positions >= 0)], codes[~whole & (positions >= 0)])


@pytest.mark.long
def test_a_text_whose_first_tokens_come_one_by_one(tiny):
    """A prompt shorter than the first tokens, and new ones after it."""
    params = tiny(FAMILY)
    chosen = jaxkv.policy("rotatekv", initial=6)
    cache = jaxkv.generate(params, ids(3), policy=chosen, max_new_tokens=9, stop_tokens=()).cache
    exact, layer = exact_of(params, cache), cache.layers[0]
    for head in range(2):
        for slot, p in enumerate(np.asarray(layer.positions)[0, head].tolist()):
            if p >= 0:
                for x, rows in zip((layer.keys, layer.values), exact[:, head], strict=True):
                    near = np.abs(np.asarray(x)[0, head, slot] - rows[p]).max() < 2e-5
                    assert near == (p < 6)


@pytest.mark.parametrize(
    "made, error, says",
    [
        (lambda: Int(4, clip=0.0), BadValue, "clip=0.0"),
        (lambda: Codecs(initial=4), BadValue, "initial=4"),
        (lambda: Codecs(Int(4), initial=-1), BadValue, "initial=-1"),
        (lambda: Gear(5), BadValue, "bits=5"),
        (lambda: Gear(rank=0), BadValue, "rank=0"),
        (lambda: Gear(by="head"), UnknownName, "head"),
        (lambda: Gear(tokens=4, rank=8).check(16), BadValue, "rank=8"),
        (lambda: jaxkv.policy("gear", residual=32), BadValue, "multiple of 64"),
    ],
)
def test_what_cannot_be_is_refused(made, error, says):
    with pytest.raises(error, match=says):
        made()
