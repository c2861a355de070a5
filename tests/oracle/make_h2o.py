"""H2O as released: prompt and steps.

    python tests/oracle/make_h2o.py PATH/TO/H2O

PATH is a checkout of https://github.com/FMInference/H2O (commit ac75c2a). Its cache (`H2OKVCache_LayerWise` of
`h2o_hf/utils_real_drop/modify_llama.py`) runs unchanged beside a plain decode of the tiny llama2, called as its
attention calls it: with the keys and values so far and the weights that they got. It knows no groups, so every query
head has a copy of its KV head.
"""

import sys

import numpy as np
import torch
from common import GOLDENS, save
from llama import Llama, Seen, causal_attention
from released import NOISE, clear_steps, model, places, released, stepped

CASES = {"p20-b16": (20, 16), "p60-b24": (60, 24), "p12-b16": (12, 16)}  # tokens, budget while a step attends


def apart(tiny: Llama) -> Llama:
    """The same model with a KV head for every query head."""
    for name, weight in tiny.weights.items():
        if "k_proj" in name or "v_proj" in name:
            heads = weight.view(tiny.kv_heads, tiny.dim, -1).repeat_interleave(tiny.heads // tiny.kv_heads, 0)
            tiny.weights[name] = heads.reshape(-1, weight.shape[1])
    tiny.kv_heads = tiny.heads
    return tiny


def run(cache, tiny: Llama, ids: torch.Tensor, budget: int, turn: int | None) -> dict[str, np.ndarray]:
    """Greedy tokens, and what is kept after the prompt and after every step; with a turn, under noise."""
    recent = budget // 2
    caches = [cache(hh_size=budget - 1 - recent, recent_size=recent) for _ in range(tiny.layers)]
    generator = torch.Generator().manual_seed(turn or 0)
    held: list = [None] * tiny.layers
    given = [torch.zeros(tiny.heads, 0, tiny.dim)] * tiny.layers  # every key so far

    def attend(layer: int, seen: Seen) -> torch.Tensor:
        given[layer] = torch.cat([given[layer], seen.key], 1)
        keys, values = seen.key[None], seen.value[None]
        if held[layer] is not None:
            keys, values = (torch.cat([old, new], 2) for old, new in zip(held[layer], (keys, values), strict=True))
        if seen.query.shape[1] > 1:
            weights = causal_attention(seen.query, keys[0])
        else:
            weights = (seen.query @ keys[0].transpose(1, 2) / tiny.dim**0.5).softmax(-1)
        noise = 1 + NOISE * torch.randn(weights.shape, generator=generator) if turn is not None else 1
        held[layer] = caches[layer]((keys, values), (weights * noise)[None])
        return weights @ values[0]

    def kept() -> np.ndarray:
        rows = np.full((tiny.layers, tiny.heads, budget - 1), -1, np.int16)
        for row, (keys, _), own in zip(rows, held, given, strict=True):
            found = places(keys[0], own)
            row[:, : found.shape[1]] = found
        return rows

    every, tokens = stepped(tiny, ids, attend, kept, few=7)
    return {"kept": every, "tokens": tokens}


def main() -> None:
    cache = released(f"{sys.argv[1]}/h2o_hf/utils_real_drop", "modify_llama").H2OKVCache_LayerWise
    tiny, arrays = apart(model()), {}
    for name, (length, budget) in CASES.items():
        arrays |= clear_steps(name, length, lambda ids, turn, budget=budget: run(cache, tiny, ids, budget, turn))
    save(GOLDENS / "policies" / "h2o_released.npz", arrays)


if __name__ == "__main__":
    main()
