"""allocate: how one budget is divided over layers and heads, and which entries that lets stay.

An allocator decides for itself: nothing asks which one it is. `budgets` gives every layer its mean budget before
anything runs; `choose` says which entries of a layer stay; `divide` what all layers keep together, after a block.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv.checks import Checked
from jaxkv.policies.score import Score, ScoreInputs
from jaxkv.store.entries import best_of_each

UNLIMITED = 2**30  # the budget of a layer that evicts nothing
Learned = Mapping[str, Any]  # name -> array [L, ...], by `jaxkv calibrate`


@dataclasses.dataclass(frozen=True)
class Contest:
    """The entries of one layer among which an allocator chooses: N slots in one row, whatever the store.

    `worth(score, goal)` scores every slot by the phase's own score (None) or another one, given how many entries are
    to stay per head (`[B]`, or `[B, Hk]`). `owner` is the KV head of each slot. A head keeps `each [B]` entries on
    average, `guard [B]` of its best at least, and `slots` at most where all heads have as many. `prompt` tells a cut of
    a prompt from one while decoding; `inputs` is what the prompt's queries saw, None where nobody looked (all fits).
    """

    worth: Callable[[Score | None, Int[Array, "B *Hk"]], Float[Array, "B N"]]
    positions: Int[Array, "B N"]
    owner: Int[Array, "B N"]
    heads: int
    each: Int[Array, "B"]
    guard: Int[Array, "B"]
    slots: int
    learned: Learned
    prompt: bool = True
    inputs: ScoreInputs | None = None

    def by_head(self, x: jax.Array) -> jax.Array:
        """`x [B, N]` as `[B, Hk, S]`, where every head has as many slots."""
        return x.reshape(x.shape[0], self.heads, -1)


class Choice(NamedTuple):
    """Which of a contest's entries stay, what they were worth, and what the layer says of itself to the others."""

    kept: Bool[Array, "B N"]
    worth: Float[Array, "B N"]
    profile: Float[Array, "B _"] | None = None


@dataclasses.dataclass(frozen=True)
class Division:
    """What the layers that share hold after a block, to be divided: the candidates of `layers`, with `heads` each, in
    one line of slots (`owner`: the heads of all, bottom first), what they are `worth`, and what each layer said of
    itself (None: nobody looked, and all stays). Layers that the block has not come to hold nothing and said zeros.

    `each [B]` entries per head stay on average over all layers, `guard [B]` at least.
    """

    positions: Int[Array, "B N"]
    owner: Int[Array, "B N"]
    worth: Float[Array, "B N"]
    held: Int[Array, "B LHk"]
    layers: int
    profiles: Float[Array, "L B _"] | None
    each: Int[Array, "B"]
    guard: Int[Array, "B"]

    @property
    def heads(self) -> int:
        """KV heads of a layer."""
        return self.held.shape[1] // self.layers


class Allocate(Checked):
    """The defaults: every head of every layer has its own budget, and keeps its best entries."""

    kind: ClassVar[str]
    alike: ClassVar[bool] = False  # where layers share: a layer's heads hold equally many
    store: ClassVar[str] = "slots"  # where a layer's entries lie: "slots", "pool" (heads share), "line" (layers share)
    needs: ClassVar[frozenset[str]] = frozenset()
    cascades: ClassVar[bool] = False  # what a layer keeps only falls as others come: it is cut after each of them

    @property
    def pooled(self) -> bool:
        """Whether heads may hold unequally many."""
        return self.store != "slots"

    @property
    def divides(self) -> bool:
        """Whether layers share what a block leaves, so that `divide` has the last word."""
        return self.store == "line"

    @property
    def equal(self) -> bool:
        """Whether every layer and head has the same budget, whatever the text."""
        return False

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The scores by which it divides, beside the phases' own."""
        return ()

    @property
    def bounded(self) -> bool:
        """Whether every layer has a budget, so that a policy that evicts while decoding holds no more than that."""
        return True

    def check(self, policy: Any) -> None:
        """Raises `BadValue` for a policy with which the division cannot be done."""

    def shares(self, layer: int, layers: int) -> bool:
        """Whether a layer of so many has its part in the division, and in what becomes of entries that leave; one that
        has not holds what its budget says, in slots of its own."""
        return True

    def prepared(self, learned: Learned, kv_heads: int) -> Learned:
        """What was measured, and what each layer, of so many KV heads, has to know of all of them."""
        return learned

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """The mean budget of every layer, bottom first, for a text of so many tokens."""
        return (budget,) * layers

    def reach(self, slots: int, limit: int, layers: int, tokens: int) -> int:
        """Slots per head that a layer may hold while a block of a prompt runs, of `layers` that share; 0: as many as
        its budget needs. `slots` are those of an even share, `limit` its budget, `tokens` the most that a layer can
        have when a block has come."""
        return 0

    def guard(self, limits: Int[Array, "B"], phases: Sequence[Any]) -> Int[Array, "B"]:
        """Entries that every head keeps whatever the others have; heads that share nothing, all."""
        return limits

    def choose(self, contest: Contest) -> Choice:
        """Which entries stay. Ties go to the older token, then to the lower head."""
        worth = contest.worth(None, contest.each)
        by_head = contest.by_head(worth), contest.by_head(contest.positions)
        kept = best_of_each(*by_head, jnp.minimum(contest.each, contest.slots))
        return Choice(kept.reshape(worth.shape), worth)

    def keeps_all(self, held: int, slots: int) -> bool:
        """Whether a layer of so many `slots` keeps as candidates all that lies in `held` slots per head."""
        return False

    def widest(self, slots: int) -> int:
        """The most entries per head that a layer may keep of its candidates, where an even share has `slots` (0: nobody
        knows)."""
        return 0

    def local(self, learned: Learned, heads: int) -> Bool[Array, "Hk"] | None:
        """True for the heads whose entries leave oldest first, whatever their score; None where there are none."""
        return None

    def moves(self, limits: Int[Array, "B"], now: Int[Array, "B"]) -> tuple[Int[Array, "B"], Bool[Array, "B"]] | None:
        """After a decode step: how many entries per head rows may keep on average, and which rows' heads move their
        borders now; None where they never do between cuts."""
        return None

    def divide(self, division: Division) -> Bool[Array, "B N"]:
        """Which of the candidates of the layers that share stay; asked where layers share a line."""
        raise NotImplementedError


EACH_ITS_OWN = Allocate()  # for layers with a sliding window, which is a budget of its own
