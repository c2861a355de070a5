"""A plain causal forward pass over whole prompts: the full cache, against which everything else is measured."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.models import graphdef
from jaxkv.models.rope import rotate


def attend(spec, query, key, value, state):
    """Causal attention within the prompt, windowed and soft-capped as the layer says; no cache."""
    length = query.shape[1]
    positions = jnp.arange(length, dtype=jnp.int32)
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    query, key = (rotate(x, positions[None, None], spec.rope) for x in (query, key))
    group = spec.num_heads // spec.num_kv_heads
    key, value = (jnp.repeat(x, group, axis=1) for x in (key, value))
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key).astype(jnp.float32) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    back = positions[:, None] - positions[None, :]
    seen = (back >= 0) & (back < (spec.window or length))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(value.dtype)
    return jnp.swapaxes(jnp.einsum("bhqk,bhkd->bhqd", weights, value), 1, 2), state


@functools.partial(jax.jit, static_argnames="config")
def logits(config, weights, tokens):
    """Float32 logits `[B, T, V]` of every position."""
    model = nnx.merge(graphdef(config), weights)
    hidden, _ = model(tokens, (None,) * config.num_layers, attend)
    return model.logits(hidden)
