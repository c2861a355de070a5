"""AdaKV as released: how many entries each head keeps of a prompt, and which.

    python tests/oracle/make_adakv.py PATH/TO/AdaKV

PATH is a checkout of https://github.com/FFY0/AdaKV (commit efe4e2e). Its `AdaptiveSnapKVCluster` runs unchanged on the
queries, keys and values of the tiny llama2, with groups (`gqa_support`, the mean) and a floor of a fifth. Budgets less
the window are multiples of 5, so that rounding changes no sum. The flash kernel that it imports is stood in for.
"""

import sys

import numpy as np
import torch
from common import GOLDENS, save
from llama import Llama, Seen
from released import Unclear, batch, clear_prompt, model, places, released, stand_in, under

WINDOW = 8
CASES = {"p60-b18-k3": (60, 18, {"kernel_size": 3}), "p90-b28-avg": (90, 28, {"pooling": "avgpool", "kernel_size": 5})}


def keeps(cluster, tiny: Llama, budget: int, more: dict):
    """What the cluster keeps of every layer, -1 behind the shorter heads."""

    def kept(every: list[Seen]) -> dict[str, np.ndarray]:
        out, spread = {}, 0
        for layer, seen in enumerate(every):
            made = cluster(
                window_size=WINDOW, base_capacity=budget, floor_alpha=0.2, skip=0, normalize=None, layer_idx=layer,
                num_hidden_layers=tiny.layers, gqa_support=True, num_key_value_groups=tiny.heads // tiny.kv_heads,
                gqa_func="mean", **more,
            )  # fmt: skip
            query, key, value = batch(seen)
            keys, values = made.update_kv(key, query, value)
            sizes = made.head_lens.tolist()
            pooled = made.calcul_attn_sore(key.repeat_interleave(tiny.heads // tiny.kv_heads, 1), query)[0]
            line = pooled.flatten().sort(descending=True).values
            ends = [line[tiny.kv_heads * (budget - WINDOW) - 1 :][:2]]
            for row, size in zip(pooled, sizes, strict=True):
                ends.append(row.sort(descending=True).values[size - WINDOW - 1 :][:2])
            if any(end[0] == end[1] for end in ends):
                raise Unclear("the last that stays ties with the first that goes: both are a neighbour's maximum")
            assert sum(sizes) == tiny.kv_heads * budget
            rows = []
            for head, (k, v) in enumerate(zip(torch.split(keys, sizes), torch.split(values, sizes), strict=True)):
                rows.append(places(k[None], seen.key[head : head + 1])[0])
                assert np.array_equal(rows[-1], places(v[None], seen.value[head : head + 1])[0])
            spread = max(spread, np.ptp(sizes))
            most = max(sizes)
            padded = [np.pad(row, (0, most - len(row)), constant_values=-1) for row in rows]
            out[f"layer{layer}/kept"] = np.stack(padded)
        if spread < 4:
            raise Unclear("heads are alike")
        return out

    return kept


def main() -> None:
    stand_in("flash_attn", flash_attn_func=None)
    cluster = released(sys.argv[1], "adaptive_snapkv.monkeypatch.snapkv_utils").AdaptiveSnapKVCluster
    tiny, arrays = model(), {}
    for case, (length, budget, more) in CASES.items():
        print(case, end=": ")
        arrays |= under(f"adakv/{case}", clear_prompt(tiny, length, keeps(cluster, tiny, budget, more)))
    save(GOLDENS / "policies" / "adakv.npz", arrays)


if __name__ == "__main__":
    main()
