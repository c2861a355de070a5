"""Records -> the rows of tables and pictures: means with 95 % intervals."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Record = dict[str, Any]
SAID = ("fidelity", "bounded")  # what a record says of its policy
WORDS = {True: "yes", False: "no"}


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean of `count` values, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float
    count: int


def wilson(scores: Sequence[float]) -> Mean:
    """Mean of scores in [0, 1] with Wilson's 95 % interval, each score taken as a share of a hit (Wilson 1927)."""
    count, z = len(scores), 1.96
    mean = statistics.fmean(scores)
    middle = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    return Mean(mean, max(0.0, middle - half), min(1.0, middle + half), count)


def asked_size(record: Record) -> int | float | None:
    """The size that was asked for: bytes of a row, the ratio, or tokens kept; None where nothing is evicted."""
    return next((size for name in ("bytes", "ratio", "budget") if (size := record.get(name)) is not None), None)


def in_words(size: int | float | None, rows: Sequence[Record]) -> str:
    """A size of these rows (or records) as tables and pictures say it: megabytes, tokens kept, or of a ratio, which is
    the share of a prompt that goes, the per cent kept."""
    if size is None:
        return "all"
    if has_bytes(rows):
        return f"{size / 1e6:.3g} MB"
    return f"{100 * (1 - size):.3g} % kept" if size < 1 else f"{size} kept"


def has_bytes(rows: Sequence[Record]) -> bool:
    """Whether the sizes of rows (or records) are bytes; they are of one kind."""
    return any(row.get("bytes") is not None for row in rows)


def size_of(record: Record) -> int | float | None:
    """Where the record stands on the budget axis: bytes or tokens kept; under a ratio, what its cache held on
    average."""
    return asked_size(record) if record.get("ratio") is None else record.get("kept")


def answers(records: Iterable[Record]) -> list[Record]:
    """The scored answers."""
    return [record for record in records if record["kind"] == "answer" and record.get("score") is not None]


def grouped(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """The records by key, keys in the order in which they come."""
    out: dict[Any, list[Record]] = {}
    for record in records:
        out.setdefault(key(record), []).append(record)
    return out


def name_of(record: Record) -> str:
    """The policy's label; another source's in front of it."""
    return record["policy"] if record["source"] == "jaxkv" else f"{record['source']}: {record['policy']}"


def column_of(record: Record) -> tuple[str, int | float | None, str]:
    """Policy, size, mode: the column of the results that a record belongs to."""
    return name_of(record), asked_size(record), record.get("mode", "")


def quality(records: Iterable[Record]) -> list[Record]:
    """One row per policy, budget and mode: the mean score of all answers and of each task, and what it cost."""
    rows = []
    for (name, size, mode), some in grouped(answers(records), column_of).items():
        row: Record = {
            "policy": name,
            "source": some[0]["source"],
            "budget": size,
            "bytes": some[0].get("bytes"),
            "mode": mode,
            **{name: some[0].get(name) for name in SAID},
            "score": wilson([record["score"] for record in some]),
            "at": statistics.fmean(x) if (x := [v for r in some if (v := size_of(r)) is not None]) else None,
            "kept": statistics.fmean(record["kept"] for record in some),
            "cache_bytes": statistics.fmean(record["cache_bytes"] for record in some),
            "tokens_per_second": speed(some),
            "tasks": {
                task: wilson([record["score"] for record in each])
                for task, each in grouped(some, lambda record: record["task"]).items()
            },
        }
        rows.append(row)
    return rows


def not_run(records: Iterable[Record]) -> list[str]:
    """The policies that could not be measured, each with the reason."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        if record.get("skipped"):
            found.setdefault(record["skipped"], {})[name_of(record)] = None
    return [f"{', '.join(names)}: {reason}" for reason, names in found.items()]


def speed(records: Sequence[Record]) -> int | float | None:
    """Decoded tokens per second, all rows together: the best batch, as the first of each shape compiles."""
    found = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    return max(found) if len(set(found)) > 1 else None


def fidelities(records: Iterable[Record]) -> list[Record]:
    """One row per policy and budget: means of KL, top-1, perplexity, mass kept and overlap with the oracle's set."""
    rows = []
    for record in records:
        if record["kind"] != "fidelity" or "kl" not in record:
            continue
        mean = lambda name, record=record: _mean(record[name])  # noqa: E731
        rows.append(
            {
                "policy": name_of(record),
                **{name: record.get(name) for name in SAID},
                "budget": asked_size(record),
                "bytes": record.get("bytes"),
                "at": asked_size(record) if record["ratio"] is None else record["length"] * (1 - record["ratio"]),
                **{name: mean(name) for name in ("kl", "top1", "perplexity", "full_perplexity", "mass", "overlap")},
                "by_head": record["mass"],
            }
        )
    return rows


def _percents(mean: Mean) -> tuple[float, float, float]:
    return 100 * mean.value, 100 * mean.low, 100 * mean.high


def _mean(value: Any) -> float:
    return statistics.fmean(_mean(each) for each in value) if isinstance(value, list) else float(value)


def text_table(rows: Sequence[Record], found: Sequence[Record] = ()) -> str:
    """The quality rows as a Markdown table: a line per policy with its fidelity and whether it is bounded while
    decoding, score with interval per budget and mode; then KL. "-" is what no record says."""
    columns = sorted({(row["mode"], row["budget"]) for row in rows if row["budget"] is not None})
    columns = columns or sorted({(row["mode"], None) for row in rows})  # where no policy evicts
    modes = {mode for mode, _ in columns}
    said = functools.partial(in_words, rows=[*rows, *found])
    label = lambda mode, size: said(size) if len(modes) < 2 else f"{mode} {said(size)}"  # noqa: E731
    kl = {(row["policy"], row["budget"]): row["kl"] for row in found}
    sizes = sorted({size for _, size in kl if size is not None}) or [None] * bool(kl)
    facts = {row["policy"]: (row["fidelity"] or "-", WORDS.get(row["bounded"], "-")) for row in [*rows, *found]}
    head = ["policy", *SAID, *(label(*column) for column in columns), *(f"KL at {said(size)}" for size in sizes)]
    lines = [head, ["---"] * 3 + ["---:"] * (len(head) - 3)]
    for name in dict.fromkeys(row["policy"] for row in [*rows, *found]):
        mine = {(row["mode"], row["budget"]): row["score"] for row in rows if row["policy"] == name}
        cells = []
        for mode, size in columns:
            mean = mine.get((mode, size)) or mine.get((mode, None))
            cells.append("-" if mean is None else "{:.0f} ({:.0f}-{:.0f})".format(*_percents(mean)))
        for size in sizes:
            value = kl.get((name, size), kl.get((name, None)))
            cells.append("-" if value is None else f"{value:.3f}")
        lines.append([name, *facts[name], *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
