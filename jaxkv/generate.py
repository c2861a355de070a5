"""prompt -> tokens: the main line.

tokens -> prefill in blocks -> bounded cache -> loop of decode steps -> tokens
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jaxkv.ahead import Ahead
from jaxkv.checks import check_arguments
from jaxkv.decoding import CHUNK, Decoding, begun, decode_ahead, with_room
from jaxkv.errors import BadValue
from jaxkv.generation import Generation
from jaxkv.plan import SIZES
from jaxkv.policies.policy import Policy
from jaxkv.prefilling import Prefilled, Prefilling
from jaxkv.programs import make_room
from jaxkv.prompts import Prompt, fronts, rows_of
from jaxkv.pseudo import Draft
from jaxkv.request import Execution, Progress, Request, check_model, checked_policy, checked_pseudo, checked_request
from jaxkv.sampling import Sampler, draws_of
from jaxkv.speculative.method import Start
from jaxkv.speculative.session import Session, Speculative
from jaxkv.store import KVCache
from jaxkv.store.cache import repeated
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
    """`generate` for one prompt, giving its text as it comes: `for piece in jaxkv.stream(...)`.

    Raises `BadValue` as `generate` does, and where there is no tokenizer.
    """
    request = checked_request(
        params, prompt, cache, policy=policy, max_new_tokens=max_new_tokens, samples=1, seed=seed,
        sampler=Sampler(temperature, top_k, top_p, min_p, repetition_penalty), stop_tokens=stop_tokens, stop=stop,
        speculative=speculative,
    )  # fmt: skip
    if params.tokenizer is None:
        raise BadValue("a stream gives text, but these params have no tokenizer: use jaxkv.generate, and .tokens")
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
    return Prefilling(params, chosen, execution, _draft(params, execution), room=room).run(rows, cache, pseudo).cache


def _so_far(cache: KVCache | None) -> tuple[np.ndarray | None, list[np.ndarray] | None]:
    """The tokens that a cache's rows have still to run, and their texts; None without a cache."""
    return (None, None) if cache is None else (np.asarray(cache.pending), cache.texts())


def _draft(params: Params, execution: Execution) -> Draft:
    """How the first pass of a policy that looks ahead goes on from rows."""

    def draft(rows: list[np.ndarray], policy: Policy, cache: KVCache | None, count: int) -> np.ndarray:
        return generate(
            params, rows, policy=policy, max_new_tokens=count, stop_tokens=(), cache=cache,
            implementation=execution.implementation, scan_layers=execution.scan_layers, sizes=execution.sizes,
        ).tokens  # fmt: skip

    return draft


def _begin(params: Params, prompt: Prompt, cache: KVCache | None, request: Request, execution: Execution) -> Decoding:
    """Prefill, and sample the first token; where the cache goes on alone, its pending token is run next."""
    started, layout, samples, ahead = time.perf_counter(), params.layout, request.samples, Ahead()
    later = request.max_new_tokens - (prompt is not None)  # tokens to run: one that waits, all new ones but the last
    apart = cache is not None and cache.batch > 1  # rows go on from texts of their own
    session, logits, expected = None, None, None
    if request.speculative is not None:
        session = Session(request.speculative, params, request.policy, cache)
    if prompt is None:
        assert cache is not None  # checked with the request
        rows, single, texts = list(np.asarray(cache.pending)[:, None]), cache.batch == 1, cache.texts()
        before = None if texts is None else [np.append(*each) for each in zip(texts, rows, strict=True)]
        make_room()
        if session is not None:
            session.check_room(np.asarray(cache.lengths), later)
        cache = with_room(request.policy, params.config, cache, later)
    else:
        rows, single = rows_of(prompt, params.tokenizer, params.config.vocab_size, *_so_far(cache))
        cache, logits, expected = _prompted(params, rows, cache, request, execution, session, ahead, later)
        texts = before = cache.texts()
    draws = draws_of([each.tobytes() for each in before or _told_apart(rows, apart)], samples, cache.draws)
    seen = None
    if request.sampler.repetition_penalty is not None:
        assert before is not None  # checked with the request
        seen = layout.put(np.repeat(_seen(before, params.config.vocab_size), samples, axis=0))
    cache = layout.cache(repeated(cache, samples))
    state = begun(cache, layout, seen, draws, left=request.max_new_tokens, seed=request.seed)
    decoding = Decoding(
        params, request, execution, session, state,
        prompt_tokens=0 if prompt is None else sum(map(len, rows)),
        single=single and samples == 1,
        before=before,
        fronts=fronts(prompt, before or rows),
        draws=draws,
        learned=params.learned_for(request.policy.learns, request.policy.name),
        ahead=ahead,
        tokens=[[] for _ in range(cache.batch)],
    )  # fmt: skip
    if logits is not None:
        decoding.sample_first(jnp.repeat(logits, samples, axis=0))
    if session is not None:
        known = texts or (rows if logits is not None else [row[:0] for row in rows])
        quiet, pending = dataclasses.replace(execution, progress=None), decoding.state.cache.pending

        def through(params: Params, policy: Policy) -> KVCache:
            prefilling = Prefilling(params, policy, quiet, _draft(params, quiet), room=later)
            return params.layout.cache(repeated(prefilling.run(known, None).cache, samples))

        session.begin(Start(params, known, samples, pending, expected, request.max_new_tokens, through))
    decoding.prefill_seconds = time.perf_counter() - started
    return decoding


def _prompted(
    params: Params,
    rows: list[np.ndarray],
    cache: KVCache | None,
    request: Request,
    execution: Execution,
    session: Session | None,
    ahead: Ahead,
    later: int,
) -> Prefilled:
    """Prefill of a call's prompts, for decoding of `later` tokens: plain, then compiled ahead, or with drafts."""
    top, limit, then = 0, 0, None
    if session is not None:
        top, limit, new = session.top, session.limit, np.array([*map(len, rows)])
        seen = 0 if cache is None else np.asarray(cache.lengths) + (np.asarray(cache.pending) >= 0)
        session.check_room(seen + new, later)
    elif later > 0:
        then = functools.partial(decode_ahead, ahead, params, request, execution)
    return Prefilling(
        params, request.policy, execution, _draft(params, execution), room=later, top=top, limit=limit, ahead=ahead,
        then=then,
    ).run(rows, cache)  # fmt: skip


def _told_apart(rows: list[np.ndarray], apart: bool) -> list[np.ndarray]:
    """What stands for each row's text where it is not known: the tokens, and the row's place where these go on from
    different texts."""
    return [np.append(place, row) for place, row in enumerate(rows)] if apart else rows


def _seen(texts: list[np.ndarray], vocab_size: int) -> np.ndarray:
    """Which tokens each text has, bool [B, V]."""
    seen = np.zeros((len(texts), vocab_size), bool)
    for row, text in zip(seen, texts, strict=True):
        row[text] = True
    return seen
