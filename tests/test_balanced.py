"""Integers of balanced channels: what is chosen of each channel, and how far off a code is."""

import jax.numpy as jnp
import numpy as np
import pytest
from held import bytes_of
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.policies import Codecs, Demote, Int, IntBalanced
from jaxkv.store.fit import FIT

KINDS = ("normal", "equal", "zero", "huge")


def drawn(seed, kind):
    """Keys `[2, 2, 7, 16]` and positions, empty slots of NaN: two channels far from 0, one far apart."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 2, 7, 16)) * (1e2 if kind == "huge" else 1.0)
    x[..., 3] += 350
    x[..., 9] -= 80
    x[..., 12] *= 40
    x = {"equal": np.full_like(x, 353.9), "zero": np.zeros_like(x)}.get(kind, x).astype(np.float32)
    positions = np.where(rng.random((2, 2, 7)) < 0.3, -1, np.arange(7)).astype(np.int32)
    x[positions < 0] = np.nan
    return x, positions


@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from([2, 3, 4, 8]),
    channels=st.sampled_from([0, 8]),
    kind=st.sampled_from(KINDS),
)
@settings(max_examples=12, deadline=None)
def test_every_code_is_within_its_bound(seed, bits, channels, kind):
    """Centre and reach by NumPy; no number is off by more than half of its channel's step."""
    x, positions = drawn(seed, kind)
    codec = IntBalanced(bits, channels)
    fit = codec.fit(jnp.asarray(x), jnp.asarray(positions), None, {})
    fitted = codec.fitted(fit)
    back = np.asarray(fitted.decode(fitted.encode(jnp.asarray(x))), np.float64)
    for row, head in np.ndindex(2, 2):
        centre, reach = (np.float64(np.asarray(fit[name])[row, head]) for name in ("centre", "reach"))
        held = np.float64(x[row, head][positions[row, head] >= 0])
        if not len(held):
            assert (centre == 0).all() and (reach == 1).all()
            continue
        np.testing.assert_allclose(centre, (held.min(0) + held.max(0)) / 2, rtol=1e-3, atol=1e-6)
        far = np.abs(held - centre).max(0)
        far = np.maximum(far, 2 / len(held) * far.mean())
        assert (reach >= far * (1 - 1e-6)).all()
        np.testing.assert_allclose(reach, np.where(far > 0, far, 1.0), rtol=2e-3, atol=1e-7)
        y = (held - centre) / reach
        runs = y.reshape(len(y), -1, channels or 16)
        step = np.repeat(np.ptp(runs, axis=-1) / (2**bits - 1), channels or 16, axis=-1).reshape(y.shape)
        off = np.abs(back[row, head][positions[row, head] >= 0] - held)
        assert (off <= reach * (step / 2 + 2e-3) + 1e-6).all()  # scale and lowest value are float16
        assert (step <= 2.01 / (2**bits - 1)).all()


def test_channels_that_stand_out_cost_the_others_nothing():
    """In plain integers the others are lost: all of them fall on one or two steps."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 1, 64, 16)).astype(np.float32)
    x[..., 3] += 350
    at = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), (1, 1, 64))
    codec = IntBalanced(4)
    fitted = codec.fitted(codec.fit(jnp.asarray(x), at, None, {}))
    others = np.arange(16) != 3
    off = [np.abs(np.asarray(c.decode(c.encode(jnp.asarray(x)))) - x)[..., others].mean() for c in (Int(4), fitted)]
    assert off[0] > 0.7 and off[1] < 0.1


def test_a_short_prompt_does_not_choose_for_the_rest():
    """Of two tokens some channels' numbers are nearly the same: were their reach as small, all that comes later would
    be lost in them."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 1, 64, 64)), jnp.float32)
    codec = IntBalanced(4)
    for few in (1, 2, 3, 8):
        at = jnp.where(jnp.arange(64) < few, jnp.arange(64, dtype=jnp.int32), -1)[None, None]
        fitted = codec.fitted(codec.fit(x, at, None, {}))
        assert float(jnp.abs(fitted.decode(fitted.encode(x)) - x).mean()) < 0.25


@pytest.mark.long
def test_a_prompt_chooses_and_the_text_goes_on(tiny):
    """Centre and reach are those of the prompt's keys; all slots are codes from there on, of the new tokens too."""
    params, ids = tiny("qwen2"), np.random.default_rng(3).integers(0, 100, 30).astype(np.int32)
    full = jaxkv.policy("full", store={"keys": {"kind": "int-balanced", "bits": 8}, "values": {"kind": "int"}})
    exact = jaxkv.generate(params, ids, policy=None, max_new_tokens=9, stop_tokens=()).cache
    prompt = jaxkv.prefill(params, ids, policy=None)
    coded = jaxkv.generate(params, ids, policy=full, max_new_tokens=9, stop_tokens=()).cache
    for mine, its, before in zip(coded.layers, exact.layers, prompt.layers, strict=True):
        keys = np.asarray(before.keys)[np.asarray(before.positions) >= 0].reshape(1, -1, 30, before.keys.shape[-1])
        fit = mine.beside[FIT].keys
        np.testing.assert_allclose(fit["centre"], (keys.min(2) + keys.max(2)) / 2, rtol=2e-3, atol=1e-3)
        assert mine.entries.keys.codes.dtype == jnp.uint8
        there = np.asarray(mine.positions) >= 0
        assert there.sum() == (np.asarray(its.positions) >= 0).sum()
    first = [np.asarray(cache.layers[0].keys)[np.asarray(cache.layers[0].positions) >= 0] for cache in (coded, exact)]
    step = float(jnp.max(coded.layers[0].beside[FIT].keys["reach"])) * 2 / 255
    assert 0 < np.abs(first[0] - first[1]).max() < 2 * step  # what came later may lie beyond the prompt's range


def test_bytes():
    """Those of integers, and of each head two float16 numbers a channel."""
    balanced, plain = (Codecs(keys=keys, values=Int(4)) for keys in (IntBalanced(4), Int(4)))
    for slots in (64, 4096):
        assert bytes_of(balanced, slots) == bytes_of(plain, slots) + 4 * 64


@pytest.mark.long
def test_a_tier_takes_the_middle_away(tiny):
    """Under balance="ranges" the first block's keys choose, and the tier's keys are the full cache's but for half a
    step of their channel's range."""
    params, ids = tiny("qwen2"), np.random.default_rng(4).integers(0, 100, 40).astype(np.int32)
    rule = {"kind": "demote", "slots": 24, "bits": 8, "balance": "ranges"}
    cache = jaxkv.prefill(params, ids, policy=jaxkv.policy("h2o", budget=16, evicted=rule))
    full = jaxkv.prefill(params, ids, policy=None)
    layer, its = cache.layers[0], full.layers[0]
    tier = layer.beside["tier"]
    keys, _ = tier.decoded()
    assert tier.values is None
    exact = np.asarray(its.keys)[0]
    place = {int(p): slot for slot, p in enumerate(np.asarray(its.positions)[0, 0]) if p >= 0}
    for head in range(exact.shape[0]):
        own = exact[head][list(place.values())]
        np.testing.assert_allclose(tier.keys.centre[0, head], (own.min(0) + own.max(0)) / 2, rtol=1e-5, atol=1e-6)
        half = np.ptp(own, axis=0) / 2
        half = np.maximum(half, 2 / len(own) * half.mean())
        np.testing.assert_allclose(1 / tier.keys.factor[0, head], half, rtol=1e-4)
        held = np.asarray(tier.entries.positions)[0, head]
        assert (held >= 0).all()
        want = exact[head][[place[p] for p in held.tolist()]]
        assert (np.abs(np.asarray(keys)[0, head] - want) <= half * (1 / 255 + 2e-3)).all()


@pytest.mark.parametrize(
    "made, says",
    [
        (lambda: IntBalanced(5), "bits=5"),
        (lambda: IntBalanced(4, channels=24).check(64), "channels=24"),
        (
            lambda: jaxkv.policy("global-h2o", budget=64, store={"keys": {"kind": "int-balanced"}}),
            "budgets of their own",
        ),
        (lambda: Demote(keys=IntBalanced(4)), "fitted to a prompt"),
        (lambda: Demote(balance="middle"), "balance='middle'"),
    ],
)
def test_what_cannot_be_balanced_is_refused(made, says):
    with pytest.raises(BadValue, match=says):
        made()
