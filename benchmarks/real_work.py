"""The scores of a run of `jaxkv eval` on a published data set: a table with intervals, and a JSON file of all scores.

Only questions that every policy and size has answered count, so that all are compared on the same ones; a run that
still goes on can be looked at. The file holds scores, sizes and the questions' digests: no prompt, answer or reference.

    jaxkv eval longbench --data FOLDER --tasks lcc --out results/lcc
    python -m benchmarks.real_work results/lcc --name longbench-lcc-qwen
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from benchmarks.arguments import positive, result_name
from benchmarks.report import write
from jaxkv.evaluation import summary
from jaxkv.evaluation.results import Record, Store

Cell = tuple[str, float | int | None]  # policy; budget, ratio, or bytes


def cell_of(record: Record) -> Cell:
    """The policy and the size of a record."""
    return record["policy"], summary.asked_size(record)


def of_task(records: Sequence[Record]) -> tuple[dict[Cell, list[Record]], list[Record]]:
    """The answers of each cell, in the order of the questions that all cells have answered, and these questions."""
    cells = summary.grouped(records, cell_of)
    asked = [{(r["example"], r["question"]) for r in some} for some in cells.values()]
    common = set.intersection(*asked)
    first = sorted(next(iter(cells.values())), key=lambda r: (r["prompt_tokens"], r["example"], r["question"]))
    order = {(r["example"], r["question"]): at for at, r in enumerate(first) if (r["example"], r["question"]) in common}
    place = lambda record: order[record["example"], record["question"]]  # noqa: E731
    kept = {
        cell: sorted((r for r in some if (r["example"], r["question"]) in order), key=place)
        for cell, some in cells.items()
    }
    return kept, [record for record in first if (record["example"], record["question"]) in order]


def interval(scores: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval, by the bootstrap over questions (percentiles of 10,000 draws)."""
    mean = float(np.mean(scores))
    if len(scores) < 2 or len(set(scores)) == 1:
        return mean, mean, mean
    found = bootstrap((np.asarray(scores),), np.mean, method="percentile", n_resamples=10_000, rng=0)
    return mean, *map(float, found.confidence_interval)


def percents(found: Sequence[float] | None) -> str:
    """A mean and its interval's ends in per cent; "-" where nobody was asked."""
    return "-" if found is None else "{:.0f} ({:.0f}-{:.0f})".format(*(100 * value for value in found))


def named(size: float | int | None) -> str:
    """A column: tokens kept or bytes, or the part of the prompt that is kept."""
    if not isinstance(size, float):
        return "all" if size is None else str(size)
    part = 1 / (1 - size)
    return f"1/{part:.0f}" if math.isclose(part, round(part)) else f"{1 - size:.3g}"


def table(cells: dict[Cell, list[Record]]) -> str:
    """A line per policy, best first, with mean and interval in per cent at each size, as Markdown."""
    sizes = sorted({size for _, size in cells if size is not None}, reverse=any(isinstance(s, float) for _, s in cells))
    means = {cell: interval([record["score"] for record in some]) for cell, some in cells.items()}
    policies = dict.fromkeys(name for name, _ in cells)

    def mean(name: str) -> float:
        return float(np.mean([value for (other, _), (value, *_) in means.items() if other == name]))

    def at(name: str, size: float | int | None) -> str:
        return percents(means.get((name, size), means.get((name, None))))

    rows = [["policy", *map(named, sizes)], ["---", *["---:"] * len(sizes)]]
    rows += [[f"`{name}`", *(at(name, size) for size in sizes)] for name in sorted(policies, key=mean, reverse=True)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    """Print a table per task, and store the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what jaxkv eval --out wrote")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--name", type=result_name, help="of the JSON file in benchmarks/results")
    what.add_argument(
        "--first", type=positive, help="print the tables of each task's shortest so many questions, and write nothing"
    )
    options = parser.parse_args()
    store = Store(options.folder)
    about = store.about()
    run, tasks = about["settings"], {}
    for task, records in summary.grouped(summary.answers(store.records()), lambda record: record["task"]).items():
        cells, questions = of_task(records)
        if not questions:
            print(f"{task}: no question is answered by all yet")
            continue
        if options.first:
            cells, questions = {cell: some[: options.first] for cell, some in cells.items()}, questions[: options.first]
        print(f"\n{task}: {len(questions)} questions of {questions[0]['prompt_tokens']} to "
              f"{questions[-1]['prompt_tokens']} tokens\n\n{table(cells)}")  # fmt: skip
        tasks[task] = {
            "questions": [{"digest": each["example"], "tokens": each["prompt_tokens"]} for each in questions],
            "scores": [
                {"policy": name, "size": size, "scores": [round(record["score"], 4) for record in some],
                 "kept": [round(record["kept"], 1) for record in some]}
                for (name, size), some in cells.items()
            ],
        }  # fmt: skip
    if options.first:
        return
    names = ("name", "model", "weights", "dtype", "batch", "block", "ratios", "budgets", "bytes")
    said: dict[str, Any] = {name: run[name] for name in names if name in run}
    print("written to", write(options.name, {"run": said, "measured_on": about["machine"], "tasks": tasks}))


if __name__ == "__main__":
    main()
