"""select: entries that stay whatever their score."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv.checks import Checked
from jaxkv.errors import BadValue
from jaxkv.policies.order import BIG, best_first, in_time
from pallas_kernels.decode_attend_score.victim import protected

EPSILON = 1e-8  # in the entropy of a chunk's scores


@dataclasses.dataclass(frozen=True)
class Select(Checked):
    """Protects the first `sinks` tokens of the text and the `recent` last ones.

    `recent` is a number of tokens, a fraction of the budget when it lies strictly between 0 and 1, or "window": as
    many as the phase's observation window has. The others stay one by one, or by chunks of `chunk` tokens of the text:
    `by="whole"` keeps whole chunks, the best by their mean over all heads (ChunkKV, arXiv 2502.00299), and cuts the
    last one to fit; `by="even"` keeps the best tokens of every chunk, the same part of each and one at least;
    `by="entropy"` goes through the chunks as "whole" does, but of an important chunk (mean at least the median) whose
    score sits on few tokens (entropy below the median) takes its best `gate` tokens only, and fills up with the best
    single tokens (kvpress' entropy-gated ChunkKV).
    """

    sinks: int = 0
    recent: int | float | str = 0
    chunk: int = 1
    by: str = "whole"
    gate: int = 4

    def __post_init__(self):
        recent = 0 if self.recent == "window" else self.recent
        if isinstance(recent, str) or self.sinks < 0 or recent < 0 or (recent > 1 and recent != int(recent)):
            raise BadValue(
                f"sinks={self.sinks}, recent={self.recent!r}: expected counts of at least 0; recent may also be a "
                "fraction of the budget or 'window'"
            )
        if self.chunk < 1 or self.gate < 1 or self.by not in ("whole", "even", "entropy"):
            raise BadValue(
                f"chunk={self.chunk}, by={self.by!r}, gate={self.gate}: expected at least 1 token, and 'whole', "
                "'even' or 'entropy'"
            )

    def resolved(self, window: int) -> "Select":
        """With "window" replaced by the number of tokens of the observation window."""
        return dataclasses.replace(self, recent=window) if self.recent == "window" else self

    @property
    def is_fraction(self) -> bool:
        """Whether `recent` is a share of the budget."""
        return not isinstance(self.recent, str) and 0 < self.recent < 1

    def recents(self, limits: Any) -> Any:
        """The number of recent tokens protected under each of the `limits` (an array of NumPy or JAX)."""
        if self.is_fraction:
            return (limits.astype("float32") * np.float32(self.recent)).astype("int32")
        return limits * 0 + int(self.recent)

    def recent_entries(
        self, positions: Int[Array, "B Hk S"], now: Int[Array, "B"], limits: Int[Array, "B"]
    ) -> Bool[Array, "B Hk S"]:
        """True for the entries of the last `recent` positions before `now`."""
        return positions >= (now - self.recents(limits))[:, None, None]

    def protected(
        self, positions: Int[Array, "B Hk S"], now: Int[Array, "B"], limits: Int[Array, "B"]
    ) -> Bool[Array, "B Hk S"]:
        """True for sinks and recent entries."""
        return protected(positions, now, self.sinks, self.recents(limits))

    @property
    def plain(self) -> bool:
        """Whether entries stay one by one."""
        return self.chunk == 1

    def by_chunks(
        self, score: Float[Array, "B Hk S"], positions: Int[Array, "B Hk S"], protected: Bool[Array, "B Hk S"]
    ) -> Float[Array, "B Hk S"]:
        """The scores that keep the entries as `by` says. Chunks begin at multiples of `chunk` in the text."""
        order, slots = in_time(positions), positions.shape[-1]
        if self.by == "entropy":  # what is protected is worth more than all else, as in the press
            free = (positions >= 0) & ~protected
            most = jnp.max(jnp.where(free, score, 0.0), axis=(-2, -1), keepdims=True)
            score = jnp.where(protected, most + 1.0, score)
        chunk, score = order.put(positions // self.chunk), order.put(jnp.where(positions < 0, 0.0, score))
        starts = jnp.concatenate([jnp.ones_like(chunk[..., :1], bool), chunk[..., 1:] != chunk[..., :-1]], axis=-1)
        starts = starts | ~order.filled  # every empty slot is a chunk of its own
        number = jnp.cumsum(starts, axis=-1) - 1

        def totals(x):
            add = jax.vmap(jax.vmap(lambda x, number: jax.ops.segment_sum(x, number, slots)))
            return jnp.take_along_axis(add(x, number), number, axis=-1)

        size = totals(jnp.ones_like(score))
        mean = totals(score) / size
        stays = totals(order.put(protected).astype(jnp.float32)) > 0
        if self.by == "whole":
            return order.slots(jnp.where(stays, BIG, mean))
        place = jnp.argsort(jnp.lexsort((best_first(score, order.put(positions)), number), axis=-1), axis=-1)
        begins = jnp.where(starts, jnp.arange(slots), 0)  # a chunk's entries stand side by side in both orders
        begins = jax.lax.cummax(begins, axis=begins.ndim - 1)
        within = place - begins
        if self.by == "even":
            last = jnp.max(positions, axis=(-2, -1), keepdims=True)
            tokens = jnp.clip(last + 1 - chunk * self.chunk, 1, self.chunk)  # of the text, also where some have left
            part = (within + 1).astype(jnp.float32) / tokens.astype(jnp.float32)
            return order.slots(-jnp.where(within == 0, 0.0, part))  # the best one of each stays first

        def median(x):  # the lower one, over the chunks
            line = jnp.sort(jnp.where(starts & order.filled, x, jnp.inf), axis=-1)
            chunks = jnp.sum(starts & order.filled, axis=-1, keepdims=True)
            return jnp.take_along_axis(line, jnp.maximum(chunks - 1, 0) // 2, axis=-1)

        low = jax.vmap(jax.vmap(lambda x, number: jax.ops.segment_min(x, number, slots)))(score, number)
        above = score - jnp.minimum(jnp.take_along_axis(low, number, axis=-1), 0.0)
        share = above / (totals(above) + EPSILON)
        entropy = -totals(share * jnp.log(share + EPSILON)) / jnp.log(jnp.maximum(size, 2.0))
        entropy = jnp.where(size > 1, jnp.clip(entropy, 0.0, 1.0), 0.0)
        spiky = (mean >= median(mean)) & (entropy < median(entropy))
        chosen = ~spiky | (within < self.gate)
        at = order.put(positions)
        ahead = best_first(mean, jnp.where(starts & order.filled, at, -1))  # of its chunk, among the chunks
        ahead = jnp.take_along_axis(ahead, begins, axis=-1) * self.chunk + within
        worth = jnp.where(chosen, -ahead, -2 * (slots + self.chunk) * self.chunk - best_first(score, at))
        return order.slots(jnp.where(stays & chosen, BIG, worth.astype(jnp.float32)))
