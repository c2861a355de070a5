"""`calibrate`: what some policies need to know of a model, measured once on a text."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv.answers import SAID, answered, hidden
from jaxkv.checks import check_arguments
from jaxkv.errors import BadValue
from jaxkv.evaluation.asking import ids
from jaxkv.evaluation.texts import calibration
from jaxkv.models import AttentionSpec, ModelConfig
from jaxkv.models.rope import rotate
from jaxkv.policies.catalogue import catalogue
from jaxkv.policies.curves import best_split
from jaxkv.policies.policy import priority
from jaxkv.policies.score import ScoreInputs
from jaxkv.request import Progress, check_model
from jaxkv.run import model_of
from jaxkv.sampling import generator
from jaxkv.store.entries import highest
from jaxkv.store.higgs import Higgs
from jaxkv.store.predicted import Predicted
from jaxkv.weights.params import Params
from pallas_kernels.masking import masked_softmax, soft_cap, visible

SKIP = 4  # the first tokens of a text draw attention whatever they say, and their queries are like no others
REPEATS = 4  # of the random tokens by which echo and induction heads are told
BLOCKS = 4  # of the text by which a layer's keys are made a second time, each seeing half of the one before it
SINKED = 128  # one of so many tokens of that text is seen by all
DAMP = 1e-3  # of the mean of the diagonal, which is added to it where keys and values are predicted
COMPARED = 16  # parts of the text, in each of which the two makings of the keys are compared


def calibrate(
    params: Params,
    *,
    length: int = 512,
    windows: int = 12,
    needles: int = 8,
    seed: int = 0,
    predictors: bool = False,
    text: str | None = None,
    progress: Progress | None = None,
) -> dict:
    """Statistics of the model's queries on a text, and which heads retrieve; float32 arrays by name.

    The `text` is one that jaxkv carries for this alone, unless another is given: what is evaluated should not be read
    here. Over `windows` stretches of it of `length` tokens, without the first four of each: `query_mean [L, Hq, D]` and
    `query_covariance [L, Hq, D, D]` (1/(N-1)) before RoPE (Expected Attention with statistics, as kvpress), and
    `query_direction [L, Hk, D]`, a group's mean of each head's first right singular vector of its queries after RoPE,
    turned to where these point (Q-Filters, arXiv 2503.02812). `key_channels [L, Hk, D]`: mean(q_c^2) * mean(k_c^2) of
    each channel after RoPE, over a group's query heads (ThinK's measure, arXiv 2407.21018). `key_products` and
    `value_products [L, N (N + 1) / 2]`: the mean of k k^T after RoPE and of v v^T, k and v being the N = Hk D channels
    of all heads of a layer; rows of the upper triangle one behind the other (SVD of activations, arXiv 2406.07056).
    `retrieval [L, Hq]` is, for every token that the model answers with and that stands in a fact hidden in the text,
    the attention mass that a head puts on the sentence with the fact, once for each time that the token stands there,
    summed over the answer; a mean over the facts of `needles` that the model tells right (CompressKV's semantic
    retrieval score, arXiv 2508.02401; where it tells none, the right answers are given instead). `reasoning [L, Hq]`:
    the same of facts of which a comparison says which one is asked for; of each token of the answer, what of a head's n
    largest weights lies on the n tokens of the right fact, over n (HeadKV's R2 score, arXiv 2410.19258). `echo` and
    `induction [L, Hq]`: in random tokens that come four times, the mass of a head on earlier places of the same token,
    and on those right behind them (RazorAttention, arXiv 2407.15891). `eviction_error [L]` is what is lost of each
    layer's output where a quarter of a stretch is kept, by CompressKV's choice: ||kept - full||_F / ||full||_F for the
    queries of the last eighth (the source's own, over our text). `utility_curves [L, 99, Hk]`: the fraction of its
    entries that a head keeps when 1 to 99 % of all are removed so that least is lost of what the second half of a
    stretch reads of the first, the heads' entries in the order of LU-KV's score; a mean over the stretches (LU-KV,
    arXiv 2602.08585; the measure of what is read is ours). `key_similarity [L]`: the cosine between the keys that a
    layer makes and those it makes where every token sees only its quarter of the stretch, half of the quarter before,
    and the first tokens; a mean over heads and parts (EpiCache's layer sensitivity, arXiv 2509.17396, at its
    proportions).

    With `predictors` also `key_predictor [L, N + 1, N]` and `value_predictor [L, 2 N + 1, N]`: what predicts a layer's
    keys before RoPE from those of the layer below, and its values from its keys and the values below, all heads
    together, the last row added; by ridge regression with the 2-bit reconstruction that a cache would hold of what it
    predicts from (AQUA-KV, arXiv 2501.19392). They are large: 3 N^2 numbers a layer, 0 in the lowest.

    `progress` hears ("calibrate", done, of) after every stretch of a measurement. Raises `BadValue` without a
    tokenizer, and for sizes that leave nothing to measure, or that the text has not.
    """
    check_model(params)
    check_arguments(length=length, windows=windows, needles=needles, seed=seed, predictors=predictors, text=text)
    if params.tokenizer is None:
        raise BadValue("calibrate needs the model's tokenizer, and these params have none: load them with one")
    if length <= 4 * SKIP or length > params.config.max_position:
        raise BadValue(
            f"length={length}: expected more than {4 * SKIP} tokens, and no more than the model's context of "
            f"{params.config.max_position}"
        )
    text = calibration() if text is None else text
    stretches = _windows(params, text, length, windows)
    kinds = [hidden(params, text, length - SAID, needles, seed, compared) for compared in (False, True)]
    least = SAID + max(needed for _, needed in kinds)
    if length < least:
        raise BadValue(f"length={length}: a fact, its question and answer alone need up to {least}; give more")
    told, compared = (answered(params, prompts, length) for prompts, _ in kinds)
    of = 4 * len(stretches) + len(told) + len(compared) + 1 + (params.config.num_layers if predictors else 0)
    sums = _Sums(params, progress, of)
    texts, front = [(tokens[None],) for tokens in stretches], len(ids(params.tokenizer, "", begins=True))
    found = {
        **_statistics(sums.total(_sums, texts)),
        "retrieval": sums.mean(_told_mass, told),
        "reasoning": sums.mean(_best_told, compared),
        **sums.total(functools.partial(_repeated, front=front), [(_random(params, length, seed),)]),
        "utility_curves": sums.mean(_splits, texts),
        "key_similarity": sums.mean(_key_similarity, texts),
    }
    found["eviction_error"] = sums.mean(functools.partial(_eviction_error, retrieval=found["retrieval"]), texts)
    if predictors:
        found |= _predictors(params, stretches, sums.heard)
    return {name: np.asarray(value) for name, value in found.items()}


def _predictors(params: Params, stretches: list[np.ndarray], heard: Callable[[], None]) -> dict[str, np.ndarray]:
    """What predicts every layer's keys and values, layer by layer, from the reconstruction of those below."""
    held = [_unturned(params.weights, tokens[None], config=params.config) for tokens in stretches]
    found, coder = {"key_predictor": [], "value_predictor": []}, Predicted()
    below: list[np.ndarray] = []  # keys and values as a cache has them, of the last layer without a sliding window
    for layer, spec in enumerate(params.config.specs):
        keys, values = (np.concatenate([each[layer][part] for each in held]) for part in range(2))
        width = keys.shape[-1]
        matrices = np.zeros((width + 1, width), np.float32), np.zeros((2 * width + 1, width), np.float32)
        if spec.window is None and not below:
            below = [_restored(Higgs(coder.first_bits), x, spec) for x in (keys, values)]
        elif spec.window is None:
            near, more = _fitted(below[0], keys, Higgs(coder.bits), spec)
            below[1], last = _fitted(np.concatenate([near, below[1]], axis=-1), values, Higgs(coder.bits), spec)
            below[0], matrices = near, (more, last)
        for name, matrix in zip(found, matrices, strict=True):
            found[name].append(matrix)
        heard()
    return {name: np.stack(matrices) for name, matrices in found.items()}


def _restored(coder: Higgs, x: Float[np.ndarray, "T N"], spec: AttentionSpec) -> Float[np.ndarray, "T N"]:
    """What a cache has of x, which is coded head by head."""
    by_head = jnp.asarray(x).reshape(len(x), spec.num_kv_heads, -1)
    return np.asarray(coder.decode(coder.encode(by_head))).reshape(x.shape)


def _fitted(
    given: Float[np.ndarray, "T I"], x: Float[np.ndarray, "T N"], coder: Higgs, spec: AttentionSpec
) -> tuple[Float[np.ndarray, "T N"], Float[np.ndarray, "_ N"]]:
    """The ridge regression of x on what is given and 1, in float64; x as a cache has it that codes what it misses."""
    wide = np.concatenate([given, np.ones((len(given), 1), np.float32)], axis=-1).astype(np.float64)
    products = wide.T @ wide
    products[np.diag_indices_from(products)] += DAMP * np.mean(np.diagonal(products))
    matrix = np.linalg.solve(products, wide.T @ x.astype(np.float64)).astype(np.float32)
    predicted = (wide @ matrix).astype(np.float32)
    return predicted + _restored(coder, x - predicted, spec), matrix


@functools.partial(jax.jit, static_argnames="config")
def _unturned(weights, tokens: Int[Array, "B T"], *, config: ModelConfig) -> tuple[tuple[Array, Array], ...]:
    """Per layer the keys before RoPE and the values `[T, N]` of all heads together."""
    back = -jnp.arange(tokens.shape[1], dtype=jnp.int32)[:, None]

    def look(spec: AttentionSpec, seen: Seen):
        key = rotate(seen.key.astype(jnp.float32), back, spec.rope)
        return tuple(x[0, SKIP:].reshape(tokens.shape[1] - SKIP, -1) for x in (key, seen.value.astype(jnp.float32)))

    return _looked(weights, tokens, config, look)


def _statistics(sums: tuple[dict[str, jax.Array], ...]) -> dict[str, jax.Array]:
    """What is said of queries, keys and values per layer, from the sums."""
    means, covariances, directions, channels = [], [], [], []
    for layer in sums:
        many = layer["count"]
        mean = layer["sum"] / many
        outer = jnp.einsum("hd,he->hde", mean, mean)
        covariances.append((layer["outer"] - many * outer) / (many - 1))
        means.append(mean)
        _, vectors = jnp.linalg.eigh(layer["turned_outer"])
        first = vectors[..., -1]
        along = jnp.einsum("hd,hd->h", first, layer["turned_sum"])
        squares = jnp.diagonal(layer["key_outer"]).reshape(layer["turned_square"].shape)
        first = jnp.where(along < 0, -1.0, 1.0)[:, None] * first
        directions.append(jnp.mean(first.reshape(len(squares), -1, first.shape[-1]), axis=1))
        channels.append(layer["turned_square"] * squares / jnp.square(many))
    return {
        "query_mean": jnp.stack(means),
        "query_covariance": jnp.stack(covariances),
        "query_direction": jnp.stack(directions),
        "key_channels": jnp.stack(channels),
        "key_products": jnp.stack([_triangle(layer["key_outer"] / layer["count"]) for layer in sums]),
        "value_products": jnp.stack([_triangle(layer["value_outer"] / layer["count"]) for layer in sums]),
    }


def _triangle(outer: Float[Array, "N N"]) -> Float[Array, "M"]:
    """The rows of the upper triangle, one behind the other."""
    return outer[np.triu_indices(len(outer))]


def _windows(params: Params, text: str, length: int, count: int) -> list[np.ndarray]:
    """`count` stretches of the text, evenly spread over it and overlapping where it is too short, each behind what the
    model's texts begin with."""
    front, tokens = ids(params.tokenizer, "", begins=True), ids(params.tokenizer, text)
    if len(tokens) < length:
        raise BadValue(
            f"the text has {len(tokens)} tokens, fewer than length={length}: give a longer text, or a smaller length="
        )
    if count > len(tokens) - length + 1:
        raise BadValue(
            f"windows={count}: the text has {len(tokens) - length + 1} stretches of {length} tokens; expected no more, "
            "or a longer text"
        )
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return [np.append(front, tokens[start : start + length - len(front)]) for start in starts]


def _random(params: Params, length: int, seed: int) -> np.ndarray:
    """What the model's texts begin with, and random tokens, the same ones four times: as many as the length holds."""
    front = ids(params.tokenizer, "", begins=True)
    some = generator(seed).integers(0, params.config.vocab_size, (length - len(front)) // REPEATS)
    return np.append(front, np.tile(some, REPEATS)).astype(np.int32)


class _Sums:
    """What is measured on texts, added up; `progress` hears of each, of so many in all."""

    def __init__(self, params: Params, progress: Progress | None, of: int):
        self._params, self._progress, self._done, self._of = params, progress, 0, of

    def total(self, measure: Callable[..., Any], texts: Sequence[tuple]) -> Any:
        """The sum over the texts of what `measure` says of them."""
        total = None
        for text in texts:
            found = measure(self._params.weights, *text, config=self._params.config)
            total = jax.block_until_ready(found if total is None else jax.tree.map(jnp.add, total, found))
            self.heard()
        return total

    def mean(self, measure: Callable[..., jax.Array], texts: Sequence[tuple]) -> jax.Array:
        """The mean over the texts of what `measure` says of them."""
        return self.total(measure, texts) / jnp.float32(len(texts))

    def heard(self) -> None:
        """One more text, or layer, is done."""
        self._done += 1
        if self._progress is not None:
            self._progress("calibrate", self._done, self._of)


@functools.partial(jax.jit, static_argnames="config")
def _sums(weights, tokens: Int[Array, "B T"], *, config: ModelConfig) -> tuple[dict[str, jax.Array], ...]:
    """Per layer the sums of the queries and of their outer products by head, before RoPE and after it; those of their
    squares after it by group; and those of keys and values."""

    def look(spec: AttentionSpec, seen: Seen):
        each = seen.query, seen.turned, seen.key, seen.value
        query, turned, key, value = (x[:, SKIP:].astype(jnp.float32) for x in each)
        group = turned.reshape(*turned.shape[:2], spec.num_kv_heads, -1, turned.shape[-1])
        return {
            "count": jnp.float32(query.shape[0] * query.shape[1]),
            "sum": jnp.sum(query, axis=(0, 1)),
            "outer": jnp.einsum("bthd,bthe->hde", query, query),
            "turned_sum": jnp.sum(turned, axis=(0, 1)),
            "turned_outer": jnp.einsum("bthd,bthe->hde", turned, turned),
            "turned_square": jnp.sum(jnp.mean(jnp.square(group), axis=3), axis=(0, 1)),
            "key_outer": jnp.einsum("btn,btm->nm", *2 * (key.reshape(*key.shape[:2], -1),)),
            "value_outer": jnp.einsum("btn,btm->nm", *2 * (value.reshape(*value.shape[:2], -1),)),
        }

    return _looked(weights, tokens, config, look)


@functools.partial(jax.jit, static_argnames="config")
def _told_mass(weights, tokens: Int[Array, "T"], inside, told, stands, *, config: ModelConfig) -> Float[Array, "L Hq"]:
    """The attention mass on the keys `inside` of the queries that tell a token, times how often it `stands` there."""

    def look(spec: AttentionSpec, seen: Seen):
        return jnp.einsum("ht,t->h", jnp.sum(jnp.where(inside, seen.mass[0], 0.0), axis=-1), stands)

    return jnp.stack(_looked(weights, tokens[None], config, look))


@functools.partial(jax.jit, static_argnames="config")
def _best_told(weights, tokens: Int[Array, "T"], inside, told, stands, *, config: ModelConfig) -> Float[Array, "L Hq"]:
    """Of the queries that have `told` a token, what of their n largest weights lies on the n keys `inside`, over n."""
    many = jnp.sum(inside, dtype=jnp.int32)

    def look(spec: AttentionSpec, seen: Seen):
        mass = seen.mass[0]
        best = highest(mass, jnp.full(len(mass), many, jnp.int32)) & inside
        return jnp.sum(jnp.where(best & told[:, None], mass, 0.0), axis=(1, 2)) / many.astype(jnp.float32)

    return jnp.stack(_looked(weights, tokens[None], config, look))


@functools.partial(jax.jit, static_argnames=("front", "config"))
def _repeated(weights, tokens: Int[Array, "T"], *, front: int, config: ModelConfig) -> dict[str, Float[Array, "L Hq"]]:
    """The mass that a head puts, a mean over the queries behind the first of the repeats, on the earlier places of the
    query's token (`echo`) and on those right behind them (`induction`). Repeats come behind the `front` first tokens.
    """
    once, place = (len(tokens) - front) // REPEATS, jnp.arange(len(tokens), dtype=jnp.int32) - front
    back = place[:, None] - place
    earlier = (back > 0) & (place >= 0)
    on = {"echo": earlier & (back % once == 0), "induction": earlier & ((back + 1) % once == 0) & (place > 0)}

    def look(spec: AttentionSpec, seen: Seen):
        behind = seen.mass[0][:, front + once :]
        return {
            name: jnp.sum(jnp.where(there[front + once :], behind, 0.0), axis=-1).mean(-1) for name, there in on.items()
        }

    found = _looked(weights, tokens[None], config, look)
    return {name: jnp.stack([layer[name] for layer in found]) for name in on}


@functools.partial(jax.jit, static_argnames="config")
def _key_similarity(weights, tokens: Int[Array, "B T"], *, config: ModelConfig) -> Float[Array, "L"]:
    """The mean over heads and parts of cos(keys, keys of a text whose tokens see little more than their block)."""
    length = tokens.shape[1]
    block, place = length // BLOCKS, jnp.arange(length, dtype=jnp.int32)
    begins = place // block * block
    near = place >= (begins - block // 2)[:, None]
    seen = (near | (place < max(length // SINKED, 1))) & (place <= place[:, None])

    def look(spec: AttentionSpec, layer: Seen):
        return layer.key.astype(jnp.float32)

    part = length // COMPARED

    def alike(full, blockwise):
        cells = (x[:, : part * COMPARED].reshape(COMPARED, part, *x.shape[2:]) for x in (full, blockwise))
        full, blockwise = cells
        dot, *sizes = (
            jnp.sum(x * y, axis=(1, 3)) for x, y in ((full, blockwise), (full, full), (blockwise, blockwise))
        )
        return jnp.mean(dot / jnp.sqrt(sizes[0] * sizes[1]))

    whole, parted = (_looked(weights, tokens, config, look, reach=reach) for reach in (None, seen))
    return jnp.stack([alike(*each) for each in zip(whole, parted, strict=True)])


@functools.partial(jax.jit, static_argnames="config")
def _eviction_error(
    weights, tokens: Int[Array, "B T"], *, retrieval: Float[Array, "L Hq"], config: ModelConfig
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


def _splits(weights, tokens: Int[np.ndarray, "B T"], *, config: ModelConfig) -> Float[Array, "L 99 Hk"]:
    """What each head keeps when 1 to 99 % of all are removed so that least is lost of what later queries read."""
    gains = _gains(weights, tokens, config=config)
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
    reach: Bool[Array, "T T"] | None = None,
) -> Any:
    """What `look` gives of every layer, bottom first; `facts` of each layer are handed to it. With `reach`, a query
    sees only those keys."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

    def attend(spec: AttentionSpec, query, key, value, facts):
        turned = rotate(query, positions[..., None], spec.rope)
        key = rotate(key, positions[..., None], spec.rope)
        keys, values = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
        logits = jnp.einsum("bthd,bshd->bhts", turned, keys, preferred_element_type=jnp.float32) * spec.scale
        seen = visible(positions[:, None], positions[:, None], spec.window)
        mass, _ = masked_softmax(soft_cap(logits, spec.softcap), seen if reach is None else seen & reach)
        context = jnp.einsum("bhts,bshd->bthd", mass.astype(values.dtype), values)
        return context.astype(query.dtype), look(spec, Seen(query, turned, mass, key, value, facts))

    _, found = model_of(config, weights)(tokens, facts or (None,) * config.num_layers, attend)
    return found
