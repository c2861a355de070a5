"""ragged_decode: picks the implementation for where it runs."""

from pallas_kernels.decode_attend_score.reference import Attended
from pallas_kernels.dispatch import dispatch, imported
from pallas_kernels.ragged_decode import reference

IMPLEMENTATIONS = {
    "tpu": imported("ragged_decode.tpu", "ragged_decode"),
    "gpu": imported("ragged_decode.gpu", "ragged_decode"),
    "cpu": imported("ragged_decode.cpu", "ragged_decode"),
    "reference": reference.ragged_decode,
}


def ragged_decode(*args, implementation: str | None = None, **kwargs) -> Attended:
    """`reference.ragged_decode` by the fastest implementation that takes the arguments, or the named one."""
    return dispatch(IMPLEMENTATIONS, implementation, *args, **kwargs)
