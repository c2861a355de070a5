"""Blocks: runs of tokens that share a part of their code. Which slots are a block, and when one is encoded anew."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxkv.store.codec import Due, Exact, Shared, alike, in_front
from pallas_kernels.read_runs import read_runs
from pallas_kernels.read_runs.reference import Run
from pallas_kernels.write_runs import write_runs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCode:
    """What each slot has of its own, `[B, Hk, C, ...]`, and what each of F blocks of slots has, `[B, Hk, F, ...]`.

    Block f holds the slots `f * tokens` to `(f + 1) * tokens`; a cut leaves the entries in time order from the first
    slot on, so a block is tokens that follow each other. `dtype` is that of what was encoded.
    """

    slots: Any
    blocks: Any
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def count(self) -> int:
        """C, the slots of a head."""
        return jax.tree.leaves(self.slots)[0].shape[2]


class Blocks(Shared):
    """A codec of blocks of `tokens` that lie side by side.

    A block is encoded when the residual window has become full, from the window's exact numbers; after a cut all blocks
    are that have other neighbours. Until then a token is read from the window, and its slot holds any code.
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
        own, shared = self.coded(self._by_block(x), self._by_block(positions >= 0))
        own = jax.tree.map(lambda code: _in_a_row(code, x.shape[2]), own)
        return BlockCode(own, shared, str(x.dtype))

    def encode_again(self, held: BlockCode, x: Float[Array, "B Hk C D"], positions: Int[Array, "B Hk C"]) -> BlockCode:
        new, whole = self.encode_all(x, positions), min(held.count, x.shape[2]) // self.tokens
        if not whole:
            return new
        count = whole * self.tokens
        same = alike(self.decode(held)[:, :, :count], x[:, :, :count]) | (positions[:, :, :count] < 0)
        blocks = jnp.all(same.reshape(*same.shape[:2], whole, self.tokens), axis=-1)
        slots = jnp.repeat(blocks, self.tokens, axis=2)
        own, shared = (
            jax.tree.map(lambda old, new, keeps=keeps: in_front(keeps, old, new), old, now)
            for keeps, old, now in ((slots, held.slots, new.slots), (blocks, held.blocks, new.blocks))
        )
        return dataclasses.replace(new, slots=own, blocks=shared)

    def encode_where(
        self, code: BlockCode, rows: Bool[Array, "B"], due: Due, exact: Exact, implementation: str | None
    ) -> BlockCode:
        heads = jax.tree.leaves(code.slots)[0].shape[:2]

        def some() -> Bool[Array, "B Hk F"]:
            return jnp.any(self._by_block(due() & rows[:, None, None]), axis=-1)

        def none() -> Bool[Array, "B Hk F"]:
            return jnp.zeros((*heads, -(-code.count // self.tokens)), bool)

        blocks = lax.cond(jnp.any(rows), some, none)  # looked for once in a window

        def one(carry: tuple[Array, BlockCode]) -> tuple[Array, BlockCode]:
            left, code = carry
            here, number = jnp.any(left, axis=-1), jnp.argmax(left, axis=-1).astype(jnp.int32)
            runs, form = self._runs(code, number)
            own, shared = jax.tree.unflatten(form, read_runs(*runs, implementation=implementation))
            x = self.numbers(own, jax.tree.map(lambda x: x[:, :, 0], shared)).astype(code.dtype)
            x, filled = exact(jnp.minimum(runs[0].slots, code.count - 1), x)
            own, shared = self.coded(x, filled & (runs[0].slots < code.count))
            new = jax.tree.leaves((own, jax.tree.map(lambda x: x[:, :, None], shared)))
            after = write_runs(here, tuple(new), *runs, implementation=implementation)
            slots, blocks = jax.tree.unflatten(form, after)
            left &= jnp.arange(left.shape[2]) != number[..., None]
            return left, dataclasses.replace(code, slots=slots, blocks=blocks)

        return lax.while_loop(lambda carry: jnp.any(carry[0]), one, (blocks, code))[1]

    def _runs(self, code: BlockCode, number: Int[Array, "B Hk"]) -> tuple[list[Run], Any]:
        """The block of this number in the arrays of slots and in those of blocks."""
        slots = [Run(x, number * self.tokens, self.tokens) for x in jax.tree.leaves(code.slots)]
        blocks = [Run(x, number, 1) for x in jax.tree.leaves(code.blocks)]
        return slots + blocks, jax.tree.structure((code.slots, code.blocks))

    def behind(self, code: BlockCode, more: int) -> BlockCode:
        blocks = -(-(code.count + more) // self.tokens) - jax.tree.leaves(code.blocks)[0].shape[2]
        slots, shared = (super(Blocks, self).behind(x, n) for x, n in ((code.slots, more), (code.blocks, blocks)))
        return dataclasses.replace(code, slots=slots, blocks=shared)

    def decode(self, code: BlockCode) -> Float[Array, "B Hk C D"]:
        x = self.numbers(jax.tree.map(self._by_block, code.slots), code.blocks)
        return _in_a_row(x, code.count).astype(code.dtype)

    def _by_block(self, x: Shaped[Array, "B Hk C *n"]) -> Shaped[Array, "B Hk F T *n"]:
        """The slots block by block; what lies behind the last is 0."""
        blocks = -(-x.shape[2] // self.tokens)
        behind = [(0, (blocks * self.tokens - x.shape[2]) * (axis == 2)) for axis in range(x.ndim)]
        return jnp.pad(x, behind).reshape(*x.shape[:2], blocks, self.tokens, *x.shape[3:])


def _in_a_row(x: Shaped[Array, "B Hk F T *n"], slots: int) -> Shaped[Array, "B Hk C *n"]:
    """So many slots that lie block by block."""
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :slots]
