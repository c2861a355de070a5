"""generate, stream, prefill, save and restore: what they give, and what they refuse."""

import dataclasses
import functools
import io
import json
import subprocess
import sys
import types
from contextlib import nullcontext

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from engines import compilations
from jax._src import monitoring
from letters import Letters, Words
from small import SMALL

import jaxkv
from jaxkv import cli, run
from jaxkv.chat import MARK, next_turn
from jaxkv.cli.terminal import Meter
from jaxkv.errors import BadCheckpoint, BadValue, JaxkvError, MissingModel, UnknownName
from jaxkv.evaluation.forced import follow
from jaxkv.lowering import lower
from jaxkv.plan import planned
from jaxkv.prompts import rows_of
from jaxkv.pseudo import drafted
from jaxkv.request import checked_request
from jaxkv.sampling import Sampler, draws_of, row_keys
from jaxkv.speculative import PromptLookup, SelfDraft
from jaxkv.store.cache import one_row

FAMILY = "llama3"


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(3, 100, length).astype(np.int32)


@pytest.fixture(scope="module")
def lettered(tiny):
    params = tiny(FAMILY)
    return type(params)(params.weights, params.config, Letters())


def test_every_form_of_prompt(lettered):
    rows = {
        "text": rows_of("ab", lettered.tokenizer, 256),
        "ids": rows_of([65, 66], None, 256),
        "array": rows_of(np.array([65, 66]), None, 256),
        "jax": rows_of(jnp.array([65, 66]), None, 256),
    }
    assert all(single and row[0].tolist() == [65, 66] for row, single in rows.values())
    for batch in (["ab", "c"], [[65, 66], [67]]):
        found, single = rows_of(batch, lettered.tokenizer, 256)
        assert not single and [row.tolist() for row in found] == [[65, 66], [67]]
    chat = [{"role": "user", "content": "hi"}]
    found, single = rows_of(chat, lettered.tokenizer, 256)
    assert single and lettered.tokenizer.decode(found[0]) == "<user>hi<a>"
    assert len(rows_of([chat, chat], lettered.tokenizer, 256)[0]) == 2
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert rows_of(parts, lettered.tokenizer, 256)[0][0].tolist() == found[0].tolist()
    for said in ({"content": None}, {}):  # an answer that is a call of a tool
        call = {"role": "assistant", **said, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
        (ids,), _ = rows_of([*chat, call, {"role": "tool", "content": "9"}], lettered.tokenizer, 256)
        assert lettered.tokenizer.decode(ids) == "<user>hi<assistant>None<tool>9<a>"


class Beginning(Letters):
    """Its texts begin with a token of their own, as those of Llama and Gemma do."""

    def __call__(self, text, add_special_tokens=True, **_):
        return {"input_ids": [1] * add_special_tokens + super().__call__(text)["input_ids"]}


def test_text_that_goes_on_from_a_cache_begins_no_text(tiny):
    params = tiny(FAMILY)
    params = type(params)(params.weights, params.config, Beginning())
    cache = jaxkv.prefill(params, "ab", policy=jaxkv.policy("h2o", budget=16))
    assert cache.texts()[0].tolist() == [1, 65, 66]
    out = jaxkv.generate(params, ["cd", "e"], cache=cache, max_new_tokens=2, stop_tokens=())
    assert [text[:5].tolist() for text in out.cache.texts()] == [[1, 65, 66, 67, 68], [1, 65, 66, 69, out.tokens[1][0]]]


def test_a_conversation_goes_on_from_its_cache(lettered):
    messages = [{"role": "user", "content": "hi"}]
    out = jaxkv.generate(lettered, messages, policy=jaxkv.policy("h2o", budget=24), max_new_tokens=3, stop_tokens=())
    said = [*messages, {"role": "assistant", "content": out.text}, {"role": "user", "content": "go on"}]
    again = jaxkv.generate(lettered, said, cache=out.cache, max_new_tokens=2, stop_tokens=())
    text = lettered.tokenizer.decode(again.cache.texts()[0])
    assert text.startswith(f"<user>hi<a>{out.text}<user>go on<a>") and text.count("hi") == 1
    with pytest.raises(BadValue, match="without an answer of the model, on a cache: expected the whole conversation"):
        jaxkv.generate(lettered, messages, cache=out.cache, max_new_tokens=2)
    with pytest.raises(BadValue, match="prompt 1 of the list is empty"):
        jaxkv.generate(lettered, ["ab", ""], policy=None, max_new_tokens=2)


def test_a_begun_answer_goes_on_from_its_cache(lettered):
    """With the question before it, which the cache has not seen."""
    messages, options = [{"role": "user", "content": "hi"}], {"max_new_tokens": 3, "stop_tokens": ()}
    out = jaxkv.generate(lettered, messages, **options)
    said = [*messages, {"role": "assistant", "content": out.text}, {"role": "user", "content": "go on"}]
    said.append({"role": "assistant", "content": "I w"})
    again = jaxkv.generate(lettered, said, cache=out.cache, **options)
    assert lettered.tokenizer.decode(again.cache.texts()[0]).startswith(
        f"<user>hi<a>{out.text}<user>go on<assistant>I w"
    )
    whole = [token for part in again.cache.texts() for token in part]
    assert jaxkv.generate(lettered, np.array(whole[: -len(again.text) + 1]), **options).text == again.text


def test_a_cache_that_is_ahead_of_its_conversation_is_refused(lettered):
    """A question that is asked anew, or changed, and a history with a turn left out."""
    ask, options = lambda text: {"role": "user", "content": text}, {"max_new_tokens": 3, "stop_tokens": ()}
    said = lambda out: {"role": "assistant", "content": out.text}  # noqa: E731
    first = [ask("Where is Wick")]
    one = jaxkv.generate(lettered, first, **options)
    second = [*first, said(one), ask("And Thurso?")]
    two = jaxkv.generate(lettered, second, cache=one.cache, **options)
    for messages in (
        second,
        [*first, said(one), ask("And Inverness?")],
        [ask("And Thurso?"), said(two), ask("And then?")],
        [ask("Wick"), said(two), ask("And then?")],
    ):
        with pytest.raises(BadValue, match="has seen more turns than these messages up to the last answer: expected"):
            jaxkv.generate(lettered, messages, cache=two.cache, **options)
    jaxkv.generate(lettered, [*second, said(two), ask("And then?")], cache=two.cache, **options)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({0: "be brave"}, r"message 0 \(system: 'be brave'\) is not in the text of this cache"),
        ({1: "Where is Wick?"}, r"message 1 \(user: 'Where is Wick\?'\) is not in the text"),
        ({1: "And Thurso?", 3: "Where  is Wick"}, "message 3 .*give the whole conversation anew, without the cache"),
        ({2: "another answer"}, None),
        ({1: " Where is\nWick"}, None),  # white space does not count
    ],
)
def test_a_conversation_that_the_cache_does_not_hold_is_refused(lettered, tmp_path, changed, words):
    """Over several turns, in a bounded cache, from disk and behind copies."""
    texts = {"system": ["be brief"], "user": ["Where is Wick", "And Thurso?"]}
    messages = [{"role": "system", "content": texts["system"][0]}]
    options = {"max_new_tokens": 3, "stop_tokens": ()}
    cache, policy = None, jaxkv.policy("h2o", budget=24)
    for text in texts["user"]:
        messages.append({"role": "user", "content": text})
        more = {"policy": policy} if cache is None else {"cache": cache}
        out = jaxkv.generate(lettered, messages, **more, **options)
        cache = out.cache
        messages.append({"role": "assistant", "content": out.text})
    jaxkv.save(cache, tmp_path / "cache")
    messages = [{**message, "content": changed.get(n, message["content"])} for n, message in enumerate(messages)]
    asked = [*messages, {"role": "user", "content": "And then?"}]
    with nullcontext() if words is None else pytest.raises(BadValue, match=words):
        jaxkv.prefill(lettered, asked, cache=jaxkv.restore(tmp_path / "cache", lettered))
    with nullcontext() if words is None else pytest.raises(BadValue, match=words):
        jaxkv.prefill(lettered, [asked, asked], cache=cache)
    jaxkv.prefill(lettered, asked, cache=dataclasses.replace(cache, tokens=None))  # nobody knows


class Particular(Letters):
    """Writes the system's message in front of the last question, as Mistral's template, and small letters alone."""

    def __call__(self, text, **_):
        return super().__call__(text.lower())

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        last = max(n for n, message in enumerate(messages) if message["role"] == "user")
        system = "".join(message["content"] for message in messages if message["role"] == "system")
        spoken = [(n, message) for n, message in enumerate(messages) if message["role"] in ("user", "assistant")]
        return "".join(f"<{m['role'][0]}>{system * (n == last)} {m['content'].strip()} " for n, m in spoken)


def test_what_a_template_moves_or_leaves_out_is_not_missed():
    words = (("system", "Be brief"), ("tool", "7"), ("user", " One "), ("assistant", "a"), ("user", "TWO"))
    messages, tokenizer = [{"role": role, "content": text} for role, text in words], Particular()
    (held,), _ = rows_of(messages[:4], tokenizer, 128)
    seen = [held, rows_of(messages, tokenizer, 128)[0][0]]
    (new,), _ = rows_of(messages, tokenizer, 128, np.array([-1]), seen[:1])
    assert "bebrief" in "".join(tokenizer.decode(new).split())
    more = [*messages, {"role": "assistant", "content": "b"}, {"role": "user", "content": "three"}]
    rows_of(more, tokenizer, 128, np.array([-1]), seen[1:])
    with pytest.raises(BadValue, match="message 4"):
        rows_of(more, tokenizer, 128, np.array([-1]), seen[:1])


class Thoughtful(Letters):
    """Writes no thoughts of answers before the last question, as Qwen3's template."""

    def apply_chat_template(self, messages, **options):
        last = max(n for n, message in enumerate(messages) if message["role"] == "user")
        later = [
            {**each, "content": each["content"].rpartition(";")[2]}
            if n < last and each["role"] == "assistant"
            else each
            for n, each in enumerate(messages)
        ]
        return super().apply_chat_template(later, **options)


def test_a_template_may_leave_out_what_was_thought():
    first = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a long thought;yes"}]
    for question in ("no", "a question that is longer than the thought"):
        new = next_turn(Thoughtful(), [*first, {"role": "user", "content": question}], -1)
        assert Thoughtful().decode(new) == f"<user>{question}<a>"


class Ending(Letters):
    """Ends each answer with "$" behind a space, as Llama 2's template, and takes none from what was said."""

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        said = [
            f"<a>{m['content'].strip()} $" if m["role"] == "assistant" else f"<{m['role']}>{m['content']}"
            for m in messages
        ]
        return "".join(said) + "<a>" * add_generation_prompt


def test_a_history_ends_where_an_answer_would():
    """So that the next turn writes what ends it, and nobody said nothing in between."""
    tokenizer = Ending()
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " yes "}]
    conversation = [*history, {"role": "user", "content": "no"}]
    (first,), _ = rows_of(history, tokenizer, 128)
    (more,), _ = rows_of(conversation, tokenizer, 128, np.array([-1]))
    (whole,), _ = rows_of(conversation, tokenizer, 128)
    assert tokenizer.decode(first) == "<user>hi<a>yes"
    assert tokenizer.decode(np.append(first, more)) == tokenizer.decode(whole) == "<user>hi<a>yes $<user>no<a>"


def test_a_message_may_have_the_words_that_stand_for_an_answer():
    words = f"is {MARK} a mark?"
    conversation = [
        {"role": each, "content": text} for each, text in (("user", "hi"), ("assistant", "yes"), ("user", words))
    ]
    assert Ending().decode(next_turn(Ending(), conversation, -1)) == f" $<user>{words}<a>"


def test_an_end_of_turn_behind_a_space_is_written_once():
    conversation = [{"role": each, "content": each} for each in ("user", "assistant", "user")]
    for pending, expected in (
        (ord("$") - 32, "<user>user<a>"),
        (ord("x") - 32, " $<user>user<a>"),
        (ord("<") - 32, " $<user>user<a>"),
    ):
        assert Ending().decode(next_turn(Ending(), conversation, pending)) == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "name", "options"),
    [
        ("mistral", "dapq-longflow", {}),
        ("qwen2", "adakv", {"window": 8}),
        ("qwen2", "global-h2o", {}),
        ("gemma3_text", "tova", {}),  # every other layer has a window: nothing to loop over
    ],
)
def test_layers_in_a_loop_do_what_they_do_in_a_row(tiny, family, name, options):
    """A prompt in three blocks, two layers in the loop: the same tokens and entries, values within rounding."""
    params, rows = tiny(family), [ids(70), ids(41, 1)]
    policy = jaxkv.policy(name, budget=40, block=32, **options)
    one, other = (
        jaxkv.generate(params, rows, policy=policy, max_new_tokens=6, stop_tokens=(), scan_layers=scan)
        for scan in (False, True)
    )
    np.testing.assert_array_equal(one.tokens, other.tokens)
    for a, b in zip(one.cache.views, other.cache.views, strict=True):
        np.testing.assert_array_equal(a.positions, b.positions)
        np.testing.assert_allclose(a.keys, b.keys, atol=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("unchecked")
def test_layers_in_a_loop_are_compiled_once(tiny):
    """The matrix products of a prefill: of one layer in the loop and of the last, which does less."""
    config, count = tiny("llama3").config, {}
    for layers in (4, 8):
        config = dataclasses.replace(config, num_layers=layers, layer_types=config.layer_types[:1] * layers)
        for scan in (False, True):
            program = lower(config, jaxkv.policy("snapkv", budget=70), batch=1, tokens=96, scan_layers=scan).prefill
            count[layers, scan] = program.compile().as_text().count(" dot(")
    assert count[4, True] == count[8, True] < count[4, False] < count[8, False]


@pytest.mark.long
@pytest.mark.parametrize("name", ["snapkv", "h2o", "adakv-h2o"])
def test_layers_that_are_alike_are_traced_once(tiny, name, monkeypatch):
    """Prefill and decode meet a kind of layer once, however many of it there are."""
    kinds = len(set(tiny(FAMILY).config.specs))
    chex.clear_trace_counter()
    for function in ("prefill_layer", "decode_layer"):
        counted = chex.assert_max_traces(getattr(run, function), n=kinds + (function == "prefill_layer"))
        monkeypatch.setattr(run, function, counted)
    policy = jaxkv.policy(name, budget=27, **({"window": 9} if name == "snapkv" else {}))
    out = jaxkv.generate(tiny(FAMILY), ids(45), policy=policy, max_new_tokens=3, stop_tokens=())
    assert out.lengths.tolist() == [3]


def test_shapes_of_the_result(lettered):
    one = jaxkv.generate(lettered, "hello", max_new_tokens=5, stop_tokens=())
    assert isinstance(one.text, str) and one.tokens.shape == (1, 5) and one.lengths.tolist() == [5]
    two = jaxkv.generate(lettered, ["hello", "you"], max_new_tokens=5, stop_tokens=())
    assert isinstance(two.text, list) and two.tokens.shape == (2, 5)
    assert two.stats.seen == (9, 7) and two.stats.new_tokens == 10, "the last token is not yet in the cache"
    assert two.stats.cache_bytes == two.cache.nbytes


@pytest.mark.long
def test_stop_tokens_end_a_row_and_the_cache_stays(lettered):
    free = jaxkv.generate(lettered, [ids(9), ids(14, 1)], max_new_tokens=20, stop_tokens=())
    token = int(free.tokens[0, 4])
    first = [row.tolist().index(token) + 1 if token in row else 20 for row in free.tokens]
    out = jaxkv.generate(lettered, [ids(9), ids(14, 1)], max_new_tokens=20, stop_tokens=(token,))
    assert out.lengths.tolist() == first
    for row, end in enumerate(first):
        assert out.tokens[row, :end].tolist() == free.tokens[row, :end].tolist()
        assert int(out.cache.lengths[row]) == [9, 14][row] + end - 1
        assert int(out.cache.layers[0].positions[row].max()) == int(out.cache.lengths[row]) - 1


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["full", "h2o"])
def test_stop_strings_leave_nothing_behind_them(lettered, name):
    policy = jaxkv.policy(name, **({"budget": 16} if name == "h2o" else {}))
    free = jaxkv.generate(lettered, ids(20), policy=policy, max_new_tokens=24, stop_tokens=())
    word = free.text[7:9]
    end = free.text.index(word) + 2
    out = jaxkv.generate(lettered, ids(20), policy=policy, max_new_tokens=24, stop_tokens=(), stop=word)
    assert out.text == free.text[: end - 2] and out.lengths.tolist() == [end]
    short = jaxkv.generate(lettered, ids(20), policy=policy, max_new_tokens=end, stop_tokens=())
    assert out.cache.lengths.tolist() == short.cache.lengths.tolist()
    held = [np.sort(np.asarray(layer.positions)) for layer in out.cache.layers]
    expected = [np.sort(np.asarray(layer.positions)) for layer in short.cache.layers]
    for mine, theirs in zip(held, expected, strict=True):
        assert np.array_equal(mine[mine >= 0], theirs[theirs >= 0])


class Special(Letters):
    """A tokenizer whose "$" is special: not in the text unless it is asked for."""

    def decode(self, tokens, skip_special_tokens=False, **_):
        return super().decode([token for token in tokens if not skip_special_tokens or token != ord("$") - 32])


def test_the_name_of_a_special_token_stops_at_the_token(lettered):
    """No decoded text holds it."""

    class Marked(Letters):
        def __call__(self, text, **more):
            return {"input_ids": [int(end)]} if text == "<end>" else super().__call__(text, **more)

        def decode(self, tokens, skip_special_tokens=False, **_):
            return super().decode([token for token in tokens if not skip_special_tokens or token != end])

    free = jaxkv.generate(lettered, "hello", max_new_tokens=12, stop_tokens=()).tokens[0]
    end = free[6]
    params = dataclasses.replace(lettered, tokenizer=Marked())
    with pytest.raises(BadValue, match=r"holds the special token '\$' and more.*give '\$' alone"):
        jaxkv.generate(dataclasses.replace(lettered, tokenizer=Special()), "hello", stop="a$")
    out = jaxkv.generate(params, "hello", max_new_tokens=12, stop_tokens=(), stop=["<end>", "never said"])
    assert out.tokens[0, : out.lengths[0]].tolist() == free[: free.tolist().index(end) + 1].tolist()


def test_a_special_token_that_the_model_cannot_give_stops_nothing(lettered):
    """A tokenizer may have more tokens than the model. What was taken once is taken again, as other hosts do."""
    beyond = lettered.config.vocab_size

    class Larger(Letters):
        def __call__(self, text, **more):
            return {"input_ids": [beyond]} if text == "<image>" else super().__call__(text, **more)

        def decode(self, tokens, skip_special_tokens=False, **_):
            if tokens == [beyond]:
                return "" if skip_special_tokens else "<image>"
            return super().decode(tokens)

    params, given = dataclasses.replace(lettered, tokenizer=Larger()), {"stop_tokens": (5,), "stop": ["<image>", "a"]}
    for _ in range(2):
        request = checked_request(
            params, ids(3), None, policy=None, max_new_tokens=1, sampler=Sampler(), samples=1, seed=0,
            speculative=None, **given,
        )  # fmt: skip
        assert (request.stop_tokens, request.stop) == ((5,), ("a",))
        given = {"stop_tokens": request.stop_tokens, "stop": request.stop}


def test_a_space_is_no_special_token(lettered):
    """Alone it decodes to nothing under a tokenizer that strips what a text begins with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE({"<end>": 0, "\N{LOWER ONE EIGHTH BLOCK}": 1, "a": 2}, []))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    spaces = decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
    model.decoder = decoders.Sequence([spaces, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")
    assert tokenizer(" ")["input_ids"] == [1] and tokenizer.decode([1]) == "" and tokenizer.decode([2, 1, 2]) == "a a"
    request = checked_request(
        dataclasses.replace(lettered, tokenizer=tokenizer), ids(3), None, policy=None, max_new_tokens=1,
        sampler=Sampler(), samples=1, seed=0, stop_tokens=(), stop=[" ", "<end>"], speculative=None,
    )  # fmt: skip
    assert request.stop == (" ",) and request.stop_tokens == (0,)


@pytest.mark.long
def test_a_row_that_showed_its_stop_string_waits_for_the_others(lettered):
    """The other row goes on over several chunks."""
    prompts = [ids(20), ids(14, 1)]
    free = jaxkv.generate(lettered, prompts, max_new_tokens=72, stop_tokens=())
    word = free.text[0][5:7]
    assert word not in free.text[1]
    out = jaxkv.generate(lettered, prompts, max_new_tokens=72, stop_tokens=(), stop=word)
    assert out.lengths.tolist() == [7, 72] and out.text == [free.text[0][:5], free.text[1]]


def test_a_continuation_begins_with_its_space(lettered):
    """Where the text before it does not end there; an answer in a chat is a text by itself."""
    params, options = dataclasses.replace(lettered, tokenizer=Words()), {"max_new_tokens": 3, "stop_tokens": ()}
    chat = [{"role": "user", "content": "ab"}]
    for prompt in ("hello", ids(9), ["hello", "hi"]):
        texts = jaxkv.generate(params, prompt, samples=2, **options).text
        assert len(texts) in (2, 4) and all(text[0] == " " and len(text) == 6 for text in texts)
    assert jaxkv.generate(params, chat, **options).text[0] != " "
    begun = jaxkv.generate(params, [chat, [*chat, {"role": "assistant", "content": "c"}]], **options)
    assert [text[0] == " " for text in begun.text] == [False, True]
    first = jaxkv.generate(params, chat, **options)
    whole = jaxkv.generate(params, chat, **{**options, "max_new_tokens": 6})
    assert first.text + jaxkv.generate(params, cache=first.cache, **options).text == whole.text
    stream = jaxkv.stream(params, "hello", **options)
    assert "".join(stream) == jaxkv.generate(params, "hello", **options).text


def test_a_prompt_may_fill_the_context(tiny):
    """The last token that is drawn is never run, so that one comes behind a full context, and no more."""
    params = tiny(FAMILY)
    params = dataclasses.replace(params, config=dataclasses.replace(params.config, max_position=32))
    out = jaxkv.generate(params, ids(32), max_new_tokens=1, stop_tokens=())
    last = jaxkv.generate(params, ids(32)[:30], max_new_tokens=3, stop_tokens=())
    assert int(out.cache.lengths[0]) == int(last.cache.lengths[0]) == 32
    for prompt, new in ((ids(32), 2), (ids(30), 4), (ids(33), 1)):
        with pytest.raises(BadValue, match="exceed the model's context of 32"):
            jaxkv.generate(params, prompt, max_new_tokens=new)
    with pytest.raises(BadValue, match="exceed the model's context of 32"):
        jaxkv.generate(params, cache=last.cache, max_new_tokens=1)
    drafted = jaxkv.generate(
        params, ids(20), max_new_tokens=13, stop_tokens=(), speculative=SelfDraft(jaxkv.policy("full"))
    )
    assert drafted.tokens.tolist() == jaxkv.generate(params, ids(20), max_new_tokens=13, stop_tokens=()).tokens.tolist()


def test_streamed_pieces_make_the_text(lettered):
    whole = jaxkv.generate(lettered, "hello", max_new_tokens=21, stop_tokens=())
    with pytest.raises(BadValue, match="2 prompts to stream: expected one"):
        jaxkv.stream(lettered, [ids(4), ids(5)], max_new_tokens=1)
    stream = jaxkv.stream(lettered, "hello", max_new_tokens=21, stop_tokens=())
    with pytest.raises(BadValue, match="iterate"):
        _ = stream.generation
    assert "".join(stream) == whole.text == stream.generation.text


@pytest.mark.long
def test_questions_branch_from_one_cache(tiny):
    params = tiny(FAMILY)
    policy = jaxkv.policy("snapkv", budget=16, window=6)
    cache = jaxkv.prefill(params, ids(40), policy=policy)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]
    questions = [ids(5, 7), ids(8, 8)]
    full = jaxkv.policy("full")
    both = jaxkv.generate(params, questions, cache=cache, policy=full, max_new_tokens=6, stop_tokens=())
    for row, question in enumerate(questions):
        alone = jaxkv.generate(params, question, cache=cache, policy=full, max_new_tokens=6, stop_tokens=())
        assert both.tokens[row].tolist() == alone.tokens[0].tolist()
    assert all(np.array_equal(a, np.asarray(b)) for a, b in zip(before, jax.tree.leaves(cache), strict=True))
    assert int(both.cache.held().max()) == 16 + 8 + 5


def test_a_conversation_equals_one_long_prompt_under_the_full_cache(tiny):
    params = tiny(FAMILY)
    first = jaxkv.generate(params, ids(12), max_new_tokens=5, stop_tokens=())
    second = jaxkv.generate(params, ids(7, 1), cache=first.cache, max_new_tokens=6, stop_tokens=())
    whole = np.concatenate([ids(12), first.tokens[0], ids(7, 1)])
    assert second.tokens.tolist() == jaxkv.generate(params, whole, max_new_tokens=6, stop_tokens=()).tokens.tolist()


def texts_of(cache):
    """Each row's text; it must be as long as what the cache has seen, with -1 behind it."""
    texts = cache.texts()
    assert cache.tokens.dtype == np.int32 and [len(text) for text in texts] == cache.lengths.tolist()
    for padded, text in zip(cache.tokens, texts, strict=True):
        assert padded.tolist() == text.tolist() + [-1] * (len(padded) - len(text))
    return [text.tolist() for text in texts]


@pytest.mark.long
def test_a_cache_remembers_its_text(lettered, tmp_path):
    """After a prefill, samples, going on alone, a prompt, branching, one row, a save, and a forced continuation."""
    policy, rows = jaxkv.policy("h2o", budget=16, block=16), [ids(20), ids(9, 1)]
    options = {"stop_tokens": (), "max_new_tokens": 5}
    cache = jaxkv.prefill(lettered, rows, policy=policy)
    said = [row.tolist() for row in rows]
    assert texts_of(cache) == said
    assert cache.nbytes == dataclasses.replace(cache, tokens=None).nbytes
    forced, _ = follow(lettered, cache, np.array([[5, 6, 7], [8, -1, -1]]), logits=False)
    assert texts_of(forced) == [[*said[0], 5, 6, 7], [*said[1], 8]]

    both = jaxkv.generate(lettered, rows, policy=policy, samples=2, temperature=1.0, **options)
    whole = [said[index // 2] + row.tolist() for index, row in enumerate(both.tokens)]
    assert texts_of(both.cache) == [row[:-1] for row in whole]
    jaxkv.save(both.cache, tmp_path / "cache")
    restored = jaxkv.restore(tmp_path / "cache", lettered)
    assert texts_of(restored) == texts_of(both.cache) and isinstance(restored.tokens, np.ndarray)
    more = jaxkv.generate(lettered, cache=restored, **options)
    whole = [row + new.tolist() for row, new in zip(whole, more.tokens, strict=True)]
    assert texts_of(more.cache) == [row[:-1] for row in whole]

    one = one_row(more.cache, 3)
    assert texts_of(one) == [whole[3][:-1]]
    asked = [ids(4, 5), ids(7, 6)]
    branches = jaxkv.generate(lettered, asked, cache=one, **options)
    ends = [asked[row].tolist() + branches.tokens[row].tolist() for row in range(2)]
    assert texts_of(branches.cache) == [whole[3] + end[:-1] for end in ends]
    assert texts_of(jaxkv.prefill(lettered, asked, cache=one)) == [whole[3] + row.tolist() for row in asked]

    free = jaxkv.generate(lettered, ids(20), policy=policy, max_new_tokens=24, stop_tokens=())
    stopped = jaxkv.generate(lettered, ids(20), policy=policy, max_new_tokens=24, stop_tokens=(), stop=free.text[7:9])
    assert texts_of(stopped.cache) == [ids(20).tolist() + stopped.tokens[0, : stopped.lengths[0] - 1].tolist()]
    unknown = jaxkv.generate(lettered, ids(3), cache=dataclasses.replace(one, tokens=None), **options)
    assert unknown.cache.tokens is None


def test_a_longer_text_compiles_nothing(tiny):
    params, policy = tiny(FAMILY), jaxkv.policy("h2o", budget=16, block=16)
    options = {"policy": policy, "max_new_tokens": 5, "stop_tokens": (), "repetition_penalty": 1.2}
    first = jaxkv.generate(params, ids(33), **options)
    jaxkv.generate(params, cache=first.cache, **options)
    compiled = [program._cache_size() for program in run.PROGRAMS]
    second = jaxkv.generate(params, ids(41), **options)
    jaxkv.generate(params, cache=second.cache, **options)
    assert [program._cache_size() for program in run.PROGRAMS] == compiled
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(second.cache))


@pytest.mark.long
@pytest.mark.parametrize("name", ["full", "streaming-llm"])
def test_repetition_penalty_counts_the_text_of_the_cache(tiny, name):
    """A prompt in two halves, in one, and going on after some tokens: the same text."""
    params = tiny(FAMILY)
    policy = jaxkv.policy(name, **({} if name == "full" else {"budget": 24}), block=16)
    options = {"policy": policy, "stop_tokens": (), "repetition_penalty": 1.8}
    first, second = ids(32), ids(16, 1)
    whole = jaxkv.generate(params, np.concatenate([first, second]), max_new_tokens=24, **options)
    cache = jaxkv.prefill(params, first, policy=policy)
    assert jaxkv.generate(params, second, cache=cache, max_new_tokens=24, **options).tokens.tolist() == (
        whole.tokens.tolist()
    )
    begun = jaxkv.generate(params, second, cache=cache, max_new_tokens=9, **options)
    ended = jaxkv.generate(params, cache=begun.cache, max_new_tokens=15, **options)
    assert begun.tokens[0].tolist() + ended.tokens[0].tolist() == whole.tokens[0].tolist()

    forgotten = dataclasses.replace(cache, tokens=np.repeat(second[:1], 32)[None])
    other = jaxkv.generate(params, second, cache=forgotten, max_new_tokens=24, **options)
    assert other.tokens.tolist() != whole.tokens.tolist(), "the text of the cache matters here"


def test_a_text_that_is_needed_and_not_known_is_refused(tiny):
    params = tiny(FAMILY)
    cache = jaxkv.prefill(params, ids(20))
    unknown = dataclasses.replace(cache, tokens=None)
    with pytest.raises(BadValue, match="give the whole text as a prompt"):
        jaxkv.generate(params, ids(3), cache=unknown, repetition_penalty=1.2)
    with pytest.raises(BadValue, match=r"\[19\] per row: expected \[20\]"):
        jaxkv.generate(params, ids(3), cache=dataclasses.replace(cache, tokens=cache.tokens[:, 1:]))


@pytest.mark.long
def test_endless_text_in_a_bounded_cache(tiny):
    params = tiny(FAMILY)
    beyond = params.config.max_position + 50
    policy = jaxkv.policy("streaming-llm", budget=24, block=64)
    out = jaxkv.generate(params, ids(beyond), policy=policy, max_new_tokens=9, stop_tokens=())
    kept = sorted(int(p) for p in out.cache.layers[0].positions[0, 0])
    assert kept == [0, 1, 2, 3, *range(beyond + 8 - 20, beyond + 8)]
    with pytest.raises(BadValue, match="streaming-llm"):
        jaxkv.generate(params, ids(beyond), policy=jaxkv.policy("h2o", budget=24), max_new_tokens=9)


@pytest.mark.long
def test_cutting_every_few_steps(tiny):
    params = tiny(FAMILY)
    policy = jaxkv.policy("h2o", budget=16, every=5)
    prompts = [ids(30), ids(8, 1)]
    together = jaxkv.generate(params, prompts, policy=policy, max_new_tokens=30, stop_tokens=())
    assert together.cache.layers[0].slots == 24, "21 in whole pieces of memory"
    assert int(together.cache.held().max()) <= 20
    for row, prompt in enumerate(prompts):
        alone = jaxkv.generate(params, prompt, policy=policy, max_new_tokens=30, stop_tokens=())
        assert together.tokens[row].tolist() == alone.tokens[0].tolist()


def test_samples_and_seeds(tiny):
    params = tiny(FAMILY)
    options = dict(max_new_tokens=8, stop_tokens=(), temperature=1.5)
    out = jaxkv.generate(params, [ids(9), ids(4, 1)], samples=2, seed=3, **options)
    assert out.tokens.shape == (4, 8) and out.tokens[0].tolist() != out.tokens[1].tolist()
    again = jaxkv.generate(params, [ids(9), ids(9), ids(4, 1)], seed=3, **options)
    assert again.tokens[:2].tolist() == out.tokens[:2].tolist(), "a prompt repeated is a prompt sampled twice"
    assert jaxkv.generate(params, ids(4, 1), seed=3, **options).tokens[0].tolist() == out.tokens[2].tolist()
    assert jaxkv.generate(params, ids(9), seed=4, **options).tokens[0].tolist() != out.tokens[0].tolist()


@pytest.mark.long
def test_samples_go_on_as_they_began(tiny, tmp_path):
    """Each by its own random numbers, as far as one longer call, also out of a file; and a question asked of different
    texts is answered as each alone answers it."""
    params, options = tiny(FAMILY), dict(stop_tokens=(), temperature=1.5, seed=3)
    whole = jaxkv.generate(params, ids(9), samples=3, max_new_tokens=16, **options)
    begun = jaxkv.generate(params, ids(9), samples=3, max_new_tokens=8, **options)
    jaxkv.save(begun.cache, tmp_path / "begun")
    for cache in (begun.cache, jaxkv.restore(tmp_path / "begun", params)):
        more = jaxkv.generate(params, cache=cache, max_new_tokens=8, **options)
        assert np.concatenate([begun.tokens, more.tokens], axis=1).tolist() == whole.tokens.tolist()
    alone = jaxkv.generate(params, cache=one_row(begun.cache, 2), max_new_tokens=8, **options)
    assert alone.tokens[0].tolist() == whole.tokens[2, 8:].tolist()

    cache = jaxkv.prefill(params, [ids(9), ids(5, 1)])
    for known in (cache, dataclasses.replace(cache, tokens=None)):
        both = jaxkv.generate(params, [ids(4, 2)] * 2, cache=known, max_new_tokens=8, **options)
        for row in range(2):
            alone = jaxkv.generate(params, ids(4, 2), cache=one_row(known, row), max_new_tokens=8, **options)
            assert alone.tokens[0].tolist() == both.tokens[row].tolist()
    assert draws_of([b"a", b"b", b"a"], 2).tolist() == [0, 1, 0, 1, 2, 3]
    assert draws_of([b"a", b"a", b"b"], 1, np.array([1, 1, 1])).tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    "options, allowed",
    [
        ({"top_k": 2}, {3, 2}),
        ({"top_p": 0.6}, {3, 2}),
        ({"min_p": 0.4}, {3, 2}),
        ({"top_p": 0.1}, {3}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_the_right_tokens_in_the_right_shares(options, allowed):
    chances = np.array([0.1, 0.15, 0.25, 0.5])
    draws = 4000
    keys = jax.vmap(lambda n: jax.random.fold_in(jax.random.key(0), n))(jnp.arange(draws))
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(chances, jnp.float32)), (draws, 4))
    tokens = np.asarray(Sampler(temperature=1.0, **options).sample(logits, None, keys, jnp.zeros(draws, jnp.int32)))
    assert set(tokens.tolist()) == allowed
    shares = np.bincount(tokens, minlength=4) / draws
    expected = np.where(np.isin(np.arange(4), list(allowed)), chances, 0)
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.03)


def test_all_bits_of_a_seed_count():
    keys = {seed: jax.random.key_data(row_keys(seed, np.arange(2))).tolist() for seed in (0, 1, 2**32, 2**32 + 1, -1)}
    assert len({str(key) for key in keys.values()}) == len(keys)
    for seed in (5, 2**32 - 1):  # as they were before
        one = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(np.arange(2))
        assert jax.random.key_data(row_keys(seed, np.arange(2))).tolist() == jax.random.key_data(one).tolist()


def test_a_top_p_of_one_sorts_nothing():
    assert Sampler(1.0, top_p=1.0) == Sampler(1.0)


def test_what_has_min_p_itself_stays():
    """As in transformers. Numbers without rounding, in the shape of the draws above, whose programs are compiled."""
    logits = jnp.broadcast_to(jnp.float32(np.log(0.25)), (4000, 4))
    assert np.isfinite(np.asarray(Sampler(temperature=1.0, min_p=1.0).warped(logits, None))).all()


def test_repetition_penalty():
    logits = jnp.array([[2.0, 1.9, -1.0]])
    seen = jnp.array([[True, False, True]])
    key = jax.random.split(jax.random.key(0), 1)
    token = Sampler(repetition_penalty=1.5).sample(logits, seen, key, jnp.zeros(1, jnp.int32))
    assert token.tolist() == [1]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda p: jaxkv.generate(p, []), "empty"),
        (lambda p: jaxkv.generate(p, [[]]), "empty"),
        (lambda p: jaxkv.generate(p, np.zeros((0, 3), int)), r"shape \(0, 3\): expected at least one row"),
        (lambda p: jaxkv.prefill(p, np.zeros((0, 3), int)), r"shape \(0, 3\): expected at least one row"),
        (lambda p: jaxkv.generate(p, np.ones(4, np.float32)), "float32: expected integers"),
        (lambda p: jaxkv.generate(p, [5, 10_000]), "10000"),
        (lambda p: jaxkv.generate(p, "text"), "no tokenizer"),
        (lambda p: jaxkv.generate(p), "neither prompt nor cache"),
        (lambda p: jaxkv.generate(p, ids(4), max_new_tokens=0), "max_new_tokens=0"),
        (lambda p: jaxkv.generate(p, ids(4), temperature=-1.0), "temperature=-1.0"),
        (lambda p: jaxkv.generate(p, ids(4), policy=jaxkv.policies.catalogue()["snapkv"]), "neither budget nor ratio"),
        (lambda p: jaxkv.generate(p, ids(4), stop=""), "empty string"),
        (lambda p: jaxkv.generate(p, ids(p.config.max_position)), "context"),
        (lambda p: jaxkv.stream(p, ids(4), max_new_tokens=1), "gives text, but .* no tokenizer: use jaxkv.generate"),
    ],
)
def test_bad_input_is_refused(tiny, call, words):
    params = tiny(FAMILY)
    params = type(params)(params.weights, params.config, None)
    with pytest.raises(BadValue, match=words):
        call(params)


def test_a_cache_of_another_model_or_policy_is_refused(goldens, tiny, tmp_path):
    params, other = tiny("llama3"), tiny("llama2")
    policy = jaxkv.policy("tova", budget=12)
    cache = jaxkv.prefill(params, ids(20), policy=policy)
    with pytest.raises(BadCheckpoint, match="made by model"):
        jaxkv.generate(other, ids(3), cache=cache)
    with pytest.raises(BadCheckpoint, match=r"made under 'tova'.*\(budget is 12 there, 13 now\)"):
        jaxkv.generate(params, ids(3), cache=cache, policy=jaxkv.policy("tova", budget=13))
    with pytest.raises(BadValue, match="no sampled token"):
        jaxkv.generate(params, cache=cache)
    narrow = jaxkv.load(goldens / "tiny" / "llama3", dtype="bfloat16")
    with pytest.raises(BadCheckpoint, match="keys of float32, but these params run in bfloat16"):
        jaxkv.generate(narrow, ids(3), cache=cache)
    jaxkv.save(cache, tmp_path / "a")
    with pytest.raises(BadCheckpoint, match="made by model"):
        jaxkv.restore(tmp_path / "a", other)
    with pytest.raises(BadCheckpoint, match="exists already"):
        jaxkv.save(cache, tmp_path / "a")
    with pytest.raises(BadCheckpoint, match="no saved cache"):
        jaxkv.restore(tmp_path / "b")
    for file in (tmp_path / "a").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(BadCheckpoint, match="not a readable"):
        jaxkv.restore(tmp_path / "a")


ELSEWHERE = """
import sys
import numpy as np
import jaxkv

params = jaxkv.load(sys.argv[1])
out = jaxkv.generate(params, cache=jaxkv.restore(sys.argv[2], params), max_new_tokens=9, stop_tokens=())
np.savez(sys.argv[3], tokens=out.tokens, **{f"keys{i}": layer.keys for i, layer in enumerate(out.cache.layers)})
"""


@pytest.mark.long
def test_another_process_goes_on_bit_for_bit(goldens, tiny, tmp_path):
    params = tiny(FAMILY)
    begun = jaxkv.generate(
        params, ids(30), policy=jaxkv.policy("dapq-longflow", budget=16), max_new_tokens=5, stop_tokens=()
    )
    jaxkv.save(begun.cache, tmp_path / "cache")
    paths = [str(path) for path in (goldens / "tiny" / FAMILY, tmp_path / "cache", tmp_path / "there.npz")]
    subprocess.run([sys.executable, "-c", ELSEWHERE, *paths], check=True)
    here = jaxkv.generate(params, cache=begun.cache, max_new_tokens=9, stop_tokens=())
    there = arrays(tmp_path / "there.npz")
    assert np.array_equal(there["tokens"], here.tokens)
    for index, layer in enumerate(here.cache.layers):
        assert np.array_equal(there[f"keys{index}"], layer.keys)


def test_the_command_line(monkeypatch, capsys, lettered):
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: lettered)
    assert cli.main(["generate", "hello", "--budget", "40", "--max-new-tokens", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["tokens"]) <= 3 and result["stats"]["seen"]
    assert cli.main(["policies", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(jaxkv.policies.catalogue())
    assert cli.main(["policies", "dapq-longflow"]) == 0
    assert "pseudo-queries" in capsys.readouterr().out
    assert cli.main(["info", "llama-3-8b", "--tokens", "1040", "--budget", "104", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["full_cache_bytes_at_1040_tokens"] == 10 * facts["cache_bytes_at_budget_104"]
    for size in (["--budget", "0"], ["--tokens", "-5"], ["--batch", "-2"]):
        assert cli.main(["info", "llama-3-8b", *size]) == 2
        assert f"{size[0].strip('-')}={size[1]}: expected" in capsys.readouterr().err
    assert cli.main(["info", "llama-3-8b", "--kernels", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefill_attend"]
    assert cli.main(["info", "llama-3-8b", "--policy", "snapkv", "--budget", "64", "--tokens", "1000", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    left = facts["cache_bytes_under_snapkv_at_budget_64_behind_the_prompt"]
    assert facts["cache_bytes_at_budget_64"] < left < 1.1 * facts["cache_bytes_at_budget_64"]
    with monkeypatch.context() as on_tpu:
        on_tpu.setattr(jax, "default_backend", lambda: "tpu")
        for name, runs in (("lacache", "reference"), ("streaming-llm", "mosaic_tpu")):  # the first turns all keys
            assert cli.main(["info", "llama-3-8b", "--policy", name, "--budget", "64", "--kernels", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["decode_attend_score"].startswith(runs)
    coded = ["--option", 'store={"keys": {"kind": "int", "bits": 4}, "values": {"kind": "int", "bits": 4}}']
    assert cli.main(["info", "llama-3-8b", "--policy", "h2o", "--budget", "64", *coded, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["keys_and_values_bytes_under_h2o_at_budget_64"] < 0.16 * facts["cache_bytes_at_budget_64"]
    for name, says in (
        ("kivi", "no: it keeps all"),
        ("snapkv", "decode=h2o bounds that"),
        ("d2o", "not while decoding\n"),
    ):
        assert cli.main(["policies", name]) == 0 and says in capsys.readouterr().out
    assert cli.main(["generate", "--budgt", "40", "x"]) == 2
    assert "unknown option of jaxkv generate '--budgt'; did you mean '--budget'" in capsys.readouterr().err
    assert cli.main(["generate", "x", "--policy", "snapvk"]) == 2
    assert "did you mean 'snapkv'" in capsys.readouterr().err


@pytest.mark.long
def test_info_sizes_every_policy_of_the_catalogue(capsys):
    for name, policy in jaxkv.policies.catalogue().items():
        size = ["--budget", "512"] if policy.evicts else []
        words = ["info", "llama-3-8b", "--policy", name, *size, "--tokens", "1000", "--kernels", "--json"]
        assert cli.main(words) == 0, name
        facts = json.loads(capsys.readouterr().out)
        (held,) = (value for key, value in facts.items() if key.startswith("keys_and_values_bytes_under"))
        assert held > 0, name


def test_chat_keeps_one_bounded_cache(monkeypatch, capsys, lettered):
    lines = iter(["hello there", "and again"])
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: False))
    monkeypatch.setattr("builtins.input", lambda _: next(lines, ""))
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: lettered)
    assert cli.main(["chat", "--policy", "h2o", "--budget", "16", "--max-new-tokens", "8", "--json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert second["stats"]["seen"][0] > first["stats"]["seen"][0] and second["stats"]["kept"] == [16.0]


@pytest.mark.long
def test_chat_says_what_it_waits_for(monkeypatch, capsys, lettered):
    """On a terminal: that it compiles, for the first time; once the words come nothing stands between them."""
    lines = iter(["a question"])
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("builtins.input", lambda _: next(lines, ""))
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: lettered)
    monkeypatch.setattr(Meter, "PATIENCE", 0.0)
    heard = len(monitoring.get_event_listeners())
    jax.clear_caches()
    assert cli.main(["chat", "--policy", "tova", "--budget", "24", "--max-new-tokens", "6"]) == 0
    assert "compiling: the first time" in terminal.getvalue()
    assert terminal.getvalue().rstrip().endswith("tokens/s]") and len(capsys.readouterr().out.strip()) > 0
    assert len(monitoring.get_event_listeners()) == heard, "nothing goes on listening"


def test_unknown_models(tmp_path):
    with pytest.raises(UnknownName, match="smollm2-135m"):
        jaxkv.load("smollm2-135")
    with pytest.raises(MissingModel):
        jaxkv.load(tmp_path / "nothing.gguf")
    assert issubclass(MissingModel, JaxkvError)


@pytest.mark.parametrize("name", ["streaming-llm", "finch"])
def test_full_goes_on_where_a_cache_has_its_keys(lettered, name):
    """Keys that are turned to their places in the cache are read so, whatever is kept of what follows."""
    policy = jaxkv.policy(name, budget=64, **SMALL.get(name, {}))
    cache = jaxkv.prefill(lettered, ids(20, 1), policy=policy)  # nothing has left
    options = {"max_new_tokens": 8, "stop_tokens": ()}
    want = jaxkv.generate(lettered, np.append(ids(20, 1), ids(7, 2)), **options)
    kept = jaxkv.generate(lettered, ids(7, 2), cache=cache, policy=jaxkv.policy("full"), **options)
    assert kept.tokens.tolist() == want.tokens.tolist()


@pytest.mark.long
def test_full_speculates_on_codes_as_they_lie(lettered):
    rng = np.random.default_rng(1)
    policy = jaxkv.policy("kivi", **SMALL["kivi"])
    cache = jaxkv.prefill(lettered, rng.integers(3, 12, 60).astype(np.int32), policy=policy)
    more, options = rng.integers(3, 12, 5).astype(np.int32), {"max_new_tokens": 24, "stop_tokens": ()}
    plain, fast = (
        jaxkv.generate(lettered, more, cache=cache, policy=jaxkv.policy("full"), speculative=method, **options)
        for method in (None, PromptLookup(fallback=False))
    )
    assert fast.tokens.tolist() == plain.tokens.tolist()


@pytest.mark.long
def test_what_looks_ahead_ends_with_the_context(lettered):
    """Fewer tokens look where the context ends before; a prompt that fills it is looked at by nobody."""
    params = dataclasses.replace(lettered, config=dataclasses.replace(lettered.config, max_position=64))
    policy = jaxkv.policy("laq-h2o", budget=16, **SMALL["laq-h2o"])
    assert policy.prefill.observe.extra == 4
    for length in (62, 63):
        out = jaxkv.generate(params, ids(length), policy=policy, max_new_tokens=1, stop_tokens=())
        assert int(out.cache.lengths[0]) == length
    assert int(jaxkv.prefill(params, ids(64), policy=policy).lengths[0]) == 64


@pytest.mark.long
def test_places_in_the_cache_end_with_the_context(lettered):
    """Where nothing leaves while decoding, they count, and not the text's length: with a prompt and without one."""
    params = dataclasses.replace(lettered, config=dataclasses.replace(lettered.config, max_position=64))
    policy = jaxkv.policy("streaming-llm", budget=32)
    cache = jaxkv.generate(params, ids(100), policy=policy, max_new_tokens=1, stop_tokens=()).cache
    full = jaxkv.policy("full")
    for prompt, new, room in ((None, 33, 33), (ids(3), 30, 29)):  # of those behind a prompt the last is not run
        words = f"tokens in the cache and {room} run behind them exceed the model's context of 64"
        with pytest.raises(BadValue, match=words):
            jaxkv.generate(params, prompt, cache=cache, policy=full, max_new_tokens=new)
    out = jaxkv.generate(params, cache=cache, policy=full, max_new_tokens=32, stop_tokens=())
    assert out.lengths.tolist() == [32] and int(out.cache.held().max()) == 64
    nothing, count = np.zeros(params.config.num_layers, int), np.array([40])
    finch = jaxkv.policy("finch", budget=32, **SMALL["finch"])
    planned(finch, params.config, np.zeros(1, int), nothing, count, 32)
    with pytest.raises(BadValue, match="32 tokens in the cache and 33 run behind"):
        planned(finch, params.config, np.zeros(1, int), nothing, count, 33)
    with pytest.raises(BadValue, match="70 tokens in the cache and 0 run behind"):
        planned(finch, params.config, np.zeros(1, int), nothing + 60, np.array([10]), 0)


def test_what_looks_ahead_near_the_end_depends_on_no_neighbour(lettered):
    """Each row drafts what its own context leaves."""
    calls = []

    def draft(rows, policy, cache, count):
        calls.append(len(rows))
        return np.array([row[:count] for row in rows])

    params = dataclasses.replace(lettered, config=dataclasses.replace(lettered.config, max_position=64))
    policy = jaxkv.policy("laq-h2o", budget=16, **SMALL["laq-h2o"])
    drafts = functools.partial(drafted, params, policy=policy, cache=None, draft=draft)
    rows = [ids(62, 1), ids(20, 2), ids(64, 3), ids(30, 4)]
    together = drafts(rows)
    assert calls == [4, 4] and np.array_equal(together, np.concatenate([drafts([row]) for row in rows]))
    assert (together >= 0).sum(axis=1).tolist() == [2, 4, 0, 4]
    calls.clear()
    assert drafts(rows[1::2]).shape == (2, 4) and calls == [2]


@pytest.mark.parametrize("name", ["tova", pytest.param("r-kv", marks=pytest.mark.long)])
def test_a_restored_cache_needs_no_new_programs(lettered, tmp_path, name):
    policy = jaxkv.policy(name, budget=12, **SMALL.get(name, {}))
    options = {"max_new_tokens": 4, "stop_tokens": ()}
    cache = jaxkv.prefill(lettered, ids(20), policy=policy)
    want = jaxkv.generate(lettered, ids(5), cache=cache, **options)
    jaxkv.save(cache, tmp_path / "cache")
    restored = jaxkv.restore(tmp_path / "cache", lettered)
    with compilations() as seen:
        out = jaxkv.generate(lettered, ids(5), cache=restored, **options)
    assert seen == [] and out.tokens.tolist() == want.tokens.tolist()


@pytest.mark.long
@pytest.mark.parametrize("name", ["global-h2o", "d2o"])
def test_layers_that_share_a_budget_beyond_the_text(lettered, monkeypatch, name):
    """A large budget has slots as the text needs them, and nothing leaves."""
    monkeypatch.setattr("jaxkv.plan.AT_ONCE", 8)
    rows, options = [ids(10, 1), ids(30, 2)], {"max_new_tokens": 5, "stop_tokens": ()}
    policy = jaxkv.policy(name, budget=400, **SMALL.get(name, {}))
    for implementation in (None, "reference"):
        out = jaxkv.generate(lettered, rows, policy=policy, implementation=implementation, **options)
        assert out.tokens.tolist() == jaxkv.generate(lettered, rows, **options).tokens.tolist()


@pytest.mark.long
def test_a_short_prompt_under_a_ratio_keeps_what_the_policy_needs(lettered):
    """Its limit is no smaller than what must stay and one token more; so what it holds does not depend on its batch."""
    policy = jaxkv.policy("ems", ratio=0.5, **SMALL["ems"])
    assert policy.mean_budget(3) == policy.floor > 3
    options = {"policy": policy, "max_new_tokens": 20, "stop_tokens": ()}
    alone = jaxkv.generate(lettered, [ids(3)], **options)
    beside = jaxkv.generate(lettered, [ids(3), ids(90, 1)], **options)
    assert beside.tokens[0].tolist() == alone.tokens[0].tolist()
    assert np.asarray(alone.cache.held()).max() <= policy.floor


@pytest.mark.parametrize(("kind", "options"), [("ratio", {"ratio": 0.5}), ("budget", {"budget": 100})])
def test_blocks_depend_on_no_neighbour_where_places_are_the_caches(lettered, kind, options):
    policy, nothing = jaxkv.policy("streaming-llm", **options), np.zeros(lettered.config.num_layers, np.int64)
    sizes = [
        planned(policy, lettered.config, np.zeros(len(new), int), nothing, np.array(new), 4)[1].size
        for new in ([1000], [1000, 2500])
    ]
    assert sizes[0] == sizes[1] == (lettered.config.max_position // 4 if kind == "ratio" else 1948)
    if kind == "ratio":
        with pytest.raises(BadValue, match="fills the model's context"):
            planned(policy, lettered.config, np.zeros(1, int), nothing, np.array([3500]), 4)


@pytest.mark.long
def test_bytes_hold_for_texts_of_any_length(tiny):
    """A pyramid gives low layers more, which windows cut; a short text gives every layer the mean."""
    params, policy = tiny("gemma3_text"), jaxkv.policy("pyramidkv", bytes=100_000, window=6)
    for length in (60, 240):
        assert jaxkv.prefill(params, ids(length), policy=policy).kv_bytes <= 100_000
