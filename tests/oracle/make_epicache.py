"""EpiCache as released: what a prompt in blocks leaves, when given tokens look at each block.

    python tests/oracle/make_epicache.py PATH/TO/ml-epicache

PATH is a checkout of https://github.com/apple/ml-epicache (commit b742661). Its cache and scores (`attention/`) run
unchanged beside the tiny llama2, called block by block as its `model/wrapper.py` does (`prefill_memory_constrained`),
with heads that compete and with equal ones (its levels "pair" and "pair-uniform"). What it would import and not use is
stood in for: the flat kernel, and transformers' caches by the lists that they were. The tokens that look stand right
behind the block; in the release the first of them stands on the block's last position (line 242 of the wrapper). Layer
budgets are those of the wrapper's `allocate_layer_budget` from made-up similarities.
"""

import sys
import types

import numpy as np
import torch
from common import GOLDENS, save
from llama import Llama, Seen
from released import NOISE, TRIES, drawn, model, places, released, same, stand_in, under

CASES = {  # tokens, of a block, budget, whether heads compete
    "p60-c20-b16": (60, 20, 16, "pair-uniform"),
    "p90-c30-b24": (90, 30, 24, "pair-uniform"),
    "pair/p60-c20-b16": (60, 20, 16, "pair"),
    "pair/p90-c30-b24": (90, 30, 24, "pair"),
}
LAYERS, POWER, MEAN = 32, 1.1, 1000  # of the layer budgets
LOOKING = 8


class Lists:
    """The lists that transformers' DynamicCache was when EpiCache was released."""

    def __init__(self):
        self.key_cache, self.value_cache, self._seen_tokens = [], [], 0


def run(release, tiny: Llama, ids: torch.Tensor, case: tuple, turn: int | None) -> dict[str, np.ndarray]:
    """What is kept of all but the last tokens, which look; with a turn, their queries with noise."""
    length, block, budget, level = case
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
        out, group = [], tiny.heads // tiny.kv_heads
        for head, (k, v) in enumerate(zip(heads(cache, layer, keys), heads(cache, layer, values), strict=True)):
            own, all_of = query.shape[2], len(k)
            later = torch.arange(all_of)[None] > torch.arange(all_of - own, all_of)[:, None]
            weights = seen.query[head * group : (head + 1) * group] @ k.T / tiny.dim**0.5
            out.append(weights.masked_fill(later, float("-inf")).softmax(-1) @ v)
        return torch.cat(out)

    def heads(cache, layer: int, x: torch.Tensor) -> list[torch.Tensor]:
        """What each KV head holds, of a flat layer or one of equal heads."""
        flat = x.reshape(-1, tiny.dim)
        even = [len(flat) // tiny.kv_heads] * tiny.kv_heads
        return list(flat.split(cache.info["len_k"][layer].tolist() if cache.evicted else even))

    for start in range(0, length, block):
        stop = min(start + block, length)
        cache.get_score = False
        tiny(ids[start:stop], torch.arange(start, stop), attend)
        cache.init_score()
        before = cache._seen_tokens
        tiny(ids[length:], torch.arange(stop, stop + LOOKING), attend)
        cache.slice_flattened(LOOKING, before)
        cache.evict_flattened(level)
    out = {}
    for layer, keys in enumerate(cache.key_cache):
        each = heads(cache, layer, keys)
        kept = [places(k[None], given[layer][head : head + 1])[0] for head, k in enumerate(each)]
        most = max(map(len, kept))
        out[f"layer{layer}/kept"] = np.stack([np.pad(row, (0, most - len(row)), constant_values=-1) for row in kept])
    return out


def layer_budgets() -> dict[str, np.ndarray]:
    """What the release gives its layers, from similarities of a fixed seed."""
    wrapper = released(sys.argv[1], "model.wrapper").LongConvQAModel
    alike = np.random.default_rng(0).random(LAYERS).astype(np.float32)
    given = wrapper.allocate_layer_budget(
        types.SimpleNamespace(device="cpu"), {"combined_scores": alike.tolist()}, MEAN, power=POWER
    )
    return {"similarity": alike, "budgets": given.numpy().astype(np.int32)}


def main() -> None:
    found = sys.modules["transformers"]  # as it stands once others have imported from it
    found.DynamicCache, found.HybridCache = Lists, object
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
    save(GOLDENS / "policies" / "epicache.npz", {**arrays, **under("layers", layer_budgets())})


if __name__ == "__main__":
    main()
