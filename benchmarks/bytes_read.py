"""Bytes of keys and values that policies hold, and that a decode step reads.

python -m benchmarks.bytes_read
"""

import argparse
from typing import Any

import numpy as np

import jaxkv
from benchmarks.arguments import positive
from benchmarks.family_cost import first_layers
from benchmarks.report import prose_rows, table, write

POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {}),
    ("h2o", {}),
    ("razorattention", {}),
    ("d2o", {}),
    ("tiered-h2o", {}),
    ("h2o", {"store": {"keys": {"kind": "int", "bits": 8}, "values": {"kind": "int", "bits": 4}}}),
    ("quest", {"count": 256}),
    ("quest", {"count": 256, "together": True}),
    ("h2o", {"read": {"kind": "pages", "count": 128, "together": True}}),
)


def main() -> None:
    """Measure, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=1024)
    parser.add_argument("--new-tokens", type=positive, default=32)
    parser.add_argument("--layers", type=positive, default=None, help="run the model's first layers only")
    options = parser.parse_args()
    params = jaxkv.load(options.model)
    if options.layers is not None:
        params = first_layers(params, options.layers)
    rows = prose_rows(params.tokenizer, 1, options.tokens)
    results = []
    for name, more in POLICIES:
        size = {"budget": options.budget} if jaxkv.policies.catalogue()[name].evicts else {}
        policy = jaxkv.policy(name, **size, **more)
        out = jaxkv.generate(params, rows, policy=policy, max_new_tokens=options.new_tokens, stop_tokens=())
        cache, beside = out.cache, sorted({name for layer in out.cache.layers for name in layer.beside})
        results.append(
            {
                "policy": name,
                "options": more,
                "held_bytes": cache.kv_bytes,
                "read_bytes": out.stats.read_bytes,
                "entries": float(np.mean(out.stats.kept)),
                "beside": beside,
                "step_ms": 1000 / out.stats.tokens_per_second,
            }
        )
    full = results[0]["held_bytes"]
    shown = [
        (
            " ".join([row["policy"], *row["options"]]), f"{row['entries']:.0f}", f"{row['held_bytes'] / 2**20:.2f}",
            f"{row['read_bytes'] / 2**20:.2f}", f"{row['held_bytes'] / full:.2f}", ", ".join(row["beside"]) or "-",
        )
        for row in results
    ]  # fmt: skip
    title = f"{options.tokens} prompt tokens, {options.new_tokens} new ones, budget {options.budget}"
    print(table(title, ("policy", "entries a head", "MiB held", "MiB read a step", "held over full", "beside"), shown))
    print("written to", write("bytes_read", {**vars(options), "results": results}))


if __name__ == "__main__":
    main()
