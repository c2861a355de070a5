"""Codecs of a store: that of the keys, that of the values, and how many of the newest tokens stay as they are."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv.checks import Checked, foreign
from jaxkv.errors import BadValue
from jaxkv.store import window
from jaxkv.store.balanced import IntBalanced
from jaxkv.store.by_channel import IntByChannel
from jaxkv.store.channels import Channels
from jaxkv.store.codec import Codec, Plain
from jaxkv.store.fit import Fit
from jaxkv.store.floats import Fp8
from jaxkv.store.gear import Gear
from jaxkv.store.higgs import Higgs
from jaxkv.store.integers import Int as Integers
from jaxkv.store.low_rank import LowRank
from jaxkv.store.outliers import IntOutliers
from jaxkv.store.pairs import Paired
from jaxkv.store.predicted import Predicted
from jaxkv.store.sparse import Sparse
from jaxkv.store.squat import Squat
from jaxkv.store.window import INITIAL, WINDOW

PLAIN = Plain()
KINDS: dict[str, type[Codec]] = {
    codec.kind: codec
    for codec in (
        *(Plain, Integers, IntByChannel, IntBalanced, IntOutliers, Fp8, Higgs, Sparse),
        *(Channels, LowRank, Gear, Squat, Paired, Predicted),
    )
}


@dataclasses.dataclass(frozen=True)
class Codecs(Checked):
    """The codec of the keys and that of the values. The newest `residual` tokens are read in full precision: they lie
    in a window beside the slots as well. They leave it one by one, or all at once when it is full where a scale is
    shared by several tokens, as in KIVI (arXiv 2402.02750). So are the `initial` first tokens of the text, as long as
    they are held.
    """

    keys: Codec = PLAIN
    values: Codec = PLAIN
    residual: int = 0
    initial: int = 0

    def __post_init__(self):
        if min(self.residual, self.initial) < 0 or (self.windows and self.plain):
            raise BadValue(
                f"residual={self.residual}, initial={self.initial}: expected 0 or more tokens in full precision, and "
                "keys or values in a codec"
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

    @property
    def windows(self) -> bool:
        """Whether some tokens are read in full precision beside their codes."""
        return max(self.residual, self.initial) > 0

    def exact(self, positions: Int[Array, "*#n"], at: Int[Array, "*#n"]) -> Bool[Array, "*n"]:
        """Whether a token at position `at` reads those at these `positions` up to its own as the model made them, where
        every slot's code is its own: itself, the `residual` tokens before it and the `initial` first."""
        return (positions + self.residual >= at) | ((positions >= 0) & (positions < self.initial))

    @property
    def readable(self) -> bool:
        """Whether the attention's operations read both as they lie."""
        return self.keys.readable and self.values.readable

    @property
    def narrow(self) -> bool:
        """Whether keys or values are read as fewer numbers than there are channels."""
        return self.keys.narrow or self.values.narrow

    @property
    def fits(self) -> bool:
        """Whether one of them fits something to the text or to the model."""
        return self.keys.fits or self.values.fits

    @property
    def pairs(self) -> bool:
        """Whether layers share what one of them holds."""
        return self.keys.pairs or self.values.pairs

    @property
    def looks(self) -> int:
        """How many of a layer's last queries they are fitted with."""
        return self.keys.looks  # queries say nothing of values

    @property
    def learns(self) -> tuple[str, ...]:
        """Names of what they need of `jaxkv calibrate`."""
        return (*self.keys.learns, *self.values.learns)

    def fit(self, entries: Any, queries: Any, learned: Any) -> Fit:
        """What they fit to plain entries by KV head, to a layer's last queries, and to what was measured of it."""
        keys, values = self.keys, self.values
        return Fit(
            keys.fit(entries.keys, entries.positions, queries, learned),
            values.fit(entries.values, entries.positions, None, learned),
        )

    def unfit(self, batch: int, heads: int, head_dim: int) -> Fit:
        """Arrays as `fit` gives them, of nothing."""
        return Fit(*(codec.unfit(batch, heads, head_dim) for codec in (self.keys, self.values)))

    def fitted(self, fit: Fit) -> "Codecs":
        """The codecs with what they have fitted."""
        return dataclasses.replace(self, keys=self.keys.fitted(fit.keys), values=self.values.fitted(fit.values))

    def check(self, head_dim: int) -> None:
        """Raises `BadValue` where heads of this width have no code, and for a codec of one's own whose arrays have
        other shapes than they should."""
        for codec in (self.keys, self.values):
            codec.check(head_dim)
            if foreign(codec) and not codec.pairs:
                _check_shapes(codec, head_dim)

    def suits(self, policy: Any) -> None:
        """Raises `BadValue` for a policy whose entries cannot lie so."""
        if not self.apart and (policy.allocate.pooled or policy.read.state):
            raise BadValue(
                f"policy {policy.name!r} with a scale that several tokens share: expected equal heads that read all "
                "they hold (allocate kind 'uniform', read kind 'all'), or a codec with a scale per token, such as "
                "{'kind': 'int', 'bits': 4}"
            )
        aligned = [codec.kind for codec in (self.keys, self.values) if codec.aligned]
        if aligned and (policy.evicts or policy.read.state):
            raise BadValue(
                f"policy {policy.name!r} with codec {aligned[0]!r}, whose heads or layers hold the same tokens in the "
                "same slots: expected a policy that evicts nothing and reads all it holds, such as 'full'"
            )
        self.keys.suits("keys", self, policy)
        self.values.suits("values", self, policy)
        pooled = self.keys.pooled and self.values.pooled
        if (self.fits and policy.allocate.divides) or (policy.allocate.pooled and not pooled):
            raise BadValue(
                f"policy {policy.name!r} with a codec that is fitted to each head: expected "
                + ("layers that have budgets of their own" if pooled else "equal heads (allocate kind 'uniform')")
                + ", or a codec that fits nothing, such as {'kind': 'int', 'bits': 4}"
            )
        if self.looks and policy.rope != "text":
            raise BadValue(
                f"policy {policy.name!r} with a codec that is fitted to the last {self.looks} queries, which were "
                "turned to their places in the text: expected rope='text'"
            )

    def beside(self, batch: int, heads: int, head_dim: int, dtype: Any) -> dict[str, Any]:
        """What lies beside a layer's slots where a prompt begins: the windows of what is read in full precision."""
        coded = {"keys": not self.keys.plain, "values": not self.values.plain}
        sizes = {WINDOW: self.residual, INITIAL: self.initial}
        return {
            name: window.empty(batch, heads, size, head_dim, dtype, **coded, first=name == INITIAL)
            for name, size in sizes.items()
            if size
        }


@functools.lru_cache(maxsize=256)
def _check_shapes(codec: Codec, head_dim: int) -> None:
    """Raises `BadValue` where a code does not begin with the slots' dimensions, or stands for other numbers."""
    slots = (1, 2, 8 * codec.together)

    def there_and_back() -> tuple[Any, Any]:
        fitted = codec.fitted(codec.unfit(*slots[:2], head_dim))
        code = fitted.encode_all(jnp.zeros((*slots, head_dim), jnp.float32), jnp.zeros(slots, jnp.int32))
        return code, fitted.decode(code)

    code, back = jax.eval_shape(there_and_back)
    back, whole = jax.tree.leaves(back), (*slots, head_dim)
    if [x.shape for x in back] != [whole] or not jnp.issubdtype(back[0].dtype, jnp.floating):
        gives = ", ".join(f"{x.dtype} of shape {x.shape}" for x in back) or "nothing"
        raise BadValue(
            f"codec {codec.kind!r}: decode gives {gives} for what encode made of shape {whole}: expected floats of "
            "that shape"
        )
    for leaf in jax.tree.leaves(code):
        if codec.apart and leaf.shape[: len(slots)] != slots:
            raise BadValue(
                f"codec {codec.kind!r}: encode gives an array of shape {leaf.shape} for numbers of shape "
                f"{whole}: expected arrays that begin with the slots' dimensions, {slots}"
            )


PLAIN_BOTH = Codecs()
