"""Questions about a text that is read once, in the model's chat format."""

import dataclasses

import numpy as np
import pytest
from letters import Letters

import jaxkv
from jaxkv.about import MARK
from jaxkv.errors import BadValue

HARBOUR = "boats come at six"


class Talk(Letters):
    """Letters with a chat template, which writes what a turn ends with. A line's end is token 95."""

    chat_template = "roles"

    def __call__(self, text, **more):
        return super().__call__(text.replace("\n", chr(95 + 32)), **more)

    def decode(self, tokens, **more):
        return super().decode(tokens, **more).replace(chr(95 + 32), "\n")

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        turns = "".join(f"<{message['role']}>{message['content']}~" for message in messages)
        return turns + "<a>" * add_generation_prompt


class Plain(Talk):
    """Letters whose texts begin with a token of their own, and no chat template."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        ids = super().__call__(text)["input_ids"]
        return {"input_ids": [1] * add_special_tokens + ids}


@pytest.fixture(scope="module")
def talking(tiny):
    return dataclasses.replace(tiny("llama3"), tokenizer=Talk())


def test_the_format_is_split_where_the_text_ends(talking):
    about = jaxkv.about(talking, HARBOUR)
    text = talking.tokenizer.decode
    assert text(about.context) == "<user>boats come at six"
    assert text(about.question("when?")) == "\n\nwhen?~<a>"
    assert text(about.question("\nwhen?", begins="at ")) == "\nwhen?~<a>at "
    talk = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    assert text(jaxkv.about(talking, HARBOUR, talk).context) == "<system>be short~<user>hi~<user>boats come at six"


def test_without_a_template_the_text_begins_as_texts_do(tiny):
    params = dataclasses.replace(tiny("llama3"), tokenizer=Plain())
    about = jaxkv.about(params, HARBOUR)
    assert about.context[0] == 1 and params.tokenizer.decode(about.context[1:]) == HARBOUR
    assert params.tokenizer.decode(about.question("when?")) == "\n\nwhen?\n"


def test_an_answer_after_the_cache_is_the_whole_prompts(talking):
    about = jaxkv.about(talking, HARBOUR)
    cache = jaxkv.prefill(talking, about.context)
    for question in ("when?", "what comes?"):
        out = jaxkv.generate(talking, about.question(question), cache=cache, max_new_tokens=6)
        whole = np.concatenate([about.context, about.question(question)])
        assert out.tokens.tolist() == jaxkv.generate(talking, whole, max_new_tokens=6).tokens.tolist()


@pytest.mark.usefixtures("unchecked")
def test_it_says_what_it_needs(talking, tiny):
    with pytest.raises(BadValue, match="no tokenizer"):
        jaxkv.about(dataclasses.replace(tiny("llama3"), tokenizer=None), HARBOUR)
    for text in ("", None, 5):
        with pytest.raises(BadValue, match=r"text=.*: expected text, one letter at least$"):
            jaxkv.about(talking, text)
    with pytest.raises(BadValue, match="is where jaxkv splits the chat; leave these letters out"):
        jaxkv.about(talking, f"a{MARK}b")
    for words, messages in (
        ("message 0 is 'hi'", ["hi"]),
        ("message 0 holds", [{"role": "user", "content": [1]}]),
        ("messages=None: expected a list", None),
        ("messages=.*: expected a list", {"role": "user", "content": "hi"}),
    ):
        with pytest.raises(BadValue, match=words):
            jaxkv.about(talking, HARBOUR, messages)
    for question, words in (("", "question=''"), (["when?"], r"question=\['when"), ("a\ud800", "surrogate")):
        with pytest.raises(BadValue, match=words):
            jaxkv.about(talking, HARBOUR).question(question)
    for begins in (5, None):
        with pytest.raises(BadValue, match=f"begins={begins}"):
            jaxkv.about(talking, HARBOUR).question("when?", begins=begins)


def test_templates_that_take_no_text_as_it_is_are_refused(talking, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Talk, "apply_chat_template", lambda self, messages, **_: messages[0]["content"].encode("ascii"))
        with pytest.raises(BadValue, match=r"chat template can't take these messages \(UnicodeEncodeError"):
            jaxkv.about(talking, HARBOUR)
    for changed in (lambda text: text.replace(MARK, "%EE"), lambda text: "", lambda text: text + text):
        with monkeypatch.context() as patch:
            patch.setattr(Talk, "apply_chat_template", lambda self, messages, **_: changed(messages[-1]["content"]))  # noqa: B023
            with pytest.raises(BadValue, match="does not write what a user says as it is: split the text yourself"):
                jaxkv.about(talking, HARBOUR)
