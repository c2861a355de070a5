"""decode_attend_score for CPUs: the step of `cpu_decode` over KV heads with as many slots each, where these are codes.

Keys and values as they are go through XLA's own products, which are as fast.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import cpu_decode
from pallas_kernels.arguments import Held, Judge, Segments, Token
from pallas_kernels.codes import ByChannel, coded
from pallas_kernels.decode_attend_score.reference import Attended, written
from pallas_kernels.decode_attend_score.victim import aim


def decode_attend_score(
    token: Token,
    held: Held,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rotate: Callable | None = None,
    with_mass: bool = True,
) -> Attended:
    """`reference.decode_attend_score` on codes, read once.

    Raises `NotImplementedError` where neither keys nor values are codes, for keys that are turned as they are read, and
    for what `cpu_decode.step` does not take.
    """
    query, position = token.query, token.position
    if not coded(held.keys, held.values) or rotate is not None:
        raise NotImplementedError(
            "keys and values are no codes" if rotate is None else "keys are turned as they are read"
        )
    lies = written(token, held, slot)
    batch, kv_heads, slots = lies.positions.shape
    borders = slots * jnp.arange(kv_heads + 1, dtype=jnp.int32)
    flat = Segments(
        keys=_in_a_row(lies.keys),
        values=_in_a_row(lies.values),
        positions=_in_a_row(lies.positions),
        offsets=jnp.broadcast_to(borders, (batch, kv_heads + 1)),
        bias=None if lies.bias is None else _in_a_row(jnp.broadcast_to(lies.bias, lies.positions.shape)),
    )
    out = cpu_decode.step(
        token, flat, jnp.where(slot < slots, slot + borders[:-1], -1), Judge(*judge[:2], group=judge.group),
        scale=scale, window=window, softcap=softcap, with_mass=with_mass,
    )  # fmt: skip
    by_head = out.mass.reshape(batch, kv_heads, -1, slots)
    mass = None if not with_mass else by_head if judge.group == "each" else by_head[:, :, 0]
    return Attended(
        output=out.output.reshape(query.shape),
        lse=out.lse.reshape(query.shape[:2]),
        mass=mass,
        keys=lies.keys,
        values=lies.values,
        positions=lies.positions,
        next_slot=aim(mass, lies.positions, position, slot, judge, window=window),
    )


def _in_a_row(x: Any) -> Any:
    """What is known of every head's slots, or lies there, the heads behind each other."""
    if isinstance(x, ByChannel):  # whose blocks are a head's
        return x
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), x)
