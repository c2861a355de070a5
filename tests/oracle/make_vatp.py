"""VATP as released, under H2O: prompt and steps.

    python tests/oracle/make_vatp.py PATH/TO/vatp

PATH is a checkout of https://github.com/guozhiyu/vatp (commit 39ea686). The attention that replaces Llama's
(`LlamaAttention_heavy_hitter.forward` of `utils_hh/modify_llama.py`) runs unchanged on queries, keys and values of the
tiny llama2, turned already; it knows no groups, so every query head has a copy of its KV head. It hides what it evicts
by a mask.
"""

import ast
import math
import sys
import types
import typing
from pathlib import Path

import numpy as np
import torch
from common import GOLDENS, save
from llama import Llama, Seen
from make_h2o import apart
from released import NOISE, STEPS, batch, clear_steps, model, stepped

CASES = {"p20-b17": (20, 17, 4), "p60-b25": (60, 25, 4)}  # tokens, budget while a step attends, sinks


def attention(file: Path) -> type:
    """The release's attention, with RoPE left to its caller; the file's other statements do not run."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    given = {
        "torch": torch, "nn": types.SimpleNamespace(Module=object, functional=torch.nn.functional), "math": math,
        "LlamaConfig": object, "Optional": typing.Optional, "Tuple": tuple,
        "apply_rotary_pos_emb": lambda query, key, *_: (query, key),
    }  # fmt: skip
    exec(compile(tree, str(file), "exec"), given)
    return given["LlamaAttention_heavy_hitter"]


def layer_of(kind: type, tiny: Llama, share: float, sinks: int) -> typing.Any:
    """One layer's attention: heavy and recent entries, each this share of the prompt."""
    it = kind.__new__(kind)
    it.num_heads, it.head_dim, it.hidden_size = tiny.heads, tiny.dim, tiny.heads * tiny.dim
    it.o_proj, it.rotary_emb = (lambda x: x), (lambda x, seq_len: (None, None))
    it.heavy_budget_ratio = it.recent_budget_ratio = share
    it.input_length, it.cache_budget_records, it.layerid = [], [], 0
    it.applyval, it.h2o, it.sink_len = True, True, sinks
    it._reset_masks()
    return it


def run(kind: type, tiny: Llama, ids: torch.Tensor, budget: int, sinks: int, turn: int | None) -> dict[str, np.ndarray]:
    """Greedy tokens, and what is kept after the prompt and after every step; with a turn, under noise."""
    half, length = budget // 2, len(ids)
    layers = [layer_of(kind, tiny, half / length + 1e-6, sinks) for _ in range(tiny.layers)]
    generator, held = torch.Generator().manual_seed(turn or 0), [None] * tiny.layers
    flat = lambda x: x.transpose(1, 2).reshape(1, x.shape[2], -1)  # noqa: E731

    def attend(layer: int, seen: Seen) -> torch.Tensor:
        query, key, value = batch(seen)
        if turn is not None:
            query = query * (1 + NOISE * torch.randn(query.shape, generator=generator))
        it, many = layers[layer], query.shape[2]
        it.q_proj, it.k_proj, it.v_proj = (lambda _, x=x: flat(x) for x in (query, key, value))
        causal = torch.full((many, many), torch.finfo(torch.float32).min).triu(1)[None, None] if many > 1 else None
        context, _, held[layer] = it.forward(flat(query), causal, None, held[layer], use_cache=True)
        return context.view(many, tiny.heads, tiny.dim).transpose(0, 1)

    def kept() -> np.ndarray:
        rows = np.full((tiny.layers, tiny.heads, budget - 1), -1, np.int16)
        for row, it in zip(rows, layers, strict=True):
            for head, mask in zip(row, it.attention_masks_next[0, :, 0, :-1].bool().numpy(), strict=True):
                head[:] = np.flatnonzero(mask)
        return rows

    every, tokens = stepped(tiny, ids, attend, kept, few=7)
    assert len(every) == STEPS + 1
    return {"kept": every, "tokens": tokens}


def main() -> None:
    kind = attention(Path(sys.argv[1]) / "utils_hh" / "modify_llama.py")
    tiny, arrays = apart(model()), {}
    for name, (length, *more) in CASES.items():
        arrays |= clear_steps(name, length, lambda ids, turn, more=more: run(kind, tiny, ids, *more, turn))
    save(GOLDENS / "policies" / "vatp_released.npz", arrays)


if __name__ == "__main__":
    main()
