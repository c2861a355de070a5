"""What a model is made of: one frozen, hashable description for every family."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.errors import BadValue, UnknownName
from jaxkv.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static facts of one layer's attention: softmax(scale * q.k, soft-capped) over the last `window` positions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    rope: Rope


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "max_position"),
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. `layer_types` holds "full" or "sliding" per layer; sliding layers see the last
    `sliding_window` positions (the query's own included) and turn by `local_rope` where the family has one.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope: Rope
    norm_eps: float
    layer_types: tuple[str, ...]
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    sliding_window: int | None = None
    local_rope: Rope | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    activation: str = "silu"
    embed_scale: float | None = None
    stop_tokens: tuple[int, ...] = ()
    bos_token: int | None = None

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 1:
                raise BadValue(f"{name} is {getattr(self, name)}: expected at least 1")
        if self.num_heads % self.num_kv_heads:
            raise BadValue(f"{self.num_heads} query heads on {self.num_kv_heads} KV heads: expected a multiple of them")
        if self.head_dim % 2:
            raise BadValue(f"head dim {self.head_dim}: rotary positions need an even one")
        if len(self.layer_types) != self.num_layers or set(self.layer_types) - {"full", "sliding"}:
            raise BadValue(f'layer_types {self.layer_types}: expected "full" or "sliding" for {self.num_layers} layers')
        if "sliding" in self.layer_types and not self.sliding_window:
            raise BadValue("sliding layers without a sliding_window: give its size")
        if self.activation not in ("silu", "gelu", "gelu_tanh"):
            raise BadValue(f"activation {self.activation!r}: supported are silu, gelu and gelu_tanh")

    def attention_spec(self, layer: int) -> AttentionSpec:
        """The facts of one layer's attention."""
        sliding = self.layer_types[layer] == "sliding"
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            window=self.sliding_window if sliding else None,
            softcap=self.attention_softcap,
            rope=self.local_rope if sliding and self.local_rope is not None else self.rope,
        )

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The facts of every layer's attention."""
        return tuple(self.attention_spec(layer) for layer in range(self.num_layers))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """The model that a Hugging Face `config.json` describes.

        Raises `UnknownName` for another model type than the supported families, and `BadValue` for a missing key or
        a feature that is not supported.
        """
        if "text_config" in config:  # a model for text and images: its text part
            outer, config = config, dict(config["text_config"])
            config.setdefault("tie_word_embeddings", outer.get("tie_word_embeddings", True))
            config.setdefault("eos_token_id", outer.get("eos_token_id"))
        family = config.get("model_type", "")
        if family not in HF_FAMILIES:
            raise UnknownName(f"unknown model type {family!r}; supported are {', '.join(sorted(HF_FAMILIES))}")
        return HF_FAMILIES[family](_Keys(config, "config.json"))

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], *, tied: bool, rope_factors: Sequence[float] | None = None):
        """The model that GGUF metadata describes; `tied` when the file has no output matrix of its own.

        `rope_factors` are the divisors of the rotary frequencies that Llama 3 files carry as a tensor. Raises
        `UnknownName` for another architecture than the supported ones, and `BadValue` as `from_hf` does.
        """
        architecture = fields.get("general.architecture", "")
        if architecture not in GGUF_FAMILIES:
            known = ", ".join(sorted(GGUF_FAMILIES))
            raise UnknownName(f"unknown GGUF architecture {architecture!r}; supported are {known}")
        return _from_gguf(_Keys(fields, "the GGUF metadata"), architecture, tied, rope_factors)


class _Keys:
    """A mapping whose missing keys are errors that name them; null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def __call__(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise BadValue(f"{self.where} has no {key!r}: expected a complete model description")
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value


ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def _hf(keys: _Keys, family: str, **changes: Any) -> ModelConfig:
    """What all families share; `changes` are the family's own."""
    heads, hidden = keys("num_attention_heads"), keys("hidden_size")
    layers = keys("num_hidden_layers")
    activation = keys.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise BadValue(f"hidden_act {activation!r}: supported are {', '.join(ACTIVATIONS)}")
    for key in ("attention_bias", "mlp_bias"):
        if keys.get(key, False):
            raise BadValue(f"{key} is true: {family} models with it are not supported")
    facts = dict(
        family=family,
        vocab_size=keys("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.get("num_key_value_heads", heads),
        head_dim=keys.get("head_dim", hidden // heads),
        max_position=keys("max_position_embeddings"),
        rope=_hf_rope(keys, "full_attention", 10000.0),
        norm_eps=float(keys.get("rms_norm_eps", 1e-6)),
        layer_types=("full",) * layers,
        tie_embeddings=bool(keys.get("tie_word_embeddings", False)),
        activation=ACTIVATIONS[activation],
        stop_tokens=_ids(keys.get("eos_token_id")),
        bos_token=next(iter(_ids(keys.get("bos_token_id"))), None),
    )
    return ModelConfig(**{**facts, **changes})


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(each) for each in value) if isinstance(value, list | tuple) else (int(value),)


def _hf_rope(keys: _Keys, layer_type: str, theta: float) -> Rope:
    """The rotary embedding: `rope_parameters` of transformers 5, else `rope_theta` and `rope_scaling`."""
    scaling = dict(keys.get("rope_parameters", None) or keys.get("rope_scaling", None) or {})
    scaling = dict(scaling.get(layer_type, scaling))
    theta = float(scaling.get("rope_theta", keys.get("rope_theta", theta)))
    partial = scaling.get("partial_rotary_factor", keys.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise BadValue(f"partial_rotary_factor {partial}: only full rotary embeddings are supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind not in ("linear", "llama3"):
        raise BadValue(f"rope scaling {kind!r}: supported are default, linear and llama3")
    numbers = _Keys(scaling, f"the {kind} rope scaling")
    if kind == "linear":
        return Rope(theta, "linear", factor=float(numbers("factor")))
    return Rope(
        theta,
        "llama3",
        factor=float(numbers("factor")),
        low_freq_factor=float(numbers("low_freq_factor")),
        high_freq_factor=float(numbers("high_freq_factor")),
        original_max_position=int(numbers("original_max_position_embeddings")),
    )


def _layer_types(keys: _Keys, sliding: Callable[[int], bool]) -> tuple[str, ...]:
    """The kind of every layer: as the config lists them, else by the family's rule."""
    listed = keys.get("layer_types")
    if listed is None:
        return tuple("sliding" if sliding(layer) else "full" for layer in range(keys("num_hidden_layers")))
    known = {"full_attention": "full", "sliding_attention": "sliding"}
    strange = sorted({str(kind) for kind in listed} - known.keys())
    if strange:
        raise BadValue(f"layer_types has {', '.join(strange)}: supported are {', '.join(known)}")
    return tuple(known[kind] for kind in listed)


def _hf_llama(keys: _Keys) -> ModelConfig:
    return _hf(keys, "llama")


def _hf_mistral(keys: _Keys) -> ModelConfig:
    window = keys.get("sliding_window")
    kinds = ("sliding" if window else "full",) * keys("num_hidden_layers")
    return _hf(keys, "mistral", sliding_window=window, layer_types=kinds)


def _hf_qwen(keys: _Keys, family: str, **changes: Any) -> ModelConfig:
    window = keys("sliding_window") if keys.get("use_sliding_window", False) else None
    first = keys.get("max_window_layers", 0)
    kinds = _layer_types(keys, lambda layer: window is not None and layer >= first)
    if window is None:
        kinds = ("full",) * len(kinds)
    return _hf(keys, family, sliding_window=window, layer_types=kinds, **changes)


def _hf_qwen2(keys: _Keys) -> ModelConfig:
    return _hf_qwen(keys, "qwen2", qkv_bias=True)


def _hf_qwen3(keys: _Keys) -> ModelConfig:
    return _hf_qwen(keys, "qwen3", qk_norm=True, head_dim=keys.get("head_dim", 128))


GEMMA3_DEFAULTS = {  # Gemma 3's published configs leave out what equals these
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}


def _hf_gemma3(keys: _Keys) -> ModelConfig:
    given = {key: value for key, value in keys.values.items() if value is not None}
    pattern = given.get("sliding_window_pattern", given.get("_sliding_window_pattern", 6))
    facts = {**GEMMA3_DEFAULTS, **given}
    keys = _Keys({**facts, "hidden_act": facts["hidden_activation"]}, keys.where)
    if keys.get("use_bidirectional_attention", False):
        raise BadValue("use_bidirectional_attention is true: only causal models are supported")
    kinds = _layer_types(keys, lambda layer: (layer + 1) % pattern != 0)
    return _hf(
        keys,
        "gemma3",
        layer_types=kinds,
        sliding_window=keys("sliding_window"),
        local_rope=_local_rope(keys),
        attention_scale=float(keys("query_pre_attn_scalar")) ** -0.5,
        attention_softcap=keys.get("attn_logit_softcapping"),
        logit_softcap=keys.get("final_logit_softcapping"),
        embed_scale=float(keys("hidden_size")) ** 0.5,
        qk_norm=True,
        post_norms=True,
    )


def _local_rope(keys: _Keys) -> Rope:
    """Sliding layers of Gemma 3 turn faster, and are not scaled."""
    local = dict(keys.get("rope_parameters", {})).get("sliding_attention", {})
    return Rope(float(local.get("rope_theta", keys("rope_local_base_freq"))))


HF_FAMILIES: dict[str, Callable[[_Keys], ModelConfig]] = {
    "llama": _hf_llama,
    "mistral": _hf_mistral,
    "qwen2": _hf_qwen2,
    "qwen3": _hf_qwen3,
    "gemma3_text": _hf_gemma3,
}

GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
GEMMA3_27B_LAYERS = 62  # the one size whose attention is scaled by hidden size / heads
GEMMA3_LOCAL_THETA, GEMMA3_PATTERN = 1e4, 6  # not in the metadata


def _from_gguf(keys: _Keys, architecture: str, tied: bool, factors: Sequence[float] | None) -> ModelConfig:
    def key(name: str) -> Any:
        return keys(f"{architecture}.{name}")

    def get(name: str, default: Any = None) -> Any:
        return keys.get(f"{architecture}.{name}", default)

    family = GGUF_FAMILIES[architecture]
    hidden, heads, layers = key("embedding_length"), key("attention.head_count"), key("block_count")
    head_dim = get("attention.key_length", hidden // heads)
    turned = get("rope.dimension_count", head_dim)
    if turned != head_dim or get("attention.value_length", head_dim) != head_dim:
        raise BadValue(f"{turned} of {head_dim} head dims are rotary: only full rotary embeddings are supported")
    theta, scaling = float(get("rope.freq_base", 10000.0)), get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise BadValue(f"rope scaling {scaling!r}: supported in GGUF are none, linear and Llama 3's factors")
    rope = Rope(theta)
    if scaling == "linear":
        rope = Rope(theta, "linear", factor=float(key("rope.scaling.factor")))
    if factors is not None:
        rope = Rope(theta, "factors", factors=tuple(float(each) for each in factors))
    window = get("attention.sliding_window")
    facts: dict[str, Any] = dict(
        family=family,
        vocab_size=get("vocab_size") or len(keys("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=key("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=key("context_length"),
        rope=rope,
        norm_eps=float(key("attention.layer_norm_rms_epsilon")),
        layer_types=("sliding" if window else "full",) * layers,
        sliding_window=window,
        tie_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        stop_tokens=_gguf_stops(keys),
        bos_token=keys.get("tokenizer.ggml.bos_token_id"),
    )
    if family == "gemma3":
        scale = hidden / heads if layers == GEMMA3_27B_LAYERS else head_dim
        facts |= dict(
            layer_types=tuple("full" if (layer + 1) % GEMMA3_PATTERN == 0 else "sliding" for layer in range(layers)),
            sliding_window=key("attention.sliding_window"),
            local_rope=Rope(GEMMA3_LOCAL_THETA),
            attention_scale=scale**-0.5,
            attention_softcap=get("attn_logit_softcapping"),
            logit_softcap=get("final_logit_softcapping"),
            embed_scale=hidden**0.5,
            activation="gelu_tanh",
            post_norms=True,
        )
    return ModelConfig(**facts)


def _gguf_stops(keys: _Keys) -> tuple[int, ...]:
    """End of text, of turn and of message, as far as the metadata names them."""
    named = [keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(int(each) for each in named if each is not None))
