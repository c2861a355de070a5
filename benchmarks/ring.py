"""Prefill over `context`: keys and values gathered once, or sent round a ring. The same attention; what does each cost?

    python -m benchmarks.ring        # 8 virtual CPU devices, timed in turns; v5e and v5p compiled with `libtpu`

One layer of Llama 3 8B: a block of prompt tokens over a cache of 4096 entries and itself, queries, keys and values
divided evenly over the devices, as `jaxkv.prefill` divides them. The ring merges its parts by their log-sum-exps.
"""

import argparse
import functools
import os
import statistics
import time
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask about
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.pod import memory
from benchmarks.report import table, write
from jaxkv.sharding.traffic import collectives

HEADS, KV_HEADS, DIMS = 32, 8, 128
CACHE = 4096
DEVICES = 8
ROUNDS = 5
SPECS = (P(None, "context"), P(None, None, "context"), P(None, None, "context"))


def part(query: jax.Array, key: jax.Array, value: jax.Array, first: jax.Array, at: jax.Array):
    """Attention [Hk, G, T, D] of queries at `first` on over the keys at `at` on, its maxima and sums [Hk, G, T, 1]."""
    logits = jnp.einsum("kgtd,ksd->kgts", query, key, preferred_element_type=jnp.float32) * DIMS**-0.5
    reach = first + jnp.arange(query.shape[2])[:, None] >= at + jnp.arange(key.shape[1])
    logits = jnp.where(reach, logits, -1e30)
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.where(reach, jnp.exp(logits - top), 0.0)
    context = jnp.einsum("kgts,ksd->kgtd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return context, top, jnp.sum(weights, axis=-1, keepdims=True)


def gathered(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Every device gets all keys and values, then attends."""
    me, mine = lax.axis_index("context"), query.shape[1]
    key, value = (lax.all_gather(x, "context", axis=1, tiled=True) for x in (key[0], value[0]))
    grouped = query.reshape(KV_HEADS, -1, mine, DIMS)
    context, _, total = part(grouped, key, value, CACHE + me * mine, jnp.int32(0))
    return (context / total).reshape(query.shape).astype(query.dtype)


def ring(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Every device attends to the part it has, while that goes on to the next."""
    me, mine, size = lax.axis_index("context"), query.shape[1], key.shape[2]
    grouped = query.reshape(KV_HEADS, -1, mine, DIMS)
    onward = [(device, (device + 1) % DEVICES) for device in range(DEVICES)]

    def turn(number, carry):
        key, value, context, top, total = carry
        following = [lax.ppermute(x, "context", onward) for x in (key, value)]
        new = part(grouped, key, value, CACHE + me * mine, (me - number) % DEVICES * size)
        higher = jnp.maximum(top, new[1])
        old, fresh = jnp.exp(top - higher), jnp.exp(new[1] - higher)
        return *following, context * old + new[0] * fresh, higher, total * old + new[2] * fresh

    start = (
        jnp.zeros(grouped.shape, jnp.float32),
        jnp.full((*grouped.shape[:3], 1), -1e30),
        jnp.zeros((*grouped.shape[:3], 1)),
    )
    start = jax.tree.map(lambda x: lax.pcast(x, "context", to="varying"), start)
    *_, context, _, total = lax.fori_loop(0, DEVICES, turn, (key[0], value[0], *start), unroll=True)
    return (context / total).reshape(query.shape).astype(query.dtype)


WAYS = {"gathered": gathered, "ring": ring}


def program(way: str, devices: list[Any], block: int, dtype: Any) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """The jitted attention on a mesh of the devices, and its abstract arguments."""
    mesh = Mesh(np.array(devices), ("context",))
    shapes = (HEADS, block, DIMS), (1, KV_HEADS, CACHE + block, DIMS), (1, KV_HEADS, CACHE + block, DIMS)
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, SPECS, strict=True)
    ]
    return jax.jit(jax.shard_map(WAYS[way], mesh=mesh, in_specs=SPECS, out_specs=SPECS[0])), given


def timed(block: int) -> dict[str, float]:
    """Seconds of each way on eight virtual CPU devices: medians of rounds in turns, after both gave the same."""
    rng, runs = np.random.default_rng(0), {}
    for way in WAYS:
        run, given = program(way, jax.devices()[:DEVICES], block, jnp.float32)
        runs[way] = functools.partial(
            run, *(jax.device_put(jnp.asarray(rng.standard_normal(x.shape), x.dtype), x.sharding) for x in given)
        )
        rng = np.random.default_rng(0)
    one, other = (np.asarray(run()) for run in runs.values())
    np.testing.assert_allclose(one, other, atol=1e-4)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            seconds[way].append(time.perf_counter() - began)
    return {way: statistics.median(each) for way, each in seconds.items()}


def compiled(way: str, topology: str, block: int) -> dict[str, Any]:
    """What a chip needs and receives, by the TPU compiler."""
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)[:DEVICES]
    run, given = program(way, devices, block, jnp.bfloat16)
    built = run.lower(*given).compile()
    sent = collectives(built.as_text())
    return {"temporary": memory(built)["temp"], "received": sum(each.bytes for each in sent), "collectives": len(sent)}


def main() -> None:
    """Compile and time; a table, and results/ring.json."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows, results = [], []
    for block in (2048, 512):
        seconds = timed(block)
        for way in WAYS:
            chips = {topology: compiled(way, topology, block) for topology in ("v5e:2x4", "v5p:2x2x2")}
            results.append({"way": way, "block": block, "seconds": seconds[way], **chips})
            found = [f"{chip[part] / 2**20:.1f}" for chip in chips.values() for part in ("temporary", "received")]
            count = "/".join(str(chip["collectives"]) for chip in chips.values())
            rows.append((f"{way}, block {block}", *found, count, seconds[way] * 1e3))
    header = (
        "way",
        "v5e temporary MiB",
        "received MiB",
        "v5p temporary",
        "received",
        "collectives",
        "8 CPU devices ms",
    )
    print(table("One layer of Llama 3 8B, cache 4096, 8 devices along the text", header, rows))
    write("ring", {"results": results})


if __name__ == "__main__":
    main()
