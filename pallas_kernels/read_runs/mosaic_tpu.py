"""read_runs for TPU: the piece of memory around each run, where it lies."""

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_runs
from pallas_kernels.read_runs.reference import Run


def read_runs(*runs: Run, interpret: bool | pltpu.InterpretParams = False) -> tuple[jax.Array, ...]:
    """`reference.read_runs` without a gather, for which XLA would lay the arrays out anew.

    Raises `NotImplementedError` for what `tpu_runs.Piece` does not take.
    """
    return tpu_runs.read(tpu_runs.pieces(runs), runs, interpret)
