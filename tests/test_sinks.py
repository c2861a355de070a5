"""`rope="sinks"`: what `rope="cache"` means where sinks and the newest tokens are all that stays, as fast as a text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.evaluation.forced import follow
from jaxkv.models.rope import FAR, Rope, frequencies, rotate
from jaxkv.speculative import PromptLookup, SelfDraft
from jaxkv.store.entries import EMPTY, before_gap, gap_in

CODES = {"kind": "int", "bits": 8}
CASES = {
    "alone": {},
    "cuts": {"decode_every": 5},
    "spread": {"name": "cam"},
    "codes": {"store": {"values": CODES}},  # of values, which are the same however keys lie
    "residual": {"store": {"values": CODES, "residual": 4}},
}


def _ids(rows, length, seed=0):
    return np.random.default_rng(seed).integers(3, 120, (rows, length)).astype(np.int32)


def _both(name="streaming-llm", **options):
    return [jaxkv.policy(name, **{"budget": 12, "block": 16, **options}, rope=rope) for rope in ("cache", "sinks")]


FEW = [("alone", "llama3", 41), ("spread", "llama3", 41), ("cuts", "gemma3_text", 3)]  # the second has windows
ALL = [*FEW, *((case, family, 41) for case in CASES for family in ("llama3", "gemma3_text"))]
MANY = [pytest.param(*case, marks=[] if case in FEW else pytest.mark.long) for case in dict.fromkeys(ALL)]


@pytest.mark.parametrize(("case", "family", "length"), MANY)
def test_it_says_what_places_in_the_cache_say(tiny, case, family, length):
    """Logits of decoded tokens, behind a prompt of several blocks, and behind a second one; and what is held."""
    params, prompts, more, answer = tiny(family), _ids(2, length), _ids(2, 7, seed=1), _ids(2, 17, seed=2)
    prompts[1, 2:5] = prompts[0, 2:5]
    found = []
    for policy in _both(**CASES[case]):
        cache = jaxkv.prefill(params, [prompts[0].tolist(), prompts[1, :2].tolist()], policy=policy)
        cache, first = follow(params, cache, answer)
        cache = jaxkv.prefill(params, more, cache=cache)
        cache, second = follow(params, cache, answer)
        found.append((first, second, [layer.positions for layer in cache.layers]))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=2e-4), *found)


def test_a_cache_goes_on_with_everything_kept(tiny):
    """Nothing says any more how many sinks there were: the gap is found."""
    params, ids, answer = tiny("llama3"), _ids(1, 30), _ids(1, 9, seed=1)
    found = []
    for policy in _both():
        cache = jaxkv.prefill(params, ids, policy=policy)
        cache = jaxkv.prefill(params, _ids(1, 20, seed=2), policy=jaxkv.policy("full"), cache=cache)
        cache, logits = follow(params, cache, answer)
        assert np.asarray(cache.held()).min() == 12 + 20 + 9
        found.append(logits)
    np.testing.assert_allclose(*found, atol=2e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["streaming-llm", "cam"])
def test_drafts_say_what_plain_decoding_says(tiny, name):
    params = tiny("llama3")
    ids = np.tile(_ids(1, 11), (1, 3))
    policy, asked = jaxkv.policy(name, budget=12), {"max_new_tokens": 24, "stop_tokens": ()}
    if name == "cam":
        policy = jaxkv.policy(name, budget=12, evicted={"kind": "drop"})  # a rule of what leaves sees no trees
    drafted = jaxkv.generate(params, ids, policy=policy, speculative=PromptLookup(), **asked)
    assert np.array_equal(jaxkv.generate(params, ids, policy=policy, **asked).tokens, drafted.tokens)
    assert drafted.stats.speculation.trees > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_drafts_may_hold_sinks(tiny, seed):
    """A text shorter than its sinks, behind which the gap opens inside a tree."""
    params, ids = tiny("llama3"), _ids(1, 2, seed)
    policy, asked = jaxkv.policy("streaming-llm", budget=9, sinks=8), {"max_new_tokens": 24, "stop_tokens": ()}
    drafted = jaxkv.generate(params, ids, policy=policy, speculative=SelfDraft(policy, depth=12), **asked)
    assert np.array_equal(jaxkv.generate(params, ids, policy=policy, **asked).tokens, drafted.tokens)


@pytest.mark.long
@pytest.mark.parametrize("name", ["streaming-llm", "cam"])
@pytest.mark.parametrize("axes", [{"model": 2}, {"context": 2}], ids=str)
def test_meshes_say_it_too(goldens, name, axes):
    folder, ids = goldens / "tiny" / "llama3", _ids(2, 40)
    policy, found = jaxkv.policy(name, budget=16), []
    for mesh in (None, jaxkv.mesh(**axes, devices=jax.devices()[:2])):
        out = jaxkv.generate(jaxkv.load(folder, mesh=mesh), ids, policy=policy, max_new_tokens=20, stop_tokens=())
        found.append(out.tokens)
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_sinks": 2},
        {"decode_score": {"kind": "key-norm"}},
        {"prefill": "snapkv"},
        {"flow": {"kind": "propagate"}},
        {"prefill_observe": {"kind": "lookahead", "count": 4}},
        {"evicted": {"kind": "merge"}},
    ],
    ids=str,
)
def test_what_it_cannot_say_is_refused(options):
    """Two gaps, queries that stand elsewhere, and rules that read keys, which lie otherwise."""
    with pytest.raises(BadValue, match="rope='cache'"):
        jaxkv.policy("streaming-llm", budget=64, **options)


def test_the_gap_is_what_has_left():
    """Of a head that holds nothing, everything, sinks and newest; with a window, of what it shows."""
    held = jnp.array([[[EMPTY] * 5, [3, 0, 1, 2, EMPTY], [0, 9, 1, 7, 8], [1, 9, 8, 7, 6]]], jnp.int32)
    gap = gap_in(held)
    assert gap.ravel().tolist() == [0, 0, 5, 4]
    assert gap_in(held, window=4).ravel().tolist() == [0, 0, 0, 0]
    assert gap_in(held, window=4, first=jnp.array([4])).ravel().tolist() == [0, 0, 5, 4]
    for sinks in (2, None):
        assert jnp.where(before_gap(held, sinks), gap, 0)[0].tolist() == [
            [0] * 5,
            [0] * 5,
            [5, 0, 5, 0, 0],
            [4, 0, 0, 0, 0],
        ]


@pytest.mark.parametrize("at", [-5, 5, FAR - 1, FAR, 3 * FAR + 17, 1_000_003, 100_000_007])
def test_angles_stay_exact_however_far_the_text_is(at):
    """In float32 a position of a million times a frequency is off by what a key shows."""
    rope, x = Rope(theta=1e4), np.random.default_rng(0).standard_normal(64).astype(np.float32)
    turns = at * frequencies(rope, 64).astype(np.float64)
    left, right = x[:32].astype(np.float64), x[32:].astype(np.float64)
    exact = np.concatenate([left * np.cos(turns) - right * np.sin(turns), right * np.cos(turns) + left * np.sin(turns)])
    atol = 1e-5 if at < 10 else 2e-3 if at < 10_000_000 else 2e-2
    np.testing.assert_allclose(rotate(jnp.asarray(x), jnp.array(at), rope), exact, atol=atol)
