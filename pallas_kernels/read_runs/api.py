"""read_runs: picks the implementation for where it runs."""

from typing import Any

import jax
from jaxtyping import Array, Shaped

from pallas_kernels.dispatch import Operation
from pallas_kernels.read_runs import reference

OPERATION = Operation("read_runs", reference.read_runs, {"mosaic_tpu": "tpu"})


def read_runs(
    *runs: reference.Run, implementation: str | None = None, **how: Any
) -> tuple[Shaped[Array, "B Hk ..."], ...]:
    """`reference.read_runs` by the fastest implementation that takes the arguments, or the named one; the reference
    where the name is another operation's."""
    return OPERATION(OPERATION.own(implementation), *runs, **how)


def by_pieces(implementation: str | None) -> bool:
    """Whether runs are copied in pieces of memory, where they lie: any other slots are gathered, for which XLA lays the
    array out anew."""
    here = OPERATION.kernels.get(implementation) if implementation else jax.default_backend()
    return here in OPERATION.kernels.values()
