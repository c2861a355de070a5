"""EpiCache: one bounded cache per topic of a history, and the question picks one."""

import dataclasses

import numpy as np
import pytest

import jaxkv
from jaxkv.episodes import k_means
from jaxkv.errors import BadValue

FAMILY = "llama3"
SIZE = 6  # tokens of a segment
TOPICS = [np.arange(3 + 20 * topic, 3 + SIZE + 20 * topic) for topic in range(3)]  # words that only one topic has


def policy(budget=16):
    return jaxkv.policy("epicache", budget=budget, count=SIZE, sinks=2, block=16)


@pytest.fixture(scope="module")
def history():
    """Nine segments, three of each topic, in turns."""
    rng = np.random.default_rng(0)
    return np.concatenate([rng.permutation(TOPICS[turn % 3]) for turn in range(9)]).astype(np.int32)


@pytest.fixture(scope="module")
def memory(tiny, history):
    return jaxkv.episodes(tiny(FAMILY), history, policy=policy(), count=3)


def test_topics_are_found(memory):
    members = memory.members.reshape(3, 3)
    assert (members == members[0]).all() and len(set(members[0])) == 3
    for topic in range(3):
        assert memory.members[memory.medoids[topic]] == topic


def test_the_question_picks_its_topic(tiny, memory, history):
    """The answer is that of a cache which only its topic's medoid has looked at."""
    params = tiny(FAMILY)
    for number, words in enumerate(TOPICS):
        question = words[:5].astype(np.int32)
        topic = memory.nearest(question)
        assert topic == memory.members[number]
        out = memory.ask(question, max_new_tokens=6, stop_tokens=())
        start = memory.medoids[topic] * SIZE
        alone = jaxkv.prefill(params, history, policy=policy(), pseudo=history[None, start : start + SIZE])
        want = jaxkv.generate(params, question, cache=alone, max_new_tokens=6, stop_tokens=())
        assert out.tokens.tolist() == want.tokens.tolist()
        assert out.cache.texts()[0].tolist() == [*history, *question, *out.tokens[0, :-1]]
        for mine, theirs in zip(out.cache.layers, want.cache.layers, strict=True):
            np.testing.assert_array_equal(np.asarray(mine.positions), np.asarray(theirs.positions))


def test_topics_keep_different_tokens_in_bounded_memory(tiny, memory, history):
    kept = [
        {int(p) for layer in memory.cache.layers for p in np.asarray(layer.positions[row]).ravel()} for row in range(3)
    ]
    assert kept[0] != kept[1] != kept[2] != kept[0]
    assert all(layer.slots == 16 for layer in memory.cache.layers)
    longer = jaxkv.episodes(tiny(FAMILY), np.tile(history, 3), policy=policy(), count=3)
    assert longer.nbytes == memory.nbytes


def test_k_means_keeps_what_is_apart_apart():
    rng = np.random.default_rng(1)
    poles = np.eye(4)[:3]
    points = np.concatenate([pole + 0.1 * rng.standard_normal((5, 4)) for pole in poles])
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    for seed in range(5):
        centres, members = k_means(points, 3, seed)
        assert len(set(members)) == 3
        assert all(len(set(members[at : at + 5])) == 1 for at in (0, 5, 10))
        np.testing.assert_allclose(np.linalg.norm(centres, axis=1), 1, rtol=1e-6)
    centres, members = k_means(np.ones((4, 2)) / np.sqrt(2), 2, 0)  # all alike: one topic has no member
    assert np.isfinite(centres).all() and set(members) == {0}


def test_refusals(tiny, history):
    params = tiny(FAMILY)
    for count, chosen in ((0, policy()), (10, policy()), (2, jaxkv.policy("knorm", budget=16))):
        with pytest.raises(BadValue, match="topics"):
            jaxkv.episodes(params, history, policy=chosen, count=count)
    with pytest.raises(BadValue, match="one"):
        jaxkv.episodes(params, [history, history], policy=policy())
    beyond = params.config.vocab_size
    for wrong in (np.zeros((1, 5), int), np.zeros((1, SIZE)), np.full((1, SIZE), beyond), np.full((1, SIZE), -1)):
        with pytest.raises(BadValue, match="pseudo"):
            jaxkv.prefill(params, history, policy=policy(), pseudo=wrong)
    with pytest.raises(BadValue, match="queries are others"):
        other = dataclasses.replace(jaxkv.policy("snapkv", budget=16, window=4))
        jaxkv.prefill(params, history, policy=other, pseudo=np.zeros((1, 4), np.int32))
