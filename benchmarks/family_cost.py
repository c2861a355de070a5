"""What each policy costs: prefill of a long prompt over plain prefill, and a decode step over LongFlow's.

Every policy runs in turns with its reference in one process. Policies without a decode phase have no second number.

    python -m benchmarks.family_cost
"""

import argparse
import dataclasses
from typing import Any

from flax import nnx

import jaxkv
from benchmarks.arguments import policies_at, policy_name, positive, result_name
from benchmarks.flat_cost import TURNS, Run, in_turns, ratios
from benchmarks.report import prose_rows, table, write
from jaxkv.models import graphdef
from jaxkv.policies.catalogue import catalogue

REFERENCE = "longflow"


def prefilled(params: Any, policy: jaxkv.Policy | None, rows: list[list[int]]) -> Run:
    """Running the prompt and sampling one token."""
    return lambda: jaxkv.generate(params, rows, policy=policy, max_new_tokens=1, stop_tokens=()).stats.prefill_seconds


def decoded(params: Any, policy: jaxkv.Policy, rows: list[list[int]], new_tokens: int) -> Run:
    """Decoding on from the prompt."""
    cache = jaxkv.generate(params, rows, policy=policy, max_new_tokens=1, stop_tokens=()).cache

    def run() -> float:
        out = jaxkv.generate(params, cache=cache, max_new_tokens=new_tokens, stop_tokens=())
        return out.stats.decode_seconds / new_tokens

    return run


def first_layers(params: Any, layers: int) -> Any:
    """The model cut off after so many layers: the same shapes, sooner done."""
    config = dataclasses.replace(params.config, num_layers=layers, layer_types=params.config.layer_types[:layers])
    model = nnx.merge(graphdef(params.config), params.weights)
    model.config, model.layers = config, nnx.List(list(model.layers)[:layers])
    learned = {name: value[:layers] for name, value in params.learned.items()}
    return dataclasses.replace(params, config=config, weights=nnx.state(model), learned=learned)


def main() -> None:
    """Measure, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--policies", type=policy_name, nargs="+", default=None, help="default: every one in the catalogue"
    )
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=2048)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--layers", type=positive, default=None, help="run the model's first layers only")
    parser.add_argument(
        "--name", type=result_name, default="family_cost", help="of the JSON file in benchmarks/results"
    )
    options = parser.parse_args()
    names = options.policies or [
        name for name, policy in catalogue().items() if policy.evicts and policy.floor <= options.budget
    ]
    policies = policies_at(parser, names, options.budget)
    reference = policies_at(parser, [REFERENCE], options.budget)[REFERENCE]
    params = jaxkv.load(options.model)
    if options.layers is not None:
        params = first_layers(params, options.layers)
    rows = prose_rows(params.tokenizer, 1, options.tokens)
    plain, step = prefilled(params, None, rows), decoded(params, reference, rows, options.new_tokens)

    results = []
    for name, policy in policies.items():
        took = in_turns({"policy": prefilled(params, policy, rows), "plain": plain}, options.rounds)
        row = {"policy": name, "prefill": ratios(took["policy"], took["plain"])[TURNS], "times": took}
        if policy.decode is not None:
            mine = decoded(params, policy, rows, options.new_tokens)
            took = in_turns({"policy": mine, REFERENCE: step}, options.rounds)
            row |= {"step": ratios(took["policy"], took[REFERENCE])[TURNS], "steps": took}
        results.append(row)
        print(name, *(f"{key} {value:.4f}" for key, value in row.items() if isinstance(value, float)), flush=True)
    shown = [(row["policy"], row["prefill"], row.get("step", "-")) for row in results]
    title = (
        f"prefill of {options.tokens} tokens over plain prefill, decode step over {REFERENCE}'s (median of the rounds)"
    )
    print(table(title, ("policy", "prefill", "step"), shown))
    print("written to", write(options.name, {**vars(options), "results": results}))


if __name__ == "__main__":
    main()
