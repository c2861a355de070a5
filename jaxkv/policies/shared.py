"""What allocators have in common under which heads share a budget."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv.errors import BadValue
from jaxkv.policies.allocator import Allocate
from jaxkv.policies.score import still


class Shared(Allocate):
    """The heads of a layer share its budget: the layer is a pool of exactly that."""

    store: ClassVar[str] = "pool"
    alike: ClassVar[bool] = False  # a layer's heads hold equally many, so that they may decide as one on a prompt

    def check(self, policy: Any) -> None:
        where = f"policy {policy.name!r}, whose heads share a layer's budget"
        if policy.prefill is None:
            raise BadValue(f"{where}, evicts nothing: give it a prefill phase, or allocate kind 'uniform'")
        if policy.rope != "text":
            raise BadValue(f"{where}: expected rope='text'; a place in the cache is no position that heads share")
        rule = None if policy.decode is None or policy.decode.every > 1 else policy.decode.evicted
        if rule is not None and rule.moves and not rule.single:
            raise BadValue(
                f"{where}, and evicted kind {rule.kind!r} changes several entries at every overwrite: set every= above "
                "1, so that it does so when the layer is cut"
            )
        if policy.decode is not None and policy.decode.score.grows:
            raise BadValue(
                f"{where}, and score {policy.decode.score.kind!r} lets it grow while decoding, which heads with "
                f"shares of their own cannot: set {still(policy.decode.score)}, or allocate kind 'uniform'"
            )
        for phase in policy.phases:
            together = [leaf.kind for leaf in phase.score.leaves() if leaf.together]
            as_one = phase.aggregate.heads != "each" or together
            if as_one and not (self.alike and phase is policy.prefill):
                raise BadValue(
                    f"{where}, lets them decide as one (aggregate heads={phase.aggregate.heads!r}, score "
                    f"{phase.score.kind!r}): set heads='each' and another score, or allocate kind 'uniform'"
                )


def spared(limits: Int[Array, "B"], phases: Sequence[Any]) -> Int[Array, "B"]:
    """The most entries of a head that a phase protects under the limits."""
    each = [phase.protects.recents(limits) + phase.protects.sinks for phase in phases]
    return jax.tree.reduce(jnp.maximum, each)


def safeguarded(safeguard: float, limits: Int[Array, "B"], phases: Sequence[Any]) -> Int[Array, "B"]:
    """The fraction `safeguard` of the limits, at least one entry, and at decode what is protected and one that can
    go; at most the limits."""
    guard = jnp.maximum(jnp.floor(limits.astype(jnp.float32) * safeguard).astype(jnp.int32), 1)
    for phase in phases[1:]:  # the decode phase, where there is one
        guard = jnp.maximum(guard, phase.protects.recents(limits) + phase.protects.sinks + 1)
    return jnp.minimum(guard, limits)
