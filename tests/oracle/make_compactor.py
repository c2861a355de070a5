"""Compactor as released, on tiny llama3: what it scores a prompt at, and what the heads of a layer keep of it.

    python tests/oracle/make_compactor.py PATH/TO/compactor-vllm

PATH is a checkout of https://github.com/vnchari/compactor-vllm (commit 8bbac3a). Its functions run unchanged; their
Triton kernels run in Triton's interpreter (`pip install triton==3.9.0`), each with the first of the sizes that it would
try. The singular values come from torch's own choice of a program, for the one that is named is CUDA's.
"""

import importlib
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
from common import GOLDENS, attended, bare, choose_ids, margin, queries, save, sharpened
from released import stand_in

LENGTH, BUDGETS, STRETCHES, SKETCH = 200, (100, 130), (512, 80), 48
FIRST, LAST, SHARP, CLEAR = 16, 64, 2.0, 1e-4


class Sized:
    """A kernel with the first of its configurations."""

    def __init__(self, kernel, config):
        self.kernel, self.sizes = kernel, config.kwargs

    def __getitem__(self, grid):
        return lambda *args, **given: self.kernel[grid](*args, **given, **self.sizes)


def released(checkout: str):
    """Its modules, without what needs a GPU."""
    triton.autotune = lambda configs, key, **_: lambda kernel: Sized(kernel, configs[0])
    torch.Tensor.cuda = lambda self, **_: self
    svd = torch.linalg.svd
    torch.linalg.svd = lambda x, full_matrices, driver: svd(x, full_matrices=full_matrices)
    source = os.path.join(checkout, "src")
    for name in ("compactor_vllm", "compactor_vllm.compression", "compactor_vllm.utils"):
        bare(name, source)
    stand_in("compactor_vllm.utils.helpers", maybe_execute_in_stream=None)
    stand_in("compactor_vllm.kv_cache", __path__=[])
    stand_in("compactor_vllm.kv_cache.store_kv_cache", prefill_store_topk_kv=None)
    names = ("compactor", "common")
    return tuple(importlib.import_module(f"compactor_vllm.compression.{name}") for name in names)


def unturned(layer) -> torch.Tensor:
    """The keys before RoPE, [S, Hk, D]."""
    return layer.module.k_proj(layer.hidden)[0].view(layer.hidden.shape[1], -1, layer.module.head_dim).detach()


def main() -> None:
    (release, common), model = released(sys.argv[1]), sharpened("llama3", SHARP)
    phi = torch.from_numpy(np.random.default_rng(0).standard_normal((16, SKETCH)).astype(np.float32)) / SKETCH**0.5

    def cases(ids: torch.Tensor) -> tuple[dict[str, np.ndarray], float]:
        arrays, smallest, edges = {}, np.inf, torch.tensor([0, LENGTH], dtype=torch.int32)
        with torch.no_grad():
            for index, layer in enumerate(attended(model, ids)):
                query, (key, value) = queries(layer)[0], (x[0] for x in (layer.keys, layer.values))
                for stretch in STRETCHES:
                    leverage = release.approximate_leverage_scores(
                        unturned(layer), [LENGTH], phi, normalize=True, chunk_size=stretch
                    )
                    scores = release.non_causal_attn_scores(
                        *(x.transpose(0, 1).contiguous() for x in (query, key, value)), edges, LENGTH,
                        chunk_size=release.CompactorCompression.chunk_size, sm_scale=1.0, normalize=True,
                        accum_scores=leverage.clone(), accum_blending=0.5, context_lens=[LENGTH],
                        protected_first_tokens=[FIRST], protected_last_tokens=[LAST],
                    )  # fmt: skip
                    where, heads = f"stretch{stretch}/layer{index}", scores.shape[1]
                    inside = scores[FIRST:-LAST].T.numpy()
                    arrays[f"{where}/leverage"] = leverage.T.numpy()
                    arrays[f"{where}/scores"] = inside
                    for budget in BUDGETS:
                        flat = common.scores_to_retain_indices(scores, edges, LENGTH, budget * heads, heads)
                        kept = torch.zeros(LENGTH * heads, dtype=torch.bool)
                        kept[flat[0]] = True
                        kept = kept.view(LENGTH, heads).T.numpy()
                        assert kept[:, :FIRST].all() and kept[:, -LAST:].all()
                        smallest = min(smallest, margin(inside, kept[:, FIRST:-LAST]))
                        arrays[f"{where}/b{budget}/kept_mask"] = kept
        return arrays, smallest

    save(GOLDENS / "policies" / "compactor.npz", choose_ids(cases, CLEAR, LENGTH, again=True) | {"phi": phi.numpy()})


if __name__ == "__main__":
    main()
