"""A second tier in plain NumPy: the best of what leaves, coded and decoded again."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import ml_dtypes
import numpy as np


def outwards(x: np.ndarray, up: bool) -> np.ndarray:
    """The nearest float16 that is not below (above) x."""
    small = x.astype(np.float16)
    beyond = small.astype(np.float64) < x if up else small.astype(np.float64) > x
    return np.where(beyond, np.nextafter(small, np.float16(np.inf if up else -np.inf)), small).astype(np.float64)


def hadamard(width: int) -> np.ndarray:
    """Sylvester's matrix, orthonormal; `width` is a power of two."""
    out = np.ones((1, 1))
    while len(out) < width:
        out = np.kron([[1, 1], [1, -1]], out)
    return out / width**0.5


def coded(x: np.ndarray, bits: int, channels: int = 0, turned: bool = False) -> np.ndarray:
    """x [..., D] after integers with a scale and an offset for each run of channels: low + step * code."""
    width = x.shape[-1]
    if turned:
        return coded(x @ hadamard(width), bits, channels) @ hadamard(width).T
    runs = x.reshape(*x.shape[:-1], -1, channels or width)
    low = outwards(runs.min(-1, keepdims=True), up=False)
    step = outwards((runs.max(-1, keepdims=True) - low) / (2**bits - 1), up=True)
    code = np.clip(np.rint((runs - low) / np.where(step > 0, step, 1)), 0, 2**bits - 1)
    return (low + step * code).reshape(x.shape)


def small_floats(x: np.ndarray) -> np.ndarray:
    """x [..., D] after float8_e4m3 with a scale."""
    step = outwards(np.abs(x).max(-1, keepdims=True) / 448, up=True)
    return (x / np.where(step > 0, step, 1)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(
        np.float64
    ) * step


def in_bits(bits: int, channels: int = 0, turned: bool = False) -> Callable[[np.ndarray], np.ndarray]:
    """`coded` with these choices."""
    return lambda x: coded(x, bits, channels, turned)


@dataclasses.dataclass
class Held:
    """What one head's tier holds, the best first."""

    at: np.ndarray
    worth: np.ndarray
    key: np.ndarray
    value: np.ndarray

    def best(self, other: "Held", slots: int) -> tuple["Held", float]:
        """The best of both, of equals the older; and how near the worst of them came to the best that is dropped."""
        both = [np.concatenate(pair) for pair in zip(*map(fields, (self, other)), strict=True)]
        order = np.lexsort((both[0], -both[1]))
        near = np.inf
        if len(order) > slots:
            stays, leaves = both[1][order[slots - 1]], both[1][order[slots]]
            near = np.inf if stays == leaves else (stays - leaves) / max(abs(stays), abs(leaves), 1e-30)
        return Held(*(x[order[:slots]] for x in both)), near


def fields(x: Any) -> list[np.ndarray]:
    return [getattr(x, field.name) for field in dataclasses.fields(x)]


class Tiered:
    """A rule whose entries, when they leave, go to a tier of `slots`, by what they were worth then. `codes` say what is
    left of keys and of values; `balance` is as of `Demote`."""

    close = 4e-3  # a scale of float32 may round to another float16
    slots = 8
    codes: ClassVar[tuple[Callable, Callable]]
    balance = "none"

    def __init__(self, budget: int):
        super().__init__(budget)
        self.said, self.tiers, self.looked_at, self.balances = {}, {}, {}, {}

    def prompt(self, seen):
        worth = super().prompt(seen)
        largest = lambda x: np.abs(x).max(1)  # noqa: E731
        for number, row in enumerate(worth):
            own = seen.query[number * seen.group : (number + 1) * seen.group]
            key, value = seen.key[number], seen.value[number]
            asked = largest(own).max(0) if self.balance == "queries" else 1.0
            by_key = np.sqrt(asked / np.abs(key).max(0)) if self.balance != "none" else 1.0
            by_value = 1 / np.sqrt(np.abs(value).max(0)) if self.balance == "channels" else 1.0
            centre = 0.0
            if self.balance == "ranges":
                centre, half = (key.min(0) + key.max(0)) / 2, np.ptp(key, axis=0) / 2
                by_key = 1 / np.maximum(half, 2 / len(key) * half.mean())
            self.said[seen.layer, number] = row
            self.balances[seen.layer, number] = ((centre, by_key), (0.0, by_value))
        return worth

    def step(self, head, mass, now):
        worth = super().step(head, mass, now)
        self.said[head.layer, head.number] = worth
        return worth

    def leave(self, head, stay, now, prompt):
        name, gone = (head.layer, head.number), np.setdiff1d(np.arange(len(head.at)), stay)
        key, value = (
            code((x[gone] - centre) * factor) / factor + centre
            for x, (centre, factor), code in zip((head.key, head.value), self.balances[name], self.codes, strict=True)
        )
        new = Held(head.at[gone], self.said[name][gone], key, value)
        none = Held(*(x[:0] for x in fields(new)))
        self.tiers[name], near = self.tiers.get(name, none).best(new, self.slots)
        self.near = min(self.near, near)
        return super().leave(head, stay, now, prompt)

    def beside(self, head):
        held = self.tiers[head.layer, head.number]
        self.looked_at[head.layer, head.number] = held
        return held.key, held.value, np.zeros(len(held.at))
