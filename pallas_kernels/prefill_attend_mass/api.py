"""prefill_attend_mass: picks the implementation for where it runs."""

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.prefill_attend_mass import reference

OPERATION = Operation(
    "prefill_attend_mass",
    reference.prefill_attend_mass,
    {"mosaic_tpu": "tpu", "mosaic_gpu_sm90": "gpu", "numba_cpu": "cpu"},
)


def prefill_attend_mass(*args, implementation: str | None = None, **kwargs) -> Float[Array, "B Hq S"]:
    """`reference.prefill_attend_mass` by the fastest implementation that takes the arguments, or the named one."""
    return OPERATION(implementation, *args, **kwargs)


def spared_by_lse(looking: int, queries: int, implementation: str | None = None) -> bool:
    """Whether the mass is had faster with the log-sum-exps that attention to the same keys gives on the way: under the
    kernels for CPUs and TPUs, where at least half of the block's queries look. Those of a few are found sooner than
    those of all are written out.
    """
    platform = jax.default_backend() if implementation is None else OPERATION.kernels.get(implementation)
    return platform in ("cpu", "tpu") and 2 * looking >= queries
