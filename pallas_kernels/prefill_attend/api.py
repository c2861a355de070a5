"""prefill_attend: picks the implementation for where it runs."""

from typing import Any

from pallas_kernels.dispatch import Operation
from pallas_kernels.prefill_attend import reference

OPERATION = Operation(
    "prefill_attend",
    reference.prefill_attend,
    {"mosaic_tpu": "tpu", "mosaic_gpu_sm90": "gpu", "numba_cpu": "cpu"},
)


def prefill_attend(*args, implementation: str | None = None, **kwargs) -> Any:
    """`reference.prefill_attend` by the fastest implementation that takes the arguments, or the named one."""
    return OPERATION(implementation, *args, **kwargs)
