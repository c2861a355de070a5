"""DefensiveKV and Layer-DefensiveKV as released, on tiny llama3 made sharper (`common.sharpened`): what they score a
prompt at, and what they keep of it.

    python tests/oracle/make_defensivekv.py PATH/TO/DefensiveKV

PATH is a checkout of https://github.com/FFY0/DefensiveKV (commit 9251b95). Its two presses run unchanged, on the
hidden states, keys and values of a prefill by transformers. Their Triton kernel for the norms is replaced by the plain
form beside it in the same class, and the compiled cache by the few fields that they read.
"""

import dataclasses
import sys
import types

import numpy as np
import torch
from common import GOLDENS, attended, bare, choose_ids, margin, save, sharpened

WINDOW = 4
RATIOS = (0.5, 0.75)
CLEAR = 1e-4
SHARP = 3.0


def released(checkout: str):
    """Its two classes, without what needs a GPU."""
    for name in ("kvpress", "kvpress.presses", "kvpress.ops"):
        bare(name, checkout)
    attr = types.ModuleType("attr")
    attr.dataclass = dataclasses.dataclass
    sys.modules.setdefault("attr", attr)
    norms = types.ModuleType("kvpress.ops.vw_norm")
    norms.vw_l1norm = None
    sys.modules["kvpress.ops.vw_norm"] = norms
    from kvpress.presses.efficient_defensivekv_press import EfficientDefensiveKVPress
    from kvpress.presses.efficient_layer_defensivekv_press import EfficientLayerDefensiveKVPress

    for press in (EfficientDefensiveKVPress, EfficientLayerDefensiveKVPress):
        press.vwl1norm_triton = press.vwl1norm
    return EfficientDefensiveKVPress, EfficientLayerDefensiveKVPress


class Metadata:
    """What the presses read of the cache's own record of a layer."""

    def __init__(self, heads: int, tokens: int):
        self.bsz, self.num_key_value_heads = 1, heads
        self.head_lens = torch.full((heads,), tokens)

    def _update_metadata_while_compressing(self, lens, *_):
        self.kept = lens


def mask_of(before: torch.Tensor, after: torch.Tensor) -> np.ndarray:
    """Which rows of `before [Hk, S, D]` are among `after [n, D]`: bool [Hk, S]."""
    return (before[:, :, None] == after).all(-1).any(-1).numpy()


def main() -> None:
    (each, across), model = released(sys.argv[1]), sharpened("llama3", SHARP)

    def cases(ids: torch.Tensor) -> tuple[dict[str, np.ndarray], float]:
        arrays, smallest, seen = {}, np.inf, attended(model, ids)
        for ratio in RATIOS:
            for name, kind in (("defensivekv", each), ("layer-defensivekv", across)):
                press = kind(compression_ratio=ratio, window_size=WINDOW)
                heads, tokens = seen[0].keys.shape[1:3]
                cache = types.SimpleNamespace(
                    metadata_list=[Metadata(heads, tokens) for _ in seen],
                    key_cache=[layer.keys[0].reshape(-1, layer.keys.shape[-1]) for layer in seen],
                    value_cache=[layer.values[0].reshape(-1, layer.values.shape[-1]) for layer in seen],
                    layer_scores=[],
                )
                scores, kept = [], []
                with torch.no_grad():
                    for index, layer in enumerate(seen):
                        flat = cache.key_cache[index], cache.value_cache[index]
                        given = {"past_key_value": cache, "position_embeddings": layer.rotation}
                        told = given | {"metadata": cache.metadata_list[index]}
                        score = press.score(layer.module, layer.hidden, *flat, None, told)
                        scores.append(score.view(heads, tokens).numpy())
                        keys, _ = press.compress(layer.module, layer.hidden, *flat, None, given)
                        kept.append(mask_of(layer.keys[0], keys))
                if kind is across:  # it cuts all layers behind the last
                    kept = [mask_of(layer.keys[0], keys) for layer, keys in zip(seen, cache.key_cache, strict=True)]
                    smallest = min(smallest, margin(np.stack(scores), np.stack(kept)))
                assert sum(mask.sum() for mask in kept) == int(tokens * (1 - ratio)) * heads * len(seen)
                for index, (score, mask) in enumerate(zip(scores, kept, strict=True)):
                    if kind is each:
                        smallest = min(smallest, margin(score, mask))
                    arrays[f"{name}/r{ratio}/layer{index}/scores"] = score
                    arrays[f"{name}/r{ratio}/layer{index}/kept_mask"] = mask
                    if not mask[:, -WINDOW:].all():
                        smallest = 0.0  # a window that another layer pushed out
        held = np.stack([arrays[f"defensivekv/r{RATIOS[0]}/layer{i}/kept_mask"].sum(-1) for i in range(len(seen))])
        budget = int(tokens * (1 - RATIOS[0]))
        return arrays, smallest if held.min() < 0.8 * budget else 0.0  # heads that compete

    save(GOLDENS / "policies" / "defensivekv.npz", choose_ids(cases, CLEAR))


if __name__ == "__main__":
    main()
