"""Heads that share a pool: what they keep against kvpress, the pool's own operations, and what it costs in bytes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from ordered import heads_of, pooled
from small import SMALL

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.policies import Adaptive, Attention, Pyramid, catalogue
from jaxkv.policies.across import Across
from jaxkv.store import EMPTY, Entries, Pool, Slots
from jaxkv.store import pool as pools
from jaxkv.store.entries import flattened, in_pieces, owners
from pallas_kernels.arguments import Held, Judge, Line, Rule, Segments, Token
from pallas_kernels.decode_attend_score.reference import decode_attend_score
from pallas_kernels.partial import Partial, merge, portion
from pallas_kernels.ragged_decode import ragged_decode
from pallas_kernels.ragged_decode.reference import first_empty, lowest

FAMILY = "llama3"
# each is like another one
SLOW = ("cake", "d2o", "layer-defensivekv", "prefixkv", "simlayerkv", "ada-pyramidkv", "critical-adakv")
POOLED = [name for name, policy in sorted(catalogue().items()) if policy.allocate.pooled]


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)


# ---- kept entries against kvpress

# kvpress' method -> the golden's file, our policy, and its options
KVPRESS = {
    "adakv-snapkv-w8-k5": ("more", "adakv", {"window": 8, "kernel": 5, "pool": "avg", "mixing": False}),
    "adakv-knorm": ("pools", "knorm", {}),
    "adakv-keydiff-a0.5": ("pools", "keydiff", {"safeguard": 0.5}),
    "adakv-expected-n512-e0.01": ("pools", "expected-attention", {"epsilon": 0.01}),
    "criticaladakv-snapkv-w8-k5": ("pools", "critical-adakv", {"window": 8}),
}
ANYWHERE = ("adakv-knorm", "adakv-keydiff-a0.5")  # the goldens of every family have these
CASES = [
    pytest.param(family, method, ratio, marks=() if (family, ratio) == ("llama3", "0.5") else pytest.mark.slow)
    for family in ("llama3", "llama2", "qwen2", "qwen3", "mistral", "gemma3_text")
    for method in (ANYWHERE if family == "gemma3_text" else KVPRESS)
    if family != "qwen2" or method in (*ANYWHERE, "adakv-snapkv-w8-k5")
    for ratio in ("0.3", "0.5", "0.75")
]


def twin(method, budget):
    """Our policy of a kvpress method; scorers of the catalogue get competing heads."""
    _, name, options = KVPRESS[method]
    if name in POOLED:
        return jaxkv.policy(name, budget=budget, **options)
    policy = jaxkv.policy(name, budget=budget)
    prefill = policy.prefill
    share = Adaptive(options.get("safeguard", 0.2))
    return dataclasses.replace(policy, prefill=prefill, decode=None, rope="text", allocate=share)


@pytest.mark.some(1)
@pytest.mark.parametrize(("family", "method", "ratio"), CASES)
def test_kept_as_in_kvpress(goldens, as_in_kvpress, family, method, ratio):
    """The same entries of every head, in every layer that kvpress compresses, and no more slots than whole pieces."""
    golden = arrays(goldens / "kvpress" / f"{family}-{KVPRESS[method][0]}.npz")
    params, tokens = as_in_kvpress(family), golden["ids"][0]
    case = f"{method}/r{ratio}"
    layers = sorted({int(key.split("/")[2][5:]) for key in golden if key.startswith(case + "/")})
    budget = int(len(tokens) * (1 - float(ratio)))
    cache = jaxkv.prefill(params, tokens, policy=twin(method, budget))
    for index in layers:
        theirs, layer = golden[f"{case}/layer{index}/kept_mask"], cache.layers[index]
        ours = np.zeros_like(theirs)
        for head, held in enumerate(heads_of(layer)):
            ours[head, held[held >= 0]] = True
        assert theirs.sum() == budget * len(theirs) and layer.total == in_pieces(budget) * len(theirs)
        np.testing.assert_array_equal(ours, theirs, err_msg=f"{case} layer {index}")
    if family == "gemma3_text":  # sliding layers stay as they are
        assert [pooled(layer) for layer in cache.layers] == [i in layers for i in range(len(cache.layers))]


@pytest.mark.long
def test_a_pyramid_of_layers_whose_heads_compete(tiny):
    """Layer budgets as PyramidKV's, shares of the heads as AdaKV's."""
    params, budget = tiny(FAMILY), 24
    policy = jaxkv.policy("ada-pyramidkv", budget=budget, window=4, beta=4.0)
    cache = jaxkv.prefill(params, ids(90), policy=policy)
    wanted = Pyramid(4.0).budgets(budget, params.config.num_layers, 90, 4, {})
    assert wanted[0] > wanted[-1]
    heads = params.config.num_kv_heads
    assert [layer.total for layer in cache.layers] == [heads * in_pieces(each) for each in wanted]
    assert np.asarray(cache.held()).sum(axis=(1, 2)).tolist() == [heads * each for each in wanted]


# ---- the pool's operations

SHAPES = ((1, 2, 5), (2, 3, 8))
compete, best = (jax.jit(f, static_argnums=n) for f, n in ((pools.compete, 3), (pools.best, ())))


@functools.partial(jax.jit, static_argnums=2)
def build(layer: Slots, kept, total: int, room) -> Pool:
    """The kept ones of a layer's slots, flat, in a pool."""
    entries = layer.by_head()
    batch, heads, _ = entries.positions.shape
    owner = owners(entries.positions).reshape(batch, -1)
    return pools.arranged(flattened(entries), owner, kept, total, room, heads, {}, layer.codecs)


def layer_of(positions: np.ndarray) -> Slots:
    """A layer whose keys and values name their position and head, NaN in the empty slots."""
    content = np.where(positions < 0, np.nan, positions + 100.0 * np.arange(positions.shape[1])[:, None])
    keys = jnp.asarray(np.stack([content, -content], axis=-1), jnp.float32)
    entries = Entries(
        keys, keys + 0.5, jnp.asarray(positions, jnp.int32), {"mark": jnp.asarray(content, jnp.float32)}
    )  # fmt: skip
    return Slots(entries, jnp.zeros(positions.shape[:2], jnp.int32))


@st.composite
def layers(draw):
    """Positions and worth [B, Hk, S] with ties and empty slots, what to keep per head on average, and a guard."""
    batch, heads, slots = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    positions = np.stack([rng.permutation(20)[:slots] for _ in range(batch * heads)]).reshape(batch, heads, slots)
    positions = np.where(rng.random(positions.shape) < draw(st.sampled_from([0.0, 0.3, 0.9])), EMPTY, positions)
    worth = rng.integers(-2, 3, positions.shape).astype(np.float32)
    worth[rng.random(positions.shape) < 0.2] = np.inf
    each = rng.integers(1, slots + 1, batch)
    return positions, worth, each, np.array([rng.integers(0, n + 1) for n in each])


def by_hand(positions, worth, keep, guard):
    """(position, head) of what stays of one row, by plain sorting: each head's guard first, then the best of all."""
    entries = [
        (-worth[head, slot], positions[head, slot], head)
        for head in range(len(positions))
        for slot in range(positions.shape[1])
        if positions[head, slot] >= 0
    ]
    safe = {e for head in range(len(positions)) for e in sorted(e for e in entries if e[2] == head)[:guard]}
    rest = sorted(e for e in entries if e not in safe)[: max(keep - len(safe), 0)]
    return sorted((p, head) for _, p, head in (*safe, *rest))


def check_pool(pool: Pool, room):
    """Borders in order, no slot shared or lost, positions once per head, contents with their positions."""
    offsets = np.asarray(pool.offsets)
    assert (offsets[:, 0] == 0).all() and (np.diff(offsets) >= 0).all()
    np.testing.assert_array_equal(offsets[:, -1], room)
    for row in range(len(offsets)):
        for head, positions in enumerate(heads_of(pool, row)):
            filled = positions >= 0
            assert len(set(positions[filled])) == filled.sum()
            inside = slice(offsets[row, head], offsets[row, head + 1])
            expected = positions[filled] + 100.0 * head
            np.testing.assert_array_equal(np.asarray(pool.keys)[row, inside, 0][filled], expected)
            np.testing.assert_array_equal(np.asarray(pool.values)[row, inside, 1][filled], 0.5 - expected)
            np.testing.assert_array_equal(np.asarray(pool.stats["mark"])[row, inside][filled], expected)
        assert (np.asarray(pool.positions)[row, offsets[row, -1] :] == EMPTY).all()


@pytest.mark.long
@given(layers())
@settings(max_examples=40, deadline=None)
def test_heads_compete_and_a_pool_is_built(case):
    positions, worth, each, guard = case
    batch, heads, slots = positions.shape
    layer = layer_of(positions)
    flat, owner = (x.reshape(batch, -1) for x in (layer.positions, owners(layer.positions)))
    value = jnp.asarray(worth.reshape(batch, -1))
    kept, safe = compete(value, flat, owner, heads, jnp.asarray(heads * each), jnp.asarray(guard))
    pool = build(layer, kept, heads * slots, jnp.asarray(heads * each))
    check_pool(pool, heads * each)
    assert not (np.asarray(safe) & ~np.asarray(kept)).any()
    held = np.asarray(pool.held())
    for row in range(batch):
        ours = sorted((p, h) for h, line in enumerate(heads_of(pool, row)) for p in line[line >= 0])
        assert ours == by_hand(positions[row], worth[row], heads * each[row], guard[row])
        for head, line in enumerate(heads_of(pool, row)):
            there = np.sum(positions[row, head] >= 0)
            assert held[row, head] >= min(guard[row], there), "the safeguard"
            empties = len(line) - held[row, head]
            assert (line[:empties] == EMPTY).all() and (np.diff(line[empties:]) > 0).all(), "time order, empty first"
            spare = heads * each[row] - held[row].sum()
            assert spare // heads <= empties <= -(-spare // heads), "what is left is shared evenly"

    again = np.asarray(best(value, flat, owner, pool.held()))
    if (guard == 0).all():
        np.testing.assert_array_equal(again, np.asarray(kept), err_msg="the same shares, the same entries")
    wide = pool.by_head()
    for row in range(batch):
        for mine, line in zip(np.asarray(wide.positions[row]), heads_of(pool, row), strict=True):
            np.testing.assert_array_equal(mine[: len(line)], line)
            assert (mine[len(line) :] == EMPTY).all()
    back = pool.unscored(pool.uncompared(wide.positions.astype(jnp.float32)))
    mine = np.asarray(pool.owner) < heads
    np.testing.assert_array_equal(np.asarray(back)[mine], np.asarray(pool.positions)[mine])


@functools.partial(jax.jit, static_argnames=("shift", "guard"))
def step(pool: Pool, key, now, each, shift, guard):
    """A token into every head's next slot, random worth, and a move of the borders where it is due."""
    heads = pool.heads
    worth = jax.random.normal(key, pool.positions.shape) * (
        1.0 + pool.owner.astype(jnp.float32)
    )  # some heads are worth more
    rows = jnp.arange(pool.positions.shape[0])[:, None]
    content = now.astype(jnp.float32) + 100.0 * jnp.arange(heads, dtype=jnp.float32)
    at = (rows, pool.next_slot)
    put = lambda x, new: x.at[at].set(jnp.broadcast_to(new, x[at].shape))  # noqa: E731
    pair = jnp.stack([content, -content], axis=-1)
    pool = pool.changed(
        keys=put(pool.keys, pair), values=put(pool.values, pair + 0.5), positions=put(pool.positions, now),
        stats={"mark": put(pool.stats["mark"], content)},
    )  # fmt: skip
    keep, room = heads * (each - shift), heads * each
    kept, _ = pools.compete(worth, pool.positions, pool.owner, heads, keep, jnp.minimum(guard, each - shift))
    moved = pool.arranged(kept, room)
    pool = jax.tree.map(lambda a, b: jnp.where(now % 7 == 0, a, b), moved, pool)
    return pool.aimed(lowest(worth, pool.positions, pool.offsets))


@pytest.mark.long
@given(st.integers(0, 2**16), st.sampled_from([1, 3]), st.sampled_from([1, 4]))
@settings(max_examples=4, deadline=None)
def test_borders_move_over_a_long_decode(seed, shift, guard):
    """Total constant, no slot lost or shared, the safeguard kept, over 200 tokens; and the borders do move."""
    heads, slots, each = 3, 8, np.array([8, 6])
    layer = layer_of(np.broadcast_to(np.arange(slots), (2, heads, slots)))
    pool = build(layer, jnp.ones((2, heads * slots), bool) & (flattened(layer.entries).positions < 6), heads * slots,
                 jnp.asarray(heads * each))  # fmt: skip
    pool = pool.aimed(first_empty(pool.positions, pool.offsets))
    borders = set()
    for now in range(slots, slots + 200):
        pool = step(pool, jax.random.key(seed * 1000 + now), jnp.int32(now), jnp.asarray(each), shift, guard)
        if now % 7 == 0 or now % 50 == 0:
            check_pool(pool, heads * each)
            held = np.asarray(pool.held())
            assert (held >= np.minimum(guard, each - shift)[:, None]).all()
            assert (held.sum(axis=1) >= heads * (each - shift)).all() and (held.sum(axis=1) <= heads * each).all()
            borders.add(tuple(np.asarray(pool.offsets[0])))
        nexts, offsets = np.asarray(pool.next_slot), np.asarray(pool.offsets)
        assert (nexts >= offsets[:, :-1]).all() and (nexts < offsets[:, 1:]).all(), "each head's own slot"
    assert len(borders) > 3


def test_more_slots_for_every_head():
    positions = np.where(np.arange(5) < [[[3], [5]]], np.arange(5), EMPTY)
    layer = layer_of(positions)
    pool = build(layer, flattened(layer.entries).positions >= 0, 10, jnp.array([10]))
    wide = pool.widened(3)
    check_pool(wide, [16])
    for line, more in zip(heads_of(pool), heads_of(wide), strict=True):
        assert more[: len(line)].tolist() == line.tolist() and more[len(line) :].tolist() == [EMPTY] * 3
    assert all(wide.positions[0, slot] == EMPTY for slot in wide.next_slot[0])


# ---- one decode step


ON_TPU = jax.default_backend() == "tpu"
DECODES = {
    "reference": {},
    "numba_cpu": {},
    "mosaic_tpu": {} if ON_TPU else {"interpret": pltpu.InterpretParams(detect_races=True)},
}
VICTIM = Rule("each", 2)
POOLS = {  # sizes of the segments per row, slots in all, dim, G: a row may leave slots that are nobody's
    "one block": ([[9, 4, 7], [5, 6, 3]], 20, 8, 2),
    # a head in both, a head in one, a head of one slot; each head by itself through the blocks that it meets
    "two blocks": ([[700, 1, 399], [1020, 9, 60]], 1100, 256, 8),
    # more heads than a register has rows, some of them through a block together
    "nine heads": ([[200, 1, 250, 90, 300, 61, 120, 100, 78], [9, 300, 2, 7, 500, 200, 180, 90, 12]], 1320, 256, 2),
}


CASES = [
    *(("one block", group, VICTIM, counts, "float32") for group, counts in (("sum", 0), ("mean", 1), ("max", 0))),
    ("one block", "sum", None, 1, "bfloat16"),
    ("two blocks", "sum", VICTIM, 1, "float32"),
    ("nine heads", "mean", VICTIM, 1, "float32"),
    ("one block", "each", None, 0, "float32"),
    ("nine heads", "each", None, 1, "bfloat16"),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "how, shape, group, rule, counts, dtype",
    [
        pytest.param(how, *case, marks=[pytest.mark.long][: case[0] == "two blocks"])
        for how in DECODES
        for case in CASES
        if how != "numba_cpu" or (case[1] != "each" and case[-1] == "float32")
    ],
)
def test_ragged_decode_is_each_head_by_itself(how, shape, group, rule, counts, dtype):
    """Every head of a pool gets what decode_attend_score gives on its segment alone; the softcap and log n as well."""
    rng = np.random.default_rng(3)
    sizes, total, dim, groups = POOLS[shape]
    sizes, many = np.array(sizes), total
    heads = sizes.shape[1]
    offsets = np.concatenate([np.zeros((2, 1), int), np.cumsum(sizes, axis=1)], axis=1)
    positions = np.full((2, total), EMPTY)
    for row in range(2):
        for head in range(heads):
            filled = sizes[row, head] - (head == 1 and sizes[row, head] > 1)  # one head still has an empty slot
            positions[row, offsets[row, head] : offsets[row, head] + filled] = rng.permutation(many)[:filled]
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    query, key, value = normal(2, heads * groups, dim), normal(2, heads, dim), normal(2, heads, dim)
    keys, values, weight, bias = normal(2, total, dim), normal(2, total, dim), normal(2, total), normal(2, total)
    keys[positions < 0] = np.nan
    values[positions < 0] = np.nan
    second = np.minimum(sizes - 1, 1)
    position, slot, recents = np.array([many, many]), offsets[:, :-1] + second, np.array([2, 3])
    added = np.where(positions < 0, np.nan, np.log(rng.integers(1, 9, positions.shape))).astype(np.float32)
    np.put_along_axis(added, slot, 0.0, axis=1)
    options = {"scale": 0.3, "softcap": 5.0}
    query, key, value, keys, values = (jnp.asarray(x, dtype) for x in (query, key, value, keys, values))
    whole = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    token, held = Token(query, key, value, whole(position)), Segments(keys, values, whole(positions), whole(offsets))
    held = held._replace(bias=jnp.asarray(added) if counts else None)
    judge = Judge(whole([total, total]), whole(recents), jnp.asarray(weight), jnp.asarray(bias), rule, group)
    run = functools.partial(ragged_decode, **options, implementation=how, **DECODES[how])
    run = jax.jit(run, static_argnames="with_mass")
    out = run(token, held, whole(slot), judge)
    near = {"rtol": 2e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 2e-2, "atol": 2e-2}
    alone = jax.jit(functools.partial(decode_attend_score, **options))
    query, key, value, keys, values = map(np.asarray, (query, key, value, keys, values))
    for row in range(2):
        for head in range(heads):
            own = slice(offsets[row, head], offsets[row, head + 1])
            one = lambda x, own=own, row=row: jnp.asarray(x[row, own][None, None])  # noqa: E731
            mine = slice(head * groups, (head + 1) * groups)
            lone = alone(
                Token(
                    jnp.asarray(query[row, mine][None]), *(jnp.asarray(x[row, head][None, None]) for x in (key, value)),
                    whole([many]),
                ),
                Held(one(keys), one(values), whole(positions[row, own][None, None]), one(added) if counts else None),
                whole([[second[row, head]]]),
                Judge(whole([sizes[row, head]]), whole(recents[row : row + 1]), one(weight), one(bias), rule, group),
            )  # fmt: skip
            text = lambda x: np.asarray(x, np.float32)  # noqa: E731
            np.testing.assert_allclose(text(out.output[row, mine]), text(lone.output[0]), **near)
            np.testing.assert_allclose(out.lse[row, mine], lone.lse[0], rtol=2e-5, atol=1e-5)
            np.testing.assert_allclose(out.mass[row, ..., own], lone.mass[0, 0], rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(out.positions[row, own], lone.positions[0, 0])
            np.testing.assert_array_equal(text(out.keys[row, own]), text(lone.keys[0, 0]))
            np.testing.assert_array_equal(text(out.values[row, own]), text(lone.values[0, 0]))
            assert int(out.next_slot[row, head]) - offsets[row, head] == int(lone.next_slot[0, 0])
        assert (np.asarray(out.mass)[row, ..., offsets[row, -1] :] == 0).all()
    by_age = judge._replace(weight=0.0)
    with_it, without = (run(token, held, whole(slot), by_age, with_mass=asked) for asked in (True, False))
    assert without.mass is None and np.array_equal(without.next_slot, with_it.next_slot)
    np.testing.assert_array_equal(np.asarray(without.output, np.float32), np.asarray(with_it.output, np.float32))
    still = run(token._replace(position=whole([-1, many])), held, whole(slot), judge)
    np.testing.assert_array_equal(np.asarray(still.positions)[0], positions[0])
    np.testing.assert_array_equal(np.asarray(still.keys, np.float32)[0], np.asarray(keys, np.float32)[0])
    np.testing.assert_array_equal(np.asarray(still.next_slot)[0], slot[0])


@pytest.mark.parametrize("how", ["reference", "mosaic_tpu"])
def test_parts_of_a_pool_are_the_whole(how):
    """As devices have them that divide its slots: a part has some heads, a piece of one, or none of its slots, and the
    new tokens of those alone."""
    rng = np.random.default_rng(11)
    sizes, dim, groups, total = np.array([[150, 60, 46], [3, 250, 3]]), 64, 4, 256
    heads, piece = sizes.shape[1], total // 4
    offsets = np.concatenate([np.zeros((2, 1), int), np.cumsum(sizes, axis=1)], axis=1)
    positions = np.where(rng.random((2, total)) < 0.8, rng.permuted(np.tile(np.arange(total), (2, 1)), axis=1), EMPTY)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    whole = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    news = normal(2, heads * groups, dim), normal(2, heads, dim), normal(2, heads, dim)
    token, slot = Token(*news, whole([total, total])), offsets[:, :-1] + np.array([[140, 5, 45], [2, 200, 0]])
    held = Segments(normal(2, total, dim), normal(2, total, dim), whole(positions), whole(offsets))
    judge = Judge(whole([total] * 2), whole([0, 0]), group="each")
    want = ragged_decode(token, held, whole(slot), judge, scale=0.3, implementation="reference")
    parts = []
    for begin in range(0, total, piece):
        own = slice(begin, begin + piece)
        some = [x[:, own] for x in held[:3]]
        at = np.where((slot >= begin) & (slot < begin + piece), slot - begin, piece)
        mine = Segments(*some, whole(np.clip(offsets - begin, 0, piece)))
        got = ragged_decode(token, mine, whole(at), judge, scale=0.3, implementation=how, **DECODES[how])
        np.testing.assert_array_equal(got.keys, want.keys[:, own])
        np.testing.assert_array_equal(got.values, want.values[:, own])
        np.testing.assert_array_equal(got.positions, want.positions[:, own])
        parts.append(got)
    joined = merge(*(Partial(part.output, part.lse, None) for part in parts))
    np.testing.assert_allclose(joined.output, want.output, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(joined.lse, want.lse, rtol=2e-5, atol=1e-5)
    shares = [np.asarray(portion(part.lse, joined.lse)).reshape(2, heads, groups) for part in parts]
    owner = (np.arange(total) >= offsets[:, 1:, None]).sum(axis=1)
    for number, (part, share) in enumerate(zip(parts, shares, strict=True)):
        own = slice(number * piece, (number + 1) * piece)
        each = np.take_along_axis(share.swapaxes(1, 2), owner[:, None, own], axis=2)
        np.testing.assert_allclose(part.mass * each, want.mass[:, :, own], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule, counts", [(VICTIM, True), (None, False)])
def test_a_line_is_read_where_it_lies(rule, counts):
    """The CPU's kernel on a layer's part of a line, before the token is in it, equals the reference on a copy."""
    rng = np.random.default_rng(5)
    heads, groups, dim, total, slots = 3, 2, 8, 100, 30
    sizes = np.array([[9, 14, 7], [5, 6, 3]])
    first = np.array([41, total - slots])  # a row whose layer stands at the line's end
    begin = np.array([0, slots - sizes[1].sum()])
    offsets = begin[:, None] + np.concatenate([np.zeros((2, 1), int), np.cumsum(sizes, axis=1)], axis=1)
    inside = (np.arange(slots) >= offsets[:, :1]) & (np.arange(slots) < offsets[:, -1:])
    positions = np.where(inside, rng.permuted(np.tile(np.arange(slots), (2, 1)), axis=1), EMPTY)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    whole = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    line = Line(normal(2, total, dim), normal(2, total, dim), whole(first))
    copies = [jnp.stack([x[row, at : at + slots] for row, at in enumerate(first)]) for x in line[:2]]
    news = normal(2, heads * groups, dim), normal(2, heads, dim), normal(2, heads, dim)
    token, held = Token(*news, whole([slots, slots + 5])), Segments(*copies, whole(positions), whole(offsets))
    held = held._replace(bias=jnp.abs(normal(2, slots)) if counts else None)
    others = whole(offsets[:, :-1] + 1), Judge(whole([slots] * 2), whole([2, 3]), normal(2, slots), 0.5, rule)
    run = functools.partial(ragged_decode, scale=0.3)
    theirs = run(token, held, *others, implementation="reference")
    poisoned = Segments(*(jnp.full_like(copy, jnp.nan) for copy in copies), *held[2:4], line, held.bias)
    ours = jax.jit(functools.partial(run, implementation="numba_cpu"))(token, poisoned, *others)
    for name in ("output", "lse", "mass"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(ours.next_slot, theirs.next_slot)
    np.testing.assert_array_equal(ours.positions, theirs.positions)


def test_heads_of_a_pool_choose_each_for_itself():
    one, row = jnp.ones((1, 1, 8)), jnp.zeros(1, jnp.int32)
    held = Segments(jnp.ones((1, 4, 8)), jnp.ones((1, 4, 8)), jnp.zeros((1, 4), jnp.int32), jnp.array([[0, 4]]))
    with pytest.raises(ValueError, match=r"heads='sum': .* give heads='each'"):
        ragged_decode(Token(one, one, one, row), held, row[None], Judge(row, row, rule=Rule("sum")), scale=1.0)


def test_numbers_of_other_forms_are_read_as_what_they_are():
    """The CPU's kernel reads bytes: it is given float32, and one of each slot."""
    cpu_decode = pytest.importorskip("pallas_kernels.cpu_decode")
    rng = np.random.default_rng(6)
    half = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731
    query, keys, values = wide(half(2, 4, 8)), wide(half(2, 9, 8)), wide(half(2, 9, 8))
    token = Token(query, half(2, 2, 8), half(2, 2, 8), jnp.array([20, 21]))
    positions = jnp.asarray([rng.permutation(9) for _ in range(2)])
    held = Segments(keys, values, positions, jnp.array([[0, 4, 9]] * 2), bias=half(2, 9))
    slot, judge = jnp.array([[1, 5], [2, 6]]), Judge(*jnp.full((2, 2), 0), half(2, 1), half(2, 9), Rule("each"))
    plain = token._replace(key=wide(token.key), value=wide(token.value)), held._replace(bias=wide(held.bias))
    full = judge._replace(weight=jnp.tile(wide(judge.weight), (1, 9)), bias=wide(judge.bias))
    theirs = ragged_decode(*plain, slot, full, scale=0.3, implementation="reference")
    ours = ragged_decode(*plain, slot, judge, scale=0.3, implementation="numba_cpu")
    np.testing.assert_array_equal(ours.next_slot, theirs.next_slot)
    given = cpu_decode.step(token, held._replace(positions=ours.positions), slot, judge, scale=0.3)
    for name in ("output", "lse", "mass"):
        for x in (getattr(ours, name), getattr(given, name)):
            want = getattr(theirs, name)
            np.testing.assert_allclose(x.reshape(want.shape), want, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(given.next_slot, theirs.next_slot)


# ---- whole runs


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in POOLED]
)
def test_bytes_are_the_budget(tiny, name):
    """Keys and values held over the full cache's: the fraction asked for, however the heads differ; a policy that
    summarises what it drops holds one more of each per head.
    """
    params, tokens = tiny(FAMILY), 96

    full = jaxkv.prefill(params, ids(tokens)).kv_bytes
    policy = jaxkv.policy(name, ratio=0.75, **SMALL.get(name, {}))
    cache = jaxkv.prefill(params, ids(tokens), policy=policy)
    more = full // tokens if policy.prefill.evicted.state == "summary" else 0
    limits = np.asarray(cache.limits)[:, 0]
    assert limits.mean() == 24
    assert cache.kv_bytes == full // (tokens * len(limits)) * sum(in_pieces(int(limit)) for limit in limits) + more
    assert all(map(pooled, cache.views))
    held = np.asarray(cache.held())
    assert held.sum() == (24 - policy.prefill.reserve) * held[:, 0].size
    if name not in ("simlayerkv", "defensivekv", "prefixkv"):  # no layer of a random model is lazy, attention is even
        assert (np.ptp(held) if isinstance(policy.allocate, Across) else np.ptp(held, axis=-1).max()) > 0, "they differ"


@pytest.mark.long
def test_borders_move_while_decoding(tiny):
    """adakv-h2o: the same bytes and safeguard after 60 tokens, between other borders."""
    params = tiny(FAMILY)
    policy = jaxkv.policy("adakv-h2o", budget=16, interval=5, shift=3)
    still = dataclasses.replace(policy, allocate=dataclasses.replace(policy.allocate, interval=0))
    run = functools.partial(jaxkv.generate, params, ids(50), stop_tokens=())
    begun, moved, fixed = (run(policy=p, max_new_tokens=n) for p, n in ((policy, 1), (policy, 60), (still, 60)))
    assert begun.cache.nbytes == moved.cache.nbytes
    borders = [np.stack([np.asarray(layer.offsets) for layer in out.cache.layers]) for out in (begun, moved, fixed)]
    assert (borders[0] == borders[2]).all() and (borders[0] != borders[1]).any()
    for layer in moved.cache.layers:
        assert (np.asarray(layer.held()) >= 5).all(), "a quarter is recent, and one entry can go"
        assert int(np.asarray(layer.offsets)[0, -1]) == layer.total


@pytest.mark.long
def test_cuts_every_few_tokens_move_borders(tiny):
    """A decode phase that cuts every 4 tokens lets the heads compete at each cut, also with a score that compares."""
    params = tiny(FAMILY)
    policy = dataclasses.replace(jaxkv.policy("keydiff", budget=16, every=4), allocate=Adaptive(), rope="text")
    out = jaxkv.generate(params, [ids(50), ids(6, 1)], policy=policy, max_new_tokens=40, stop_tokens=())
    for layer in out.cache.layers:
        assert pooled(layer) and layer.slots == in_pieces(20)
        held = np.asarray(layer.held()).sum(axis=1)
        assert (held >= 16 * layer.heads).all() and (held <= 20 * layer.heads).all()
        assert np.ptp(np.asarray(layer.held()), axis=1).max() > 0


@pytest.mark.long
def test_a_pool_goes_on_with_more_text_and_with_everything(tiny):
    """A second prompt competes with what is there; under "full" a pool grows, and nothing more is lost."""
    params = tiny(FAMILY)
    policy = jaxkv.policy("adakv", budget=20, window=4, block=16)
    cache = jaxkv.prefill(params, ids(60), policy=policy)
    second = jaxkv.prefill(params, ids(30, 1), cache=cache)
    for layer in second.layers:
        assert int(layer.held().sum()) == 20 * layer.heads
        assert all(set(range(86, 90)) <= set(line) for line in heads_of(layer)), "the window of the last prompt"
    full = catalogue()["full"]
    before = np.asarray(cache.held())
    out = jaxkv.generate(params, ids(10, 2), cache=cache, policy=full, max_new_tokens=9, stop_tokens=())
    assert (np.asarray(out.cache.held()) == before + 18).all()
    on = jaxkv.generate(params, cache=out.cache, max_new_tokens=80, stop_tokens=())
    assert (np.asarray(on.cache.held()) == before + 98).all()
    whole = jaxkv.generate(params, ids(10, 2), cache=cache, policy=full, max_new_tokens=89, stop_tokens=())
    assert [*out.tokens[0], *on.tokens[0]] == whole.tokens[0].tolist()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: jaxkv.policy("adakv", budget=99, heads="sum"), "decide as one"),
        (lambda: jaxkv.policy("adakv", budget=99, rope="cache"), "rope='text'"),
        (lambda: jaxkv.policy("adakv", budget=99, safeguard=1.5), "safeguard=1.5"),
        (lambda: jaxkv.policy("adakv", budget=99, interval=8), "without a decode phase none move"),
        (lambda: jaxkv.policy("adakv-h2o", budget=8, interval=8, shift=8), "shift=8"),
        (lambda: jaxkv.policy("adakv-h2o", budget=8, shift=0), "shift=0"),
        (
            lambda: dataclasses.replace(catalogue()["knorm"], rope="text", allocate=Adaptive(of=Attention())),
            "'attention' needs what the prefill score has not: mass",
        ),
        (lambda: dataclasses.replace(catalogue()["full"], allocate=Adaptive()), "evicts nothing"),
        (lambda: dataclasses.replace(catalogue()["kvcrush"], allocate=Adaptive()), "decide as one"),
    ],
)
def test_what_cannot_compete_is_refused(make, words):
    with pytest.raises(BadValue, match=words):
        make()


def test_pools_under_drafts_are_refused(tiny):
    policy = jaxkv.policy("adakv", budget=20, window=4)
    cache = jaxkv.prefill(tiny(FAMILY), ids(30), policy=policy)
    for options in ({"policy": policy}, {"cache": cache, "policy": catalogue()["full"]}):
        with pytest.raises(BadValue, match="share a pool"):
            jaxkv.generate(tiny(FAMILY), ids(9), speculative=jaxkv.speculative.AASD(), **options)
