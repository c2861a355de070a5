"""A GGUF file -> config, tensors and tokenizer metadata, with the `gguf` reader."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.errors import BadWeights, unknown
from jaxkv.models import ModelConfig, Rope
from jaxkv.models.rope import frequencies
from jaxkv.weights.tables import Read

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
GEMMA_PATTERN = 6  # five sliding layers, then a global one; the file does not say so


def open_file(path: Path) -> Any:
    """The file's reader. Raises `BadWeights` where it is truncated or no GGUF."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    except Exception as error:
        raise BadWeights(f"{path}: truncated or not a GGUF file ({type(error).__name__}: {error})") from error
    if not reader.tensors or end > path.stat().st_size:
        raise BadWeights(f"{path}: truncated: {path.stat().st_size} bytes, expected at least {end}; fetch it again")
    return reader


def fields(reader: Any) -> dict[str, Any]:
    """The metadata as plain Python values."""
    return {name: field.contents() for name, field in reader.fields.items()}


def read_config(reader: Any, source: str) -> ModelConfig:
    """The model that the metadata describes. Raises `UnknownName` for an architecture that there is not."""
    meta = fields(reader)
    arch = meta.get("general.architecture", "")
    if arch not in FAMILIES:
        raise unknown("GGUF architecture", str(arch), FAMILIES)

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"{arch}.{key}", default)

    names = {tensor.name: tensor for tensor in reader.tensors}
    heads, hidden = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length") or hidden // heads
    layers, gemma = get("block_count"), arch == "gemma3"
    window = get("attention.sliding_window")
    sliding = [bool(window) and (not gemma or (layer + 1) % GEMMA_PATTERN != 0) for layer in range(layers)]
    rope = Rope(theta=float(get("rope.freq_base", 10000.0)))
    if get("rope.scaling.type") == "linear":
        rope = Rope(theta=rope.theta, scaling="linear", factor=float(get("rope.scaling.factor")))
    elif get("rope.scaling.type") not in (None, "none"):
        raise BadWeights(f"{source}: RoPE scaling {get('rope.scaling.type')!r} is not supported; expected none or linear")
    if "rope_freqs.weight" in names:
        rope = _llama3(rope, head_dim, np.array(names["rope_freqs.weight"].data, np.float32), source)
    stops = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    return ModelConfig(
        family=FAMILIES[arch],
        vocab_size=int(names["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=get("context_length"),
        rope=rope,
        layer_types=tuple("sliding" if each else "full" for each in sliding),
        norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        sliding_window=int(window) if window else None,
        local_rope=Rope(theta=10000.0) if gemma else None,
        activation="gelu_tanh" if gemma else "silu",
        norm_offset=0.0,  # GGUF stores Gemma's norms with the 1 added
        embed_scale=hidden**0.5 if gemma else None,
        post_norms=gemma,
        stop_tokens=tuple(dict.fromkeys(int(stop) for stop in stops if stop is not None)),
        bos_token=meta.get("tokenizer.ggml.bos_token_id"),
    )


def _llama3(rope: Rope, head_dim: int, factors: np.ndarray, source: str) -> Rope:
    """Llama 3's scaling, of which the file holds only the resulting divisors."""
    scaled = Rope(theta=rope.theta, scaling="llama3", factor=float(factors.max()))
    if not np.allclose(frequencies(rope, head_dim) / factors, frequencies(scaled, head_dim), rtol=1e-4):
        raise BadWeights(f"{source}: rope_freqs.weight is not Llama 3's scaling; this model's RoPE is not supported")
    return scaled


def read_tensors(reader: Any, config: ModelConfig, source: str) -> Iterator[tuple[str, Read]]:
    """Name and dequantising reader of every tensor."""
    llama = fields(reader).get("general.architecture") == "llama"
    for tensor in reader.tensors:
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(tensor.name.split(".")[-2])
        yield tensor.name, lambda t=tensor, h=heads if llama else None: _read(t, h, source)


def _read(tensor: Any, heads: int | None, source: str) -> np.ndarray:
    import gguf

    try:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
    except Exception as error:
        raise BadWeights(f"{source}: tensor {tensor.name!r} cannot be read ({error}); fetch the file again") from error
    if heads is None:
        return array
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])  # GGUF interleaves RoPE's pairs
    return pairs.swapaxes(1, 2).reshape(array.shape)
