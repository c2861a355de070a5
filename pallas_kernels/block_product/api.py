"""block_product: picks the implementation for where it runs."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.block_product import reference
from pallas_kernels.dispatch import Operation

OPERATION = Operation(
    "block_product",
    reference.block_product,
    {"numba_cpu": "cpu", "mosaic_tpu": "tpu"},
)


def block_product(
    rows: Float[Array, "N I"],
    codes: Shaped[Array, "..."],
    scale: Int[Array, "..."],
    offset: Int[Array, "..."] | None = None,
    *,
    divided: bool = False,
    implementation: str | None = None,
    **kwargs,
) -> Float[Array, "N O"]:
    """`reference.block_product` by the fastest implementation that takes the arguments, or the named one.

    A plain matrix is multiplied by what is there for the platform that is compiled for. XLA divides no kernel over
    devices, so one that is `divided` over them is multiplied by the reference, and so are rows of other floats than a
    TPU has.
    """
    arrays = (rows, codes, scale, offset)
    if implementation is not None or codes.ndim == 3:
        return OPERATION(implementation, *arrays, **kwargs)
    if divided or scale.shape[0] == 1 or rows.dtype not in (jnp.bfloat16, jnp.float32):
        return reference.block_product(*arrays, **kwargs)

    def plain(name: str):
        return lambda *arrays: OPERATION(name, *arrays, **kwargs)

    return lax.platform_dependent(*arrays, tpu=plain("mosaic_tpu"), default=plain("reference"))
