"""EpiCache: one bounded cache per topic of a history, and the question picks one."""

import dataclasses
import sys
import types

import numpy as np
import pytest

import jaxkv
from jaxkv.episodes import Episodes, k_means
from jaxkv.errors import BadValue
from jaxkv.policies import Uniform
from jaxkv.policies.policy import made
from jaxkv.store.cache import one_row

FAMILY = "llama3"
episodes_of = sys.modules["jaxkv.episodes"]  # the name in jaxkv is the function's
SIZE = 6  # tokens of a segment
TOPICS = [np.arange(3 + 20 * topic, 3 + SIZE + 20 * topic) for topic in range(3)]  # words that only one topic has


def policy(budget=16):
    return jaxkv.policy("epicache", budget=budget, count=SIZE, sinks=2, block=16)


class Words:
    """Every word is a token; a message is its words."""

    chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(word) if word.isdigit() else 90 + len(word) for word in text.split()]}

    def decode(self, tokens, **_):
        return " ".join(map(str, tokens))

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True):
        return " ".join(message["content"] for message in messages)


@pytest.fixture(scope="module")
def history():
    """Nine segments, three of each topic, in turns."""
    rng = np.random.default_rng(0)
    return np.concatenate([rng.permutation(TOPICS[turn % 3]) for turn in range(9)]).astype(np.int32)


@pytest.fixture(scope="module")
def memory(tiny, history):
    return jaxkv.episodes(tiny(FAMILY), history, policy=policy(), count=3)


@pytest.mark.long
def test_topics_are_found(memory):
    members = memory.members.reshape(3, 3)
    assert (members == members[0]).all() and len(set(members[0])) == 3
    for topic in range(3):
        assert (memory.members[memory.nearby[topic]] == topic).all() and len(memory.nearby[topic]) == 3
        assert (np.diff(memory.nearby[topic]) > 0).all(), "in time order"


def watched(monkeypatch):
    """The pseudo tokens of every prefill."""
    given, real = [], episodes_of.prefill

    def prefill(*args, pseudo, **more):
        given.append(pseudo)
        return real(*args, pseudo=pseudo, **more)

    monkeypatch.setattr(episodes_of, "prefill", prefill)
    return given


@pytest.mark.long
def test_the_nearest_windows_look(tiny, history, monkeypatch):
    """Of a topic's segments the nearest to its centre look, behind the instruction and in time order."""
    given = watched(monkeypatch)
    params = dataclasses.replace(tiny(FAMILY), tokenizer=Words())
    memory = jaxkv.episodes(params, history, policy=policy(), count=3, windows=2, instruction="a b")
    for topic, near in enumerate(memory.nearby):
        assert len(near) == 2 and (memory.members[near] == topic).all()
        segments = history.reshape(-1, SIZE)
        directions = episodes_of._directions(episodes_of._means(params, list(segments)), memory.mean)
        near_all = np.where(memory.members == topic, directions @ memory.centres[topic], -np.inf)
        assert set(near) == set(np.argsort(-near_all, kind="stable")[:2])
        assert given[0][topic].tolist() == [91, 91, *segments[near].ravel()]


@pytest.mark.long
def test_windows_of_utterances(tiny, monkeypatch):
    """Four messages are a segment, with who said them; so are four lines of a text."""
    given = watched(monkeypatch)
    params = dataclasses.replace(tiny(FAMILY), tokenizer=Words())
    said = [" ".join(map(str, range(3 + 5 * turn, 8 + 5 * turn))) for turn in range(10)]
    chat = [{"role": "user" if turn % 2 == 0 else "assistant", "content": words} for turn, words in enumerate(said)]
    jaxkv.episodes(params, chat, policy=policy(), count=3, instruction="")
    rows = {tuple(row[row >= 0]) for row in given[0]}
    texts = [" ".join(f"{message['role']}: {message['content']}" for message in chat[at : at + 4]) for at in (0, 4, 8)]
    assert rows == {tuple(Words()(text)["input_ids"]) for text in texts}
    jaxkv.episodes(params, "\n".join(said) + "\n\n", policy=policy(), count=2, utterances=5, instruction="")
    assert {tuple(row[row >= 0]) for row in given[1]} == {tuple(range(3, 28)), tuple(range(28, 53))}


@pytest.mark.long
def test_messages_ask_by_what_follows_the_last_answer(tiny):
    """As the whole conversation, or as the question alone: the topic is the question's, and so is the answer."""
    params = dataclasses.replace(tiny(FAMILY), tokenizer=Words())
    said = [" ".join(map(str, words)) for topic in TOPICS for words in (topic[:3], topic[3:])]
    chat = [{"role": ("user", "assistant")[turn % 2], "content": words} for turn, words in enumerate(said)]
    memory = jaxkv.episodes(params, chat, policy=policy(), count=3, utterances=2, instruction="")
    assert len(set(memory.members)) == 3
    for number, words in enumerate(TOPICS):
        asked = [{"role": "user", "content": " ".join(map(str, words[1:4]))}]
        assert memory.nearest(asked) == memory.nearest([*chat, *asked]) == memory.members[number]
        outs = [memory.ask(question, max_new_tokens=3, stop_tokens=()) for question in (asked, [*chat, *asked])]
        assert outs[0].tokens.tolist() == outs[1].tokens.tolist()
        assert outs[0].stats.prompt_tokens == outs[1].stats.prompt_tokens
    with pytest.raises(BadValue, match="2 questions"):
        memory.ask([TOPICS[0], TOPICS[1]])


@pytest.mark.long
def test_the_question_picks_its_topic(tiny, memory, history):
    """The answer is that of a cache which only its topic's segments have looked at."""
    params = tiny(FAMILY)
    for number, words in enumerate(TOPICS):
        question = words[:5].astype(np.int32)
        topic = memory.nearest(question)
        assert topic == memory.members[number]
        out = memory.ask(question, max_new_tokens=6, stop_tokens=())
        looking = history.reshape(-1, SIZE)[memory.nearby[topic]].reshape(1, -1)
        alone = jaxkv.prefill(params, history, policy=policy(), pseudo=looking)
        want = jaxkv.generate(params, question, cache=alone, max_new_tokens=6, stop_tokens=())
        assert out.tokens.tolist() == want.tokens.tolist()
        assert out.cache.texts()[0].tolist() == [*history, *question, *out.tokens[0, :-1]]
        for mine, theirs in zip(out.cache.layers, want.cache.layers, strict=True):
            np.testing.assert_array_equal(np.asarray(mine.positions), np.asarray(theirs.positions))


@pytest.mark.long
def test_topics_keep_different_tokens_in_bounded_memory(tiny, memory, history):
    kept = [
        {int(p) for layer in memory.cache.layers for p in np.asarray(layer.positions[row]).ravel()} for row in range(3)
    ]
    assert kept[0] != kept[1] != kept[2] != kept[0]
    assert np.asarray(memory.cache.limits).mean() == 16
    longer = jaxkv.episodes(tiny(FAMILY), np.tile(history, 3), policy=policy(), count=3)
    assert longer.nbytes == memory.nbytes
    assert "\n" not in repr(memory) and f"{len(memory.centres)} topics of {len(memory.members)} segments" in repr(
        memory
    )


CODED = [
    {"keys": {"kind": "int", "bits": 4}, "values": {"kind": "int", "bits": 4}, "residual": 4},
    {"keys": {"kind": "int-by-channel", "tokens": 4}, "values": {"kind": "int", "bits": 4}, "residual": 4},
]


@pytest.mark.long
@pytest.mark.parametrize("store", CODED, ids=["token", "channel"])
def test_topics_in_codes(tiny, memory, history, store):
    """Every topic holds its codes, in fewer bytes; the question's goes on from them, by itself as beside the others."""
    chosen = dataclasses.replace(policy(), allocate=Uniform(), store=made("store", store))
    coded = jaxkv.episodes(tiny(FAMILY), history, policy=chosen, count=3)
    assert coded.members.tolist() == memory.members.tolist()
    assert coded.cache.kv_bytes < 0.75 * memory.cache.kv_bytes
    held = np.asarray(coded.cache.held())
    assert (held == held.max()).all() and held.max() <= 16
    question = np.append(TOPICS[1][:4], TOPICS[1][:2])
    out = coded.ask(question, max_new_tokens=6, stop_tokens=())
    row = one_row(coded.cache, coded.nearest(question))
    again = jaxkv.generate(tiny(FAMILY), question, cache=row, max_new_tokens=6, stop_tokens=())
    assert out.tokens.tolist() == again.tokens.tolist() and len(out.tokens[0]) == 6


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
    talk = [{"role": role, "content": "3 4 5"} for role in ("user", "assistant", "user")]
    with pytest.raises(BadValue, match=r"ends with a message of 'user'.*to ask\(\)"):
        jaxkv.episodes(dataclasses.replace(params, tokenizer=Words()), talk, policy=policy(), count=1)
    for wrong in ({"content": "x"}, {"role": "user"}):
        with pytest.raises(BadValue, match="message 0 is"):
            Episodes.nearest(types.SimpleNamespace(params=params), [wrong])
    with pytest.raises(BadValue, match="policy 'knorm' of episodes: expected one at which tokens look from behind"):
        jaxkv.episodes(params, history, policy=jaxkv.policy("knorm", budget=16))
    for name in ("laq", "tiered-laq"):
        with pytest.raises(
            BadValue, match=f"policy '{name}' of episodes: expected .* none are drafted for that, such as"
        ):
            jaxkv.episodes(params, history, policy=jaxkv.policy(name, budget=64))
    for count, words in (
        (0, "count=0: expected a whole number of topics"),
        (10, "count=10 topics .* has 9 segments of 6 tokens: give count= at most 9"),
    ):
        with pytest.raises(BadValue, match=words):
            jaxkv.episodes(params, history, policy=policy(), count=count)
    with pytest.raises(BadValue, match="one"):
        jaxkv.episodes(params, [history, history], policy=policy())
    beyond = params.config.vocab_size
    gap = np.array([[5, -1, 6]])
    for wrong in (np.zeros((2, 5), int), np.zeros((1, SIZE)), np.full((1, SIZE), beyond), np.full((1, SIZE), -1), gap):
        with pytest.raises(BadValue, match="pseudo"):
            jaxkv.prefill(params, history, policy=policy(), pseudo=wrong)
    with pytest.raises(BadValue, match=r"pseudo=\[\[1, 2\], \[3\]\]: expected integers of shape \[2, N\]; put -1"):
        jaxkv.prefill(params, [history, history], policy=policy(), pseudo=[[1, 2], [3]])
    with pytest.raises(BadValue, match="queries are others"):
        other = dataclasses.replace(jaxkv.policy("snapkv", budget=16, window=4))
        jaxkv.prefill(params, history, policy=other, pseudo=np.zeros((1, 4), np.int32))
