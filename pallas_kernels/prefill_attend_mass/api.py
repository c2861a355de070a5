"""prefill_attend_mass: picks the implementation for where it runs."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import dispatch
from pallas_kernels.prefill_attend_mass import reference, tpu


def _gpu(*args, **kwargs) -> Float[Array, "B Hq S"]:
    from pallas_kernels.prefill_attend_mass import gpu  # when called: not every jaxlib carries Mosaic GPU

    return gpu.prefill_attend_mass(*args, **kwargs)


IMPLEMENTATIONS = {"tpu": tpu.prefill_attend_mass, "gpu": _gpu, "reference": reference.prefill_attend_mass}


def prefill_attend_mass(*args, implementation: str | None = None, **kwargs) -> Float[Array, "B Hq S"]:
    """`reference.prefill_attend_mass` by the fastest implementation that takes the arguments, or the named one."""
    return dispatch(IMPLEMENTATIONS, implementation, *args, **kwargs)
