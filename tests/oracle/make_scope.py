"""SCOPE's three forms at decode as released, on random queries, keys and values: what a layer keeps of each new token.

    python tests/oracle/make_scope.py PATH/TO/SCOPE

PATH is a checkout of https://github.com/Linking-ai/SCOPE (commit 8cbae48). `SnapKVCluster.update_kv_in_decoding` of
`model/kv_utils.py` runs unchanged, one layer of as many KV heads as query heads, behind a prompt that fills its part.
Keys and queries are turned by RoPE here, base 10000.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import torch
from common import GOLDENS, save

HEADS, DIM, PROMPT, WINDOW, RECENT, DELTA, STEPS = 3, 8, 10, 12, 4, 3, 30
UNIT = 16  # inputs are multiples of 1 / 16, so that they are stored as int8
MARGIN = 1e-3


class Unclear(Exception):
    """A choice that rounding could change."""


def turned(x: torch.Tensor) -> torch.Tensor:
    """x [H, T, D] at positions 0 to T - 1."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None].float() * 10_000.0 ** (-torch.arange(half).float() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def kept(module, form: str, query: torch.Tensor, key: torch.Tensor) -> np.ndarray:
    """Whether each entry [steps, H, T] is held after each new token."""
    cluster = module.SnapKVCluster(
        form, DELTA, num_hidden_layers=1, decoding_window_size=WINDOW, decoding_recent_size=RECENT, window_size=4,
        max_capacity_prompt=PROMPT,
    )  # fmt: skip
    kind = type(cluster)
    kind.current_decoding_step = kind.jump_step = kind.jump_layer = 0
    every, mine = turned(key), turned(query)
    held, out = every[None, :, :PROMPT], np.zeros((STEPS, HEADS, PROMPT + STEPS), bool)
    for step in range(STEPS):
        at = PROMPT + step
        held = torch.cat([held, every[None, :, at : at + 1]], 2)
        before = held
        held, _ = cluster.update_kv_in_decoding(held, mine[None, :, at : at + 1], held, None, 1)
        order = torch.cdist(held[0], every).argmin(-1)
        out[step] = np.eye(PROMPT + STEPS, dtype=bool)[order.numpy()].any(1)
        order, back = order.sort(-1)
        held = held.gather(2, back[None, ..., None].expand_as(held))
        lost = before.shape[2] - held.shape[2]
        if lost:
            weights = (before[0] @ mine[:, at, :, None])[..., 0] / DIM**0.5
            line = weights[:, PROMPT:-RECENT].sort(-1).values
            if (line[:, lost] - line[:, lost - 1]).min() < MARGIN:
                raise Unclear(form)
    return out


def main() -> None:
    spec = importlib.util.spec_from_file_location("kv_utils", Path(sys.argv[1]) / "model" / "kv_utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        given = rng.integers(-40, 41, (3, HEADS, PROMPT + STEPS, DIM)).astype(np.int8)
        query, key, _ = torch.from_numpy(given).float() / UNIT
        try:
            out = {form: kept(module, form, query, key) for form in ("slide", "adaptive", "discontinuous")}
            break
        except Unclear:
            continue
    out["inputs"] = given
    out["sizes"] = np.array([PROMPT, WINDOW, RECENT, DELTA, UNIT], np.int16)
    print({form: out[form][:, 0].sum(-1).tolist() for form in ("slide", "adaptive", "discontinuous")})
    save(GOLDENS / "policies" / "scope.npz", out)


if __name__ == "__main__":
    main()
