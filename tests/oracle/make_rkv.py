"""R-KV as released, on tiny llama3 made sharper (`common.sharpened`): what it scores a prompt at, and what it keeps.

    python tests/oracle/make_rkv.py PATH/TO/R-KV

PATH is a checkout of https://github.com/Zefan-Cai/R-KV (commit d15c976). Its `R1KV` runs unchanged, with the defaults
of its `run_math.py`, on the last queries and all keys and values of a prefill by transformers; its scores are read off
its local variables. Where a key has no copy it leaves out the first key, which is not meant: every key has one here.
"""

import importlib
import sys

import numpy as np
import torch
from common import GOLDENS, attended, bare, choose_ids, margin, queries, save, sharpened

SHARP, BUDGET, WINDOW = 2.0, 60, 8
CLEAR = 1e-5


def main() -> None:
    for name in ("rkv", "rkv.compression"):
        bare(name, sys.argv[1])
    utils = importlib.import_module("rkv.utils")
    package = sys.modules["rkv.compression"]  # its own __init__ hands on these two, and wants other packages
    package.cal_similarity, package.compute_attention_scores = utils.cal_similarity, utils.compute_attention_scores
    theirs = importlib.import_module("rkv.compression.r1_kv").R1KV
    press = theirs(budget=BUDGET, window_size=WINDOW, mix_lambda=0.07, retain_ratio=0.2, retain_direction="last")
    model, found = sharpened("llama3", SHARP), {}

    def watch(frame, event, _):
        if event == "return" and frame.f_code is theirs.update_kv.__code__:
            found.update(frame.f_locals)

    def cases(ids: torch.Tensor) -> tuple[dict[str, np.ndarray], float]:
        arrays, smallest = {}, np.inf
        for index, layer in enumerate(attended(model, ids)):
            sys.setprofile(watch)
            keys, _ = press.update_kv(layer.keys, queries(layer, WINDOW), layer.values)
            sys.setprofile(None)
            scores = found["final_score"][0].numpy()
            kept = (layer.keys[0][:, :, None] == keys[0][:, None]).all(-1).any(-1).numpy()
            assert kept[:, -WINDOW:].all() and (kept.sum(-1) == BUDGET).all()
            for score, mask in zip(scores, kept, strict=True):
                smallest = min(smallest, margin(score, mask[:-WINDOW]))
            unit = torch.nn.functional.normalize(layer.keys[0], dim=-1)
            near = (unit @ unit.transpose(-1, -2) - 2 * torch.eye(unit.shape[1])) > 0.5
            if not near.any(-1).all():
                smallest = 0.0
            arrays |= {f"layer{index}/scores": scores, f"layer{index}/kept_mask": kept}
        return arrays, smallest

    save(GOLDENS / "policies" / "r-kv.npz", choose_ids(cases, CLEAR, length=200, vocabulary=27, again=True))


if __name__ == "__main__":
    main()
