"""Stores: what an entry is and where it lies, and the few pure operations on them."""

from typing import Any

from jaxkv.store import pool, slots
from jaxkv.store.cache import KVCache as KVCache
from jaxkv.store.codecs import Codecs as Codecs
from jaxkv.store.entries import EMPTY as EMPTY
from jaxkv.store.entries import Entries as Entries
from jaxkv.store.pool import Pool as Pool
from jaxkv.store.slots import Slots as Slots


def empty(
    kind: str,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: Any,
    stats: tuple[str, ...],
    codecs: Codecs,
    beside: dict[str, Any],
    weighs: bool = False,
) -> Slots | Pool:
    """A store without a slot, where a prompt begins: "slots", "pool", or a "line"'s candidates, which are pools.
    `weighs`: its entries may stand for several tokens."""
    if kind == "slots":
        return slots.empty(batch, heads, 0, head_dim, dtype, stats, codecs, beside, weighs)
    return pool.empty(batch, heads, head_dim, dtype, stats, codecs, beside, weighs)
