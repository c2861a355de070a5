"""The programs of a run, lowered for abstract arguments: to be compiled and asked for memory, bytes and copies."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv import run
from jaxkv.models import ModelConfig, abstract_weights
from jaxkv.models.linear import Blocks
from jaxkv.plan import plan
from jaxkv.policies.policy import NOTHING, Learned, Policy
from jaxkv.sampling import Sampler
from jaxkv.sharding import ONE_DEVICE, Layout
from jaxkv.store import KVCache


@dataclasses.dataclass(frozen=True)
class Lowered:
    """`prefill` (of the blocks behind the first, where there are some) and `decode` as `jax.stages.Lowered`, and the
    shapes of the weights and of the cache between them.
    """

    prefill: Any
    decode: Any
    weights: Any
    cache: KVCache


def lower(
    config: ModelConfig,
    policy: Policy,
    *,
    batch: int,
    tokens: int,
    room: int = 0,
    steps: int = 16,
    dtype: Any = jnp.float32,
    panels: bool | None = None,
    layout: Layout = ONE_DEVICE,
    implementation: str | None = None,
    scan_layers: bool = False,
    learned: Learned = NOTHING,
    kept: str | None = None,
) -> Lowered:
    """Prefill of `batch` prompts of `tokens` tokens each, and up to `steps` greedy decode steps; nothing runs.

    On the mesh of `layout` weights and cache are divided as `load` and `generate` do it. `room` is the new tokens that
    a policy which only adds must hold; `panels` as in `abstract_weights`, `kept`: what `load` calls `weights`,
    `scan_layers` as in `generate`; `learned` is what the policy `learns`. Raises `BadValue` for a text longer than the
    model's context.
    """
    weights = _weights(config, dtype, panels, layout, kept)
    shapes, blocks, limits = plan(
        policy, config, None, np.full(batch, tokens), room, parts=layout.parts, learned=learned
    )
    static = {"config": config, "policy": policy, "layout": layout, "implementation": implementation}
    placed = lambda layers: tuple(  # noqa: E731
        layout.each(layer, lambda leaf, *axes: _array(layout, leaf, axes)) for layer in layers
    )
    layers = placed(jax.eval_shape(lambda: run.empty_layers(config, policy, batch, dtype)))

    def block(program: Any, layers: Any, length: int) -> Any:
        width = policy.extra if shapes.look else 0
        ints = ((batch, length), (batch, length), (batch, width), (batch,), (batch,), limits.shape)
        given = [_array(layout, jax.ShapeDtypeStruct(shape, jnp.int32)) for shape in ints]
        given.append(_array(layout, jax.ShapeDtypeStruct((), jnp.bool_)))
        return program.lower(weights, layers, *given, **static, plan=shapes, scan_layers=scan_layers, learned=learned)

    prefill = block(run.first_block, layers, blocks.first)
    if blocks.count:
        between = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), prefill.out_info[0])
        prefill = block(run.next_block, placed(between), blocks.size)

    def state(layers) -> run.DecodeState:
        row = jnp.zeros(batch, jnp.int32)
        cache = KVCache(layers, row, jnp.asarray(limits), row, policy=policy)
        keys = jax.random.split(jax.random.key(0), batch)
        return run.DecodeState(cache, row < 0, row, None, keys)

    left = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), prefill.out_info[0])
    if policy.store.fits:
        left = jax.eval_shape(lambda *given: run.fitted(*given, config=config, policy=policy), left, learned)
    begun = jax.eval_shape(state, left)
    cache = dataclasses.replace(
        jax.tree.map(lambda leaf: _array(layout, leaf), begun.cache),
        layers=placed(begun.cache.layers),
    )
    begun = dataclasses.replace(jax.tree.map(lambda leaf: _array(layout, leaf), begun), cache=cache)
    count = _array(layout, jax.ShapeDtypeStruct((), jnp.int32))
    decode = run.decode.lower(weights, begun, count, **static, room=steps, sampler=Sampler(), stop=(), learned=learned)
    return Lowered(prefill, decode, weights, begun.cache)


def held(tree: Any) -> int:
    """Bytes of a tree's arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def held_by_one(tree: Any) -> int:
    """Bytes of a tree's arrays on one device of their mesh."""
    shapes = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * size for shape, size in shapes)


def _weights(config: ModelConfig, dtype: Any, panels: bool | None, layout: Layout, kept: str | None) -> Any:
    if layout.mesh is None:
        return abstract_weights(config, dtype, panels=panels, weights=kept)
    flat = nnx.to_flat_state(abstract_weights(config, dtype, panels=False, weights=kept))

    def placed(name: str, value: Any) -> Any:
        if not isinstance(value, Blocks):
            return _array(layout, value, layout.rule(name))
        return Blocks.placed({each: placed(name, array) for each, array in value.arrays.items()}, value.dtype)

    return nnx.from_flat_state(
        (path, leaf.replace(placed("/".join(map(str, path)), leaf.get_value()))) for path, leaf in flat
    )


def _array(layout: Layout, leaf: Any, axes: Any = None) -> jax.ShapeDtypeStruct:
    """The shape of an array, with its place on the mesh (no axes: replicated)."""
    if layout.mesh is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    place = layout.sharding(leaf.shape, axes or (None,) * len(leaf.shape))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
