"""The pseudo tokens: they look at a prompt from behind it, and come from the prompt itself or from a first pass."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxkv.plan import PromptBlocks, limits_of, places_taken, rows_filled
from jaxkv.policies.allocator import UNLIMITED
from jaxkv.policies.catalogue import catalogue
from jaxkv.policies.evicted import Drop
from jaxkv.policies.observe import LastQueries, Observer
from jaxkv.policies.policy import Policy
from jaxkv.sharding.layout import on_host
from jaxkv.store import EMPTY, KVCache
from jaxkv.store.cache import rows_at
from jaxkv.weights.params import Params

Draft = Callable[[list[np.ndarray], Policy, KVCache | None, int], np.ndarray]  # so many new tokens of each row


def behind(params: Params, rows: list[np.ndarray], observe: Observer, blocks: PromptBlocks) -> np.ndarray:
    """The tokens that look from behind each row's prompt, where they come from the prompt itself: `[B, N]` for all
    blocks, or `[B, K, N]` where each of the K has its own; -1 behind the shorter ones."""
    tokenizer = params.tokenizer
    encode = None if tokenizer is None else lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    first = [observe.behind(row, params.config.vocab_size, encode) for row in rows]
    if not observe.lead and not observe.ends:
        return np.stack(first)

    def at(row: np.ndarray, one: np.ndarray, block: slice) -> np.ndarray:
        if observe.ends and block.stop == blocks.length:
            return one[:0]
        begin = block.start - (blocks.length - len(row))
        lead = observe.lead and begin > 0
        return observe.between(row[max(begin - observe.lead, 0) : begin], encode) if lead else one

    each = [[at(row, one, block) for block in blocks] for row, one in zip(rows, first, strict=True)]
    longest = (observe.between(np.zeros(observe.lead, np.int32), encode),) if observe.lead else ()
    most = max(map(len, (*longest, *first)))
    out = np.full((len(rows), len(each[0]), most), EMPTY, np.int32)
    for row, of_row in enumerate(each):
        for block, tokens in enumerate(of_row):
            out[row, block, : len(tokens)] = tokens
    return out


def drafted(params: Params, rows: list[np.ndarray], policy: Policy, cache: KVCache | None, draft: Draft) -> np.ndarray:
    """What a first pass says behind each row, int32 [B, N]: fewer tokens (then EMPTY) where the context of a row ends
    before. The rows begin with what the cache has still to run."""
    assert policy.prefill is not None
    observe, config, first = policy.prefill.observe, params.config, first_pass(policy, goes_on=cache is not None)
    new = np.array([*map(len, rows)])
    seen, held = np.zeros_like(new), np.zeros((config.num_layers, 1), int)
    if cache is not None:
        seen, held = on_host(cache.lengths), rows_filled(cache)
        cache = dataclasses.replace(cache, pending=jnp.full_like(cache.pending, EMPTY))
    limits = limits_of(first, config, seen + new, params.learned_for(first.learns, first.name))
    left = config.max_position - places_taken(first, config, seen, held, new, limits)
    counts = np.clip(left, 0, observe.extra)
    out = np.full((len(rows), observe.extra), EMPTY, np.int32)
    for count in sorted({*counts.tolist()} - {0}):
        of = counts == count
        at = np.where(of, np.arange(len(rows)), np.argmax(of))  # in place of other rows stands one of these
        begin = cache if cache is None or of.all() else rows_at(cache, at)
        out[of, :count] = draft([rows[row] for row in at], first, begin, count)[of]
    return out


def first_pass(policy: Policy, goes_on: bool = False) -> Policy:
    """The policy under which a lookahead policy drafts: SnapKV with `draft_pool`, at `draft_times` the budget, in the
    same codecs, and with the same rule for what leaves, unless that asks for the attention so far, which SnapKV does
    not add up: then it drops. Its window is smaller than its budget.

    Where the prompt goes on from a cache, which is bounded already, all that is new is kept.
    """
    assert policy.prefill is not None
    if goes_on:
        return dataclasses.replace(catalogue()["full"], rope=policy.rope, block=policy.block, store=policy.store)
    observe, evicted = policy.prefill.observe, policy.prefill.evicted
    budget = None if policy.budget is None else min(int(policy.budget * observe.draft_times), UNLIMITED)
    ratio = None if policy.ratio is None else max(policy.ratio - (observe.draft_times - 1) * (1 - policy.ratio), 0.0)
    window = observe.draft_window if budget is None else max(min(observe.draft_window, budget - 1), 1)
    snapkv = catalogue()["snapkv"]
    assert snapkv.prefill is not None
    evicted = Drop() if evicted.attentive else evicted
    pooled = dataclasses.replace(snapkv.prefill.aggregate, pool=observe.draft_pool, kernel=observe.draft_kernel)
    phase = dataclasses.replace(snapkv.prefill, observe=LastQueries(window), aggregate=pooled, evicted=evicted)
    return dataclasses.replace(
        snapkv, prefill=phase, budget=budget, ratio=ratio, rope=policy.rope, block=policy.block, store=policy.store,
        fidelity="",
    )  # fmt: skip
