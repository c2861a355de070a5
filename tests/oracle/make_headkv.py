"""HeadKV's budget of every head as released: its own scores of Meta-Llama-3-8B-Instruct, its own code.

    python tests/oracle/make_headkv.py PATH/TO/HeadKV

PATH is a checkout of https://github.com/FYYFU/HeadKV (commit 0862a09). Its `ReasonSnapKVCluster` is imported from
`headkv/snapkv_utils.py` and made with a capacity of 128 per head, 32 of them the window.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
from common import GOLDENS, save

BETAS = (1.2, 1.5, 2.0)  # with them 96 / beta is whole, so that nobody rounds
FILES = {"copy": "retrieval_heads", "reason": "retrieval_reasoning_heads"}


def main() -> None:
    where = Path(sys.argv[1])
    spec = importlib.util.spec_from_file_location("snapkv_utils", where / "headkv" / "snapkv_utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = {}
    for which, name in FILES.items():
        file = where / "Important_Head" / "head_score" / f"Meta-Llama-3-8B-Instruct_{name}.json"
        scores = np.array([np.mean(each) for each in json.loads(file.read_text().splitlines()[0]).values()])
        out[f"{which}/scores"] = scores.reshape(32, 32).astype(np.float32)
        for beta in BETAS:
            cluster = module.ReasonSnapKVCluster(
                base_capacity=128, head_choice=which, beta=beta, temp=1, layer_idx=0, num_hidden_layers=32,
                num_attention_heads=32, model="llama",
            )  # fmt: skip
            out[f"{which}/{beta}/capacity"] = cluster.head_capacity.numpy().astype(np.int16)
    save(GOLDENS / "policies" / "headkv.npz", out)


if __name__ == "__main__":
    main()
