"""evicted: what becomes of the entries that leave a layer's slots.

Dropped, summarised into their means, taken up by residual slots, sketched for an estimate, moved to a tier of lower
precision, or merged into a survivor (`merging.py`). A rule is called in two places: when a store is cut, and when a
decode step overwrites one entry per head. What it must remember lies beside the slots, under the rule's `state`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxkv.checks import Checked, foreign
from jaxkv.errors import BadValue
from jaxkv.policies.score import ScoreInputs, draws
from jaxkv.store import residue, sketch, summary, tier
from jaxkv.store.balance import largest, middle, reach
from jaxkv.store.codec import Codec
from jaxkv.store.codecs import Codecs
from jaxkv.store.entries import Change, Entries
from jaxkv.store.integers import Int as Integers

BALANCES = {  # of keys, of values, and around a centre
    "none": (False, False, False),
    "queries": (True, False, False),
    "channels": (True, True, False),
    "ranges": (True, False, True),
}


@dataclasses.dataclass(frozen=True)
class Leaving:
    """What a rule may know besides the entries: which heads let their oldest go first (None: no head does so), which
    slots of survivors the phase protects, the position of the next token, how RoPE turns keys by so many positions
    (None: keys lie as the model makes them), and how many survivors a head has at most (0: as many as there are slots).
    """

    local: Bool[Array, "Hk"] | None = None
    spared: Bool[Array, "B Hk C"] | None = None
    now: Int[Array, "B"] | None = None
    rotate: Callable[[Any, Any], Any] | None = None
    most: int = 0


class Evicted(Checked):
    """The defaults: nothing is remembered, and survivors stay as they are."""

    kind: ClassVar[str]
    state: ClassVar[str] = ""  # the name under which its state lies beside the slots; "" for none
    moves: ClassVar[bool] = False  # whether survivors change
    reads_keys: ClassVar[bool] = True  # whether it looks at keys, or changes them
    single: ClassVar[bool] = False  # whether at an overwrite at most one survivor of a head does: `take`
    attended: ClassVar[bool] = False  # whether its state is attended to
    weighs: ClassVar[bool] = False  # whether survivors may stand for several tokens
    ranks: ClassVar[bool] = False  # whether it asks what each entry was last valued at: the statistic `worth`
    attentive: ClassVar[bool] = False  # whether it asks for the attention that entries have had so far
    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def acts(self) -> bool:
        """Whether anything becomes of what leaves."""
        return bool(self.state) or self.moves

    def check(self, policy: Any) -> None:
        """Raises `BadValue` for a policy under which the rule cannot work."""

    def sized(self, budget: int) -> "Evicted":
        """The rule for a policy that keeps `budget` tokens per KV head."""
        return self

    def begin(self, batch: int, heads: int, head_dim: int, dtype: Any) -> Any:
        """The state before anything has left."""
        return None

    def begun(self, beside: Any, entries: Entries, block: ScoreInputs) -> Any:
        """The state with what it takes from a block of the prompt and the `entries` held with it, before any leave."""
        return beside

    def absorb(self, beside: Any, kept: Entries | None, lost: Entries, facts: Leaving) -> tuple[Entries | None, Any]:
        """The survivors `[B, Hk, C]` and the state, after the `lost [B, Hk, S]` entries have left.

        Keys are as they lie in the cache; position -1 marks what is no survivor, or has not left. At a cut both lie in
        the same S = C slots. Statistics are those after the last observation. A rule that moves nothing gets no
        survivors at an overwrite (None), and gives back what it got; one that does changes keys, values and weights.
        """
        raise NotImplementedError

    def take(
        self, beside: Any, held: Entries, takers: Bool[Array, "B Hk S"], gone: Entries, facts: Leaving
    ) -> tuple[Change, Any]:
        """`absorb` of a `single` rule at an overwrite: what one survivor of each head becomes, and the state.

        `held` are a store's entries where they lie, `[B, Hk, S]` or, where heads share slots, `[B, S]`; `takers` which
        of them are each head's and stay, `gone [B, Hk, 1]` what each loses.
        """
        raise NotImplementedError


def begin_by(rule: Evicted, batch: int, heads: int, head_dim: int, dtype: Any) -> Any:
    """What the rule's `begin` gives. Raises `BadValue` where that does not say what it is beside the slots."""
    found = rule.begin(batch, heads, head_dim, dtype)
    if lacking := [name for name in ("attends", "kv_bytes") if not hasattr(found, name)]:
        raise BadValue(
            f"begin of evicted kind {rule.kind!r} gives {type(found).__name__} without {' and '.join(lacking)}: "
            "expected a state that says whether it is attended to, and the bytes of keys and values in it"
        )
    return found


def absorb_by(rule: Evicted, beside: Any, kept: Entries | None, lost: Entries, facts: Leaving) -> Any:
    """What the rule's `absorb` gives. Raises `BadValue` as `_check_given` does."""
    found = rule.absorb(beside, kept, lost, facts)
    if foreign(rule):
        _check_given(rule, "absorb", found, (kept, beside))
    return found


def take_by(
    rule: Evicted, beside: Any, held: Entries, takers: Bool[Array, "B Hk S"], gone: Entries, facts: Leaving
) -> Any:
    """What the rule's `take` gives. Raises `BadValue` as `_check_given` does."""
    found = rule.take(beside, held, takers, gone, facts)
    if foreign(rule):
        one = jax.tree.map(lambda x: x[:, :, 0], (gone.positions, gone.keys, gone.values, gone.weight))
        _check_given(rule, "take", found, (Change(*one), beside))
    return found


def _check_given(rule: Evicted, method: str, found: Any, wanted: tuple[Any, Any]) -> None:
    """Raises `BadValue` where a rule gave no pair, or arrays of other shapes than wanted."""
    gives = f"it gives {type(found).__name__}"
    if isinstance(found, tuple) and len(found) == 2:
        mine, due = _shapes(found), _shapes(wanted)
        wrong = next((name for name in [*due, *mine] if mine.get(name) != due.get(name)), None)
        if wrong is None:
            return
        gives = f"{wrong} is {mine.get(wrong)}, not {due.get(wrong)}"
    raise BadValue(
        f"{method} of evicted kind {rule.kind!r}: {gives}; expected a pair, what becomes of the survivors and the "
        "state, with arrays of the shapes that it was given (a state of None where it keeps none)"
    )


def _shapes(answer: tuple[Any, Any]) -> dict[str, Any]:
    """The shape of every array of what a rule gave or was given, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(dict(zip(("survivors", "state"), answer, strict=True)))
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.shape(leaf) for path, leaf in leaves}


@dataclasses.dataclass(frozen=True)
class Drop(Evicted):
    """What leaves is gone."""

    kind: ClassVar[str] = "drop"
    reads_keys: ClassVar[bool] = False

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
        counts = gone.astype(jnp.float32) if lost.weight is None else jnp.where(gone, lost.weight, 0.0)
        return kept, beside.added(lost.keys, lost.values, counts)


@dataclasses.dataclass(frozen=True)
class Residual(Evicted):
    """What leaves goes into the mean of one of `slots` residual slots per KV head, which leave never: at first in equal
    runs by position, later into the one of the largest product of keys. One that stands for n has `share` log n added
    to its logit.

    Source: ZSMerge (arXiv 2503.10714) in its release's form (`cache_init`, `cache_merge`). There the residual slots are
    of the budget, here they lie beside it, and what attention entries get is counted among the other slots alone; a
    text that loses fewer than `slots` entries at its first cut fills the rest later, where the release takes the first
    tokens of such a text.
    """

    slots: int = 1
    share: float = 0.6
    kind: ClassVar[str] = "residual"
    state: ClassVar[str] = "residue"
    attended: ClassVar[bool] = True

    def __post_init__(self):
        if isinstance(self.slots, bool) or self.slots < 1 or not 0 <= self.share <= 1:
            raise BadValue(
                f"slots={self.slots}, share={self.share}: expected at least 1 residual slot per KV head, and a share "
                "of log n from 0 to 1"
            )

    def begin(self, batch: int, heads: int, head_dim: int, dtype: Any) -> residue.Residue:
        return residue.empty(batch, heads, self.slots, head_dim, self.share)

    def absorb(self, beside, kept, lost, facts):
        return kept, beside.added(lost)


@dataclasses.dataclass(frozen=True)
class Demote(Evicted):
    """What leaves goes to a second tier of `slots` slots per KV head, in integers of `bits` bits, or in the codecs
    `keys` and `values`. Of what came there stay, by "position", the newest; by "score", those that the phase's score
    valued most when they left: so an entry is at first exact, then of low precision, then gone.

    `times` above 0: the tier has so many times the budget's slots (`slots`, under a `ratio`). Both tiers are attended
    to; the first evicts by its own attention mass alone, and in the second nothing is scored again. Ours; a tier of low
    precision for what is not important is MiKV's idea (arXiv 2402.18096), which bounds neither.

    `balance` multiplies channels before they are coded, and divides after, by factors of the row's KV head that the
    prompt's first block chooses: "queries" keys by sqrt(max |q| / max |k|) of the channel (MiKV); "channels" keys and
    values x by 1 / sqrt(max |x|) of their own (ZipCache, arXiv 2405.14256, has that for values); "ranges" keys by
    1 / max |k - c|, c being the middle of the channel's range, which is taken away before; of n tokens the maximum is
    at least 2/n of the channels' mean (ours).
    """

    slots: int = 256
    bits: int = 4
    by: str = "position"
    times: float = 0.0
    keys: Codec | None = None
    values: Codec | None = None
    balance: str = "none"
    kind: ClassVar[str] = "demote"
    state: ClassVar[str] = "tier"
    attended: ClassVar[bool] = True

    def __post_init__(self):
        if isinstance(self.slots, bool) or self.slots < 1 or self.times < 0:
            raise BadValue(
                f"slots={self.slots}, times={self.times}: expected at least 1 slot per KV head in the second tier, and "
                "how many times the budget's it has (0: `slots`)"
            )
        if self.by not in ("position", "score"):
            raise BadValue(f"by={self.by!r}: expected 'position', the newest stay, or 'score', the best")
        if self.balance not in BALANCES:
            raise BadValue(f"balance={self.balance!r}: expected one of {', '.join(BALANCES)}")
        for codec in self._each:
            if codec.fits or not codec.apart:
                raise BadValue(
                    f"a second tier in codec {codec.kind!r}, where several tokens share a scale, or which is fitted to "
                    "a prompt: expected one that codes each token by itself, such as {'kind': 'int', 'bits': 4}"
                )

    @property
    def ranks(self) -> bool:  # type: ignore[override]
        """Whether it asks what each entry was last valued at."""
        return self.by == "score"

    @property
    def codecs(self) -> Codecs:
        """How keys and values lie in the tier."""
        return Codecs(*self._each)

    @property
    def _each(self) -> tuple[Codec, Codec]:
        return self.keys or Integers(self.bits), self.values or Integers(self.bits)

    def sized(self, budget: int) -> "Demote":
        if not self.times:
            return self
        return dataclasses.replace(self, slots=max(round(self.times * budget), 1), times=0.0)

    def begin(self, batch: int, heads: int, head_dim: int, dtype: Any) -> tier.Tier:
        of_keys, of_values, centred = BALANCES[self.balance]
        return tier.empty(
            *(batch, heads, self.slots, head_dim, dtype, self.codecs),
            ranked=self.ranks,
            balanced=(of_keys, of_values),
            centred=centred,
        )

    def check(self, policy: Any) -> None:
        _check_single(self, policy)
        if self.balance != "none" and policy.allocate.divides:
            raise BadValue(
                f"balance={self.balance!r} of policy {policy.name!r}, whose layers share one budget and are cut when "
                "the block's queries are gone: expected balance='none', or an allocator of heads or of none"
            )

    def absorb(self, beside, kept, lost, facts):
        if lost.positions.shape[-1] == 1:
            return kept, beside.with_one(lost)
        assert kept is not None
        return kept, beside.with_many(lost)

    def begun(self, beside, entries, block):
        """The tier with its factors, where the block's rows have none so far."""
        if self.balance == "none" or block.queries is None:
            return beside
        assert block.query_positions is not None
        there = entries.filled
        rows = jnp.any(there, axis=(1, 2))
        keys, values = beside.keys, beside.values
        if keys is not None:
            if keys.centre is not None:
                centre = middle(entries.keys, there)
                keys = keys.choosing(1 / reach(entries.keys, there, centre), rows, centre)
            else:
                asked = 1.0
                if self.balance == "queries":
                    at = block.query_positions[:, None]
                    asked = largest(block.turned(block.queries, at), at >= 0)
                    asked = jnp.max(asked.reshape(*there.shape[:2], -1, asked.shape[-1]), axis=2)
                keys = keys.choosing(jnp.sqrt(asked / largest(entries.keys, there)), rows)
        if values is not None:
            values = values.choosing(1 / jnp.sqrt(largest(entries.values, there)), rows)
        return dataclasses.replace(beside, keys=keys, values=values)


@dataclasses.dataclass(frozen=True)
class Estimate(Evicted):
    """What leaves goes into a sketch, from which its part in the attention is estimated: per KV head, `clusters` groups
    of keys with `members` of each, drawn evenly, and a `sample` of entries drawn with odds ||v||^2.

    denominator = sum_i n_i / T sum_j exp(q . k_ij) over the T members of each cluster of n_i keys; numerator =
    sum_j mu / (S ||v_j||^2) exp(q . k_j) v_j over the sample of S, mu being the sum of all ||v||^2. Draws are with
    replacement, by a hash of position, head and `seed`, so that a text gives the same sample however it is cut.
    Source: SubGen (arXiv 2402.06082), algorithm 1. A key opens a cluster if it lies farther than `radius` from all
    centres, as there; ours: only while there is room, and at a cut the farthest first (the greedy k-center of its
    experiments); the numbers.
    """

    clusters: int = 64
    members: int = 4
    sample: int = 64
    radius: float = 0.0
    seed: int = 0
    kind: ClassVar[str] = "estimate"
    state: ClassVar[str] = "sketch"
    attended: ClassVar[bool] = True

    def __post_init__(self):
        if min(self.clusters, self.members, self.sample) < 1 or self.radius < 0:
            raise BadValue(
                f"clusters={self.clusters}, members={self.members}, sample={self.sample}, radius={self.radius}: "
                "expected at least 1 of each, and a distance of 0 or more"
            )

    def check(self, policy: Any) -> None:
        _check_single(self, policy)

    def begin(self, batch: int, heads: int, head_dim: int, dtype: Any) -> sketch.Sketch:
        return sketch.empty(batch, heads, self.clusters, self.members, self.sample, head_dim)

    def absorb(self, beside, kept, lost, facts):
        even = draws(lost.positions, self.seed, self.members)
        u = draws(lost.positions, self.seed + self.members, self.sample)
        by_size = jnp.log(jnp.maximum(u, 2.0**-25))  # over ||v||^2 the highest is a draw with those odds
        return kept, beside.added(lost.keys, lost.values, lost.positions, even, by_size, self.radius)


def _check_single(rule: Evicted, policy: Any) -> None:
    """Refuses entries that stand for several tokens, for a rule whose state takes each for one."""
    if policy.weighs:
        raise BadValue(
            f"evicted kind {rule.kind!r} of policy {policy.name!r}, whose entries may stand for several tokens: it "
            "would take each for one; expected a rule of the other phase that does not count (counts=false), or here "
            "evicted kind 'summarise', 'residual' or 'drop'"
        )


KINDS: dict[str, type[Evicted]] = {rule.kind: rule for rule in (Drop, Summarise, Residual, Estimate, Demote)}
