"""Tokens that are read beside a store's codes: parts of one softmax, whose masses go back to their slots."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.partial import GROUP, Partial, merge, portion

RUN = 128  # slots of a run: the lanes of a register


class Beside(NamedTuple):
    """Attention to some tokens, with the mass `[B, Hk, G, R]` of each query head, and their slots (-1: none)."""

    part: Partial
    slots: Int[Array, "B Hk R"]


def joined(codes: Partial, others: Sequence[Beside], group: str) -> Partial:
    """Attention over the slots' codes and what lies beside them. The mass `[B, Hk, C]` is that of every slot in the
    softmax over all, `group` ("sum", "mean", "max") of the query heads'; None where `codes` has none."""
    whole = merge(codes, *(other.part for other in others))
    if codes.mass is None or not others:
        return whole

    def mass(part: Partial) -> Float[Array, "B Hk S"]:
        assert part.mass is not None, "whoever reads tokens beside the codes gives their mass"
        share = portion(part.lse, whole.lse).reshape(*part.mass.shape[:3], 1)
        return GROUP[group](part.mass * share, axis=2)

    total = mass(codes)
    for part, slots in others:
        total = lax.platform_dependent(total, mass(part), slots, cpu=_added, default=_multiplied)
    return whole._replace(mass=total)


def _added(
    total: Float[Array, "B Hk C"], mass: Float[Array, "B Hk R"], slots: Int[Array, "B Hk R"]
) -> Float[Array, "B Hk C"]:
    """The masses added where their slots are."""
    rows, heads = jnp.arange(total.shape[0])[:, None, None], jnp.arange(total.shape[1])[None, :, None]
    at = jnp.where(slots >= 0, slots, total.shape[2])  # out of range, so dropped
    return total.at[rows, heads, at].add(mass, mode="drop")


def _multiplied(
    total: Float[Array, "B Hk C"], mass: Float[Array, "B Hk R"], slots: Int[Array, "B Hk R"]
) -> Float[Array, "B Hk C"]:
    """The same as a product of matrices, which matrix units do best: masses by runs of slots, by places in a run."""
    runs = -(-total.shape[2] // RUN)
    by_run = jnp.where(slots[..., None] // RUN == jnp.arange(runs, dtype=jnp.int32), mass[..., None], 0.0)
    place = (slots[..., None] % RUN == jnp.arange(RUN, dtype=jnp.int32)) & (slots >= 0)[..., None]
    found = jnp.einsum("bhrf,bhrp->bhfp", by_run, place.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return total + found.reshape(*total.shape[:2], -1)[..., : total.shape[2]]
