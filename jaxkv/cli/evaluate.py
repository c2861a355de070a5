"""`jaxkv eval` and `jaxkv report`: what policies cost on text."""

import dataclasses
import json
import os
import sys
from typing import Any

from tyro.conf import FlagCreatePairsOff, Positional

from jaxkv.cli.options import Weights, register


@dataclasses.dataclass(frozen=True)
class Eval:
    """Measure what policies cost on text: tasks, fidelity, memory, speed. Goes on where it was stopped."""

    run: Positional[str] = "default"
    """A TOML file, or a shipped run: ahead, ahead-int4, ahead-long, allocators, bytes, bytes-code, bytes-long,
    bytes-qwen, catalogue, dapq, default, flagship, gsm8k, heads, long-output, long-output-1000, long-values,
    longbench, longbench-code, longbench-few, merging, needles, reading, retrieval, ruler, ruler-few, text."""
    model: str | None = None
    """Instead of the run's model."""
    dtype: str | None = None
    """Instead of the run's dtype."""
    policies: tuple[str, ...] = ()
    """Instead of the run's policies: names, .toml files, or "all" of the catalogue."""
    budgets: tuple[int, ...] = ()
    """Tokens kept per KV head, instead of the run's sizes and those of its single policies."""
    ratios: tuple[float, ...] = ()
    """Fractions removed, instead of these."""
    bytes: tuple[int, ...] = ()
    """What the keys and values of a row may take, instead of these."""
    weights: Weights | None = None
    """How the model's matrices are held, instead of the run's: in blocks of 8 or 4 bits, as a GGUF file has them, or as
    floats."""
    data: str | None = None
    """Folder of published data sets, such as LongBench's files (by default they come from the hub)."""
    tasks: tuple[str, ...] = ()
    """Only these of the run's tasks: lcc, or longbench/lcc."""
    limit: int | None = None
    """Rows of each file of data."""
    longest: int | None = None
    """Cut longer prompts of data to so many tokens, in the middle."""
    lengths: tuple[int, ...] = ()
    """Tokens of the prompts that are made, instead of the run's."""
    batch: int | None = None
    """Instead of the run's batch."""
    block: int | None = None
    """Prompt tokens that run at a time, instead of 2048."""
    share_prefill: FlagCreatePairsOff[bool] = False
    """Run a prompt once for all policies that can share that, also where the run does not say so."""
    plan: bool = False
    """Say what the run will cost, and run nothing."""
    parts: tuple[str, ...] = ()
    """Python files or modules that register parts of your own, besides the run's."""
    out: str | None = None
    """Folder of the results (results/NAME by default)."""
    report: bool = True
    """Draw the report when the run has ended."""
    json: bool = False
    """The mean scores as JSON."""

    def __call__(self) -> int:
        import jaxkv
        from jaxkv import evaluation
        from jaxkv.evaluation.results import Store

        register(self.parts)
        given = ("model", "dtype", "weights", "policies", "data", "batch", "block", "share_prefill")
        asked = {name: getattr(self, name) for name in given}
        changes = {name: value for name, value in asked.items() if value not in (None, ()) and value is not False}
        if self.weights == "floats":
            changes["weights"] = None
        if self.budgets or self.ratios or self.bytes:  # the run's own sizes, of all kinds, go
            changes |= {"budgets": self.budgets, "ratios": self.ratios, "bytes": self.bytes}
        of_tasks = {name: getattr(self, name) for name in ("limit", "longest", "lengths")}
        each = {name: value for name, value in of_tasks.items() if value not in (None, ())}
        settings = evaluation.changed(evaluation.load(self.run), changes, self.tasks, each, self.parts)
        evaluation.check_data(settings)
        out = self.out or os.path.join("results", settings.name)
        try:
            params = jaxkv.load(settings.model, dtype=settings.dtype, weights=settings.weights)
            if self.plan:
                print(evaluation.cost(params, settings))
                return 0
            store = evaluation.evaluate(params, settings, out, progress=_progress)
            return self._told(store)
        except KeyboardInterrupt:
            kept = len(list(Store(out).records()))
            told = f"stopped; {kept} records are kept in {out}, and the same command goes on there"
            print(f"jaxkv: {told}", file=sys.stderr)
            return 130

    def _told(self, store: Any) -> int:
        """Prints the scores, and draws the report."""
        from jaxkv.evaluation import summary

        records = list(store.records())
        rows, found = summary.quality(records), summary.fidelities(records)
        if self.json:
            means = [{**row, "tasks": {task: mean.value for task, mean in row["tasks"].items()}} for row in rows]
            print(json.dumps([{**row, "score": row["score"].value} for row in means]))
        else:
            print(summary.text_table(rows, found))
        for each in summary.not_run(records):
            print(f"not run: {each}", file=sys.stderr)
        if self.report:
            from jaxkv.evaluation.report import report

            print(f"written to {report([store.folder])}", file=sys.stderr)
        return 0


@dataclasses.dataclass(frozen=True)
class Report:
    """A page, pictures and tables from the results of one or more runs."""

    folders: Positional[tuple[str, ...]]
    """Folders that `jaxkv eval` wrote; several are drawn together."""
    out: str | None = None
    """Where to write (the first folder by default)."""

    def __call__(self) -> int:
        from jaxkv.evaluation.report import report

        print(report(self.folders, self.out))
        return 0


def _progress(what: str, done: int, of: int, left: float | None) -> None:
    """A line on standard error per batch of an evaluation: how far it is, and the time left."""
    time = "" if left is None else f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left"
    print(f"[{done}/{of}{time}] {what}", file=sys.stderr, flush=True)
