"""Drafts by a model: a small one of its own, or the same weights over a smaller cache (self-speculation)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.attend import Ask, LayerIn, decode_layer
from jaxkv.checks import Checked
from jaxkv.errors import BadValue
from jaxkv.models import ModelConfig
from jaxkv.plan import planned, shares
from jaxkv.policies.catalogue import catalogue
from jaxkv.policies.policy import Policy
from jaxkv.run import DecodeState, decode_facts, model_of
from jaxkv.sampling import Sampler
from jaxkv.sharding.layout import ONE_DEVICE, Layout
from jaxkv.sizes import on_model
from jaxkv.speculative.attend import check
from jaxkv.speculative.gate import Gate, hopeful
from jaxkv.speculative.method import Start
from jaxkv.speculative.slots import put, taken
from jaxkv.speculative.tree import Shape, chain, check_depth
from jaxkv.speculative.verify import Conditional, parse
from jaxkv.store import EMPTY, Slots
from jaxkv.weights.params import Params

DRAFT = 3  # folded into a position's key for the draft's own draw


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """The draft model's cache, which stands where the model's own does; `live` is False once it was passed over."""

    layers: tuple[Slots, ...]
    limits: Int[Array, "L B"]
    live: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Overwritten:
    """What one token overwrote in one layer (or some did, one after the other), to be put back when it is rejected."""

    slot: Int[Array, "*some B Hk"]
    key: Float[Array, "*some B Hk D"]
    value: Float[Array, "*some B Hk D"]
    position: Int[Array, "*some B Hk"]
    stats: dict[str, Float[Array, "*some B Hk C"]]
    weight: Float[Array, "*some B Hk"] | None = None


def overwritten(layer: Slots) -> Overwritten:
    """What the layer's next token will overwrite."""
    at = lambda held: taken(held, layer.next_slot[..., None])[:, :, 0]  # noqa: E731
    weight = layer.entries.weight
    held = layer.next_slot, at(layer.keys), at(layer.values), at(layer.positions), layer.stats
    return Overwritten(*held, None if weight is None else at(weight))


def undone(layer: Slots, log: Overwritten, rejected: Array) -> Slots:
    """The layer before its last token, in the rows where that was rejected."""
    slot = jnp.where(rejected[:, None], log.slot, layer.slots)[..., None]  # out of range, so dropped
    back = lambda held, old: put(held, slot, old[:, :, None])  # noqa: E731
    before = layer.changed(
        keys=back(layer.keys, log.key),
        values=back(layer.values, log.value),
        positions=back(layer.positions, log.position),
        stats={name: jnp.where(rejected[:, None, None], log.stats[name], stat) for name, stat in layer.stats.items()},
    )
    weight = layer.entries.weight
    if weight is not None:
        before = before.changed(weight=back(weight, log.weight))
    return before.aimed(log.slot, rejected)


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """The compiled side of a draft model: a chain of `depth` tokens, each drawn by the draft model itself."""

    depth: int
    config: ModelConfig
    policy: Policy
    layout: Layout = ONE_DEVICE

    def gate(self, cost: float) -> Gate:
        """A gate that has seen nothing, where a tree costs so many plain steps."""
        return hopeful(self.depth, cost)

    @property
    def shape(self) -> Shape:
        """The shape of every tree."""
        return Shape((1,) * self.depth)

    def look(self, drafts: Drafts) -> tuple[Int[Array, "B"], Any]:
        """Kind 1 for every row, until the draft model was passed over."""
        return jnp.broadcast_to(drafts.live.astype(jnp.int32), drafts.limits.shape[1:]), None

    def draft(self, weights, drafts: Drafts, kind: Int[Array, "B"], hint: Any, state: DecodeState, sampler: Sampler):
        """Run the pending token and each draft through the draft model; the chain, its chances, and a log to undo.

        The last draft is run too, so that its key and value are there when it is accepted.
        """
        cache = state.cache
        model = model_of(self.config, weights)
        active = state.going

        def step(carry, number):
            layers, token = carry
            position = jnp.where(active & (number < state.left), cache.lengths + number, EMPTY)

            def attend(spec, query, key, value, layer):
                return decode_layer(self.policy, position, self.layout, None, spec, query, key, value, layer)

            states = [
                LayerIn(
                    layer,
                    drafts.limits[i],
                    decode_facts(model, self.policy, i),
                    Ask(shares=shares(self.policy, self.config, i)),
                )
                for i, layer in enumerate(layers)
            ]
            hidden, states = model(jnp.maximum(token, 0)[:, None], states, attend, self.layout.lay)
            logits = sampler.warped(self.layout.constrain(model.logits(hidden[:, 0])), None)
            keys = jax.vmap(lambda key, at: jax.random.fold_in(jax.random.fold_in(key, at), DRAFT))(
                state.keys, cache.lengths + 1 + number
            )
            drawn = sampler.draw(logits, keys, cache.lengths)
            chance = None if sampler.temperature == 0 else jax.nn.softmax(logits, axis=-1)
            log = tuple(overwritten(layer) for layer in layers)
            return (tuple(state.cache for state in states), drawn), (drawn, chance, log)

        numbers = jnp.arange(self.depth + 1, dtype=jnp.int32)
        (layers, _), (drawn, chances, log) = lax.scan(step, (drafts.layers, cache.pending), numbers)
        tree = chain(drawn[: self.depth].T, cache.pending)
        chances = None if chances is None else jnp.moveaxis(chances[: self.depth], 0, 1)
        return tree, chances, (dataclasses.replace(drafts, layers=layers), log)

    def settle(self, weights, drafts: tuple[Drafts, Any], tokens: Int[Array, "B n"]) -> Drafts:
        """The draft model's cache with as many tokens as were taken: the others are undone, newest first."""
        ran, log = drafts
        count = jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)

        def back(layers, turn):
            number, logs = turn
            return tuple(undone(layer, log, number >= count) for layer, log in zip(layers, logs, strict=True)), None

        numbers = jnp.arange(self.depth + 1, dtype=jnp.int32)
        layers, _ = lax.scan(back, ran.layers, (numbers, log), reverse=True)
        return dataclasses.replace(ran, layers=layers)

    def laid(self, layout: Layout, drafts: Drafts) -> Drafts:
        """The drafts on the model's mesh, which the draft model divides in its own way, inside a compiled program."""
        layers = tuple(map(self.layout.layer, drafts.layers))
        return Drafts(layers, layout.constrain(drafts.limits), layout.constrain(drafts.live))

    def passed(self, drafts: Drafts, tokens: Int[Array, "B n"]) -> Drafts:
        """A token came that the draft model has not run: it is left out from now on."""
        return dataclasses.replace(drafts, live=jnp.zeros_like(drafts.live))


def _checked(depth: int, verify: str | Conditional, policy: Policy) -> None:
    check_depth(depth)
    parse(verify)
    check(policy)
    if not policy.store.apart:
        raise BadValue(
            f"a draft's policy {policy.name!r} with a scale that several tokens share, of which drafts cannot be taken "
            "back: expected a codec with a scale per token, such as {'kind': 'int', 'bits': 4}"
        )
    if policy.store.windows:
        residual, initial = policy.store.residual, policy.store.initial
        raise BadValue(
            f"a draft's policy {policy.name!r} with residual={residual}, initial={initial} tokens in full precision: "
            "what drafts overwrite of these cannot be put back; set both to 0 in its store, or take another policy"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class DraftModel(Checked):
    """Drafts of a smaller model with the same vocabulary: standard speculative sampling (arXiv 2211.17192).

    `policy` bounds the draft model's own cache (none: full). When its drafts do not pay, it is left out for the rest
    of the call, unless `fallback=False`. For a model on a mesh it is loaded onto the same one. Raises `BadValue` for a
    policy that cannot take tokens back.
    """

    params: Params
    policy: Policy = dataclasses.field(default_factory=lambda: catalogue()["full"])
    depth: int = 4
    verify: str | Conditional = "exact"
    fallback: bool = True
    top: ClassVar[int] = 0
    limit: ClassVar[int] = 0
    alone: ClassVar[bool] = False

    def __post_init__(self):
        _checked(self.depth, self.verify, self.policy)

    def drafter(self, params: Params) -> ModelDrafter:
        """The compiled side, drafting for `params`. Raises `BadValue` for another vocabulary."""
        mine, theirs = self.params.config.vocab_size, params.config.vocab_size
        if mine != theirs:
            raise BadValue(f"a draft model of {mine} tokens for a model of {theirs}: expected the same vocabulary")
        return ModelDrafter(self.depth, self.params.config, on_model(self.params, self.policy), self.params.layout)

    def check_room(self, params: Params, lengths: np.ndarray, room: int) -> None:
        """Raises `BadValue` where the draft model's context is too short for texts of `lengths [B]` and `room` more."""
        _check_room(self, self.params, lengths, room)

    def begin(self, start: Start) -> tuple[Drafts, Any]:
        """The draft model's cache after the text, and its weights."""
        return _begun(start, self.params, self.policy)


@dataclasses.dataclass(frozen=True)
class SelfDraft(Checked):
    """Drafts of the same weights over a smaller cache, verified over the call's own: eviction without loss.

    Source: MagicDec (arXiv 2408.11049), and QuantSpec (arXiv 2502.10424) without its quantisation. It pays where
    reading the full cache dominates a step.
    """

    policy: Policy
    depth: int = 4
    verify: str | Conditional = "exact"
    fallback: bool = True
    top: ClassVar[int] = 0
    limit: ClassVar[int] = 0
    alone: ClassVar[bool] = False

    def __post_init__(self):
        _checked(self.depth, self.verify, self.policy)

    def drafter(self, params: Params) -> ModelDrafter:
        """The compiled side, drafting for `params`."""
        return ModelDrafter(self.depth, params.config, on_model(params, self.policy), params.layout)

    def check_room(self, params: Params, lengths: np.ndarray, room: int) -> None:
        """Raises `BadValue` where the context is too short for texts of `lengths [B]` and `room` more under the drafts'
        policy."""
        _check_room(self, params, lengths, room)

    def begin(self, start: Start) -> tuple[Drafts, Any]:
        """The smaller cache after the text, and the weights."""
        return _begun(start, start.params, self.policy)


def _check_room(method: "DraftModel | SelfDraft", params: Params, lengths: np.ndarray, room: int) -> None:
    config, policy = params.config, on_model(params, method.policy)
    nothing = np.zeros_like(lengths), np.zeros(config.num_layers, int)
    learned = params.learned_for(policy.learns, policy.name)
    try:
        planned(policy, config, *nothing, lengths, room, learned=learned)
    except BadValue as error:
        name = type(method).__name__
        raise BadValue(f"the draft model (policy {policy.name!r}) of speculative={name}(...): {error}") from error


def _begun(start: Start, params: Params, policy: Policy) -> tuple[Drafts, Any]:
    cache = start.prefill(params, on_model(params, policy))
    return Drafts(cache.layers, cache.limits, params.layout.put(np.bool_(True))), params.weights
