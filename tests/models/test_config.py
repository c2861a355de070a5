"""What config.json and GGUF metadata say about a model."""

import json

import pytest

from jaxkv.errors import BadValue, UnknownName
from jaxkv.models import ModelConfig, Rope

TINY = ["llama2", "llama3", "smollm2", "qwen2", "qwen3", "mistral", "gemma3_text"]


def read(goldens, family, variant=""):
    return json.loads((goldens / "tiny" / family / f"config{variant}.json").read_text())


@pytest.mark.parametrize("family", TINY)
def test_both_generations_of_config_json_mean_the_same(goldens, family):
    assert ModelConfig.from_hf(read(goldens, family)) == ModelConfig.from_hf(read(goldens, family, "-v5"))


def test_llama3(goldens):
    config = ModelConfig.from_hf(read(goldens, "llama3"))
    assert config.rope == Rope(10000.0, "llama3", 8.0, 1.0, 4.0, 32)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 2, 16)
    assert config.tie_embeddings and not config.qkv_bias and not config.qk_norm
    assert hash(config) == hash(ModelConfig.from_hf(read(goldens, "llama3")))


def test_qwen2_slides_only_when_told_to(goldens):
    plain, sliding = (ModelConfig.from_hf(read(goldens, "qwen2", variant)) for variant in ("", "-sliding"))
    assert plain.layer_types == ("full",) * 3 and plain.sliding_window is None and plain.qkv_bias
    assert sliding.layer_types == ("full", "sliding", "sliding")
    assert [spec.window for spec in sliding.specs] == [None, 8, 8]


def test_mistral_slides_in_every_layer(goldens):
    assert {spec.window for spec in ModelConfig.from_hf(read(goldens, "mistral")).specs} == {8}
    assert {spec.window for spec in ModelConfig.from_hf(read(goldens, "mistral", "-full")).specs} == {None}


def test_windows_that_a_config_leaves_out(goldens):
    """What transformers takes in their place; null says that there is none."""
    mistral = {
        key: value for key, value in read(goldens, "mistral").items() if key not in ("sliding_window", "layer_types")
    }
    assert {spec.window for spec in ModelConfig.from_hf(mistral).specs} == {4096}
    assert {spec.window for spec in ModelConfig.from_hf({**mistral, "sliding_window": None}).specs} == {None}
    qwen = {
        key: value
        for key, value in read(goldens, "qwen2", "-sliding").items()
        if key not in ("max_window_layers", "layer_types")
    }
    assert ModelConfig.from_hf({**qwen, "num_hidden_layers": 30}).layer_types == ("full",) * 28 + ("sliding",) * 2


def test_the_same_scaling_in_both_spellings(goldens):
    given = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    both = {"rope_parameters": given, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert ModelConfig.from_hf({**read(goldens, "llama2"), **both}).rope == Rope(1e4, "linear", 2.0)


def test_gemma3_scales_sliding_layers_where_told_to(goldens):
    raw = read(goldens, "gemma3_text", "-v5")
    local = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}
    raw["rope_parameters"] = {**raw["rope_parameters"], "sliding_attention": local}
    assert ModelConfig.from_hf(raw).local_rope == Rope(1e4, "linear", 8.0)


def test_gemma3(goldens):
    config = ModelConfig.from_hf(read(goldens, "gemma3_text", "-softcap"))
    raw = read(goldens, "gemma3_text", "-softcap")
    local, full = config.attention_spec(0), config.attention_spec(1)
    assert (local.window, full.window) == (8, None)
    assert (local.rope, full.rope) == (Rope(1e4), Rope(1e6))
    assert local.scale == raw["query_pre_attn_scalar"] ** -0.5
    assert full.softcap == raw["attn_logit_softcapping"]
    assert config.logit_softcap == raw["final_logit_softcapping"]
    assert config.embed_scale == raw["hidden_size"] ** 0.5


def test_gemma3_leaves_out_its_defaults():
    """The published text-and-image configs give only what differs from the defaults."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    config = ModelConfig.from_hf({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.layer_types[:7] == ("sliding",) * 5 + ("full", "sliding")
    assert config.rope == Rope(1e6, "linear", 8.0) and config.local_rope == Rope(1e4)
    assert config.stop_tokens == (1, 106) and config.tie_embeddings


def test_unknown_family_names_the_supported_ones():
    with pytest.raises(UnknownName, match=r"'mamba'.*gemma3_text, llama, mistral, qwen2, qwen3"):
        ModelConfig.from_hf({"model_type": "mamba"})
    with pytest.raises(UnknownName, match=r"'qwen2moe'.*qwen2"):
        ModelConfig.from_gguf({"general.architecture": "qwen2moe"}, tied=True)


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic"])
def test_unsupported_rope_scaling(goldens, kind):
    with pytest.raises(BadValue, match=f"'{kind}'.*linear and llama3"):
        ModelConfig.from_hf({**read(goldens, "llama2"), "rope_scaling": {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "relu"}, "relu"),
        ({"num_attention_heads": 5, "head_dim": 16}, "5 query heads on 2"),
        ({"head_dim": 15}, "head dim 15"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "quantization_config"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_scaling has .*'factor': 4.0.*which rope_parameters has not",
        ),
    ],
)
def test_what_is_missing_or_unsupported_is_named(goldens, change, message):
    with pytest.raises(BadValue, match=message):
        ModelConfig.from_hf({**read(goldens, "llama2"), **change})


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e5,
    "llama.vocab_size": 99,
    "tokenizer.ggml.eos_token_id": 7,
    "tokenizer.ggml.eot_token_id": 9,
}


def test_gguf_metadata():
    config = ModelConfig.from_gguf(GGUF, tied=False, rope_factors=[1.0, 1.0, 4.0, 8.0])
    assert (config.family, config.vocab_size, config.head_dim, config.num_kv_heads) == ("llama", 99, 8, 2)
    assert config.stop_tokens == (7, 9) and not config.tie_embeddings
    assert config.rope == Rope(5e5, "factors", factors=(1.0, 1.0, 4.0, 8.0))


def test_gguf_turns_end_where_the_vocabulary_says_so():
    tokens = ["a", "<end_of_turn>", "<|endoftext|>", "<|im_end|>"]
    assert ModelConfig.from_gguf({**GGUF, "tokenizer.ggml.tokens": tokens}, tied=True).stop_tokens == (7, 9, 1, 3)
    padded = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.padding_token_id": 2}  # as Qwen's
    assert ModelConfig.from_gguf({**GGUF, **padded}, tied=True).stop_tokens == (7, 9, 1, 2, 3)
    llama = {"tokenizer.ggml.tokens": ["a", "<|end_of_text|>"]}
    assert ModelConfig.from_gguf({**GGUF, **llama}, tied=True).stop_tokens == (7, 9, 1)


@pytest.mark.parametrize(
    ("more", "scaling"),
    [
        ({"llama.rope.scale_linear": 8.0}, ("linear", 8.0)),
        ({"llama.rope.scaling.factor": 4.0}, ("linear", 4.0)),
        ({"llama.rope.scaling.factor": 1.0}, ("none", 1.0)),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "none"}, ("none", 1.0)),
    ],
)
def test_gguf_scaling_without_a_kind_is_linear(more, scaling):
    rope = ModelConfig.from_gguf({**GGUF, **more}, tied=True).rope
    assert (rope.scaling, rope.factor) == scaling


def test_gguf_metadata_that_is_not_enough():
    with pytest.raises(BadValue, match=r"llama\.block_count"):
        ModelConfig.from_gguf({key: value for key, value in GGUF.items() if "block" not in key}, tied=True)
    with pytest.raises(BadValue, match="'yarn'"):
        ModelConfig.from_gguf({**GGUF, "llama.rope.scaling.type": "yarn"}, tied=True)
    with pytest.raises(BadValue, match="4 of 8"):
        ModelConfig.from_gguf({**GGUF, "llama.rope.dimension_count": 4}, tied=True)


def test_gguf_gemma3():
    gemma = {key.replace("llama.", "gemma3."): value for key, value in GGUF.items()}
    gemma |= {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 16, "gemma3.block_count": 7}
    config = ModelConfig.from_gguf(gemma | {"gemma3.attention.key_length": 16}, tied=True)
    assert config.layer_types == ("sliding",) * 5 + ("full", "sliding")
    assert config.attention_spec(0).rope == Rope(1e4) and config.attention_spec(5).rope == Rope(5e5)
    assert config.attention_spec(0).scale == 0.25 and config.embed_scale == 32**0.5
    own = {"gemma3.rope.freq_base_swa": 2e4, "gemma3.attention.sliding_window_pattern": 3}
    other = ModelConfig.from_gguf(gemma | own | {"gemma3.attention.key_length": 16}, tied=True)
    assert other.layer_types == ("sliding", "sliding", "full") * 2 + ("sliding",) and other.local_rope == Rope(2e4)
    listed = {"gemma3.attention.sliding_window_pattern": [True] * 6 + [False]}
    assert ModelConfig.from_gguf(gemma | listed, tied=True).layer_types == ("sliding",) * 6 + ("full",)
    with pytest.raises(BadValue, match="sliding_window_pattern is 'x'"):
        ModelConfig.from_gguf(gemma | {"gemma3.attention.sliding_window_pattern": "x"}, tied=True)
