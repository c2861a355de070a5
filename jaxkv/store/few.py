"""Reading the keys or values of a few slots out of many."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.store.entries import picked
from pallas_kernels.codes import ByChannel
from pallas_kernels.read_runs import by_pieces, read_runs
from pallas_kernels.read_runs.reference import Run

TOGETHER = 128  # slots that memory holds as one piece on TPU


def numbers_at(
    x: Float[Array, "B *S D"] | ByChannel,
    at: Int[Array, "B Hk R"],
    newest: Int[Array, "B Hk"],
    implementation: str | None,
) -> Float[Array, "B Hk R D"]:
    """The keys or values of some slots of each KV head; anything, for -1. On TPU they are read where they lie: those
    that come behind each other up to the slot of the `newest` at once, others one by one, which takes far longer."""
    slots = jnp.maximum(at, 0)
    if not isinstance(x, ByChannel):
        return picked(x, slots, flat=x.ndim == 3)
    if not by_pieces(implementation):
        return x.at(slots)
    size = -(-max(at.shape[2], x.tokens) // TOGETHER) * TOGETHER
    first = newest // size * size
    before = jnp.maximum(first - size, 0)
    arrays = ((x.codes, 1), (x.scale, x.tokens), (x.low, x.tokens))  # and of how many slots each has something

    def read(*begin: Int[Array, "B Hk"], size: int) -> list[Any]:
        runs = [Run(y, at // each, max(size // each, 1)) for y, each in arrays for at in begin]
        return list(read_runs(*runs, implementation=implementation))

    def two_runs() -> Float[Array, "B Hk R D"]:
        found = read(before, first, size=size)
        both = (jnp.concatenate(found[n : n + 2], axis=2) for n in (0, 2, 4))
        few = dataclasses.replace(x, **dict(zip(("codes", "scale", "low"), both, strict=True)))
        begin = jnp.where(slots < first[..., None], before[..., None], (first - size)[..., None])
        return few.at(jnp.maximum(slots - begin, 0))

    def one_by_one() -> Float[Array, "B Hk R D"]:
        def one(at: Int[Array, "B Hk"]) -> Float[Array, "B Hk D"]:
            codes, scale, low = read(at, size=1)
            few = dataclasses.replace(x, codes=codes, scale=scale, low=low)
            return few.at(jnp.zeros_like(at)[..., None])[:, :, 0]

        return jnp.moveaxis(lax.map(one, jnp.moveaxis(slots, 2, 0)), 0, 2)

    there = (at < 0) | ((at >= before[..., None]) & (at < (first + size)[..., None]))
    return lax.cond(jnp.all(there), two_runs, one_by_one)
