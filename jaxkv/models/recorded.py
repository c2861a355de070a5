"""What a prompt makes of itself in every layer, kept, and a model that gives it again instead of running.

A prompt that runs as one block attends to itself whole, whatever is evicted behind it: so queries, keys and values are
the same under every policy, and one run of the model serves them all.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.models.config import AttentionSpec
from jaxkv.models.decoder import Attend, Decoder, Fold, Lay, Route, through


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Heard:
    """What one layer made of some tokens: queries, keys and values before RoPE, and the L2 norms of the normed hidden
    states that they were made of. It is called as a layer is, and gives them to `attend` again."""

    query: Float[Array, "B T Hq D"]
    key: Float[Array, "B T Hk D"]
    value: Float[Array, "B T Hk D"]
    sizes: Float[Array, "B T"]

    def __call__(
        self, x: Any, spec: AttentionSpec, state: Any, attend: Attend, lay: Lay, behind: Any = None, sizes: bool = False
    ) -> tuple[Any, Any]:
        """The stream as it came, and the state that `attend` gives."""
        more = {"sizes": self.sizes} if sizes else {}
        return x, attend(spec, self.query, self.key, self.value, state, **more)[1]

    def followed(self, by: "Heard") -> "Heard":
        """These tokens and those behind them."""
        return jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), self, by)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A `Decoder` whose `layers` give what they `heard`. There is no stream: what it says of hidden states is 0."""

    model: Decoder
    layers: Sequence[Heard]

    attends: ClassVar[bool] = False

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        states: Sequence[Any],
        attend: Attend,
        lay: Lay = lambda name, x: x,
        behind: int | None = None,
        route: Route | None = None,
        sizes: bool = False,
        scan: bool = False,
        fold: Fold | None = None,
    ) -> tuple[Float[Array, "B 1 1"], tuple[Any, ...]]:
        """As `Decoder` is called; the tokens are those that were heard."""
        none = jnp.zeros((tokens.shape[0], 1, 1), jnp.float32)
        return through(self.layers, self.model.specs, none, states, attend, lay, None, route, sizes, scan, fold)

    def output_matrix(self, layer: int) -> Float[Array, "Hq D M"]:
        """The output matrix of one layer's attention, by query heads."""
        return self.model.output_matrix(layer)
