"""write_runs in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from pallas_kernels.read_runs.reference import Run


def write_runs(
    active: Bool[Array, "B Hk"], news: tuple[Shaped[Array, "B Hk ..."], ...], *runs: Run
) -> tuple[Shaped[Array, "B Hk ..."], ...]:
    """The arrays with what is new in the runs, of heads that are active; what is behind the last slot is dropped."""
    row, head = (jnp.arange(size) for size in runs[0].first.shape)

    def written(run: Run, new: jax.Array) -> jax.Array:
        at = jnp.where(active[..., None], run.slots, run.array.shape[2])  # out of range, so dropped
        return run.array.at[row[:, None, None], head[:, None], at].set(new, mode="drop")

    return tuple(written(run, new) for run, new in zip(runs, news, strict=True))
