"""What XLA's TPU compiler makes of one layer's decode step over a coded cache: the bytes that the kernels say that they
move, what XLA expects of its own operations beside them, and the memory it needs. No TPU need be there.

Each store with the kernels that read codes, and with the reference, which decodes all keys and values in memory. The
whole of `Slots.step`: what is read in full precision beside the slots, and the new token's code. "Weighed" is the step
of a policy that evicts by sums of attention: with the mass of every slot, and the choice of the next.

    pip install libtpu && python -m benchmarks.tpu_coded_step [--only NAME ...]
"""

import argparse
import os
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask about
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

from benchmarks.report import table, write
from benchmarks.tpu_programs import step_of
from benchmarks.tpu_schedule import CHIPS, SIZES

NAME = "tpu_coded_step"
STORES = ("plain", "int4", "laq-h2o-int4", "kivi", "squat", "mustafar")
WEIGHED = ("laq-h2o-int4", "kivi")  # under a policy that evicts while it decodes as well
IMPLEMENTATIONS = ("mosaic_tpu", "reference")
HEADER = (
    "store", "chip", "implementation", "cache MiB", "kernels move MiB", "operations beside",
    "XLA expects of them, cycles", "temporary MiB",
)  # fmt: skip


def codecs_of(name: str) -> Any:
    """The store of a policy of this name, or one of its own."""
    from jaxkv.policies import Codecs, Int
    from jaxkv.policies.catalogue import catalogue

    own = {"plain": Codecs(), "int4": Codecs(Int(4), Int(4))}
    return own[name] if name in own else catalogue()[name].store


def compiled(
    codecs: Any, sizes: tuple[int, ...], chip: str, implementation: str, weighed: bool = False
) -> tuple[Any, Any]:
    """A step of a layer of `sizes` (B, Hk, G, C, D), its cache donated; and the cache, as shapes. Without mass, as
    nothing is evicted, or `weighed`: the slot of the lowest sum goes."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from jaxkv.sharding.layout import Layout
    from jaxkv.store import slots as slots_of
    from pallas_kernels.arguments import Judge, Rule, Token

    batch, kv_heads, group, slots, dim = sizes

    def arrays():
        beside = codecs.beside(batch, kv_heads, dim, jnp.bfloat16)
        cache = slots_of.empty(batch, kv_heads, slots, dim, jnp.bfloat16, codecs=codecs, beside=beside)
        if codecs.fits:
            cache = cache.with_fit(codecs.unfit(batch, kv_heads, dim), looks=False)
        new, row = jnp.zeros((batch, kv_heads, dim), jnp.bfloat16), jnp.zeros(batch, jnp.int32)
        token = Token(jnp.zeros((batch, kv_heads * group, dim), jnp.bfloat16), new, new, row)
        sums = jnp.zeros((batch, kv_heads, slots), jnp.float32)
        return cache, token, Judge(row, row, 1.0, sums, Rule(), "mean") if weighed else Judge(row, row)

    def step(cache, token, judge):
        return cache.step(
            Layout(None), token, judge, None, scale=0.1, window=None, softcap=None, implementation=implementation,
            with_mass=weighed,
        )  # fmt: skip

    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology).devices[0]
    on = SingleDeviceSharding(device)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), jax.eval_shape(arrays))
    return jax.jit(step, donate_argnums=0).lower(*given).compile(), given[0]


def measured(name: str, chip: str, implementation: str, weighed: bool) -> dict[str, Any]:
    """What is made of the step of the layer `SIZES[128]` over this store."""
    from jaxkv.lowering import held_by_one

    program, cache = compiled(codecs_of(name), SIZES[128], chip, implementation, weighed)
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None
    main = step_of(text[text.index("\nENTRY ") :])
    return {
        "name": name + ", weighed" * weighed,
        "chip": chip,
        "implementation": implementation,
        "cache": held_by_one((cache.entries.keys, cache.entries.values, cache.beside)),
        "kernels": sum(each["bytes"] for each in main["kernels"].values()),
        "operations": main["operations"],
        "cycles": main["cycles"],
        "temporary": memory.temp_size_in_bytes,
    }


def row_of(found: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    mebi = lambda x: f"{x / 2**20:.1f}"  # noqa: E731
    return (
        found["name"], found["chip"], found["implementation"], mebi(found["cache"]),
        mebi(found["kernels"]) if found["kernels"] else "-", str(found["operations"]), str(found["cycles"]),
        mebi(found["temporary"]),
    )  # fmt: skip


def main() -> None:
    """Compile, print the table and store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=STORES, choices=STORES, help="these stores")
    options = parser.parse_args()
    results = []
    for name in options.only:
        for weighed in (False, True) if name in WEIGHED else (False,):
            results += [measured(name, "v5e", how, weighed) for how in IMPLEMENTATIONS]
    print(table("one layer's decode step on TPU", HEADER, [row_of(each) for each in results]))
    write(NAME, {"results": results})


if __name__ == "__main__":
    main()
