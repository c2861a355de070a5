"""Tokenizers that are built from GGUF metadata."""

import contextlib
import json

import pytest

from jaxkv.errors import BadValue, BadWeights, UnknownName
from jaxkv.weights.tokenizer import from_folder, from_gguf


@pytest.fixture(scope="module")
def golden(goldens):
    return json.loads((goldens / "smollm2" / "tokens.json").read_text())


def test_smollm2_texts(smollm2, golden):
    assert len(golden["texts"]) >= 40
    for case in golden["texts"]:
        ids = smollm2.tokenizer(case["text"])["input_ids"]
        assert ids == case["ids"], case["text"]
        assert smollm2.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == case["text"]


def test_smollm2_chats(smollm2, golden):
    assert golden["chats"]
    for case in golden["chats"]:
        text = smollm2.tokenizer.apply_chat_template(
            case["messages"], tokenize=False, add_generation_prompt=case["add_generation_prompt"]
        )
        assert text == case["text"]
        assert smollm2.tokenizer(text, add_special_tokens=False)["input_ids"] == case["ids"]


def test_smollm2_special_tokens(smollm2, golden):
    tokenizer = smollm2.tokenizer
    special = golden["special"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        special["bos"],
        special["eos"],
        special["padding"],
    )
    assert len(tokenizer) == golden["vocab_size"]
    ids = tokenizer("<|im_start|>user\nHi<|im_end|>")["input_ids"]
    assert ids[0] == 1 and ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nHi"


# Byte-level BPE and SentencePiece, on vocabularies small enough to work out by hand

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level(pre, **more):
    tokens = ["<|end|>", "a", "b", "Ġ", "1", "2", "3", "ab", "Ġab", "12", "123", "aa", "<tag>"]
    kinds = [CONTROL] + [NORMAL] * 11 + [USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2", "12 3", "a a"],
        "tokenizer.ggml.eos_token_id": 0,
        **more,
    }


@pytest.mark.parametrize(
    ("pre", "digits"),
    [("smollm", ["1", "2", "3"]), ("qwen2", ["1", "2", "3"]), ("llama-bpe", ["123"]), ("gpt-2", ["123"])],
)
def test_pre_tokenizers_cut_digits_as_their_models_do(pre, digits):
    tokenizer = from_gguf(byte_level(pre))
    assert tokenizer.tokenize("ab ab123") == ["ab", "Ġab", *digits]


def test_added_tokens_bos_and_eos():
    tokenizer = from_gguf(
        byte_level("qwen2", **{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 12})
    )
    assert tokenizer("ab<|end|>a<tag>")["input_ids"] == [12, 7, 0, 1, 12]
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [7]
    assert tokenizer.decode([7, 0, 1], skip_special_tokens=True) == "aba"
    both = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert from_gguf(byte_level("qwen2", **both))("ab")["input_ids"] == [7, 0]


def test_texts_of_llama_3_begin_with_bos_unless_the_file_says_otherwise():
    first = {"tokenizer.ggml.bos_token_id": 12}
    assert from_gguf(byte_level("llama-bpe", **first))("ab")["input_ids"] == [12, 7]
    assert from_gguf(byte_level("llama-bpe", **first, **{"tokenizer.ggml.add_bos_token": False}))("ab")[
        "input_ids"
    ] == [7]
    assert from_gguf(byte_level("qwen2", **first))("ab")["input_ids"] == [7]


def sentencepiece(**more):
    tokens = ["<unk>", "<s>", "<0xC3>", "<0xA9>", "a", "b", "▁", "ab", "▁a", "▁ab", "bb", "  "]
    kinds = [UNKNOWN, CONTROL, BYTE, BYTE] + [NORMAL] * 7 + [USER_DEFINED]
    scores = [0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -3.0, -1.0, -4.0, 0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        **more,
    }


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes():
    plain = {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = from_gguf(sentencepiece(**plain))
    ids = tokenizer("ab abb", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "▁ab", "b"]  # "ab" joins before "▁a" and before "bb"
    assert tokenizer("aé")["input_ids"] == [1, 4, 2, 3]
    assert tokenizer.decode([4, 2, 3, 9]) == "aé ab"
    assert tokenizer("a  b", add_special_tokens=False)["input_ids"] == [4, 11, 5]  # two spaces are a token of their own
    assert tokenizer.decode([4, 11, 5]) == "a  b"
    assert from_gguf(sentencepiece(**plain, **{"tokenizer.ggml.add_bos_token": False}))("a")["input_ids"] == [4]


def test_sentencepiece_puts_a_space_in_front_unless_told_not_to():
    tokenizer = from_gguf(sentencepiece())
    assert tokenizer("ab")["input_ids"] == [1, 9]
    assert tokenizer.decode([9, 5]) == "abb"


def test_chat_template_of_the_file():
    template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    tokenizer = from_gguf(byte_level("qwen2", **{"tokenizer.chat_template": template}))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "user:ab;"
    assert from_gguf(byte_level("qwen2")).chat_template is None


def test_what_can_not_be_built_is_named():
    assert from_gguf({}) is None
    with pytest.raises(UnknownName, match=r"pre-tokenizer 'superbpe'.*load the model's Hugging Face folder"):
        from_gguf(byte_level("superbpe"))
    with pytest.raises(UnknownName, match=r"tokenizer model 't5'"):
        from_gguf(byte_level("qwen2", **{"tokenizer.ggml.model": "t5"}))
    broken = byte_level("qwen2")
    del broken["tokenizer.ggml.merges"]
    with pytest.raises(BadWeights, match=r"no tokenizer\.ggml\.merges"):
        from_gguf(broken)
    with pytest.raises(BadWeights, match=r"tokenizer\.ggml\.token_type has 1 entries, and there are 13 tokens"):
        from_gguf(byte_level("qwen2", **{"tokenizer.ggml.token_type": [1]}))
    with pytest.raises(BadWeights, match="cannot be built"):
        from_gguf(byte_level("qwen2", **{"tokenizer.ggml.merges": ["x y"]}))


@pytest.mark.parametrize("wrong", [99, -1, "no", 2**32 - 1])
def test_special_tokens_that_the_vocabulary_has_not_are_left_out(wrong):
    tokenizer = from_gguf(byte_level("llama-bpe", **{"tokenizer.ggml.bos_token_id": wrong}))
    assert tokenizer("ab")["input_ids"] == [7] and tokenizer.bos_token is None and tokenizer.eos_token == "<|end|>"
    assert from_gguf(sentencepiece(**{"tokenizer.ggml.unknown_token_id": wrong}))("ab")["input_ids"] == [1, 9]


@pytest.mark.parametrize(("architecture", "digits"), [("qwen2", 3), ("qwen3", 3), ("llama", 1)])
def test_a_pre_tokenizer_that_is_not_named_is_the_architectures(architecture, digits):
    fields = {**byte_level("gone"), "general.architecture": architecture}
    del fields["tokenizer.ggml.pre"]
    assert len(from_gguf(fields)("123")["input_ids"]) == digits


def test_a_vocabulary_of_llama_3_names_its_pre_tokenizer():
    fields = byte_level("gone")
    del fields["tokenizer.ggml.pre"]
    fields["tokenizer.ggml.tokens"][12] = "<|begin_of_text|>"
    assert from_gguf({**fields, "tokenizer.ggml.bos_token_id": 12})("ab")["input_ids"] == [12, 7]


def test_tekken_cuts_words_where_capitals_begin():
    tokens = ["<s>", "a", "B", "aB", "Ba", "\u0120", "1", "2", "12"]
    fields = byte_level("tekken", **{"tokenizer.ggml.bos_token_id": 0})
    fields |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [CONTROL] + [NORMAL] * 8}
    fields["tokenizer.ggml.merges"] = ["a B", "B a", "1 2"]
    tokenizer = from_gguf(fields)
    assert tokenizer.convert_ids_to_tokens(tokenizer("aBa 12")["input_ids"]) == ["<s>", "a", "Ba", "\u0120", "1", "2"]


def test_folders(tmp_path, smollm2):
    assert from_folder(tmp_path) is None
    smollm2.tokenizer.save_pretrained(tmp_path)
    again = from_folder(tmp_path)
    text = "The train leaves at seven. 12345"
    assert again(text)["input_ids"] == smollm2.tokenizer(text)["input_ids"]
    own = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**own, "auto_map": {"AutoTokenizer": ["code.X", None]}})
    )
    with contextlib.suppress(BadValue):
        from_folder(tmp_path)
    assert not (tmp_path / "ran").exists()  # nor is anybody asked for leave
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadValue, match="can't be read"):
        from_folder(tmp_path)
