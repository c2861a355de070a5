"""Q-Filters as released: prompt and steps.

    python tests/oracle/make_qfilters.py PATH/TO/qfilters

PATH is a checkout of https://github.com/NathanGodey/qfilters (commit cda5c38). Its cache runs unchanged beside a plain
decode of the tiny llama2, which attends to what it gives back while decoding (the prompt attends to all of itself).
The filters are made up (`tests/measured.py`) and point away from the queries, as its own do; they stand in for those
that it would download, and transformers' `Cache` for nothing: only the name is used.
"""

import sys
import types
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))  # tests/measured.py

import transformers.cache_utils
from common import GOLDENS, save
from llama import Llama, Seen, causal_attention
from measured import measured
from released import NOISE, clear_steps, model, places, released, stand_in, stepped

CASES = {"p20-b16-w4": (20, 16, 4), "p60-b24-w8": (60, 24, 8)}  # tokens, most that is held, newest that stay


def run(cache, tiny: Llama, ids: torch.Tensor, budget: int, window: int, turn: int | None) -> dict[str, np.ndarray]:
    """Greedy tokens, and what is held after the prompt and after every step; with a turn, filters with noise."""
    cache = cache(max_length=budget, window_length=window, model_name="made-up")
    generator, group = torch.Generator().manual_seed(turn or 0), tiny.heads // tiny.kv_heads
    if turn is not None:
        cache.q_filters = cache.q_filters * (1 + NOISE * torch.randn(cache.q_filters.shape, generator=generator))
    given = [torch.zeros(tiny.kv_heads, 0, tiny.dim)] * tiny.layers  # every key so far
    held = np.zeros((tiny.layers, tiny.kv_heads, budget), np.int16)

    def attend(layer: int, seen: Seen) -> torch.Tensor:
        given[layer] = torch.cat([given[layer], seen.key], 1)
        keys, values = cache.update(seen.key[None], seen.value[None], layer)
        held[layer] = places(keys[0], given[layer])
        if seen.query.shape[1] > 1:
            return causal_attention(seen.query, seen.key) @ seen.value.repeat_interleave(group, 0)
        keys, values = (x[0].repeat_interleave(group, 0) for x in (keys, values))
        return (seen.query @ keys.transpose(1, 2) / tiny.dim**0.5).softmax(-1) @ values

    held, tokens = stepped(tiny, ids, attend, held.copy)
    return {"held": held, "tokens": tokens}


def main() -> None:
    tiny, arrays = model(), {}
    found = measured(tiny.layers, tiny.heads, tiny.kv_heads, tiny.dim)
    filters = types.SimpleNamespace(q_filters=-torch.from_numpy(found["query_direction"]))
    stand_in("src.utils", QFilters=types.SimpleNamespace(from_pretrained=lambda _: filters))
    transformers.cache_utils.Cache = object
    cache = released(sys.argv[1], "src.hf_cache").QFiltersCache
    for name, (length, budget, window) in CASES.items():
        arrays |= clear_steps(
            name, length, lambda ids, turn, budget=budget, window=window: run(cache, tiny, ids, budget, window, turn)
        )
    save(GOLDENS / "policies" / "qfilters.npz", arrays)


if __name__ == "__main__":
    main()
