"""LaCache's cache as released: which of a text's tokens every layer keeps, of a prompt at once or token by token.

    python tests/oracle/make_lacache.py PATH/TO/LaCache

PATH is a checkout of https://github.com/GATECH-EIC/LaCache (commit 0f27c33); `ppl/lacache/kv_cache.py` runs unchanged
on keys that say their own positions. After its first cut it lets its cache grow by half of what a ladder takes away;
the size stored here is the one that it keeps to.
"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import GOLDENS, save


@dataclass(frozen=True)
class Case:
    layers: int
    span: int
    overlap: int
    size: int
    tokens: int
    each: bool  # token by token


CASES = {
    "half": Case(30, 16, 0, 100, 140, False),
    "again": Case(30, 16, 0, 80, 160, False),
    "thrice": Case(32, 16, 0, 64, 150, False),
    "overlap": Case(32, 8, 4, 98, 150, False),
    "steps": Case(30, 16, 0, 60, 180, True),
}


def held(module, case: Case) -> tuple[int, np.ndarray]:
    """The size that it keeps to, and the positions [L, n]."""
    cache = module.LaCache(case.size, case.span, case.overlap)
    start = 1 if case.each else case.tokens
    at = torch.arange(start).view(1, 1, -1, 1)
    layers = [[at, at] for _ in range(case.layers)]
    for token in range(start, case.tokens + 1):
        layers = cache(layers)
        if token < case.tokens:
            new = torch.tensor(token).view(1, 1, 1, 1)
            layers = [[torch.cat([key, new], 2)] * 2 for key, _ in layers]
    return cache.cache_size, torch.stack([key[0, 0, :, 0] for key, _ in layers]).numpy().astype(np.int16)


def main() -> None:
    spec = importlib.util.spec_from_file_location("kv_cache", Path(sys.argv[1]) / "ppl" / "lacache" / "kv_cache.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = {}
    for name, case in CASES.items():
        size, kept = held(module, case)
        out[f"{name}/kept"] = kept
        out[f"{name}/case"] = np.array([case.layers, case.span, case.overlap, size, case.tokens, case.each], np.int16)
        print(name, size, kept.shape)
    save(GOLDENS / "policies" / "lacache.npz", out)


if __name__ == "__main__":
    main()
