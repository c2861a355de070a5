"""The next slot, in registers of a TPU: the lowest worth, of those the lowest age, and of those the lowest index."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import tpu_blocks as blocks_of
from pallas_kernels.decode_attend_score.victim import HEADS
from pallas_kernels.tpu_plan import Plan

LAST = jnp.iinfo(jnp.int32).max
RUNS = 4  # of comparisons side by side


def worth(plan: Plan, score: jax.Array | None, place: jax.Array, now, room, recent) -> tuple[jax.Array, jax.Array]:
    """What `victim.victim` compares: the lowest worth goes, the lowest age among those, the lowest index then."""
    live = place >= 0 if plan.window is None else (place >= 0) & (place > now - plan.window)
    if plan.rule is None or score is None:  # the first empty or expired slot
        return live.astype(jnp.float32), jnp.zeros(place.shape, jnp.int32)
    if plan.rule.heads != "each" and not plan.pooled:
        score = jnp.broadcast_to(HEADS[plan.rule.heads](score, axis=0, keepdims=True), score.shape)
    safe = (place < plan.rule.sinks) | (place >= now - recent)
    score = jnp.where(safe, jnp.inf, score)
    return jnp.where(live, score, jnp.where(room, -jnp.inf, jnp.inf)), place


def tree(act: Callable, parts: list) -> Any:
    """The parts joined in pairs, so that the pairs of a level need not wait for each other."""
    while len(parts) > 1:
        parts = [act(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def over_lanes(act: Callable, x: jax.Array) -> jax.Array:
    """[rows, S] to [rows, 128], lane by lane."""
    return tree(act, [x[:, start : start + blocks_of.LANES] for start in range(0, x.shape[1], blocks_of.LANES)])


def in_runs(act: Callable, of: Callable, width: int, begin: Any) -> Any:
    """`of(start)` of every register's lanes of a width, each joined to what was found before it: a few runs side by
    side, so that they do not wait for each other, and no more is alive than registers hold."""
    starts = list(range(0, width, blocks_of.LANES))
    each = -(-len(starts) // RUNS)
    runs = [starts[first : first + each] for first in range(0, len(starts), each)]
    found = [begin] * len(runs)
    for turn in range(each):
        found = [act(one, of(run[turn])) if turn < len(run) else one for one, run in zip(found, runs, strict=True)]
    return tree(act, found)


def lowest(worth: jax.Array, age: jax.Array, index: jax.Array) -> jax.Array:
    """Per head, the index [Hk, 1] of lowest worth, then age, then index."""
    least = jnp.min(worth, axis=1, keepdims=True)
    oldest = jnp.min(jnp.where(worth == least, age, LAST), axis=1, keepdims=True)
    return jnp.min(jnp.where((worth == least) & (age == oldest), index, LAST), axis=1, keepdims=True)


def lower(a: tuple, b: tuple, ordered: bool = True) -> tuple:
    """The lower of two triples of worth, age and index, in every place; the indices of a are the lower ones, if they
    are `ordered`. A worth that is NaN in b says that there is none."""
    (wa, aa, ia), (wb, ab, ib) = a, b
    second = ab < aa if ordered else (ab < aa) | ((ab == aa) & (ib < ia))
    second = (wb < wa) | ((wb == wa) & second)
    return tuple(jnp.where(second, y, x) for x, y in zip(a, b, strict=True))


def head_in_row(worth: Float[Array, "Hk 8 128"], age: Array, index: Array) -> tuple[Array, ...]:
    """Each head's lowest triple in every lane, `[Hk, 128]` each."""
    kv_heads, shape = worth.shape[0], worth.shape[1:]
    each = [(worth[head], age[head], index[head]) for head in range(kv_heads)]
    none = (jnp.full(shape, jnp.inf), *[jnp.full(shape, LAST, jnp.int32)] * 2)
    each += [none] * (-kv_heads % blocks_of.SUBLANES)
    in_any_order = functools.partial(lower, ordered=False)
    found = [
        blocks_of.as_rows(in_any_order, each[first : first + blocks_of.SUBLANES])
        for first in range(0, len(each), blocks_of.SUBLANES)
    ]
    return tuple(jnp.concatenate(some, axis=0)[:kv_heads] for some in zip(*found, strict=True))
