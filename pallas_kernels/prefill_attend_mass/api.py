"""prefill_attend_mass: picks the implementation for where it runs."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.prefill_attend_mass import reference

OPERATION = Operation(
    "prefill_attend_mass",
    reference.prefill_attend_mass,
    {"mosaic_tpu": "tpu", "mosaic_gpu_sm90": "gpu"},
)


def prefill_attend_mass(*args, implementation: str | None = None, **kwargs) -> Float[Array, "B Hq S"]:
    """`reference.prefill_attend_mass` by the fastest implementation that takes the arguments, or the named one."""
    return OPERATION(implementation, *args, **kwargs)
