"""MiniCache: pairs of layers hold one direction and two lengths, and the tokens that differ most as they are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from going_on import gone_on_with, ids
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.policies import Paired
from jaxkv.sizes import size_of
from jaxkv.store import pairs
from jaxkv.store.codecs import Codecs
from jaxkv.store.entries import Entries
from jaxkv.store.fit import FIT
from jaxkv.store.slots import Slots
from pallas_kernels.arguments import Token

FAMILY, DIM = "llama3", 16
OF_TWO = {"after": 0.0}  # the tiny model has two layers


def middle(low, up, toward):
    """Of two vectors the direction between theirs, and the angle, in float64, vector by vector."""
    low, up = (np.float64(x) / max(np.linalg.norm(np.float64(x)), 1e-300) for x in (low, up))
    angle = np.arccos(np.clip(low @ up, -1, 1))
    if np.sin(angle) < 1e-3:
        between = (1 - toward) * low + toward * up
    else:
        between = (np.sin((1 - toward) * angle) * low + np.sin(toward * angle) * up) / np.sin(angle)
    return between / max(np.linalg.norm(between), 1e-300), angle


def merged(low, up, toward, exact):
    """The tokens `[S, D]` of one head of two layers after they are joined, by the paper's text."""
    found = [middle(*two, toward) for two in zip(low, up, strict=True)]
    count = -(-round(exact * 1000) * len(low) // 1000)
    apart = sorted(range(len(low)), key=lambda token: -found[token][1])[:count]
    out = []
    for each in (low, up):
        out.append([np.linalg.norm(np.float64(x)) * found[token][0] for token, x in enumerate(each)])
        for token in apart:
            out[-1][token] = each[token]
    return np.array(out)


def two_layers(rng, positions, codec=None):
    """Two layers with random entries; NaN where there is none."""
    codec = codec or Paired(0.0)
    shape = (*positions.shape, DIM)

    def layer():
        keys, values = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        for x in (keys, values):
            x[positions < 0] = np.nan
        entries = Entries(jnp.asarray(keys), jnp.asarray(values), jnp.asarray(positions), {})
        held = (positions >= 0).sum(-1).astype(np.int32)
        return Slots(entries, jnp.asarray(held), {}, Codecs(codec, codec)).fitted({}, False)

    return layer(), layer()


@pytest.mark.long
@given(
    seed=st.integers(0, 999), toward=st.sampled_from([0.0, 0.3, 0.6, 1.0]), exact=st.sampled_from([0.0, 0.05, 0.4, 1.0])
)
@settings(max_examples=25, deadline=None)
def test_two_layers_by_an_independent_form(seed, toward, exact):
    """A prompt of rows of other lengths, and a token that comes to some of them; empty slots hold NaN."""
    rng = np.random.default_rng(seed)
    held = rng.integers(1, 21, 2)
    positions = np.where(np.arange(24) < held[:, None, None], np.arange(24), -1) * np.ones((1, 2, 1), int)
    layers = two_layers(rng, positions.astype(np.int32), Paired(0.0, toward, exact))
    plain = [{name: np.asarray(getattr(layer.entries, name)) for name in pairs.NAMES} for layer in layers]
    after = pairs.begun(layers, (None, None))
    assert all(getattr(after[1].entries, name).directions is None for name in pairs.NAMES)
    position = np.where(rng.random(2) < 0.7, held, -1).astype(np.int32)
    tokens = [
        Token(
            None, *(jnp.asarray(rng.standard_normal((2, 2, DIM)), jnp.float32) for _ in range(2)), jnp.array(position)
        )
        for _ in layers
    ]
    step = [layer.with_token(token) for layer, token in zip(pairs.lent(after), tokens, strict=True)]
    for layer, token in zip(step, tokens, strict=True):  # the new token is attended to as it is
        at = (np.arange(2)[:, None], np.arange(2)[None], held[:, None])
        there = position[:, None, None] >= 0
        np.testing.assert_allclose(np.where(there, layer.keys[at], 0), np.where(there, token.key, 0), atol=1e-5)
    last = pairs.returned(after, step, jnp.asarray(position))
    for name, of_token in (("keys", "key"), ("values", "value")):
        for row, head in np.ndindex(2, 2):
            both = [each[name][row, head, : held[row]] for each in plain]
            want = merged(*both, toward, exact)
            if position[row] >= 0:
                new = [np.asarray(getattr(token, of_token))[row, head] for token in tokens]
                one = middle(*new, toward)[0]
                want = np.concatenate([want, [[np.linalg.norm(x) * one] for x in new]], axis=1)
            for layer, x in zip(pairs.lent(last), want, strict=True):
                got = np.asarray(getattr(layer, name))[row, head, : len(x)]
                np.testing.assert_allclose(got, x, atol=2e-5)


def test_directions_that_are_hard():
    """Equal, opposite and empty vectors: what is between them is finite, and what is equal stays what it is."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 3, DIM)), jnp.float32)
    unit = pairs.parted(x)[1]
    for up in (unit, -unit, jnp.zeros_like(unit)):
        direction, angle = pairs.between(unit, up, 0.6)
        assert np.isfinite(np.asarray(direction)).all() and np.isfinite(np.asarray(angle)).all()
    np.testing.assert_allclose(pairs.between(unit, unit, 0.6)[0], unit, atol=1e-6)
    assert not np.asarray(pairs.between(0 * unit, 0 * unit, 0.6)[0]).any()


def test_ties_and_shares_of_each_row():
    """Of equal angles the first tokens stay apart; each row's share is of its own tokens, rounded up."""
    filled = jnp.asarray(np.arange(40) < np.array([20, 21, 0, 40])[:, None])[:, None]
    apart = np.asarray(pairs.most_apart(jnp.zeros((4, 1, 40)), filled, 0.05))[:, 0]
    assert [np.flatnonzero(row).tolist() for row in apart] == [[0], [0, 1], [], [0, 1]]


@pytest.mark.parametrize(
    "windows, lower", [((None,) * 6, [3]), ((None,) * 8, [4, 6]), ((8, None) * 4, []), ((None,), [])]
)
def test_which_layers_are_pairs(windows, lower):
    roles = Paired().roles(windows)
    assert [i for i, role in enumerate(roles) if role == pairs.LOWER] == lower
    assert [i for i, role in enumerate(roles) if role == pairs.UPPER] == [i + 1 for i in lower]


@pytest.mark.long
def test_a_prompt_is_joined_and_joined_again(tiny):
    """What a prompt leaves by the independent form; behind another prompt the share apart is of both."""
    params, chosen = tiny(FAMILY), jaxkv.policy("minicache", **OF_TWO)
    cache = jaxkv.prefill(params, ids(30), policy=chosen)
    full = jaxkv.prefill(params, ids(30), policy=None)
    for name in pairs.NAMES:
        for head in range(2):
            there = np.asarray(full.layers[0].positions)[0, head] >= 0
            both = [np.asarray(getattr(layer, name))[0, head][there] for layer in full.layers]
            want = merged(*both, 0.6, 0.05)
            for layer, x in zip(cache.views, want, strict=True):
                there = np.asarray(layer.positions)[0, head] >= 0
                np.testing.assert_allclose(np.asarray(getattr(layer, name))[0, head][there], x, atol=5e-5)
    more = jaxkv.generate(params, ids(31, 4), cache=cache, max_new_tokens=3, stop_tokens=()).cache
    for layer in more.layers:
        places = np.asarray(layer.entries.keys.place)
        assert ((places >= 0).sum(-1) == 4).all(), "a twentieth of 61 tokens, rounded up"
        for row in places[0]:
            assert len(set(row[row >= 0].tolist())) == 4
    assert more.layers[0].entries.keys.directions is not None and more.layers[1].entries.keys.directions is None


@pytest.mark.long
@pytest.mark.parametrize("store", [{}, {"keys": {"kind": "plain"}}], ids=["both", "values"])
def test_saved_and_gone_on_with(tiny, tmp_path, store):
    """Rows in another order, and a saved cache, say the same, behind prompts of several blocks."""
    values = {"kind": "paired", "after": 0.0}
    given_ = {"store": {**store, "values": values}} if store else OF_TWO
    gone_on_with(tiny(FAMILY), jaxkv.policy("minicache", block=20, **given_), tmp_path)


def test_bytes_of_a_pair(tiny):
    """One direction for two layers, a length and a place for each, and the exact ones; `info` reckons the same."""
    params, chosen = tiny(FAMILY), jaxkv.policy("minicache", **OF_TWO)
    cache = jaxkv.prefill(params, ids(90), policy=chosen)
    slots = [layer.slots for layer in cache.layers]
    exact = -(-slots[0] // 20)
    for layer, directions in zip(cache.layers, (1, 0), strict=True):
        each = slots[0] * (directions * DIM * 4 + 4 + 2) + exact * DIM * 4
        assert layer.kv_bytes == 2 * 2 * each
    size = size_of(chosen, params.config, params.dtype, slots)
    assert size.keys_values == cache.kv_bytes
    assert size.all == sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))
    assert cache.read_bytes[1] == cache.layers[1].kv_bytes + 2 * 2 * slots[0] * DIM * 4


def test_a_step_leaves_finished_rows(tiny):
    """Codes of a row that has finished are bit for bit what they were."""
    layers = pairs.begun(
        two_layers(np.random.default_rng(1), np.arange(8, dtype=np.int32) * np.ones((2, 2, 1), np.int32)), (None,) * 2
    )
    layers = tuple(layer.resized(16) for layer in layers)
    layers = tuple(dataclasses.replace(layer, next_slot=jnp.full((2, 2), 8)) for layer in layers)
    token = Token(None, jnp.ones((2, 2, DIM)), jnp.ones((2, 2, DIM)), jnp.array([8, -1], jnp.int32))
    after = pairs.returned(layers, [each.with_token(token) for each in pairs.lent(layers)], token.position)
    for before, now in zip(layers, after, strict=True):
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(now), strict=True):
            assert np.array_equal(np.asarray(old)[1], np.asarray(new)[1], equal_nan=True)
    assert FIT in after[0].beside


@pytest.mark.parametrize(
    "made, says",
    [
        (lambda: Paired(after=1.0), "after=1.0"),
        (lambda: Paired(exact=1.5), "exact=1.5"),
        (lambda: jaxkv.policy("h2o", budget=64, store={"keys": {"kind": "paired"}}), "evicts nothing"),
        (lambda: jaxkv.policy("quest", store={"values": {"kind": "paired"}}), "reads all it holds"),
    ],
)
def test_what_does_not_go_together(made, says):
    with pytest.raises(BadValue, match=says):
        made()
