"""The rules of the cache's own operations, with generated cases."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv.store import entries as of_slots
from jaxkv.store import slots as stores
from jaxkv.store.slots import Slots
from pallas_kernels.arguments import Judge, Rule
from pallas_kernels.decode_attend_score.victim import aim, alive, victim


def layer_with(positions: np.ndarray, seed: int = 0) -> Slots:
    """A layer whose keys and values name their position, NaN in the empty slots."""
    batch, heads, slots = positions.shape
    content = np.where(positions < 0, np.nan, positions).astype(np.float32)
    layer = stores.empty(batch, heads, slots, 2, jnp.float32, ("mark",))
    return layer.changed(
        keys=jnp.asarray(np.stack([content, -content], axis=-1)),
        values=jnp.asarray(np.stack([content + 0.5, content], axis=-1)),
        positions=jnp.asarray(positions, jnp.int32),
        stats={"mark": jnp.asarray(np.nan_to_num(content))},
    )


@st.composite
def layers(draw):
    """Positions [B, Hk, S]: some empty, the rest distinct and in any order; scores with many ties."""
    batch, heads, slots = draw(st.sampled_from([(1, 1, 1), (3, 1, 5), (2, 3, 12)]))  # each shape compiles
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    positions = np.stack([rng.permutation(40)[:slots] for _ in range(batch * heads)]).reshape(batch, heads, slots)
    positions = np.where(rng.random(positions.shape) < draw(st.sampled_from([0.0, 0.3, 0.9])), -1, positions)
    scores = rng.integers(0, draw(st.sampled_from([1, 3, 100])), positions.shape).astype(np.float32)
    scores[rng.random(scores.shape) < 0.2] = np.inf
    return positions, scores


def best(positions, scores, count):
    """The positions that a plain sort would keep: highest score, then oldest."""
    entries = sorted((-s, p) for p, s in zip(positions, scores, strict=True) if p >= 0)
    return sorted(p for _, p in entries[:count])


def sorted_between(positions: np.ndarray) -> np.ndarray:
    """The entries in time order, the empty slots staying where they are."""
    ordered = positions.copy()
    for row in ordered.reshape(-1, positions.shape[-1]):
        row[row >= 0] = np.sort(row[row >= 0])
    return ordered


@given(layers(), st.sampled_from([1, 4, 15]), st.integers(1, 15))  # each number of slots compiles
@settings(max_examples=15, deadline=None)
def test_keep_is_a_stable_top_k_in_time_order(case, slots, limit):
    positions, scores = case
    positions = sorted_between(positions)
    layer = layer_with(positions)
    limits = jnp.full(positions.shape[0], limit, jnp.int32)
    chosen = of_slots.best_of_each(jnp.asarray(scores), layer.positions, jnp.minimum(limits, slots))
    kept = layer.rebuilt(layer.by_head(), chosen, slots, limits, {})
    assert kept.slots == slots
    for b, h in np.ndindex(positions.shape[:2]):
        held = np.asarray(kept.positions[b, h])
        assert held[held >= 0].tolist() == best(positions[b, h], scores[b, h], min(slots, limit))
        at = held >= 0
        assert np.array_equal(np.asarray(kept.keys[b, h])[at], np.stack([held[at], -held[at]], axis=-1))
        assert np.array_equal(np.asarray(kept.values[b, h])[at], np.stack([held[at] + 0.5, held[at]], axis=-1))
        assert np.array_equal(np.asarray(kept.stats["mark"][b, h])[at], held[at])


ANY = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, 1e-45, -3e38, 3e38, np.inf, -np.inf])


@pytest.mark.long
@given(
    st.sampled_from([1, 2, 33]).flatmap(lambda size: st.lists(ANY, min_size=size, max_size=size)), st.integers(0, 45)
)
@settings(max_examples=80, deadline=None)
def test_highest_is_exact_over_all_floats(scores, count):
    """Signs, zeros, subnormals and infinities: as a stable sort has it."""
    scores = np.array(scores, np.float32)
    chosen = of_slots.highest(jnp.asarray(scores)[None, None], jnp.array([count], jnp.int32))[0, 0]
    expected = sorted(sorted(range(scores.size), key=lambda i: -scores[i])[:count])
    assert np.flatnonzero(np.asarray(chosen)).tolist() == expected


@given(layers())
@settings(max_examples=40, deadline=None)
def test_in_time_order_moves_everything_along(case):
    positions, _ = case
    ordered = layer_with(positions).in_time_order()
    held = np.asarray(ordered.positions)
    assert np.array_equal(held, np.sort(positions, axis=-1))
    assert np.array_equal(np.asarray(ordered.keys)[held >= 0], np.stack([held, -held], axis=-1)[held >= 0])
    assert np.array_equal(np.asarray(ordered.values)[..., 0][held >= 0], held[held >= 0] + 0.5)
    assert np.array_equal(np.asarray(ordered.stats["mark"])[held >= 0], held[held >= 0])


@given(layers(), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_victim_is_free_then_lowest_then_oldest(case, limit):
    positions, scores = case
    limits = jnp.full(positions.shape[0], limit, jnp.int32)
    chosen = victim(jnp.asarray(scores), jnp.asarray(positions, jnp.int32), jnp.asarray(positions >= 0), limits)
    for b, h in np.ndindex(positions.shape[:2]):
        held, score, slot = positions[b, h], scores[b, h], int(chosen[b, h])
        count = int((held >= 0).sum())
        if count < limit and count < held.size:
            assert slot == int(np.argmax(held < 0))
        elif count and np.isfinite(score[held >= 0]).any():
            assert (score[slot], held[slot]) == min((s, p) for s, p in zip(score, held, strict=True) if p >= 0)


@pytest.mark.parametrize("rule", [None, Rule(sinks=0, heads="each")], ids=["none", "rule"])
def test_the_next_token_takes_what_just_left_the_window(rule):
    """The token at 7 sees 4 to 7 through a window of 4: the entry at 3, and no other, is free."""
    positions = jnp.array([[[6, 5, 3, 4]]], jnp.int32)
    assert alive(positions, jnp.array([7]), 4).tolist() == [[[True, True, False, True]]]
    judge = Judge(jnp.array([4]), jnp.array([0]), rule=rule)
    mass = jnp.array([[[3.0, 1.0, 2.0, 4.0]]])
    assert aim(mass, positions, jnp.array([6]), jnp.array([[0]]), judge, window=4).tolist() == [[2]]
    assert alive(positions, jnp.array([7]), 5).all()


@given(layers())
@settings(max_examples=40, deadline=None)
def test_ranks_count_the_entries_before(case):
    positions, _ = case
    ranks = np.asarray(of_slots.ranks(jnp.asarray(positions, jnp.int32)))
    for b, h in np.ndindex(positions.shape[:2]):
        held = positions[b, h]
        expected = [int(((held >= 0) & (held < p)).sum()) if p >= 0 else -1 for p in held]
        assert ranks[b, h].tolist() == expected
    ordered = jnp.asarray(sorted_between(positions), jnp.int32)
    assert np.array_equal(of_slots.counted(ordered >= 0), of_slots.ranks(ordered))


@given(layers(), st.integers(0, 11))
@settings(max_examples=40, deadline=None)
def test_slots_filled_around_are_ranked_without_a_sort(case, start):
    positions, _ = case
    packed = -np.sort(-np.where(positions < 0, 99, positions), axis=-1)[..., ::-1]  # oldest first, empty ones last
    filled = np.roll(np.where(packed == 99, -1, packed), start, axis=-1)
    filled = jnp.asarray(filled, jnp.int32)
    assert np.array_equal(of_slots.around(filled), of_slots.ranks(filled))


@given(layers(), st.integers(0, 11))
@settings(max_examples=20, deadline=None)
def test_a_ring_stays_one_where_slots_are_added_for_devices(case, start):
    """The new slots are behind the newest entry, and the next token goes there, or where it would have gone."""
    positions, _ = case
    packed = -np.sort(-np.where(positions < 0, 99, positions), axis=-1)[..., ::-1]  # oldest first, empty ones last
    filled = np.roll(np.where(packed == 99, -1, packed), start, axis=-1)
    newest, slots = filled.argmax(axis=-1), filled.shape[-1]
    layer = layer_with(filled).aimed(jnp.asarray((newest + 1) % slots, jnp.int32))
    wide = layer.divisible(2)
    assert wide.slots == of_slots.in_pieces(slots, 2) > slots
    assert np.array_equal(of_slots.around(wide.positions), of_slots.ranks(wide.positions))
    held = np.asarray(wide.positions)
    assert np.array_equal(np.asarray(wide.keys)[held >= 0], np.stack([held, -held], axis=-1)[held >= 0])
    for b, h in np.ndindex(filled.shape[:2]):
        before, after = (held[b, h, held[b, h] >= 0].tolist() for held in (filled, held))
        assert after == before, "in the order in which they lay"
        aimed = [np.asarray(x.positions)[b, h, int(x.next_slot[b, h])] for x in (layer, wide)]
        assert aimed[0] == aimed[1]
        if aimed[1] < 0 and before:
            assert int(wide.next_slot[b, h]) == (held[b, h].argmax() + 1) % wide.slots


def test_resize_only_adds_empty_slots():
    positions = np.array([[[3, -1, 1]]])
    layer = layer_with(positions).resized(5)
    assert layer.positions.tolist() == [[[3, -1, 1, -1, -1]]]
    assert layer.resized(2) is layer


def test_a_cache_is_shown_in_one_line(tiny):
    cache = jaxkv.prefill(tiny("llama3"), [3, 4, 5], policy=jaxkv.policy("h2o", budget=16))
    assert repr(cache) == f"KVCache(h2o, {len(cache.layers)} layers, lengths of shape (1,))"
