"""block_product: picks the implementation for where it runs."""

from jaxtyping import Array, Float

from pallas_kernels.block_product import reference
from pallas_kernels.dispatch import dispatch, imported

IMPLEMENTATIONS = {"cpu": imported("block_product.cpu", "block_product"), "reference": reference.block_product}


def block_product(*args, implementation: str | None = None, **kwargs) -> Float[Array, "N O"]:
    """`reference.block_product` by the fastest implementation that takes the arguments, or the named one."""
    return dispatch(IMPLEMENTATIONS, implementation, *args, **kwargs)
