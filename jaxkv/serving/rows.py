"""What runs on the device: rows of one batch, each with a request of its own, and the four programs on them.

A row is a function of its own leaves alone. What requests differ in is data, so no program is compiled for a request.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxkv.models import ModelConfig
from jaxkv.policies.policy import NOTHING, Learned, Policy
from jaxkv.run import DecodeState, Expected, Layers, decode_logits, emit
from jaxkv.sampling import RowSampler, key_of
from jaxkv.serving.drafts import Drafts
from jaxkv.sharding.layout import ONE_DEVICE, Layout
from jaxkv.speculative.gate import Gate
from jaxkv.speculative.rounds import Counts, Drafting, passes
from jaxkv.store import EMPTY, KVCache
from jaxkv.store.line import held_by


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The state of decoding, and what each row's request asked for: how tokens are drawn, the tokens that end it
    (filled up with -1), and whether log-probabilities are wanted; and what it drafts from, where rows draft.
    """

    state: DecodeState
    sampler: RowSampler
    stop: Int[Array, "B S"]
    told: Bool[Array, "B"]
    drafts: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Told:
    """A step's token of each row (-1: none), its log-probability by the model's own logits, and the likeliest K."""

    token: Int[Array, "*R B"]
    chance: Float[Array, "*R B"]
    best: Int[Array, "*R B K"]
    chances: Float[Array, "*R B K"]


def told(
    logits: Float[Array, "B *N V"],
    token: Int[Array, "B *M"],
    wanted: Bool[Array, "B"],
    count: int,
    nodes: Int[Array, "B M"] | None = None,
) -> Told:
    """The log-probabilities of the tokens and of the `count` likeliest; zeros where no row wants them.

    With `nodes` each row has several tokens, and which of its logits each of them was drawn from.
    """
    shape = (*token.shape, count)

    def all_rows() -> tuple[jax.Array, jax.Array, jax.Array]:
        of = logits if nodes is None else jnp.take_along_axis(logits, nodes[..., None], axis=1)
        total = jax.nn.logsumexp(of, axis=-1, keepdims=True)
        own = jnp.take_along_axis(of, jnp.maximum(token, 0)[..., None], axis=-1)
        chances, best = lax.top_k(of, count)
        return (own - total)[..., 0], best.astype(jnp.int32), chances - total

    def nothing() -> tuple[jax.Array, jax.Array, jax.Array]:
        return jnp.zeros(shape[:-1], logits.dtype), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, logits.dtype)

    return Told(token, *lax.cond(jnp.any(wanted), all_rows, nothing))


def begin(
    logits: Float[Array, "1 V"],
    cache: KVCache,
    left: Int[Array, "1"],
    seen: Bool[Array, "1 V"],
    seed: UInt32[Array, "2"],
    number: Int[Array, ""],
    sampler: RowSampler,
    stop: Int[Array, "1 S"],
    wanted: Bool[Array, "1"],
    text: Any = None,
    *,
    count: int,
    drafts: Drafts | None = None,
    layout: Layout = ONE_DEVICE,
) -> tuple[Rows, Told]:
    """A row behind its prompt, whose first token has been drawn; `cache` comes and goes without its layers. Where rows
    draft, `text` is what it drafts from, before that token.

    `number` tells samples of one prompt apart, as `draws_of` does.
    """
    keys = jax.random.fold_in(key_of(seed), number)[None]
    state, token = emit(sampler, stop, DecodeState(cache, left <= 0, left, seen, keys), logits)
    text = text if drafts is None else drafts.drafter.passed(text, token[:, None])
    row = Rows(state, sampler, stop, wanted, text), told(logits, token, wanted, count)
    return jax.tree.map(layout.constrain, row)


def insert(rows: Rows, row: Rows, at: Int[Array, ""], *, layout: Layout = ONE_DEVICE) -> Rows:
    """The rows, which are donated, with one row, a batch of its own, at place `at`; no other row is touched."""
    return laid(put(rows, row, at), layout)


def put(rows: Rows, some: Rows, at: int | Int[Array, ""]) -> Rows:
    """The rows with some others in the places from `at` on."""
    into = lambda every, few: lax.dynamic_update_slice_in_dim(every, few, at, 0)  # noqa: E731
    return by_row(jax.tree.map(into, by_row(rows), by_row(some)))


def first(rows: Rows, many: int) -> Rows:
    """The first so many of the rows."""
    return by_row(jax.tree.map(lambda every: every[:many], by_row(rows)))


def by_row(rows: Rows) -> Rows:
    """Every array begins with the row: limits, `[L, B]`, are turned to `[B, L]`; and its own inverse."""
    cache = dataclasses.replace(rows.state.cache, limits=rows.state.cache.limits.T)
    return dataclasses.replace(rows, state=dataclasses.replace(rows.state, cache=cache))


def laid(rows: Rows, layout: Layout) -> Rows:
    """The rows with their caches divided over the layout's devices, and all else everywhere, inside a program."""
    rest = jax.tree.map(layout.constrain, dataclasses.replace(rows, state=None))
    return dataclasses.replace(rest, state=layout.state(rows.state))


def chunk(
    weights: Any,
    rows: Rows,
    steps: Int[Array, ""],
    ended: Bool[Array, "B"],
    *,
    many: int,
    room: int,
    count: int,
    config: ModelConfig,
    policy: Policy,
    layout: Layout = ONE_DEVICE,
    implementation: str | None = None,
    learned: Learned = NOTHING,
) -> tuple[Rows, Told, Float[Array, "N"]]:
    """At most `steps` decode steps (up to `room`) of the first `many` rows, N, fewer when all of them have ended; all
    rows are donated.

    `ended` rows have been ended by the host. Gives what was told `[room, N]`, and the tokens that each row holds.
    """
    every_row, rows, ended = rows, rows if many == len(ended) else first(rows, many), ended[:many]

    def going(carry: Any) -> Bool[Array, ""]:
        step, state, _ = carry
        return (step < steps) & jnp.any(state.going)

    def body(carry: Any) -> Any:
        step, state, every = carry
        cache, logits = decode_logits(
            weights, state.cache, state.going, config, policy, layout, implementation, learned
        )
        state, token = emit(rows.sampler, rows.stop, dataclasses.replace(state, cache=cache), logits)
        one = told(logits, token, rows.told, count)
        every = jax.tree.map(lambda all, new: lax.dynamic_update_index_in_dim(all, new, step, 0), every, one)
        return step + 1, layout.state(state), jax.tree.map(layout.constrain, every)

    state, nothing = dataclasses.replace(rows.state, done=rows.state.done | ended), untold(room, many, count)
    _, state, every = lax.while_loop(going, body, (jnp.int32(0), state, nothing))
    rows = dataclasses.replace(rows, state=state)
    rows = laid(rows if len(every_row.told) == many else put(every_row, rows, 0), layout)
    return rows, jax.tree.map(layout.constrain, every), kept(state.cache.layers, layout=layout)


def untold(room: int, batch: int, count: int) -> Told:
    """So many steps that have told nothing."""
    dtype = jnp.float32
    return Told(
        jnp.full((room, batch), EMPTY, jnp.int32), jnp.zeros((room, batch), dtype),
        jnp.zeros((room, batch, count), jnp.int32), jnp.zeros((room, batch, count), dtype),
    )  # fmt: skip


def rounds(
    weights: Any,
    rows: Rows,
    gate: Gate,
    cost: Float[Array, ""],
    steps: Int[Array, ""],
    ended: Bool[Array, "B"],
    *,
    room: int,
    count: int,
    drafts: Drafts,
    config: ModelConfig,
    policy: Policy,
    layout: Layout = ONE_DEVICE,
    implementation: str | None = None,
) -> tuple[Rows, Told, Float[Array, "B"], Gate, Counts]:
    """As `chunk`, for rows that draft: passes of the model that take about as long as `steps` plain ones (at least one
    pass, at most `room`), a pass over trees being `cost` of them.

    What was told has `levels` places for each pass, `[room * levels, B]`, with -1 where a row has no token.
    """
    most, batch = room * drafts.levels, ended.shape[0]

    def on(counts: Counts) -> Bool[Array, ""]:
        spent = counts.steps.astype(jnp.float32) + counts.trees.astype(jnp.float32) * cost
        return (spent < steps.astype(jnp.float32)) & (counts.steps + counts.trees < room)

    def tell(logits: jax.Array, nodes: jax.Array, tokens: jax.Array) -> Told:
        of_rows = told(logits, tokens, rows.told, count, nodes)
        return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), of_rows)

    state = dataclasses.replace(rows.state, done=rows.state.done | ended)
    begun = Drafting(drafts.drafter.roomy(rows.drafts, most), dataclasses.replace(gate, cost=cost))
    state, drafting, every, counts = passes(
        weights, None, state, begun, untold(most, batch, count), on=on, tell=tell, drafter=drafts.drafter,
        config=config, policy=policy, sampler=rows.sampler, stop=rows.stop, verify=drafts.verify,
        fallback=drafts.fallback, layout=layout, implementation=implementation,
    )  # fmt: skip
    rows = laid(dataclasses.replace(rows, state=state, drafts=drafting.drafts), layout)
    every, counts = jax.tree.map(layout.constrain, (every, counts))
    return rows, every, kept(state.cache.layers, layout=layout), drafting.gate, counts


def expecting(
    text: Any, positions: Int[Array, "1 T"], expected: Expected, *, drafts: Drafts, layout: Layout = ONE_DEVICE
) -> Any:
    """What a row drafts from, with what the model held likely after each token of a block of its prompt."""
    top, chance = expected
    text = drafts.drafter.expecting(text, (jnp.where(positions[..., None] < 0, EMPTY, top), chance))
    return drafts.drafter.laid(layout, text)


def kept(layers: Layers, *, layout: Layout = ONE_DEVICE) -> Float[Array, "B"]:
    """Tokens that each row holds, on average over layers and KV heads."""
    return layout.constrain(jnp.mean(held_by(layers).astype(jnp.float32), axis=(0, 2)))
