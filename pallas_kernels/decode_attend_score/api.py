"""decode_attend_score: picks the implementation for where it runs."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Int

from pallas_kernels.arguments import Held, Judge, Token
from pallas_kernels.decode_attend_score import reference
from pallas_kernels.dispatch import Operation

OPERATION = Operation(
    "decode_attend_score",
    reference.decode_attend_score,
    {"mosaic_tpu": "tpu", "mosaic_gpu_sm90": "gpu", "numba_cpu": "cpu"},
)


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
    implementation: str | None = None,
    **how: Any,
) -> reference.Attended:
    """`reference.decode_attend_score` by the fastest implementation that takes the arguments, or the named one; `how`
    is what that one alone takes, such as `interpret`.

    Raises `ValueError` where the judge weighs the mass and `with_mass` is False.
    """
    judge.check(with_mass)
    how |= {"scale": scale, "window": window, "softcap": softcap, "rotate": rotate, "with_mass": with_mass}
    return OPERATION(implementation, token, held, slot, judge.over(held.positions.shape), **how)
