"""The GPU kernels against the reference: natively on a Hopper GPU, under the interpreter (with its race detection, and
uninitialised memory full of NaN) elsewhere, and lowered for CUDA everywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attend_score import reference
from pallas_kernels.decode_attend_score.victim import Rule

gpu = pytest.importorskip("pallas_kernels.decode_attend_score.gpu", reason="this jaxlib carries no Mosaic GPU")
plgpu = gpu.plgpu

NATIVE = jax.default_backend() == "gpu"
CLOSE = {"output": 8e-3, "lse": 1e-5, "mass": 2e-6}  # the output is rounded to 16 bits, the scores never

RULES = {  # rule, is there a weight, is there a bias, limit as a share of the slots, recents
    "longflow": (Rule("sum"), True, False, 1.0, 0),
    "longflow, each head": (Rule("each", sinks=4), True, False, 1.0, 3),
    "h2o": (Rule("each"), False, True, 1.0, 9),
    "tova, room left": (Rule("mean"), False, False, 2.0, 1),
    "adds": (None, False, False, 1.0, 0),
}


def inputs(batch, kv_heads, group, slots, dim, dtype="bfloat16", rule="longflow", seed=0):
    """Random arguments: three in ten slots empty and full of NaN, one row finished, the last one with nothing held."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    held = np.stack([rng.permutation(slots * 2)[:slots] for _ in range(batch * kv_heads)])
    held = held.reshape(batch, kv_heads, slots)
    held = np.where(rng.random(held.shape) < 0.3, -1, held)
    held[-1] = -1
    hollow = jnp.asarray(np.where(held < 0, np.nan, 1.0)[..., None], dtype)
    position = rng.integers(slots, 2 * slots, batch)
    position[0] = -1 if batch > 1 else position[0]
    chosen, *parts, share, recents = RULES[rule]
    parts = [
        jnp.asarray(rng.random(held.shape), jnp.float32) if part else float(i == 0) for i, part in enumerate(parts)
    ]
    arrays = (
        draw(batch, kv_heads * group, dim), draw(batch, kv_heads, dim), draw(batch, kv_heads, dim),
        jnp.asarray(position, jnp.int32), jnp.asarray(rng.integers(0, slots, (batch, kv_heads)), jnp.int32),
        draw(batch, kv_heads, slots, dim) * hollow, draw(batch, kv_heads, slots, dim) * hollow,
        jnp.asarray(held, jnp.int32), jnp.full(batch, int(slots * share), jnp.int32),
        jnp.full(batch, recents, jnp.int32), *parts,
    )  # fmt: skip
    return arrays, {"scale": dim**-0.5, "rule": chosen}


def run(implementation, arrays, **options):
    arrays, factors = arrays[:10], arrays[10:]
    if implementation is gpu and not NATIVE:
        # Where heads do not begin at a multiple of 8, what lies beside a head is read and thrown away, written or not.
        races = arrays[5].shape[2] % 8 == 0
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=races)
    return jax.jit(lambda *args: implementation.decode_attend_score(*args, *factors, **options))(*arrays)


def check(got, want):
    for name, tolerance in CLOSE.items():
        ours, theirs = (np.asarray(getattr(x, name), np.float32) for x in (got, want))
        np.testing.assert_allclose(ours, theirs, atol=tolerance, rtol=tolerance, err_msg=name)
    for name in ("keys", "values", "positions", "next_slot"):
        np.testing.assert_array_equal(*(np.asarray(getattr(x, name), np.float32) for x in (got, want)), err_msg=name)


CASES = {  # G, C, D, dtype, rule, more
    "one query head": (1, 64, 64, "bfloat16", "longflow, each head", {}),
    "D 80, window": (2, 200, 80, "float16", "h2o", {"window": 150}),
    "D 96, soft cap, odd slots": (5, 98, 96, "bfloat16", "tova, room left", {"softcap": 20.0, "group": "mean"}),
    "sixteen query heads, odd slots": (16, 134, 128, "bfloat16", "longflow", {"group": "max"}),
    "D 256": (9, 72, 256, "bfloat16", "adds", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    group, slots, dim, dtype, rule, more = CASES[name]
    arrays, options = inputs(2, 2, group, slots, dim, dtype, rule)
    check(run(gpu, arrays, **options, **more), run(reference, arrays, **options, **more))


def test_splits_where_one_sees_nothing():
    """A head's slots on several programs, all the held ones on the first."""
    arrays, options = inputs(1, 1, 4, 600, 128)
    plan = gpu._plan(1, 600, 128, 4, jnp.bfloat16, 1.0, None, None, True)
    assert plan.splits > 1
    arrays = list(arrays)
    arrays[5:8] = inputs(2, 1, 4, 600, 128)[0][5:8]
    first = plan.each * plan.block
    arrays[5:8] = [x[:1] for x in arrays[5:8]]
    hollow = (jnp.arange(600) >= first)[None, None]
    arrays[5:7] = [jnp.where(hollow[..., None], jnp.bfloat16(jnp.nan), x) for x in arrays[5:7]]
    arrays[7] = jnp.where(hollow, -1, arrays[7])
    arrays[4] = jnp.zeros((1, 1), jnp.int32)
    arrays[3] = jnp.full(1, 1300, jnp.int32)
    one = run(gpu, arrays, **options)
    check(one, run(reference, arrays, **options))
    again = run(gpu, arrays, **options)
    for ours, theirs in zip(one, again, strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_ties_go_to_the_older_token():
    """Equal keys get equal mass to the last bit, wherever their slots lie, so the oldest of them goes."""
    arrays, options = inputs(1, 1, 4, 152, 64)
    arrays = list(arrays)
    arrays[5] = jnp.ones_like(arrays[5])
    arrays[6] = jnp.ones_like(arrays[6])
    arrays[1] = jnp.ones_like(arrays[1])
    arrays[7] = jnp.asarray(np.random.default_rng(3).permutation(152)[None, None], jnp.int32)
    arrays[3], arrays[4] = jnp.full(1, 152, jnp.int32), jnp.full((1, 1), 7, jnp.int32)
    arrays[8], arrays[10:] = jnp.full(1, 152, jnp.int32), (1.0, 0.0)
    got = run(gpu, arrays, **options)
    assert len(np.unique(np.asarray(got.mass))) == 1
    assert int(got.positions[0, 0, got.next_slot[0, 0]]) == int(np.min(np.asarray(got.positions)))


@pytest.mark.parametrize("slots", [997, 1000])
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (80, 1), (96, 7), (128, 16), (256, 8)])
def test_lowers_for_cuda(dim, group, slots):
    """As far as a machine without a GPU goes: layouts are inferred and the kernel's module is built and verified."""
    arrays, options = inputs(2, 4, group, slots, dim)
    arrays, factors = arrays[:10], arrays[10:]
    step = functools.partial(gpu.decode_attend_score, **options, window=500, softcap=30.0)
    traced = jax.jit(lambda *args: step(*args, *factors), donate_argnums=(5, 6, 7)).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    call = next(line for line in text.splitlines() if "@mosaic_gpu" in line)
    for output, operand in ((3, 6), (4, 7)):  # K and V go in and out as the same buffers
        assert f"output_tuple_indices = [{output}], operand_index = {operand}" in call


@pytest.mark.parametrize("rows", [1, 2, 8, 60, 512, 2048])
@pytest.mark.parametrize("slots", [8, 64, 264, 2048, 32768])
def test_every_block_is_read_once(rows, slots):
    plan = gpu._plan(rows, slots, 128, 4, jnp.bfloat16, 1.0, None, None, True)
    starts = [split * plan.each for split in range(plan.splits)]
    counts = [min(plan.each, plan.blocks - start) for start in starts]
    assert sum(counts) == plan.blocks == -(-slots // plan.block)
    assert min(counts) > 0
    assert rows * plan.splits >= min(gpu.PROGRAMS * 0.85, rows * max(1, plan.blocks // 8))


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("float32", {"dtype": "float32"}),
        ("head dim 100", {"dim": 100}),
        ("1 x 63 slots", {"slots": 63}),
        ("head dim 320", {"dim": 320}),
        ("17 query heads", {"group": 17}),
    ],
)
def test_refuses_what_it_cannot_do(said, change):
    shape = {"batch": 1, "kv_heads": 1, "group": 2, "slots": 64, "dim": 64} | change
    arrays, options = inputs(**shape)
    with pytest.raises(NotImplementedError, match=said):
        run(gpu, arrays, **options)


def test_refuses_keys_turned_at_read_time():
    arrays, options = inputs(1, 1, 1, 64, 64)
    with pytest.raises(NotImplementedError, match="rotate"):
        run(gpu, arrays, **options, rotate=lambda q, k, p: (q, k))
