"""Whole prefill and decode programs through XLA's TPU compiler: how long that takes, and the memory they need.

All layers with the kernels in them, bfloat16, policy `dapq-longflow`; Llama 3 8B stands on four chips of v5e, as its
weights would fill one. Prefill also with its layers as one loop (`scan_layers`). No TPU need be there (see `pod.py`,
whose cases are for many chips).

    pip install libtpu && python -m benchmarks.tpu_programs [--only NAME ...] [--phases prefill]
"""

import argparse
import json
from typing import Any

from benchmarks.pod import Case, into_page, measured
from benchmarks.report import RESULTS, table, write

PAGE = RESULTS.parent / "RESULTS.md"
NAME = "tpu_programs"
CASES = tuple(
    Case(model, topology, (("model", chips),), batch=8, tokens=8192, budget=1024, block=512)
    for model in ("smollm2-135m", "llama-3-8b")
    for topology, chips in (("v5e:2x2", 1 if model == "smollm2-135m" else 4), ("v6e:2x2", 1), ("v5p:2x2x1", 1))
)
HEADER = (
    "program", "weights GiB", "cache GiB", "prefill: compiled in s", "temporary MiB", "in a loop: compiled in s",
    "temporary MiB", "decode: compiled in s", "temporary MiB",
)  # fmt: skip
PHASES = {"prefill": ("prefill", False), "scanned": ("prefill", True), "decode": ("decode", False)}


def row_of(result: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table: sizes on one chip."""
    cells = [result["name"], *(f"{result[part] / 2**30:.2f}" for part in ("weights", "cache"))]
    for phase in PHASES:
        found = result.get(phase)
        if found is None or "refused" in found:
            cells += ["-" if found is None else "does not fit", "-"]
        else:
            cells += [f"{found['seconds']:.0f}", f"{found['memory']['temp'] / 2**20:.1f}"]
    return tuple(cells)


def main() -> None:
    """Compile, print the table, add to the JSON and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name holds one of these")
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=list(PHASES))
    options = parser.parse_args()

    path = RESULTS / f"{NAME}.json"
    done = {each["name"]: each for each in json.loads(path.read_text())["results"]} if path.exists() else {}
    for case in CASES:
        if not any(part in case.name for part in options.only):
            continue
        for phase in options.phases:
            program, scan_layers = PHASES[phase]
            found = measured(case, None, program, "mosaic_tpu", scan_layers)
            found[phase] = found.pop(program)
            done[case.name] = done.get(case.name, {}) | found
            ordered = [done[each.name] for each in CASES if each.name in done]
            rows = [row_of(each) for each in ordered]
            print(table("whole programs on TPU", HEADER, rows), flush=True)
            write(NAME, {"results": ordered})
            into_page(PAGE, NAME, HEADER, rows)


if __name__ == "__main__":
    main()
