"""A pod without a pod: decode and prefill compiled for TPU topologies that are not there, and what they need.

Nothing runs and no weights exist: XLA's TPU compiler, from `libtpu`, compiles the sharded programs for abstract
arguments; memory per chip and the bytes of every collective are read from the executables.

    pip install libtpu && python -m benchmarks.pod [--only NAME ...] [--phases decode] [--scaling]
"""

import argparse
import collections
import dataclasses
import math
import os
import time
import tomllib
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask about
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several compilers side by side

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import jaxkv
from benchmarks.arguments import cases_of, positive
from benchmarks.report import RESULTS, into_page, table, write, written
from jaxkv.configs import config_files
from jaxkv.lowering import Lowered, held_by_one, lower
from jaxkv.models import ModelConfig
from jaxkv.sharding import Layout
from jaxkv.sharding.traffic import Collective, collectives

GIB = 2**30
CHIPS = {  # HBM bytes and bytes per second of a chip (cloud.google.com/tpu/docs, system architecture, 2026)
    "v5e": (16 * GIB, 819e9),
    "v6e": (32 * GIB, 1640e9),
    "v5p": (95 * GIB, 2765e9),
}
BUDGET, BLOCK, STEPS = 4096, 2048, 16
DOCS = RESULTS.parent.parent / "docs" / "sharding.md"


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one topology: the mesh's axes, the rows of the batch, and the prompt's tokens."""

    model: str
    topology: str
    mesh: tuple[tuple[str, int], ...]
    batch: int
    tokens: int = 2**20
    policy: str = "dapq-longflow"
    budget: int | None = BUDGET
    block: int = BLOCK

    @property
    def name(self) -> str:
        """Names the case on the command line and in the table."""
        axes = " ".join(f"{axis}={size}" for axis, size in self.mesh if size > 1) or "one chip"
        return f"{self.model} {self.topology} {axes}"

    @property
    def chip(self) -> str:
        return self.topology.partition(":")[0]


CASES = (
    Case("llama-3-8b", "v5e:8x8", (("data", 8), ("model", 8)), 64),
    Case("llama-3-8b", "v5e:8x8", (("model", 8), ("context", 8)), 1),
    Case("llama-3-8b", "v6e:4x4", (("data", 2), ("model", 8)), 32),
    Case("llama-3-8b", "v5p:2x2x2", (("model", 8),), 32),
    Case("llama-3-70b", "v5e:8x8", (("data", 2), ("model", 32)), 32),
    Case("llama-3-70b", "v6e:4x4", (("model", 16),), 16),
    Case("llama-3-70b", "v5p:2x2x2", (("model", 8),), 16),
)
SCALING = tuple(
    Case("llama-3-8b", f"v5e:{topology}", (("data", data), ("model", model)), 8 * data)
    for topology, data, model in (
        ("1x1", 1, 1), ("2x2", 1, 4), ("2x4", 1, 8), ("4x4", 2, 8), ("4x8", 4, 8), ("8x8", 8, 8), ("8x16", 16, 8),
        ("16x16", 32, 8),
    )
)  # fmt: skip


def config_of(model: str, layers: int | None) -> ModelConfig:
    """The shape of a model of `configs/models`, its context stretched to what the study prefills."""
    facts = tomllib.loads(config_files("models")[model].read_text(encoding="utf-8"))["config"]
    if layers is not None:
        facts["num_hidden_layers"] = layers
    return dataclasses.replace(ModelConfig.from_hf(facts), max_position=2**21)


def devices_of(topology: str) -> list[Any]:
    """The chips of a topology, none of which need be there."""
    options = {"chips_per_host_bounds": [1, 1, 1]} if topology.endswith(":1x1") else {}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)


def memory(compiled: Any) -> dict[str, int]:
    """Bytes on one chip: the most that the program needs at a time, and its parts."""
    found = compiled.memory_analysis()
    parts = {
        name: getattr(found, f"{name}_size_in_bytes")
        for name in ("argument", "output", "alias", "temp", "generated_code")
    }
    parts["total"] = parts["argument"] + parts["output"] - parts["alias"] + parts["temp"] + parts["generated_code"]
    return parts


def traffic(found: list[Collective]) -> dict[str, Any]:
    """Collectives of one turn of the program's loop: how many, and the bytes that they bring to a chip, by kind."""
    looped = [each for each in found if each.looped]
    counts = collections.Counter(each.kind for each in looped)
    sizes: collections.Counter[str] = collections.Counter()
    for each in looped:
        sizes[each.kind] += each.bytes
    return {
        "count": len(looped),
        "bytes": sum(sizes.values()),
        "counts": dict(counts),
        "sizes": dict(sizes),
    }


def lowered(case: Case, layers: int | None, implementation: str | None = None, scan_layers: bool = False) -> Lowered:
    """Both programs of a case for its chips, with all layers or so many."""
    config = config_of(case.model, layers)
    chips = devices_of(case.topology)[: math.prod(size for _, size in case.mesh)]
    layout = Layout.of(jaxkv.mesh(**dict(case.mesh), devices=chips), config)
    policy = jaxkv.policy(case.policy, budget=case.budget, block=case.block)
    return lower(
        config, policy, batch=case.batch, tokens=case.tokens, steps=STEPS, dtype=jnp.bfloat16, layout=layout,
        implementation=implementation, scan_layers=scan_layers,
    )  # fmt: skip


def measured(
    case: Case, layers: int | None, phase: str, implementation: str | None = None, scan_layers: bool = False
) -> dict[str, Any]:
    """Compile one phase of a case, with all layers or so many; memory, collectives and seconds."""
    programs = lowered(case, layers, implementation, scan_layers)
    began, held = time.perf_counter(), programs.cache.layers
    out = {
        **dataclasses.asdict(case),
        "name": case.name,
        "weights": held_by_one(programs.weights),
        "cache": held_by_one(held),
    }
    try:
        compiled = getattr(programs, phase).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {**out, phase: {"layers": len(held), "refused": str(error)[:300]}}
    found = collectives(compiled.as_text())
    keys = min(held_by_one(layer.keys) for layer in held)
    # sums may be over slots (of the heads' scores, where they evict as one), but nothing is gathered or sent on
    moved = max((each.bytes for each in found if each.kind != "all-reduce"), default=0)
    assert phase != "decode" or moved < keys, f"{case.name}: decoding moves {moved} bytes, a layer's keys are {keys}"
    return {
        **out,
        phase: {
            "layers": len(held),
            "seconds": time.perf_counter() - began,
            "memory": memory(compiled),
            "traffic": traffic(found),
            "largest_moved": moved,
            "keys_of_a_layer": keys,
        },
    }


def row_of(result: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table of programs."""
    hbm, bandwidth = CHIPS[result["topology"].partition(":")[0]]
    cells = [result["name"], str(result["batch"])]
    cells += [f"{result[part] / GIB:.2f}" if part in result else "-" for part in ("weights", "cache")]
    if "refused" in result.get("decode", {}):
        cells += ["does not fit", *["-"] * 4]
    elif "decode" in result:
        total, moved = result["decode"]["memory"]["total"], result["decode"]["traffic"]
        cells += [f"{total / GIB:.2f}", f"{total / hbm:.0%}", str(moved["count"]), f"{moved['bytes'] / 2**20:.2f}"]
        cells.append(f"{(result['weights'] + result['cache']) / bandwidth * 1e3:.2f}")
    else:
        cells += ["-"] * 5
    if "prefill" in result:
        moved = result["prefill"]["traffic"]
        cells += [str(result["prefill"]["layers"]), f"{result['prefill']['memory']['temp'] / GIB:.2f}"]
        cells += [str(moved["count"]), f"{moved['bytes'] / 2**20:.1f}"]
    else:
        cells += ["-"] * 4
    return tuple(cells)


HEADER = (
    "program", "batch", "weights GiB", "cache GiB", "decode GiB", "of HBM", "collectives/token", "MiB/token",
    "limit ms/token", "prefill: layers", "temporary GiB", "collectives/block", "MiB/block",
)  # fmt: skip


def main() -> None:
    """Compile, print the table, add to the JSON and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name holds one of these")
    parser.add_argument("--scaling", action="store_true", help="the weak-scaling series instead, decode only")
    parser.add_argument(
        "--prefill-layers", type=positive, default=2, help="prefill is compiled with so many layers, for they are alike"
    )
    parser.add_argument("--phases", nargs="+", default=["decode", "prefill"], choices=["decode", "prefill"])
    options = parser.parse_args()

    name = "pod_scaling" if options.scaling else "pod"
    stored = written(name).get("results", [])
    done = {result["name"]: result for result in stored}
    cases = SCALING if options.scaling else CASES
    for case in cases_of(parser, cases, options.only):
        result = done.setdefault(case.name, {})
        for phase in ("decode",) if options.scaling else tuple(options.phases):
            found = measured(case, options.prefill_layers if phase == "prefill" else None, phase)
            if phase == "prefill":  # weights and cache are those of all layers
                found = {key: value for key, value in found.items() if key not in ("weights", "cache")}
            result |= found
            print(table(case.name, HEADER, [row_of(result)]), flush=True)
            print(f"{phase}: {result[phase]}", flush=True)
            ordered = [done[each.name] for each in cases if each.name in done]
            write(name, {"results": ordered})
            into_page(DOCS, name, HEADER, [row_of(each) for each in ordered])


if __name__ == "__main__":
    main()
