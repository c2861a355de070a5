"""prompt -> tokens: the main line.

tokens -> prefill in blocks -> bounded cache -> loop of decode steps -> tokens
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import run
from jaxkv.ahead import Ahead, foreseeable
from jaxkv.checks import check_arguments
from jaxkv.decoding import CHUNK, Decoding, plainly
from jaxkv.errors import BadValue
from jaxkv.generation import Generation
from jaxkv.plan import (
    SIZES,
    Plan,
    PromptBlocks,
    check_room,
    lacking,
    limits_of,
    places_taken,
    plan,
    rows_filled,
    scored,
)
from jaxkv.policies.allocator import UNLIMITED
from jaxkv.policies.catalogue import catalogue
from jaxkv.policies.evicted import Drop
from jaxkv.policies.observe import LastQueries, Observer
from jaxkv.policies.policy import Policy, check_scores
from jaxkv.programs import asked_before, make_room
from jaxkv.prompts import Prompt, fronts, left_padded, right_padded, rows_of
from jaxkv.request import Execution, Progress, Request, check_model, checked_policy, checked_pseudo, checked_request
from jaxkv.sampling import Sampler, draws_of, row_keys
from jaxkv.sharding.layout import Layout, on_host
from jaxkv.speculative.attend import check_expected
from jaxkv.speculative.method import Start
from jaxkv.speculative.session import Session, Speculative
from jaxkv.store import EMPTY, KVCache
from jaxkv.store.cache import branched, grown, joined, repeated, rows_at
from jaxkv.store.line import line_of, narrowed
from jaxkv.weights.params import Params

STREAM_CHUNK = 4


def generate(
    params: Params,
    prompt: Prompt = None,
    *,
    policy: Policy | None = None,
    max_new_tokens: int = 128,
    cache: KVCache | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    samples: int = 1,
    seed: int = 0,
    stop_tokens: Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    speculative: Speculative | None = None,
    implementation: str | None = None,
    scan_layers: bool = False,
    sizes: int = SIZES,
    progress: Progress | None = None,
) -> Generation:
    """Continue the prompt under the policy (none: full cache), or go on from `cache` with or without a new prompt.

    `prompt`: text, texts, chat messages, token ids `[T]`, `[B, T]` or ragged rows. A cache of one row branches to
    every prompt; it goes on under its own policy (or "full"). `stop_tokens=None` stops at the model's own,
    `()` at nothing; `stop` strings end the text before them. `samples` continues each prompt that many times.
    `speculative`, such as `jaxkv.speculative.AASD()`, drafts several tokens and verifies them in one pass.
    `repetition_penalty` counts the text that the cache has seen too, and drafts come from it as well.
    `scan_layers` runs layers that are alike as one loop at prefill: it compiles sooner, and then runs a little slower.
    `sizes`: prompts are padded to so many sizes per doubling of the length, each compiled once: more of them pad less.
    Raises `BadValue`, `BadCheckpoint` and their kin before anything is compiled.
    """
    request = checked_request(
        params, prompt, cache, policy=policy, max_new_tokens=max_new_tokens, samples=samples, seed=seed,
        sampler=Sampler(temperature, top_k, top_p, min_p, repetition_penalty), stop_tokens=stop_tokens, stop=stop,
        speculative=speculative,
    )  # fmt: skip
    decoding = _begin(params, prompt, cache, request, Execution(implementation, scan_layers, sizes, progress))
    for _ in decoding.run(CHUNK):
        pass
    return decoding.finish()


class Stream:
    """Iterates over pieces of text as they come; afterwards `generation` holds the whole result."""

    def __init__(self, decoding: Decoding):
        self._decoding = decoding
        self._generation: Generation | None = None

    def __iter__(self) -> Iterator[str]:
        shown = ""
        for last in self._decoding.run(STREAM_CHUNK):
            text = self._decoding.text(0, complete=last)
            if len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
        self._generation = self._decoding.finish()

    @property
    def generation(self) -> Generation:
        """The result. Raises `BadValue` while text is still to come."""
        if self._generation is None:
            raise BadValue("the stream has not ended: iterate over it first")
        return self._generation


def stream(
    params: Params,
    prompt: Prompt = None,
    *,
    policy: Policy | None = None,
    max_new_tokens: int = 128,
    cache: KVCache | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop_tokens: Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    speculative: Speculative | None = None,
    implementation: str | None = None,
    scan_layers: bool = False,
    sizes: int = SIZES,
    progress: Progress | None = None,
) -> Stream:
    """`generate` for one prompt, giving its text as it comes: `for piece in jaxkv.stream(...)`."""
    request = checked_request(
        params, prompt, cache, policy=policy, max_new_tokens=max_new_tokens, samples=1, seed=seed,
        sampler=Sampler(temperature, top_k, top_p, min_p, repetition_penalty), stop_tokens=stop_tokens, stop=stop,
        speculative=speculative,
    )  # fmt: skip
    if prompt is not None:
        rows = len(rows_of(prompt, params.tokenizer, params.config.vocab_size, *_so_far(cache))[0])
    else:
        assert cache is not None  # checked with the request
        rows = cache.batch
    if rows != 1:
        raise BadValue(f"{rows} prompts to stream: expected one; use generate for a batch")
    return Stream(_begin(params, prompt, cache, request, Execution(implementation, scan_layers, sizes, progress)))


def prefill(
    params: Params,
    prompt: Prompt,
    *,
    policy: Policy | None = None,
    cache: KVCache | None = None,
    room: int = 0,
    pseudo: np.ndarray | Sequence[Sequence[int]] | None = None,
    implementation: str | None = None,
    scan_layers: bool = False,
    sizes: int = SIZES,
    progress: Progress | None = None,
) -> KVCache:
    """The cache that the prompt leaves under the policy, to `generate(..., cache=cache)` from, any number of times.

    `room` asks for slots for so many tokens to come, where the policy only adds them (otherwise added when needed).
    `pseudo [B, N]` are tokens that look instead of those that a policy with pseudo queries makes up, any number of them
    (-1 behind the shorter rows). Raises `BadValue` for others.
    """
    check_model(params, cache)
    check_arguments(room=room)
    rows, _ = rows_of(prompt, params.tokenizer, params.config.vocab_size, *_so_far(cache))
    chosen = checked_policy(params, policy, cache)
    if pseudo is not None:
        pseudo = checked_pseudo(pseudo, len(rows), chosen, params.config.vocab_size)
    execution = Execution(implementation, scan_layers, sizes, progress)
    return _prefill(params, rows, chosen, cache, execution, room=room, pseudo=pseudo)[0]


def _told_apart(rows: list[np.ndarray], apart: bool) -> list[np.ndarray]:
    """What stands for each row's text where it is not known: the tokens, and the row's place where these go on from
    different texts."""
    return [np.append(place, row) for place, row in enumerate(rows)] if apart else rows


def _so_far(cache: KVCache | None) -> tuple[np.ndarray | None, list[np.ndarray] | None]:
    """The tokens that a cache's rows have still to run, and their texts; None without a cache."""
    return (None, None) if cache is None else (np.asarray(cache.pending), cache.texts())


def _begin(params: Params, prompt: Prompt, cache: KVCache | None, request: Request, execution: Execution) -> Decoding:
    """Prefill, and sample the first token; where the cache goes on alone, its pending token is run next."""
    config, layout, policy, samples = params.config, params.layout, request.policy, request.samples
    apart = cache is not None and cache.batch > 1  # rows go on from texts of their own
    session, ahead = None, Ahead()
    if request.speculative is not None:
        session = Session(request.speculative, params, policy, cache)
    started = time.perf_counter()
    later = request.max_new_tokens - (
        prompt is not None
    )  # tokens to run: one that waits, and all new ones but the last
    if prompt is None:
        make_room()
        assert cache is not None  # checked with the request
        single, logits, expected, prompt_tokens = cache.batch == 1, None, None, 0
        rows, texts = list(np.asarray(cache.pending)[:, None]), cache.texts()
        before = None if texts is None else [np.append(*each) for each in zip(texts, rows, strict=True)]
        if session is not None:
            session.check_room(np.asarray(cache.lengths), later)
        cache = with_room(policy, config, cache, later)
    else:
        rows, single = rows_of(prompt, params.tokenizer, config.vocab_size, *_so_far(cache))
        prompt_tokens = sum(map(len, rows))
        top, limit = 0, 0
        if session is not None:
            top, limit, new = session.top, session.limit, np.array([len(row) for row in rows])
            seen = 0 if cache is None else np.asarray(cache.lengths) + (np.asarray(cache.pending) >= 0)
            session.check_room(seen + new, later)
        plain = request if session is None and later > 0 else None
        cache, logits, expected = _prefill(
            params, rows, policy, cache, execution, room=later, top=top, limit=limit, ahead=ahead, then=plain
        )
        logits = jnp.repeat(logits, samples, axis=0)
        texts = before = cache.texts()
    draws = draws_of([each.tobytes() for each in before or _told_apart(rows, apart)], samples, cache.draws)
    seen = None
    if request.sampler.repetition_penalty is not None:
        assert before is not None  # checked with the request
        seen = np.zeros((len(before), config.vocab_size), bool)
        for row, text in zip(seen, before, strict=True):
            row[text] = True
        seen = layout.put(np.repeat(seen, samples, axis=0))
    cache = layout.cache(repeated(cache, samples))
    state = _state(cache, request, layout, seen, draws)
    decoding = Decoding(
        params, request, execution, session, state,
        prompt_tokens=prompt_tokens,
        single=single and samples == 1,
        before=before,
        fronts=fronts(prompt, before or rows),
        draws=draws,
        learned=params.learned_for(policy.learns, policy.name),
        ahead=ahead,
        tokens=[[] for _ in range(cache.batch)],
    )  # fmt: skip
    if logits is not None:
        ahead.wait(run.first_token)
        decoding.state, first = run.first_token(request.sampler, request.stop_tokens, state, logits, layout=layout)
        decoding.take(np.asarray(first)[:, None])
    if session is not None:
        known = texts or (rows if logits is not None else [row[:0] for row in rows])

        def prefilled(params: Params, policy: Policy) -> KVCache:
            quiet = dataclasses.replace(execution, progress=None)
            drafts, *_ = _prefill(params, known, policy, None, quiet, room=later)
            return repeated(drafts, samples)

        pending = decoding.state.cache.pending
        session.begin(Start(params, known, samples, pending, expected, request.max_new_tokens, prefilled))
    decoding.prefill_seconds = time.perf_counter() - started
    return decoding


def _state(
    cache: KVCache, request: Request, layout: Layout, seen: jax.Array | None, draws: np.ndarray
) -> run.DecodeState:
    """Rows that have a cache, and may each get all of their tokens."""
    return run.DecodeState(
        cache=cache,
        done=layout.put(np.zeros(cache.batch, bool)),
        left=layout.put(np.full(cache.batch, request.max_new_tokens, np.int32)),
        seen=seen,
        keys=layout.put(row_keys(request.seed, draws)),
    )


def _decode_ahead(
    ahead: Ahead, params: Params, request: Request, execution: Execution, cache: KVCache, logits: jax.Array
) -> None:
    """Compile what runs behind the prompt, which leaves a cache and logits of these forms."""
    if line_of(cache.layers) is not None:
        return  # how many slots its layers read is told by the prompt (`narrowed`)
    config, layout, samples = params.config, params.layout, request.samples

    def begun(cache: KVCache, logits: jax.Array) -> tuple[run.DecodeState, jax.Array]:
        rows = cache.batch * samples
        penalty = request.sampler.repetition_penalty is not None
        seen = layout.put(np.zeros((rows, config.vocab_size), bool)) if penalty else None
        state = _state(repeated(cache, samples), request, layout, seen, np.zeros(rows, np.int32))
        return state, jnp.repeat(logits, samples, axis=0)

    sampler, stop = request.sampler, request.stop_tokens
    state, _ = ahead.add(run.first_token, sampler, stop, *jax.eval_shape(begun, cache, logits), layout=layout)
    learned = params.learned_for(request.policy.learns, request.policy.name)
    given, named = plainly(params, request, execution, learned, state)
    ahead.add(run.decode, *given, **named)


def _prefill(
    params: Params,
    rows: list[np.ndarray],
    policy: Policy,
    cache: KVCache | None,
    execution: Execution,
    *,
    room: int = 0,
    top: int = 0,
    limit: int = 0,
    pseudo: np.ndarray | None = None,
    ahead: Ahead | None = None,
    then: Request | None = None,
    shapes: Plan | None = None,
) -> tuple[KVCache, jax.Array, run.Expected | None]:
    """Run the rows, on top of the cache if there is one; the new cache and the logits `[B, V]` of the last tokens.

    With `top` also the likeliest tokens after each token of the padded rows, as far as `limit` reaches (EMPTY after
    padding). What is new is compiled side by side; `ahead` may hold what the prompt is `then` decoded by. `shapes` are
    those of a larger batch, if the rows are part of one.
    """
    make_room()
    config, layout, batch, given = params.config, params.layout, len(rows), rows
    check_expected(policy, top)
    if cache is not None:
        cache = layout.cache(branched(cache, batch))
        pending = np.asarray(cache.pending)
        rows = [np.append(pending[i], row).astype(np.int32) if pending[i] >= 0 else row for i, row in enumerate(rows)]
    learned = params.learned_for(policy.learns, policy.name)
    new = np.array([len(row) for row in rows])
    planned, blocks, limits = plan(
        policy, config, cache, new, room, parts=layout.parts, learned=learned, sizes=execution.sizes
    )
    alone = shapes is None
    shapes = planned if alone else shapes
    begin = blocks.beginning(new)
    if cache is not None and shapes.look and begin.any():  # what a row holds is not cut before its prompt begins
        numbers = np.unique(begin)
        groups, runs = [np.flatnonzero(begin == number) for number in numbers], blocks.count + 1 - numbers
        parts = [
            _prefill(
                params, [given[row] for row in at], policy, rows_at(cache, at),
                _progressing(execution, int(runs[:part].sum()), int(runs.sum())), room=room, top=top, limit=limit,
                pseudo=None if pseudo is None else pseudo[at], shapes=shapes,
            )
            for part, at in enumerate(groups)
        ]  # fmt: skip
        return _in_one(parts, np.argsort(np.concatenate(groups)), blocks.length)
    lengths = np.zeros(batch, np.int32) if cache is None else np.asarray(cache.lengths)
    tokens, positions = left_padded(rows, blocks.length, lengths)
    if policy.prefill is None or not shapes.look:
        pseudo = np.zeros((batch, 0), np.int32)
    elif pseudo is None:
        pseudo = _pseudo_tokens(params, rows, policy, policy.prefill.observe, cache, execution, blocks)
        if policy.prefill.observe.drafts:
            pseudo = np.where(scored(policy, config, lengths + new, limits)[:, None], pseudo, EMPTY)
    if cache is None:
        layers = layout.layers(run.empty_layers(config, policy, batch, params.dtype))
    else:
        layers = _keeping(cache.layers, policy)

    def left(layers: Any) -> KVCache:
        return KVCache(
            layers=layers,
            lengths=layout.put(lengths + np.array([len(row) for row in rows], np.int32)),
            limits=layout.put(limits),
            pending=layout.put(np.full(batch, -1, np.int32)),
            policy=policy,
            model=params.fingerprint,
        )

    def behind(layers: Any, logits: Any) -> None:
        if compiling is not None and then is not None:
            _decode_ahead(compiling, params, then, execution, left(layers), logits)

    leaves, form = jax.tree.flatten(layers)
    asked = (
        params.fingerprint, params.dtype, policy, shapes, blocks.first, blocks.size, blocks.count > 0, pseudo.shape[-1],
        top, execution.implementation, execution.scan_layers, form, *((leaf.shape, leaf.dtype) for leaf in leaves),
        *(() if then is None else (then.sampler, then.stop_tokens, then.samples)),
    )  # fmt: skip
    compiling = None
    if layout.mesh is None and not asked_before(asked) and foreseeable((params.weights, layers)):
        compiling = ahead or Ahead()
    try:
        layers, logits, expected = run.prefill(
            params.weights, layers, tokens, positions, pseudo, lengths, limits, blocks=blocks, config=config,
            policy=policy, plan=shapes, layout=layout, implementation=execution.implementation,
            progress=execution.progress, top=top, limit=limit, scan_layers=execution.scan_layers, learned=learned,
            ahead=compiling, behind=behind,
        )  # fmt: skip
    except BaseException:
        if compiling is not None:
            compiling.drop()
        raise
    check_pass(params, policy, logits)
    layers = narrowed(layers) if alone else layers
    if expected is not None:
        expected = jnp.where(positions[..., None] < 0, EMPTY, expected[0]), expected[1]
    texts = [np.zeros(0, np.int32)] * batch if cache is None else cache.texts()
    whole = None if texts is None else right_padded([np.append(*each) for each in zip(texts, rows, strict=True)])
    cache = dataclasses.replace(left(layers), tokens=whole, draws=None if cache is None else cache.draws)
    return cache, logits, expected


def _progressing(execution: Execution, before: int, total: int) -> Execution:
    """The same, that tells of a part of the prompt's blocks, behind those `before`, as a part of the `total`."""
    progress = execution.progress
    if progress is None:
        return execution
    return dataclasses.replace(execution, progress=lambda what, done, _: progress(what, before + done, total))


def _in_one(parts: Sequence[Any], order: np.ndarray, length: int) -> tuple[KVCache, jax.Array, run.Expected | None]:
    """What `_prefill` gave for each part of a batch, in the batch's `order`, as of prompts padded to its `length`."""
    caches, logits, expected = zip(*parts, strict=True)
    cache = joined(caches, order)

    def padded(of: jax.Array, empty: Any) -> jax.Array:
        return jnp.pad(of, ((0, 0), (length - of.shape[1], 0), (0, 0)), constant_values=empty)

    cache = dataclasses.replace(cache, layers=narrowed(cache.layers))
    if expected[0] is None:
        return cache, jnp.concatenate(logits)[order], None
    tokens, chances = (
        jnp.concatenate([padded(of[which], empty) for of in expected])[order] for which, empty in ((0, EMPTY), (1, 0.0))
    )
    return cache, jnp.concatenate(logits)[order], (tokens, chances)


def check_pass(params: Params, policy: Policy, logits: jax.Array) -> None:
    """Raises `BadValue` where a score of one's own gave NaN, or float16 weights logits that are NaN or infinite."""
    check_scores(policy)
    if params.dtype == jnp.float16 and not bool(jnp.isfinite(logits).all()):
        raise BadValue(
            "the model's logits are not finite: its numbers go beyond 65504, where float16 ends; load it with "
            "dtype='bfloat16' or 'float32'"
        )


def _pseudo_tokens(
    params: Params,
    rows: list[np.ndarray],
    policy: Policy,
    observe: Observer,
    cache: KVCache | None,
    execution: Execution,
    blocks: PromptBlocks,
) -> np.ndarray:
    """The tokens that look from behind the prompt, as `behind` gives them (N = 0 for observers that are in it)."""
    if not observe.drafts:
        return behind(params, rows, observe, blocks)
    config, draft, new = params.config, first_pass(policy, goes_on=cache is not None), np.array([*map(len, rows)])
    seen, held = np.zeros_like(new), np.zeros((config.num_layers, 1), int)
    if cache is not None:  # its token to run next already stands in front of the rows
        seen, held = on_host(cache.lengths), rows_filled(cache)
        cache = dataclasses.replace(cache, pending=jnp.full_like(cache.pending, -1))
    limits = limits_of(draft, config, seen + new, params.learned_for(draft.learns, draft.name))
    left = config.max_position - places_taken(draft, config, seen, held, new, limits)
    counts = np.clip(left, 0, observe.extra)  # fewer where the context of a row ends before
    drafted = np.full((len(rows), observe.extra), EMPTY, np.int32)
    for count in sorted({*counts.tolist()} - {0}):
        of = counts == count
        at = np.where(of, np.arange(len(rows)), np.argmax(of))  # in place of other rows stands one of these
        drafted[of, :count] = generate(
            params, [rows[row] for row in at], policy=draft, max_new_tokens=count, stop_tokens=(),
            cache=cache if cache is None or of.all() else rows_at(cache, at),
            implementation=execution.implementation, scan_layers=execution.scan_layers, sizes=execution.sizes,
        ).tokens[of]  # fmt: skip
    return drafted


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


def with_room(policy: Policy, config: Any, cache: KVCache, room: int) -> KVCache:
    """A copy of the cache to decode on (decoding donates its state), with slots for new tokens where it lacks them."""
    seen = on_host(cache.lengths)
    check_room(policy, config, seen, rows_filled(cache), np.zeros_like(seen), room, None)
    layers, more = cache.layers, lacking(policy, cache, room)
    if any(more):
        windows = tuple(spec.window for spec in config.specs)
        layers = tuple(map(policy.read.indexed, grown(layers, on_host(cache.held()), more, windows)))
    copied = jax.tree.map(jnp.copy, dataclasses.replace(cache, layers=_keeping(layers, policy), policy=policy))
    return dataclasses.replace(copied, tokens=cache.tokens, draws=cache.draws)


def _keeping(layers: tuple[Any, ...], policy: Policy) -> tuple[Any, ...]:
    """The layers with those statistics that the policy keeps."""
    return tuple(layer.keeping(policy.stats) for layer in layers)
