"""prefill_attend for CPUs, compiled by numba: logits stay in a core's cache."""

from jaxtyping import Array, Float, Int

from pallas_kernels.codes import Codes
from pallas_kernels.cpu_prefill import attended


def prefill_attend(
    queries: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"] | Codes,
    values: Float[Array, "B Hk S D"] | Codes,
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    own_keys_last: bool = False,
    with_lse: bool = False,
    bias: Float[Array, "B Hk S"] | None = None,
) -> Float[Array, "B Hq T D"] | tuple[Float[Array, "B Hq T D"], Float[Array, "B Hq T"]]:
    """`reference.prefill_attend`; raises `NotImplementedError` for what `cpu_prefill` does not take."""
    output, lse = attended(
        queries, keys, values, query_positions, key_positions, scale=scale, window=window, softcap=softcap,
        own_keys_last=own_keys_last, bias=bias,
    )  # fmt: skip
    return (output, lse) if with_lse else output
