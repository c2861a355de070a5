"""Channels: of every KV head those that count, the same ones in all slots."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxkv.errors import BadValue, unknown
from jaxkv.store.balance import of_queries
from jaxkv.store.codec import Codec, Fitting, Narrow, with_slots
from jaxkv.store.integers import packed
from pallas_kernels.codes import unpacked

BY = ("queries", "calibration")
CALIBRATED = "key_channels"


@dataclasses.dataclass(frozen=True)
class Channels(Fitting):
    """x^ = x in the D - int(sparsity * D) best channels of each KV head and 0 in the others; of equals the first.

    Which they are is chosen once, when a prompt has been read. `by="queries"`: a channel is worth mean(q_c^2) *
    mean(k_c^2), over the layer's last `window` queries of all heads of the group, and over the keys held. Values have
    no queries: mean(v_c^2). `by="calibration"`: the same over a text, measured by `jaxkv calibrate` ("key_channels"),
    so that it is the model's and not the prompt's. A slot holds the channels kept, and each head a bit for each
    channel. Source: ThinK (arXiv 2407.21018); static channels as in LeanK (arXiv 2508.02215).
    """

    sparsity: float = 0.4
    by: str = "queries"
    window: int = 32
    kind: ClassVar[str] = "channels"

    def __post_init__(self):
        if not 0 <= self.sparsity < 1 or self.window < 1:
            raise BadValue(
                f"sparsity={self.sparsity}, window={self.window}: expected the fraction of channels dropped, from 0 to "
                "below 1, and at least 1 query"
            )
        if self.by not in BY:
            raise unknown("by of codec 'channels'", self.by, BY)

    def check(self, head_dim: int) -> None:
        if head_dim % 8:
            raise BadValue(f"a head of {head_dim} channels has no whole bytes of bits: expected a multiple of 8")

    def suits(self, name: str, codecs: Any, policy: Any) -> None:
        if name == "values" and self.by == "calibration":
            raise BadValue(
                f"policy {policy.name!r} with values in the channels by='calibration', which was measured of keys and "
                "queries: expected by='queries' for values"
            )

    @property
    def looks(self) -> int:
        return self.window if self.by == "queries" else 0

    @property
    def learns(self) -> tuple[str, ...]:
        return (CALIBRATED,) if self.by == "calibration" else ()

    def fit(
        self,
        x: Float[Array, "B Hk S D"],
        positions: Int[Array, "B Hk S"],
        queries: Float[Array, "B Hq W D"] | None,
        learned: Any,
    ) -> UInt8[Array, "B Hk N"]:
        width = x.shape[-1]
        if self.by == "calibration":
            worth = jnp.broadcast_to(learned[CALIBRATED], (x.shape[0], *learned[CALIBRATED].shape))
        else:
            worth = mean_square(x, positions)
            if queries is not None:
                square = jnp.square(queries[:, :, -self.window :].astype(jnp.float32))
                worth *= jnp.mean(square.reshape(*x.shape[:2], -1, width), axis=2)
        _, best = lax.top_k(worth, width - int(self.sparsity * width))
        kept = jnp.any(best[..., None, :] == jnp.arange(width)[:, None], axis=-1)
        return packed(kept.astype(jnp.uint8), 1)

    def unfit(self, batch: int, heads: int, head_dim: int) -> UInt8[Array, "B Hk N"]:
        return jnp.zeros((batch, heads, head_dim // 8), jnp.uint8)

    def fitted(self, fit: UInt8[Array, "*heads N"]) -> Codec:
        width = fit.shape[-1] * 8
        return Kept(fit, width - int(self.sparsity * width))


def mean_square(x: Float[Array, "B Hk S D"], positions: Int[Array, "B Hk S"]) -> Float[Array, "B Hk D"]:
    """The mean of x_c^2 over the filled slots."""
    filled = (positions >= 0)[..., None]
    total = jnp.sum(jnp.where(filled, jnp.square(x.astype(jnp.float32)), 0.0), axis=2)
    return total / jnp.maximum(jnp.sum(filled, axis=2), 1).astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept(Narrow):
    """The `count` channels that have their bit in `bits`, which begin with the first of the slots' dimensions."""

    bits: UInt8[Array, "*heads N"]
    count: int = dataclasses.field(metadata={"static": True})

    def encode(self, x: Float[Array, "*slots D"]) -> Float[Array, "*slots K"]:
        dropped = unpacked(self.bits, 1) == 0
        channels = jnp.argsort(dropped, axis=-1, stable=True)[..., : self.count]
        return jnp.take_along_axis(x, with_slots(channels, x.ndim), axis=-1)

    def decode(self, code: Float[Array, "*slots K"]) -> Float[Array, "*slots D"]:
        kept = unpacked(self.bits, 1).astype(bool)
        place = jnp.clip(jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - 1, 0, self.count - 1)
        x = jnp.take_along_axis(code, with_slots(place, code.ndim), axis=-1)
        return jnp.where(with_slots(kept, code.ndim), x, jnp.zeros((), x.dtype))

    def ask(self, query: Float[Array, "B Hq D"]) -> Float[Array, "B Hq K"]:
        return Kept(of_queries(self.bits, query), self.count).encode(query)

    def unturn(self, x: Float[Array, "B Hq K"]) -> Float[Array, "B Hq D"]:
        return Kept(of_queries(self.bits, x), self.count).decode(x)
