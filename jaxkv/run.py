"""The compiled programs: prefill in blocks, and decode as a scan of one step.

Everything here is pure and jitted with static config, policy and plan; `generate.py` calls these from the host.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxkv import cache as slots_of
from jaxkv.attend import LayerState, decode_layer, prefill_layer
from jaxkv.cache import EMPTY, KVCache, LayerCache
from jaxkv.models import Decoder, ModelConfig, graphdef
from jaxkv.plan import Plan
from jaxkv.policies.policy import Policy
from jaxkv.sampling import Sampler

Layers = tuple[LayerCache, ...]


def _model(config: ModelConfig, weights) -> Decoder:
    return nnx.merge(graphdef(config), weights)


def empty_layers(config: ModelConfig, policy: Policy, batch: int, dtype) -> Layers:
    """Layers without a slot, where a prompt begins."""
    specs = [config.attention_spec(layer) for layer in range(config.num_layers)]
    return tuple(slots_of.empty(batch, s.num_kv_heads, 0, s.head_dim, dtype, policy.stats) for s in specs)


@functools.partial(jax.jit, static_argnames=("config", "policy", "plan", "implementation", "progress"))
def prefill(
    weights,
    layers: Layers,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    pseudo: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    limits: Int[Array, "L B"],
    *,
    config: ModelConfig,
    policy: Policy,
    plan: Plan,
    implementation: str | None = None,
    progress=None,
) -> tuple[Layers, Float[Array, "B V"]]:
    """Run the left-padded prompt (padding at position -1) in blocks; the layers it leaves and the last logits.

    `lengths [B]` tokens were seen before. The pseudo tokens run behind every block, at the positions that the first
    decoded tokens will have.
    """
    model = _model(config, weights)
    end = lengths + jnp.sum(positions >= 0, axis=-1, dtype=jnp.int32)
    ahead = end[:, None] + jnp.arange(pseudo.shape[1], dtype=jnp.int32)

    def block(layers: Layers, tokens, positions):
        now = jnp.where(positions[:, -1] < 0, lengths, positions[:, -1] + 1)  # a row of padding has not begun
        attend = functools.partial(
            prefill_layer, policy, jnp.concatenate([positions, ahead], axis=1), now, implementation
        )
        states = [LayerState(layer, plan.slots[i], limits[i], plan.look) for i, layer in enumerate(layers)]
        everything = jnp.concatenate([tokens, pseudo], axis=1)
        hidden, states = model(everything, states, attend, only=tokens.shape[1] - 1)
        return tuple(state.cache for state in states), hidden[:, 0]

    layers, hidden = block(layers, tokens[:, : plan.first], positions[:, : plan.first])

    def more(carry, turn):
        layers, _ = carry
        number, tokens, positions = turn
        if progress is not None:
            jax.debug.callback(functools.partial(progress, "prefill"), number, plan.blocks + 1)
        return block(layers, tokens, positions), None

    if plan.blocks:
        rest = [
            jnp.moveaxis(x[:, plan.first :].reshape(-1, plan.blocks, plan.block), 1, 0) for x in (tokens, positions)
        ]
        (layers, hidden), _ = lax.scan(more, (layers, hidden), (jnp.arange(1, plan.blocks + 1), *rest))
    return layers, model.logits(hidden)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """What a decode step takes and gives back, donated: the cache (with the token to run as `pending`), which rows
    have finished, how many tokens each may still get, the tokens seen (for the repetition penalty) and random keys.
    """

    cache: KVCache
    done: Bool[Array, "B"]
    left: Int[Array, "B"]
    seen: Bool[Array, "B V"] | None
    keys: Key[Array, "B"]


def emit(
    sampler: Sampler, stop: tuple[int, ...], state: DecodeState, logits: Float[Array, "B V"]
) -> tuple[DecodeState, Int[Array, "B"]]:
    """Sample each running row's next token into `pending`; finished rows give -1."""
    running = ~state.done & (state.left > 0)
    token = sampler.sample(logits, state.seen, state.keys, state.cache.lengths)
    seen = state.seen
    if seen is not None:
        rows = jnp.arange(token.shape[0])
        seen = seen.at[rows, token].set(seen[rows, token] | running)
    ended = jnp.isin(token, jnp.array(stop, jnp.int32)) if stop else jnp.zeros_like(state.done)
    pending = jnp.where(running, token, state.cache.pending)
    left = state.left - running.astype(jnp.int32)
    state = dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, pending=pending),
        done=state.done | (running & ended),
        left=left,
        seen=seen,
    )
    return state, jnp.where(running, token, EMPTY)


def decode_logits(
    weights,
    cache: KVCache,
    running: Bool[Array, "B"],
    config: ModelConfig,
    policy: Policy,
    implementation: str | None = None,
) -> tuple[KVCache, Float[Array, "B V"]]:
    """Run each running row's pending token through the model; the cache, and the logits of the token after it."""
    position = jnp.where(running, cache.lengths, EMPTY)
    attend = functools.partial(decode_layer, policy, position, implementation)
    states = [LayerState(layer, layer.slots, cache.limits[i]) for i, layer in enumerate(cache.layers)]
    model = _model(config, weights)
    hidden, states = model(jnp.maximum(cache.pending, 0)[:, None], states, attend)
    cache = dataclasses.replace(
        cache,
        layers=tuple(each.cache for each in states),
        lengths=cache.lengths + running.astype(jnp.int32),
    )
    return cache, model.logits(hidden[:, 0])


def decode_step(
    weights,
    state: DecodeState,
    config: ModelConfig,
    policy: Policy,
    sampler: Sampler,
    stop: tuple[int, ...],
    implementation: str | None = None,
) -> tuple[DecodeState, Int[Array, "B"]]:
    """Run each running row's pending token through the model and sample the next; -1 for rows that have finished."""
    running = ~state.done & (state.left > 0)
    cache, logits = decode_logits(weights, state.cache, running, config, policy, implementation)
    return emit(sampler, stop, dataclasses.replace(state, cache=cache), logits)


@functools.partial(
    jax.jit, static_argnames=("steps", "config", "policy", "sampler", "stop", "implementation"), donate_argnames="state"
)
def decode(
    weights,
    state: DecodeState,
    *,
    steps: int,
    config: ModelConfig,
    policy: Policy,
    sampler: Sampler,
    stop: tuple[int, ...],
    implementation: str | None = None,
) -> tuple[DecodeState, Int[Array, "B steps"]]:
    """`steps` decode steps as one scan; the state is donated."""

    def step(state: DecodeState, _):
        return decode_step(weights, state, config, policy, sampler, stop, implementation)

    state, tokens = lax.scan(step, state, length=steps)
    return state, tokens.T


first_token = jax.jit(emit, static_argnums=(0, 1))
