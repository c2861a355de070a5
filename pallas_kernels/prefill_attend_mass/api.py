"""prefill_attend_mass: picks the implementation for where it runs."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import dispatch, imported
from pallas_kernels.prefill_attend_mass import reference

IMPLEMENTATIONS = {
    "tpu": imported("prefill_attend_mass.tpu", "prefill_attend_mass"),
    "gpu": imported("prefill_attend_mass.gpu", "prefill_attend_mass"),
    "reference": reference.prefill_attend_mass,
}


def prefill_attend_mass(*args, implementation: str | None = None, **kwargs) -> Float[Array, "B Hq S"]:
    """`reference.prefill_attend_mass` by the fastest implementation that takes the arguments, or the named one."""
    return dispatch(IMPLEMENTATIONS, implementation, *args, **kwargs)
