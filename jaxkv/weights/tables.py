"""Which tensor of a file goes where: one table per family for Hugging Face names, and one for GGUF names.

A table maps a name with `{layer}` to a target: `path#part`, where the parts of one path are joined along their outputs
in the order of `shapes`. `changes` are done to a tensor before that.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jaxkv.models import ModelConfig

Change = Callable[[ModelConfig, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Table:
    """Names to targets, changes per target, and names that carry nothing for us."""

    names: Mapping[str, str]
    changes: Mapping[str, Change] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def find(self, name: str) -> tuple[str, int | None] | None:
        """The target of a tensor and its layer, or None."""
        for pattern, target in self.names.items():
            match = re.fullmatch(re.escape(pattern).replace(r"\{layer\}", r"(\d{1,9})"), name)
            if match:
                return target, int(match[1]) if match.groups() else None
        return None

    def ignores(self, name: str) -> bool:
        """Whether a tensor is known to carry nothing for us."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def name_of(self, target: str, layer: int | None) -> str:
        """What the file should call a target's tensor."""
        return next(name for name, goal in self.names.items() if goal == target).replace("{layer}", str(layer))


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every target's tensor in files: `[out, in]`, `[V, M]` or `[size]`."""
    width, inner, dims = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dims, config.num_kv_heads * dims
    found: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, width),
        "norm": (width,),
        "attention_norm": (width,),
        "qkv#q": (queries, width),
        "qkv#k": (keys, width),
        "qkv#v": (keys, width),
        "out": (width, queries),
        "mlp_norm": (width,),
        "gate_up#gate": (inner, width),
        "gate_up#up": (inner, width),
        "down": (width, inner),
    }
    if not config.tie_embeddings:
        found["head"] = (config.vocab_size, width)
    if config.qkv_bias:
        found |= {"qkv_bias#q": (queries,), "qkv_bias#k": (keys,), "qkv_bias#v": (keys,)}
    if config.qk_norm:
        found |= {"q_norm": (dims,), "k_norm": (dims,)}
    if config.post_norms:
        found |= {"post_attention_norm": (width,), "post_mlp_norm": (width,)}
    return found


OUTSIDE_LAYERS = ("embed", "norm", "head")


def wanted(config: ModelConfig) -> Iterable[tuple[str, int | None]]:
    """Every target and its layer that the model needs."""
    for target in shapes(config):
        if target in OUTSIDE_LAYERS:
            yield target, None
        else:
            yield from ((target, layer) for layer in range(config.num_layers))


def _plus_one(config: ModelConfig, weight: np.ndarray) -> np.ndarray:
    """Gemma's files hold a norm's weight less one."""
    return weight.astype(np.float32) + np.float32(1)


def _halves(heads: str) -> Change:
    """Llama's GGUF interleaves the two halves that RoPE turns together: put them back one after the other."""

    def change(config: ModelConfig, weight: np.ndarray) -> np.ndarray:
        count = getattr(config, heads)
        pairs = weight.reshape(count, config.head_dim // 2, 2, *weight.shape[1:])
        return np.swapaxes(pairs, 1, 2).reshape(weight.shape)

    return change


_LAYER = "model.layers.{layer}."
_LLAMA = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "norm",
    "lm_head.weight": "head",
    _LAYER + "input_layernorm.weight": "attention_norm",
    _LAYER + "self_attn.q_proj.weight": "qkv#q",
    _LAYER + "self_attn.k_proj.weight": "qkv#k",
    _LAYER + "self_attn.v_proj.weight": "qkv#v",
    _LAYER + "self_attn.o_proj.weight": "out",
    _LAYER + "post_attention_layernorm.weight": "mlp_norm",
    _LAYER + "mlp.gate_proj.weight": "gate_up#gate",
    _LAYER + "mlp.up_proj.weight": "gate_up#up",
    _LAYER + "mlp.down_proj.weight": "down",
}
_BIASES = {_LAYER + f"self_attn.{part}_proj.bias": f"qkv_bias#{part}" for part in "qkv"}
_QK_NORMS = {_LAYER + f"self_attn.{part}_norm.weight": f"{part}_norm" for part in "qk"}
_GEMMA3 = {name: target for name, target in _LLAMA.items() if target != "mlp_norm"} | {
    _LAYER + "post_attention_layernorm.weight": "post_attention_norm",
    _LAYER + "pre_feedforward_layernorm.weight": "mlp_norm",
    _LAYER + "post_feedforward_layernorm.weight": "post_mlp_norm",
}
_NORMS = ("norm", "attention_norm", "mlp_norm", "q_norm", "k_norm", "post_attention_norm", "post_mlp_norm")
_BUFFERS = (r"rotary_emb\.inv_freq$",)

HF = {
    "llama": Table(_LLAMA, ignored=_BUFFERS),
    "mistral": Table(_LLAMA, ignored=_BUFFERS),
    "qwen2": Table(_LLAMA | _BIASES, ignored=_BUFFERS),
    "qwen3": Table(_LLAMA | _QK_NORMS, ignored=_BUFFERS),
    "gemma3": Table(
        _GEMMA3 | _QK_NORMS,
        changes=dict.fromkeys(_NORMS, _plus_one),
        ignored=(*_BUFFERS, r"(^|\.)vision_tower\.", r"(^|\.)multi_modal_projector\."),
    ),
}

_BLOCK = "blk.{layer}."
_GGUF = {
    "token_embd.weight": "embed",
    "output_norm.weight": "norm",
    "output.weight": "head",
    _BLOCK + "attn_norm.weight": "attention_norm",
    _BLOCK + "attn_q.weight": "qkv#q",
    _BLOCK + "attn_k.weight": "qkv#k",
    _BLOCK + "attn_v.weight": "qkv#v",
    _BLOCK + "attn_q.bias": "qkv_bias#q",
    _BLOCK + "attn_k.bias": "qkv_bias#k",
    _BLOCK + "attn_v.bias": "qkv_bias#v",
    _BLOCK + "attn_q_norm.weight": "q_norm",
    _BLOCK + "attn_k_norm.weight": "k_norm",
    _BLOCK + "attn_output.weight": "out",
    _BLOCK + "post_attention_norm.weight": "post_attention_norm",
    _BLOCK + "ffn_norm.weight": "mlp_norm",
    _BLOCK + "ffn_gate.weight": "gate_up#gate",
    _BLOCK + "ffn_up.weight": "gate_up#up",
    _BLOCK + "ffn_down.weight": "down",
    _BLOCK + "post_ffw_norm.weight": "post_mlp_norm",
}
_PERMUTED = {"qkv#q": _halves("num_heads"), "qkv#k": _halves("num_kv_heads")}
_ROPE = (r"^rope_freqs\.weight$",)  # read with the config

GGUF = {  # GGUF holds Gemma's norms with the one already added
    "llama": Table(_GGUF, changes=_PERMUTED, ignored=_ROPE),
    "qwen2": Table(_GGUF, ignored=_ROPE),
    "qwen3": Table(_GGUF, ignored=_ROPE),
    "gemma3": Table(_GGUF, ignored=_ROPE),
}
