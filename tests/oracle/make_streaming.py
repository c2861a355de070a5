"""StreamingLLM as released: prompt and steps.

    python tests/oracle/make_streaming.py PATH/TO/streaming-llm

PATH is a checkout of https://github.com/mit-han-lab/streaming-llm (commit 2e50426). Its cache runs unchanged beside a
plain decode of the tiny llama2, called before each token as its `run_streaming_llama.py` does. Keys are cached before
RoPE and turned to their places in the cache, as its `pos_shift` has it. Nothing is scored, so only tokens can be near.
"""

import sys

import numpy as np
import torch
from common import GOLDENS, save
from llama import Llama, Seen
from released import Unclear, drawn, model, released, under

CASES = {"p20-b16": (20, 16), "p60-b24": (60, 24)}  # tokens, budget while a step attends
SINKS, STEPS, GAP = 4, 24, 3e-3


def run(cache, tiny: Llama, ids: torch.Tensor, budget: int) -> dict[str, np.ndarray]:
    """Greedy tokens, and what each step attends to."""
    cache, past = cache(start_size=SINKS, recent_size=budget - SINKS), None

    def attend(layer: int, seen: Seen) -> torch.Tensor:
        old = past[layer] if past is not None else (seen.key[None, :, :0], seen.value[None, :, :0])
        keys, values = (torch.cat(pair, 2) for pair in zip(old, (seen.key[None], seen.value[None]), strict=True))
        now[layer] = [keys, values]
        at = torch.arange(keys.shape[2])
        key = tiny.rope(keys[0], at).repeat_interleave(tiny.heads // tiny.kv_heads, 0)
        query = tiny.rope(seen.query, at[-seen.query.shape[1] :])
        later = at[None] > at[-seen.query.shape[1] :, None]
        weights = (query @ key.transpose(1, 2) / tiny.dim**0.5).masked_fill(later, float("-inf")).softmax(-1)
        return weights @ values[0].repeat_interleave(tiny.heads // tiny.kv_heads, 0)

    tokens, chosen, every = ids, [], []
    for step in range(STEPS + 1):
        past, now = cache.evict_for_space(past, 1) if step else None, [None] * tiny.layers
        logits, _ = tiny(tokens, torch.zeros(len(tokens)), attend)  # not turned yet
        new = torch.arange(len(ids))[None, None, :, None] if past is None else torch.tensor([[[[len(ids) + step - 1]]]])
        followed = new if past is None else torch.cat([past[-1][0], new], 2)
        past = [*now, [followed, followed]]  # the positions go through the cache like one more layer
        if step:
            every.append(followed.flatten().numpy().astype(np.int16))
            assert len(every[-1]) == budget
        best = logits[-1].topk(2)
        if best.values[0] - best.values[1] < GAP:
            raise Unclear("token")
        chosen.append(int(best.indices[0]))
        tokens = best.indices[:1]
    return {"held": np.stack(every), "tokens": np.array(chosen, np.int32)}


def main() -> None:
    cache = released(sys.argv[1], "streaming_llm.kv_cache").StartRecentKVCache
    tiny, arrays = model(), {}
    for name, (length, budget) in CASES.items():
        for seed in range(5000):
            ids = drawn(length, seed)
            try:
                found = run(cache, tiny, ids, budget)
            except Unclear:
                continue
            if len(set(found["tokens"])) > 7:
                print(f"{name}: seed {seed}")
                break
        else:
            raise SystemExit(f"{name}: no prompt that is clear")
        arrays |= under(name, {"ids": ids.numpy().astype(np.int32), **found})
    save(GOLDENS / "policies" / "streaming.npz", arrays)


if __name__ == "__main__":
    main()
