"""The engine: requests that come and go in the rows of one batch get the tokens that each gets alone."""

import dataclasses
import json
import math
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import ACTIONS, DRAWS, LENGTHS, alone, arriving, compilations, finish, idle, in_any_order, sized
from hypothesis import HealthCheck, given, settings
from letters import Letters, Words
from measured import calibrated

import jaxkv
from jaxkv.errors import BadCheckpoint, BadValue, Busy, JaxkvError, UnknownName
from jaxkv.policies.catalogue import catalogue
from jaxkv.prefilling import Prefilling
from jaxkv.request import Execution
from jaxkv.serving import Engine, turns
from jaxkv.serving.wire import Reader

FAMILY = "llama3"
GOLDENS = Path(__file__).parents[1] / "goldens"


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(3, 100, length).astype(np.int32)


def requests(count):
    """So many different requests: prompt and settings."""
    stops = (), tuple(range(0, 256, 6))[:16]
    return [
        (
            ids(LENGTHS[n % len(LENGTHS)], n),
            {**DRAWS[n % 3], "max_new_tokens": 3 + n % 11, "stop_tokens": stops[n % 3 != 1]},
        )
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def params(tiny):
    loaded = tiny(FAMILY)
    return type(loaded)(loaded.weights, loaded.config, Letters(), learned=loaded.learned)


@pytest.fixture(scope="module")
def engine(params):
    """An engine of four rows that all tests share: each leaves it idle."""
    return Engine(params, sized("dapq-longflow"), rows=4, longest=140, max_new_tokens=16, steps=4, queue=12)


@pytest.fixture(scope="module")
def known(params):
    """A dozen requests, and what each gets alone."""
    policy = sized("dapq-longflow")
    return [(prompt, asked, alone(params, policy, prompt, **asked)) for prompt, asked in requests(12)]


def test_mixed_requests_get_what_each_gets_alone_and_nothing_is_compiled(engine, known):
    engine.warm()
    finish_first = engine.submit(ids(3), max_new_tokens=2)
    finish(engine)
    assert len(finish_first.tokens) == 2
    with compilations() as seen:
        answers = arriving(engine, known)
    assert seen == []
    for (prompt, asked, tokens), answer in zip(known, answers, strict=True):
        assert answer.tokens == tokens, asked
        assert answer.prompt_tokens == len(prompt) and answer.seen == len(prompt) + len(tokens) - 1
        assert answer.finish == ("stop" if tokens[-1] in asked["stop_tokens"] else "length")
        assert 0 < answer.kept <= min(40, answer.seen)
        times = dataclasses.astuple(answer.times)
        assert list(times) == sorted(times)


def test_a_request_alone_takes_steps_of_one_row(engine, known):
    """Then those of all rows, when another one has come; one of them is alone again at the end."""
    ask = {"max_new_tokens": 16, "stop_tokens": ()}
    first, (prompt, asked, tokens) = ids(30, 6), known[3]
    lone, widths = engine.submit(first, **ask), []
    other = None
    while not lone.ended or other is None or not other.ended:
        engine.turn()
        if engine._flying is not None:
            widths.append(engine._flying.told.token.shape[1])
        if other is None and lone.tokens:
            other = engine.submit(prompt, **asked)
    finish(engine)
    assert widths[0] == 1 and 4 in widths
    assert lone.tokens == alone(engine.params, engine.policy, first, **ask) and other.tokens == tokens


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTIONS)
def test_arrivals_and_cancels_in_any_order(engine, known, actions):
    in_any_order(engine, known, actions)


def test_the_queue_is_bounded(engine, known):
    prompt, asked, tokens = known[0]
    answers = [engine.submit(prompt, **asked) for _ in range(12)]
    with pytest.raises(Busy, match="12 requests wait"):
        engine.submit(prompt, **asked)
    finish(engine)
    assert all(answer.tokens == tokens for answer in answers)
    assert engine.submit(prompt, **asked) and engine.load.queued == 1
    finish(engine)


def test_stop_strings_end_the_text_before_them(engine, params):
    prompt = ids(20, 4)
    whole = jaxkv.generate(params, prompt, policy=engine.policy, max_new_tokens=14, stop_tokens=())
    stop = whole.text[5:7]
    alone = jaxkv.generate(params, prompt, policy=engine.policy, max_new_tokens=14, stop_tokens=(), stop=stop)
    other = engine.submit(prompt, max_new_tokens=14, stop_tokens=())
    answer = engine.submit(prompt, max_new_tokens=14, stop_tokens=(), stop=stop)
    finish(engine)
    assert answer.text() == alone.text and answer.tokens == alone.tokens[0, : alone.lengths[0]].tolist()
    assert answer.finish == "stop" and other.text() == whole.text and other.finish == "length"


def test_other_hosts_hear_what_an_answer_goes_on_from(engine, params, monkeypatch):
    """By the prompt's ids alone a chat's answer would go on from them, and its first space be another's."""
    monkeypatch.setattr(engine, "params", dataclasses.replace(params, tokenizer=Words()))
    work = engine._asked([{"role": "user", "content": "Hi"}], max_new_tokens=4, stop=" a", stop_tokens=())
    other = engine._asked(**turns.settings(json.loads(json.dumps(turns.words(work)))))
    for one in (work, other):
        one.answers[0].take([ord(letter) - 32 for letter in "ab"], [], 1.0)
    assert other.answers[0].front == work.answers[0].front == ()
    assert other.answers[0].tokens == work.answers[0].tokens and not other.answers[0].ended
    with pytest.raises(UnknownName, match="unknown argument of submit 'front'"):
        engine.submit(ids(9), front=())


@pytest.mark.parametrize("name, options", [("laq-heads", {"draft_window": 6}), ("headkv", {"window": 4})])
def test_rows_hold_prompts_of_every_length(goldens, name, options):
    """Where windows leave layers room that others fill, a text just above the budget may need the most slots."""
    params = calibrated(jaxkv.load(goldens / "tiny" / "gemma3_text"))
    policy = jaxkv.policy(name, budget=40, block=32, **options)
    engine = Engine(params, policy, rows=1, longest=100, max_new_tokens=12, queue=100)
    for length in range(1, 101):
        engine.submit(np.zeros(length, np.int32), max_new_tokens=12)


def test_texts_go_on_from_their_prompt_and_answers_begin(engine, params, monkeypatch):
    """As those of `jaxkv.generate`; where tokens are told, their places in the text are of the same."""
    spaced = dataclasses.replace(params, tokenizer=Words())
    monkeypatch.setattr(engine, "params", spaced)
    for prompt in ("hello", [{"role": "user", "content": "ab"}]):
        answer = engine.submit(prompt, max_new_tokens=4, stop_tokens=(), logprobs=True)
        finish(engine)
        out = jaxkv.generate(spaced, prompt, policy=engine.policy, max_new_tokens=4, stop_tokens=())
        assert answer.text() == out.text and (out.text[0] == " ") == (prompt == "hello")
        reader = Reader(answer, spaced.tokenizer)
        assert reader.offsets(reader.piece()) == ([0, 2, 4, 6] if prompt == "hello" else [0, 1, 3, 5])


def test_samples_share_their_prompt(engine, params):
    prompt, asked = ids(45, 9), {"max_new_tokens": 9, "temperature": 1.1, "seed": 4, "stop_tokens": ()}
    out = jaxkv.generate(params, prompt, policy=engine.policy, samples=3, **asked)
    before = engine.load.prompt_tokens
    answers = engine.submit_all(prompt, samples=3, **asked)
    finish(engine)
    assert [answer.tokens for answer in answers] == out.tokens.tolist()
    assert len({tuple(answer.tokens) for answer in answers}) > 1
    assert engine.load.prompt_tokens - before == 45  # it was run once
    with pytest.raises(BadValue, match="as many as the engine has rows"):
        engine.submit_all(prompt, samples=5)


def test_equal_prompts_draw_differently_on_every_host(engine):
    """By what is said to the other hosts too, which make the request of it; and all are asked for, or none."""
    asked = {"max_new_tokens": 4, "temperature": 1.1, "samples": 2}
    answers = engine.submit_each([ids(9), ids(9, 1), ids(9)], **asked)
    works = list(engine._asked_for)
    assert [work.draw for work in works] == [0, 0, 2] and answers == tuple(a for work in works for a in work.answers)
    assert [engine._asked(**turns.settings(turns.words(work))).draw for work in works] == [0, 0, 2]
    numpys = {"temperature": np.float32(0.5), "top_k": np.int64(5), "top_p": np.float32(0.5), "budget": np.int64(12)}
    said = json.loads(json.dumps(turns.words(engine._asked(ids(5), **numpys))))
    assert {name: said[name] for name in numpys} == {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "budget": 12}
    with pytest.raises(Busy, match="3 requests wait, and this engine's queue holds 12: no room for 10 more"):
        engine.submit_each([ids(9)] * 10)
    with pytest.raises(BadValue, match="13 prompts in one request: expected at most 12"):  # no waiting would help
        engine.submit_each([ids(9)] * 13)
    assert len(engine._asked_for) == 3
    with pytest.raises(UnknownName, match="unknown argument of submit 'draw'"):
        engine.submit(ids(9), draw=1)
    finish(engine)
    assert len({tuple(answer.tokens) for answer in (*answers[:2], *answers[4:])}) > 1 and idle(engine)


@pytest.mark.long
def test_equal_prompts_behind_a_prefix_draw_as_those_of_generate(engine, params):
    asked = {"max_new_tokens": 6, "temperature": 1.1, "seed": 5, "stop_tokens": ()}
    cache = jaxkv.prefill(params, ids(20, 5), policy=engine.policy)
    cache = dataclasses.replace(cache, draws=np.array([3], np.int32))  # as a sample has it that is gone on from
    engine.store("sample", cache)
    answers = engine.submit_each([ids(3), ids(3)], samples=2, prefix="sample", **asked)
    finish(engine)
    out = jaxkv.generate(params, [ids(3), ids(3)], cache=cache, samples=2, **asked)
    assert [answer.tokens for answer in answers] == out.tokens.tolist()
    engine.forget("sample")


def test_log_probabilities_are_those_of_the_models_own_logits(engine, params):
    prompt, asked = ids(12, 2), {"max_new_tokens": 4, "stop_tokens": (), "temperature": 1.5, "top_k": 3, "seed": 1}
    answer, silent = engine.submit(prompt, logprobs=True, **asked), engine.submit(prompt, **asked)
    finish(engine)
    assert answer.tokens == silent.tokens and silent.chances == []
    assert [chance.token for chance in answer.chances] == answer.tokens
    prefilling = Prefilling(params, engine.policy, Execution(), draft=lambda *_: pytest.fail("it looks ahead"))
    for number, chance in enumerate(answer.chances):
        text = np.append(prompt, answer.tokens[:number]).astype(np.int32)
        logits = np.asarray(prefilling.run([text], None).logits[0])
        expected = logits - np.log(np.exp(logits).sum())
        assert chance.logprob == pytest.approx(expected[chance.token], abs=2e-4)
        np.testing.assert_allclose([value for _, value in chance.best], np.sort(expected)[::-1][:20], atol=2e-4)
        assert [expected[token] for token, _ in chance.best] == pytest.approx([v for _, v in chance.best], abs=2e-4)


@pytest.mark.some(1)
@pytest.mark.parametrize("length", [20, 70])
def test_a_request_may_have_a_smaller_budget(engine, params, length):
    policy = jaxkv.policy("dapq-longflow", budget=24, block=32, count=6)
    prompt, asked = ids(length, 3), {"max_new_tokens": 12, "stop_tokens": ()}
    answer, whole = engine.submit(prompt, budget=24, **asked), engine.submit(prompt, **asked)
    finish(engine)
    assert answer.tokens == alone(params, policy, prompt, **asked) and answer.kept <= 24
    assert whole.tokens == alone(params, engine.policy, prompt, **asked)
    with pytest.raises(BadValue, match="budget=41 of a request: expected at most 40"):
        engine.submit(prompt, budget=41, **asked)
    with pytest.raises(BadValue, match="budget"):
        engine.submit(prompt, budget=1, **asked)


@pytest.mark.parametrize("name", ["mikv", "tiered-laq", "qaq", "arkv", "zipcache", "tiered-h2o"])
def test_a_budget_of_its_own_does_not_resize_a_second_tier(params, name):
    """Rows begin with the tier of the engine's budget; one of so many slots whatever the budget (`tiered-h2o`) fits."""
    engine = Engine(params, sized(name), rows=2, longest=140, max_new_tokens=4)
    assert engine.policy.budget == 40 and engine.submit(ids(9), budget=40, max_new_tokens=4)
    if name == "tiered-h2o":
        assert engine.submit(ids(9), budget=32, max_new_tokens=4)
    else:
        with pytest.raises(BadValue, match=f"budget=32 of a request under policy '{name}': expected 40, or none"):
            engine.submit(ids(9), budget=32, max_new_tokens=4)


@pytest.mark.long
def test_requests_branch_from_a_stored_prefix(engine, params):
    engine.warm()
    cache = jaxkv.prefill(params, ids(77, 5), policy=engine.policy)
    spoken = jaxkv.generate(params, cache=cache, prompt=ids(5), max_new_tokens=4, stop_tokens=()).cache
    engine.store("manual", cache)
    engine.store("talk", spoken)
    asked = {"max_new_tokens": 8, "stop_tokens": (), "repetition_penalty": 1.3}
    with compilations() as seen:
        answers = [
            engine.submit(ids(length, length), prefix=name, **asked) for length, name in ((3, "manual"), (40, "talk"))
        ]
        finish(engine)
    assert seen == []
    expected = [
        jaxkv.generate(params, ids(length, length), cache=from_, **asked).tokens[0].tolist()
        for length, from_ in ((3, cache), (40, spoken))
    ]
    assert [answer.tokens for answer in answers] == expected
    assert answers[0].prompt_tokens == 3 and answers[0].seen == 77 + 3 + 7
    assert engine.prefixes == ("manual", "talk")
    engine.forget("manual")
    engine.forget("talk")
    with pytest.raises(UnknownName, match="unknown prefix"):
        engine.submit(ids(3), prefix="manual")
    with pytest.raises(BadValue, match="expected one row"):
        engine.store("two", jaxkv.prefill(params, [ids(5), ids(6)], policy=engine.policy))
    with pytest.raises(BadCheckpoint, match="was made under"):
        engine.store("other", jaxkv.prefill(params, ids(5), policy=jaxkv.policy("full")))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"stop_tokens": tuple(range(17))}, "stop_tokens=.*expected at most 16.*are 17"),
        ({"max_tokens": 2}, "unknown argument of submit 'max_tokens'; did you mean 'max_new_tokens'"),
        ({"prefix": "nope"}, "unknown prefix 'nope'; known: none"),
        ({"logprobs": 5}, "logprobs=5"),
        ({"fewer": 1}, "fewer=1: expected True or False"),
        ({"max_new_tokens": 10_000}, "exceed the model's context"),
        ({"stop": [""]}, "empty string"),
        ({"stop": ["never"] * 17}, "stop=.*expected at most 16 texts.*are 17"),
        ({"prefix": ["x"]}, "unknown prefix"),
        ({"samples": 2}, r"samples=2 of submit: expected none, .*call submit_all\(prompt, samples=\)"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(engine, asked, says):
    with pytest.raises(JaxkvError, match=says):
        engine.submit(ids(9), **asked)
    with pytest.raises(BadValue):
        engine.submit([], max_new_tokens=1)
    for prompts in ([[1, 2, 3]], ["a"], [[1], [2]]):
        with pytest.raises(BadValue, match=r"prompt=\[.*, a list of prompts: expected one, .*submit_each"):
            engine.submit(prompts)
    with pytest.raises(BadValue, match="prompts='abc': expected a list of prompts"):
        engine.submit_each("abc")
    assert idle(engine)


@pytest.mark.long
@pytest.mark.parametrize("name", ["laq-h2o", "laq32-h2o-int4"])
def test_a_policy_that_looks_ahead_reads_a_prompt_twice(params, name):
    policy = sized(name)
    engine = Engine(params, policy, rows=4, longest=140, max_new_tokens=12, steps=4)
    engine.warm()
    work = [(ids(length, length), {"max_new_tokens": 11, "stop_tokens": ()}) for length in (5, 90, 33)]
    with compilations() as seen:
        answers = [engine.submit(prompt, **asked) for prompt, asked in work]
        gone = engine.submit(ids(90, 7))
        engine.turn()
        gone.cancel()
        small = engine.submit(work[1][0], budget=36, **work[1][1])
        finish(engine)
    assert seen == [] and idle(engine)
    for (prompt, asked), answer in zip(work, answers, strict=True):
        assert answer.tokens == alone(params, policy, prompt, **asked), len(prompt)
    prompt, asked = work[1]
    assert small.tokens == alone(params, dataclasses.replace(policy, budget=36), prompt, **asked)
    with pytest.raises(BadValue, match="first pass would look with another window"):
        engine.submit(ids(90), budget=int(policy.prefill.observe.draft_window / policy.prefill.observe.draft_times))


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "laq-h2o-int4",
        pytest.param("laq-h2o", marks=pytest.mark.slow),
        pytest.param("laq-heads", marks=pytest.mark.slow),
        pytest.param("tiered-laq", marks=pytest.mark.slow),
    ],
)
def test_a_policy_that_looks_ahead_goes_on_from_a_prefix(params, name):
    """The first pass behind a prefix forgets nothing, and a prefix that holds less than the budget is no other case."""
    policy = sized(name)
    engine = Engine(params, policy, rows=2, longest=140, max_new_tokens=12, steps=4)
    engine.warm()
    texts = {"manual": ids(77, 5), "few": ids(9, 2)}
    caches = {prefix: jaxkv.prefill(params, text, policy=policy) for prefix, text in texts.items()}
    caches["talk"] = jaxkv.generate(params, ids(5), cache=caches["manual"], max_new_tokens=4, stop_tokens=()).cache
    for prefix, cache in caches.items():
        engine.store(prefix, cache)
    asked = {"max_new_tokens": 8, "stop_tokens": ()}
    engine.submit(ids(3), prefix="manual", **asked)  # small operations on the host are compiled
    finish(engine)
    work = [(3, "manual"), (40, "talk"), (90, "few"), (4, "few"), (120, None), (100, "manual")]
    with compilations() as seen:
        answers = [engine.submit(ids(length, length), prefix=prefix, **asked) for length, prefix in work]
        finish(engine)
    assert seen == [] and idle(engine)
    for answer, (length, prefix) in zip(answers, work, strict=True):
        cache = {} if prefix is None else {"cache": caches[prefix]}
        assert answer.tokens == alone(params, policy, ids(length, length), **cache, **asked), (length, prefix)


@pytest.mark.long
def test_windows_that_a_ratio_grows_beyond(tiny):
    """Under a ratio a long prompt leaves a sliding layer whole, and a shorter one does not: no program may be missing
    for the long one."""
    params, policy = tiny("mistral"), jaxkv.policy("snapkv", ratio=0.8, window=2, block=16)
    engine = Engine(params, policy, rows=2, longest=70, max_new_tokens=4, steps=4)
    asked = {"max_new_tokens": 4, "stop_tokens": ()}
    answers = [engine.submit(ids(length, length), **asked) for length in (20, 60)]
    finish(engine)
    for answer, length in zip(answers, (20, 60), strict=True):
        assert answer.tokens == alone(params, policy, ids(length, length), **asked), length


def test_what_an_engine_does_not_take(params):
    with compilations() as seen:
        with pytest.raises(BadValue, match="divides one budget over all layers"):
            Engine(params, sized("global-h2o"))
        with pytest.raises(BadValue, match="rows=0"):
            Engine(params, sized("h2o"), rows=0)
        with pytest.raises(BadValue, match="context"):
            Engine(params, jaxkv.policy("full"), longest=10**6)
        with pytest.raises(BadValue, match="longest=2040 and max_new_tokens=16: expected at most 2048 together"):
            Engine(params, jaxkv.policy("full"), longest=2040, max_new_tokens=16)
        with pytest.raises(BadValue, match="longest=1 and max_new_tokens=2048: expected at most 2048 together"):
            Engine(params, jaxkv.policy("full"), max_new_tokens=2048)
        assert max(Engine(params, jaxkv.policy("full")).shapes.slots) == 2048  # all of the context, by the defaults
        few = Engine(params, jaxkv.policy("full"), longest=10, max_new_tokens=5)  # blocks as long as the context
        assert max(few.shapes.whole) >= 10
        full = Engine(params, jaxkv.policy("full", block=32), longest=64, max_new_tokens=8)
        with pytest.raises(BadValue, match="slots in a layer"):
            full.submit(ids(90), max_new_tokens=8)
        with pytest.raises(BadValue, match="budget=20 of a request"):
            full.submit(ids(9), budget=20)
    assert len(seen) < 20  # a few small arrays, no program of the model


def test_a_thread_runs_it_and_the_stop_finishes_what_runs(params, known):
    with Engine(params, sized("dapq-longflow"), rows=2, longest=140, max_new_tokens=16, steps=4) as engine:
        heard = threading.Event()
        answers = [engine.submit(prompt, **asked) for prompt, asked, _ in known]
        answers[0].watch(heard.set)
        pieces = ["".join(answer) for answer in answers[:3]]
        assert heard.wait(10) and pieces == [answer.text() for answer in answers[:3]]
        assert answers[5].wait(60).ended
    assert [answer.tokens for answer in answers] == [tokens for *_, tokens in known]
    with pytest.raises(Busy, match="takes no more"):
        engine.submit(ids(3))
    other = Engine(params, engine.policy, rows=2, longest=140, max_new_tokens=16)
    waits = other.submit(ids(5))
    with pytest.raises(TimeoutError, match=r"nobody runs its engine; call the engine's start\(\)"):
        waits.wait(0.01)
    for never in (waits.wait, lambda: list(waits)):
        with pytest.raises(BadValue, match="nobody runs"):
            never()
    other._runs = True
    with pytest.raises(TimeoutError, match="it goes on"):
        waits.wait(0.01)


def test_a_stop_waits_for_a_start_under_way(params, monkeypatch):
    """The process may end behind a stop, and must not while XLA compiles."""
    engine, compiles, done = Engine(params, sized("h2o"), rows=1, longest=40), threading.Event(), threading.Event()

    def make():
        compiles.set()
        done.wait(10)

    monkeypatch.setattr(engine, "_make", make)
    monkeypatch.setattr(engine, "_rest", lambda wanted: None)
    starts, stops = (threading.Thread(target=each, daemon=True) for each in (engine.start, engine.stop))
    starts.start()
    assert compiles.wait(10)
    stops.start()
    stops.join(0.1)
    assert stops.is_alive()
    done.set()
    stops.join(10)
    starts.join(10)
    assert not stops.is_alive() and not starts.is_alive() and not engine._thread.is_alive()


@pytest.mark.long
def test_prompts_whose_programs_are_there_do_not_wait_for_the_others(params, monkeypatch):
    """Under a policy that looks ahead a short prompt is answered before the programs of long ones are made."""
    policy, ask = sized("laq-h2o"), {"max_new_tokens": 6, "stop_tokens": ()}
    engine, go_on = Engine(params, policy, rows=4, longest=140, max_new_tokens=12, steps=4), threading.Event()
    held = engine._programs.add_missing
    monkeypatch.setattr(engine._programs, "add_missing", lambda wanted: go_on.wait(60) and held(wanted))
    long, short, middle = (engine.submit(ids(length, 3), **ask) for length in (100, 9, 30))
    gone = engine.submit(ids(120), **ask)
    with engine:
        assert short.wait(60).tokens == alone(params, policy, ids(9, 3), **ask)
        assert middle.wait(60).tokens == alone(params, policy, ids(30, 3), **ask)
        with pytest.raises(TimeoutError):
            long.wait(0.2)
        gone.cancel()
        gone.wait(60)
        go_on.set()
        assert long.wait(60).tokens == alone(params, policy, ids(100, 3), **ask)
    assert not long.cancelled and gone.finish == "cancelled" and idle(engine)


def test_what_waits_for_programs_is_answered_before_the_engine_stops(params):
    policy, ask = sized("laq-h2o"), {"max_new_tokens": 6, "stop_tokens": ()}
    with Engine(params, policy, rows=2, longest=30, max_new_tokens=12, steps=4) as engine:
        answer = engine.submit(ids(24, 3), **ask)
    assert answer.tokens == alone(params, policy, ids(24, 3), **ask)


def test_programs_that_cannot_be_made_end_an_engine(params, monkeypatch):
    engine = Engine(params, sized("dapq-longflow"), rows=2, longest=140, max_new_tokens=16)
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)

    def broken(_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._programs, "add_missing", broken)
    answer = engine.submit(ids(100))
    engine.start()
    with pytest.raises(JaxkvError, match="out of memory"):
        answer.wait(60)
    engine.stop()


@pytest.mark.parametrize(
    ("name", "whole", "scored"),
    [("dapq", (16, 32, 64), (32, 64, 128)), ("full", (16, 32, 64, 128), ()), ("h2o", (), (16, 32, 64, 128))],
)
def test_first_blocks_have_the_sizes_that_prompts_can_have(params, name, whole, scored):
    """At a budget of 40 no longer prompt is kept whole, and a shorter one is scored where its scores are kept."""
    shapes = Engine(params, dataclasses.replace(sized(name), block=128), longest=140, max_new_tokens=4).shapes
    assert (shapes.firsts(False, False), shapes.firsts(True, False)) == (whole, scored)
    assert shapes.firsts(True, True) == ((16, 32, 64, 128) if scored else ())


def test_an_engine_that_fails_says_so_to_everybody(params, monkeypatch):
    engine = Engine(params, sized("dapq-longflow"), rows=2, longest=140, max_new_tokens=16)
    engine.warm()
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)

    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._programs, "chunk", broken)
    answers = [engine.submit(ids(5, seed)) for seed in range(4)]
    engine.start()
    for answer in answers:
        with pytest.raises(JaxkvError, match="out of memory"):
            answer.wait(60)
    with pytest.raises(Busy, match="has failed"):
        engine.submit(ids(5))
    engine.stop()


def test_a_prompt_beyond_float16_fails_alone(tiny):
    """One token has numbers that grow beyond 65504: its prompt is told, and the engine goes on."""
    params = tiny("mistral")
    assert not params.config.tie_embeddings
    weights = jax.tree.map(lambda x: x.astype("float16"), params.weights)
    weights["embed"][...] = weights["embed"][...].at[7].set(np.inf)
    engine = Engine(type(params)(weights, params.config, Letters()), sized("h2o"), rows=2, longest=140)
    bad, good = engine.submit([9, 7, 8]), engine.submit([9, 6, 8], max_new_tokens=3, stop_tokens=())
    finish(engine)
    with pytest.raises(BadValue, match="beyond 65504, where float16 ends; load it with dtype='bfloat16'"):
        bad.wait()
    assert (bad.finish, bad.tokens, good.finish, len(good.tokens)) == ("failed", [], "length", 3)
    assert engine.load.ended == {"failed": 1, "length": 1} and engine.failure is None


TAKEN = [name for name, policy in catalogue().items() if not policy.allocate.divides]


OF_EACH_KIND = (
    "laq-h2o-int4",
    "streaming-llm",
    "snapkv",
    "spans-longflow",
    "adakv-h2o",
    "razorattention",
    "quest",
    "keepkv",
    "full",
)
EACH = [
    pytest.param(name, marks=pytest.mark.long if name in OF_EACH_KIND else pytest.mark.slow) for name in sorted(TAKEN)
]


@pytest.mark.parametrize("name", EACH)
def test_policies(params, name):
    """Each policy that an engine takes, with rows of every length beside one another."""
    policy = sized(name)
    engine = Engine(params, policy, rows=4, longest=140, max_new_tokens=12, steps=4)
    work = [(ids(length, length), {"max_new_tokens": 11, "stop_tokens": ()}) for length in (5, 90, 33, 50, 130)]
    answers = [engine.submit(prompt, **asked) for prompt, asked in work]
    finish(engine)
    for (prompt, asked), answer in zip(work, answers, strict=True):
        assert answer.tokens == alone(params, policy, prompt, **asked), len(prompt)


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "llama3"])
def test_64_requests_at_random_times(tiny, family):
    params, policy = tiny(family), sized("dapq-longflow")
    engine = Engine(params, policy, rows=8, longest=140, max_new_tokens=16, steps=4)
    engine.warm()
    draw, work, answers = np.random.default_rng(0), requests(64), []
    with compilations() as seen:
        while len(answers) < len(work) or not all(answer.ended for answer in answers):
            for _ in range(int(draw.poisson(1.5))):
                if len(answers) < len(work):
                    prompt, asked = work[len(answers)]
                    answers.append(engine.submit(prompt, **asked))
            engine.turn()
        finish(engine)
    assert seen == [] and idle(engine)
    for (prompt, asked), answer in zip(work, answers, strict=True):
        assert answer.tokens == alone(params, policy, prompt, **asked), (len(prompt), asked)


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"model": 2}, {"context": 2}, {"model": 4, "context": 2}], ids=str)
@pytest.mark.parametrize("name", ["dapq-longflow", "snapkv", "adakv-h2o", "laq-h2o-int4"])
def test_on_a_mesh(params, name, axes):
    """Heads and slots divided over devices, rows whole: the tokens of one device, and nothing compiled."""
    on = type(params)
    divided = jaxkv.load(
        GOLDENS / "tiny" / FAMILY, mesh=jaxkv.mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    )
    divided = on(divided.weights, divided.config, params.tokenizer, divided.layout, params.learned)
    engine = Engine(divided, sized(name), rows=3, longest=140, max_new_tokens=12, steps=4)
    engine.warm()
    work = [
        (ids(length, length), {**DRAWS[length % 3], "max_new_tokens": 9, "stop_tokens": ()}) for length in LENGTHS[:5]
    ]
    with compilations() as seen:
        answers = [engine.submit(prompt, **asked) for prompt, asked in work]
        finish(engine)
    assert seen == []
    assert [answer.tokens for answer in answers] == [alone(params, engine.policy, p, **asked) for p, asked in work]


@pytest.mark.parametrize("left", [1, 5, 16, 40])
def test_fewer_tokens_where_so_many_do_not_fit(engine, params, left):
    """Those that the context leaves behind the prompt (the last is not run), and no more than were asked for."""
    asked = {"max_new_tokens": 16, "stop_tokens": ()}
    prompt = ids(params.config.max_position + 1 - left)
    if left < 16:
        with pytest.raises(BadValue, match="exceed the model's context"):
            engine.submit(prompt, **asked)
    answer = engine.submit(prompt, **asked, fewer=True)
    finish(engine)
    asked = {**asked, "max_new_tokens": min(left, 16)}
    assert answer.tokens == alone(params, engine.policy, prompt, **asked) and answer.finish == "length"
    with pytest.raises(BadValue, match="exceed the model's context"):
        engine.submit(ids(params.config.max_position + 1), fewer=True)


def test_a_mesh_that_divides_rows_is_refused(params):
    divided = jaxkv.load(GOLDENS / "tiny" / FAMILY, mesh=jaxkv.mesh(data=2, devices=jax.devices()[:2]))
    with pytest.raises(BadValue, match="divides rows by 2"):
        Engine(divided, sized("h2o"))


@pytest.mark.long
def test_a_penalty_behind_a_prefix_of_unknown_text_is_refused(engine, params):
    cache = jaxkv.prefill(params, ids(20, 5), policy=engine.policy)
    engine.store("unknown", dataclasses.replace(cache, tokens=None))
    engine.submit(ids(3), prefix="unknown", max_new_tokens=1).cancel()
    with pytest.raises(BadValue, match="tokens of the prefix are not known"):
        engine.submit(ids(3), prefix="unknown", max_new_tokens=1, repetition_penalty=2.0)


def test_a_prompt_that_leaves_no_room_for_what_looks_ahead(params):
    context = params.config.max_position
    with pytest.raises(BadValue, match=f"longest={context - 3}: behind a prompt 4 tokens look ahead"):
        Engine(params, sized("laq-h2o"), rows=1, longest=context - 3, max_new_tokens=2)
