"""What the decode operations take, as bundles of arrays.

B rows, Hq query heads, Hk KV heads, D head dim, S slots: C of every KV head, or P of a pool.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.codes import Codes


class Token(NamedTuple):
    """One token per row in one layer: its query heads, key and value (turned by RoPE if the cache holds them so), and
    its position, -1 for a row that has finished.

    Where the slots hold keys or values as `Codes`, what is written there are `key_code` and `value_code`; in this step
    the token is attended to by its exact key and value.
    """

    query: Float[Array, "B Hq D"]
    key: Float[Array, "B Hk D"]
    value: Float[Array, "B Hk D"]
    position: Int[Array, "B"]
    key_code: Codes | None = None
    value_code: Codes | None = None

    @property
    def entry(self) -> tuple[jax.Array | Codes, jax.Array | Codes]:
        """Key and value as they lie in a slot."""
        coded = ((self.key, self.key_code), (self.value, self.value_code))
        key, value = (exact if code is None else code for exact, code in coded)
        return key, value


class Held(NamedTuple):
    """The slots of a layer where every KV head has C; a position of -1 is an empty slot, and no head holds any
    other position twice. `bias` is added to the logits of each slot, after a soft cap."""

    keys: Any  # Float[Array, "B Hk C D"], Codes or ByChannel
    values: Any
    positions: Int[Array, "B Hk C"]
    bias: Float[Array, "B Hk C"] | None = None


class Line(NamedTuple):
    """Keys and values of many layers, side by side, and the slot in which a layer's view of them begins."""

    keys: Float[Array, "B T D"]
    values: Float[Array, "B T D"]
    first: Int[Array, "B"]


class Segments(NamedTuple):
    """The slots of a layer whose KV heads share a pool: head h owns those from `offsets[h]` to `offsets[h + 1]`.

    Where keys and values are cut out of a `line`, a kernel that can reads them there. `bias` is added to the logits of
    each slot, after a soft cap.
    """

    keys: Any  # Float[Array, "B P D"] or Codes
    values: Any
    positions: Int[Array, "B P"]
    offsets: Int[Array, "B Hk_1"]
    line: Line | None = None
    bias: Float[Array, "B P"] | None = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a victim is chosen: every KV head by its own score, or all by the "sum" or "mean" of theirs (`heads`).

    The first `sinks` tokens of the text are never chosen while anything else is there.
    """

    heads: str = "each"
    sinks: int = 0


@jax.tree_util.register_pytree_node_class
class Judge(NamedTuple):
    """How the attention pass chooses the next slot: the lowest weight * mass + bias.

    `limits [B]` entries per head may be held, the last `recents [B]` tokens and the rule's sinks are spared; without
    a rule the next slot is the first empty one. `group` ("sum", "mean" or "max") reduces the mass over the query heads
    of a KV head; "each" leaves every query head its own, for parts of one softmax that are still to be merged, and goes
    without a rule. As a pytree its leaves are its arrays: a plain number, the rule and the group are static.
    """

    limits: Int[Array, "B"]
    recents: Int[Array, "B"]
    weight: Float[Array, "B *S"] | float = 1.0
    bias: Float[Array, "B *S"] | float = 0.0
    rule: Rule | None = None
    group: str = "sum"

    @property
    def weighs(self) -> bool:
        """Whether the choice needs the attention mass."""
        return self.rule is not None and not (isinstance(self.weight, float) and self.weight == 0)

    def check(self, with_mass: bool) -> None:
        """Raises `ValueError` where the choice needs the mass and nobody computes it, or reduces it."""
        if self.group == "each" and self.rule is not None:
            raise ValueError(f"group='each' with {self.rule}: a choice needs a mass per KV head; give group='sum'")
        if self.weighs and not with_mass:
            raise ValueError(
                f"with_mass=False, and the judge weighs the mass by {self.weight}: give weight=0.0, or none"
            )

    def over(self, shape: tuple[int, ...]) -> "Judge":
        """The same with a weight and a bias that are numbers, or a float32 of each slot, as the kernels read them."""
        factors = (
            float(x) if isinstance(x, int | float) else jnp.broadcast_to(x, shape).astype(jnp.float32)
            for x in (self.weight, self.bias)
        )
        return self._replace(**dict(zip(("weight", "bias"), factors, strict=True)))

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """The arrays (None in a plain number's place), and what is static."""
        factors = self.weight, self.bias
        numbers = tuple(x if isinstance(x, float) else None for x in factors)
        arrays = (None if isinstance(x, float) else x for x in factors)
        return (self.limits, self.recents, *arrays), (numbers, self.rule, self.group)

    @classmethod
    def tree_unflatten(cls, static: tuple, leaves: Any) -> "Judge":
        """The inverse."""
        numbers, rule, group = static
        limits, recents, *arrays = leaves
        weight, bias = (x if number is None else number for x, number in zip(arrays, numbers, strict=True))
        return cls(limits, recents, weight, bias, rule, group)
