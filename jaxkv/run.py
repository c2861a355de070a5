"""The compiled programs: prefill in blocks, and decode as a scan of one step.

Everything here is pure and jitted with static config, policy and plan; `generate.py` calls these from the host.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxkv import attend_model, model_pool, pool
from jaxkv import cache as slots_of
from jaxkv.attend import LayerState, decode_layer, prefill_layer
from jaxkv.cache import EMPTY, KVCache
from jaxkv.models import Decoder, ModelConfig, graphdef
from jaxkv.plan import Plan
from jaxkv.policies.across import Across
from jaxkv.policies.needs import HIDDEN, OUTPUT
from jaxkv.policies.observe import Replay
from jaxkv.policies.policy import NOTHING, Learned, Policy
from jaxkv.pool import Pool
from jaxkv.sampling import Sampler
from jaxkv.sharding.layout import ONE_DEVICE, Layout

Layers = tuple[Any, ...]  # of LayerCache, Pool or Share
Expected = tuple[Int[Array, "B T K"], Float[Array, "B T K"]]  # the likeliest next tokens and their probabilities
HEAD_ROWS = 256  # hidden states whose logits are computed together, where every position's are asked for


def model_of(config: ModelConfig, weights) -> Decoder:
    """The model with its weights in place."""
    return nnx.merge(graphdef(config), weights)


def _of_layer(learned: Learned, layer: int) -> dict[str, Array]:
    return {name: value[layer] for name, value in learned.items()}


def _in_time_order(layer: Any, layout: Layout) -> Any:
    return (pool if isinstance(layer, Pool) else slots_of).in_time_order(layout.gathered(layer))


def empty_layers(config: ModelConfig, policy: Policy, batch: int, dtype) -> Layers:
    """Layers without a slot, where a prompt begins."""
    specs = [config.attention_spec(layer) for layer in range(config.num_layers)]
    return tuple(slots_of.empty(batch, s.num_kv_heads, 0, s.head_dim, dtype, policy.stats) for s in specs)


@functools.partial(
    jax.jit,
    static_argnames=("config", "policy", "plan", "layout", "implementation", "progress", "top", "limit", "scan_layers"),
)
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
    layout: Layout = ONE_DEVICE,
    implementation: str | None = None,
    progress=None,
    top: int = 0,
    limit: int = 0,
    scan_layers: bool = False,
    learned: Learned = NOTHING,
) -> tuple[Layers, Float[Array, "B V"], Expected]:
    """Run the left-padded prompt (padding at position -1) in blocks; the layers it leaves and the last logits.

    `lengths [B]` tokens were seen before. The pseudo tokens run behind every block, at the positions that the first
    decoded tokens will have; when the block itself is replayed, they are its instruction and come before it. With
    `top` also the likeliest tokens after each prompt token, for at least the last `limit` of them.
    """
    model = model_of(config, weights)
    # the slots of a cache to go on from lie as decoding left them; from here on they stay in time order
    layers = model_pool.changed(layers, lambda layer: _in_time_order(layer, layout) if layer.slots else layer)
    share = policy.allocate if isinstance(policy.allocate, Across) else None
    replays = plan.look and policy.prefill is not None and isinstance(policy.prefill.observe, Replay)
    end = lengths + jnp.sum(positions >= 0, axis=-1, dtype=jnp.int32)
    ahead = end[:, None] + jnp.arange(pseudo.shape[1], dtype=jnp.int32)

    def block(layers: Layers, tokens, positions, wanted):
        length = tokens.shape[1]
        front = ((0, 0), (-(length + pseudo.shape[1]) % layout.parts, 0))  # equal parts for the devices
        tokens, positions = jnp.pad(tokens, front), jnp.pad(positions, front, constant_values=EMPTY)
        now = jnp.where(positions[:, -1] < 0, lengths, positions[:, -1] + 1)  # a row of padding has not begun
        behind, places = (pseudo, ahead) if not replays else _replayed(pseudo, tokens, positions, now)
        attend = functools.partial(
            prefill_layer, policy, jnp.concatenate([positions, places], axis=1), now, layout, implementation
        )
        turn, onward = None, 0
        if plan.look and policy.propagate is not None:
            turn = policy.propagate.layer(config.num_layers)
            onward = policy.propagate.count(tokens.shape[1], max(plan.slots))
            onward = min(onward + -(onward + behind.shape[1]) % layout.parts, tokens.shape[1])
        full = [layer for layer, spec in enumerate(config.specs) if spec.window is None]
        states = [
            LayerState(
                layer, plan.reach if share and i in full else plan.slots[i], limits[i], plan.look, behind.shape[1], i,
                model.output_matrix(i) if OUTPUT in policy.needs else None, _of_layer(learned, i),
                onward=onward if i == turn else 0,
            )
            for i, layer in enumerate(slots_of.opened(layers))
        ]  # fmt: skip

        def route(index: int, x, state: LayerState, following):
            if policy.reuse > 1 and state.worth is not None and index in full:
                place = full.index(index) % policy.reuse  # among the layers that choose together
                if place == 0:
                    following = functools.partial(attend, lead=state.worth)
                return x, attend if place == policy.reuse - 1 else following
            if index != turn or state.chosen is None:
                return x, following
            own = x.shape[1] - behind.shape[1]
            going = jnp.take_along_axis(x[:, :own], jnp.maximum(state.chosen, 0)[..., None], axis=1)
            at = jnp.take_along_axis(positions, jnp.maximum(state.chosen, 0), axis=1)
            at = jnp.concatenate([jnp.where(state.chosen < 0, EMPTY, at), places], axis=1)
            x = layout.lay("stream", jnp.concatenate([going, x[:, own:]], axis=1))
            return x, functools.partial(prefill_layer, policy, at, now, layout, implementation)

        everything, last = layout.lay("tokens", jnp.concatenate([tokens, behind], axis=1)), tokens.shape[1] - 1
        after = None if top else behind.shape[1]
        between = route if turn is not None or policy.reuse > 1 else None
        hidden, states = model(
            everything, states, attend, layout.lay, behind=after, route=between,
            sizes=plan.look and HIDDEN in policy.needs, scan=scan_layers,
        )  # fmt: skip
        expected = _expected(model, hidden[:, tokens.shape[1] - length :], (tokens.shape[0], length), top, wanted)
        layers = tuple(state.cache for state in states)
        if share is not None:
            layers = _divided(policy, share, states, full, plan, now, limits[full[0]])
        return (layers, hidden[:, last if top else 0]), expected

    (layers, hidden), expected = block(
        layers, tokens[:, : plan.first], positions[:, : plan.first], jnp.bool_(plan.blocks * plan.block < limit)
    )

    def more(carry, turn):
        layers, _ = carry
        number, tokens, positions = turn
        if progress is not None:
            jax.debug.callback(functools.partial(progress, "prefill"), number, plan.blocks + 1)
        return block(layers, tokens, positions, (plan.blocks - number) * plan.block < limit)

    if plan.blocks:
        rest = [
            jnp.moveaxis(x[:, plan.first :].reshape(-1, plan.blocks, plan.block), 1, 0) for x in (tokens, positions)
        ]
        (layers, hidden), later = lax.scan(more, (layers, hidden), (jnp.arange(1, plan.blocks + 1), *rest))
        in_order = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2], top)  # noqa: E731
        expected = jax.tree.map(lambda a, b: jnp.concatenate([a, in_order(b)], axis=1), expected, later)
    return tuple(map(layout.layer, layers)), layout.constrain(model.logits(hidden)), expected


def _divided(
    policy: Policy,
    share: Across,
    states: Any,
    full: list[int],
    plan: Plan,
    now: Int[Array, "B"],
    limits: Int[Array, "B"],
) -> Layers:
    """The layers after a block whose `full` ones divide one budget."""
    put_up = [states[i].cache for i in full]
    looked = plan.look and policy.prefill is not None
    reserved = jnp.zeros_like(limits)
    if looked:
        assert policy.prefill is not None
        reserved += policy.prefill.reserved(limits)
    heads, slots = put_up[0].heads, sum(plan.slots[i] for i in full)
    profiles = [states[i].profile for i in full] if looked else None
    shares = attend_model.divided(
        policy, share, put_up, profiles, heads * slots, heads * plan.reach, now, limits, reserved
    )
    return attend_model.together(states, shares)


def _expected(
    model: Decoder, hidden: Float[Array, "B _ M"], shape: tuple[int, int], top: int, wanted: Bool[Array, ""]
) -> Expected:
    """The `top` likeliest tokens after each of the first T of `shape` (B, T); zeros where they are not wanted."""
    batch, length = shape
    nothing = jnp.zeros((*shape, top), jnp.int32), jnp.zeros((*shape, top), jnp.float32)
    if not top:
        return nothing
    width = hidden.shape[-1]
    hidden = hidden[:, :length]
    rows = hidden.reshape(-1, width)
    size = min(HEAD_ROWS, rows.shape[0])
    rows = jnp.pad(rows, ((0, -rows.shape[0] % size), (0, 0))).reshape(-1, size, width)

    def some(rows):
        logits = model.logits(rows)
        best, tokens = lax.top_k(logits, top)
        return tokens.astype(jnp.int32), jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))

    def all_rows():
        return tuple(x.reshape(-1, top)[: batch * length].reshape(*shape, top) for x in lax.map(some, rows))

    return lax.cond(wanted, all_rows, lambda: nothing)


def _replayed(
    instruction: Int[Array, "B N"], tokens: Int[Array, "B T"], positions: Int[Array, "B T"], now: Int[Array, "B"]
) -> tuple[Int[Array, "B NT"], Int[Array, "B NT"]]:
    """The instruction and the block's own tokens once more, and their positions from `now` on (padding at -1)."""
    behind = jnp.concatenate([instruction, tokens], axis=1)
    real = jnp.concatenate([instruction >= 0, positions >= 0], axis=1)
    places = now[:, None] + jnp.cumsum(real, axis=1, dtype=positions.dtype) - 1
    return behind, jnp.where(real, places, EMPTY)


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
    layout: Layout = ONE_DEVICE,
    implementation: str | None = None,
    learned: Learned = NOTHING,
) -> tuple[KVCache, Float[Array, "B V"]]:
    """Run each running row's pending token through the model; the cache, and the logits of the token after it."""
    position = jnp.where(running, cache.lengths, EMPTY)
    attend = functools.partial(decode_layer, policy, position, layout, implementation)
    model = model_of(config, weights)
    states = [
        LayerState(
            layer, layer.slots, cache.limits[i], layer=i,
            out=model.output_matrix(i) if policy.decode is not None and OUTPUT in policy.decode.needs else None,
            learned=_of_layer(learned, i), line=line,
        )
        for i, (layer, line) in enumerate(zip(cache.views, model_pool.places(cache.layers), strict=True))
    ]  # fmt: skip
    hidden, states = model(layout.lay("tokens", jnp.maximum(cache.pending, 0)[:, None]), states, attend, layout.lay)
    cache = dataclasses.replace(
        cache,
        layers=model_pool.written(
            cache.layers, tuple(each.cache for each in states), tuple(each.token for each in states), position
        ),
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
    layout: Layout = ONE_DEVICE,
    implementation: str | None = None,
    learned: Learned = NOTHING,
) -> tuple[DecodeState, Int[Array, "B"]]:
    """Run each running row's pending token through the model and sample the next; -1 for rows that have finished."""
    running = ~state.done & (state.left > 0)
    cache, logits = decode_logits(weights, state.cache, running, config, policy, layout, implementation, learned)
    state, token = emit(sampler, stop, dataclasses.replace(state, cache=cache), logits)
    return layout.state(state), layout.constrain(token)


@functools.partial(
    jax.jit,
    static_argnames=("steps", "config", "policy", "sampler", "stop", "layout", "implementation"),
    donate_argnames="state",
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
    layout: Layout = ONE_DEVICE,
    implementation: str | None = None,
    learned: Learned = NOTHING,
) -> tuple[DecodeState, Int[Array, "B steps"]]:
    """`steps` decode steps as one scan; the state is donated."""

    def step(state: DecodeState, _):
        return decode_step(weights, state, config, policy, sampler, stop, layout, implementation, learned)

    state, tokens = lax.scan(step, state, length=steps)
    return layout.state(state), layout.constrain(tokens.T)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="layout")
def first_token(
    sampler: Sampler,
    stop: tuple[int, ...],
    state: DecodeState,
    logits: Float[Array, "B V"],
    *,
    layout: Layout = ONE_DEVICE,
) -> tuple[DecodeState, Int[Array, "B"]]:
    """`emit` as a program of its own, for the token behind the prompt."""
    state, token = emit(sampler, stop, state, logits)
    return layout.state(state), layout.constrain(token)
