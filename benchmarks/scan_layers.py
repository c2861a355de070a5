"""Layers as one loop at prefill (`scan_layers`): how much sooner the program is there, and what it costs to run.

Both ways in turns in one process; every turn forgets what was compiled, calls once, and then again.

    python -m benchmarks.scan_layers
"""

import argparse
import statistics
import time
from typing import Any

import jax
import numpy as np

import jaxkv
from benchmarks.arguments import policies_at, policy_name, positive
from benchmarks.report import prose_rows, table, write

WAYS = {"in a row": False, "in a loop": True}
CALLS = ("first", "again")


def called(params: Any, rows: list[np.ndarray], policy: jaxkv.Policy, scan_layers: bool) -> float:
    """Seconds of one prefill."""
    started = time.perf_counter()
    jax.block_until_ready(jaxkv.prefill(params, rows, policy=policy, scan_layers=scan_layers))
    return time.perf_counter() - started


def main() -> None:
    """Measure, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policies", type=policy_name, nargs="+", default=["full", "snapkv", "dapq-longflow", "adakv"])
    parser.add_argument("--budget", type=positive, default=128)
    parser.add_argument("--length", type=positive, default=512)
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--rounds", type=positive, default=3)
    options = parser.parse_args()
    policies = policies_at(parser, options.policies, options.budget)
    params = jaxkv.load(options.model)
    rows = prose_rows(params.tokenizer, options.batch, options.length)

    results, lines = [], []
    for name, policy in policies.items():
        found: dict[str, dict[str, list[float]]] = {way: {which: [] for which in CALLS} for way in WAYS}
        for turn in range(options.rounds):
            for way in list(WAYS) if turn % 2 == 0 else reversed(WAYS):
                jax.clear_caches()
                for which in CALLS:
                    found[way][which].append(called(params, rows, policy, WAYS[way]))
        row, loop = ([statistics.median(found[way][which]) for which in CALLS] for way in WAYS)
        lines.append((name, *row, *loop, *(mine / other for mine, other in zip(loop, row, strict=True))))
        results.append({"policy": name, "seconds": found})
    header = ("policy", *(f"{way}: {which}" for way in WAYS for which in CALLS), "ratio: first", "again")
    print(table(f"seconds of a prefill, {options.batch} x {options.length} tokens", header, lines))
    settings = {key: getattr(options, key) for key in ("model", "budget", "length", "batch", "rounds")}
    print("written to", write("scan_layers", settings | {"runs": results}))


if __name__ == "__main__":
    main()
