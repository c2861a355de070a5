"""prefill_attend: picks the implementation for where it runs."""

from typing import Any

from pallas_kernels.dispatch import dispatch, imported
from pallas_kernels.prefill_attend import reference

IMPLEMENTATIONS = {
    "tpu": imported("prefill_attend.tpu", "prefill_attend"),
    "gpu": imported("prefill_attend.gpu", "prefill_attend"),
    "reference": reference.prefill_attend,
}


def prefill_attend(*args, implementation: str | None = None, **kwargs) -> Any:
    """`reference.prefill_attend` by the fastest implementation that takes the arguments, or the named one."""
    return dispatch(IMPLEMENTATIONS, implementation, *args, **kwargs)
