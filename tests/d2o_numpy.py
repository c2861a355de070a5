"""D2O's merging as its release does it, written again in NumPy: what an implementation is compared with.

One row, one layer, H heads that each choose for themselves (the release repeats keys and values to all query heads
first). Keys are those that attention multiplies with, rotated. In the order of the release:

1. The prompt is attended in full, and nothing is cut. A score per head and token: attention summed over its queries.
2. Its ratios of the layers come from that attention (`layer_ratios`), the sizes from prompt + 1 (`sizes`). Layers 0, 1
   and L - 1 are never cut.
3. The first generated token attends to the whole prompt and itself; its attention is added to the scores; then the cut.
   `first_cut` is all of this.
4. Every later token attends to the heavy + recent slots and itself; its attention is added; then the cut of one slot
   per head. `step` is this.

The cut (`compress`): the first 4 slots score +inf, and stay so. Kept are the `heavy` best outside the last `recent`
slots, and those; slots stay in the order of time, and keep their scores whatever is merged into them. An evicted e has
m_e = the largest cosine of its key with a kept one (sinks, recent and new ones too), and that slot as its target, of
each head. The threshold is moved first: to the mean of m over heads and tokens when there is none, otherwise to
alpha * tau + beta * mean. Then e is merged, in all heads, if the mean of m_e over the heads is at least the threshold:
e counts the evicted of each head from the oldest, so the heads' e-th are different tokens. Otherwise it is dropped.
A slot with n merged tokens becomes (x + sum m_e x_e) / (1 + n), keys and values alike, from the keys before the merge.
"""

from dataclasses import dataclass

import numpy as np

SINKS = 4
EXEMPT_FIRST, EXEMPT_LAST = 2, 1  # layers at either end that are never cut


@dataclass(frozen=True)
class Cache:
    """What is kept after a cut."""

    keys: np.ndarray  # [H, C, D]
    values: np.ndarray
    scores: np.ndarray  # [H, C], accumulated attention; +inf: sinks
    positions: np.ndarray  # [H, C], where each slot's own token stood; rising
    tau: float | None


@dataclass(frozen=True)
class Evicted:
    """What a cut took away, in the order of time within each head."""

    positions: np.ndarray  # [H, E]
    similarity: np.ndarray  # [H, E], m
    targets: np.ndarray  # [H, E], slots after the cut
    merged: np.ndarray  # [E]; the others were dropped


def attention(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Causal softmax [H, T, S] of the last T of S tokens."""
    logits = queries @ keys.swapaxes(1, 2) / np.sqrt(keys.shape[-1])
    late = np.arange(keys.shape[1]) > np.arange(keys.shape[1])[-queries.shape[1] :, None]
    logits = np.where(late, -np.inf, logits)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def cosines(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """[H, E, D] and [H, C, D] -> [H, E, C]."""
    unit = [array / np.linalg.norm(array, axis=-1, keepdims=True) for array in (rows, columns)]
    return unit[0] @ unit[1].swapaxes(1, 2)


def merge(slots: np.ndarray, gone: np.ndarray, weights: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(x + sum w e) / (1 + n) for one head: [C, D], [E, D], [E], [E] -> [C, D]."""
    total, count = slots.copy(), np.ones(len(slots))
    for token, weight, slot in zip(gone, weights, targets, strict=True):
        total[slot] += weight * token
        count[slot] += 1
    return total / count[:, None]


def compress(cache: Cache, heavy: int, recent: int, alpha: float = 0.5, beta: float = 0.5) -> tuple[Cache, Evicted]:
    """Cut to heavy + recent slots, and merge what is evicted. Needs heavy >= 4, as the release does."""
    heads, length = cache.scores.shape
    scores = cache.scores.copy()
    scores[:, :SINKS] = np.inf
    best = np.argsort(-scores[:, : length - recent], axis=-1, kind="stable")[:, :heavy]
    mask = np.arange(length) >= length - recent
    mask = np.repeat(mask[None], heads, 0)
    np.put_along_axis(mask, best, True, axis=1)

    def split(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return tuple(array[which].reshape(heads, -1, *array.shape[2:]) for which in (mask, ~mask))

    (keys, gone_keys), (values, gone_values) = split(cache.keys), split(cache.values)
    (positions, gone_positions), (scores, _) = split(cache.positions), split(scores)
    similar = cosines(gone_keys, keys)
    similarity, targets = similar.max(-1), similar.argmax(-1)
    tau = similarity.mean() if cache.tau is None else alpha * cache.tau + beta * similarity.mean()
    merged = similarity.mean(0) >= tau
    chosen = [(similarity[head, merged], targets[head, merged]) for head in range(heads)]
    keys = np.stack([merge(keys[head], gone_keys[head, merged], *chosen[head]) for head in range(heads)])
    values = np.stack([merge(values[head], gone_values[head, merged], *chosen[head]) for head in range(heads)])
    return Cache(keys, values, scores, positions, tau), Evicted(gone_positions, similarity, targets, merged)


def first_cut(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    heavy: int,
    recent: int,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
    tau: float | None = None,
) -> tuple[Cache, Evicted, np.ndarray]:
    """The cache after the first generated token, the last of queries, keys and values [H, prompt + 1, D]; what it lost;
    and that token's attention output [H, D]. `tau` is the threshold that the release carries over from the last text.
    """
    weights = attention(queries, keys)
    positions = np.repeat(np.arange(keys.shape[1])[None], len(keys), 0)
    cache, lost = compress(Cache(keys, values, weights.sum(1), positions, tau), heavy, recent, alpha, beta)
    return cache, lost, (weights[:, -1:] @ values)[:, 0]


def step(
    cache: Cache,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    position: int,
    heavy: int,
    recent: int,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
) -> tuple[Cache, Evicted, np.ndarray]:
    """One later token, query, key and value [H, D]: the cache after it, what it lost, and its attention output."""
    keys = np.concatenate([cache.keys, key[:, None]], 1)
    values = np.concatenate([cache.values, value[:, None]], 1)
    positions = np.pad(cache.positions, ((0, 0), (0, 1)), constant_values=position)
    weights = attention(query[:, None], keys)[:, 0]
    scores = np.pad(cache.scores, ((0, 0), (0, 1))) + weights
    cache, lost = compress(Cache(keys, values, scores, positions, cache.tau), heavy, recent, alpha, beta)
    return cache, lost, (weights[:, None] @ values)[:, 0]


def spread(scores: np.ndarray) -> float:
    """How uneven a layer's attention is, from the prompt's scores [H, S]: each head's variance over the tokens (divided
    by S - 1), brought to [0, 1] over the layer's own heads, and its mean. Two heads always give 1/2, one gives 0.
    """
    variance = scores.var(-1, ddof=1)
    low, high = variance.min(), variance.max()
    return ((variance - low) / (high - low + 1e-6)).mean()


def layer_ratios(spreads: np.ndarray, heavy: float, recent: float) -> np.ndarray:
    """[2, L], the layers' ratios of heavy and of recent tokens. All layers take part, those that are never cut too."""
    weights = np.exp(-spreads) / np.exp(-spreads).sum()
    total = np.clip(weights * len(spreads) * (heavy + recent), 0.01, 1.0)
    return np.stack([total * heavy, total * recent]) / (heavy + recent)


def sizes(ratios: np.ndarray, prompt: int) -> np.ndarray:
    """Slots [2, L] of heavy and of recent tokens, rounded down; the first generated token counts as one of the text."""
    return ((prompt + 1) * ratios).astype(int)
