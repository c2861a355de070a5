"""ragged_decode: picks the implementation for where it runs."""

from pallas_kernels.decode_attend_score.reference import Attended
from pallas_kernels.dispatch import dispatch
from pallas_kernels.ragged_decode import reference, tpu

IMPLEMENTATIONS = {"tpu": tpu.ragged_decode, "reference": reference.ragged_decode}


def ragged_decode(*args, implementation: str | None = None, **kwargs) -> Attended:
    """`reference.ragged_decode` by the fastest implementation that takes the arguments, or the named one."""
    return dispatch(IMPLEMENTATIONS, implementation, *args, **kwargs)
