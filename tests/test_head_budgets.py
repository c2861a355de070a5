"""Head budgets by what was measured: HeadKV, DuoAttention, RazorAttention against plain NumPy forms of their rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from ordered import heads_of
from shares import apportioned, headkv_budgets
from watched import watched

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.policies import Attention, CurrentQuery, Curves, Divided, KeyDiff, Phase, Proportional, Select, catalogue
from jaxkv.policies.curves import best_split
from jaxkv.policies.measured import poured, scaled
from jaxkv.store.entries import in_pieces

FAMILY = "smollm2"  # three KV heads of three query heads each
TOKENS, GROUP = 70, 3


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)


pour = jax.jit(poured)


@given(st.integers(0, 2**16), st.sampled_from([1, 2, 3, 8]), st.sampled_from([20, 100_000_000]))
@settings(max_examples=60, deadline=None)
def test_poured_is_the_largest_remainder_under_caps(seed, heads, much):
    rng = np.random.default_rng(seed)
    shares = rng.integers(0, 4096, heads) * (rng.random(heads) < 0.8)
    room, left = rng.integers(0, much, (4, heads)), rng.integers(0, heads * much // 2, 4)
    ours = pour(*(jnp.asarray(x, jnp.int32) for x in (left, shares, room)))
    for row, mine in enumerate(np.asarray(ours).tolist()):
        assert mine == apportioned(int(left[row]), shares.tolist(), room[row].tolist())


# ---- the rules in NumPy


def pooled_mass(weights, window, apart, kind, kernel):
    """SnapKV's score of every token by query head: mean over the last `window` queries, pooled over neighbours."""
    mass = weights[:, -window:].mean(1)
    mass[:, len(mass[0]) - apart :] = 0
    half = kernel // 2
    if kind == "avg":
        return np.stack([np.convolve(row, np.ones(kernel) / kernel, mode="same") for row in mass])
    padded = np.pad(mass, ((0, 0), (half, half)), constant_values=-np.inf)
    return np.max([padded[:, shift : shift + mass.shape[1]] for shift in range(kernel)], axis=0)


def divided_budgets(local, budget, floor, tokens):
    """Local heads hold `floor`, the others share the rest, up to the whole text; what they cannot use goes back."""
    heads, few = len(local), ~local
    each, over = divmod(heads * budget - floor * local.sum(), max(few.sum(), 1))
    out = np.where(few, each, floor)
    out[np.flatnonzero(few)[:over]] += 1
    out = np.minimum(out, tokens)
    each, over = divmod(heads * budget - out.sum(), max(local.sum(), 1))
    out[local] += each
    out[np.flatnonzero(local)[:over]] += 1
    return out


def kept_by(score, budget, sinks, recent):
    """The protected tokens and the best of the others; ties go to the older."""
    tokens = len(score)
    safe = (np.arange(tokens) < sinks) | (np.arange(tokens) >= tokens - recent)
    order = np.lexsort((np.arange(tokens), -np.where(safe, np.inf, score)))
    return sorted(order[:budget].tolist())


def newest(tokens, budget, sinks):
    """Sinks, and the newest tokens in the rest of the budget."""
    return [*range(sinks), *range(tokens - budget + sinks, tokens)]


def razor_local(learned):
    """All query heads [L, Hq] but the best 14 of 100 by induction and the best of 100 by echo, one at least."""
    local = np.ones(learned["echo"].shape, bool)
    for name, share in (("induction", 0.14), ("echo", 0.01)):
        local.ravel()[np.argsort(-learned[name], axis=None)[: max(round(share * local.size), 1)]] = False
    return local


def duo_local(learned, share):
    """All KV heads [L, Hk] of the model but the best by their groups' scores."""
    scores = learned["retrieval"].reshape(len(learned["retrieval"]), -1, GROUP)
    scores = scores.max(2) if share.of_group == "max" else scores.mean(2)
    local = np.ones(scores.shape, bool)
    best = max(round(share.retrieval * scores.size + 1e-9), 1)
    local.ravel()[np.argsort(-scores, axis=None, kind="stable")[:best]] = False
    return local


CASES = {
    "headkv": [(24, {"window": 6}), (40, {"window": 6, "beta": 5.0}), (24, {"window": 6, "beta": 1.0})],
    "duo": [(24, {"sinks": 2, "recent": 6, "of_group": "max"}), (24, {"sinks": 2, "recent": 6, "retrieval": 0.3})],
    "razorattention": [(24, {"window": 6, "decode_recent": 6}), (50, {"window": 6, "decode_recent": 6})],
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "budget", "options"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_kept_by_the_papers_rule(tiny, name, budget, options):
    """Each head's budget and its entries, and no more slots than the heads' mean budget in whole pieces."""
    params, tokens = tiny(FAMILY), ids(TOKENS)
    heads, group = params.config.num_kv_heads, params.config.num_heads // params.config.num_kv_heads
    policy = jaxkv.policy(name, budget=budget, **options)
    prefill, share = policy.prefill, policy.allocate
    cache = jaxkv.prefill(params, tokens, policy=policy)
    window, sinks, recent = prefill.observe.window, prefill.protects.sinks, prefill.protects.recent
    spreads = []
    for layer, (_, _, weights) in enumerate(watched(params, tokens)):
        learned, local = {name: np.asarray(x) for name, x in params.learned.items()}, np.zeros(heads, bool)
        if name == "headkv":
            scores = learned["reasoning"].reshape(-1, heads, group).mean(2)
            budgets = headkv_budgets(scores, budget, window, share.beta, TOKENS)[layer]
        else:
            local = razor_local(learned)[layer] if name == "razorattention" else duo_local(learned, share)[layer]
            local = local.reshape(heads, -1).all(1)
            floor = sinks + recent + max(int((budget - sinks - recent) * share.base), 1)
            budgets = divided_budgets(local, budget, floor, TOKENS)
        assert cache.layers[layer].total == heads * in_pieces(-(-int(budgets.sum()) // heads))
        assert name == "headkv" or budgets.sum() == heads * budget
        mass = pooled_mass(weights, window, recent, prefill.aggregate.pool, prefill.aggregate.kernel)
        mass = mass.reshape(heads, group, -1).mean(1)
        for head, held in enumerate(heads_of(cache.layers[layer])):
            want = (
                newest(TOKENS, budgets[head], sinks)
                if local[head]
                else kept_by(mass[head], budgets[head], sinks, recent)
            )
            assert held[held >= 0].tolist() == want, f"layer {layer} head {head}"
        spreads.append(np.ptp(budgets))
    assert max(spreads) > 0
    if name == "razorattention" and budget == 50:
        assert np.asarray(cache.held()).max() == TOKENS, "a retrieval head is whole where the budget holds it"


def test_a_head_that_retrieves_nothing_keeps_its_base():
    """Scores of 0 leave the base; where all are 0 the heads are equal. Caps go to the others."""
    share, many = Proportional(beta=2.0), jnp.full((1, 3), 500, jnp.int32)
    total, guard = jnp.array([300], jnp.int32), jnp.array([1], jnp.int32)

    def quotas(scores, held):
        learned = share.prepared({"reasoning": jnp.array([scores])}, len(scores))
        return np.asarray(share.quotas({"parts": learned["parts"][0]}, total, guard, held, total))[0].tolist()

    assert quotas([1.0, 0.0, 0.0], many) == [200, 50, 50]
    assert quotas([0.0, 0.0, 0.0], many) == [100, 100, 100]
    assert quotas([1.0, 0.0, 0.0], jnp.array([[120, 500, 500]], jnp.int32)) == [120, 90, 90]
    assert quotas([1.0, 0.0, 0.0], jnp.array([[10, 20, 500]], jnp.int32)) == [10, 20, 270]
    assert quotas([1.0, 0.0, 0.0], jnp.array([[10, 20, 30]], jnp.int32)) == [10, 20, 30]


@pytest.mark.long
@pytest.mark.parametrize("beta", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("which", ["copy", "reason"])
def test_headkv_as_released(goldens, which, beta):
    """Every head of 32 layers gets what the release gives it of 96 tokens, but for whole tokens per layer."""
    golden = arrays(goldens / "policies" / "headkv.npz")
    share, budget, window = dataclasses.replace(catalogue()["headkv"].allocate, beta=beta), 128, 32
    theirs, learned = window + golden[f"{which}/{beta}/capacity"], {"reasoning": golden[f"{which}/scores"]}
    layers = share.budgets(budget, 32, 10_000, window, learned)
    assert sum(layers) == 32 * budget and np.abs(np.array(layers) - theirs.mean(axis=1)).max() < 1
    parts, plenty = share.prepared(learned, 32)["parts"], jnp.full((1, 32), 10_000, jnp.int32)
    guard = jnp.array([window + 1], jnp.int32)
    for layer, mean in enumerate(layers):
        total = jnp.array([32 * mean], jnp.int32)
        ours = np.asarray(share.quotas({"parts": parts[layer]}, total, guard, plenty, total))[0]
        assert ours.sum() == 32 * mean
        np.testing.assert_allclose(ours, theirs[layer], rtol=0.02, atol=1.01)


@pytest.mark.parametrize(
    "layers, heads, sparsity", [(1, 1, 0.0), (2, 1, 0.5), (3, 2, 0.5), (32, 8, 0.5), (32, 8, 0.75)]
)
def test_which_heads_are_local(layers, heads, sparsity):
    """DuoAttention's release: the heads of all layers whose gate is at least the quantile of all (its
    `sparsify_attention_heads`)."""
    gates = np.random.default_rng(heads).permutation(layers * heads).reshape(layers, heads).astype(np.float32)
    share, learned = Divided(retrieval=1 - sparsity), {"retrieval": np.repeat(gates, 3, axis=1)}
    learned = share.prepared(learned, heads)
    local = np.stack([share.local({"retrieves": each}, heads) for each in learned["retrieves"]])
    np.testing.assert_array_equal(~local, gates >= np.quantile(gates, sparsity))
    assert layers < 32 or np.unique((~local).sum(axis=1)).size > 2, "layers have unequally many"


# ---- curves


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama2", "llama3"])
@pytest.mark.parametrize("ratio", ["0.3", "0.5", "0.75"])
def test_curves_as_in_kvpress(goldens, tiny, family, ratio):
    """LU-KV's layers and heads keep the entries that kvpress leaves unmasked, and hold no slot more."""
    golden, params = arrays(goldens / "kvpress" / f"{family}-curves.npz"), tiny(family)
    tokens, held = golden["ids"][0], []
    cache = jaxkv.prefill(params, tokens, policy=jaxkv.policy("lu-kv", ratio=float(ratio)))
    for index, layer in enumerate(cache.layers):
        theirs = golden[f"lukv-expected-n512/r{ratio}/layer{index}/kept_mask"]
        ours = np.zeros_like(theirs)
        for head, entries in enumerate(heads_of(layer)):
            ours[head, entries[entries >= 0]] = True
        np.testing.assert_array_equal(ours, theirs, err_msg=f"layer {index}")
        assert layer.total == layer.heads * in_pieces(int(theirs.sum()) // layer.heads)
        held.append(theirs.sum(-1).tolist())
    assert len({tuple(each) for each in held}) > 1 and len(set(held[0])) > 1, "layers and heads keep differently"


by_curves = jax.jit(Curves().quotas)


@pytest.mark.long
@given(st.integers(0, 2**16), st.sampled_from([1, 2, 3, 8]), st.integers(6, 40), st.integers(41, 400))
@settings(max_examples=60, deadline=None)
def test_heads_share_in_proportion_but_for_what_each_keeps(seed, heads, budget, tokens):
    """Fractions times the text, whole by largest remainders, no less than the guard; against a plain search."""
    rng = np.random.default_rng(seed)
    curves = np.sort(rng.random((99, heads)), axis=0)[::-1].astype(np.float32)
    guard, total = int(rng.integers(1, budget + 1)), heads * budget
    many = lambda x: jnp.full((1,), x, jnp.int32)  # noqa: E731
    held = jnp.full((1, heads), tokens, jnp.int32)
    given = by_curves({"utility_curves": jnp.asarray(curves)}, many(total), many(guard), held, many(tokens))
    given = np.asarray(given)[0]
    assert given.sum() == total and (given >= guard).all() and (given <= tokens).all()
    row = np.argmin(np.abs(curves.mean(1) - np.float32(budget / tokens)))
    shares = curves[row].astype(float)
    free = (given > guard) & (given < tokens)
    if free.any():  # those at no bound are in one proportion up to rounding, and the bounded ones on their side of it
        most, near = np.argmax(np.where(free, shares, -1)), 2.1 + tokens / 2000
        exact = shares * given[most] / shares[most]
        assert (np.abs(exact - given)[free] <= near).all()
        assert (exact[given == guard] <= guard + near).all() and (exact[given == tokens] >= tokens - near).all()


@given(st.integers(0, 2**16), st.integers(1, 12), st.integers(7, 60))
@settings(max_examples=60, deadline=None)
def test_layers_in_proportion_within_bounds(seed, layers, budget):
    shares = np.random.default_rng(seed).random(layers)
    each = scaled(shares, layers * budget, 6, 64)
    assert each.sum() == layers * budget and each.min() >= 6 and each.max() <= 64
    order = np.argsort(shares, kind="stable")
    assert (np.diff(each[order]) >= -1).all()


def test_the_best_split():
    """Where gains fall nothing keeps more; a late peak counts as early as the concave curve above it."""
    gains = -np.sort(-np.random.default_rng(0).random((2, 4)), axis=1)
    split = best_split(gains)
    assert split.shape == (99, 2) and (np.diff(split.sum(1)) <= 0).all()
    for removed in (25, 50, 75):
        keep = 8 - 8 * removed // 100
        sums = {
            first: gains[0, :first].sum() + gains[1, : keep - first].sum()
            for first in range(max(keep - 4, 0), min(keep, 4) + 1)
        }
        assert round(split[removed - 1, 0] * 4) == max(sums, key=sums.get)
    late = best_split(np.array([[0.0, 0.0, 0.0, 8.0], [1.0, 1.0, 1.0, 1.0]]))
    assert late[49].tolist() == [1.0, 0.0]


# ---- at decode


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("duo", Attention()),
        ("razorattention", KeyDiff()),
        pytest.param("razorattention", Attention(), marks=pytest.mark.slow),
    ],
)
def test_the_window_of_a_local_head_slides(tiny, name, score):
    """Local heads hold the sinks and the newest after the prompt and 25 more tokens; no segment changes its size."""
    params, options = tiny(FAMILY), {"sinks": 2, "recent": 5} if name == "duo" else {"window": 5, "decode_recent": 5}
    policy = jaxkv.policy(name, budget=20, block=24, **options)
    policy = dataclasses.replace(policy, decode=dataclasses.replace(policy.decode, score=score))
    out = jaxkv.generate(params, [ids(60), ids(33, 1)], policy=policy, max_new_tokens=26, stop_tokens=())
    share, sinks = policy.allocate, policy.decode.protects.sinks
    floor = 8 if name == "duo" else 9 + 5  # sinks, recents and one entry; sinks, recents and half of the others
    learned = share.prepared(params.learned, params.config.num_kv_heads)
    for index, layer in enumerate(out.cache.layers):
        local = np.asarray(share.local({name: x[index] for name, x in learned.items()}, layer.heads))
        for row, tokens in enumerate((60, 33)):
            held = heads_of(layer, row)
            assert [len(each) for each in held] == divided_budgets(local, 20, floor, tokens).tolist()
            for head in np.flatnonzero(local):
                assert sorted(held[head]) == newest(tokens + 25, len(held[head]), sinks)


@pytest.mark.long
def test_cuts_every_few_tokens_keep_the_shares(tiny):
    """A decode phase that cuts every 4 tokens gives each head its share again, also when the prompt was short."""
    params, budget = tiny(FAMILY), 16
    policy = jaxkv.policy("headkv", budget=budget, window=4)
    decode = Phase(CurrentQuery(), Attention(), select=Select(recent=4), every=4)
    policy = dataclasses.replace(policy, decode=decode)
    out = jaxkv.generate(params, [ids(50), ids(6, 1)], policy=policy, max_new_tokens=31, stop_tokens=())
    guard = policy.allocate.guard(jnp.array([budget, budget], jnp.int32), policy.phases)
    assert guard.tolist() == [4 + 1, 4 + 1]
    limits, share = np.asarray(out.cache.limits), policy.allocate
    assert (limits.mean(axis=0) == budget).all()
    for index, layer in enumerate(out.cache.layers):
        assert layer.slots == in_pieces(int(limits[index, 0]) + 4)
        held = np.asarray(layer.held())
        assert (held.sum(1) >= limits[index] * layer.heads).all() and (held >= 5).all()
        plenty = jnp.full((2, layer.heads), 999, jnp.int32)
        total = jnp.asarray(limits[index] * layer.heads)
        scores = {"parts": share.prepared(params.learned, layer.heads)["parts"][index]}
        quotas = np.asarray(share.quotas(scores, total, guard, plenty, total))
        assert (np.asarray(layer.sizes) == quotas + 4).all(), "a cut frees as many slots in every head"


# ---- what is refused


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: jaxkv.policy("headkv", budget=99, beta=0.5), "beta=0.5"),
        (lambda: jaxkv.policy("duo", budget=999, retrieval=0.0), "retrieval=0.0"),
        (lambda: jaxkv.policy("duo", budget=999, base=1.5), "base=1.5"),
        (lambda: jaxkv.policy("duo", budget=384), "at least 385"),
        (lambda: jaxkv.policy("lu-kv", budget=99, least=0), "least=0"),
        (lambda: jaxkv.policy("duo", budget=999, of_group="sum"), "'mean' or 'max'"),
        (lambda: jaxkv.policy("headkv", budget=99, heads="sum"), "decide as one"),
        (lambda: jaxkv.policy("headkv", budget=99, rope="cache"), "rope='text'"),
        (lambda: dataclasses.replace(catalogue()["full"], allocate=Divided()), "evicts nothing"),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(BadValue, match=words):
        make()


@pytest.mark.long
def test_the_shares_compile_once_for_every_split(tiny):
    """What was measured is data: other scores, other borders, the same program and bytes."""
    params, policy = tiny(FAMILY), jaxkv.policy("headkv", budget=24, window=6)
    one = jaxkv.prefill(params, ids(TOKENS), policy=policy)
    before = jaxkv.run.first_block._cache_size()
    turned = {**params.learned, "reasoning": jnp.flip(jnp.asarray(params.learned["reasoning"]), axis=-1)}
    two = jaxkv.prefill(dataclasses.replace(params, learned=turned), ids(TOKENS), policy=policy)
    assert jaxkv.run.first_block._cache_size() == before and one.nbytes == two.nbytes
    moved = [np.asarray(a.offsets) != np.asarray(b.offsets) for a, b in zip(one.layers, two.layers, strict=True)]
    assert np.any(moved)
