"""What the oracle scripts share: where goldens go, how they are written, greedy decoding with its
margins, and what the attention of a tiny model sees."""

import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils import logging

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a compressed npz after checking that every float array is finite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            raise ValueError(f"{path.name}: {name} has values that are not finite")
    np.savez_compressed(path, **arrays)
    print(f"{path.relative_to(GOLDENS)}: {len(arrays)} arrays, {path.stat().st_size / 1e3:.0f} kB")


def save_json(path: Path, content) -> None:
    """Write readable JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{path.relative_to(GOLDENS)}: {path.stat().st_size / 1e3:.0f} kB")


def greedy(model, ids: torch.Tensor, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """`generate` without sampling or stop tokens from ids [B, T]: tokens int32 and top-2 logit gaps, [B, steps]."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[:, ids.shape[1] :]
    top = torch.stack(out.logits, dim=1).float().topk(2, dim=-1)
    assert tokens.shape[1] == steps and torch.equal(top.indices[..., 0], tokens)
    return tokens.numpy().astype(np.int32), (top.values[..., 0] - top.values[..., 1]).numpy()


@dataclass
class Layer:
    """What a layer's attention saw of a prompt: its input, RoPE's cosines and sines, and its cache. B = 1."""

    module: torch.nn.Module
    hidden: torch.Tensor  # [1, S, M]
    rotation: tuple[torch.Tensor, torch.Tensor]
    keys: torch.Tensor  # [1, Hk, S, D], turned
    values: torch.Tensor


def sharpened(family: str, sharp: float):
    """A tiny model whose attention norms' weights are `sharp` times as large: its logits are sharp^2 times as far
    apart, as real attention is far less even than that of random weights."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(GOLDENS / "tiny" / family, dtype=torch.float32).eval()
    for layer in model.model.layers:
        layer.input_layernorm.weight.data *= sharp
    return model


def attended(model, ids: torch.Tensor) -> list[Layer]:
    """One prefill by transformers, layer by layer."""
    seen = {}

    def watch(module, args, kwargs):
        seen[module.layer_idx] = kwargs["hidden_states"], kwargs["position_embeddings"]

    hooks = [layer.self_attn.register_forward_pre_hook(watch, with_kwargs=True) for layer in model.model.layers]
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    return [
        Layer(layer.self_attn, *seen[index], cache.layers[index].keys, cache.layers[index].values)
        for index, layer in enumerate(model.model.layers)
    ]


def queries(layer: Layer, last: int = 0) -> torch.Tensor:
    """The queries of the `last` tokens (0: all) [1, Hq, T, D], turned."""
    hidden, rotation = layer.hidden[:, -last:], [x[:, -last:] for x in layer.rotation]
    query = layer.module.q_proj(hidden).view(1, hidden.shape[1], -1, layer.module.head_dim).transpose(1, 2)
    return apply_rotary_pos_emb(query, query, *rotation)[0].detach()


def bare(name: str, checkout: str) -> None:
    """Makes the package `name` of a checkout importable without its `__init__.py` and what that wants."""
    package = types.ModuleType(name)
    package.__path__ = [str(Path(checkout).joinpath(*name.split(".")))]
    sys.modules[name] = package


def margin(scores: np.ndarray, kept: np.ndarray) -> float:
    """The lowest score that is kept less the highest that is not, relative to the larger of them."""
    low, high = scores[kept].min(), scores[~kept].max()
    return float((low - high) / max(abs(low), abs(high), 1e-30))


def choose_ids(
    cases, need: float, length: int = 120, vocabulary: int = 160, again: bool = False
) -> dict[str, np.ndarray]:
    """`ids` [1, length], none twice unless `again`, of the first seed whose `cases(ids)`, arrays and their smallest
    margin, leave a margin of `need`; and those arrays."""
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        ids = 3 + torch.randperm(vocabulary - 3, generator=generator)[None, :length]
        if again:
            ids = torch.randint(3, vocabulary, (1, length), generator=generator)
        arrays, smallest = cases(ids)
        if smallest >= need:
            print(f"seed {seed}: smallest margin {smallest:.1e}")
            return {"ids": ids.numpy().astype(np.int32)} | arrays
    raise SystemExit("no seed without near ties")
