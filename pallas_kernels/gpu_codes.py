"""Keys and values as codes in the decode kernels for GPUs: integers of 8 and 4 bits, and floats of 8, with a scale and
perhaps a low for each slot of a head.

A code is a whole number of at most 8 bits, or a float of 8, and as such exact in 16 bits: in registers it becomes an
operand of the tensor cores without its scale. The scale of a key then multiplies its logits, and its low adds low times
the sum of the query; the scale of a value multiplies its weight, and the output gets the sum of weight * low. So K and
V are not rounded again. Of 4 bits the even channels come first and the odd ones behind them: `ordered` brings the query
and the exact key, or the output, there and back.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.codes import Codes
from pallas_kernels.gpu_blocks import KEYS, QUERIES, SQUARE, per_key, per_query


@dataclasses.dataclass(frozen=True)
class Side:
    """Keys, or values, as they lie in memory: codes of so many bits."""

    dtype: str  # of the codes
    bits: int
    offset: int
    parts: tuple[str, ...]  # codes, and a scale and a low where there are

    @classmethod
    def of(cls, x: jax.Array | Codes, dim: int, slots: int) -> "Side | None":
        """None for floats. Raises `NotImplementedError` for codes that the kernels do not read."""
        if not isinstance(x, Codes):
            return None
        if x.bits not in (8, 4):
            raise NotImplementedError(f"codes of {x.bits} bits: the kernel reads 8 and 4")
        if x.bits == 4 and dim % 64:
            raise NotImplementedError(f"codes of 4 bits with head dim {dim}: a multiple of 64")
        if x.groups > 1:
            raise NotImplementedError(f"{x.groups} scales for a key or value: the kernel reads one")
        if slots % 8:
            raise NotImplementedError(f"codes of {slots} slots: a multiple of 8")
        parts = tuple(name for name in ("codes", "scale", "low") if getattr(x, name) is not None)
        return cls(str(x.codes.dtype), x.bits, x.offset, parts)

    def scratch(self, name: str, stages: int, block: int, wide: int, dim: int) -> dict[str, Any]:
        """Shared memory for blocks of codes, and for the new token's."""
        codes = {f"{name}_codes": plgpu.SMEM((stages, block, wide * self.bits // 8), self.dtype)}
        lines = {f"{name}_{part}": plgpu.SMEM((stages, block), jnp.float16) for part in self.parts[1:]}
        return codes | lines | {f"{name}_new": plgpu.SMEM((dim * self.bits // 8,), self.dtype)}


def lines(codes: Codes, rows: int) -> dict[str, jax.Array]:
    """Codes, scales and lows of slots, one line for each of the rows; of one slot each, without it."""
    whole = {name: getattr(codes, name) for name in ("codes", "scale", "low") if getattr(codes, name) is not None}
    slots = codes.codes.size // codes.codes.shape[-1] // rows
    shape = (rows, slots) if slots > 1 else (rows,)
    return {name: x.reshape(*shape, -1) if name == "codes" else x.reshape(shape) for name, x in whole.items()}


def ordered(x: Float[Array, "*n D"], side: Side | None, back: bool = False) -> Float[Array, "*n D"]:
    """Channels in the order in which codes of 4 bits are read: the even ones, then the odd ones; or back from there."""
    if side is None or side.bits == 8:
        return x
    pairs = x.reshape(*x.shape[:-1], *((2, -1) if back else (-1, 2)))
    return jnp.swapaxes(pairs, -1, -2).reshape(x.shape)


def spread(side: Side, codes, memory, exact, own, held=None) -> None:
    """A block of codes as an operand in shared memory, without scales; what is the token's `own` slot as it is, in
    `exact`, and what is not `held` as 0."""
    x = plgpu.layout_cast(codes[...], SQUARE)
    width = x.shape[1]
    if side.dtype == "uint8":
        whole = x.astype(jnp.int32)
        halves = [whole] if side.bits == 8 else [whole & 15, lax.shift_right_logical(whole, 4)]
        halves = [half - side.offset if side.offset else half for half in halves]
    else:
        halves = [x]
    for index, half in enumerate(halves):
        some = pl.ds(index * width, width)
        new = plgpu.layout_cast(exact[some], QUERIES).astype(jnp.float32)
        half = jnp.where(per_key(own, half.shape), per_query(new, half.shape), half.astype(jnp.float32))
        if held is not None:
            half = jnp.where(per_key(held, half.shape), half, 0.0)
        memory.at[:, some][...] = half.astype(memory.dtype)


def factor(memory, own, exact: float):
    """Scales or lows of a block's slots, that of the token's own slot as if it were no code."""
    x = plgpu.layout_cast(memory[...], KEYS).astype(jnp.float32)
    return jnp.where(own, exact, x)


def write(side: Side, name: str, ref: dict[str, Any], mem: dict[str, Any], row, target, once) -> None:
    """Put the new token's code into its slot."""
    plgpu.copy_gmem_to_smem(ref[f"{name}_codes_new"].at[row], mem[f"{name}_new"], once)
    plgpu.barrier_wait(once)
    plgpu.copy_smem_to_gmem(mem[f"{name}_new"], ref[f"{name}_codes"].at[row, target])
    for part in side.parts[1:]:
        ref[f"{name}_{part}"][row, target] = ref[f"{name}_{part}_new"][row]
    plgpu.wait_smem_to_gmem(0)
