"""The catalogue, its options, and what it refuses."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.cli.options import Cut
from jaxkv.errors import BadValue, UnknownName
from jaxkv.plan import planned, scored
from jaxkv.policies import (
    Aggregate,
    Allocate,
    Attention,
    AttentionValue,
    CurrentQuery,
    Global,
    KeyNorm,
    LastQueries,
    Maximum,
    NoQueries,
    Phase,
    Policy,
    Pyramid,
    Score,
    Select,
    Weighted,
    catalogue,
)
from jaxkv.policies.policy import from_dict, to_dict
from jaxkv.policies.score import ScoreInputs, of_entries


def test_every_policy_of_the_main_job_is_there():
    needed = {"full", "streaming-llm", "snapkv", "h2o", "tova", "knorm", "dapq", "longflow", "dapq-longflow"}
    assert needed <= set(catalogue())
    assert all(policy.title and policy.paper and policy.fidelity for policy in catalogue().values())
    assert all((policy.fidelity == "ours") == _of_nobody(policy.paper) for policy in catalogue().values())


def _of_nobody(paper: str) -> bool:
    """Whether a method is jaxkv's or kvpress' own, or no method at all."""
    return paper.startswith(("ours: ", "no ", "kvpress' ")) or "with kvpress'" in paper


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_tables_and_back(name):
    policy = catalogue()[name]
    assert from_dict(to_dict(policy)) == policy
    assert hash(policy) == hash(from_dict(to_dict(policy)))


def test_options_reach_their_parts():
    policy = jaxkv.policy("snapkv", budget=40, window=16, kernel=7)
    assert (policy.prefill.observe.window, policy.prefill.aggregate.kernel) == (16, 7)
    assert policy.prefill.protects.recent == 16, "the window stays, however long it is"
    both = jaxkv.policy("streaming-llm", ratio=0.5, sinks=2, rope="text")
    assert (both.prefill.select.sinks, both.decode.select.sinks, both.rope) == (2, 2, "text")
    one = jaxkv.policy("streaming-llm", budget=40, decode_sinks=2, rope="cache")
    assert (one.prefill.select.sinks, one.decode.select.sinks) == (4, 2)
    for share in (Global(most=3.0), {"kind": "global", "most": 3.0}):
        assert jaxkv.policy("dapq", budget=40, allocate=share).allocate == Global(most=3.0)
    for score in (KeyNorm(), {"kind": "key-norm"}):
        policy = jaxkv.policy("h2o", budget=40, score=score, decode_select={"sinks": 2})
        assert policy.prefill.score == policy.decode.score == KeyNorm()
        assert (policy.prefill.select.sinks, policy.decode.select) == (0, Select(sinks=2))
    policy = jaxkv.policy("h2o", budget=40, prefill_score=KeyNorm(), prefill_observe={"kind": "none"})
    assert (policy.prefill.observe, policy.decode) == (NoQueries(), catalogue()["h2o"].decode), "both parts at once"
    assert policy.fidelity == "" and jaxkv.policy("h2o", budget=40).fidelity == catalogue()["h2o"].fidelity


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_any_policy_can_be_bounded_while_decoding(name, tmp_path):
    """By the decode phase of another, given by its name, itself, or as a table; where layers are spared, they too."""
    policy = catalogue()[name]
    spares = name in ("knorm", "d2o")
    assert policy.bounded == (policy.decode is not None and not spares)
    if not policy.evicts:
        with pytest.raises(BadValue, match="not be bounded"):
            jaxkv.policy(name, decode="h2o")
        return
    if policy.flow.going_on or policy.rope != "text" or policy.bounded:
        return
    more = {"allocate": {"kind": "uniform"}} if spares else {}
    bounded = jaxkv.policy(name, budget=512, decode="h2o", **more)
    assert bounded.bounded and bounded.decode == catalogue()["h2o"].decode and bounded.prefill == policy.prefill
    assert bounded == jaxkv.policy(name, budget=512, decode=bounded.decode, **more)
    assert bounded == jaxkv.policy(name, budget=512, decode=to_dict(bounded)["decode"], **more)
    assert from_dict(to_dict(bounded)) == bounded
    assert jaxkv.policy(name, budget=512, decode=None).bounded is False


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: jaxkv.policy("snapvk", budget=9), UnknownName, "did you mean 'snapkv'"),
        (lambda: jaxkv.policy("snapkv", budget=99, allocate={"kind": "globe"}), UnknownName, "did you mean 'global'"),
        (lambda: jaxkv.policy("snapkv", budget=64, decode="dapq"), BadValue, "has no decode phase"),
        (lambda: jaxkv.policy("snapkv", budget=64, prefill=None), BadValue, "keeps everything"),
        (lambda: jaxkv.policy("snapkv", budget=64, decode_score={"kind": "key-norm"}), BadValue, "no decode phase"),
        (lambda: jaxkv.policy("snapkv", budget=64, score={"kind": "keynorm"}), UnknownName, "did you mean 'key-norm'"),
        (lambda: jaxkv.policy("full", store={"kind": "int"}), UnknownName, "kind"),
        (lambda: jaxkv.policy("snapkv", budget=64, select={"kind": "x"}), UnknownName, "kind"),
        (lambda: jaxkv.policy("h2o", budget=64, chosen=3), UnknownName, "chosen"),
        (lambda: Cut("h2o", option=("budget=8",)).build(), BadValue, "give --budget 8"),
        (lambda: jaxkv.policy("snapkv"), BadValue, "exactly one of"),
        (lambda: jaxkv.policy("snapkv", budget=100, ratio=0.5), BadValue, "budget=100 and ratio=0.5"),
        (lambda: jaxkv.policy("snapkv", budget=32), BadValue, "at least 33"),
        (lambda: jaxkv.policy("full", budget=64), BadValue, "keeps everything"),
        (lambda: jaxkv.policy("full", grows=True), BadValue, "which evicts nothing: leave it out"),
        (lambda: jaxkv.policy("snapkv", budget=100, windw=3), UnknownName, "did you mean 'window'"),
        (lambda: jaxkv.policy("tova", budget=100, prefill_sink=3), UnknownName, "did you mean 'sinks'"),
        (lambda: jaxkv.policy("dapq", budget=100, content="poem"), BadValue, "'prompt', 'random' or 'last'"),
        (lambda: jaxkv.policy("tova", ratio=1.0), BadValue, "ratio=1.0"),
        (lambda: jaxkv.policy("tova", budget=True), BadValue, "whole number"),
        (lambda: jaxkv.policy("tova", budget=9, rope="cash"), BadValue, "'text', 'cache' or 'sinks'"),
        (lambda: jaxkv.policy("snapkv", budget=99, kernel=4), BadValue, "odd"),
        (lambda: from_dict({"name": "x", "prefil": {}}), UnknownName, "did you mean 'prefill'"),
        (lambda: from_dict({"name": "x", "prefill": {"score": {"kind": "recent"}}}), UnknownName, "recency"),
        (lambda: from_dict({"name": "x", "prefill": {"score": {"kind": "attention"}}}), BadValue, "queries that look"),
        (lambda: jaxkv.policy("h2o", budget=9, reserve=0.5), BadValue, "something can be evicted"),
        (lambda: jaxkv.policy("vatp", budget=40), BadValue, "at least 41"),
        (lambda: jaxkv.policy("H2O", budget=40), UnknownName, "did you mean 'h2o'"),
        (lambda: jaxkv.policy("snapkv", budget=64, decode_window=8), BadValue, "no decode phase: add decode="),
        (
            lambda: jaxkv.policy("snapkv", budget=64, every=16),
            BadValue,
            "every=16 .* at prefill: .* give decode_every=",
        ),
        (lambda: jaxkv.policy("h2o", budget=64, prefill_every=16), BadValue, "every=16 of policy 'h2o' at prefill"),
        (lambda: jaxkv.policy("full", decode="h2o"), BadValue, "add a prefill phase"),
        (lambda: jaxkv.policy("h2o", budget=64, allocate="global"), BadValue, "allocate={'kind': 'global'}"),
        (lambda: jaxkv.policy("h2o", budget=64, store="int4"), BadValue, "store={'keys': {'kind': 'int', 'bits': 4}}"),
    ],
)
def test_refusals_name_the_value_and_the_remedy(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "name, options, words",
    [
        ([], {}, r"policy \[\]: expected a name"),
        ("snapkv", {"decode": 5}, "decode=5: expected the name of a policy"),
        ("snapkv", {"score": 5}, "expected Score"),
    ],
)
def test_values_of_other_kinds(name, options, words):
    with pytest.raises(BadValue, match=words):
        jaxkv.policy(name, budget=64, **options)


def test_ratio_is_the_fraction_removed():
    assert jaxkv.policy("tova", ratio=0.75).budgets(1000, 2) == (250, 250)
    assert jaxkv.policy("snapkv", ratio=0.75).budgets(100, 1) == (33,), "never below sinks + recent + 1"
    assert jaxkv.policy("streaming-llm", ratio=0.5, sinks=2, recent=3).floor == 6, "sinks + recent + 1"
    assert jaxkv.policy("vatp", ratio=0.5, sinks=20).floor == 41, "half of it is recent, 20 are sinks, and one can go"
    assert jaxkv.policy("vatp", ratio=0.5, sinks=2).budgets(9, 1) == (5,)


def test_pyramid_keeps_the_mean():
    budgets = Pyramid().budgets(512, 32, 4096, 8, {})
    assert budgets[0] > budgets[-1] and abs(np.mean(budgets) - 512) < 1
    assert Pyramid().budgets(64, 8, 4096, 64, {}) == (64,) * 8, "no room for the window: uniform"


def test_a_layer_is_never_left_with_what_is_protected_alone():
    errors = {"eviction_error": np.array([0.1, 0.5])}
    by_error = {"kind": "error", "least": 3}
    assert jaxkv.policy("h2o", budget=12, allocate=by_error).budgets(99, 2, errors) == (6, 18)
    assert jaxkv.policy("streaming-llm", budget=12, sinks=6, allocate=by_error).budgets(99, 2, errors) == (12, 12)


def test_recent_as_a_share_of_the_budget():
    select = Select(recent=0.5)
    assert select.recents(jnp.array([10, 21])).tolist() == [5, 10]


def test_pool_follows_the_text_and_not_the_slots():
    """Entries in time order with empty slots anywhere between are neighbours all the same."""
    rng = np.random.default_rng(0)
    mass = rng.random((1, 1, 9)).astype(np.float32)
    apart = jnp.zeros((1, 2, 13), bool)
    at = np.array([[0, 1, 2, 5, 6, 7, 8, 9, 12], [1, 2, 3, 4, 5, 6, 10, 11, 12]])  # the slots of two KV heads
    wide, positions = np.zeros((1, 4, 13), np.float32), np.full((1, 2, 13), -1, np.int32)
    for head in range(4):  # of two query heads each
        wide[0, head, at[head // 2]] = mass[0, 0]
        positions[0, head // 2, at[head // 2]] = 10 * np.arange(9)
    for pool, expected in (
        ("avg", np.convolve(mass[0, 0], np.ones(5) / 5, mode="same")),
        ("max", np.max([np.pad(mass[0, 0], 2)[i : i + 9] for i in range(5)], axis=0)),
    ):
        got = Aggregate(pool=pool, kernel=5).along_text(jnp.asarray(wide), jnp.asarray(positions), apart)
        for head in range(4):
            np.testing.assert_allclose(np.asarray(got)[0, head, at[head // 2]], expected, rtol=1e-5)


def test_a_policy_by_hand():
    hand = Policy(
        name="mine",
        prefill=Phase(LastQueries(8), Attention(), Aggregate(pool="max", kernel=3), Select(sinks=1, recent="window")),
        decode=Phase(CurrentQuery(), AttentionValue(), Aggregate(group="sum")),
        budget=20,
    )
    assert hand.floor == 10 and hand.stats == ("value_l1",)
    assert dataclasses.replace(hand, budget=10).budget == 10


def test_a_score_in_both_phases_counts_once():
    h2o = jaxkv.policy("h2o", budget=8, decay=0.5)
    stats = {"attention": jnp.array([[[1.0, 2.0]]]), "attended_at": jnp.array([[[1.0, 1.0]]])}
    mass = jnp.array([[[0.25, 0.5]]])
    for phase in h2o.phases:
        assert h2o.observe(phase, stats, mass, jnp.array([2]))["attention"].tolist() == [[[0.75, 1.5]]]


@pytest.mark.parametrize(
    "given, expected",
    [
        (1.0, "gave the factors 1.0: expected two"),
        ((0.0, jnp.zeros((2, 5))), r"gave float32 \(2, 5\): expected a float32 for each of the entries, \(2, 2, 5\)"),
        ((jnp.zeros((2, 2, 4)), 0.0), r"gave float32 \(2, 2, 4\)"),
        ((1.0, None), r"gave None \(\)"),
        ((1.0, jnp.zeros((2, 2, 5), jnp.int32)), "gave int32"),
    ],
    ids=["one", "no heads", "few slots", "none", "whole numbers"],
)
def test_factors_of_an_own_score_are_a_number_for_each_entry(given, expected):
    """As many rows as KV heads: factors without heads would fit the heads, and rows would read each other's."""

    @dataclasses.dataclass(frozen=True)
    class Own(Score):
        kind: ClassVar[str] = "own"

        def factors(self, stats, positions, now):
            return given

    inputs = ScoreInputs(
        mass=jnp.ones((2, 2, 5)),
        positions=jnp.zeros((2, 2, 5), jnp.int32),
        now=jnp.ones(2, int),
        protected=jnp.zeros((2, 2, 5), bool),
    )
    for score in (Own(), Maximum(Attention(), Own()), Weighted(Attention(), Own(), scale="rank")):
        with pytest.raises(BadValue, match=f"score 'own' {expected}"):
            score.each({}, inputs)


def test_factors_of_a_row_or_of_other_floats_become_one_of_each_entry():
    positions = jnp.zeros((2, 3, 5), jnp.int32)
    for given in (jnp.ones((2, 1, 1)), jnp.bfloat16(1), jnp.ones((2, 3, 5), jnp.bfloat16)):
        found = of_entries("own", given, positions)
        assert (found.shape, found.dtype) == (positions.shape, jnp.float32)
    assert of_entries("own", 0.5, positions) == 0.5


@pytest.mark.parametrize(
    "given, expected",
    [
        (jnp.zeros((2, 2, 5)), "expected a dictionary"),
        ({"other": jnp.zeros((2, 2, 5))}, r"gave the statistics \['other'\]: .*names, \['seen'\]"),
        ({"seen": jnp.zeros((2, 2, 4))}, r"'seen' as float32 \(2, 2, 4\): expected .*, \(2, 2, 5\)"),
        ({"seen": jnp.zeros((2, 2, 5), jnp.int32)}, "'seen' as int32"),
        ({"seen": None}, "'seen' as None"),
    ],
    ids=["no names", "another name", "few tokens", "whole numbers", "none"],
)
def test_statistics_of_an_own_score_are_a_number_for_each_entry(given, expected):
    @dataclasses.dataclass(frozen=True)
    class Own(Score):
        kind: ClassVar[str] = "own"
        stats: ClassVar[tuple[str, ...]] = ("seen",)

        def enter(self, new):
            return given

        def observe(self, stats, mass, now):
            return given

    phase = Phase(observe=CurrentQuery(), score=Maximum(Attention(), Own()))
    policy = Policy("mine", prefill=phase)
    with pytest.raises(BadValue, match=f"score 'own' .*{expected}"):
        policy.enter(jnp.zeros((2, 2, 5, 8)), jnp.zeros((2, 2, 5, 8)), positions=jnp.zeros((2, 5), jnp.int32))
    with pytest.raises(BadValue, match=f"score 'own' .*{expected}"):
        policy.observe(phase, {"seen": jnp.zeros((2, 2, 5))}, None)


@pytest.mark.parametrize(
    "given, expected",
    [
        ((32,), "expected 4 whole numbers"),
        ((31.5, 32.5, 32, 32), "expected 4 whole numbers"),
        ((0, 64, 32, 32), "expected at least 1 for each layer"),
        ((33, 32, 32, 32), "at most 128 together"),
    ],
    ids=["too few", "no whole numbers", "nothing for a layer", "more than the budget"],
)
def test_budgets_of_an_own_allocator_are_a_whole_number_for_each_layer(given, expected):
    @dataclasses.dataclass(frozen=True)
    class Own(Allocate):
        kind: ClassVar[str] = "own"

        def budgets(self, budget, layers, tokens, window, learned):
            return given

    policy = dataclasses.replace(jaxkv.policy("h2o", budget=32), allocate=Own())
    with pytest.raises(BadValue, match=rf"allocate kind 'own' gives the budgets .* {expected}"):
        policy.budgets(100, 4)


def test_one_statistic_of_two_kinds_counts_once():
    """H2O's sums behind a prompt that was scored by another kind of the same sums."""
    for kind in ("chains", "neighbours"):
        policy = jaxkv.policy("h2o", budget=64, prefill_score={"kind": kind})
        none = {name: jnp.zeros((1, 2, 3)) for name in policy.stats}
        found = policy.observe(policy.prefill, none, jnp.ones((1, 2, 3)))
        assert (found["attention"] == 1).all() and (found.get("seen", found["attention"]) == 1).all()


ACCUMULATED = {"kind": "accumulated-attention"}
FIXED = {"kind": "fixed-place"}
BELOW = {"kind": "weighted", "first": {"kind": "attention"}, "second": {"kind": "recency"}, "second_weight": -1.0}
CHUNKS = [{"kind": "non-causal", "mutual": size} for size in (4, 256)]


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("h2o", {"decode_score": ACCUMULATED | {"decay": 0.9}}, "keep the same statistic 'attention' in two ways"),
        ("snapkv", {"score": {"kind": "weighted", "first": CHUNKS[0], "second": CHUNKS[1]}}, "keep the same statistic"),
        ("h2o", {"decode_score": {"kind": "pooled", "of": FIXED}}, "lets the cache grow"),
        ("snapkv", {"score": {"kind": "scaled", "of": BELOW}}, "can be negative"),
        ("snapkv", {"allocate": {"kind": "adaptive", "of": {"kind": "crush"}}}, "sums over the heads"),
        ("dapq", {"aggregate": {"decay": 0.9}}, "'pseudo-queries' stand behind them"),
        ("kvzip", {"aggregate": {"probes": 0.1}}, "'replay' stand behind them"),
        ("snapkv", {"observe": {"kind": "all-queries"}}, "recent='window' under observe kind 'all-queries'"),
    ],
)
def test_parts_that_do_not_go_together(name, options, words):
    with pytest.raises(BadValue, match=words):
        jaxkv.policy(name, budget=64, **options)


def test_a_decoded_token_has_an_even_share():
    """Where only the prefill phase reads the output matrix: not less than any token of the prompt."""
    policy = jaxkv.policy("defensivekv", budget=64)
    new = jnp.ones((1, 4, 1, 8))
    assert np.asarray(policy.enter(new, new)["output_share"]).tolist() == [[[0.25]] * 4]


@pytest.mark.long
def test_a_score_that_divides_looks_too(tiny):
    """Heads' shares by what the layer's last queries see, which the policy's own score does not ask for."""
    share = {"kind": "adaptive", "of": {"kind": "window-attention", "window": 4}}
    policy = jaxkv.policy("snapkv", budget=16, window=4, allocate=share)
    assert policy.looks == 4
    cache = jaxkv.prefill(tiny("llama3"), [np.arange(3, 43)], policy=policy)
    assert (np.asarray(cache.held()).sum(axis=-1) == 2 * 16).all()


def test_who_is_scored(tiny):
    """Rows that are cut; all of them where what their queries saw is remembered; a reserve counts with and without a
    decode phase. Each for itself."""
    limits, config = np.full((2, 3), 24), tiny("llama3").config
    asked = lambda policy, *totals: scored(policy, config, np.array(totals), limits).tolist()  # noqa: E731
    snapkv = jaxkv.policy("snapkv", budget=24, window=4)
    assert asked(snapkv, 20, 24, 25) == [False, False, True]
    assert asked(jaxkv.policy("snapkv", budget=24, window=4, reserve=8), 16, 17, 30) == [False, True, True]
    assert asked(jaxkv.policy("snapkv", budget=24, window=4, decode="tova"), 20, 23, 24) == [False, False, True]
    assert asked(jaxkv.policy("kvzip", budget=24), 20, 21, 30) == [True] * 3, "what comes behind asks what was seen"
    assert asked(jaxkv.policy("full"), 20, 21, 30) == [False] * 3


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_a_window_that_the_budget_holds_is_not_scored(tiny, family):
    """A layer whose budget is its window of 8 loses nothing to a policy, one with a smaller budget does."""
    config = tiny(family).config
    nothing = np.zeros(1, int), np.zeros(config.num_layers, int)

    def look(name, budget, length):
        options = {"window": 4} if name == "snapkv" else {}
        return planned(jaxkv.policy(name, budget=budget, **options), config, *nothing, np.array([length]), 10)[0].look

    for name in ("laq-h2o", "snapkv"):
        assert not look(name, 200, 60)
        assert look(name, 40, 60) == (family == "gemma3_text"), "every other layer has no window there"
    assert look("snapkv", 6, 60) and not look("snapkv", 6, 5)
    assert look("kvzip", 200, 60), "what comes behind asks what was seen"


@pytest.mark.long
@pytest.mark.parametrize("options", [{"reserve": 2}, {"decode": "h2o", "prefill_reserve": 16}])
def test_sliding_layers_reserve_nothing(tiny, options):
    """Their windows are their budgets: what a budget holds whole gives the full cache's tokens."""
    prompt, params = np.random.default_rng(9).integers(3, 180, 40), tiny("gemma3_text")
    said = [
        jaxkv.generate(params, [prompt], policy=policy, max_new_tokens=6, stop_tokens=()).tokens.tolist()
        for policy in (jaxkv.policy("full"), jaxkv.policy("snapkv", budget=128, window=4, **options))
    ]
    assert said[0] == said[1]


@pytest.mark.long
def test_as_many_as_the_deeper_layers_hold_go_on_from_a_sliding_one(tiny):
    prompt, params = np.random.default_rng(9).integers(3, 180, 40), tiny("gemma3_text")
    policy = jaxkv.policy("snapkv", budget=24, window=4, flow={"kind": "propagate", "after": 0, "keep": 0.1})
    held = np.asarray(jaxkv.prefill(params, [prompt], policy=policy).held())
    assert (held[1] == 24).all() and (held[3] == 24).all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("h2o", {"rope": "cache", "evicted": {"kind": "low-pass"}, "decode_every": 8}),
        ("h2o", {"decode_every": 8, "evicted": {"kind": "low-pass"}, "rope": "cache"}),
        ("knorm", {"spare": 0, "rope": "cache"}),
        ("tova", {"heads": "each", "score": {"kind": "peak-attention"}, "allocate": {"kind": "adaptive"}}),
    ],
)
def test_options_that_only_fit_together(name, options):
    """In any order, whole parts and fields of parts; what does not fit is refused as before."""
    assert jaxkv.policy(name, budget=64, **options).budget == 64
    without = {key: value for key, value in options.items() if key not in ("decode_every", "spare", "heads")}
    with pytest.raises(BadValue):
        jaxkv.policy(name, budget=64, **without)
