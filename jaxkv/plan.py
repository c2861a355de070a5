"""The shapes of a run: slots per layer and blocks of the prompt, in few sizes; and every row's budget."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxkv.errors import BadValue
from jaxkv.models import ModelConfig
from jaxkv.policies.policy import NOTHING, UNLIMITED, Learned, Policy
from jaxkv.sharding.layout import on_host
from jaxkv.store import KVCache
from jaxkv.store.entries import in_pieces

ROUND = 16  # sizes are multiples of this
SIZES = 4  # a prompt's first block has one of so many sizes per doubling of its length
SLOT_SIZES = 8  # and so have the slots for tokens that are only added: up to an eighth of them is spare
SHARE = 4  # a block's part of the context where a ratio says how much of a text stays, and places are the cache's
AT_ONCE = 8192  # a larger budget has slots as the text needs them
CEILING = 2**21  # limits are no larger, or the budgets of all layers and heads together would not fit 32 bits


def rounded(count: int, sizes: int) -> int:
    """The count, rounded up to a multiple of 16 and to one of `sizes` sizes per doubling: each size is a program."""
    step = max(ROUND, (1 << max(count - 1, 1).bit_length() - 1) // sizes)
    return -(-count // step) * step


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the programs of a prompt are compiled for: the `slots` per layer.

    `look` is False when every row's budget holds all of it, beside what falls out of a layer's own window: then nothing
    need be scored, and no pseudo token runs.
    `reach` is the most slots per KV head of a layer that shares the model's budget.
    """

    slots: tuple[int, ...]
    look: bool
    reach: int = 0


@dataclasses.dataclass(frozen=True)
class PromptBlocks:
    """How the padded prompt is cut: `first` tokens, and then `count` times `size`."""

    first: int
    count: int
    size: int

    @property
    def length(self) -> int:
        """Tokens of the padded prompt."""
        return self.first + self.count * self.size

    @classmethod
    def of(cls, longest: int, size: int, sizes: int) -> "PromptBlocks":
        """Those of a batch whose longest prompt has so many tokens; the first is padded to one of `sizes` sizes per
        doubling."""
        count = max(0, -(-longest // size) - 1)
        return cls(min(rounded(longest - count * size, sizes), size), count, size)

    def beginning(self, new: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B"]:
        """The number of the block in which each row of `new` tokens begins; in those before it there is padding."""
        return self.count + 1 - np.maximum(-(-new // self.size), 1)

    def __iter__(self) -> Iterator[slice]:
        """Where each block lies in the padded prompt."""
        ends = [self.first + number * self.size for number in range(self.count + 1)]
        return map(slice, [0, *ends], ends)


def shares(policy: Policy, config: ModelConfig, layer: int) -> bool:
    """Whether a layer has its part in what the allocator and the rules do: not under a sliding window, nor spared."""
    return config.specs[layer].window is None and policy.allocate.shares(layer, config.num_layers)


def plan(
    policy: Policy,
    config: ModelConfig,
    cache: KVCache | None,
    new: np.ndarray,
    room: int,
    *,
    parts: int = 1,
    learned: Learned = NOTHING,
    sizes: int = SIZES,
) -> tuple[Plan, PromptBlocks, np.ndarray]:
    """The shapes for `new [B]` prompt tokens per row and `room` tokens decoded after them, and limits int32 [L, B].

    The slots of every layer are whole pieces of memory (`in_pieces`) for each of the `parts` devices that share them;
    those beyond the budget stay empty. A layer has the slots of its budget, or above `AT_ONCE` those that prompt and
    room need; where nothing is evicted while decoding, those for new tokens are rounded up, and so is a prompt that
    fits. Blocks are counted from the end of the prompt, so a row is cut at the same places whatever stands beside it;
    the first is padded to one of `sizes` sizes per doubling.
    Raises `BadValue` for more places than the model's context has: in the text, or in the cache where they count.
    """
    seen = np.zeros_like(new) if cache is None else np.asarray(cache.lengths)
    held = np.zeros(config.num_layers, np.int64) if cache is None else slots_filled(cache)
    rows = None if cache is None else rows_filled(cache)
    return planned(policy, config, seen, held, new, room, rows=rows, parts=parts, learned=learned, sizes=sizes)


def block_of(policy: Policy, context: int, limit: int) -> int:
    """The tokens of a prompt that run at a time, in a model's context and beside at most `limit` entries; below 1 where
    there is no room for any."""
    if policy.bound_to_text:
        return policy.block
    room = context - limit  # positions in the cache run up to budget + block
    if policy.ratio is None:
        return min(policy.block, room)
    block = min(policy.block, max(context // SHARE, 1))  # by no row's length: rows do not depend on each other
    return block if block <= room else 0


def planned(
    policy: Policy,
    config: ModelConfig,
    seen: np.ndarray,
    held: np.ndarray,
    new: np.ndarray,
    room: int,
    *,
    rows: np.ndarray | None = None,
    parts: int = 1,
    learned: Learned = NOTHING,
    sizes: int = SIZES,
) -> tuple[Plan, PromptBlocks, np.ndarray]:
    """`plan` on a cache that has seen so many tokens `[B]` and fills so many slots per KV head of each layer `[L]`,
    and of each of its `rows [L, B]` (None: all alike)."""
    total = seen + new
    longest = int(total.max())
    limits = limits_of(policy, config, total, learned)
    rows = held[:, None] if rows is None else rows
    check_room(policy, config, seen, rows, new, room, limits)
    block = block_of(policy, config.max_position, int(limits.max()))
    if block < 1:
        given = limits.max() if policy.budget is None else policy.budget
        raise BadValue(
            f"budget {given} fills the model's context of {config.max_position}: lower budget= to leave room for the "
            "tokens that come"
        )

    slots = []
    for layer in range(config.num_layers):
        window = config.attention_spec(layer).window
        if window is not None:
            limits[layer] = np.minimum(limits[layer], window)
        limit = int(limits[layer].max())
        prompt, more = rounded(int(held[layer] + new.max()), SLOT_SIZES), rounded(room, SLOT_SIZES)
        slots.append(slots_of(policy, limit, window, prompt, more, parts))

    blocks = PromptBlocks.of(int(new.max()), block, sizes)
    first = int(new.max()) - blocks.count * block
    if policy.rope != "text" and policy.decode is None:  # what was decoded is there beside the first block
        check_room(policy, config, seen, rows, np.full_like(new, first), 0, None)
    reach, sharing = 0, [layer for layer in range(config.num_layers) if shares(policy, config, layer)]
    if sharing:
        most_slots = max(slots[layer] for layer in sharing)
        limit = min(int(limits[sharing].max()), most_slots)
        tokens = min(longest, len(sharing) * limit + block)
        reach = policy.allocate.reach(most_slots, limit, len(sharing), tokens)
    return Plan(tuple(slots), bool(scored(policy, config, total, limits).any()), in_pieces(reach)), blocks, limits


def slots_of(policy: Policy, limit: int, window: int | None, prompt: int, more: int = 0, parts: int = 1) -> int:
    """Slots per KV head of a layer of this limit, with its sliding window, for so many tokens of a prompt (what a cache
    holds already among them) and `more` behind it."""
    limit = limit if window is None else min(limit, window)
    if policy.decode is not None:
        count = whole(policy, limit)
        count = min(count, prompt + more) if _as_needed(policy, limit) else count
    else:
        count = min(limit, prompt) + more
        count = count if window is None else min(count, window)
    return in_pieces(count, parts)


def limits_of(policy: Policy, config: ModelConfig, total: np.ndarray, learned: Learned = NOTHING) -> np.ndarray:
    """The budget of every layer and row for texts of `total [B]` tokens, int32 [L, B]."""
    most = UNLIMITED if not policy.evicts else max(CEILING, 2 * config.max_position)
    each = [policy.budgets(int(tokens), config.num_layers, learned) for tokens in total]
    return np.array([[min(limit, most) for limit in row] for row in each], np.int32).T


def places_taken(
    policy: Policy, config: ModelConfig, seen: np.ndarray, held: np.ndarray, new: np.ndarray, limits: np.ndarray | None
) -> np.ndarray:
    """The places of the model's context that rows have taken after `new [B]` prompt tokens, on a cache that has `seen
    [B]` tokens and holds so many `[L, B]`: those in the text, or where places are the cache's, what is held under the
    limits (None: before any cut). 0 where decoding takes no more of them, for it evicts.
    """
    if policy.rope == "text":
        return seen + new
    full = [layer for layer, spec in enumerate(config.specs) if spec.window is None]
    if policy.decode is not None or not full:  # what falls out of a window leaves its place
        return np.zeros_like(seen)
    after = held[full] + new
    return (after if limits is None else np.minimum(limits[full], after)).max(axis=0)


def check_room(
    policy: Policy,
    config: ModelConfig,
    seen: np.ndarray,
    held: np.ndarray,
    new: np.ndarray,
    room: int,
    limits: np.ndarray | None,
) -> None:
    """Raises `BadValue` where `room` tokens more go beyond the model's context, by `places_taken`."""
    taken = int(places_taken(policy, config, seen, held, new, limits).max())
    if taken == 0 or taken + room <= config.max_position:
        return
    if policy.rope == "text":
        raise BadValue(
            f"{taken} tokens of text and {room} run behind them exceed the model's context of {config.max_position}: "
            "shorten them, or use a policy with positions in the cache, such as policy('streaming-llm', budget=...)"
        )
    raise BadValue(
        f"{taken} tokens in the cache and {room} run behind them exceed the model's context of {config.max_position}, "
        f"for policy {policy.name!r} evicts nothing while decoding: shorten them, or use one that does, such as "
        "policy('streaming-llm', budget=...)"
    )


def whole(policy: Policy, limit: int) -> int:
    """Slots per KV head that a layer fills under a decode phase: its budget, and what decode runs over it."""
    assert policy.decode is not None
    return limit + (policy.decode.every if policy.decode.every > 1 else 0)


def _as_needed(policy: Policy, limit: int) -> bool:
    """Whether a layer has the slots that its text needs, and not those of its budget. Positions in the cache need all
    of them: there the slots are a ring."""
    return limit > AT_ONCE and policy.rope != "cache"


def lacking(policy: Policy, cache: KVCache, room: int) -> tuple[int, ...]:
    """Slots per KV head that decoding of `room` tokens needs besides those that each layer's entries fill; 0 for a
    layer that has all that its budget may fill."""
    if policy.decode is None:
        return (room,) * len(cache.layers)

    limits = on_host(cache.limits).max(axis=1).tolist()
    if not any(_as_needed(policy, limit) for limit in limits):
        return (0,) * len(limits)

    def of(layer: Any, held: np.ndarray, limit: int) -> int:
        most = whole(policy, limit)
        short = _as_needed(policy, limit) and layer.slots < most
        return min(room, max(most - layer.needed(held), 0)) if short else 0

    return tuple(map(of, cache.layers, on_host(cache.held()), limits))


def rows_filled(cache: KVCache) -> np.ndarray:
    """The most entries that a KV head holds in each layer and row, int [L, B]."""
    return np.array([of.max(axis=-1) for of in on_host(cache.held())], int)


def slots_filled(cache: KVCache) -> np.ndarray:
    """Slots per KV head that hold what each layer holds; where heads share, on average over them."""
    held = on_host(cache.held())
    return np.array([layer.needed(of) for layer, of in zip(cache.layers, held, strict=True)], int)


def scored(policy: Policy, config: ModelConfig, total: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Which rows' prompts of `total [B]` tokens are scored, bool [B]: those that are cut, and where a phase remembers
    what the prompt's queries saw, for what comes behind the prompt, all of them. A layer whose limit `[L, B]` is its
    sliding window cuts nothing: what leaves it is seen by nobody any more.

    Tokens that are drafted to look are those that decoding gives. Where these, too, fit into a row's budget, they will
    look themselves before anything goes, so none are drafted for it.
    """
    if policy.prefill is None:
        return np.zeros(total.shape, bool)
    observe, ahead = policy.prefill.observe, 0
    if any(leaf.remembers for phase in policy.phases for leaf in phase.score.leaves()):
        if not observe.drafts:
            return np.ones(total.shape, bool)
        ahead = observe.extra
    free = 0 if policy.decode is None else 1  # a slot for the next token
    windows = np.array([[UNLIMITED if spec.window is None else spec.window] for spec in config.specs])
    beyond = total + ahead + free > limits - policy.prefill.reserved(limits)
    return (beyond & (limits < windows)).any(axis=0)
