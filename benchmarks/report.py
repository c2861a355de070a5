"""What every benchmark prints and stores: a table, and a JSON file that says on what machine it was measured."""

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxkv.evaluation.texts import prose

RESULTS = Path(__file__).parent / "results"
DATA = Path(__file__).parent / "data"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Processor, cores, backend and the versions of what was measured."""
    import jax

    names = ("jax", "jaxlib", "flax", "numpy")
    return {
        "processor": _processor(),
        "cores": cores(),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The rows as aligned text under a title: the first column to the left, the others to the right."""
    cells = [[_cell(value) for value in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(text.ljust(width) if column == 0 else text.rjust(width) for column, (text, width) in enumerate(pairs))
        for pairs in ([*zip(row, widths, strict=True)] for row in cells)
    ]
    return "\n".join([title, lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def named(name: str, model: str) -> str:
    """The name of a file for one model, be that a path or a hub name."""
    return f"{name}-{Path(model).name}"


def check_same(stored: dict[str, Any], given: dict[str, Any], remedy: str = "another --name") -> None:
    """Ends the program where what is stored was measured under other settings, for rows of both would stand in one
    table."""
    for setting, value in given.items():
        if stored and stored.get(setting) != json.loads(json.dumps(value)):
            raise SystemExit(
                f"{setting}={value}, and the rows that are stored have {setting}={stored.get(setting)}: both would "
                f"stand in one table; expected the same, or {remedy}"
            )


def write(name: str, result: dict[str, Any]) -> Path:
    """Store the result as benchmarks/results/<name>.json, whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
    return path


def written(name: str) -> dict[str, Any]:
    """What benchmarks/results/<name>.json holds; nothing where there is no such file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def into_page(page: Path, name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Put the table between the markers of that name in a page."""
    lines = [header, ("---",) * len(header), *rows]
    markdown = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    before, _, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    after = rest.partition(f"<!-- end of {name} -->")[2]
    page.write_text(f"{before}<!-- {name} -->\n{markdown}\n<!-- end of {name} -->{after}", encoding="utf-8")


def prose_rows(tokenizer: Any, batch: int, length: int) -> list[list[int]]:
    """`batch` rows of `length` token ids: the prose from different places on, repeated as often as needed."""
    ids = tokenizer(prose(), add_special_tokens=False)["input_ids"]
    step = len(ids) // batch
    return [[ids[(row * step + at) % len(ids)] for at in range(length)] for row in range(batch)]
