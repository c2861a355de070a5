"""What goes into the attention of one layer and what comes out: four things that are not one another."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Facts:
    """What the model knows of the layer: its number, its output matrix where a part needs it, what was measured on it
    beforehand, and how many layers there are."""

    layer: int | Int[Array, ""] = 0
    out: Float[Array, "Hq D M"] | None = None
    learned: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    layers: int | Int[Array, ""] = 1


@dataclasses.dataclass(frozen=True)
class Ask:
    """What is asked of the layer, static: `slots` per KV head after a block of the prompt, whether anybody looks at it,
    the `extra` tokens behind the block that are not kept, how many of its tokens are `going` on to deeper layers (0:
    all), whether later layers want what its entries were worth, and whether anybody wants what it attends to. At
    decode, whether it reads everything. In both, whether it has its part in what the policy's allocator and rules do:
    not under a sliding window, nor when spared."""

    slots: int = 0
    look: bool = True
    extra: int = 0
    going: int = 0
    leads: bool = False
    attends: bool = True
    everything: bool = True
    shares: bool = True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerIn:
    """A layer's store, each row's budget in it, what the model knows of the layer, and what is asked of it; of a prompt
    also the most that a row may hold in any layer."""

    cache: Any
    limits: Int[Array, "B"]
    facts: Facts = Facts()
    ask: Ask = dataclasses.field(default=Ask(), metadata={"static": True})
    most: Int[Array, "B"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Notes:
    """What a layer says to the others: the indices of the block's tokens that go on, what cache and block were worth,
    and what it is like, where layers share a budget."""

    going: Int[Array, "B N"] | None = None
    worth: Float[Array, "B Hk S"] | None = None
    profile: Float[Array, "B _"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerOut:
    """The layer's store after a block or a step, and its notes."""

    cache: Any
    notes: Notes = Notes()
