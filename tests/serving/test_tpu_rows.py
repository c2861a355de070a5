"""Insert and a chunk of steps through TPU's own compiler: the cache goes in and out in the same memory."""

import dataclasses
import functools
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import jaxkv
from jaxkv import run
from jaxkv.configs import config_files
from jaxkv.lowering import lower
from jaxkv.models import ModelConfig, abstract_weights
from jaxkv.sampling import RowSampler
from jaxkv.serving import rows as device
from jaxkv.serving.asked import STOPS
from jaxkv.serving.programs import TOP
from jaxkv.sharding import Layout
from jaxkv.store import KVCache
from jaxkv.store import slots as stores

pytest.importorskip("libtpu", reason="libtpu, which holds the TPU compiler, is not installed here (pip install libtpu)")

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
ROWS, SLOTS = 16, 1024
MOVES_NOTHING = {"parameter", "get-tuple-element", "bitcast", "custom-call", "tuple", "while"}


def shapes(config, policy, batch, chip, slots=SLOTS):
    """The rows as shapes on a chip."""

    def made():
        row = jnp.zeros(batch, jnp.int32)
        layers = tuple(
            stores.empty(batch, spec.num_kv_heads, slots, spec.head_dim, jnp.bfloat16, policy.stats)
            for spec in config.specs
        )
        cache = KVCache(layers, row, jnp.zeros((config.num_layers, batch), jnp.int32), row, policy=policy)
        seen = jnp.zeros((batch, config.vocab_size), bool)
        state = run.DecodeState(cache, row < 0, row, seen, jax.vmap(jax.random.key)(row))
        each = jnp.zeros(batch, jnp.float32)
        return device.Rows(
            state, RowSampler(each, row, each, each, each), jnp.zeros((batch, STOPS), jnp.int32), row < 0
        )

    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip)  # noqa: E731
    return jax.tree.map(place, jax.eval_shape(made))


def made_of(shape, text):
    """The operations whose result is an array of this shape, in a compiled program."""
    return set(re.findall(rf"= \(?[a-z0-9]+\[{','.join(map(str, shape))}\][^=]*? ([a-z-]+)\(", text))


@pytest.mark.parametrize(
    "name, family",
    [
        pytest.param("v5e", "smollm2-135m", marks=pytest.mark.long),
        pytest.param("v6e", "llama-3-8b", marks=pytest.mark.slow),
    ],
)
def test_no_copy_of_the_cache(name, family):
    config = ModelConfig.from_hf(tomllib.loads(config_files("models")[family].read_text())["config"])
    policy = jaxkv.policy("dapq-longflow", budget=SLOTS)
    chip = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[name]).devices[0])
    rows, row = (shapes(config, policy, batch, chip) for batch in (ROWS, 1))
    keys = (ROWS, config.num_kv_heads, SLOTS, config.head_dim)
    cache = config.num_layers * 2 * int(np.prod(keys)) * 2
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=chip)

    insert = jax.jit(device.insert, donate_argnums=0).lower(rows, row, number).compile()
    assert insert.memory_analysis().alias_size_in_bytes >= cache
    assert insert.memory_analysis().temp_size_in_bytes < cache // 16
    assert made_of(keys, insert.as_text()) <= {*MOVES_NOTHING, "dynamic-update-slice", "fusion"}

    chunk = functools.partial(
        device.chunk, room=8, count=TOP, config=config, policy=policy, implementation="mosaic_tpu", learned={}
    )
    weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip),
        abstract_weights(config, jnp.bfloat16, panels=False),
    )
    ended = jax.ShapeDtypeStruct((ROWS,), jnp.bool_, sharding=chip)
    for many, also in ((ROWS, {"copy-start", "copy-done"}), (1, {"dynamic-update-slice", "fusion"})):
        of_rows = functools.partial(chunk, many=many)
        steps = jax.jit(of_rows, donate_argnums=1).lower(weights, rows, number, ended).compile()
        assert steps.memory_analysis().alias_size_in_bytes >= cache
        assert made_of(keys, steps.as_text()) <= {*MOVES_NOTHING, *also}
        if many == 1:  # its row is there a second time
            assert steps.memory_analysis().temp_size_in_bytes < cache // 4


def shared_out(tree, layout):
    """The rows as shapes on the chips of a mesh: caches divided as the layout says, all else on each."""
    place = lambda leaf, *axes: jax.ShapeDtypeStruct(  # noqa: E731
        leaf.shape, leaf.dtype, sharding=layout.sharding(leaf.shape, axes or (None,) * leaf.ndim)
    )
    layers = tuple(layout.each(layer, place) for layer in tree.state.cache.layers)
    rest = jax.tree.map(place, tree)
    cache = dataclasses.replace(rest.state.cache, layers=layers)
    return dataclasses.replace(rest, state=dataclasses.replace(rest.state, cache=cache))


@pytest.mark.slow
def test_64_rows_of_llama_on_four_chips_of_v5e():
    """Insert, a block of a prompt and a chunk of steps at a budget of 2048: they fit, and nothing copies the cache."""
    rows_count, budget, gib = 64, 2048, 2**30
    config = ModelConfig.from_hf(tomllib.loads(config_files("models")["llama-3-8b"].read_text())["config"])
    policy = jaxkv.policy("dapq-longflow", budget=budget, block=256)
    chips = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v5e"]).devices
    layout = Layout.of(jaxkv.mesh(model=4, devices=list(chips)), config)
    common = {"layout": layout, "implementation": "mosaic_tpu"}
    alone = lower(config, policy, batch=1, tokens=8192, dtype=jnp.bfloat16, scan_layers=True, **common)
    one = jax.sharding.SingleDeviceSharding(chips[0])
    rows, row = (shared_out(shapes(config, policy, batch, one, budget), layout) for batch in (rows_count, 1))
    number, ended = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(shape, (None,) * len(shape)))
        for shape, dtype in (((), jnp.int32), ((rows_count,), jnp.bool_))
    )
    insert = jax.jit(device.insert, donate_argnums=0, static_argnames="layout").lower(rows, row, number, layout=layout)
    chunk = functools.partial(
        device.chunk, many=rows_count, room=8, count=TOP, config=config, policy=policy, learned={}, **common
    )
    programs = {
        "insert": insert.compile(),
        "block": alone.prefill.compile(),
        "chunk": jax.jit(chunk, donate_argnums=1).lower(alone.weights, rows, number, ended).compile(),
    }
    keys = (rows_count, config.num_kv_heads // 4, budget, config.head_dim)  # of one chip
    cache = config.num_layers * 2 * int(np.prod(keys)) * 2
    for name, program in programs.items():
        found = program.memory_analysis()
        fresh = found.output_size_in_bytes - found.alias_size_in_bytes
        needed = found.argument_size_in_bytes + fresh + found.temp_size_in_bytes
        print(f"{name}: {needed / gib:.2f} GiB a chip, {found.temp_size_in_bytes / gib:.2f} of them temporary")
        held = needed if name != "block" else needed + cache  # a block runs beside the rows
        assert held < 16 * gib
        if name != "block":
            assert found.alias_size_in_bytes >= cache and found.temp_size_in_bytes < cache // 16
            allowed = {"dynamic-update-slice", "fusion"} if name == "insert" else {"copy-start", "copy-done"}
            assert made_of(keys, program.as_text()) <= {*MOVES_NOTHING, *allowed}
