"""Windows: the newest and the first tokens' keys and values as the model makes them, beside their codes."""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.store.entries import EMPTY, Entries
from pallas_kernels.arguments import Token
from pallas_kernels.masking import visible
from pallas_kernels.partial import Partial, attend_few

WINDOW = "window"  # the name under which that of the newest tokens lies beside the slots
INITIAL = "initial"  # and that of the first
WINDOWS = (WINDOW, INITIAL)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """The last R tokens of each KV head, the one at position p in place p % R; or, `first`, its first R tokens. `seen`
    counts the row's tokens. None where keys or values are plain in the slots.

    Every entry has its code in a slot as well, from the exact numbers; the window is read instead of it. So gathers,
    cuts and evictions move codes alone, and an entry that has been evicted is simply not asked for.
    """

    keys: Float[Array, "B Hk R D"] | None
    values: Float[Array, "B Hk R D"] | None
    positions: Int[Array, "B Hk R"]
    seen: Int[Array, "B"]
    first: bool = dataclasses.field(default=False, metadata={"static": True})

    attends: ClassVar[bool] = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of its keys and values."""
        return sum(x.nbytes for x in (self.keys, self.values) if x is not None)

    def over(
        self,
        name: str,
        x: Float[Array, "B *S D"],
        positions: Int[Array, "B *S"],
        owner: Int[Array, "B *S"],
        whole: bool,
    ) -> Float[Array, "B *S D"]:
        """`x`, the decoded "keys" or "values" of entries at these positions of these heads, with what the window holds
        put over it. `whole`: tokens leave the window R at a time, when it is full; otherwise one by one."""
        held = getattr(self, name)
        batch, heads, size, dim = held.shape
        if positions.ndim == 3:  # each head's own slots: devices that divide the heads have what they need
            at = positions % size
            there = jnp.take_along_axis(self.positions, at, axis=2)
            exact = jnp.take_along_axis(held, at[..., None], axis=2)
        else:
            flat = jnp.minimum(owner, heads - 1) * size + positions % size
            there = jnp.take_along_axis(self.positions.reshape(batch, -1), flat, axis=1)
            exact = jnp.take_along_axis(held.reshape(batch, -1, dim), flat[..., None], axis=1)
        seen = self.seen.reshape(batch, *(1,) * (positions.ndim - 1))
        inside = (positions >= 0) & (there == positions) & (owner < heads)
        inside &= self.stays(positions, seen, whole)
        return jnp.where(inside[..., None], exact, x)

    def holds(self, positions: Int[Array, "B Hk S"]) -> Bool[Array, "B Hk S"]:
        """Whether tokens of the slots at these positions lie in the window as well: it has what the slots hold of the
        newest, or of the first."""
        size = self.positions.shape[2]
        return positions < size if self.first else positions >= (self.seen - size)[:, None, None]

    def stays(self, positions: Int[Array, "B *S"], seen: Int[Array, "B *#S"], whole: bool) -> Bool[Array, "B *S"]:
        """Whether tokens that lie in the window are read from it: with `whole`, until it is full for the next time."""
        size = self.positions.shape[2]
        return positions >= (seen // size * size if whole and not self.first else jnp.zeros_like(seen))

    def read(
        self,
        token: Token,
        held: Bool[Array, "B Hk R"],
        of_slots: dict[str, Float[Array, "B Hk R D"]],
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Partial:
        """Attention of a token to those of the window's that are `held`, with the mass of each query head; a model's
        sliding `window` as everywhere.
        `of_slots` has the "keys" or "values" as they lie in the slots where they leave the window all at once, or where
        it has none."""
        stay = self.stays(self.positions, self.seen[:, None, None], whole=True)[..., None]

        def both(name: str, exact: Any) -> Float[Array, "B Hk R D"]:
            if name not in of_slots:
                return exact
            return of_slots[name] if exact is None else jnp.where(stay, exact, of_slots[name])

        keys, values = both("keys", self.keys), both("values", self.values)
        seen = held[:, :, None] & visible(token.position[:, None, None], self.positions, window)
        few = attend_few(token.query[:, :, None], keys, values, seen, scale=scale, softcap=softcap, group="each")
        return few.now()

    def with_token(
        self, key: Float[Array, "B Hk D"], value: Float[Array, "B Hk D"], position: Int[Array, "B"]
    ) -> "Window":
        """The window after a decode step; a row whose position is -1 has finished."""
        batch, heads, size = self.positions.shape
        at = jnp.where(self._takes(position), position % size, size)  # out of range, so dropped
        index = jnp.arange(batch)[:, None], jnp.arange(heads)[None, :], at[:, None]

        def put(old: Any, new: Array) -> Any:
            return None if old is None else old.at[index].set(new.astype(old.dtype), mode="drop")

        positions = put(self.positions, jnp.broadcast_to(position[:, None], (batch, heads)))
        seen = jnp.maximum(self.seen, position + 1)
        return Window(put(self.keys, key), put(self.values, value), positions, seen, self.first)

    def _takes(self, position: Int[Array, "*n"]) -> Bool[Array, "*n"]:
        """Whether a token at this position has a place when it comes."""
        return (position >= 0) & (position < self.positions.shape[2]) if self.first else position >= 0

    def changed_at(
        self, position: Int[Array, "B Hk"], key: Float[Array, "B Hk D"], value: Float[Array, "B Hk D"]
    ) -> "Window":
        """The window with another key and value for the token at `position` of each head, where it holds that."""
        batch, heads, size = self.positions.shape
        rows, of = jnp.arange(batch)[:, None], jnp.arange(heads)[None, :]
        here = (position >= 0) & (self.positions[rows, of, position % size] == position)
        index = rows, of, jnp.where(here, position % size, size)  # out of range, so dropped

        def put(old: Any, new: Array) -> Any:
            return None if old is None else old.at[index].set(new.astype(old.dtype), mode="drop")

        return Window(put(self.keys, key), put(self.values, value), self.positions, self.seen, self.first)

    def filled_from(self, entries: Entries, chosen: Bool[Array, "B Hk S"]) -> "Window":
        """The window anew, of the `chosen` ones of plain entries: those among the row's newest, or first, R tokens."""
        size = self.positions.shape[2]
        newest = jnp.max(entries.positions, axis=(1, 2), initial=EMPTY)
        seen = jnp.maximum(self.seen, newest + 1)
        due = self._takes(entries.positions) if self.first else entries.positions >= (seen - size)[:, None, None]
        stay = chosen & entries.filled & due
        rows, heads = jnp.arange(stay.shape[0])[:, None, None], jnp.arange(stay.shape[1])[None, :, None]
        at = (rows, heads, jnp.where(stay, entries.positions % size, size))  # out of range, so dropped

        def put(old: Any, new: Array) -> Any:
            return None if old is None else jnp.zeros_like(old).at[at].set(new.astype(old.dtype), mode="drop")

        positions = jnp.full_like(self.positions, EMPTY).at[at].set(entries.positions, mode="drop")
        return Window(put(self.keys, entries.keys), put(self.values, entries.values), positions, seen, self.first)


def apart(
    windows: Iterable[Window], positions: Int[Array, "B Hk S"], filled: Bool[Array, "B Hk S"]
) -> tuple[Bool[Array, "B Hk S"], list[Int[Array, "B Hk R"]]]:
    """Which filled slots' tokens lie in a window, and the slot of each window's tokens, -1 of those that have none; one
    that lies in two windows counts in the first."""
    left, slots = filled, []
    for state in windows:
        inside = left & state.holds(positions)
        at = jnp.where(inside, positions, EMPTY - 1)  # never an empty place's
        slots.append(
            lax.platform_dependent(at, state.positions, cpu=_slots_put, tpu=_slots_in_a_row, default=_slots_found)
        )
        left &= ~inside
    return filled & ~left, slots


def _slots_found(at: Int[Array, "B Hk S"], positions: Int[Array, "B Hk R"]) -> Int[Array, "B Hk R"]:
    """The slot that has each of these positions, -1 where none has: by comparing, which vector units do best."""
    number = jnp.arange(at.shape[2], dtype=jnp.int32)[:, None]
    same = at[..., None] == positions[:, :, None]
    return jnp.max(jnp.where(same, number, EMPTY), axis=2, initial=EMPTY)


def _slots_in_a_row(at: Int[Array, "B Hk S"], positions: Int[Array, "B Hk R"]) -> Int[Array, "B Hk R"]:
    """The same: all at once by counting on from one where they lie behind each other, as where nothing is evicted."""
    filled, far = at >= 0, jnp.iinfo(jnp.int32).max
    shift = jnp.arange(at.shape[2], dtype=jnp.int32) - at  # of a token's slot from its position
    least, most = jnp.min(jnp.where(filled, shift, far), axis=2), jnp.max(jnp.where(filled, shift, -far), axis=2)
    asked = positions >= 0
    every = jnp.sum(filled, axis=2) == jnp.sum(asked, axis=2)
    in_a_row = every & ((least == most) | ~jnp.any(filled, axis=2))

    def counted() -> Int[Array, "B Hk R"]:
        return jnp.where(asked, positions + most[..., None], EMPTY)

    return lax.cond(jnp.all(in_a_row), counted, lambda: _slots_found(at, positions))


def _slots_put(at: Int[Array, "B Hk S"], positions: Int[Array, "B Hk R"]) -> Int[Array, "B Hk R"]:
    """The same by a write of every slot's number to its token's place, which a CPU does best."""
    batch, heads, size = positions.shape
    rows, of = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
    place = jnp.where(at >= 0, at % size, size)  # out of range, so dropped
    number = jnp.arange(at.shape[2], dtype=jnp.int32)
    found = jnp.full_like(positions, EMPTY).at[rows, of, place].set(number, mode="drop")
    there = jnp.take_along_axis(at, jnp.maximum(found, 0), axis=2) == positions
    return jnp.where(there & (found >= 0), found, EMPTY)


def empty(
    batch: int,
    heads: int,
    size: int,
    head_dim: int,
    dtype: Any,
    keys: bool = True,
    values: bool = True,
    first: bool = False,
) -> Window:
    """A window of `size` tokens that has seen none; for keys, for values, or for both."""
    of_keys, of_values = (jnp.zeros((batch, heads, size, head_dim), dtype) if some else None for some in (keys, values))
    nothing = jnp.full((batch, heads, size), EMPTY, jnp.int32)
    return Window(of_keys, of_values, nothing, jnp.zeros(batch, jnp.int32), first)
