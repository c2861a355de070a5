"""Merging: every choice against plain NumPy; what an entry stands for, in every attention and through the model."""

import dataclasses

import jax.numpy as jnp
import merging_numpy as form
import numpy as np
import pytest
from archives import arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from small import SMALL

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.models.rope import Rope, rotate
from jaxkv.policies import Merge, Residual, Spread, merging
from jaxkv.policies.catalogue import named
from jaxkv.policies.evicted import Leaving
from jaxkv.policies.merging import ATTENTION, BY, INTO
from jaxkv.policies.score import drawn
from jaxkv.speculative import PromptLookup
from jaxkv.store.entries import Entries, chosen_at
from pallas_kernels.arguments import Held, Judge, Rule, Segments, Token
from pallas_kernels.decode_attend_score.reference import decode_attend_score
from pallas_kernels.partial import attend_few, merge
from pallas_kernels.prefill_attend.reference import prefill_attend
from pallas_kernels.prefill_attend_mass.reference import prefill_attend_mass
from pallas_kernels.ragged_decode.reference import ragged_decode

FAMILY, ROPE = "llama3", Rope(10000.0)


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)


def layer_of(seed, slots=14, heads=2, dim=8, counts=True):
    """Random entries with gaps, keys near enough to each other that cosines are of both signs."""
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, heads, slots, dim)).astype(np.float32)
    keys += 0.5 * rng.standard_normal((heads, 1, dim)).astype(np.float32)
    at = np.stack([np.sort(rng.permutation(3 * slots)[:slots]) for _ in range(heads)])
    at[rng.random(at.shape) < 0.15] = -1
    count = rng.integers(1, 4, at.shape).astype(np.float32) if counts else np.ones(at.shape, np.float32)
    return form.Layer(keys, values, at.astype(np.int32), count, rng.random(at.shape).astype(np.float32)), rng


def entries_of(layer, weighs):
    row = lambda x: jnp.asarray(x)[None]  # noqa: E731
    weight = row(layer.count) if weighs else None
    return Entries(row(layer.keys), row(layer.values), row(layer.at), {ATTENTION: row(layer.attention)}, weight)


def assert_same(new, want, held, weighs):
    for name in ("keys", "values"):
        np.testing.assert_allclose(np.asarray(getattr(new, name))[0][held], getattr(want, name)[held], atol=2e-5)
    if weighs:
        np.testing.assert_allclose(np.asarray(new.weight)[0][held], want.count[held])


parts = st.builds(
    Merge,
    into=st.sampled_from(INTO),
    alike=st.sampled_from([-1.0, 0.2, "average"]),
    by=st.sampled_from(BY),
    divide=st.sampled_from(["sum", "count"]),
    what=st.sampled_from(["both", "values"]),
    turned=st.booleans(),
    direction=st.booleans(),
    counts=st.booleans(),
    spares=st.booleans(),
)


@pytest.mark.long
@given(part=parts, seed=st.integers(0, 999), one=st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_choice_equals_its_form(part, seed, one):
    """At a cut, and where one entry per head is overwritten."""
    layer, rng = layer_of(seed, counts=part.counts)
    held, now = layer.at >= 0, int(layer.at.max()) + 1
    if part.divide == "sum" and part.by == "similarity":  # weights that cancel have no mean
        part = dataclasses.replace(part, by="equal")
    stays = held & (rng.random(held.shape) < 0.5)
    if one:
        stays = held.copy()
        gone = np.array([rng.choice(np.flatnonzero(row)) for row in held])
        stays[np.arange(len(held)), gone] = False
    protected = held & ((layer.at < 4) | (layer.at > now - 8))
    want, tau = form.merge(layer, stays, protected, now, part)
    entries = entries_of(layer, part.counts)
    lost = entries.masked(jnp.asarray(held & ~stays)[None])
    if one:
        lost = chosen_at(lost, jnp.asarray(gone, jnp.int32)[None, :, None])
    most = int(stays.sum(axis=1).max()) + seed % 2  # survivors of a head
    facts = Leaving(None, jnp.asarray(protected)[None], jnp.array([now]), lambda x, by: rotate(x, by, ROPE), most)
    new, state = part.absorb(part.begin(1, 2, 8, jnp.float32), entries.masked(jnp.asarray(stays)[None]), lost, facts)
    assert_same(new, want, stays, part.counts)
    if part.alike == "average" and tau is not None:
        np.testing.assert_allclose(state.tau[0], tau, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@given(seed=st.integers(0, 999), over=st.integers(1, 6), one=st.booleans())
@settings(max_examples=8, deadline=None)
def test_spreading_equals_its_form(seed, over, one):
    layer, rng = layer_of(seed)
    held = layer.at >= 0
    stays = held & (rng.random(held.shape) < 0.5)
    if one:
        gone = np.array([rng.choice(np.flatnonzero(row)) for row in held])
        stays = held.copy()
        stays[np.arange(len(held)), gone] = False
    draws = np.asarray(drawn(jnp.broadcast_to(jnp.arange(64), (1, 2, 64)), 3))[0]
    want = form.spread(layer, stays, over, lambda head, at: draws[head, at])
    entries = entries_of(layer, False)
    lost = entries.masked(jnp.asarray(held & ~stays)[None])
    if one:
        lost = chosen_at(lost, jnp.asarray(gone, jnp.int32)[None, :, None])
    new, _ = Spread(over, seed=3).absorb(None, entries.masked(jnp.asarray(stays)[None]), lost, Leaving())
    np.testing.assert_allclose(np.asarray(new.values)[0][stays], want[stays], atol=1e-5)
    assert np.array_equal(np.asarray(new.keys)[0][stays], layer.keys[stays])


# ---- against releases

# the part as the method's file has it (the prompt's, or the steps'), and how near: KeepKV's release works in float16
RELEASED = [
    ("look-m", "", "prefill", {}, 1e-5),
    ("keepkv", "/0", "prefill", {"by": "attention"}, 3e-3),  # by the weights W = n s of the release
    ("keepkv", "/1", "decode", {"by": "attention"}, 3e-3),
    ("keepkv", "/2", "decode", {"by": "attention"}, 3e-3),
    ("elastic-cache", "", "prefill", {}, 1e-5),
    ("cam", "/0", "decode", {}, 1e-5),
    ("cam", "/1", "decode", {}, 1e-5),
    ("value-merging", "", "prefill", {}, 1e-5),
]


@pytest.mark.some(2)
@pytest.mark.parametrize("name, which, phase, options, near", RELEASED, ids=lambda x: x if isinstance(x, str) else "")
def test_merging_as_released(goldens, name, which, phase, options, near, monkeypatch):
    """What stays and what leaves is given, as the release chose; keys, values and counts after it are equal."""
    golden = arrays(goldens / "policies" / "merging.npz")
    read = lambda field: golden.get(f"{name}{which}/{field}")  # noqa: E731
    part = dataclasses.replace(getattr(named(name), phase).evicted, **options)
    stays, weight, count = read("stays"), read("weight"), read("count")
    at = read("at") if read("at") is not None else np.broadcast_to(np.arange(stays.shape[1]), stays.shape)
    seen = np.ones(stays.shape, np.float32) if weight is None else weight
    layer = form.Layer(read("keys"), read("values"), at.astype(np.int32), count, seen)
    entries = entries_of(layer, count is not None)
    spared = {"elastic-cache": at == stays.shape[1] - 1}.get(name)
    facts = Leaving(spared=None if spared is None else jnp.asarray(spared)[None])
    if name == "cam":  # its own draws
        monkeypatch.setattr(merging, "drawn", lambda at, seed: jnp.broadcast_to(read("draws")[:, None], at.shape))
    new, _ = part.absorb(None, *(entries.masked(jnp.asarray(x)[None]) for x in (stays, ~stays)), facts)
    rest = lambda x: np.asarray(x)[0][stays].reshape(read("new_keys").shape)  # noqa: E731
    np.testing.assert_allclose(rest(new.keys), read("new_keys"), atol=near)
    np.testing.assert_allclose(rest(new.values), read("new_values"), atol=near)
    moved = np.abs(rest(new.values) - read("values")[stays].reshape(read("new_keys").shape)).max(-1) > 10 * near
    assert moved.any() and (~stays).any(), "something was merged"
    if count is not None:
        np.testing.assert_array_equal(np.asarray(new.weight)[0][stays], read("new_count").ravel())


@pytest.mark.long
def test_elastic_cache_grows_as_released(goldens):
    """Step by step, which tokens a head holds behind a prompt's cut: as many as the prompt's share, one place freed."""
    steps = arrays(goldens / "policies" / "merging.npz")["elastic-cache/steps"]
    part, prompt = dataclasses.replace(named("elastic-cache").decode.score, offset=4), jnp.array([25])
    at = [0, 2, 5, 8, 11, 14, 17, 20, 23, 24]
    begun = len(at)
    stay = dict(zip(at, np.asarray(part.left(jnp.array([[at]]), prompt)["held_since"])[0, 0], strict=True))
    for token, want in enumerate(steps, 25):
        at = [*at, token]
        stats, places = {"held_since": jnp.array([[[stay.get(p, 0.0) for p in at]]])}, jnp.array([[at]])
        most = begun + int(part.grown(stats, places, jnp.array([token]), prompt * 0, jnp.array([begun]))[0])
        worth = np.asarray(part.factors(stats, places, jnp.array([token + 1]))[1])[0, 0]
        if len(at) > most:
            at.remove(at[int(worth.argmin())])
        assert at == np.flatnonzero(want).tolist(), token
    assert len(at) == 24 and set(range(56, 60)) < set(at)


@pytest.mark.long
def test_residual_slots_as_released(goldens):
    """ZSMerge's after a prompt's cut and after each step, and attention over them and the others with 0.6 log n."""
    golden = arrays(goldens / "policies" / "merging.npz")
    read = lambda field: golden[f"zsmerge/{field}"]  # noqa: E731
    part = dataclasses.replace(named("zsmerge").decode.evicted, slots=3)
    stays, row = read("stays"), lambda x: jnp.asarray(x)[None]
    at = np.broadcast_to(np.arange(stays.shape[1], dtype=np.int32), stays.shape)
    entries = Entries(row(read("keys")), row(read("values")), row(at), {})
    state = part.begin(1, *read("keys").shape[::2], jnp.float32)
    for number in range(len(read("new_keys"))):
        lost = entries.masked(row(~stays))
        if number:
            lost = [row(read(f"lost_{name}")[number - 1]) for name in ("keys", "values")]
            lost = Entries(*lost, jnp.full((1, len(stays), 1), 30 + number), {})
        _, state = part.absorb(state, None, lost, Leaving())
        for mine, its in ((state.keys, "new_keys"), (state.values, "new_values"), (state.count, "new_count")):
            np.testing.assert_allclose(mine[0], read(its)[number], atol=1e-5)
    query, scale = row(read("query")), read("query").shape[-1] ** -0.5
    rest = row(read("rest_keys")), row(read("rest_values"))
    whole = merge(
        attend_few(query, *rest, jnp.ones((1, 1, 1, rest[0].shape[2]), bool), scale=scale),
        state.attend(query, jnp.array([[99]]), scale=scale, softcap=None),
    )
    np.testing.assert_allclose(whole.output[0], read("output"), atol=1e-5)


@pytest.mark.long
@given(seed=st.integers(0, 999), slots=st.integers(1, 5), cuts=st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_residual_slots_stand_for_what_has_left(seed, slots, cuts):
    """Whatever leaves when: counts and weighted sums add up, runs are even, and none is empty while another has two."""
    rng = np.random.default_rng(seed)
    part, total = Residual(slots), np.zeros((2, 4))
    state, many = part.begin(1, 2, 4, jnp.float32), 0
    for number in range(cuts):
        keys = rng.standard_normal((1, 2, 9, 4)).astype(np.float32)
        gone = rng.random((1, 2, 9)) < rng.random()
        at = jnp.asarray(np.where(gone, np.arange(9) + 9 * number, -1).astype(np.int32))
        lost = Entries(jnp.asarray(np.where(gone[..., None], keys, np.nan)), jnp.asarray(-keys), at, {})
        _, state = part.absorb(state, None, lost, Leaving())
        many, total = many + gone.sum(-1)[0], total + np.where(gone[..., None], keys, 0).sum(2)[0]
        count = np.asarray(state.count)[0]
        np.testing.assert_allclose(count.sum(-1), many)
        np.testing.assert_allclose((np.asarray(state.keys)[0] * count[..., None]).sum(1), total, atol=1e-4)
        np.testing.assert_allclose(state.values, -state.keys, atol=1e-5)
        if not number:
            assert (np.ptp(count, axis=-1) <= 1).all()


# ---- what an entry stands for


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


@pytest.mark.long
@given(counts=st.lists(st.integers(1, 5), min_size=3, max_size=6), seed=st.integers(0, 99), cap=st.booleans())
@settings(max_examples=6, deadline=None)
def test_a_bias_is_as_many_entries(counts, seed, cap):
    """Every attention with log n equals the one over n copies: of a prompt, its mass, slots, and ragged segments."""
    rng, softcap = np.random.default_rng(seed), 5.0 if cap else None
    counts, slots, dim = np.array(counts), len(counts), 8
    times = np.repeat(np.arange(slots), counts)
    keys, values = normal(rng, 1, 2, slots, dim), normal(rng, 1, 2, slots, dim)
    at = jnp.broadcast_to(jnp.arange(slots), (1, 2, slots))
    bias = jnp.broadcast_to(jnp.log(jnp.asarray(counts, jnp.float32)), at.shape)
    query, now = normal(rng, 1, 4, 3, dim), jnp.full((1, 3), slots)
    options = {"scale": 0.5, "softcap": softcap}
    got = prefill_attend(query, keys, values, now, at, with_lse=True, bias=bias, **options)
    want = prefill_attend(query, keys[:, :, times], values[:, :, times], now, at[:, :, times], with_lse=True, **options)
    for mine, its in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, its, atol=2e-6)
    one = prefill_attend_mass(query, keys, now, at, bias=bias, **options)
    many = prefill_attend_mass(query, keys[:, :, times], now, at[:, :, times], **options)
    folded = np.stack([np.asarray(many)[..., times == s].sum(-1) for s in range(slots)], -1)
    np.testing.assert_allclose(one, folded, atol=2e-6)

    token = Token(query[:, :, 0], normal(rng, 1, 2, dim), normal(rng, 1, 2, dim), jnp.array([slots]))
    room = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 3))  # noqa: E731
    places = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 1)), constant_values=-1)  # noqa: E731
    judge = Judge(jnp.array([99]), jnp.array([0]), rule=Rule())
    end = lambda count: jnp.full((1, 2), count)  # noqa: E731
    mine = decode_attend_score(
        token, Held(room(keys), room(values), places(at), room(bias)), end(slots), judge, **options
    )
    copies = [x[:, :, times] for x in (keys, values, at)]
    its = decode_attend_score(
        token, Held(room(copies[0]), room(copies[1]), places(copies[2])), end(len(times)), judge, **options
    )
    np.testing.assert_allclose(mine.output, its.output, atol=2e-6)
    np.testing.assert_allclose(mine.lse, its.lse, atol=2e-6)

    flat = lambda x: x.reshape(1, -1, *x.shape[3:])  # noqa: E731
    edges = lambda n: jnp.array([[0, n + 1, 2 * n + 2]])  # noqa: E731
    ends = lambda n: jnp.array([[n, 2 * n + 1]])  # noqa: E731
    pool = Segments(*(flat(x) for x in (room(keys), room(values), places(at))), edges(slots), None, flat(room(bias)))
    ragged = ragged_decode(token, pool, ends(slots), judge, **options)
    np.testing.assert_allclose(ragged.output, mine.output, atol=2e-6)
    np.testing.assert_allclose(ragged.mass.reshape(mine.mass.shape), mine.mass, atol=2e-6)


@given(seed=st.integers(0, 999), kinds=st.integers(1, 4), into=st.sampled_from(["nearest", "product"]))
@settings(max_examples=10, deadline=None)
def test_identical_keys_that_count_lose_nothing(seed, kinds, into):
    """Where every key that leaves has a twin that stays, attention is the full cache's, whatever the values."""
    rng, slots = np.random.default_rng(seed), 12
    distinct = rng.standard_normal((kinds, 8)).astype(np.float32)
    distinct /= np.linalg.norm(distinct, axis=-1, keepdims=True)  # of the largest product too, a key is its own
    which = np.concatenate([np.arange(kinds), rng.integers(0, kinds, slots - kinds)])
    stays = np.arange(slots) < kinds
    shuffle = rng.permutation(slots)
    which, stays = which[shuffle], stays[shuffle]
    layer = form.Layer(
        distinct[which][None], rng.standard_normal((1, slots, 8)).astype(np.float32),
        np.arange(slots, dtype=np.int32)[None], rng.integers(1, 4, (1, slots)).astype(np.float32),
        np.ones((1, slots), np.float32),
    )  # fmt: skip
    part = Merge(into=into, alike=-1.0, by="equal", divide="sum", counts=True)
    entries = entries_of(layer, True)
    new, _ = part.absorb(None, *(entries.masked(jnp.asarray(x)[None, None]) for x in (stays, ~stays)), Leaving())
    query = normal(rng, 1, 2, 3, 8)
    attend = lambda e: attend_few(  # noqa: E731
        query, e.keys, e.values, jnp.broadcast_to(e.filled[:, :, None], (1, 1, 3, slots)), e.weight, scale=2.0
    )
    whole, merged = attend(entries), attend(new)
    np.testing.assert_allclose(merged.output, whole.output, atol=3e-6)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=3e-6)
    assert float(jnp.sum(jnp.where(new.filled, new.weight, 0))) == layer.count.sum()


def doubled(layer):
    """Every entry twice."""
    from jaxkv.store.entries import appended

    return dataclasses.replace(layer, entries=appended(layer.entries, layer.entries))


COUNTED = {"into": "neighbour", "alike": -1.0, "by": "equal", "divide": "sum", "counts": True}


@pytest.mark.long
def test_the_model_reads_an_entry_of_two_as_two(tiny):
    """Decoding, a second prompt and drafts over entries that all stand for two, against each of them twice."""
    params = tiny(FAMILY)
    cache = jaxkv.generate(params, ids(12, 1), max_new_tokens=1, stop_tokens=()).cache
    two = lambda layer: dataclasses.replace(  # noqa: E731
        layer, entries=dataclasses.replace(layer.entries, weight=jnp.full(layer.positions.shape, 2.0))
    )
    weighed = dataclasses.replace(cache, layers=tuple(map(two, cache.layers)))
    copied = dataclasses.replace(cache, layers=tuple(map(doubled, cache.layers)))
    options = {"max_new_tokens": 8, "stop_tokens": ()}
    for prompt in (None, ids(7, 2)):
        got, want, plain = (jaxkv.generate(params, prompt, cache=c, **options) for c in (weighed, copied, cache))
        assert got.tokens.tolist() == want.tokens.tolist()
        last = [np.asarray(out.cache.layers[-1].values)[0, :, :] for out in (got, want, plain)]
        at = [np.asarray(out.cache.layers[-1].positions)[0] for out in (got, want, plain)]
        newest = [v[a == got.cache.lengths[0] - 1] for v, a in zip(last, at, strict=True)]
        np.testing.assert_allclose(newest[0], newest[1], atol=1e-5)
        if prompt is None:
            assert not np.allclose(newest[0], newest[2], atol=1e-4)
        weight = got.cache.layers[0].entries.weight
        held = np.asarray(got.cache.layers[0].positions)
        assert (np.asarray(weight)[held >= 12] == 1).all() and (
            np.asarray(weight)[(held >= 0) & (held < 12)] == 2
        ).all()
    drafted = jaxkv.generate(params, None, cache=weighed, speculative=PromptLookup(fallback=False), **options)
    assert drafted.tokens.tolist() == jaxkv.generate(params, None, cache=weighed, **options).tokens.tolist()


@pytest.mark.long
@pytest.mark.parametrize("name, every", [("h2o", 1), ("h2o", 4), ("adakv-h2o", 4), ("global-h2o", 0), ("snapkv", 0)])
def test_what_entries_stand_for_adds_up(tiny, name, every):
    """To the tokens seen, of every head, in slots, pools and lines; where all is taken up."""
    params, rows = tiny(FAMILY), [ids(45, 1), ids(3, 2)]
    still = {"interval": 0} if name == "adakv-h2o" else {}  # its cuts move the borders
    chosen = jaxkv.policy(
        name, budget=16, block=20, **{**SMALL.get(name, {}), **still} | ({"every": 4} if still else {})
    )
    rule, replace = Merge(**COUNTED), dataclasses.replace
    decode = replace(chosen.decode, evicted=rule, every=every) if every else None
    chosen = replace(chosen, prefill=replace(chosen.prefill, evicted=rule), decode=decode)
    out = jaxkv.generate(params, rows, policy=chosen, max_new_tokens=14, stop_tokens=())
    for layer in out.cache.views:
        wide = layer.by_head()
        stands = np.asarray(jnp.sum(jnp.where(wide.filled, wide.weight, 0.0), axis=-1))
        np.testing.assert_allclose(
            stands, np.broadcast_to(np.asarray(out.cache.lengths)[:, None], stands.shape), rtol=1e-6
        )


@pytest.mark.long
def test_what_has_merged_can_be_drafted_over(tiny):
    """A prompt's merging, with and without weights: the drafts' tokens are plain decoding's; a step's is refused."""
    params, prompt = tiny(FAMILY), np.tile(ids(9, 1), 5)
    for counts in (True, False):
        chosen = jaxkv.policy("snapkv", budget=16, window=6, evicted=Merge(**COUNTED | {"counts": counts}))
        plain = jaxkv.generate(params, prompt, policy=chosen, max_new_tokens=12, stop_tokens=())
        fast = jaxkv.generate(
            params, prompt, policy=chosen, max_new_tokens=12, stop_tokens=(), speculative=PromptLookup(fallback=False)
        )
        assert fast.tokens.tolist() == plain.tokens.tolist()
    with pytest.raises(BadValue, match="while decoding"):
        jaxkv.generate(
            params, prompt, policy=jaxkv.policy("weightedkv", budget=32), max_new_tokens=2,
            speculative=PromptLookup(fallback=False),
        )  # fmt: skip


def test_who_is_not_averaged_with_others_stands_for_itself():
    """Weights of 0 are no mean: the survivor stays as it is, and counts as it did."""
    layer, _ = layer_of(1)
    layer.attention[:] = 0
    stays = layer.at % 2 == 0
    entries = entries_of(layer, True)
    lost, kept = entries.masked(jnp.asarray(~stays)[None]), entries.masked(jnp.asarray(stays)[None])
    new, _ = Merge(by="attention", divide="sum", alike=-1.0, counts=True).absorb(None, kept, lost, Leaving())
    held = np.asarray(new.filled)
    assert (np.asarray(new.weight) == np.asarray(kept.weight))[held].all()
    assert (np.asarray(new.values) == np.asarray(kept.values))[held].all()


def test_what_does_not_fit_is_refused():
    for options, match in (
        ({"into": "above"}, "into='above'"),
        ({"by": "guess"}, "by='guess'"),
        ({"alike": 1.5}, "alike=1.5"),
        ({"sigma": 0.0}, "sigma=0.0"),
    ):
        with pytest.raises(BadValue, match=match):
            Merge(**options)
    with pytest.raises(BadValue, match="none of its scores adds up"):
        jaxkv.policy("snapkv", budget=128, evicted=Merge(by="attention"))
    for rule in ({"kind": "demote"}, {"kind": "estimate"}):
        with pytest.raises(BadValue, match="stand for several"):
            jaxkv.policy("h2o", budget=128, prefill_evicted=Merge(counts=True), decode_evicted=rule)
    with pytest.raises(BadValue, match="turned=false"):
        shared = jaxkv.policy("global-h2o", budget=128)
        dataclasses.replace(shared, prefill=dataclasses.replace(shared.prefill, evicted=Merge(turned=False)))
