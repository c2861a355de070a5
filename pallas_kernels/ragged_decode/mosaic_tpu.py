"""ragged_decode for TPU: the walk of `tpu_decode` over a layer's pool, every query head meeting every block of slots.

Each block of K and V passes through on-chip memory once, wherever in it one head's segment ends and the next begins.
"""

import jax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels import tpu_decode
from pallas_kernels.arguments import Judge, Segments, Token
from pallas_kernels.codes import check_slots
from pallas_kernels.decode_attend_score.reference import Attended
from pallas_kernels.ragged_decode.reference import placed


def ragged_decode(
    token: Token,
    held: Segments,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    scale: float,
    softcap: float | None = None,
    with_mass: bool = True,
    interpret: bool | pltpu.InterpretParams = False,
) -> Attended:
    """`reference.ragged_decode`, K and V read once. Every head's `slot` lies in its own segment.

    Raises `NotImplementedError` for what `check_slots` refuses, for 4 slots or fewer, and where two rows' logits do not
    fit in on-chip memory. XLA copies K and V for it where P is no multiple of 8.
    """
    check_slots(held.keys, held.values)
    positions = placed(held.positions, token.position, slot)
    weight, bias = (x[:, None] if isinstance(x, jax.Array) else x for x in (judge.weight, judge.bias))
    added = None if held.bias is None else held.bias[:, None]
    keys, values = jax.tree.map(lambda x: x[:, None], (held.keys, held.values))
    out = tpu_decode.step(
        token, keys, values, positions[:, None], slot,
        judge._replace(weight=weight, bias=bias), held.offsets, added, scale=scale, window=None, softcap=softcap,
        with_mass=with_mass, interpret=interpret,
    )  # fmt: skip
    return Attended(
        output=out.output.reshape(token.query.shape),
        lse=out.lse.reshape(token.query.shape[:2]),
        mass=None if out.mass is None else out.mass[:, 0] if judge.group != "each" else out.mass,
        keys=jax.tree.map(lambda x: x[:, 0], out.keys),
        values=jax.tree.map(lambda x: x[:, 0], out.values),
        positions=positions,
        next_slot=out.next_slot,
    )
