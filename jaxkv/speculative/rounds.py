"""The compiled loop of speculative decoding: draft a tree, run it in one pass, keep what the model would have said."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attend import LayerIn
from jaxkv.models import ModelConfig
from jaxkv.policies.policy import Policy
from jaxkv.programs import held
from jaxkv.run import DecodeState, decode_facts, decode_logits, emit, model_of
from jaxkv.sampling import RowSampler, Sampler
from jaxkv.sharding.layout import ONE_DEVICE, Layout
from jaxkv.speculative import gate as gates
from jaxkv.speculative.attend import commit, steady, tree_layer
from jaxkv.speculative.gate import Gate
from jaxkv.speculative.tree import placed, pruned, walk
from jaxkv.speculative.verify import Verify, follows, seen_by
from jaxkv.store import EMPTY

Tell = Callable[[Float[Array, "B N V"], Int[Array, "B levels"], Int[Array, "B levels"]], Any]
Stop = tuple[int, ...] | Int[Array, "B S"]  # tokens that end a row: of all rows, or each one's own, filled up with -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """What happened in a chunk: `trees` and `steps` are passes of the model over the batch, the others rows' sums.

    `passes` are those of running rows, which got `tokens`; `verified` of them had a draft, and `gained` tokens from
    it; `departed` tokens are not those of exact verification.
    """

    trees: Int[Array, ""]
    steps: Int[Array, ""]
    passes: Int[Array, ""]
    tokens: Int[Array, ""]
    verified: Int[Array, ""]
    gained: Int[Array, ""]
    departed: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafting:
    """The drafter's own state, the gate, and the counts; donated like the decode state beside it."""

    drafts: Any
    gate: Gate


@held
@functools.partial(
    jax.jit,
    static_argnames=(
        "rounds",
        "drafter",
        "config",
        "policy",
        "sampler",
        "stop",
        "verify",
        "fallback",
        "layout",
        "implementation",
    ),
    donate_argnames=("state", "drafting"),
)
def speculate(
    weights,
    extra,
    state: DecodeState,
    drafting: Drafting,
    *,
    rounds: int,
    drafter: Any,
    config: ModelConfig,
    policy: Policy,
    sampler: Sampler,
    stop: tuple[int, ...],
    verify: Verify,
    fallback: bool,
    most: Int[Array, "B"],
    layout: Layout = ONE_DEVICE,
    implementation: str | None = None,
) -> tuple[DecodeState, Drafting, Int[Array, "B n"], Counts]:
    """At most `rounds` passes of the model, ending early when every row has; new tokens with EMPTY in between.

    A round runs a tree where drafts are expected to pay (always, without `fallback`), else one plain step. `extra`
    are arrays that the drafter needs and nobody changes. A row ends with its `most`-th token of these rounds, which
    changes no token before it: drafts are as deep as without.
    """
    nothing = jnp.full((rounds * (drafter.shape.depth + 1), state.done.shape[0]), EMPTY, jnp.int32)
    state, drafting, out, counts = passes(
        weights, extra, state, drafting, nothing, on=lambda counts: counts.trees + counts.steps < rounds,
        tell=lambda logits, nodes, tokens: tokens.T, drafter=drafter, config=config, policy=policy, sampler=sampler,
        stop=stop, verify=verify, fallback=fallback, most=most, layout=layout, implementation=implementation,
    )  # fmt: skip
    return state, drafting, layout.constrain(out.T), jax.tree.map(layout.constrain, counts)


def passes(
    weights,
    extra,
    state: DecodeState,
    drafting: Drafting,
    nothing: Any,
    *,
    on: Callable[[Counts], Bool[Array, ""]],
    tell: Tell,
    drafter: Any,
    config: ModelConfig,
    policy: Policy,
    sampler: Sampler | RowSampler,
    stop: Stop,
    verify: Verify,
    fallback: bool,
    most: Int[Array, "B"] | None = None,
    layout: Layout = ONE_DEVICE,
    implementation: str | None = None,
) -> tuple[DecodeState, Drafting, Any, Counts]:
    """The loop of `speculate` while it is to go `on`, inside a compiled program; what each pass had to `tell`.

    `tell(logits, nodes, tokens)` gives arrays `[levels, B, ...]` of a pass: `tokens[b, d]` (EMPTY: none) was drawn
    from the logits of node `nodes[b, d]`. They fill `nothing` from the front, arrays `[passes * levels, B, ...]`.
    """
    levels = drafter.shape.depth + 1

    def laid(state, drafting):
        gate = jax.tree.map(layout.constrain, drafting.gate)
        return layout.state(state), Drafting(drafter.laid(layout, drafting.drafts), gate)

    def going(carry):
        state, _, _, counts, _ = carry
        return on(counts) & layout.constrain(jnp.any(state.going))

    def body(carry):
        state, drafting, told, counts, most = carry
        active = state.going
        kinds, hint = drafter.look(drafting.drafts)
        kinds = jnp.where(active, kinds, 0)
        worth = jnp.any(kinds > 0)
        if fallback:
            worth &= gates.pays(drafting.gate, kinds, active)

        def tree(state, drafting, counts):
            return _tree_round(
                weights, extra, state, drafting, counts, kinds, hint, drafter, config, policy, sampler, stop, verify,
                tell, most, layout, implementation,
            )  # fmt: skip

        def plain(state, drafting, counts):
            cache, logits = decode_logits(weights, state.cache, active, config, policy, layout, implementation)
            state, token = emit(sampler, stop, dataclasses.replace(state, cache=cache), logits)
            tokens = jnp.pad(token[:, None], ((0, 0), (0, levels - 1)), constant_values=EMPTY)
            drafting = Drafting(drafter.passed(drafting.drafts, tokens), gates.waited(drafting.gate, kinds, active))
            new = tokens, tell(logits[:, None], jnp.zeros_like(tokens), tokens)
            return state, drafting, dataclasses.replace(counts, steps=counts.steps + 1), new

        at = (counts.trees + counts.steps) * levels
        state, drafting, counts, (tokens, new) = lax.cond(worth, tree, plain, state, drafting, counts)
        if most is not None:
            most = most - jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)
            state = dataclasses.replace(state, done=state.done | (most <= 0))
        counts = dataclasses.replace(
            counts,
            passes=counts.passes + jnp.sum(active, dtype=jnp.int32),
            tokens=counts.tokens + jnp.sum(tokens >= 0, dtype=jnp.int32),
        )
        told = jax.tree.map(lambda every, one: lax.dynamic_update_slice_in_dim(every, one, at, 0), told, new)
        return *laid(state, drafting), told, counts, most

    zero = jnp.int32(0)
    start = state, drafting, nothing, Counts(*[zero] * 7), most
    state, drafting, told, counts, _ = lax.while_loop(going, body, start)
    return *laid(state, drafting), told, counts


def _tree_round(
    weights, extra, state, drafting, counts, kinds, hint, drafter, config, policy, sampler, stop, verify, tell,
    most, layout, implementation,
) -> tuple[DecodeState, Drafting, Counts, tuple[Int[Array, "B levels"], Any]]:  # fmt: skip
    """Draft, verify in one pass, and write what was accepted as if it had come token by token; the tokens, and what
    there is to tell of them."""
    active = state.going
    shape, cache = drafter.shape, state.cache
    tree, chances, drafts = drafter.draft(extra, drafting.drafts, kinds, hint, state, sampler)
    left = steady(policy, cache.lengths, state.left)
    tree = pruned(shape, tree, jnp.where(active, left, 0))
    spot = placed(shape, tree, jnp.where(active, cache.lengths, EMPTY))
    model = model_of(config, weights)
    states = [LayerIn(layer, cache.limits[i], decode_facts(model, policy, i)) for i, layer in enumerate(cache.layers)]
    attend: Any = functools.partial(tree_layer, policy, spot, layout, implementation)  # a layer's state to its branches
    hidden, grown = model(jnp.maximum(tree.tokens, 0), states, attend, layout.lay)
    branches: Any = grown
    logits = layout.constrain(model.logits(hidden))

    seen = None if state.seen is None else seen_by(shape, tree, spot.paths, state.seen)
    at = cache.lengths[:, None] + 1 + shape.depths
    token, departs = follows(shape, tree, logits, sampler, verify, seen, state.keys, at, chances)
    nodes, tokens = walk(shape, tree, token)
    state, tokens, count = _taken(stop, state, tokens, most)
    first = cache.lengths
    layers = tuple(
        commit(layer, branch, nodes, count, first) for layer, branch in zip(cache.layers, branches, strict=True)
    )
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=layers))

    drafted = active & (tree.tokens[:, 1:] >= 0).any(axis=1)
    departed = jnp.take_along_axis(departs, jnp.maximum(nodes, 0), axis=1) & (tokens >= 0)
    counts = dataclasses.replace(
        counts,
        trees=counts.trees + 1,
        verified=counts.verified + jnp.sum(drafted, dtype=jnp.int32),
        gained=counts.gained + jnp.sum(jnp.where(drafted, count, 0), dtype=jnp.int32),
        departed=counts.departed + jnp.sum(departed, dtype=jnp.int32),
    )
    gate = gates.learned(drafting.gate, kinds, count - 1, drafted)
    drafting = Drafting(drafter.settle(extra, drafts, tokens), gate)
    return state, drafting, counts, (tokens, tell(logits, jnp.maximum(nodes, 0), tokens))


def _taken(
    stop: Stop, state: DecodeState, tokens: Int[Array, "B n"], most: Int[Array, "B"] | None
) -> tuple[DecodeState, Int[Array, "B n"], Int[Array, "B"]]:
    """The state after each running row took its tokens up to the first stop token, what it has left, and its `most`.

    Gives the tokens taken (EMPTY behind them) and how many; the last is pending, so that many nodes go into the cache.
    """
    cache = state.cache
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    of_row = jnp.atleast_2d(jnp.asarray(stop, jnp.int32))[:, None]
    ends = jnp.any(tokens[..., None] == of_row, axis=-1) & (tokens >= 0)
    before = jnp.cumsum(ends, axis=1, dtype=jnp.int32) - ends.astype(jnp.int32)  # stop tokens in front of this one
    left = state.left if most is None else jnp.minimum(state.left, most)
    kept = (tokens >= 0) & (before == 0) & (steps < left[:, None]) & state.going[:, None]
    count = jnp.sum(kept, axis=1, dtype=jnp.int32)
    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    seen = state.seen
    if seen is not None:
        rows = jnp.arange(tokens.shape[0])[:, None]
        seen = seen.at[rows, jnp.where(kept, tokens, seen.shape[1])].set(True, mode="drop")
    cache = dataclasses.replace(cache, lengths=cache.lengths + count, pending=jnp.where(count > 0, last, cache.pending))
    state = dataclasses.replace(
        state, cache=cache, done=state.done | jnp.any(kept & ends, axis=1), left=state.left - count, seen=seen
    )
    return state, jnp.where(kept, tokens, EMPTY), count
