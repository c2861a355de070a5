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
from released import NOISE, TRIES, Unclear, drawn, model, places, released, same, stand_in, under

CASES = {"p20-b16-w4": (20, 16, 4), "p60-b24-w8": (60, 24, 8)}  # tokens, most that is held, newest that stay
STEPS, GAP = 24, 3e-3


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

    positions, tokens, chosen, every = torch.arange(len(ids)), ids, [], []
    for step in range(STEPS + 1):
        logits, _ = tiny(tokens, positions, attend)
        every.append(held.copy())
        best = logits[-1].topk(2)
        if best.values[0] - best.values[1] < GAP:
            raise Unclear("token")
        chosen.append(int(best.indices[0]))
        tokens, positions = best.indices[:1], torch.tensor([len(ids) + step])
    return {"held": np.stack(every), "tokens": np.array(chosen, np.int32)}


def main() -> None:
    tiny, arrays = model(), {}
    found = measured(tiny.layers, tiny.heads, tiny.kv_heads, tiny.dim)
    filters = types.SimpleNamespace(q_filters=-torch.from_numpy(found["query_direction"]))
    stand_in("src.utils", QFilters=types.SimpleNamespace(from_pretrained=lambda _: filters))
    transformers.cache_utils.Cache = object
    cache = released(sys.argv[1], "src.hf_cache").QFiltersCache
    for name, (length, budget, window) in CASES.items():
        for seed in range(2000):
            ids = drawn(length, seed)
            try:
                found = run(cache, tiny, ids, budget, window, None)
                if all(same(found, run(cache, tiny, ids, budget, window, turn)) for turn in range(TRIES)):
                    print(f"{name}: seed {seed}, distinct tokens {len(set(found['tokens']))}")
                    break
            except Unclear:
                continue
        else:
            raise SystemExit(f"{name}: no prompt that is clear")
        arrays |= under(name, {"ids": ids.numpy().astype(np.int32), **found})
    save(GOLDENS / "policies" / "qfilters.npz", arrays)


if __name__ == "__main__":
    main()
