"""Tensor names of the checkpoint formats -> our parameters: one regex table, and how pieces are put together."""

import dataclasses
import re
from collections.abc import Callable, Iterable

import numpy as np

from jaxkv.errors import BadWeights
from jaxkv.models import ModelConfig

Path = tuple[str | int, ...]
Read = Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Entry:
    """`pattern` matches a tensor's name; `path` is our parameter ("{}" the layer), `part` its place in a fused one."""

    pattern: str
    path: str
    part: int = 0
    parts: int = 1


def _layer_entries(prefix: str, names: dict[str, str]) -> list[Entry]:
    """The entries of one layer, the same for every format but for the names."""
    n = {key: prefix + re.escape(name) for key, name in names.items()}
    entries = []
    for suffix in ("weight", "bias"):
        for part, key in enumerate("qkv"):
            entries.append(Entry(rf"{n[key]}\.{suffix}", f"layers.{{}}.attention.qkv.{suffix}", part, 3))
    for part, key in enumerate(("gate", "up")):
        entries.append(Entry(rf"{n[key]}\.weight", "layers.{}.mlp.gate_up.weight", part, 2))
    for key, path in (
        ("out", "attention.out"),
        ("down", "mlp.down"),
        ("q_norm", "attention.q_norm"),
        ("k_norm", "attention.k_norm"),
        ("attention_norm", "attention_norm"),
        ("attention_post", "attention_post"),
        ("mlp_norm", "mlp_norm"),
        ("mlp_post", "mlp_post"),
    ):
        entries.append(Entry(rf"{n[key]}\.weight", f"layers.{{}}.{path}.weight"))
    return entries


def hugging_face(config: ModelConfig) -> list[Entry]:
    """safetensors names of transformers' checkpoints; Gemma's second norm sits behind the attention, not the MLP's."""
    post = config.post_norms
    names = {
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj",
        "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
        "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
        "attention_norm": "input_layernorm",
        "attention_post": "post_attention_layernorm" if post else "never",
        "mlp_norm": "pre_feedforward_layernorm" if post else "post_attention_layernorm",
        "mlp_post": "post_feedforward_layernorm",
    }  # fmt: skip
    front = r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?"
    return [
        *_layer_entries(front + r"layers\.(\d+)\.", names),
        Entry(front + r"embed_tokens\.weight", "embedding"),
        Entry(front + r"norm\.weight", "norm.weight"),
        Entry(r"(?:language_model\.)?lm_head\.weight", "head.weight"),
    ]


def gguf(config: ModelConfig) -> list[Entry]:
    """Names in GGUF files."""
    names = {
        "q": "attn_q", "k": "attn_k", "v": "attn_v", "out": "attn_output",
        "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
        "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
        "attention_norm": "attn_norm", "attention_post": "post_attention_norm",
        "mlp_norm": "ffn_norm", "mlp_post": "post_ffw_norm",
    }  # fmt: skip
    return [
        *_layer_entries(r"blk\.(\d+)\.", names),
        Entry(r"token_embd\.weight", "embedding"),
        Entry(r"output_norm\.weight", "norm.weight"),
        Entry(r"output\.weight", "head.weight"),
    ]


IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|rope_freqs\.weight)|vision_tower\..*|multi_modal_projector\..*|model\.vision_tower\..*|model\.multi_modal_projector\..*")


def assemble(
    tensors: Iterable[tuple[str, Read]],
    table: list[Entry],
    expected: dict[Path, tuple[int, ...]],
    dtype,
    source: str,
) -> dict[Path, np.ndarray]:
    """Every expected parameter from the tensors, matrices turned to [inputs, outputs] and fused ones joined.

    Tensors are read one at a time. Raises `BadWeights` that lists all that is missing, unexpected, of the wrong
    shape, or not finite.
    """
    pieces: dict[Path, dict[int, Read]] = {}
    parts: dict[Path, int] = {}
    wrong: list[str] = []
    for name, read in tensors:
        if IGNORED.fullmatch(name):
            continue
        found = _find(name, table)
        if found is None or found[0] not in expected:
            if name.endswith("lm_head.weight") or name == "output.weight":
                continue  # a copy of the tied embedding
            wrong.append(f"unexpected tensor {name!r}")
            continue
        path, entry = found
        pieces.setdefault(path, {})[entry.part] = read
        parts[path] = entry.parts
    out: dict[Path, np.ndarray] = {}
    for path, shape in expected.items():
        label = ".".join(map(str, path))
        have = pieces.get(path, {})
        if len(have) < parts.get(path, 1):
            wrong.append(f"missing {label}" + (f" (parts {sorted(have)} of {parts[path]} there)" if have else ""))
            continue
        array = _joined(path, [have[part] for part in sorted(have)])
        if array.shape != shape:
            wrong.append(f"{label} has shape {array.shape}, expected {shape}")
        elif not np.isfinite(array.astype(np.float32, copy=False)).all():
            wrong.append(f"{label} holds NaN or infinity")
        else:
            out[path] = array.astype(dtype)
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise BadWeights(f"{source}: {'; '.join(wrong[:8])}{more}. Is the file whole, and of the model its config names?")
    return out


def _find(name: str, table: list[Entry]) -> tuple[Path, Entry] | None:
    for entry in table:
        match = re.fullmatch(entry.pattern, name)
        if match:
            path = entry.path.format(*match.groups())
            return tuple(int(step) if step.isdigit() else step for step in path.split(".")), entry
    return None


def _joined(path: Path, reads: list[Read]) -> np.ndarray:
    """The pieces side by side along the outputs; a matrix is stored [outputs, inputs] in every format."""
    turn = path[-1] == "weight" and path != ("embedding",)
    arrays = [read() for read in reads]
    arrays = [array.T if turn and array.ndim == 2 else array for array in arrays]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
