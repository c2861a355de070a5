"""Bytes of a cache before there is one, and the budget that fits into so many."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv.errors import BadValue
from jaxkv.models import AttentionSpec, ModelConfig
from jaxkv.plan import shares, slots_of, whole
from jaxkv.policies.policy import NOTHING, Learned, Policy
from jaxkv.run import empty_layer
from jaxkv.store.entries import PIECE, in_pieces
from jaxkv.store.together import begun
from jaxkv.weights.params import Params

BORDER = 4  # bytes of where a segment of a pool ends, int32
LENGTHS = 33  # of texts that are tried for the one that takes most
LEAST = 4096  # a part whose smallest budget is larger than that, and twice what is protected, is wrong


@dataclasses.dataclass(frozen=True)
class Size:
    """Bytes of one row's cache: of `keys_values` and what the policy's rules hold beside them, and `all` of it, with
    positions and statistics."""

    keys_values: int
    all: int


def size_of(policy: Policy, config: ModelConfig, dtype: Any, slots: Sequence[int]) -> Size:
    """Bytes of one row's cache with so many slots per KV head in each layer, read off the arrays that it would have."""
    if policy.store.pairs:  # whose sizes depend on each other
        each = _layers(policy, config.specs, str(dtype), tuple(slots))
    else:
        each = [
            _layers(policy, (spec,), str(dtype), (count,), shares(policy, config, layer))[0]
            for layer, (spec, count) in enumerate(zip(config.specs, slots, strict=True))
        ]
    # layers in one line have the border at its end together, where each pool has one of its own
    borders = sum(shares(policy, config, layer) for layer in range(config.num_layers)) if policy.allocate.divides else 1
    return Size(sum(size.keys_values for size in each), sum(size.all for size in each) - BORDER * max(borders - 1, 0))


@functools.lru_cache(maxsize=4096)
def _layers(
    policy: Policy, specs: tuple[AttentionSpec, ...], dtype: str, slots: tuple[int, ...], sharing: bool = True
) -> tuple[Size, ...]:
    found: list[Size] = []

    def one(spec: AttentionSpec, count: int) -> Any:
        store = empty_layer(spec, policy, 1, jax.numpy.dtype(dtype), sharing).sized(count)
        if policy.store.fits:
            store = store.with_fit(policy.store.unfit(1, spec.num_kv_heads, spec.head_dim), bool(policy.looks))
        return policy.read.indexed(store)

    def made() -> None:
        stores = begun(list(map(one, specs, slots)), [spec.window for spec in specs])
        found.extend(Size(each.kv_bytes, sum(leaf.nbytes for leaf in jax.tree.leaves(each))) for each in stores)

    jax.eval_shape(made)
    return tuple(found)


def slots_at(policy: Policy, config: ModelConfig, budget: int, tokens: int, learned: Learned = NOTHING) -> list[int]:
    """Slots per KV head of each layer under a budget, for a text of so many tokens; where tokens are only added while
    decoding, those of the prompt."""
    limits = dataclasses.replace(policy, budget=budget, ratio=None, bytes=None).budgets(
        tokens, config.num_layers, learned
    )
    return [slots_of(policy, limit, spec.window, tokens) for limit, spec in zip(limits, config.specs, strict=True)]


def _used_at(policy: Policy, config: ModelConfig, learned: Learned, tokens: int) -> list[int]:
    """The slots that layers ever fill with a text of so many tokens, under the policy's budget."""
    return _used(policy, config, policy.budgets(tokens, config.num_layers, learned))


def _most_used(policy: Policy, config: ModelConfig, budget: int, learned: Learned) -> list[int]:
    """The slots that layers fill with the text that takes most of them, be it shorter than the model's context.

    A layer with a sliding window takes no more than that. What layers that differ leave to it is lost, and a text that
    is too short for a layer's share gives the rest to others: so a text of some length between may take more than a
    longer one. Between two lengths a layer has at most what it has at one of them.
    """
    last = config.max_position
    ends = np.geomspace(min(budget, last), min(budget * config.num_layers, last), LENGTHS).astype(int).tolist()
    used = [_used_at(policy, config, learned, tokens) for tokens in dict.fromkeys([*ends, last])]
    between = [list(map(max, one, other)) for one, other in itertools.pairwise([used[0], *used])]
    return max(between, key=sum)


def _used(policy: Policy, config: ModelConfig, limits: Sequence[int]) -> list[int]:
    """The slots that layers of such budgets ever fill."""
    limits = [min(limit, config.max_position) for limit in limits]  # a layer that is spared holds the text
    limits = [min(limit, spec.window or limit) for limit, spec in zip(limits, config.specs, strict=True)]
    return [limit if policy.decode is None else whole(policy, limit) for limit in limits]


def least(policy: Policy) -> int:
    """The smallest budget under which all parts of a policy can work."""
    budget = policy.floor
    while True:
        try:
            dataclasses.replace(policy, budget=budget, ratio=None)
        except BadValue:
            if budget >= 2 * policy.floor + LEAST:
                raise
            budget += 1
        else:
            return budget


def fitted(policy: Policy, config: ModelConfig, dtype: Any, learned: Learned = NOTHING, parts: int = 1) -> Policy:
    """The policy with the largest budget, up to the model's context, at which a row's keys and values, and what lies
    beside them, take at most its `bytes`; as it is, where it has none. So many devices share a head's slots.

    Raises `BadValue` where the smallest budget takes more.
    """
    if policy.bytes is None:
        return policy
    free = dataclasses.replace(policy, bytes=None)

    @functools.cache
    def taken(budget: int) -> int:
        # layers that differ may do so in another way for another length of text, and be rounded up by more; a short
        # text may give all the same, which windows cut elsewhere
        more, sized = PIECE * parts - 1, dataclasses.replace(free, budget=budget)
        kinds = [_used_at(sized, config, learned, config.max_position)]
        if not free.allocate.equal:
            kinds.append(_used(free, config, (budget,) * config.num_layers))
            if any(spec.window for spec in config.specs):
                kinds.append(_most_used(sized, config, budget, learned))
        each = [
            [in_pieces(count, parts) if len(set(slots)) == 1 else count + more for count in slots] for slots in kinds
        ]
        return max(size_of(sized, config, dtype, slots).keys_values for slots in each)

    low = least(free)
    high = max(config.max_position, low)
    if taken(low) > policy.bytes:
        remedy = "raise bytes="
        if not policy.allocate.bounded:
            remedy = (
                f"some layers hold the whole text beside it, counted with the model's context of {config.max_position} "
                "tokens: spare fewer layers with spare= (and spare_last=; 0 for none), raise bytes="
            )
        raise BadValue(
            f"bytes={policy.bytes} of policy {policy.name!r}: its smallest budget, {low} tokens per KV head, takes "
            f"{taken(low)} bytes of keys and values per row with this model; {remedy}, or give keys and values fewer "
            "bits with store="
        )
    if taken(high) <= policy.bytes:
        low = high
    while high - low > 1:  # fits at low, not at high; bytes grow by nearly as much with every token
        guess = low + (policy.bytes - taken(low)) * (high - low) // (taken(high) - taken(low))
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if taken(guess) <= policy.bytes else (low, guess)
    return dataclasses.replace(free, budget=low)


def on_model(params: Params, policy: Policy) -> Policy:
    """The policy with the budget that its bytes allow on this model; as it is, where it has none. Raises `BadValue`
    where they are too few."""
    if policy.bytes is None:
        return policy
    learned = params.learned_for(policy.learns, policy.name)
    return fitted(policy, params.config, params.dtype, learned, params.layout.parts)
