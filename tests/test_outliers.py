"""QAQ: integers of few bits beside outliers, and how many bits an entry needs, by the release and in NumPy."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from held import bytes_of
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.policies import IntOutliers, NeededBits, catalogue
from jaxkv.policies.score import ScoreInputs
from jaxkv.store.outliers import outliers_of, spread

NUMBERS = st.floats(-1e4, 1e4, width=32)


def apart(row, share):
    """The numbers of one slot that are no outliers, and their channels."""
    low, high = math.ceil(share / 2 * len(row)), len(row) - math.floor((1 - share / 2) * len(row))
    order = sorted(range(len(row)), key=lambda at: (row[at], at))
    inner = order[low : len(row) - high]
    return np.float64(row)[inner], inner


def quantised(row, bits, share):
    """One slot by QAQ's uniform quantisation, and the size of a step."""
    numbers, inner = apart(row, share)
    scale, mean = (np.float64(np.float16(x)) for x in (np.ptp(numbers) / 2**bits, numbers.mean()))
    out = np.float64(row).copy()
    steps = np.clip(np.rint((numbers - mean) / (scale or 1)), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    out[inner] = mean + scale * steps
    return out, scale


@pytest.mark.long
@given(row=st.lists(NUMBERS, min_size=16, max_size=16), bits=st.sampled_from([2, 3, 4, 8]), flat=st.booleans())
@settings(max_examples=40, deadline=None)
def test_slots_by_an_independent_form(row, bits, flat):
    """Within its bound, outliers bit for bit, of equal numbers the first are the smaller; NaN stays in its slot."""
    row = np.array([row[0]] * 16 if flat else row, np.float32)
    codec = IntOutliers(bits, 0.2)
    x = jnp.asarray(np.stack([row, np.full(16, np.nan, np.float32)]))
    code = codec.encode(x)
    got = np.asarray(codec.decode(code))[0]
    want, scale = quantised(row, bits, 0.2)
    numbers, inner = apart(row, 0.2)
    outer = np.setdiff1d(np.arange(16), inner)
    assert len(outer) == 4 and np.array_equal(got[outer], row[outer])
    rough = 2e-3 * np.abs(row).max() + 1e-6  # scale and mean are float16
    assert (np.abs(got - row)[inner] <= np.ptp(numbers) / 2 + scale + rough).all()
    assert (np.abs(got - want) <= scale + rough).all() and np.mean(np.abs(got - want) > rough) < 0.2


@pytest.mark.parametrize("bits", [2, 4])
def test_slots_as_released(goldens, bits):
    """QAQ's own quantiser, with each head of each token by itself; its scales are float32, ours float16."""
    golden = arrays(goldens / "policies" / "qaq.npz")
    codec = dataclasses.replace(catalogue()["qaq"].store.keys, bits=bits)
    for name in ("keys", "values"):
        x, theirs = golden[name], golden[f"{name}/{bits}"]
        mine = np.asarray(codec.decode(codec.encode(jnp.asarray(x))))
        step = np.asarray(spread(jnp.asarray(x), 0.01))[..., None] / 2**bits
        off = np.abs(mine - theirs)
        assert (off < 1e-2 * step + 1e-3 * np.abs(x)).mean() > 0.98 and (off < 1.02 * step).all()
        rows = np.take_along_axis(x, np.asarray(outliers_of(jnp.asarray(x), 0.01)), axis=-1)
        kept = np.take_along_axis(mine, np.asarray(outliers_of(jnp.asarray(x), 0.01)), axis=-1)
        assert rows.shape[-1] == 2 and np.array_equal(rows, kept)


def test_bits_as_released(goldens):
    """The release's bits of each key and value, rounded up: of all tokens but the last four, to which it gives the
    most."""
    golden = arrays(goldens / "policies" / "qaq.npz")
    score, many = catalogue()["qaq"].prefill.score, golden["keys"].shape[1]
    at = jnp.broadcast_to(jnp.arange(many, dtype=jnp.int32), golden["keys"].shape[:2])[None]
    mass = golden["attention"][:, -5:].max(axis=1)
    nothing = np.zeros_like(golden["keys"])
    for name, other in (("keys", "values"), ("values", "keys")):
        given_ = {name: jnp.asarray(golden[name])[None], other: jnp.asarray(nothing)[None]}  # which need no bits
        inputs = ScoreInputs(positions=at, mass=jnp.asarray(mass)[None], now=jnp.array([many], jnp.int32), **given_)
        mine = np.asarray(score.score({}, inputs))[0]
        assert np.array_equal(np.ceil(mine)[:, :-4], golden[f"{name}/needed"][:, :-4])
        assert (golden[f"{name}/needed"][:, -4:] == 16).all()
        assert len(np.unique(np.ceil(mine))) > 1


@pytest.mark.long
def test_bytes_of_two_tiers(tiny):
    """4 and 2 bits, two float16 numbers and two outliers a head, within 3 % of what the arrays take; at 64 channels."""
    store = catalogue()["qaq"].store
    own = (2 * 16 + 2 * (16 + 8)) / 64
    assert bytes_of(store, 4096) / (4096 * 2 * 64 * 2) == pytest.approx((4 + own) / 16, rel=0.03)
    chosen = jaxkv.policy("qaq", budget=16, outliers=0.1)
    cache = jaxkv.prefill(tiny("llama3"), np.arange(90, dtype=np.int32), policy=chosen)
    for layer in cache.layers:
        tier = layer.beside["tier"]
        assert tier.entries.positions.shape[-1] == 3 * 16 and (np.asarray(tier.entries.positions) >= 0).all()
        each = lambda bits: 16 * bits // 8 + 4 + 2 * (4 + 1)  # noqa: E731 - float32 here
        assert layer.kv_bytes == 2 * 2 * (layer.slots * each(4) + 48 * each(2))


@pytest.mark.parametrize(
    "made, says",
    [
        (lambda: IntOutliers(5), "bits=5"),
        (lambda: IntOutliers(outliers=1.0), "outliers=1.0"),
        (lambda: IntOutliers(outliers=0.9).check(8), "no outliers"),
        (lambda: IntOutliers(8).check(512), "256 channels"),
        (lambda: NeededBits(error=0.0), "error=0.0"),
    ],
)
def test_what_cannot_be_coded_is_refused(made, says):
    with pytest.raises(BadValue, match=says):
        made()
