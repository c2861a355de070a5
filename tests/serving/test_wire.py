"""What is said over HTTP, read and written without a server."""

import json
import threading
from types import SimpleNamespace

import pytest
from letters import Letters

from jaxkv.errors import BadValue
from jaxkv.serving.answer import Answer, Chance
from jaxkv.serving.wire import Chat, Completion, Reader, Written, Wrong, parsed, spelled, word_of
from jaxkv.stop_strings import StopStrings


def body(**given):
    return json.dumps(given).encode()


def chat(**given):
    """A body whose one message has this besides its role."""
    return body(messages=[{"role": "user", **given}])


def refused(kind, data):
    """The message and the field that is to blame."""
    with pytest.raises(Wrong) as error:
        parsed(kind, data)
    assert error.value.status == 400 and error.value.message.startswith(f"{error.value.param}: ")
    return error.value.message.partition(": ")[2], error.value.param


@pytest.mark.parametrize(
    ("data", "where", "says"),
    [
        (chat(content=[{"type": "image_url", "image_url": {}}]), "messages.0.content.0.type", "'text' only"),
        (chat(content=[{"type": "text", "text": 5}]), "messages.0.content.0.text", "a valid string"),
        (chat(content=[{"type": "text"}]), "messages.0.content.0.text", "required"),
        (chat(content=5), "messages.0.content", "a valid string"),
        (chat(content={"a": 1}), "messages.0.content", "a valid string"),
        (chat(content=None), "messages.0.content", "expected text"),
        (chat(content="a", tool_calls=[{}]), "messages.0.tool_calls", "does not support"),
        (chat(), "messages.0.content", "required"),
        (body(), "messages", "required"),
    ],
)
def test_a_wrong_message_is_blamed_where_it_is(data, where, says):
    message, param = refused(Chat, data)
    assert param == where and says in message


@pytest.mark.parametrize(
    ("given", "where", "says"),
    [
        ({"prompt": ["a", 5]}, "prompt.1", "string"),
        ({"prompt": [1, "a"]}, "prompt.1", "integer"),
        ({"prompt": [[1], [2, "a"]]}, "prompt.1.1", "integer"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"stop": ["a", ""]}, "stop.1", "at least 1 character"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"stop": "a" * 1001}, "stop", "at most 1000 characters"),
        ({"stop": ["a", "a" * 1001]}, "stop.1", "at most 1000 characters"),
        ({"presence_penalty": 1}, "presence_penalty", "moves no chances"),
        ({"presence_penalty": False}, "presence_penalty", "number"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "moves no chances"),
        ({"store": True}, "store", "False"),
        ({"service_tier": "flex"}, "service_tier", "'auto' or 'default'"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "False"),
        ({"tools": []}, "tools", "does not support"),
    ],
)
def test_the_type_that_was_meant_is_told_of(given, where, says):
    message, param = refused(Completion, body(**{"prompt": "a", **given}))
    assert param == where and says in message


def test_what_says_nothing_is_taken():
    """As clients send it: an answer of the API itself, and that what is not there shall not be done."""
    said = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "tool_calls": None,
    }
    wanted = parsed(
        Chat,
        body(
            messages=[said], tools=None, suffix=None, logit_bias={}, store=False, service_tier="auto",
            metadata={"a": "b"}, presence_penalty=0, frequency_penalty=0.0, stream=True,
            stream_options={"include_usage": True, "include_obfuscation": False},
        ),
    )  # fmt: skip
    assert wanted.prompts() == [[{"role": "assistant", "content": "a"}]]


def test_null_leaves_a_field_out_wherever_it_is():
    """All fields but those without which there is no request, those of parts among them."""
    content = [{"type": "text", "text": "a", "cache_control": None}]
    fields = dict.fromkeys(Chat.model_fields.keys() - {"messages"})
    options = {"include_usage": None, "include_obfuscation": None, "other": None}
    given = {**fields, "stream": True, "stream_options": options}
    wanted = parsed(Chat, body(messages=[{"role": "user", "content": content, "name": None}], **given))
    assert wanted.ignore_eos is False and wanted.stream_options.include_usage is False
    assert wanted.prompts() == [[{"role": "user", "content": [{"type": "text", "text": "a"}]}]]
    assert refused(Completion, body(prompt=None)) == ("Field required", "prompt")
    assert refused(Chat, body(messages=[{"role": None, "content": "a"}])) == ("Field required", "messages.0.role")


def test_a_role_that_is_none_is_refused():
    says = "unknown role 'usr'; did you mean 'user'?", "messages.0.role"
    assert refused(Chat, body(messages=[{"role": "usr", "content": "a"}])) == says


ENGINE = SimpleNamespace(policy=SimpleNamespace(name="tova"), params=None)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (Chat, {"top_logprobs": 3}, "top_logprobs=3: expected logprobs=true"),
        (Chat, {"top_logprobs": 21, "logprobs": True}, "top_logprobs=21: expected 0 to 20"),
        (Chat, {"top_logprobs": -1, "logprobs": True}, "top_logprobs=-1: expected 0 to 20"),
        (Chat, {"max_tokens": 4, "max_completion_tokens": 2}, "max_tokens=4 and max_completion_tokens=2"),
        (Completion, {"logprobs": -1}, "logprobs=-1: expected 0 to 20"),
        (Completion, {"stream_options": {"include_usage": True}}, "stream_options without stream"),
    ],
)
def test_what_would_be_passed_over_is_refused(kind, given, says):
    text = {"prompt": "a"} if kind is Completion else {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(BadValue, match=says):
        parsed(kind, body(**text, **given)).settings(ENGINE, 16)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_only_a_default_may_be_fewer(name):
    """A number of tokens that was asked for is given, or refused."""
    text = {"messages": [{"role": "user", "content": "a"}]}
    assert parsed(Chat, body(**text)).settings(ENGINE, 16).items() >= {"max_new_tokens": 16, "fewer": True}.items()
    given = parsed(Chat, body(**text, **{name: 9})).settings(ENGINE, 16)
    assert given.items() >= {"max_new_tokens": 9, "fewer": False}.items()


def told(tokenizer, ids, *, best=(), stop=(), ends=(), step=3):
    """The log-probabilities of a completion with these tokens as it is streamed, and its text."""
    answer = Answer(1, 1, len(ids), ends, StopStrings(stop, tokenizer), True, lambda: None, lambda: True)
    reader = Reader(answer, tokenizer)
    written = Written(parsed(Completion, body(prompt="a", logprobs=5)), "tiny", tokenizer)
    pieces = []
    for at in range(0, len(ids), step):
        chances = [Chance(token, -0.1, tuple(best)) for token in ids[at : at + step]]
        answer.take(ids[at : at + step], chances, 0.0)
        (choice,) = written.event(0, reader, reader.piece())["choices"]
        pieces.append(choice)
    return [piece["logprobs"] for piece in pieces], "".join(piece["text"] for piece in pieces)


@pytest.mark.parametrize("step", [1, 3, 100])
def test_parts_of_characters_have_their_bytes_and_their_place(smollm2, step):
    tokenizer, text = smollm2.tokenizer, "é 🚂🚃 a ü 東京."
    ids = tokenizer(text)["input_ids"]
    parts = [spelled(tokenizer, token) for token in ids]
    assert b"".join(parts) == text.encode() and any(word_of(tokenizer, token) == "\ufffd" for token in ids)
    logprobs, sent = told(tokenizer, ids, step=step)
    offsets = [at for each in logprobs for at in each["text_offset"]]
    begins = [len(b"".join(parts[:count]).decode(errors="ignore")) for count in range(len(ids))]
    assert sent == text and offsets == begins


def test_of_tokens_that_look_alike_the_likeliest_is_told(smollm2):
    alike = [token for token in range(1000) if word_of(smollm2.tokenizer, token) == "\ufffd"][:2]
    best = [(alike[0], -1.0), (65, -2.0), (alike[1], -3.0)]
    ((logprobs,), _) = told(smollm2.tokenizer, [65], best=best)
    assert logprobs["top_logprobs"] == [{"\ufffd": -1.0, word_of(smollm2.tokenizer, 65): -2.0}]


class Ending(Letters):
    """Letters whose "$" is a special token."""

    def decode(self, tokens, skip_special_tokens=False, **_):
        text = super().decode(tokens)
        return text.replace("$", "") if skip_special_tokens else text


@pytest.mark.parametrize("step", [1, 2, 100])
@pytest.mark.parametrize(("text", "tokens"), [("ab$", ["a", "b"]), ("abc", ["a", "b", "c"])])
def test_the_token_that_ends_a_text_is_told_where_it_is_a_part_of_it(text, tokens, step):
    """As an ordinary word is; not so a special one. Whoever named it: the model, or the request by its id or name."""
    ids = Ending()(text)["input_ids"]
    logprobs, sent = told(Ending(), ids, ends=ids[-1:], step=step)
    assert [token for each in logprobs for token in each["tokens"]] == tokens and sent == "".join(tokens)


def test_a_piece_is_of_one_moment():
    """A reader that comes between an answer's last chances and its end waits for the end."""
    ids, pieces = Ending()("ab$")["input_ids"], []
    answer = Answer(1, 1, len(ids), ids[-1:], StopStrings((), Ending()), True, lambda: None, lambda: True)
    reads = threading.Thread(target=lambda: pieces.append(Reader(answer, Ending()).piece()))

    class Read(list):
        def extend(self, more):
            super().extend(more)
            reads.start()
            reads.join(0.2)

    answer.chances = Read()
    answer.take(ids, [Chance(token, -0.1, ()) for token in ids], 0.0)
    reads.join(10)
    (piece,) = pieces
    assert piece.finish == "stop" and [chance.token for chance in piece.chances] == ids[:2]


def test_no_token_begins_behind_the_text():
    ((logprobs,), sent) = told(Letters(), Letters()("abcdefgh")["input_ids"], stop=("cdef",), step=100)
    assert sent == "ab" and logprobs["text_offset"] == [0, 1, 2, 2, 2, 2]


def test_bytes_of_other_tokenizers():
    class Pieces(Letters):
        def convert_ids_to_tokens(self, token):
            return {1: "<0xF0>", 2: "\ufffd"}[token]

        def decode(self, tokens, **_):
            return "\ufffd"

    assert spelled(Pieces(), 1) == b"\xf0" and spelled(Pieces(), 2) == "\ufffd".encode()
    assert spelled(None, 7) == b"7"
