"""block_product in plain jnp: defines its meaning. On TPU and GPU XLA makes the numbers inside the product.

A matrix in blocks is `codes * scale + offset`. The codes have 8 bits (int8), or 4 (uint8, two in a byte: of every GROUP
inputs the first half in the low ones); each output, or every GROUP inputs of it, has a scale and perhaps an offset. In
8 bits every half of a GROUP may have them too. Scales and offsets are float16 numbers, given as the int16 of their
bits: kernels for TPU take no float16.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.codes import halves

GROUP = 32  # inputs that share a scale
AT_ONCE = 16  # panels whose numbers are made together
MANY_ROWS = 128  # above it one product of these panels is two to three times faster than one for each, on CPU


def numbers(
    codes: Shaped[Array, "..."], scale: Int[Array, "..."], offset: Int[Array, "..."] | None = None, axis: int = -2
) -> Float[Array, "..."]:
    """codes * scale + offset, float32; `axis` (from the end) is that of the inputs."""
    before, behind = codes.shape[:axis], codes.shape[axis:][1:]
    if codes.dtype == jnp.uint8:
        pairs = codes.reshape(*before, -1, GROUP // 2, *behind)
        codes = jnp.concatenate([pairs & 15, pairs >> 4], axis=axis).reshape(*before, -1, *behind)
    grouped = codes.reshape(*before, scale.shape[axis], -1, *behind)
    found = grouped.astype(jnp.float32) * jnp.expand_dims(halves(scale), axis)
    if offset is not None:
        found = found + jnp.expand_dims(halves(offset), axis)
    return found.reshape(*before, -1, *behind)


def block_product(
    rows: Float[Array, "N I"],
    codes: Shaped[Array, "..."],
    scale: Int[Array, "..."],
    offset: Int[Array, "..."] | None,
    *,
    out_dtype=None,
) -> Float[Array, "N O"]:
    """`rows @ (codes * scale + offset)`, in the dtype of the rows unless `out_dtype` says otherwise.

    The codes lie as a plain matrix `[I, O]` (4 bits: `[I / 2, O]`) with scales `[S, O]`, or as P panels of some outputs
    each, `[P, I, W]` and `[P, S, W]`; S is 1, I / GROUP or 2 I / GROUP.
    """
    dtype = jnp.dtype(out_dtype or rows.dtype)
    if scale.shape[-2] == 1 and offset is None and codes.dtype != jnp.uint8:  # a scale for each output: its sum's
        out = _product(rows, lambda codes: codes.astype(rows.dtype), codes)
        return (out * halves(scale).reshape(-1)).astype(dtype)
    arrays = (codes, scale) if offset is None else (codes, scale, offset)
    return _product(rows, lambda *arrays: numbers(*arrays).astype(rows.dtype), *arrays).astype(dtype)


def _product(rows: Float[Array, "N I"], made: Callable, *arrays: Shaped[Array, "..."]) -> Float[Array, "N O"]:
    """rows @ made(*arrays), float32; of panels only some are made at a time."""
    if arrays[0].ndim == 2:
        return jnp.matmul(rows, made(*arrays), preferred_element_type=jnp.float32)

    def some(*arrays):
        matrix = made(*arrays)
        if rows.shape[0] > MANY_ROWS:
            plain = jnp.swapaxes(matrix, 0, 1).reshape(matrix.shape[1], -1)
            return _in_panels(jnp.matmul(rows, plain, preferred_element_type=jnp.float32), matrix.shape[0])
        each = jnp.broadcast_to(rows, (matrix.shape[0], *rows.shape))  # a third faster than vmap's one product
        return lax.dot_general(each, matrix, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)

    count = arrays[0].shape[0]
    whole = count // AT_ONCE * AT_ONCE
    out = []
    if whole:
        first = [x[:whole].reshape(-1, AT_ONCE, *x.shape[1:]) for x in arrays]
        out.append(lax.map(lambda part: some(*part), first).reshape(whole, *rows.shape[:1], -1))
    if whole < count:
        out.append(some(*(x[whole:] for x in arrays)))
    return jnp.swapaxes(jnp.concatenate(out), 0, 1).reshape(rows.shape[0], -1)


def _in_panels(product: Float[Array, "N O"], panels: int) -> Float[Array, "P N W"]:
    return jnp.swapaxes(product.reshape(product.shape[0], panels, -1), 0, 1)
