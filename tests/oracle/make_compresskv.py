"""CompressKV as released: what every layer keeps of a prompt, under one budget and under budgets of its own.

    python tests/oracle/make_compresskv.py PATH/TO/CompressKV

PATH is a checkout of https://github.com/TUDa-HWAI/CompressKV (commit e8af510). Its cluster runs unchanged. Which heads
retrieve is made up (`tests/measured.py`), and so are the layers' errors, from which the function in
`longbench/pred_compresskv.py` makes the budgets.
"""

import sys
import types
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # tests/measured.py

from common import GOLDENS, save
from llama import Llama, Seen
from measured import measured
from released import batch, clear_prompt, function, model, places, released, stand_in, under

WINDOW, LEAST, MOST = 8, 10, 3
CASES = {  # tokens of the prompt, budget, whether each layer has its own
    "compresskv/p60-b24": (60, 24, False),
    "compresskv/p90-b32": (90, 32, False),
    "layer-compresskv/p90-b24": (90, 24, True),
}


def keeps(cluster, tiny: Llama, heads: list, budgets: list[int]):
    """What its cluster keeps of every layer."""
    part = cluster(window_size=WINDOW, max_capacity_prompt_layer_adaptive=budgets, important_heads=heads)

    def kept(every: list[Seen]) -> dict[str, np.ndarray]:
        out = {}
        for layer, seen in enumerate(every):
            query, key, value = batch(seen)
            keys, _ = part.update_kv(key, query, value, tiny.heads // tiny.kv_heads, layer)
            out[f"layer{layer}/kept"] = places(keys[0], seen.key)
        return out

    return kept


def main() -> None:
    stand_in("loguru", logger=types.SimpleNamespace(info=lambda *_: None))
    checkout, tiny, arrays = Path(sys.argv[1]), model(), {}
    cluster = released(checkout, "methods.compresskv.snapkv_utils").compresskvCluster
    divided = function(checkout / "longbench" / "pred_compresskv.py", "error_aware_layer_budget_allocation", np=np)
    found = measured(tiny.layers, tiny.heads, tiny.kv_heads, tiny.dim)
    heads = np.argsort(-found["retrieval"], axis=-1, kind="stable").tolist()
    for name, (length, budget, apart) in CASES.items():
        budgets = [budget] * tiny.layers
        if apart:
            error = found["eviction_error"]
            budgets = divided(error / error.sum(), budget * tiny.layers, LEAST, budget * MOST)
        print(name, budgets, end=": ")
        arrays |= under(name, clear_prompt(tiny, length, keeps(cluster, tiny, heads, budgets)))
    save(GOLDENS / "policies" / "compresskv.npz", arrays)


if __name__ == "__main__":
    main()
