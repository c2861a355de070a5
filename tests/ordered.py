"""Slots in the order of the text."""

import numpy as np


def in_text_order(value, positions):
    """`value [Hk, S]` of the filled slots, by position."""
    value, positions = np.asarray(value), np.asarray(positions)
    rows = [v[p >= 0][np.argsort(p[p >= 0])] for v, p in zip(value, positions, strict=True)]
    return np.stack(rows)
