"""Speculative decoding: the same text as plain decoding, the same cache, the same distribution."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import Letters
from small import SMALL

import jaxkv
from jaxkv import cli, run
from jaxkv.attend import LayerIn, decode_layer
from jaxkv.errors import BadValue
from jaxkv.evaluation import texts
from jaxkv.models import AttentionSpec
from jaxkv.models.rope import Rope
from jaxkv.policies import catalogue
from jaxkv.prefilling import Prefilling
from jaxkv.prompts import rows_of
from jaxkv.request import Execution
from jaxkv.run import DecodeState, model_of
from jaxkv.sampling import Sampler
from jaxkv.sharding.layout import ONE_DEVICE
from jaxkv.speculative import AASD, Conditional, DraftModel, PromptLookup, SelfDraft, gate
from jaxkv.speculative.attend import check, commit, steady, tree_layer
from jaxkv.speculative.context import begun, expecting, extended, match, slid
from jaxkv.speculative.method import Start
from jaxkv.speculative.rounds import Drafting, speculate
from jaxkv.speculative.session import Session
from jaxkv.speculative.tree import ABSENT, Shape, Tree, chain, lineage, placed, pruned, sees, walk
from jaxkv.speculative.verify import follows
from jaxkv.store import EMPTY, KVCache, Slots
from jaxkv.store import slots as stores

FAMILY = "llama3"
SHOWN = ["full", "longflow", "streaming-llm", "streaming-llm/text", "dapq", "dapq-longflow"]
FLAGSHIP = "dapq-longflow"  # most tests run this one alone, so that they share compiled programs
CODED = "laq-h2o-int4"
LOW = ["kv-adaquant", "rotatekv", "think", "leank", "cskv", "mustafar", "qpruning"]  # some tokens in full precision
IN_CODES = {
    "int4": {"keys": {"kind": "int", "bits": 4}, "values": {"kind": "int", "bits": 4}},
    "fp8-keys": {"keys": {"kind": "fp8"}},
    "windows": {"keys": {"kind": "int", "bits": 4}, "values": {"kind": "int", "bits": 4}, "residual": 3, "initial": 2},
    "by-channel": {
        "keys": {"kind": "int-by-channel", "bits": 4, "tokens": 4}, "values": {"kind": "int", "bits": 4}, "residual": 8,
    },
    "gear": {
        "keys": {"kind": "gear", "tokens": 8}, "values": {"kind": "gear", "tokens": 8, "by": "token"}, "residual": 8,
    },
}  # fmt: skip


def slow(*values):
    """A case that is left out by default, for what it compiles."""
    return pytest.param(*values, marks=pytest.mark.slow)


def policy(name: str, budget: int = 24, **options):
    """The named policy at test size; "name/text" is the one with positions in the text, "name+int4" with such codes."""
    name, _, codes = name.partition("+")
    name, _, rope = name.partition("/")
    options = {**SMALL.get(name, {}), **({"rope": rope} if rope else {}), **options}
    options |= {"store": IN_CODES[codes]} if codes else {}
    return jaxkv.policy(name, **({"budget": budget} if catalogue()[name].evicts else {}), **options)


def no_draft(*_):
    raise AssertionError("no policy here looks ahead")


def ids(length: int, seed: int = 0) -> np.ndarray:
    """Few different tokens, so that much of the text stood before."""
    return np.random.default_rng(seed).integers(3, 12, length).astype(np.int32)


BATCH = [ids(60, 1), ids(33, 2), ids(41, 3)]
WIDE = AASD(depth=4, siblings=(2, 1), low=1.0, fallback=False)


def both(params, prompts, chosen, method, steps, **options):
    """Plain and speculative decoding of the same prompts."""
    options = {"stop_tokens": (), **options}
    plain = jaxkv.generate(params, prompts, policy=chosen, max_new_tokens=steps, **options)
    fast = jaxkv.generate(params, prompts, policy=chosen, max_new_tokens=steps, speculative=method, **options)
    return plain, fast


def assert_same_cache(plain, fast):
    """Slots, positions, next slots and statistics as if every token had come alone."""
    assert plain.lengths.tolist() == fast.lengths.tolist() and plain.pending.tolist() == fast.pending.tolist()
    for one, other in zip(plain.layers, fast.layers, strict=True):
        assert np.array_equal(one.positions, other.positions)
        assert np.array_equal(one.next_slot, other.next_slot)
        live = np.asarray(one.positions) >= 0
        for name in one.stats:
            np.testing.assert_allclose(
                np.asarray(one.stats[name])[live], np.asarray(other.stats[name])[live], atol=1e-3
            )
        for name, mine, theirs in (("keys", one.keys, other.keys), ("values", one.values, other.values)):
            near = np.isclose(np.asarray(mine)[live], np.asarray(theirs)[live], rtol=1e-7, atol=1e-3)
            codec = getattr(one.codecs, name)  # rounding moves a number to the next code, in gear its block along
            least = 1.0 if codec.plain else 0.99 if codec.kind == "gear" else 0.998
            assert near.mean() >= least, f"{name}: {near.mean():.4%} alike"


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name",
    [
        "full",
        FLAGSHIP,
        CODED,
        "full+by-channel",
        *map(slow, ["kivi", "squat", "gear"]),
        *map(slow, ["longflow", "streaming-llm", "streaming-llm/text", "dapq", "h2o", *LOW]),
    ],
)
def test_greedy_equals_plain_decoding(tiny, name):
    """128 tokens of a batch whose rows accept different lengths; AASD drafts siblings everywhere, so that all occur."""
    plain, fast = both(tiny(FAMILY), BATCH, policy(name), WIDE, 128)
    assert fast.tokens.tolist() == plain.tokens.tolist()
    assert_same_cache(plain.cache, fast.cache)
    told = fast.stats.speculation
    assert told.trees > 30 and told.acceptance_length > 1.05, "drafts were tried, and some were right"
    assert told.departed == 0


@pytest.mark.long
def test_drafts_enter_with_what_a_decode_score_reads_of_the_model(tiny):
    """Its output matrix, in the tree and in the drafter's steps; these are the model's own, so that all is right."""
    decode = {
        "observe": {"kind": "current-query"},
        "score": {"kind": "scaled", "by": "output-share", "of": {"kind": "accumulated-attention"}},
        "select": {"recent": 4},
    }
    chosen = jaxkv.policy("vatp", budget=24, sinks=2, decode=decode)
    method = SelfDraft(chosen, depth=3, fallback=False)
    plain, fast = both(tiny(FAMILY), BATCH[:1], chosen, method, 25)
    assert fast.tokens.tolist() == plain.tokens.tolist()
    assert_same_cache(plain.cache, fast.cache)
    assert fast.stats.speculation.acceptance_length == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHOWN, "h2o", "tova", "knorm"])
@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "qwen3"])
def test_greedy_equals_plain_decoding_in_every_family(tiny, family, name):
    if (family, name) == ("gemma3_text", "knorm"):
        pytest.skip("its keys are normalised and so equally long: rounding alone says which of them goes")
    params = tiny(family)
    for seed in range(3):
        prompts = [ids(length, 10 * seed + length) for length in (50, 23, 37, 64)]
        for method in (PromptLookup(fallback=False), AASD(depth=4, low=1.0, fallback=False)):
            plain, fast = both(params, prompts, policy(name), method, 128)
            assert fast.tokens.tolist() == plain.tokens.tolist()
            assert_same_cache(plain.cache, fast.cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_greedy_equals_plain_decoding_on_a_real_model(smollm2, name):
    """128 tokens of eight prompts in two batches; where a row differs, its logits must agree to rounding there."""
    paragraphs = texts.paragraphs()
    asked = [f"{paragraphs[at]}\n\n{paragraphs[at + 1]}\n\nRepeat the text." for at in range(0, 8, 2)]
    asked += [f"{paragraphs[at]}\n\n{paragraphs[at + 1]}\n\nWho is in it?" for at in range(1, 9, 2)]
    rows = [rows_of([{"role": "user", "content": text}], smollm2.tokenizer, 49152)[0][0] for text in asked]
    for batch in (rows[:4], rows[4:]):
        plain, fast = both(smollm2, batch, policy_of_size(name), AASD(), 128)
        for row, prompt in enumerate(batch):
            differ = np.flatnonzero(plain.tokens[row] != fast.tokens[row])
            if differ.size:
                gap = logit_gap(smollm2, policy_of_size(name), prompt, plain.tokens[row], fast.tokens[row], differ[0])
                print(f"{name}: row {row} differs from token {differ[0]} on; logits {gap:.2g} apart")
                assert gap < 1e-3


def policy_of_size(name: str):
    name, _, rope = name.partition("/")
    return jaxkv.policy(name, **({} if name == "full" else {"budget": 256}), **({"rope": rope} if rope else {}))


def logit_gap(params, chosen, prompt, mine, theirs, at) -> float:
    """How far apart the logits of two tokens are after the text that both share, decoded plainly."""
    shared = mine[:at].tolist()
    cache = jaxkv.prefill(params, prompt, policy=chosen)
    for token in shared[:-1]:
        cache = jaxkv.generate(params, [token], cache=cache, max_new_tokens=1, stop_tokens=()).cache
    row = jnp.array([shared[-1]], jnp.int32)
    states = [LayerIn(layer, cache.limits[i]) for i, layer in enumerate(cache.layers)]
    model = model_of(params.config, params.weights)

    def attend(*given):
        return decode_layer(chosen, cache.lengths, ONE_DEVICE, None, *given)

    hidden, _ = model(row[:, None], states, attend)
    logits = np.asarray(model.logits(hidden[:, 0]))[0]
    return float(abs(logits[mine[at]] - logits[theirs[at]]))


def grown(shape: Shape, seed: int, batch: int = 2, gaps: float = 0.2) -> Tree:
    """A random tree: parents anywhere in the depth above, some nodes absent, siblings with different tokens."""
    rng = np.random.default_rng(seed)
    tokens = np.zeros((batch, shape.nodes), np.int32)
    parents = np.zeros((batch, shape.nodes), np.int32)
    for row in range(batch):
        tokens[row] = rng.permutation(90)[: shape.nodes] + 3
        for node in range(1, shape.nodes):
            above = int(shape.depths[node]) - 1
            parents[row, node] = shape.first(above) + rng.integers(1 if above == 0 else shape.widths[above - 1])
        tokens[row, 1:][rng.random(shape.nodes - 1) < gaps] = ABSENT
    return Tree(jnp.asarray(tokens), jnp.asarray(parents))


WIDTHS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@pytest.mark.long
@given(widths=WIDTHS, seed=st.integers(0, 10**6), left=st.integers(0, 6))
@settings(max_examples=12, deadline=None)
def test_every_tree_is_walked_as_its_nodes_stand(widths, seed, left):
    """lineage, sees, pruned and walk against plain loops over the nodes."""
    shape = Shape(tuple(widths))
    tree = grown(shape, seed)
    lefts = jnp.array([left, left + 2])
    cut = pruned(shape, tree, lefts)
    paths = np.asarray(lineage(shape, cut))
    looks = np.asarray(sees(shape, jnp.asarray(paths)))
    tokens, parents = np.asarray(cut.tokens), np.asarray(cut.parents)
    after = np.random.default_rng(seed + 1).choice(tokens[tokens >= 0] if (tokens >= 0).any() else [5], tokens.shape)
    nodes, follow = (np.asarray(x) for x in walk(shape, cut, jnp.asarray(after.astype(np.int32))))
    for row in range(2):
        for node in range(shape.nodes):
            line = [node]
            while line[-1]:
                line.append(int(parents[row, line[-1]]))
            assert set(np.flatnonzero(looks[row, node])) == set(line)
            assert [p for p in paths[row, node] if p >= 0] == line[::-1]
            original = int(tree.tokens[row, node])
            whole = all(int(tree.tokens[row, p]) >= 0 for p in line)
            usable = whole and len(line) - 1 < int(lefts[row])
            assert tokens[row, node] == (original if usable else ABSENT)
        at, expected = 0, [0]
        while True:
            right = [n for n in range(1, shape.nodes)
                     if parents[row, n] == at and tokens[row, n] == after[row, at] and tokens[row, n] >= 0]  # fmt: skip
            if not right:
                break
            at = right[0]
            expected.append(at)
        assert [n for n in nodes[row] if n >= 0] == expected
        assert [t for t in follow[row] if t >= 0] == [after[row, n] for n in expected]


def rooted(nodes: int) -> list[tuple[int, ...]]:
    """Every ordered tree of so many nodes: the parents of nodes 1, 2, ... counted depth by depth."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, nodes):
        found = [(*above, parent) for above in found for parent in range(max(above, default=0), node)]
    return found


def planted(shape: Shape, trees: list[tuple[int, ...]], seed: int) -> Tree:
    """One tree a row, its nodes in columns that chance takes; the others are absent."""
    rng = np.random.default_rng(seed)
    tokens = np.full((len(trees), shape.nodes), ABSENT, np.int32)
    parents = np.zeros((len(trees), shape.nodes), np.int32)
    tokens[:, 0] = 0
    for row, above in enumerate(trees):
        free = [[0], *(shape.first(depth) + rng.permutation(shape.width) for depth in range(1, shape.depth + 1))]
        free, places = [list(columns) for columns in free], [0]
        for number, parent in enumerate(above, 1):
            places.append(int(free[int(shape.depths[places[parent]]) + 1].pop()))
            tokens[row, places[-1]], parents[row, places[-1]] = number, places[parent]
    return Tree(jnp.asarray(tokens), jnp.asarray(parents))


SPEC = AttentionSpec(4, 2, 8, scale=8**-0.5, window=None, softcap=None, rope=Rope(10_000.0))
SLIDING = dataclasses.replace(SPEC, window=9, softcap=5.0)
SIZE = 6  # nodes of the largest trees of which there is every one
EVERY = [tree for nodes in range(1, SIZE + 1) for tree in rooted(nodes)]
LEVEL = Shape((SIZE - 1,) * (SIZE - 1))
ROWS = len(EVERY)


def drawn(rng, *lead: int) -> list[jax.Array]:
    """Query, key and value of some tokens."""
    return [jnp.asarray(rng.normal(size=(*lead, heads, 8)).astype(np.float32)) for heads in (4, 2, 2)]


@functools.cache
def programs(chosen, spec, shape):
    """One plain step of a layer, a tree's pass over it, and the writing of what was accepted, all compiled."""

    @jax.jit
    def step(layer, limits, position, *given):
        context, after = decode_layer(chosen, position, ONE_DEVICE, None, spec, *given, LayerIn(layer, limits))
        return context[:, 0], after.cache

    @jax.jit
    def whole(layer, limits, first, tree, *given):
        spot = placed(shape, tree, first)
        context, branches = tree_layer(chosen, spot, ONE_DEVICE, None, spec, *given, LayerIn(layer, limits))
        return context, spot, branches

    return step, whole, jax.jit(commit)


def assert_paths_come_one_by_one(chosen, spec, shape, tree, seed):
    """Every node's context, and the cache after its path alone, against plain steps along the path, in a layer whose
    rows hold different numbers of tokens, under different limits; the last row has finished."""
    rng, rows = np.random.default_rng(seed), np.arange(ROWS)
    step, whole, written = programs(chosen, spec, shape)
    slots = chosen.budget if chosen.decode else spec.window or 48  # without eviction room for all that is added
    limits = jnp.asarray(rng.integers(min(10, slots), slots + 1, ROWS).astype(np.int32))
    beside = chosen.store.beside(ROWS, 2, 8, jnp.float32)
    layer = stores.empty(ROWS, 2, slots, 8, jnp.float32, chosen.stats, chosen.store, beside)
    lengths = rng.integers(0, 41, ROWS)
    for at in range(int(lengths.max())):
        position = jnp.asarray(np.where(at < lengths, at, EMPTY).astype(np.int32))
        layer = step(layer, limits, position, *drawn(rng, ROWS, 1))[1]
    layer = layer.fitted({}, looks=False)
    first = jnp.asarray(np.where(rows < ROWS - 1, lengths, EMPTY).astype(np.int32))
    tree = pruned(shape, tree, steady(chosen, first, jnp.full(ROWS, shape.depth + 1, jnp.int32)))
    given = drawn(rng, ROWS, shape.nodes)
    context, spot, branches = whole(layer, limits, first, tree, *given)
    positions, parents = np.asarray(spot.positions), np.asarray(tree.parents)

    steps: list[Slots] = []
    for node in range(shape.nodes):
        before = _each_after(steps, parents[:, node]) if node else layer
        alone, after = step(before, limits, positions[:, node], *(x[:, node : node + 1] for x in given))
        steps.append(after)
        there = positions[:, node] >= 0
        np.testing.assert_allclose(np.asarray(context)[there, node], np.asarray(alone)[there], atol=1e-5)
        count = jnp.where(first >= 0, jnp.sum(spot.paths[:, node] >= 0, axis=1, dtype=jnp.int32), 0)
        taken = written(layer, branches, spot.paths[:, node], count, first)
        assert_same_layer(after, taken, there | (rows == ROWS - 1))


def _each_after(steps: list[Slots], node: np.ndarray) -> Slots:
    """Each row's layer as it was after its node."""
    rows = np.arange(len(node))
    return jax.tree.map(lambda *each: jnp.asarray(np.stack(list(map(np.asarray, each)))[node, rows]), *steps)


def assert_same_layer(plain, fast, rows):
    """The rows' slots, positions, statistics and next slots are the same; empty slots may hold anything."""
    assert np.array_equal(np.asarray(plain.positions)[rows], np.asarray(fast.positions)[rows])
    assert np.array_equal(np.asarray(plain.next_slot)[rows], np.asarray(fast.next_slot)[rows])
    live = (np.asarray(plain.positions) >= 0) & rows[:, None, None]
    pairs = list(zip(*(jax.tree.leaves((x.entries.keys, x.entries.values)) for x in (plain, fast)), strict=True))
    if not plain.codecs.apart and live.any():  # a block is rounded as it becomes: a number may be the next one
        for one, other in zip((plain.keys, plain.values), (fast.keys, fast.values), strict=True):
            assert np.isclose(np.asarray(one)[live], np.asarray(other)[live], atol=1e-5).mean() > 0.999
    if not plain.codecs.apart:
        pairs = []
    for name, state in plain.beside.items():
        for mine, theirs in zip(*(jax.tree.leaves(x) for x in (state, fast.beside[name])), strict=True):
            np.testing.assert_allclose(np.asarray(mine)[rows], np.asarray(theirs)[rows], atol=1e-5)
    for mine, theirs in [*pairs, *((plain.stats[name], fast.stats[name]) for name in plain.stats)]:
        np.testing.assert_allclose(np.asarray(mine)[live], np.asarray(theirs)[live], atol=1e-5)


LAYERS = [
    *[(name, SPEC) for name in ("full", "streaming-llm", "h2o", FLAGSHIP, CODED, "full+int4", "h2o+windows")],
    *[(name, SPEC) for name in ("full+by-channel", "full+gear")],
    ("full", SLIDING),
    *[slow(name, SPEC) for name in ("longflow", "streaming-llm/text", "dapq", "knorm", "streaming-llm+fp8-keys")],
    *[slow(name, SPEC) for name in ("full+windows", "streaming-llm+windows")],
    slow("tova", SLIDING),
]


@pytest.mark.some(1)
@pytest.mark.parametrize("name, spec", LAYERS)
@pytest.mark.parametrize("seed", range(3))
def test_every_tree_of_six_nodes_equals_its_paths_token_by_token(name, spec, seed):
    assert_paths_come_one_by_one(policy(name, 16), spec, LEVEL, planted(LEVEL, EVERY, seed), seed)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["full", FLAGSHIP, slow("streaming-llm")])
@pytest.mark.parametrize("widths", [(1, 1, 1, 1, 1), (3, 1, 2), slow((4,)), slow((1, 3, 2))])
def test_trees_of_uneven_shapes_equal_their_paths_token_by_token(name, widths):
    shape = Shape(widths)
    for seed in range(3):
        tree = pruned(shape, grown(shape, seed, ROWS), jnp.arange(ROWS, dtype=jnp.int32) % 7 + 1)
        assert_paths_come_one_by_one(policy(name, 16), SPEC, shape, tree, seed)


@pytest.mark.long
def test_nothing_is_compiled_again_while_rows_accept_different_lengths(tiny):
    params = tiny(FAMILY)
    both(params, BATCH, policy(FLAGSHIP), WIDE, 128)
    before = speculate._cache_size()
    other = [ids(60, 4), ids(40, 5), ids(12, 6)]
    plain, fast = both(params, other, policy(FLAGSHIP), WIDE, 128)
    assert speculate._cache_size() == before
    assert fast.tokens.tolist() == plain.tokens.tolist()


@pytest.mark.long
@pytest.mark.parametrize("name", [FLAGSHIP, slow("full")])
def test_a_stop_token_inside_a_draft_ends_its_row_there(tiny, name):
    """Some rows end early, one of them behind accepted drafts; nothing lies behind the stop token, and others go on."""
    params, method = tiny(FAMILY), PromptLookup(depth=5, fallback=False)
    free = jaxkv.generate(params, BATCH, policy=policy(name), max_new_tokens=128, stop_tokens=())
    plain, fast = both(params, BATCH, policy(name), method, 60, stop_tokens=(int(free.tokens[1, 17]),))
    assert fast.lengths.tolist() == plain.lengths.tolist()
    for row, end in enumerate(plain.lengths):
        assert fast.tokens[row, :end].tolist() == plain.tokens[row, :end].tolist()
    assert_same_cache(plain.cache, fast.cache)
    assert len(set(plain.lengths.tolist())) > 1, "rows ended at different places"


@pytest.mark.long
@pytest.mark.parametrize("name", [FLAGSHIP, slow("full")])
def test_a_stop_string_inside_a_draft_leaves_nothing_behind(tiny, name):
    params = tiny(FAMILY)
    params = type(params)(params.weights, params.config, Letters())
    free = jaxkv.generate(params, ids(40), policy=policy(name), max_new_tokens=40, stop_tokens=())
    plain, fast = both(params, ids(40), policy(name), PromptLookup(fallback=False), 40, stop=free.text[20:22])
    assert fast.text == plain.text and fast.lengths.tolist() == plain.lengths.tolist()
    assert_same_cache(plain.cache, fast.cache)


@pytest.mark.long
def test_a_stop_string_ends_a_row_of_any_verification(tiny):
    """Near misses may pass, by what was drafted: a chunk that is run again comes to the same text, and ends in it."""
    params = dataclasses.replace(tiny(FAMILY), tokenizer=Letters())
    method = PromptLookup(verify=Conditional(0.0, 0.0, 0.0), fallback=False)
    options = {"policy": policy("full"), "max_new_tokens": 40, "stop_tokens": (), "speculative": method}
    prompt = np.resize(ids(6), 60)
    free = jaxkv.generate(params, prompt, **options)
    assert free.stats.speculation.departed
    for at in range(0, 36, 3):
        out = jaxkv.generate(params, prompt, stop=free.text[at : at + 2], **options)
        assert out.text == free.text[: free.text.index(free.text[at : at + 2])]


@pytest.mark.long
def test_rows_that_end_inside_a_chunk_leave_a_cache_to_go_on_from(tiny):
    """Where a row ends sooner the others draft otherwise, and come further: they too end with their stop string."""
    params = dataclasses.replace(tiny(FAMILY), tokenizer=Letters())
    rows = [np.random.default_rng(seed).integers(3, 9, 60).astype(np.int32) for seed in (1, 2, 3)]
    plain, fast = both(params, rows, policy("full"), PromptLookup(depth=4), 60, stop=[")¹", "//", "C."])
    assert fast.text == plain.text and fast.lengths.tolist() == plain.lengths.tolist()
    assert_same_cache(plain.cache, fast.cache)
    jaxkv.generate(params, None, cache=fast.cache, max_new_tokens=2)


@pytest.mark.parametrize("verify", ["exact", "conditional"])
def test_measured_times_say_when_to_draft_only_where_the_text_does_not_depend_on_it(tiny, verify):
    session = Session(PromptLookup(verify=verify), tiny(FAMILY), policy("full"))
    session.drafting = Drafting(None, gate.opened(2, 1.5))
    session._tally, session._pending = types.SimpleNamespace(add=lambda *_: None, cost=7.0), ()
    session.tally(0.5)
    assert float(session.drafting.gate.cost) == (7.0 if verify == "exact" else 1.5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["full", slow("tova")])
@pytest.mark.parametrize("steps", [7, slow(1), slow(2), slow(3)])
def test_no_draft_goes_beyond_what_was_asked_or_the_context(tiny, steps, name):
    """A text that repeats itself, so that drafts are right, up to the last position of the model's context."""
    params, method = tiny(FAMILY), PromptLookup(depth=5, fallback=False)
    params = type(params)(params.weights, dataclasses.replace(params.config, max_position=64), None)
    prompt = np.resize(ids(5), params.config.max_position - steps)
    plain, fast = both(params, prompt, policy(name), method, steps)
    assert fast.tokens.tolist() == plain.tokens.tolist()
    assert int(fast.cache.lengths[0]) == params.config.max_position - 1
    assert_same_cache(plain.cache, fast.cache)


@pytest.mark.long
@pytest.mark.parametrize("name", [FLAGSHIP, slow("full")])
def test_going_on_from_a_cache(tiny, name):
    params, method = tiny(FAMILY), PromptLookup(fallback=False)
    plain, fast = both(params, ids(40), policy(name), method, 40)
    for prompt, steps in ((ids(12, 4), 40), (None, 39)):  # as many compiled steps each time
        options = {"max_new_tokens": steps, "stop_tokens": ()}
        one = jaxkv.generate(params, prompt, cache=plain.cache, **options)
        other = jaxkv.generate(params, prompt, cache=fast.cache, speculative=method, **options)
        assert one.tokens.tolist() == other.tokens.tolist()
        assert_same_cache(one.cache, other.cache)


@pytest.mark.long
def test_rows_that_go_on_with_prompts_of_other_lengths(tiny):
    """What was likely in rows that begin in different blocks is one array again."""
    params, chosen = tiny(FAMILY), policy(FLAGSHIP, block=16)
    cache = jaxkv.generate(params, ids(40), policy=chosen, max_new_tokens=4, stop_tokens=()).cache
    method, prompts = AASD(fallback=False), [ids(30, 2), ids(4, 1), ids(20, 3)]
    options = {"max_new_tokens": 20, "stop_tokens": ()}
    plain = jaxkv.generate(params, prompts, cache=cache, **options)
    fast = jaxkv.generate(params, prompts, cache=cache, speculative=method, **options)
    assert fast.tokens.tolist() == plain.tokens.tolist()
    assert_same_cache(plain.cache, fast.cache)
    alone = jaxkv.generate(params, prompts[1], cache=cache, **options)
    assert plain.tokens[1].tolist() == alone.tokens[0].tolist()


def test_streamed_pieces_are_the_same(tiny):
    params = tiny(FAMILY)
    params = type(params)(params.weights, params.config, Letters())
    options = {"policy": policy(FLAGSHIP), "max_new_tokens": 40, "stop_tokens": ()}
    whole = jaxkv.generate(params, ids(40), **options)
    stream = jaxkv.stream(params, ids(40), speculative=PromptLookup(fallback=False), **options)
    assert "".join(stream) == whole.text


@pytest.mark.long
@pytest.mark.parametrize("name", [FLAGSHIP, slow("full")])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3},
        slow({"temperature": 1.0, "samples": 2}),
        slow({"temperature": 0.5, "top_p": 0.9}),
    ],
)
def test_drafts_from_the_text_change_no_draw(tiny, options, name):
    """With a seed, sampling gives the very tokens of plain decoding: its distribution therefore is the model's."""
    plain, fast = both(tiny(FAMILY), BATCH, policy(name), WIDE, 128, seed=3, **options)
    assert fast.tokens.tolist() == plain.tokens.tolist()
    assert_same_cache(plain.cache, fast.cache)


def noisy(params, size=0.1):
    """A draft model that is often wrong: the same weights with noise."""
    noise = lambda x: x + size * x.std() * jax.random.normal(jax.random.key(1), x.shape, x.dtype)  # noqa: E731
    return type(params)(jax.tree.map(noise, params.weights), params.config, params.tokenizer)


def chi_square(found, expected) -> tuple[float, float]:
    """The statistic over cells of at least five expected, and a bound that chance passes once in 10,000 times."""
    common = expected >= 5
    found, expected = (
        np.append(found[common], found[~common].sum()),
        np.append(expected[common], expected[~common].sum()),
    )
    found, expected = found[expected > 0], expected[expected > 0]
    freedom = len(found) - 1
    return float(((found - expected) ** 2 / expected).sum()), freedom + 4.5 * np.sqrt(2 * freedom) + 6


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["draft model", slow("self")])
def test_a_draft_model_keeps_the_models_distribution(tiny, drafter):
    """Sequences of three tokens from many samples, against their exact probabilities under plain decoding."""
    params, draws, kept = tiny(FAMILY), 2048, 4
    method = {
        "draft model": DraftModel(noisy(params), depth=2, fallback=False),
        "self": SelfDraft(policy("streaming-llm", 16), depth=2, fallback=False),
    }[drafter]
    options = dict(temperature=1.3, top_k=kept, max_new_tokens=3, stop_tokens=(), policy=jaxkv.policy("full"))
    out = jaxkv.generate(params, ids(20), samples=draws, seed=5, speculative=method, **options)
    told = out.stats.speculation
    assert 1.05 < told.acceptance_length < 2, "some drafts were accepted and some were not"

    sampler = Sampler(temperature=1.3, top_k=kept)

    def chances(rows):
        prompts = [np.append(ids(20), row).astype(np.int32) for row in rows]
        logits = Prefilling(params, jaxkv.policy("full"), Execution(), no_draft).run(prompts, None).logits
        return np.asarray(jax.nn.softmax(sampler.warped(logits, None), axis=-1))

    first = chances([[]])[0]
    ones = np.flatnonzero(first)
    second = chances([[a] for a in ones])
    twos = [(a, b) for i, a in enumerate(ones) for b in np.flatnonzero(second[i])]
    third = chances([list(pair) for pair in twos])
    exact = {
        (a, b, c): first[a] * second[list(ones).index(a), b] * third[i, c]
        for i, (a, b) in enumerate(twos)
        for c in np.flatnonzero(third[i])
    }
    found = {sequence: 0 for sequence in exact}
    for row in out.tokens:
        found[tuple(int(t) for t in row)] += 1
    value, bound = chi_square(np.array(list(found.values())), draws * np.array(list(exact.values())))
    assert value < bound


def test_standard_speculative_sampling_follows_p_whatever_q():
    """One round over made-up chances: the first token follows p, and so does the second where the first was a draft."""
    rng = np.random.default_rng(0)
    draws, size = 20_000, 6
    p, q = (rng.dirichlet(np.ones(size), 1 + size) for _ in range(2))
    d1 = np.array([rng.choice(size, p=q[0]) for _ in range(draws)], np.int32)
    d2 = np.array([rng.choice(size, p=q[1 + d]) for d in d1], np.int32)
    tree = chain(jnp.asarray(np.stack([d1, d2], 1)), jnp.zeros(draws, jnp.int32))
    logits = np.log(np.stack([np.broadcast_to(p[0], (draws, size)), p[1 + d1], p[1 + d2]], 1)).astype(np.float32)
    drawn = jnp.asarray(np.stack([np.broadcast_to(q[0], (draws, size)), q[1 + d1]], 1).astype(np.float32))
    keys = jax.vmap(lambda n: jax.random.fold_in(jax.random.key(1), n))(jnp.arange(draws))
    at = jnp.broadcast_to(jnp.arange(3), (draws, 3))
    shape = Shape((1, 1))
    token, _ = follows(shape, tree, jnp.asarray(logits), Sampler(temperature=1.0), None, None, keys, at, drawn)
    _, tokens = (np.asarray(x) for x in walk(shape, tree, token))
    value, bound = chi_square(np.bincount(tokens[:, 0], minlength=size), draws * p[0])
    assert value < bound
    assert abs((tokens[:, 1] >= 0).mean() - np.minimum(p[0], q[0]).sum()) < 0.02, "accepted as often as can be"
    for first in range(size):
        second = tokens[(tokens[:, 0] == first) & (tokens[:, 1] >= 0), 1]
        value, bound = chi_square(np.bincount(second, minlength=size), len(second) * p[1 + first])
        assert value < bound


DRAFTERS = {
    "itself": lambda params: DraftModel(params, depth=3, fallback=False),
    "noisy": lambda params: DraftModel(noisy(params), policy("h2o", 16), depth=3, fallback=False),
    "self": lambda params: SelfDraft(policy("longflow", 16), depth=3, fallback=False),
    "self, with fallback": lambda params: SelfDraft(policy("streaming-llm", 16), depth=3),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name, drafter",
    [
        (FLAGSHIP, "self"),
        slow(FLAGSHIP, "noisy"),
        *(slow(name, drafter) for name in ("full", "tova") for drafter in DRAFTERS),
    ],
)
def test_draft_models_change_nothing_when_greedy(tiny, name, drafter):
    params = tiny(FAMILY)
    plain, fast = both(params, BATCH, policy(name), DRAFTERS[drafter](params), 129)
    assert fast.tokens.tolist() == plain.tokens.tolist()
    assert_same_cache(plain.cache, fast.cache)
    if (name, drafter) == ("full", "itself"):
        assert fast.stats.speculation.acceptance_length == 4, "the model agrees with itself"


@pytest.mark.long
def test_conditional_verification_follows_its_formula():
    """One node with two children, of made-up probabilities: which child passes, and what counts as a departure."""
    shape, rule = Shape((2,)), Conditional(alpha=0.1, beta=0.3, floor=0.02)
    tree = Tree(jnp.array([[9, 1, 2]]), jnp.zeros((1, 3), jnp.int32))
    key = jax.random.split(jax.random.key(0), 1)
    cases = []
    for chances in ([0.5, 0.1, 0.2, 0.2], [0.9, 0.03, 0.04, 0.03], [0.3, 0.25, 0.2, 0.25], [0.2, 0.5, 0.2, 0.1]):
        p = np.array(chances)
        bar = min(max(0.3 - 0.1 * -(p * np.log(p)).sum(), 0.02), p.max())
        best = max((1, 2), key=lambda token: p[token])
        exact = int(p.argmax())
        expected = exact if exact in (1, 2) or p[best] < bar else best
        logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (1, 3, 4))
        token, departs = follows(shape, tree, logits, Sampler(), rule, None, key, jnp.zeros((1, 3), jnp.int32))
        assert int(token[0, 0]) == expected and bool(departs[0, 0]) == (expected != exact)
        cases.append(expected != exact)
    assert True in cases and False in cases


@pytest.mark.long
@pytest.mark.parametrize("strictness", ["loose", slow("strict")])
def test_conditional_verification_reports_its_departures(tiny, strictness):
    params = tiny(FAMILY)
    rule = {"loose": Conditional(floor=0.01), "strict": Conditional(beta=1.0, floor=1.0)}[strictness]
    exact, free = (
        jaxkv.generate(
            params, BATCH, policy=policy(FLAGSHIP), max_new_tokens=128, stop_tokens=(),
            speculative=dataclasses.replace(WIDE, verify=verify),
        )
        for verify in ("exact", rule)
    )  # fmt: skip
    told = free.stats.speculation
    if strictness == "strict":
        assert free.tokens.tolist() == exact.tokens.tolist() and told.departed == 0, "only the likeliest token passes"
    else:
        assert told.departed > 0 and free.tokens.tolist() != exact.tokens.tolist()
        assert told.acceptance_length > exact.stats.speculation.acceptance_length


def test_matches_are_the_longest_and_of_those_the_latest():
    def text(*rows):
        return begun([np.array(row, np.int32) for row in rows], max(map(len, rows)), 8, 0)

    length, column = match(text([1, 2, 3, 9, 2, 3, 8, 3, 7, 2, 3], [5, 4], [6, 6, 6]), 4)
    assert length.tolist() == [2, 0, 2] and column[0] == 5 and column[2] == 9
    grown = extended(text([1, 2, 3], [4, 1, 2]), jnp.array([[1, -1], [4, 1]]))
    assert grown.ends.tolist() == [4, 5] and match(grown, 3)[0].tolist() == [1, 2]
    assert match(grown, 3)[1].tolist() == [0, 1]


def test_a_text_without_columns_loses_its_oldest_tokens():
    top = jnp.arange(12, dtype=jnp.int32).reshape(1, 6, 2).repeat(2, axis=0)
    text = expecting(begun([np.arange(1, 7, dtype=np.int32)] * 2, 6, 3, 2), (top, top.astype(jnp.float32) / 12))
    text = extended(text, jnp.array([[7, 8], [7, -1]]))
    same = slid(text, 1)
    assert all(np.array_equal(*pair) for pair in zip(jax.tree.leaves(same), jax.tree.leaves(text), strict=True))
    less = slid(text, 3)
    assert less.tokens[:, :6].tolist() == [[3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7]] and less.ends.tolist() == [6, 6]
    assert (less.tokens[:, 6:] == ABSENT).all()
    assert less.top[0].tolist() == [*top[0, 2:].tolist(), [ABSENT] * 2, [ABSENT] * 2]
    np.testing.assert_allclose(less.chance[1, :, 1], [3 / 12, 5 / 12, 7 / 12, 9 / 12, 11 / 12, 0])
    again = extended(less, jnp.array([[1, 2, 3], [3, -1, -1]]))
    assert match(again, 4)[0].tolist() == [1, 1] and match(again, 4)[1].tolist() == [0, 1]


@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_matches_against_a_plain_search(tokens, longest):
    length, column = match(begun([np.array(tokens, np.int32)], 32, 4, 0), longest)
    best = (0, -1)
    for end in range(len(tokens) - 1):
        same = 0
        while same < longest and same <= end and tokens[end - same] == tokens[len(tokens) - 1 - same]:
            same += 1
        best = max(best, (same, end + 32 - len(tokens)))
    assert int(length[0]) == best[0] and (best[0] == 0 or int(column[0]) == best[1])


def test_siblings_are_what_the_prefill_held_likelier(tiny):
    """Where the prompt's own distribution gave the next token less than `low`, its likeliest tokens stand beside."""
    params = tiny(FAMILY)
    row = ids(40)
    policy, full = jaxkv.policy("tova", budget=16), jaxkv.policy("full")
    prefilling = Prefilling(params, policy, Execution(), no_draft, room=8, top=3, limit=100)
    top, chance = prefilling.run([row], None).expected
    for at in (10, 39):
        logits = np.asarray(Prefilling(params, full, Execution(), no_draft).run([row[: at + 1]], None).logits[0])
        column = top.shape[1] - 40 + at
        exact = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        assert top[0, column].tolist() == np.argsort(-logits, kind="stable")[:3].tolist()
        np.testing.assert_allclose(chance[0, column], exact[np.asarray(top[0, column])], rtol=1e-3)


@pytest.mark.long
def test_siblings_are_drawn_by_their_chances():
    method = AASD(depth=2, siblings=(2, 1), low=0.4)
    tokens = np.array([1, 2, 3, 4, 1, 2], np.int32)
    top = jnp.broadcast_to(jnp.array([3, 7, 8]), (1, 6, 3)).astype(jnp.int32)
    chance = jnp.broadcast_to(jnp.array([0.3, 0.25, 0.1]), (1, 6, 3)).astype(jnp.float32)
    text = expecting(begun([tokens], 6, 4, 3), (top, chance))
    kind, hint = method.look(text)
    assert kind.tolist() == [2]
    cache = KVCache((), jnp.array([6]), jnp.zeros((0, 1), jnp.int32), jnp.array([2]))
    state = DecodeState(cache, jnp.array([False]), jnp.array([9]), None, jax.random.split(jax.random.key(0), 1))
    tree, chances, _ = method.draft(None, text, kind, hint, state, Sampler())
    assert chances is None
    assert tree.tokens[0, :2].tolist() == [2, 3] and tree.tokens[0, 4] == 4, "trunk 3, 4"
    assert set(tree.tokens[0, 2:4].tolist()) == {7, 8} and int(tree.tokens[0, 5]) in (3, 7, 8)
    assert tree.parents.tolist() == [[0, 0, 0, 0, 1, 1]]
    sure = dataclasses.replace(method, low=0.2)
    tree = sure.draft(None, text, kind, hint, state, Sampler())[0]
    assert tree.tokens[0, :5].tolist() == [2, 3, ABSENT, ABSENT, 4], "likely enough: nothing beside it"

    def beside(key):
        each = dataclasses.replace(state, keys=jax.random.split(key, 1))
        return method.draft(None, text, kind, hint, each, Sampler())[0].tokens[0, jnp.array([2, 5])]

    drawn = np.asarray(jax.vmap(beside)(jax.random.split(jax.random.key(1), 4000)))
    first = [np.mean(drawn[:, 0] == token) for token in (3, 7, 8)]
    np.testing.assert_allclose(first, [0, 0.25 / 0.35, 0.1 / 0.35], atol=0.03)  # 3 is the trunk's own
    second = [np.mean(drawn[:, 1] == token) for token in (3, 7, 8)]
    np.testing.assert_allclose(second, np.array([0.3, 0.25, 0.1]) / 0.65, atol=0.03)


@pytest.mark.long
def test_a_bounded_table_of_a_long_prompt(tiny):
    """`limit` bounds what is kept; the text is the same whether drafts reach far back or not."""
    params = tiny(FAMILY)
    chosen = policy("h2o", 24, block=32)
    plain, fast = both(params, ids(150), chosen, AASD(depth=3, low=1.0, limit=40, fallback=False), 30)
    assert fast.tokens.tolist() == plain.tokens.tolist()


def test_the_gate_closes_when_drafts_fail_and_tries_again():
    kinds, running = jnp.array([2]), jnp.array([True])
    state, passed = gate.opened(4, 1.5), []
    tried = 0
    for _ in range(400):
        if bool(gate.pays(state, kinds, running)):
            state = gate.learned(state, kinds, jnp.array([0]), running)
            tried += 1
            passed.append(True)
        else:
            state = gate.waited(state, kinds, running)
            passed.append(False)
    assert tried * 0.5 / 400 < 0.05, "failing drafts cost less than a twentieth"
    assert any(passed[200:]), "and are tried now and then"
    for _ in range(60):
        if bool(gate.pays(state, kinds, running)):
            state = gate.learned(state, kinds, jnp.array([5]), running)
        else:
            state = gate.waited(state, kinds, running)
    assert bool(gate.pays(state, kinds, running))


def test_a_first_cost_is_in_steps_of_as_many_rows():
    """With 8 tokens that double a pass: 8 rows of 6 tokens over 8 rows of one, 7 over 2."""
    assert gate.first_cost(1, 1) == gate.first_cost(64, 1) == 1
    assert gate.first_cost(8, 6) == 3.5 and gate.first_cost(1, 6) < gate.first_cost(8, 6) < 6


@pytest.mark.parametrize("accepted, kept", [(0, False), (1, True)])
def test_a_draft_model_is_tried_before_it_is_judged(accepted, kept):
    """Whatever the number of rows; and a single round that brought nothing does not end it."""
    for rows in (1, 2, 8):
        kinds, running = jnp.ones(rows, jnp.int32), jnp.ones(rows, bool)
        state, rounds = gate.hopeful(4, gate.first_cost(rows, 5)), 0
        while bool(gate.pays(state, kinds, running)) and rounds < 40:
            turns = [0, 3] if rows == 8 and accepted else [0, 2 * accepted]
            state = gate.learned(state, kinds, jnp.full(rows, turns[rounds % 2]), running)
            rounds += 1
        assert rounds >= 3 and (rounds == 40) == (kept and rows < 8)


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 3])
def test_a_model_drafts_for_itself_in_every_batch(tiny, rows):
    """All of its drafts are right, so each pass gives all of a chain."""
    params = tiny(FAMILY)
    out = jaxkv.generate(
        params, [ids(20, row) for row in range(rows)], max_new_tokens=21, stop_tokens=(), speculative=DraftModel(params)
    )
    assert out.stats.speculation.steps == 0 and out.stats.speculation.trees == 4


def test_a_chunk_that_ran_twice_is_not_timed(tiny):
    """A stop string inside a chunk has it run again: what that took says nothing of a tree's cost."""
    params = dataclasses.replace(tiny(FAMILY), tokenizer=Letters())
    free = jaxkv.generate(params, ids(20), max_new_tokens=40, stop_tokens=())
    timed, tally = [], Session.tally
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "tally", lambda self, seconds: (timed.append(seconds), tally(self, seconds)))
        stop = next(free.text[at : at + 2] for at in range(18, 30) if free.text.index(free.text[at : at + 2]) == at)
        jaxkv.generate(params, ids(20), max_new_tokens=40, stop_tokens=(), stop=stop, speculative=PromptLookup())
    assert timed[-1] is None and None not in timed[:-1]


@given(st.floats(1.1, 4.0), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_measured_cost_is_that_of_the_chunks(cost, seed):
    rng = np.random.default_rng(seed)
    trees, steps = rng.integers(0, 9, 12), rng.integers(0, 9, 12)
    trees[0], steps[0], trees[1], steps[1] = 40, 0, 0, 40
    seconds = 0.02 * (steps + cost * trees)
    assert gate.measured(trees.tolist(), steps.tolist(), seconds.tolist(), 1.5) == pytest.approx(cost, rel=0.05)
    assert gate.measured([], [], [], 1.7) == 1.7


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda p: jaxkv.generate(p, ids(9), policy=policy("h2o", every=4), speculative=AASD()), "every=1"),
        (lambda p: SelfDraft(policy("h2o", every=4)), "every=1"),
        (lambda p: jaxkv.generate(p, ids(9), policy=policy("h2o+by-channel"), speculative=AASD()), "evicts nothing"),
        (lambda p: SelfDraft(policy("full+by-channel")), "cannot be taken back"),
        (lambda p: SelfDraft(policy("h2o+windows")), "residual=3, initial=2.*cannot be put back"),
        (lambda p: DraftModel(p, policy("cskv")), "cannot be put back"),
        (lambda p: PromptLookup(depth=0), "depth=0"),
        (lambda p: DraftModel(p, depth=33), "depth=33: expected 1 to 32"),
        (lambda p: PromptLookup(shortest=5, longest=3), "shortest"),
        (lambda p: AASD(depth=2, siblings=(1, 1, 1)), "siblings"),
        (lambda p: AASD(low=1.5), "low=1.5"),
        (lambda p: AASD(kept=1), "kept=1"),
        (lambda p: jaxkv.generate(p, ids(9), speculative=AASD(kept=500)), "kept=500 for a model of 160 tokens"),
        (lambda p: AASD(verify="loose"), "verify='loose'"),
        (lambda p: Conditional(floor=2.0), "floor=2.0"),
        (lambda p: Shape(()), "tree widths"),
    ],
)
def test_what_cannot_be_is_refused(tiny, call, words):
    with pytest.raises(BadValue, match=words):
        call(tiny(FAMILY))


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["aasd", "self", slow("lookup"), slow("noisy")])
@pytest.mark.parametrize("name", [FLAGSHIP, slow("full"), slow("streaming-llm")])
def test_drafts_from_a_cache_change_nothing_when_greedy(tiny, name, drafter):
    """With a new prompt and without one, in two samples and in one: the text, the cache and what it remembers."""
    params, chosen = tiny(FAMILY), policy(name)
    known = {**DRAFTERS, "aasd": lambda _: WIDE, "lookup": lambda _: PromptLookup(fallback=False)}
    begun = jaxkv.generate(params, BATCH, policy=chosen, max_new_tokens=30, stop_tokens=()).cache
    for prompts, samples in ((None, 1), ([ids(4, 7), ids(9, 8), ids(2, 9)], 2)):
        options = dict(cache=begun, max_new_tokens=40, stop_tokens=(), samples=samples)
        plain = jaxkv.generate(params, prompts, **options)
        fast = jaxkv.generate(params, prompts, speculative=known[drafter](params), **options)
        assert fast.tokens.tolist() == plain.tokens.tolist()
        assert_same_cache(plain.cache, fast.cache)
        assert np.array_equal(plain.cache.tokens, fast.cache.tokens)
        assert fast.stats.speculation.acceptance_length > 1


@pytest.mark.long
@pytest.mark.parametrize("method", [PromptLookup(fallback=False), AASD(fallback=False)], ids=["lookup", "aasd"])
def test_drafts_come_from_the_text_of_the_cache(tiny, method):
    """A cache whose text holds what the model is about to say: every draft is right. Not known, it drafts little."""
    params = tiny(FAMILY)
    begun = jaxkv.generate(params, ids(40), max_new_tokens=8, stop_tokens=()).cache
    options = {"max_new_tokens": 12, "stop_tokens": ()}
    for prompt in (None, ids(5, 3)):
        plain = jaxkv.generate(params, prompt, cache=begun, **options)
        said = plain.cache.texts()[0]
        seen = int(begun.lengths[0])
        held = said[-min(seen, 24) :]  # the last words before the new text, the new text, and words that are never said
        text = np.concatenate([np.full(seen - len(held), 250), held]).astype(np.int32)
        told = [
            jaxkv.generate(
                params, prompt, cache=dataclasses.replace(begun, tokens=tokens), speculative=method, **options
            )
            for tokens in (text[None], None)
        ]
        assert all(out.tokens.tolist() == plain.tokens.tolist() for out in told)
        known, unknown = (out.stats.speculation for out in told)
        assert known.steps == 0 and known.acceptance_length > 5
        assert unknown.tokens_per_pass < 2


def test_siblings_stand_only_where_the_model_was_asked(tiny):
    """Of a cache's text the distributions are not known: ABSENT before the tokens that were run now."""
    params, cached, asked = tiny(FAMILY), ids(30), ids(6, 1)
    cache = jaxkv.prefill(params, cached)
    prefilling = Prefilling(params, cache.policy, Execution(), no_draft, room=8, top=2, limit=100)
    cache, _, expected = prefilling.run([asked], cache)
    start = Start(params, cache.texts(), 2, jnp.array([4, 5]), expected, 8, lambda *_: cache)
    text, _ = AASD(kept=2).begin(start)
    width = text.top.shape[1]
    assert text.tokens[:, width - 36 : width].tolist() == [[*cached, *asked]] * 2
    assert text.tokens[:, width].tolist() == [4, 5] and text.ends.tolist() == [width + 1] * 2
    assert (np.asarray(text.top[:, : width - 6]) == ABSENT).all() and (np.asarray(text.top[:, width - 6 :]) >= 0).all()


def test_a_draft_model_needs_the_text_and_the_vocabulary(tiny):
    params = tiny(FAMILY)
    cache = dataclasses.replace(jaxkv.prefill(params, ids(20)), tokens=None)
    with pytest.raises(BadValue, match="whole text"):
        jaxkv.generate(params, ids(3), cache=cache, speculative=SelfDraft(policy("h2o", 16)))
    with pytest.raises(BadValue, match="same vocabulary"):
        jaxkv.generate(params, ids(3), speculative=DraftModel(tiny("mistral")))


def test_the_context_of_a_draft_model_is_checked_first(tiny, monkeypatch):
    """Before the main model's prefill, with a cache's text and its pending token, and in words about the drafts."""
    params = tiny(FAMILY)
    small = dataclasses.replace(params, config=dataclasses.replace(params.config, max_position=32))
    cache = dataclasses.replace(jaxkv.prefill(params, ids(20)), pending=jnp.array([4]))

    def never(*_, **__):
        raise AssertionError("the prompt ran")

    monkeypatch.setattr(run, "prefill", never)
    monkeypatch.setattr(run, "decode", never)
    for prompt, before, text, later in ((ids(40), None, 40, 13), (ids(8), cache, 29, 13), (None, cache, 20, 14)):
        drafts = r"the draft model \(policy 'full'\) of speculative=DraftModel\(...\): "
        told = rf"{drafts}{text} tokens of text and {later} run"
        with pytest.raises(BadValue, match=told):
            jaxkv.generate(params, prompt, cache=before, max_new_tokens=14, speculative=DraftModel(small))
    bounded = SelfDraft(jaxkv.policy("h2o", budget=8))
    with pytest.raises(BadValue, match=r"'h2o'.* of speculative=SelfDraft.*30 tokens of text"):
        jaxkv.generate(small, ids(30), policy=policy("streaming-llm"), max_new_tokens=14, speculative=bounded)


@pytest.mark.long
def test_the_command_line_speculates(monkeypatch, capsys, tiny):
    params = tiny(FAMILY)
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: type(params)(params.weights, params.config, Letters()))
    common = ["generate", "abcabcabcab", "--budget", "40", "--max-new-tokens", "9", "--json"]
    told = []
    for extra in ([], ["--speculative", "aasd"]):
        assert cli.main([*common, *extra]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["tokens"] == told[1]["tokens"]
    assert told[0]["stats"]["speculation"] is None and told[1]["stats"]["speculation"]["departed"] == 0
    assert cli.main([*common, "--verify", "conditional"]) == 2
    assert "--speculative" in capsys.readouterr().err


def test_a_drafts_policy_may_say_its_bytes(tiny):
    """They are a budget on the model that drafts."""
    params, policies = tiny(FAMILY), []
    bounded = jaxkv.policy("streaming-llm", bytes=30_000)

    def prefilled(params, chosen):
        policies.append(chosen)
        return types.SimpleNamespace(layers=(), limits=jnp.zeros((1, 1), jnp.int32))

    for method in (SelfDraft(bounded), DraftModel(params, bounded)):
        method.begin(Start(params, [ids(3)], 1, jnp.array([4]), None, 8, prefilled))
        policies.append(method.drafter(params).policy)
    assert len(policies) == 4 and len(set(policies)) == 1 and policies[0].budget > 0 and policies[0].bytes is None


def test_codes_of_several_tokens_need_a_model_that_forgets_none(tiny):
    with pytest.raises(BadValue, match="sliding windows"):
        jaxkv.generate(tiny("gemma3_text"), ids(9), policy=policy("full+by-channel"), speculative=AASD())


def test_every_policy_speculates_or_says_why_not():
    refused = set()
    for name, known in catalogue().items():
        chosen = dataclasses.replace(known, budget=512) if known.evicts else known
        try:
            check(chosen)
        except BadValue as error:
            refused.add(name)
            assert f"policy {name!r}" in str(error) and "leave speculative= out" in str(error)
    slow = {name for name, known in catalogue().items() if known.decode and known.decode.every > 1}
    bent = {name for name, known in catalogue().items() if known.decode and not known.decode.linear}
    pooled = {name for name, known in catalogue().items() if known.allocate.pooled}
    measured = {"q-filters"}  # what was measured on the model scores every token that enters
    beside = {"quest", "subgen", "zsmerge"}  # a tree knows no pages, sketch, residual slot; nor a second tier
    beside |= {"arkv", "mikv", "tiered-h2o", "tiered-laq", "zipcache", "qaq"}
    growing = {name for name, known in catalogue().items() if known.decode and known.decode.score.grows}
    merging = {name for name, known in catalogue().items() if known.decode and known.decode.evicted.moves}
    coded = {
        name for name, known in catalogue().items()
        if (known.evicts and not known.store.apart) or known.store.pairs
    }  # fmt: skip
    assert refused == slow | bent | pooled | measured | beside | growing | merging | coded and bent and coded
