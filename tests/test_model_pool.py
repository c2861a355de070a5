"""Layers that share the model's budget: who gets how much by the papers' rules in NumPy, and the line that holds it."""

import dataclasses
import functools
import itertools
import json

import d2o_numpy as d2o
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from flax import nnx
from ordered import heads_of, in_line
from safetensors.numpy import load_file, save_file
from small import SMALL
from test_head_budgets import apportioned
from watched import watched

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.policies import Cake, Composite, Density, Global, Lazy, Prefix, Uniform, catalogue
from jaxkv.policies.across import Across
from jaxkv.run import decode_logits
from jaxkv.store import Entries, Pool
from jaxkv.store.line import Written, opened, placed, written

FAMILY = "llama3"
TOKENS, BUDGET = 70, 24
ACROSS = [name for name, policy in sorted(catalogue().items()) if isinstance(policy.allocate, Across)]
NAMES = [pytest.param(name, marks=() if name == "global-h2o" else pytest.mark.slow) for name in ACROSS]
SHARES = [Global(1.0), Prefix(1.0), Composite(1.0), Cake(1.0, window=4), Density(1.0), Lazy(1.0, sinks=0, recent=1)]
EVEN = [pytest.param(each, marks=() if isinstance(each, Global) else pytest.mark.slow) for each in SHARES]


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)


def held(cache, row=0):
    """The positions that every layer and head holds."""
    return [[sorted(int(p) for p in head if p >= 0) for head in heads_of(layer, row)] for layer in cache.views]


# ---- the rules in NumPy


def attention(params, tokens):
    """Every layer's attention weights [Hk, G, T, T]."""
    return [each.reshape(params.config.num_kv_heads, -1, *each.shape[1:]) for _, _, each in watched(params, tokens)]


def by_weight(weights, total, most=TOKENS):
    """Shares of the total in proportion to the weights, none above `most`."""
    shares = np.round(np.float32(weights) / np.float32(max(weights)) * 4095).astype(int).tolist()
    return np.array(apportioned(total, shares, [most] * len(shares)))


def guarded(weights, safeguard=0.2):
    """The layers' sizes: the safeguard, and of the rest shares in proportion to the weights, up to twice the mean."""
    floor = max(int(safeguard * BUDGET), 1)
    return floor + by_weight(weights, len(weights) * (BUDGET - floor), 2 * BUDGET - floor)


@pytest.fixture
def apart(tiny):
    """A model whose second layer looks more sharply than its first, so that they want different budgets."""
    params = tiny(FAMILY)
    flat = nnx.to_flat_state(params.weights)
    sharper = [(path, leaf.replace(leaf[...] * 3) if path == ("layers", 1, "qkv") else leaf) for path, leaf in flat]
    return dataclasses.replace(params, weights=nnx.from_flat_state(sharper))


def best(score, count, sinks, recent):
    """The protected tokens and the best others of one head; ties go to the older."""
    at = np.arange(len(score))
    safe = (at < sinks) | (at >= len(score) - recent)
    return sorted(np.lexsort((at, -np.where(safe, np.inf, score)))[:count].tolist())


@pytest.mark.long
def test_prefixkv(apart):
    """The sizes by a search for the share of attention that fills the budget; one set of tokens for all heads."""
    params, tokens = apart, ids(TOKENS)
    policy = jaxkv.policy("prefixkv", budget=BUDGET, sinks=2, reserve=0)
    ours = held(jaxkv.prefill(params, tokens, policy=policy))
    weights = [each.mean(axis=(0, 1)).sum(axis=0) for each in attention(params, tokens)]  # [S] per layer
    low, high = 0.0, 1.0
    for turn in range(61):
        share = high if turn == 60 else (low + high) / 2
        sizes = []
        for each in weights:
            before = np.append(0, np.cumsum(-np.sort(-each) / each.sum())[:-1])
            sizes.append(min(3 + int((before < share).sum()), TOKENS))  # sinks and the last token come on top
        low, high = (share, high) if sum(sizes) < len(sizes) * BUDGET else (low, share)
    assert sum(sizes) == len(sizes) * BUDGET and len(set(sizes)) > 1
    for layer, each in enumerate(weights):
        assert ours[layer] == [best(each, sizes[layer], 2, 1)] * len(ours[layer]), layer


@pytest.mark.long
def test_cake(apart):
    """Entropy and variance of the window's attention share out the budget; mean + gamma variance chooses the tokens."""
    params, tokens, window = apart, ids(TOKENS), 4
    policy = jaxkv.policy("cake", budget=BUDGET, window=window, prefill_kernel=1, decode_recent=window, reserve=0)
    ours = held(jaxkv.prefill(params, tokens, policy=policy))  # how neighbours are pooled is SnapKV's
    seen = [each[:, :, -window:].astype(np.float64) for each in attention(params, tokens)]  # [Hk, G, W, S]
    preferences = []
    for each in seen:
        before = each[..., :-window]
        entropy = -(before * np.log(np.maximum(before, 1e-30))).sum()
        preferences.append(entropy ** (1 / 1.6) * before.var(axis=2, ddof=1).sum() ** (1 / 0.6))
    sizes = window + by_weight(preferences, len(seen) * (BUDGET - window))
    assert sizes.sum() == len(seen) * BUDGET and len(set(sizes)) > 1
    for layer, each in enumerate(seen):
        score = each.mean(axis=2) + 200 * each.var(axis=2, ddof=1)
        assert ours[layer] == [best(head, sizes[layer], 0, window) for head in score.mean(axis=1)], layer


@pytest.mark.long
def test_d2o(apart):
    """The evener a layer's attention, the more of the budget."""
    params, tokens = apart, ids(TOKENS)
    policy = jaxkv.policy("d2o", budget=BUDGET, sinks=2, prefill_recent=4, spare=0, spare_last=0)
    ours = held(jaxkv.prefill(params, tokens, policy=dataclasses.replace(policy, decode=None)))
    by_query = [each.sum(axis=2) for each in attention(params, tokens)]
    summed = [each.mean(axis=1) for each in by_query]
    spreads = [d2o.spread(each.reshape(-1, each.shape[-1])) for each in by_query]
    ratios = d2o.layer_ratios(np.array(spreads), 0.1, 0.1).sum(axis=0)
    exact = ratios / ratios.sum() * len(summed) * BUDGET
    sizes = np.floor(exact).astype(int)
    sizes[np.argsort(sizes - exact)[: len(summed) * BUDGET - sizes.sum()]] += 1
    assert len(set(sizes)) > 1
    for layer, each in enumerate(summed):
        assert ours[layer] == [best(head, sizes[layer], 2, 4) for head in each], layer


@pytest.mark.long
def test_merged_layers_are_those_of_a_row_alone(tiny):
    """A row's smaller budget merges what it merges alone, beside one whose layers hold their whole text for a while."""
    policy = jaxkv.policy("d2o", ratio=0.75, sinks=2, spare=0, spare_last=0)  # two layers, half of the text
    rows = [ids(70, 1), ids(45, 2)]
    beside, alone = (jaxkv.prefill(tiny(FAMILY), each, policy=policy) for each in (rows, rows[1]))
    assert held(beside, 1) == held(alone)
    for mine, own in zip(beside.views, alone.views, strict=True):
        for name in ("keys", "values"):
            sums = [np.asarray(getattr(each.by_head(), name))[row] for each, row in ((mine, 1), (own, 0))]
            at = [np.asarray(each.by_head().positions)[row] for each, row in ((mine, 1), (own, 0))]
            mine_, own_ = (np.where(p[..., None] >= 0, x, 0).sum(axis=1) for x, p in zip(sums, at, strict=True))
            np.testing.assert_allclose(mine_, own_, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_layers_that_are_spared_hold_the_text(tiny):
    """The first ones and the last, at decode and when a cache goes on too; the others share, and merge at each step."""
    params = tiny(FAMILY)
    policy = jaxkv.policy("d2o", budget=16, sinks=2, spare=1, spare_last=0)
    assert not policy.bounded and jaxkv.policy("d2o", budget=16, sinks=2, spare=0, spare_last=0).bounded
    begun = jaxkv.generate(params, ids(40), policy=policy, max_new_tokens=3, stop_tokens=()).cache
    after = jaxkv.generate(params, cache=begun, max_new_tokens=70, stop_tokens=()).cache
    again = jaxkv.generate(params, ids(30, 1), cache=after, max_new_tokens=3, stop_tokens=()).cache
    for cache in (begun, after, again):
        seen = int(cache.lengths[0])
        np.testing.assert_array_equal(np.asarray(cache.held())[:, 0], [[seen, seen], [16, 16]])
    none = jaxkv.policy("d2o", budget=16, sinks=2)  # of two layers three are spared
    assert (np.asarray(jaxkv.prefill(params, ids(40), policy=none).held()) == 40).all()


@pytest.mark.some(1)
@pytest.mark.parametrize("lazy", [[True, True], [True, False], [False, False]], ids=["all", "some", "none"])
def test_simlayerkv(apart, lazy):
    """Lazy layers hold sinks, the newest and the safeguard; all are equal where none is lazy, or all are."""
    params, tokens = apart, ids(TOKENS)
    last = [each[:, :, -1].mean(axis=1) for each in attention(params, tokens)]  # [Hk, S]
    newest = BUDGET // 2 - 2  # what the safeguard holds besides the sinks
    ends = [(each[:, :2].sum(1) + each[:, -newest:].sum(1)).mean() for each in last]
    assert ends[0] > ends[1]
    threshold = {2: ends[1] * 0.9, 1: (ends[0] + ends[1]) / 2, 0: ends[0] * 1.1}[sum(lazy)]
    policy = jaxkv.policy("simlayerkv", budget=BUDGET, threshold=float(threshold), sinks=2, prefill_recent=0)
    ours = held(jaxkv.prefill(params, tokens, policy=policy))
    sizes = guarded(np.where(lazy, 0, 1), safeguard=0.5) if sum(lazy) == 1 else [BUDGET] * len(last)
    for layer, each in enumerate(last):
        if lazy[layer]:
            assert ours[layer] == [[0, 1, *range(TOKENS - sizes[layer] + 2, TOKENS)]] * len(each)
        else:
            assert ours[layer] == [best(head, sizes[layer], 2, 0) for head in each]


@pytest.mark.long
@pytest.mark.parametrize("safeguard", [0.0, 0.5])
def test_one_budget_for_all(apart, safeguard):
    """global: every head its safeguard, and the best of all layers and heads together, up to a layer's ceiling."""
    params, tokens = apart, ids(TOKENS)
    policy = jaxkv.policy("global-h2o", budget=BUDGET, safeguard=safeguard, prefill_recent=4)
    policy = dataclasses.replace(policy, decode=None)
    ours = held(jaxkv.prefill(params, tokens, policy=policy))
    score = np.stack([each.sum(axis=2).mean(axis=1) for each in attention(params, tokens)])  # [L, Hk, S]
    score[..., -4:] = np.inf
    guard = max(int(safeguard * BUDGET), 1)
    rank = np.argsort(np.argsort(-score, axis=-1, kind="stable"), axis=-1)
    value = np.where(rank < guard, np.inf, score).astype(np.float64)
    layers, heads, _ = value.shape
    ceiling = 2 * BUDGET * heads
    for layer in range(layers):  # what a layer puts up
        line = value[layer].ravel()
        line[np.argsort(-line, kind="stable")[ceiling:]] = -1
    kept = np.zeros(value.size, bool)
    kept[np.argsort(-value.ravel(), kind="stable")[: layers * heads * BUDGET]] = True
    kept = kept.reshape(value.shape)
    assert len({int(each.sum()) for each in kept}) > 1
    assert ours == [[np.flatnonzero(head).tolist() for head in layer] for layer in kept]


@pytest.mark.long
@pytest.mark.parametrize("share", EVEN, ids=lambda share: share.kind)
def test_a_safeguard_of_all_is_an_even_share(tiny, share):
    """Then every head keeps its own best, in every block, and decodes as without a pool."""
    params = tiny(FAMILY)
    even = dataclasses.replace(jaxkv.policy("h2o", budget=16, block=20), allocate=Uniform())
    run = functools.partial(jaxkv.generate, params, [ids(55), ids(9, 1)], max_new_tokens=20, stop_tokens=())
    ours, theirs = run(policy=dataclasses.replace(even, allocate=share)), run(policy=even)
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    for row in range(2):
        assert held(ours.cache, row) == held(theirs.cache, row)


@pytest.fixture(scope="module")
def deep(goldens, tmp_path_factory):
    """A model of six layers, the tiny llama2's twice, each looking more sharply than the one below it."""
    source, folder = goldens / "tiny" / "llama2", tmp_path_factory.mktemp("deep")
    facts, weights = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    new = {name: weight for name, weight in weights.items() if ".layers." not in name}
    for layer, (name, weight) in itertools.product(range(6), weights.items()):
        old = f".layers.{layer % facts['num_hidden_layers']}."
        if old in name:
            new[name.replace(old, f".layers.{layer}.")] = weight * (1 + layer / 2 if "q_proj" in name else 1)
    save_file(new, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**facts, "num_hidden_layers": 6}))
    return jaxkv.load(folder)


@pytest.mark.long
@pytest.mark.parametrize("share", [Global(0.1, most=0.0), Prefix(), Cake(window=4)], ids=lambda share: share.kind)
def test_layers_that_are_cut_as_they_come_keep_the_same(deep, share):
    """What all of them at once would, one by one or in a loop, in each block of a prompt."""
    at_once = type("AtOnce", (type(share),), {"cascades": False})(
        **{field.name: getattr(share, field.name) for field in dataclasses.fields(share)}
    )
    policy = dataclasses.replace(jaxkv.policy("h2o", budget=16, block=20), decode=None)
    run = functools.partial(jaxkv.prefill, deep, [ids(38), ids(9, 1)])
    want = run(policy=dataclasses.replace(policy, allocate=at_once))
    assert len({len(layer[0]) for layer in held(want)}) > 1
    for scan in (False, True):
        got = run(policy=dataclasses.replace(policy, allocate=share), scan_layers=scan)
        for row in range(2):
            assert held(got, row) == held(want, row)


# ---- the line


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_long_decode_loses_no_slot(tiny, name):
    """300 tokens: the bytes and borders stay, segments don't overlap, sinks and newest stay; or all is added."""
    params, policy = tiny(FAMILY), jaxkv.policy(name, budget=16, **SMALL.get(name, {}))
    prompts = [ids(60), ids(40, 1)]
    begun = jaxkv.prefill(params, prompts, policy=policy)
    out = jaxkv.generate(params, prompts, policy=policy, max_new_tokens=300, stop_tokens=())
    line = out.cache.layers[0].line
    sizes = np.asarray(line.sizes)
    assert (sizes >= 1).all() and (np.asarray(line.offsets)[:, -1] <= line.total).all()
    for row in range(2):
        for layer in held(out.cache, row):
            for head in layer:
                assert len(head) == len(set(head)) and head[-1] == int(out.cache.lengths[row]) - 1
    if policy.decode is None:
        assert (np.asarray(out.cache.held()) == np.asarray(begun.held()) + 299).all()
    else:
        assert out.cache.nbytes == begun.nbytes and int(out.cache.held().sum()) == 16 * begun.held().size
        assert (np.asarray(out.cache.layers[0].line.offsets) == np.asarray(begun.layers[0].line.offsets)).all()


def test_a_view_is_the_layers_own():
    """What `view` cuts out and `written` puts back: every layer its slots, at the line's end too."""
    rng, batch, heads, layers, dim = np.random.default_rng(0), 2, 2, 3, 4
    sizes = np.array([[3, 5, 1, 2, 4, 1], [1, 1, 6, 3, 2, 3]])
    total, reach = 16, 9
    borders = np.concatenate([np.zeros((batch, 1), int), sizes.cumsum(1)], axis=1)
    entries = Entries(
        *(jnp.asarray(rng.normal(size=(batch, total, dim)), jnp.float32) for _ in range(2)),
        jnp.asarray(rng.integers(0, 99, (batch, total)), jnp.int32),
        {"mark": jnp.asarray(rng.normal(size=(batch, total)), jnp.float32)},
    )
    line = Pool(
        entries, jnp.asarray(borders, jnp.int32), jnp.asarray(borders[:, :-1] + rng.integers(0, sizes), jnp.int32)
    )
    places = placed(line, [{}] * layers, reach)
    views = opened(places)
    for number, view in enumerate(views):
        for row in range(batch):
            for head, positions in enumerate(heads_of(view, row)):
                own = slice(*borders[row, number * heads + head :][:2])
                np.testing.assert_array_equal(positions, np.asarray(line.positions)[row, own])
        assert int((view.positions >= 0).sum()) == sizes[:, number * heads : (number + 1) * heads].sum()

    def step(view):
        token = Written(*(jnp.full((batch, heads, dim), number) for number in (7.0, 8.0)))
        return view.changed(stats={"mark": view.stats["mark"] + 1}).aimed(view.offsets[:, :-1]).replaced(new=token)

    position = jnp.full((batch,), 100, jnp.int32)
    after = written(places, tuple(map(step, views)), position)[0].line
    slot = np.zeros((batch, total), bool)
    np.put_along_axis(slot, np.asarray(line.next_slot), True, axis=1)
    inside = np.arange(total) < borders[:, -1:]
    np.testing.assert_array_equal(after.keys, np.where(slot[..., None], 7, line.keys))
    np.testing.assert_array_equal(after.values, np.where(slot[..., None], 8, line.values))
    np.testing.assert_array_equal(after.positions, np.where(slot, 100, line.positions))
    np.testing.assert_array_equal(after.next_slot, borders[:, :-1])
    np.testing.assert_allclose(after.stats["mark"], np.asarray(line.stats["mark"]) + inside, rtol=1e-6)


@pytest.mark.long
def test_goes_on_with_more_text_and_with_everything(tiny):
    """A second prompt competes with what is there; under "full" nothing more is lost."""
    params = tiny(FAMILY)
    policy = jaxkv.policy("layer-defensivekv", budget=20, window=4, block=16)
    cache = jaxkv.prefill(params, ids(60), policy=policy)
    second = jaxkv.prefill(params, ids(30, 1), cache=cache)
    assert int(second.held().sum()) == 20 * second.held().size
    assert all(set(range(86, 90)) <= set(head) for layer in held(second) for head in layer), "the last prompt's window"
    before = np.asarray(second.held())
    out = jaxkv.generate(params, ids(10, 2), cache=second, policy=catalogue()["full"], max_new_tokens=9, stop_tokens=())
    assert (np.asarray(out.cache.held()) == before + 18).all()


@pytest.mark.long
def test_sliding_layers_keep_their_windows(tiny):
    """Gemma: its global layers share, the sliding ones hold what they always hold."""
    params = tiny("gemma3_text")
    run = functools.partial(jaxkv.generate, params, ids(60), max_new_tokens=20, stop_tokens=())
    out, plain = (run(policy=jaxkv.policy(name, budget=16)) for name in ("global-h2o", "h2o"))
    full = [i for i, spec in enumerate(params.config.specs) if spec.window is None]
    for index, (mine, theirs) in enumerate(zip(out.cache.layers, plain.cache.layers, strict=True)):
        assert in_line(mine) == (index in full)
        assert index in full or mine.slots == theirs.slots
    assert int(np.asarray(out.cache.held())[full].sum()) == 16 * np.asarray(out.cache.held())[full].size


def test_what_cannot_share(tiny):
    for changes, word in (
        ({"decode": jaxkv.policy("keydiff", budget=16, every=4).decode}, "one slot of its own head"),
        ({"prefill": jaxkv.policy("knorm", budget=16).prefill, "allocate": Prefix()}, "goes by attention"),
        ({"rope": "cache"}, "rope='text'"),
    ):
        with pytest.raises(BadValue, match=word):
            dataclasses.replace(jaxkv.policy("global-h2o", budget=16), **changes)
    with pytest.raises(BadValue, match=r"most=0\.5"):
        Global(most=0.5)


# ---- against the releases (tests/oracle/make_layers.py)


@pytest.fixture
def released(goldens, tiny):
    """The golden, and the model that it was made with."""
    golden, params = arrays(goldens / "policies" / "layers.npz"), tiny("llama2")
    flat = nnx.to_flat_state(params.weights)
    times: dict[tuple, float] = {("layers", layer, "qkv"): float(by) for layer, by in enumerate(golden["sharper"])}
    scaled = [(path, leaf.replace(leaf[...] * times[path]) if path in times else leaf) for path, leaf in flat]
    return golden, dataclasses.replace(params, weights=nnx.from_flat_state(scaled))


def gone_of(layer):
    """The positions that the next token overwrites in every head."""
    return np.asarray(layer.positions)[0, np.asarray(layer.next_slot)[0]].tolist()


def forced(params, policy, tokens):
    """The positions that every layer and head keeps after the prompt, and after each of the given tokens when what the
    next one overwrites is gone."""
    cache = jaxkv.prefill(params, tokens[:TOKENS], policy=policy)
    step = jax.jit(decode_logits, static_argnames=("config", "policy"))
    yield held(cache)
    for token in tokens[TOKENS:]:
        cache = dataclasses.replace(cache, pending=jnp.array([token], jnp.int32))
        cache, _ = step(params.weights, cache, jnp.array([True]), config=params.config, policy=policy)
        kept = []
        for layer in cache.views:
            heads = zip(heads_of(layer), gone_of(layer), strict=True)
            kept.append([sorted({*head.tolist()} - {-1, gone}) for head, gone in heads])
        yield kept


@pytest.mark.long
@pytest.mark.parametrize("size", [16, 28])
def test_cake_as_released(released, size):
    """Sizes of the layers under its cascade, and what they keep of the prompt and of 8 new tokens."""
    golden, params = released
    policy = jaxkv.policy("cake", budget=size + 1, window=8, decode_recent=8)  # and the token that comes
    for step, ours in enumerate(forced(params, policy, golden[f"cake/{size}/ids"])):
        for layer, heads in enumerate(ours):
            assert heads == golden[f"cake/{size}/step{step}/layer{layer}"].tolist(), (step, layer)


@pytest.mark.long
@pytest.mark.parametrize(("ratio", "mean"), [(0.53, 33), (0.75, 18)])
def test_prefixkv_as_released(released, ratio, mean):
    """Sizes of the layers, and what all of their heads keep of the prompt and of 8 new tokens."""
    golden, params = released
    policy = jaxkv.policy("prefixkv", budget=mean + 1)  # and the token that comes
    for step, ours in enumerate(forced(params, policy, golden["prefix/ids"])):
        for layer, heads in enumerate(ours):
            assert heads == [golden[f"prefix/{ratio}/step{step}/layer{layer}"].tolist()] * len(heads), (step, layer)
