"""Writes the goldens beside it: transformers' logits and greedy tokens of the large wheels' models, in float32.

Runs in the oracles' environment (see ../../oracle/README.md), with the GGUF file that `jaxkv.load` has joined:

    python tests/models/large/make.py ~/.cache/jaxkv/gemma-3-270m-q4_k_m.gguf gemma3-270m
    python tests/models/large/make.py ~/.cache/jaxkv/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf qwen2.5-coder-1.5b

The ids of the prompts come from `prompts.json`, so that no tokenizer is part of the comparison.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
NEW, LAST, SOME = 64, 4, 256


def main(file: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    vocabulary = np.sort(np.random.default_rng(0).choice(model.config.vocab_size, SOME, replace=False))
    out = {"vocabulary": vocabulary.astype(np.int32)}
    for prompt, ids in json.loads((HERE / "prompts.json").read_text())[name].items():
        tokens = list(ids)
        with torch.no_grad():
            step = model(torch.tensor([tokens]), use_cache=True)
            last, gaps = step.logits[0, -LAST:].numpy(), []
            for _ in range(NEW):
                best = torch.topk(step.logits[0, -1], 2)
                gaps.append(float(best.values[0] - best.values[1]))
                tokens.append(int(best.indices[0]))
                step = model(torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values, use_cache=True)
        assert np.isfinite(last).all() and last.std() > 0.1
        out |= {
            f"{prompt}/ids": np.array(ids, np.int32),
            f"{prompt}/last": last[:, vocabulary],
            f"{prompt}/argmax": last.argmax(-1).astype(np.int32),
            f"{prompt}/greedy": np.array(tokens[len(ids) :], np.int32),
            f"{prompt}/greedy_gaps": np.array(gaps, np.float32),
        }
        print(name, prompt, len(ids), "smallest gap", min(gaps), flush=True)
    np.savez_compressed(HERE / f"{name}.npz", **out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
