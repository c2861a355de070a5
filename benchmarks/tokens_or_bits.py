"""Scores against bytes, of runs of `jaxkv eval bytes`, `bytes-qwen`, `bytes-code`, `bytes-long` and `ruler-few`: which
split of the cache's bytes between tokens and bits says most.

Bytes are those of keys and values in bfloat16, and of what lies beside them, when the prompt has been read (where the
output is long, when it has been written), as a share of the full cache's. Only questions that every policy and size has
answered count. Of several runs a policy's sizes stand in one row where their shares of the bytes are nearest to the
same power of two.

    jaxkv eval bytes --out results/bytes
    jaxkv eval bytes-long --out results/bytes-long
    python -m benchmarks.tokens_or_bits results/bytes results/bytes-long --name tokens-or-bits-smollm2 --page
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks.all_policies import ends, rounded
from benchmarks.arguments import result_name
from benchmarks.real_work import cell_of, interval, named, of_task, percents
from benchmarks.report import RESULTS, into_page, write, written
from jaxkv.evaluation import settings, summary
from jaxkv.evaluation.jobs import measurable
from jaxkv.evaluation.plots import COLOURS, MARKERS
from jaxkv.evaluation.results import Store
from jaxkv.plan import planned
from jaxkv.policies.policy import Policy
from jaxkv.sizes import size_of
from jaxkv.weights.params import Params

PAGE = Path(__file__).parent / "RESULTS.md"
WHOLE = jaxkv.policy("full")
MEASURES = {
    "needles": "needles, right",
    "kl": "KL from the full cache",
    "ruler": "RULER, right",
    "code": "code similarity",
    "long": "long outputs",
}  # in the order of the columns, with the titles of the picture's panels
LONG = ("long-output", "recite")
Found = dict[str, list[float]]  # of each measure that was taken: mean and the ends of its interval


def bytes_of(params: Params, policy: Policy, tokens: int) -> int:
    """Bytes of keys and values, and of what lies beside them, after a prompt of so many tokens, in bfloat16."""
    config, learned = params.config, params.learned_for(policy.learns, policy.name)
    none, empty = np.zeros(1, np.int32), np.zeros(config.num_layers, np.int64)
    plan, *_ = planned(policy, config, none, empty, np.array([tokens]), 0, learned=learned)
    return size_of(policy, config, jnp.dtype("bfloat16"), plan.slots).keys_values


def share_of(params: Params, policy: Policy, tokens: Sequence[int]) -> float:
    """The mean share of the full cache's bytes over prompts of these lengths."""
    return float(np.mean([bytes_of(params, policy, each) / bytes_of(params, WHOLE, each) for each in tokens]))


def kind(task: str) -> str:
    """The measure that a task belongs to."""
    families = {"longbench": "code", "ruler": "ruler"}
    return families.get(task.split("/")[0], "long" if task in LONG else "needles")


def rows(params: Params, folder: Path) -> Iterator[dict[str, Any]]:
    """Of each policy and size of a run: its share of the bytes, what it has of every measure, and out of how many."""
    store = Store(folder)
    run = settings.from_dict(store.about()["settings"])
    records = list(store.records())
    tasks = summary.grouped(summary.answers(records), lambda record: kind(record["task"]))
    answered = {measure: of_task(some) for measure, some in tasks.items()}
    texts = {cell_of(record): record["kl"] for record in records if "kl" in record}
    lengths = [
        record["length"] if measure == "long" else record["prompt_tokens"]
        for measure, (_, asked) in answered.items()
        for record in asked
    ]
    if run.fidelity is not None and texts:
        lengths += [run.fidelity.prompt] * run.fidelity.texts
    if not lengths:
        raise SystemExit(f"{folder}: no question is answered by all policies yet")
    for cell in (measurable(params, each) for each in run.cells()):
        if cell.policy is None:
            continue
        key = (cell.label, cell.size)
        found: Found = {}
        count: dict[str, int] = {}
        for measure, (cells, asked) in answered.items():
            scores = [record["score"] for record in cells.get(key, [])]
            if not asked or not scores:
                continue
            count[measure] = len(scores)
            found[measure] = rounded(interval(scores)) if measure == "code" else ends(summary.wilson(scores))
        if key in texts:
            found["kl"], count["kl"] = rounded(interval(texts[key])), len(texts[key])
        share = round(share_of(params, cell.policy, lengths), 4)
        yield {"policy": cell.label, "size": key[1], "bytes": share, "count": count, **found}


def line(row: dict[str, Any], measures: Sequence[str]) -> tuple[str, ...]:
    """A row of the table."""
    shown = (
        "{:.4f} ({:.4f}-{:.4f})".format(*(value + 0.0 for value in row[name]))
        if name == "kl" and name in row
        else percents(row.get(name))
        for name in measures
    )
    return f"`{row['policy']}`", named(row["size"]), f"{row['bytes']:.3f}", *shown


def picture(found: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each measure that was taken: the score against the share of the bytes, a line per policy."""
    from matplotlib.figure import Figure

    wanted = [(name, MEASURES[name]) for name in taken(found)]
    figure = Figure(figsize=(4.2 * len(wanted), 4.2), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(wanted), squeeze=False)[0]
    for axes, (name, title) in zip(panels, wanted, strict=True):
        for number, (policy, some) in enumerate(summary.grouped(found, lambda row: row["policy"]).items()):
            points = sorted((row["bytes"], row[name][0]) for row in some if name in row)
            if not points:
                continue
            look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            line = ("-", "--", ":")[number // len(COLOURS) % 3]
            axes.plot(*zip(*points, strict=True), line, label=policy, markersize=4, linewidth=1.2, **look)
        axes.set(xscale="log", xlabel="share of the full cache's bytes", title=title)
        if name == "kl":
            axes.set_yscale("log")
        axes.set_xticks([1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], ["1/32", "1/16", "1/8", "1/4", "1/2", "1"])
        axes.minorticks_off()
    lines = {mine.get_label(): mine for axes in panels for mine in axes.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})


def taken(found: Sequence[dict[str, Any]]) -> list[str]:
    """The measures that some row has."""
    return [name for name in MEASURES if any(name in row for row in found)]


def joined(runs: Iterable[Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each policy and size of several runs, in order of policies and bytes. Size and bytes are the first
    run's that has the row."""
    out: dict[tuple[str, int | None, int], dict[str, Any]] = {}
    for run in runs:
        seen: Counter[tuple[str, int | None]] = Counter()
        for row in run:
            near = None if row["size"] is None else round(-math.log2(row["bytes"]))
            place = (row["policy"], near)
            mine = out.setdefault((*place, seen[place]), row)
            seen[place] += 1
            mine["count"] |= row["count"]
            mine |= {name: row[name] for name in MEASURES if name in row}
    order = list(dict.fromkeys(row["policy"] for row in out.values()))
    return sorted(out.values(), key=lambda row: (order.index(row["policy"]), row["bytes"]))


def main() -> None:
    """Print the table, draw the picture, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="what jaxkv eval --out wrote")
    parser.add_argument("--name", type=result_name, default="tokens-or-bits", help="of the files in benchmarks/results")
    parser.add_argument("--page", action="store_true", help="put the table into RESULTS.md")
    parser.add_argument("--go-on", action="store_true", help="keep rows of the JSON file that these runs do not have")
    options = parser.parse_args()
    about = Store(options.folders[0]).about()
    params = jaxkv.load(about["settings"]["model"], weights=about["settings"]["weights"])
    before = written(options.name).get("results", []) if options.go_on else []
    found = joined([before, *(rows(params, folder) for folder in options.folders)])
    measures = taken(found)
    header = ("policy", "kept", "bytes", *("KL" if name == "kl" else name for name in measures))
    lines = [line(row, measures) for row in found]
    for each in (header, *lines):
        print("| " + " | ".join(each) + " |")
    if options.page:
        into_page(PAGE, options.name, header, lines)
    path = RESULTS / f"{options.name}.svg"
    picture(found, path)
    model = {name: about["settings"][name] for name in ("model", "weights", "dtype")}
    print("drawn to", path, "\nwritten to", write(options.name, {"run": model, "measured_on": about["machine"],
                                                               "results": found}))  # fmt: skip


if __name__ == "__main__":
    main()
