"""Weights in blocks of 8 and 4 bits, and in a GGUF file's own, beside floats: bytes, quality, tokens per second.

All take turns in one process. KL is that of the next token's distribution, over a stretch of prose read token by token
under the full cache, to the floats' distribution.

    python -m benchmarks.weights
"""

import argparse
from typing import Any

import jax
import numpy as np

import jaxkv
from benchmarks.arguments import positive
from benchmarks.family_cost import decoded, prefilled
from benchmarks.flat_cost import TURNS, in_turns, ratios
from benchmarks.report import prose_rows, table, write
from jaxkv.evaluation.forced import follow

KINDS = (None, "int8", "int8-g16", "int4", "file")


def logits(params: Any, ids: np.ndarray, begun: int) -> jax.Array:
    """The log-probabilities `[N, V]` after each of `ids` from `begun` on."""
    cache = jaxkv.prefill(params, ids[None, :begun], room=len(ids) - begun)
    _, found = follow(params, cache, ids[None, begun:])
    assert found is not None
    return jax.nn.log_softmax(found[0])


def main() -> None:
    """Measure, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=positive, default=512)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--batches", type=positive, nargs="*", default=[1, 8], help="none: KL and bytes alone")
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args()
    loaded = {kind or "floats": jaxkv.load(options.model, weights=kind) for kind in KINDS}
    policy = jaxkv.policy("dapq-longflow", budget=options.budget)
    ids = np.asarray(prose_rows(loaded["floats"].tokenizer, 1, options.tokens)[0], np.int32)
    want = logits(loaded["floats"], ids, options.tokens // 4)
    found: dict[str, dict[str, Any]] = {}
    for kind, params in loaded.items():
        mine = want if kind == "floats" else logits(params, ids, options.tokens // 4)
        kl = jax.numpy.sum(jax.numpy.exp(want) * (want - mine), axis=-1)
        found[kind] = {
            "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights)),
            "kl": float(kl.mean()),
            "agree": float((want.argmax(-1) == mine.argmax(-1)).mean()),
        }
    for batch in options.batches:
        rows = prose_rows(loaded["floats"].tokenizer, batch, options.tokens)
        steps = in_turns(
            {kind: decoded(params, policy, rows, options.new_tokens) for kind, params in loaded.items()}, options.rounds
        )
        prompts = in_turns({kind: prefilled(params, policy, rows) for kind, params in loaded.items()}, options.rounds)
        for kind, row in found.items():
            row[f"tokens_per_second_{batch}"] = batch / float(np.median(steps[kind]))
            row[f"speed_{batch}"] = 1 / ratios(steps[kind], steps["floats"])[TURNS]
            row[f"prefill_{batch}"] = 1 / ratios(prompts[kind], prompts["floats"])[TURNS]
    header = ["weights", "MB", "KL", "same token"]
    header += [f"{what}, batch {b}" for b in options.batches for what in ("tokens/s", "over floats", "prefill over")]
    shown = [
        [kind, row["bytes"] / 1e6, row["kl"], row["agree"]]
        + [row[f"{what}_{b}"] for b in options.batches for what in ("tokens_per_second", "speed", "prefill")]
        for kind, row in found.items()
    ]
    print(table(f"{options.model}, {options.tokens} prompt tokens, budget {options.budget}", header, shown))
    print("written to", write("weights", {**vars(options), "results": found}))


if __name__ == "__main__":
    main()
