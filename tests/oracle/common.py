"""What the oracle scripts share: where goldens go, how they are written, and greedy decoding with its margins."""

import json
from pathlib import Path

import numpy as np
import torch

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a compressed npz after checking that every float array is finite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            raise ValueError(f"{path.name}: {name} has values that are not finite")
    np.savez_compressed(path, **arrays)
    print(f"{path.relative_to(GOLDENS)}: {len(arrays)} arrays, {path.stat().st_size / 1e3:.0f} kB")


def save_json(path: Path, content) -> None:
    """Write readable JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{path.relative_to(GOLDENS)}: {path.stat().st_size / 1e3:.0f} kB")


def greedy(model, ids: torch.Tensor, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """`generate` without sampling or stop tokens from ids [B, T]: tokens int32 and top-2 logit gaps, [B, steps]."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[:, ids.shape[1] :]
    top = torch.stack(out.logits, dim=1).float().topk(2, dim=-1)
    assert tokens.shape[1] == steps and torch.equal(top.indices[..., 0], tokens)
    return tokens.numpy().astype(np.int32), (top.values[..., 0] - top.values[..., 1]).numpy()
