"""prefill_attend_mass for CPUs, compiled by numba: weights stay in a core's cache."""

from jaxtyping import Array, Float, Int

from pallas_kernels.codes import Codes
from pallas_kernels.cpu_prefill import massed


def prefill_attend_mass(
    queries: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"] | Codes,
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    reduce: str = "sum",
    own_keys_last: bool = False,
    weights: Float[Array, "B T"] | None = None,
    bias: Float[Array, "B Hk S"] | None = None,
    lse: Float[Array, "B Hq T"] | None = None,
) -> Float[Array, "B Hq S"]:
    """`reference.prefill_attend_mass`; raises `NotImplementedError` for what `cpu_prefill` does not take."""
    return massed(
        queries, keys, query_positions, key_positions, reduce=reduce, weights=weights, lse=lse, scale=scale,
        window=window, softcap=softcap, own_keys_last=own_keys_last, bias=bias,
    )  # fmt: skip
