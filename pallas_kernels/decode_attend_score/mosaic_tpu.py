"""decode_attend_score for TPU: the walk of `tpu_decode` over KV heads with as many slots each."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels import tpu_decode
from pallas_kernels.arguments import Held, Judge, Token
from pallas_kernels.codes import check_widths
from pallas_kernels.decode_attend_score.reference import Attended, placed


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
    interpret: bool | pltpu.InterpretParams = False,
) -> Attended:
    """`reference.decode_attend_score`, K and V read once; not those of blocks in which a row holds nothing.

    Raises `NotImplementedError` for keys turned at read time (`rotate`), for keys and values of unlike widths, for 4
    slots or fewer, and where two rows' logits do not fit in on-chip memory. XLA copies K and V for it where C is no
    multiple of 8.
    """
    if rotate is not None:
        raise NotImplementedError("the TPU kernel reads keys as they lie in the cache: rotate= needs the reference")
    check_widths(held.keys, held.values)
    positions = placed(held.positions, token.position, slot)
    out = tpu_decode.step(
        token, held.keys, held.values, positions, slot, judge, logit_bias=held.bias, scale=scale, window=window,
        softcap=softcap, with_mass=with_mass, interpret=interpret,
    )  # fmt: skip
    flat = jnp.reshape
    return Attended(
        output=flat(out.output, token.query.shape),
        lse=flat(out.lse, token.query.shape[:2]),
        mass=out.mass,
        keys=out.keys,
        values=out.values,
        positions=positions,
        next_slot=out.next_slot,
    )
