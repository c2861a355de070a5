"""allocate: the budget of every layer, in tokens per KV head, from the mean budget; and whether its heads share it.

Heads share it by what their entries are worth (`Adaptive`), or by what was measured on the model (`Measured`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv.errors import BadValue
from jaxkv.policies import layers
from jaxkv.policies.allocator import Allocate, Choice, Contest, Learned
from jaxkv.policies.curves import Curves
from jaxkv.policies.layers import Uniform
from jaxkv.policies.measured import Divided, Proportional, Repeating, poured
from jaxkv.policies.needs import MASS, OUTPUT
from jaxkv.policies.score import Score
from jaxkv.policies.shared import Shared, safeguarded
from jaxkv.store.pool import best, compete
from pallas_kernels.ragged_decode.segments import per_head


@dataclasses.dataclass(frozen=True)
class Adaptive(Shared):
    """The KV heads of a layer compete for its budget: the best entries of all heads stay, wherever they are.

    Every head keeps at least its best `safeguard` (a fraction of the budget); or, when `mixing`, gets of what is not
    protected round((1 - safeguard) n + safeguard m) of its best, n being how many it won and m the mean. With `of`, the
    heads' shares come from that score, and inside each head the policy's own decides. `layers` gives each layer its
    budget. At decode the borders between the heads move every `interval` steps (0: never): the lowest `shift` entries
    per head on average, of all heads together, make room for as many new ones in every head. A decode phase with
    `every` > 1 moves the borders whenever it cuts. The cache is a pool of exactly the budget. Layers with a sliding
    window stay uniform. Source: AdaKV (arXiv 2407.11550), mixing as in its release (`AdaptiveSnapKVCluster`), the
    safeguard as in kvpress; the moves are ours.
    """

    safeguard: float = 0.2
    mixing: bool = False
    of: Score | None = None
    layers: Allocate = Uniform()
    interval: int = 0
    shift: int = 1
    kind: ClassVar[str] = "adaptive"

    def __post_init__(self):
        if not 0 <= self.safeguard <= 1:
            raise BadValue(f"safeguard={self.safeguard}: expected a fraction of the budget, from 0 to 1")
        if self.interval < 0 or self.shift < 1:
            raise BadValue(
                f"interval={self.interval}, shift={self.shift}: expected at least 0 steps (0: never) and 1 entry"
            )

    @property
    def needs(self) -> frozenset[str]:
        """What dividing the budget over heads and layers needs."""
        return self.layers.needs if self.of is None else self.layers.needs | self.of.needs

    @property
    def leaves(self) -> tuple[Score, ...]:
        return () if self.of is None else self.of.leaves()

    @property
    def bounded(self) -> bool:
        return self.layers.bounded

    def budgets(self, budget: int, layers: int, tokens: int, window: int, learned: Learned) -> tuple[int, ...]:
        """The layers' own, as means over their heads."""
        return self.layers.budgets(budget, layers, tokens, window, learned)

    def check(self, policy: Any) -> None:
        super().check(policy)
        where = f"policy {policy.name!r}, whose heads compete for a layer's budget"
        if self.of is not None and policy.prefill is not None:
            own = policy.prefill.score
            together = [leaf.kind for leaf in self.leaves if leaf.together]
            if together:
                raise BadValue(
                    f"{where}: allocate of={together[0]!r} sums over the heads, which must hold the same tokens then: "
                    "expected another score"
                )
            lacks = sorted((self.of.needs & {MASS, OUTPUT}) - own.needs) + sorted(set(self.of.stats) - set(own.stats))
            if lacks:
                raise BadValue(f"allocate of={self.of.kind!r} needs what the prefill score has not: {', '.join(lacks)}")
        if self.interval and (policy.decode is None or policy.decode.every > 1):
            raise BadValue(
                f"{where}: interval={self.interval} moves borders between decode steps that overwrite one slot each; "
                "without a decode phase none move, and one with every > 1 moves them at its cuts: leave interval= out"
            )
        if self.interval and policy.budget is not None and self.shift >= policy.budget:
            raise BadValue(f"shift={self.shift}: expected fewer entries than the budget of {policy.budget}")

    def guard(self, limits: Int[Array, "B"], phases: Sequence[Any]) -> Int[Array, "B"]:
        """The safeguard, and at decode what is protected and one entry that can go."""
        return safeguarded(0.0 if self.mixing else self.safeguard, limits, phases)

    def choose(self, contest: Contest) -> Choice:
        """The best of all heads together. With `of`, that settles how many each head keeps of a prompt, and inside
        each head the phase's own score decides which."""
        of = self.of if contest.prompt else None
        each = jnp.minimum(contest.each, contest.slots)
        worth, place = contest.worth(of, each), (contest.positions, contest.owner)
        kept, safe = compete(worth, *place, contest.heads, contest.heads * each, jnp.minimum(contest.guard, each))
        if of is None and not self.mixing:
            return Choice(kept, worth)
        quota = per_head(kept, contest.owner, contest.heads)
        if self.mixing:
            held = per_head(contest.positions >= 0, contest.owner, contest.heads)
            quota = self.mixed(quota, per_head(worth == jnp.inf, contest.owner, contest.heads), each, held)
        if of is not None:
            worth = jnp.where(safe, jnp.inf, contest.worth(None, quota))
        return Choice(best(worth, *place, quota), worth)

    def mixed(
        self, won: Int[Array, "B Hk"], protected: Int[Array, "B Hk"], each: Int[Array, "B"], held: Int[Array, "B Hk"]
    ) -> Int[Array, "B Hk"]:
        """What heads won, moved towards an even share, as many together; none more than it has held."""
        part = jnp.float32(self.safeguard)
        even = each[:, None] - protected
        exact = (1 - part) * (won - protected).astype(jnp.float32) + part * even.astype(jnp.float32)
        whole = jnp.floor(exact + 1e-4).astype(jnp.int32)
        left = jnp.sum(won, axis=-1) - jnp.sum(protected + whole, axis=-1)
        place = jnp.argsort(jnp.argsort(whole.astype(jnp.float32) - exact, axis=-1, stable=True), axis=-1)
        quota = jnp.minimum(protected + whole + (place < left[:, None]).astype(jnp.int32), held)
        ones = jnp.ones(held.shape[-1], jnp.int32)
        return quota + poured(jnp.sum(won, axis=-1) - jnp.sum(quota, axis=-1), ones, held - quota)

    def moves(self, limits, now):
        if not self.interval:
            return None
        return limits - self.shift, now % self.interval == 0


KINDS = layers.KINDS | {part.kind: part for part in (Adaptive, Proportional, Divided, Repeating, Curves)}
