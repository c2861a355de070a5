"""The one place that knows how weight matrices lie in memory.

Plain: `[in, out]`. Panels: `[out / 64, in, 64]`, strips of 64 outputs that are contiguous, because XLA's CPU dot walks
a plain matrix in such strips with a stride of a whole row; measured 1.4 to 2 times faster for 2 to 16 rows. Either may
be in blocks of 8 or 4 bits.
"""

import dataclasses
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxkv.errors import BadValue
from pallas_kernels.block_product import block_product
from pallas_kernels.block_product.reference import GROUP, numbers
from pallas_kernels.codes import halves

PANEL = 64
LARGE_PAGE = 2**21  # bytes
ASKED_FOR = 2**22  # bytes from which NumPy asks the kernel for large pages
MANY_ROWS = 128  # above it arithmetic is the bound, and one matrix product is faster than one per panel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A matrix in 8 or 4 bits: `codes * scale + offset`, with a float16 scale (and offset, or None) for each output, or
    for every 32 or 16 inputs of it, held as the int16 of their bits; in the `dtype` of what is computed with it.

    Each array lies as a matrix of floats would: plain or in panels; of an embedding table `[V, M]` as the table.
    `divided` says whether they lie over several devices.
    """

    codes: Any
    scale: Any
    dtype: Any = dataclasses.field(metadata={"static": True})
    offset: Any = None
    divided: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def placed(cls, arrays: dict[str, Any], dtype: Any) -> "Blocks":
        """The matrix of arrays that lie on devices."""
        return cls(**arrays, dtype=dtype, divided=len(arrays["codes"].sharding.device_set) > 1)

    def __getitem__(self, everything: EllipsisType) -> "Blocks":
        """Itself, as `weight[...]` gives an array."""
        return self

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays that there are, by name."""
        named = {"codes": self.codes, "scale": self.scale, "offset": self.offset}
        return {name: array for name, array in named.items() if array is not None}


class Form(NamedTuple):
    """A kind of blocks: the bits of a code (8 or 4), how many inputs share a scale (None: all), whether offsets are."""

    bits: int
    group: int | None
    offset: bool


FORMS = {"int8": Form(8, None, False), "int8-g16": Form(8, 16, False), "int4": Form(4, GROUP, True)}


def in_blocks(leaf: Any, form: Form, axis: int) -> Blocks:
    """The shapes of a matrix's arrays in blocks; `axis` is its inputs'. Raises `BadValue` where they don't fit."""
    each, group = 8 // form.bits, form.group

    def shape(size: int, dtype: Any) -> jax.ShapeDtypeStruct:
        sizes = list(leaf.shape)
        sizes[axis] = size
        return jax.ShapeDtypeStruct(tuple(sizes), dtype)

    inputs = leaf.shape[axis]
    if inputs % (group or 1):
        raise BadValue(f"{form.bits} bits for a matrix of {inputs} inputs: expected a multiple of {group}; use 'int8'")
    scale = shape(1 if group is None else inputs // group, jnp.int16)
    codes = shape(inputs // each, jnp.int8 if each == 1 else jnp.uint8)
    return Blocks(codes, scale, leaf.dtype, scale if form.offset else None)


def quantised(weight: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """The codes, and scales and offsets in float16, for a matrix `[out, in]`, by name, each `[out, ...]`.

    "int8": an output's largest magnitude becomes 127; "int8-g16": that of each 16 of its inputs. "int4": of 32 inputs
    the least becomes 0 and the largest 15.
    """
    form, tiny = FORMS[kind], np.finfo(np.float16).smallest_subnormal
    grouped = weight.astype(np.float32, copy=False).reshape(len(weight), -1, form.group or weight.shape[1])
    if form.bits == 8:
        scale = np.maximum((np.abs(grouped).max(axis=2) / 127).astype(np.float16), tiny)
        codes = np.rint(np.clip(grouped / scale[..., None].astype(np.float32), -127, 127)).astype(np.int8)
        return {"codes": codes.reshape(weight.shape), "scale": scale}
    least = grouped.min(axis=2).astype(np.float16)
    offset = least.astype(np.float32)
    scale = np.maximum(((grouped.max(axis=2) - offset) / 15).astype(np.float16), tiny)
    steps = (grouped - offset[..., None]) / scale[..., None].astype(np.float32)
    codes = np.rint(np.clip(steps, 0, 15)).astype(np.uint8)
    pairs = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    return {"codes": pairs.reshape(len(weight), -1), "scale": scale, "offset": least}


def as_held(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays as `Blocks` hold them: float16 numbers as the int16 of their bits."""
    return {name: array.view(np.int16) if array.dtype == np.float16 else array for name, array in arrays.items()}


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


def project(
    x: Float[Array, "*lead I"], weight: Float[Array, "..."] | Blocks, out_dtype: Any = None
) -> Float[Array, "*lead O"]:
    """`x @ weight` for a stored matrix, in the dtype of both unless `out_dtype` says otherwise."""
    dtype = jnp.dtype(out_dtype or x.dtype)
    if isinstance(weight, Blocks):
        arrays = (weight.codes, weight.scale, weight.offset)
        out = block_product(x.reshape(-1, x.shape[-1]), *arrays, divided=weight.divided, out_dtype=dtype)
        return out.reshape(*x.shape[:-1], out.shape[-1])
    if weight.ndim == 2:
        return jnp.matmul(x, weight, preferred_element_type=dtype)
    panels, inner, width = weight.shape
    rows = x.reshape(-1, inner)
    if rows.shape[0] > MANY_ROWS:
        # the barrier has the plain matrix made where it is used; without, XLA makes all of them ahead and holds them
        x, own = lax.optimization_barrier((x, jnp.asarray(weight)))
        return jnp.matmul(x, _plain(own), preferred_element_type=dtype)
    each = jnp.broadcast_to(rows, (panels, *rows.shape))
    out = lax.dot_general(each, weight, (((2,), (1,)), ((0,), (0,))), preferred_element_type=dtype)
    return jnp.swapaxes(out, 0, 1).reshape(*x.shape[:-1], panels * width)


def plain(weight: Float[Array, "..."] | Blocks) -> Float[Array, "I O"]:
    """A stored matrix as `[in, out]` of floats."""
    if isinstance(weight, Blocks):
        return _plain(numbers(weight.codes, weight.scale, weight.offset)).astype(weight.dtype)
    return _plain(weight)


def _plain(weight: Shaped[Array, "..."]) -> Shaped[Array, "I O"]:
    return weight if weight.ndim == 2 else jnp.swapaxes(weight, 0, 1).reshape(weight.shape[1], -1)


def packed_table(table: np.ndarray, panels: bool) -> np.ndarray:
    """The stored form of an embedding table `[V, M]` that is also the output matrix: itself, or as panels."""
    return packed(table, True) if panels and table.shape[0] % PANEL == 0 else np.ascontiguousarray(table)


def lookup(table: Float[Array, "..."] | Blocks, tokens: Int[Array, "*lead"]) -> Float[Array, "*lead M"]:
    """The tokens' rows of an embedding table `[V, M]`, or of one stored as panels."""
    if isinstance(table, Blocks):
        rows = {name: _lookup(array, tokens) for name, array in table.arrays.items()}
        return numbers(**rows, axis=-1).astype(table.dtype)
    return _lookup(table, tokens)


def _lookup(table: Shaped[Array, "..."], tokens: Int[Array, "*lead"]) -> Shaped[Array, "*lead M"]:
    return table[tokens] if table.ndim == 2 else table[tokens // PANEL, :, tokens % PANEL]


def unembed(
    x: Float[Array, "*lead M"], table: Float[Array, "..."] | Blocks, out_dtype: Any = None
) -> Float[Array, "*lead V"]:
    """`x @ table.T` for an embedding table `[V, M]`, or for one stored as panels."""
    if isinstance(table, Blocks):
        if table.codes.ndim == 3:
            return project(x, table, out_dtype)
        if table.scale.shape[1] == 1 and table.offset is None:
            found = unembed(x, table.codes.astype(x.dtype), jnp.float32) * halves(table.scale[:, 0])
            return found.astype(out_dtype or x.dtype)
        table = numbers(table.codes, table.scale, table.offset, axis=-1).astype(x.dtype)
    if table.ndim == 3:
        return project(x, table, out_dtype)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, table, contract, preferred_element_type=jnp.dtype(out_dtype or x.dtype))
