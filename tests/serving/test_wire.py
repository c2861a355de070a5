"""What is said over HTTP, read and written without a server."""

import json
from types import SimpleNamespace

import pytest

from jaxkv.errors import BadValue
from jaxkv.serving.wire import Chat, Completion, Wrong, parsed


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
        ({"presence_penalty": 1}, "presence_penalty", "less than or equal to 0"),
        ({"presence_penalty": False}, "presence_penalty", "number"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "at most 0"),
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


ENGINE = SimpleNamespace(policy=SimpleNamespace(name="tova"), params=None)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (Chat, {"top_logprobs": 3}, "top_logprobs=3: expected logprobs=true"),
        (Chat, {"top_logprobs": 21, "logprobs": True}, "top_logprobs=21: expected 0 to 20"),
        (Chat, {"top_logprobs": -1, "logprobs": True}, "top_logprobs=-1: expected 0 to 20"),
        (Completion, {"logprobs": -1}, "logprobs=-1: expected 0 to 20"),
        (Completion, {"stream_options": {"include_usage": True}}, "stream_options without stream"),
    ],
)
def test_what_would_be_passed_over_is_refused(kind, given, says):
    text = {"prompt": "a"} if kind is Completion else {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(BadValue, match=says):
        parsed(kind, body(**text, **given)).settings(ENGINE, 16)
