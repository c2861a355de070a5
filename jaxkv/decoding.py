"""The host's side of decoding: compiled chunks of steps until every row has ended, and the result.

The device stops rows at stop tokens and at their number of tokens. Stop strings are found here, between the chunks.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import run
from jaxkv.ahead import Ahead
from jaxkv.generation import Generation, Stats
from jaxkv.plan import check_room, lacking, rows_filled
from jaxkv.policies.policy import Policy, check_scores
from jaxkv.prompts import right_padded
from jaxkv.request import Execution, Request
from jaxkv.sampling import row_keys
from jaxkv.sharding.layout import Layout, on_host
from jaxkv.speculative.session import Session
from jaxkv.stop_strings import StopStrings
from jaxkv.store import KVCache
from jaxkv.store.cache import grown, repeated
from jaxkv.store.line import line_of
from jaxkv.weights.params import Params

CHUNK = 32  # the most decode steps at a time: the host looks in between
UNENDED = 2**30  # more tokens than a chunk has


def compiled_for(params: Params, request: Request, execution: Execution) -> dict[str, Any]:
    """What the programs of decoding are compiled for, with drafts or without."""
    return {
        "config": params.config, "policy": request.policy, "sampler": request.sampler, "stop": request.stop_tokens,
        "implementation": execution.implementation,
    }  # fmt: skip


def plainly(
    params: Params,
    request: Request,
    execution: Execution,
    learned: run.Learned,
    state: run.DecodeState,
    steps: int = CHUNK,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `run.decode` takes for a chunk of so many steps: arrays, and the rest by name."""
    given = params.weights, state, params.layout.put(np.int32(steps))
    static = compiled_for(params, request, execution)
    return given, {"room": CHUNK, "layout": params.layout, "learned": learned, **static}


@dataclasses.dataclass
class Decoding:
    """One call after its prefill: what was asked, the device's state, and each row's new tokens so far.

    `before` is each prompt's whole text in front of them (None: not known), once for all of its samples; `draws` says
    by which random numbers each row draws (`draws_of`). New tokens go on from the text of the `fronts`. `ahead` may
    still be compiling the program.
    """

    params: Params
    request: Request
    execution: Execution
    session: Session | None
    state: run.DecodeState
    prompt_tokens: int
    single: bool
    before: list[np.ndarray] | None
    fronts: list[tuple[int, ...]]
    draws: np.ndarray
    learned: run.Learned
    ahead: Ahead
    tokens: list[list[int]]
    prefill_seconds: float = 0.0
    chunk_seconds: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        every = [front for front in self.fronts for _ in range(self.request.samples)]
        self._stops = [StopStrings(self.request.stop, self.params.tokenizer, front) for front in every]

    def run(self, chunk: int) -> Iterator[bool]:
        """Run chunks of so many steps until every row has ended; yields whether it was the last one."""
        while not self._ended():
            yield False
            started = time.perf_counter()
            new, once = self._ended_chunk(chunk)
            self.chunk_seconds.append((int(np.sum(new >= 0)), time.perf_counter() - started))
            if self.session is not None:
                self.session.tally(self.chunk_seconds[-1][1] if once else None)
            self.take(new)
            if self.execution.progress is not None:
                self.execution.progress("decode", max(map(len, self.tokens)), self.request.max_new_tokens)
        yield True

    def sample_first(self, logits: jax.Array) -> None:
        """Sample each row's first token from the logits `[B, V]` behind its prompt."""
        request, layout = self.request, self.params.layout
        self.ahead.wait(run.first_token)
        self.state, first = run.first_token(request.sampler, request.stop_tokens, self.state, logits, layout=layout)
        self.take(np.asarray(first)[:, None])

    def take(self, new: np.ndarray) -> None:
        """Add each row's new tokens `[B, n]` (-1: none); a row that has shown a stop string ends there."""
        counts = self._counts(new)
        for index, row in enumerate(new):
            self.tokens[index].extend(int(token) for token in row[row >= 0][: counts[index]])
        ended = np.array([stop.reached(row) for stop, row in zip(self._stops, self.tokens, strict=True)])
        if ended.any():
            self.state = dataclasses.replace(self.state, done=self.state.done | ended)

    def text(self, row: int, complete: bool = True) -> str:
        """The row's text, before its stop string; while it still comes, without what may yet change."""
        return self._stops[row].text(self.tokens[row], complete)

    def finish(self) -> Generation:
        """Everything that the call gives back."""
        request = self.request
        cache = dataclasses.replace(self.state.cache, tokens=self._seen(), draws=self.draws)
        lengths = np.array([len(row) for row in self.tokens], np.int32)
        pad = request.stop_tokens[0] if request.stop_tokens else 0
        tokens = np.full((len(self.tokens), request.max_new_tokens), pad, np.int32)
        for index, row in enumerate(self.tokens):
            tokens[index, : len(row)] = row
        held = on_host(cache.held())
        timed = self.chunk_seconds[1:] or self.chunk_seconds
        seconds = sum((spent for _, spent in timed), 0.0)
        stats = Stats(
            prompt_tokens=self.prompt_tokens,
            new_tokens=int(lengths.sum()),
            prefill_seconds=self.prefill_seconds,
            decode_seconds=sum((spent for _, spent in self.chunk_seconds), 0.0),
            tokens_per_second=sum(count for count, _ in timed) / seconds if seconds else 0.0,
            cache_bytes=cache.nbytes,
            read_bytes=sum(cache.read_bytes),
            seen=tuple(int(n) for n in np.asarray(cache.lengths)),
            kept=tuple(float(n) for n in held.mean(axis=(0, 2))),
            bounded=request.policy.bounded,
            speculation=None if self.session is None else self.session.summary(),
        )
        texts = [self.text(row) for row in range(len(self.tokens))]
        return Generation(texts[0] if self.single else texts, tokens, lengths, cache, stats)

    def _seen(self) -> np.ndarray | None:
        """The tokens that the cache has seen, int32 `[B, N]`: all but the pending one of each row's text."""
        if self.before is None:
            return None
        rows = []
        for index, (new, length) in enumerate(zip(self.tokens, np.asarray(self.state.cache.lengths), strict=True)):
            rows.append(np.append(self.before[index // self.request.samples], new)[:length])
        return right_padded(rows)

    def _ended_chunk(self, steps: int) -> tuple[np.ndarray, bool]:
        """A chunk, and whether it was run but once. Its rows end with the token that completes a stop string: where one
        came inside, the chunk is run again, so that the cache holds nothing behind it. With drafts another row may then
        come to other tokens, and its end is looked for anew; the row that ends first stays as it is, so that one more
        is right each time."""
        most = np.full(len(self.tokens), UNENDED, np.int32)
        before = jax.tree.map(jnp.copy, (self.state, self._drafting())) if self.request.stop else None
        while True:
            new = self._chunk(steps, most)
            if before is None:
                return new, True
            counts, came = self._counts(new), np.sum(new >= 0, axis=1)
            # decoding texts takes time: only those that were cut are
            cut = zip(came == most, self._stops, self.tokens, new, strict=True)
            right = np.array(
                [full and stop.reached([*row, *more[more >= 0].tolist()]) for full, stop, row, more in cut]
            )
            wanted = np.where(counts < came, counts, np.where(right, most, UNENDED))
            if np.array_equal(wanted, most):
                return new, bool((most == UNENDED).all())
            most = wanted.astype(np.int32)
            self.state, drafting = jax.tree.map(jnp.copy, before)
            if self.session is not None:
                self.session.drafting = drafting

    def _chunk(self, steps: int, most: np.ndarray) -> np.ndarray:
        """Some steps, or rounds of drafting; each row's new tokens, its `most` at most, with -1 where there is none."""
        params, request = self.params, self.request
        if self.session is not None:
            shared = compiled_for(params, request, self.execution)
            self.state, new = self.session.chunk(params.weights, self.state, steps, most, shared)
        else:
            if (most < UNENDED).any():
                self.state = dataclasses.replace(self.state, left=jnp.minimum(self.state.left, most))
            given, named = plainly(params, request, self.execution, self.learned, self.state, steps)
            self.ahead.wait(run.decode)
            self.state, new = run.decode(*given, **named)
        check_scores(request.policy)
        return np.asarray(new)

    def _counts(self, new: np.ndarray) -> np.ndarray:
        """How many of each row's new tokens there are up to the one that completes a stop string."""
        each = zip(self._stops, self.tokens, new, strict=True)
        return np.array([stop.count(tokens, more) for stop, tokens, more in each])

    def _drafting(self) -> Any:
        return None if self.session is None else self.session.drafting

    def _ended(self) -> bool:
        return bool(np.all(np.asarray(self.state.done) | (np.asarray(self.state.left) <= 0)))


def with_room(policy: Policy, config: Any, cache: KVCache, room: int) -> KVCache:
    """A copy of the cache to decode on (decoding donates its state), with slots for new tokens where it lacks them."""
    seen = on_host(cache.lengths)
    check_room(policy, config, seen, rows_filled(cache), np.zeros_like(seen), room, None)
    layers, more = cache.layers, lacking(policy, cache, room)
    if any(more):
        windows = tuple(spec.window for spec in config.specs)
        layers = tuple(map(policy.read.indexed, grown(layers, on_host(cache.held()), more, windows)))
    layers = tuple(layer.keeping(policy.stats) for layer in layers)
    copied = jax.tree.map(jnp.copy, dataclasses.replace(cache, layers=layers, policy=policy))
    return dataclasses.replace(copied, tokens=cache.tokens, draws=cache.draws)


def begun(
    cache: KVCache, layout: Layout, seen: jax.Array | None, draws: np.ndarray, *, left: int, seed: int
) -> run.DecodeState:
    """The state of rows that have a cache, and have so many tokens `left` to get."""
    return run.DecodeState(
        cache=cache,
        done=layout.put(np.zeros(cache.batch, bool)),
        left=layout.put(np.full(cache.batch, left, np.int32)),
        seen=seen,
        keys=layout.put(row_keys(seed, draws)),
    )


def decode_ahead(
    ahead: Ahead, params: Params, request: Request, execution: Execution, cache: KVCache, logits: jax.Array
) -> None:
    """Compile what runs behind the prompt, which leaves a cache and logits of these forms."""
    if line_of(cache.layers) is not None:
        return  # how many slots its layers read is told by the prompt (`narrowed`)
    layout, sampler, stop = params.layout, request.sampler, request.stop_tokens
    shape = {"samples": request.samples, "penalty": sampler.repetition_penalty is not None}
    behind = ahead.gives(_behind_prompt, cache, logits, layout=layout, **shape)
    state, _ = ahead.add(run.first_token, sampler, stop, *behind, layout=layout)
    learned = params.learned_for(request.policy.learns, request.policy.name)
    given, named = plainly(params, request, execution, learned, state)
    ahead.add(run.decode, *given, **named)


def _behind_prompt(
    cache: KVCache, logits: jax.Array, *, samples: int, penalty: bool, layout: Layout
) -> tuple[run.DecodeState, jax.Array]:
    """What the first tokens of all samples are drawn from, as far as its forms go."""
    rows = cache.batch * samples
    seen = jnp.zeros((rows, logits.shape[-1]), bool) if penalty else None
    state = begun(repeated(cache, samples), layout, seen, np.zeros(rows, np.int32), left=0, seed=0)
    return state, jnp.repeat(logits, samples, axis=0)
