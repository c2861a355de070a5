"""Whole prefill and decode programs through XLA's TPU compiler: how long that takes, and the memory they need.

All layers with the kernels in them, bfloat16, policy `dapq-longflow`; Llama 3 8B stands on four chips of v5e, as its
weights would fill one. Prefill also with its layers as one loop (`scan_layers`). No TPU need be there (see `pod.py`,
whose cases are for many chips).

`--bounds` says instead how fast a decode step of all layers, or a block of a prompt in two, can be at best: the bytes
that it moves at the memory's bandwidth, its products at the matrix units' rate, and its kernels' bundles at the clock.
`--check` compares them with those that are stored, and fails where one is worse.

    pip install libtpu && python -m benchmarks.tpu_programs [--only NAME ...] [--phases prefill] [--bounds [--check]]
"""

import argparse
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from benchmarks import tpu_schedule
from benchmarks.arguments import cases_of, positive
from benchmarks.pod import Case, into_page, lowered, measured
from benchmarks.report import RESULTS, table, write
from jaxkv.lowering import held_by_one

PAGE = RESULTS.parent / "RESULTS.md"
NAME = "tpu_programs"
BOUNDS = "tpu_bounds"
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


# ---- how fast a step can be at best

FEW = 2  # layers of the prefill programs, which are alike
KERNELS = rf"({'|'.join(sorted(tpu_schedule.KERNELS, reverse=True))})"
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "u64": 8}
FREE = {"get-tuple-element", "bitcast", "constant", "tuple", "iota", "parameter", "custom-call", "while", "after-all"}
ARRAY = re.compile(r"\b[a-z]+\d*\[[\d,]*\](?:\{[^}]*\})?")
SLACK = 1.03  # by which a bound may get worse before `--check` fails


def in_memory(shapes: str) -> list[int]:
    """Bytes of each array of a result's type that lies in main memory: the others have a memory space, `S(1)`."""
    found = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\](?:\{([^}]*)\})?", shapes)
    return [
        SIZES.get(kind, 4) * math.prod(int(size) for size in dims.split(",") if size)
        for kind, dims, layout in found
        if "S(" not in layout
    ]


def step_of(text: str) -> dict[str, Any]:
    """A compiled program's step (of the loop that has the kernels, or of the whole): its kernels, how often and with
    how many bytes and operations each; bytes to and from main memory of all that XLA runs beside them, how many
    operations those are, and the cycles that XLA expects of them. What loops inside it is counted once.

    A gather (tokens of the embedding) counts with its result alone, a slice that is fetched ahead with its own size.
    """
    parts = text.split("\n}\n")
    body = max(parts, key=lambda part: len(re.findall(rf"%{KERNELS}[.\d]* = ", part)))
    lines = tpu_schedule.operations(body)
    made = {name: shapes for name, shapes, *_ in lines}
    kernels: dict[str, Any] = {}
    moved, operations, cycles = 0, 0, 0
    for name, shapes, kind, rest in lines:
        if kernel := re.match(rf"%{KERNELS}[.\d]*$", name):
            told = dict(re.findall(r'"(bytes_accessed|flops)":"(\d+)"', rest))
            each = kernels.setdefault(kernel[1], Counter())
            each.update(calls=1, bytes=int(told["bytes_accessed"]), flops=int(told["flops"]))
        if kind in FREE or "-done" in name + kind:
            continue
        operands = tpu_schedule.operands(rest)
        if kind in ("slice-start", "copy-start"):  # to on-chip memory, or from it: both arrays' sizes are in the result
            moved += min(in_memory(shapes.replace("S(", ""))[:2])
        elif "gather" in name or kind == "gather":
            moved += 2 * sum(in_memory(shapes.replace("S(", "")))
        else:
            arrays = (
                Counter(ARRAY.findall(shapes)),
                Counter(ARRAY.findall(" ".join(made.get(x, "") for x in set(operands)))),
            )
            if "S(2)" in shapes:  # what is on its way to other chips meanwhile goes in and out as it is
                arrays = arrays[0] - arrays[1], arrays[1] - arrays[0]
            moved += sum(sum(in_memory(array)) * count for each in arrays for array, count in each.items())
        operations += 1
        expected = re.search(r'estimated_cycles":"(\d+)', rest)
        cycles += int(expected[1]) if expected else 0
    return {"kernels": kernels, "moved": moved, "operations": operations, "cycles": cycles}


def bound_of(case: Case, phase: str, layers: int | None) -> dict[str, Any]:
    """A decode step, or a block of a prompt, compiled with all layers or so many: what one chip reads, writes and
    multiplies."""
    programs = lowered(case, layers, "mosaic_tpu")
    step = step_of(getattr(programs, phase).compile().as_text())
    own = held_by_one(programs.weights["layers"])  # every token is multiplied with all of them
    tokens = case.batch * (case.block if phase == "prefill" else 1)
    tied = "head" not in programs.weights
    ends = programs.weights["embed" if tied else "head"]
    weights = own + held_by_one(ends) * (phase == "decode")
    return {
        "name": f"{case.name} {phase}",
        "chip": case.chip,
        "layers": len(programs.cache.layers),
        "weights": weights,
        "beside": step["moved"],
        "operations": step["operations"],
        "expected": step["cycles"],
        "kernels": sum(each["bytes"] for each in step["kernels"].values()),
        "flops": tokens * weights + sum(each["flops"] for each in step["kernels"].values()),  # of 2 bytes, 2 operations
    }


def bundles_of(case: Case, phase: str) -> dict[str, Any]:
    """Bundles of a layer's kernels, and those in front of which a decode kernel's loop runs: as if no block were
    skipped and memory were never waited for. Compiled with one layer, in a process of its own."""
    _, kernels = tpu_schedule.dumped(NAME, "--bounds", "--only", case.name, "--phases", phase, "--layers", "1")
    each = ("attends", "prepares", "weighs", "chooses", "looks back", "around", "steps")
    counts = (steps * sum(by.get(name, 0) for name in each) for found in kernels.values() for steps, by in found)
    return {"bundles": sum(counts)}  # of one core


def bound_row(found: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table of bounds."""
    chip = tpu_schedule.CHIPS[found["chip"]]
    total = found["beside"] + found["kernels"]
    ms = lambda amount, rate: f"{1e3 * amount / rate:.3f}"  # noqa: E731
    bundles = found.get("bundles")
    return (
        found["name"], str(found["layers"]),
        *(f"{found[name] / 2**20:.1f}" for name in ("weights", "beside", "kernels")),
        ms(total, chip.bandwidth), f"{100 * min(found['weights'], found['beside']) / total:.1f}",
        ms(found["flops"], chip.flops), ms(found["kernels"], chip.bandwidth),
        "-" if bundles is None else ms(found["layers"] * bundles, chip.hertz),
        str(found["operations"]), ms(found["expected"], chip.hertz),
    )  # fmt: skip


BOUND_HEADER = (
    "program", "layers", "weights MiB", "moved beside the kernels MiB", "by the kernels MiB", "bound by bytes ms",
    "weights' share %", "bound by products ms", "kernels: by bytes ms", "by bundles ms", "operations beside",
    "XLA expects of them ms",
)  # fmt: skip


def worse(found: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """In what a program's bound is worse than it was."""
    return [
        f"{found['name']}, {name}: {found[name]}, not {before[name]}"
        for name in ("beside", "kernels", "operations", "bundles")
        if found.get(name, 0) > SLACK * before.get(name, 0) + 8
    ]


def stored(name: str) -> dict[str, dict[str, Any]]:
    """Rows of the last run, by name."""
    path = RESULTS / f"{name}.json"
    return {each["name"]: each for each in json.loads(path.read_text())["results"]} if path.exists() else {}


def bounds(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Compile, print and store the table of bounds, or compare with it; with `--layers` print alone."""
    done, said = stored(BOUNDS), []
    for case, phase in itertools.product(cases, ("decode", "prefill")):
        if phase not in options.phases:
            continue
        found = bound_of(case, phase, options.layers or (FEW if phase == "prefill" else None))
        if options.layers:
            print(json.dumps(found), flush=True)
            continue
        if not options.bytes:
            found |= bundles_of(case, phase)
        print("  ".join(bound_row(found)), flush=True)
        if options.check:
            said += worse(found, done[found["name"]])
            continue
        done[found["name"]] = found
        names = [f"{each.name} {phase}" for each in CASES for phase in ("decode", "prefill")]
        ordered = [done[name] for name in names if name in done]
        versions = {name: metadata.version(name) for name in ("jax", "libtpu")}
        write(BOUNDS, {"versions": versions, "results": ordered})
        into_page(PAGE, BOUNDS, BOUND_HEADER, [bound_row(each) for each in ordered])
    if said:
        raise SystemExit("\n".join(said))


def main() -> None:
    """Compile, print the table, add to the JSON and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name holds one of these")
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=list(PHASES))
    parser.add_argument("--bounds", action="store_true", help="bytes, bundles and milliseconds instead")
    parser.add_argument("--check", action="store_true", help="compare bounds with those stored, and fail if worse")
    parser.add_argument("--bytes", action="store_true", help="bounds without the schedules, whose dumps take minutes")
    parser.add_argument("--layers", type=positive, help="bounds of so many layers, printed alone")
    options = parser.parse_args()
    cases = cases_of(parser, CASES, options.only)
    if options.bounds:
        bounds(cases, options)
        return

    done = stored(NAME)
    for case in cases:
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
