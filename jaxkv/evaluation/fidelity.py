"""Fidelity without a task: how far a policy's next-token distributions are from the full cache's, on any text.

Teacher-forced: the prompt is prefilled under the policy, then the text's own continuation runs through decode token by
token under it. Everything is compared with the same steps on the full cache.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.decoding import with_room
from jaxkv.evaluation import one_prefill
from jaxkv.evaluation.forced import follow, step_on
from jaxkv.generate import prefill
from jaxkv.models import ModelConfig
from jaxkv.policies.aggregate import Aggregate
from jaxkv.policies.catalogue import catalogue
from jaxkv.policies.observe import CurrentQuery
from jaxkv.policies.policy import Phase, Policy
from jaxkv.policies.score import AccumulatedAttention
from jaxkv.programs import held
from jaxkv.request import checked_ids
from jaxkv.store import KVCache
from jaxkv.weights.params import Params


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the full cache says: log-probabilities `[B, N, V]` after each continuation token, and the attention mass
    `[L, B, Hk, T]` that each prompt token got from the N continuation queries (summed; mean over the group). In a layer
    with a sliding window that is what queries gave it while it was inside.
    """

    prompt: np.ndarray
    continuation: np.ndarray
    log_probabilities: Float[Array, "B N V"]
    mass: np.ndarray


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """A policy beside the full cache, per text (row).

    `kl [B]`: mean over the continuation of KL(full || policy), in nats. `top1 [B]`: share of steps with the same most
    likely token. `perplexity [B]` and `full_perplexity [B]`: of the continuation from its second token on.
    `mass [L, Hk]`: of the attention mass that the continuation's queries give the prompt on the full cache, the share
    on what prefill kept. `overlap [L, Hk]`: of the kept tokens, the share that is in the oracle's set, as many tokens
    of highest such mass.
    """

    kl: np.ndarray
    top1: np.ndarray
    perplexity: np.ndarray
    full_perplexity: np.ndarray
    mass: np.ndarray
    overlap: np.ndarray


def reference(params: Params, prompt: np.ndarray, continuation: np.ndarray) -> Reference:
    """The full cache's answers for `prompt [B, T]` and `continuation [B, N]` token ids."""
    prompt = np.asarray(prompt)
    continuation = checked_ids("continuation", continuation, len(prompt), params.config.vocab_size)
    logits = _logits(params, catalogue()["full"], prompt, continuation)[0]
    return Reference(prompt, continuation, logits, _mass(params, prompt, continuation))


def fidelity(params: Params, policy: Policy, against: Reference) -> Fidelity:
    """The policy against the reference. The full cache against itself has a KL of exactly 0."""
    mine, positions = _logits(params, policy, against.prompt, against.continuation)
    kl, top1, loss, full_loss = (
        np.asarray(x) for x in _compare(against.log_probabilities, mine, jnp.asarray(against.continuation))
    )
    kept = np.stack([_kept(each, against.prompt.shape[1]) for each in positions])
    share, overlap = shares(kept, against.mass)
    return Fidelity(kl, top1, np.exp(loss), np.exp(full_loss), share, overlap)


def together(params: Params, policies: Sequence[Policy], against: Reference, *, chunk: int) -> list[Fidelity]:
    """`fidelity` of each policy, from one prefill of each text; at most `chunk` rows, of any texts, are decoded side by
    side. Every policy must be able to share a prefill of this length (`one_prefill.apart`)."""
    found: list[dict[int, tuple[Any, ...]]] = [{} for _ in policies]  # of each policy, by text
    asked = ((one_prefill.hear(params, ids), policies) for ids in against.prompt)
    for places, views, logits in one_prefill.followed(params, asked, against.continuation, chunk=chunk):
        rows = np.array([row for row, _ in places])
        mine = jax.nn.log_softmax(logits)
        figures = _compare(against.log_probabilities[rows], mine, jnp.asarray(against.continuation[rows]))
        for (row, number), layers, said in zip(places, views, zip(*map(np.asarray, figures), strict=True), strict=True):
            kept = np.stack([_kept(each[None], against.prompt.shape[1]) for each in layers])
            found[number][row] = (*said, kept)
    out = []
    for texts in found:
        kl, top1, loss, full_loss, kept = zip(*(texts[row] for row in range(len(against.prompt))), strict=True)
        share, overlap = shares(np.concatenate(kept, axis=1), against.mass)
        out.append(Fidelity(np.array(kl), np.array(top1), np.exp(loss), np.exp(full_loss), share, overlap))
    return out


def shares(kept: np.ndarray, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of the mass kept, and overlap with the oracle's set of the same size, per layer and head (mean over rows).

    `kept` bool and `mass`, both `[L, B, Hk, T]`. Where a head gave the prompt no mass, none is lost: a share of 1. Of
    tokens with the same mass those that are kept are the oracle's: behind a sliding window all have none.
    """
    total = mass.sum(axis=-1)
    share = np.divide((kept * mass).sum(axis=-1), total, out=np.ones_like(total), where=total > 0)
    rank = np.argsort(np.lexsort((~kept, -mass), axis=-1), axis=-1)
    counts = kept.sum(axis=-1, keepdims=True)
    overlap = (kept & (rank < counts)).sum(axis=-1) / np.maximum(counts[..., 0], 1)
    return share.mean(axis=1), overlap.mean(axis=1)


def _logits(
    params: Params, policy: Policy, prompt: np.ndarray, continuation: np.ndarray
) -> tuple[Float[Array, "B N V"], list[np.ndarray]]:
    """Log-probabilities after each continuation token, and each layer's positions `[B, Hk, C]` after the prompt."""
    cache = prefill(params, prompt, policy=policy, room=continuation.shape[1], scan_layers=True)
    positions = [np.asarray(layer.by_head().positions) for layer in cache.views]
    _, logits = follow(params, cache, continuation)
    assert logits is not None
    return jax.nn.log_softmax(logits), positions


def _mass(params: Params, prompt: np.ndarray, continuation: np.ndarray) -> np.ndarray:
    """The mass of every prompt token: what a policy that evicts nothing and adds up attention has added up."""
    tokens = prompt.shape[1] + continuation.shape[1]
    watch = Policy(
        name="watch",
        prefill=Phase(),
        decode=Phase(CurrentQuery(), AccumulatedAttention(), Aggregate(group="mean")),
        budget=tokens,
    )
    cache = prefill(params, prompt, policy=watch, scan_layers=True)
    cache = with_room(watch, params.config, cache, continuation.shape[1])
    _, mass = _added_up(params.weights, cache, continuation, config=params.config, tokens=prompt.shape[1])
    return np.stack([np.asarray(layer) for layer in mass])


@held
@functools.partial(jax.jit, static_argnames=("config", "tokens"), donate_argnames="cache")
def _added_up(
    weights, cache: KVCache, continuation: Int[Array, "B N"], *, config: ModelConfig, tokens: int
) -> tuple[KVCache, list[Float[Array, "B Hk T"]]]:
    """The cache behind the continuation, and what each layer's first `tokens` have added up. That is read after every
    step, for a token that falls out of a sliding window takes its sum along."""

    def step(carry, token: Int[Array, "B"]):
        cache, mass = carry
        cache, _ = step_on(weights, cache, token, config, cache.policy)
        return (cache, [_by_position(layer, each) for layer, each in zip(cache.layers, mass, strict=True)]), None

    nothing = [jnp.zeros((*layer.positions.shape[:2], tokens), jnp.float32) for layer in cache.layers]
    return lax.scan(step, (cache, nothing), continuation.T)[0]


def _by_position(layer: Any, before: Float[Array, "B Hk T"]) -> Float[Array, "B Hk T"]:
    """The attention that a layer's tokens have added up, by position; as `before` where one is held no more."""
    batch, heads, tokens = before.shape
    rows, head = jnp.arange(batch)[:, None, None], jnp.arange(heads)[:, None]
    at = jnp.where(layer.positions < 0, tokens, layer.positions)  # past the last: nobody's
    return before.at[rows, head, at].set(layer.stats["attention"], mode="drop")


def _kept(positions: np.ndarray, tokens: int) -> np.ndarray:
    """Which of `tokens` positions are held: bool `[B, Hk, tokens]` from positions `[B, Hk, C]`."""
    out = np.zeros((*positions.shape[:2], tokens), bool)
    row, head, slot = np.nonzero((positions >= 0) & (positions < tokens))
    out[row, head, positions[row, head, slot]] = True
    return out


@jax.jit
def _compare(
    full: Float[Array, "B N V"], mine: Float[Array, "B N V"], continuation: Int[Array, "B N"]
) -> tuple[Float[Array, "B"], Float[Array, "B"], Float[Array, "B"], Float[Array, "B"]]:
    """Mean KL, mean top-1 agreement, and both mean losses on the continuation's second to last tokens."""
    from optax import losses

    kl = losses.kl_divergence_with_log_targets(mine, full)
    top1 = (jnp.argmax(full, axis=-1) == jnp.argmax(mine, axis=-1)).astype(jnp.float32)
    loss, of_full = (
        losses.softmax_cross_entropy_with_integer_labels(log[:, :-1], continuation[:, 1:]).mean(axis=-1)
        for log in (mine, full)
    )
    return kl.mean(axis=-1), top1.mean(axis=-1), loss, of_full
