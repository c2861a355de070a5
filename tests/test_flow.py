"""FastKV: only some of a prompt's tokens go on to deeper layers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from watched import watched

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.policies import Propagate, Straight
from jaxkv.policies.policy import from_dict
from jaxkv.speculative import AASD, PromptLookup

FAMILY = "llama2"  # three layers


def chosen_by_hand(mass, tokens, keep, window, kernel, budget, pool="max"):
    """The release's rule for one row [Hq, T]: what stands before the window by its pooled mass, and the window."""
    many = min(max(int(np.float32(tokens) * np.float32(keep)), window, budget), tokens)
    reach, reduce = kernel // 2, {"max": np.max, "avg": np.sum}[pool]
    old = mass[:, : tokens - window]
    before = np.stack([reduce(old[:, max(t - reach, 0) : t + reach + 1], axis=1) for t in range(old.shape[1])]).sum(1)
    best = np.argsort(-before, kind="stable")[: many - window]
    return np.sort(np.concatenate([best, np.arange(tokens - window, tokens)]))


@pytest.mark.some(6)
@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("keep, budget", [(0.2, 4), (0.5, 4), (0.2, 20), (1.0, 4)])
def test_the_choice_of_a_padded_batch(keep, budget, pool):
    part, (rows, length) = Propagate(keep=keep, window=3, kernel=5, pool=pool), (3, 40)
    rng, tokens = np.random.default_rng(0), np.array([40, 21, 2])
    mass = rng.random((rows, 2, length)).astype(np.float32)
    positions = np.arange(length) - (length - tokens)[:, None]
    positions = np.where(positions < 0, -1, positions)
    slots = part.count(length, budget)
    got = np.asarray(part.choose(jnp.asarray(mass), jnp.asarray(positions), jnp.full(rows, budget), slots))
    assert got.shape == (rows, slots)
    for row in range(2):
        pad = length - tokens[row]
        want = chosen_by_hand(mass[row, :, pad:], tokens[row], keep, 3, 5, budget, pool)
        held = got[row][got[row] >= 0]
        np.testing.assert_array_equal(held - pad, want)
        assert (got[row][: slots - len(held)] == -1).all()
    np.testing.assert_array_equal(got[2][got[2] >= 0], [38, 39])


@pytest.mark.long
def test_deeper_layers_see_the_chosen_tokens_alone(tiny):
    """What they hold is among the tokens that the layer's own attention chose; the layers up to it hold others too."""
    params, tokens = tiny(FAMILY), np.random.default_rng(3).integers(3, 100, 60)
    after, keep, budget, window = 1, 0.15, 8, 4
    policy = jaxkv.policy("fastkv", budget=budget, window=window, after=after, keep=keep)
    cache = jaxkv.prefill(params, tokens, policy=policy)
    weights = watched(params, tokens)[after][2]
    mass = weights[:, -window:].sum(1)
    going = chosen_by_hand(mass, 60, keep, window, 7, budget)
    assert len(going) == 9
    for index, layer in enumerate(cache.layers):
        held = {int(p) for p in np.asarray(layer.positions).ravel() if p >= 0}
        assert (held <= set(going.tolist())) == (index > after)


@pytest.mark.long
def test_all_tokens_going_on_is_no_propagation(tiny):
    params, tokens = tiny(FAMILY), np.random.default_rng(4).integers(3, 100, 60)
    policy = jaxkv.policy("fastkv", budget=12, window=4, keep=1.0, after=1)
    plain = dataclasses.replace(policy, flow=Straight())
    one, two = (jaxkv.generate(params, tokens, policy=p, max_new_tokens=12, stop_tokens=()) for p in (policy, plain))
    assert one.tokens.tolist() == two.tokens.tolist()
    for mine, theirs in zip(one.cache.layers, two.cache.layers, strict=True):
        np.testing.assert_array_equal(np.asarray(mine.positions), np.asarray(theirs.positions))


def test_refusals(tiny):
    for options in ({"after": -1}, {"after": 1.5}, {"keep": 0.0}, {"keep": 1.5}):
        with pytest.raises(BadValue, match="after="):
            Propagate(**options)
    with pytest.raises(BadValue, match="kernel"):
        Propagate(kernel=4)
    with pytest.raises(BadValue, match="without replay"):
        dataclasses.replace(jaxkv.policy("kvzip", budget=12, allocate={"kind": "uniform"}), flow=Propagate())
    summed = {"score": {"kind": "accumulated-attention"}, "observe": {"kind": "all-queries"}}
    for rule in ({"kind": "merge", "by": "mean-attention"}, {"kind": "spread"}):
        with pytest.raises(BadValue, match="see no attention"):
            from_dict({"name": "x", "flow": {"kind": "follow"}, "prefill": {**summed, "evicted": rule}})
    with pytest.raises(BadValue, match="PromptLookup"):
        policy = jaxkv.policy("fastkv", budget=12, window=4)
        jaxkv.generate(tiny(FAMILY), np.arange(3, 63), policy=policy, speculative=AASD())


@pytest.mark.long
def test_drafts_from_the_text_where_few_tokens_go_on(tiny):
    policy, tokens = jaxkv.policy("fastkv", budget=12, window=4), np.arange(3, 63)
    plain = jaxkv.generate(tiny(FAMILY), tokens, policy=policy, max_new_tokens=8, stop_tokens=())
    drafted = jaxkv.generate(
        tiny(FAMILY), tokens, policy=policy, max_new_tokens=8, stop_tokens=(), speculative=PromptLookup()
    )
    assert drafted.tokens.tolist() == plain.tokens.tolist()
