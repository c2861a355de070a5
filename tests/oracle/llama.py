"""A tiny Llama in plain torch, written from its formulas, that shows queries, keys and values of every layer."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file


@dataclass
class Seen:
    """One layer: query [Hq, T, D] and key [Hk, T, D] after RoPE, value [Hk, T, D]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def causal_attention(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Attention weights [Hq, T, T]."""
    key = key.repeat_interleave(len(query) // len(key), 0)
    logits = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
    later = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
    return logits.masked_fill(later, float("-inf")).softmax(-1)


class Llama:
    """Reads a Hugging Face folder (untied, no RoPE scaling)."""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_scaling"] is None and not config["tie_word_embeddings"]
        self.weights = load_file(folder / "model.safetensors")
        self.layers, self.eps, self.theta = config["num_hidden_layers"], config["rms_norm_eps"], config["rope_theta"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config["hidden_size"] // self.heads

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[name]

    def rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [H, T, D] turned by its positions [T]: halves (a, b) -> (a cos - b sin, b cos + a sin)."""
        half = self.dim // 2
        angle = positions[:, None].float() * self.theta ** (-torch.arange(half).float() / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """The stream [T, hidden] that the first layer gets."""
        return self.weights["model.embed_tokens.weight"][ids]

    def layer(self, layer: int, x: torch.Tensor, positions: torch.Tensor, attend) -> tuple[torch.Tensor, Seen]:
        """The stream after one layer."""
        at = f"model.layers.{layer}."
        h = self.norm(x, at + "input_layernorm.weight")

        def split(name: str) -> torch.Tensor:
            out = h @ self.weights[f"{at}self_attn.{name}_proj.weight"].T
            return out.view(len(h), -1, self.dim).transpose(0, 1)

        seen = Seen(self.rope(split("q"), positions), self.rope(split("k"), positions), split("v"))
        context = attend(layer, seen).transpose(0, 1).reshape(len(x), -1)
        x = x + context @ self.weights[at + "self_attn.o_proj.weight"].T
        h = self.norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ self.weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (torch.nn.functional.silu(gate) * up) @ self.weights[at + "mlp.down_proj.weight"].T, seen

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of the last layer's stream."""
        return self.norm(x, "model.norm.weight") @ self.weights["lm_head.weight"].T

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, attend) -> tuple[torch.Tensor, list[Seen]]:
        """Logits [T, V]; `attend(layer, seen)` gives the context [Hq, T, D]."""
        x, every = self.embedded(ids), []
        for layer in range(self.layers):
            x, seen = self.layer(layer, x, positions, attend)
            every.append(seen)
        return self.logits(x), every

    def causal(self, layer: int, seen: Seen) -> torch.Tensor:
        """The context [Hq, T, D] of a prompt's plain attention."""
        return causal_attention(seen.query, seen.key) @ seen.value.repeat_interleave(self.heads // self.kv_heads, 0)

    def prompt(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[Seen]]:
        """A whole prompt, causally."""
        return self(ids, torch.arange(len(ids)), self.causal)
