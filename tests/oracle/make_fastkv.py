"""FastKV as released: what every layer keeps of a prompt, and which tokens go on.

    python tests/oracle/make_fastkv.py PATH/TO/FastKV

PATH is a checkout of https://github.com/dongwonjo/FastKV (commit b978769). Its cluster runs unchanged; between the
layers the stream goes on as its decoder layer has it: after the chosen layer only the chosen tokens, at their places in
the text.
"""

import sys
from collections.abc import Callable

import numpy as np
import torch
from common import GOLDENS, save
from llama import Llama
from released import TRIES, batch, drawn, model, places, released, same, shaken, under

CASES = {  # tokens of the prompt, budget, layer after which fewer go on, how many of them
    "p60-b16-g24": (60, 16, 1, 24),
    "p90-b24-g27": (90, 24, 0, 27),
}
WINDOW, KERNEL = 8, 7


def run(cluster: Callable, tiny: Llama, ids: torch.Tensor, case: tuple, turn: int | None) -> dict[str, np.ndarray]:
    """What is kept and what goes on; with a turn, from queries, keys and values with noise."""
    _, budget, after, onward = case
    x, positions, out = tiny.embedded(ids), torch.arange(len(ids)), {}
    for layer in range(tiny.layers):
        x, seen = tiny.layer(layer, x, positions, tiny.causal)
        seen = seen if turn is None else shaken([seen], TRIES * layer + turn)[0]
        query, key, value = batch(seen)
        part = cluster(
            window_size=WINDOW, max_capacity_prompt=budget, kernel_size=KERNEL, tsp_layer=layer == after,
            tsp_length=onward,
        )  # fmt: skip
        keys, _, going = part.update_kv(key, query, value, None, tiny.heads // tiny.kv_heads, layer)
        out[f"layer{layer}/kept"] = positions[places(keys[0], seen.key).astype(int)].numpy().astype(np.int16)
        if going is not None:
            x, positions = x[going[0]], positions[going[0]]
            out["going"] = positions.numpy().astype(np.int16)
    return out


def main() -> None:
    cluster, tiny, arrays = released(sys.argv[1], "baselines.fastkv.utils").FastKVCluster, model(), {}
    for name, case in CASES.items():
        for seed in range(2000):
            ids = drawn(case[0], seed)
            found = run(cluster, tiny, ids, case, None)
            if all(same(found, run(cluster, tiny, ids, case, turn)) for turn in range(TRIES)):
                print(f"{name}: seed {seed}")
                break
        else:
            raise SystemExit(f"{name}: no prompt that is clear")
        arrays |= under(f"fastkv/{name}", {"ids": ids.numpy().astype(np.int32), **found})
    save(GOLDENS / "policies" / "fastkv.npz", arrays)


if __name__ == "__main__":
    main()
