"""How an attention pass reads a layer's keys and values and writes the new token's: as codes, or decoded before."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.store.codec import Codec
from jaxkv.store.codecs import Codecs
from pallas_kernels.arguments import Token
from pallas_kernels.codes import Codes
from pallas_kernels.decode_attend_score.reference import Attended
from pallas_kernels.partial import Partial


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Keys and values are decoded before the pass; the token's code is written behind it."""

    codecs: Codecs  # with what they have fitted
    codes: ClassVar[bool] = False  # whether the pass reads them

    def lent(self, store: Any, awaits: Callable[[Any], Any] | None = None) -> tuple[Any, Any]:
        """Keys and values as the pass takes them; what is decoded is so of the store as `awaits` gives it: when the
        layer is due, and not those of all layers at once."""
        later = store if awaits is None or self.codecs.plain else awaits(store)
        keys, values = (store if getattr(self.codecs, name).plain else later for name in ("keys", "values"))
        return keys.keys, values.values

    def form(self, codec: Codec, x: Float[Array, "*slots D"]) -> Any:
        """Keys or values, of slots or a token, as the pass takes them."""
        return x

    def asked(self, token: Token) -> Token:
        """The token as the pass takes it."""
        return token

    def answered(self, token: Token, result: Attended, scale: float) -> Partial:
        """What the pass gave, as the layer takes it."""
        return Partial(result.output, result.lse, result.mass)

    def returned(self, store: Any, result: Attended, token: Token) -> tuple[Any, Any]:
        """Keys and values as they lie in the slots after the pass."""
        keys, values = (
            x if getattr(self.codecs, name).plain else store.written(name, new, token.position)
            for name, new, x in (("keys", token.key, result.keys), ("values", token.value, result.values))
        )
        return keys, values


class AsCodes(Decoded):
    """The pass reads codes where they lie and writes the token's; where slots share their code, the store does so. The
    query goes into the keys' space, and what all its logits have in common is added to their log-sum-exp; the
    output comes back out of the values' space."""

    codes: ClassVar[bool] = True

    def lent(self, store: Any, awaits: Callable[[Any], Any] | None = None) -> tuple[Any, Any]:
        return self.codecs.keys.as_codes(store.entries.keys), self.codecs.values.as_codes(store.entries.values)

    def form(self, codec: Codec, x: Float[Array, "*slots D"]) -> Any:
        if codec.apart:
            return codec.as_codes(codec.encode(x))
        if x.ndim < 4:  # a token's, or a pool's: none that share a code
            return x
        return codec.as_codes(codec.encode_all(x, jnp.zeros(x.shape[:-1], jnp.int32)))

    def asked(self, token: Token) -> Token:
        keys, values = self.codecs.keys, self.codecs.values
        lies = (self.form(of, x) for of, x in ((keys, token.key), (values, token.value)))
        codes = (x if isinstance(x, Codes) else None for x in lies)
        return Token(keys.ask(token.query), keys.turn(token.key), values.turn(token.value), token.position, *codes)

    def answered(self, token: Token, result: Attended, scale: float) -> Partial:
        level, lse, output = self.codecs.keys.level(token.query), result.lse, result.output
        output = self.codecs.values.unturn(output)
        if output is not result.output:
            looked = lse[..., None] > -jnp.inf  # else no weights: the output is 0 in any space
            output = jnp.where(looked, output, jnp.zeros_like(output))
        return Partial(output, lse if level is None else lse + scale * level, result.mass)

    def returned(self, store: Any, result: Attended, token: Token) -> tuple[Any, Any]:
        keys, values = (
            codec.of_codes(x) if codec.apart else getattr(store.entries, name)
            for name, codec, x in (
                ("keys", self.codecs.keys, result.keys),
                ("values", self.codecs.values, result.values),
            )
        )
        return keys, values


def reading(
    codecs: Codecs, *, windows: bool, rotates: bool, capped: bool, at_once: bool, divided: bool = False
) -> Decoded:
    """As codes where both codecs are `readable`; decoded where keys are turned as they are read (`rotates`), where
    logits are `capped` and keys lie around a centre, where slots that share a code are `divided` over devices, and
    where one pass must read all entries (`at_once`) while some tokens are read in full precision beside it: those of
    `windows`, or the newest one beside keys or values that are `narrow`."""
    beside = windows or codecs.narrow
    decoded = (beside and at_once) or (divided and not codecs.apart)
    decoded = decoded or rotates or (capped and codecs.keys.centred) or not codecs.readable
    return Decoded(codecs) if decoded else AsCodes(codecs)
