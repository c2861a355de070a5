"""The TPU kernels, and whole prefill and decode programs, through the real TPU compiler, on a machine without a TPU.

`libtpu` holds the compiler; a topology stands in for the chips. What is read off the compiled program: it compiles and
fits, the cache goes in and out in the same memory, nothing makes a copy of it, and how many bytes a kernel moves.
"""

import dataclasses
import functools
import itertools
import math
import re
import tomllib

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.state.discharge import discharge_state
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

import jaxkv
from benchmarks import tpu_programs, tpu_schedule
from jaxkv import run
from jaxkv.configs import config_files
from jaxkv.lowering import lower
from jaxkv.models import ModelConfig, abstract_weights
from jaxkv.sampling import Sampler
from jaxkv.sharding import Layout
from jaxkv.store import KVCache
from jaxkv.store import slots as stores
from pallas_kernels.arguments import Held, Judge, Rule, Segments, Token
from pallas_kernels.block_product.mosaic_tpu import block_product
from pallas_kernels.decode_attend_score.mosaic_tpu import decode_attend_score
from pallas_kernels.prefill_attend.mosaic_tpu import prefill_attend
from pallas_kernels.prefill_attend_mass.mosaic_tpu import prefill_attend_mass
from pallas_kernels.ragged_decode.mosaic_tpu import ragged_decode
from pallas_kernels.tpu_walk import Walk

pytest.importorskip("libtpu", reason="libtpu, which holds the TPU compiler, is not installed here (pip install libtpu)")

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
SHAPES = {  # B, Hk, G, C, D
    "smollm2": (8, 3, 3, 1024, 64),
    "llama-3-8b": (8, 8, 4, 4096, 128),
    "one row of 131072": (1, 8, 4, 131072, 128),
    "odd": (64, 2, 16, 300, 80),
    "wide": (2, 4, 7, 712, 256),
}


@functools.cache
def chip(name: str) -> SingleDeviceSharding:
    """Arrays on one chip of the kind."""
    return SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[name]).devices[0])


def on(name: str, tree):
    """The same arrays, as shapes on a chip."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip(name)), tree)


def step_arrays(batch: int, kv_heads: int, group: int, slots: int, dim: int, dtype: str, counts: bool = False) -> tuple:
    """The arguments of decode_attend_score as shapes, with an array as weight; with `counts` logits have a bias."""
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    new = jax.ShapeDtypeStruct((batch, kv_heads, dim), dtype)
    cache = jax.ShapeDtypeStruct((batch, kv_heads, slots, dim), dtype)
    each = jax.ShapeDtypeStruct((batch, kv_heads, slots), jnp.int32)
    weight = jax.ShapeDtypeStruct((batch, kv_heads, slots), jnp.float32)
    return (
        Token(jax.ShapeDtypeStruct((batch, kv_heads * group, dim), dtype), new, new, row),
        Held(cache, cache, each, weight if counts else None),
        jax.ShapeDtypeStruct((batch, kv_heads), jnp.int32),
        Judge(row, row, weight, rule=Rule("sum")),
    )


def in_place(step, token, held, *others):
    """The step, compiled; keys and values are donated."""

    def apart(cache, rest, token, *others):
        return step(token, type(held)(*cache, *rest), *others)

    return jax.jit(apart, donate_argnums=0).lower(held[:2], held[2:], token, *others).compile()


def made_of(shape: tuple[int, ...], text: str) -> set[str]:
    """The operations whose result is an array of this shape, or of its last two axes swapped, in a compiled program."""
    return set(tpu_schedule.made_of(shape, text))


BATCH, SLOTS, BLOCK = 8, 1024, 256  # of the whole programs
QUICK = ("v5e", "smollm2-135m")  # the one that is compiled by default
NAMES_ONLY = {"parameter", "get-tuple-element", "bitcast", "custom-call", "tuple"}  # operations that move nothing


@pytest.mark.some(2)
@pytest.mark.parametrize("shape, dtype", [*((shape, "bfloat16") for shape in SHAPES), ("llama-3-8b", "float32")])
@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("counts", [False, True])
def test_decode_kernel_compiles_and_writes_in_place(name, shape, dtype, counts):
    sizes = SHAPES[shape]
    arrays = on(name, step_arrays(*sizes, dtype, counts))
    compiled = in_place(functools.partial(decode_attend_score, scale=0.1), *arrays)
    batch, kv_heads, _, slots, dim = sizes
    cache_bytes = 2 * batch * kv_heads * slots * dim * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes // 2  # so no copy of K or of V
    assert made_of(arrays[1].keys.shape, compiled.as_text()) <= NAMES_ONLY


def pool_arrays(batch: int, kv_heads: int, group: int, slots: int, dim: int, counts: bool = False) -> tuple:
    """The arguments of ragged_decode as shapes, in bfloat16, with an array as weight; `slots` for each head.

    With `counts` logits have a bias.
    """
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    each = jax.ShapeDtypeStruct((batch, kv_heads), jnp.int32)
    new = jax.ShapeDtypeStruct((batch, kv_heads, dim), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((batch, kv_heads * slots, dim), jnp.bfloat16)
    offsets = jax.ShapeDtypeStruct((batch, kv_heads + 1), jnp.int32)
    weight = jax.ShapeDtypeStruct(pool.shape[:2], jnp.float32)
    return (
        Token(jax.ShapeDtypeStruct((batch, kv_heads * group, dim), jnp.bfloat16), new, new, row),
        Segments(pool, pool, jax.ShapeDtypeStruct(pool.shape[:2], jnp.int32), offsets, bias=weight if counts else None),
        each,
        Judge(row, row, weight, rule=Rule("each")),
    )


POOLS = [name for name, (*_, slots, _) in SHAPES.items() if slots < 100_000]  # a row's logits stay on the chip


@pytest.mark.some(1)
@pytest.mark.parametrize("shape", POOLS)
@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("counts", [False, True])
def test_pool_kernel_compiles_and_writes_in_place(name, shape, counts):
    arrays = on(name, pool_arrays(*SHAPES[shape], counts))
    compiled = in_place(functools.partial(ragged_decode, scale=0.1), *arrays)
    pool = arrays[1].keys
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * pool.size * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * pool.size  # so no copy of K or of V
    assert made_of(pool.shape, compiled.as_text()) <= NAMES_ONLY


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CHIPS)
def test_prefill_kernels_compile(name, dtype):
    for batch, kv_heads, group, length, slots, dim in ((1, 8, 4, 2048, 3072, 128), (2, 3, 3, 40, 300, 64)):
        query = jax.ShapeDtypeStruct((batch, kv_heads * group, length, dim), dtype)
        keys = jax.ShapeDtypeStruct((batch, kv_heads, slots, dim), dtype)
        at = jax.ShapeDtypeStruct((batch, length), jnp.int32)
        place, bias = (jax.ShapeDtypeStruct((batch, kv_heads, slots), kind) for kind in (jnp.int32, jnp.float32))
        attend = functools.partial(prefill_attend, scale=0.1, window=1000, softcap=50.0, own_keys_last=True)
        jax.jit(attend).lower(*on(name, (query, keys, keys, at, place))).compile()
        beside = lambda *arrays: prefill_attend(*arrays[:-1], bias=arrays[-1], scale=0.1, with_lse=True)  # noqa: E731
        jax.jit(beside).lower(*on(name, (query, keys, keys, at, place, bias))).compile()
        mass = lambda *arrays: prefill_attend_mass(*arrays[:-1], bias=arrays[-1], scale=0.1, reduce="mean")  # noqa: E731
        compiled = jax.jit(mass).lower(*on(name, (query, keys, at, place, bias))).compile()
        every = 4 * batch * kv_heads * group * length * slots
        assert length < 128 or compiled.memory_analysis().temp_size_in_bytes < every // 4  # no queries x keys array


def pallas_calls(function, *arrays) -> list:
    """The Pallas calls in a function, as equations of its jaxpr."""

    def calls(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation
            for value in equation.params.values():
                if isinstance(value, jax.extend.core.ClosedJaxpr) and equation.primitive.name != "pallas_call":
                    yield from calls(value.jaxpr)

    return list(calls(jax.make_jaxpr(function)(*arrays).jaxpr))


def fetches(call, scalars: tuple) -> list[tuple[list, int]]:
    """Per blocked operand, in order: the blocks that the pipeline moves, step by step (a block that stays is not moved
    again), and their bytes, where the kernel's scalars are these.
    """
    mapping = call.params["grid_mapping"]
    steps = jnp.array(list(np.ndindex(*mapping.grid)), jnp.int32)
    out = []
    for block in mapping.block_mappings:
        shape, dtype = block.array_aval.shape, block.array_aval.dtype
        sizes = [getattr(size, "block_size", size) for size in block.block_shape]
        if block.transformed_block_aval.memory_space in (pl.ANY, pltpu.HBM):
            out.append(([], 0))
            continue
        pure = discharge_state(block.index_map_jaxpr)

        def of(step, pure=pure, shape=shape):
            return jax.core.eval_jaxpr(pure.jaxpr, pure.consts, *step, *scalars)[: len(shape)]

        at = np.stack(jax.jit(jax.vmap(of))(steps), axis=1)
        moved = at[np.r_[True, (at[1:] != at[:-1]).any(axis=1)]]
        total = np.minimum(sizes, np.array(shape) - moved * np.array(sizes)).prod(axis=1).sum()
        out.append(([tuple(each) for each in moved.tolist()], int(total) * dtype.itemsize))
    return out


def held_rows(kind: str, batch: int, sets: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of all slots, and of the tokens: all full; some rows finished, among them the first; the slots of some
    empty but for the first and the last."""
    positions = np.tile(np.arange(slots, dtype=np.int32), (batch, sets, 1))
    now = np.full(batch, slots, np.int32)
    if kind == "finished":
        now[[0, (batch - 1) // 2]] = -1
    if kind == "hollow":
        positions[::2, :, 1:-1] = -1
    return positions, now


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("inputs", [11008, 8960])
def test_products_of_one_row_compile_at_any_height(inputs, bits):
    """Llama 2 7B's and Qwen2.5 1.5B's matrices, whose last block of codes is partly there."""
    codes = (inputs, 512, jnp.int8) if bits == 8 else (inputs // 2, 512, jnp.uint8)
    arrays = [(1, inputs, jnp.bfloat16), codes, (inputs // 32, 512, jnp.int16)]
    given = on("v5e", [jax.ShapeDtypeStruct(tuple(shape), dtype) for *shape, dtype in arrays])
    assert "block_product" in jax.jit(block_product).lower(*given, None).compile().as_text()


@pytest.mark.some(1)
@pytest.mark.parametrize("rows", ["full", "finished", "hollow"])
@pytest.mark.parametrize("pooled, counts", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", POOLS)
def test_decode_kernels_move_each_block_once(shape, pooled, counts, rows):
    """K and V once where they are filled, nothing of rows that have finished; beside them at most 5 %, and log n once.

    The compiler is told the bytes of full rows.
    """
    batch, kv_heads, _, slots, dim = SHAPES[shape]
    sizes = SHAPES[shape]
    arrays = pool_arrays(*sizes, counts) if pooled else step_arrays(*sizes, "bfloat16", counts)
    step = functools.partial(ragged_decode if pooled else decode_attend_score, scale=0.1)
    (call,) = pallas_calls(step, *arrays)
    sets, width = (1, kv_heads * slots) if pooled else (kv_heads, slots)
    positions, now = held_rows(rows, batch, sets, width)
    mapping = call.params["grid_mapping"]
    block = math.prod(size.block_size for size in mapping.block_mappings[5].block_shape) // sets  # of positions
    blocks = -(-width // block)
    walk = Walk(width, block, blocks, batch, mapping.grid[0])
    table = walk.table(jnp.asarray(positions), jnp.asarray(now), None)
    zeros = jnp.zeros(batch, jnp.int32)
    borders = [jnp.zeros((batch, kv_heads + 1), jnp.int32)] * pooled
    operands = fetches(call, (jnp.asarray(now), jnp.zeros((batch, kv_heads), jnp.int32), zeros, zeros, *borders, table))
    filled = np.pad(positions >= 0, ((0, 0), (0, 0), (0, walk.width - width))).reshape(batch, sets, blocks, block)
    due = filled.any(axis=(1, 3)) & (now >= 0)[:, None]
    for moved, _ in operands[3:5]:
        assert len(moved) == len(set(moved)), "no block twice"
        seen = {(place[0], place[2] or place[3]) for place in moved}
        assert seen == {*zip(*map(np.ndarray.tolist, np.nonzero(due)), strict=True)}
    if rows != "full":
        return
    tiles = [x.aval for x in call.params["jaxpr"].invars[-3 - 2 : -3]]  # before the semaphore, logits and their sums
    assert [each.shape[0] for each in tiles] == [kv_heads, kv_heads]  # of K and of V
    written = batch * sum(int(np.prod(each.shape)) for each in tiles) * 2
    everything = sum(total for _, total in operands) + written
    cache = operands[3][1] + operands[4][1]
    out = sum(total for _, total in operands[mapping.num_inputs :]) + written
    assert cache == 2 * batch * kv_heads * slots * dim * 2
    added = 4 * positions.size if counts else 0
    assert everything <= 1.05 * (cache + out) + added
    assert call.params["cost_estimate"].bytes_accessed == pytest.approx(everything, rel=0.01)
    assert made_of((1, 2), "%x = f32[1,2]{1,0} copy(%y)") == {"copy"}  # what the tests above look for is found


# Llama 3 8B in bfloat16 is 16 GB of weights, as much as one v5e chip holds: there it stands on four, its heads divided.
PROGRAMS = [
    pytest.param(name, family, id=f"{name}-{family}", marks=() if (name, family) == QUICK else pytest.mark.slow)
    for name, family in itertools.product(CHIPS, ("smollm2-135m", "llama-3-8b"))
    if (name, family) != ("v5e", "llama-3-8b")
]
GIB = 2**30
HBM = {"v5e": 16 * GIB, "v6e": 32 * GIB, "v5p": 95 * GIB}  # of a chip


def model(name: str, layers: int | None = None) -> ModelConfig:
    """The shape of a model of `configs/models`, all of its layers or the first so many."""
    config = ModelConfig.from_hf(tomllib.loads(config_files("models")[name].read_text())["config"])
    layers = layers or config.num_layers
    return dataclasses.replace(config, num_layers=layers, layer_types=config.layer_types[:layers])


def needed(compiled) -> int:
    """Bytes that a program needs on its chip at a time."""
    found = compiled.memory_analysis()
    fresh = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + fresh + found.temp_size_in_bytes


@pytest.mark.long
@pytest.mark.parametrize("name, family", PROGRAMS)
def test_decode_step_copies_no_cache(name, family):
    config, policy = model(family), jaxkv.policy("dapq-longflow", budget=SLOTS)
    layers = config.num_layers

    def start() -> list:
        rows = jnp.zeros(BATCH, jnp.int32)
        empty = tuple(
            stores.empty(BATCH, spec.num_kv_heads, SLOTS, spec.head_dim, jnp.bfloat16, policy.stats)
            for spec in config.specs
        )
        cache = KVCache(empty, rows, jnp.zeros((layers, BATCH), jnp.int32), rows)
        state = run.DecodeState(cache, jnp.zeros(BATCH, bool), rows, None, jax.vmap(jax.random.key)(rows))
        leaves, structure[:] = jax.tree.flatten(state)[0], [jax.tree.structure(state)]
        return leaves

    def decode(weights, leaves):
        return run.decode(
            weights, jax.tree.unflatten(structure[0], leaves), jnp.int32(4), room=4, config=config, policy=policy,
            sampler=Sampler(), stop=(), implementation="mosaic_tpu",
        )  # fmt: skip

    structure: list = []
    state = on(name, jax.eval_shape(start))
    weights = on(name, abstract_weights(config, jnp.bfloat16, panels=False))
    compiled = jax.jit(decode, donate_argnums=1).lower(weights, state).compile()
    spec = config.specs[0]
    keys = (BATCH, spec.num_kv_heads, SLOTS, spec.head_dim)
    assert compiled.memory_analysis().alias_size_in_bytes >= layers * 2 * int(np.prod(keys)) * 2
    text = compiled.as_text()
    assert made_of(keys, text) <= {*NAMES_ONLY, "while", "copy-start", "copy-done"}
    # Of a cache of small arrays (3 MiB) XLA may carry one, of one layer, from step to step on the chip (v5p: up to
    # three): it goes back to memory at the top of the loop and is fetched again at its end, past the kernel, which
    # reads from memory.
    shape = ",".join(map(str, (BATCH, spec.num_kv_heads)))
    loop = max(text.split("\n}\n"), key=lambda part: part.count("%decode_attend_score"))
    assert len(re.findall(rf"= \(bf16\[{shape},[^=]*? copy-start\(", loop)) <= (3 if name == "v5p" else 1)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["adakv-h2o", "layer-defensivekv", "streaming-llm"])
def test_a_step_has_a_kernel_a_layer(policy, unchecked):
    """And the cache in place: heads that share a budget, layers that share the model's, sinks that are turned."""
    config, chips = model("smollm2-135m", 2), topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v5e"])
    layout = Layout.of(jaxkv.mesh(devices=[chips.devices[0]]), config)
    program = lower(
        config, jaxkv.policy(policy, budget=256), batch=BATCH, tokens=1024, steps=4, dtype=jnp.bfloat16, layout=layout,
        implementation="mosaic_tpu",
    )  # fmt: skip
    compiled = program.decode.compile()
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', compiled.as_text())) == config.num_layers
    held = 2 * config.num_layers * BATCH * config.num_kv_heads * 256 * config.head_dim * 2
    assert compiled.memory_analysis().alias_size_in_bytes >= held


@pytest.mark.long
@pytest.mark.parametrize("batch, kv_heads, group, budget", [(4, 8, 4, 300), (8, 8, 4, 1001), (8, 2, 6, 1001)], ids=str)
def test_no_budget_makes_a_step_copy_the_cache(batch, kv_heads, group, budget, unchecked):
    """Slots are whole pieces of memory, whatever the budget: else XLA lays K and V out with the heads or the rows
    innermost, and copies all of them for the kernel and back."""
    sizes = {"num_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": 128, "vocab_size": 1024}
    config = dataclasses.replace(model("llama-3-8b", 1), **sizes)
    chips = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v5e"]).devices
    layout = Layout.of(jaxkv.mesh(devices=[chips[0]]), config)
    program = lower(
        config, jaxkv.policy("dapq-longflow", budget=budget), batch=batch, tokens=2 * budget, steps=4,
        dtype=jnp.bfloat16, layout=layout, implementation="mosaic_tpu",
    )  # fmt: skip
    layer = program.cache.layers[0]
    shape = layer.entries.keys.shape
    assert int(np.prod(shape)) == batch * kv_heads * -(-budget // 8) * 8 * 128
    compiled = program.decode.compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * 2 * int(np.prod(shape))
    assert made_of(shape, compiled.as_text()) <= {*NAMES_ONLY, "while"}


@pytest.mark.long
@pytest.mark.parametrize(
    "name, axes",
    [("dapq-longflow", (1, 4)), ("dapq-longflow", (2, 2)), ("adakv-h2o", (1, 4)), ("streaming-llm", (1, 4))],
    ids=str,
)
def test_devices_that_divide_the_slots_run_the_kernel(name, axes, unchecked):
    """Each on its own slots, or on its part of a pool, in place; only what the merge needs goes between them."""
    heads, text = axes
    config, policy = model("llama-3-8b", 1), jaxkv.policy(name, budget=SLOTS)
    chips = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v5e"]).devices
    layout = Layout.of(jaxkv.mesh(model=heads, context=text, devices=list(chips)), config)
    program = lower(
        config, policy, batch=BATCH, tokens=2 * SLOTS, steps=4, dtype=jnp.bfloat16, layout=layout,
        implementation="mosaic_tpu",
    )  # fmt: skip
    compiled = program.decode.compile()
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', compiled.as_text())) == config.num_layers
    keys = (BATCH, config.num_kv_heads // heads, SLOTS // text, config.head_dim)
    if policy.allocate.pooled:
        keys = (BATCH, config.num_kv_heads * SLOTS // text, config.head_dim)
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * 2 * int(np.prod(keys))
    if not policy.allocate.pooled:  # whose borders move now and then
        assert made_of(keys, compiled.as_text()) <= {*NAMES_ONLY, "while"}


def prefill_program(name: str, family: str, tokens: int, layers: int | None = None):
    """The blocks after a prompt's first, lowered for one chip; all layers or the first so many."""
    config, policy = model(family, layers), jaxkv.policy("dapq-longflow", budget=SLOTS, block=BLOCK)
    chips = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[name]).devices
    layout = Layout.of(jaxkv.mesh(devices=[chips[0]]), config)
    return lower(
        config, policy, batch=BATCH, tokens=tokens, dtype=jnp.bfloat16, layout=layout, implementation="mosaic_tpu"
    ).prefill


@pytest.mark.long
def test_a_block_of_a_prompt_compiles(unchecked):
    """Nothing is sorted, which would cost XLA's TPU compiler half a minute a layer."""
    assert not re.search(r" sort\(", prefill_program("v5e", "smollm2-135m", 4 * BLOCK, layers=1).compile().as_text())


def test_a_prompt_of_any_length_runs_the_same_program(unchecked):
    """So that beside weights and cache it needs what one block of it needs."""
    short, long = (prefill_program("v5e", "smollm2-135m", blocks * BLOCK, layers=1).as_text() for blocks in (4, 32))
    assert long == short


@pytest.mark.parametrize("name, family", [pytest.param(*x.values, id=x.id, marks=pytest.mark.slow) for x in PROGRAMS])
def test_whole_prefill_compiles_and_fits(name, family, unchecked):
    """All layers; nothing is sorted."""
    compiled = prefill_program(name, family, 4 * BLOCK).compile()
    assert not re.search(r" sort\(", compiled.as_text())
    assert needed(compiled) < HBM[name]


@pytest.mark.slow
def test_llama_on_four_chips_of_v5e(unchecked):
    """Whole prefill and decode, every chip with two of the eight KV heads and their part of the weights."""
    config, policy = model("llama-3-8b"), jaxkv.policy("dapq-longflow", budget=SLOTS, block=BLOCK)
    chips = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v5e"]).devices
    layout = Layout.of(jaxkv.mesh(model=4, devices=list(chips)), config)
    programs = lower(
        config,
        policy,
        batch=BATCH,
        tokens=4 * BLOCK,
        steps=4,
        dtype=jnp.bfloat16,
        layout=layout,
        implementation="mosaic_tpu",
    )
    prefill, decode = programs.prefill.compile(), programs.decode.compile()
    assert not re.search(r" sort\(", prefill.as_text())
    assert needed(prefill) < HBM["v5e"] and needed(decode) < HBM["v5e"]
    keys = (BATCH, 2, SLOTS, 128)
    assert decode.memory_analysis().alias_size_in_bytes >= config.num_layers * 2 * int(np.prod(keys)) * 2
    assert made_of(keys, decode.as_text()) <= {*NAMES_ONLY, "while"}


def one_chip(layers: int | None, kept: str, **options):
    """Llama 3 8B in blocks, lowered for one chip of v5e: all layers or the first so many."""
    config = model("llama-3-8b", layers)
    chips = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v5e"]).devices
    layout = Layout.of(jaxkv.mesh(devices=[chips[0]]), config)
    return config, lower(
        config, jaxkv.policy("dapq-longflow", budget=4096, block=128), batch=BATCH, tokens=8192, steps=4,
        dtype=jnp.bfloat16, implementation="mosaic_tpu", kept=kept, layout=layout, **options,
    )  # fmt: skip


def codes_read(config: ModelConfig, text: str, bits: int) -> list[float]:
    """How often a decode step reads each matrix' codes: by an operation of its loop, or in slices before one."""
    loop = max(text.split("\n}\n"), key=lambda part: part.count("%decode_attend_score"))
    kind, each = ("s8", 1) if bits == 8 else ("u8", 2)
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    wide, inner = config.hidden_size, config.intermediate_size
    shapes = {(wide, heads), (wide, wide), (wide, 2 * inner), (inner, wide), (wide, config.vocab_size)}
    found = []
    for rows, columns in sorted((rows // each, columns) for rows, columns in shapes):
        array = rf"{kind}\[{rows},{columns}\]"
        assert not re.findall(rf"= {array}\S* (?:copy|fusion)\(", loop)  # no second array of them is made
        for name in re.findall(rf"(%\S+) = {array}\S* get-tuple-element\(", loop):
            used = [line for line in loop.splitlines() if re.search(rf"{re.escape(name)}[,)]", line)]
            slices = [re.search(r"slice-start\(.*slice=\{\[(\d+):(\d+)\]", line) for line in used]
            parts = [(int(part[2]) - int(part[1])) / rows if part else 1.0 for part in slices]
            found.append(sum(parts) - sum("ROOT" in line for line in used))  # the loop hands it on to its next turn
    return found


@pytest.mark.long
def test_blocks_with_scales_for_some_inputs_become_numbers_on_the_chip(unchecked):
    """A kernel for each product, no matrix in floats beside it, and every code read once a step."""
    config, programs = one_chip(2, "int4")
    decode = programs.decode.compile()
    text = decode.as_text()
    assert len(re.findall(r"%block_product\S* = ", text)) == 4 * config.num_layers + 1
    smallest = config.hidden_size * config.head_dim * (config.num_heads + 2 * config.num_kv_heads) * 2
    assert decode.memory_analysis().temp_size_in_bytes < smallest
    assert codes_read(config, text, 4) == [1.0] * (4 * config.num_layers + 1)


@pytest.mark.slow
def test_llama_in_8_bits_on_one_chip_of_v5e(unchecked):
    """Eight rows of 4096 tokens beside Llama 3 8B in 8 bits; while decoding no matrix is made whole in floats.

    Every code is read once a step.
    """
    config, programs = one_chip(None, "int8")
    prefill, decode = programs.prefill.compile(), programs.decode.compile()
    print(f"prefill needs {needed(prefill) / GIB:.2f} GiB, decode {needed(decode) / GIB:.2f}")
    assert needed(prefill) < HBM["v5e"] and needed(decode) < 0.8 * HBM["v5e"]
    smallest = config.hidden_size * config.head_dim * (config.num_heads + 2 * config.num_kv_heads) * 2
    assert decode.memory_analysis().temp_size_in_bytes < 2 * smallest
    assert codes_read(config, decode.as_text(), 8) == [1.0] * (4 * config.num_layers + 1)


BOUNDED = [  # whole steps, with so many layers
    ("smollm2-135m v5e:2x2 one chip", "decode", None),
    *((f"llama-3-8b {chips}", "decode", 2) for chips in ("v5e:2x2 model=4", "v6e:2x2 one chip", "v5p:2x2x1 one chip")),
    ("smollm2-135m v5e:2x2 one chip", "prefill", 2),
    ("llama-3-8b v5e:2x2 model=4", "prefill", 1),
]


@pytest.mark.long
@pytest.mark.parametrize("name, phase, layers", BOUNDED)
def test_steps_move_their_weights_and_their_cache(name, phase, layers, unchecked):
    """Beside the kernels a decode step reads each weight once, and next to nothing else; none is worse than stored."""
    case = next(case for case in tpu_programs.CASES if case.name == name)
    found = tpu_programs.bound_of(case, phase, layers)
    before = tpu_programs.stored(tpu_programs.BOUNDS)[f"{name} {phase}"]
    if found["layers"] == before["layers"]:
        assert tpu_programs.worse(found, before) == []
        assert tpu_programs.worse({**found, "beside": 2 * found["beside"]}, before), "what is worse is found"
    if phase == "decode":
        assert found["beside"] < 1.15 * found["weights"]
        assert found["kernels"] / found["layers"] == pytest.approx(before["kernels"] / before["layers"], rel=0.01)
    else:
        assert found["beside"] > found["weights"]


SCHEDULED = [  # every kernel on v5e; and one of each on another chip
    *(f"{kernel} v5e" for kernel in ("equal chooses D128", "ragged chooses D128", "ragged chooses D64")),
    *(f"prefill {work} D128 v5e" for work in ("attends", "weighs")),
    "ragged chooses D128 v6e",
    "prefill attends D128 v5p",
    "equal chooses D128 int8 v5e",
    "ragged chooses D128 int4 v5e",
]


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules_get_no_worse(name, unchecked):
    """Bundles by what they do, copies and temporary memory, as `benchmarks.tpu_schedule` has stored them."""
    case = next(case for case in tpu_schedule.CASES if case.name == name)
    found, before = tpu_schedule.measured(case), tpu_schedule.stored()[name]
    assert tpu_schedule.worse(found, before) == []
    assert found["copies"] == 0
    slower = {**found, "regions": {**found["regions"], "attends": 2 * found["regions"]["attends"]}}
    assert tpu_schedule.worse(slower, before), "what is worse is found"
