"""The family of methods: scores and kept entries against kvpress, and against small NumPy versions of the papers."""

import dataclasses
import functools
import re
import tomllib
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from ordered import heads_of

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.models.rope import rotate
from jaxkv.plan import PromptBlocks
from jaxkv.policies import (
    AccumulatedAttention,
    Adaptive,
    Aggregate,
    Attention,
    FixedPlace,
    Follow,
    LagKV,
    Leverage,
    Maximum,
    NonCausal,
    Phase,
    Random,
    Recurrence,
    Redundancy,
    Scaled,
    Select,
    StretchLeverage,
    Then,
    Weighted,
    catalogue,
    observe,
)
from jaxkv.policies.needs import HIDDEN, MASS, OUTPUT
from jaxkv.policies.order import BIG, best_first
from jaxkv.policies.parts import PARTS
from jaxkv.policies.policy import from_dict, to_dict
from jaxkv.policies.score import Entering, KeyNorm, Recency, ScoreInputs
from jaxkv.pseudo import behind, first_pass
from jaxkv.store import entries as of_slots
from pallas_kernels.prefill_attend_mass.reference import prefill_attend_mass

RTOL = 1e-4
CLEAR = 2e-5  # smallest margin of every golden here: rounding can't change what is kept

# kvpress' method -> our policy, its options, and whether its own scores can be compared (ChunkKV records those of the
# scorer inside, ChunkPress' become places in a chunk)
BARE = {"epsilon": 0.0, "allocate": {"kind": "uniform"}}  # ExpectedAttentionPress by itself
MORE = {
    "keydiff": ("keydiff", {}, True),
    "cur": ("cur", {}, True),
    "lagkv-l16": ("lagkv", {"sinks": 4, "lag": 16}, True),
    "expected-n512": ("expected-attention", BARE, True),
    "expected-n512-e0.01": ("expected-attention", BARE | {"epsilon": 0.01}, True),
    "cap": ("capkv", {}, True),
    "chunkkv-c10-snapkv-w8-k5": ("chunkkv", {"window": 8, "chunk": 10}, False),
}
EVEN = {"allocate": {"kind": "uniform"}, "select": {}}  # equal heads, and nothing protected, as in kvpress
NON_CAUSAL = {"kind": "non-causal", "neighbours": 3, "by_value": True, "apart": True}
BLEND = {
    **{"kind": "weighted", "first": {"kind": "leverage"}, "first_weight": "ratio"},
    **{"second": NON_CAUSAL | {"mutual": 36}, "second_weight": 1.0},
}
FINCH = {"observe": {"kind": "none"}, "score": {"kind": "question-attention", "question": 8}, "aggregate": {}}
FAMILY = {
    "criticalkv-snapkv-w8-k5": ("criticalkv", {"window": 8}, True),
    "leverage-s48": ("leverage", {"score": {"kind": "leverage"}, **EVEN}, True),
    "noncausal-c40": ("non-causal", {"score": NON_CAUSAL | {"mutual": 40}, **EVEN}, True),
    "compactor-c36": ("compactor", {"score": BLEND, **EVEN, "select": {"sinks": 8, "recent": 4}}, True),
    "chunk-c40-knorm": ("chunk-topk", {"chunk": 40}, False),
    "finch-w8": ("finch", FINCH | {"recent": 8, "rope": "text"}, True),
    "egchunkkv-c10-knorm": ("chunkkv-entropy", {}, False),
}
CALIBRATED = {
    "qfilters": ("q-filters", {"prefill_recent": 0}, True),
    "expected-stats-n512": ("expected-attention-stats", BARE, True),
}
GEMMA = (
    "keydiff",
    "cur",
    "lagkv-l16",
    "leverage-s48",
    "noncausal-c40",
    "compactor-c36",
    "chunk-c40-knorm",
    "egchunkkv-c10-knorm",
)
METHODS = {**{name: ("more", *entry) for name, entry in MORE.items()}, **{n: ("family", *e) for n, e in FAMILY.items()}}
METHODS |= {name: ("calibrated", *entry) for name, entry in CALIBRATED.items()}
FAMILIES = ["llama2", "llama3", "qwen2", "qwen3", "mistral", "gemma3_text"]


def _sketch(self, heads, dims):
    """The sketch of the golden (tests/oracle/make_kvpress.py)."""
    normal = np.random.default_rng(0).standard_normal((heads, dims, self.sketch)).astype(np.float32)
    return jnp.asarray(normal) * self.sketch**-0.5


def _twin(method, budget):
    """Our policy of a kvpress method."""
    _, name, options, _ = METHODS[method]
    if method == "egchunkkv-c10-knorm":  # the choice of chunks is the policy's, the score is not
        policy, aggregate = catalogue()[name], Aggregate(heads="sum")
        select = dataclasses.replace(policy.prefill.select, recent=0)
        return dataclasses.replace(
            policy, prefill=Phase(score=KeyNorm(), aggregate=aggregate, select=select), budget=budget
        )
    return jaxkv.policy(name, budget=budget, **options)


def _held(layer) -> np.ndarray:
    """Sorted positions [Hk, n] of row 0."""
    return np.stack([np.sort(head[head >= 0]) for head in np.asarray(layer.positions[0])])


def _compare(ours, theirs):
    """The scores of what nobody protects; what is protected is above it in both."""
    free = ours < min(1e30, np.inf)
    if theirs.max() == 1 and (theirs == 1).sum() > len(theirs):  # LagKV: the tail is 1, ours is above by its place
        free &= theirs < 1
    assert free.any()
    if not free.all():
        assert theirs[~free].min() >= theirs[free].max() - 1e-6
    np.testing.assert_allclose(ours[free], theirs[free], rtol=RTOL, atol=RTOL * np.std(theirs[free]) * 0.1)


def _check_twin(goldens, as_in_kvpress, scored, monkeypatch, family, method, ratio):
    monkeypatch.setattr(Leverage, "gaussian", _sketch)
    golden = arrays(goldens / "kvpress" / f"{family}-{METHODS[method][0]}.npz")
    params, ids = as_in_kvpress(family), golden["ids"][0]
    case = f"{method}/r{ratio}"
    layers = sorted({int(key.split("/")[2][5:]) for key in golden if key.startswith(case + "/")})
    budget = golden[f"{case}/layer{layers[0]}/kept"].shape[1]  # ChunkKV's is a multiple of its chunk
    cache, worths = scored(params, ids, _twin(method, budget))
    for layer in layers:
        where = f"{case}/layer{layer}/"
        assert golden[where + "margin"].min() > (-1 if method.startswith("lagkv") else CLEAR)
        if METHODS[method][3]:
            _compare(worths[layer], golden[where + "scores"])
        ours, theirs = _held(cache.layers[layer]), golden[where + "kept"]
        if method.startswith("lagkv"):  # its scores are ranks, the same in every partition: ties at the cut
            scores = golden[where + "scores"]
            for head in range(len(ours)):
                assert np.array_equal(np.sort(scores[head][ours[head]]), np.sort(scores[head][theirs[head]]))
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=where)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_kvpress_twins(goldens, as_in_kvpress, scored, monkeypatch, method):
    """Scores and kept positions of every layer."""
    _check_twin(goldens, as_in_kvpress, scored, monkeypatch, "llama3", method, "0.5")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_kvpress_twins_everywhere(goldens, as_in_kvpress, scored, monkeypatch, family, method):
    """The same at every ratio and for every family; of Gemma, the full layers."""
    if method not in GEMMA and family == "gemma3_text":
        pytest.skip("kvpress scales Gemma's attention by the wrong number, or does not run on it")
    if method.startswith("criticalkv") and family == "qwen2":
        pytest.skip("kvpress' CriticalKV wants a head_dim in the configuration")
    if method in CALIBRATED and family not in ("llama2", "llama3"):
        pytest.skip("there are goldens of two families")
    for ratio in ("0.3", "0.5", "0.75"):
        _check_twin(goldens, as_in_kvpress, scored, monkeypatch, family, method, ratio)


REPLAYED = [
    pytest.param(family, method, ratio, marks=() if (family, ratio) == ("llama3", "0.5") else pytest.mark.slow)
    for family in FAMILIES[:-1]  # kvpress refuses KVzip for Gemma 3
    for method in ("kvzip", "kvzip-plus")
    for ratio in ("0.3", "0.5", "0.75")
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "method", "ratio"), REPLAYED)
def test_replay_as_in_kvpress(goldens, as_in_kvpress, scored, family, method, ratio):
    """KVzip and KVzip+: scores, and what heads that compete for a layer's budget keep; the instruction in tokens."""
    golden = arrays(goldens / "kvpress" / f"{family}-replay.npz")
    params, ids = as_in_kvpress(family), golden["ids"][0]
    params = dataclasses.replace(params, tokenizer=lambda text, **_: {"input_ids": [7, 11, 13]})
    policy = jaxkv.policy(method, budget=int(len(ids) * (1 - float(ratio))))
    cache, worths = scored(params, ids, dataclasses.replace(policy, allocate=Adaptive(safeguard=0.0)))
    for index, (layer, ours) in enumerate(zip(cache.layers, worths, strict=True)):
        scores, kept, margin = (
            golden[f"{method}/r{ratio}/layer{index}/{name}"] for name in ("scores", "kept_mask", "margin")
        )
        assert margin.min() > CLEAR
        assert np.isposinf(ours[:, :4]).all() and (scores[:, :4] > scores[:, 4:].max() + 0.9).all()
        np.testing.assert_allclose(ours[:, 4:], scores[:, 4:], rtol=RTOL)
        for head, held in enumerate(heads_of(layer)):
            np.testing.assert_array_equal(held[held >= 0], np.flatnonzero(kept[head]))


COMPOSED = [
    pytest.param(family, ratio, marks=() if (family, ratio) == ("llama3", "0.5") else pytest.mark.slow)
    for family in FAMILIES[:-1]
    for ratio in ("0.25", "0.5", "0.75")
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "ratio"), COMPOSED)
def test_composite_tokens_as_in_kvpress(goldens, as_in_kvpress, scored, family, ratio):
    """KVCompose: scores, how many tokens each layer keeps of the budget of all, and which each of its heads."""
    golden = arrays(goldens / "kvpress" / f"{family}-compose.npz")
    params, ids = as_in_kvpress(family), golden["ids"][0]
    cache, worths = scored(params, ids, jaxkv.policy("kvcompose", budget=int(len(ids) * (1 - float(ratio)))))
    sizes = set()
    for index, (layer, ours) in enumerate(zip(cache.views, worths, strict=True)):
        scores, kept, margin = (
            golden[f"kvcompose/r{ratio}/layer{index}/{name}"] for name in ("scores", "kept_mask", "margin")
        )
        assert margin.min() > CLEAR
        np.testing.assert_allclose(ours, scores, rtol=RTOL)
        for head, held in enumerate(heads_of(layer)):
            np.testing.assert_array_equal(held[held >= 0], np.flatnonzero(kept[head]))
        sizes.add(int(kept[0].sum()))
    assert len(sizes) > 1


# What follows needs no model: arrays of one row, two heads, S entries in shuffled slots.

S, HEADS, DIMS = 24, 2, 8


@pytest.fixture
def entries():
    """`(inputs, arrays)`: entries at positions 0..S-1 (in time order in `arrays`) in shuffled slots, 3 empty."""
    rng = np.random.default_rng(7)
    order = np.concatenate([rng.permutation(S)])
    keys, values = rng.normal(size=(2, 1, HEADS, S, DIMS)).astype(np.float32)
    mass = rng.random((1, HEADS, S)).astype(np.float32)
    holes = 3

    def slots(x, empty):
        x = np.concatenate([x[:, :, order], np.broadcast_to(empty, (1, HEADS, holes, *x.shape[3:]))], axis=2)
        return jnp.asarray(x)

    positions = slots(np.broadcast_to(np.arange(S, dtype=np.int32), (1, HEADS, S)), np.int32(-1))
    inputs = ScoreInputs(
        keys=slots(keys, np.float32(np.nan)),
        values=slots(values, np.float32(np.nan)),
        places=positions,
        positions=positions,
        mass=slots(mass, np.float32(0)),
        now=jnp.array([S], jnp.int32),
        limits=jnp.array([S // 2], jnp.int32),
        protected=jnp.zeros(positions.shape, bool),
        rotate=lambda x, at: x,
    )

    def in_time(x):
        return np.asarray(x)[:, :, np.argsort(order)]

    return inputs, {"keys": keys, "values": values, "mass": mass, "slots": slots, "in_time": in_time}


@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_redundancy_of_copies(entries, threshold):
    """R-KV's second term by its formula, and: of three copies the newest is the least redundant."""
    inputs, arrays = entries
    keys = arrays["keys"].copy()
    keys[:, :, 5] = keys[:, :, 11] = keys[:, :, 17]
    inputs = dataclasses.replace(inputs, keys=arrays["slots"](keys, np.float32(np.nan)))
    got = arrays["in_time"](Redundancy(threshold=threshold).score({}, inputs))[0]
    unit = keys[0] / np.linalg.norm(keys[0], axis=-1, keepdims=True)
    for head in range(HEADS):
        cos = unit[head] @ unit[head].T
        np.fill_diagonal(cos, 0)
        for row in cos:
            near = np.flatnonzero(row > threshold)
            if len(near):
                row[near[-1]] = 0
        mean = cos.mean(axis=0)
        want = -np.exp(mean) / np.exp(mean).sum()
        np.testing.assert_allclose(got[head], want, rtol=RTOL)
        if threshold == 0.9:  # nothing else is near them
            assert got[head, 5] < got[head, 11] < got[head, 17]


def test_neighbours_of_the_best_count_less(entries):
    """GraphKV by its formula: s_j times (1 - e_ij) for each source i that has j among its 3 nearest, two rounds."""
    inputs, arrays = entries
    inputs = dataclasses.replace(inputs, protected=inputs.at >= S - 2)
    part = dataclasses.replace(catalogue()["graphkv"].prefill.score, share=0.5, neighbours=3, rounds=2)
    got = arrays["in_time"](part.score({}, inputs))[0]
    keys, mass, nodes = arrays["keys"][0], arrays["mass"][0], range(S - 2)
    unit, decayed = keys / np.linalg.norm(keys, axis=-1, keepdims=True), 0
    for head in range(HEADS):
        want = mass[head].copy()
        for _ in range(2):
            for source in sorted(nodes, key=lambda node: -mass[head, node])[: S // 4]:
                edges = {node: unit[head, source] @ unit[head, node] for node in nodes if node != source}
                for node in sorted(edges, key=edges.get, reverse=True)[:3]:
                    want[node] *= 1 - max(edges[node], 0)
        decayed += (want != mass[head]).sum()
        np.testing.assert_allclose(got[head], want, rtol=RTOL)
    assert HEADS * S / 4 < decayed < HEADS * (S - 2)


@pytest.mark.parametrize("sketch", [0, 4])
def test_leverage_is_the_hat_matrix(entries, sketch):
    """x^T (X^T X + 0.01)^-1 x of the centred keys, in z-scores over the row, whatever lies in empty slots."""
    inputs, arrays = entries
    part = Leverage(sketch=sketch)
    got = arrays["in_time"](part.score({}, inputs))[0]
    x = arrays["keys"][0].astype(np.float64)
    x = x - x.mean(axis=1, keepdims=True)
    if sketch:
        x = x @ np.asarray(part.gaussian(HEADS, DIMS), np.float64)
    hat = np.stack([np.einsum("sd,de,se->s", y, np.linalg.inv(y.T @ y + 0.01 * np.eye(y.shape[1])), y) for y in x])
    np.testing.assert_allclose(got, (hat - hat.mean()) / hat.std(ddof=1), rtol=RTOL, atol=1e-4)


def test_lag_kv_with_a_constant_channel(entries):
    """A channel that does not vary in the next partition says nothing; kvpress divides by zero there."""
    inputs, arrays = entries
    keys = arrays["keys"].copy()
    keys[..., 3] = 1.5
    inputs = dataclasses.replace(inputs, keys=arrays["slots"](keys, np.float32(np.nan)), sinks=2)
    got = np.asarray(LagKV(lag=4, cross=True).score({}, inputs))
    assert np.isfinite(np.where(np.asarray(inputs.live), got, 0)).all()


def test_lag_kv_keeps_the_newest_of_a_short_text(entries):
    inputs, arrays = entries
    got = arrays["in_time"](LagKV(lag=16).score({}, dataclasses.replace(inputs, sinks=4)))
    assert (np.diff(got, axis=-1) > 0).all()


def _entering(pads, length=20):
    """Random tokens behind `pads` empty places, and the queries, keys and values of the tokens."""
    rng = np.random.default_rng(3)
    query, key, value = (rng.normal(size=(1, heads, length, DIMS)).astype(np.float32) for heads in (4, 2, 2))

    def padded(x):
        return jnp.asarray(np.concatenate([np.full((*x.shape[:2], pads, DIMS), 9.0, np.float32), x], axis=2))

    positions = jnp.asarray(np.concatenate([np.full(pads, -1), np.arange(length)])[None], jnp.int32)
    return Entering(padded(key), padded(value), padded(query), positions, lambda x, at: x), query[0], key[0], value[0]


@pytest.mark.some(1)
@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("pads", [0, 3])
def test_non_causal_chunks_do_not_leak(pads, released):
    """Chunks of 8 of 20 tokens: the last has 4, and neither padding nor another chunk adds to its sums; as released its
    keys get an eighth for each of the 4 queries that it lacks."""
    new, query, key, value = _entering(pads)
    length = key.shape[1]
    part = NonCausal(mutual=8) if released else NonCausal(mutual=8, neighbours=3, by_value=True, apart=True)
    got = np.asarray(part.enter(new)["non_causal"])[0, :, pads:]
    want = np.zeros((2, length))
    for head in range(4):
        for start in range(0, length, 8):
            logits = query[head, start : start + 8] @ key[head // 2, start : start + 8].T
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            want[head // 2, start : start + 8] += (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0) / 2
    if released:
        want[:, 16:] += 4 / 8
    else:
        want = want * np.linalg.norm(value, axis=-1)
        want = np.stack([np.convolve(row, np.ones(3) / 3, mode="same") for row in want])
    np.testing.assert_allclose(got, want, rtol=RTOL)


@pytest.mark.parametrize("pads", [0, 3])
def test_leverage_by_stretches(pads):
    """The hat matrix of each stretch of 8 of 20 tokens by itself, the last of 4, as z-scores over its heads and tokens;
    padding adds nothing, and a decoded token has 0."""
    new, _, key, _ = _entering(pads)
    part = StretchLeverage(sketch=5, stretch=8)
    got = np.asarray(part.enter(new)["stretch_leverage"])[0]
    assert (got[:, :pads] == 0).all()
    for start in (0, 8, 16):
        x = key[:, start : start + 8].astype(np.float64)
        x = (x - x.mean(1, keepdims=True)) @ np.asarray(part.gaussian(DIMS), np.float64)
        inverse = np.linalg.inv(x.swapaxes(1, 2) @ x + 0.005 * np.eye(5))
        hat = np.einsum("hsd,hde,hse->hs", x, inverse, x)
        want = (hat - hat.mean()) / hat.std()
        np.testing.assert_allclose(got[:, pads + start :][:, :8], want, rtol=RTOL, atol=1e-4)
    assert not part.enter(dataclasses.replace(new, prompt=False))["stretch_leverage"].any()


@pytest.mark.long
def test_who_looks_changes_no_statistic_of_a_token_that_enters(tiny):
    """The tokens behind a block are not of it: they enter no chunk, and are not the newest."""
    score = {
        "kind": "weighted",
        "first": {"kind": "non-causal", "mutual": 8, "apart": True},
        "second": {"kind": "attention"},
    }
    kept = []
    for who in ({"kind": "all-queries"}, {"kind": "pseudo-queries", "count": 5}, {"kind": "replay"}):
        phase = {"score": {**score, "second_weight": 0.0}, "observe": who, "select": {"recent": 4}}
        cache = jaxkv.prefill(tiny("llama3"), _ids(40), policy=from_dict({"name": "x", "budget": 16, "prefill": phase}))
        kept.append([np.sort(layer.positions, axis=-1).tolist() for layer in cache.layers])
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.long
def test_a_question_behind_every_block(tiny):
    """FINCH (`finch`): of the first 25 tokens stays what the prompt's last 4, run behind them, look at, and no block
    comes behind the last."""
    params, row = tiny("llama3"), _ids(45)
    policy = jaxkv.policy("finch", budget=16, count=4, recent=4, block=20)
    question = row[-4:].tolist()
    given = behind(params, [row], policy.prefill.observe, PromptBlocks(5, 2, 20))
    assert given.tolist() == [[question, question, [-1] * 4]]

    phase = dataclasses.replace(policy.prefill, observe=observe.PseudoQueries(count=4, content="last", at="block"))
    asked = dataclasses.replace(policy, prefill=phase)

    def kept(part, policy, **given):
        return [set(_held(layer)[0]) for layer in jaxkv.prefill(params, [part], policy=policy, **given).layers]

    before = kept(row[:25], asked, pseudo=row[None, -4:])
    assert all({p for p in held if p < 25} <= own for held, own in zip(kept(row, policy), before, strict=True))
    assert before != kept(row[:25], asked), "another question keeps others"


@pytest.mark.parametrize(
    ("name", "options", "protected"),
    [
        ("finch", {"count": 4, "recent": 4}, 4),
        ("quickvideo", {"chunk": 20, "recent": 4}, 4),
        ("a2sf", {"recent": 0}, 0),
    ],
)
def test_a_budget_that_grows_with_the_text(tiny, monkeypatch, name, options, protected):
    """After k of four equal blocks a row holds what is protected and k/4 of the rest; a short one is never cut."""
    params, rows, held, text = tiny("llama3"), [_ids(80), _ids(19, 1)], [], 80 - protected

    def watched(block, *args, **static):
        out = block(*args, **static)
        held.append([{len(of[of >= 0]) for layer in out[0] for of in heads_of(layer, row)} for row in (0, 1)])
        return out

    for block in ("first_block", "next_block"):
        monkeypatch.setattr(jaxkv.run, block, functools.partial(watched, getattr(jaxkv.run, block)))
    grows = jaxkv.policy(name, budget=23, block=20, grows=True, **options)
    cache = jaxkv.prefill(params, rows, policy=grows)
    want = [protected + -(-(23 - protected) * min(20 * k, text) // text) for k in (1, 2, 3, 4)]
    assert held == [[{many}, {0}] for many in want[:-1]] + [[{23}, {19}]] and want[-1] == 23

    del held[:]
    at_once = jaxkv.prefill(params, rows, policy=dataclasses.replace(grows, grows=False))
    assert [long for long, _ in held] == [{20}, {23}, {23}, {23}]
    assert [layer.slots for layer in at_once.layers] == [layer.slots for layer in cache.layers]
    one, other = (
        jaxkv.prefill(params, rows, policy=dataclasses.replace(grows, block=80, grows=each)) for each in (True, False)
    )
    assert [_held(layer).tolist() for layer in one.layers] == [_held(layer).tolist() for layer in other.layers]


def test_recurrence_by_hand():
    """Two entries' gaps over a hand-made history: the one that comes back soon is worth more when it is due."""
    part = Recurrence(threshold=0.5)
    none = jnp.zeros((1, 1, 2, DIMS))
    stats = part.enter(Entering(none, none, positions=jnp.array([[1, 2]]), prompt=False))
    assert stats["last_seen"].tolist() == [[[1.0, 2.0]]], "the step before each came, and one"
    hits = {3: (1, 0), 5: (1, 0), 9: (0, 1), 10: (1, 0)}  # entry 0 at 3, 5, 10; entry 1 at 9
    for step in range(3, 13):
        mass = jnp.asarray([[hits.get(step, (0, 0))]], jnp.float32)
        stats = part.observe(stats, mass, jnp.array([step + 1]))
    assert stats["last_seen"].tolist() == [[[11.0, 10.0]]]
    assert stats["longest_gap"].tolist() == [[[5.0, 8.0]]]
    inputs = ScoreInputs(positions=jnp.array([[[1, 2]]], jnp.int32), now=jnp.array([13]))
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    want = [2 * sigmoid(-1 - 2 / 5) + 2 * sigmoid(1 - 5), 2 * sigmoid(-1 - 3 / 8) + 2 * sigmoid(1 - 8)]
    np.testing.assert_allclose(np.asarray(part.score(stats, inputs))[0, 0], want, rtol=RTOL)


def test_forgetting_factor():
    """A2SF: after n observations the sum over them of decay^age * mass."""
    rng, part = np.random.default_rng(0), AccumulatedAttention(decay=0.7)
    masses = rng.random((6, 1, 2, 5)).astype(np.float32)
    stats = part.enter(Entering(jnp.zeros((1, 2, 5, DIMS)), jnp.zeros((1, 2, 5, DIMS))))
    for step, mass in enumerate(masses[:-1]):
        stats = part.observe(stats, jnp.asarray(mass), jnp.array([step + 1]))
    weight, bias = part.factors(stats, jnp.zeros((1, 2, 5), jnp.int32), jnp.array([6]))
    want = sum(0.7 ** (5 - i) * mass for i, mass in enumerate(masses))
    np.testing.assert_allclose(weight * masses[-1] + np.asarray(bias), want, rtol=RTOL)


@pytest.mark.parametrize("by", ["value-l1", "value-l2", "output-l1"])
def test_scaled_by_the_size_of_the_value(by):
    """VATP's and CriticalKV's factor, as a line in the mass and as a score."""
    rng = np.random.default_rng(1)
    values, out = rng.normal(size=(1, 2, 6, DIMS)), rng.normal(size=(4, DIMS, 10))
    values, out = values.astype(np.float32), out.astype(np.float32)
    part = Scaled(of=AccumulatedAttention(), by=by, epsilon=0.5)
    stats = part.enter(Entering(jnp.asarray(values), jnp.asarray(values)))
    size = {"value-l1": np.abs(values).sum(-1), "value-l2": np.sqrt((values**2).sum(-1))}.get(by)
    if size is None:
        size = np.stack([np.abs(values[0, h // 2] @ out[h]).sum(-1) for h in range(4)])
        size = size.reshape(2, 2, 6).mean(1)[None]
    past, mass = rng.random((2, 1, 2, 6)).astype(np.float32)
    stats["attention"] = jnp.asarray(past)
    at = jnp.zeros((1, 2, 6), jnp.int32)
    inputs = ScoreInputs(
        values=jnp.asarray(values), positions=at, mass=jnp.asarray(mass), now=jnp.array([6]), out=jnp.asarray(out)
    )
    want = (mass + past + 0.5) * size
    np.testing.assert_allclose(np.asarray(part.score(stats, inputs)), want, rtol=RTOL)
    assert part.linear != (OUTPUT in part.needs) == (by == "output-l1")
    if part.linear:
        weight, bias = part.factors(stats, at, jnp.array([6]))
        np.testing.assert_allclose(np.asarray(weight) * mass + np.asarray(bias), want, rtol=RTOL)
    with pytest.raises(BadValue, match="turn its order around"):
        Scaled(of=KeyNorm(), by=by)


def test_weighted_max_and_then(entries):
    inputs, arrays = entries
    mass, newest = arrays["mass"][0], np.broadcast_to(np.arange(S), (HEADS, S))
    show = lambda part: arrays["in_time"](part.score({}, inputs))[0]  # noqa: E731
    plain = Weighted(first=Attention(), second=Recency(), first_weight=2.0, second_weight=0.25)
    assert plain.linear and MASS in plain.needs
    np.testing.assert_allclose(show(plain), 2 * mass + 0.25 * newest, rtol=RTOL)
    weight, bias = plain.factors({}, inputs.at, inputs.next)
    np.testing.assert_allclose(np.asarray(weight * inputs.mass + bias), np.asarray(plain.score({}, inputs)), rtol=RTOL)

    flat = Weighted(first=Attention(), second=Attention(), first_weight=2.0, second_weight=0.25)
    assert flat.factors({}, inputs.at, inputs.next) == (2.25, 0.0)  # numbers, as each has them

    ratio = Weighted(first=Attention(), second=Recency(), first_weight="ratio", second_weight=1.0)
    np.testing.assert_allclose(show(ratio), 0.5 * mass + newest, rtol=RTOL)  # half of them have to go
    unit = Weighted(first=Attention(), second=Recency(), scale="unit")
    assert not unit.linear
    scaled = (mass - mass.min(1, keepdims=True)) / np.ptp(mass, axis=1, keepdims=True)
    np.testing.assert_allclose(show(unit), scaled / 2 + newest / (S - 1) / 2, rtol=RTOL)

    rank = lambda x: x.argsort(axis=-1).argsort(axis=-1) + 1  # noqa: E731
    want = np.maximum(rank(mass), rank(newest)) / S
    np.testing.assert_allclose(show(Maximum(first=Attention(), second=Recency())), want, rtol=RTOL)

    then = show(Then(first=Attention(), second=Recency(), share=0.5))
    lead = rank(mass) > S - S // 4
    assert (then[lead] == np.float32(BIG)).all() and np.array_equal(then[~lead], newest[~lead])


def test_two_memories_of_one_kind_are_refused():
    table = {
        "kind": "weighted",
        "first": {"kind": "accumulated-attention", "decay": 0.5},
        "second": {"kind": "accumulated-attention"},
    }
    phase = {"observe": {"kind": "all-queries"}, "score": table}
    with pytest.raises(BadValue, match="same statistic 'attention'"):
        from_dict({"name": "x", "prefill": phase})


def test_combinations_in_toml():
    """A score of scores from tables and back, and options that reach into it."""
    table = to_dict(catalogue()["criticalkv"])
    assert table["prefill"]["score"]["second"]["of"]["kind"] == "attention"
    assert from_dict(table) == catalogue()["criticalkv"]
    assert jaxkv.policy("criticalkv", budget=99, share=0.25).prefill.score.share == 0.25


def test_queries_are_there_at_prefill_only():
    table = {"prefill": {}, "decode": {"score": {"kind": "expected-attention"}}}
    with pytest.raises(BadValue, match="at prefill only"):
        from_dict({"name": "x", **table})


def test_a_fixed_place(entries):
    """What lies 5 places from the end goes first."""
    inputs, arrays = entries
    fixed = FixedPlace(offset=5)
    weight, worth = fixed.factors(fixed.left(inputs.at, inputs.next), inputs.at, inputs.next)
    assert weight == 0.0
    np.testing.assert_array_equal(arrays["in_time"](worth)[0, 0].argsort(kind="stable")[:5], np.arange(S - 5, S))


@pytest.mark.parametrize(("guarded", "share"), [(0, 0.25), (5, 0.5), (4, 0.0)])
def test_an_even_sample_of_behaviour(entries, guarded, share):
    """KVCrush by loops: a share of what protection leaves, bits by halves, every (n // m)-th of the rest.

    Attention of the protected counts for nothing, so theirs is the largest here.
    """
    inputs, arrays = entries
    guard, mass = np.asarray(inputs.at) >= S - guarded, arrays["mass"][0].copy()
    mass[:, S - guarded :] += 1
    inputs = dataclasses.replace(
        inputs, protected=jnp.asarray(guard), mass=arrays["slots"](mass[None], np.float32(0)), limits=jnp.array([13])
    )
    part = dataclasses.replace(catalogue()["kvcrush"].prefill.score, share=share)
    worth = arrays["in_time"](part.score({}, inputs))[0]
    assert (worth[0] == worth[1]).all()
    free, room = S - guarded, 13 - guarded
    leaders = sorted(range(free), key=lambda t: -mass[:, t].sum())[: int(room * share)]
    differ = [0] * free
    for head in range(HEADS):
        loved = sorted(range(free), key=lambda t: -mass[head, t])[: free // 2]
        for token in range(free):
            differ[token] += (token in loved) != (head % 2 == 1)
    rest = sorted((t for t in range(free) if t not in leaders), key=lambda t: (differ[t], t))
    wanted = room - len(leaders)
    sampled = [rest[i * (len(rest) // wanted)] for i in range(wanted)]
    assert set(np.flatnonzero(worth[0] == np.float32(BIG))) == set(leaders)
    assert set(np.flatnonzero(worth[0] == 1)) == set(sampled) and len(set(sampled)) == wanted


def test_random_is_uniform_and_differs():
    at = jnp.broadcast_to(jnp.arange(4000, dtype=jnp.int32), (1, 2, 4000))
    draw = lambda seed: np.asarray(Random(seed).factors({}, at, jnp.array([4000]))[1])[0]  # noqa: E731
    for row in (*draw(0), *draw(1)):
        assert abs(row.mean() - 0.5) < 0.02 and abs(np.corrcoef(row[:-1], row[1:])[0, 1]) < 0.05
        assert row.min() >= 0 and row.max() < 1
    assert abs(np.corrcoef(draw(0)[0], draw(0)[1])[0, 1]) < 0.05, "heads draw apart"
    assert abs(np.corrcoef(draw(0)[0], draw(1)[0])[0, 1]) < 0.05, "and so do seeds"


@pytest.mark.parametrize("by", ["whole", "even"])
def test_chunks(entries, by):
    """Whole chunks by their mean, with what shares a chunk with a protected entry; or the best part of every chunk."""
    inputs, arrays = entries
    guard = jnp.asarray(np.asarray(inputs.at) == S - 1)
    worth = Select(chunk=5, by=by).by_chunks(inputs.mass, inputs.at, guard)
    worth, mass = arrays["in_time"](worth)[0], arrays["mass"][0]
    for row, values in zip(worth, mass, strict=True):
        for start in range(0, S, 5):
            mine, score = row[start : start + 5], values[start : start + 5]
            if by == "even":
                rank = (-score).argsort().argsort()
                np.testing.assert_allclose(-mine, np.where(rank == 0, 0.0, (rank + 1) / rank.size), rtol=RTOL)
            elif start == 20:
                assert (mine == np.float32(BIG)).all()
            else:
                np.testing.assert_allclose(mine, score.mean(), rtol=RTOL)


def test_a_short_chunk_keeps_the_same_part():
    """Of 100 tokens in chunks of 40 half: 20, 20 and 10, as kvpress' ChunkPress."""
    for held in (np.arange(100), np.r_[0:40:2, 40:100]):  # half of the first chunk has left already
        at = jnp.asarray(held, jnp.int32)[None, None]
        score = jnp.asarray(np.random.default_rng(0).permutation(len(held)), jnp.float32)[None, None]
        worth = Select(chunk=40, by="even").by_chunks(score, at, jnp.zeros(at.shape, bool))
        kept = held[np.asarray(best_first(worth, at))[0, 0] < 50]
        assert np.histogram(kept, [0, 40, 80, 100])[0].tolist() == [20, 20, 10]


def test_the_window_counts_where_chunks_are_gated():
    """The press gives its window more than all else before it takes the medians over the chunks."""
    rng = np.random.default_rng(1)
    at = jnp.arange(60, dtype=jnp.int32)[None, None]
    score = np.where(np.arange(60) < 52, rng.random(60), 0.0).astype(np.float32)[None, None]
    window, select = at >= 52, Select(chunk=4, by="entropy", gate=2)
    worth = select.by_chunks(jnp.asarray(score), at, window)
    given = np.where(window, score.max() + 1, score)
    none = jnp.zeros(at.shape, bool)
    free = np.asarray(at < 52)
    same, other = (np.asarray(select.by_chunks(jnp.asarray(each), at, none)) for each in (given, score))
    order = [np.argsort(-np.asarray(x)[free], kind="stable").tolist() for x in (worth, same, other)]
    assert order[0] == order[1] != order[2]


@pytest.mark.some(2)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("length", [60, 700])
def test_mass_without_the_keys_that_come_later(reduce, length):
    """`own_keys_last` leaves out what no query sees, and changes nothing; the queries go by tiles."""
    rng, held = np.random.default_rng(2), 20
    queries = jnp.asarray(rng.normal(size=(2, 4, length, DIMS)), jnp.float32)
    keys = jnp.asarray(rng.normal(size=(2, 2, held + length, DIMS)), jnp.float32)
    at = np.stack([np.arange(length) + 30, np.r_[np.full(7, -1), np.arange(length - 7) + 25]]).astype(np.int32)
    old = np.broadcast_to(np.r_[-1, np.arange(held - 1)], (2, held))
    positions = np.repeat(np.concatenate([old, at], axis=1)[:, None], 2, axis=1).astype(np.int32)
    both = [
        np.asarray(
            prefill_attend_mass(
                queries, keys, jnp.asarray(at), jnp.asarray(positions), scale=0.3, reduce=reduce, own_keys_last=last
            )
        )
        for last in (False, True)
    ]
    np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-7)
    assert (both[0] > 0).any(axis=-1).all()


def test_weighed_by_the_output():
    """KVzip+'s factor of the value, by query heads, against v W_O itself."""
    rng = np.random.default_rng(4)
    mass, values, out = rng.random((1, 4, 6)), rng.normal(size=(1, 2, 6, DIMS)), rng.normal(size=(4, DIMS, 10))
    mass, values, out = (x.astype(np.float32) for x in (mass, values, out))
    got = Aggregate(weigh="output").by_output(*map(jnp.asarray, (mass, values, out)))
    size = np.stack([np.linalg.norm(values[0, h // 2] @ out[h], axis=-1) for h in range(4)])
    np.testing.assert_allclose(got[0], mass[0] * size, rtol=RTOL)
    plus = catalogue()["kvzip-plus"]
    assert plus.needs == {MASS, OUTPUT, HIDDEN} and catalogue()["kvzip"].needs == {MASS}
    with pytest.raises(BadValue, match="at decode"):
        dataclasses.replace(plus, decode=dataclasses.replace(plus.prefill, observe=observe.CurrentQuery()))


def test_what_heads_have_in_common():
    """Twice the mean of the heads comes on top in the slots in which all hold the same token, and in no other."""
    mass, positions = np.random.default_rng(5).random((1, 6, 4)).astype(np.float32), np.arange(4, dtype=np.int32)
    positions = np.stack([positions, positions, [0, 3, 2, -1]]).astype(np.int32)[None]
    apart = jnp.zeros(positions.shape, bool)
    own, got = (
        np.asarray(Aggregate(group="mean", common=common).by_kv_head(jnp.asarray(mass), jnp.asarray(positions), apart))
        for common in (0.0, 2.0)
    )
    np.testing.assert_allclose(own[0], mass[0].reshape(3, 2, 4).mean(1), rtol=RTOL)
    np.testing.assert_allclose((got - own)[0], [2 * own[0].mean(0) * [1, 0, 1, 0]] * 3, rtol=RTOL, atol=1e-6)
    with pytest.raises(BadValue, match="common=-1"):
        Aggregate(common=-1.0)
    with pytest.raises(BadValue, match="at decode"):
        jaxkv.policy("kvcompose", budget=9, decode={"aggregate": {"common": 1.0}})


# On a model.


def _ids(length, seed=0):
    return np.random.default_rng(seed).integers(3, 120, length).astype(np.int32)


@pytest.mark.long
def test_keys_turned_to_their_places(tiny):
    """`rope="cache"` with any score: what is read is RoPE at places 0..n-1 of the keys before RoPE."""
    params, ids = tiny("llama3"), _ids(40)
    text = jaxkv.prefill(params, ids, policy=jaxkv.policy("keydiff", budget=12))
    cache = jaxkv.prefill(params, ids, policy=jaxkv.policy("keydiff", budget=12, rope="cache"))
    rope = params.config.attention_spec(0).rope
    for one, other in zip(text.layers, cache.layers, strict=True):
        assert np.array_equal(one.positions, other.positions)
        np.testing.assert_allclose(rotate(other.keys, other.positions, rope), one.keys, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("size", [{"budget": 16}, {"ratio": 0.6}], ids=str)
@pytest.mark.parametrize("times", [1, 2])
def test_lookahead_tokens_are_the_drafts(tiny, monkeypatch, times, size):
    """LAQ: the observing tokens are what SnapKV under the same budget, or a multiple of it, goes on with."""
    params, ids = tiny("llama3"), _ids(40)
    draft = jaxkv.generate(
        params,
        ids,
        policy=jaxkv.policy("snapkv", budget=16 * times, window=6, pool="max", kernel=7),
        max_new_tokens=5,
        stop_tokens=(),
    )
    seen = []
    prefill = jaxkv.run.prefill

    def watched(weights, layers, tokens, positions, pseudo, *rest, **options):
        seen.append(np.asarray(pseudo))
        return prefill(weights, layers, tokens, positions, pseudo, *rest, **options)

    monkeypatch.setattr(jaxkv.run, "prefill", watched)
    policy = jaxkv.policy("laq", **size, count=5, draft_window=6, draft_times=float(times))
    ours = jaxkv.prefill(params, ids, policy=policy)
    assert [x.shape[1] for x in seen] == [0, 5] and np.array_equal(seen[1], draft.tokens)
    assert (np.asarray(ours.held()) == 16).all()


def test_the_first_pass_can_be_wherever_its_policy_can():
    """Rules that ask for attention drop while it drafts, rules of the cache's places have them; budgets it cannot have
    are refused with the policy's own name."""
    for rule in ({"kind": "merge", "by": "attention"}, {"kind": "spread"}):
        draft = first_pass(jaxkv.policy("laq-h2o", budget=20, evicted=rule))
        assert draft.prefill.evicted.kind == "drop" and draft.budget == 20
    looks = {"prefill_observe": {"kind": "lookahead", "count": 4}, "prefill_score": {"kind": "attention"}}
    draft = first_pass(jaxkv.policy("freqkv", budget=64, **looks))
    assert (draft.rope, draft.prefill.evicted.kind) == ("cache", "low-pass")
    with pytest.raises(BadValue, match="budget=1 of policy 'laq': expected at least 2"):
        jaxkv.policy("laq", budget=1)
    assert first_pass(jaxkv.policy("laq", budget=1, draft_times=2.0)).budget == 2
    assert first_pass(jaxkv.policy("laq", budget=2)).budget == 2
    pools = [
        first_pass(jaxkv.policy(name, budget=99)).prefill.aggregate for name in ("laq", "laq-plus-plus", "laq-h2o")
    ]
    assert [(pool.pool, pool.kernel) for pool in pools] == [("max", 7), ("max", 7), ("avg", 5)]


@pytest.mark.long
@pytest.mark.parametrize("local", [0, 3])
def test_nothing_is_drafted_for_a_prompt_that_fits(tiny, local):
    """A row that holds its prompt and what would be drafted begins with sums of zero, whatever stands beside it."""
    params, short, longer = tiny("llama3"), _ids(20), _ids(60)
    policy = jaxkv.policy("laq-h2o", budget=28, count=6, draft_window=6, local=local)

    def left(*rows):
        with mock.patch.object(jaxkv.run, "prefill", wraps=jaxkv.run.prefill) as prefills:
            return jaxkv.prefill(params, list(rows), policy=policy), prefills.call_count

    (fits, once), (cut, twice), (both, _) = left(short), left(longer), left(short, longer)
    assert (once, twice, left(np.append(short, 5))[1]) == (1, 2, 2)  # with one token more the last drafted has no slot
    for one, other, row in zip(fits.layers, cut.layers, both.layers, strict=True):
        (sums,), filled = row.stats.values(), np.asarray(row.positions) >= 0
        assert not np.asarray(sums)[0][filled[0]].any() and (np.asarray(sums)[1][filled[1]] > 0).all()
        for number, single in enumerate((one, other)):
            held = np.asarray(single.positions)[0]
            assert np.array_equal(np.asarray(row.positions)[number][held >= 0], held[held >= 0])


def _weights(params, ids):
    """Every layer's attention weights `[1, Hk, G, T, S]` in a prefill that keeps everything."""
    found = []
    attend = jaxkv.attend.prompt.prefill_attend

    def recorded(layout, query, keys, values, at, key_positions, **options):
        query_by_group = query.reshape(1, keys.shape[1], -1, *query.shape[2:])
        weights = np.einsum("bhgtd,bhsd->bhgts", query_by_group, keys) * options["scale"]
        place = np.asarray(key_positions)[:, :, None, None]
        weights = np.where((place >= 0) & (place <= np.asarray(at)[:, None, None, :, None]), weights, -1e30)
        weights = np.exp(weights - weights.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        found.append(weights)
        return attend(layout, query, keys, values, at, key_positions, **options)

    with mock.patch.object(jaxkv.attend.prompt, "prefill_attend", recorded), jax.disable_jit():
        jaxkv.prefill(params, ids, policy=jaxkv.policy("full"))
    pad = found[0].shape[-1] - len(ids)
    return [weights[..., pad:, pad:] for weights in found]


@pytest.mark.long
def test_replay_looks_at_its_own_block(tiny):
    """KVzip: with a block as long as the prompt, its scores are the largest weights that a second copy of it gives."""
    params, ids = tiny("llama2"), _ids(30)
    equal = {"kind": "uniform"}
    ours = jaxkv.prefill(params, ids, policy=jaxkv.policy("kvzip", budget=10, sinks=0, instruction="", allocate=equal))
    for held, weights in zip(ours.layers, _weights(params, np.concatenate([ids, ids])), strict=True):
        peak = weights[0, :, :, 30:, :30].max(axis=(1, 2))
        want = np.sort(np.argsort(-peak, axis=-1)[:, :10], axis=-1)
        assert np.array_equal(_held(held), want)


@pytest.mark.long
def test_replay_tells_where_a_block_begins(tiny, monkeypatch):
    """KVzip: behind the first block its instruction, behind every other one the continuation and the last 8 tokens
    before it; a row that begins later has its own first block."""
    params = dataclasses.replace(tiny("llama2"), tokenizer=lambda text, **_: {"input_ids": [7 + len(text) % 2]})
    rows, seen, run = [_ids(40), _ids(17)], [], jaxkv.run.of_block
    monkeypatch.setattr(jaxkv.run, "of_block", lambda pseudo, number: seen.append(run(pseudo, number)) or seen[-1])
    policy = jaxkv.policy("kvzip", budget=10, sinks=0, block=16)
    jaxkv.prefill(params, rows, policy=policy)
    first, again = ([7 + len(text) % 2] for text in (policy.prefill.observe.instruction, policy.prefill.observe.again))
    want = [[first, [-1]], [[*again, *rows[0][0:8]], first], [[*again, *rows[0][16:24]], [*again, *rows[1][:1]]]]
    assert len(seen) == 3  # blocks of 8, 16 and 16 tokens
    for number, block in enumerate(seen):
        for row, wanted in enumerate(want[number]):
            if number or not row:
                assert block[row][block[row] >= 0].tolist() == [int(x) for x in wanted], (number, row)


@pytest.mark.long
def test_the_replay_of_a_block_looks_with_its_instruction(tiny):
    """The first of two blocks by hand: the second copy of it, behind its instruction, and what is left of it."""
    params, ids = tiny("llama2"), _ids(30)
    params = dataclasses.replace(params, tokenizer=lambda text, **_: {"input_ids": [7, 11]})
    equal = {"kind": "uniform"}
    ours = jaxkv.prefill(params, ids, policy=jaxkv.policy("kvzip", budget=10, sinks=0, allocate=equal))
    for held, weights in zip(ours.layers, _weights(params, np.concatenate([ids, [7, 11], ids])), strict=True):
        peak = weights[0, :, :, 30:, :30].max(axis=(1, 2))
        assert np.array_equal(_held(held), np.sort(np.argsort(-peak, axis=-1)[:, :10], axis=-1))


@pytest.mark.long
def test_a_look_once(tiny):
    """MPCache: by the most that any query of the last fifth looks at a token, in the mean of all heads; a threshold at
    the last that stays keeps the same."""
    params, ids = tiny("llama2"), _ids(42)
    ours = jaxkv.prefill(params, ids, policy=jaxkv.policy("mpcache", budget=10))
    assert len(ours.layers) == 3
    for layer, weights in enumerate(_weights(params, ids)):
        looked = weights.reshape(-1, 42, 42)[:, 42 - 8 :].mean(axis=0)  # int(42 * 0.2) queries
        threshold = np.sort(looked.max(axis=0))[-10]
        want = np.flatnonzero((looked >= threshold).sum(axis=0) > 0)
        assert len(want) == 10 and (_held(ours.layers[layer]) == want).all(), layer


@pytest.mark.long
def test_layers_in_pairs_keep_the_same(tiny):
    """Under flow "follow" the second layer of a pair keeps what the first chose."""
    params, ids = tiny("llama2"), _ids(41)
    apart = jaxkv.prefill(params, ids, policy=jaxkv.policy("mpcache", budget=10))
    ours = jaxkv.prefill(params, ids, policy=jaxkv.policy("mpcache", budget=10, flow=Follow(2)))
    assert np.array_equal(ours.layers[1].positions, ours.layers[0].positions)
    for layer in (0, 2):
        assert np.array_equal(ours.layers[layer].positions, apart.layers[layer].positions)
    assert not np.array_equal(apart.layers[1].positions, apart.layers[0].positions)


@pytest.mark.slow
def test_layers_that_share_stay_together(tiny):
    """Over blocks, turns and rows of other lengths."""
    params, prompts = tiny("llama2"), [_ids(41), _ids(19, 1)]
    policy = jaxkv.policy("snapkv", budget=10, window=4, flow={"kind": "follow", "reuse": 2}, block=16)
    cache = jaxkv.prefill(params, prompts, policy=policy)
    cache = jaxkv.generate(params, [_ids(7, 2), _ids(7, 3)], policy=policy, cache=cache, max_new_tokens=4).cache
    assert np.array_equal(cache.layers[1].positions, cache.layers[0].positions)
    assert not np.array_equal(cache.layers[2].positions, cache.layers[0].positions)


def test_layers_that_cannot_share():
    policy = jaxkv.policy("mpcache", budget=10, flow=Follow(2))
    with pytest.raises(BadValue, match="reuse="):
        Follow(reuse=0)
    for options in (
        {"decode": jaxkv.policy("h2o", budget=10).decode},
        {"prefill": None},
    ):
        with pytest.raises(BadValue, match="reuse="):
            dataclasses.replace(policy, **options)
    with pytest.raises(BadValue, match="reuse="):
        dataclasses.replace(jaxkv.policy("adakv", budget=10, window=4), flow=Follow())
    with pytest.raises(BadValue, match="share="):
        jaxkv.policy("mpcache", budget=10, share=1.5)


@pytest.mark.long
def test_scope_keeps_the_prompt(tiny):
    """The prompt's half never changes; the new tokens live in the other half."""
    params = tiny("llama3")
    policy = jaxkv.policy("scope", budget=20, window=4, decode_recent=2)
    start = jaxkv.prefill(params, _ids(40), policy=policy)
    assert (np.asarray(start.held()) == 10).all()
    end = jaxkv.generate(params, _ids(40), policy=policy, max_new_tokens=50, stop_tokens=()).cache
    for before, after in zip(start.layers, end.layers, strict=True):
        for old, new in zip(_held(before), _held(after), strict=True):
            assert len(new) == 20 and np.array_equal(new[:10], old) and (new[10:] >= 40).all()
            assert set(new[-2:]) == {87, 88}


@pytest.mark.long
@pytest.mark.parametrize("name", ["streaming-llm", "lagkv", "lazyeviction"])
def test_two_thousand_steps(tiny, name):
    """Sinks, recents and the order of time hold to the end, where kvpress loses them (slots in score order)."""
    options = {
        "streaming-llm": {"rope": "text"},
        "lagkv": {"lag": 8, "every": 8},
        "lazyeviction": {"window": 8, "decode_recent": 8, "every": 8},
    }[name]
    params, policy = tiny("llama3"), jaxkv.policy(name, budget=32, **options)
    out = jaxkv.generate(params, _ids(40), policy=policy, max_new_tokens=2000, stop_tokens=())
    last = int(out.cache.lengths[0]) - 1
    for layer in out.cache.layers:
        for held in _held(layer):
            assert len(set(held)) == len(held) >= 32
            assert set(range(policy.decode.select.sinks)) <= set(held)
            recent = {"streaming-llm": 28, "lagkv": 8, "lazyeviction": 8}[name]
            assert set(range(last - recent + 1, last + 1)) <= set(held)


@pytest.mark.long
def test_where_cuts_come_at_intervals_slots_stand_in_time_order_around(tiny):
    params, rng = tiny("llama3"), np.random.default_rng(3)
    prompts = [rng.integers(0, 100, n).tolist() for n in (40, 5)]
    policy = jaxkv.policy("lacache", budget=12, every=4)
    out = jaxkv.generate(params, prompts, policy=policy, max_new_tokens=9, stop_tokens=())
    for _ in range(4):
        out = jaxkv.generate(params, cache=out.cache, max_new_tokens=7, stop_tokens=())
        for layer in out.cache.layers:
            assert np.array_equal(of_slots.around(layer.positions), of_slots.ranks(layer.positions))


def test_the_policies_of_the_docs():
    """What docs/policies.md shows is what it says there, and every kind that there is stands in it."""
    text = (Path(__file__).parent.parent / "docs" / "policies.md").read_text(encoding="utf-8")
    table = re.search(r"```toml\n(.*?)```", text, re.S)
    made = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(code, made)
    assert made["merging"].decode.every == 16 and made["shared"].allocate.kind == "global"
    assert from_dict({"name": "x", **tomllib.loads(table[1])}).prefill == made["stages"]
    assert made["either"].decode.linear and not made["either"].prefill.linear
    for kind in {
        kind for kinds in PARTS.values() for kind in kinds.parts if kinds.parts[kind].__module__[:5] == "jaxkv"
    }:
        assert f"`{kind}`" in text, kind


@pytest.mark.some(4)
@pytest.mark.parametrize("case", ["half", "again", "thrice", "overlap", "steps"])
def test_lacache_as_released(goldens, case):
    """What each layer keeps of a prompt at once, one or several passes long, and of a text token by token."""
    golden = arrays(goldens / "policies" / "lacache.npz")
    layers, span, overlap, size, tokens, each = golden[f"{case}/case"].tolist()
    theirs, every = golden[f"{case}/kept"], 10
    limits = jnp.array([size], jnp.int32)
    part = dataclasses.replace(catalogue()["lacache"].decode.score, span=span, overlap=overlap)

    @jax.jit
    def score(at, now, layer):
        inputs = ScoreInputs(positions=at, now=now, limits=limits, layer=layer, layers=layers, sinks=4)
        return part.score({}, inputs)

    for layer in range(layers):
        held = list(range(size)) if each else []
        for end in range(size + every, tokens + 1, every) if each else [tokens]:
            held += range(held[-1] + 1 if held else 0, end)
            at = jnp.asarray(held, jnp.int32)[None, None]
            worth = score(at, jnp.array([end], jnp.int32), jnp.int32(layer))
            held = sorted(np.array(held)[np.argsort(-np.asarray(worth)[0, 0])[:size]].tolist())
        more = set(held) - set(theirs[layer].tolist())
        assert set(theirs[layer].tolist()) <= set(held), layer
        assert len(more) == size - theirs.shape[1] and len(more) <= 5, "it takes away whole ladders"
