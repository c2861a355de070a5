"""One prefill of a prompt for every policy and size: what each keeps of it, and the answers or a text's own
continuation, decoded side by side.

A prompt that runs as one block attends to itself whole, whatever is evicted behind it. So the model runs once and what
it made of the prompt in every layer is kept (`models.recorded`); each policy then cuts that by the very program that
`jaxkv.prefill` runs, and its answer is decoded under it. Policies whose decode steps are the same stand in one batch,
also those of several prompts that are padded to one length.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv import run
from jaxkv.evaluation.forced import follow
from jaxkv.generate import generate
from jaxkv.models import AttentionSpec, ModelConfig
from jaxkv.models.recorded import Heard, Recorded
from jaxkv.models.rope import rotate
from jaxkv.plan import Plan, PromptBlocks, block_of, planned, rounded
from jaxkv.policies.policy import Policy, check_scores
from jaxkv.programs import held, make_room
from jaxkv.prompts import left_padded
from jaxkv.pseudo import behind, first_pass
from jaxkv.store import EMPTY, KVCache
from jaxkv.store.line import narrowed
from jaxkv.store.together import opened
from jaxkv.weights.params import Params
from pallas_kernels.prefill_attend.api import prefill_attend

PIECE = 16  # decode steps between two looks at whether the answers are long enough
LENGTHS = 2  # prompts are padded to one of so many lengths per doubling: each is a set of programs
Place = tuple[int, int]  # of an answer: the prompt's number, and the policy's among those asked of it
Enough = Callable[[Place, list[int]], bool]  # whether what may follow these tokens of an answer changes nothing


def padded(tokens: int) -> int:
    """The length that a prompt of so many tokens is padded to."""
    return rounded(tokens, LENGTHS)


def apart(policy: Policy, tokens: int, context: int) -> str:
    """Why the policy needs a prefill of its own for a prompt of so many tokens, on a model whose context has `context`;
    nothing where it does not."""
    if policy.flow.going_on:
        return "only some tokens go on to its deeper layers"
    block = policy.block if policy.bound_to_text else block_of(policy, context, policy.mean_budget(tokens))
    return f"it runs blocks of {block} tokens" if tokens > block else ""


@dataclasses.dataclass(frozen=True)
class Said:
    """What a policy led to: its tokens, the entries held at their end (tokens per KV head, on average), and the bytes
    of a cache with the slots that its own budget needs."""

    tokens: list[int]
    kept: float
    cache_bytes: int


@held
@functools.partial(jax.jit, static_argnames="config")
def _listen(
    weights, tokens: Int[Array, "1 T"], positions: Int[Array, "1 T"], before: list[Heard], past: Int[Array, "1 P"],
    *, config: ModelConfig,
) -> tuple[Float[Array, "1 V"], list[Heard]]:  # fmt: skip
    """Run tokens behind those that were heard `before` at positions `past`: the last logits, and what was heard."""

    def attend(spec: AttentionSpec, query, key, value, state: Heard, sizes):
        keys, values = (jnp.concatenate(each, axis=1) for each in ((state.key, key), (state.value, value)))
        places = jnp.concatenate([past, positions], axis=1)
        turned = rotate(jnp.swapaxes(query, 1, 2), positions[:, None], spec.rope)
        read = rotate(jnp.swapaxes(keys, 1, 2), places[:, None], spec.rope)
        context = prefill_attend(
            turned, read, jnp.swapaxes(values, 1, 2), positions, jnp.broadcast_to(places[:, None], read.shape[:3]),
            scale=spec.scale, window=spec.window, softcap=spec.softcap,
        )  # fmt: skip
        return jnp.swapaxes(context, 1, 2), Heard(query, key, value, sizes)

    model = run.model_of(config, weights)
    hidden, heard = model(tokens, before, attend, sizes=True, scan=True)
    return model.logits(hidden[:, -1]), list(heard)


@held
@functools.partial(jax.jit, static_argnames=("config", "policy", "plan", "dtype"))
def _cut(
    weights, heard: list[Heard], looks: list[Heard] | None, tokens: Int[Array, "1 T"], positions: Int[Array, "1 T"],
    pseudo: Int[Array, "1 N"], ends: Int[Array, "1"], limits: Int[Array, "S L 1"], learned: run.Learned,
    *, config: ModelConfig, policy: Policy, plan: Plan, dtype: Any,
) -> list[run.Layers]:  # fmt: skip
    """What the policy keeps of the prompt in every layer at each of S sizes, `looks` looking on from behind it. What
    does not depend on the size, such as the scores, is computed once."""
    if looks is not None:
        heard = [each.followed(by) for each, by in zip(heard, looks, strict=True)]
    form: Any = None

    def at(limits: Int[Array, "L 1"]) -> list[jax.Array]:
        nonlocal form
        layers, *_ = run.through_block(
            Recorded(run.model_of(config, weights), heard), run.empty_layers(config, policy, 1, dtype), tokens,
            positions, pseudo, jnp.zeros_like(ends), ends, limits, config=config, policy=policy, plan=plan, begins=True,
            scan_layers=True, learned=learned,
        )  # fmt: skip
        layers = run.fitted(layers, learned, config=config, policy=policy) if policy.store.fits else layers
        arrays, form = jax.tree.flatten(layers)
        return arrays

    arrays = jax.vmap(at)(limits)
    return [jax.tree.unflatten(form, [each[size] for each in arrays]) for size in range(len(limits))]


@held
@jax.jit
def _positions(layers: run.Layers) -> list[Int[Array, "B Hk _"]]:
    """The positions that every layer's heads hold."""
    return [view.by_head().positions for view in opened(layers)]


def nothing(config: ModelConfig, dtype: Any) -> list[Heard]:
    """What was heard before the first token."""
    empty = lambda heads, spec: jnp.zeros((1, 0, heads, spec.head_dim), dtype)  # noqa: E731
    return [
        Heard(
            empty(config.num_heads, spec), empty(spec.num_kv_heads, spec), empty(spec.num_kv_heads, spec),
            jnp.zeros((1, 0), jnp.float32),
        )
        for spec in config.specs
    ]  # fmt: skip


@dataclasses.dataclass
class Prompt:
    """One prompt, run once: its tokens, left-padded, with what every layer made of them, and the first new token."""

    params: Params
    ids: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    heard: list[Heard]
    first: int
    looks: dict[bytes, list[Heard]] = dataclasses.field(default_factory=dict)

    @property
    def ends(self) -> np.ndarray:
        """Tokens of the prompt, int32 [1]."""
        return np.array([len(self.ids)], np.int32)

    def looked(self, tokens: Array, places: Array) -> list[Heard]:
        """What tokens behind the prompt make of it; the same ones run once."""
        key = np.asarray(tokens).tobytes() + np.asarray(places).tobytes()
        if key not in self.looks:
            self.looks[key] = _listen(
                self.params.weights, tokens, places, self.heard, jnp.asarray(self.positions), config=self.params.config
            )[1]
        return self.looks[key]


def hear(params: Params, ids: np.ndarray) -> Prompt:
    """The prompt in one block, left-padded to one of few lengths."""
    make_room()
    tokens, positions = left_padded([ids], padded(len(ids)), np.zeros(1, np.int32))
    logits, heard = _listen(
        params.weights, jnp.asarray(tokens), jnp.asarray(positions), nothing(params.config, params.dtype),
        jnp.zeros((1, 0), jnp.int32), config=params.config,
    )  # fmt: skip
    return Prompt(params, ids, tokens, positions, heard, int(jnp.argmax(logits[0])))


@dataclasses.dataclass(frozen=True)
class Kept:
    """A policy at one size: what it keeps of a prompt of so many tokens, the first new one, and the share of its slots
    that its own budget needs."""

    layers: run.Layers
    limits: np.ndarray
    share: float
    tokens: int
    first: int


def keep(prompt: Prompt, sizes: Sequence[Policy], room: int) -> Iterator[Kept]:
    """What one policy keeps at each of its `sizes` (it differs in budget or ratio alone), with slots for `room` tokens
    more. All have the slots that the largest needs in a prompt of this padded length: so few programs are compiled."""
    params, config, length = prompt.params, prompt.params.config, prompt.tokens.shape[1]
    learned = params.learned_for(sizes[0].learns, sizes[0].name)
    none, empty = np.zeros(1, np.int32), np.zeros(config.num_layers, np.int64)

    def shapes(policy: Policy, tokens: int) -> tuple[Plan, np.ndarray]:
        found, _, limits = planned(policy, config, none, empty, np.array([tokens]), room, learned=learned)
        return found, limits

    own = [shapes(policy, len(prompt.ids)) for policy in sizes]
    largest = max(range(len(sizes)), key=lambda at: int(own[at][1].sum(dtype=np.int64)))
    wide = shapes(sizes[largest], min(length, config.max_position - room))[0]
    wide = dataclasses.replace(wide, slots=tuple(map(max, wide.slots, *(each.slots for each, _ in own))))
    wide = dataclasses.replace(wide, reach=max(wide.reach, *(each.reach for each, _ in own)))
    looking = [
        (mine.look, tokens if mine.look else tokens[:, :0])
        for (mine, _), tokens in zip(own, _pseudo(prompt, sizes), strict=True)
    ]
    key = lambda at: (looking[at][0], looking[at][1].tobytes())  # noqa: E731
    for _, alike in itertools.groupby(range(len(sizes)), key):  # those that are looked at by the same tokens
        make_room()
        group = list(alike)
        look, tokens = looking[group[0]]
        behind, places = run.looking_on(
            sizes[largest], look, jnp.asarray(prompt.tokens), jnp.asarray(prompt.positions), jnp.asarray(tokens),
            jnp.asarray(prompt.ends), jnp.asarray(prompt.ends),
        )  # fmt: skip
        some = _cut(
            params.weights, prompt.heard, prompt.looked(behind, places) if behind.shape[1] else None, prompt.tokens,
            prompt.positions, tokens, prompt.ends, np.stack([own[at][1] for at in group]), learned, config=config,
            policy=sizes[largest], plan=dataclasses.replace(wide, look=look), dtype=params.dtype,
        )  # fmt: skip
        check_scores(sizes[largest])
        some.reverse()  # so that each is given away as it is taken
        for at in group:
            mine, limits = own[at]
            yield Kept(some.pop(), limits, sum(mine.slots) / sum(wide.slots), len(prompt.ids), prompt.first)


def _pseudo(prompt: Prompt, sizes: Sequence[Policy]) -> list[np.ndarray]:
    """The tokens `[1, N]` that look from behind the prompt, at each size: of a policy that drafts them, what its own
    first pass goes on with."""
    observe = sizes[0].prefill.observe if sizes[0].prefill is not None else None
    if observe is None:
        return [np.zeros((1, 0), np.int32)] * len(sizes)
    if not observe.drafts:
        whole = PromptBlocks(prompt.tokens.shape[1], 0, prompt.tokens.shape[1])
        return [run.of_block(behind(prompt.params, [prompt.ids], observe, whole), 0)] * len(sizes)
    said = answers(prompt.params, [(prompt, [first_pass(policy) for policy in sizes])], observe.extra, chunk=len(sizes))
    pairs = (one for batch in said for one in batch)
    return [np.array([each.tokens], np.int32) for _, each in sorted(pairs, key=lambda one: one[0])]


def batches(
    asked: Iterable[tuple[Prompt, Sequence[Policy]]], room: int, *, chunk: int
) -> Iterator[tuple[Policy, list[tuple[Place, Kept]]]]:
    """What each policy keeps of its prompt, with its place, in batches of at most `chunk` that decode by the same
    steps, under these steps; with slots for `room` tokens more."""
    waiting: dict[Any, list[tuple[Place, Kept]]] = {}  # by decode steps, and the form of what they keep
    question = -1
    for prompt, policies in asked:
        question += 1
        alike: dict[Policy, dict[Policy, list[int]]] = {}  # by decode steps, then by all but the size
        for number, policy in enumerate(policies):
            unsized = dataclasses.replace(policy.sized, budget=None, ratio=None)
            alike.setdefault(policy.decoding, {}).setdefault(unsized, []).append(number)
        for steps, numbers in ((steps, numbers) for steps, methods in alike.items() for numbers in methods.values()):
            for number, kept in zip(numbers, keep(prompt, [policies[at] for at in numbers], room), strict=True):
                kept = dataclasses.replace(kept, layers=tuple(layer.keeping(steps.stats) for layer in kept.layers))
                form = (steps, jax.tree.structure(kept.layers), *map(jax.typeof, jax.tree.leaves(kept.layers)))
                waiting.setdefault(form, []).append(((question, number), kept))
                del kept  # what waits is the only one
                if len(waiting[form]) == chunk:
                    yield steps, waiting.pop(form)
        del prompt  # it is not in memory while the next one is heard
    for steps, *rest in list(waiting):
        yield steps, waiting.pop((steps, *rest))


def answers(
    params: Params,
    asked: Iterable[tuple[Prompt, Sequence[Policy]]],
    count: int,
    *,
    chunk: int,
    enough: Enough = lambda *_: False,
) -> Iterator[list[tuple[Place, Said]]]:
    """(place, what it leads to) for each policy asked of each prompt, up to `count` greedy tokens, in batches of at
    most `chunk`; one ends where all its answers are long `enough`."""
    for steps, some in batches(asked, count, chunk=chunk):
        yield _said(params, steps, some, count, enough)


def followed(
    params: Params,
    asked: Iterable[tuple[Prompt, Sequence[Policy]]],
    continuations: Int[np.ndarray, "B N"],
    *,
    chunk: int,
) -> Iterator[tuple[list[Place], list[list[np.ndarray]], Float[Array, "R N V"]]]:
    """For each policy asked of each prompt its place, the positions that every layer's heads hold of the prompt
    `[Hk, C]`, and the logits after every token of the prompt's continuation, which is forced through decode; in batches
    of at most `chunk`."""
    for steps, some in batches(asked, continuations.shape[1], chunk=chunk):
        places = [place for place, _ in some]
        cache = _together(params, steps, some, [EMPTY] * len(some))
        views = list(map(np.asarray, _positions(cache.layers)))
        held_by = [[view[row] for view in views] for row in range(len(places))]
        _, logits = follow(params, cache, continuations[[question for question, _ in places]])
        assert logits is not None
        yield places, held_by, logits


def _together(params: Params, steps: Policy, some: list[tuple[Place, Kept]], pending: Sequence[int]) -> KVCache:
    """One cache whose rows are what these policies keep, with the tokens that wait to be run (-1: none). `some` is
    emptied: each is in memory once."""
    lengths = [kept.tokens for _, kept in some]
    layers = jax.tree.map(lambda *each: jnp.concatenate(each), *(kept.layers for _, kept in some))
    limits = jnp.asarray(np.concatenate([kept.limits for _, kept in some], axis=1))
    some.clear()
    return KVCache(
        layers=narrowed(layers),
        lengths=jnp.asarray(lengths, jnp.int32),
        limits=limits,
        pending=jnp.asarray(pending, jnp.int32),
        policy=steps,
        model=params.fingerprint,
    )


def _said(
    params: Params, steps: Policy, some: list[tuple[Place, Kept]], count: int, enough: Enough
) -> list[tuple[Place, Said]]:
    """The answers of one batch, decoded under the steps that its policies share. Rows that repeat the last one fill it
    up to a power of two, so that few programs are compiled."""
    shares = [(place, kept.share) for place, kept in some]
    some += some[-1:] * ((1 << (len(some) - 1).bit_length()) - len(some))
    first = [kept.first for _, kept in some]
    tokens, rows = [[each] for each in first], len(some)
    cache = _together(params, steps, some, first)

    def ended() -> bool:
        return all(enough(place, so_far) for (place, _), so_far in zip(shares, tokens, strict=False))

    while len(tokens[0]) < count and not ended():
        out = generate(params, None, cache=cache, max_new_tokens=min(PIECE, count - len(tokens[0])), stop_tokens=())
        tokens = [[*before, *new] for before, new in zip(tokens, out.tokens.tolist(), strict=True)]
        cache = out.cache
    held_by = np.asarray(cache.held()).mean(axis=(0, 2))
    return [
        (place, Said(tokens[row], float(held_by[row]), int(cache.nbytes / rows * share)))
        for row, (place, share) in enumerate(shares)
    ]
