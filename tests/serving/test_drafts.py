"""Rows that draft: the tokens that each request gets alone, whatever the others' drafts bring."""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import ACTIONS, DRAWS, LENGTHS, alone, arriving, compilations, finish, in_any_order, sized
from hypothesis import HealthCheck, given, settings
from letters import Letters

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.serving import Engine
from jaxkv.speculative import AASD, Conditional, DraftModel, PromptLookup, SelfDraft

FAMILY = "llama3"
GOLDENS = Path(__file__).parents[1] / "goldens"
WIDE = AASD(depth=4, siblings=(2, 1), low=1.0, fallback=False)  # siblings everywhere, and a tree in every pass
STOPS = (), (11, 150), (5,)


def ids(length, seed=0):
    """Few different tokens, so that much of the text stood before."""
    return np.random.default_rng(seed).integers(3, 12, length).astype(np.int32)


def requests(count):
    """So many different requests, which end inside a round by their length, by stop tokens of their own, or neither."""
    return [
        (ids(LENGTHS[n % len(LENGTHS)], n), {**DRAWS[n % 3], "max_new_tokens": 7 + n % 13, "stop_tokens": STOPS[n % 3]})
        for n in range(count)
    ]


def lettered(loaded):
    return type(loaded)(loaded.weights, loaded.config, Letters(), learned=loaded.learned)


@pytest.fixture(scope="module")
def params(tiny):
    return lettered(tiny(FAMILY))


@pytest.fixture(scope="module")
def engine(params):
    """An engine of three rows that all tests share: each leaves it idle."""
    options = {"rows": 3, "longest": 140, "max_new_tokens": 20, "steps": 4, "queue": 12}
    return Engine(params, sized("dapq-longflow"), speculative=WIDE, **options)


@pytest.fixture(scope="module")
def known(params):
    """A dozen requests, and what each gets alone."""
    policy = sized("dapq-longflow")
    return [(prompt, asked, alone(params, policy, prompt, **asked)) for prompt, asked in requests(12)]


@pytest.mark.long
def test_mixed_requests_get_what_each_gets_alone_and_nothing_is_compiled(engine, known, params):
    engine.warm()
    finish_first = engine.submit(ids(3), max_new_tokens=2)
    finish(engine)
    assert len(finish_first.tokens) == 2
    with compilations() as seen:
        answers = arriving(engine, known)
    assert seen == []
    for (_, asked, tokens), answer in zip(known, answers, strict=True):
        assert answer.tokens == tokens, asked
        assert answer.finish == ("stop" if tokens[-1] in asked["stop_tokens"] else "length")
    told = engine.speculation
    assert told is not None and told.trees > 20 and told.acceptance_length > 1.05 and told.departed == 0
    for prompt, asked, tokens in known[:2]:  # as `generate` with the same drafts has it
        assert alone(params, engine.policy, prompt, speculative=WIDE, **asked) == tokens


@pytest.mark.long
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTIONS)
def test_arrivals_and_cancels_in_any_order(engine, known, actions):
    in_any_order(engine, known, actions)


@pytest.mark.long
def test_rows_in_codes_behind_a_first_pass_draft_as_well(params):
    policy = sized("laq-h2o-int4")
    small = Engine(params, policy, speculative=WIDE, rows=2, longest=140, max_new_tokens=20, steps=4, queue=12)
    known = [(prompt, asked, alone(params, policy, prompt, **asked)) for prompt, asked in requests(4)]
    assert [answer.tokens for answer in arriving(small, known)] == [tokens for _, _, tokens in known]
    assert small.speculation is not None and small.speculation.acceptance_length > 1.05


@pytest.mark.slow
def test_rows_draft_where_blocks_share_a_code(params):
    codecs = {"keys": {"kind": "int-by-channel", "tokens": 4}, "values": {"kind": "int", "bits": 4}, "residual": 8}
    policy = sized("full", store=codecs)
    engine = Engine(params, policy, rows=2, longest=90, max_new_tokens=20, speculative=PromptLookup(fallback=False))
    work = requests(5)
    answers = [engine.submit(prompt, **asked) for prompt, asked in work]
    finish(engine)
    assert [answer.tokens for answer in answers] == [alone(params, policy, prompt, **asked) for prompt, asked in work]
    told = engine.speculation
    assert told is not None and told.trees > 5 and told.acceptance_length > 1.05


@pytest.mark.long
def test_stop_strings_and_samples(engine, params):
    prompt, asked = ids(20, 4), {"max_new_tokens": 18, "stop_tokens": ()}
    whole = jaxkv.generate(params, prompt, policy=engine.policy, **asked)
    stops = [whole.text[at : at + 2] for at in (3, 6, 9)]
    answers = [engine.submit(prompt, stop=stop, **asked) for stop in stops]
    samples = engine.submit_all(ids(45, 9), samples=3, temperature=1.1, seed=4, **asked)
    finish(engine)
    for stop, answer in zip(stops, answers, strict=True):
        cut = jaxkv.generate(params, prompt, policy=engine.policy, stop=stop, **asked)
        assert answer.text() == cut.text and answer.tokens == cut.tokens[0, : cut.lengths[0]].tolist()
    out = jaxkv.generate(params, ids(45, 9), policy=engine.policy, samples=3, temperature=1.1, seed=4, **asked)
    assert [answer.tokens for answer in samples] == out.tokens.tolist()


@pytest.mark.long
def test_a_text_longer_than_its_columns_and_log_probabilities(engine, params):
    """The oldest text goes where new tokens need its columns; what drafts are taken from changes no token."""
    prompt, asked = ids(30, 5), {"max_new_tokens": 150, "stop_tokens": (), "repetition_penalty": 1.1}
    answer, other = engine.submit(prompt, logprobs=True, **asked), engine.submit(prompt, **asked)
    plain = Engine(params, engine.policy, rows=1, longest=140, max_new_tokens=20, steps=4)
    expected = plain.submit(prompt, logprobs=True, **asked)
    finish(engine)
    finish(plain)
    assert answer.tokens == other.tokens == expected.tokens and other.chances == []
    assert [chance.token for chance in answer.chances] == answer.tokens
    for mine, theirs in zip(answer.chances, expected.chances, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        np.testing.assert_allclose([v for _, v in mine.best], [v for _, v in theirs.best], atol=1e-3)


@pytest.mark.long
def test_requests_branch_from_a_stored_prefix(engine, params):
    engine.warm()
    cache = jaxkv.prefill(params, ids(77, 5), policy=engine.policy)
    engine.store("manual", cache)
    asked = {"max_new_tokens": 12, "stop_tokens": ()}
    engine.submit(ids(3), prefix="manual", **asked)  # small operations on the host are compiled
    finish(engine)
    with compilations() as seen:
        answers = [engine.submit(ids(length, length), prefix="manual", **asked) for length in (3, 40)]
        finish(engine)
    assert seen == []
    expected = [jaxkv.generate(params, ids(n, n), cache=cache, **asked).tokens[0].tolist() for n in (3, 40)]
    assert [answer.tokens for answer in answers] == expected
    engine.forget("manual")


REFUSED = {
    "adakv-h2o": PromptLookup(),
    "quest": PromptLookup(),
    "zipcache": PromptLookup(),
    "fastkv": AASD(),
    "r-kv": PromptLookup(),
    "dapq-longflow": "lookup",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_generate_refuses_an_engine_refuses_in_the_same_words(params, name):
    options = {"policy": sized(name), "speculative": REFUSED[name]}
    with compilations() as seen:
        with pytest.raises(BadValue) as alone:
            jaxkv.generate(params, ids(5), max_new_tokens=1, **options)
        with pytest.raises(BadValue) as refused:
            Engine(params, **options)
    assert str(alone.value) == str(refused.value) and "speculative=" in str(refused.value)
    assert len(seen) < 20  # a few small arrays, no program of the model


def test_drafts_of_a_model_are_refused(params):
    for method in (DraftModel(params), SelfDraft(jaxkv.policy("tova", budget=16))):
        with pytest.raises(BadValue, match="a cache of their own"):
            Engine(params, sized("h2o"), speculative=method)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dapq-longflow", "full"])
@pytest.mark.parametrize("axes", [{"model": 2}, {"model": 2, "context": 4}], ids=str)
def test_an_engine_drafts_on_a_mesh(params, name, axes):
    """What one device gives, in any order of coming and going."""
    devices = jax.devices()[: math.prod(axes.values())]
    divided = jaxkv.load(GOLDENS / "tiny" / FAMILY, mesh=jaxkv.mesh(**axes, devices=devices))
    prompts = [np.tile(ids(7, seed), 5)[:length] for seed, length in enumerate((9, 35, 20, 30))]
    answers = []
    for each in (params, divided):
        engine = Engine(each, sized(name), rows=2, longest=64, max_new_tokens=12, speculative=WIDE)
        asked = [engine.submit(prompt, max_new_tokens=12, stop_tokens=()) for prompt in prompts]
        finish(engine)
        answers.append([answer.tokens for answer in asked])
        assert engine.speculation.trees > 0
    plain = jaxkv.generate(params, prompts, policy=sized(name), max_new_tokens=12, stop_tokens=())
    assert answers[0] == answers[1] == plain.tokens.tolist()


METHODS = {
    "lookup": PromptLookup(),
    "lookup, always": PromptLookup(fallback=False),
    "aasd": AASD(),
    "aasd, always": WIDE,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapq-longflow", "snapkv", "streaming-llm", "full"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", [FAMILY, "gemma3_text", "qwen3"])
def test_40_requests_at_random_times(tiny, family, method, name):
    params, policy = lettered(tiny(family)), sized(name)
    engine = Engine(params, policy, rows=6, longest=140, max_new_tokens=20, steps=4, speculative=METHODS[method])
    engine.warm()
    with compilations() as seen:
        answers = arriving(engine, requests(40), seed=2)
    assert seen == []
    for (prompt, asked), answer in zip(requests(40), answers, strict=True):
        assert answer.tokens == alone(params, policy, prompt, **asked), (len(prompt), asked)


@pytest.mark.long
def test_near_misses_pass_as_they_do_alone(params):
    """Conditional verification departs from the exact text by what a row drafts, which is its own text alone."""
    method = dataclasses.replace(WIDE, verify=Conditional(alpha=0.5, beta=0.1, floor=0.0))
    policy = sized("dapq-longflow")
    engine = Engine(params, policy, rows=3, longest=140, max_new_tokens=20, steps=4, speculative=method)
    answers = arriving(engine, requests(9))
    for (prompt, asked), answer in zip(requests(9), answers, strict=True):
        assert answer.tokens == alone(params, policy, prompt, speculative=method, **asked), (len(prompt), asked)
    assert engine.speculation is not None and engine.speculation.departed > 0
