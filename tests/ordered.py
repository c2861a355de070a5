"""Slots in the order of the text, and layers whatever their store."""

import numpy as np

from jaxkv.store.line import Place
from jaxkv.store.pool import Pool


def in_text_order(value, positions):
    """`value [Hk, S]` of the filled slots, by position."""
    value, positions = np.asarray(value), np.asarray(positions)
    rows = [v[p >= 0][np.argsort(p[p >= 0])] for v, p in zip(value, positions, strict=True)]
    return np.stack(rows)


def pooled(layer):
    """Whether the layer's heads share a pool."""
    return isinstance(layer, Pool)


def in_line(layer):
    """Whether the layer shares a line with others."""
    return isinstance(layer, Place)


def heads_of(layer, row=0):
    """The positions of each head's slots, whether the heads hold equally many or share a pool."""
    positions = np.asarray(layer.positions[row])
    return np.split(positions, np.asarray(layer.offsets[row]))[1:-1] if pooled(layer) else list(positions)


def changed(layers, change):
    """Every holder of entries changed: the line of the layers that share one, any other layer itself."""
    return tuple(
        layer.holding(layer.line and change(layer.line)) if in_line(layer) else change(layer) for layer in layers
    )
