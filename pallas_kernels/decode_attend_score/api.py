"""decode_attend_score: picks the implementation for where it runs."""

from pallas_kernels.decode_attend_score import reference, tpu
from pallas_kernels.dispatch import dispatch

IMPLEMENTATIONS = {"tpu": tpu.decode_attend_score, "reference": reference.decode_attend_score}


def decode_attend_score(*args, implementation: str | None = None, **kwargs) -> reference.Attended:
    """`reference.decode_attend_score` by the fastest implementation that takes the arguments, or the named one."""
    return dispatch(IMPLEMENTATIONS, implementation, *args, **kwargs)
