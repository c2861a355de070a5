"""`calibrate`: what some policies need to know of a model, measured once on text that jaxkv carries."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.checks import check_arguments
from jaxkv.errors import BadValue
from jaxkv.evaluation import texts
from jaxkv.models import AttentionSpec, ModelConfig
from jaxkv.models.rope import rotate
from jaxkv.policies.catalogue import catalogue
from jaxkv.policies.curves import best_split
from jaxkv.policies.policy import priority
from jaxkv.policies.score import ScoreInputs
from jaxkv.request import check_model
from jaxkv.run import model_of
from jaxkv.store.entries import highest
from jaxkv.weights.params import Params
from pallas_kernels.masking import masked_softmax, soft_cap, visible

SKIP = 4  # the first tokens of a text draw attention whatever they say, and their queries are like no others
FACTS = (
    ("The secret word of the old lighthouse is {}.", "What is the secret word of the old lighthouse?"),
    ("The blue door opens with the code {}.", "Which code opens the blue door?"),
    ("The captain's favourite number is {}.", "What is the captain's favourite number?"),
    ("The parcel for the baker has the label {}.", "Which label does the parcel for the baker have?"),
)


def calibrate(params: Params, *, length: int = 512, windows: int = 12, needles: int = 8, seed: int = 0) -> dict:
    """Statistics of the model's queries on prose, and which heads retrieve; float32 arrays by name.

    Over `windows` stretches of `length` tokens, without the first four of each: `query_mean [L, Hq, D]` and
    `query_covariance [L, Hq, D, D]` (1/(N-1)) before RoPE (Expected Attention with statistics, as kvpress), and
    `query_direction [L, Hk, D]`, the first right singular vector of a group's queries after RoPE, turned so that they
    point along it on average (Q-Filters, arXiv 2503.02812). `retrieval [L, Hq]` is the attention mass that a head, at
    the tokens which say an answer, puts on the whole sentence that holds it (CompressKV's semantic retrieval score,
    arXiv 2508.02401, here with the right answer given instead of generated), over `needles` facts hidden in prose.
    `eviction_error [L]` is what is lost of each layer's output where a quarter of a stretch is kept, by CompressKV's
    choice: ||kept - full||_F / ||full||_F for the queries of the last eighth (the source's own, over our text).
    `utility_curves [L, 99, Hk]`: the fraction of its entries that a head keeps when 1 to 99 % of all are removed so
    that least is lost of what the second half of a stretch reads of the first, the heads' entries in the order of
    LU-KV's score; a mean over the stretches (LU-KV, arXiv 2602.08585; the measure of what is read is ours).
    Raises `BadValue` without a tokenizer, and for sizes that leave nothing to measure.
    """
    check_model(params)
    check_arguments(length=length, windows=windows, needles=needles, seed=seed)
    if params.tokenizer is None:
        raise BadValue("calibrate needs the model's tokenizer, and these params have none: load them with one")
    if length <= 4 * SKIP or length > params.config.max_position:
        raise BadValue(
            f"length={length}: expected more than {4 * SKIP} tokens, and no more than the model's context of "
            f"{params.config.max_position}"
        )
    sums, stretches = None, _windows(params, length, windows)
    for tokens in stretches:
        found = _query_sums(params.weights, tokens[None], config=params.config)
        sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
    assert sums is not None
    masses = [
        _answer_mass(params.weights, *one, config=params.config) for one in _hidden(params, length, needles, seed)
    ]
    found = {**_statistics(sums), "retrieval": sum(masses)}
    errors = [
        _eviction_error(params.weights, tokens[None], found["retrieval"], config=params.config) for tokens in stretches
    ]
    found["eviction_error"] = sum(errors) / len(errors)
    splits = [_split(_gains(params.weights, tokens[None], config=params.config)) for tokens in stretches]
    found["utility_curves"] = sum(splits) / len(splits)
    return {name: np.asarray(value) for name, value in found.items()}


def _statistics(sums: tuple[dict[str, jax.Array], ...]) -> dict[str, jax.Array]:
    """Mean, covariance and principal direction per layer from the sums."""
    means, covariances, directions = [], [], []
    for layer in sums:
        many = layer["count"]
        mean = layer["sum"] / many
        outer = jnp.einsum("hd,he->hde", mean, mean)
        covariances.append((layer["outer"] - many * outer) / (many - 1))
        means.append(mean)
        _, vectors = jnp.linalg.eigh(layer["turned_outer"])
        first = vectors[..., -1]
        along = jnp.einsum("hd,hd->h", first, layer["turned_sum"])
        directions.append(jnp.where(along < 0, -1.0, 1.0)[:, None] * first)
    return {
        "query_mean": jnp.stack(means),
        "query_covariance": jnp.stack(covariances),
        "query_direction": jnp.stack(directions),
    }


def _windows(params: Params, length: int, count: int) -> list[np.ndarray]:
    """`count` stretches of the prose, evenly spread over it and overlapping where it is too short."""
    ids = np.asarray(params.tokenizer(texts.prose(), add_special_tokens=False)["input_ids"], np.int32)
    if len(ids) < length:
        raise BadValue(f"length={length}: the text that jaxkv carries has {len(ids)} tokens; expected no more")
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return [ids[start : start + length] for start in starts]


def _hidden(params: Params, length: int, count: int, seed: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Prompts that hide a fact in prose and end with its answer: tokens, which are the fact's, which say the answer."""
    rng = np.random.default_rng(seed)
    prose = " ".join(texts.prose().split())

    def ids(text: str) -> list[int]:
        return params.tokenizer(text, add_special_tokens=False)["input_ids"]

    filler, out = ids(prose), []
    for number in range(count):
        fact, question = FACTS[number % len(FACTS)]
        answer = str(rng.integers(10_000, 100_000))
        needle, asked = ids(" " + fact.format(answer)), ids(f"\n\nQuestion: {question}\nAnswer:")
        said = ids(f" {answer}")
        room = length - len(needle) - len(asked) - len(said)
        if room < 1:
            raise BadValue(f"length={length}: a fact, its question and answer alone need {length - room}; give more")
        at, start = int(room * (number + 0.5) / count), int(rng.integers(0, max(1, len(filler) - room)))
        text = filler[start : start + room]
        tokens = [*text[:at], *needle, *text[at:], *asked, *said]
        place = np.arange(len(tokens))
        inside = (place >= at) & (place < at + len(needle))
        # a token is said by the query before it, and counts where it stands in the fact
        says = (place >= len(tokens) - len(said) - 1) & (place < len(tokens) - 1)
        says &= np.isin(np.append(tokens[1:], -1), needle)
        out.append((np.asarray(tokens, np.int32), inside, says))
    return out


@functools.partial(jax.jit, static_argnames="config")
def _query_sums(weights, tokens: Int[Array, "B T"], *, config: ModelConfig) -> tuple[dict[str, jax.Array], ...]:
    """Per layer the sums of the queries and of their outer products, before RoPE by head and after it by group."""

    def look(spec: AttentionSpec, seen: Seen):
        query, turned = (x[:, SKIP:].astype(jnp.float32) for x in (seen.query, seen.turned))
        group = turned.reshape(*turned.shape[:2], spec.num_kv_heads, -1, turned.shape[-1])
        return {
            "count": jnp.float32(query.shape[0] * query.shape[1]),
            "sum": jnp.sum(query, axis=(0, 1)),
            "outer": jnp.einsum("bthd,bthe->hde", query, query),
            "turned_sum": jnp.sum(group, axis=(0, 1, 3)),
            "turned_outer": jnp.einsum("bthgd,bthge->hde", group, group),
        }

    return _looked(weights, tokens, config, look)


@functools.partial(jax.jit, static_argnames="config")
def _answer_mass(weights, tokens: Int[Array, "T"], inside, says, *, config: ModelConfig) -> Float[Array, "L Hq"]:
    """The attention mass of every head from the queries that `say` on the keys `inside`, a mean over the queries."""

    def look(spec: AttentionSpec, seen: Seen):
        mass = jnp.sum(jnp.where(inside, seen.mass, 0.0), axis=-1)[0]  # [Hq, T]
        return jnp.sum(jnp.where(says, mass, 0.0), axis=-1) / jnp.maximum(jnp.sum(says, dtype=jnp.float32), 1.0)

    return jnp.stack(_looked(weights, tokens[None], config, look))


@functools.partial(jax.jit, static_argnames="config")
def _eviction_error(
    weights, tokens: Int[Array, "B T"], retrieval: Float[Array, "L Hq"], *, config: ModelConfig
) -> Float[Array, "L"]:
    """||kept - full||_F / ||full||_F of every layer's output, for queries after a prompt of which a quarter is kept."""
    phase, model = catalogue()["compresskv"].prefill, model_of(config, weights)
    assert phase is not None
    prompt = tokens.shape[1] - tokens.shape[1] // 8
    window, keep = phase.observe.window, prompt // 4
    facts = [(model.output_matrix(layer), retrieval[layer]) for layer in range(config.num_layers)]

    def look(spec: AttentionSpec, seen: Seen):
        out, scores = seen.facts
        mass = jnp.sum(seen.mass[:, :, prompt - window : prompt, :prompt], axis=2)
        at = jnp.broadcast_to(jnp.arange(prompt, dtype=jnp.int32), (len(mass), spec.num_kv_heads, prompt))
        recent = at >= prompt - window
        mass = phase.aggregate.along_text(mass, at, recent)
        worth = phase.aggregate.over_group(mass, spec.num_kv_heads, {"retrieval": scores})
        kept = highest(jnp.where(recent, jnp.inf, worth), jnp.full(len(mass), keep, jnp.int32))
        kept = jnp.pad(kept, ((0, 0), (0, 0), (0, tokens.shape[1] - prompt)), constant_values=True)
        kept = jnp.repeat(kept, mass.shape[1] // spec.num_kv_heads, axis=1)[:, :, None]
        value = jnp.repeat(seen.value, mass.shape[1] // spec.num_kv_heads, axis=2)
        full = seen.mass[:, :, prompt:]
        held = jnp.where(kept, full, 0.0)
        lost = held / jnp.sum(held, axis=-1, keepdims=True) - full
        size = lambda weight: jnp.linalg.norm(  # noqa: E731
            jnp.einsum("bhqs,bshd,hdm->bqm", weight, value.astype(jnp.float32), out.astype(jnp.float32))
        )
        return size(lost) / size(full)

    return jnp.stack(_looked(weights, tokens, config, look, facts))


@functools.partial(jax.jit, static_argnames="config")
def _gains(weights, tokens: Int[Array, "B T"], *, config: ModelConfig) -> Float[Array, "L Hk N"]:
    """What later queries read of the first N = T // 2 entries of every head, in the order in which it would keep them.

    An entry's worth is the attention that the queries after the N give it, times the size of what it writes into the
    stream, sum_q a_q ||v W_O||_2 over the group's heads, of the layer's whole.
    """
    policy, model, prompt = catalogue()["lu-kv"], model_of(config, weights), tokens.shape[1] // 2
    phase = policy.prefill
    assert phase is not None
    facts = [model.output_matrix(layer) for layer in range(config.num_layers)]

    def look(spec: AttentionSpec, seen: Seen):
        query, key, value = (jnp.swapaxes(x[:, :prompt], 1, 2) for x in (seen.query, seen.key, seen.value))
        at = jnp.broadcast_to(jnp.arange(prompt, dtype=jnp.int32), (1, spec.num_kv_heads, prompt))
        now = jnp.full(1, prompt, jnp.int32)
        inputs = ScoreInputs(
            keys=key, values=value, places=at, queries=query, query_positions=at[:, 0], query_places=at[:, 0],
            rotate=lambda x, places: rotate(x, places, spec.rope), scale=spec.scale,
        )  # fmt: skip
        worth = priority(phase, policy.enter(key, value), at, None, now, now, inputs)
        read = jnp.sum(seen.mass[:, :, prompt:, :prompt], axis=2).reshape(1, spec.num_kv_heads, -1, prompt)
        out = seen.facts.reshape(spec.num_kv_heads, -1, spec.head_dim, config.hidden_size).astype(jnp.float32)
        size = jnp.linalg.norm(jnp.einsum("bhsd,hgdm->bhgsm", value.astype(jnp.float32), out), axis=-1)
        gain = jnp.sum(read * size, axis=2)[0]
        return jnp.take_along_axis(gain, jnp.argsort(-worth[0], axis=-1, stable=True), axis=-1) / jnp.sum(gain)

    return jnp.stack(_looked(weights, tokens, config, look, facts))


def _split(gains: Float[Array, "L Hk N"]) -> Float[Array, "L 99 Hk"]:
    layers, heads, entries = gains.shape
    return jnp.asarray(best_split(np.asarray(gains).reshape(-1, entries)).reshape(99, layers, heads).swapaxes(0, 1))


class Seen(NamedTuple):
    """A layer and a text: queries before and after RoPE, attention weights, turned keys and values; its `facts`."""

    query: Float[Array, "B T Hq D"]
    turned: Float[Array, "B T Hq D"]
    mass: Float[Array, "B Hq T T"]
    key: Float[Array, "B T Hk D"]
    value: Float[Array, "B T Hk D"]
    facts: Any


def _looked(
    weights,
    tokens: Int[Array, "B T"],
    config: ModelConfig,
    look: Callable[[AttentionSpec, Seen], Any],
    facts: Sequence[Any] | None = None,
) -> Any:
    """What `look` gives of every layer, bottom first; `facts` of each layer are handed to it."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

    def attend(spec: AttentionSpec, query, key, value, facts):
        turned = rotate(query, positions[..., None], spec.rope)
        key = rotate(key, positions[..., None], spec.rope)
        keys, values = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
        logits = jnp.einsum("bthd,bshd->bhts", turned, keys, preferred_element_type=jnp.float32) * spec.scale
        reach = visible(positions[:, None], positions[:, None], spec.window)
        mass, _ = masked_softmax(soft_cap(logits, spec.softcap), reach)
        context = jnp.einsum("bhts,bshd->bthd", mass.astype(values.dtype), values)
        return context.astype(query.dtype), look(spec, Seen(query, turned, mass, key, value, facts))

    _, found = model_of(config, weights)(tokens, facts or (None,) * config.num_layers, attend)
    return found
