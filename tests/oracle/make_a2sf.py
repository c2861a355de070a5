"""A2SF as released, on tiny llama3 made sharper (`common.sharpened`): what it scores a prompt at, and what it keeps.

    python tests/oracle/make_a2sf.py PATH/TO/A2SF

PATH is a checkout of https://github.com/Dirac-Notation/A2SF (commit 00a617f). Its attention and its policy run
unchanged on the queries, keys and values of a prefill by transformers, its 16 recents and the forgetting factor of its
README included.
"""

import sys

import numpy as np
import torch
from common import GOLDENS, attended, bare, choose_ids, margin, queries, save, sharpened

SHARP, BUDGET, FORGET = 2.0, 40, 0.95
CLEAR = 1e-4


def main() -> None:
    bare("utils_real_drop", sys.argv[1])
    from utils_real_drop.attention import compressed_attention
    from utils_real_drop.policies import A2SFPolicy

    model = sharpened("llama3", SHARP)

    class Watched(A2SFPolicy):
        def select(self, scores, seq_len_k):
            self.scores = scores
            return super().select(scores, seq_len_k)

    def cases(ids: torch.Tensor) -> tuple[dict[str, np.ndarray], float]:
        arrays, smallest = {}, np.inf
        for index, layer in enumerate(attended(model, ids)):
            heads, group = layer.keys.shape[1], layer.module.num_key_value_groups
            policy = Watched(heads, BUDGET, FORGET)
            keys, values = (x.repeat_interleave(group, 1) for x in (layer.keys, layer.values))
            with torch.no_grad():
                _, kept = compressed_attention(
                    queries(layer), keys, values, policy=policy, attn_mask=None, head_dim=keys.shape[-1]
                )
            scores, kept = policy.scores[0].numpy(), kept[0].numpy().astype(np.int16)
            for score, held in zip(scores, kept, strict=True):
                mask = np.zeros(len(score), bool)
                mask[held] = True
                old = slice(len(score) - policy.recent_budget)
                smallest = min(smallest, margin(score[old], mask[old]))
            arrays |= {f"layer{index}/scores": scores, f"layer{index}/kept": kept}
        return arrays, smallest

    save(GOLDENS / "policies" / "a2sf.npz", choose_ids(cases, CLEAR))


if __name__ == "__main__":
    main()
