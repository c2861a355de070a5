"""How far channels of a model's keys stand out, over all KV heads and the tokens of a stretch of prose: of each layer
the largest |k| of any channel, that of the median channel, and the middle of the largest one's range.

    python -m benchmarks.key_channels --model qwen2.5-coder-1.5b --weights file

Where the first is many times the second, a scale per token loses the other channels: take `int-balanced` for keys. A
middle that is as large comes from a bias of the key projection.
"""

import argparse
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks.arguments import positive
from benchmarks.report import named, prose_rows, table, write
from jaxkv.store.balance import largest, middle


def measured(params: Any, tokens: int) -> list[dict[str, float]]:
    """Of each layer the figures."""
    rows = prose_rows(params.tokenizer, 1, tokens)
    cache = jaxkv.prefill(params, [np.asarray(row[:tokens], np.int32) for row in rows], policy=None)
    found = []
    for number, layer in enumerate(cache.layers):
        there = layer.positions >= 0
        centre = np.asarray(middle(layer.keys, there))[0].ravel()
        size = np.asarray(largest(layer.keys, there))[0].ravel()
        best = int(np.argmax(size))
        found.append({"layer": number, "largest": float(size.max()), "median": float(np.median(size)),
                      "middle": float(centre[best])})  # fmt: skip
    return found


def main() -> None:
    """Print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default=None, help='"file" for a GGUF file\'s blocks')
    parser.add_argument("--tokens", type=positive, default=512)
    options = parser.parse_args()
    found = measured(jaxkv.load(options.model, dtype=jnp.float32, weights=options.weights), options.tokens)
    header = ("layer", "largest |k|", "median channel's", "middle of the largest")
    print(table(f"{options.model}, {options.tokens} tokens of prose", header, [tuple(row.values()) for row in found]))
    print("written to", write(named("key_channels", options.model), {**vars(options), "results": found}))


if __name__ == "__main__":
    main()
