"""Whether a round drafts at all: what drafts brought so far, against what the longer pass costs."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

RATE = 0.2  # weight of the newest round in the running mean
RETRY = 1 / 24  # a failed try is forgotten after so many rounds that were passed over
FIRST_COST = 1.5  # of a tree's pass in plain steps, until it has been measured
RANGE = (1.02, 8.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gate:
    """`gain [classes]`: accepted drafts per round and row so far, by kind of draft; `cost`: one tree in plain steps."""

    gain: Float[Array, "classes"]
    cost: Float[Array, ""]


def opened(classes: int, depth: int) -> Gate:
    """A gate that has seen nothing and expects much."""
    return Gate(jnp.full(classes, depth / 2, jnp.float32).at[0].set(0.0), jnp.float32(FIRST_COST))


def pays(gate: Gate, kinds: Int[Array, "B"], running: Bool[Array, "B"]) -> Bool[Array, ""]:
    """Whether the drafts expected of this round's kinds are worth the cost: 1 + mean gain > cost."""
    gain = jnp.sum(jnp.where(running, gate.gain[kinds], 0.0)) / jnp.maximum(jnp.sum(running, dtype=jnp.float32), 1.0)
    return 1 + gain > gate.cost


def learned(gate: Gate, kinds: Int[Array, "B"], accepted: Int[Array, "B"], running: Bool[Array, "B"]) -> Gate:
    """After a tree: the running means of the kinds that occurred move towards what was accepted."""
    member = (kinds[:, None] == jnp.arange(gate.gain.size)) & running[:, None]
    count = jnp.sum(member, axis=0, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(member, accepted[:, None], 0), axis=0, dtype=jnp.float32) / jnp.maximum(count, 1.0)
    gain = jnp.where(count > 0, gate.gain + RATE * (mean - gate.gain), gate.gain)
    return dataclasses.replace(gate, gain=gain.at[0].set(0.0))


def waited(gate: Gate, kinds: Int[Array, "B"], running: Bool[Array, "B"]) -> Gate:
    """After a plain step: the kinds that were passed over come a little closer to another try."""
    member = jnp.any((kinds[:, None] == jnp.arange(gate.gain.size)) & running[:, None], axis=0)
    gain = jnp.where(member, gate.gain + RATE * RETRY * (gate.cost - 1), gate.gain)
    return dataclasses.replace(gate, gain=gain.at[0].set(0.0))


def measured(trees: list[int], steps: list[int], seconds: list[float]) -> float:
    """One tree's pass in plain steps, from chunks that mixed them: least squares, drawn weakly to FIRST_COST."""
    total = sum(steps) + FIRST_COST * sum(trees)
    if not total:
        return FIRST_COST
    unit = sum(seconds) / total
    a, b, c = 4.0, 0.0, 4.0  # the weak prior: four rounds of each at their expected times
    x, y = 4.0 * unit, 4.0 * FIRST_COST * unit
    for tree, step, second in zip(trees, steps, seconds, strict=True):
        a, b, c = a + step * step, b + step * tree, c + tree * tree
        x, y = x + step * second, y + tree * second
    step, tree = (c * x - b * y) / (a * c - b * b), (a * y - b * x) / (a * c - b * b)
    return float(min(max(tree / step, RANGE[0]), RANGE[1])) if step > 0 else FIRST_COST
