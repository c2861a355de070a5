"""EpiCache as released: what a prompt in blocks leaves, when given tokens look at each block.

    python tests/oracle/make_epicache.py PATH/TO/ml-epicache

PATH is a checkout of https://github.com/apple/ml-epicache (commit b742661). Its cache and scores (`attention/`) run
unchanged beside the tiny llama2, called block by block as its `model/wrapper.py` does (`prefill_memory_constrained`),
with equal heads (its level "pair-uniform"). What it would import and not use is stood in for: the flat kernel, and
transformers' caches by the lists that they were. The tokens that look stand right behind the block; in the release the
first of them stands on the block's last position (line 242 of the wrapper).
"""

import sys
import types

import numpy as np
import torch
import transformers
from common import GOLDENS, save
from llama import Llama, Seen
from released import NOISE, TRIES, drawn, model, places, released, same, stand_in, under

CASES = {"p60-c20-b16": (60, 20, 16), "p90-c30-b24": (90, 30, 24)}  # tokens, of a block, budget
LOOKING = 8


class Lists:
    """The lists that transformers' DynamicCache was when EpiCache was released."""

    def __init__(self):
        self.key_cache, self.value_cache, self._seen_tokens = [], [], 0


def run(release, tiny: Llama, ids: torch.Tensor, case: tuple, turn: int | None) -> dict[str, np.ndarray]:
    """What is kept of all but the last tokens, which look; with a turn, their queries with noise."""
    length, block, budget = case
    generator = torch.Generator().manual_seed(turn or 0)
    config = types.SimpleNamespace(
        num_hidden_layers=tiny.layers, num_attention_heads=tiny.heads, num_key_value_heads=tiny.kv_heads
    )
    cache = release(
        types.SimpleNamespace(parameters=lambda: iter([torch.zeros(1)]), config=config), (0, length), budget
    )
    cache.prefill_mode = True
    given = [torch.zeros(tiny.kv_heads, 0, tiny.dim)] * tiny.layers  # the keys of every token so far

    def attend(layer: int, seen: Seen) -> torch.Tensor:
        query, key, value = (x[None].contiguous() for x in (seen.query, seen.key, seen.value))
        if not cache.get_score:
            given[layer] = torch.cat([given[layer], seen.key], 1)
        keys, values = cache.update(key, value, layer)
        if cache.get_score:
            noise = 1 + NOISE * torch.randn(query.shape, generator=generator) if turn is not None else 1
            cache._get_score_flatten(query * noise, keys, layer)
        if cache.evicted:
            cache.prepare(query, keys, values, layer, prefill_mode=True)
        group = tiny.heads // tiny.kv_heads
        keys, values = (x.reshape(tiny.kv_heads, -1, tiny.dim).repeat_interleave(group, 0) for x in (keys, values))
        own, all_of = query.shape[2], keys.shape[1]
        later = torch.arange(all_of)[None] > torch.arange(all_of - own, all_of)[:, None]
        weights = seen.query @ keys.transpose(1, 2) / tiny.dim**0.5
        return weights.masked_fill(later, float("-inf")).softmax(-1) @ values

    for start in range(0, length, block):
        stop = min(start + block, length)
        cache.get_score = False
        tiny(ids[start:stop], torch.arange(start, stop), attend)
        cache.init_score()
        before = cache._seen_tokens
        tiny(ids[length:], torch.arange(stop, stop + LOOKING), attend)
        cache.slice_flattened(LOOKING, before)
        cache.evict_flattened("pair-uniform")
    held = (keys.view(tiny.kv_heads, -1, tiny.dim) for keys in cache.key_cache)
    return {f"layer{layer}/kept": places(keys, given[layer]) for layer, keys in enumerate(held)}


def main() -> None:
    transformers.DynamicCache, transformers.HybridCache = Lists, object
    stand_in("tiny_api_cuda", update_flatten_view=None)
    release, tiny, arrays = released(sys.argv[1], "attention.kvcache").EvictCache, model(), {}
    for name, case in CASES.items():
        for seed in range(2000):
            ids = drawn(case[0] + LOOKING, seed)
            found = run(release, tiny, ids, case, None)
            if all(same(found, run(release, tiny, ids, case, turn)) for turn in range(TRIES)):
                print(f"{name}: seed {seed}")
                break
        else:
            raise SystemExit(f"{name}: no prompt that is clear")
        prompt, looking = (x.numpy().astype(np.int32) for x in (ids[: case[0]], ids[case[0] :]))
        arrays |= under(name, {"ids": prompt, "looking": looking, **found})
    save(GOLDENS / "policies" / "epicache.npz", arrays)


if __name__ == "__main__":
    main()
