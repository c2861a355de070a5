"""The compiled programs: a block of a prompt, and decode as a loop of one step.

Everything here is pure and jitted with static config, policy and plan; `generate.py` calls these from the host.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxkv.ahead import Ahead
from jaxkv.attend import Ask, Facts, LayerIn, Sharing, decode_layer, divided, gathering, overwritten, prefill_layer
from jaxkv.models import AttentionSpec, ModelConfig, graphdef
from jaxkv.models.decoder import Decoder
from jaxkv.plan import Plan, PromptBlocks, shares
from jaxkv.policies.flow import Block
from jaxkv.policies.needs import HIDDEN, OUTPUT
from jaxkv.policies.policy import NOTHING, Learned, Policy
from jaxkv.programs import held
from jaxkv.sampling import RowSampler, Sampler
from jaxkv.sharding.layout import ONE_DEVICE, Layout
from jaxkv.store import EMPTY, KVCache, looks
from jaxkv.store import empty as empty_store
from jaxkv.store.looks import LOOKS
from jaxkv.store.together import begun, opened, rejoined, written

Layers = tuple[Any, ...]  # a store per layer
Expected = tuple[Int[Array, "B T K"], Float[Array, "B T K"]]  # the likeliest next tokens and their probabilities
HEAD_ROWS = 256  # hidden states whose logits are computed together, where every position's are asked for


def model_of(config: ModelConfig, weights) -> Decoder:
    """The model with its weights in place."""
    return nnx.merge(graphdef(config), weights)


def _of_layer(learned: Learned, layer: int | Int[Array, ""]) -> dict[str, Array]:
    return {name: value[layer] for name, value in learned.items()}


def empty_layers(config: ModelConfig, policy: Policy, batch: int, dtype) -> Layers:
    """Stores without a slot, where a prompt begins."""
    each = enumerate(config.specs)
    return tuple(empty_layer(spec, policy, batch, dtype, shares(policy, config, layer)) for layer, spec in each)


def empty_layer(spec: AttentionSpec, policy: Policy, batch: int, dtype, sharing: bool) -> Any:
    """One layer's store without a slot; `sharing` as `plan.shares` says of it. Raises `BadValue` where heads of its
    width have no code."""
    kind = policy.allocate.store if sharing else "slots"
    beside = policy.beside(batch, spec.num_kv_heads, spec.head_dim, dtype) if sharing else {}
    if last := max(policy.looks, policy.store.looks):
        beside[LOOKS] = looks.empty(batch, spec.num_heads, last, spec.head_dim, dtype)
    if spec.window is None:  # a window is small, and read whole
        beside |= policy.read.beside(batch, spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype)
    policy.store.check(spec.head_dim)
    beside |= policy.store.beside(batch, spec.num_kv_heads, spec.head_dim, dtype)
    shape = (batch, spec.num_kv_heads, spec.head_dim, dtype)
    weighs = policy.weighs and sharing
    return empty_store(kind, *shape, policy.stats, policy.store, beside, weighs)


def prefill(
    weights,
    layers: Layers,
    tokens: Int[np.ndarray, "B T"],
    positions: Int[np.ndarray, "B T"],
    pseudo: Int[np.ndarray, "B *K N"],
    lengths: Int[np.ndarray, "B"],
    limits: Int[np.ndarray, "L B"],
    *,
    blocks: PromptBlocks,
    layout: Layout = ONE_DEVICE,
    progress: Callable[[str, int, int], None] | None = None,
    top: int = 0,
    limit: int = 0,
    ahead: Ahead | None = None,
    behind: Callable[[Any, Any], None] = lambda layers, logits: None,
    **static: Any,
) -> tuple[Layers, Float[Array, "B V"], Expected | None]:
    """Run the left-padded prompt (padding at position -1) block by block; the layers it leaves and the last logits.

    One program runs the first block and one all others, so that a prompt of any length needs these two. With `top`
    also the likeliest tokens after each prompt token, for at least the last `limit` of them. `pseudo` are the same for
    all K blocks, or each block's own. `static` is what `first_block` is compiled for. `ahead` compiles both side
    by side, with what `behind(layers, logits)` adds to it, given the forms of what the prompt leaves.
    """
    ends = lengths + np.sum(positions >= 0, axis=1, dtype=np.int32)
    fixed, parts = tuple(map(layout.put, (lengths, ends, limits))), list(blocks)
    static |= {"layout": layout, "top": top}
    logits, expected = None, []
    fits, learned = static["policy"].store.fits, static.get("learned", NOTHING)
    fitting = {"config": static["config"], "policy": static["policy"], "layout": layout}

    def call(number: int, layers: Any) -> tuple[Any, tuple[Any, ...]]:
        """The program of a block, and the arrays that it takes."""
        part, wanted = parts[number], (blocks.count - number) * blocks.size < limit
        block = tuple(map(layout.put, (tokens[:, part], positions[:, part], of_block(pseudo, number))))
        return next_block if number else first_block, (weights, layers, *block, *fixed, layout.put(np.bool_(wanted)))

    if ahead is not None:
        forms = layers
        for number in range(len(parts[:2])):
            program, given = call(number, forms)
            forms, logits, _ = ahead.add(program, *given, **static)
        behind(ahead.gives(fitted, forms, learned, **fitting) if fits else forms, logits)
    for number in range(len(parts)):
        program, given = call(number, layers)
        if ahead is not None:
            ahead.wait(program)
        layers, logits, likely = program(*given, **static)
        expected.append(likely)
        if progress is not None:
            jax.block_until_ready(logits)
            progress("prefill", number + 1, blocks.count + 1)
    assert logits is not None  # there is a first block
    if fits:
        layers = fitted(layers, learned, **fitting)
    if not top:
        return layers, logits, None
    return layers, logits, cast(Any, jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), *expected))


def of_block(pseudo: Int[np.ndarray, "B *K N"], number: int) -> Int[np.ndarray, "B N"]:
    """The tokens that run behind a block: the same for all, or its own."""
    return pseudo if pseudo.ndim == 2 else pseudo[:, number]


def _block(
    weights,
    layers: Layers,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    pseudo: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    ends: Int[Array, "B"],
    limits: Int[Array, "L B"],
    wanted: Bool[Array, ""],
    *,
    config: ModelConfig,
    policy: Policy,
    plan: Plan,
    begins: bool,
    layout: Layout = ONE_DEVICE,
    implementation: str | None = None,
    top: int = 0,
    scan_layers: bool = False,
    learned: Learned = NOTHING,
) -> tuple[Layers, Float[Array, "B V"], Expected]:
    """Run a block of the prompt and cut what it leaves to the budget; the layers, and the logits of its last token.

    With `top` also the likeliest tokens after each of the block's, where they are `wanted`.
    """
    model, length = model_of(config, weights), tokens.shape[1]
    layers, hidden, last = through_block(
        model, layers, tokens, positions, pseudo, lengths, ends, limits, config=config, policy=policy, plan=plan,
        begins=begins, layout=layout, implementation=implementation, scan_layers=scan_layers, learned=learned,
        whole=bool(top),
    )  # fmt: skip
    expected = _expected(model, hidden[:, last + 1 - length :], (tokens.shape[0], length), top, wanted)
    expected = cast(Any, jax.tree.map(layout.constrain, expected))
    logits = model.logits(hidden[:, last if top else 0])
    return layers, layout.constrain(layout.lay("logits", logits)), expected  # first as the matrix makes them


def through_block(
    model: Any,
    layers: Layers,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    pseudo: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    ends: Int[Array, "B"],
    limits: Int[Array, "L B"],
    *,
    config: ModelConfig,
    policy: Policy,
    plan: Plan,
    begins: bool,
    layout: Layout = ONE_DEVICE,
    implementation: str | None = None,
    scan_layers: bool = False,
    learned: Learned = NOTHING,
    whole: bool = False,
) -> tuple[Layers, Float[Array, "B _ M"], int]:
    """A block of the prompt through a model (a `Decoder`, or what is called as one): the layers cut to the budget, the
    hidden states of its last token, or of the `whole` block, and where in the block the last token stands.

    `lengths [B]` tokens were seen before the prompt, `ends [B]` are with it. The pseudo tokens run behind the block, at
    the positions that the observer gives them; when the block itself is replayed, they are its instruction and come
    before it.
    """
    length, learned = tokens.shape[1], policy.allocate.prepared(learned, config.num_kv_heads)
    if begins:  # the slots of a cache to go on from lie as decoding left them; from here on they stay in time order
        layers = tuple(layout.gathered(layer).in_time_order() if layer.slots else layer for layer in layers)
    full = [layer for layer in range(config.num_layers) if shares(policy, config, layer)]
    front = ((0, 0), (-(length + pseudo.shape[1]) % layout.parts, 0))  # equal parts for the devices
    tokens, positions = jnp.pad(tokens, front), jnp.pad(positions, front, constant_values=EMPTY)
    now = jnp.where(positions[:, -1] < 0, lengths, positions[:, -1] + 1)  # a row of padding has not begun
    behind, places = looking_on(policy, plan.look, tokens, positions, pseudo, ends, now)

    def attend_at(positions):
        return functools.partial(prefill_layer, policy, positions, now, layout, implementation)

    attend, flow = attend_at(jnp.concatenate([positions, places], axis=1)), policy.flow
    passing = Block(
        positions, places, config.num_layers, full, max(plan.slots), layout.parts, attend, attend_at, layout.lay
    )
    if policy.grows:  # but for layers with a sliding window, which see no more of the text at its end
        whole_text = np.isin(np.arange(config.num_layers), full)[:, None]
        limits = jnp.where(whole_text, policy.so_far(limits, now, ends), limits)
    most = jnp.max(limits, axis=0)
    given = [
        LayerIn(
            store,
            limits[i],
            Facts(
                i,
                model.output_matrix(i) if OUTPUT in policy.needs else None,
                _of_layer(learned, i),
                config.num_layers,
            ),
            Ask(
                plan.reach if plan.reach and i in full else plan.slots[i],
                plan.look,
                behind.shape[1],
                flow.going(passing, i) if plan.look else 0,
                plan.look and flow.leads(i, passing),
                model.attends,
                shares=i in full,
            ),
            most,
        )
        for i, store in enumerate(opened(layers))
    ]
    everything, last = layout.lay("tokens", jnp.concatenate([tokens, behind], axis=1)), tokens.shape[1] - 1
    sharing = Sharing(policy, plan, full, limits[full[0]] if full else limits[0], layout)
    fold = gathering(sharing)
    hidden, left = model(
        everything, given, attend, layout.lay, behind=None if whole else behind.shape[1], route=flow.route(passing),
        sizes=plan.look and HIDDEN in policy.needs, scan=scan_layers, fold=fold,
    )  # fmt: skip
    outs, gathered = (left, None) if fold is None else (left[:-1], left[-1])
    layers = divided(sharing, cast(Any, outs), cast(Any, gathered), now, lambda i: _of_layer(learned, i))
    return tuple(map(layout.layer, rejoined(layers))), hidden, last


STATIC = ("config", "policy", "plan", "layout", "implementation", "top", "scan_layers")
first_block = held(jax.jit(functools.partial(_block, begins=True), static_argnames=STATIC))
next_block = held(jax.jit(functools.partial(_block, begins=False), static_argnames=STATIC, donate_argnames="layers"))


@held
@functools.partial(jax.jit, static_argnames=("policy", "layout"))
def _fit(layer: Any, learned: Learned, number: Int[Array, ""], *, policy: Policy, layout: Layout) -> Any:
    """A layer behind a prompt, with what its codecs fit; layers that are alike are one program."""
    return layout.layer(policy.read.indexed(layer.fitted(_of_layer(learned, number), bool(policy.looks))))


@held
@functools.partial(jax.jit, static_argnames=("config", "layout"))
def _joined(layers: Layers, *, config: ModelConfig, layout: Layout) -> Layers:
    """Layers that hold something together from here on."""
    return tuple(map(layout.layer, begun(layers, [spec.window for spec in config.specs])))


def fitted(
    layers: Layers, learned: Learned = NOTHING, *, config: ModelConfig, policy: Policy, layout: Layout = ONE_DEVICE
) -> Layers:
    """The layers behind a prompt, with what their codecs fit: to what is held, to the last queries, to the model, to
    the layer below."""
    fit = functools.partial(_fit, policy=policy, layout=layout)
    after = tuple(fit(layer, learned, np.int32(i)) for i, layer in enumerate(layers))
    return _joined(after, config=config, layout=layout) if policy.store.pairs else after


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


def looking_on(
    policy: Policy,
    look: bool,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    pseudo: Int[Array, "B N"],
    ends: Int[Array, "B"],
    now: Int[Array, "B"],
) -> tuple[Int[Array, "B M"], Int[Array, "B M"]]:
    """The tokens that run behind a block, and their positions: the pseudo tokens, where the observer puts them, and
    the block once more where it is replayed (padding at -1).
    """
    observe = None if policy.prefill is None else policy.prefill.observe
    begin = ends if observe is None else observe.begins(ends, now)
    replays = look and observe is not None and observe.replays
    again = (jnp.where(positions >= 0, tokens, EMPTY),) if replays else ()
    behind = jnp.concatenate([pseudo, *again], axis=1)
    places = begin[:, None] + jnp.cumsum(behind >= 0, axis=1, dtype=jnp.int32) - 1
    return behind, jnp.where(behind >= 0, places, EMPTY)


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

    @property
    def going(self) -> Bool[Array, "B"]:
        """Rows that go on."""
        return ~self.done & (self.left > 0)


def emit(
    sampler: Sampler | RowSampler,
    stop: tuple[int, ...] | Int[Array, "B S"],
    state: DecodeState,
    logits: Float[Array, "B V"],
) -> tuple[DecodeState, Int[Array, "B"]]:
    """Sample each running row's next token into `pending`; finished rows give -1. Each row may have stop tokens of its
    own, filled up with -1."""
    running = state.going
    token = sampler.sample(logits, state.seen, state.keys, state.cache.lengths)
    seen = state.seen
    if seen is not None:
        rows = jnp.arange(token.shape[0])
        seen = seen.at[rows, token].set(seen[rows, token] | running)
    ended = jnp.any(token[:, None] == jnp.atleast_2d(jnp.asarray(stop, jnp.int32)), axis=-1)
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


def decode_facts(model: Any, policy: Policy, layer: int, learned: Learned = NOTHING) -> Facts:
    """What the policy's decode phase is told of a layer of the model."""
    needs_out = policy.decode is not None and OUTPUT in policy.decode.needs
    out = model.output_matrix(layer) if needs_out else None
    return Facts(layer, out, _of_layer(learned, layer), model.config.num_layers)


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
    position, learned = jnp.where(running, cache.lengths, EMPTY), policy.allocate.prepared(learned, config.num_kv_heads)
    attend = functools.partial(decode_layer, policy, position, layout, implementation)
    model = model_of(config, weights)
    given = tuple(
        LayerIn(
            store,
            cache.limits[i],
            decode_facts(model, policy, i, learned),
            Ask(
                everything=policy.read.state not in store.beside or policy.read.everything(i),
                shares=shares(policy, config, i),
            ),
        )
        for i, store in enumerate(cache.views)
    )
    layers = overwritten(policy, cache.layers, given, config.specs, position)
    given = [dataclasses.replace(each, cache=store) for each, store in zip(given, opened(layers), strict=True)]
    hidden, outs = model(layout.lay("tokens", jnp.maximum(cache.pending, 0)[:, None]), given, attend, layout.lay)
    cache = dataclasses.replace(
        cache,
        layers=written(layers, tuple(out.cache for out in outs), position),
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
    running = state.going
    cache, logits = decode_logits(weights, state.cache, running, config, policy, layout, implementation, learned)
    state, token = emit(sampler, stop, dataclasses.replace(state, cache=cache), logits)
    return layout.state(state), layout.constrain(token)


@held
@functools.partial(
    jax.jit,
    static_argnames=("room", "config", "policy", "sampler", "stop", "layout", "implementation"),
    donate_argnames="state",
)
def decode(
    weights,
    state: DecodeState,
    steps: Int[Array, ""],
    *,
    room: int,
    config: ModelConfig,
    policy: Policy,
    sampler: Sampler,
    stop: tuple[int, ...],
    layout: Layout = ONE_DEVICE,
    implementation: str | None = None,
    learned: Learned = NOTHING,
) -> tuple[DecodeState, Int[Array, "B room"]]:
    """At most `steps` decode steps (up to `room`), ending early when every row has; the state is donated.

    The number of steps is data, so that one program serves every length of an answer.
    """

    def going(carry):
        step, some, *_ = carry
        return (step < steps) & some

    def body(carry):
        step, _, state, tokens = carry
        state, token = decode_step(weights, state, config, policy, sampler, stop, layout, implementation, learned)
        tokens = lax.dynamic_update_slice(tokens, token[None], (step, jnp.int32(0)))
        return step + 1, layout.constrain(jnp.any(state.going)), state, tokens

    nothing = layout.constrain(jnp.full((room, state.done.shape[0]), EMPTY, jnp.int32))
    start = (jnp.int32(0), layout.constrain(jnp.any(state.going)), state, nothing)
    _, _, state, tokens = lax.while_loop(going, body, start)
    return layout.state(state), layout.constrain(tokens.T)


@held
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


PROGRAMS = (first_block, next_block, first_token, decode)  # of a call of `generate` without drafts
