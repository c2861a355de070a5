"""Results -> a self-contained HTML page, PNGs and a table."""

import base64
import io
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jaxkv.errors import BadValue
from jaxkv.evaluation import summary
from jaxkv.evaluation.results import Record, Store, table, written
from jaxkv.evaluation.retention import Retention
from jaxkv.folders import writing


def report(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Draw the results of one or more folders (such as ours and kvpress') into `out` (the first): `report.html`, which
    needs nothing beside it, the same pictures as PNG, `table.md`, and the records as CSV and Parquet.

    Raises `BadValue` for a folder without results, for sizes in tokens beside some in bytes, and where matplotlib is
    not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadValue("a report needs matplotlib, which is not installed: pip install 'jaxkv[eval]'") from None
    if not folders:
        raise BadValue("no folders to report on: expected at least one that jaxkv eval wrote")
    stores = [Store(folder) for folder in folders]
    about = [store.about() for store in stores]
    records = _gathered(stores, about)
    if not records:
        raise BadValue(f"{stores[0].folder} holds no records yet: run jaxkv eval first")
    sized = [each for each in records if each["kind"] != "retention" and summary.asked_size(each) is not None]
    if len({"bytes" in each for each in sized}) > 1:
        raise BadValue(f"{', '.join(map(str, folders))}: some have sizes in bytes, others in tokens; draw each apart")
    folder = Path(out or stores[0].folder).expanduser()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    images = {}
    for name, figure in figures(records).items():
        picture = io.BytesIO()
        figure.savefig(picture, format="png", metadata={"Software": None})
        written(folder / name, picture.getvalue())
        images[name] = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    table(records, folder)
    rows, found = summary.quality(records), summary.fidelities(records)
    written(folder / "table.md", summary.text_table(rows, found) + "\n")
    written(folder / "report.html", _page(records, about, images, rows, found))
    return folder / "report.html"


def _gathered(stores: Sequence[Store], about: Sequence[Record]) -> list[Record]:
    """The records of all folders: one that stands in several once. Behind the policy's name stands what its folder was
    run with, where others were not: the model, its numbers, what came after the text, and where one name stands for two
    policies the folder."""
    models = [str(each["model"]).removeprefix("kvpress: ") for each in about]
    numbers = [str(each.get("weights") or "") for each in about]  # "": not said
    after = [str(each["settings"].get("after", "policy")) for each in about]
    named = [_own(each["settings"]) for each in about]
    out: dict[tuple[str, ...], Record] = {}
    for at, store in enumerate(stores):
        of_folder = ""
        if len(set(models)) > 1:
            of_folder += f" on {about[at]['settings']['model']}"
        if len({*numbers} - {""}) > 1 and numbers[at]:
            of_folder += f" in {_numbers(about[at]['settings'])}"
        if len(set(after)) > 1:
            of_folder += f", then {after[at]}"
        for record in store.records():
            name = record.get("policy")
            several = {each[name] for each in named if name in each}
            more = of_folder + f" ({store.folder.name})" * (len(several) > 1 and name in named[at])
            identity = models[at], numbers[at], after[at], record["key"]
            out.setdefault(identity, {**record, "policy": f"{name}{more}"} if more else record)
    return list(out.values())


def _numbers(settings: Record) -> str:
    """What numbers a run held the model in, as it asked for them."""
    return str(settings.get("weights") or settings.get("dtype") or "floats")


def _own(settings: Record) -> dict[str, str]:
    """The run's own policies by the name that stands in its results, each as text."""
    entries = [each for each in settings.get("policies", ()) if isinstance(each, dict)]
    sizes = ("budgets", "ratios", "bytes")
    tables = {
        each.get("label") or each["name"]: {name: value for name, value in each.items() if name not in sizes}
        for each in entries
        if "label" in each or "table" in each
    }
    return {name: json.dumps(table, sort_keys=True) for name, table in tables.items()}


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """Every picture that the records have the data for, by file name."""
    from jaxkv.evaluation import plots

    out: dict[str, Any] = {}
    answers, found = summary.answers(records), summary.fidelities(records)
    if answers:
        out["quality.png"] = plots.quality_figure(records)
        out["tasks.png"] = plots.tasks_figure(records)
        out["cost.png"] = plots.cost_figure(records)
    if any(record.get("depth") is not None and record.get("length") is not None for record in answers):
        out["needle.png"] = plots.needle_figure(records)
    if any(row["budget"] is not None for row in found):
        out["fidelity.png"] = plots.fidelity_figure(found)
        out["heads.png"] = plots.heads_figure(found)
    for number, record in enumerate(_retentions(records)):
        picture, title = Retention.from_dict(record), _title(record)
        out[f"retention-{number}.png"] = plots.retention_figure(picture, title)
        out[f"retention-{number}-text.png"] = plots.text_figure(picture, title)
    return out


def _retentions(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == "retention"]


def _title(record: Record) -> str:
    size = summary.asked_size(record)
    return record["policy"] if size is None else f"{record['policy']}, {summary.in_words(size, [record])}"


def _page(records: Any, about: list[Record], images: dict[str, str], rows: Any, found: Any) -> str:
    import jinja2

    source = (files("jaxkv.evaluation") / "data" / "report.html").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, undefined=jinja2.ChainableUndefined).from_string(source)
    pictures = [
        {name: record[name] for name in ("bits", "shape", "steps", "tokens", "prompt")}
        for record in _retentions(records)
    ]
    first, models = about[0], dict.fromkeys(each["settings"]["model"] for each in about)
    facts = ", ".join(f"{name} {value}" for name, value in first["machine"].items())
    return page.render(
        title=f"{first['settings']['name']}: {', '.join(models)}",
        facts=facts,
        quality=rows,
        tasks=list(dict.fromkeys(task for row in rows for task in row["tasks"])),
        fidelity=found,
        images=images,
        skipped=summary.not_run(records),
        retention=[
            {"title": _title(record), "map": f"retention-{number}.png"}
            for number, record in enumerate(_retentions(records))
        ],
        words=summary.WORDS,
        said=lambda row: summary.in_words(row["budget"], [row]),
        percent=lambda share: f"{100 * share:.0f}",
        about="\n\n".join(json.dumps(each, indent=1) for each in about),
        # In a script element only "</" would end the element, so that is what must not occur.
        pictures=json.dumps(pictures).replace("</", "<\\/"),
    )
