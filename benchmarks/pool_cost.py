"""What a pool costs against a uniform cache of the same total, and what each method holds of the full cache.

Decode steps of the same model and parts, once with heads that compete and once with equal heads, in turns in one
process; then bytes held over the full cache's, read from the arrays, for every method whose heads compete.

    python -m benchmarks.pool_cost [--oracle-python PATH]

With PATH, a Python with torch, transformers and kvpress, kvpress' bytes stand beside those of its twins.
"""

import argparse
import dataclasses
from typing import Any

import jax
import numpy as np

import jaxkv
from benchmarks import peer_kvpress
from benchmarks.arguments import policies_at, policy_name, positive, python, result_name
from benchmarks.family_cost import decoded, prefilled
from benchmarks.flat_cost import TURNS, in_turns, ratios
from benchmarks.report import prose_rows, table, write
from jaxkv.policies import Uniform
from jaxkv.policies.catalogue import catalogue


def uniform(policy: jaxkv.Policy) -> jaxkv.Policy:
    """The same parts with equal heads and layers."""
    return dataclasses.replace(policy, allocate=getattr(policy.allocate, "layers", Uniform()))


def costs(params: Any, policy: jaxkv.Policy, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a decode step and of the prefill, pool and uniform in turns, and the median of the rounds' ratios."""
    jax.clear_caches()
    rows = prose_rows(params.tokenizer, batch, options.tokens)
    pair = {"pool": policy, "uniform": uniform(policy)}
    step = in_turns(
        {name: decoded(params, each, rows, options.new_tokens) for name, each in pair.items()}, options.rounds
    )
    prefill = in_turns({name: prefilled(params, each, rows) for name, each in pair.items()}, options.rounds)
    ratio = {
        name: ratios(took["pool"], took["uniform"])[TURNS] for name, took in (("step", step), ("prefill", prefill))
    }
    return {"policy": policy.name, "batch": batch, "step": step, "prefill": prefill, "ratio": ratio}


def held(params: Any, policy: jaxkv.Policy, full: int, rows: list[list[int]]) -> dict[str, Any]:
    """Bytes of keys and values held after the prompt, over the full cache's, beside the fraction asked for."""
    jax.clear_caches()  # so many programs, each in many pieces, reach the number of mappings a process may have
    cache = jaxkv.prefill(params, rows, policy=policy)
    mine = cache.kv_bytes
    spread = np.asarray(cache.held())[:, 0]
    return {
        "policy": policy.name, "asked": policy.budget / len(rows[0]), "held": mine / full,
        "least": int(spread.min()), "most": int(spread.max()),
    }  # fmt: skip


def theirs(python: str, model: str, names: list[str], budget: int, row: list[int]) -> dict[str, float]:
    """Bytes of keys and values that kvpress' twins of the policies hold after the prompt, over its full cache's."""
    peer = peer_kvpress.started(python, model)
    prompt = {"context": row, "rest": [], "compress": "all", "new_tokens": 1, "stop": []}
    full = peer.ask(press="none", kept=None, **prompt)["cache_bytes"]
    twins = [name for name in names if name in peer_kvpress.TWINS]
    found = {
        name: peer.ask(press=peer_kvpress.TWINS[name], kept=budget, **prompt)["cache_bytes"] / full for name in twins
    }
    peer.close()
    return found


def main() -> None:
    """Measure, print the tables, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--policies", type=policy_name, nargs="+", default=["adakv-h2o", "global-h2o"], help="for the times"
    )
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=1024)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--oracle-python", type=python, default=None, help="a Python with torch, transformers and kvpress"
    )
    parser.add_argument("--name", type=result_name, default="pool_cost", help="of the JSON file in benchmarks/results")
    options = parser.parse_args()
    policies = policies_at(parser, options.policies, options.budget)
    params = jaxkv.load(options.model)
    pooled = [name for name, policy in catalogue().items() if policy.allocate.pooled and policy.floor <= options.budget]
    rows = prose_rows(params.tokenizer, 1, options.tokens)
    full = jaxkv.prefill(params, rows).kv_bytes
    bytes_held = [held(params, jaxkv.policy(name, budget=options.budget), full, rows) for name in pooled]
    if options.oracle_python is not None:
        beside = theirs(options.oracle_python, options.model, pooled, options.budget, [int(id) for id in rows[0]])
        bytes_held = [{**row, "kvpress": beside.get(row["policy"], "-")} for row in bytes_held]
    print(
        table(
            "bytes held over the full cache's; entries of a head", [*bytes_held[0]], [[*r.values()] for r in bytes_held]
        )
    )

    times = []
    for name, policy in policies.items():
        for batch in options.batch:
            times.append(costs(params, policy, batch, options))
            print(name, batch, times[-1]["ratio"], flush=True)
    shown = [(row["policy"], row["batch"], row["ratio"]["step"], row["ratio"]["prefill"]) for row in times]
    print(table("pool over uniform, median of the rounds", ("policy", "batch", "step", "prefill"), shown))
    settings = {name: value for name, value in vars(options).items() if name != "oracle_python"}  # a path
    print("written to", write(options.name, {**settings, "times": times, "held": bytes_held}))


if __name__ == "__main__":
    main()
