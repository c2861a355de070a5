"""What the TPU compiler makes of each kernel: bundles per block beside the block's copy, bytes moved beside those
needed, and copies of the cache in a loop. No TPU need be there.

libtpu's compiler writes each kernel's static schedule, one bundle a cycle. A kernel whose bundles for a block are fewer
than the cycles in which the block comes from memory is bound by memory; what is beyond that, it costs. Each case is
compiled in a process of its own, as a loop of steps whose cache is donated.

    pip install libtpu && python -m benchmarks.tpu_schedule [--only NAME ...] [--check]

`--check` compares with `results/tpu_schedule.json` instead of writing it, and fails where a case got worse.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask about

from benchmarks.arguments import cases_of
from benchmarks.report import RESULTS, into_page, write

NAME = "tpu_schedule"
PAGE = RESULTS.parent / "RESULTS.md"
SLACK = 1.03  # by which a case may get worse before `--check` fails


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip's topology, cores that share its memory, bytes from memory and bfloat16 operations a second; its clock."""

    topology: str
    cores: int
    bandwidth: float
    flops: float
    hertz: float

    @property
    def bytes_per_cycle(self) -> float:
        """Of a core."""
        return self.bandwidth / self.cores / self.hertz

    @property
    def flops_per_cycle(self) -> float:
        """Of a core."""
        return self.flops / self.cores / self.hertz


CHIPS = {
    "v5e": Chip("v5e:2x2", 1, 819e9, 197e12, 1.5e9),
    "v6e": Chip("v6e:2x2", 1, 1640e9, 918e12, 1.75e9),
    "v5p": Chip("v5p:2x2x1", 2, 2765e9, 459e12, 1.75e9),
}
WORK = ("attends", "scores", "chooses")  # no mass and the first empty slot; the mass too; and the lowest score
SIZES = {128: (8, 8, 4, 4096, 128), 64: (8, 8, 4, 8192, 64)}  # B, Hk, G, C, D
PROMPT = (1, 8, 4, 1024, 4096, 128)  # B, Hk, G, queries, keys, D


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel on a chip: "equal" or "ragged" heads and what a step does, or "prefill"; over `codes`, or bfloat16."""

    kernel: str
    work: str
    dim: int
    chip: str
    codes: str = ""

    @property
    def name(self) -> str:
        """As the table and the files name it."""
        return " ".join(filter(None, (self.kernel, self.work, f"D{self.dim}", self.codes, self.chip)))


CODES = ("int8", "int4", "fp8")  # a scale for each entry; of integers a lowest value too; and as `kivi` has them
CASES = [
    *(Case(*each) for each in itertools.product(("equal", "ragged"), WORK, SIZES, CHIPS)),
    *(Case(*each) for each in itertools.product(("equal", "ragged"), ("chooses",), (128,), CHIPS, CODES)),
    *(Case(*each) for each in itertools.product(("equal",), ("attends",), SIZES, CHIPS, ("kivi",))),
    *(Case("prefill", work, 128, chip) for work, chip in itertools.product(("attends", "weighs"), CHIPS)),
]
CALLS = {
    ("prefill", "attends"): "prefill_attend", ("prefill", "weighs"): "prefill_attend_mass",
    **{("equal", work): "decode_attend_score" for work in WORK}, **{("ragged", work): "ragged_decode" for work in WORK},
}  # fmt: skip
KERNELS = {*CALLS.values(), "prefill_attend_lse"}


# ---- in a process of its own


def compiled(case: Case) -> dict[str, Any]:
    """The case compiled: its copies, its temporary memory, and the bytes that its operations move in a step."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

    chips = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[case.chip].topology).devices
    on = SingleDeviceSharding(chips[0])
    function, arrays, donated = prompt_block(case) if case.kernel == "prefill" else steps(case)
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), arrays)
    kind = AbstractDevice(chips[0].device_kind, CHIPS[case.chip].cores, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        program = jax.jit(function, donate_argnums=donated).lower(*arrays).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None
    keys = jax.tree.leaves(arrays[0]["keys"])[0] if donated else None  # the codes, where there are some
    made = Counter() if keys is None else made_of(keys.shape, text)
    return {
        "temporary": memory.temp_size_in_bytes,
        "copies": sum(count for name, count in made.items() if name not in MOVES_NOTHING),
        **beside(text, CALLS[case.kernel, case.work], math.prod(SIZES[case.dim][i] for i in (0, 1, 3))),
    }


def steps(case: Case) -> tuple[Any, tuple, tuple[int, ...]]:
    """Some decode steps one after the other; the cache goes from each to the next."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.arguments import Held, Judge, Rule, Segments, Token
    from pallas_kernels.decode_attend_score.mosaic_tpu import decode_attend_score
    from pallas_kernels.ragged_decode.mosaic_tpu import ragged_decode

    batch, kv_heads, group, slots, dim = SIZES[case.dim]
    each = (batch, kv_heads, slots) if case.kernel == "equal" else (batch, kv_heads * slots)
    of: Any = jax.ShapeDtypeStruct
    new, row = of((batch, kv_heads, dim), jnp.bfloat16), of((batch,), jnp.int32)
    codes = [token_code(case, name) for name in BOTH] if case.codes else ()
    token = Token(of((batch, kv_heads * group, dim), jnp.bfloat16), new, new, row, *codes)
    cache = {name: held(case, name, each) for name in BOTH}
    cache |= {"positions": of(each, jnp.int32), "slot": of((batch, kv_heads), jnp.int32)}
    weight = of(each, jnp.float32)
    options: dict[str, Any] = {"scale": 0.1, "with_mass": case.work != "attends"}
    rule = Rule("each", sinks=4) if case.work == "chooses" else None

    def loop(cache, token, row, weight, offsets):
        judge = Judge(row, row, weight, rule=rule) if rule else Judge(row, row)

        def step(_, carry):
            cache, token, _ = carry
            arrays = cache["keys"], cache["values"], cache["positions"]
            if case.kernel == "equal":
                out = decode_attend_score(token, Held(*arrays), cache["slot"], judge, **options)
            else:
                out = ragged_decode(token, Segments(*arrays, offsets), cache["slot"], judge, **options)
            cache = {"keys": out.keys, "values": out.values, "positions": out.positions, "slot": out.next_slot}
            token = token._replace(query=out.output, position=token.position + 1)
            return cache, token, jnp.zeros(each) if out.mass is None else out.mass

        return jax.lax.fori_loop(0, 4, step, (cache, token, jnp.zeros(each)))

    return loop, (cache, token, row, weight, of((batch, kv_heads + 1), jnp.int32)), (0,)


BOTH = ("keys", "values")


def codec_of(case: Case, name: str) -> Any:
    """How the "keys" or "values" lie."""
    from jaxkv.policies import Codecs, Fp8, Int, IntByChannel

    kivi = {"keys": IntByChannel(2, 32), "values": Int(2, channels=32)}[name]
    return {"": Codecs().keys, "int8": Int(8), "int4": Int(4), "fp8": Fp8(), "kivi": kivi}[case.codes]


def held(case: Case, name: str, slots: tuple[int, ...]) -> Any:
    """The "keys" or "values" of so many slots, as shapes."""
    import jax
    import jax.numpy as jnp

    codec = codec_of(case, name)
    return jax.eval_shape(
        lambda: codec.as_codes(
            codec.encode_all(jnp.zeros((*slots, case.dim), jnp.bfloat16), jnp.zeros(slots, jnp.int32))
        )
    )


def token_code(case: Case, name: str) -> Any:
    """The code of a token's key or value, as shapes; None where a step writes none."""
    import jax
    import jax.numpy as jnp

    batch, kv_heads, _, _, dim = SIZES[case.dim]
    codec = codec_of(case, name)
    if not codec.apart:
        return None
    return jax.eval_shape(lambda: codec.as_codes(codec.encode(jnp.zeros((batch, kv_heads, dim), jnp.bfloat16))))


def prompt_block(case: Case) -> tuple[Any, tuple, tuple[int, ...]]:
    """A block of a prompt: its attention, or what each key gets of it."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.prefill_attend.mosaic_tpu import prefill_attend
    from pallas_kernels.prefill_attend_mass.mosaic_tpu import prefill_attend_mass

    batch, kv_heads, group, length, slots, dim = PROMPT
    query = jax.ShapeDtypeStruct((batch, kv_heads * group, length, dim), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((batch, kv_heads, slots, dim), jnp.bfloat16)
    at = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    place = jax.ShapeDtypeStruct((batch, kv_heads, slots), jnp.int32)
    if case.work == "attends":
        attend = functools.partial(prefill_attend, scale=0.1, own_keys_last=True)
        return attend, (query, keys, keys, at, place), ()
    return functools.partial(prefill_attend_mass, scale=0.1, reduce="sum"), (query, keys, at, place), ()


MOVES_NOTHING = {"parameter", "get-tuple-element", "bitcast", "custom-call", "tuple", "while"}


def made_of(shape: tuple[int, ...], text: str) -> Counter[str]:
    """The operations of a compiled program whose result is an array of this shape, or of its last two axes swapped."""
    *lead, slots, dim = shape
    either = "|".join(",".join(map(str, (*lead, *last))) for last in ((slots, dim), (dim, slots)))
    return Counter(re.findall(rf"= \(?[a-z0-9]+\[(?:{either})\][^=]*? ([a-z-]+)\(", text))


def operations(body: str) -> list[tuple[str, str, str, str]]:
    """Of each operation in a part of a compiled program its name, the type of its result, its kind, and the rest."""
    return re.findall(r"^ +(?:ROOT )?(%\S+) = (.*?) ([a-z][a-z-]*)\((.*)$", body, re.M)


def operands(rest: str) -> list[str]:
    """The names of what an operation takes, out of the rest of its line."""
    return re.findall(r"%[^\s,)]+", re.split(r"\), |\)$", rest)[0])


def beside(text: str, call: str, slots: int) -> dict[str, int]:
    """Operations beside the kernel in a program, or in the loop that has it, and the cycles XLA expects of them; and
    how often the kernel fetches the positions of the `slots` beside the first time."""
    body = next(part for part in text.split("\n}\n") if re.search(rf"%{call}[.\d]* = ", part))
    lines = operations(body)
    some = [rest for _, _, kind, rest in lines if kind not in MOVES_NOTHING | {"constant", "iota"}]
    expected = (re.search(r'estimated_cycles":"(\d+)', rest) for rest in some)
    kernel = next(rest for name, _, _, rest in lines if re.match(rf"%{call}[.\d]*$", name))
    sizes = {name: re.match(r"\(?s32\[([\d,]+)\]", shape) for name, shape, *_ in lines}
    takes = [sizes.get(name) for name in operands(kernel)]
    words = sum(math.prod(map(int, size[1].split(","))) >= slots for size in takes if size)
    return {
        "beside": len(some),
        "expected": sum(int(found[1]) for found in expected if found),
        "again": words - 1,
    }


# ---- the schedule


@dataclasses.dataclass
class Part:
    """Bundles that run one after the other, in so many loops, and how many of each vector operation they hold."""

    label: str
    loops: int = 0
    bundles: int = 0
    operations: Counter[str] = dataclasses.field(default_factory=Counter)

    def has(self, *names: str) -> bool:
        """Whether it holds one of the operations."""
        return any(self.operations[name] for name in names)


def parts_of(lines: Iterable[str]) -> list[Part]:
    """A schedule's parts: from each label or branch to the next."""
    parts, ended = [Part("")], False
    for line in lines:
        found = re.match(r"\s*(?:0x[0-9a-f]+|0)\s+([A-Z]+)?\s*: (>*)", line)
        if found is None:
            continue
        if found[1] or ended:
            parts.append(Part(found[1] or ""))
        parts[-1].bundles += 1
        parts[-1].loops = max(parts[-1].loops, len(found[2]))  # an empty bundle does not say
        parts[-1].operations.update(re.findall(r"(?:= |;;  |\{ )(v[a-z]+[0-9]?|dma)\b", line))
        ended = "sbr.rel" in line
    return parts


def regions(schedule: str) -> dict[str, int]:
    """Bundles of a kernel's loop over the blocks, by what they do:

    "attends" has the matrix products, "prepares" what else runs for them; "clears" is the work before them on values of
    blocks with empty slots; "weighs", "chooses" and "looks back" are what comes behind them (mass; scores and choice;
    the rest; in a decode kernel of the row before), "around" the loop that they are in; "ends" what only the last block
    of a row runs; "writes" what only a new token's block runs; "steps" the loop over the blocks itself and its copies.
    """
    body = [part for part in parts_of(schedule.splitlines()) if part.loops]
    products = [number for number, part in enumerate(body) if part.has("vmatmul", "vmatprep", "vmatpush", "vmatres")]
    kinds: list[str] = []
    for number, part in enumerate(body):
        stores, vectors = part.operations["vst"], sum(part.operations.values()) - part.operations["dma"]
        if number in products:
            kind = "attends"
        elif products[0] - 2 <= number < products[0] and stores > 16 and part.has("vpack", "vxpose"):
            kind = "clears"
        elif number < products[0] and stores and (part.has("dma") or (part.has("vsel") and part.bundles < 80)):
            kind = "writes"
        elif number > products[-1] and (part.has("vlog2", "vrcp") or (part.has("vmin") and part.has("vcvt"))):
            kind = "ends"
        elif number > products[-1] and vectors > part.bundles // 2 and not part.has("dma"):
            compares = part.has("vcmp") and part.has("vsel")
            kind = "weighs" if part.has("vexp2", "vpow2") else "chooses" if compares else "looks back"
        else:
            kind = "steps"
        kinds.append(kind)
    if "writes" in kinds:  # all between the first and the last of them stands under one condition
        first, last = kinds.index("writes"), len(kinds) - kinds[::-1].index("writes")
        kinds[first:last] = ["writes"] * (last - first)
        for number in range(last, products[-1]):
            kinds[number] = "prepares" if kinds[number] == "steps" else kinds[number]
    for number in range(products[-1], len(body)):
        kinds[number] = "around" if kinds[number] == "steps" and body[number].loops > 1 else kinds[number]
    found: Counter[str] = Counter()
    for kind, part in zip(kinds, body, strict=True):
        found[kind] += part.bundles
    return dict(found)


# ---- a case's row


def dumped(module: str, *options: str) -> tuple[dict[str, Any], dict[str, list[tuple[int, dict[str, int]]]]]:
    """What a benchmark run with these options prints last, as JSON; and by a kernel's name, of each compiled the
    steps of its grid on one core and its `regions`."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        own = {"LIBTPU_INIT_ARGS": flags, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
        own |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
        command = [sys.executable, "-m", f"benchmarks.{module}", *options]
        done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{options}: {done.stderr[-2000:]}")
        found: dict[str, list[tuple[int, dict[str, int]]]] = {}
        for path in Path(folder).glob("*-final_bundles.txt"):
            kernel = re.match(r"(\d+-([a-z_]+)[.\d]*)-\d+-final_bundles", path.name)
            if kernel is None or kernel[2] not in KERNELS:
                continue
            source = next(Path(folder).glob(f"{kernel[1]}-*-original.txt")).read_text()
            grid = re.search(r"iteration_bounds: \(([\d, ]+)\)", source)
            steps = math.prod(int(size) for size in grid[1].split(",") if size.strip()) if grid else 1
            found.setdefault(kernel[2], []).append((steps, regions(path.read_text())))
        return json.loads(done.stdout.splitlines()[-1]), found


def measured(case: Case) -> dict[str, Any]:
    """The case, compiled in a process of its own, and what its schedule says."""
    facts, kernels = dumped(NAME, "--one", case.name)
    steps, found = max(kernels[CALLS[case.kernel, case.work]], key=lambda each: sum(each[1].values()))
    return {"name": case.name, **facts, "regions": found} | bound(case, steps, found, facts["again"])


def bound(case: Case, steps: int, found: dict[str, int], again: int) -> dict[str, Any]:
    """Bundles and cycles of a block, and the whole kernel's cycles over those of its bytes (or its products); its grid
    has so many steps on each core, and it fetches positions so often beside the first time."""
    import jax

    chip = CHIPS[case.chip]
    if case.kernel == "prefill":
        from pallas_kernels.prefill_attend.mosaic_tpu import KEYS, ROWS

        products = 1 if case.work == "weighs" else 2
        cycles = 2 * products * ROWS * KEYS * case.dim / chip.flops_per_cycle
        back = sum(found.get(kind, 0) for kind in ("weighs", "chooses", "looks back"))
        return {
            "block": found["attends"],
            "attends": found["attends"],
            "back": back,
            "bound": round(cycles),
            "over": found["attends"] / cycles - 1,
        }
    from pallas_kernels.tpu_plan import bands

    batch, kv_heads, group, slots, _ = SIZES[case.dim]
    rows = batch // chip.cores
    blocks, rest = divmod(steps - 1, rows)  # a core goes one step further, to look back at its last row
    assert rest == 0, f"{case.name}: {steps} steps for {rows} rows"
    scores, chooses = case.work != "attends", case.work == "chooses"
    entries = kv_heads * slots / blocks  # of a block
    cache = [held(case, name, (1, kv_heads, slots)) for name in BOTH]
    entry = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) / (kv_heads * slots)  # bytes of K and V
    needed = entries * (entry + 4 + 4 * scores + 4 * chooses)  # and positions, masses, weights
    fetched = needed + 4 * entries * again
    moved = fetched + 4 * entries  # positions once more: to see which blocks are due
    cycles = fetched / chip.bytes_per_cycle
    some = len(bands(kv_heads, group)) if case.kernel == "ragged" else 1
    met = (1 + (some - 1) / blocks) / some  # of the heads' bands a block meets one, and one more at every border
    attends, back = met * found["attends"] + found.get("prepares", 0), found.get("looks back", 0)
    back += met * (found.get("weighs", 0) + found.get("chooses", 0))
    if case.codes and case.kernel == "ragged":
        attends += found.get("clears", 0)  # numbers of the codes, made once for all heads that meet a block
    back += found.get("around", 0)
    run = attends + back + found["steps"]
    new = found.get("ends", 0) + found["writes"]  # a row's block with the new token, say the last
    if case.kernel == "ragged":  # each head's own is in a segment of its own
        run, new = run + found["writes"] / blocks, found.get("ends", 0)
    whole = cycles + rows * (blocks - 1) * max(cycles, run) + (rows - 1) * max(cycles, run + new)
    whole += run + new + blocks * back + found["steps"] + found.get("ends", 0)  # no copy hides these
    return {
        "block": round(run),
        "attends": round(attends),
        "back": round(back),
        "bound": round(needed / chip.bytes_per_cycle),
        "over": whole / (rows * blocks * needed / chip.bytes_per_cycle) - 1,
        "moved": moved / needed,
    }


HEADER = (
    "kernel", "attends", "looks back", "clears", "loop", "a block", "bound in cycles", "over the bound %",
    "bytes moved / needed", "operations beside", "XLA expects of them", "copies", "temporary MiB",
)  # fmt: skip


def row_of(found: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    by = found["regions"]
    return (
        found["name"], str(found["attends"]), str(found["back"]), str(by.get("clears", 0)), str(by["steps"]),
        str(found["block"]), str(found["bound"]), f"{100 * found['over']:.1f}",
        f"{found['moved']:.3f}" if "moved" in found else "-", str(found["beside"]), str(found["expected"]),
        str(found["copies"]), f"{found['temporary'] / 2**20:.1f}",
    )  # fmt: skip


def stored() -> dict[str, dict[str, Any]]:
    """The cases of the last run, by name."""
    path = RESULTS / f"{NAME}.json"
    return {each["name"]: each for each in json.loads(path.read_text())["results"]} if path.exists() else {}


def worse(found: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """In what a case is worse than it was."""
    said = [
        f"{found['name']}, {name}: {found['regions'].get(name, 0)} bundles, not {before['regions'].get(name, 0)}"
        for name in ("attends", "weighs", "chooses", "looks back", "clears", "steps", "around")
        if found["regions"].get(name, 0) > SLACK * before["regions"].get(name, 0) + 8
    ]
    if found["expected"] > SLACK * before["expected"] + 8:
        said.append(f"{found['name']}: {found['expected']} cycles of operations beside, not {before['expected']}")
    if found["copies"] > before["copies"] or found["temporary"] > SLACK * before["temporary"] + 2**20:
        said.append(f"{found['name']}: {found['copies']} copies, {found['temporary']} bytes of temporary memory")
    return said


def main() -> None:
    """Compile, print the lines of the table, and store or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name holds one of these")
    parser.add_argument("--check", action="store_true", help="compare with what is stored; fail where it is worse")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compiled(next(case for case in CASES if case.name == options.one))))
        return

    done, said = stored(), []
    for case in cases_of(parser, CASES, options.only):
        found = measured(case)
        print("  ".join(row_of(found)), flush=True)
        if options.check:
            said += worse(found, done[case.name]) if case.name in done else [f"{case.name}: nothing is stored"]
        else:
            done[case.name] = found
            store([done[case.name] for case in CASES if case.name in done])
    if said:
        raise SystemExit("\n".join(said))


def store(ordered: list[dict[str, Any]]) -> None:
    """Into the JSON file and the page."""
    versions = {name: metadata.version(name) for name in ("jax", "libtpu")}
    write(NAME, {"versions": versions, "results": ordered})
    into_page(PAGE, NAME, HEADER, [row_of(each) for each in ordered])


if __name__ == "__main__":
    main()
