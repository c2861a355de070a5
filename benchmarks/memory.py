"""Bytes that the compiled programs need, by prompt length: prefill in blocks, and decode.

Nothing runs: the programs are compiled for abstract arguments and asked for their memory.

    python -m benchmarks.memory
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks.report import table, write
from jaxkv import run
from jaxkv.cache import KVCache
from jaxkv.plan import plan
from jaxkv.sampling import Sampler


def abstract(tree: Any) -> Any:
    """The shapes and dtypes of a tree's arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def needed(params: Any, policy: jaxkv.Policy, batch: int, length: int, room: int) -> dict[str, int]:
    """Temporary and argument bytes of prefill over `length` tokens and of decode after it; weights told apart."""
    config, weights = params.config, abstract(params.weights)
    shapes, limits = plan(policy, config, None, np.full(batch, length), room)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    pseudo = policy.extra if shapes.look else 0
    layers = jax.eval_shape(lambda: run.empty_layers(config, policy, batch, params.dtype))
    arguments = (
        weights, layers, ints(batch, shapes.length), ints(batch, shapes.length), ints(batch, pseudo), ints(batch),
        ints(*limits.shape),
    )  # fmt: skip
    static = {"config": config, "policy": policy}
    prefill = run.prefill.lower(*arguments, **static, plan=shapes).compile()
    layers, _ = jax.eval_shape(lambda *given: run.prefill(*given, **static, plan=shapes), *arguments)
    cache = KVCache(layers, ints(batch), ints(*limits.shape), ints(batch), policy=policy, model=params.fingerprint)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    state = run.DecodeState(cache, jax.ShapeDtypeStruct((batch,), bool), ints(batch), None, keys)
    decode = run.decode.lower(weights, state, **static, steps=16, sampler=Sampler(), stop=()).compile()

    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
    out = {"tokens": length, "weights": held, "cache": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layers))}
    for name, compiled in (("prefill", prefill), ("decode", decode)):
        memory = compiled.memory_analysis()
        out[f"{name}_temporary"] = memory.temp_size_in_bytes
        out[f"{name}_arguments"] = memory.argument_size_in_bytes
    return out


def main() -> None:
    """Compile, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policies", nargs="+", default=["dapq-longflow", "full"])
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8064])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--room", type=int, default=128, help="new tokens that a policy which only adds must hold")
    options = parser.parse_args()
    params = jaxkv.load(options.model)

    results = []
    for name in options.policies:
        policy = jaxkv.policy(name, budget=None if name == "full" else options.budget, block=options.block)
        found = [needed(params, policy, options.batch, length, options.room) for length in options.tokens]
        rows = []
        for each in found:
            for phase in ("prefill", "decode"):
                each[f"{phase}_total"] = each[f"{phase}_temporary"] + each[f"{phase}_arguments"]
            rows.append(
                (
                    str(each["tokens"]),
                    *(f"{(each[f'prefill_{what}']) / 1e6:.2f}" for what in ("temporary", "arguments")),
                    f"{each['prefill_total'] / found[0]['prefill_total']:.3f}",
                    f"{(each['prefill_total'] - each['weights']) / (found[0]['prefill_total'] - each['weights']):.3f}",
                    f"{each['cache'] / 1e6:.2f}",
                    f"{(each['decode_total'] - each['weights']) / 1e6:.2f}",
                )
            )
        title = f"{name}, budget {policy.budget}, block {policy.block}, batch {options.batch}; MB"
        header = ("tokens", "prefill temporary", "arguments", "ratio", "ratio without weights", "cache",
                  "decode without weights")  # fmt: skip
        print(table(title, header, rows), end="\n\n")
        results.append({"policy": name, "budget": policy.budget, "block": policy.block, "runs": found})
    print("written to", write("memory", {"batch": options.batch, "results": results}))


if __name__ == "__main__":
    main()
