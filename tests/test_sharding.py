"""Generation on a mesh: the same tokens, kept positions and caches as on one device."""

import dataclasses
import functools
import itertools
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import compilations
from flax import nnx
from letters import Letters
from measured import calibrated, measured
from small import SMALL

import jaxkv
from benchmarks.family_cost import first_layers
from jaxkv import cli, run
from jaxkv.errors import BadValue, UnknownName
from jaxkv.lowering import held_by_one, lower
from jaxkv.policies import catalogue
from jaxkv.sharding import Layout, on_host
from jaxkv.sharding.attention import prefill_attend, prefill_attend_mass
from jaxkv.sharding.mesh import parsed
from jaxkv.sharding.traffic import collectives
from jaxkv.speculative import AASD, DraftModel, PromptLookup, SelfDraft, session
from jaxkv.speculative.rounds import speculate

NAMES = sorted(catalogue())
MESHES = {"8,1,1": (8, 1, 1), "1,8,1": (1, 8, 1), "1,1,8": (1, 1, 8), "2,2,2": (2, 2, 2)}
ALWAYS = ("dapq-longflow",)  # on every mesh
# each way through the code, on 2,2,2
ONCE = ("full", "h2o", "adakv-h2o", "global-h2o", "razorattention", "keepkv", "zsmerge", "d2o")
CASES = [
    pytest.param(
        name,
        axes,
        id=f"{name}-{axes}",
        marks=() if (axes == "2,2,2" and name in ONCE) or name in ALWAYS else pytest.mark.slow,
    )
    for name in NAMES
    for axes in MESHES
]
LENGTHS = (45, 9, 30, 17, 26, 33, 12, 40)
STEP = 1.0  # of codes: rounding, which is a mesh's own, may move a number by one


def policy(name, budget=16, **options):
    options = {"block": 16, **SMALL.get(name, {}), **options}
    return jaxkv.policy(name, budget=budget, **options) if catalogue()[name].evicts else jaxkv.policy(name, **options)


def prompts(rows=8, first=0):
    """Ragged prompts, no token twice in one (see `generated`); seeds from the `first` on."""
    seeds = range(first, first + rows)
    return [
        np.random.default_rng(i).permutation(150)[:n].astype(np.int32) for i, n in zip(seeds, LENGTHS, strict=False)
    ]


def on(axes):
    data, model, context = axes
    return jaxkv.mesh(data=data, model=model, context=context)


def generated(params, name, steps=16, first=0, **options):
    """A run in which no token comes twice: equal keys (layer 0 under `knorm`) tie but for rounding, which is the matrix
    product's own, in prefill another than in decode and on a part of the matrix another than on the whole.
    """
    sampling = {"stop_tokens": (), "repetition_penalty": 1e6}
    chosen = policy(name, **options)
    return jaxkv.generate(params, prompts(first=first), policy=chosen, max_new_tokens=steps, **sampling)


@functools.cache
def expected(folder, name):
    """What one device gives."""
    return generated(calibrated(jaxkv.load(folder)), name)


def in_time(layer):
    """Positions, keys and values of a layer in time order, the empty slots first."""
    positions = on_host(layer.positions)
    order = np.argsort(positions, axis=-1, kind="stable")
    rows = [np.take_along_axis(on_host(x).astype(np.float32), order[..., None], 2) for x in (layer.keys, layer.values)]
    return np.take_along_axis(positions, order, -1), *rows


def assert_same_cache(ours, theirs, atol=1e-4, windows=None):
    """The same entries. Slots that a mesh has added are empty, or under a sliding window hold what none will see."""
    by_head = ([view.by_head() for view in cache.views] for cache in (ours, theirs))
    for mine, other, window in zip(*by_head, windows or [None] * len(ours.layers), strict=True):
        slots = min(x.positions.shape[-1] for x in (mine, other))  # a mesh may have added slots
        (positions, *arrays), (expected, *references) = in_time(mine), in_time(other)
        assert np.array_equal(positions[..., -slots:], expected[..., -slots:])
        passed = 0 if window is None else np.maximum(on_host(ours.lengths) - window + 1, 0)[:, None, None]
        assert (positions[..., :-slots] < passed).all() and (expected[..., :-slots] < passed).all()
        held = positions[..., -slots:, None] >= 0
        for array, reference in zip(arrays, references, strict=True):
            difference = np.where(held, array[..., -slots:, :] - reference[..., -slots:, :], 0)
            assert np.abs(difference).max() <= atol
    for name in ("lengths", "limits", "pending"):
        assert np.array_equal(on_host(getattr(ours, name)), on_host(getattr(theirs, name)))


@pytest.mark.long
@pytest.mark.parametrize("name, axes", CASES)
def test_a_mesh_gives_what_one_device_gives(goldens, name, axes):
    folder = goldens / "tiny" / "llama3"
    out = generated(calibrated(jaxkv.load(folder, mesh=on(MESHES[axes]))), name)
    assert out.tokens.tolist() == expected(folder, name).tokens.tolist()
    assert_same_cache(out.cache, expected(folder, name).cache, atol=1e-4 if policy(name).store.plain else STEP)


@pytest.mark.some(1)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("family, queries", [("llama3", 16), ("smollm2", 16), ("smollm2", 6)])
def test_queries_are_shared_along_the_text(goldens, reduce, family, queries):
    """By as many devices as divide them (SmolLM2's 3 KV heads leave `model` for that too), with KVzip+'s weights."""
    config = jaxkv.load(goldens / "tiny" / family).config
    rng = np.random.default_rng(0)
    heads, held, dims = config.num_kv_heads, 24, config.head_dim
    query = jnp.asarray(rng.normal(size=(2, config.num_heads, queries, dims)), jnp.float32)
    keys = jnp.asarray(rng.normal(size=(2, heads, held, dims)), jnp.float32)
    at = jnp.broadcast_to(jnp.arange(held, dtype=jnp.int32), (2, held))
    weights = None if reduce == "mean" else jnp.asarray(rng.uniform(0.1, 10, (2, queries)), jnp.float32)
    arrays = query, keys, at[:, -queries:], jnp.broadcast_to(at[:, None], (2, heads, held))
    layouts = [Layout.of(mesh, config) for mesh in (None, on((2, 2, 2)))]
    looked = [prefill_attend(layout, *arrays[:2], *arrays[1:], scale=0.3, with_lse=True) for layout in layouts]
    np.testing.assert_allclose(looked[0].lse, on_host(looked[1].lse), rtol=1e-5)
    mass = functools.partial(prefill_attend_mass, reduce=reduce, weights=weights, scale=0.3)
    one, many = (mass(layout, *arrays) for layout in layouts)
    known = (mass(layout, *arrays, lse=part.lse) for layout, part in zip(layouts, looked, strict=True))
    for other in (many, *known):
        np.testing.assert_allclose(one, on_host(other), rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "axes",
    [(1, 8, 1), *(pytest.param(axes, marks=pytest.mark.slow) for axes in ((1, 3, 2), (2, 4, 1), (2, 2, 2)))],
    ids=str,
)
def test_heads_that_the_axis_does_not_divide(goldens, axes):
    """9 query heads on 3 KV heads, over 8, 4, 2 and 3 devices."""
    folder = goldens / "tiny" / "smollm2"
    data, model, context = axes
    devices = jax.devices()[: math.prod(axes)]
    params = jaxkv.load(folder, mesh=jaxkv.mesh(data=data, model=model, context=context, devices=devices))
    out = generated(params, "dapq-longflow")
    assert out.tokens.tolist() == expected(folder, "dapq-longflow").tokens.tolist()
    assert_same_cache(out.cache, expected(folder, "dapq-longflow").cache)


TIES = {"alisa": 8}  # seeds of other prompts: with the first ones two of its scores are equal but for rounding


@functools.cache
def real(axes):
    """SmolLM2's own weights, cut off after four layers, on a mesh; None: on one device."""
    mesh = None if axes is None else on(MESHES[axes])
    return first_layers(jaxkv.load("smollm2-135m", dtype=jnp.float32, mesh=mesh), 4)


@functools.cache
def really_expected(name):
    """What one device gives of them."""
    return generated(real(None), name, first=TIES.get(name, 0))


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES)  # the outer loop, so that weights are loaded once
@pytest.mark.parametrize("name", [name for name in NAMES if catalogue()[name].store.plain])
def test_real_weights_whose_heads_no_axis_divides(name, axes):
    """9 query heads on 3 KV heads, every policy whose entries are no codes: one that rounding moves by a step decides
    later what leaves. (Four layers: the compiler's time is in their number.)"""
    out = generated(real(axes), name, first=TIES.get(name, 0))
    assert out.tokens.tolist() == really_expected(name).tokens.tolist()
    assert_same_cache(out.cache, really_expected(name).cache, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    "family, options",
    [
        ("gemma3_text", {}),
        pytest.param("qwen2", {}, marks=pytest.mark.slow),
        pytest.param("llama3", {"every": 5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_windows_biases_and_cuts_every_few_steps(goldens, family, options):
    folder = goldens / "tiny" / family
    params = jaxkv.load(folder)
    one = generated(params, "h2o", **options)
    out = generated(jaxkv.load(folder, mesh=on((2, 2, 2))), "h2o", **options)
    assert out.tokens.tolist() == one.tokens.tolist()
    assert_same_cache(out.cache, one.cache, windows=[spec.window for spec in params.config.specs])


@pytest.mark.long
def test_windows_are_read_whole_where_others_are_read_in_pages(goldens):
    """The slots that a mesh adds to a window would be in other pages."""
    folder, devices = goldens / "tiny" / "gemma3_text", jax.devices()[:2]
    policy = jaxkv.policy("quest", count=12, page=4, dense=1)
    one, many = (
        jaxkv.generate(jaxkv.load(folder, mesh=mesh), prompts(), policy=policy, max_new_tokens=12, stop_tokens=())
        for mesh in (None, jaxkv.mesh(context=2, devices=devices))
    )
    assert many.tokens.tolist() == one.tokens.tolist()
    held = [(layer.slots, "pages" in layer.beside) for layer in one.cache.layers]
    assert held[0][1] is False and held[1][1] is True and one.cache.read_bytes[2] == one.cache.read_bytes[0]


@pytest.mark.long
def test_pages_do_not_know_how_many_slots_a_mesh_divides(goldens):
    folder, devices = goldens / "tiny" / "llama3", jax.devices()[:2]
    policy = jaxkv.policy("h2o", budget=40, read={"kind": "pages", "count": 16, "page": 16, "dense": 0})
    one, many = (
        jaxkv.generate(jaxkv.load(folder, mesh=mesh), prompts(), policy=policy, max_new_tokens=12, stop_tokens=())
        for mesh in (None, jaxkv.mesh(context=2, devices=devices))
    )
    assert one.cache.layers[0].slots < many.cache.layers[0].slots
    assert many.tokens.tolist() == one.tokens.tolist()


@pytest.mark.long
@pytest.mark.parametrize(
    "name, options", [("h2o", {"count": 1000}), ("h2o", {"count": 16, "page": 7}), ("lagkv", {"count": 16})], ids=str
)
def test_a_cache_that_is_read_in_pages_goes_on_on_a_mesh(goldens, tmp_path, name, options):
    """Where slots are added that no page had."""
    folder, going = goldens / "tiny" / "llama3", {"max_new_tokens": 10, "stop_tokens": ()}
    one = jaxkv.load(folder)
    many = jaxkv.load(folder, mesh=jaxkv.mesh(context=4, devices=jax.devices()[:4]))
    cuts = {"every": 8, "lag": 8} if name == "lagkv" else {}
    chosen = jaxkv.policy(name, budget=40, read={"kind": "pages", "page": 4, "dense": 0, **options}, **cuts)
    ids = np.random.default_rng(0).integers(3, 100, (1, 60))
    cache = jaxkv.generate(one, ids, policy=chosen, max_new_tokens=4, stop_tokens=()).cache
    jaxkv.save(cache, tmp_path / "cache")
    whole = jaxkv.generate(one, cache=cache, **going)
    for held in (cache, jaxkv.restore(tmp_path / "cache", many)):
        moved = jaxkv.generate(many, cache=held, **going)
        assert moved.cache.layers[0].slots == 64 > cache.layers[0].slots
        assert moved.tokens.tolist() == whole.tokens.tolist()


@pytest.mark.long
def test_weights_over_fsdp(goldens):
    folder = goldens / "tiny" / "llama3"
    params = jaxkv.load(folder, mesh=jaxkv.mesh(fsdp=4, model=2))
    one = jaxkv.load(folder)
    held = sum(leaf[...].addressable_shards[0].data.nbytes for _, leaf in nnx.to_flat_state(params.weights))
    whole = sum(leaf[...].nbytes for _, leaf in nnx.to_flat_state(one.weights))
    assert held < 0.14 * whole, "an eighth, and the norms"
    assert_same_cache(generated(params, "h2o").cache, expected(folder, "h2o").cache)


@pytest.mark.long
def test_bfloat16_differs_by_rounding_only(goldens):
    folder = goldens / "tiny" / "llama3"
    policy = jaxkv.policy("full")
    found = []
    for mesh in (None, on((2, 2, 2)), on((1, 8, 1)), on((1, 1, 8))):
        params = jaxkv.load(folder, dtype=jnp.bfloat16, mesh=mesh)
        found.append(jaxkv.prefill(params, prompts(), policy=policy))
    for cache in found[1:]:
        for mine, other in zip(cache.layers, found[0].layers, strict=True):
            (_, *arrays), (_, *references) = in_time(mine), in_time(other)
            for array, reference in zip(arrays, references, strict=True):
                array = array[..., -reference.shape[2] :, :]
                assert np.abs(array - reference).max() <= 2**-5 * np.abs(reference).max(), "4 units of 2^-8, relative"


def read_counted(monkeypatch):
    """Bytes read from safetensors, counted."""
    from jaxkv.weights import safetensors_files

    read, count = safetensors_files.SafeTensor.read, [0]

    def counted(self, *index):
        value = read(self, *index)
        count[0] += value.nbytes
        return value

    monkeypatch.setattr(safetensors_files.SafeTensor, "read", counted)
    return count


@pytest.mark.parametrize("axes", [(1, 8, 1), (2, 2, 2)], ids=str)
def test_weights_are_read_once_and_hold_what_the_file_holds(goldens, monkeypatch, axes):
    folder = goldens / "tiny" / "smollm2"
    count = read_counted(monkeypatch)
    params = jaxkv.load(folder, mesh=on(axes))
    one_device = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    read, count[0] = count[0], 0
    plain = jaxkv.load(folder, mesh=one_device)
    assert read == count[0] == sum(leaf[...].nbytes for _, leaf in nnx.to_flat_state(plain.weights))
    for (path, mine), (_, other) in zip(*map(nnx.to_flat_state, (params.weights, plain.weights)), strict=True):
        assert np.array_equal(mine[...], other[...]), path
        if mine[...].ndim == 2:
            assert mine[...].addressable_shards[0].data.size * axes[1] == mine[...].size, path


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "dapq-longflow",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("adakv-h2o", "global-h2o", "razorattention")),
    ],
)
def test_a_cache_goes_on_on_another_mesh(goldens, tmp_path, name):
    folder = goldens / "tiny" / "llama3"
    where = {"one": None, "model": on((1, 8, 1)), "context": on((1, 1, 8)), "mixed": on((2, 2, 2))}
    params_on = {place: calibrated(jaxkv.load(folder, mesh=mesh)) for place, mesh in where.items()}
    first = generated(params_on["mixed"], name, steps=5, budget=18)  # 18 slots don't divide by 8
    jaxkv.save(first.cache, tmp_path / "cache")
    going = {"policy": None, "max_new_tokens": 9, "stop_tokens": ()}
    whole = jaxkv.generate(params_on["mixed"], cache=first.cache, **going)
    for place, params in params_on.items():
        restored = jaxkv.restore(tmp_path / "cache", params)
        out = jaxkv.generate(params, cache=restored, **going)
        assert out.tokens.tolist() == whole.tokens.tolist(), place
        assert_same_cache(out.cache, whole.cache)
        assert np.array_equal(out.cache.tokens, whole.cache.tokens)
        moved = jaxkv.generate(params, cache=first.cache, **going)
        assert moved.tokens.tolist() == whole.tokens.tolist(), place
        assert np.array_equal(moved.cache.tokens, whole.cache.tokens)


@pytest.mark.long
def test_a_tier_that_is_divided_over_fewer_axes_counts_once(goldens):
    """Three KV heads on two devices along `model`: these share the slots, 10 of the tier only along `context`."""
    folder, devices = goldens / "tiny" / "smollm2", jax.devices()[:4]
    policy = jaxkv.policy("tiered-h2o", budget=16, slots=10, block=16)
    rows, options = np.random.default_rng(5).integers(3, 100, (1, 50)).astype(np.int32), {"stop_tokens": ()}
    one, many = (
        jaxkv.generate(jaxkv.load(folder, mesh=mesh), rows, policy=policy, max_new_tokens=12, **options)
        for mesh in (None, jaxkv.mesh(model=2, context=2, devices=devices))
    )
    assert one.tokens.tolist() == many.tokens.tolist()


def test_a_full_cache_goes_on_where_devices_share_its_slots(goldens, tmp_path):
    """Slots that are added for the mesh are there to be filled: no token is written over."""
    folder, devices = goldens / "tiny" / "llama3", jax.devices()[:4]
    one = jaxkv.load(folder)
    many = jaxkv.load(folder, mesh=jaxkv.mesh(context=4, devices=devices))
    options = {"stop_tokens": ()}
    cache = jaxkv.generate(one, np.arange(32) % 90 + 3, max_new_tokens=16, **options).cache
    cache = jaxkv.generate(one, cache=cache, max_new_tokens=1, **options).cache
    assert int(cache.held().min()) == cache.layers[0].slots == 48
    jaxkv.save(cache, tmp_path / "cache")
    whole, moved = (
        jaxkv.generate(params, cache=jaxkv.restore(tmp_path / "cache", params), max_new_tokens=6, **options)
        for params in (one, many)
    )
    assert moved.tokens.tolist() == whole.tokens.tolist()
    assert np.asarray(moved.cache.held()).tolist() == np.asarray(whole.cache.held()).tolist()


@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 4, 17])
@pytest.mark.parametrize(
    "name, options",
    [
        ("lacache", {"every": 4}),
        ("freqkv", {"every": 4}),
        ("lacache", {"every": 6, "store": {"keys": {"kind": "int", "bits": 8}, "residual": 4}}),
        ("streaming-llm", {"rope": "cache"}),
    ],
    ids=["lacache", "freqkv", "codes", "streaming-llm"],
)
def test_places_in_the_cache_do_not_know_how_many_slots_a_mesh_divides(goldens, tmp_path, name, options, steps):
    """Neither behind the prompt, where the new tokens go round to the first slots, nor after cuts."""
    folder, going = goldens / "tiny" / "llama3", {"max_new_tokens": 10, "stop_tokens": ()}
    one = jaxkv.load(folder)
    many = jaxkv.load(folder, mesh=jaxkv.mesh(context=4, devices=jax.devices()[:4]))
    chosen, ids = jaxkv.policy(name, budget=40, **options), np.random.default_rng(0).integers(3, 100, (1, 60))
    cache = jaxkv.generate(one, ids, policy=chosen, max_new_tokens=steps, stop_tokens=()).cache
    jaxkv.save(cache, tmp_path / "cache")
    whole = jaxkv.generate(one, cache=cache, **going)
    moved = jaxkv.generate(many, cache=cache, **going)
    assert moved.cache.layers[0].slots == 64 > cache.layers[0].slots
    restored = jaxkv.generate(many, cache=jaxkv.restore(tmp_path / "cache", many), **going)
    assert whole.tokens.tolist() == moved.tokens.tolist() == restored.tokens.tolist()
    back = jaxkv.generate(one, cache=moved.cache, **going)
    assert back.tokens.tolist() == jaxkv.generate(one, cache=whole.cache, **going).tokens.tolist()


BY_TOKEN = {"keys": {"kind": "int", "bits": 4}, "values": {"kind": "int", "bits": 4}, "residual": 4}
AS_CODES = {"keys": {"kind": "int", "bits": 8, "hadamard": True}, "values": {"kind": "fp8"}}  # read as they lie
BY_CHANNEL = {**BY_TOKEN, "keys": {"kind": "int-by-channel", "bits": 4, "tokens": 4}, "residual": 8}
FITTED = {**BY_TOKEN, "keys": {"kind": "channels", "window": 4}}


@pytest.mark.long
@pytest.mark.parametrize(
    "name, store, axes",
    [
        ("h2o", BY_TOKEN, (2, 2, 2)),
        ("h2o", AS_CODES, (2, 2, 2)),
        ("h2o", BY_CHANNEL, (1, 2, 4)),
        ("adakv-h2o", FITTED, (2, 2, 2)),
        ("knorm", BY_CHANNEL, (1, 2, 4)),  # which weighs nothing: the window is a part beside the codes
        ("knorm", FITTED, (2, 2, 2)),
        ("minicache", {}, (2, 2, 2)),
        ("kv-heads", {}, (2, 2, 2)),
        ("aquakv", {}, (2, 2, 2)),
        ("gear", {}, (1, 2, 4)),
    ],
)
def test_codes_on_a_mesh(goldens, tmp_path, name, store, axes):
    """The same tokens and entries as on one device; saved there, a cache goes on on one device and on another mesh."""
    folder, options = goldens / "tiny" / "llama3", {"budget": 18, **({"store": store} if store else {})}
    one, mesh, other = (
        calibrated(jaxkv.load(folder, mesh=None if where is None else on(where))) for where in (None, axes, (1, 1, 8))
    )
    out, alone = (generated(params, name, steps=9, **options) for params in (mesh, one))
    assert out.tokens.tolist() == alone.tokens.tolist()
    assert out.cache.kv_bytes >= alone.cache.kv_bytes
    if alone.cache.layers[0].equal:
        assert_same_cache(out.cache, alone.cache, atol=STEP)
    jaxkv.save(out.cache, tmp_path / "cache")
    going = {"policy": None, "max_new_tokens": 5, "stop_tokens": ()}
    after = [
        jaxkv.generate(params, cache=jaxkv.restore(tmp_path / "cache", params), **going).tokens.tolist()
        for params in (mesh, one, other)
    ]
    assert after[0] == after[1] == after[2] == jaxkv.generate(mesh, cache=out.cache, **going).tokens.tolist()


METHODS = {
    "lookup": PromptLookup(fallback=False),
    "aasd": AASD(depth=3, siblings=(1, 0, 2), low=1.0, fallback=False),
    "self": SelfDraft(jaxkv.policy("tova", budget=8), depth=2, fallback=False),
}
OFTEN = ("dapq-longflow", "aasd", "2,2,2")
DRAFTED = [
    pytest.param(*case, id="-".join(case), marks=() if case == OFTEN else pytest.mark.long)
    for case in itertools.product(("full", "dapq-longflow", "streaming-llm", "h2o", "snapkv"), METHODS, MESHES)
]


@pytest.mark.parametrize("name, method, axes", DRAFTED)
def test_drafts_on_a_mesh_change_no_token(goldens, name, method, axes):
    """Nor what is kept, nor how many drafts pass."""
    folder, rows = goldens / "tiny" / "llama3", [np.tile(row[:9], 4)[: len(row)] for row in prompts(4)]
    asked = {"policy": policy(name), "max_new_tokens": 14, "stop_tokens": (), "speculative": METHODS[method]}
    here, there = jaxkv.load(folder), jaxkv.load(folder, mesh=on(MESHES[axes]))
    out, alone = jaxkv.generate(there, rows, **asked), jaxkv.generate(here, rows, **asked)
    plain = jaxkv.generate(here, rows, **{**asked, "speculative": None})
    assert out.tokens.tolist() == alone.tokens.tolist() == plain.tokens.tolist()
    assert_same_cache(out.cache, plain.cache)
    passes = dataclasses.replace(out.stats.speculation, cost=1.0)
    assert passes.trees > 0 and passes == dataclasses.replace(alone.stats.speculation, cost=1.0)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_chunks_of_drafts_are_one_program(goldens, method):
    """Also where one row becomes several samples, which devices divide as they could not divide the row."""
    params, asked = jaxkv.load(goldens / "tiny" / "smollm2", mesh=on((2, 2, 2))), {"speculative": METHODS[method]}
    drawn = {"max_new_tokens": 60, "samples": 2, "temperature": 0.5, "stop_tokens": ()}
    with compilations() as seen:
        jaxkv.generate(params, prompts(1), policy=policy("h2o"), **drawn, **asked)
    assert seen.count("jit(speculate)") == 1


@pytest.mark.long
@pytest.mark.parametrize("axes", [(1, 8, 1), (2, 2, 2)], ids=str)
def test_drawn_drafts_on_a_mesh(goldens, axes):
    """With samples, a penalty, another turn of the text, and drafts of a model that divides the mesh in another way."""
    folder, small = goldens / "tiny" / "smollm2", goldens / "tiny" / "qwen2"
    drawn = {"max_new_tokens": 9, "temperature": 0.8, "samples": 2, "repetition_penalty": 1.1, "stop_tokens": ()}
    found = []
    for mesh in (None, on(axes)):
        params = jaxkv.load(folder, mesh=mesh)
        drafter = DraftModel(jaxkv.load(small, mesh=mesh), policy("h2o", budget=12), depth=2, fallback=False)
        for method in (*METHODS.values(), drafter):
            out = jaxkv.generate(
                params, prompts(2), policy=policy("laq-h2o-int4", budget=24), speculative=method, **drawn
            )
            more = jaxkv.generate(params, prompts(4, 2), cache=out.cache, speculative=method, **{**drawn, "samples": 1})
            found.append((out.tokens.tolist(), more.tokens.tolist()))
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_a_draft_model_lies_on_the_same_mesh(goldens):
    small, mesh = goldens / "tiny" / "llama2", on((2, 2, 2))
    alone, divided = jaxkv.load(small), jaxkv.load(small, mesh=mesh)
    for params, drafter in ((alone, divided), (divided, alone)):
        with pytest.raises(BadValue, match=r"a draft model on .* load both with the same mesh="):
            jaxkv.generate(params, np.arange(5), speculative=DraftModel(drafter), max_new_tokens=2)


POOLED = {"allocate": {"kind": "adaptive", "safeguard": 0.2}}  # without moves of borders, which move entries


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name, axes, options",
    [
        ("h2o", (1, 8, 1), {}), ("tova", (1, 1, 8), {}), ("dapq-longflow", (2, 2, 2), {}), ("h2o", (2, 2, 2), POOLED),
        ("global-h2o", (8, 1, 1), {}), ("razorattention", (2, 2, 2), {}),
    ],
    ids=str,
)  # fmt: skip
def test_decode_moves_no_cache(goldens, unchecked, name, axes, options):
    config = jaxkv.load(goldens / "tiny" / "llama3").config
    layout = Layout.of(on(axes), config)
    chosen = policy(name, budget=1024, **options)
    made_up = measured(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    learned = {fact: made_up[fact] for fact in chosen.learns}
    programs = lower(config, chosen, batch=8, tokens=160, layout=layout, learned=learned)
    found = collectives(programs.decode.compile().as_text())
    arrays = jax.tree.leaves(programs.cache.layers)
    gathered = [each.bytes for each in found if each.kind != "all-reduce"]  # sums over heads do have slots
    slotted = [x for x in arrays if len(x.shape) > 2 and x.shape[-2] >= 1024]  # keys and values, but no summary's
    assert gathered and max(gathered) < min(map(held_by_one, slotted))
    assert max(each.bytes for each in found) < max(held_by_one(x) for x in arrays)
    assert sum(each.bytes for each in found if each.looped) < 0.1 * held_by_one(arrays)


class Seen(Exception):
    """The text of a program, instead of a run of it."""


@pytest.mark.some(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name, axes",
    [("h2o", (1, 8, 1)), ("dapq-longflow", (1, 1, 8)), ("full", (2, 2, 2)), ("rotatekv", (1, 8, 1))],
    ids=str,
)
def test_drafts_move_no_cache(goldens, unchecked, monkeypatch, name, axes, method):
    def told(weights, extra, state, drafting, **static):
        own = min(held_by_one(layer.keys) for layer in state.cache.layers)
        raise Seen(speculate.lower(weights, extra, state, drafting, **static).compile().as_text(), own)

    monkeypatch.setattr(session, "speculate", told)
    params, asked = jaxkv.load(goldens / "tiny" / "llama3", mesh=on(axes)), {"speculative": METHODS[method]}
    with pytest.raises(Seen) as seen:
        jaxkv.generate(params, prompts(), policy=policy(name, budget=1024), max_new_tokens=1024, **asked)
    found, own = collectives(seen.value.args[0]), seen.value.args[1]
    gathered = [each.bytes for each in found if each.kind != "all-reduce"]  # sums over heads do have slots
    assert found and max(gathered, default=0) < own / 2 and max(each.bytes for each in found) < own


def test_a_gathered_cache_would_be_seen(goldens, unchecked):
    """Else the test above would show nothing: without the layout, the partitioner is free to gather."""
    config = jaxkv.load(goldens / "tiny" / "llama3").config
    layout = Layout.of(on((1, 1, 8)), config)
    layers = lower(config, policy("tova", budget=128), batch=8, tokens=160, layout=layout).cache.layers
    text = jax.jit(lambda layer: layout.gathered(layer).keys + 1).lower(layers[0]).compile().as_text()
    (gathered,) = collectives(text)
    assert gathered.kind == "all-gather" and gathered.bytes == 8 * held_by_one(layers[0].keys)


def test_collectives_are_found_in_text():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def gather(x):
        return jax.lax.with_sharding_constraint(x + 1, whole)

    def loop(x):
        return jax.lax.fori_loop(0, 4, lambda _, y: y + jnp.sum(jax.lax.with_sharding_constraint(y, rows)), x)

    x = jax.device_put(jnp.zeros((16, 4)), rows)
    (one,) = collectives(jax.jit(gather).lower(x).compile().as_text())
    assert (one.kind, one.bytes, one.looped) == ("all-gather", 16 * 4 * 4, False)
    text = one_line = (
        '  %all-gather.1 = bf16[8,4]{1,0:T(8,128)} all-gather(%p), channel_id=2, frontend_attributes={chain_id="0"}\n'
    )
    for name in ("started", "finished"):  # as TPUs write one out that runs beside other work
        text += f"%{name} (p: bf16[8,1]) -> bf16[8,4] {{\n{one_line}}}\n"
    assert [each.bytes for each in collectives(text)] == [64]
    found = collectives(jax.jit(loop, out_shardings=rows).lower(x).compile().as_text())
    assert [(each.kind, each.bytes) for each in found if each.looped] == [("all-reduce", 4)]


@pytest.mark.long
def test_bytes_hold_where_devices_share_the_slots(goldens):
    """Each device's share is whole pieces of memory, which counts."""
    params = jaxkv.load(goldens / "tiny" / "smollm2", mesh=on((1, 1, 8)))
    policy = jaxkv.policy("h2o", bytes=60_000, block=16)
    cache = jaxkv.generate(params, prompts(1), policy=policy, max_new_tokens=2).cache
    assert 40_000 < cache.kv_bytes <= 60_000


def test_every_array_of_a_policy_can_be_divided(goldens):
    """Also those of more dimensions than entries have; saved arrays are laid by the same names, a kind for each."""
    params = jaxkv.load(goldens / "tiny" / "llama3", mesh=on((2, 2, 2)))
    for name in NAMES:
        for layer in run.empty_layers(params.config, policy(name), 2, params.dtype):
            said = []
            params.layout.each(layer, lambda leaf, *axes, said=said: said.append((leaf.ndim, len(axes))) or leaf)
            assert len(said) == len(jax.tree.leaves(layer)) and all(ndim == axes for ndim, axes in said), name


def test_what_divides_the_heads(goldens):
    config = jaxkv.load(goldens / "tiny" / "llama3").config
    shapes = {
        (32, 8, 4): (4, 1, 1),
        (32, 8, 8): (8, 1, 1),
        (9, 3, 8): (1, 1, 8),
        (8, 2, 8): (2, 4, 1),
        (6, 2, 8): (2, 1, 4),
    }
    for (heads, kv_heads, model), split in shapes.items():
        config = dataclasses.replace(config, num_heads=heads, num_kv_heads=kv_heads)
        layout = Layout.of(jaxkv.mesh(model=model, data=8 // model), config)
        assert layout.mesh is not None
        assert tuple(layout.mesh.shape[axis] for axis in ("heads", "group", "spare")) == split


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: jaxkv.mesh(data=3), BadValue, "data=3 needs 3 devices, but there are 8"),
        (lambda: jaxkv.mesh(data=0), BadValue, "data=0: expected a whole number"),
        (lambda: jaxkv.mesh("v5e-65"), UnknownName, "v5e-64"),
        (lambda: jaxkv.mesh("v5e-64", data=2), BadValue, "the name or the axes"),
        (lambda: jaxkv.mesh(**parsed("v5e-64")), BadValue, "needs 64 devices, but there are 8"),
        (lambda: parsed("data=2,tensor=4"), BadValue, "data, fsdp, model, context"),
        (lambda: parsed("data=2,data=4"), BadValue, "expected a name, or axes"),
    ],
)
def test_meshes_that_cannot_be(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_mesh_with_strange_axes_is_refused(goldens):
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(BadValue, match="'tensor'"):
        jaxkv.load(goldens / "tiny" / "llama3", mesh=mesh)


@pytest.mark.long
def test_the_command_line_on_a_mesh(goldens, monkeypatch, capsys):
    load, given = jaxkv.load, []

    def lettered(*_, mesh=None, **__):
        given.append(mesh)
        return dataclasses.replace(load(goldens / "tiny" / "llama3", mesh=mesh), tokenizer=Letters())

    monkeypatch.setattr(jaxkv, "load", lettered)
    command = ["generate", "hello there", "--policy", "tova", "--budget", "8", "--max-new-tokens", "6", "--json"]
    answers = []
    for spread in ([], ["--mesh", "model=4,context=2"]):
        assert cli.main([*command, *spread]) == 0
        answers.append(json.loads(capsys.readouterr().out)["tokens"])
    assert answers[0] == answers[1] and given[0] is None and given[1].shape["model"] == 4
    assert cli.main([*command, "--mesh", "model=3"]) == 2
    assert "needs 3 devices, but there are 8" in capsys.readouterr().err
    assert cli.main([*command, "--coordinator", "a:1"]) == 2
    assert "--coordinator without --mesh" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, says",
    [
        (["serve", "--port", "0", "--mesh", "data=8", "--policy", "h2o"], "divides rows by 8"),
        (["generate", "hi", "--mesh", "rows=8"], "mesh 'rows=8': expected a name, or axes"),
    ],
)
def test_a_mesh_is_refused_before_weights_are_read(monkeypatch, capsys, words, says):
    monkeypatch.setattr(jaxkv, "load", None)
    assert cli.main(words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.long
def test_chat_on_a_mesh(goldens, monkeypatch, capsys):
    load = jaxkv.load
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: False))
    monkeypatch.setattr(
        jaxkv,
        "load",
        lambda *_, mesh=None, **__: dataclasses.replace(
            load(goldens / "tiny" / "llama3", mesh=mesh), tokenizer=Letters()
        ),
    )
    answers = []
    for spread in ([], ["--mesh", "model=2,context=4"]):
        lines = iter(["hello there", "and again"])
        monkeypatch.setattr("builtins.input", lambda _, lines=lines: next(lines, ""))
        command = ["chat", "--policy", "tova", "--budget", "16", "--max-new-tokens", "8", "--json", *spread]
        assert cli.main(command) == 0
        answers.append([json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()])
    assert answers[0] == answers[1] and len(answers[0]) == 2
