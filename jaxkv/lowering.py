"""The programs of a run, lowered for abstract arguments: to be compiled and asked for memory, bytes and copies."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import run
from jaxkv.cache import KVCache
from jaxkv.models import ModelConfig, abstract_weights
from jaxkv.plan import plan
from jaxkv.policies.policy import Policy
from jaxkv.sampling import Sampler


@dataclasses.dataclass(frozen=True)
class Lowered:
    """`prefill` and `decode` as `jax.stages.Lowered`, and the shapes of the weights and of the cache between them."""

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
    implementation: str | None = None,
) -> Lowered:
    """Prefill of `batch` prompts of `tokens` tokens each, and `steps` greedy decode steps after it; nothing runs.

    `room` is the new tokens that a policy which only adds must hold; `panels` as in `abstract_weights`. Raises
    `BadValue` for a text longer than the model's context.
    """
    weights = abstract_weights(config, dtype, panels=panels)
    shapes, limits = plan(policy, config, None, np.full(batch, tokens), room)
    static = {"config": config, "policy": policy, "implementation": implementation}
    arguments = (
        weights,
        jax.eval_shape(lambda: run.empty_layers(config, policy, batch, dtype)),
        _ints(batch, shapes.length),
        _ints(batch, shapes.length),
        _ints(batch, policy.extra if shapes.look else 0),
        _ints(batch),
        _ints(*limits.shape),
    )
    prefill = run.prefill.lower(*arguments, **static, plan=shapes)

    def state(*given) -> run.DecodeState:
        layers, *_ = run.prefill(*given, **static, plan=shapes)
        row = jnp.zeros(batch, jnp.int32)
        cache = KVCache(layers, row, jnp.asarray(limits), row, policy=policy)
        keys = jax.random.split(jax.random.key(0), batch)
        return run.DecodeState(cache, row < 0, row, None, keys)

    begun = jax.eval_shape(state, *arguments)
    decode = run.decode.lower(weights, begun, **static, steps=steps, sampler=Sampler(), stop=())
    return Lowered(prefill, decode, weights, begun.cache)


def held(tree: Any) -> int:
    """Bytes of a tree's arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
