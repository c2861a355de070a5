"""read_runs in plain jnp."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


class Run(NamedTuple):
    """An array over slots, and a run of `size` slots of each head: the one from `first` on, a multiple of that size."""

    array: Shaped[Array, "B Hk S *N"]
    first: Int[Array, "B Hk"]
    size: int

    @property
    def slots(self) -> Int[Array, "B Hk R"]:
        """The run's slots."""
        return self.first[..., None] + jnp.arange(self.size, dtype=jnp.int32)


def read_runs(*runs: Run) -> tuple[Shaped[Array, "B Hk ..."], ...]:
    """What lies in the runs; anything, for what is behind the last slot."""

    def read(run: Run) -> Shaped[Array, "B Hk R *N"]:
        at = jnp.minimum(run.slots, run.array.shape[2] - 1)
        return jnp.take_along_axis(run.array, at.reshape(*at.shape, *(1,) * (run.array.ndim - 3)), axis=2)

    return tuple(map(read, runs))
