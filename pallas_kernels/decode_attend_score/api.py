"""decode_attend_score: picks the implementation for where it runs."""

from pallas_kernels.decode_attend_score import reference, tpu
from pallas_kernels.dispatch import dispatch


def _gpu(*args, **kwargs) -> reference.Attended:
    from pallas_kernels.decode_attend_score import gpu  # when called: not every jaxlib carries Mosaic GPU

    return gpu.decode_attend_score(*args, **kwargs)


IMPLEMENTATIONS = {"tpu": tpu.decode_attend_score, "gpu": _gpu, "reference": reference.decode_attend_score}


def decode_attend_score(*args, implementation: str | None = None, **kwargs) -> reference.Attended:
    """`reference.decode_attend_score` by the fastest implementation that takes the arguments, or the named one."""
    return dispatch(IMPLEMENTATIONS, implementation, *args, **kwargs)
