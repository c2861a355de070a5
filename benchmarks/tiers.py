"""Eviction, bits and tiers at equal bytes: needles, and KL from the full cache on prose.

Each policy gets the largest budget whose keys and values, and what lies beside them, take at most a share of the full
cache's bytes in bfloat16, of a text of 512 tokens. All evict while the answer is written. A run that was broken off
goes on where it was; rows that are there already stay in the JSON file.

    python -m benchmarks.tiers --out FOLDER
"""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import jaxkv
from benchmarks.all_policies import ends, rounded
from benchmarks.arguments import positive, result_name
from benchmarks.real_work import interval
from benchmarks.report import check_same, table, write, written
from jaxkv import sizes
from jaxkv.evaluation import runner, summary
from jaxkv.evaluation.results import Record
from jaxkv.evaluation.settings import Fidelity, Settings, Tasks

TOKENS, BATCH = 512, 8
BOUNDED = {"decode": "h2o", "decode_select": {"recent": 0.25}}  # what only adds, bounded as `tiered-laq` is
FOUR_BITS = {"keys": {"kind": "int", "bits": 4, "hadamard": True}, "values": {"kind": "int", "bits": 4}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "h2o": ("h2o", {}),
    "laq, then h2o": ("laq", BOUNDED),
    "laq-longflow": ("laq-longflow", {}),
    "spans, then h2o": ("spans", BOUNDED),
    "dapq-longflow": ("dapq-longflow", {}),
    "keepkv": ("keepkv", {}),
    "headkv, then h2o": ("headkv", {**BOUNDED, "window": 8}),
    "kvzip, then h2o": ("kvzip", BOUNDED),
    "laq-heads": ("laq-heads", {}),
    "tova": ("tova", {}),
    "laq, then h2o, all in 4 bits": ("laq", {**BOUNDED, "store": FOUR_BITS}),
    "tiered-laq, tier 3.5 times": ("tiered-laq", {"times": 3.5}),
    "tiered-laq": ("tiered-laq", {}),
    "mikv in 4 bits": ("mikv", {"bits": 4}),
}


def policies(params: Any, share: int, chosen: list[str]) -> Iterator[jaxkv.Policy]:
    """The policies by their case's name, with the budget that the share of the bytes is."""
    config, spec = params.config, params.config.specs[0]
    held = 2 * spec.num_kv_heads * spec.head_dim * 2 * TOKENS * config.num_layers // share
    for case in chosen:
        name, options = CASES[case]
        policy = jaxkv.policy(name, bytes=held, **options)
        learned = params.learned_for(policy.learns, policy.name)
        policy = sizes.fitted(policy, config, jnp.dtype("bfloat16"), learned)
        yield dataclasses.replace(policy, name=case)


def rows(share: int, sized: list[jaxkv.Policy], params: Any, records: list[Record]) -> Iterator[dict[str, Any]]:
    """Of each policy what it holds, right answers and KL with intervals."""
    asked = summary.grouped(summary.answers(records), summary.name_of)
    texts = {summary.name_of(r): r["kl"] for r in records if r["kind"] == "fidelity" and "kl" in r}
    for policy in sized:
        assert policy.budget is not None
        config, learned = params.config, params.learned_for(policy.learns, policy.name)
        slots = sizes.slots_at(policy, config, policy.budget, learned)
        right = ends(summary.wilson([record["score"] for record in asked[policy.name]]))
        kl = rounded(interval(texts[policy.name]))
        size = sizes.size_of(policy, config, jnp.dtype("bfloat16"), slots).keys_values
        yield {"share": share, "case": policy.name, "budget": policy.budget, "bytes": size, "right": right, "kl": kl}


def main() -> None:
    """Measure, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records, one for each share in it")
    parser.add_argument("--shares", type=positive, nargs="+", default=[4, 8, 16], help="1/4 of the bytes, 1/8, ...")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--texts", type=positive, default=8)
    parser.add_argument("--name", type=result_name, default="tiers", help="of the JSON file in benchmarks/results")
    options = parser.parse_args()
    about = {"model": options.model, "texts": options.texts}
    check_same(written(options.name), about)
    params = jaxkv.load(options.model)
    tasks = tuple(
        Tasks(name, lengths=(TOKENS,), depths=(0.1, 0.35, 0.6, 0.9), max_new_tokens=16)
        for name in ("passkey", "niah-single", "niah-multikey")
    )
    known = written(options.name).get("results", [])
    found = {(row["share"], row["case"]): row for row in known}
    for share in options.shares:
        sized = list(policies(params, share, options.cases))
        run = Settings(
            name=f"tiers-{share}", policies=tuple(sized), tasks=tasks, batch=BATCH, share_prefill=True,
            fidelity=Fidelity(texts=options.texts, prompt=TOKENS, continuation=32),
        )  # fmt: skip
        store = runner.evaluate(
            params, run, options.out / str(share), progress=lambda *told: print(*told, flush=True), model=options.model
        )
        found |= {(share, row["case"]): row for row in rows(share, sized, params, list(store.records()))}
        results = sorted(found.values(), key=lambda row: (row["share"], list(CASES).index(row["case"])))
        print("written to", write(options.name, {**about, "results": results}))
    header = ("share and case", "budget", "MB", "right", "KL")
    shown = [
        (f"1/{row['share']} {row['case']}", row["budget"], row["bytes"] / 1e6, row["right"][0], row["kl"][0])
        for row in found.values()
    ]
    print(table("needles and prose at equal bytes", header, shown))


if __name__ == "__main__":
    main()
