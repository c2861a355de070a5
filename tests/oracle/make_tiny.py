"""Tiny random models of every family as Hugging Face folders, with their logits and greedy tokens.

python tests/oracle/make_tiny.py [family ...]
"""

import json
import shutil
import sys

import numpy as np
import torch
import transformers
from common import GOLDENS, greedy, save
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma3 import modeling_gemma3

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
    "use_cache": True,
}

# config.json as the published checkpoints write it (rope_theta and rope_scaling at the top level).
FAMILIES = {
    "llama2": COMMON
    | LLAMA
    | {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "llama3": COMMON
    | LLAMA
    | {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
            "rope_type": "llama3",
        },
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "smollm2": COMMON
    | LLAMA
    | {
        "vocab_size": 192,
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
    },
    "qwen2": COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": 192,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_window_layers": 1,
        "rope_theta": 1000000.0,
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "qwen3": COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": 160,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_window_layers": 3,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "mistral": COMMON
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "sliding_window": 8,
        "tie_word_embeddings": False,
    },
    "gemma3_text": COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "vocab_size": 256,
        "hidden_size": 40,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 24,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
    },
}

# The same weights under a changed configuration: config-<variant>.json and logits-<variant>.npz.
VARIANTS = {
    "qwen2": {"sliding": {"use_sliding_window": True}},
    "mistral": {"full": {"sliding_window": None}},
    "gemma3_text": {"softcap": {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}},
}

GAP = 3e-3  # smallest top-2 logit gap allowed along the greedy tokens


class BadSeed(Exception):
    """Greedy tokens that rounding could change, or that are always the same."""


def randomise(model, seed: int) -> None:
    """Weights with a spread that makes attention and logits far from flat; biases and norm weights not trivial."""
    generator = torch.Generator().manual_seed(seed)
    gemma = model.config.model_type == "gemma3_text"
    for name, weight in sorted(model.named_parameters()):
        normal = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1 and "norm" in name:
            # Gemma stores what is added to 1; larger after a sublayer, against repeating the input
            new = 0.25 * normal + ((1.0 if "post_" in name else 0.0) if gemma else 1.0)
        elif weight.ndim == 1:
            new = 0.4 * normal
        elif "q_proj" in name or "k_proj" in name:
            new = 0.2 * normal
        elif gemma and "embed" in name:
            new = 0.15 * normal  # scaled by sqrt(hidden) on entry: not so large that the model repeats its input
        else:
            new = 0.3 * normal
        weight.data.copy_(new)


def honour_attention_softcap() -> None:
    """Gemma 3's eager attention takes a soft-cap, but transformers 5.2 does not hand it `attn_logit_softcapping`."""
    plain = modeling_gemma3.eager_attention_forward

    def capped(module, *args, **kwargs):
        return plain(module, *args, softcap=module.attn_logit_softcapping, **kwargs)

    modeling_gemma3.eager_attention_forward = capped


def logits_of(folder, config: dict, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """Full eager logits, and greedy tokens that a full forward over them confirms."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        tokens, gaps = greedy(model, ids[:, :24], 32)
        again = model(torch.cat([ids[:, :24], torch.from_numpy(tokens).long()], 1), use_cache=False).logits
    assert (again[:, 23:-1].argmax(-1).numpy() == tokens).all(), "generate and a full forward disagree"
    assert logits.std(-1).min() > 0.3, "flat logits"
    distinct = [len(set(row)) for row in tokens.tolist()]
    if gaps.min() < GAP or min(distinct) < 8:
        raise BadSeed(f"{folder.name}: gap {gaps.min():.1e}, distinct tokens {distinct}")
    print(
        f"{folder.name}: logits std {logits.std():.2f}, max {logits.abs().max():.1f}, smallest gap {gaps.min():.3f}, "
        f"distinct tokens {distinct}"
    )
    return {"ids": ids.numpy().astype(np.int32), "logits": logits.numpy(), "greedy": tokens, "gaps": gaps}


def make(family: str, seed: int) -> None:
    """One folder: config.json, the same as transformers 5 writes it, weights, logits."""
    folder = GOLDENS / "tiny" / family
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    randomise(model, seed)
    weights = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}  # no tied copies
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    model.config.to_json_file(folder / "config-v5.json", use_diff=False)
    written = json.loads((folder / "config-v5.json").read_text())
    written.pop("_name_or_path", None)
    (folder / "config-v5.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    assert (folder / "model.safetensors").stat().st_size < 400_000, "too large"

    ids = torch.randint(3, config["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(100 + seed))
    result = logits_of(folder, config, ids)
    with torch.no_grad():
        direct = model.eval()(ids, use_cache=False).logits
    assert (direct - torch.from_numpy(result["logits"])).abs().max() < 1e-4, "the written folder gives other logits"
    save(folder / "logits.npz", result)
    for variant, changes in VARIANTS.get(family, {}).items():
        changed = config | changes
        (folder / f"config-{variant}.json").write_text(json.dumps(changed, indent=2, sort_keys=True) + "\n")
        other = logits_of(folder, changed, ids)
        assert np.abs(other["logits"] - result["logits"]).max() > 0.1, f"{variant} changes nothing"
        save(folder / f"logits-{variant}.npz", other)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    honour_attention_softcap()
    for family in sys.argv[1:] or FAMILIES:
        for seed in range(1, 30):
            try:
                make(family, seed)
            except BadSeed as bad:
                print(f"{bad}, seed {seed}: trying the next seed")
            else:
                break
        else:
            raise SystemExit(f"{family}: no seed would do")
