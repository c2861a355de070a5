"""Merging against dropping at equal bytes: the same policy with its rule, and with what leaves dropped.

The methods of the catalogue that merge, and four rules put under other policies' prompts: `values` (kvpress'
MergingPress), `counted` (nearest key from a cosine of 0.8, log n added to the logit; also with keys turned back before
they are averaged) and `d2o`. By default: KL from the
full cache on prose, teacher-forced, and passkeys. With `--cost`: prefill and decode step over dropping's, in turns.
Rows that are there already stay in the JSON file.

    python -m benchmarks.merging
    python -m benchmarks.merging --cost
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

import jaxkv
from benchmarks.family_cost import decoded, first_layers, prefilled
from benchmarks.flat_cost import TURNS, in_turns, ratios
from benchmarks.passkey import examples, hits
from benchmarks.report import RESULTS, prose_rows, table, write
from jaxkv.evaluation.fidelity import fidelity, reference
from jaxkv.policies import Merge, catalogue
from jaxkv.policies.evicted import Drop

RULES = {
    "values": Merge(into="nearest", alike=0.0, by="norm", divide="sum", what="values"),
    "counted": Merge(into="nearest", alike=0.8, by="equal", divide="sum", counts=True),
    "counted, turned back": Merge(into="nearest", alike=0.8, by="equal", divide="sum", counts=True, turned=False),
    "d2o": Merge(),
}
UNDER = ("snapkv", "h2o", "dapq", "longflow")


def pairs(budget: int) -> dict[str, tuple[jaxkv.Policy, jaxkv.Policy]]:
    """Each method that merges, and each rule under each policy; and the same with what leaves dropped."""
    found = {}
    for name, policy in catalogue().items():
        if any(phase.evicted.moves for phase in policy.phases):
            chosen = jaxkv.policy(name, budget=budget)
            found[name] = chosen, dropping(chosen)
    for name in UNDER:
        chosen = jaxkv.policy(name, budget=budget)
        for label, rule in RULES.items():
            prefill = dataclasses.replace(chosen.prefill, evicted=rule)
            found[f"{name} + {label}"] = dataclasses.replace(chosen, prefill=prefill), chosen
    return found


def dropping(policy: jaxkv.Policy) -> jaxkv.Policy:
    """The policy whose entries that leave are gone."""
    phases = {"prefill": policy.prefill, "decode": policy.decode}
    gone = {name: phase and dataclasses.replace(phase, evicted=Drop()) for name, phase in phases.items()}
    return dataclasses.replace(policy, **gone)


def costs(params: Any, names: list[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Prefill and decode step of each pair, merging over dropping."""
    params = first_layers(params, options.layers)
    rows = prose_rows(params.tokenizer, 1, options.tokens)
    for name, (merging, drops) in pairs(options.budget).items():
        if name not in names:
            continue
        row: dict[str, Any] = {"policy": name}
        for what, run in (("prefill", prefilled), ("step", decoded)):
            if what == "step" and merging.decode is None:
                continue
            more = () if what == "prefill" else (options.new_tokens,)
            both = {label: run(params, each, rows, *more) for label, each in (("merge", merging), ("drop", drops))}
            took = in_turns(both, options.rounds)
            row |= {what: ratios(took["merge"], took["drop"])[TURNS], f"{what}_times": took}
        print(name, *(f"{key} {value:.3f}" for key, value in row.items() if isinstance(value, float)), flush=True)
        yield row


def quality(params: Any, names: list[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """KL and right passkeys of each pair."""
    whole = np.asarray(prose_rows(params.tokenizer, options.texts, options.tokens + options.new_tokens), np.int32)
    against = reference(params, whole[:, : options.tokens], whole[:, options.tokens :])
    asked = examples(params.tokenizer, options.tokens, [0.1, 0.3, 0.5, 0.7, 0.9], 0) if options.passkeys else []
    known: dict[Any, tuple[float, list[bool]]] = {}
    for name, both in pairs(options.budget).items():
        if name not in names:
            continue
        row: dict[str, Any] = {"policy": name}
        for label, policy in zip(("merge", "drop"), both, strict=True):
            parts = policy.prefill, policy.decode, policy.allocate, policy.budget
            if parts not in known:
                kl = float(fidelity(params, policy, against).kl.mean())
                right = hits(params, policy, asked, 10).tolist() if asked else []
                known[parts] = kl, right
            row[f"{label} KL"], row[f"{label} right"] = known[parts]
        shown = f"KL {row['merge KL']:.3f} against {row['drop KL']:.3f}"
        print(name, shown, f"right {sum(row['merge right'])} against {sum(row['drop right'])}", flush=True)
        yield row


def main() -> None:
    """Measure, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--policies", nargs="+", default=None, help="default: all pairs, named as in the table")
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--passkeys", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--layers", type=int, default=6, help="with --cost: the model's first layers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default=None, help="of the JSON file in benchmarks/results")
    options = parser.parse_args()
    params = jaxkv.load(options.model)
    names = options.policies or list(pairs(options.budget))
    title = options.name or ("merging-cost" if options.cost else "merging")
    path = RESULTS / f"{title}.json"
    before = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    rows = {row["policy"]: row for row in before}
    for row in (costs if options.cost else quality)(params, names, options):
        rows[row["policy"]] = row
        results = [rows[name] for name in pairs(options.budget) if name in rows]
        write(title, {**vars(options), "results": results})
    if options.cost:
        shown = [(row["policy"], row["prefill"], row.get("step", "-")) for row in results]
        print(table("merging over dropping (median of the rounds)", ("policy", "prefill", "step"), shown))
    else:
        right = lambda row, label: f"{sum(row[f'{label} right'])}/{len(row[f'{label} right'])}"  # noqa: E731
        shown = [
            (row["policy"], row["merge KL"], row["drop KL"], right(row, "merge"), right(row, "drop")) for row in results
        ]
        header = ("policy", "KL, merge", "KL, drop", "passkeys, merge", "drop")
        print(table(f"budget {options.budget} of {options.tokens} tokens", header, shown))
    print("written to", path)


if __name__ == "__main__":
    main()
