"""Tokens or bits: KL from the full cache on prose, teacher-forced, at equal bytes of keys and values.

First every store of `STORES` with all entries held, then a policy with as many entries as a share of the full bfloat16
cache's bytes holds under each store. Bytes are those that the arrays take where the model is in bfloat16: codes and
scales are the same in any dtype, the residual window is counted in 2 bytes a number. Rows that are there already stay
in the JSON file.

    jaxkv calibrate smollm2-135m --predictors # once, for `aquakv`
    python -m benchmarks.precision
    python -m benchmarks.precision --time    # a decode step with every entry held, over the plain one's, in turns
"""

import argparse
import bisect
import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks.arguments import policy_name, positive, result_name
from benchmarks.family_cost import decoded, first_layers
from benchmarks.flat_cost import TURNS, in_turns, ratios
from benchmarks.report import RESULTS, check_same, prose_rows, table, write, written
from jaxkv.evaluation.fidelity import Reference, fidelity, reference
from jaxkv.models import ModelConfig
from jaxkv.policies import Codecs, Fp8, Int, IntBalanced, IntByChannel, Paired, Sparse, catalogue
from jaxkv.sizes import size_of

STORES = {
    "bfloat16": Codecs(),
    "8 bits": Codecs(Int(8), Int(8)),
    "fp8": Codecs(Fp8(), Fp8()),
    "4 bits": Codecs(Int(4), Int(4)),
    "4 bits, groups of 32": Codecs(Int(4, 32), Int(4, 32)),
    "4 bits, turned": Codecs(Int(4, hadamard=True), Int(4, hadamard=True)),
    "4 bits, keys by channel": Codecs(IntByChannel(4, 32), Int(4, 32), residual=32),
    "4 bits, keys balanced": Codecs(IntBalanced(4), Int(4)),
    "4 bits, keys balanced, groups of 32": Codecs(IntBalanced(4, 32), Int(4, 32)),
    "keys 4, values 2": Codecs(Int(4, hadamard=True), Int(2, 32)),
    "3 bits, turned": Codecs(Int(3, hadamard=True), Int(3, hadamard=True)),
    "2 bits, keys by channel": Codecs(IntByChannel(2, 32), Int(2, 32), residual=32),
    "half of the channels": Codecs(Sparse(0.5), Sparse(0.5), residual=32),
    "values in pairs, all layers": Codecs(values=Paired(after=0.0)),
}
METHODS = ("kivi", "kv-heads", "think", "cskv", "aquakv", "qaq", "rotatekv", "squat", "gear", "minicache")
AT_EQUAL_BYTES = (
    *("bfloat16", "8 bits", "4 bits, turned", "4 bits, keys balanced"),
    *("4 bits, keys by channel", "2 bits, keys by channel"),
)
SHARES = (2, 4, 8, 16, 32)
SAME = ("model", "policy", "tokens", "new_tokens", "texts", "layers")  # in all rows of a file


def everything() -> dict[str, jaxkv.Policy]:
    """Policies that hold all entries, under each store and under that of each method, by label."""
    full = jaxkv.policy("full")
    stores = {label: dataclasses.replace(full, store=store) for label, store in STORES.items()}
    methods = {name: catalogue()[name] for name in METHODS}
    return stores | {name: dataclasses.replace(full, store=of.store, rope=of.rope) for name, of in methods.items()}


def taken(policy: jaxkv.Policy, slots: int, config: ModelConfig) -> int:
    """Bytes of keys and values of one row in bfloat16, with so many slots for a head."""
    return size_of(policy, config, "bfloat16", [slots] * config.num_layers).keys_values


def budget_of(policy: jaxkv.Policy, share: int, tokens: int, config: ModelConfig) -> int:
    """The most entries that a share of the full cache's bytes holds, 0 for none, at most all of the text."""
    most = taken(jaxkv.policy("full"), tokens, config) // share
    return bisect.bisect_right(range(1, tokens + 1), most, key=lambda count: taken(policy, count, config))


def cases(options: argparse.Namespace, config: ModelConfig) -> Iterator[tuple[str, int | None, jaxkv.Policy]]:
    """What is measured: its label, budget (None: everything), and policy."""
    whole = everything()
    for label, policy in whole.items():
        yield label, None, policy
    for share in options.shares:
        for label in AT_EQUAL_BYTES:
            budget = budget_of(whole[label], share, options.tokens + options.new_tokens, config)
            if budget >= options.least:
                chosen = jaxkv.policy(options.policy, budget=budget, store=STORES[label])
                yield f"1/{share} {label}", budget, chosen


def place(row: dict[str, Any]) -> tuple[int, int]:
    """Where a row stands: everything held first, then by bytes, largest first."""
    if row.get("budget") is None:
        return 0, [*STORES, *METHODS].index(row["case"])
    share, label = row["case"].split(" ", 1)
    return int(share[2:]), list(STORES).index(label)


def measured(params: Any, against: Reference, options: argparse.Namespace, known: dict) -> Iterator[dict[str, Any]]:
    """Of each case that is not known yet: entries, share of the bytes, KL and top-1."""
    config, text = params.config, options.tokens + options.new_tokens
    for label, budget, policy in cases(options, config):
        if label in known:
            continue
        found = fidelity(params, policy, against)
        held = taken(policy, budget or text, config) / taken(jaxkv.policy("full"), text, config)
        row = {"case": label, "budget": budget, "bytes": held, "kl": float(found.kl.mean())}
        row["top1"] = float(found.top1.mean())
        print(label, f"budget {budget} bytes {held:.3f} KL {row['kl']:.5f} top-1 {row['top1']:.3f}", flush=True)
        yield row


def timed(params: Any, options: argparse.Namespace, known: dict) -> Iterator[dict[str, Any]]:
    """Of each store that is not known yet milliseconds per token, and over those of plain keys and values."""
    rows = prose_rows(params.tokenizer, 1, options.tokens)
    plain = decoded(params, jaxkv.policy("full"), rows, options.new_tokens)
    for label, policy in everything().items():
        if policy.store == Codecs() or label in known:
            continue
        coded = decoded(params, policy, rows, options.new_tokens)
        took = in_turns({"coded": coded, "plain": plain}, options.rounds)
        row = {"case": label, "step": ratios(took["coded"], took["plain"])[TURNS]}
        row |= {f"{name}_ms": 1000 * statistics.median(times) for name, times in took.items()}
        print(*(f"{value:.2f}" if isinstance(value, float) else value for value in row.values()), flush=True)
        yield row


def main() -> None:
    """Measure, print the tables, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policy", type=policy_name, default="h2o")
    parser.add_argument("--tokens", type=positive, default=1024)
    parser.add_argument("--new-tokens", type=positive, default=32)
    parser.add_argument("--texts", type=positive, default=2)
    parser.add_argument("--shares", type=positive, nargs="+", default=list(SHARES), help="1/2 of the bytes, 1/4, ...")
    parser.add_argument("--least", type=positive, default=8, help="the smallest budget that is measured")
    parser.add_argument("--time", action="store_true", help="time decode steps instead")
    parser.add_argument("--rounds", type=positive, default=5, help="with --time")
    parser.add_argument("--layers", type=positive, help="only the model's first ones: sooner compiled, for --time")
    parser.add_argument("--name", type=result_name, default="precision", help="of the JSON file in benchmarks/results")
    options = parser.parse_args()
    if options.layers and not options.time:
        parser.error("--layers: fewer layers say nothing about KL; expected it with --time")
    params = jaxkv.load(options.model, dtype=jnp.float32)
    name = f"{options.name}-time" if options.time else options.name
    stored_as = written(name)
    before = stored_as.get("results", [])
    check_same(stored_as, {setting: getattr(options, setting) for setting in SAME})
    known = {row["case"]: row for row in before}
    for label, policy in everything().items():
        if label not in known:
            params.learned_for(policy.learns, policy.name)  # says what to run where something was not measured
    if options.layers:
        params = first_layers(params, options.layers)

    def stored(found: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        results = [*before]
        for row in found:
            results = sorted([*results, row], key=place)
            write(name, {**vars(options), "results": results})
        return results

    if options.time:
        results = stored(timed(params, options, known))
        header = ("case", "a step over the plain one", "ms a token", "plain, ms")
        shown = [tuple(row[name] for name in ("case", "step", "coded_ms", "plain_ms")) for row in results]
        layers = f", the first {options.layers} layers" if options.layers else ""
        print(table(f"{options.tokens} tokens held, {options.new_tokens} more{layers}", header, shown))
        return
    whole = np.asarray(prose_rows(params.tokenizer, options.texts, options.tokens + options.new_tokens), np.int32)
    against = reference(params, whole[:, : options.tokens], whole[:, options.tokens :])
    results = stored(measured(params, against, options, known))
    header = ("case", "entries a head", "bytes of bfloat16's", "KL", "same top token")
    shown = [(row["case"], row["budget"] or "all", row["bytes"], row["kl"], row["top1"]) for row in results]
    print(table(f"{options.policy}, {options.tokens} tokens of prose and {options.new_tokens} more", header, shown))
    print("written to", RESULTS / f"{name}.json")


if __name__ == "__main__":
    main()
