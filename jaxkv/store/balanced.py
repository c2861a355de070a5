"""Integers with a scale per slot, of channels that were brought to one range before: so that none takes the scale."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Int

from jaxkv.store.balance import level, middle, of_queries, reach
from jaxkv.store.codec import Codec, Fitting, small, with_slots
from jaxkv.store.integers import Int as Integers
from jaxkv.store.integers import IntCode, outwards
from pallas_kernels.codes import Codes

Fitted = dict[str, Float16[Array, "*heads D"]]


@dataclasses.dataclass(frozen=True)
class IntBalanced(Fitting):
    """x^ = centre + reach * y^, where y^ is y = (x - centre) / reach as `int` codes it, with a scale per slot or for
    each run of `channels` adjacent channels. Each channel of a KV head has its centre, the middle of its range over the
    n entries held, and its reach, how far they lie from it at most, but no less than 2/n of the mean over the channels
    (1, where none does): chosen once, when a prompt has been read.

    |x - x^| <= reach * scale / 2, the scale being that of the slot's y: some 2 / (2^bits - 1) at most for the entries
    held then. For keys: where the model's projection has a bias, some of their channels lie far from 0 in all tokens.
    Beside the bytes of `int` each head takes 4 bytes a channel. Source: ours.
    """

    bits: int = 4
    channels: int = 0
    kind: ClassVar[str] = "int-balanced"

    def __post_init__(self):
        _ = self.integers  # raises for bits and channels that it has not

    @property
    def integers(self) -> Integers:
        """What codes the balanced numbers."""
        return Integers(self.bits, self.channels)

    def check(self, head_dim: int) -> None:
        self.integers.check(head_dim)

    def fit(
        self,
        x: Float[Array, "B Hk S D"],
        positions: Int[Array, "B Hk S"],
        queries: Float[Array, "B Hq W D"] | None,
        learned: Any,
    ) -> Fitted:
        there = positions >= 0
        centre = small(middle(x, there))
        far = outwards(reach(x, there, centre.astype(jnp.float32)), 1)
        return {"centre": centre, "reach": jnp.where(far > 0, far, jnp.ones_like(far))}

    def unfit(self, batch: int, heads: int, head_dim: int) -> Fitted:
        shape = (batch, heads, head_dim)
        return {"centre": jnp.zeros(shape, jnp.float16), "reach": jnp.ones(shape, jnp.float16)}

    def fitted(self, fit: Fitted) -> Codec:
        return Balanced(fit["centre"], fit["reach"], self.integers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Balanced(Codec):
    """The integers of (x - centre) / reach; both begin with the first of the slots' dimensions."""

    centre: Float16[Array, "*heads D"]
    reach: Float16[Array, "*heads D"]
    integers: Integers = dataclasses.field(metadata={"static": True})
    readable: ClassVar[bool] = True
    centred: ClassVar[bool] = True

    def encode(self, x: Float[Array, "*slots D"]) -> IntCode:
        centre, reach = self._of_slots(x.ndim)
        code = self.integers.encode((x.astype(jnp.float32) - centre) / reach)
        return dataclasses.replace(code, dtype=str(x.dtype))

    def decode(self, code: IntCode) -> Float[Array, "*slots D"]:
        y = self.integers.decode(dataclasses.replace(code, dtype="float32"))
        centre, reach = self._of_slots(y.ndim)
        return (y * reach + centre).astype(code.dtype)

    def as_codes(self, code: IntCode) -> Codes:
        return self.integers.as_codes(code)

    def of_codes(self, codes: Codes) -> IntCode:
        return self.integers.of_codes(codes)

    def turn(self, x: Float[Array, "B Hk D"]) -> Float[Array, "B Hk D"]:
        return ((x.astype(jnp.float32) - self.centre.astype(jnp.float32)) / self.reach.astype(jnp.float32)).astype(
            x.dtype
        )

    def unturn(self, x: Float[Array, "B Hq D"]) -> Float[Array, "B Hq D"]:
        centre, reach = (of_queries(own.astype(jnp.float32), x) for own in (self.centre, self.reach))
        return (x.astype(jnp.float32) * reach + centre).astype(x.dtype)

    def ask(self, query: Float[Array, "B Hq D"]) -> Float[Array, "B Hq D"]:
        return (query.astype(jnp.float32) * of_queries(self.reach.astype(jnp.float32), query)).astype(query.dtype)

    def level(self, query: Float[Array, "B Hq D"]) -> Float[Array, "B Hq"]:
        return level(query, self.centre)

    def _of_slots(self, ndim: int) -> tuple[Float[Array, "*slots D"], Float[Array, "*slots D"]]:
        return with_slots(self.centre.astype(jnp.float32), ndim), with_slots(self.reach.astype(jnp.float32), ndim)
