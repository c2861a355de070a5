"""How an attention pass reads a layer's keys and values and writes the new token's: as codes, or decoded before."""

from typing import Any

from jaxtyping import Array, Float

from jaxkv.store.codec import Codec
from jaxkv.store.codecs import Codecs
from pallas_kernels.arguments import Token


class Decoded:
    """Keys and values are decoded before the pass; the token's code is written behind it."""

    def lent(self, store: Any) -> tuple[Any, Any]:
        """Keys and values as the pass takes them."""
        return store.keys, store.values

    def form(self, codec: Codec, x: Float[Array, "*slots D"]) -> Any:
        """Keys or values, of slots or a token, as the pass takes them."""
        return x

    def asked(self, codecs: Codecs, token: Token) -> Token:
        """The token as the pass takes it."""
        return token

    def answered(self, codecs: Codecs, output: Float[Array, "B Hq D"]) -> Float[Array, "B Hq D"]:
        """What the pass gave, as the layer takes it."""
        return output

    def returned(self, store: Any, result: Any, token: Token) -> tuple[Any, Any]:
        """Keys and values as they lie in the slots after the pass."""
        keys, values = (
            x if getattr(store.codecs, name).plain else store.written(name, new, token.position, x)
            for name, new, x in (("keys", token.key, result.keys), ("values", token.value, result.values))
        )
        return keys, values


class AsCodes(Decoded):
    """The pass reads codes where they lie and writes the token's. The query goes into the keys' space, the output comes
    back out of the values'."""

    def lent(self, store: Any) -> tuple[Any, Any]:
        return store.codecs.keys.as_codes(store.entries.keys), store.codecs.values.as_codes(store.entries.values)

    def form(self, codec: Codec, x: Float[Array, "*slots D"]) -> Any:
        return codec.as_codes(codec.encode(x))

    def asked(self, codecs: Codecs, token: Token) -> Token:
        keys, values = codecs.keys, codecs.values
        codes = (None if of.plain else self.form(of, x) for of, x in ((keys, token.key), (values, token.value)))
        return Token(keys.turn(token.query), keys.turn(token.key), values.turn(token.value), token.position, *codes)

    def answered(self, codecs: Codecs, output: Float[Array, "B Hq D"]) -> Float[Array, "B Hq D"]:
        return codecs.values.unturn(output)

    def returned(self, store: Any, result: Any, token: Token) -> tuple[Any, Any]:
        return store.codecs.keys.of_codes(result.keys), store.codecs.values.of_codes(result.values)


def reading(codecs: Codecs, windows: bool, rotates: bool) -> Decoded:
    """As codes where both codecs are `readable`; decoded where some tokens are read in full precision beside their
    codes (`windows`), and where keys are turned as they are read (`rotates`)."""
    return Decoded() if windows or rotates or not codecs.readable else AsCodes()
