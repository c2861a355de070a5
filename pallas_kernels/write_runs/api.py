"""write_runs: picks the implementation for where it runs."""

from typing import Any

from jaxtyping import Array, Bool, Shaped

from pallas_kernels.dispatch import Operation
from pallas_kernels.read_runs.reference import Run
from pallas_kernels.write_runs import reference

OPERATION = Operation("write_runs", reference.write_runs, {"mosaic_tpu": "tpu"})


def write_runs(
    active: Bool[Array, "B Hk"],
    news: tuple[Shaped[Array, "B Hk ..."], ...],
    *runs: Run,
    implementation: str | None = None,
    **how: Any,
) -> tuple[Shaped[Array, "B Hk ..."], ...]:
    """`reference.write_runs` by the fastest implementation that takes the arguments, or the named one; the reference
    where the name is another operation's."""
    return OPERATION(OPERATION.own(implementation), active, news, *runs, **how)
