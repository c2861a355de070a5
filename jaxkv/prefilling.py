"""The host's side of prefill: rows of tokens, planned and run in blocks; the bounded cache that they leave."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import run
from jaxkv.ahead import Ahead, foreseeable
from jaxkv.errors import BadValue
from jaxkv.plan import Plan, PromptBlocks, plan, scored
from jaxkv.policies.policy import Policy, check_scores
from jaxkv.programs import make_room
from jaxkv.prompts import left_padded, right_padded
from jaxkv.pseudo import Draft, behind, drafted
from jaxkv.request import Execution
from jaxkv.speculative.attend import check_expected
from jaxkv.store import EMPTY, KVCache
from jaxkv.store.cache import branched, joined, rows_at
from jaxkv.store.line import narrowed
from jaxkv.weights.params import Params

Rows = list[np.ndarray]
Planned = tuple[Plan, PromptBlocks, np.ndarray]  # as `plan` gives it


class Prefilled(NamedTuple):
    """The cache that prompts leave, the logits `[B, V]` of their last tokens, and where they were asked for the
    likeliest tokens after each token of the padded rows (EMPTY after padding)."""

    cache: KVCache
    logits: jax.Array
    expected: run.Expected | None


@dataclasses.dataclass(frozen=True)
class Prefilling:
    """What all prompts of a call share: model, policy, how a first pass drafts, and slots for `room` new tokens.

    `top` likeliest tokens are given after each token, as far as `limit` reaches. New programs are compiled side by side
    `ahead`; `then(cache, logits)` adds to them, given the forms of what the prompts leave.
    """

    params: Params
    policy: Policy
    execution: Execution
    draft: Draft
    room: int = 0
    top: int = 0
    limit: int = 0
    ahead: Ahead | None = None
    then: Callable[[KVCache, Any], None] | None = None

    def run(self, rows: Rows, cache: KVCache | None, pseudo: np.ndarray | None = None) -> Prefilled:
        """Run the prompts, on top of the cache if there is one; `pseudo [B, N]` look in place of the policy's own."""
        make_room()
        check_expected(self.policy, self.top)
        if cache is not None:
            cache = self.params.layout.cache(branched(cache, len(rows)))
            rows = _with_pending(rows, cache)
        planned = self._plan(rows, cache)
        groups = _groups(rows, planned[1]) if cache is not None and planned[0].look else []
        if cache is not None and len(groups) > 1:
            left = self._apart(groups, rows, cache, pseudo, *planned[:2])
        else:
            left = self._together(rows, cache, pseudo, planned)
        return left._replace(cache=dataclasses.replace(left.cache, layers=narrowed(left.cache.layers)))

    def _plan(self, rows: Rows, cache: KVCache | None) -> Planned:
        params, new = self.params, np.array([*map(len, rows)])
        learned = params.learned_for(self.policy.learns, self.policy.name)
        return plan(
            self.policy, params.config, cache, new, self.room, parts=params.layout.parts, learned=learned,
            sizes=self.execution.sizes,
        )  # fmt: skip

    def _apart(
        self,
        groups: list[np.ndarray],
        rows: Rows,
        cache: KVCache,
        pseudo: np.ndarray | None,
        shapes: Plan,
        blocks: PromptBlocks,
    ) -> Prefilled:
        """The rows of each group together, group by group, with slots as all need them; joined as they stood."""
        held = [self.params.layout.cache(rows_at(cache, at)) for at in groups]
        given = [
            ([rows[row] for row in at], of, None if pseudo is None else pseudo[at])
            for at, of in zip(groups, held, strict=True)
        ]
        plans = [(shapes, *self._plan(*each[:2])[1:]) for each in given]
        runs, parts = [1 + blocks.count for _, blocks, _ in plans], []
        for number, (each, planned) in enumerate(zip(given, plans, strict=True)):
            execution = _progressing(self.execution, sum(runs[:number]), sum(runs))
            part = dataclasses.replace(self, execution=execution, ahead=None, then=None)
            parts.append(part._together(*each, planned))
        return _in_one(parts, np.argsort(np.concatenate(groups)), blocks.length)

    def _together(self, rows: Rows, cache: KVCache | None, pseudo: np.ndarray | None, planned: Planned) -> Prefilled:
        """Run the prompts in blocks that all of them share."""
        params, policy, execution, layout = self.params, self.policy, self.execution, self.params.layout
        batch, (shapes, blocks, limits) = len(rows), planned
        lengths = np.zeros(batch, np.int32) if cache is None else np.asarray(cache.lengths)
        tokens, positions = left_padded(rows, blocks.length, lengths)
        pseudo = self._looking(rows, cache, pseudo, planned)
        if cache is None:
            layers = layout.layers(run.empty_layers(params.config, policy, batch, params.dtype))
        else:
            layers = tuple(layer.keeping(policy.stats) for layer in cache.layers)

        def left(layers: Any) -> KVCache:
            return KVCache(
                layers=layers,
                lengths=layout.put(lengths + np.array([*map(len, rows)], np.int32)),
                limits=layout.put(limits),
                pending=layout.put(np.full(batch, EMPTY, np.int32)),
                policy=policy,
                model=params.fingerprint,
            )

        def then(layers: Any, logits: Any) -> None:
            if self.then is not None:
                self.then(left(layers), logits)

        ahead = None
        if layout.mesh is None and foreseeable((params.weights, layers)):
            ahead = self.ahead or Ahead()
        try:
            layers, logits, expected = run.prefill(
                params.weights, layers, tokens, positions, pseudo, lengths, limits, blocks=blocks, config=params.config,
                policy=policy, plan=shapes, layout=layout, implementation=execution.implementation,
                progress=execution.progress, top=self.top, limit=self.limit, scan_layers=execution.scan_layers,
                learned=params.learned_for(policy.learns, policy.name), ahead=ahead, behind=then,
            )  # fmt: skip
        except BaseException:
            if ahead is not None:
                ahead.drop()
            raise
        check_pass(params, policy, logits)
        if expected is not None:
            expected = jnp.where(positions[..., None] < 0, EMPTY, expected[0]), expected[1]
        texts = [np.zeros(0, np.int32)] * batch if cache is None else cache.texts()
        whole = None if texts is None else right_padded([np.append(*each) for each in zip(texts, rows, strict=True)])
        draws = None if cache is None else cache.draws
        return Prefilled(dataclasses.replace(left(layers), tokens=whole, draws=draws), logits, expected)

    def _looking(
        self,
        rows: Rows,
        cache: KVCache | None,
        pseudo: np.ndarray | None,
        planned: Planned,
    ) -> np.ndarray:
        """The tokens that look from behind the prompts, `[B, N]`, or `[B, K, N]` for each of K blocks (N = 0: none)."""
        params, policy, (shapes, blocks, limits) = self.params, self.policy, planned
        if policy.prefill is None or not shapes.look:
            return np.zeros((len(rows), 0), np.int32)
        if pseudo is not None:
            return pseudo
        if not policy.prefill.observe.drafts:
            return behind(params, rows, policy.prefill.observe, blocks)
        seen = np.array([*map(len, rows)]) + (0 if cache is None else np.asarray(cache.lengths))
        wanted = scored(policy, params.config, seen, limits)
        return np.where(wanted[:, None], drafted(params, rows, policy, cache, self.draft), EMPTY)


def check_pass(params: Params, policy: Policy, logits: jax.Array) -> None:
    """Raises `BadValue` where a score of one's own gave NaN, or float16 weights logits that are NaN or infinite."""
    check_scores(policy)
    if params.dtype == jnp.float16 and not bool(jnp.isfinite(logits).all()):
        raise BadValue(
            "the model's logits are not finite: its numbers go beyond 65504, where float16 ends; load it with "
            "dtype='bfloat16' or 'float32'"
        )


def _with_pending(rows: Rows, cache: KVCache) -> Rows:
    """The rows, each behind the token that its cache has still to run."""
    pending = np.asarray(cache.pending)
    return [
        np.append(token, row).astype(np.int32) if token >= 0 else row
        for token, row in zip(pending, rows, strict=True)
    ]  # fmt: skip


def _groups(rows: Rows, blocks: PromptBlocks) -> list[np.ndarray]:
    """The rows that begin in the same block of the padded prompt: what a row holds is not cut before its own begins."""
    begin = blocks.beginning(np.array([*map(len, rows)]))
    return [np.flatnonzero(begin == number) for number in np.unique(begin)]


def _progressing(execution: Execution, before: int, total: int) -> Execution:
    """The same, that tells of a part of the prompt's blocks, behind those `before`, as a part of the `total`."""
    progress = execution.progress
    if progress is None:
        return execution
    return dataclasses.replace(execution, progress=lambda what, done, _: progress(what, before + done, total))


def _in_one(parts: Sequence[Prefilled], order: np.ndarray, length: int) -> Prefilled:
    """What the parts of a batch left, in the batch's `order`, as of prompts padded to its `length`."""
    caches, logits, expected = zip(*parts, strict=True)

    def padded(of: jax.Array, empty: Any) -> jax.Array:
        return jnp.pad(of, ((0, 0), (length - of.shape[1], 0), (0, 0)), constant_values=empty)

    likely = None
    if expected[0] is not None:
        tokens, chances = (
            jnp.concatenate([padded(of[which], empty) for of in expected])[order]
            for which, empty in ((0, EMPTY), (1, 0.0))
        )
        likely = tokens, chances
    return Prefilled(joined(caches, order), jnp.concatenate(logits)[order], likely)
