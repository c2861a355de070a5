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
    """Whether the mass is had faster with the log-sum-exps of the `looking` among so many queries, which attention to
    the same keys can give: on a CPU, where attention has them anyway, and on a TPU, where it has to write out those of
    all, if at least half of them look.
    """
    platform = jax.default_backend() if implementation is None else OPERATION.kernels.get(implementation)
    return platform == "cpu" or (platform == "tpu" and 2 * looking >= queries)
