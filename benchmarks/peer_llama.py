"""The llama.cpp side of stored_blocks and serving, which runs in an environment with xllamacpp.

llama.cpp's own server runs inside the process, with as many slots as are asked for; prompts go to it as token ids over
HTTP. One request: {"ids": [[...], ...], "new_tokens": n}: every row is a slot of one batch. Its answer: the seconds up
to the last row's first token, the seconds of the tokens after it, and the tokens, greedy. Or {"work": [[at, ids, new],
...]}: requests that arrive at seconds `at`, whose answer is the seconds of each one's first and last token.
"""

import argparse
import json
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peer import serve


def main() -> None:
    """Start the server, say so, and answer requests until stdin closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens per slot")
    parser.add_argument("--batch", type=int, default=2048, help="tokens of prompts that are read at a time")
    options = parser.parse_args()
    serve(lambda: begin(options))


def begin(options: argparse.Namespace) -> tuple[dict[str, Any], Callable]:
    """The versions and compiled-in features, and what answers a request."""
    from importlib import metadata

    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(options.gguf)
    settings.n_gpu_layers = 0
    settings.n_parallel = options.slots
    settings.n_ctx = options.slots * options.context
    settings.n_batch = options.batch
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = options.threads
    settings.cache_prompt = False  # every prompt is read whole
    settings.cache_ram_mib = 0
    settings.port = 0
    server = xllamacpp.Server(settings)
    about = {
        "xllamacpp": metadata.version("xllamacpp"),
        "build": xllamacpp.BUILD_INFO,
        "system": xllamacpp.get_system_info(),
        "threads": options.threads,
    }
    return about, lambda request: answer(server, request)


def answer(server: Any, request: dict) -> dict:
    """Requests that arrive one after another, or one batch."""
    if "work" in request:
        return {"done": arriving(server, request["work"])}
    rows, new = request["ids"], request["new_tokens"]
    started = time.perf_counter()
    out = json.load(asked(server, {"prompt": rows if len(rows) > 1 else rows[0], **greedy(new)}))
    seconds = time.perf_counter() - started
    done = sorted(out if isinstance(out, list) else [out], key=lambda each: each["index"])
    decode = max(each["timings"]["predicted_ms"] for each in done) / 1000
    return {
        "prefill_seconds": seconds - decode,
        "decode_seconds": decode,
        "tokens": [each["tokens"] for each in done],
    }


def greedy(new: int) -> dict[str, Any]:
    """Settings of a request: so many likeliest tokens, whatever they are."""
    return {"n_predict": new, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True}


def asked(server: Any, body: dict) -> Any:
    """The open answer of the server's native endpoint."""
    ask = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(ask)


def arriving(server: Any, work: list[tuple[float, list[int], int]]) -> list[tuple[float, float]]:
    """Each request in a thread of its own, streamed: when its first and last token were there."""
    done: list[tuple[float, float]] = [(0.0, 0.0)] * len(work)
    started = time.perf_counter()

    def ask(number: int) -> None:
        at, ids, new = work[number]
        time.sleep(max(at - (time.perf_counter() - started), 0))
        times = []
        with asked(server, {"prompt": ids, "stream": True, **greedy(new)}) as lines:
            for line in lines:
                if line.startswith(b"data: ") and json.loads(line[6:]).get("tokens"):
                    times.append(time.perf_counter() - started)
        done[number] = (times[0], times[-1])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


if __name__ == "__main__":
    main()
