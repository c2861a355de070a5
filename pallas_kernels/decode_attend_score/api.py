"""decode_attend_score: picks the implementation for where it runs."""

from pallas_kernels.decode_attend_score import reference
from pallas_kernels.dispatch import dispatch, imported

IMPLEMENTATIONS = {
    "tpu": imported("decode_attend_score.tpu", "decode_attend_score"),
    "gpu": imported("decode_attend_score.gpu", "decode_attend_score"),
    "reference": reference.decode_attend_score,
}


def decode_attend_score(*args, implementation: str | None = None, **kwargs) -> reference.Attended:
    """`reference.decode_attend_score` by the fastest implementation that takes the arguments, or the named one."""
    return dispatch(IMPLEMENTATIONS, implementation, *args, **kwargs)
