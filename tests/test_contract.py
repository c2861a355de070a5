"""The cache rules of the design, for every registered policy.

Heads that share a pool keep as many entries together as equal heads, and each at least its safeguard.
By default every policy of the catalogue runs the lean `test_rules_of_the_family`, which compiles twice. The others run
on one policy of each way through the code that matters to them; on the rest they are marked slow.
"""

import dataclasses

import behaviour
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from behaviour import CHUNK, STEPS
from behaviour import generated as ran
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from letters import Letters
from ordered import changed, heads_of, pooled
from small import CORE, SMALL

import jaxkv
from jaxkv import run
from jaxkv.plan import CEILING
from jaxkv.policies import catalogue
from jaxkv.policies.catalogue import named
from jaxkv.store import Entries, Slots
from jaxkv.store.blocks import BlockCode
from jaxkv.store.cache import one_row
from jaxkv.store.entries import in_pieces
from jaxkv.store.fit import FIT

FAMILY = "llama3"
VOCAB = 100


def chiefly(*names: str, bounded: bool = False):
    """Every policy, or every one that evicts, as `name`; all but the named ones only where slow tests run."""
    found = [name for name, chosen in sorted(catalogue().items()) if chosen.evicts or not bounded]
    marked = [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in found]
    return pytest.mark.parametrize("name", marked)


def policy(name: str, budget: int = 16, **options):
    """The named policy at test size."""
    options = {**SMALL.get(name, {}), **options}
    return jaxkv.policy(name, **({"budget": budget} if named(name).evicts else {}), **options)


def ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def distinct(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(VOCAB)[:length].astype(np.int32)


def generated(params, prompt, chosen, steps=20, **options):
    return jaxkv.generate(params, prompt, policy=chosen, max_new_tokens=steps, stop_tokens=(), **options)


def entries(layer, row=0):
    """The positions held per head, in time order."""
    return [sorted(int(p) for p in head if p >= 0) for head in heads_of(layer, row)]


def guard(chosen, limit):
    """Entries that each head keeps where heads compete; all of its budget where they don't."""
    return int(chosen.allocate.guard(jnp.array([limit]), chosen.phases)[0]) if chosen.allocate.pooled else limit


def freed(chosen):
    """Entries per head that the last move of borders may have made room for."""
    moves = chosen.allocate.moves(jnp.array([0]), jnp.array([0]))
    return 0 if moves is None else -int(moves[0][0])


def even(layer):
    """A pool whose heads got equally many slots as the layer that it would be without competition."""
    if not pooled(layer):
        return layer
    begin, slots = int(layer.offsets[0, 0]), int(layer.sizes[0, 0])
    assert (np.asarray(layer.sizes) == slots).all() and (np.asarray(layer.offsets)[:, 0] == begin).all()
    own = slice(begin, begin + layer.heads * slots)
    split = lambda x: x[:, own].reshape(x.shape[0], layer.heads, slots, *x.shape[2:])  # noqa: E731
    entries = Entries(split(layer.keys), split(layer.values), split(layer.positions), {})
    return Slots(entries, layer.next_slot)


def poisoned(cache):
    """The cache with NaN in every empty slot."""
    return dataclasses.replace(cache, layers=changed(cache.layers, holed))


def holed(layer):
    """The layer with NaN in every empty slot."""
    hole = (layer.positions < 0)[..., None]
    if layer.codecs.pairs and FIT in layer.beside:  # it is read with other layers: what lies in its slots is no array
        lies = lambda x: (  # noqa: E731
            jnp.where(hole if x.ndim == 4 else hole[..., 0], jnp.nan, x) if x.dtype in ("f2", "f4") else x
        )
        keys, values = jax.tree.map(lies, (layer.entries.keys, layer.entries.values))
        return layer.replaced(entries=dataclasses.replace(layer.entries, keys=keys, values=values))
    stats = {k: jnp.where(hole[..., 0], jnp.nan, v) for k, v in layer.stats.items()}
    codes = {name: getattr(layer.entries, name) for name in ("keys", "values")}
    shared = {name: code for name, code in codes.items() if isinstance(code, BlockCode)}  # not to be encoded anew
    apart = {name: jnp.where(hole, jnp.nan, getattr(layer, name)) for name in codes if name not in shared}

    def lies(x):
        worst = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).max
        return jnp.where(hole.reshape(*hole.shape[:3], *(1,) * (x.ndim - 3)), jnp.asarray(worst, x.dtype), x)

    holes = {name: dataclasses.replace(code, slots=jax.tree.map(lies, code.slots)) for name, code in shared.items()}
    after = layer.changed(**apart, stats=stats)
    return after.replaced(entries=dataclasses.replace(after.entries, **holes))


def assert_rules(cache, chosen, row=0):
    """Never over budget, no position twice, protected entries there, nothing from the future."""
    seen = int(cache.lengths[row])
    if chosen.allocate.divides:
        assert_shared(cache, chosen, row)
    for index, layer in enumerate(cache.views):
        limit = int(cache.limits[index][row])
        over = chosen.decode.every if chosen.decode is not None and chosen.decode.every > 1 else 0
        each = entries(layer, row)
        if pooled(layer) and not chosen.allocate.divides:
            total = sum(map(len, each))
            assert chosen.decode is None or total <= layer.heads * (limit + over)
            if seen >= limit:
                reserved = chosen.prefill.reserved(np.int32(limit))
                assert total >= layer.heads * (limit - reserved - freed(chosen))
                assert min(map(len, each)) >= min(guard(chosen, limit), limit - reserved - freed(chosen))
        for head, held in enumerate(each):
            assert len(held) == len(set(held)) <= len(heads_of(layer, row)[head])
            assert all(0 <= p < seen for p in held)
            if chosen.decode is not None and not pooled(layer):
                assert len(held) <= limit + over
                if seen >= limit:
                    assert len(held) >= limit - chosen.prefill.reserved(np.int32(limit))
            for phase in chosen.phases:
                assert set(range(min(phase.protects.sinks, seen))) <= set(held)


def assert_shared(cache, chosen, row):
    """All layers together hold the budget, each no more than its ceiling, every head its safeguard."""
    limit, seen = int(cache.limits[0][row]), int(cache.lengths[row])
    views = [layer for layer in cache.views if pooled(layer)]
    held = np.array([[len(head) for head in entries(layer, row)] for layer in views])
    reserved = int(chosen.prefill.reserved(np.int32(limit)))
    if chosen.decode is not None:
        most = chosen.allocate.most or len(views)
        assert held.sum() <= held.size * limit and held.mean(axis=1).max() <= most * limit
    if seen >= limit:
        assert held.sum() >= held.size * (limit - reserved)
        assert held.min() >= min(guard(chosen, limit), limit - reserved)


def reserved(chosen, limit):
    """Slots of the budget that the prompt leaves free."""
    return 0 if chosen.prefill is None else chosen.prefill.reserved(limit)


def assert_filled(cache, chosen):
    """What a prompt longer than its budget leaves of its first row: all that it may, in time order."""
    limits, across = np.asarray(cache.limits)[:, 0], chosen.allocate.divides
    bounded = limits[limits < CEILING]
    assert not chosen.evicts or bounded.mean() == 16
    limits = np.minimum(limits, cache.lengths[0])
    limits, held = limits - reserved(chosen, limits), cache.held()[:, 0]
    assert int(held.sum()) == held.shape[1] * limits.sum(), "the prompt fills its budget"
    for layer, each, kept in zip(cache.views, held, limits.tolist(), strict=True):
        assert across or int(each.sum()) == kept * len(each), "every layer its own"
        for head in heads_of(layer):
            entries = head[head >= 0]
            assert len(entries) == kept or pooled(layer), "each head its own"
            assert (np.diff(entries) > 0).all(), "kept entries are in time order"
            behind = layer.codecs.apart and "pages" not in layer.beside
            empty = head[: len(head) - len(entries)] if behind else head[len(entries) :]
            assert (empty < 0).all(), (
                "behind the empty slots, or before them where blocks or pages begin with the first"
            )


@pytest.mark.long
@chiefly("h2o", "dapq-longflow", "adakv-h2o", bounded=True)
@pytest.mark.parametrize("block", [7, pytest.param(2048, marks=pytest.mark.slow)])
def test_budget_holds_at_prefill_and_decode(tiny, name, block):
    params, chosen = tiny(FAMILY), policy(name, block=block)
    cache = jaxkv.prefill(params, ids(50), policy=chosen)
    assert_filled(cache, chosen)
    assert_rules(cache, chosen)
    out = generated(params, ids(50), chosen, 40)
    assert_rules(out.cache, chosen)
    if chosen.decode is not None:
        over = chosen.decode.every if chosen.decode.every > 1 else 0
        limited = [
            layer.slots for layer, limit in zip(out.cache.views, out.cache.limits, strict=True) if limit[0] < CEILING
        ]
        assert chosen.allocate.divides or set(limited) == {in_pieces(16 + over)}
        recent = chosen.decode.protects
        count = int(recent.recents(jnp.array([16]))[0])
        for layer in out.cache.views:
            for held in entries(layer):
                assert set(range(89 - count, 89)) <= set(held)


@pytest.mark.some(1)
@chiefly("streaming-llm", "snapkv", "dapq-longflow", "adakv-h2o", bounded=True)
def test_enough_budget_is_the_full_cache(tiny, name):
    params, steps = tiny(FAMILY), 16
    prompt = ids(32)  # sizes that need no rounding up
    decode, store = policy(name).decode, policy(name).store
    full = generated(params, prompt, dataclasses.replace(policy("full"), store=store), steps)
    chosen = policy(name, budget=32 + (steps if decode else 0) - (decode.every if decode and decode.every > 1 else 0))
    chosen = dataclasses.replace(chosen, prefill=dataclasses.replace(chosen.prefill, reserve=0))
    ours = generated(params, prompt, chosen, steps)
    assert ours.tokens.tolist() == full.tokens.tolist()
    for mine, theirs in zip(map(even, ours.cache.views), full.cache.views, strict=True):
        assert mine.slots == theirs.slots, "no more than they need"
        assert np.array_equal(np.asarray(mine.positions), np.asarray(theirs.positions))
        held = np.asarray(mine.positions)[..., None] >= 0
        looked = chosen.extra > 0 and decode is not None and decode.score.remembers  # pseudo tokens run all the same,
        looked = looked and not chosen.prefill.observe.drafts  # but where they would be drafted
        if chosen.allocate.pooled or looked:  # attention reads another shape
            np.testing.assert_allclose(np.where(held, mine.keys, 0), np.where(held, theirs.keys, 0), atol=2e-5)
        elif chosen.rope == "text":  # bit for bit, hidden states and all
            assert np.array_equal(np.where(held, mine.keys, 0), np.where(held, theirs.keys, 0))
        np.testing.assert_allclose(np.where(held, mine.values, 0), np.where(held, theirs.values, 0), atol=2e-5)


@pytest.mark.long
@chiefly("streaming-llm", "dapq-longflow", "adakv-h2o")
@pytest.mark.parametrize("size", [{"budget": 16}, pytest.param({"ratio": 0.5}, marks=pytest.mark.slow)], ids=str)
def test_padding_and_batch_change_nothing(tiny, name, size):
    params = tiny(FAMILY)
    options = {**SMALL.get(name, {}), "block": 16}
    chosen = jaxkv.policy(name, **options, **(size if catalogue()[name].evicts else {}))
    # leverage's prompts have no token twice: its keys before RoPE are the same in the first layer, and rounding chooses
    some = distinct if name == "leverage" else ids
    prompts, alone = [some(45, 1), some(9, 2), some(30, 3), some(17, 4)], (1, 2)
    if "ratio" in size:
        prompts, alone = prompts[:2], (1,)
    together = generated(params, prompts, chosen, 24)
    turned = generated(params, prompts[::-1], chosen, 24)  # other neighbours, compiled already
    others = [(turned, len(prompts) - 1 - row, row) for row in range(len(prompts))]
    others += [(generated(params, prompts[row], chosen, 24), 0, row) for row in alone]  # each compiles on its own
    for other, at, row in others:
        assert together.tokens[row].tolist() == other.tokens[at].tolist()
        for mine, theirs in zip(together.cache.views, other.cache.views, strict=True):
            assert entries(mine, row) == entries(theirs, at)


@chiefly("dapq-longflow")
def test_one_compilation_per_shape(tiny, name):
    params, chosen = tiny(FAMILY), policy(name)
    generated(params, [ids(40, 1), ids(33, 2)], chosen, 9)
    before = [program._cache_size() for program in run.PROGRAMS]
    generated(params, [ids(40, 3), ids(21, 4)], chosen, 9)
    assert [program._cache_size() for program in run.PROGRAMS] == before


@pytest.mark.some(1)
@chiefly("full", "streaming-llm", "h2o", "adakv-h2o")
def test_scan_equals_stepping_by_hand(tiny, name):
    params, chosen = tiny(FAMILY), policy(name)
    whole = generated(params, ids(40), chosen, 13)
    lettered = dataclasses.replace(params, tokenizer=Letters())
    pieces = jaxkv.stream(lettered, ids(40), policy=chosen, max_new_tokens=13, stop_tokens=())
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
    for mine, theirs in zip(cache.views, whole.cache.views, strict=True):
        assert entries(mine) == entries(theirs)


@pytest.mark.some(2)
@chiefly("snapkv", "h2o", "adakv-h2o", "keydiff", "scope")
def test_a_row_that_goes_on_is_not_cut_before_its_text_comes(tiny, name):
    """A longer prompt beside it begins blocks before, of which the row has only padding; it may hold more than its
    budget then."""
    params, chosen = tiny(FAMILY), policy(name, block=16)
    cache = generated(params, [ids(75), ids(30, 1)], chosen, 9).cache
    more = [ids(4, 2), ids(25, 3)]
    told = []
    both = generated(params, more, None, 6, cache=cache, progress=lambda *done: told.append(done))
    blocks = [done for what, *done in told if what == "prefill"]
    assert blocks == [[number, len(blocks)] for number in range(1, len(blocks) + 1)]
    for row in (0, 1):
        alone = generated(params, [more[row]], None, 6, cache=one_row(cache, row))
        assert alone.tokens[0].tolist() == both.tokens[row].tolist()
        for mine, theirs in zip(alone.cache.views, both.cache.views, strict=True):
            assert entries(mine) == entries(theirs, row)


@pytest.mark.some(1)
@chiefly("snapkv", "h2o", "adakv-h2o", "keepkv")
def test_save_and_restore_equals_going_on(tiny, name, tmp_path):
    params, chosen = tiny(FAMILY), policy(name)
    out = generated(params, [ids(40), ids(12, 1)], chosen, 9)  # compiled by the test before; the steps below as well
    jaxkv.save(out.cache, tmp_path / "cache")
    restored = jaxkv.restore(tmp_path / "cache", params)
    assert restored.policy == out.cache.policy
    one = generated(params, None, None, 8, cache=out.cache)
    two = generated(params, None, None, 8, cache=restored)
    assert one.tokens.tolist() == two.tokens.tolist()
    for a, b in zip(jax.tree.leaves(one.cache), jax.tree.leaves(two.cache), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.some(1)
@chiefly("streaming-llm", "snapkv", "dapq-longflow", "adakv-h2o")
def test_empty_slots_are_never_read(tiny, name):
    params, chosen = tiny(FAMILY), policy(name, budget=32)
    cache = generated(params, [ids(20), ids(9, 1)], chosen, 4).cache

    bad = poisoned(cache)
    for prompt in (None, [ids(5, 5), ids(30, 6)]):
        clean, dirty = (generated(params, prompt, None, 8, cache=c) for c in (cache, bad))
        assert clean.tokens.tolist() == dirty.tokens.tolist()
        for a, b in zip(clean.cache.views, dirty.cache.views, strict=True):
            assert np.array_equal(np.asarray(a.positions), np.asarray(b.positions))


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_rules_of_the_family(tiny, name):
    """Budget, order, sinks and recents; rows that don't depend on their neighbours; empty slots that are never read.

    And what is recorded of the same prompts: the programs are compiled once for both.
    """
    params, chosen = tiny(FAMILY), behaviour.policy("tiny", name, 20)
    seed, before = behaviour.record("tiny", name, 20) or (0, None)
    prompts = behaviour.prompts("tiny", seed)
    first, whole = jaxkv.prefill(params, prompts, policy=chosen, room=STEPS + 1), ran(params, prompts, chosen)
    compiled = [program._cache_size() for program in run.PROGRAMS]
    for cache in (first, whole.cache):
        for row in range(len(prompts)):
            assert_rules(cache, chosen, row)
    if before is not None:
        behaviour.assert_same(behaviour.seen(first, whole), before)
    assert_filled(first, chosen)

    steps = STEPS if chosen.decode is None else CHUNK  # other slots for other numbers of tokens, where nothing goes
    out = ran(params, prompts, chosen, steps)
    cache = out.cache
    assert out.tokens.tolist() == whole.tokens[:, : steps + 1].tolist()
    for row in range(len(prompts)):
        assert_rules(cache, chosen, row)
        mean = np.mean([len(held) for layer in cache.views for held in entries(layer, row)])
        assert out.stats.kept[row] == pytest.approx(mean)
        assert out.stats.evicted[row] == pytest.approx(len(prompts[row]) + steps - mean)
    for layer, limit in zip(cache.views, np.asarray(cache.limits)[:, 0], strict=True):
        kept, shared = int(min(limit, 45) - reserved(chosen, limit)), pooled(layer)
        new = 0 if chosen.decode is not None else steps
        if shared and not chosen.allocate.divides:
            assert int(layer.held()[0].sum()) >= (kept + new - freed(chosen)) * layer.heads
        for held, few in zip(entries(layer), entries(layer, 1), strict=True):
            assert few == list(range(3 + steps)) and (shared or len(held) >= kept)
            if chosen.decode is None:
                assert (shared or len(held) == kept + steps) and held[-steps:] == list(range(45, 45 + steps))
            else:
                recents = int(chosen.decode.protects.recents(jnp.array([16]))[0])
                assert set(range(45 + steps - recents, 45 + steps)) <= set(held)

    other = ran(params, [prompts[1], prompts[2], behaviour.prompts("tiny", seed + 1)[0]], chosen, steps)
    for mine, its in ((0, 1), (1, 2)):
        assert other.tokens[mine].tolist() == out.tokens[its].tolist()
        for ours, theirs in zip(other.cache.views, cache.views, strict=True):
            assert entries(ours, mine) == entries(theirs, its)
    spares = chosen.evicts and int(first.limits.max()) >= CEILING  # layers that have other slots as well
    assert spares or [program._cache_size() for program in run.PROGRAMS] == compiled
    if chosen.decode is None:
        return  # from here on it is the full cache's code
    clean, dirty = (behaviour.generated(params, None, None, CHUNK, cache=each) for each in (cache, poisoned(cache)))
    assert clean.tokens.tolist() == dirty.tokens.tolist()
    for mine, theirs in zip(clean.cache.views, dirty.cache.views, strict=True):
        assert np.array_equal(np.asarray(mine.positions), np.asarray(theirs.positions))


@chiefly(bounded=True)
def test_rules_hold_for_generated_cases_of_the_family(tiny, name):
    rng = np.random.default_rng(sorted(catalogue()).index(name))
    for budget, block in ((9, 8), (13, 20), (24, 20)):
        params, chosen = tiny(FAMILY), policy(name, budget=budget, block=block)
        prompts = [ids(int(length), i) for i, length in enumerate(rng.integers(1, 45, 2))]
        out = generated(params, prompts, chosen, 10)
        for row in range(2):
            assert_rules(out.cache, chosen, row)


@pytest.mark.long
@given(
    name=st.sampled_from([name for name in CORE if name != "full"]),
    budget=st.sampled_from([9, 13, 24]),
    block=st.sampled_from([8, 20]),
    lengths=st.lists(st.integers(1, 44), min_size=2, max_size=2),
    seed=st.integers(0, 99),
)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_rules_hold_for_generated_cases(tiny, name, budget, block, lengths, seed):
    params, chosen = tiny(FAMILY), policy(name, budget=budget, block=block)
    prompts = [ids(length, seed + i) for i, length in enumerate(lengths)]
    out = generated(params, prompts, chosen, 10)
    for row in range(2):
        assert_rules(out.cache, chosen, row)
