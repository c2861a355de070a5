"""SnapKV, PyramidKV, H2O (prompt) and StreamingLLM (prompt) as KVCache-Factory has them: kept positions.

    python tests/oracle/make_kvcache_factory.py PATH/TO/KVCache-Factory

PATH is a checkout of https://github.com/Zefan-Cai/KVCache-Factory (commit c97f9d7), PyramidKV's release, which has the
others beside it. Its clusters run unchanged on the queries, keys and values of the tiny llama2, with groups (its
`kv_head` layout, scores as means over the group).
"""

import sys

import numpy as np
from common import GOLDENS, save
from llama import Llama, Seen
from released import batch, clear_prompt, model, places, released, under

WINDOW = 8
CASES = {  # tokens of the prompt, budget, more of the cluster's arguments
    "snapkv": {"p60-b24": (60, 24, {}), "p90-b32-k7": (90, 32, {"kernel_size": 7})},
    "pyramidkv": {
        "p90-b28": (90, 28, {"beta": 20}),
        "p90-b48": (90, 48, {"beta": 2}),
        "p60-b32": (60, 32, {}),
        "p60-b26-k3-max": (60, 26, {"kernel_size": 3, "pooling": "maxpool"}),  # where no cut lies between equal ones
    },
    "h2o": {"p60-b16": (60, 16, {}), "p90-b16": (90, 16, {})},
    "streaming-llm": {"p60-b12": (60, 12, {"window_size": 8})},
}


def keeps(clusters, tiny: Llama, name: str, budget: int, more: dict):
    """What a method's cluster keeps of every layer."""
    kind = {"snapkv": "SnapKV", "pyramidkv": "PyramidKV", "h2o": "H2OKV", "streaming-llm": "StreamingLLMKV"}[name]
    options = {"window_size": WINDOW, "max_capacity_prompt": budget, **more}

    def kept(every: list[Seen]) -> dict[str, np.ndarray]:
        out = {}
        for layer, seen in enumerate(every):
            own = {"num_hidden_layers": tiny.layers, "layer_idx": layer} if name == "pyramidkv" else {}
            cluster = getattr(clusters, f"{kind}Cluster")(**options, **own)
            query, key, value = batch(seen)
            keys, values = cluster.update_kv(key, query, value, None, tiny.heads // tiny.kv_heads)
            out[f"layer{layer}/kept"] = places(keys[0], seen.key)
            assert np.array_equal(out[f"layer{layer}/kept"], places(values[0], seen.value))
        return out

    return kept


def main() -> None:
    clusters, tiny, arrays = released(sys.argv[1], "pyramidkv.pyramidkv_utils"), model(), {}
    for name, cases in CASES.items():
        for case, (length, budget, more) in cases.items():
            print(name, case, end=": ")
            found = clear_prompt(tiny, length, keeps(clusters, tiny, name, budget, more))
            arrays |= under(f"{name}/{case}", found)
    save(GOLDENS / "policies" / "kvcache_factory.npz", arrays)


if __name__ == "__main__":
    main()
