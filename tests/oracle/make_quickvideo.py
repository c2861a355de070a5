"""QuickVideo's choice of each block as released: which of its tokens stay.

    python tests/oracle/make_quickvideo.py PATH/TO/QuickVideo

PATH is a checkout of https://github.com/TIGER-AI-Lab/QuickVideo (commit f079e45). Its `get_top_k_mask_to_predict` runs
unchanged ("key_norms_small") on the keys of the tiny llama2, block by block of one full pass.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from common import GOLDENS, save
from llama import Seen
from released import clear_prompt, function, model, under

CASES = {"p60-n20-k6": (60, 20, 6), "p96-n16-k5": (96, 16, 5)}  # tokens, of a block, of them that stay


def main() -> None:
    file = Path(sys.argv[1]) / "lvu" / "utils.py"
    choose, arrays = function(file, "get_top_k_mask_to_predict", torch=torch, F=torch.nn.functional), {}

    def keeps(block: int, top_k: int):
        def kept(every: list[Seen]) -> dict[str, np.ndarray]:
            out = {}
            for layer, seen in enumerate(every):
                length, places = seen.key.shape[1], []
                for start in range(0, length, block):
                    keys, values = (x[None, :, start : start + block] for x in (seen.key, seen.value))
                    mask = choose(None, keys, values, values, top_k=top_k, predict_type="key_norms_small")
                    places += (np.flatnonzero(mask[0].numpy()) + start).tolist()
                out[f"layer{layer}/kept"] = np.array([places] * len(seen.key), np.int16)
            return out

        return kept

    for case, (length, block, top_k) in CASES.items():
        print(case, end=": ")
        arrays |= under(f"quickvideo/{case}", clear_prompt(model(), length, keeps(block, top_k)))
    save(GOLDENS / "policies" / "quickvideo.npz", arrays)


if __name__ == "__main__":
    main()
