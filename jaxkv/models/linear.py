"""The one place that knows how weight matrices lie in memory.

Plain: `[in, out]`. Panels: `[out / 64, in, 64]`, strips of 64 outputs that are contiguous, because XLA's CPU dot walks
a plain matrix in such strips with a stride of a whole row; measured 1.4 to 2 times faster for 2 to 16 rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

PANEL = 64
LARGE_PAGE = 2**21  # bytes
ASKED_FOR = 2**22  # bytes from which NumPy asks the kernel for large pages
MANY_ROWS = 128  # above it arithmetic is the bound, and one matrix product is faster than one per panel


def prefers_panels() -> bool:
    """Whether weights are stored as panels on the default backend: on CPU only."""
    return jax.default_backend() == "cpu"


def packed_shape(rows: int, columns: int, panels: bool) -> tuple[int, ...]:
    """The stored shape of an `[in, out]` matrix; plain where the outputs don't fill panels."""
    return (columns // PANEL, rows, PANEL) if panels and columns % PANEL == 0 else (rows, columns)


def packed(weight: np.ndarray, panels: bool) -> np.ndarray:
    """The stored form of a matrix given as `[out, in]`, the way files hold it."""
    columns, rows = weight.shape
    shape = packed_shape(rows, columns, panels)
    if len(shape) == 3:
        weight = weight.reshape(columns // PANEL, PANEL, rows)
    return np.ascontiguousarray(np.swapaxes(weight, -1, -2))


def on_large_pages(array: np.ndarray) -> np.ndarray:
    """The values in memory that is made of large pages, as far as the kernel has some; jax on CPU takes it as it is.

    All weights are read for every token: 4 to 6 % faster so. Arrays of less than half a large page stay as they are.
    """
    if array.nbytes < LARGE_PAGE // 2:
        return array
    memory = np.empty(max(array.nbytes + LARGE_PAGE, ASKED_FOR), np.uint8)
    start = -memory.ctypes.data % LARGE_PAGE
    placed = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[...] = array
    return placed


def settled(weight: np.ndarray) -> jax.Array:
    """The weight on the one device, on a CPU on large pages."""
    return jax.device_put(on_large_pages(weight) if jax.default_backend() == "cpu" else weight)


def project(x: Float[Array, "*lead I"], weight: Float[Array, "..."], out_dtype: Any = None) -> Float[Array, "*lead O"]:
    """`x @ weight` for a stored matrix, in the dtype of both unless `out_dtype` says otherwise."""
    dtype = jnp.dtype(out_dtype or x.dtype)
    if weight.ndim == 2:
        return jnp.matmul(x, weight, preferred_element_type=dtype)
    panels, inner, width = weight.shape
    rows = x.reshape(-1, inner)
    if rows.shape[0] > MANY_ROWS:
        # the barrier has the plain matrix made where it is used; without, XLA makes all of them ahead and holds them
        x, weight = lax.optimization_barrier((x, weight))
        plain = jnp.swapaxes(weight, 0, 1).reshape(inner, panels * width)
        return jnp.matmul(x, plain, preferred_element_type=dtype)
    each = jnp.broadcast_to(rows, (panels, *rows.shape))
    out = lax.dot_general(each, weight, (((2,), (1,)), ((0,), (0,))), preferred_element_type=dtype)
    return jnp.swapaxes(out, 0, 1).reshape(*x.shape[:-1], panels * width)


def plain(weight: Float[Array, "..."]) -> Float[Array, "I O"]:
    """A stored matrix as `[in, out]`."""
    return weight if weight.ndim == 2 else jnp.swapaxes(weight, 0, 1).reshape(weight.shape[1], -1)


def packed_table(table: np.ndarray, panels: bool) -> np.ndarray:
    """The stored form of an embedding table `[V, M]` that is also the output matrix: itself, or as panels."""
    return packed(table, True) if panels and table.shape[0] % PANEL == 0 else np.ascontiguousarray(table)


def lookup(table: Float[Array, "..."], tokens: Int[Array, "*lead"]) -> Float[Array, "*lead M"]:
    """The tokens' rows of an embedding table `[V, M]`, or of one stored as panels."""
    return table[tokens] if table.ndim == 2 else table[tokens // PANEL, :, tokens % PANEL]


def unembed(x: Float[Array, "*lead M"], table: Float[Array, "..."], out_dtype: Any = None) -> Float[Array, "*lead V"]:
    """`x @ table.T` for an embedding table `[V, M]`, or for one stored as panels."""
    if table.ndim == 3:
        return project(x, table, out_dtype)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, table, contract, preferred_element_type=jnp.dtype(out_dtype or x.dtype))
