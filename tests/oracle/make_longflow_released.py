"""LongFlow as released: prompt and steps.

    TRITON_INTERPRET=1 python tests/oracle/make_longflow_released.py PATH/TO/LongFLow

PATH is a checkout of https://github.com/yisunlp/LongFLow (commit 89a68d3). Its cache (`models/ours.py`) and its kernel
(`triton_kernel/attention.py`, under triton's interpreter: `pip install --no-deps triton==3.9.0`) run unchanged in every
layer of a plain decode of the tiny llama2, called as its attention calls them; the tensors say that they lie on a GPU,
which the kernel asks. transformers' `Cache` is stood in for by nothing: only the name is used.
"""

import sys

import numpy as np
import torch
import transformers.cache_utils
from common import GOLDENS, save
from llama import Llama, Seen, causal_attention
from released import NOISE, clear_steps, model, places, released, stepped

CASES = {"p20-b24": (20, 24), "p60-b48": (60, 48)}  # tokens, budget; longer prompts are cut by a window of 32


class OnGpu(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = True


def run(release, tiny: Llama, ids: torch.Tensor, budget: int, turn: int | None) -> dict[str, np.ndarray]:
    """Greedy tokens, what is kept of the prompt, and what every step attends to; with a turn, values with noise."""
    ours, kernel = release
    cache = ours.OursCache(cache_budget=budget)
    generator, group = torch.Generator().manual_seed(turn or 0), tiny.heads // tiny.kv_heads
    given = [torch.zeros(tiny.kv_heads, 0, tiny.dim)] * tiny.layers  # every key so far
    rows = np.full((tiny.layers, budget), -1, np.int16)

    def attend(layer: int, seen: Seen) -> torch.Tensor:
        noise = 1 + NOISE * torch.randn(seen.value.shape, generator=generator) if turn is not None else 1
        query, key, value = seen.query[None], seen.key[None], (seen.value * noise)[None]
        given[layer] = torch.cat([given[layer], seen.key], 1)
        if query.shape[2] > 1:
            cache.initialize(query, key, value, None, layer)
            out = causal_attention(seen.query, seen.key) @ seen.value.repeat_interleave(group, 0)
        else:
            keys, values, mask = cache.update(key, value, layer)
            tensors = (x.as_subclass(OnGpu) for x in (query, keys, values, mask))
            found, victim = kernel.triton_evict_attention_forward(*tensors, group, tiny.dim**-0.5, 0.0)
            cache.update_evict_idx(victim.as_subclass(torch.Tensor), layer)
            out = found.as_subclass(torch.Tensor)[0].transpose(0, 1)
        filled = cache.masks[layer][0].bool()
        held = places(cache.key_cache[layer][0][:, filled], given[layer])
        assert (held == held[0]).all(), "one choice for the layer"
        rows[layer] = -1
        rows[layer, : held.shape[1]] = held[0]
        return out

    held, tokens = stepped(tiny, ids, attend, rows.copy)
    return {"held": held, "tokens": tokens}


def main() -> None:
    transformers.cache_utils.Cache = object
    release = [released(sys.argv[1], module) for module in ("models.ours", "triton_kernel.attention")]
    tiny, arrays = model(), {}
    for name, (length, budget) in CASES.items():
        arrays |= clear_steps(name, length, lambda ids, turn, budget=budget: run(release, tiny, ids, budget, turn))
    save(GOLDENS / "policies" / "longflow_released.npz", arrays)


if __name__ == "__main__":
    main()
