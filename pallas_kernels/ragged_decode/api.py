"""ragged_decode: picks the implementation for where it runs."""

from pallas_kernels.decode_attend_score.reference import Attended
from pallas_kernels.dispatch import dispatch
from pallas_kernels.ragged_decode import reference, tpu


def _gpu(*args, **kwargs) -> Attended:
    from pallas_kernels.ragged_decode import gpu  # when called: not every jaxlib carries Mosaic GPU

    return gpu.ragged_decode(*args, **kwargs)


def _cpu(*args, **kwargs) -> Attended:
    try:
        from pallas_kernels.ragged_decode import cpu
    except ImportError as error:  # numba is not everywhere
        raise NotImplementedError(str(error)) from error
    return cpu.ragged_decode(*args, **kwargs)


IMPLEMENTATIONS = {"tpu": tpu.ragged_decode, "gpu": _gpu, "cpu": _cpu, "reference": reference.ragged_decode}


def ragged_decode(*args, implementation: str | None = None, **kwargs) -> Attended:
    """`reference.ragged_decode` by the fastest implementation that takes the arguments, or the named one."""
    return dispatch(IMPLEMENTATIONS, implementation, *args, **kwargs)
