"""Sinks that stand right before the newest tokens, though the text between has left: `rope="sinks"`.

RoPE sees distances alone. Where only the first tokens and the newest stay, those of the newest are the text's, and so
nothing but the sinks' keys needs to be turned as it is read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.sharding.attention import RotateAtRead
from jaxkv.store.beside import Beside
from jaxkv.store.entries import EMPTY, before_gap, gap_in, taken
from pallas_kernels.arguments import Token
from pallas_kernels.masking import MASKED, visible
from pallas_kernels.partial import attend_few


def read_apart(count: int | None, *, windows: bool, weighs: bool, on_mesh: bool) -> bool:
    """Whether the sinks can be a part of their own: not where nobody knows how many there are, where they may lie in a
    window, and where their mass would have to go to slots of several devices. Else all keys go through one pass."""
    return count is not None and not windows and not (weighs and on_mesh)


class TurnSinks(NamedTuple):
    """How the keys of the first `count` tokens are turned on when they are read; of all before the gap, for None.
    `window` and `first` are those of `gap_in`."""

    count: int | None
    by: Callable[[Float[Array, "*lead D"], Int[Array, "..."]], Float[Array, "*lead D"]]  # keys, how far
    window: int | None
    first: Int[Array, "B"] | None = None

    def gap(self, positions: Int[Array, "B Hk S"]) -> Int[Array, "B Hk 1"]:
        """How far the sinks are turned on."""
        return gap_in(positions, self.window, self.first)

    def how_far(self, positions: Int[Array, "B Hk S"]) -> Int[Array, "B Hk S"]:
        """How far each entry's key is turned on: by the gap, or not at all."""
        return jnp.where(before_gap(positions, self.count), self.gap(positions), 0)

    def turned(self, keys: Float[Array, "*B S D"], how_far: Int[Array, "*B S"]) -> Float[Array, "*B S D"]:
        """The keys as they are read; there is one angle a head."""
        turned = self.by(keys, jnp.max(how_far, axis=-1, keepdims=True))
        return jnp.where((how_far > 0)[..., None], turned, keys)

    @property
    def everywhere(self) -> RotateAtRead:
        """The same in one pass over all keys, wherever a device's slots lie."""
        return RotateAtRead(self.how_far, lambda query, keys, how_far, _: (query, self.turned(keys, how_far)))

    def left_out(self, store: Any, token: Token) -> Float[Array, "B Hk C"]:
        """What takes the sinks out of the logits of all of the store's slots, as the token comes into one of them."""
        assert self.count is not None
        none = jnp.full(store.next_slot.shape, EMPTY, jnp.int32)
        positions = store.put(store.positions, none, token.position >= 0)
        return jnp.where((positions >= 0) & (positions < self.count), MASKED, 0.0)

    def beside(self, store: Any, token: Token, scale: float, window: int | None, softcap: float | None) -> Beside:
        """Attention to the sinks as a part of its own, in a store that holds the token; that is none of them. (Before
        the token is written nothing is read, or XLA would copy the cache.)"""
        assert self.count is not None
        numbers, slots = (jnp.arange(size, dtype=jnp.int32) for size in (self.count, store.slots))
        asked = jnp.where(numbers == token.position[:, None], EMPTY - 1, numbers)[:, None, :, None]
        at = jnp.max(jnp.where(store.positions[:, :, None] == asked, slots, EMPTY), axis=-1, initial=EMPTY)
        few = store.plain(taken(store.loose(), jnp.maximum(at, 0), jnp.where(at >= 0, numbers, EMPTY)))
        seen = visible(token.position[:, None, None], few.positions, window)
        part = attend_few(
            token.query[:, :, None], self.by(few.keys, self.gap(store.positions)), few.values, seen, few.weight,
            scale=scale, softcap=softcap, group="each",
        )  # fmt: skip
        return Beside(part.now(), at)
