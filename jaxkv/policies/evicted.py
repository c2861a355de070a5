"""evicted: what becomes of the entries that leave a layer's slots.

Dropped, summarised into their means, merged into a survivor, or moved to a tier of lower precision. A rule is called in
two places: when a store is cut, and when a decode step overwrites one entry per head. What it must remember lies beside
the slots, under the rule's `state`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.checks import Checked
from jaxkv.errors import BadValue
from jaxkv.store import summary, tier
from jaxkv.store.codecs import Codecs
from jaxkv.store.codecs import Int as Integers
from jaxkv.store.entries import Entries
from jaxkv.store.threshold import Threshold

SEARCHED = 256  # leaving entries whose nearest survivors are looked for together


@dataclasses.dataclass(frozen=True)
class Leaving:
    """What a rule may know besides the entries: which heads let their oldest go first (None: no head does so)."""

    local: Bool[Array, "Hk"] | None = None


class Evicted(Checked):
    """The defaults: nothing is remembered, and survivors stay as they are."""

    kind: ClassVar[str]
    state: ClassVar[str] = ""  # the name under which its state lies beside the slots; "" for none
    moves: ClassVar[bool] = False  # whether survivors change
    attended: ClassVar[bool] = False  # whether its state is attended to
    needs: ClassVar[frozenset[str]] = frozenset()

    def begin(self, batch: int, heads: int, head_dim: int, dtype: Any) -> Any:
        """The state before anything has left."""
        return None

    def absorb(self, beside: Any, kept: Entries | None, lost: Entries, facts: Leaving) -> tuple[Entries | None, Any]:
        """The survivors `[B, Hk, C]` and the state, after the `lost [B, Hk, S]` entries have left.

        Keys are as they lie in the cache; position -1 marks what is no survivor, or has not left. A rule that moves
        nothing gets no survivors at an overwrite (None), and gives back what it got.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Drop(Evicted):
    """What leaves is gone."""

    kind: ClassVar[str] = "drop"

    def absorb(self, beside, kept, lost, facts):
        return kept, beside


@dataclasses.dataclass(frozen=True)
class Summarise(Evicted):
    """The means of the keys and values that left a head stay in its softmax, with their number as the weight.

    With `local_only` those of local heads alone, as their allocator names them (all heads, where it names none).
    Source: RazorAttention's compensation token (arXiv 2407.15891).
    """

    local_only: bool = False
    kind: ClassVar[str] = "summarise"
    state: ClassVar[str] = "summary"
    attended: ClassVar[bool] = True

    def begin(self, batch: int, heads: int, head_dim: int, dtype: Any) -> summary.Summary:
        return summary.empty(batch, heads, head_dim)

    def absorb(self, beside, kept, lost, facts):
        gone = lost.filled
        if self.local_only and facts.local is not None:
            gone = gone & facts.local[:, None]
        return kept, beside.added(lost.keys, lost.values, gone)


@dataclasses.dataclass(frozen=True)
class Demote(Evicted):
    """What leaves goes to a second tier of `slots` slots per KV head, in integers of `bits` bits; of what came there
    the newest stay. Both tiers are attended to, and the first evicts by its own attention mass alone. Ours; a tier of
    low precision for what is not important is MiKV's idea (arXiv 2402.18096), which bounds neither.
    """

    slots: int = 256
    bits: int = 4
    kind: ClassVar[str] = "demote"
    state: ClassVar[str] = "tier"
    attended: ClassVar[bool] = True

    def __post_init__(self):
        if isinstance(self.slots, bool) or self.slots < 1:
            raise BadValue(f"slots={self.slots}: expected at least 1 slot per KV head in the second tier")
        Integers(self.bits)  # raises for other numbers of bits

    def begin(self, batch: int, heads: int, head_dim: int, dtype: Any) -> tier.Tier:
        codec = Integers(self.bits)
        return tier.empty(batch, heads, self.slots, head_dim, dtype, Codecs(codec, codec))

    def absorb(self, beside, kept, lost, facts):
        one = lost.positions.shape[-1] == 1
        return kept, beside.with_one(lost) if one else beside.with_many(lost)


@dataclasses.dataclass(frozen=True)
class Merge(Evicted):
    """An entry that leaves is merged into the survivor whose key is nearest, where that one is near enough.

    m_e = max_j cos(k_e, k_j), and t(e) is the first j that has it. tau is the mean of all m the first time, later
    alpha tau + beta mean(m). The e-th entries that the heads lose, in time order, are merged where the mean of their m
    is at least tau, else dropped: k_j = (k_j + sum m_e k_e) / (1 + n_j) over the n_j entries merged into j, v alike.
    Source: D2O (arXiv 2406.13035), in its release's form; tau begins anew with every text, unlike there.
    """

    alpha: float = 0.5
    beta: float = 0.5
    kind: ClassVar[str] = "merge"
    state: ClassVar[str] = "threshold"
    moves: ClassVar[bool] = True

    def __post_init__(self):
        if not 0 <= self.alpha <= 1 or not 0 <= self.beta <= 1:
            raise BadValue(f"alpha={self.alpha}, beta={self.beta}: expected weights of a moving average from 0 to 1")

    def begin(self, batch: int, heads: int, head_dim: int, dtype: Any) -> Threshold:
        return Threshold(jnp.zeros(batch, jnp.float32), jnp.zeros(batch, bool))

    def absorb(self, beside, kept, lost, facts):
        assert kept is not None
        near, target = nearest(lost, kept)
        gone = lost.filled & jnp.any(kept.filled, axis=-1, keepdims=True)
        place = jnp.where(gone, jnp.cumsum(gone, axis=-1, dtype=jnp.int32) - 1, gone.shape[-1])  # of those that leave
        near = jnp.where(gone, near, 0.0)
        total, count = (_over_heads(x, place) for x in (near, gone.astype(jnp.float32)))
        many = jnp.sum(count, axis=-1)
        mean = jnp.sum(total, axis=-1) / jnp.maximum(many, 1.0)
        moved = jnp.where(beside.begun, self.alpha * beside.tau + self.beta * mean, mean)
        state = Threshold(jnp.where(many > 0, moved, beside.tau), beside.begun | (many > 0))
        alike = total / jnp.maximum(count, 1.0) >= state.tau[:, None]
        joins = gone & jnp.take_along_axis(alike[:, None], jnp.minimum(place, gone.shape[-1] - 1), axis=-1)
        return merged(
            kept, lost, jnp.where(joins, near, 0.0), jnp.where(joins, target, kept.positions.shape[-1])
        ), state


def nearest(lost: Entries, kept: Entries) -> tuple[Float[Array, "B Hk E"], Int[Array, "B Hk E"]]:
    """The largest cosine of each leaving key with a survivor's of its head, and the first survivor that has it.

    Some leaving entries at a time, so that there is no array of all by all. What is no survivor has cosine -2.
    """
    unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-30)  # noqa: E731
    there = kept.filled
    keys = unit(jnp.where(there[..., None], kept.keys.astype(jnp.float32), 0.0))
    rows = unit(jnp.where(lost.filled[..., None], lost.keys.astype(jnp.float32), 0.0))

    def some(rows: Float[Array, "B Hk N D"]) -> tuple[jax.Array, jax.Array]:
        alike = jnp.einsum("bhnd,bhcd->bhnc", rows, keys, precision=lax.Precision.HIGHEST)
        alike = jnp.where(there[:, :, None], alike, -2.0)
        return jnp.max(alike, axis=-1), jnp.argmax(alike, axis=-1).astype(jnp.int32)

    count = rows.shape[2]
    size = min(SEARCHED, count)
    parts = jnp.pad(rows, ((0, 0), (0, 0), (0, -count % size), (0, 0)))
    parts = jnp.moveaxis(parts.reshape(*rows.shape[:2], -1, size, rows.shape[-1]), 2, 0)
    found = lax.map(some, parts)
    return tuple(jnp.moveaxis(x, 0, 2).reshape(*rows.shape[:2], -1)[..., :count] for x in found)  # type: ignore


def merged(kept: Entries, lost: Entries, weights: Float[Array, "B Hk E"], targets: Int[Array, "B Hk E"]) -> Entries:
    """The survivors, each the mean (x + sum w_e x_e) / (1 + n) of itself and the n entries that go to it, keys and
    values alike; a target past the last survivor is nobody. Statistics stay as they are."""
    slots = kept.positions.shape[-1]
    add = jax.vmap(jax.vmap(lambda x, at: jax.ops.segment_sum(x, at, slots + 1)[:slots]))
    count = 1.0 + add(jnp.ones_like(weights), targets)

    def mean(x: jax.Array, gone: jax.Array) -> jax.Array:
        gone = jnp.where((targets < slots)[..., None], gone.astype(jnp.float32), 0.0)
        total = x.astype(jnp.float32) + add(gone * weights[..., None], targets)
        return jnp.where((count > 1)[..., None], total / count[..., None], x.astype(jnp.float32)).astype(x.dtype)

    return dataclasses.replace(kept, keys=mean(kept.keys, lost.keys), values=mean(kept.values, lost.values))


def _over_heads(x: Float[Array, "B Hk E"], place: Int[Array, "B Hk E"]) -> Float[Array, "B E"]:
    """The sum over the heads of what stands at the same place among those that leave; places past the end are none."""
    rows = jnp.arange(x.shape[0])[:, None, None]
    return jnp.zeros((x.shape[0], x.shape[2]), x.dtype).at[rows, place].add(x, mode="drop")


KINDS: dict[str, type[Evicted]] = {rule.kind: rule for rule in (Drop, Summarise, Merge, Demote)}
