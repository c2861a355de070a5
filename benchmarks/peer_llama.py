"""The llama.cpp side of stored_blocks, which runs in an environment with llama-cpp-python.

One request: {"ids": [[...], ...], "new_tokens": n}; every row is a sequence of one batch. Its answer: the seconds up to
the first token, the seconds of the tokens after it, and the tokens, greedy.
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
    """The versions and compiled-in features, and what answers a request."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), settings)
    if not model:
        raise RuntimeError(f"{gguf} cannot be loaded")
    system = llama_cpp.llama_print_system_info().decode()
    about = {"llama_cpp_python": llama_cpp.__version__, "system": system, "threads": threads}
    return about, lambda request: answer(model, threads, request)


def answer(model: Any, threads: int, request: dict) -> dict:
    """All prompts in one batch, then a token for each row per step."""
    import llama_cpp

    rows, new = request["ids"], request["new_tokens"]
    longest = max(map(len, rows))
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = len(rows) * (-(-(longest + new) // 256) * 256)
    settings.n_seq_max = len(rows)
    settings.n_batch = len(rows) * longest
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, settings)
    batch = llama_cpp.llama_batch_init(len(rows) * longest, 0, 1)
    try:
        started = time.perf_counter()
        places = [(row, at, token) for row, ids in enumerate(rows) for at, token in enumerate(ids)]
        last = [len(ids) - 1 for ids in rows]
        found = [run(context, batch, places, {(row, at) for row, at in enumerate(last)})]
        first = time.perf_counter()
        for step in range(new - 1):
            places = [(row, last[row] + 1 + step, token) for row, token in enumerate(found[-1])]
            found.append(run(context, batch, places, {(row, at) for row, at, _ in places}))
        ended = time.perf_counter()
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
    return {
        "prefill_seconds": first - started,
        "decode_seconds": ended - first,
        "tokens": [list(row) for row in zip(*found, strict=True)],
    }


def run(context: Any, batch: Any, places: list[tuple[int, int, int]], wanted: set[tuple[int, int]]) -> list[int]:
    """Run (row, position, token) places; the likeliest next token of each wanted one, in order."""
    import llama_cpp
    import numpy as np

    batch.n_tokens = len(places)
    for index, (row, at, token) in enumerate(places):
        batch.token[index], batch.pos[index] = token, at
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
        batch.logits[index] = (row, at) in wanted
    if llama_cpp.llama_decode(context, batch) != 0:
        raise RuntimeError("llama_decode failed")
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context)))
    chosen = [index for index, (row, at, _) in enumerate(places) if (row, at) in wanted]
    logits = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, index), (size,)) for index in chosen]
    return [int(each.argmax()) for each in logits]


if __name__ == "__main__":
    main()
