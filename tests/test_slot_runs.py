"""Runs of slots, read and written: the TPU kernels against the reference, and the reference against loops in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.read_runs import by_pieces, read_runs
from pallas_kernels.read_runs.reference import Run
from pallas_kernels.write_runs import write_runs
from tests.test_kernels import HOW

KERNEL = HOW["mosaic_tpu"] | {"implementation": "mosaic_tpu"}
if KERNEL.get("interpret"):
    KERNEL["interpret"] = dataclasses.replace(KERNEL["interpret"], out_of_bounds_reads="raise")
# slots, how many of them are a run, bytes of a slot, channels of what a run has in common
SHAPES = [(300, 32, 32, 128), (70, 8, 16, 64), (1000, 128, 128, 128), (24, 32, 32, 64), (40, 1, 64, 128)]
BATCH, HEADS = 3, 2


def case(slots, run, width, channels, arrays=2):
    """Arrays over slots and over runs, the runs and what is new in them. Not all heads are active."""
    rng = np.random.default_rng(slots)
    codes = rng.integers(0, 255, (BATCH, HEADS, slots, width)).astype(np.uint8)
    scales = rng.integers(-3000, 3000, (BATCH, HEADS, -(-slots // run), channels)).astype(np.int16)
    slot = rng.integers(0, slots, (BATCH, HEADS)).astype(np.int32)
    slot[2] = slots - 1
    runs = (
        Run(jnp.asarray(codes), jnp.asarray(slot // run * run), run),
        Run(jnp.asarray(scales), jnp.asarray(slot // run), 1),
    )
    news = (
        rng.integers(0, 255, (BATCH, HEADS, run, width)).astype(np.uint8),
        rng.integers(-99, 99, (BATCH, HEADS, 1, channels)).astype(np.int16),
    )
    return (
        runs[:arrays],
        tuple(map(jnp.asarray, news[:arrays])),
        jnp.asarray([[True, True], [False, False], [True, False]]),
    )


def called(function, runs, *before, **how):
    """The function under jit: the sizes of runs are no arrays."""
    sizes = [run.size for run in runs]

    def call(arrays, firsts, *before):
        return function(*before, *map(Run, arrays, firsts, sizes), **how)

    return jax.jit(call)([run.array for run in runs], [run.first for run in runs], *before)


@pytest.mark.some(4)
@pytest.mark.parametrize("how", [{"implementation": "reference"}, KERNEL], ids=["reference", "mosaic_tpu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_runs_are_read_and_written(shape, how):
    runs, news, active = case(*shape)
    found, after = called(read_runs, runs, **how), called(write_runs, runs, active, news, **how)
    for run, new, one, whole in zip(runs, news, found, after, strict=True):
        expected = np.array(run.array)
        for row, head in np.ndindex(BATCH, HEADS):
            first = int(run.first[row, head])
            there = expected[row, head, first : first + run.size].copy()
            assert np.array_equal(np.asarray(one)[row, head, : len(there)], there)
            if active[row, head]:
                expected[row, head, first : first + run.size] = np.asarray(new)[row, head, : len(there)]
        assert np.array_equal(np.asarray(whole), expected)


@pytest.mark.parametrize("shape", [(136, 128, 128, 128), (520, 256, 32, 64)], ids=str)
def test_the_last_of_long_runs_ends_behind_what_memory_has(shape):
    """With the slots along the sublanes, and along the lanes."""
    test_runs_are_read_and_written(shape, KERNEL)


def test_a_run_of_one_array_and_rows_a_few_at_a_time(monkeypatch):
    two_rows = 2 * HEADS * 32 * 128  # bytes of pieces on the chip, so that the last row is alone
    monkeypatch.setattr("pallas_kernels.tpu_runs.CHIP_BYTES", two_rows)
    runs, news, active = case(320, 32, 32, 128, arrays=1)
    reference = {"implementation": "reference"}
    for function, before in ((read_runs, ()), (write_runs, (active, news))):
        (got,), (expected,) = (called(function, runs, *before, **how) for how in (KERNEL, reference))
        assert np.array_equal(got, expected)


def test_what_is_not_read_in_pieces():
    runs, *_ = case(300, 12, 32, 128)
    with pytest.raises(NotImplementedError, match="runs of 12 slots: a divisor or a multiple of 128"):
        read_runs(*runs, **KERNEL)
    half = Run(jnp.zeros((1, 1, 8, 8), jnp.float16), jnp.zeros((1, 1), jnp.int32), 1)
    with pytest.raises(NotImplementedError, match="float16"):
        read_runs(half, **KERNEL)
    assert by_pieces("mosaic_tpu") and not by_pieces("numba_cpu") and not by_pieces("reference")
    assert by_pieces(None) == (jax.default_backend() == "tpu")
    (same,) = read_runs(half, implementation="numba_cpu")  # another operation's name
    assert same.shape == (1, 1, 1, 8)
