"""What a decoder-only model is made of: one frozen description for every family."""

import dataclasses
from typing import Any

from jaxkv.errors import BadWeights, unknown
from jaxkv.models.rope import Rope

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
TYPES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3", "gemma3": "gemma3"}


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static facts of one layer's attention; `window` is its sliding window in tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    rope: Rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder, hashable, so that a compiled program can be keyed by it.

    `layer_types` says "full" or "sliding" per layer; `local_rope` turns the sliding layers where they differ
    (Gemma 3); `norm_offset` is added to the norm weights (Gemma: 1); `post_norms` norms each branch's output too.
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
    layer_types: tuple[str, ...]
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    local_rope: Rope | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    activation: str = "silu"
    norm_offset: float = 0.0
    embed_scale: float | None = None
    post_norms: bool = False
    stop_tokens: tuple[int, ...] = ()
    bos_token: int | None = None

    def attention_spec(self, layer: int) -> AttentionSpec:
        """The facts of one layer's attention."""
        sliding = self.layer_types[layer] == "sliding"
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.attention_scale or self.head_dim**-0.5,
            window=self.sliding_window if sliding else None,
            softcap=self.attention_softcap,
            rope=self.local_rope if sliding and self.local_rope is not None else self.rope,
        )


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """The description in a Hugging Face config.json. Raises `UnknownName` for a family that there is not."""
    config = {**config, **config.get("text_config", {})}
    family = TYPES.get(config.get("model_type", "")) or FAMILIES.get((config.get("architectures") or [""])[0])
    if family is None:
        raise unknown("model family", str(config.get("model_type")), TYPES)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    gemma = family == "gemma3"
    rope, local = _ropes(config, gemma)
    window = config.get("sliding_window")
    if family == "qwen2" and not config.get("use_sliding_window", False):
        window = None
    return ModelConfig(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        max_position=config.get("max_position_embeddings", 131072 if gemma else 2048),
        rope=rope,
        layer_types=_layer_types(config, layers, window),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_embeddings=config.get("tie_word_embeddings", gemma),
        attention_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
        qk_norm=family in ("qwen3", "gemma3"),
        sliding_window=window,
        local_rope=local,
        attention_scale=config.get("query_pre_attn_scalar", 256) ** -0.5 if gemma else None,
        attention_softcap=config.get("attn_logit_softcapping"),
        logit_softcap=config.get("final_logit_softcapping"),
        activation="gelu_tanh" if gemma else "silu",
        norm_offset=1.0 if gemma else 0.0,
        embed_scale=config["hidden_size"] ** 0.5 if gemma else None,
        post_norms=gemma,
        stop_tokens=_as_tuple(config.get("eos_token_id")),
        bos_token=config.get("bos_token_id"),
    )


def _as_tuple(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def _layer_types(config: dict[str, Any], layers: int, window: int | None) -> tuple[str, ...]:
    if window is None:
        return ("full",) * layers
    if config.get("layer_types"):
        return tuple("sliding" if kind == "sliding_attention" else "full" for kind in config["layer_types"])
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if pattern:  # every pattern-th layer is global
        return tuple("full" if (layer + 1) % pattern == 0 else "sliding" for layer in range(layers))
    first = config.get("max_window_layers", 0) if config.get("use_sliding_window") else 0
    return tuple("sliding" if layer >= first else "full" for layer in range(layers))


def _ropes(config: dict[str, Any], gemma: bool) -> tuple[Rope, Rope | None]:
    """The rotation of the global layers, and of the sliding ones where it differs."""
    new = config.get("rope_parameters") or {}
    if "full_attention" in new:  # transformers 5: one table per kind of layer
        return _rope(new["full_attention"], config), _rope(new["sliding_attention"], config)
    rope = _rope({**(config.get("rope_scaling") or {}), **new}, config)
    if not gemma:
        return rope, None
    return rope, Rope(theta=config.get("rope_local_base_freq", 10000.0))


def _rope(table: dict[str, Any], config: dict[str, Any]) -> Rope:
    kind = table.get("rope_type", table.get("type", "default"))
    theta = float(table.get("rope_theta", config.get("rope_theta", 10000.0)))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, scaling="linear", factor=float(table["factor"]))
    if kind == "llama3":
        return Rope(
            theta=theta,
            scaling="llama3",
            factor=float(table["factor"]),
            low_freq_factor=float(table["low_freq_factor"]),
            high_freq_factor=float(table["high_freq_factor"]),
            original_max_position=int(table["original_max_position_embeddings"]),
        )
    raise BadWeights(f"RoPE scaling {kind!r}: expected none, 'linear' or 'llama3'; this model's scaling is not supported")
