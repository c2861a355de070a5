"""Layers that hold something together, as a line or in pairs: apart for a block or a step, and together behind it."""

from typing import Any

from jaxtyping import Array, Int

from jaxkv.store import line, pairs


def opened(layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Every layer as a store that can be read and written alone."""
    return pairs.lent(line.opened(layers))


def written(layers: tuple[Any, ...], after: tuple[Any, ...], position: Int[Array, "B"]) -> tuple[Any, ...]:
    """The layers after a decode step that left the stores `after`, whose token stands at `position [B]`; -1 marks a row
    that has finished, of which nothing is written."""
    return pairs.returned(layers, line.written(layers, after, position), position)
