"""Slots in the order of the text."""

import numpy as np

from jaxkv.store import Pool


def in_text_order(value, positions):
    """`value [Hk, S]` of the filled slots, by position."""
    value, positions = np.asarray(value), np.asarray(positions)
    rows = [v[p >= 0][np.argsort(p[p >= 0])] for v, p in zip(value, positions, strict=True)]
    return np.stack(rows)


def heads_of(layer, row=0):
    """The positions of each head's slots, whether the heads hold equally many or share a pool."""
    positions = np.asarray(layer.positions[row])
    return np.split(positions, np.asarray(layer.offsets[row]))[1:-1] if isinstance(layer, Pool) else list(positions)
