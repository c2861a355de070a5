"""evicted, by frequency: survivors become the slow changes along the text of all that was held."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.errors import BadValue
from jaxkv.policies.evicted import Evicted


@dataclasses.dataclass(frozen=True)
class LowPass(Evicted):
    """Of a head's n entries in time order, without those that the phase protects, m stay; they become sqrt(m / n) *
    IDCT_m of the first m of the n coefficients of their orthonormal DCT-II along the text, channel by channel, of keys
    (which lie as before RoPE) and of values.

    Source: FreqKV (arXiv 2505.00570), `dct_compress` of its release.
    """

    kind: ClassVar[str] = "low-pass"
    moves: ClassVar[bool] = True

    def check(self, policy: Any) -> None:
        if policy.rope != "cache":
            raise BadValue(
                f"policy {policy.name!r} with evicted kind 'low-pass', which mixes keys of all positions before they "
                "are turned: expected rope='cache'"
            )
        if policy.decode is not None and policy.decode.every < 2:
            raise BadValue(
                f"policy {policy.name!r} with evicted kind 'low-pass' and every={policy.decode.every}: expected a cut "
                "every 2 tokens or more, for each changes all entries"
            )

    def absorb(self, beside, kept, lost, facts):
        assert kept is not None
        free = True if facts.spared is None else ~facts.spared
        stay, given = kept.filled & free, (kept.filled | lost.filled) & free
        held = jnp.where(kept.filled[..., None], kept.keys, lost.keys)
        values = jnp.where(kept.filled[..., None], kept.values, lost.values)
        both = jnp.where(given[..., None], jnp.concatenate([held, values], axis=-1).astype(jnp.float32), 0.0)
        by_head = lambda x: jnp.swapaxes(x, 0, 1)  # noqa: E731
        most = facts.most or stay.shape[-1]
        heads = tuple(map(by_head, (both, given, stay)))
        slow = by_head(lax.map(lambda head: low_pass(head[0], head[1], head[2], most), heads))
        changes = (stay & (jnp.sum(stay, -1) < jnp.sum(given, -1))[..., None])[..., None]
        width = held.shape[-1]
        keys, values = (
            jnp.where(changes, new.astype(old.dtype), old)
            for new, old in ((slow[..., :width], kept.keys), (slow[..., width:], kept.values))
        )
        return dataclasses.replace(kept, keys=keys, values=values), beside


def low_pass(
    x: Float[Array, "B S D"], given: Bool[Array, "B S"], stay: Bool[Array, "B S"], most: int
) -> Float[Array, "B S D"]:
    """The low frequencies of the `given` rows of x, in the `stay`ing ones of them, at most `most` of a batch row."""
    before, after = cosines(given, most), cosines(stay, most)
    times: Any = {"precision": lax.Precision.HIGHEST}
    n, m = (jnp.maximum(jnp.sum(of, axis=-1), 1).astype(jnp.float32)[:, None, None] for of in (given, stay))
    slow = jnp.arange(most)[:, None].astype(jnp.float32) < m
    coefficients = jnp.where(slow, jnp.einsum("bks,bsd->bkd", before, x, **times), 0.0)
    return jnp.sqrt(m / n) * jnp.einsum("bks,bkd->bsd", after, coefficients, **times)


def cosines(rows: Bool[Array, "B S"], most: int) -> Float[Array, "B K S"]:
    """The first K = `most` functions of the orthonormal DCT-II over the rows that are True; 0 in the others."""
    place = (jnp.cumsum(rows, axis=-1, dtype=jnp.int32) - 1)[:, None, :]
    many = jnp.maximum(jnp.sum(rows, axis=-1, dtype=jnp.int32), 1)[:, None, None]
    k: Int[Array, "K 1"] = jnp.arange(most, dtype=jnp.int32)[:, None]
    turns = ((2 * place + 1) * k % (4 * many)).astype(jnp.float32)  # whole turns left out, which float32 would not hold
    size = jnp.sqrt(jnp.where(k == 0, 1.0, 2.0) / many.astype(jnp.float32))
    return jnp.where(rows[:, None, :], size * jnp.cos(jnp.pi * turns / (2 * many).astype(jnp.float32)), 0.0)


KINDS: dict[str, type[Evicted]] = {LowPass.kind: LowPass}
