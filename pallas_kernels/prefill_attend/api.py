"""prefill_attend: picks the implementation for where it runs."""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.dispatch import dispatch
from pallas_kernels.prefill_attend import reference, tpu


def _gpu(*args, **kwargs) -> Float[Array, "B Hq T D"]:
    from pallas_kernels.prefill_attend import gpu  # when called: not every jaxlib carries Mosaic GPU

    return gpu.prefill_attend(*args, **kwargs)


IMPLEMENTATIONS = {"tpu": tpu.prefill_attend, "gpu": _gpu, "reference": reference.prefill_attend}


def prefill_attend(*args, implementation: str | None = None, **kwargs) -> Any:
    """`reference.prefill_attend` by the fastest implementation that takes the arguments, or the named one."""
    return dispatch(IMPLEMENTATIONS, implementation, *args, **kwargs)
