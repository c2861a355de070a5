"""Codec: how keys or values lie in a slot.

A codec turns an array `[*slots, D]` into its code, a pytree of arrays that begin with the slots' dimensions, and back.
Every slot's code is its own (no scale is shared between slots), so eviction, gathers and overwrites need not know. A
codec that is not `apart` shares something between slots: see `by_channel.py`. One that `fits` learns something of
each KV head when a prompt has been read: see `channels.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxkv.checks import Checked
from pallas_kernels.codes import Lying

Due = Callable[[], Bool[Array, "B Hk C"]]  # which slots are due to be encoded
# of some slots of each head and what their codes stand for: the numbers to be encoded, and which slots are filled
Exact = Callable[
    [Int[Array, "B Hk T"], Float[Array, "B Hk T D"]], tuple[Float[Array, "B Hk T D"], Bool[Array, "B Hk T"]]
]
FEW = float(jnp.finfo(jnp.float16).max)


class Codec(Checked):
    """The form of keys or values in a slot."""

    kind: ClassVar[str]
    plain: ClassVar[bool] = False  # the code is the array itself
    apart: ClassVar[bool] = True  # every slot's code is its own
    fits: ClassVar[bool] = False  # something of each KV head is fitted to the text or to the model
    pairs: ClassVar[bool] = False  # layers share what it holds
    readable: ClassVar[bool] = False  # `as_codes` gives what the attention's operations read as it lies
    narrow: ClassVar[bool] = False  # that has fewer numbers than there are channels: it is not the exact array either
    centred: ClassVar[bool] = False  # the numbers of `as_codes` lie around a centre: queries have a `level`
    pooled: ClassVar[bool] = True  # heads may share slots: what it fits of a head, each slot could hold

    @property
    def aligned(self) -> bool:
        """Whether the heads and layers that share what it holds must hold the same tokens in the same slots."""
        return self.pairs

    def encode(self, x: Float[Array, "*slots D"]) -> Any:
        """The code of every slot."""
        raise NotImplementedError

    def decode(self, code: Any) -> Float[Array, "*slots D"]:
        """The array that the code stands for, in any float: the store gives it the model's dtype."""
        raise NotImplementedError

    def encode_all(self, x: Float[Array, "*slots D"], positions: Int[Array, "*slots"]) -> Any:
        """The code of all slots of a store; position -1 marks an empty one, which may hold anything."""
        return self.encode(x)

    def encode_again(self, held: Any, x: Float[Array, "B Hk C D"], positions: Int[Array, "B Hk C"]) -> Any:
        """As `encode_all`, where slots share their code; numbers that the code `held` stands for, in the same slots,
        keep it."""
        return self.encode_all(x, positions)

    def behind(self, code: Any, more: int) -> Any:
        """What makes the code of `[B, Hk, C]` slots that of so many more, which are empty, where each array of it is
        concatenated along its third dimension."""
        return jax.tree.map(lambda x: jnp.zeros((*x.shape[:2], more, *x.shape[3:]), x.dtype), code)

    def as_codes(self, code: Any) -> Float[Array, "*slots D"] | Lying:
        """The code as the attention's operations read it, if `readable`: floats, or codes with their scales, of what
        `turn` makes of the numbers. They write the codes of a slot that shares nothing with others; the store writes
        the rest."""
        raise NotImplementedError(f"{self.kind!r} is decoded before it is read")

    def of_codes(self, codes: Any) -> Any:
        """The inverse of `as_codes`."""
        raise NotImplementedError(f"{self.kind!r} is decoded before it is read")

    def turn(self, x: Float[Array, "*n D"]) -> Float[Array, "*n _"]:
        """Numbers in the space of what `as_codes` gives."""
        return x

    def unturn(self, x: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        """The inverse of `turn`; of what attention makes of values too, for its weights sum to 1."""
        return x

    def ask(self, query: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        """The query whose products with turned keys are the query's with the keys, but for its `level`."""
        return self.turn(query)

    def level(self, query: Float[Array, "*n D"]) -> Float[Array, "*n"] | None:
        """What the query's products with all keys have in common, beside those of `ask`; None: nothing."""
        return None

    @property
    def looks(self) -> int:
        """How many of the layer's last queries it is fitted with."""
        return 0

    @property
    def learns(self) -> tuple[str, ...]:
        """Names of what it needs of `jaxkv calibrate`."""
        return ()

    def fit(
        self,
        x: Float[Array, "B Hk S D"],
        positions: Int[Array, "B Hk S"],
        queries: Float[Array, "B Hq W D"] | None,
        learned: Any,
    ) -> Any:
        """What is fitted of every KV head: arrays that begin with `[B, Hk]`; None where nothing is. `x` are the entries
        held (position -1: empty, anything), `queries` the layer's last ones (zeros where there were fewer; None for
        values), `learned` what was measured of the layer."""
        return None

    def unfit(self, batch: int, heads: int, head_dim: int) -> Any:
        """Arrays as `fit` gives them, of nothing."""
        return None

    def fitted(self, fit: Any) -> "Codec":
        """The codec with what it has fitted: itself, where it fits nothing."""
        return self

    @property
    def together(self) -> int:
        """How many tokens share a part of the code."""
        return 1

    def check(self, head_dim: int) -> None:
        """Raises `BadValue` where heads of this width have no code."""

    def suits(self, name: str, codecs: Any, policy: Any) -> None:
        """Raises `BadValue` where it cannot hold the `name` ("keys" or "values") of a policy with these codecs."""

    def empty(self, shape: tuple[int, ...], head_dim: int, dtype: Any) -> Any:
        """The code of zeros in slots of this shape."""
        return _empty(self, shape, head_dim, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))  # every layer's in one program
def _empty(codec: Codec, shape: tuple[int, ...], head_dim: int, dtype: Any) -> Any:
    return codec.encode_all(jnp.zeros((*shape, head_dim), dtype), jnp.full(shape, -1, jnp.int32))


class Fitting(Codec):
    """What a codec that `fits` has instead. While a prompt is read keys and values lie as the model makes them; then
    `fit` is asked once, and what it gives makes a codec (`fitted`) that codes the entries held and those that come.
    """

    fits: ClassVar[bool] = True

    def encode(self, x: Float[Array, "*slots D"]) -> Any:
        return x

    def decode(self, code: Any) -> Float[Array, "*slots D"]:
        return code


class Shared(Codec):
    """What a codec that is not `apart` has instead: some of the code of `[B, Hk, C]` slots belongs to several."""

    apart: ClassVar[bool] = False

    def encode_where(
        self, code: Any, rows: Bool[Array, "B"], due: Due, exact: Exact, implementation: str | None
    ) -> Any:
        """The code after, in these rows, all slots that share theirs with one that is `due` have been encoded anew."""
        raise NotImplementedError

    def encode(self, x: Float[Array, "*slots D"]) -> Any:
        raise NotImplementedError("slots share their code: encode_all")


class Floats(Codec):
    """What a codec has instead whose code is an array of floats, which is read as it lies."""

    readable: ClassVar[bool] = True

    def as_codes(self, code: Float[Array, "*slots N"]) -> Float[Array, "*slots N"]:
        return code

    def of_codes(self, codes: Float[Array, "*slots N"]) -> Float[Array, "*slots N"]:
        return codes


class Narrow(Floats):
    """The same of fewer floats than there are channels: queries and outputs go into their space and back."""

    narrow: ClassVar[bool] = True

    def turn(self, x: Float[Array, "*n D"]) -> Float[Array, "*n N"]:
        return self.encode(x)


@dataclasses.dataclass(frozen=True)
class Plain(Floats):
    """As the model makes them."""

    kind: ClassVar[str] = "plain"
    plain: ClassVar[bool] = True

    def encode(self, x: Float[Array, "*slots D"]) -> Float[Array, "*slots D"]:
        return x

    def decode(self, code: Float[Array, "*slots D"]) -> Float[Array, "*slots D"]:
        return code


def with_slots(x: Shaped[Array, "*heads N"], ndim: int) -> Shaped[Array, "*slots N"]:
    """What is known of each head, for all of its slots: `[B, Hk, N]` as `[B, Hk, 1, N]`."""
    return x.reshape(*x.shape[:-1], *(1,) * (ndim - x.ndim), x.shape[-1])


def small(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The number in float16, the largest one where it is larger: scales and offsets, whatever the model's dtype."""
    return jnp.clip(x, -FEW, FEW).astype(jnp.float16)


def alike(near: Float[Array, "*n D"], x: Float[Array, "*n D"]) -> Bool[Array, "*n"]:
    """Whether the numbers are those of a code, but for the last bit, which compilers round as they will."""
    room = jnp.asarray(2 * jnp.finfo(x.dtype).eps, x.dtype)
    return jnp.all(jnp.abs(near.astype(x.dtype) - x) <= room * jnp.abs(x), axis=-1)


def in_front(
    keeps: Bool[Array, "B Hk N"], old: Shaped[Array, "B Hk _ *n"], new: Shaped[Array, "B Hk S *n"]
) -> Shaped[Array, "B Hk S *n"]:
    """The new array, with the old one where it is kept among the first N."""
    count = keeps.shape[2]
    keeps = keeps.reshape(*keeps.shape, *(1,) * (new.ndim - 3))
    return jnp.concatenate([jnp.where(keeps, old[:, :, :count], new[:, :, :count]), new[:, :, count:]], axis=2)
