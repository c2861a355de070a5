"""Quantised keys and values as KIVI and transformers' quantised cache have them.

    python tests/oracle/make_codecs.py PATH/TO/KIVI

PATH is a checkout of https://github.com/jy-yuan/KIVI (commit 876b4d2), whose plain torch functions of
`quant/new_pack.py` run unchanged (triton, which only its kernels need, is stood in for). Needs optimum-quanto 0.2.7
besides, for transformers' `QuantoQuantizedLayer`.
"""

import sys
import types
from pathlib import Path

import numpy as np
import torch
from common import GOLDENS, save
from transformers.cache_utils import QuantoQuantizedLayer

GROUP = 32


def released(folder: str) -> types.ModuleType:
    """KIVI's functions."""
    stub = types.ModuleType("triton")
    stub.jit = lambda f: f
    language = types.ModuleType("triton.language")
    language.constexpr = int
    stub.language = language
    sys.modules |= {"triton": stub, "triton.language": language}
    module = types.ModuleType("new_pack")
    exec(compile((Path(folder) / "quant" / "new_pack.py").read_text(), "new_pack.py", "exec"), module.__dict__)
    return module


def exact(rng: np.random.Generator, bits: int, axis: int) -> np.ndarray:
    """[1, 1, 32, 64] whose groups along the axis have a power of two as their scale; no number lies between steps."""
    shape, most = (1, 1, GROUP, 2 * GROUP), 2**bits - 1
    codes = rng.integers(0, most + 1, shape)
    groups = np.moveaxis(codes.reshape(1, 1, GROUP, 2, GROUP), 4, 2) if axis == 3 else codes
    groups[:, :, 0], groups[:, :, 1] = 0, most
    off = np.clip(groups + rng.uniform(-0.4, 0.4, groups.shape), 0, most)
    off[:, :, :2] = groups[:, :, :2]
    step = 2.0 ** rng.integers(-6, 1, groups[:, :, :1].shape)
    low = rng.integers(-16, 16, step.shape) / 4
    x = low + step * np.round(off * 64) / 64
    x = np.moveaxis(x, 2, 4).reshape(shape) if axis == 3 else x
    return x.astype(np.float32)


def main(folder: str) -> None:
    """Write the goldens."""
    kivi, rng, out = released(folder), np.random.default_rng(0), {}
    for bits in (2, 4, 8):
        for what, axis in (("k", 2), ("v", 3)):
            for case in ("exact", "normal"):
                x = exact(rng, bits, axis)
                if case == "normal":
                    x = (np.round(rng.standard_normal(x.shape) * 256) / 64).astype(np.float32)
                given = torch.from_numpy(x)
                coded = (kivi.quant_and_pack_kcache if what == "k" else kivi.quant_and_pack_vcache)(given, GROUP, bits)
                back = (kivi.unpack_and_dequant_kcache if what == "k" else kivi.unpack_and_dequant_vcache)(
                    coded[0], *(each.float() for each in coded[1:]), GROUP, bits
                )
                codes = kivi.unpack_tensor(coded[0], bits, axis)
                name = f"kivi/{case}/{what}{bits}"
                out |= {f"{name}/x": x, f"{name}/codes": codes.numpy().astype(np.uint8)}
                out[f"{name}/back"] = back.numpy().astype(np.float32)
    for bits in (2, 4):
        x = (np.round(rng.standard_normal((1, 2, 9, 64)) * 256) / 64).astype(np.float32)
        layer = QuantoQuantizedLayer(nbits=bits, axis_key=0, axis_value=0, q_group_size=64, residual_length=128)
        layer.update(torch.from_numpy(x), torch.from_numpy(x))
        one = torch.zeros(1, 2, 1, 64)
        _, values = layer.update(one, one)
        out |= {f"quanto/{bits}/x": x, f"quanto/{bits}/back": values[:, :, :-1].numpy()}
    save(GOLDENS / "policies" / "codecs.npz", out)


if __name__ == "__main__":
    main(sys.argv[1])
