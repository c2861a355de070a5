"""How an attention pass reads a layer's keys and values and writes the new token's: as codes, or decoded before."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.store.codec import Codec
from jaxkv.store.codecs import Codecs
from pallas_kernels.arguments import Token
from pallas_kernels.decode_attend_score.reference import Attended
from pallas_kernels.partial import Partial


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Keys and values are decoded before the pass; the token's code is written behind it."""

    codecs: Codecs  # with what they have fitted
    codes: ClassVar[bool] = False  # whether the pass reads them

    def lent(self, store: Any) -> tuple[Any, Any]:
        """Keys and values as the pass takes them."""
        return store.keys, store.values

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
            x if getattr(self.codecs, name).plain else store.written(name, new, token.position, x)
            for name, new, x in (("keys", token.key, result.keys), ("values", token.value, result.values))
        )
        return keys, values


class AsCodes(Decoded):
    """The pass reads codes where they lie and writes the token's. The query goes into the keys' space, and what all its
    logits have in common is added to their log-sum-exp; the output comes back out of the values' space."""

    codes: ClassVar[bool] = True

    def lent(self, store: Any) -> tuple[Any, Any]:
        return self.codecs.keys.as_codes(store.entries.keys), self.codecs.values.as_codes(store.entries.values)

    def form(self, codec: Codec, x: Float[Array, "*slots D"]) -> Any:
        return codec.as_codes(codec.encode(x))

    def asked(self, token: Token) -> Token:
        keys, values = self.codecs.keys, self.codecs.values
        codes = (None if of.plain else self.form(of, x) for of, x in ((keys, token.key), (values, token.value)))
        return Token(keys.ask(token.query), keys.turn(token.key), values.turn(token.value), token.position, *codes)

    def answered(self, token: Token, result: Attended, scale: float) -> Partial:
        level, lse = self.codecs.keys.level(token.query), result.lse
        looked = lse[..., None] > -jnp.inf  # else no weights: the output is 0 in any space
        output = jnp.where(looked, self.codecs.values.unturn(result.output), result.output)
        return Partial(output, lse if level is None else lse + scale * level, result.mass)

    def returned(self, store: Any, result: Attended, token: Token) -> tuple[Any, Any]:
        return self.codecs.keys.of_codes(result.keys), self.codecs.values.of_codes(result.values)


def reading(codecs: Codecs, windows: bool, rotates: bool, capped: bool, weighs: bool) -> Decoded:
    """As codes where both codecs are `readable`; decoded where keys are turned as they are read (`rotates`), where
    logits are `capped` and keys lie around a centre, and where some tokens are read in full precision beside their
    codes (`windows`) and either the pass `weighs` all entries against each other or keys or values are plain."""
    whole = windows and (weighs or codecs.keys.plain or codecs.values.plain)
    decoded = whole or rotates or (capped and codecs.keys.centred) or not codecs.readable
    return Decoded(codecs) if decoded else AsCodes(codecs)
