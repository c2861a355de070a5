"""prompt -> tokens: the main line.

tokens -> prefill in blocks -> bounded cache -> scan of decode steps -> tokens
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import cache as slots_of
from jaxkv import model_pool, run
from jaxkv import pool as pools
from jaxkv.cache import KVCache, LayerCache
from jaxkv.errors import BadCheckpoint, BadValue
from jaxkv.model_pool import Share
from jaxkv.plan import plan
from jaxkv.policies.catalogue import catalogue
from jaxkv.policies.catalogue import policy as by_name
from jaxkv.policies.observe import Lookahead, Observer, PseudoQueries, Replay
from jaxkv.policies.policy import Policy
from jaxkv.pool import Pool
from jaxkv.prompts import Prompt, left_padded, rows_of
from jaxkv.sampling import Sampler
from jaxkv.sharding.layout import on_host
from jaxkv.speculative.method import Start
from jaxkv.speculative.session import Session, Speculation, Speculative
from jaxkv.weights.params import Params

CHUNK = 32  # decode steps per compiled scan: the host looks in between
STREAM_CHUNK = 4
GROW = 64  # slots added at a time where new tokens are only added: going on step by step compiles once per so many

Progress = Callable[[str, int, int], None]  # ("prefill" or "decode", done, of)


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a run cost. `seen`, `kept`, `evicted` are tokens per row; kept is the mean over layers and KV heads.

    `tokens_per_second` counts all rows' new tokens over the decode time, without the first chunk (which may compile)
    when there are more. `speculation` says what drafts brought.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    cache_bytes: int
    seen: tuple[int, ...]
    kept: tuple[float, ...]
    speculation: Speculation | None = None

    @property
    def evicted(self) -> tuple[float, ...]:
        """Tokens per row that no KV head holds any more, on average over layers and KV heads."""
        return tuple(seen - kept for seen, kept in zip(self.seen, self.kept, strict=True))


@dataclasses.dataclass(frozen=True)
class Generation:
    """`text` (a string for one prompt, a list for several), `tokens [B, max_new_tokens]` padded with `pad` behind
    `lengths [B]` real ones, the `cache` to go on from, and `stats`.
    """

    text: Any
    tokens: np.ndarray
    lengths: np.ndarray
    cache: KVCache
    stats: Stats


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
    progress: Progress | None = None,
) -> Generation:
    """Continue the prompt under the policy (none: full cache), or go on from `cache` with or without a new prompt.

    `prompt`: text, texts, chat messages, token ids `[T]`, `[B, T]` or ragged rows. A cache of one row branches to
    every prompt; it goes on under its own policy (or "full"). `stop_tokens=None` stops at the model's own,
    `()` at nothing; `stop` strings end the text before them. `samples` continues each prompt that many times.
    `speculative`, such as `jaxkv.speculative.AASD()`, drafts several tokens and verifies them in one pass.
    `scan_layers` runs layers that are alike as one loop at prefill: it compiles sooner, and then runs a little slower.
    Raises `BadValue`, `BadCheckpoint` and their kin before anything is compiled.
    """
    sampler = Sampler(temperature, top_k, top_p, min_p, repetition_penalty)
    task = _begin(
        params, prompt, policy, max_new_tokens, cache, sampler, samples, seed, stop_tokens, stop, speculative,
        implementation, scan_layers, progress,
    )  # fmt: skip
    for _ in _decode(task, CHUNK):
        pass
    return _finish(task)


class Stream:
    """Iterates over pieces of text as they come; afterwards `generation` holds the whole result."""

    def __init__(self, task: "_Task"):
        self._task = task
        self._generation: Generation | None = None

    def __iter__(self) -> Iterator[str]:
        shown = ""
        for last in _decode(self._task, STREAM_CHUNK):
            text = _text(self._task, 0, complete=last)
            if len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
        self._generation = _finish(self._task)

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
    progress: Progress | None = None,
) -> Stream:
    """`generate` for one prompt, giving its text as it comes: `for piece in jaxkv.stream(...)`."""
    sampler = Sampler(temperature, top_k, top_p, min_p, repetition_penalty)
    task = _begin(
        params, prompt, policy, max_new_tokens, cache, sampler, 1, seed, stop_tokens, stop, speculative,
        implementation, scan_layers, progress,
    )  # fmt: skip
    if len(task.tokens) != 1:
        raise BadValue(f"{len(task.tokens)} prompts to stream: expected one; use generate for a batch")
    return Stream(task)


def prefill(
    params: Params,
    prompt: Prompt,
    *,
    policy: Policy | None = None,
    cache: KVCache | None = None,
    room: int = 0,
    pseudo: np.ndarray | None = None,
    implementation: str | None = None,
    scan_layers: bool = False,
    progress: Progress | None = None,
) -> KVCache:
    """The cache that the prompt leaves under the policy, to `generate(..., cache=cache)` from, any number of times.

    `room` asks for slots for so many tokens to come, where the policy only adds them (otherwise added when needed).
    `pseudo [B, count]` are tokens that look instead of those that a policy with pseudo queries makes up. Raises
    `BadValue` for others.
    """
    rows, _ = rows_of(prompt, params.tokenizer, params.config.vocab_size)
    chosen = _policy(params, policy, cache)
    if pseudo is not None:
        pseudo = _checked(np.asarray(pseudo), len(rows), chosen, params.config.vocab_size)
    return _prefill(params, rows, chosen, cache, room, implementation, scan_layers, progress, pseudo=pseudo)[0]


def _checked(pseudo: np.ndarray, rows: int, policy: Policy, vocab_size: int) -> np.ndarray:
    """The pseudo tokens as int32. Raises `BadValue` where they don't fit the rows, the policy or the vocabulary."""
    looking = policy.prefill is not None and isinstance(policy.prefill.observe, PseudoQueries)
    if not looking or pseudo.shape != (rows, policy.extra) or not np.issubdtype(pseudo.dtype, np.integer):
        want = f"integers of shape {(rows, policy.extra)}" if looking else "none, for its queries are others"
        raise BadValue(f"pseudo of {pseudo.dtype} {pseudo.shape} under policy {policy.name!r}: expected {want}")
    if pseudo.min() < 0 or pseudo.max() >= vocab_size:
        raise BadValue(f"pseudo token {pseudo.min()} or {pseudo.max()}: expected ids from 0 to {vocab_size - 1}")
    return pseudo.astype(np.int32)


def _policy(params: Params, policy: Policy | None, cache: KVCache | None) -> Policy:
    """The policy to run under. Raises `BadCheckpoint` where the cache was made under another model or policy."""
    full = catalogue()["full"]
    if policy is not None and not isinstance(policy, Policy):
        raise BadValue(f"policy={policy!r}: expected a Policy, such as jaxkv.policy('dapq-longflow', budget=256)")
    if cache is None:
        return full if policy is None else policy
    if cache.model != params.fingerprint:
        raise BadCheckpoint(f"the cache was made by model {cache.model}, but these params are {params.fingerprint}")
    if policy is None:
        return cache.policy
    if policy != cache.policy and policy != full:
        raise BadCheckpoint(
            f"the cache was made under {cache.policy.name!r} (budget {cache.policy.budget}, ratio "
            f"{cache.policy.ratio}), not under {policy.name!r} as given: leave policy= out, or give policy('full') "
            "to keep everything that follows"
        )
    return policy


def _prefill(
    params: Params,
    rows: list[np.ndarray],
    policy: Policy,
    cache: KVCache | None,
    room: int,
    implementation: str | None,
    scan_layers: bool,
    progress: Progress | None,
    top: int = 0,
    limit: int = 0,
    pseudo: np.ndarray | None = None,
) -> tuple[KVCache, jax.Array, run.Expected]:
    """Run the rows, on top of the cache if there is one; the new cache and the logits `[B, V]` of the last tokens.

    With `top` also the likeliest tokens after each token of the padded rows, as far as `limit` reaches.
    """
    config, layout, batch = params.config, params.layout, len(rows)
    if top and policy.propagate is not None:
        raise BadValue(
            f"policy {policy.name!r} runs only some of the prompt through the last layers, and these drafts need what "
            "the model held likely after each token: use PromptLookup, or leave speculative= out"
        )
    if cache is not None:
        cache = layout.cache(_branched(cache, batch))
        pending = np.asarray(cache.pending)
        rows = [np.append(pending[i], row).astype(np.int32) if pending[i] >= 0 else row for i, row in enumerate(rows)]
    learned = params.learned_for(policy.learns, policy.name)
    new = np.array([len(row) for row in rows])
    shapes, limits = plan(policy, config, cache, new, room, parts=layout.parts, learned=learned)
    lengths = np.zeros(batch, np.int32) if cache is None else np.asarray(cache.lengths)
    tokens, positions = left_padded(rows, shapes.length, lengths)
    if policy.prefill is None or not shapes.look:
        pseudo = np.zeros((batch, 0), np.int32)
    elif pseudo is None:
        pseudo = _pseudo_tokens(params, rows, policy, policy.prefill.observe, cache, implementation, scan_layers)
    if cache is None:
        layers = layout.layers(run.empty_layers(config, policy, batch, params.dtype))
    else:
        layers = _keeping(cache.layers, policy)
    layers, logits, expected = run.prefill(
        params.weights, layers, *map(layout.put, (tokens, positions, pseudo, lengths, limits)),
        config=config, policy=policy, plan=shapes, layout=layout, implementation=implementation, progress=progress,
        top=top, limit=limit, scan_layers=scan_layers, learned=learned,
    )  # fmt: skip
    cache = KVCache(
        layers=layers,
        lengths=layout.put(lengths + np.array([len(row) for row in rows], np.int32)),
        limits=layout.put(limits),
        pending=layout.put(np.full(batch, -1, np.int32)),
        policy=policy,
        model=params.fingerprint,
    )
    return cache, logits, expected


def _check_pools(policy: Policy, cache: KVCache | None) -> None:
    """Raises `BadValue` for a pool under drafts, which know only layers whose heads hold equally many."""
    if policy.allocate.pooled or any(isinstance(layer, Pool | Share) for layer in (cache.layers if cache else ())):
        raise BadValue(
            f"policy {policy.name!r} with speculative=: its heads share a pool, which drafts do not know so far; leave "
            "one of the two out, or set allocate kind 'uniform'"
        )


def _pseudo_tokens(
    params: Params,
    rows: list[np.ndarray],
    policy: Policy,
    observe: Observer,
    cache: KVCache | None,
    implementation: str | None,
    scan_layers: bool,
) -> np.ndarray:
    """The tokens that look from behind the prompt, int32 `[B, N]` (N = 0 for observers that are in it)."""
    if isinstance(observe, PseudoQueries):
        return np.stack([observe.tokens(row, params.config.vocab_size) for row in rows])
    if isinstance(observe, Replay) and params.tokenizer is not None and observe.instruction:
        ids = params.tokenizer(observe.instruction, add_special_tokens=False)["input_ids"]
        return np.tile(np.asarray(ids, np.int32), (len(rows), 1))
    if isinstance(observe, Lookahead):
        draft = catalogue()["full"]
        if cache is None:
            draft = first_pass(policy, observe)
        else:  # its token to run next already stands in front of the rows
            cache = dataclasses.replace(cache, pending=jnp.full_like(cache.pending, -1))
        once = {"cache": cache, "stop_tokens": (), "implementation": implementation, "scan_layers": scan_layers}
        ahead = generate(params, rows, policy=draft, max_new_tokens=observe.count, **once)
        return ahead.tokens
    return np.zeros((len(rows), 0), np.int32)


def first_pass(policy: Policy, observe: Lookahead) -> Policy:
    """The policy under which a lookahead policy drafts: SnapKV at the same budget."""
    draft = by_name("snapkv", budget=policy.budget, ratio=policy.ratio, window=observe.draft_window)
    return dataclasses.replace(draft, rope=policy.rope, block=policy.block)


def _branched(cache: KVCache, batch: int) -> KVCache:
    """The cache for `batch` rows: its own number, or one row repeated."""
    if cache.batch == batch:
        return cache
    if cache.batch != 1:
        raise BadValue(f"{batch} prompts on a cache of {cache.batch} rows: expected {cache.batch}, or a cache of 1 row")
    return _repeated(cache, batch)


def _repeated(cache: KVCache, times: int) -> KVCache:
    """Every row `times` times, next to each other."""
    if times == 1:
        return cache
    repeat = lambda leaf: jnp.repeat(leaf, times, axis=0)  # noqa: E731
    return dataclasses.replace(
        cache,
        layers=jax.tree.map(repeat, cache.layers),
        lengths=repeat(cache.lengths),
        limits=jnp.repeat(cache.limits, times, axis=1),
        pending=repeat(cache.pending),
    )


@dataclasses.dataclass
class _Task:
    """One call on the host: what was asked, the device state, and the tokens so far."""

    params: Params
    policy: Policy
    sampler: Sampler
    stop_tokens: tuple[int, ...]
    stop: tuple[str, ...]
    single: bool
    max_new_tokens: int
    steps: int
    state: run.DecodeState
    tokens: list[list[int]]
    prompt_tokens: int
    prefill_seconds: float
    implementation: str | None
    progress: Progress | None
    learned: run.Learned
    session: Session | None = None
    chunk_seconds: list[tuple[int, float]] = dataclasses.field(default_factory=list)


def _begin(
    params: Params,
    prompt: Prompt,
    policy: Policy | None,
    max_new_tokens: int,
    cache: KVCache | None,
    sampler: Sampler,
    samples: int,
    seed: int,
    stop_tokens: Sequence[int] | None,
    stop: str | Sequence[str] | None,
    speculative: Speculative | None,
    implementation: str | None,
    scan_layers: bool,
    progress: Progress | None,
) -> _Task:
    """Check everything, prefill, and sample the first token."""
    config = params.config
    for name, value in (("max_new_tokens", max_new_tokens), ("samples", samples)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise BadValue(f"{name}={value!r}: expected a whole number of at least 1")
    stop_tokens = config.stop_tokens if stop_tokens is None else tuple(int(token) for token in stop_tokens)
    stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stop:
        raise BadValue("stop holds an empty string, which every text contains: leave it out")
    if stop and params.tokenizer is None:
        raise BadValue("stop strings need a tokenizer, and these params have none: use stop_tokens=")
    chosen = _policy(params, policy, cache)
    if speculative is not None and params.layout.mesh is not None:
        raise BadValue("speculative= on a mesh: drafts are verified on one device so far; leave one of the two out")
    if speculative is not None:
        _check_pools(chosen, cache)
    session = None if speculative is None else Session(speculative, params, chosen)
    went_on = cache is not None
    started = time.perf_counter()

    if prompt is None:
        if cache is None:
            raise BadValue("neither prompt nor cache: expected a prompt, or a cache to go on from")
        if int(np.asarray(cache.pending).min()) < 0:
            raise BadValue("no prompt, and the cache holds no sampled token to go on from: give a prompt")
        rows, single, logits, expected = None, cache.batch == 1, None, None
        cache = with_room(chosen, config, cache, max_new_tokens)
    else:
        rows, single = rows_of(prompt, params.tokenizer, config.vocab_size)
        top = (session.top, session.limit) if session is not None else (0, 0)
        cache, logits, expected = _prefill(
            params, rows, chosen, cache, max_new_tokens, implementation, scan_layers, progress, *top
        )
        logits = jnp.repeat(logits, samples, axis=0)
    layout = params.layout
    cache = layout.cache(_repeated(cache, samples))
    seen = None
    if sampler.repetition_penalty is not None:
        seen = np.zeros((cache.batch, config.vocab_size), bool)
        for index in range(cache.batch):
            seen[index, rows[index // samples] if rows else np.asarray(cache.pending)[index]] = True
    state = run.DecodeState(
        cache=cache,
        done=layout.put(np.zeros(cache.batch, bool)),
        left=layout.put(np.full(cache.batch, max_new_tokens, np.int32)),
        seen=None if seen is None else layout.put(seen),
        keys=layout.put(_row_keys(seed, rows, cache, samples)),
    )
    tokens: list[list[int]] = [[] for _ in range(cache.batch)]
    task = _Task(
        params, chosen, sampler, stop_tokens, stop, single and samples == 1, int(max_new_tokens),
        max_new_tokens - (logits is not None), state, tokens, sum(map(len, rows or [])), 0.0, implementation, progress,
        params.learned_for(chosen.learns, chosen.name), session,
    )  # fmt: skip
    if logits is not None:
        task.state, first = run.first_token(sampler, stop_tokens, state, logits, layout=layout)
        _take(task, np.asarray(first)[:, None])
    if session is not None:

        def prefilled(params: Params, policy: Policy) -> KVCache:
            drafts = _prefill(params, rows or [], policy, None, max_new_tokens, implementation, scan_layers, None)[0]
            return _repeated(drafts, samples)

        known = rows is not None and not went_on
        session.begin(
            Start(
                params, rows, samples, task.state.cache.pending, expected, max_new_tokens, prefilled if known else None
            )
        )
    task.prefill_seconds = time.perf_counter() - started
    return task


def with_room(policy: Policy, config: Any, cache: KVCache, room: int) -> KVCache:
    """A copy of the cache to decode on (decoding donates its state), with slots for new tokens if they are added."""
    if policy.rope == "text" and int(np.asarray(cache.lengths).max()) + room > config.max_position:
        raise BadValue(
            f"{int(np.asarray(cache.lengths).max())} tokens seen and {room} new ones exceed the model's context of "
            f"{config.max_position}: generate fewer"
        )
    layers = cache.layers
    if policy.decode is None:
        held = on_host(cache.held()).max(axis=(1, 2))
        layers = tuple(
            _widened(layer, room)
            if isinstance(layer, Pool)
            else _grown(layer, int(held[index]) + room, config.attention_spec(index).window)
            if isinstance(layer, LayerCache)
            else layer
            for index, layer in enumerate(layers)
        )
        lacking = [_lacking(layer.line, room) for layer in layers if isinstance(layer, Share) and layer.line]
        layers = model_pool.room_for(layers, *lacking) if lacking else layers
    return jax.tree.map(jnp.copy, dataclasses.replace(cache, layers=_keeping(layers, policy), policy=policy))


def _keeping(layers: tuple[Any, ...], policy: Policy) -> tuple[Any, ...]:
    """The layers with those statistics that the policy keeps."""
    return model_pool.changed(
        layers, lambda layer: dataclasses.replace(layer, stats={k: layer.stats[k] for k in policy.stats})
    )


def _grown(layer: LayerCache, tokens: int, window: int | None) -> LayerCache:
    """The layer with slots for so many tokens (or its window's), the next one going to the first new slot."""
    slots = -(-tokens // GROW) * GROW
    slots = slots if window is None else min(slots, window)
    if layer.slots >= min(tokens, slots):
        return layer
    return dataclasses.replace(
        slots_of.resize(layer, slots), next_slot=jnp.full(layer.next_slot.shape, layer.slots, jnp.int32)
    )


def _widened(pool: Pool, tokens: int) -> Pool:
    """The pool with slots for so many tokens more in every head."""
    more = _lacking(pool, tokens)
    return pools.widened(pool, more) if more else pool


def _lacking(pool: Pool, tokens: int) -> int:
    """Slots that every head of the pool needs besides its empty ones, a multiple of GROW."""
    return -(-max(tokens - int(np.min(on_host(pool.sizes - pool.held()))), 0) // GROW) * GROW


def _row_keys(seed: int, rows: list[np.ndarray] | None, cache: KVCache, samples: int) -> jax.Array:
    """A key per row from the seed and how often the same prompt stood before: no row depends on the others' text."""
    times: dict[bytes, int] = {}
    numbers = []
    for index in range(cache.batch):
        prompt = rows[index // samples].tobytes() if rows else np.asarray(cache.pending)[index].tobytes()
        numbers.append(times.get(prompt, 0))
        times[prompt] = numbers[-1] + 1
    return jax.vmap(lambda number: jax.random.fold_in(jax.random.key(seed), number))(jnp.array(numbers))


def _decode(task: _Task, chunk: int) -> Iterator[bool]:
    """Run the decode steps in chunks until every row has finished; yields whether it was the last one."""
    size = -(-task.steps // max(1, -(-task.steps // chunk)))
    while not _all_done(task):
        yield False
        before = jax.tree.map(jnp.copy, (task.state, _drafting(task))) if task.stop else None
        started = time.perf_counter()
        new = _chunk(task, size)
        counts = _until_stop(task, new)
        if before is not None and (counts < np.sum(new >= 0, axis=1)).any():
            # A stop string ended a row inside the chunk: run it again so that the cache holds nothing behind it.
            state, drafting = before
            left = jnp.where(counts < np.sum(new >= 0, axis=1), jnp.minimum(state.left, counts), state.left)
            task.state = dataclasses.replace(state, left=left)
            if task.session is not None:
                task.session.drafting = drafting
            new = _chunk(task, size)
        task.chunk_seconds.append((int(np.sum(new >= 0)), time.perf_counter() - started))
        if task.session is not None:
            task.session.tally(task.chunk_seconds[-1][1])
        _take(task, new)
        if task.progress is not None:
            task.progress("decode", max(map(len, task.tokens)), task.max_new_tokens)
    yield True


def _drafting(task: _Task) -> Any:
    return None if task.session is None else task.session.drafting


def _chunk(task: _Task, steps: int) -> np.ndarray:
    """Some steps, or rounds of drafting; each row's new tokens, with -1 where there is none."""
    shared = {
        "config": task.params.config, "policy": task.policy, "sampler": task.sampler, "stop": task.stop_tokens,
        "implementation": task.implementation,
    }  # fmt: skip
    if task.session is not None:
        task.state, new = task.session.chunk(task.params.weights, task.state, steps, shared)
    else:
        task.state, new = run.decode(
            task.params.weights, task.state, steps=steps, layout=task.params.layout, learned=task.learned, **shared
        )
    return np.asarray(new)


def _take(task: _Task, new: np.ndarray) -> None:
    """Add each row's new tokens; a row that has shown a stop string ends there."""
    counts = _until_stop(task, new)
    ended = np.zeros(len(task.tokens), bool)
    for index, row in enumerate(new):
        real = row[row >= 0]
        task.tokens[index].extend(int(token) for token in real[: counts[index]])
        ended[index] = bool(task.stop) and _stop_at(task, _words(task, task.tokens[index])) is not None
    if ended.any():
        task.state = dataclasses.replace(task.state, done=task.state.done | ended)


def _until_stop(task: _Task, new: np.ndarray) -> np.ndarray:
    """How many of each row's new tokens there are up to the one that completes a stop string."""
    counts = np.sum(new >= 0, axis=1)
    if not task.stop:
        return counts
    for index, row in enumerate(new):
        row = [int(token) for token in row[row >= 0]]
        if _stop_at(task, _words(task, task.tokens[index] + row)) is None:
            continue
        counts[index] = next(
            count
            for count in range(1, len(row) + 1)
            if count == len(row) or _stop_at(task, _words(task, task.tokens[index] + row[:count])) is not None
        )
    return counts


def _stop_at(task: _Task, text: str) -> int | None:
    """Where the first stop string begins in the text, if one is there."""
    found = [at for at in (text.find(stop) for stop in task.stop) if at >= 0]
    return min(found) if found else None


def _words(task: _Task, tokens: list[int]) -> str:
    if task.params.tokenizer is None:
        return ""
    return task.params.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _text(task: _Task, row: int, complete: bool = True) -> str:
    """The row's text, before its stop string; while it still comes, without what may yet change."""
    text = _words(task, task.tokens[row])
    at = _stop_at(task, text)
    if at is not None:
        return text[:at]
    if complete:
        return text
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # the first bytes of a character whose rest is still to come
    partial = [n for stop in task.stop for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(partial, default=0)]


def _all_done(task: _Task) -> bool:
    return bool(np.all(np.asarray(task.state.done) | (np.asarray(task.state.left) <= 0)))


def _finish(task: _Task) -> Generation:
    """Everything that the call gives back."""
    cache = task.state.cache
    lengths = np.array([len(row) for row in task.tokens], np.int32)
    pad = task.stop_tokens[0] if task.stop_tokens else 0
    tokens = np.full((len(task.tokens), task.max_new_tokens), pad, np.int32)
    for index, row in enumerate(task.tokens):
        tokens[index, : len(row)] = row
    held = on_host(cache.held())
    timed = task.chunk_seconds[1:] or task.chunk_seconds
    seconds = sum((spent for _, spent in timed), 0.0)
    stats = Stats(
        prompt_tokens=task.prompt_tokens,
        new_tokens=int(lengths.sum()),
        prefill_seconds=task.prefill_seconds,
        decode_seconds=sum((spent for _, spent in task.chunk_seconds), 0.0),
        tokens_per_second=sum(count for count, _ in timed) / seconds if seconds else 0.0,
        cache_bytes=cache.nbytes,
        seen=tuple(int(n) for n in np.asarray(cache.lengths)),
        kept=tuple(float(n) for n in held.mean(axis=(0, 2))),
        speculation=None if task.session is None else task.session.summary(),
    )
    texts = [_text(task, index) for index in range(len(task.tokens))]
    return Generation(texts[0] if task.single else texts, tokens, lengths, cache, stats)
