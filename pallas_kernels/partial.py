"""Partial attention: attention over some of the keys, with the log-sum-exp that lets parts be merged.

Parts are a monoid: `merge` of the attention over two sets of keys is the attention over both, in any order and
grouping, and a part whose log-sum-exp is -inf (no keys) changes nothing.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.masking import masked_softmax, soft_cap

GROUP = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max}


class Partial(NamedTuple):
    """softmax(logits) v over some keys, the log of the sum of exp(logits) over them, and each key's softmax weight
    reduced over the query heads of its KV head (None where nobody asks)."""

    output: Float[Array, "B Hq *T D"]
    lse: Float[Array, "B Hq *T"]
    mass: Float[Array, "B *S"] | None = None

    def now(self) -> "Partial":
        """The part of the first of T queries alone, without the dimension T."""
        return Partial(self.output[:, :, 0], self.lse[:, :, 0], self.mass)


def merge(first: Partial, *others: Partial) -> Partial:
    """Attention over the keys of all parts: output = sum_i exp(lse_i - lse) output_i, lse = log sum_i exp(lse_i).

    The mass stays the first part's, as if its keys were alone. Outputs are summed in float32, in the first's dtype.
    """
    if not others:
        return first
    parts = (first, *others)
    lse = jax.nn.logsumexp(jnp.stack([part.lse for part in parts]), axis=0)
    scaled = [part.output.astype(jnp.float32) * portion(part.lse, lse)[..., None] for part in parts]
    output = functools.reduce(jnp.add, scaled)
    return Partial(output.astype(first.output.dtype), lse, first.mass)


def portion(lse: Float[Array, "..."], whole: Float[Array, "..."]) -> Float[Array, "..."]:
    """A part's share exp(lse - whole) of the softmax over all parts; 0 for a part without keys."""
    return jnp.where(lse > -jnp.inf, jnp.exp(lse - whole), 0.0)


def attend_few(
    query: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"],
    values: Float[Array, "B Hk S D"],
    seen: Bool[Array, "B Hk_or_1 T S"],
    counts: Float[Array, "B Hk S"] | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    group: str | None = None,
) -> Partial:
    """Attention over a few keys in plain jnp, float32, where `seen`; what lies in unseen slots is not read.

    An entry that stands for `counts` tokens has the logarithm of that added to its logit. With `group` ("sum", "mean",
    "max") the mass `[B, Hk, S]` of the first query, reduced over the query heads of each KV head; `[B, Hk, G, S]` with
    "each".
    """
    batch, heads, length, dim = query.shape
    if not keys.shape[2]:
        each = () if group != "each" else (heads // keys.shape[1],)
        mass = None if group is None else jnp.zeros((*keys.shape[:2], *each, keys.shape[2]), jnp.float32)
        return Partial(jnp.zeros(query.shape, jnp.float32), jnp.full(query.shape[:3], -jnp.inf), mass)
    grouped = query.reshape(batch, keys.shape[1], -1, length, dim).astype(jnp.float32)
    logits = jnp.einsum("bhgtd,bhsd->bhgts", grouped, keys.astype(jnp.float32)) * scale
    logits = soft_cap(logits, softcap)
    if counts is not None:
        logits = logits + jnp.log(jnp.maximum(counts, 1.0))[:, :, None, None]
    weights, lse = masked_softmax(logits, seen[:, :, None])
    there = jnp.any(seen, axis=2)[..., None]
    values = jnp.where(there, values.astype(jnp.float32), 0.0)
    output = jnp.einsum("bhgts,bhsd->bhgtd", weights, values)
    mass = None
    if group is not None:
        mass = weights[:, :, :, 0]
        mass = mass if group == "each" else GROUP[group](mass, axis=2)
    return Partial(output.reshape(query.shape), lse.reshape(batch, heads, length), mass)
