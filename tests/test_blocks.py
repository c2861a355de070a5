"""Weights in blocks of 8 and 4 bits: what they stand for, every implementation of their product, and models of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax import lax
from jax.experimental.pallas import tpu as pltpu

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.models.linear import FORMS, GROUP, Blocks, as_held, lookup, packed, plain, project, quantised, unembed
from jaxkv.sharding.layout import on_host
from pallas_kernels.block_product import api
from pallas_kernels.block_product.reference import numbers

MODEL = "qwen2"  # whose matrices all have multiples of 32 inputs
TEXTS = [np.arange(5, 45) % 97 + 3, np.arange(9, 20) + 3]


def matrix(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32) / inputs**0.5


def stored(weight: np.ndarray, kind: str, panels: bool) -> Blocks:
    """The matrix `[out, in]` in blocks, as a model holds it."""
    found = {name: jnp.asarray(packed(array, panels)) for name, array in as_held(quantised(weight, kind)).items()}
    return Blocks(**found, dtype=jnp.dtype(jnp.float32))


def meant(weight: np.ndarray, kind: str) -> np.ndarray:
    """What the codes of the matrix `[out, in]` stand for, by hand."""
    found = quantised(weight, kind)
    codes = found["codes"]
    if kind == "int4":
        pairs = codes.reshape(len(weight), -1, GROUP // 2)
        codes = np.concatenate([pairs % 16, pairs // 16], axis=2).reshape(weight.shape)
    each = weight.shape[1] // found["scale"].shape[1]
    value = codes * np.repeat(found["scale"].astype(np.float64), each, axis=1)
    return value + np.repeat(found["offset"].astype(np.float64), each, axis=1) if "offset" in found else value


IMPLEMENTATIONS = (*api.OPERATION.kernels, "reference")


def interpreted(implementation: str) -> dict:
    """What runs a TPU's kernel under the interpreter, whose memory that nobody wrote is NaN."""
    return {"interpret": pltpu.InterpretParams(uninitialized_memory="nan")} if implementation == "mosaic_tpu" else {}


@pytest.mark.parametrize("kind", FORMS)
@given(
    weight=arrays.arrays(
        np.float32, (3, 2 * GROUP), elements=st.floats(-4, 4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
    )
)
@settings(max_examples=50, deadline=None)
def test_codes_are_the_nearest(kind, weight):
    """Off by half a step at most, and by the rounding of a scale and an offset to 16 bits."""
    scale = np.repeat(
        quantised(weight, kind)["scale"], weight.shape[1] // quantised(weight, kind)["scale"].shape[1], axis=1
    )
    largest = np.abs(weight).max()
    assert (np.abs(meant(weight, kind) - weight) <= 0.5 * scale + 0.02 * scale * 15 + 1e-3 * largest).all()


@pytest.mark.some(5)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 8, 33, 130])
@pytest.mark.parametrize("outputs, inputs", [(64, 32), (1088, 96)])
def test_every_implementation_gives_the_product(implementation, kind, rows, outputs, inputs):
    if implementation == "numba_cpu":
        pytest.importorskip("numba")
    weight, x = matrix(outputs, inputs), matrix(rows, inputs, 1)
    blocks = stored(weight, kind, panels=implementation != "mosaic_tpu")

    def product():
        return api.block_product(
            jnp.asarray(x), blocks.codes, blocks.scale, blocks.offset, implementation=implementation,
            **interpreted(implementation),
        )  # fmt: skip

    if (implementation == "numba_cpu" and rows > 128) or (
        implementation == "mosaic_tpu" and kind == "int8" and inputs > GROUP
    ):
        with pytest.raises(
            NotImplementedError, match=f"{rows} rows" if implementation == "numba_cpu" else "some inputs"
        ):
            product()
        return
    want = x.astype(np.float64) @ meant(weight, kind).T
    np.testing.assert_allclose(jax.jit(product)(), want, atol=2e-5)


@pytest.mark.some(10)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_scales_for_some_of_the_inputs(implementation, group, offset, rows):
    """8 bits with a scale for 16 or 32 inputs, as files have them."""
    if implementation == "numba_cpu":
        pytest.importorskip("numba")
    draw = np.random.default_rng(0)
    panels = () if implementation == "mosaic_tpu" else (2,)
    codes = draw.integers(-128, 128, (*panels, 96, 64)).astype(np.int8)
    scale, more = draw.normal(size=(2, *panels, 96 // group, 64)).astype(np.float16)
    x = matrix(rows, 96, 1)
    meant = codes * np.repeat(scale.astype(np.float64), group, axis=-2)
    meant = meant + np.repeat(more.astype(np.float64), group, axis=-2) if offset else meant
    given = [jnp.asarray(each.view(np.int16)) for each in (scale, more)]
    arrays = [jnp.asarray(x), jnp.asarray(codes), given[0], given[1] if offset else None]
    got = api.block_product(*arrays, implementation=implementation, **interpreted(implementation))
    matrices = meant if meant.ndim == 2 else np.swapaxes(meant, 0, 1).reshape(96, -1)
    np.testing.assert_allclose(got, x @ matrices, rtol=1e-5, atol=1e-3)


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", [kind for kind in FORMS if FORMS[kind].group])
@pytest.mark.parametrize("outputs, inputs, rows", [(600, 4096 + 96, 3), (64, 5120, 300)])
def test_a_large_matrix_in_tiles(kind, outputs, inputs, rows):
    """More rows, inputs and outputs than a tile of the TPU's kernel has, and inputs that fill no whole tiles."""
    weight, x = matrix(outputs, inputs), matrix(rows, inputs, 1)
    blocks = stored(weight, kind, panels=False)
    arrays = (jnp.asarray(x), blocks.codes, blocks.scale, blocks.offset)
    got = api.block_product(*arrays, implementation="mosaic_tpu", **interpreted("mosaic_tpu"))
    np.testing.assert_allclose(got, x.astype(np.float64) @ meant(weight, kind).T, atol=5e-5)


@pytest.mark.long
@pytest.mark.parametrize("panels", [(), (1,)])
def test_two_codes_in_a_byte_with_a_scale_for_each_output(panels):
    codes = jnp.full((*panels, GROUP, 64), 0x21, jnp.uint8)
    scale = jnp.ones((*panels, 1, 64), jnp.float16).view(jnp.int16)
    for dtype in (jnp.float32, jnp.float16):
        got = api.block_product(jnp.ones((1, 2 * GROUP), dtype), codes, scale)
        assert got.dtype == dtype and np.all(np.asarray(got) == 3 * GROUP)


def test_rows_of_floats_that_a_tpu_has_not():
    codes, scale = jnp.ones((2 * GROUP, 64), jnp.int8), jnp.ones((2, 64), jnp.float16).view(jnp.int16)
    rows = jnp.ones((1, 2 * GROUP), jnp.float16)
    assert np.all(np.asarray(api.block_product(rows, codes, scale)) == 2 * GROUP)
    with pytest.raises(NotImplementedError, match="float16: bfloat16 or float32"):
        api.block_product(rows, codes, scale, implementation="mosaic_tpu")


def test_scales_that_the_cpu_does_not_take():
    pytest.importorskip("numba")
    codes, scale = jnp.ones((1, 64, 64), jnp.int8), jnp.ones((1, 8, 64), jnp.int16)
    with pytest.raises(NotImplementedError, match="scales for 8 inputs"):
        api.block_product(jnp.ones((1, 64)), codes, scale, None, implementation="numba_cpu")


@pytest.mark.parametrize("implementation", list(api.OPERATION.kernels))
@pytest.mark.parametrize("scale", [1e-6, 3e-8, 1.0, 6e4])
def test_scales_of_every_size_are_read(implementation, scale):
    """These kernels decode 16 bits by hand: subnormal numbers, normal ones and the largest."""
    if implementation == "numba_cpu":
        pytest.importorskip("numba")
    codes = jnp.ones((2 * GROUP, 64), jnp.int8)
    each = jnp.full((2, 64), scale, jnp.float16).at[:, ::2].multiply(-1)
    bits = lax.bitcast_convert_type(each, jnp.int16)
    arrays = (codes[None], bits[None]) if implementation == "numba_cpu" else (codes, bits)
    rows = jnp.ones((1, 2 * GROUP))
    got = api.block_product(rows, *arrays, implementation=implementation, **interpreted(implementation))
    np.testing.assert_allclose(got[0], 2 * GROUP * np.asarray(each[0], np.float64), rtol=1e-6)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("panels", [False, True])
def test_a_stored_matrix_is_what_its_codes_mean(kind, panels):
    weight, x = matrix(128, 64), matrix(3, 64, 1)
    blocks, want = stored(weight, kind, panels), meant(weight, kind)
    np.testing.assert_allclose(plain(blocks), want.T, atol=1e-6)
    np.testing.assert_allclose(project(jnp.asarray(x), blocks), x @ want.T, atol=1e-5)
    table = blocks
    if not panels:  # a table lies as [V, M]
        found = {name: jnp.asarray(array) for name, array in as_held(quantised(weight, kind)).items()}
        table = Blocks(**found, dtype=jnp.dtype(jnp.float32))
        np.testing.assert_allclose(numbers(table.codes, table.scale, table.offset, axis=-1), want, atol=1e-6)
    np.testing.assert_allclose(lookup(table, jnp.array([[5, 77]])), want[[[5, 77]]], atol=1e-6)
    np.testing.assert_allclose(unembed(jnp.asarray(x), table), x @ want.T, atol=1e-5)


@pytest.fixture(scope="module", params=FORMS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(goldens, kind):
    return jaxkv.load(goldens / "tiny" / MODEL, weights=kind)


def generated(params, **options):
    return jaxkv.generate(
        params, TEXTS, policy=jaxkv.policy("h2o", budget=16), max_new_tokens=8, stop_tokens=(), **options
    )


def test_all_matrices_are_in_blocks(model, kind):
    leaves = jax.tree.leaves(model.weights, is_leaf=lambda leaf: isinstance(leaf, Blocks))
    blocks = [leaf for leaf in leaves if isinstance(leaf, Blocks)]
    assert len(blocks) == 4 * model.config.num_layers + (1 if model.config.tie_embeddings else 2)
    assert all(leaf.ndim == 1 for leaf in leaves if not isinstance(leaf, Blocks))
    assert model.dtype == jnp.float32
    count = sum(leaf.codes.size * 8 // FORMS[kind].bits for leaf in blocks)
    held = sum(array.nbytes for leaf in blocks for array in leaf.arrays.values())
    assert held <= count * {"int8": 1.07, "int8-g16": 9 / 8, "int4": 5 / 8}[kind]


@pytest.mark.long
def test_a_model_in_blocks_is_the_model_of_their_numbers(goldens, model):
    """The same tokens from the floats that the codes stand for."""
    floats = jaxkv.load(goldens / "tiny" / MODEL)
    filled = []
    for (path, leaf), (_, other) in zip(
        nnx.to_flat_state(model.weights), nnx.to_flat_state(floats.weights), strict=True
    ):
        value = leaf[...]
        if isinstance(value, Blocks):
            axis = -1 if str(path[-1]) == "embed" and other.ndim == 2 else -2
            value = numbers(value.codes, value.scale, value.offset, axis=axis)
        filled.append((path, other.replace(value)))
    want = generated(dataclasses.replace(floats, weights=nnx.from_flat_state(filled)))
    got = generated(model)
    assert got.tokens.tolist() == want.tokens.tolist()
    for mine, theirs in zip(got.cache.views, want.cache.views, strict=True):
        np.testing.assert_array_equal(mine.positions, theirs.positions)
    assert generated(model, scan_layers=True).tokens.tolist() == want.tokens.tolist()


@pytest.mark.long
def test_from_saved_weights_and_over_a_mesh(goldens, model, kind, tmp_path):
    source = goldens / "tiny" / MODEL
    jaxkv.save_weights(jaxkv.load(source), tmp_path / "saved")
    want = generated(model).tokens.tolist()
    again = jaxkv.load(tmp_path / "saved", weights=kind)
    for mine, theirs in zip(jax.tree.leaves(again.weights), jax.tree.leaves(model.weights), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    mesh = jaxkv.mesh(data=2, model=4)
    for folder in (source, tmp_path / "saved"):
        spread = jaxkv.load(folder, weights=kind, mesh=mesh)
        assert generated(spread).tokens.tolist() == want
    codes = spread.weights["layers"][0]["gate_up"][...].codes
    assert on_host(codes).shape == codes.shape and codes.sharding.shard_shape(codes.shape)[1] == codes.shape[1] // 4


def test_what_is_refused(goldens, model, tmp_path):
    with pytest.raises(BadValue, match="weights='int3': expected 'int8', 'int8-g16', 'int4', 'file', or None"):
        jaxkv.load(goldens / "tiny" / MODEL, weights="int3")
    with pytest.raises(BadValue, match="matrix of 80 inputs: expected a multiple of 32"):
        jaxkv.load(goldens / "tiny" / "llama3", weights="int4")
    with pytest.raises(BadValue, match="save them as floats"):
        jaxkv.save_weights(model, tmp_path / "there")
    assert not (tmp_path / "there").exists()
