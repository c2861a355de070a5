"""Blocks: runs of tokens that share a part of their code. Which slots are a block, and when one is encoded anew."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv.store.codec import Shared
from jaxkv.store.entries import picked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCode:
    """What each slot has of its own, `[B, Hk, C, ...]`, and what each of F blocks of slots has, `[B, Hk, F, ...]`.

    Block f holds the slots in places `f * tokens` to `(f + 1) * tokens` from the oldest entry's slot `start` on, past
    the last slot to the first, so that a block is tokens that follow each other. `dtype` is that of what was encoded.
    """

    slots: Any
    blocks: Any
    start: Int[Array, "B Hk"]
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def count(self) -> int:
        """C, the slots of a head."""
        return jax.tree.leaves(self.slots)[0].shape[2]

    def numbers(self, slots: Int[Array, "*#heads N"], tokens: int) -> Int[Array, "*heads N"]:
        """The block of so many tokens that each of these slots is in."""
        return ((slots - self.start[..., None]) % max(self.count, 1)) // tokens


class Blocks(Shared):
    """A codec of blocks of `tokens` that lie side by side.

    Where a slot is written its whole block is encoded anew; so are all blocks after a cut, with other neighbours. What
    the residual window holds is encoded from the exact numbers.
    """

    tokens: int

    @property
    def together(self) -> int:
        return self.tokens

    def coded(self, x: Float[Array, "*n T D"], filled: Bool[Array, "*n T"]) -> tuple[Any, Any]:
        """The code of blocks of T slots, by those that are filled (others hold anything): what each slot has of its
        own, arrays `[*n, T, ...]`, and what each block has, arrays `[*n, ...]`."""
        raise NotImplementedError

    def numbers(self, slots: Any, blocks: Any) -> Float[Array, "*n T D"]:
        """What these codes stand for."""
        raise NotImplementedError

    def encode_all(self, x: Float[Array, "B Hk C D"], positions: Int[Array, "B Hk C"]) -> BlockCode:
        slots = x.shape[2]
        never = jnp.iinfo(jnp.int32).max
        oldest = jnp.where(positions < 0, never, positions)
        start = jnp.argmin(oldest, axis=-1).astype(jnp.int32) if slots else jnp.zeros(x.shape[:2], jnp.int32)
        at = self._places(start, slots)
        shape = (*x.shape[:2], at.shape[2] // self.tokens, self.tokens)
        inside = jnp.arange(at.shape[2]) < slots
        rows = jnp.take_along_axis(x, at[..., None], axis=2).reshape(*shape, x.shape[3])
        filled = (jnp.take_along_axis(positions, at, axis=2) >= 0) & inside
        own, shared = self.coded(rows, filled.reshape(shape))
        own = jax.tree.map(lambda x: _back(x.reshape(*shape[:2], at.shape[2], *x.shape[4:]), start, slots), own)
        return BlockCode(own, shared, start, str(x.dtype))

    def block(self, code: BlockCode, slot: Int[Array, "B Hk"]) -> tuple[Int[Array, "B Hk T"], Float[Array, "B Hk T D"]]:
        """The slots of the block that `slot` is in, and what their codes stand for. Where the last block is not full
        they are followed by some others."""
        at, number, _ = self._block(code, slot)
        own = jax.tree.map(lambda x: picked(x, at, flat=False), code.slots)
        shared = jax.tree.map(lambda x: picked(x, number, flat=False), code.blocks)
        return at, self.numbers(own, shared).astype(code.dtype)

    def written(
        self,
        code: BlockCode,
        rows: Float[Array, "B Hk T D"],
        positions: Int[Array, "B Hk T"],
        slot: Int[Array, "B Hk"],
        active: Bool[Array, "B"],
    ) -> BlockCode:
        at, number, inside = self._block(code, slot)
        slots, blocks = code.count, -(-code.count // self.tokens)
        own, shared = self.coded(rows, (positions >= 0) & inside)
        row, head = jnp.arange(at.shape[0])[:, None], jnp.arange(at.shape[1])[None, :]
        live = active[:, None]
        to = jnp.where(inside & live[..., None], at, slots)  # out of range, so dropped
        number = jnp.where(live, number, blocks)
        put = lambda old, new: old.at[row[..., None], head[..., None], to].set(new, mode="drop")  # noqa: E731
        put_block = lambda old, new: old.at[row, head, number].set(new, mode="drop")  # noqa: E731
        return dataclasses.replace(
            code,
            slots=jax.tree.map(put, code.slots, own),
            blocks=jax.tree.map(put_block, code.blocks, shared),
        )

    def _block(
        self, code: BlockCode, slot: Int[Array, "B Hk"]
    ) -> tuple[Int[Array, "B Hk T"], Int[Array, "B Hk"], Bool[Array, "B Hk T"]]:
        """The slots of the block that `slot` is in, its number, and which of these slots are its own."""
        number = code.numbers(slot[..., None], self.tokens)[..., 0]
        place = number[..., None] * self.tokens + jnp.arange(self.tokens)
        return _slots(code.start[..., None], place, code.count), number, place < code.count

    def decode(self, code: BlockCode) -> Float[Array, "B Hk C D"]:
        slots = code.count
        at = self._places(code.start, slots)
        shape = (*at.shape[:2], at.shape[2] // self.tokens, self.tokens)

        def by_block(x: Array) -> Array:
            index = at.reshape(*at.shape, *(1,) * (x.ndim - 3))
            return jnp.take_along_axis(x, index, axis=2).reshape(*shape, *x.shape[3:])

        x = self.numbers(jax.tree.map(by_block, code.slots), code.blocks)
        return _back(x.reshape(*at.shape, x.shape[-1]), code.start, slots).astype(code.dtype)

    def _places(self, start: Int[Array, "B Hk"], slots: int) -> Int[Array, "B Hk _"]:
        """The slot of every place of every block."""
        return _slots(start[..., None], jnp.arange(-(-slots // self.tokens) * self.tokens), slots)


def _slots(start: Int[Array, "*n 1"], place: Int[Array, "*#m T"], slots: int) -> Int[Array, "*n T"]:
    """The slots at these places from `start` on; places past the last slot give some slot."""
    return ((start + place) % max(slots, 1)).astype(jnp.int32)


def _back(x: Any, start: Int[Array, "B Hk"], slots: int) -> Any:
    """What stands in the places of all blocks, in its slots."""
    back = (jnp.arange(slots) - start[..., None]) % max(slots, 1)
    return jnp.take_along_axis(x, back.reshape(*back.shape, *(1,) * (x.ndim - 3)), axis=2)
