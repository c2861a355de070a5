"""flow: what happens between the layers of a prompt's block.

Straight on, or only some tokens go on to deeper layers (`propagate`), or layers keep what an earlier one chose
(`follow`). The program that runs the block knows no kinds: it asks the flow for a `Passage` of the block.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.checks import Checked
from jaxkv.errors import BadValue
from jaxkv.policies.aggregate import Aggregate
from jaxkv.store.entries import EMPTY, NEVER, highest, packed

Attend = Callable[..., tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a prompt on its way: `tokens` of its own at `positions [B, T]`, and `behind` them pseudo tokens at
    `places [B, N]`; `layers` in all, of which the `full` ones have no sliding window. `slots` are the most that a layer
    has, `parts` the devices that share the tokens of a prompt.

    `attend` is a layer's attention; `attend_at(positions)` the same for other tokens, `lay` lays a stream over devices.
    """

    positions: Int[Array, "B T"]
    places: Int[Array, "B N"]
    layers: int
    full: Sequence[int]
    slots: int
    parts: int
    attend: Attend
    attend_at: Callable[[Int[Array, "B _"]], Attend]
    lay: Callable[[str, jax.Array], jax.Array]


class Flow(Checked):
    """Straight on; the base of the others."""

    kind: ClassVar[str]
    straight: ClassVar[bool] = True  # every layer sees every token and chooses for itself
    going_on: ClassVar[bool] = False  # only some tokens go on to deeper layers

    def check(self, policy: Any) -> None:
        """Raises `BadValue` for a policy that this flow cannot run."""

    def going(self, block: Block, layer: int) -> int:
        """How many of the block's tokens go on from the layer; 0: all."""
        return 0

    def leads(self, layer: int, block: Block) -> bool:
        """Whether later layers ask what this one valued the entries at."""
        return False

    def route(self, block: Block) -> Callable[[int, jax.Array, Any, Attend], tuple[jax.Array, Attend]] | None:
        """What is done with the stream and the following layers' attention after each layer; None: nothing."""
        return None


@dataclasses.dataclass(frozen=True)
class Straight(Flow):
    """Every layer sees every token of the prompt and chooses for itself."""

    kind: ClassVar[str] = "straight"


@dataclasses.dataclass(frozen=True)
class Follow(Flow):
    """`reuse` adjacent layers choose together: the first looks at the prompt, and the others keep the same entries.

    Layers with a sliding window choose for themselves. Source: ChunkKV (arXiv 2502.00299), its layer-wise index reuse.
    """

    reuse: int = 2
    kind: ClassVar[str] = "follow"

    def __post_init__(self):
        if isinstance(self.reuse, bool) or self.reuse < 1:
            raise BadValue(f"reuse={self.reuse}: expected at least 1 layer")

    @property
    def straight(self) -> bool:
        """With groups of one layer nobody follows."""
        return self.reuse == 1

    def check(self, policy: Any) -> None:
        if not self.straight and (policy.prefill is None or policy.decode is not None or not policy.allocate.equal):
            raise BadValue(
                f"reuse={self.reuse} of policy {policy.name!r}: expected at least 1 layer; above 1 the layers hold the "
                "same entries, so it goes with a prefill phase, uniform budgets and no decode phase"
            )
        if not self.straight and policy.prefill.evicted.attentive:
            raise BadValue(
                f"evicted {policy.prefill.evicted} of policy {policy.name!r}, whose layers follow others "
                f"(reuse={self.reuse}): those that follow see no attention to go by; expected reuse=1, or a rule that "
                "asks for none, such as evicted kind 'merge' with by='equal'"
            )

    def leads(self, layer: int, block: Block) -> bool:
        return not self.straight and layer in block.full and block.full.index(layer) % self.reuse == 0

    def route(self, block: Block):
        if self.straight:
            return None

        def follow(layer: int, x, notes, following):
            if layer not in block.full:
                return x, following
            place = block.full.index(layer) % self.reuse  # among the layers that choose together
            if place == 0 and notes.worth is not None:
                following = lambda *args, **more: block.attend(*args, **more, lead=notes.worth)  # noqa: E731
            return x, block.attend if place == self.reuse - 1 else following

        return follow


@dataclasses.dataclass(frozen=True)
class Propagate(Flow):
    """After one layer, only `keep` of a block's tokens go on: those that its last `window` queries attend to most,
    pooled over `kernel` neighbours ("max" or "avg") in each query head, in the mean over them; and the window itself.

    `after` is the layer's number from 0, or a share of the layers between 0 and 1. Source: FastKV (arXiv 2502.01068),
    where the layer is the 16th of 32 and `keep` 0.2. Ours: the choice is made in each block of a long prompt, and as
    many as the budget always go on, for deeper layers could not fill it otherwise.
    """

    after: int | float = 0.5
    keep: float = 0.2
    window: int = 8
    kernel: int = 7
    pool: str = "max"
    kind: ClassVar[str] = "propagate"
    straight: ClassVar[bool] = False
    going_on: ClassVar[bool] = True

    def __post_init__(self):
        whole = self.after == int(self.after)
        if self.after < 0 or (not whole and self.after > 1) or not 0 < self.keep <= 1:
            raise BadValue(
                f"after={self.after}, keep={self.keep}: expected a layer's number or a share of the layers, and "
                "a share of the tokens above 0 and up to 1"
            )
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0 or self.pool not in ("max", "avg"):
            raise BadValue(
                f"window={self.window}, kernel={self.kernel}, pool={self.pool!r}: expected window >= 1, an odd kernel, "
                "and 'max' or 'avg'"
            )

    def check(self, policy: Any) -> None:
        if policy.prefill is None or policy.prefill.observe.replays:
            raise BadValue(
                f"policy {policy.name!r} propagates some tokens of a prompt: expected a prefill phase without replay"
            )

    def layer(self, layers: int) -> int:
        """The number of the layer after which fewer tokens go on."""
        share = 0 < self.after < 1
        return min(round(self.after * layers) - 1 if share else int(self.after), layers - 1)

    def count(self, tokens: int, budget: int) -> int:
        """How many of so many tokens go on, at most: never fewer than the window or the budget."""
        share = int(np.float32(tokens) * np.float32(self.keep))  # rounded as `choose` does
        return min(max(share, self.window, budget), tokens)

    def choose(
        self, mass: Float[Array, "B Hq T"], positions: Int[Array, "B T"], limits: Int[Array, "B"], slots: int
    ) -> Int[Array, "B N"]:
        """The indices of the tokens that go on, in time order and padded with -1: of each row as many as it alone
        would send, whatever its padding (position -1)."""
        real = positions >= 0
        tokens = jnp.sum(real, axis=-1, keepdims=True, dtype=jnp.int32)
        share = (tokens.astype(jnp.float32) * jnp.float32(self.keep)).astype(jnp.int32)
        many = jnp.minimum(jnp.maximum(share, jnp.maximum(self.window, limits[:, None])), tokens)
        window = (jnp.arange(positions.shape[1]) >= positions.shape[1] - self.window) & real
        along = Aggregate(pool=self.pool, kernel=self.kernel)
        pooled = jnp.mean(along.along_text(mass, positions[:, None], window[:, None]), axis=1)
        worth = jnp.where(real, jnp.where(window, jnp.inf, pooled), NEVER)[:, None]
        return packed(highest(worth, many[:, 0]) & real[:, None], slots)[:, 0]

    def going(self, block: Block, layer: int) -> int:
        if layer != self.layer(block.layers):
            return 0
        tokens = block.positions.shape[1]
        onward = self.count(tokens, block.slots)
        return min(onward + -(onward + block.places.shape[1]) % block.parts, tokens)

    def route(self, block: Block):
        def propagate(layer: int, x, notes, following):
            if layer != self.layer(block.layers) or notes.going is None:
                return x, following
            own, index = block.positions.shape[1], jnp.maximum(notes.going, 0)
            some = jnp.take_along_axis(x[:, :own], index[..., None], axis=1)
            at = jnp.take_along_axis(block.positions, index, axis=1)
            at = jnp.concatenate([jnp.where(notes.going < 0, EMPTY, at), block.places], axis=1)
            return block.lay("stream", jnp.concatenate([some, x[:, own:]], axis=1)), block.attend_at(at)

        return propagate


KINDS: dict[str, type[Flow]] = {flow.kind: flow for flow in (Straight, Follow, Propagate)}
