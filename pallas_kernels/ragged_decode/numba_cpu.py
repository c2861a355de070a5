"""ragged_decode for CPUs: the step of `cpu_decode`, which reads every head's own segment where it lies."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import cpu_decode
from pallas_kernels.arguments import Judge, Segments, Token
from pallas_kernels.decode_attend_score.reference import Attended
from pallas_kernels.ragged_decode.reference import written


def ragged_decode(
    token: Token,
    held: Segments,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    scale: float,
    softcap: float | None = None,
    with_mass: bool = True,
) -> Attended:
    """`reference.ragged_decode`, K and V read once and only where they are filled; of a layer that shares a line, where
    they lie in it.

    Raises `NotImplementedError` for what `cpu_decode.step` does not take, and for a mass of each
    query head.
    """
    if judge.group == "each":
        raise NotImplementedError("group='each', which parts of a pool on a mesh have: 'sum', 'mean' or 'max'")
    query, position = token.query, token.position
    lies = written(held, *token.entry, position, slot)
    out = cpu_decode.step(token, lies, slot, judge, scale=scale, softcap=softcap, with_mass=with_mass)
    return Attended(
        output=out.output.reshape(query.shape),
        lse=out.lse.reshape(query.shape[:2]),
        mass=out.mass if with_mass else None,
        keys=lies.keys,
        values=lies.values,
        positions=lies.positions,
        next_slot=jnp.where(position[:, None] < 0, slot, out.next_slot),
    )
