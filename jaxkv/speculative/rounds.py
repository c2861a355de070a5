"""The compiled loop of speculative decoding: draft a tree, run it in one pass, keep what the model would have said."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxkv.attend import LayerIn
from jaxkv.models import ModelConfig
from jaxkv.policies.policy import Policy
from jaxkv.programs import held
from jaxkv.run import DecodeState, decode_step, model_of
from jaxkv.sampling import Sampler
from jaxkv.speculative import gate as gates
from jaxkv.speculative.attend import commit, tree_layer
from jaxkv.speculative.gate import Gate
from jaxkv.speculative.tree import placed, pruned, walk
from jaxkv.speculative.verify import Verify, follows, seen_by
from jaxkv.store import EMPTY


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
    implementation: str | None = None,
) -> tuple[DecodeState, Drafting, Int[Array, "B n"], Counts]:
    """At most `rounds` passes of the model, ending early when every row has; new tokens with EMPTY in between.

    A round runs a tree where drafts are expected to pay (always, without `fallback`), else one plain step. `extra`
    are arrays that the drafter needs and nobody changes.
    """
    levels = drafter.shape.depth + 1
    out = jnp.full((state.done.shape[0], rounds * levels), EMPTY, jnp.int32)

    def going(carry):
        turn, state, *_ = carry
        return (turn < rounds) & jnp.any(state.going)

    def body(carry):
        turn, state, drafting, out, counts = carry
        active = state.going
        kinds, hint = drafter.look(drafting.drafts)
        kinds = jnp.where(active, kinds, 0)
        worth = jnp.any(kinds > 0)
        if fallback:
            worth &= gates.pays(drafting.gate, kinds, active)

        def tree(state, drafting, counts):
            return _tree_round(
                weights, extra, state, drafting, counts, kinds, hint, drafter, config, policy, sampler, stop, verify
            )

        def plain(state, drafting, counts):
            state, token = decode_step(weights, state, config, policy, sampler, stop, implementation=implementation)
            token = jnp.pad(token[:, None], ((0, 0), (0, levels - 1)), constant_values=EMPTY)
            drafts = drafter.passed(drafting.drafts, token)
            gate = gates.waited(drafting.gate, kinds, active)
            return state, Drafting(drafts, gate), dataclasses.replace(counts, steps=counts.steps + 1), token

        state, drafting, counts, new = lax.cond(worth, tree, plain, state, drafting, counts)
        counts = dataclasses.replace(
            counts,
            passes=counts.passes + jnp.sum(active, dtype=jnp.int32),
            tokens=counts.tokens + jnp.sum(new >= 0, dtype=jnp.int32),
        )
        out = lax.dynamic_update_slice(out, new, (jnp.int32(0), turn * levels))
        return turn + 1, state, drafting, out, counts

    zero = jnp.int32(0)
    start = (zero, state, drafting, out, Counts(*[zero] * 7))
    _, state, drafting, out, counts = lax.while_loop(going, body, start)
    return state, drafting, out, counts


def _tree_round(
    weights, extra, state, drafting, counts, kinds, hint, drafter, config, policy, sampler, stop, verify
) -> tuple[DecodeState, Drafting, Counts, Int[Array, "B levels"]]:
    """Draft, verify in one pass, and write what was accepted as if it had come token by token."""
    active = state.going
    shape, cache = drafter.shape, state.cache
    tree, chances, drafts = drafter.draft(extra, drafting.drafts, kinds, hint, state, sampler)
    tree = pruned(shape, tree, jnp.where(active, state.left, 0))
    spot = placed(shape, tree, jnp.where(active, cache.lengths, EMPTY))
    states = [LayerIn(layer, cache.limits[i]) for i, layer in enumerate(cache.layers)]
    model = model_of(config, weights)
    attend: Any = functools.partial(tree_layer, policy, spot)  # takes a layer's state, gives its branches
    hidden, grown = model(jnp.maximum(tree.tokens, 0), states, attend)
    branches: Any = grown
    logits = model.logits(hidden)

    seen = None if state.seen is None else seen_by(shape, tree, spot.paths, state.seen)
    at = cache.lengths[:, None] + 1 + shape.depths
    token, departs = follows(shape, tree, logits, sampler, verify, seen, state.keys, at, chances)
    nodes, tokens = walk(shape, tree, token)
    state, tokens, count = _taken(stop, state, tokens)
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
    return state, Drafting(drafter.settle(extra, drafts, tokens), gate), counts, tokens


def _taken(
    stop: tuple[int, ...], state: DecodeState, tokens: Int[Array, "B n"]
) -> tuple[DecodeState, Int[Array, "B n"], Int[Array, "B"]]:
    """The state after each running row took its tokens up to the first stop token and to what it has left.

    Gives the tokens taken (EMPTY behind them) and how many; the last is pending, so that many nodes go into the cache.
    """
    cache = state.cache
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    ends = jnp.isin(tokens, jnp.array(stop, jnp.int32)) if stop else jnp.zeros(tokens.shape, bool)
    before = jnp.cumsum(ends, axis=1, dtype=jnp.int32) - ends.astype(jnp.int32)  # stop tokens in front of this one
    kept = (tokens >= 0) & (before == 0) & (steps < state.left[:, None]) & state.going[:, None]
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
