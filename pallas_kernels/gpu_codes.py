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

from pallas_kernels.arguments import Held, Segments, Token
from pallas_kernels.codes import Codes, halves
from pallas_kernels.gpu_blocks import KEYS, QUERIES, SQUARE, Decode, columns_of, per_key, per_query


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
        lines = {f"{name}_{part}": plgpu.SMEM((stages, block), jnp.int16) for part in self.parts[1:]}
        return codes | lines | {f"{name}_new": plgpu.SMEM((dim * self.bits // 8,), self.dtype)}


def lines(codes: Codes, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    """Codes, scales and lows, with slots of this shape."""
    whole = {name: getattr(codes, name) for name in ("codes", "scale", "low") if getattr(codes, name) is not None}
    return {name: x.reshape(*shape, -1) if name == "codes" else x.reshape(shape) for name, x in whole.items()}


def named(
    plan: Decode, token: Token, held: Held | Segments, slots: tuple[int, ...], heads: tuple[int, ...]
) -> dict[str, Any]:
    """What a kernel takes of the token and the slots, by name: keys and values to be written in place.

    Slots and KV heads have these shapes. Of codes there is each part by itself, and with `_new` the token's.
    """
    dim = held.keys.shape[-1]
    dtype = next((x.dtype for x in (held.keys, held.values) if not isinstance(x, Codes)), token.query.dtype)
    query = token.query.reshape(*heads, -1, dim)
    more = columns_of(query.shape[-2]) - query.shape[-2]
    query = jnp.pad(query, [(0, 0)] * len(heads) + [(0, more), (0, 0)]) if more else query
    given: dict[str, Any] = {
        "query": ordered(query, plan.keys),
        "key": ordered(token.key.reshape(*heads, dim), plan.keys),
        "value": ordered(token.value.reshape(*heads, dim), plan.values),
    }
    given = {name: x.astype(dtype) for name, x in given.items()} | {"position": token.position}
    for name, x, new in (("keys", held.keys, token.key_code), ("values", held.values, token.value_code)):
        if isinstance(x, Codes):
            assert new is not None, f"{name} are codes, and the token has none"
            given |= {f"{name}_{part}": jax.new_ref(y) for part, y in lines(x, slots).items()}
            given |= {f"{name}_{part}_new": y for part, y in lines(new, heads).items()}
        else:
            given[name] = jax.new_ref(x.reshape(*slots, dim))
    return given


def after(x: Array | Codes, given: dict[str, Any], name: str) -> Array | Codes:
    """Keys or values with the new token."""
    if not isinstance(x, Codes):
        return jax.freeze(given[name]).reshape(x.shape)
    parts = {part: given.get(f"{name}_{part}") for part in ("codes", "scale", "low")}
    parts = {part: jax.freeze(ref).reshape(getattr(x, part).shape) for part, ref in parts.items() if ref is not None}
    return dataclasses.replace(x, **parts)


def fetch(
    side: Side | None, name: str, ref: dict[str, Any], mem: dict[str, Any], at: tuple, memory, stage, here
) -> None:
    """Copy a block of keys or values, at these indices: floats to `memory`, codes and what belongs to them to their
    own."""
    *slots, dims = at
    if side is None:
        plgpu.copy_gmem_to_smem(ref[name].at[(*slots, dims)], memory.at[stage], here.at[stage])
        return
    for part in side.parts:
        there = mem[f"{name}_{part}"]
        where = (*slots, pl.ds(dims.start, there.shape[-1])) if part == "codes" else tuple(slots)
        plgpu.copy_gmem_to_smem(ref[f"{name}_{part}"].at[where], there.at[stage], here.at[stage])


def ordered(x: Float[Array, "*n D"], side: Side | None, back: bool = False) -> Float[Array, "*n D"]:
    """Channels in the order in which codes of 4 bits are read: the even ones, then the odd ones; or back from there."""
    if side is None or side.bits == 8:
        return x
    pairs = x.reshape(*x.shape[:-1], *((2, -1) if back else (-1, 2)))
    return jnp.swapaxes(pairs, -1, -2).reshape(x.shape)


def spread(side: Side, codes, memory, held=None) -> None:
    """A block of codes as an operand in shared memory, without scales, and what is not `held` as 0."""
    x = plgpu.layout_cast(codes[...], SQUARE)
    width = x.shape[1]
    if side.dtype == "uint8":
        whole = x.astype(jnp.int32)
        halves = [whole] if side.bits == 8 else [whole & 15, lax.shift_right_logical(whole, 4)]
        halves = [half - side.offset if side.offset else half for half in halves]
    else:
        halves = [x]
    for index, half in enumerate(halves):
        half = half.astype(jnp.float32)
        if held is not None:
            half = jnp.where(per_key(held, half.shape), half, 0.0)
        memory.at[:, pl.ds(index * width, width)][...] = half.astype(memory.dtype)


def lay(memory, own, exact) -> None:
    """The token's `own` slot of an operand as it is, in `exact`."""
    x = plgpu.layout_cast(memory[...], SQUARE).astype(jnp.float32)
    new = plgpu.layout_cast(exact[...], QUERIES).astype(jnp.float32)
    memory[...] = jnp.where(per_key(own, x.shape), per_query(new, x.shape), x).astype(memory.dtype)


def factors(side: Side | None, name: str, mem: dict[str, Any], stage, own, full=None) -> tuple:
    """Scales and lows of a block's slots, None where there are none: of the token's `own` slot as if it were no code,
    and 0 where it is not `full`."""
    found: dict[str, Any] = {"scale": None, "low": None}
    for part in () if side is None else side.parts[1:]:
        x = halves(plgpu.layout_cast(mem[f"{name}_{part}"][stage], KEYS))
        x = jnp.where(own, 1.0 if part == "scale" else 0.0, x)
        found[part] = x if full is None else jnp.where(full, x, 0.0)
    return found["scale"], found["low"]


def write(side: Side, name: str, ref: dict[str, Any], mem: dict[str, Any], new: tuple, at: tuple, once) -> None:
    """Put the token's code, which is at `new`, into its slot."""
    plgpu.copy_gmem_to_smem(ref[f"{name}_codes_new"].at[new], mem[f"{name}_new"], once)
    plgpu.barrier_wait(once)
    plgpu.copy_smem_to_gmem(mem[f"{name}_new"], ref[f"{name}_codes"].at[at])
    for part in side.parts[1:]:
        ref[f"{name}_{part}"][at] = ref[f"{name}_{part}_new"][new]
    plgpu.wait_smem_to_gmem(0)
