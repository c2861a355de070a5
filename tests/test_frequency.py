"""FreqKV: survivors are the low frequencies of what was held, by SciPy's transform and as released."""

import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import dct, idct

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.policies import LowPass
from jaxkv.policies.evicted import Leaving
from jaxkv.store.entries import Entries

FAMILY = "llama3"


def slow(x, stay):
    """The first coefficients of rows [n, D], transformed back to `stay` rows."""
    some = dct(x, axis=0, norm="ortho")[:stay]
    return idct(some, axis=0, norm="ortho") * np.sqrt(stay / len(x))


def cut(x, positions, newest, sinks):
    """The rule on entries whose slots are in time order: all but the sinks, into the `newest` of them."""
    entries = Entries(jnp.asarray(x), jnp.asarray(-x), jnp.asarray(positions), {})
    kept = jnp.asarray(newest | ((positions >= 0) & (positions < sinks)))
    spared = jnp.asarray((positions >= 0) & (positions < sinks))
    facts = Leaving(spared=spared, most=positions.shape[-1])
    after, _ = LowPass().absorb(None, entries.masked(kept), entries.masked(~kept), facts)
    return after


@pytest.mark.long
@given(seed=st.integers(0, 999), held=st.integers(1, 14), goes=st.integers(0, 13), sinks=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_low_frequencies_by_scipy(seed, held, goes, sinks):
    """Behind empty slots, which hold NaN; with nothing that leaves all stay as they are."""
    rng = np.random.default_rng(seed)
    x, positions = rng.standard_normal((2, 2, 14, 4)).astype(np.float32), np.full((2, 2, 14), -1, np.int32)
    positions[..., 14 - held :] = np.arange(held)
    x[positions < 0] = np.nan
    newest = positions >= min(sinks + goes, held)
    after = cut(x, positions, newest, sinks)
    for row in range(2):
        for head in range(2):
            given_, stay = positions[row, head] >= sinks, newest[row, head] & (positions[row, head] >= sinks)
            for name, exact in (("keys", x), ("values", -x)):
                got = np.asarray(getattr(after, name))[row, head]
                if stay.any():
                    np.testing.assert_allclose(got[stay], slow(exact[row, head][given_], stay.sum()), atol=1e-5)
                same = (positions[row, head] >= 0) & (positions[row, head] < sinks) | ((goes == 0) & stay)
                np.testing.assert_array_equal(got[same], exact[row, head][same])


@pytest.mark.parametrize("stay", [6, 9])
def test_low_frequencies_as_released(goldens, stay):
    golden, name = arrays(goldens / "policies" / "precision.npz"), "freqkv"
    x = golden[f"{name}/x"]
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), x.shape[:3])
    after = cut(x, positions, positions >= 12 - stay, 0)
    np.testing.assert_allclose(np.asarray(after.keys)[:, :, 12 - stay :], golden[f"{name}/{stay}"], atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("block", [64, 16])
def test_a_text_that_is_cut_again_and_again(tiny, block):
    """The first layer's keys before RoPE, which depend on their tokens alone, under `freqkv`'s rule in NumPy: after
    each block of a prompt, and whenever 4 tokens more than the budget are held."""
    params, sinks, budget, every = tiny(FAMILY), 2, 12, 4
    prompt = np.random.default_rng(3).integers(0, 100, 45).astype(np.int32)
    chosen = jaxkv.policy("freqkv", budget=budget, sinks=sinks, every=every, block=block)
    cache = jaxkv.generate(params, prompt, policy=chosen, max_new_tokens=15, stop_tokens=()).cache
    text = cache.texts()[0]
    whole = jaxkv.prefill(params, text, policy=jaxkv.policy("full", rope="cache")).layers[0]
    for head in range(2):
        order = np.argsort(np.asarray(whole.positions)[0, head])[-len(text) :]
        for name in ("keys", "values"):
            exact, held = np.asarray(getattr(whole, name))[0, head][order].astype(np.float64), np.zeros((0, 16))
            ends = [end for end in range(45 % block or block, 46, block)] + list(range(46, len(text) + 1))
            for begin, end in zip([0, *ends], ends, strict=False):
                held = np.concatenate([held, exact[begin:end]])
                if len(held) > budget and (end <= 45 or len(held) >= budget + every):
                    held = np.concatenate([held[:sinks], slow(held[sinks:], budget - sinks)])
            layer = cache.layers[0]
            at = np.asarray(layer.positions)[0, head]
            mine = np.asarray(getattr(layer, name))[0, head][np.argsort(at)][-(at >= 0).sum() :]
            np.testing.assert_allclose(mine, held, atol=1e-4)


@pytest.mark.parametrize("options, says", [({"rope": "text"}, "rope='cache'"), ({"every": 1}, "every=1")])
def test_what_cannot_be_filtered_is_refused(options, says):
    with pytest.raises(BadValue, match=says):
        jaxkv.policy("freqkv", budget=64, **options)
