"""Merging against dropping at equal bytes: the pairs of `jaxkv eval merging`, side by side.

The run's file (`configs/evals/merging.toml`) has each method of the catalogue that merges beside itself with what
leaves dropped, and three rules put under other policies' prompts beside those policies. By default this runs it, as
`jaxkv eval merging --data FOLDER --out OUT` does, goes on where that was stopped, and prints the pairs: needles, KL
from the full cache on prose, long outputs, LongBench's code (without `--data` the others alone). With `--cost`: prefill
and decode step over dropping's, in turns; rows that are there already stay in the JSON file.

    python -m benchmarks.merging --data FOLDER
    python -m benchmarks.merging --cost
"""

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import jaxkv
from benchmarks.all_policies import PAGE, ends, rounded
from benchmarks.arguments import positive, result_name
from benchmarks.family_cost import decoded, first_layers, prefilled
from benchmarks.flat_cost import TURNS, in_turns, ratios
from benchmarks.real_work import interval, percents
from benchmarks.report import RESULTS, check_same, into_page, prose_rows, table, write, written
from jaxkv import evaluation
from jaxkv.evaluation import published, summary
from jaxkv.evaluation.settings import Settings

DROPPED, UNDER = ": dropped", " + "
WAYS = ("merging", "dropping")
MEASURED = ("layers", "tokens", "new_tokens", "rounds")  # what each cost is of
COLUMNS = {"needles": ("passkey", "niah-single"), "code": ("longbench/lcc",), "long output": ("recite",)}


def pairs(settings: Settings) -> dict[str, str]:
    """The labels of the run's policies that merge, and of the same with what leaves dropped."""
    labels = [cell.label for cell in settings.cells()]
    methods = {label: label + DROPPED for label in labels if label + DROPPED in labels}
    return methods | {label: label.partition(UNDER)[0] for label in labels if UNDER in label}


def only(settings: Settings, names: list[str]) -> Settings:
    """The run with these policies alone, what they stand beside, and the full cache."""
    found = pairs(settings)
    strange = [name for name in names if name not in found]
    if strange:
        raise SystemExit(f"--policies {' '.join(strange)}: expected some of {', '.join(sorted(found))}")
    wanted = {"full", *names, *(found[name] for name in names)}
    label = lambda entry: entry if isinstance(entry, str) else entry.get("label", entry.get("name"))  # noqa: E731
    return evaluation.changed(settings, {"policies": tuple(p for p in settings.policies if label(p) in wanted)})


def costs(params: Any, settings: Settings, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Prefill and decode step of each pair, merging over dropping."""
    params = first_layers(params, options.layers)
    rows = prose_rows(params.tokenizer, 1, options.tokens)
    policies = {cell.label: cell.policy for cell in settings.cells() if cell.policy is not None}
    for name, base in pairs(settings).items():
        both = {"merge": policies[name], "drop": policies[base]}
        row: dict[str, Any] = {"policy": name, **{each: getattr(options, each) for each in MEASURED}}
        for what, run in (("prefill", prefilled), ("step", decoded)):
            if what == "step" and policies[name].decode is None:
                continue
            more = () if what == "prefill" else (options.new_tokens,)
            took = in_turns({label: run(params, each, rows, *more) for label, each in both.items()}, options.rounds)
            row |= {what: ratios(took["merge"], took["drop"])[TURNS], f"{what}_times": took}
        print(name, *(f"{key} {value:.3f}" for key, value in row.items() if isinstance(value, float)), flush=True)
        yield row


def quality(params: Any, settings: Settings, out: str) -> Iterator[dict[str, Any]]:
    """Scores by task, KL and bytes of each pair, from the records of the run, with 95 % intervals: Wilson's of needles,
    else the bootstrap's."""

    def told(what: str, done: int, of: int, left: float | None) -> None:
        print(f"[{done}/{of}" + ("" if left is None else f", {left / 60:.0f} min left") + f"] {what}", flush=True)

    records = list(evaluation.evaluate(params, settings, out, progress=told).records())
    asked = summary.grouped(summary.answers(records), summary.name_of)
    texts = {summary.name_of(record): record["kl"] for record in records if "kl" in record}
    for name, base in {"full": "full", **pairs(settings)}.items():
        if name not in asked or base not in asked:
            continue
        row: dict[str, Any] = {"policy": name}
        for label, which in (("merge", name), ("drop", base)):
            for column, tasks in COLUMNS.items():
                if some := [each["score"] for each in asked[which] if each["task"] in tasks]:
                    found = ends(summary.wilson(some)) if column == "needles" else rounded(interval(some))
                    row[f"{label} {column}"] = found
            row[f"{label} bytes"] = statistics.fmean(each["cache_bytes"] for each in asked[which])
            if which in texts:
                row[f"{label} KL"] = rounded(interval(texts[which]))
        if name in texts and base in texts and name != base:
            more = [mine - other for mine, other in zip(texts[name], texts[base], strict=True)]
            row["KL more"] = rounded(interval(more))
        yield row


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table: of each column what merging gives, and what dropping gives."""
    cells = [f"`{row['policy']}`"]
    for column in COLUMNS:
        cells += [percents(row.get(f"{label} {column}")) for label in ("merge", "drop")]
    means = [row.get(f"{label} KL") for label in ("merge", "drop")]
    cells += ["-" if each is None else f"{abs(each[0]):.3f}" for each in means]
    return (*cells, "{:+.3f} ({:+.3f} to {:+.3f})".format(*row["KL more"]) if "KL more" in row else "-")


def main() -> None:
    """Measure, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="default: the run's")
    parser.add_argument("--data", default="", help="the folder of LongBench's files")
    parser.add_argument("--out", default="results/merging", help="where the run's records lie")
    parser.add_argument("--policies", nargs="+", default=None, help="labels of the run's that merge; default: all")
    parser.add_argument("--budget", type=positive, default=None, help="default: the run's")
    parser.add_argument("--tasks", nargs="+", default=None, help="of the run's; default: all")
    parser.add_argument("--limit", type=positive, default=None, help="examples of a data set; default: the run's")
    parser.add_argument("--page", action="store_true", help="put the table into RESULTS.md")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--tokens", type=positive, default=1024, help="with --cost")
    parser.add_argument("--new-tokens", type=positive, default=32, help="with --cost")
    parser.add_argument("--layers", type=positive, default=6, help="with --cost: the model's first layers")
    parser.add_argument("--rounds", type=positive, default=5, help="with --cost")
    parser.add_argument("--name", type=result_name, default=None, help="of the JSON file in benchmarks/results")
    options = parser.parse_args()
    settings = evaluation.load("merging")
    fields = {"model": options.model, "data": options.data, "budgets": options.budget and (options.budget,)}
    tasks = options.tasks or [task.name for task in settings.tasks if options.data or task.name not in published.NAMES]
    each = {"limit": options.limit} if options.limit else {}
    settings = evaluation.changed(settings, {name: value for name, value in fields.items() if value}, tasks, each)
    settings = only(settings, options.policies) if options.policies else settings
    params = jaxkv.load(settings.model)
    title = options.name or ("merging-cost" if options.cost else "merging-pairs")
    path = RESULTS / f"{title}.json"
    if options.cost:
        check_same(written(title), {"model": settings.model})
        rows = {row["policy"]: row for row in written(title).get("results", [])}
        for row in costs(params, settings, options):
            rows[row["policy"]] = row
            write(title, {"model": settings.model, "results": list(rows.values())})
        shown = [(row["policy"], row["prefill"], row.get("step", "-")) for row in rows.values()]
        print(table("merging over dropping (median of the rounds)", ("policy", "prefill", "step"), shown))
    else:
        results = list(quality(params, settings, options.out))
        write(title, {**{n: v for n, v in vars(options).items() if n not in ("data", "out")}, "results": results})
        header = (
            "policy",
            *(f"{name}, {way}" for name in (*COLUMNS, "KL") for way in WAYS),
            "KL, merging over dropping",
        )
        shown = [line(row) for row in results]
        print(table(f"{settings.model}, budget {settings.budgets[0]}", header, shown))
        if options.page:
            into_page(PAGE, "merging", header, shown)
    print("written to", path)


if __name__ == "__main__":
    main()
