"""Prefill on a CPU by the kernel that numba compiles: what is its own, beside the suite of all kernels."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import SMALL

import jaxkv
from jaxkv.attend import prompt as prompt_layer
from jaxkv.evaluation import one_prefill
from pallas_kernels.choices import choices
from pallas_kernels.prefill_attend import api as attend_api
from pallas_kernels.prefill_attend_mass import api as mass_api

LATER = ("kvzip", True), ("longflow", False)
TINY = Path(__file__).parent / "goldens" / "tiny"


def attention(rng, batch=2, kv_heads=2, group=3, slots=700, dim=32, length=300):
    """Queries, keys, values and positions, some slots empty and NaN, the queries' own keys last."""
    query = rng.normal(size=(batch, kv_heads * group, length, dim)).astype(np.float32)
    keys, values = rng.normal(size=(2, batch, kv_heads, slots, dim)).astype(np.float32)
    at = np.tile(np.arange(slots - length, slots, dtype=np.int32), (batch, 1))
    at[0, :70] = -1  # padding on the left
    positions = np.tile(np.arange(slots, dtype=np.int32), (batch, kv_heads, 1))
    positions[:, :, 5 : slots - length : 3] = -1
    positions[:, :, slots - length :] = at[:, None]
    keys[positions < 0] = values[positions < 0] = np.nan
    return tuple(map(jnp.asarray, (query, keys, values, at, positions)))


@pytest.mark.some(2)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [300, 32])
def test_with_the_log_sum_exps_of_attention_the_mass_is_the_same(reduce, last):
    query, keys, values, at, positions = attention(np.random.default_rng(0))
    options = dict(scale=0.2, window=400, softcap=30.0, own_keys_last=True, implementation="numba_cpu")
    _, lse = attend_api.prefill_attend(query, keys, values, at, positions, with_lse=True, **options)
    looks = query[:, :, -last:], keys, at[:, -last:], positions
    found = mass_api.prefill_attend_mass(*looks, reduce=reduce, **options)
    given = mass_api.prefill_attend_mass(*looks, reduce=reduce, lse=lse[:, :, -last:], **options)
    assert np.array_equal(found, given) and np.isfinite(found).all()
    options["implementation"] = "reference"
    plain = mass_api.prefill_attend_mass(*looks, reduce=reduce, lse=lse[:, :, -last:], **options)
    np.testing.assert_allclose(given, plain, atol=2e-6, rtol=1e-4)


def test_no_logits_are_written_out():
    """The temporary memory of both is that of keys, values and queries laid out, whatever they are multiplied to."""
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in attention(np.random.default_rng(0), 1, 2, 3, 4096, 32, 2048)
    ]
    options = dict(scale=0.2, own_keys_last=True)

    def both(query, keys, values, at, positions):
        out, lse = attend_api.prefill_attend(query, keys, values, at, positions, with_lse=True, **options)
        return out, mass_api.prefill_attend_mass(query, keys, at, positions, lse=lse, **options)

    memory = jax.jit(both).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * memory.argument_size_in_bytes < 2048 * 4096


def test_it_is_chosen_where_heads_fill_registers():
    shape = dict(heads=4, kv_heads=2, slots=64, dtype="bfloat16", platform="cpu")
    for name in ("prefill_attend", "prefill_attend_mass"):
        assert choices(head_dim=64, **shape)[name].implementation == "numba_cpu"
        narrow = choices(head_dim=20, **shape)[name]
        assert narrow.implementation == "reference" and "20 channels: a multiple of" in narrow.reasons[0]
        few = choices(head_dim=64, tokens=31, **shape)[name]
        assert few.implementation == "reference" and "31 queries of 2 heads" in few.reasons[0]
        assert choices(head_dim=64, tokens=32, **shape)[name].implementation == "numba_cpu"


@pytest.mark.usefixtures("unchecked")  # the operations ask for whole shapes
def test_what_is_alike_for_all_rows_and_heads_may_be_given_once():
    query, keys, values, at, positions = attention(np.random.default_rng(1))
    at, positions = at[1:], positions[1:, :1]  # of the second row and its first head
    keys, values = jnp.nan_to_num(keys), jnp.nan_to_num(values)
    options = dict(scale=0.2, bias=jnp.log1p(jnp.arange(700.0))[None, None])
    for call, more in (
        (lambda **how: attend_api.prefill_attend(query, keys, values, at, positions, **options, **how), {}),
        (lambda **how: mass_api.prefill_attend_mass(query, keys, at, positions, **options, **how), {"reduce": "max"}),
    ):
        ours, theirs = (call(implementation=name, **more) for name in ("numba_cpu", "reference"))
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-4)


def test_it_maps_over_calls():
    query, keys, values, at, positions = attention(np.random.default_rng(2))
    call = functools.partial(attend_api.prefill_attend, scale=0.2)
    one = call(query, keys, values, at, positions)
    many = jax.vmap(jax.jit(lambda query: call(query, keys, values, at, positions)))(jnp.stack([query, -query]))
    np.testing.assert_allclose(many[0], one, atol=1e-6)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["h2o", "laq", "kvzip", "dapq-longflow", "keepkv", "streaming-llm"])
def test_policies_keep_what_they_keep_by_the_reference(name):
    """Sums over all queries, over tokens behind the prompt that keep no keys, over the block itself, beside biases."""
    params = jaxkv.load(TINY / "qwen3", dtype=jnp.float32)
    assert params.config.head_dim % 16 == 0
    prompt = np.random.default_rng(0).integers(3, 160, 90)
    small = SMALL.get(name, {}) | ({"allocate": {"kind": "uniform"}} if name == "kvzip" else {})
    policy = jaxkv.policy(name, budget=24, block=48, **small)
    options = {"policy": policy, "max_new_tokens": 4, "stop_tokens": ()}
    want = jaxkv.generate(params, [prompt], **options, implementation="reference")
    got = jaxkv.generate(params, [prompt], **options)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    for ours, theirs in zip(got.cache.layers, want.cache.layers, strict=True):
        np.testing.assert_array_equal(ours.positions, theirs.positions)


@pytest.mark.parametrize(
    "name, handed",
    [("h2o", True), ("snapkv", False), *(pytest.param(*each, marks=pytest.mark.long) for each in LATER)],
)
def test_attention_hands_on_its_log_sum_exps_where_most_queries_look(name, handed, monkeypatch):
    """And not where a prompt is heard once for many policies: what it attends to is known there."""
    params, told = jaxkv.load(TINY / "qwen3", dtype=jnp.float32), []
    attend, mass = prompt_layer.prefill_attend, prompt_layer.prefill_attend_mass

    def attended(*args, with_lse, **options):
        told.append(("attended", with_lse))
        return attend(*args, with_lse=with_lse, **options)

    def weighed(*args, lse=None, **options):
        told.append(("weighed", lse is not None))
        return mass(*args, lse=lse, **options)

    monkeypatch.setattr(prompt_layer, "prefill_attend", attended)
    monkeypatch.setattr(prompt_layer, "prefill_attend_mass", weighed)
    policy = jaxkv.policy(name, budget=23, block=64, **SMALL.get(name, {}))
    ids = np.random.default_rng(0).integers(3, 160, 50).astype(np.int32)
    jaxkv.prefill(params, ids, policy=policy)
    assert set(told) == {("attended", handed), ("weighed", handed)}
    if name in ("h2o", "snapkv"):
        told.clear()
        list(one_prefill.keep(one_prefill.hear(params, ids), [policy], 4))
        assert set(told) == {("attended", False), ("weighed", False)}
