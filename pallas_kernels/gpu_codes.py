"""Keys and values as codes in the decode kernels for GPUs: integers of 8, 4 and 2 bits, and floats of 8, with scales
and perhaps lows for each slot of a head, or for each channel of a block of its slots.

A code is a whole number of at most 8 bits, or a float of 8, and as such exact in 16 bits: in registers it becomes an
operand of the tensor cores without its scale. The scale of a key then multiplies its logits, and its low adds low times
the sum of the query; the scale of a value multiplies its weight, and the output gets the sum of weight * low. So K and
V are not rounded again. With several scales to a slot, or scales by channel, the operand is the number itself, rounded
once, as a cache in 16 bits has it. Of 2 and 4 bits a byte's first channels come first, then its second ones, and so on:
`ordered` brings the query and the exact key, or the output, there and back.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Shaped

from pallas_kernels.arguments import Held, Segments, Token
from pallas_kernels.codes import ByChannel, Codes, Lying, halves, split
from pallas_kernels.gpu_blocks import KEYS, QUERIES, SLOTS, SQUARE, Decode, columns_of, per_key, per_query, round_up

MOST = 8  # blocks of slots with scales by channel that a kernel's block may have


@dataclasses.dataclass(frozen=True)
class Side:
    """Keys, or values, as they lie in memory: codes of so many bits."""

    dtype: str  # of the codes
    bits: int
    offset: int
    parts: tuple[str, ...]  # codes, and a scale and a low where there are
    groups: int = 1  # scales to a slot
    run: int = 0  # channels that share one
    tokens: int = 0  # slots that share a scale for each channel

    @classmethod
    def of(cls, x: jax.Array | Lying, dim: int, slots: int) -> "Side | None":
        """None for floats. Raises `NotImplementedError` for codes that the kernels do not read."""
        if not isinstance(x, Lying):
            return None
        if x.bits not in (8, 4, 2):
            raise NotImplementedError(f"codes of {x.bits} bits: the kernel reads 8, 4 and 2")
        if dim % 64 and (x.bits < 8 or dim > 128):
            raise NotImplementedError(f"codes of {x.bits} bits with head dim {dim}: a multiple of 64")
        if slots % 8:
            raise NotImplementedError(f"codes of {slots} slots: a multiple of 8")
        parts = tuple(name for name in ("codes", "scale", "low") if getattr(x, name) is not None)
        if isinstance(x, ByChannel):
            block = SLOTS[round_up(dim, 64)]
            if (block % x.tokens and x.tokens % block) or block > MOST * x.tokens:
                raise NotImplementedError(
                    f"scales by channel of {x.tokens} slots: a multiple of {block}, or {block} over up to {MOST}"
                )
            return cls(str(x.codes.dtype), x.bits, 0, parts, tokens=x.tokens)
        if dim // x.groups * x.bits % 8:
            raise NotImplementedError(f"a scale for {dim // x.groups} channels in {x.bits} bits: whole bytes")
        return cls(str(x.codes.dtype), x.bits, x.offset, parts, x.groups, dim // x.groups)

    @property
    def bare(self) -> bool:
        """Whether codes are an operand without their scales."""
        return self.groups == 1 and not self.tokens

    @property
    def pieces(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    def shared(self, block: int) -> int:
        """Blocks of slots with scales by channel in so many slots of a kernel's."""
        return max(block // self.tokens, 1)

    def scratch(self, name: str, stages: int, block: int, wide: int, dim: int) -> dict[str, Any]:
        """Shared memory for blocks of codes, and for the new token's."""
        codes = {f"{name}_codes": plgpu.SMEM((stages, block, wide // self.pieces), self.dtype)}
        if self.tokens:
            shape = stages, self.shared(block), wide
        else:
            shape = (stages, block) if self.bare else (stages, self.groups, block)
        factors = {f"{name}_{part}": plgpu.SMEM(shape, jnp.int16) for part in self.parts[1:]}
        return codes | factors | {f"{name}_new": plgpu.SMEM((dim // self.pieces,), self.dtype)}


def lines(codes: Codes, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    """Codes, scales and lows, with slots of this shape."""
    whole = {name: getattr(codes, name) for name in ("codes", "scale", "low") if getattr(codes, name) is not None}
    one = codes.groups == 1
    return {name: x.reshape(shape if one and name != "codes" else (*shape, -1)) for name, x in whole.items()}


def named(
    plan: Decode, token: Token, held: Held | Segments, slots: tuple[int, ...], heads: tuple[int, ...]
) -> dict[str, Any]:
    """What a kernel takes of the token and the slots, by name: keys and values to be written in place.

    Slots and KV heads have these shapes. Of codes there is each part by itself, and with `_new` the token's. Several
    scales to a slot are read as `_lines`, those of one group side by side: a copy in which nothing is written.
    """
    dim = held.keys.shape[-1]
    dtype = next((x.dtype for x in (held.keys, held.values) if not isinstance(x, Lying)), token.query.dtype)
    query = token.query.reshape(*heads, -1, dim)
    more = columns_of(query.shape[-2]) - query.shape[-2]
    query = jnp.pad(query, [(0, 0)] * len(heads) + [(0, more), (0, 0)]) if more else query
    given: dict[str, Any] = {
        "query": ordered(query, plan.keys),
        "key": ordered(token.key.reshape(*heads, dim), plan.keys),
        "value": ordered(token.value.reshape(*heads, dim), plan.values),
    }
    given = {name: x.astype(dtype) for name, x in given.items()} | {"position": token.position}
    for name, x, new, side in (
        ("keys", held.keys, token.key_code, plan.keys),
        ("values", held.values, token.value_code, plan.values),
    ):
        if isinstance(x, ByChannel):
            given[f"{name}_codes"] = x.codes.reshape(*slots, -1)
            for part, y in (("scale", x.scale), ("low", x.low)):
                given[f"{name}_{part}"] = ordered(y, side).reshape(*slots[:-1], -1, dim)
        elif isinstance(x, Codes):
            assert new is not None, f"{name} are codes, and the token has none"
            parts = lines(x, slots)
            given |= {f"{name}_{part}": jax.new_ref(y) for part, y in parts.items()}
            given |= {f"{name}_{part}_new": y for part, y in lines(new, heads).items()}
            if x.groups > 1:
                given |= {f"{name}_{part}_lines": jnp.swapaxes(parts[part], -1, -2) for part in side.parts[1:]}
        else:
            given[name] = jax.new_ref(x.reshape(*slots, dim))
    return given


def after(x: Array | Lying, given: dict[str, Any], name: str) -> Array | Lying:
    """Keys or values with the new token; those with scales by channel as they were."""
    if isinstance(x, ByChannel):
        return x
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
    some = slots[-1]
    for part in side.parts:
        there, source, where = mem[f"{name}_{part}"], ref[f"{name}_{part}"], tuple(slots)
        if part == "codes":
            where = (*slots, pl.ds(dims.start, there.shape[-1]))
        elif side.tokens:
            where = (*slots[:-1], pl.ds(lax.div(some.start, side.tokens), there.shape[-2]), dims)
        elif not side.bare:
            source, where = ref[f"{name}_{part}_lines"], (*slots[:-1], slice(None), some)
        plgpu.copy_gmem_to_smem(source.at[where], there.at[stage], here.at[stage])


def ordered(x: Shaped[Array, "*n D"], side: Side | None, back: bool = False) -> Shaped[Array, "*n D"]:
    """Channels in the order in which codes are read: of each byte the first ones, then the second ones and so on; or
    back from there."""
    if side is None or side.pieces == 1:
        return x
    bytes_of = split(x, x.shape[-1] // side.pieces if back else side.pieces)
    return jnp.swapaxes(bytes_of, -1, -2).reshape(x.shape)


def spread(side: Side, name: str, mem: dict[str, Any], stage, memory, held=None) -> None:
    """A block of codes as an operand in shared memory, what is not `held` as 0: without scales where these are one to a
    slot, else as the numbers that they stand for."""
    x = plgpu.layout_cast(mem[f"{name}_codes"].at[stage][...], SQUARE)
    pieces, width = [x], x.shape[1]
    if side.dtype == "uint8":
        x, most = x.astype(jnp.int32), 2**side.bits - 1
        pieces = [lax.shift_right_logical(x, side.bits * index) & most for index in range(side.pieces)]
        pieces = [piece - side.offset if side.offset else piece for piece in pieces]
    for index, piece in enumerate(pieces):
        piece, some = piece.astype(jnp.float32), pl.ds(index * width, width)
        if not side.bare:
            scale, low = _ranges(side, name, mem, stage, piece.shape, some)
            piece = piece * scale if low is None else piece * scale + low
        if held is not None:
            piece = jnp.where(per_key(held, piece.shape), piece, 0.0)
        memory.at[:, some][...] = piece.astype(memory.dtype)


def _ranges(side: Side, name: str, mem: dict[str, Any], stage, shape: tuple[int, int], some: pl.Slice) -> list:
    """Scales and lows of `some` channels of a block's codes, None where there are none: each slot's by groups of
    channels, or each channel's by blocks of slots."""
    found: list[Any] = [None, None]
    rows, width = shape
    if side.tokens:
        there, spreads = plgpu.layout_cast(lax.iota(jnp.int32, rows), KEYS), (per_key, per_query)
        many, each, layout = side.shared(rows), side.tokens, QUERIES
    else:
        there, spreads = plgpu.layout_cast(lax.iota(jnp.int32, width), QUERIES), (per_query, per_key)
        many, each, layout = side.groups, side.run // side.pieces, KEYS
    of_place, over = spreads
    for at, part in enumerate(side.parts[1:]):
        for number in range(many):
            memory = mem[f"{name}_{part}"].at[stage, number]
            memory = memory.at[some] if side.tokens else memory
            x = over(halves(plgpu.layout_cast(memory[...], layout)), shape)
            # also of the first, which needs no choice: else no layout is found for 128 columns
            x = jnp.where(of_place(lax.div(there, each) == number, shape), x, 0.0 if found[at] is None else found[at])
            found[at] = x
    return found


def lay(memory, own, exact) -> None:
    """The token's `own` slot of an operand as it is, in `exact`."""
    x = plgpu.layout_cast(memory[...], SQUARE).astype(jnp.float32)
    new = plgpu.layout_cast(exact[...], QUERIES).astype(jnp.float32)
    memory[...] = jnp.where(per_key(own, x.shape), per_query(new, x.shape), x).astype(memory.dtype)


def factors(side: Side | None, name: str, mem: dict[str, Any], stage, own, full=None) -> tuple:
    """Scales and lows of a block's slots, None where there are none, or the operand has them: of the token's `own` slot
    as if it were no code, and 0 where it is not `full`."""
    found: dict[str, Any] = {"scale": None, "low": None}
    for part in side.parts[1:] if side is not None and side.bare else ():
        x = halves(plgpu.layout_cast(mem[f"{name}_{part}"][stage], KEYS))
        x = jnp.where(own, 1.0 if part == "scale" else 0.0, x)
        found[part] = x if full is None else jnp.where(full, x, 0.0)
    return found["scale"], found["low"]


def write(side: Side, name: str, ref: dict[str, Any], mem: dict[str, Any], new: tuple, at: tuple, once) -> None:
    """Put the token's code, which is at `new`, into its slot; nothing with scales by channel."""
    if side.tokens:
        return
    plgpu.copy_gmem_to_smem(ref[f"{name}_codes_new"].at[new], mem[f"{name}_new"], once)
    plgpu.barrier_wait(once)
    plgpu.copy_smem_to_gmem(mem[f"{name}_new"], ref[f"{name}_codes"].at[at])
    for part in side.parts[1:]:
        for group in [()] if side.bare else [(number,) for number in range(side.groups)]:
            ref[f"{name}_{part}"][(*at, *group)] = ref[f"{name}_{part}_new"][(*new, *group)]
    plgpu.wait_smem_to_gmem(0)
