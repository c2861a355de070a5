"""Bytes that the compiled programs need, by prompt length: prefill in blocks, and decode.

Nothing runs: the programs are compiled for abstract arguments and asked for their memory.

    python -m benchmarks.memory
"""

import argparse
from typing import Any

import jaxkv
from benchmarks.arguments import at_least, policies_at, policy_name, positive
from benchmarks.report import table, write
from jaxkv.lowering import held, lower


def needed(params: Any, policy: jaxkv.Policy, batch: int, length: int, room: int) -> dict[str, int]:
    """Temporary and argument bytes of prefill over `length` tokens and of decode after it; weights told apart."""
    programs = lower(params.config, policy, batch=batch, tokens=length, room=room, dtype=params.dtype)
    out = {"tokens": length, "weights": held(programs.weights), "cache": held(programs.cache.layers)}
    for name, program in (("prefill", programs.prefill), ("decode", programs.decode)):
        memory = program.compile().memory_analysis()
        out[f"{name}_temporary"] = memory.temp_size_in_bytes
        out[f"{name}_arguments"] = memory.argument_size_in_bytes
    return out


def main() -> None:
    """Compile, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policies", type=policy_name, nargs="+", default=["dapq-longflow", "full"])
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--block", type=positive, default=512)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[2048, 4096, 8064])
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument(
        "--room", type=at_least(0), default=128, help="new tokens that a policy which only adds must hold"
    )
    options = parser.parse_args()
    policies = policies_at(parser, options.policies, options.budget, block=options.block)
    params = jaxkv.load(options.model)

    results = []
    for name, policy in policies.items():
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
