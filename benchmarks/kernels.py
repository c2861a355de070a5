"""The decode operations beside what else could do the work, on whatever accelerator is there.

Per batch and number of slots, all with one new token per row and the cache full:
- fused: `decode_attend_score` with LongFlow's rule, by the fastest implementation for this backend;
- unscored: the same without scoring (on a GPU the same kernel, without the logits; else the reference, whose scoring
  XLA leaves out);
- library: `jax.nn.dot_product_attention` (cuDNN on a GPU), in the layout that it wants; it writes no token;
- tokamax: `tokamax.dot_product_attention`, likewise, where it is installed;
- unfused: write, library attention, and a second pass over K that scores and takes the victim;
- copy: a measured copy of as many bytes, the limit;
- pool: `ragged_decode` on as many slots in all, which the KV heads share evenly;
- uneven: the same where the first head has all but 8 slots of each other one;
- plain pool: `uneven` by the reference, which every pool runs on where there is no kernel.

Each runs in a loop inside one compiled program, its output the next query, so that dispatch does not count (on an
accelerator; on a CPU a program is one step); the ways take turns, and every figure is the median of the rounds. Fused
and unfused, pool and plain are compared before they are timed.

    python -m benchmarks.kernels            # JSON to benchmarks/results/kernels.json
    python -m benchmarks.kernels --quick    # a smoke run on tiny shapes; stores nothing
"""

import argparse
import functools
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.arguments import above_zero, positive, rows_and_slots
from benchmarks.report import table, write
from pallas_kernels.arguments import Held, Judge, Rule, Segments, Token
from pallas_kernels.decode_attend_score import decode_attend_score
from pallas_kernels.decode_attend_score.victim import alive, linear, over_heads, protected, victim
from pallas_kernels.ragged_decode import ragged_decode

RULE = Rule("sum")
SECONDS = 0.05  # what is timed lasts at least so long
STEPS = 16  # of one program on an accelerator, as a number: a loop that asks the host whether to go on is slower

Step = Callable[[dict[str, Any]], dict[str, Any]]  # one decode step: state to state


def start(batch: int, slots: int, options: argparse.Namespace) -> dict[str, Any]:
    """Random arguments of a decode step over a full cache, the queries grouped [B, Hq, D]."""
    heads, group, dim = options.kv_heads, options.group, options.dim
    draw = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(
        jax.random.split(jax.random.key(0), 5),
        [(batch, heads * group, dim), *[(batch, heads, dim)] * 2, *[(batch, heads, slots, dim)] * 2],
        strict=True,
    )]  # fmt: skip
    query, key, value, keys, values = draw
    return {
        "query": query, "key": key, "value": value, "keys": keys, "values": values,
        "positions": jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, heads, slots)),
        "weight": jnp.sum(jnp.abs(values.astype(jnp.float32)), axis=-1),
        "position": jnp.full(batch, slots, jnp.int32),
        "slot": jnp.zeros((batch, heads), jnp.int32),
    }  # fmt: skip


def fused(state: dict[str, Any], implementation: str | None = None) -> dict[str, Any]:
    """The operation: write, attend, score, choose."""
    result = _operation(state, implementation)
    return state | {
        "query": result.output, "keys": result.keys, "values": result.values, "positions": result.positions,
        "slot": result.next_slot, "position": state["position"] + 1,
    }  # fmt: skip


def _operation(state: dict[str, Any], implementation: str | None):
    limits = jnp.full_like(state["position"], state["keys"].shape[2])
    judge = Judge(limits, jnp.zeros_like(limits), state["weight"], rule=RULE)
    return decode_attend_score(
        _bundle(Token, state), _bundle(Held, state), state["slot"], judge, scale=_scale(state),
        implementation=implementation,
    )  # fmt: skip


def _bundle(kind: type, state: dict[str, Any]) -> Any:
    """The state's arrays, as the operations take them."""
    return kind(**{name: state[name] for name in kind._fields if name in state})


def unscored(state: dict[str, Any]) -> dict[str, Any]:
    """Write and attend: the slots are filled in turn."""
    slots = state["keys"].shape[2]
    limits = jnp.full_like(state["position"], slots)
    judge = Judge(limits, jnp.zeros_like(limits), 0.0)
    result = decode_attend_score(
        _bundle(Token, state), _bundle(Held, state), state["slot"], judge, scale=_scale(state), with_mass=False,
        implementation=None if jax.default_backend() == "gpu" else "reference",
    )  # fmt: skip
    return state | {
        "query": result.output, "keys": result.keys, "values": result.values, "positions": result.positions,
        "slot": lax.rem(state["slot"] + 1, slots), "position": state["position"] + 1,
    }  # fmt: skip


def library(state: dict[str, Any]) -> dict[str, Any]:
    """jax.nn.dot_product_attention over K and V as [B, C, Hk, D]."""
    return state | {"query": _library(state)}


@functools.cache
def library_runs_as() -> str:
    """cuDNN where it takes a decode step, else XLA."""
    if jax.default_backend() != "gpu":
        return "xla"
    query, cache = jnp.zeros((1, 1, 8, 128), jnp.bfloat16), jnp.zeros((1, 64, 2, 128), jnp.bfloat16)
    try:
        jax.block_until_ready(jax.nn.dot_product_attention(query, cache, cache, implementation="cudnn"))
    except Exception as error:  # whatever it says, it cannot be compared with
        print(f"cuDNN does not run a decode step: {error}")
        return "xla"
    return "cudnn"


def _library(state: dict[str, Any]):
    implementation = library_runs_as()
    attend = functools.partial(jax.nn.dot_product_attention, scale=_scale(state), implementation=implementation)
    return attend(state["query"][:, None], state["keys"], state["values"])[:, 0]


def tokamax(state: dict[str, Any]) -> dict[str, Any]:
    """tokamax.dot_product_attention over K and V as [B, C, Hk, D]."""
    import tokamax  # pyright: ignore[reportMissingImports]

    attended = tokamax.dot_product_attention(
        state["query"][:, None], state["keys"], state["values"], scale=_scale(state)
    )
    return state | {"query": attended[:, 0]}


def unfused(state: dict[str, Any]) -> dict[str, Any]:
    """Write; library attention; then a second pass over K for the mass, the scores and the victim."""
    batch, slots, kv_heads, dim = state["keys"].shape
    rows, heads = jnp.arange(batch)[:, None], jnp.arange(kv_heads)[None, :]
    keys = state["keys"].at[rows, state["slot"], heads].set(state["key"])
    values = state["values"].at[rows, state["slot"], heads].set(state["value"])
    positions = state["positions"].at[rows, heads, state["slot"]].set(state["position"][:, None])
    state = state | {"keys": keys, "values": values, "positions": positions}
    output = _library(state)
    queries = state["query"].reshape(batch, kv_heads, -1, dim)
    logits = jnp.einsum("bhgd,bchd->bhgc", queries, keys, preferred_element_type=jnp.float32) * _scale(state)
    mass = jnp.sum(jax.nn.softmax(logits, axis=-1), axis=2)
    now, live = state["position"] + 1, alive(positions, state["position"] + 1, None)
    score = over_heads(linear(mass, state["weight"], 0.0), RULE.heads)
    score = jnp.where(protected(positions, now, RULE.sinks, jnp.zeros_like(now)), jnp.inf, score)
    slot = victim(score, positions, live, jnp.full_like(now, slots))
    return state | {"query": output, "slot": slot, "position": now}


def pool_of(state: dict[str, Any], uneven: bool) -> dict[str, Any]:
    """The same keys and values as one pool, full."""
    batch, heads, slots, dim = state["keys"].shape
    total = heads * slots
    offsets = total - np.arange(heads, -1, -1) * (8 if uneven else slots)
    offsets[0] = 0
    return {
        **{name: state[name] for name in ("query", "key", "value")},
        **{name: state[name].reshape(batch, total, dim) for name in ("keys", "values")},
        "positions": jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32), (batch, total)),
        "weight": state["weight"].reshape(batch, total),
        "position": jnp.full(batch, total, jnp.int32),
        "offsets": jnp.broadcast_to(jnp.asarray(offsets, jnp.int32), (batch, heads + 1)),
        "slot": jnp.broadcast_to(jnp.asarray(offsets[:-1], jnp.int32), (batch, heads)),
    }


def pooled(state: dict[str, Any], implementation: str | None = None) -> dict[str, Any]:
    """The operation on a pool: write, attend, score, choose."""
    limits = jnp.full_like(state["position"], state["keys"].shape[1])
    judge = Judge(limits, jnp.zeros_like(limits), state["weight"], rule=Rule("each"))
    result = ragged_decode(
        _bundle(Token, state), _bundle(Segments, state), state["slot"], judge, scale=_scale(state),
        implementation=implementation,
    )  # fmt: skip
    return state | {
        "query": result.output, "keys": result.keys, "values": result.values, "positions": result.positions,
        "slot": result.next_slot, "position": state["position"] + 1,
    }  # fmt: skip


plain = functools.partial(pooled, implementation="reference")


def copy(state: dict[str, Any]) -> dict[str, Any]:
    """Read K and write it back changed: as many bytes as reading K and V."""
    return state | {"keys": state["keys"] + state["position"][0].astype(state["keys"].dtype)}


def _scale(state: dict[str, Any]) -> float:
    return state["query"].shape[-1] ** -0.5


def looped(step: Step, state: dict[str, Any]) -> Callable[[int], float]:
    """`run(times)`: seconds per step of at least so many, the state donated from call to call."""
    steps = 1 if jax.default_backend() == "cpu" else STEPS
    loop = jax.jit(lambda state: lax.fori_loop(0, steps, lambda _, s: step(s), state), donate_argnums=0)
    held = [jax.tree.map(jnp.copy, state)]

    def run(times: int) -> float:
        calls = -(-times // steps)
        started = time.perf_counter()
        for _ in range(calls):
            held[0] = loop(held[0])
        jax.block_until_ready(held[0])
        return (time.perf_counter() - started) / (calls * steps)

    return run


def timed(ways: dict[str, Callable[[int], float]], options: argparse.Namespace) -> dict[str, float]:
    """Median seconds per step of the ways, which take turns."""
    times = {}
    for name, run in ways.items():  # how many steps fill the time
        once = min(run(2) for _ in range(2))
        times[name] = max(2, min(5000, int(np.ceil(options.seconds / max(once, 1e-7)))))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds):
        for name in list(ways) if turn % 2 == 0 else reversed(list(ways)):
            found[name].append(ways[name](times[name]))
    return {name: statistics.median(each) for name, each in found.items()}


def compared(what: str, ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """How far two ways' outputs lie apart, and the share of equal victims; raises where they are not the same."""
    apart = float(jnp.max(jnp.abs(ours["query"].astype(jnp.float32) - theirs["query"].astype(jnp.float32))))
    if not apart < 0.05:
        raise RuntimeError(f"{what}: outputs differ by {apart}")
    return apart, float(jnp.mean((ours["slot"] == theirs["slot"]).astype(jnp.float32)))


def together(tasks: list[Callable[[], Any]]) -> list[Any]:
    """What the tasks give; they are compiled side by side."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda task: task(), tasks))


def measure(batch: int, slots: int, options: argparse.Namespace) -> dict[str, Any]:
    """Median seconds per step of every way, K and V's bytes, and how far fused and unfused lie apart."""
    state = start(batch, slots, options)
    swapped = state | {name: jnp.swapaxes(state[name], 1, 2) for name in ("keys", "values")}  # [B, C, Hk, D]
    few = {name: value for name, value in state.items() if name in ("keys", "position")}
    even, uneven = (pool_of(state, uneven) for uneven in (False, True))
    once = [(fused, state), (unfused, swapped), (pooled, even), (plain, even), (pooled, uneven), (plain, uneven)]
    given = together([functools.partial(jax.jit(step), of) for step, of in once])
    size = f"at batch {batch}, {slots} slots"
    apart, same = compared(f"fused and unfused {size}", *given[:2])
    compared(f"pool and plain {size}", *given[2:4])
    compared(f"uneven pool and plain {size}", *given[4:])
    del given

    ways: dict[str, Callable[[int], float]] = {
        "fused": looped(fused, state),
        "unscored": looped(unscored, state),
        "library": looped(library, swapped),
        "unfused": looped(unfused, swapped),
        "copy": looped(copy, few),
        "pool": looped(pooled, even),
        "uneven": looped(pooled, uneven),
        "plain pool": looped(plain, uneven),
    }
    if importlib.util.find_spec("tokamax"):
        ways["tokamax"] = looped(tokamax, swapped)
    held = 2 * state["keys"].nbytes
    del state, swapped, few, even, uneven, once
    together([functools.partial(run, 1) for run in ways.values()])
    return {
        "batch": batch, "slots": slots, "bytes": held, "apart": apart, "same_victims": same,
        "seconds": timed(ways, options),
    }  # fmt: skip


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Bandwidth of the fused way as a share of the copy's, its time beside the other ways', and the pools' times."""
    seconds = found["seconds"]
    return {
        "of_copy": seconds["copy"] / seconds["fused"],
        "scoring_costs": seconds["fused"] / seconds["unscored"] - 1,
        "uneven_over_pool": seconds["uneven"] / seconds["pool"],
        **{f"{name}_over_fused": seconds[name] / seconds["fused"] for name in seconds if name not in ("fused", "copy")},
    }


def fits(batch: int, slots: int, options: argparse.Namespace) -> bool:
    """Whether nine ways with a cache each, and the four that they start from, fit in the device's memory."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit", 2**31)
    return batch * slots * options.kv_heads * options.dim * 4 * 14 < 0.9 * limit


def main() -> None:
    """Measure, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--slots", type=positive, nargs="+", default=[256, 1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--sizes", type=rows_and_slots, nargs="+", metavar="BxC", help="these alone, as 8x4096")
    parser.add_argument("--kv-heads", type=positive, default=8)
    parser.add_argument("--group", type=positive, default=4)
    parser.add_argument("--dim", type=positive, default=128)
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--seconds", type=above_zero, default=SECONDS, help="a timed loop lasts at least so long")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two rounds, nothing stored")
    options = parser.parse_args()
    if options.quick:
        options.batches, options.slots, options.kv_heads, options.rounds, options.seconds = (
            [1, 2],
            [64, 200],
            2,
            2,
            1e-3,
        )

    results: list[dict[str, Any]] = []
    skipped: list[tuple[int, int]] = []
    shape = {"kv_heads": options.kv_heads, "group": options.group, "dim": options.dim, "dtype": "bfloat16"}
    about = {"shape": shape, "rounds": options.rounds, "library": library_runs_as(), "skipped": skipped}
    path = None
    for batch, slots in options.sizes or itertools.product(options.batches, options.slots):
        if not fits(batch, slots, options):
            skipped.append((batch, slots))
            continue
        found = measure(batch, slots, options)
        results.append(found | {"ratios": ratios(found)})
        print(f"{batch} x {slots}:", ", ".join(f"{name} {x * 1e6:.1f} us" for name, x in found["seconds"].items()))
        if not options.quick:  # after each size, so that what was measured stays if the machine goes
            path = write("kernels", about | {"results": results})
    names = sorted({name for found in results for name in found["seconds"]})
    rows = [
        (
            f"{found['batch']} x {found['slots']}",
            f"{found['bytes'] / 2**20:.0f}",
            *(f"{found['bytes'] / found['seconds'][name] / 1e9:.1f}" for name in names),
            f"{found['ratios']['of_copy']:.0%}",
            f"{found['ratios']['scoring_costs']:+.0%}",
            f"{found['ratios']['unfused_over_fused']:.2f}",
            f"{found['ratios']['pool_over_fused']:.2f}",
            f"{found['ratios']['uneven_over_pool']:.2f}",
        )
        for found in results
    ]
    title = (
        f"decode on {jax.devices()[0].device_kind}: GB/s of K and V (Hk {options.kv_heads}, G {options.group}, "
        f"D {options.dim}, bfloat16)"
    )
    print(
        table(
            title,
            ("batch x slots", "MiB", *names, "of copy", "scoring", "unfused/fused", "pool/fused", "uneven/pool"),
            rows,
        )
    )
    if skipped:
        print(f"left out, too large for the memory: {', '.join(f'{b} x {s}' for b, s in skipped)}")
    if not options.quick and results:
        print(path)


if __name__ == "__main__":
    main()
