"""The transformers side of decode_speed: runs in an environment with torch, reads requests and writes answers as JSON.

One request per line on stdin: {"ids": [[...], ...], "new_tokens": n, "cache": "dynamic" or "static"}. One answer per
line on stdout: the seconds up to the first token, the seconds of the tokens after it, and the tokens.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Load the model, say so, and answer requests until stdin closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")  # libraries print to stdout: keep the answers apart from that
    os.dup2(2, 1)
    os.environ["HF_HUB_OFFLINE"] = "1"

    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.gguf.parent, gguf_file=options.gguf.name, dtype=torch.float32
    ).eval()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**versions, "threads": torch.get_num_threads()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), file=answers, flush=True)


def answer(model, request: dict) -> dict:
    """Generate greedily, noting the time at which the logits of each token are there."""
    import torch

    at = []

    def note(_, scores):
        at.append(time.perf_counter())
        return scores

    ids = torch.tensor(request["ids"])
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request["new_tokens"],
            min_new_tokens=request["new_tokens"],
            cache_implementation=request["cache"],
            pad_token_id=0,
            logits_processor=[note],
        )
    ended = time.perf_counter()
    return {
        "prefill_seconds": at[0] - started,
        "decode_seconds": ended - at[0],
        "tokens": out[:, ids.shape[1] :].tolist(),
    }


if __name__ == "__main__":
    main()
