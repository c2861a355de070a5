"""The cache rules of the design, for every registered policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv import run
from jaxkv.policies import catalogue

NAMES = sorted(catalogue())
BOUNDED = [name for name in NAMES if catalogue()[name].evicts]
SMALL = {  # published windows are longer than the tiny prompts
    "snapkv": {"window": 6},
    "longflow": {"window": 6},
    "dapq": {"count": 6},
    "dapq-longflow": {"count": 6},
}
FAMILY = "llama3"
VOCAB = 100


def policy(name: str, budget: int = 16, **options):
    """The named policy at test size."""
    options = {**SMALL.get(name, {}), **options}
    return jaxkv.policy(name, budget=budget, **options) if catalogue()[name].evicts else jaxkv.policy(name, **options)


def ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def generated(params, prompt, chosen, steps=20, **options):
    return jaxkv.generate(params, prompt, policy=chosen, max_new_tokens=steps, stop_tokens=(), **options)


def entries(layer, row=0):
    """The positions held per head, in time order."""
    return [sorted(int(p) for p in head if p >= 0) for head in np.asarray(layer.positions[row])]


def assert_rules(cache, chosen, row=0):
    """Never over budget, no position twice, protected entries there, nothing from the future."""
    seen = int(cache.lengths[row])
    for index, layer in enumerate(cache.layers):
        limit = int(cache.limits[index][row])
        for held in entries(layer, row):
            assert len(held) == len(set(held)) <= layer.slots
            assert all(0 <= p < seen for p in held)
            if chosen.decode is not None:
                assert len(held) <= limit + (chosen.decode.every if chosen.decode.every > 1 else 0)
                if seen >= limit:
                    assert len(held) >= limit - chosen.prefill.reserve
            for phase in chosen.phases:
                assert set(range(min(phase.protects.sinks, seen))) <= set(held)


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("block", [7, 2048])
def test_budget_holds_at_prefill_and_decode(tiny, name, block):
    params, chosen = tiny(FAMILY), policy(name, block=block)
    cache = jaxkv.prefill(params, ids(50), policy=chosen)
    for layer in cache.layers:
        positions = np.asarray(layer.positions[0])
        for head in positions:
            held = head[head >= 0]
            assert len(held) == 16 - chosen.prefill.reserve, "the prompt fills its budget"
            assert (np.diff(held) > 0).all(), "kept entries are in time order"
            assert (head[: len(head) - len(held)] < 0).all(), "behind the empty slots"
    assert_rules(cache, chosen)
    out = generated(params, ids(50), chosen, 40)
    assert_rules(out.cache, chosen)
    if chosen.decode is not None:
        assert all(layer.slots == 16 for layer in out.cache.layers)
        recent = chosen.decode.protects
        count = int(recent.recents(jnp.array([16]))[0])
        for layer in out.cache.layers:
            for held in entries(layer):
                assert set(range(89 - count, 89)) <= set(held)


@pytest.mark.parametrize("name", BOUNDED)
def test_enough_budget_is_the_full_cache(tiny, name):
    params, steps = tiny(FAMILY), 12
    prompt = ids(30)
    full = generated(params, prompt, None, steps)
    chosen = policy(name, budget=30 + (steps if policy(name).decode is not None else 0))
    chosen = dataclasses.replace(chosen, prefill=dataclasses.replace(chosen.prefill, reserve=0))
    ours = generated(params, prompt, chosen, steps)
    assert ours.tokens.tolist() == full.tokens.tolist()
    for mine, theirs in zip(ours.cache.layers, full.cache.layers, strict=True):
        assert mine.slots == theirs.slots
        assert np.array_equal(np.asarray(mine.positions), np.asarray(theirs.positions))
        if chosen.rope == "text":  # bit for bit, hidden states and all
            held = np.asarray(mine.positions)[..., None] >= 0
            assert np.array_equal(np.where(held, mine.keys, 0), np.where(held, theirs.keys, 0))
        np.testing.assert_allclose(np.asarray(mine.values), np.asarray(theirs.values), atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [{"budget": 16}, {"ratio": 0.5}], ids=["budget", "ratio"])
def test_padding_and_batch_change_nothing(tiny, name, size):
    params = tiny(FAMILY)
    options = {**SMALL.get(name, {}), "block": 16}
    chosen = jaxkv.policy(name, **options, **(size if catalogue()[name].evicts else {}))
    prompts = [ids(45, 1), ids(9, 2), ids(30, 3), ids(17, 4)]
    together = generated(params, prompts, chosen, 24)
    for row, prompt in enumerate(prompts):
        alone = generated(params, prompt, chosen, 24)
        assert together.tokens[row].tolist() == alone.tokens[0].tolist()
        for mine, theirs in zip(together.cache.layers, alone.cache.layers, strict=True):
            assert entries(mine, row) == entries(theirs)


@pytest.mark.parametrize("name", NAMES)
def test_one_compilation_per_shape(tiny, name):
    params, chosen = tiny(FAMILY), policy(name, budget=18)
    generated(params, [ids(40, 1), ids(33, 2)], chosen, 9)
    before = run.prefill._cache_size(), run.decode._cache_size()
    generated(params, [ids(40, 3), ids(21, 4)], chosen, 9)
    assert (run.prefill._cache_size(), run.decode._cache_size()) == before


@pytest.mark.parametrize("name", NAMES)
def test_scan_equals_stepping_by_hand(tiny, name):
    params, chosen = tiny(FAMILY), policy(name)
    whole = generated(params, ids(40), chosen, 13)
    pieces = jaxkv.stream(params, ids(40), policy=chosen, max_new_tokens=13, stop_tokens=())
    for _ in pieces:
        pass
    assert pieces.generation.tokens.tolist() == whole.tokens.tolist()

    out = generated(params, ids(40), chosen, 1)
    by_hand = [int(out.tokens[0, 0])]
    cache = out.cache
    for _ in range(12):
        out = generated(params, None, None, 1, cache=cache)
        cache = out.cache
        by_hand.append(int(out.tokens[0, 0]))
    assert by_hand == whole.tokens[0].tolist()
    for mine, theirs in zip(cache.layers, whole.cache.layers, strict=True):
        assert entries(mine) == entries(theirs)


@pytest.mark.parametrize("name", NAMES)
def test_save_and_restore_equals_going_on(tiny, name, tmp_path):
    params, chosen = tiny(FAMILY), policy(name)
    out = generated(params, [ids(40), ids(12, 1)], chosen, 7)
    jaxkv.save(out.cache, tmp_path / "cache")
    restored = jaxkv.restore(tmp_path / "cache", params)
    assert restored.policy == out.cache.policy
    one = generated(params, None, None, 9, cache=out.cache)
    two = generated(params, None, None, 9, cache=restored)
    assert one.tokens.tolist() == two.tokens.tolist()
    for a, b in zip(jax.tree.leaves(one.cache), jax.tree.leaves(two.cache), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", NAMES)
def test_empty_slots_are_never_read(tiny, name):
    params, chosen = tiny(FAMILY), policy(name, budget=32)
    cache = generated(params, [ids(20), ids(9, 1)], chosen, 4).cache

    def poisoned(layer):
        hole = (layer.positions < 0)[..., None]
        return dataclasses.replace(
            layer,
            keys=jnp.where(hole, jnp.nan, layer.keys),
            values=jnp.where(hole, jnp.nan, layer.values),
            stats={k: jnp.where(hole[..., 0], jnp.nan, v) for k, v in layer.stats.items()},
        )

    bad = dataclasses.replace(cache, layers=tuple(poisoned(layer) for layer in cache.layers))
    for prompt in (None, [ids(5, 5), ids(30, 6)]):
        clean, dirty = (generated(params, prompt, None, 8, cache=c) for c in (cache, bad))
        assert clean.tokens.tolist() == dirty.tokens.tolist()
        for a, b in zip(clean.cache.layers, dirty.cache.layers, strict=True):
            assert np.array_equal(np.asarray(a.positions), np.asarray(b.positions))


@given(
    name=st.sampled_from(BOUNDED),
    budget=st.sampled_from([9, 13, 24]),
    block=st.sampled_from([8, 20]),
    lengths=st.lists(st.integers(1, 44), min_size=2, max_size=2),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_rules_hold_for_generated_cases(tiny, name, budget, block, lengths, seed):
    params, chosen = tiny(FAMILY), policy(name, budget=budget, block=block)
    prompts = [ids(length, seed + i) for i, length in enumerate(lengths)]
    out = generated(params, prompts, chosen, 10)
    for row in range(2):
        assert_rules(out.cache, chosen, row)
