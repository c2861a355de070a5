"""Decode steps whose tokens are given: every policy reads the same continuation, one token at a time."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import run
from jaxkv.decoding import with_room
from jaxkv.errors import BadValue
from jaxkv.models import ModelConfig
from jaxkv.policies.policy import Policy, check_scores
from jaxkv.programs import held
from jaxkv.prompts import right_padded
from jaxkv.request import check_model, checked_ids, checked_policy
from jaxkv.store import KVCache
from jaxkv.weights.params import Params


def follow(
    params: Params,
    cache: KVCache,
    tokens: np.ndarray | Sequence[Sequence[int]],
    implementation: str | None = None,
    logits: bool = True,
) -> tuple[KVCache, jax.Array | None]:
    """Run `tokens [B, N]` (-1: none, only at a row's end) through decode under the cache's policy; the cache, and the
    logits `[B, N, V]` after each token, or None.

    Raises `BadValue` for tokens of another shape, ids that the model has not, and a cache that waits for a sampled
    token; `BadCheckpoint` for another model's cache.
    """
    check_model(params, cache)
    policy = checked_policy(params, None, cache)
    ids = checked_ids("tokens", tokens, cache.batch, params.config.vocab_size)
    if int(np.asarray(cache.pending).max()) >= 0:
        raise BadValue("the cache waits for a token that it sampled: expected one straight from prefill")
    texts = cache.texts()
    cache = with_room(policy, params.config, cache, ids.shape[1])
    cache, out = followed(
        params.weights, cache, jnp.asarray(ids), config=params.config, policy=policy,
        implementation=implementation, logits=logits, learned=params.learned_for(policy.learns, policy.name),
    )  # fmt: skip
    check_scores(policy)
    if texts is not None:
        texts = right_padded([np.append(text, row[row >= 0]) for text, row in zip(texts, ids, strict=True)])
    return dataclasses.replace(cache, tokens=texts), out


@held
@functools.partial(jax.jit, static_argnames=("config", "policy", "implementation", "logits"), donate_argnames="cache")
def followed(
    weights,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    *,
    config: ModelConfig,
    policy: Policy,
    implementation: str | None,
    logits: bool,
    learned: run.Learned,
) -> tuple[KVCache, Float[Array, "B N V"] | None]:
    """`follow`, compiled."""

    how = {"implementation": implementation, "learned": learned}

    def step(cache: KVCache, token: Int[Array, "B"]):
        cache, after = step_on(weights, cache, token, config, policy, **how)
        return cache, after if logits else None

    cache, out = lax.scan(step, cache, tokens.T)
    return cache, None if out is None else jnp.swapaxes(out, 0, 1)


def step_on(
    weights, cache: KVCache, token: Int[Array, "B"], config: ModelConfig, policy: Policy, **how: Any
) -> tuple[KVCache, Float[Array, "B V"]]:
    """The cache behind one forced token of each row (-1: none), and the logits after it; `how` as `decode_logits` has
    it."""
    cache = dataclasses.replace(cache, pending=token)
    cache, after = run.decode_logits(weights, cache, token >= 0, config, policy, **how)
    return dataclasses.replace(cache, pending=jnp.full_like(token, -1)), after
