"""KVzip as released: what a prompt leaves once it has been repeated behind itself, heads and layers competing or not.

    python tests/oracle/make_kvzip.py PATH/TO/KVzip

PATH is a checkout of https://github.com/snu-mllab/KVzip (commit 5d84729). Its cache and scores (`attention/`) run
unchanged beside the tiny llama2, called as its `model/wrapper.py` does (`prefill`, `scoring`), for a prompt of one
chunk without a system prompt, behind an instruction of three tokens. What it would import and not use is stood in for:
the flat kernel, and transformers' caches by the lists that they were. Under its level "pair" it keeps one entry fewer
than the ratio says (`score > thres`, the threshold being the last that would stay): the ratio asks for one more.
"""

import contextlib
import io
import sys
import types

import numpy as np
import torch
from common import GOLDENS, save
from llama import Llama, Seen
from released import NOISE, TRIES, drawn, model, released, same, stand_in, under

CASES = {"p60-b24": (60, 24, "pair"), "p90-b20": (90, 20, "pair"), "p60-b16-uniform": (60, 16, "pair-uniform")}
INSTRUCTION = torch.tensor([7, 11, 13])


class Lists:
    """The lists that transformers' DynamicCache was when KVzip was released."""

    def __init__(self):
        self.key_cache, self.value_cache, self._seen_tokens = [], [], 0


def run(release, tiny: Llama, ids: torch.Tensor, case: tuple, turn: int | None) -> dict[str, np.ndarray]:
    """What is kept; with a turn, of queries with noise."""
    length, budget, level = case
    generator = torch.Generator().manual_seed(turn or 0)
    config = types.SimpleNamespace(
        num_hidden_layers=tiny.layers, num_attention_heads=tiny.heads, num_key_value_heads=tiny.kv_heads
    )
    cache = release(types.SimpleNamespace(parameters=lambda: iter([torch.zeros(1)]), config=config), (0, length))

    def attend(layer: int, seen: Seen) -> torch.Tensor:
        query, key, value = (x[None].contiguous() for x in (seen.query, seen.key, seen.value))
        keys, values = cache.update(key, value, layer)
        if cache.get_score:
            noise = 1 + NOISE * torch.randn(query.shape, generator=generator) if turn is not None else 1
            cache._get_score(query * noise, keys, layer)
        keys, values = (x[0].repeat_interleave(tiny.heads // tiny.kv_heads, 0) for x in (keys, values))
        own, all_of = query.shape[2], keys.shape[1]
        later = torch.arange(all_of)[None] > torch.arange(all_of - own, all_of)[:, None]
        weights = seen.query @ keys.transpose(1, 2) / tiny.dim**0.5
        return weights.masked_fill(later, float("-inf")).softmax(-1) @ values

    tiny(ids, torch.arange(length), attend)
    cache.init_score()
    cache.end_idx = length
    again = torch.cat([INSTRUCTION, ids])
    tiny(again, torch.arange(length, length + len(again)), attend)
    cache.slice(length)
    cache.get_score = False
    whole = tiny.layers * tiny.kv_heads
    ratio = budget / length if "uniform" in level else (whole * budget + 1.5) / (whole * length)
    with contextlib.redirect_stdout(io.StringIO()):
        cache.prune(ratio + 1e-6, level)
    out = {}
    for layer, valid in enumerate(cache.valid):
        rows = [np.flatnonzero(head) for head in valid[0].numpy()]
        most = max(map(len, rows))
        padded = [np.pad(row, (0, most - len(row)), constant_values=-1) for row in rows]
        out[f"layer{layer}/kept"] = np.stack(padded).astype(np.int16)
    assert sum(int((x >= 0).sum()) for x in out.values()) == whole * budget
    assert all((x >= 0).any(axis=1).all() for x in out.values())
    return out


def main() -> None:
    found = sys.modules["transformers"]  # as it stands once others have imported from it
    found.DynamicCache, found.HybridCache = Lists, type("Hybrid", (), {})
    stand_in("tiny_api_cuda", update_flatten_view=None)
    release, tiny, arrays = released(sys.argv[1], "attention.kvcache").EvictCache, model(), {}
    for name, case in CASES.items():
        for seed in range(2000):
            ids = drawn(case[0], seed)
            found = run(release, tiny, ids, case, None)
            if all(same(found, run(release, tiny, ids, case, turn)) for turn in range(TRIES)):
                print(f"{name}: seed {seed}")
                break
        else:
            raise SystemExit(f"{name}: no prompt that is clear")
        arrays |= under(f"kvzip/{name}", {"ids": ids.numpy().astype(np.int32), **found})
    save(GOLDENS / "policies" / "kvzip.npz", arrays)


if __name__ == "__main__":
    main()
