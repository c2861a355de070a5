"""ragged_decode: picks the implementation for where it runs."""

from typing import Any

from jaxtyping import Array, Int

from pallas_kernels.arguments import Judge, Segments, Token
from pallas_kernels.decode_attend_score.reference import Attended
from pallas_kernels.dispatch import Operation
from pallas_kernels.ragged_decode import reference

OPERATION = Operation(
    "ragged_decode",
    reference.ragged_decode,
    {"mosaic_tpu": "tpu", "mosaic_gpu_sm90": "gpu", "numba_cpu": "cpu"},
)


def ragged_decode(
    token: Token,
    held: Segments,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    scale: float,
    softcap: float | None = None,
    with_mass: bool = True,
    implementation: str | None = None,
    **how: Any,
) -> Attended:
    """`reference.ragged_decode` by the fastest implementation that takes the arguments, or the named one; `how` is what
    that one alone takes, such as `interpret`.

    Raises `ValueError` where the judge weighs the mass and `with_mass` is False, for a mass of each query head under a
    rule, and for a rule by which heads choose together.
    """
    judge.check(with_mass)
    if judge.rule is not None and judge.rule.heads != "each":
        raise ValueError(f"heads={judge.rule.heads!r}: the heads of a pool hold different tokens; give heads='each'")
    how |= {"scale": scale, "softcap": softcap, "with_mass": with_mass}
    return OPERATION(implementation, token, held, slot, judge.over(held.positions.shape), **how)
