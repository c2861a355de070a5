"""The scores of a run of `jaxkv eval catalogue`: a table of all policies with intervals, in `RESULTS.md`, and a JSON
file that the catalogue's pages read.

    jaxkv eval catalogue --out DIR
    python -m benchmarks.all_policies DIR

Policies that the run leaves out (`--policies tiered-laq`) keep the rows that they have.
"""

import argparse
import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_work import interval, percents
from benchmarks.report import check_same, into_page, write, written
from jaxkv.evaluation import summary
from jaxkv.evaluation.results import Record, Store
from jaxkv.policies.catalogue import catalogue

PAGE = Path(__file__).parent / "RESULTS.md"
NAME = "all-policies"
HEADER = ("policy", "fidelity", "bounded", "right", "noise", "prose", "KL", "top-1")


def measured(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row per policy: shares of right answers with Wilson's 95 % interval, KL with the bootstrap's over texts."""
    texts = {summary.name_of(r): r for r in records if r["kind"] == "fidelity" and "kl" in r}
    asked, rows = summary.grouped(summary.answers(records), summary.name_of), []
    for row in summary.quality(records):
        name, answers = row["policy"], asked[row["policy"]]
        kinds = {kind: summary.wilson(scores_of(answers, haystack=kind)) for kind in ("noise", "prose")}
        found: dict[str, Any] = {
            "policy": name, "date": str(datetime.date.today()), "fidelity": row["fidelity"],
            "bounded": row["bounded"], "budget": row["budget"], "answers": row["score"].count,
            "right": ends(row["score"]), "tasks": {task: ends(mean) for task, mean in row["tasks"].items()},
            **{kind: ends(mean) for kind, mean in kinds.items()},
        }  # fmt: skip
        if name in texts:
            found["kl"] = rounded(interval(texts[name]["kl"]))
            found["top1"] = round(sum(texts[name]["top1"]) / len(texts[name]["top1"]), 3)
        rows.append(found)
    return rows


def best_first(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Most right answers first, of equals the smaller KL."""
    return sorted(rows, key=lambda row: (-row["right"][0], row.get("kl", [9.0])[0], row["policy"]))


def scores_of(records: Iterable[Record], haystack: str) -> list[float]:
    return [record["score"] for record in records if record["haystack"] == haystack]


def ends(mean: summary.Mean) -> list[float]:
    """The mean, and its interval's ends."""
    return rounded((mean.value, mean.low, mean.high))


def rounded(found: Iterable[float]) -> list[float]:
    """As the JSON files have them."""
    return [round(x, 4) for x in found]


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    whole = percents(row["right"])
    kinds = (f"{100 * row[kind][0]:.0f}" for kind in ("noise", "prose"))
    kl = "{:.3f} ({:.3f}-{:.3f})".format(*row["kl"]) if "kl" in row else "-"
    top1 = f"{100 * row['top1']:.0f}" if "top1" in row else "-"
    return f"`{row['policy']}`", row["fidelity"], summary.WORDS[row["bounded"]], whole, *kinds, kl, top1


def main() -> None:
    """Put the table into the page, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what jaxkv eval catalogue --out wrote")
    options = parser.parse_args()
    store = Store(options.folder)
    about = store.about()
    run = {name: about["settings"][name] for name in ("name", "model", "budgets", "tasks", "fidelity")}
    check_same(written(NAME).get("run", {}), run, f"a run of jaxkv eval catalogue as it stands, or no {NAME}.json")
    found = {row["policy"]: row for row in measured(list(store.records()))}
    known = {row["policy"]: row for row in written(NAME).get("policies", ())} | found
    for name, policy in catalogue().items():  # how faithful a policy is may be said otherwise since
        if name in known:
            known[name]["fidelity"] = policy.fidelity
    rows = best_first(known.values())
    into_page(PAGE, NAME, HEADER, [line(row) for row in rows])
    print("written to", PAGE, "and", write(NAME, {"run": run, "measured_on": about["machine"], "policies": rows}))


if __name__ == "__main__":
    main()
