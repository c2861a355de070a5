"""Which block of which row is on the chip at each step of a decode kernel.

The grid is (parts, steps): one for each block of each of a part's rows, and then those that look back at its last row.
A step looks at a block of one row and at the same block of the row before. Behind the last row one step looks back at
all of its blocks, if the chip has room for what that takes (`at_once`), else one step at each. A block in which its row
sees nothing is not fetched: the one that was fetched last stays, or the first that will be is there already.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

NONE = -(2**31)  # in place of an entry


@dataclasses.dataclass(frozen=True)
class Walk:
    """`slots` of each of `batch` rows, in `blocks` blocks of `block`; so many `parts`, one for each core."""

    slots: int
    block: int
    blocks: int
    batch: int
    parts: int
    at_once: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def width(self) -> int:
        """Slots of whole blocks."""
        return self.block * self.blocks

    @property
    def rows(self) -> int:
        """Rows of a part; the last part may have fewer."""
        return -(-self.batch // self.parts)

    @property
    def steps(self) -> tuple[int, int]:
        """The grid."""
        return self.parts, self.rows * self.blocks + (1 if self.at_once else self.blocks)

    def place(self, step):
        """The row of its part, and the block, of a step; the row behind the last is looked back from alone."""
        return lax.div(step, self.blocks), lax.rem(step, self.blocks)

    def looked_at(self, row, block):
        """The blocks of the row before that a step looks back at: the first, and the one behind the last."""
        if not self.at_once:
            return block, block + 1
        return block, jnp.where(row == self.rows, self.blocks, block + 1)

    # The row that a step attends to, the one that it looks back at, and whether there is one: indices by part and row.

    def last(self, part):
        """The last row of a part."""
        return jnp.minimum((part + 1) * self.rows, self.batch) - 1

    def here(self, part, row):
        """The row that is attended to, or the part's last behind it, and whether it is one."""
        own = part * self.rows + row
        return jnp.minimum(own, self.last(part)), own <= self.last(part)

    def before(self, part, row):
        """The row that is looked back at, or the nearest, and whether it is one."""
        own = part * self.rows + row - 1
        return jnp.clip(own, part * self.rows, self.last(part)), (row > 0) & (own <= self.last(part))

    # Entries of the table: a row, a block, and whether the block has empty slots.

    @property
    def _shift(self) -> int:
        """Bits of an entry below the row."""
        return 1 + (self.blocks - 1).bit_length()

    def at(self, part, row):
        """Where the entries of a part's row are in the table."""
        return part * (self.rows + 1) + row

    def row_of(self, entry):
        """The row of an entry."""
        return lax.shift_right_logical(entry, self._shift)

    def block_of(self, entry):
        """Its block."""
        return lax.shift_right_logical(entry & ((1 << self._shift) - 1), 1)

    def fetched(self, entry, row, block):
        """Whether a step's own block, of this row, is what is there."""
        return lax.shift_right_logical(entry, 1) == (row << (self._shift - 1)) + block

    def table(self, positions: Int[Array, "B H S"], position: Int[Array, "B"], window: int | None) -> Int[Array, "T N"]:
        """The entry of what is there in each step of each part's rows, and one more: the block itself, where the row
        runs and sees something in it; else what was due last before it, or first of all."""
        batch, sets, _ = positions.shape
        place = jnp.pad(positions, ((0, 0), (0, 0), (0, self.width - self.slots)), constant_values=-1)
        place = place.reshape(batch, sets, self.blocks, self.block)
        seen = place >= 0
        if window is not None:
            seen = seen & (place > (position[:, None, None, None] - window))
        due, hollow = jnp.any(seen, axis=(1, 3)), jnp.any(place < 0, axis=(1, 3))
        number = np.arange(self.blocks, dtype=np.int32)
        entries = (np.arange(batch, dtype=np.int32)[:, None] << self._shift) + 2 * number
        entries = entries + hollow.astype(jnp.int32)  # in the order of the steps
        due = due & (position[:, None] >= 0)
        entry = jnp.where(due, entries, NONE)
        own = jnp.max(jnp.where(number <= number[:, None], entry[:, None], NONE), axis=-1)
        own = jnp.pad(own, ((0, self.parts * self.rows - batch), (0, 0)), constant_values=NONE)
        own = jnp.pad(own.reshape(self.parts, self.rows, -1), ((0, 0), (0, 1), (0, 0)), constant_values=NONE)
        own = own.reshape(-1, self.blocks)
        # of the rows before a step the last entry; of those behind it the first as -2 - entry, less than any entry
        behind = np.arange(self.parts)[:, None] * self.rows + np.arange(self.rows + 1)
        earlier = np.arange(batch) < np.minimum(behind, batch).reshape(-1, 1)
        last, first = jnp.max(entry, axis=1), jnp.max(jnp.where(due, -2 - entries, NONE), axis=1)
        other = jnp.max(jnp.where(earlier, last, first), axis=1, keepdims=True)
        other = jnp.where(other >= 0, other, jnp.where(other == NONE, 0, -2 - other))
        return jnp.where(own >= 0, own, other)

    def whole(self, x: jax.Array, columns: bool) -> jax.Array:
        """A cache filled up to whole blocks with NaN, or with ones in all bits, as the interpreter does, which gives an
        aliased one back so."""
        axis = x.ndim - (1 if columns else 2)
        grow = [(0, (self.width - self.slots) * (at == axis)) for at in range(x.ndim)]
        return jnp.pad(x, grow, constant_values=255 if x.dtype == jnp.uint8 else jnp.nan)
