"""A second tier while tokens are written: its codes are read where they lie, by the kernels too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.sharding import attention
from jaxkv.sharding.layout import Layout
from jaxkv.store import tier
from jaxkv.store.balance import middle, reach
from jaxkv.store.codecs import Codecs
from jaxkv.store.entries import Entries
from jaxkv.store.floats import Fp8
from jaxkv.store.higgs import Higgs
from jaxkv.store.integers import Int
from pallas_kernels.decode_attend_score import api
from tests.test_tpu_compile import NAMES_ONLY, made_of, on

CODECS = {
    "4 bits": Codecs(Int(4), Int(4)),
    "turned": Codecs(Int(4, channels=32, hadamard=True), Int(8, symmetric=True)),
    "fp8": Codecs(Fp8(), Int(2)),
    "plain": Codecs(),
    "no numbers": Codecs(Higgs(4), Int(4)),
}
BALANCES = {"none": (False, False, False), "channels": (True, True, False), "ranges": (True, False, True)}
ROWS, HEADS, GROUP, SLOTS, DIM = 3, 2, 3, 24, 64


def tiered(codecs, balance):
    """A tier of three rows, the second holding nothing, with a channel of keys far from 0."""
    rng = np.random.default_rng(1)
    keys, values = (rng.standard_normal((ROWS, HEADS, SLOTS, DIM)) for _ in range(2))
    keys[..., 5] += 40
    positions = np.where(rng.random((ROWS, HEADS, SLOTS)) < 0.7, np.arange(SLOTS), -1)
    positions[1] = -1
    return _held(codecs, balance, *(x.astype(np.float32) for x in (keys, values)), positions.astype(np.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _held(codecs, balance, keys, values, at):
    of_keys, of_values, centred = BALANCES[balance]
    held = tier.empty(
        ROWS, HEADS, SLOTS, DIM, jnp.dtype("float32"), codecs, balanced=(of_keys, of_values), centred=centred
    )
    there, rows = at >= 0, jnp.ones(ROWS, bool)
    if held.keys is not None:
        centre = middle(keys, there) if centred else jnp.zeros((ROWS, HEADS, DIM))
        held = dataclasses.replace(held, keys=held.keys.choosing(1 / reach(keys, there, centre), rows, centre))
    if held.values is not None:
        factor = 1 / reach(values, there, jnp.zeros((ROWS, HEADS, DIM)))
        held = dataclasses.replace(held, values=held.values.choosing(factor, rows))
    return held.with_many(Entries(keys, values, at, {}))


def asked(held, softcap=None):
    """A step of one token, of which the last row has finished; and the same as a block of one."""
    query = jnp.asarray(np.random.default_rng(2).standard_normal((ROWS, HEADS * GROUP, DIM)), jnp.float32)
    position = jnp.asarray([SLOTS, SLOTS, -1], jnp.int32)
    softmax = {"scale": 0.125, "softcap": softcap}

    @jax.jit  # anew for each call, whose kernel may be another
    def both(held):
        step = held.step(Layout(None), query, position, None, **softmax)
        return *step, held.attend(query[:, :, None], position[:, None], **softmax).now()

    return both(held)


def assert_same(part, after, block, held):
    """The parts agree within rounding, and no code has changed."""
    np.testing.assert_allclose(part.lse, block.lse, atol=2e-4, rtol=2e-5)
    np.testing.assert_allclose(part.output, block.output, atol=2e-4)
    for mine, before in zip(*map(jax.tree.leaves, (after, held)), strict=True):
        assert np.array_equal(mine, before)


@pytest.mark.some(6)
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("codecs", CODECS)
def test_a_step_is_a_block_of_one(codecs, balance, softcap):
    """And no code changes."""
    held = tiered(CODECS[codecs], balance)
    part, after, block = asked(held, softcap)
    assert_same(part, after, block, held)
    assert np.isneginf(np.asarray(part.lse)[1:]).all() and not np.asarray(part.output)[1:].any()


@pytest.mark.parametrize("codecs, balance", [("4 bits", "ranges"), ("turned", "channels"), ("fp8", "none")])
def test_the_kernel_reads_a_tier(codecs, balance, monkeypatch):
    """Under the interpreter of TPU kernels."""
    held = tiered(CODECS[codecs], balance)
    _, _, block = asked(held)
    interpreted = functools.partial(api.decode_attend_score, interpret=True)

    def kernel(*args, **how):
        return interpreted(*args, **(how | {"implementation": "mosaic_tpu"}))

    monkeypatch.setattr(attention.decode_kernel, "decode_attend_score", kernel)
    part, after, _ = asked(held)
    assert_same(part, after, block, held)


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"context": 8}, {"data": 2, "model": 2, "context": 2}], ids=str)
def test_codes_on_a_mesh(goldens, axes):
    """Tiers and balanced codes, keys and values, say there what they say on one device."""
    folder, mesh = goldens / "tiny" / "qwen2", jaxkv.mesh(**axes)
    one, many = jaxkv.load(folder), jaxkv.load(folder, mesh=mesh)
    rows = [np.random.default_rng(n).integers(0, 100, n).astype(np.int32) for n in (45, 30)]
    balanced = {"keys": {"kind": "int-balanced", "bits": 8}, "values": {"kind": "int-balanced", "bits": 8}}
    for name, more in (("tiered-h2o", {"slots": 16}), ("h2o", {"store": balanced})):
        chosen = jaxkv.policy(name, budget=16, block=20, **more)
        said = [
            jaxkv.generate(params, rows, policy=chosen, max_new_tokens=12, stop_tokens=()).tokens.tolist()
            for params in (one, many)
        ]
        assert said[0] == said[1], name


def test_no_number_of_a_tier_is_in_memory(unchecked):
    """As TPU's compiler makes it: the kernel has the codes, where they lie, and nothing has them decoded."""
    batch, kv_heads, group, slots, dim = 8, 8, 4, 2560, 128
    codecs = CODECS["4 bits"]
    make = functools.partial(tier.empty, balanced=(True, False), centred=True)
    held = jax.eval_shape(lambda: make(batch, kv_heads, slots, dim, jnp.bfloat16, codecs))
    query = jax.ShapeDtypeStruct((batch, kv_heads * group, dim), jnp.bfloat16)
    position = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def step(held, query, position):
        return held.step(Layout(None), query, position, "mosaic_tpu", scale=0.1, softcap=None)

    text = jax.jit(step, donate_argnums=0).lower(*on("v5e", (held, query, position))).compile().as_text()
    codes = held.entries.keys.codes.shape
    for shape in (codes, (*codes[:-1], dim)):
        assert made_of(shape, text) <= NAMES_ONLY, shape
