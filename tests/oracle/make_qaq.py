"""Keys and values by QAQ's own quantiser, and the bits that it says they need.

    python tests/oracle/make_qaq.py PATH/TO/QAQ-KVCacheQuantization

The path is a checkout of ClubieDong/QAQ-KVCacheQuantization (f8d47e0), whose `quantizer.Quantizer` runs unchanged, with
each head of each token quantised by itself.
"""

import sys
import warnings

import numpy as np
import torch
from common import GOLDENS, save
from make_precision import halves
from released import released, stand_in

HEADS, TOKENS, DIM = 2, 12, 64


def main(qaq_at: str) -> None:
    """Write policies/qaq.npz."""
    warnings.filterwarnings("ignore", message=".*MaskedTensors.*")
    stand_in("models", CausalLM=object)
    stand_in("scipy")
    stand_in("scipy.stats", norm=None)  # for its other method, by quantiles
    quantizer = released(f"{qaq_at}/src", "quantizer").Quantizer
    rng = np.random.default_rng(0)
    scale = np.geomspace(0.3, 8, TOKENS).astype(np.float32)[:, None]
    x = {name: halves(rng, 1, 1, HEADS, TOKENS, DIM) * scale for name in ("key", "value")}  # layers, rows, heads, ...
    logits = torch.from_numpy(3 * rng.standard_normal((1, HEADS, TOKENS, TOKENS)).astype(np.float32))
    attention = torch.softmax(logits + torch.full((TOKENS, TOKENS), -torch.inf).triu(1), dim=-1)
    out = {"attention": attention.numpy()[0]}
    shared = {"level": "head", "symmetric": False, "method": "uniform", "outliers_ratio": 0.01}
    for name, given in x.items():
        out[f"{name}s"] = given[0, 0]
        for bits in (2, 4):
            made = quantizer(name, use_attentions=False, n_bits_uniform=bits, **shared)
            made.set_dtype_and_device(torch.float32, torch.device("cpu"))
            out[f"{name}s/{bits}"] = made.quantize(torch.from_numpy(given), [])[0].numpy()[0, 0]
        made = quantizer(
            name, use_attentions=True, last_n_attentions=5, target_quantization_error=3.0, n_bits_min=0, n_bits_max=16,
            q_norm=300, **shared,
        )  # fmt: skip
        made.set_dtype_and_device(torch.float32, torch.device("cpu"))
        cache = torch.from_numpy(given).permute(1, 3, 0, 2, 4)
        needed = made._calc_quantization_bits([attention], cache, made._calc_outlier_mask(cache))
        out[f"{name}s/needed"] = needed.numpy()[0, :, 0].T.astype(np.int32)  # [H, S]; the last 4 tokens get the most
    save(GOLDENS / "policies" / "qaq.npz", out)


if __name__ == "__main__":
    main(*sys.argv[1:])
