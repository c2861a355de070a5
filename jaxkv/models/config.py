"""What a model is made of: one frozen, hashable description for every family."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.checks import MOST, Checked, finite, fits, shown, words
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


MOST_LAYERS = 10_000  # more than any model has: what a damaged config asks for would fill the memory
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "max_position"),
)


@dataclasses.dataclass(frozen=True)
class ModelConfig(Checked):
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
        if self.num_layers > MOST_LAYERS:
            raise BadValue(f"num_layers is {self.num_layers}: expected at most {MOST_LAYERS}")
        if not 0 <= self.norm_eps < 1:
            raise BadValue(f"norm_eps is {self.norm_eps}: expected a small number, from 0 up to but not including 1")
        for name in ("sliding_window", "attention_scale", "attention_softcap", "logit_softcap", "embed_scale"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and finite(value)):
                raise BadValue(f"{name} is {value}: expected a number above 0")
        for rope in (self.rope, self.local_rope):
            if rope is not None and rope.scaling == "factors" and len(rope.factors) != self.head_dim // 2:
                raise BadValue(f"{len(rope.factors)} rope factors for heads of {self.head_dim}: expected half as many")
        ids = (*self.stop_tokens, *(() if self.bos_token is None else (self.bos_token,)))
        if any(token < 0 for token in ids):
            raise BadValue(f"stop_tokens {self.stop_tokens}, bos_token {self.bos_token}: expected ids from 0 on")
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
        if not isinstance(config, Mapping):
            raise BadValue(f"a config of type {type(config).__name__}: expected the object of a config.json")
        if "text_config" in config:  # a model for text and images: its text part
            outer, config = config, dict(_Keys(config, "config.json").table("text_config"))
            config.setdefault("tie_word_embeddings", outer.get("tie_word_embeddings", True))
            config.setdefault("eos_token_id", outer.get("eos_token_id"))
        family = config.get("model_type", "")
        if not isinstance(family, str) or family not in HF_FAMILIES:
            raise UnknownName(f"unknown model type {family!r}; supported are {', '.join(sorted(HF_FAMILIES))}")
        return HF_FAMILIES[family](_Keys(config, "config.json"))

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], *, tied: bool, rope_factors: Sequence[float] | None = None):
        """The model that GGUF metadata describes; `tied` when the file has no output matrix of its own.

        `rope_factors` are the divisors of the rotary frequencies that Llama 3 files carry as a tensor. Raises
        `UnknownName` for another architecture than the supported ones, and `BadValue` as `from_hf` does.
        """
        architecture = fields.get("general.architecture", "")
        if not isinstance(architecture, str) or architecture not in GGUF_FAMILIES:
            known = ", ".join(sorted(GGUF_FAMILIES))
            raise UnknownName(f"unknown GGUF architecture {architecture!r}; supported are {known}")
        return _from_gguf(_Keys(fields, "the GGUF metadata"), architecture, tied, rope_factors)


NEEDED = object()  # in place of a default: the key must be there


class _Keys:
    """A mapping whose missing keys and values of other types are errors that name them; null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def __call__(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise BadValue(f"{self.where} has no {key!r}: expected a complete model description")
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def _typed(self, key: str, hint: Any, default: Any) -> Any:
        value = self(key) if default is NEEDED else self.get(key, default)
        if not fits(value, hint):
            raise BadValue(f"{key} is {shown(value)}: expected {words(hint)}")
        return value

    def whole(self, key: str, default: Any = NEEDED) -> Any:
        """A whole number of at least 1."""
        value = self._typed(key, int if default is NEEDED else int | None, default)
        if value is not None and not 1 <= value <= MOST:
            raise BadValue(f"{key} is {shown(value)}: expected a whole number of at least 1, of 31 bits")
        return value

    def layers(self, key: str) -> int:
        """A number of layers, which lists of as many are made of."""
        count = self.whole(key)
        if count > MOST_LAYERS:
            raise BadValue(f"{key} is {count}: expected at most {MOST_LAYERS}; the file is damaged, get it again")
        return count

    def number(self, key: str, default: Any = NEEDED) -> Any:
        """A number that is not NaN."""
        value = self._typed(key, float if default is NEEDED else float | None, default)
        return None if value is None else float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        return self._typed(key, bool, default)

    def text(self, key: str, default: Any = NEEDED) -> str:
        """A word."""
        return self._typed(key, str, default)

    def table(self, key: str, default: Any = NEEDED) -> Mapping[str, Any]:
        """An object of its own."""
        return self._typed(key, Mapping, default)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: one, several or none."""
        return token_ids(self.values, key)


def token_ids(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The token ids that stand there: one, several or none. Raises `BadValue` for anything else."""
    value = values.get(key)
    found = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(fits(each, int) and 0 <= each <= MOST for each in found):
        raise BadValue(f"{key} is {shown(value)}: expected a token id or a list of them")
    return tuple(map(int, found))


ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def _hf(keys: _Keys, family: str, **changes: Any) -> ModelConfig:
    """What all families share; `changes` are the family's own."""
    heads, hidden = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    layers = keys.layers("num_hidden_layers")
    activation = keys.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise BadValue(f"hidden_act {activation!r}: supported are {', '.join(ACTIVATIONS)}")
    for key in ("attention_bias", "mlp_bias"):
        if keys.flag(key):
            raise BadValue(f"{key} is true: {family} models with it are not supported")
    if keys.get("quantization_config"):
        raise BadValue(
            "quantization_config: expected weights in floats, or a GGUF file; jaxkv.load(weights='int8') makes blocks"
        )
    facts = dict(
        family=family,
        vocab_size=keys.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.whole("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.whole("num_key_value_heads", heads),
        head_dim=keys.whole("head_dim", hidden // heads),
        max_position=keys.whole("max_position_embeddings"),
        rope=_hf_rope(keys, "full_attention", 10000.0),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        layer_types=("full",) * layers,
        tie_embeddings=keys.flag("tie_word_embeddings"),
        activation=ACTIVATIONS[activation],
        stop_tokens=keys.ids("eos_token_id"),
        bos_token=next(iter(keys.ids("bos_token_id")), None),
    )
    return ModelConfig(**{**facts, **changes})


def _hf_rope(keys: _Keys, layer_type: str, theta: float) -> Rope:
    """The rotary embedding: `rope_parameters` of transformers 5, else `rope_theta` and `rope_scaling`."""
    given, old = keys.table("rope_parameters", {}), keys.table("rope_scaling", {})
    numbers = _Keys(_Keys(given or old, "rope_parameters").table(layer_type, given or old), "the rope scaling")
    other = {key: value for key, value in old.items() if value != numbers.get({"type": "rope_type"}.get(key, key))}
    if given and other:
        raise BadValue(
            f"rope_scaling has {shown(other)}, which rope_parameters has not: expected one of the two, or alike ones"
        )
    return _rope_of(numbers, keys, theta)


def _rope_of(numbers: _Keys, keys: _Keys, theta: float) -> Rope:
    """The rotary embedding that a table of its numbers describes; what it leaves out stands in the config."""
    theta = numbers.number("rope_theta", keys.number("rope_theta", theta))
    partial = numbers.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise BadValue(f"partial_rotary_factor {partial}: only full rotary embeddings are supported")
    kind = numbers.text("rope_type", numbers.text("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind not in ("linear", "llama3"):
        raise BadValue(f"rope scaling {kind!r}: supported are default, linear and llama3")
    if kind == "linear":
        return Rope(theta, "linear", factor=numbers.number("factor"))
    return Rope(
        theta,
        "llama3",
        factor=numbers.number("factor"),
        low_freq_factor=numbers.number("low_freq_factor"),
        high_freq_factor=numbers.number("high_freq_factor"),
        original_max_position=numbers.whole("original_max_position_embeddings"),
    )


def _layer_types(keys: _Keys, sliding: Callable[[int], bool]) -> tuple[str, ...]:
    """The kind of every layer: as the config lists them, else by the family's rule."""
    listed = keys.get("layer_types")
    if listed is None:
        return tuple("sliding" if sliding(layer) else "full" for layer in range(keys.layers("num_hidden_layers")))
    if not isinstance(listed, list | tuple):
        raise BadValue(f"layer_types is {shown(listed)}: expected a list with the kind of every layer")
    known = {"full_attention": "full", "sliding_attention": "sliding"}
    strange = sorted({str(kind) for kind in listed} - known.keys())
    if strange:
        raise BadValue(f"layer_types has {shown(', '.join(strange))}: supported are {', '.join(known)}")
    return tuple(known[kind] for kind in listed)


def _hf_llama(keys: _Keys) -> ModelConfig:
    return _hf(keys, "llama")


def _hf_mistral(keys: _Keys) -> ModelConfig:
    given = keys.values.get("sliding_window", 4096)  # published configs without one say null
    window = keys.whole("sliding_window", 4096) if given else None
    kinds = ("sliding" if window else "full",) * keys.layers("num_hidden_layers")
    return _hf(keys, "mistral", sliding_window=window, layer_types=kinds)


def _hf_qwen(keys: _Keys, family: str, **changes: Any) -> ModelConfig:
    window = keys.whole("sliding_window") if keys.flag("use_sliding_window") else None
    first = keys.number("max_window_layers", 28)
    kinds = _layer_types(keys, lambda layer: window is not None and layer >= first)
    if window is None:
        kinds = ("full",) * len(kinds)
    return _hf(keys, family, sliding_window=window, layer_types=kinds, **changes)


def _hf_qwen2(keys: _Keys) -> ModelConfig:
    return _hf_qwen(keys, "qwen2", qkv_bias=True)


def _hf_qwen3(keys: _Keys) -> ModelConfig:
    return _hf_qwen(keys, "qwen3", qk_norm=True, head_dim=keys.whole("head_dim", 128))


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
    pattern = _Keys(given, keys.where).whole("sliding_window_pattern", given.get("_sliding_window_pattern", 6))
    facts = {**GEMMA3_DEFAULTS, **given}
    keys = _Keys({**facts, "hidden_act": facts["hidden_activation"]}, keys.where)
    if keys.flag("use_bidirectional_attention"):
        raise BadValue("use_bidirectional_attention is true: only causal models are supported")
    kinds = _layer_types(keys, lambda layer: (layer + 1) % pattern != 0)
    scalar = keys.number("query_pre_attn_scalar")
    if not scalar > 0:
        raise BadValue(f"query_pre_attn_scalar is {scalar}: expected a number above 0")
    return _hf(
        keys,
        "gemma3",
        layer_types=kinds,
        sliding_window=keys.whole("sliding_window"),
        local_rope=_local_rope(keys),
        attention_scale=scalar**-0.5,
        attention_softcap=keys.number("attn_logit_softcapping", None),
        logit_softcap=keys.number("final_logit_softcapping", None),
        embed_scale=float(keys.whole("hidden_size")) ** 0.5,
        qk_norm=True,
        post_norms=True,
    )


def _local_rope(keys: _Keys) -> Rope:
    """Sliding layers of Gemma 3 turn faster, and are scaled only where `rope_parameters` says so."""
    local = _Keys(keys.table("rope_parameters", {}), "rope_parameters").table("sliding_attention", {})
    own = _Keys({"rope_theta": keys.number("rope_local_base_freq")}, keys.where)
    return _rope_of(_Keys(local, "rope_parameters"), own, GEMMA3_DEFAULTS["rope_local_base_freq"])


HF_FAMILIES: dict[str, Callable[[_Keys], ModelConfig]] = {
    "llama": _hf_llama,
    "mistral": _hf_mistral,
    "qwen2": _hf_qwen2,
    "qwen3": _hf_qwen3,
    "gemma3_text": _hf_gemma3,
}

GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
GEMMA3_27B_LAYERS = 62  # the one size whose attention is scaled by hidden size / heads
GEMMA3_LOCAL_THETA, GEMMA3_PATTERN = 1e4, 6  # where the metadata does not say
ENDS = ("<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>")  # not every file names its own
FILLS = ("<|endoftext|>",)  # an end of text where the file pads with it, as Qwen's


def _from_gguf(keys: _Keys, architecture: str, tied: bool, factors: Sequence[float] | None) -> ModelConfig:
    def whole(name: str, default: Any = NEEDED) -> Any:
        return keys.whole(f"{architecture}.{name}", default)

    def number(name: str, default: Any = NEEDED) -> Any:
        return keys.number(f"{architecture}.{name}", default)

    family = GGUF_FAMILIES[architecture]
    hidden, heads = whole("embedding_length"), whole("attention.head_count")
    layers = keys.layers(f"{architecture}.block_count")
    head_dim = whole("attention.key_length", hidden // heads)
    turned = whole("rope.dimension_count", head_dim)
    if turned != head_dim or whole("attention.value_length", head_dim) != head_dim:
        raise BadValue(f"{turned} of {head_dim} head dims are rotary: only full rotary embeddings are supported")
    theta, factor = number("rope.freq_base", 10000.0), number("rope.scaling.factor", number("rope.scale_linear", 0.0))
    scaling = keys.text(f"{architecture}.rope.scaling.type", "none" if factor in (0.0, 1.0) else "linear")
    if scaling not in ("none", "linear"):
        raise BadValue(f"rope scaling {scaling!r}: supported in GGUF are none, linear and Llama 3's factors")
    rope = Rope(theta)
    if scaling == "linear":
        rope = Rope(theta, "linear", factor=factor or number("rope.scaling.factor"))
    if factors is not None:
        rope = Rope(theta, "factors", factors=tuple(float(each) for each in factors))
    window = keys.get(f"{architecture}.attention.sliding_window")  # 0 says that there is none
    window = whole("attention.sliding_window") if window else None
    facts: dict[str, Any] = dict(
        family=family,
        vocab_size=whole("vocab_size", None) or len(_listed(keys, "tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=whole("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=whole("context_length"),
        rope=rope,
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        layer_types=("sliding" if window else "full",) * layers,
        sliding_window=window,
        tie_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        stop_tokens=_gguf_stops(keys),
        bos_token=next(iter(keys.ids("tokenizer.ggml.bos_token_id")), None),
    )
    if family == "gemma3":
        scale = hidden / heads if layers == GEMMA3_27B_LAYERS else head_dim
        facts |= dict(
            layer_types=_gemma3_layers(keys.get("gemma3.attention.sliding_window_pattern", GEMMA3_PATTERN), layers),
            sliding_window=whole("attention.sliding_window"),
            local_rope=Rope(number("rope.freq_base_swa", GEMMA3_LOCAL_THETA)),
            attention_scale=scale**-0.5,
            attention_softcap=number("attn_logit_softcapping", None),
            logit_softcap=number("final_logit_softcapping", None),
            embed_scale=hidden**0.5,
            activation="gelu_tanh",
            post_norms=True,
        )
    return ModelConfig(**facts)


def _gemma3_layers(pattern: Any, layers: int) -> tuple[str, ...]:
    """The kind of every layer: one of `pattern` layers is full, or those that a list calls no sliding ones."""
    if fits(pattern, int) and pattern >= 1:
        slides = [(layer + 1) % pattern != 0 for layer in range(layers)]
    elif isinstance(pattern, list) and len(pattern) == layers:
        slides = list(map(bool, pattern))
    else:
        raise BadValue(
            f"gemma3.attention.sliding_window_pattern is {shown(pattern)}: expected a number of layers, or true or "
            f"false for each of {layers}"
        )
    return tuple("sliding" if slide else "full" for slide in slides)


def _gguf_stops(keys: _Keys) -> tuple[int, ...]:
    """End of text, of turn and of message: those that the metadata names, and those that the vocabulary spells so."""
    named = [keys.ids(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, fills = keys.get("tokenizer.ggml.tokens", []), keys.get("tokenizer.ggml.padding_token_id")
    tokens = tokens if isinstance(tokens, list) else []
    spelt = [index for index, token in enumerate(tokens) if token in ENDS or (token in FILLS and index == fills)]
    return tuple(dict.fromkeys([*(each for some in named for each in some), *spelt]))


def _listed(keys: _Keys, key: str) -> list[Any]:
    """A list that the metadata holds."""
    found = keys(key)
    if not isinstance(found, list):
        raise BadValue(f"{key} is {shown(found)}: expected a list")
    return found
