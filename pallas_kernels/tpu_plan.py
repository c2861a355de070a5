"""What a decode step on TPU is compiled for: what goes through a block together, and what the chip holds of it."""

import dataclasses
import math

from pallas_kernels import tpu_blocks as blocks_of
from pallas_kernels.arguments import Rule
from pallas_kernels.tpu_codes import Form
from pallas_kernels.tpu_walk import Walk


@dataclasses.dataclass(frozen=True)
class Plan(Walk):
    """The numbers that the kernel is compiled for."""

    sets: int
    members: int
    kv_heads: int
    pooled: bool
    scale: float
    window: int | None
    softcap: float | None
    reduce: str
    rule: Rule | None
    weight: float | None  # None: an array, which is an input then
    bias: float | None
    biased: bool  # the logits, which is an input then
    with_mass: bool
    keys: Form
    values: Form
    together: int = 1  # sets whose query heads fill a register with each other
    keeps_places: bool = False  # a row's positions stay on the chip until it has been looked back at

    @property
    def packs(self) -> int:
        """Sets, those that are together as one."""
        return self.sets // self.together

    @property
    def each(self) -> int:
        """Query heads of a pack."""
        return self.members * self.together

    @property
    def coded(self) -> bool:
        """Whether the token itself is what the softmax begins with."""
        return self.keys.coded or self.values.coded

    @property
    def of_slots(self) -> tuple[int, int]:
        """The shape of what a block's slots have: a row for each set, or 128 slots of a pool in each."""
        return (self.block // blocks_of.LANES, blocks_of.LANES) if self.pooled else (self.sets, self.block)

    def beside(self, groups: int) -> tuple[int, ...]:
        """The shape of a block's scales, or lows, where slots have so many each."""
        if groups == 1:
            return self.of_slots
        return (groups, *self.of_slots) if self.pooled else (self.sets, groups, self.block)

    def held_rows(self, groups: int) -> int:
        """Numbers that the chip holds for a slot's scales: rows lie eight at a time where there are several sets."""
        if self.pooled:
            return groups
        rows, each = (self.sets, 1) if groups == 1 else (groups, self.sets)
        return each * blocks_of.round_up(rows, blocks_of.SUBLANES)

    @property
    def of_row(self) -> tuple[int, int]:
        """As `of_slots`, of a row's blocks."""
        return (self.blocks * self.of_slots[0], blocks_of.LANES) if self.pooled else (self.sets, self.width)

    @property
    def query_rows(self) -> int:
        """Rows that the chip holds for all query heads."""
        few = self.each < blocks_of.SUBLANES
        padded = 2 ** (self.each - 1).bit_length() if few else blocks_of.round_up(self.each, blocks_of.SUBLANES)
        return self.packs * padded

    @property
    def mass_rows(self) -> int:
        """Rows that it holds for the masses."""
        if self.reduce == "each" and not self.pooled:
            return self.query_rows
        return self.held_rows(1) * (self.members // self.kv_heads if self.reduce == "each" else 1)

    @property
    def buffers(self) -> int:
        """Rows whose logits are on the chip at a time: the one that is read, and the one before."""
        return min(2, self.rows)

    @property
    def bands(self) -> list[tuple[int, int]]:
        """The KV heads that go through a block together, first and last: all, or those of a pool in `bands`."""
        return bands(self.kv_heads, self.members // self.kv_heads) if self.pooled else [(0, self.kv_heads - 1)]

    def rows_of(self, band: tuple[int, int]) -> slice:
        """A band's query heads among those of a set."""
        group = self.members // self.kv_heads
        return slice(band[0] * group, (band[1] + 1) * group) if self.pooled else slice(None)

    def rows_of_set(self, number: int) -> slice:
        """The rows of one of the sets that are together."""
        return slice(number * self.members, (number + 1) * self.members)


def together(pooled: bool, sets: int, members: int) -> int:
    """How many sets' query heads go through their slots together: as many as fill a register, if they fill one."""
    many = blocks_of.SUBLANES // members if blocks_of.SUBLANES % members == 0 else 1
    return many if not pooled and sets % many == 0 else 1


def bands(kv_heads: int, group: int) -> list[tuple[int, int]]:
    """A pool's KV heads, as few together as fill whole registers with their query heads: the first and the last."""
    each = blocks_of.SUBLANES // math.gcd(blocks_of.SUBLANES, group)
    return [(first, min(first + each, kv_heads) - 1) for first in range(0, kv_heads, each)]


def vmem_bytes(plan: Plan, row_bytes: int, factors: int) -> int:
    """On-chip memory: two blocks of K, V, positions, masses, factors and a bias each, and the logits of two rows."""
    logits = plan.buffers * 4 * plan.width * plan.query_rows if plan.with_mass else 0
    rows = plan.mass_rows + plan.held_rows(1) * (2 + factors)
    return 4 * plan.block * row_bytes + logits + 8 * plan.block * rows + 2**22


def line_bytes(plan: Plan, factors: int) -> int:
    """On-chip memory of what comes and goes of the row before: masses, factors, and positions that are fetched again,
    two of each."""
    masses = plan.mass_rows if plan.with_mass else 0
    slots = plan.width if plan.at_once else plan.block
    return 8 * slots * (masses + plan.held_rows(1) * (factors + (not plan.keeps_places)))
