"""Pairs: two adjacent layers hold one direction for each key or value, and a length each.

The lower layer of a pair holds the directions, the upper one lengths alone. For a block of a prompt or a step the upper
one is lent the directions (`lent`), so that each layer reads and writes a store of its own. Behind it the directions of
what is new are joined (`returned`, `rejoined`), and the upper layer gives back what it was lent. Both hold the same
tokens in the same slots, which is so where nothing is evicted.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxkv.errors import BadValue
from jaxkv.store.codec import Codec, Fitting
from jaxkv.store.entries import highest, packed, picked, placed_at
from jaxkv.store.fit import FIT

LOWER, UPPER = "lower", "upper"
NAMES = ("keys", "values")
ALIKE = 1e-3  # directions nearer to each other than this sine are mixed along the straight line
TINY = float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Paired(Fitting):
    """x_l^ = |x_l| e in both layers l of a pair, e = (sin((1 - t) w) u_low + sin(t w) u_up) / sin w, w being the angle
    between the directions u = x / |x| in the two layers, and t = `toward`. In each KV head the `exact` share of the
    tokens whose w is largest are held as they are in both layers.

    Layers are paired two by two from `after` (a share of the layers) on; those with a sliding window, and a last one
    without another, hold everything. A prompt is joined when it has been read, and each later token behind its step.
    Source: MiniCache (arXiv 2405.14366), equations 2 to 5, read from those who rebuilt it: its code is not public.
    Ours: angles are compared within a KV head, of keys and of values each, and no token that is decoded is held apart
    before a prompt follows it.
    """

    after: float = 0.5
    toward: float = 0.6
    exact: float = 0.05
    kind: ClassVar[str] = "paired"
    pooled: ClassVar[bool] = False
    pairs: ClassVar[bool] = True

    def __post_init__(self):
        if not (0 <= self.after < 1 and 0 <= self.toward <= 1 and 0 <= self.exact <= 1):
            raise BadValue(
                f"after={self.after}, toward={self.toward}, exact={self.exact}: expected shares of the "
                "layers (below 1), of the way from the lower to the upper direction, and of the tokens, from 0 to 1"
            )

    def roles(self, windows: Sequence[int | None]) -> list[str]:
        """Of every layer whether it is the lower or the upper one of a pair, or "" for neither."""
        roles = [""] * len(windows)
        for lower in range(int(self.after * len(windows)), len(windows) - 1, 2):
            if windows[lower] is None and windows[lower + 1] is None:
                roles[lower : lower + 2] = LOWER, UPPER
        return roles

    def fitted(self, fit: "PairHalf | None") -> Codec:
        return self if fit is None else Joint(fit)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairHalf:
    """A layer's part in a pair: its keys or values of the N tokens that are `apart`, and which layer of the two it is.
    `lent`: the directions of the lower layer stand in the upper one's code."""

    apart: Float[Array, "B Hk N D"]
    role: str = dataclasses.field(metadata={"static": True})
    lent: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairCode:
    """Lengths, and which of the tokens that are apart stands in each slot (-1: none); and the directions, but not in an
    upper layer at rest."""

    lengths: Float32[Array, "*slots"]
    place: Int[Array, "*slots"]
    directions: Float[Array, "*slots D"] | None


@dataclasses.dataclass(frozen=True)
class Joint(Codec):
    """Lengths times directions, and the tokens that are apart as they are."""

    half: PairHalf

    def encode(self, x: Float[Array, "*slots D"]) -> PairCode:
        lengths, directions = parted(x.astype(jnp.float32))
        held = self.half.role == LOWER or self.half.lent
        nowhere = jnp.full(x.shape[:-1], -1, small_enough(self.half.apart.shape[2]))
        return PairCode(lengths, nowhere, directions.astype(x.dtype) if held else None)

    def decode(self, code: PairCode) -> Float[Array, "*slots D"]:
        assert code.directions is not None, "an upper layer is read with the directions of the lower one"
        x = (code.lengths[..., None] * code.directions).astype(code.directions.dtype)
        place = code.place.astype(jnp.int32)[..., None]
        exact = jnp.take_along_axis(self.half.apart, jnp.maximum(place, 0), axis=2)
        return jnp.where(place >= 0, exact, x)


def small_enough(room: int) -> Any:
    """The integers that number so many tokens."""
    return jnp.int16 if room < 2**15 else jnp.int32


def parted(x: Float[Array, "*n D"]) -> tuple[Float[Array, "*n"], Float[Array, "*n D"]]:
    """Length and direction; a direction of zeros where there is no length."""
    lengths = jnp.linalg.norm(x, axis=-1)
    return lengths, x / jnp.maximum(lengths, TINY)[..., None]


def between(
    low: Float[Array, "*n D"], up: Float[Array, "*n D"], toward: float
) -> tuple[Float[Array, "*n D"], Float[Array, "*n"]]:
    """The direction `toward` of the way from `low` to `up` along the great circle, and the angle between the two."""
    angle = jnp.arccos(jnp.clip(jnp.sum(low * up, axis=-1), -1.0, 1.0))
    sine = jnp.sin(angle)
    curved = jnp.stack([jnp.sin((1 - toward) * angle), jnp.sin(toward * angle)]) / jnp.maximum(sine, ALIKE)
    straight = jnp.array([1 - toward, toward]).reshape(2, *(1,) * angle.ndim)
    weight = jnp.where(sine < ALIKE, straight, curved)[..., None]
    return parted(weight[0] * low + weight[1] * up)[1], angle


# ---- two layers together


def half_of(store: Any, name: str) -> PairHalf | None:
    """The layer's part in a pair that shares its "keys" or "values"; None where it has none."""
    half = getattr(store.beside[FIT], name) if FIT in store.beside else None
    return half if isinstance(half, PairHalf) else None


def _uppers(layers: Sequence[Any], name: str) -> Iterator[int]:
    """The numbers of the upper layers of the pairs that share their "keys" or "values"."""
    for number, layer in enumerate(layers):
        half = half_of(layer, name)
        if half is not None and half.role == UPPER:
            yield number


def _with(store: Any, name: str, code: PairCode, half: PairHalf) -> Any:
    fit = dataclasses.replace(store.beside[FIT], **{name: half})
    entries = dataclasses.replace(store.entries, **{name: code})
    return store.replaced(entries=entries, beside={**store.beside, FIT: fit})


def _lending(upper: Any, name: str, directions: Float[Array, "B Hk C D"] | None) -> Any:
    """The upper layer with the lower one's directions in its code; None takes them back."""
    code = dataclasses.replace(getattr(upper.entries, name), directions=directions)
    half = dataclasses.replace(getattr(upper.beside[FIT], name), lent=directions is not None)
    return _with(upper, name, code, half)


def lent(layers: Sequence[Any]) -> tuple[Any, ...]:
    """The layers, upper ones with the directions that the lower ones hold."""
    after = list(layers)
    for name in NAMES:
        for number in _uppers(layers, name):
            directions = getattr(layers[number - 1].entries, name).directions
            after[number] = _lending(after[number], name, directions)
    return tuple(after)


def begun(layers: Sequence[Any], windows: Sequence[int | None]) -> tuple[Any, ...]:
    """The layers behind their first prompt, whose codecs have fitted nothing yet, in pairs."""
    uppers = {}
    for name in NAMES:
        codec = getattr(layers[0].codecs, name)
        roles = codec.roles(windows) if isinstance(codec, Paired) else []
        uppers[name] = [i for i, role in enumerate(roles) if role == UPPER and half_of(layers[i], name) is None]
    return _all_joined(layers, uppers)


def rejoined(layers: Sequence[Any]) -> tuple[Any, ...]:
    """The layers after another block, whose pairs each hold directions of their own, with one direction for both."""
    return _all_joined(layers, {name: _uppers(layers, name) for name in NAMES})


def _all_joined(layers: Sequence[Any], uppers: Mapping[str, Iterable[int]]) -> tuple[Any, ...]:
    """The layers; of the keys and of the values those pairs joined whose upper layers are named."""
    after = list(layers)
    for name, numbers in uppers.items():
        for number in numbers:
            after[number - 1 : number + 1] = _joined(after[number - 1], after[number], name)
    return tuple(after)


def returned(before: Sequence[Any], layers: Sequence[Any], position: Int[Array, "B"]) -> tuple[Any, ...]:
    """The layers after a step whose token at `position [B]` (-1: a row that has finished) went into the next slots of
    `before`, with one direction of it for both of a pair."""
    after = list(layers)
    for name in NAMES:
        for number in _uppers(layers, name):
            lower, upper = after[number - 1 : number + 1]
            codec, slot = getattr(lower.codecs, name), before[number].next_slot
            held = getattr(lower.entries, name)
            two = (getattr(each.entries, name).directions for each in (lower, upper))
            low, up = (picked(x, slot, flat=False).astype(jnp.float32) for x in two)
            new, _ = between(low, up, codec.toward)
            there = jnp.where((position >= 0)[:, None], slot, lower.slots)  # past the last: nobody's
            code = dataclasses.replace(held, directions=placed_at(held.directions, there, new, flat=False))
            after[number - 1] = lower.replaced(entries=dataclasses.replace(lower.entries, **{name: code}))
            after[number] = _lending(upper, name, None)
    return tuple(after)


def _joined(lower: Any, upper: Any, name: str) -> tuple[Any, Any]:
    """Two layers, each with its own keys or values, with one direction for both."""
    codec = getattr(lower.codecs, name)
    filled = lower.entries.filled
    numbers = [jnp.where(filled[..., None], getattr(each, name), 0) for each in (lower, upper)]
    (low, of_low), (up, of_up) = (parted(x.astype(jnp.float32)) for x in numbers)
    direction, angle = between(of_low, of_up, codec.toward)
    apart = most_apart(angle, filled, codec.exact)
    room = max(math.ceil(codec.exact * filled.shape[-1]), 1)
    index = packed(apart, room)
    first = room - jnp.sum(apart, axis=-1, keepdims=True, dtype=jnp.int32)
    place = jnp.where(apart, first + jnp.cumsum(apart, axis=-1, dtype=jnp.int32) - 1, -1).astype(small_enough(room))
    exact = [jnp.take_along_axis(x, jnp.maximum(index, 0)[..., None], axis=2) for x in numbers]
    codes = PairCode(low, place, direction.astype(numbers[0].dtype)), PairCode(up, place, None)
    halves = PairHalf(exact[0], LOWER), PairHalf(exact[1], UPPER)
    return tuple(map(_with, (lower, upper), (name, name), codes, halves))  # type: ignore[return-value]


def most_apart(angle: Float[Array, "B Hk C"], filled: Bool[Array, "B Hk C"], share: float) -> Bool[Array, "B Hk C"]:
    """True for that share of each row's tokens, rounded up, whose angle is largest in the head; of equals the first."""
    held = jnp.max(jnp.sum(filled, axis=-1, dtype=jnp.int32), axis=-1)
    count = jnp.ceil(held.astype(jnp.float32) * jnp.float32(share) - 1e-4).astype(jnp.int32)  # 0.05 * 20 is 1
    return highest(jnp.where(filled, angle, -jnp.inf), count) & filled
