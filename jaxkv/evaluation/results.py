"""Results on disk: a folder with `run.json` (what was run, on what) and `results.jsonl` (one record per line).

Lines are only ever added, a batch at a time, so a run that was stopped goes on where it was; a last line that was cut
off is dropped.
"""

import itertools
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.checks import shown
from jaxkv.errors import BadValue, first_line
from jaxkv.folders import appearing, writing

Record = dict[str, Any]
COLUMNS = (
    "kind", "source", "policy", "budget", "ratio", "bytes", "mode", "task", "haystack", "length", "depth", "score",
    "prompt_tokens", "kept", "cache_bytes", "tokens_per_second", "prefill_seconds", "decode_seconds", "kl", "top1",
    "perplexity", "full_perplexity", "mass", "overlap", "answer", "answers", "key",
)  # fmt: skip


def _differing(then: Any, now: Any, name: str = "") -> tuple[str, Any, Any]:
    """The first place in two values of JSON that are not the same, such as `tasks[0].limit`, and what stands there."""
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(then, dict) and isinstance(now, dict):
        pairs = [(f"{name}.{key}".lstrip("."), then.get(key), now.get(key)) for key in {**then, **now}]
    elif isinstance(then, list) and isinstance(now, list):
        pairs = [(f"{name}[{n}]", *both) for n, both in enumerate(itertools.zip_longest(then, now))]
    found = next((pair for pair in pairs if pair[1] != pair[2]), None)
    return (name, then, now) if found is None else _differing(*found[1:], found[0])


class Store:
    """The folder of one run."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self.path = self.folder / "results.jsonl"

    def open(self, settings: Record, model: str, weights: str = "") -> set[str]:
        """Make the folder, or go on in it; the keys of the records that are there. `weights` says what numbers the
        model is held in.

        Raises `BadValue` where it holds a run of other settings, another model, or one in other numbers.
        """
        mine = json.loads(json.dumps({"settings": settings, "model": model, "weights": weights}))
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        about = self.folder / "run.json"
        if about.exists():
            there = self.about()
            for what, now in mine.items():
                then = there.get(what, now if what == "weights" else None)  # not said by older runs
                if then != now:
                    name, was, is_now = _differing(then, now)
                    raise BadValue(
                        f"{self.folder} holds a run with other {what} ({name or what}: {shown(was)} there, "
                        f"{shown(is_now)} now): give another folder (--out), or remove this one"
                    )
        else:
            written(about, json.dumps({**mine, "machine": machine()}, indent=1) + "\n")
        records = list(self.records())
        if self.path.exists():  # without the line that was cut off, if there is one
            written(self.path, _lines(records))
        return {record["key"] for record in records}

    def leave_out(self, wanted: set[str]) -> int:
        """Move the records of other keys, whose data has changed since, to `stale.jsonl`; their number."""
        records = list(self.records())
        stale = [record for record in records if record["key"] not in wanted]
        if stale:
            self._append(self.folder / "stale.jsonl", stale)
            written(self.path, _lines(record for record in records if record["key"] in wanted))
        return len(stale)

    def add(self, records: Iterable[Record]) -> None:
        """Add a batch: all its lines in one write, on the disk when this returns, or none of them."""
        self._append(self.path, records)

    def _append(self, path: Path, records: Iterable[Record]) -> None:
        with writing(path), path.open("ab", buffering=0) as file:
            before, lines = file.tell(), memoryview(_lines(records).encode())
            try:
                while lines:
                    lines = lines[file.write(lines) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise

    def records(self) -> Iterable[Record]:
        """The records so far, each key once. Raises `BadValue` for a broken line that is not the last."""
        if not self.path.exists():
            return
        lines, seen = self.path.read_bytes().splitlines(), set()
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                if number < len(lines):
                    raise BadValue(f"{self.path}, line {number}: not JSON; remove the line to go on") from None
                return
            if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in ("key", "kind")):
                raise BadValue(f"{self.path}, line {number}: no record of jaxkv eval; remove the line to go on")
            if record["key"] not in seen:
                seen.add(record["key"])
                yield record

    def about(self) -> Record:
        """run.json. Raises `BadValue` where there is none, or a broken one."""
        path = self.folder / "run.json"
        if not path.exists():
            raise BadValue(f"{self.folder} holds no results (no run.json): run jaxkv eval first")
        try:
            about = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise BadValue(f"{path} cannot be read ({first_line(error)}): remove the folder, or give another") from None
        if not isinstance(about, dict) or not isinstance(about.get("settings"), dict):
            raise BadValue(f"{path} says nothing of a run: remove the folder, or give another")
        return about


def _lines(records: Iterable[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def written(path: Path, text: str | bytes) -> None:
    """The file with this content, whole or not at all."""
    with appearing(path) as draft:
        draft.write_bytes(text.encode() if isinstance(text, str) else text)


def table(records: Iterable[Record], folder: Path) -> list[Path]:
    """results.csv, and results.parquet where pyarrow is installed: one row per record, the columns of `COLUMNS`."""
    import csv
    import io

    rows: list[Record] = [{name: _cell(record.get(name)) for name in COLUMNS} for record in records]
    text = io.StringIO()
    out = csv.DictWriter(text, list[str](COLUMNS), lineterminator="\n")
    out.writeheader()
    out.writerows(rows)
    written(folder / "results.csv", text.getvalue())
    paths = [folder / "results.csv"]
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return paths
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    written(folder / "results.parquet", buffer.getvalue().to_pybytes())
    return [*paths, folder / "results.parquet"]


def _cell(value: Any) -> Any:
    """Arrays per layer and head as their mean; lists of text as one text."""
    if isinstance(value, list):
        if value and isinstance(value[0], str):
            return " | ".join(value)
        return float(np.mean(value)) if value else None
    return value


def machine() -> dict[str, Any]:
    """The device and the versions that a run was measured with."""
    import jax

    import jaxkv

    return {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "jaxkv": jaxkv.__version__,
        "jax": jax.__version__,
    }
