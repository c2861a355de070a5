"""What the tests of engines share: requests, what each gets alone, and turns."""

import contextlib

import jax.monitoring
import numpy as np
from hypothesis import strategies as st
from small import SMALL

import jaxkv
from jaxkv.errors import Busy
from jaxkv.policies.catalogue import catalogue

LENGTHS = (5, 40, 17, 90, 33, 64, 1, 130)
DRAWS = (
    {},
    {"temperature": 1.2, "top_p": 0.7, "seed": -(2**40)},
    {"temperature": 0.9, "top_k": 30, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 2**40},
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 11)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("turn"), st.integers(1, 4)),
    ),
    max_size=40,
)


def sized(name, **options):
    """The policy at a budget of 40 tokens and blocks of 32, with options that fit tiny prompts."""
    budget = {"budget": 40} if catalogue()[name].evicts and catalogue()[name].budget is None else {}
    return jaxkv.policy(name, block=32, **budget, **SMALL.get(name, {}), **options)


def alone(params, policy, prompt, **asked):
    """What `generate` gives: the tokens up to the end, and the text."""
    out = jaxkv.generate(params, prompt, policy=policy, **asked)
    return out.tokens[0, : out.lengths[0]].tolist()


def finish(engine):
    """Run turns until nothing is left to do."""
    for _ in range(10_000):
        if not engine.turn():
            return
    raise AssertionError("the engine does not come to an end")


def idle(engine):
    """Whether nothing is left of any request."""
    load = engine.load
    return (load.queued, load.taken, engine._open, engine._flying, engine._firsts) == (0, 0, set(), None, [])


def arriving(engine, work, seed=1):
    """The answers to requests (prompt, settings, ...) that arrive while others run."""
    draw, answers, waiting = np.random.default_rng(seed), [], list(work)
    while waiting or not all(answer.ended for answer in answers):
        for _ in range(int(draw.integers(0, 3))):
            if waiting:
                prompt, asked, *_ = waiting.pop(0)
                answers.append(engine.submit(prompt, **asked))
        engine.turn()
    assert not engine.turn() and idle(engine)
    return answers


def in_any_order(engine, known, actions):
    """Does what `ACTIONS` say. Who is not cancelled gets all its tokens, who is gets the first of them; no row and no
    request is left behind."""
    before, asked, cancelled = engine.load.ended, [], set()
    for what, number in actions:
        if what == "submit":
            prompt, wanted, tokens = known[number]
            with contextlib.suppress(Busy):
                asked.append((engine.submit(prompt, **wanted), tokens))
        elif what == "cancel" and asked:
            answer, _ = asked[number % len(asked)]
            if not answer.ended:
                cancelled.add(number % len(asked))
            answer.cancel()
        elif what == "turn":
            for _ in range(number):
                engine.turn()
    finish(engine)
    assert idle(engine)
    for number, (answer, tokens) in enumerate(asked):
        if answer.finish == "cancelled":
            assert number in cancelled and answer.tokens == tokens[: len(answer.tokens)]
        else:
            assert answer.tokens == tokens
    assert sum(engine.load.ended.values()) - sum(before.values()) == len(asked)


@contextlib.contextmanager
def compilations():
    """The names of what is compiled inside the block, as JAX tells them."""
    seen = []

    def heard(event, seconds, **told):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(told.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
