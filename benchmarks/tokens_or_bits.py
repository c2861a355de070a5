"""Scores against bytes, of runs of `jaxkv eval bytes` and `bytes-code`: which split of the cache's bytes between tokens
and bits says most.

Bytes are those of keys and values in bfloat16, and of what lies beside them, for a prompt of the asked length, as a
share of the full cache's. Only questions that every policy and size has answered count.

    jaxkv eval bytes --weights file --out results/bytes
    python -m benchmarks.tokens_or_bits results/bytes --name tokens-or-bits-qwen --page
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks.all_policies import ends, rounded
from benchmarks.real_work import interval, named, of_task, percents
from benchmarks.report import RESULTS, into_page, write
from jaxkv.evaluation import settings, summary
from jaxkv.evaluation.plots import COLOURS, MARKERS
from jaxkv.evaluation.results import Store
from jaxkv.plan import planned
from jaxkv.policies.policy import Policy
from jaxkv.sizes import size_of
from jaxkv.weights.params import Params

PAGE = Path(__file__).parent / "RESULTS.md"
WHOLE = jaxkv.policy("full")
HEADER = ("policy", "kept", "bytes", "needles", "KL", "code")
Found = dict[str, list[float] | None]  # mean and the ends of its interval


def bytes_of(params: Params, policy: Policy, tokens: int) -> int:
    """Bytes of keys and values, and of what lies beside them, after a prompt of so many tokens, in bfloat16."""
    config, learned = params.config, params.learned_for(policy.learns, policy.name)
    none, empty = np.zeros(1, np.int32), np.zeros(config.num_layers, np.int64)
    plan, *_ = planned(policy, config, none, empty, np.array([tokens]), 0, learned=learned)
    return size_of(policy, config, jnp.dtype("bfloat16"), plan.slots).keys_values


def share_of(params: Params, policy: Policy, tokens: Sequence[int]) -> float:
    """The mean share of the full cache's bytes over prompts of these lengths."""
    return float(np.mean([bytes_of(params, policy, each) / bytes_of(params, WHOLE, each) for each in tokens]))


def rows(params: Params, folder: Path) -> Iterator[dict[str, Any]]:
    """Of each policy and size of a run: its share of the bytes, right answers and similarity per task, KL."""
    store = Store(folder)
    run = settings.from_dict(store.about()["settings"])
    records = list(store.records())
    tasks = summary.grouped(summary.answers(records), lambda record: is_code(record["task"]))
    answered = {code: of_task(some) for code, some in tasks.items()}
    texts = {(r["policy"], r["budget"] if r["ratio"] is None else r["ratio"]): r for r in records if "kl" in r}
    lengths = [record["prompt_tokens"] for _, asked in answered.values() for record in asked]
    if run.fidelity is not None and texts:
        lengths += [run.fidelity.prompt] * run.fidelity.texts
    if not lengths:
        raise SystemExit(f"{folder}: no question is answered by all policies yet")
    for cell in run.cells():
        if cell.policy is None:
            continue
        key = (cell.label, cell.budget if cell.ratio is None else cell.ratio)
        found: Found = {"needles": None, "kl": None, "code": None}
        for code, (cells, asked) in answered.items():
            scores = [record["score"] for record in cells[key]] if asked else []
            if scores:
                found["code" if code else "needles"] = (
                    rounded(interval(scores)) if code else ends(summary.wilson(scores))
                )
        if key in texts:
            found["kl"] = rounded(interval(texts[key]["kl"]))
        yield {
            "policy": cell.label,
            "size": key[1],
            "bytes": round(share_of(params, cell.policy, lengths), 4),
            "questions": {name: len(answered[code][1]) for code, name in NAMES.items() if code in answered},
            **found,
        }


NAMES = {False: "needles", True: "code"}


def is_code(task: str) -> bool:
    """Whether a task is one of LongBench's code tasks; the others are needles."""
    return task.startswith("longbench/")


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    kl = "-" if row["kl"] is None else "{:.4f} ({:.4f}-{:.4f})".format(*(value + 0.0 for value in row["kl"]))
    kept = named(row["size"])
    return f"`{row['policy']}`", kept, f"{row['bytes']:.3f}", percents(row["needles"]), kl, percents(row["code"])


def picture(found: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each measure that was taken: the score against the share of the bytes, a line per policy."""
    from matplotlib.figure import Figure

    wanted = [
        (name, title)
        for name, title in (
            ("needles", "needles, right"),
            ("kl", "KL from the full cache"),
            ("code", "code similarity"),
        )
        if any(row[name] is not None for row in found)
    ]
    figure = Figure(figsize=(4.2 * len(wanted), 4.2), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(wanted), squeeze=False)[0]
    for axes, (name, title) in zip(panels, wanted, strict=True):
        for number, (policy, some) in enumerate(summary.grouped(found, lambda row: row["policy"]).items()):
            points = sorted((row["bytes"], row[name][0]) for row in some if row[name] is not None)
            look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            line = "-" if number < len(COLOURS) else "--"
            axes.plot(*zip(*points, strict=True), line, label=policy, markersize=4, linewidth=1.2, **look)
        axes.set(xscale="log", xlabel="share of the full cache's bytes", title=title)
        if name == "kl":
            axes.set_yscale("log")
        axes.set_xticks([1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], ["1/32", "1/16", "1/8", "1/4", "1/2", "1"])
        axes.minorticks_off()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})


def joined(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each policy and size of several runs, in order of policies and bytes."""
    out: dict[tuple[str, Any], dict[str, Any]] = {}
    for row in found:
        mine = out.setdefault((row["policy"], row["size"]), dict(row, questions={}))
        mine["questions"] |= row["questions"]
        mine |= {name: row[name] for name in ("needles", "kl", "code") if row[name] is not None}
    order = list(dict.fromkeys(row["policy"] for row in out.values()))
    return sorted(out.values(), key=lambda row: (order.index(row["policy"]), row["bytes"]))


def main() -> None:
    """Print the table, draw the picture, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="what jaxkv eval --out wrote")
    parser.add_argument("--name", default="tokens-or-bits", help="of the files in benchmarks/results")
    parser.add_argument("--page", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    about = Store(options.folders[0]).about()
    params = jaxkv.load(about["settings"]["model"], weights=about["settings"]["weights"])
    found = joined([row for folder in options.folders for row in rows(params, folder)])
    lines = list(map(line, found))
    for each in (HEADER, *lines):
        print("| " + " | ".join(each) + " |")
    if options.page:
        into_page(PAGE, options.name, HEADER, lines)
    path = RESULTS / f"{options.name}.svg"
    picture(found, path)
    model = {name: about["settings"][name] for name in ("model", "weights", "dtype")}
    print("drawn to", path, "\nwritten to", write(options.name, {"run": model, "measured_on": about["machine"],
                                                               "results": found}))  # fmt: skip


if __name__ == "__main__":
    main()
