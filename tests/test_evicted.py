"""What becomes of entries that leave: merged as D2O's release merges, demoted; codecs; reading by pages."""

import collections
import dataclasses
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from ordered import heads_of

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.evaluation.forced import follow
from jaxkv.policies import Demote, Merge, Pages
from jaxkv.policies.combine import Maximum
from jaxkv.policies.evicted import Leaving
from jaxkv.policies.score import Score, ScoreInputs
from jaxkv.store import slots as stores
from jaxkv.store import tier
from jaxkv.store.by_channel import IntByChannel
from jaxkv.store.channels import Channels
from jaxkv.store.codecs import Codecs
from jaxkv.store.entries import Entries
from jaxkv.store.integers import Int
from jaxkv.store.pages import PAGES, empty
from jaxkv.store.threshold import Threshold
from pallas_kernels.masking import masked_softmax
from pallas_kernels.partial import Partial, attend_few, merge
from pallas_kernels.prefill_attend_mass.reference import prefill_attend_mass

FAMILY = "llama3"


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)


# ---- partial attention is a monoid


@pytest.mark.long
@given(sizes=st.lists(st.integers(0, 5), min_size=2, max_size=4), seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_merged_parts_are_the_whole(sizes, seed):
    """In any order and grouping; a part without keys changes nothing, and no keys at all give 0."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    query, keys, values = normal(2, 4, 3, 8), normal(2, 2, sum(sizes), 8), normal(2, 2, sum(sizes), 8)
    seen = lambda count: jnp.ones((2, 1, 3, count), bool)  # noqa: E731
    whole = attend_few(query, keys, values, seen(sum(sizes)), scale=0.7)
    ends = np.cumsum([0, *sizes])
    parts = [
        attend_few(query, keys[:, :, a:b], values[:, :, a:b], seen(b - a), scale=0.7)
        for a, b in itertools.pairwise(ends)
    ]
    for got in (merge(*parts), merge(*parts[::-1]), merge(parts[0], merge(*parts[1:]))):
        np.testing.assert_allclose(got.output, whole.output, atol=2e-6)
        np.testing.assert_allclose(got.lse, whole.lse, atol=2e-6)
    nothing = Partial(jnp.ones_like(whole.output), jnp.full_like(whole.lse, -jnp.inf))
    assert np.array_equal(np.asarray(merge(whole, nothing).output), np.asarray(whole.output)), "bit for bit"


def test_an_entry_that_stands_for_n_counts_n_times():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    query, keys, values = normal(1, 2, 1, 4), normal(1, 1, 3, 4), normal(1, 1, 3, 4)
    got = attend_few(query, keys, values, jnp.ones((1, 1, 1, 3), bool), jnp.array([[[1.0, 4.0, 2.0]]]), scale=1.0)
    times = np.repeat(np.arange(3), [1, 4, 2])
    want = attend_few(query, keys[:, :, times], values[:, :, times], jnp.ones((1, 1, 1, 7), bool), scale=1.0)
    np.testing.assert_allclose(got.output, want.output, atol=1e-6)
    np.testing.assert_allclose(got.lse, want.lse, atol=1e-6)


# ---- merging, against the release of D2O


def entries_of(keys, values, positions):
    as_row = lambda x, kind: jnp.asarray(np.asarray(x)[None], kind)  # noqa: E731
    return Entries(as_row(keys, jnp.float32), as_row(values, jnp.float32), as_row(positions, jnp.int32), {})


def cuts(goldens, case):
    """Of each cut of the release: alpha and beta, what it cut, with the new token behind it, and what it left."""
    golden, cache = (
        arrays(goldens / "policies" / "d2o.npz"),
        collections.namedtuple("Cache", "keys values positions tau"),
    )
    keys, values = (golden[f"{case}/{name}"] / 16 for name in "kv")
    group = golden[f"{case}/q"].shape[1] // keys.shape[1]
    keys, values = keys.repeat(group, 1), values.repeat(group, 1)
    for layer in (2, 3):
        k, v, name = keys[layer], values[layer - 2], f"{case}/layer{layer}"
        left = [cache(*(golden[f"{name}/{x}"][n] for x in ("keys", "values", "positions", "tau"))) for n in range(13)]
        start = k.shape[1] - len(left)
        at = np.repeat(np.arange(start + 1)[None], len(k), 0)
        before = cache(k[:, : start + 1], v[:, : start + 1], at, golden.get(f"{name}/tau_before"))
        for number, after in enumerate(left, start + 1):
            yield golden[f"{case}/average"], before, after
            if number < k.shape[1]:
                behind = lambda old, new, n=number: np.concatenate([old, new[:, n : n + 1]], axis=1)  # noqa: E731
                at = np.pad(after.positions, ((0, 0), (0, 1)), constant_values=number)
                before = cache(behind(after.keys, k), behind(after.values, v), at, after.tau)


@pytest.mark.long
@pytest.mark.parametrize("case", ["two", "two-again", "four", "grouped"])
def test_merging_equals_the_release(goldens, case):
    """Cut after cut: merged keys and values, and the threshold. Which entries leave is given, as the release chose."""
    number = 0
    for (alpha, beta), before, after in cuts(goldens, case):
        heads = len(before.positions)
        stays = np.stack([np.isin(before.positions[h], after.positions[h]) for h in range(heads)])
        entries = entries_of(before.keys, before.values, before.positions)
        begun = before.tau is not None
        state = Threshold(jnp.array([before.tau or 0.0], jnp.float32), jnp.array([begun]))
        part = Merge(alpha=float(alpha), beta=float(beta))
        stay, gone = (entries.masked(jnp.asarray(x[None])) for x in (stays, ~stays))
        new, state = part.absorb(state, stay, gone, Leaving())
        for name in ("keys", "values"):
            got = np.asarray(getattr(new, name))[0][stays].reshape(heads, -1, before.keys.shape[-1])
            np.testing.assert_allclose(got, getattr(after, name), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state.tau[0], after.tau, rtol=1e-5)
        number += 1
    assert number == 26


@pytest.mark.long
def test_rows_merge_apart_and_nothing_changes_where_nothing_leaves():
    rng, part = np.random.default_rng(1), Merge()
    keys, values = rng.standard_normal((2, 3, 2, 9, 4)).astype(np.float32)
    at = np.broadcast_to(np.arange(9, dtype=np.int32), (3, 2, 9))
    gone = rng.random((3, 2, 9)) < 0.4
    gone[1] = False
    entries = Entries(jnp.asarray(keys), jnp.asarray(values), jnp.asarray(at), {})
    begin = part.begin(3, 2, 4, jnp.float32)
    split = lambda e, g: (e.masked(jnp.asarray(~g)), e.masked(jnp.asarray(g)))  # noqa: E731
    new, state = part.absorb(begin, *split(entries, gone), Leaving())
    assert np.array_equal(np.asarray(new.keys)[1], keys[1]) and state.begun.tolist() == [True, False, True]
    for row in (0, 2):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], entries)
        one, tau = part.absorb(part.begin(1, 2, 4, jnp.float32), *split(alone, gone[row : row + 1]), Leaving())
        np.testing.assert_allclose(one.keys[0], new.keys[row], atol=1e-6)
        np.testing.assert_allclose(tau.tau[0], state.tau[row], atol=1e-6)


def test_a_search_in_parts_is_the_whole_search(monkeypatch):
    from jaxkv.policies import merging

    rng = np.random.default_rng(2)
    keys = jnp.asarray(rng.standard_normal((1, 2, 70, 8)), jnp.float32)
    at = jnp.broadcast_to(jnp.arange(70, dtype=jnp.int32), (1, 2, 70))
    entries = Entries(keys, keys, at, {})
    stay = jnp.asarray(rng.random((1, 2, 70)) < 0.3)
    whole = merging.nearest(entries.masked(~stay), entries.masked(stay))
    monkeypatch.setattr(merging, "SEARCHED", 16)
    for a, b in zip(whole, merging.nearest(entries.masked(~stay), entries.masked(stay)), strict=True):
        gone = ~np.asarray(stay)
        np.testing.assert_allclose(np.asarray(a)[gone], np.asarray(b)[gone], atol=1e-6)
    unit = np.asarray(keys / jnp.linalg.norm(keys, axis=-1, keepdims=True))
    alike = np.where(np.asarray(stay)[:, :, None], np.einsum("bhsd,bhtd->bhst", unit, unit), -2)
    assert (np.asarray(whole[1])[gone] == alike.argmax(-1)[gone]).all()


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 4], ids=["overwritten", "cut"])
def test_merging_while_decoding_moves_what_stays(tiny, every):
    """With room for everything nothing merges; under a budget the entries held are those of dropping, changed."""
    params = tiny(FAMILY)
    options = {"policy": None, "max_new_tokens": 12, "stop_tokens": ()}
    base = jaxkv.policy("h2o", budget=16, block=20, every=every)
    merging = jaxkv.policy("h2o", budget=16, block=20, every=every, evicted=Merge())
    first = [jaxkv.prefill(params, [ids(45, 1), ids(3, 2)], policy=p).layers[0] for p in (base, merging)]
    assert [heads_of(first[0])[h].tolist() for h in range(2)] == [heads_of(first[1])[h].tolist() for h in range(2)]
    held = np.asarray(first[0].positions)[..., None] >= 0
    assert not np.allclose(np.where(held, first[0].values, 0)[0], np.where(held, first[1].values, 0)[0])
    np.testing.assert_array_equal(np.where(held, first[0].keys, 0)[1], np.where(held, first[1].keys, 0)[1])
    out = jaxkv.generate(params, [ids(45, 1), ids(3, 2)], **{**options, "policy": merging})
    assert out.cache.layers[0].beside["threshold"].begun.tolist() == [True, False]
    wide = [dataclasses.replace(p, budget=80) for p in (base, merging)]
    one, two = (jaxkv.generate(params, ids(45, 1), **{**options, "policy": p}) for p in wide)
    assert one.tokens.tolist() == two.tokens.tolist()


def test_heads_that_share_change_several_entries_at_cuts_only():
    with pytest.raises(BadValue, match="every= above 1"):
        jaxkv.policy("adakv-h2o", budget=64, evicted={"kind": "spread"})
    jaxkv.policy("adakv-h2o", budget=64, evicted={"kind": "merge"})


# ---- codecs and the second tier


def test_what_has_left_has_no_place_in_the_cache():
    with pytest.raises(BadValue, match="rope='text'"):
        jaxkv.policy("streaming-llm", budget=64, evicted=Demote())


def test_a_tier_that_cannot_be_is_refused():
    with pytest.raises(BadValue, match="bits=5"):
        Demote(bits=5)
    with pytest.raises(BadValue, match="slots=0"):
        Demote(slots=0)
    with pytest.raises(BadValue, match="by='mass'"):
        Demote(by="mass")
    with pytest.raises(BadValue, match="'int-by-channel', where several tokens share"):
        Demote(keys=IntByChannel(bits=4))
    with pytest.raises(BadValue, match=r"'channels'.*fitted to a prompt"):
        Demote(values=Channels())


@pytest.mark.long
def test_a_tier_as_many_times_the_budget(tiny):
    """`times` counts in slots of the budget, whichever way that was given; the bytes asked for are kept to."""
    params = tiny(FAMILY)
    rule = {"kind": "demote", "times": 3.0, "slots": 5}
    slots = lambda policy: jaxkv.prefill(params, ids(45, 1), policy=policy).layers[0].beside["tier"].entries  # noqa: E731
    assert slots(jaxkv.policy("h2o", budget=16, evicted=rule)).positions.shape[-1] == 48
    assert slots(jaxkv.policy("h2o", ratio=0.5, evicted=rule)).positions.shape[-1] == 5
    room = jaxkv.prefill(params, ids(45, 1), policy=jaxkv.policy("h2o", budget=24, evicted=rule)).kv_bytes
    cache = jaxkv.prefill(params, ids(45, 1), policy=jaxkv.policy("h2o", bytes=room, evicted=rule))
    assert (cache.policy.budget, cache.kv_bytes) == (24, room)


@pytest.mark.long
@pytest.mark.parametrize("by", ["position", "score"])
@given(
    rounds=st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=6), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_the_tier_holds_the_best_of_what_came(by, rounds, seed):
    """The newest, or those of highest worth, of equals the older: at cuts of many and overwrites of one. Codes never
    change again, and their attention is that of the decoded."""
    rng, slots = np.random.default_rng(seed), 4
    codec = Int(8)
    held = tier.empty(1, 1, slots, 8, jnp.dtype("float32"), Codecs(codec, codec), ranked=by == "score")
    came, value, first = {}, {}, 0

    def of(keys, at):
        worth = rng.integers(0, 4, at.shape).astype(np.float32)  # with ties
        worth[rng.random(at.shape) < 0.1] = np.inf  # protected once
        value.update({int(p): x for p, x in zip(at.ravel(), worth.ravel(), strict=True) if p >= 0})
        stats = {"worth": jnp.asarray(worth)} if by == "score" else {}
        return Entries(jnp.asarray(keys), jnp.asarray(-keys), jnp.asarray(at), stats)

    for mask in rounds:
        keys = rng.standard_normal((1, 1, 6, 8)).astype(np.float32)
        at = np.where(np.array(mask), first + np.arange(6), -1)[None, None].astype(np.int32)
        came |= {int(p): keys[0, 0, i] for i, p in enumerate(at[0, 0]) if p >= 0}
        held = held.with_many(of(keys, at))
        one = rng.standard_normal((1, 1, 1, 8)).astype(np.float32)
        came[first + 6] = one[0, 0, 0]
        held = held.with_one(of(one, np.full((1, 1, 1), first + 6, np.int32)))
        none = of(one, np.full((1, 1, 1), -1, np.int32))
        assert all(
            np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (held, held.with_one(none))), strict=True)
        )
        first += 7
        best = sorted(came, key=lambda p: (-value[p], p) if by == "score" else -p)[:slots]
        positions = np.asarray(held.entries.positions)[0, 0]
        assert sorted(p for p in positions.tolist() if p >= 0) == sorted(best)
        decoded = np.asarray(codec.decode(held.entries.keys))[0, 0]
        for place, position in enumerate(positions.tolist()):
            if position >= 0:
                np.testing.assert_allclose(
                    decoded[place], codec.decode(codec.encode(jnp.asarray(came[position]))), atol=1e-5
                )
    query = jnp.asarray(rng.standard_normal((1, 2, 1, 8)), jnp.float32)
    part = held.attend(query, jnp.full((1, 1), first), scale=0.5, softcap=None)
    there = positions >= 0
    logits = np.where(there, np.asarray(query)[0, :, 0] @ decoded.T * 0.5, -np.inf)
    weights, lse = masked_softmax(jnp.asarray(logits), jnp.asarray(np.broadcast_to(there, logits.shape)))
    np.testing.assert_allclose(part.lse[0, :, 0], lse, atol=1e-5)
    values = np.asarray(codec.decode(held.entries.values))[0, 0]
    np.testing.assert_allclose(
        part.output[0, :, 0], np.asarray(weights) @ np.where(there[:, None], values, 0), atol=1e-5
    )
    padding = held.attend(query, jnp.full((1, 1), -1), scale=0.5, softcap=None)
    assert np.isneginf(np.asarray(padding.lse)).all()


@pytest.mark.long
def test_a_second_tier_holds_what_the_first_has_lost(tiny):
    """Both tiers together hold the newest of all that left; the tier costs 4 bits a channel and two numbers a slot, and
    of the keys two numbers a channel."""
    params = tiny(FAMILY)
    plain = jaxkv.policy("h2o", budget=16, block=20)
    tiered = jaxkv.policy("tiered-h2o", budget=16, block=20, slots=8)
    rows = [ids(45, 1), ids(3, 2)]
    one, two = (jaxkv.prefill(params, rows, policy=p) for p in (plain, tiered))
    config = params.config
    per_slot = config.head_dim // 2 + 2 * 2
    pairs = config.num_layers * config.num_kv_heads * len(rows)
    assert two.kv_bytes - one.kv_bytes == (2 * 8 * per_slot + 2 * 4 * config.head_dim) * pairs
    out = jaxkv.generate(params, rows, policy=tiered, max_new_tokens=30, stop_tokens=())
    for cache, seen in ((two, (45, 3)), (out.cache, (74, 32))):
        layer = cache.layers[0]
        for row, tokens in enumerate(seen):
            for head in range(config.num_kv_heads):
                held = {int(p) for p in heads_of(layer, row)[head] if p >= 0}
                beside = {int(p) for p in np.asarray(layer.beside["tier"].entries.positions)[row, head] if p >= 0}
                left = sorted(set(range(tokens)) - held)
                assert beside == set(left[-8:]), (row, head)


@dataclasses.dataclass(frozen=True)
class Scrambled(Score):
    """score = 37 position mod 101."""

    kind: ClassVar[str] = "scrambled"

    def factors(self, stats, positions, now):
        return 0.0, (positions * 37 % 101).astype(jnp.float32)


@pytest.mark.long
@pytest.mark.parametrize("of", ["slots", "every", "not linear", "heads share", "layers share"])
def test_a_second_tier_by_score_holds_the_best_of_what_the_first_has_lost(tiny, of):
    """Under a score that never changes: whatever the store, at cuts and overwrites, at prefill and at decode."""
    params, rows, demote = tiny(FAMILY), [ids(45, 1), ids(3, 2)], {"kind": "demote", "by": "score", "slots": 8}
    options = {
        "slots": {},
        "every": {"every": 4},
        "not linear": {"score": Maximum(Scrambled(), Scrambled(), "none")},
        "heads share": {"allocate": {"kind": "adaptive", "safeguard": 0.2, "interval": 4, "shift": 2}},
        "layers share": {"allocate": {"kind": "global", "safeguard": 0.2}},
    }[of]
    policy = jaxkv.policy("random", budget=16, block=20, evicted=demote, recent=2, **{"score": Scrambled(), **options})
    assert (of == "not linear") == (not policy.decode.linear)
    one, heads = jaxkv.prefill(params, rows, policy=policy), params.config.num_kv_heads
    out = jaxkv.generate(params, rows, policy=policy, max_new_tokens=30, stop_tokens=())
    full = 0
    for cache, seen in ((one, (45, 3)), (out.cache, (74, 32))):
        for view, layer in zip(cache.views, cache.layers, strict=True):
            for row, tokens in enumerate(seen):
                for head in range(heads):
                    held = {int(p) for p in heads_of(view, row)[head] if p >= 0}
                    beside = {int(p) for p in np.asarray(layer.beside["tier"].entries.positions)[row, head] if p >= 0}
                    left = sorted(set(range(tokens)) - held, key=lambda p: -(37 * p % 101))
                    assert beside == set(left[:8]), (row, head)
                    full += len(left) > 8
    assert full


@pytest.mark.long
def test_zipcache_as_released(goldens):
    """What its probes say of every token, and values in the tier of 2 bits; of policy `zipcache`."""
    golden, phase = arrays(goldens / "policies" / "zipcache.npz"), jaxkv.policy("zipcache", budget=64).prefill
    assert phase is not None
    for case in ("t40", "t100"):
        query, key, probes, worth, others = (
            golden[f"{case}/{name}"] for name in ("query", "key", "probes", "worth", "others")
        )
        at, now = np.arange(query.shape[1], dtype=np.int32)[None], jnp.array([query.shape[1]], jnp.int32)
        times = np.bincount(probes, minlength=query.shape[1]).astype(np.float32)  # it draws some more than once
        last = phase.aggregate.weights(jnp.asarray(at), now, None)[0] == 1
        assert set(probes[: int(np.ceil(0.05 * len(times)))]) <= set(np.flatnonzero(last))
        positions = jnp.asarray(at[:, None].repeat(len(key), 1))
        mass = prefill_attend_mass(
            jnp.asarray(query[None]), jnp.asarray(key[None]), jnp.asarray(at), positions, scale=key.shape[-1] ** -0.5,
            reduce=phase.aggregate.queries, weights=jnp.maximum(jnp.asarray(times[None]), 1e-30),
        )  # fmt: skip
        weight, bias = phase.score.factors({}, positions, now)
        mine = np.asarray(weight * phase.aggregate.over_group(mass, len(key)) + bias)[0]
        np.testing.assert_allclose(mine, worth, rtol=2e-5)
        assert np.array_equal(np.sort(np.argsort(mine, axis=-1)[:, : others.shape[1]], axis=-1), others)
    values, others = jnp.asarray(golden["values"][None, None]), golden["others"]
    at = np.arange(values.shape[2], dtype=np.int32)
    stay = jnp.asarray(~np.isin(at, others))[None, None]
    stats = {"worth": jnp.zeros((1, 1, len(at)), jnp.float32)}
    entries = Entries(values, values, jnp.asarray(at)[None, None], stats)
    rule = dataclasses.replace(phase.evicted, slots=len(others), times=0.0)
    looks = ScoreInputs(queries=values, query_positions=jnp.asarray(at)[None])
    begun = rule.begun(rule.begin(1, 1, values.shape[-1], jnp.dtype("float32")), entries, looks)
    _, held = rule.absorb(begun, entries.masked(stay), entries.masked(~stay), Leaving())
    assert np.asarray(held.entries.positions)[0, 0].tolist() == others.tolist()
    step = np.ptp(golden["values"] / np.sqrt(np.abs(golden["values"]).max(0)), axis=-1).max() / 3
    off = np.abs(np.asarray(held.decoded()[1])[0, 0] - golden["decoded"][others])
    factor = np.sqrt(np.abs(golden["values"]).max(0))
    assert (off <= 2e-3 * step * factor + 1e-6).mean() > 0.98  # a scale of 16 bits turns few codes by one
    assert (off <= 1.01 * step * factor).all()


@pytest.mark.long
def test_what_is_demoted_is_attended_to(tiny):
    """A tier as large as the text, at 8 bits: nearly the full cache's next-token logits, where dropping is far off."""
    params, prompt = tiny(FAMILY), ids(60, 3)
    score = lambda policy: np.asarray(  # noqa: E731
        jaxkv.generate(params, prompt, policy=policy, max_new_tokens=2, stop_tokens=()).cache.layers[-1].values
    )[0, :, -1]
    want = score(None)
    far = score(jaxkv.policy("streaming-llm", budget=12, rope="text", block=20))
    near = score(jaxkv.policy("streaming-llm", budget=12, rope="text", block=20, evicted=Demote(slots=64, bits=8)))
    newest = lambda x: x  # noqa: E731
    assert np.abs(newest(near) - want).max() < 0.2 * np.abs(newest(far) - want).max()


@pytest.mark.parametrize("budget", [8, 64])
def test_a_prompt_that_fits_balances_the_tier_too(tiny, budget):
    """The channels' ranges are those of the prompt, whether any of it leaves or only what decoding writes over."""
    rule = {"kind": "demote", "slots": 16, "balance": "ranges"}
    policy = jaxkv.policy("streaming-llm", budget=budget, sinks=2, rope="text", evicted=rule, block=64)
    cache = jaxkv.prefill(tiny(FAMILY), ids(20), policy=policy)
    whole = jaxkv.prefill(tiny(FAMILY), ids(20), policy=jaxkv.policy("full"))
    for layer, full in zip(cache.layers, whole.layers, strict=True):
        centre, chosen = layer.beside["tier"].keys.centre, layer.beside["tier"].keys.chosen
        keys = np.asarray(full.keys)[0, :, np.asarray(full.positions)[0, 0] >= 0]
        assert chosen.all()
        if layer is cache.layers[0]:  # deeper ones see what the first has lost
            np.testing.assert_allclose(np.asarray(centre)[0], (keys.max(0) + keys.min(0)) / 2, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("bits, name", [(8, "h2o"), (4, "adakv-h2o"), (4, "global-h2o")])
def test_any_policy_under_a_codec(tiny, bits, name):
    """The slots, pools and lines hold codes: a share of the bytes, as near to the keys as the code's step."""
    params, rows = tiny(FAMILY), [ids(45, 1), ids(3, 2)]
    coded = {"keys": {"kind": "int", "bits": bits}, "values": {"kind": "int", "bits": bits}}
    plain = jaxkv.prefill(params, rows, policy=jaxkv.policy(name, budget=16, block=20))
    policy = jaxkv.policy(name, budget=16, block=20, store=coded)
    small = jaxkv.prefill(params, rows, policy=policy)
    dim = params.config.head_dim
    assert small.kv_bytes / plain.kv_bytes == (dim * bits / 8 + 4) / (4 * dim)
    first = [cache.views[0].by_head() for cache in (plain, small)]
    same = (np.asarray(first[0].positions) == np.asarray(first[1].positions)) & (np.asarray(first[0].positions) >= 0)
    both = [np.asarray(entries.keys)[same] for entries in first]
    assert same.sum() > 10 and np.abs(both[0] - both[1]).max() < 12 * 2.0**-bits
    out = jaxkv.generate(params, rows, policy=policy, max_new_tokens=9, stop_tokens=())
    assert out.cache.kv_bytes == small.kv_bytes and int(np.asarray(out.cache.held()).sum()) > 0


# ---- reading pages


def test_no_key_of_a_page_beats_its_bound():
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((2, 2, 21, 8)).astype(np.float32)
    positions = np.where(rng.random((2, 2, 21)) < 0.8, np.arange(21), -1).astype(np.int32)
    positions[0, 0, 8:12] = -1  # an empty page
    keys[positions < 0] = np.nan
    none = empty(2, 2, 8, jnp.float32, size=4, group=2)
    index = none.of(jnp.asarray(keys), jnp.asarray(positions))
    query = rng.standard_normal((2, 4, 8)).astype(np.float32)
    bound = np.asarray(index.score(jnp.asarray(query)))
    assert bound.shape == (2, 2, 2, 6) and np.isneginf(bound[0, 0, :, 2]).all()
    logits = np.einsum("bhgd,bhsd->bhgs", query.reshape(2, 2, 2, 8), np.nan_to_num(keys))
    logits = np.where(positions[:, :, None] >= 0, logits, -np.inf)
    logits = np.pad(logits, (*[(0, 0)] * 3, (0, 3)), constant_values=-np.inf).reshape(2, 2, 2, 6, 4).max(-1)
    assert (bound >= logits - 1e-5).all()
    new = rng.standard_normal((2, 2, 8)).astype(np.float32) * 9
    slot = np.array([[9, 20], [3, 0]], np.int32)
    after = index.with_key(jnp.asarray(slot), jnp.asarray(new), jnp.array([[True], [False]]))
    keys[0, 0, 9], keys[0, 1, 20] = new[0]
    positions[0, 0, 9], positions[0, 1, 20] = 21, 21
    want = none.of(jnp.asarray(keys), jnp.asarray(positions))
    assert (np.asarray(after.low)[0] <= np.asarray(want.low)[0]).all(), "an overwrite only widens"
    assert np.array_equal(np.asarray(after.low)[1], np.asarray(index.low)[1]), "a row that has finished stays"


@pytest.mark.long
def test_reading_every_page_is_reading_everything(tiny):
    params, rows = tiny(FAMILY), [ids(45, 1), ids(3, 2)]
    options = {"max_new_tokens": 12, "stop_tokens": ()}
    full = jaxkv.generate(params, rows, **options)
    paged = jaxkv.generate(params, rows, policy=jaxkv.policy("quest", count=512, page=4, dense=0), **options)
    assert paged.tokens.tolist() == full.tokens.tolist()
    for mine, theirs in zip(paged.cache.layers, full.cache.layers, strict=True):
        ours, others = (layer.in_time_order() for layer in (dataclasses.replace(mine, beside={}), theirs))
        assert np.array_equal(ours.positions, others.positions)
        held = np.asarray(others.positions)[..., None] >= 0
        np.testing.assert_allclose(np.where(held, ours.values, 0), np.where(held, others.values, 0), atol=1e-4)


@pytest.mark.parametrize("slots", [13, 20, 30])
def test_slots_that_are_added_have_pages(slots):
    """A store that holds an index of pages has one of as many as its slots fill, those behind the others empty."""
    rng, positions = np.random.default_rng(6), np.arange(10, dtype=np.int32).reshape(1, 1, 10)
    store = stores.empty(1, 1, 10, 8, jnp.float32, beside={PAGES: empty(1, 1, 8, jnp.float32, size=4, group=1)})
    keys = jnp.asarray(rng.standard_normal((1, 1, 10, 8)), jnp.float32)
    store = Pages(page=4).indexed(store.changed(keys=keys, positions=jnp.asarray(positions)))
    wide = store.resized(slots)
    index, anew = wide.beside[PAGES], Pages(page=4).indexed(wide).beside[PAGES]
    assert np.array_equal(index.low, anew.low) and np.array_equal(index.high, anew.high)
    assert index.low.shape[2] == -(-slots // 4)


TWO_BITS = {"keys": {"kind": "int", "bits": 2}, "values": {"kind": "int", "bits": 2}}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "store",
    [TWO_BITS, {**TWO_BITS, "residual": 8, "initial": 2}, {**TWO_BITS, "keys": {"kind": "channels", "window": 4}}],
    ids=["codes", "windows", "channels"],
)
def test_every_page_of_codes_is_read_as_everything_is(tiny, store):
    """The token that comes by its exact key and value, and as many before it as the window holds."""
    found = []
    for read in ({}, {"read": Pages(count=512, page=4, dense=0)}):
        cache = jaxkv.prefill(tiny(FAMILY), ids(40, 1), policy=jaxkv.policy("full", store=store, **read))
        found.append(follow(tiny(FAMILY), cache, ids(12, 2)[None])[1])
    np.testing.assert_allclose(*found, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("together", [False, True])
def test_few_pages_are_read(tiny, together):
    """What is in no chosen page is not read: NaN there changes nothing. The bytes read are the index and the pages that
    each query head chooses, or the query heads of a KV head together."""
    params = tiny(FAMILY)
    policy = jaxkv.policy("quest", count=12, page=4, dense=1, together=together)
    cache = jaxkv.prefill(params, ids(45, 1), policy=policy, room=10)
    kinds = [policy.read.everything(layer) for layer in range(params.config.num_layers)]
    assert kinds[:2] == [True, False]
    held, config = cache.layers[1], params.config
    per_entry, pairs = 2 * config.head_dim * 4, config.num_kv_heads
    pages = held.beside["pages"].low.shape[2]
    read = cache.read_bytes[1]
    choices = 1 if together else config.num_heads // pairs
    assert read == pairs * per_entry * (12 * choices + pages)
    assert not together or read < cache.read_bytes[0]
    assert cache.read_bytes[0] == pairs * per_entry * held.slots
    out = jaxkv.generate(params, ids(1, 9), cache=cache, max_new_tokens=4, stop_tokens=())
    assert out.stats.read_bytes == sum(out.cache.read_bytes)

    begun = jaxkv.generate(params, ids(44, 1), policy=policy, max_new_tokens=1, stop_tokens=()).cache
    first, second = begun.layers
    pages = second.beside["pages"].low.shape[2]
    assert not (np.asarray(second.positions)[0, :, 44:48] >= 0).any(), "the new token's page holds nothing yet"

    def following(hit, *names):
        """The token behind a step that finds NaN in these pages `[Hk, P]` of the second layer."""
        slots = np.repeat(hit, 4, axis=1)[None, :, :, None]
        bad = second.changed(**{name: jnp.where(slots, jnp.nan, getattr(second, name)) for name in names})
        spoilt = dataclasses.replace(begun, layers=(first, bad))
        return int(jaxkv.generate(params, cache=spoilt, max_new_tokens=1, stop_tokens=()).tokens[0, 0])

    every = np.eye(pairs * pages, dtype=bool).reshape(-1, pairs, pages)
    want = following(np.zeros_like(every[0]), "values")
    matter = np.array([following(one, "values") != want for one in every]).reshape(pairs, pages)
    if together:
        assert matter.sum(axis=1).tolist() == [2, 2], "of three pages one is the new token's"
    else:
        assert all(2 < count <= 2 * choices for count in matter.sum(axis=1)), "two of each query head's"
    assert following(~matter, "keys", "values") == want


@pytest.mark.long
def test_reading_few_of_a_bounded_cache(tiny):
    """What is kept and what is read are two budgets: H2O keeps 32 and reads 8 of them; others get no mass."""
    params = tiny(FAMILY)
    policy = jaxkv.policy("h2o", budget=32, block=20, read=Pages(count=8, page=4, dense=0))
    out = jaxkv.generate(params, [ids(60, 1), ids(3, 2)], policy=policy, max_new_tokens=20, stop_tokens=())
    assert np.asarray(out.cache.held()).max() <= 32
    with pytest.raises(BadValue, match="reads pages"):
        jaxkv.policy("adakv-h2o", budget=32, read=Pages())


@pytest.mark.some(1)
@pytest.mark.parametrize("page", [12, 16, 32])
def test_pages_begin_with_the_text(tiny, page):
    """Whatever slots there are for other rows, or for tokens to come: a page is the same entries."""
    params, policy = tiny(FAMILY), jaxkv.policy("quest", count=2 * page, page=page, dense=0)
    prompts = [ids(90, 0), ids(130, 1)]
    both = jaxkv.generate(params, prompts, policy=policy, max_new_tokens=12, stop_tokens=())
    for row, prompt in enumerate(prompts):
        one = jaxkv.generate(params, prompt, policy=policy, max_new_tokens=12, stop_tokens=())
        assert both.tokens[row].tolist() == one.tokens[0].tolist()
        begun = jaxkv.generate(params, prompt, policy=policy, max_new_tokens=1, stop_tokens=())
        rest = jaxkv.generate(params, cache=begun.cache, max_new_tokens=11, stop_tokens=())
        assert [*begun.tokens[0], *rest.tokens[0]] == one.tokens[0].tolist()
        for layer in one.cache.layers:
            held = np.asarray(layer.positions[0])
            assert (held[:, : len(prompt)] == np.arange(len(prompt))).all()


@pytest.mark.long
@pytest.mark.parametrize(
    "more", [{"decode_every": 4}, {"decode_evicted": {"kind": "merge", "alike": -1.0}}], ids=["cuts", "merges"]
)
def test_the_index_knows_what_moves_while_decoding(tiny, more):
    """A cut moves entries to other pages, and a merge changes keys: every key held lies in the range of its page."""
    policy = jaxkv.policy("h2o", budget=24, read=Pages(count=8, page=4, dense=0), **more)
    out = jaxkv.generate(tiny(FAMILY), ids(40, 1), policy=policy, max_new_tokens=12, stop_tokens=())
    for layer in out.cache.layers:
        index, held = layer.beside["pages"], np.asarray(layer.positions) >= 0
        low, high = (np.repeat(x, index.size, axis=2)[:, :, : held.shape[2]] for x in (index.low, index.high))
        keys = np.asarray(layer.keys)
        assert ((low <= keys) & (keys <= high)).all(axis=-1)[held].all()
