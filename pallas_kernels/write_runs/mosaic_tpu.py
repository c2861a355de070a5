"""write_runs for TPU: the piece of memory around each run is read, changed and sent back to where it lies."""

from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Shaped

from pallas_kernels import tpu_runs
from pallas_kernels.read_runs.reference import Run


def write_runs(
    active: Bool[Array, "B Hk"],
    news: tuple[Shaped[Array, "B Hk ..."], ...],
    *runs: Run,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Shaped[Array, "B Hk ..."], ...]:
    """`reference.write_runs` without a scatter, for which XLA would lay the arrays out anew, and back.

    Raises `NotImplementedError` for what `tpu_runs.Piece` does not take.
    """
    return tpu_runs.write(tpu_runs.pieces(runs), active, news, runs, interpret)
