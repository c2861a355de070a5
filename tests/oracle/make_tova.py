"""TOVA as released: prompt and steps.

    python tests/oracle/make_tova.py PATH/TO/TOVA

PATH is a checkout of https://github.com/schwartz-lab-NLP/TOVA (commit 9c7d09b). Its cache runs unchanged beside a plain
decode of the tiny llama2, called behind each attention with the weights, as its `llama_custom.py` does. transformers'
`DynamicCache`, on whose older lists it builds, is stood in for by those lists.
"""

import sys

import numpy as np
import torch
import transformers.cache_utils
from common import GOLDENS, save
from llama import Llama, Seen, causal_attention
from released import NOISE, clear_steps, model, places, released, stepped

CASES = {"p20-b16": (20, 16), "p60-b24": (60, 24)}  # tokens, budget while a step attends


class Lists:
    """The lists that transformers' DynamicCache was when TOVA was released."""

    def __init__(self):
        self.key_cache, self.value_cache = [], []


def run(cache, tiny: Llama, ids: torch.Tensor, budget: int, turn: int | None) -> dict[str, np.ndarray]:
    """Greedy tokens, and what is kept after the prompt and after every step; with a turn, under noise."""
    cache, group = cache(cache_size=budget - 1), tiny.heads // tiny.kv_heads
    generator = torch.Generator().manual_seed(turn or 0)
    given = [torch.zeros(tiny.kv_heads, 0, tiny.dim)] * tiny.layers  # every key so far

    def attend(layer: int, seen: Seen) -> torch.Tensor:
        given[layer] = torch.cat([given[layer], seen.key], 1)
        if seen.query.shape[1] > 1:
            cache.key_cache.append(seen.key[None])
            cache.value_cache.append(seen.value[None])
            weights = causal_attention(seen.query, seen.key)
        else:
            cache.key_cache[layer] = torch.cat([cache.key_cache[layer], seen.key[None]], 2)
            cache.value_cache[layer] = torch.cat([cache.value_cache[layer], seen.value[None]], 2)
            keys = cache.key_cache[layer][0].repeat_interleave(group, 0)
            weights = (seen.query @ keys.transpose(1, 2) / tiny.dim**0.5).softmax(-1)
        context = weights @ cache.value_cache[layer][0].repeat_interleave(group, 0)
        noise = 1 + NOISE * torch.randn(weights.shape, generator=generator) if turn is not None else 1
        cache.reduce(layer, (weights * noise)[None])
        return context

    kept, tokens = stepped(
        tiny,
        ids,
        attend,
        lambda: np.stack([places(keys[0], own) for keys, own in zip(cache.key_cache, given, strict=True)]),
        few=7,
    )
    return {"kept": kept, "tokens": tokens}


def main() -> None:
    transformers.cache_utils.DynamicCache = Lists
    cache = released(f"{sys.argv[1]}/src", "tova_cache").TOVACache
    tiny, arrays = model(), {}
    for name, (length, budget) in CASES.items():
        arrays |= clear_steps(name, length, lambda ids, turn, budget=budget: run(cache, tiny, ids, budget, turn))
    save(GOLDENS / "policies" / "tova_released.npz", arrays)


if __name__ == "__main__":
    main()
