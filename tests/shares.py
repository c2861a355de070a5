"""Budgets of heads by measured scores, in plain NumPy and exact fractions."""

from fractions import Fraction

import numpy as np


def apportioned(left, shares, room):
    """`left` by shares under caps, in exact fractions: the level at which caps bind, then the largest remainders."""
    room = [each if share > 0 else 0 for each, share in zip(room, shares, strict=True)]
    if left >= sum(room):
        return room
    level = lambda x: sum(min(x * share, cap) for share, cap in zip(shares, room, strict=True))  # noqa: E731
    below = Fraction(0)
    for knot in sorted(Fraction(cap, share) for cap, share in zip(room, shares, strict=True) if share > 0):
        if level(knot) > left:
            break
        below = knot
    rising = sum(share for share, cap in zip(shares, room, strict=True) if share > 0 and below * share < cap)
    at = below + (left - level(below)) / rising
    exact = [min(at * share, Fraction(cap)) for share, cap in zip(shares, room, strict=True)]
    given = [int(each) for each in exact]
    order = sorted(range(len(given)), key=lambda head: (given[head] - exact[head], head))
    for head in order[: left - sum(given)]:
        given[head] += 1
    return given


def headkv_budgets(scores, budget, window, beta, tokens, reserve=0, spared=None):
    """`[L, Hk]`: window + base + a share of the model's pool in proportion to the score, by its formula; then whole
    tokens per layer and head, by largest remainders. Of a layer's tokens `reserve` per head are left free, and every
    head has `spared` (the window) before the rest is shared."""
    heads = scores.shape[1]
    part = scores / scores.mean() / beta + 1 - 1 / beta
    layers = apportioned(len(part) * (budget - window), _whole(part.mean(1)), [tokens - window] * len(part))
    spared = window if spared is None else spared
    totals = [heads * (window + total - reserve - spared) for total in layers]
    room = [tokens - spared] * heads
    return spared + np.array([apportioned(*each, room) for each in zip(totals, map(_whole, part), strict=True)])


def _whole(shares):
    """Shares as whole numbers, fine ones."""
    return np.round(shares / shares.max() * 4095).astype(int).tolist()
