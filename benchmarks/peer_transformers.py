"""The transformers side of decode_speed, which runs in an environment with torch.

One request: {"ids": [[...], ...], "new_tokens": n, "cache": "dynamic" or "static"}, and "padding", how many of each
row's first ids are none, where some are. Its answer: the seconds up to the first token, the seconds of the tokens after
it, and the tokens.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peer import serve


def main() -> None:
    """Load the model, say so, and answer requests until stdin closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    serve(lambda: begin(options.gguf, options.threads))


def begin(gguf: Path, threads: int) -> tuple[dict[str, Any], Callable]:
    """The model's versions, and what answers a request."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {**versions, "threads": torch.get_num_threads()}, lambda request: answer(model, request)


def answer(model, request: dict) -> dict:
    """Generate greedily, noting the time at which the logits of each token are there."""
    import torch

    at = []

    def note(_, scores):
        at.append(time.perf_counter())
        return scores

    ids = torch.tensor(request["ids"])
    padding = torch.tensor(request.get("padding", [0] * len(ids)))
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=(torch.arange(ids.shape[1]) >= padding[:, None]).long(),
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
