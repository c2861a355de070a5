"""Layers that hold something together, as a line, in pairs or in a chain: apart for a block or a step, and together
behind it."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Int

from jaxkv.store import line, pairs, predicted


def opened(layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Every layer as a store that can be read and written alone."""
    return predicted.opened(pairs.lent(line.opened(layers)))


def written(layers: tuple[Any, ...], after: tuple[Any, ...], position: Int[Array, "B"]) -> tuple[Any, ...]:
    """The layers after a decode step that left the stores `after`, whose token stands at `position [B]`; -1 marks a row
    that has finished, of which nothing is written."""
    alone = line.written(layers, after, position)
    return predicted.written(layers, pairs.returned(layers, alone, position), position)


def begun(layers: Sequence[Any], windows: Sequence[int | None]) -> tuple[Any, ...]:
    """The layers behind their first prompt, with sliding `windows` (None: without), which are together from now on."""
    return predicted.begun(pairs.begun(layers, windows), windows)


def rejoined(layers: Sequence[Any]) -> tuple[Any, ...]:
    """The layers after another block, which left each alone."""
    return predicted.rejoined(pairs.rejoined(layers))
