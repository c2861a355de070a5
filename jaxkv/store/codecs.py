"""Codecs of a store: that of the keys, that of the values, and how many of the newest tokens stay as they are."""

import dataclasses
from typing import Any

import jax

from jaxkv.checks import Checked
from jaxkv.errors import BadValue
from jaxkv.store import window
from jaxkv.store.by_channel import IntByChannel
from jaxkv.store.codec import Codec, Plain
from jaxkv.store.floats import Fp8
from jaxkv.store.integers import Int
from jaxkv.store.sparse import Sparse
from jaxkv.store.window import WINDOW

PLAIN = Plain()
KINDS: dict[str, type[Codec]] = {codec.kind: codec for codec in (Plain, Int, IntByChannel, Fp8, Sparse)}


@dataclasses.dataclass(frozen=True)
class Codecs(Checked):
    """The codec of the keys and that of the values. The newest `residual` tokens are read in full precision: they lie
    in a window beside the slots as well. They leave it one by one, or all at once when it is full where a scale is
    shared by several tokens, as in KIVI (arXiv 2402.02750).
    """

    keys: Codec = PLAIN
    values: Codec = PLAIN
    residual: int = 0

    def __post_init__(self):
        if self.residual < 0 or (self.residual and self.plain):
            raise BadValue(
                f"residual={self.residual}: expected 0 or more tokens in full precision, and keys or values in a codec"
            )
        for codec in (self.keys, self.values):
            tokens = codec.together
            if self.residual % tokens or (not codec.apart and not self.residual):
                raise BadValue(
                    f"residual={self.residual} with {codec.kind!r}, where {tokens} tokens share a scale: expected a "
                    f"multiple of {tokens} tokens in full precision, such as residual={tokens}"
                )

    @property
    def plain(self) -> bool:
        """Whether both are as the model makes them."""
        return self.keys.plain and self.values.plain

    @property
    def apart(self) -> bool:
        """Whether every slot's code is its own."""
        return self.keys.apart and self.values.apart

    def check(self, head_dim: int) -> None:
        """Raises `BadValue` where heads of this width have no code."""
        self.keys.check(head_dim)
        self.values.check(head_dim)

    def suits(self, policy: Any) -> None:
        """Raises `BadValue` for a policy whose entries cannot lie so."""
        if not self.apart and (policy.allocate.pooled or policy.read.state):
            raise BadValue(
                f"policy {policy.name!r} with a scale that several tokens share: expected equal heads that read all "
                "they hold (allocate kind 'uniform', read kind 'all'), or a codec with a scale per token, such as "
                "{'kind': 'int', 'bits': 4}"
            )

    def beside(self, batch: int, heads: int, head_dim: int, dtype: Any) -> dict[str, Any]:
        """What lies beside a layer's slots where a prompt begins: the residual window, if there is one."""
        if not self.residual:
            return {}
        coded = {"keys": not self.keys.plain, "values": not self.values.plain}
        return {WINDOW: window.empty(batch, heads, self.residual, head_dim, dtype, **coded)}

    def bytes(self, slots: int, head_dim: int, dtype: Any) -> int:
        """Bytes of keys and values of one KV head with so many slots, the residual window among them."""

        found: list[int] = []

        def made() -> None:
            codes = [codec.empty((1, 1, slots), head_dim, dtype) for codec in (self.keys, self.values)]
            beside = self.beside(1, 1, head_dim, dtype).values()
            found.extend([*(leaf.nbytes for leaf in jax.tree.leaves(codes)), *(state.kv_bytes for state in beside)])

        jax.eval_shape(made)
        return sum(found)


PLAIN_BOTH = Codecs()
