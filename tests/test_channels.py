"""Codecs that are fitted when a prompt has been read: which channels stay, and where a fit goes with its cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from engines import finish
from going_on import gone_on_with, ids
from held import bytes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import calibrated
from ordered import heads_of
from test_codecs import by_channel, exact_of

import jaxkv
from jaxkv.errors import BadValue, UnknownName
from jaxkv.lowering import lower
from jaxkv.policies import Channels, Codecs, LowRank, Squat
from jaxkv.serving import Engine
from jaxkv.store.fit import FIT
from jaxkv.store.looks import LOOKS
from pallas_kernels.codes import unpacked

FAMILY = "llama3"
STORE = {"keys": {"kind": "channels", "window": 6}, "values": {"kind": "int", "bits": 4}, "residual": 4}
BALANCED = {"keys": {"kind": "int-balanced"}, "values": {"kind": "int", "bits": 4}}


def chosen_of(fit):
    """The channels kept, of bits `[..., N]`."""
    return np.asarray(unpacked(fit, 1)).astype(bool)


def best(worth, kept):
    """True for the largest, of equals the first."""
    order = sorted(range(len(worth)), key=lambda channel: (-worth[channel], channel))
    return np.isin(np.arange(len(worth)), order[:kept])


@given(seed=st.integers(0, 999), sparsity=st.sampled_from([0.0, 0.4, 0.7, 0.95]), flat=st.booleans())
@settings(max_examples=20, deadline=None)
def test_channels_by_an_independent_form(seed, sparsity, flat):
    """Empty slots hold NaN, missing queries are 0, many channels are worth the same."""
    rng = np.random.default_rng(seed)
    x = np.ones((2, 2, 7, 16), np.float32) if flat else np.round(rng.standard_normal((2, 2, 7, 16)) * 2)
    x, queries = x.astype(np.float32), np.round(rng.standard_normal((2, 4, 5, 16)).astype(np.float32))
    queries[:, :, 0] = 0
    positions = np.where(rng.random((2, 2, 7)) < 0.3, -1, np.arange(7)).astype(np.int32)
    x[positions < 0] = np.nan
    codec = Channels(sparsity, window=4)
    fit = codec.fit(jnp.asarray(x), jnp.asarray(positions), jnp.asarray(queries), {})
    code = codec.fitted(fit).encode(jnp.asarray(x))
    back, kept = np.asarray(codec.fitted(fit).decode(code)), 16 - int(sparsity * 16)
    assert code.shape == (2, 2, 7, kept)
    for row in range(2):
        for head in range(2):
            filled = x[row, head][positions[row, head] >= 0].astype(np.float64)
            size = (filled**2).sum(axis=0) / max(len(filled), 1)
            looks = (queries[row, 2 * head : 2 * head + 2, -4:].astype(np.float64) ** 2).mean(axis=(0, 1))
            want = best(np.float32(size) * np.float32(looks), kept)
            assert chosen_of(fit)[row, head].sum() == kept
            np.testing.assert_array_equal(back[row, head], np.where(chosen_of(fit)[row, head], x[row, head], 0))
            off = want != chosen_of(fit)[row, head]  # rounding may part two that are worth the same
            assert not off.any() or np.ptp((size * looks)[off]) <= 1e-5 * (size * looks).max()


def test_channels_as_released(goldens):
    """ThinK's own function on the same keys and queries, where every query head has keys of its own."""
    golden = arrays(goldens / "policies" / "precision.npz")
    keys, queries = golden["think/keys"], golden["think/queries"]
    codec = jaxkv.policy("think").store.keys
    at = jnp.broadcast_to(jnp.arange(keys.shape[2], dtype=jnp.int32), keys.shape[:3])
    fit = codec.fit(jnp.asarray(keys), at, jnp.asarray(queries), {})
    assert np.array_equal(chosen_of(fit), golden["think/kept"])
    code = np.asarray(codec.fitted(fit).encode(jnp.asarray(keys)))
    np.testing.assert_array_equal(code[:, :, :-8], golden["think/pruned"])


@pytest.mark.some(1)
@pytest.mark.parametrize("block", [2048, 16])
def test_channels_as_in_kvpress(goldens, tiny, block):
    """ThinKPress on a prompt of the tiny model, in one block and in several."""
    golden = arrays(goldens / "policies" / "precision.npz")
    chosen = jaxkv.policy("think", window=8, residual=4, block=block)
    cache = jaxkv.prefill(tiny(FAMILY), golden["kvpress/ids"][0], policy=chosen)
    mine = np.stack([chosen_of(layer.beside[FIT].keys)[0] for layer in cache.layers])
    assert golden["kvpress/kept"].sum(-1).tolist() == [[10, 10]] * len(mine)
    assert np.array_equal(mine, golden["kvpress/kept"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["think", "leank"])
def test_a_method_keeps_its_channels(tiny, name):
    """Keys of the first layer have the channels chosen and no others, but for the newest; slots are that much smaller.
    The channels stay while the text goes on, and the queries that chose them are gone."""
    params, residual = calibrated(tiny(FAMILY)), 8
    initial = 0 if name == "think" else 2
    chosen = jaxkv.policy(name, residual=residual, initial=initial, window=6)
    cache = jaxkv.generate(params, ids(29), policy=chosen, max_new_tokens=12, stop_tokens=()).cache
    layer, seen = cache.layers[0], int(cache.lengths[0])
    full = jaxkv.prefill(params, cache.texts()[0], policy=None).layers[0]
    kept = 16 - int(chosen.store.keys.sparsity * 16)
    assert layer.entries.keys.shape[-1] == kept and layer.entries.values.shape[-1] == 16
    assert LOOKS not in layer.beside
    for head in range(2):
        channels, exact = chosen_of(layer.beside[FIT].keys)[0, head], {}
        if name == "leank":
            assert np.array_equal(channels, best(np.asarray(params.learned["key_channels"])[0, head], kept))
        for slot, p in enumerate(np.asarray(full.positions)[0, head].tolist()):
            exact[p] = np.asarray(full.keys)[0, head, slot]
        for slot, p in enumerate(np.asarray(layer.positions)[0, head].tolist()):
            if p >= 0:
                want = exact[p] if p >= seen - residual or p < initial else np.where(channels, exact[p], 0)
                np.testing.assert_allclose(np.asarray(layer.keys)[0, head, slot], want, atol=2e-5)


# ---- low rank


@pytest.mark.long
@given(
    seed=st.integers(0, 999),
    share=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    heads=st.sampled_from([0, 1, 2, 3]),
    held=st.integers(0, 9),
)
@settings(max_examples=20, deadline=None)
def test_directions_of_the_prompt(seed, share, heads, held):
    """Of all subspaces of that rank the one that leaves least of what each head, or group of heads, holds, by NumPy's
    SVD; empty slots hold NaN. Three of four heads are no group: all four are."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((2, 4, 9, 16)) * np.geomspace(3, 0.1, 16)).astype(np.float32)
    positions = np.broadcast_to(np.where(np.arange(9) < held, np.arange(9), -1), (2, 4, 9)).astype(np.int32)
    x[positions < 0] = np.nan
    codec, many = LowRank(share, heads=heads), {0: 4, 3: 4}.get(heads, heads)
    coder = codec.fitted(codec.fit(jnp.asarray(x), jnp.asarray(positions), None, {}))
    code = coder.encode(jnp.asarray(x))
    back, kept = np.asarray(coder.decode(code)), max(int(share * 16), 1)
    assert code.shape == (2, 4, 9, kept)
    np.testing.assert_allclose(coder.encode(jnp.asarray(x[:, :, 0])), code[:, :, 0], rtol=1e-3, atol=1e-3)  # one token
    for row in range(2):
        for first in range(0, 4, many):
            exact, near = (
                np.concatenate(list(each[row, first : first + many, :held]), axis=-1) for each in (np.float64(x), back)
            )
            sizes = np.linalg.svd(exact, compute_uv=False) if held else np.zeros(1)
            off, least = np.linalg.norm(exact - near), np.sqrt((sizes[many * kept :] ** 2).sum())
            assert least * 0.999 - 1e-3 <= off <= least * 1.01 + 5e-3 * sizes[0]


@pytest.mark.some(1)
@pytest.mark.parametrize("name, heads, kept", [("cskv", 1, (4, 12)), ("kv-heads", 2, (8, 8))])
def test_a_method_holds_its_directions(tiny, name, heads, kept):
    """Keys and values of the first layer are projected on the model's directions, of each head or of both together, but
    for the newest."""
    params, residual = calibrated(tiny(FAMILY)), 8
    chosen = jaxkv.policy(name, residual=residual)
    cache = jaxkv.generate(params, ids(29), policy=chosen, max_new_tokens=12, stop_tokens=()).cache
    exact, layer, seen = exact_of(params, cache), cache.layers[0], int(cache.lengths[0])
    assert (layer.entries.keys.shape[-1], layer.entries.values.shape[-1]) == kept
    for part, x, all_heads, each in zip(("key", "value"), (layer.keys, layer.values), exact, kept, strict=True):
        moment = np.zeros((32, 32))
        moment[np.triu_indices(32)] = params.learned[f"{part}_products"][0]
        moment += np.triu(moment, 1).T
        for first in range(0, 2, heads):
            own = slice(16 * first, 16 * (first + heads))
            vectors = np.linalg.eigh(moment[own, own])[1][:, -heads * each :]
            rows = np.concatenate(all_heads[first : first + heads], axis=-1)
            got = np.asarray(x)[0, first : first + heads]
            for slot, p in enumerate(np.asarray(layer.positions)[0, first].tolist()):
                if p >= 0:
                    want = rows[p] if p >= seen - residual else rows[p] @ vectors @ vectors.T
                    np.testing.assert_allclose(np.concatenate(list(got[:, slot])), want, atol=5e-3)


@pytest.mark.long
def test_heads_that_share_directions_go_on(tiny, tmp_path):
    """Rows in another order, and a saved cache, say the same, behind prompts of several blocks."""
    gone_on_with(calibrated(tiny(FAMILY)), jaxkv.policy("kv-heads", block=20), tmp_path)


# ---- SQuat


def seen_error(off, queries, rank, strength):
    """What SQuat keeps small: |e|^2 and the strongest directions of the queries times e, over a block's tokens."""
    _, sizes, turned = np.linalg.svd(queries.astype(np.float64), full_matrices=False)
    few = np.diag(sizes[:rank]) @ turned[:rank]
    return (off**2).sum() + strength * ((off @ few.T) ** 2).sum()


@pytest.mark.some(1)
@pytest.mark.parametrize("bits", [2, 4])
def test_errors_are_turned_as_released(goldens, bits):
    """SQuat's own functions on a block of 32 tokens, with its own directions of the queries: nearly the same numbers,
    and as little of the error is seen by the queries; without the turn more is."""
    golden = arrays(goldens / "policies" / "precision.npz")
    keys, queries, theirs = (golden[f"squat/{part}"] for part in ("keys", "queries", bits))
    codec = jaxkv.policy("squat", bits=bits, channels=4, rank=3, strength=0.01).store.keys
    at = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), keys.shape[:3])
    fit = codec.fit(jnp.asarray(keys), at, jnp.asarray(queries), {})
    coder = codec.fitted(fit)
    mine = np.asarray(coder.decode(coder.encode_all(jnp.asarray(keys), at)))
    plain = codec.fitted(jax.tree.map(jnp.zeros_like, fit))
    alone = np.asarray(plain.decode(plain.encode_all(jnp.asarray(keys), at)))
    step = np.ptp(keys, axis=2, keepdims=True) / (2**bits - 1)
    near = np.abs(mine - theirs) < 0.05 * step
    assert near[..., :4].mean() > 0.99 and near.mean() > 0.75  # a step's rounding to float16 goes on through the runs
    for head in range(2):
        seen = [seen_error(x[0, head] - keys[0, head], queries[0, head], 3, 0.01) for x in (mine, theirs, alone)]
        assert seen[0] == pytest.approx(seen[1], rel=0.15) and seen[0] < 0.5 * seen[2]


@pytest.mark.long
@given(seed=st.integers(0, 999), held=st.integers(0, 8), flat=st.booleans())
@settings(max_examples=15, deadline=None)
def test_turned_blocks_by_an_independent_form(seed, held, flat):
    """Runs of 4 of 12 channels one after the other, in NumPy: integers by channel, then -P_rr^-1 P_re e to the channels
    behind. Empty slots hold NaN; queries that are all 0 turn nothing."""
    rng = np.random.default_rng(seed)
    x, queries = rng.standard_normal((8, 12)).astype(np.float32), rng.standard_normal((1, 2, 6, 12)).astype(np.float32)
    queries = queries * (0 if flat else 3)
    x[: 8 - held] = np.nan
    codec = Squat(4, tokens=8, channels=4, rank=2, strength=0.1, window=6)
    positions = jnp.where(jnp.arange(8) >= 8 - held, jnp.arange(8, dtype=jnp.int32), -1)[None, None]
    given_ = jnp.asarray(x)[None, None]
    coder = codec.fitted(codec.fit(given_, positions, jnp.asarray(queries), {}))
    got = np.asarray(coder.decode(coder.encode_all(given_, positions)))[0, 0, 8 - held :]
    _, sizes, turned = np.linalg.svd(queries.reshape(-1, 12).astype(np.float64), full_matrices=False)
    few = np.diag(sizes[:2]) @ turned[:2]
    weight, left = np.eye(12) + 0.1 * few.T @ few, x[8 - held :].astype(np.float64)
    want = np.zeros_like(left)
    for end in (4, 8, 12):
        found = by_channel(left.astype(np.float32), np.arange(held), 8, 4)
        for row, numbers in found.items():
            want[row, end - 4 : end] = numbers[end - 4 : end]
        off = want[:, end - 4 : end] - left[:, end - 4 : end]
        if end < 12:
            left[:, end:] -= off @ np.linalg.solve(weight[end:, end:], weight[end:, end - 4 : end]).T
    assert np.isfinite(got).all()
    if held:
        assert (np.abs(got - want) < 0.1 * np.ptp(x[8 - held :], axis=0) / 15 + 1e-3).mean() > 0.8


@pytest.mark.long
@pytest.mark.parametrize("store", [STORE, BALANCED], ids=["channels", "balanced"])
@pytest.mark.parametrize("name", ["h2o", "adakv-h2o", "quest", "keydiff", "tiered-h2o"])
def test_any_policy_of_equal_layers(tiny, name, store, tmp_path):
    """Rows don't depend on their neighbours, bytes are those reckoned, a saved cache and another prompt go on."""
    small = {"keydiff": {"every": 4}, "tiered-h2o": {"slots": 8}, "adakv-h2o": {"interval": 4, "shift": 2}}
    small |= {"quest": {"count": 16, "page": 4, "dense": 1}}
    size = {} if name == "quest" else {"budget": 16}
    chosen = jaxkv.policy(name, **size, block=20, store=store, **small.get(name, {}))
    cache, later = gone_on_with(tiny(FAMILY), chosen, tmp_path)
    for one in later:
        for before, after in zip(cache.layers, one.layers, strict=True):
            fits = (jax.tree.leaves(layer.beside[FIT].keys) for layer in (before, after))
            assert all(np.array_equal(mine, its) for mine, its in zip(*fits, strict=True))
    for head in heads_of(cache.views[0]):
        held = [int(p) for p in head if p >= 0]
        assert len(held) == len(set(held))


@pytest.mark.long
@pytest.mark.parametrize(
    "name, more",
    [("h2o", {"budget": 24, "store": BALANCED}), ("minicache", {"after": 0.0})],
)
def test_an_engine_fits_behind_the_last_block(unchecked, tiny, name, more):
    """Rows of an engine, with prompts of one block and of several and behind a prefix, say what `generate` says."""
    params, options = tiny(FAMILY), {"max_new_tokens": 6, "stop_tokens": ()}
    chosen = jaxkv.policy(name, block=16, **more)
    engine = Engine(params, chosen, rows=2, longest=64, max_new_tokens=6)
    prefix = jaxkv.prefill(params, ids(20, 5), policy=chosen)
    engine.store("before", prefix)
    answers = [engine.submit(ids(n, n), **options) for n in (9, 40)]
    answers.append(engine.submit(ids(33, 7), prefix="before", **options))
    finish(engine)
    wanted = [jaxkv.generate(params, ids(n, n), policy=chosen, **options) for n in (9, 40)]
    wanted.append(jaxkv.generate(params, ids(33, 7), cache=prefix, **options))
    assert [each.tokens for each in answers] == [each.tokens[0].tolist() for each in wanted]


def test_programs_on_what_is_fitted(unchecked, tiny):
    """`lower` makes the decode program of a cache as a prompt leaves it."""
    learned = {"key_channels": jax.ShapeDtypeStruct((2, 2, 16), jnp.float32)}
    for name, given_, kept in (("think", {}, 10), ("leank", learned, 5)):
        made = lower(tiny(FAMILY).config, jaxkv.policy(name), batch=1, tokens=20, room=4, learned=given_)
        assert {layer.entries.keys.shape[-1] for layer in made.cache.layers} == {kept}


def test_bytes_of_a_fit(tiny, goldens):
    """Of 64 channels 39 or 20 are held, of 64 directions 16 and 48; `bytes=` reckons with what lies beside."""
    store = jaxkv.policies.catalogue()["cskv"].store
    assert bytes_of(store, 4096) == (4096 + 64) * 2 * (16 + 48) + 32 * 64 * 4
    store = jaxkv.policies.catalogue()["kv-heads"].store
    assert bytes_of(store, 4096) - bytes_of(store, 0) == 4096 * 2 * (32 + 32)
    for name, kept in (("think", 39), ("leank", 20)):
        store = jaxkv.policies.catalogue()[name].store
        alone = bytes_of(store, 4096) - bytes_of(store, 0)
        assert alone == 4096 * 2 * (kept + 64)
        assert bytes_of(store, 0) == (store.residual + store.initial) * 64 * 2 + 8
    chosen = jaxkv.policy("h2o", bytes=9000, store=STORE)
    cache = jaxkv.prefill(tiny(FAMILY), ids(90), policy=chosen)
    assert 8000 < cache.kv_bytes <= 9000


@pytest.mark.parametrize(
    "made, error, says",
    [
        (lambda: Channels(1.0), BadValue, "sparsity=1.0"),
        (lambda: Channels(window=0), BadValue, "window=0"),
        (lambda: LowRank(0.0), BadValue, "share=0.0"),
        (lambda: LowRank(basis="queries"), UnknownName, "queries"),
        (lambda: LowRank(heads=-1), BadValue, "heads=-1"),
        (
            lambda: jaxkv.policy("h2o", budget=64, store={"values": {"kind": "low-rank", "heads": 2}}),
            BadValue,
            "same to",
        ),
        (lambda: jaxkv.policy("adakv-h2o", budget=64, store={"keys": {"kind": "low-rank"}}), BadValue, "equal heads"),
        (lambda: Squat(rank=0), BadValue, "rank=0"),
        (lambda: Codecs(Squat(channels=24), residual=32).check(64), BadValue, "channels=24"),
        (lambda: jaxkv.policy("squat", residual=16), BadValue, "multiple of 32"),
        (lambda: Channels(by="weights"), UnknownName, "weights"),
        (lambda: Codecs(Channels()).check(12), BadValue, "multiple of 8"),
        (lambda: jaxkv.policy("global-h2o", budget=64, store=STORE), BadValue, "budgets of their own"),
        (lambda: jaxkv.policy("streaming-llm", budget=64, store=STORE), BadValue, "rope='text'"),
    ],
)
def test_what_cannot_be_fitted_is_refused(made, error, says):
    with pytest.raises(error, match=says):
        made()
