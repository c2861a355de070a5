"""Whether a round drafts at all: what drafts brought so far, against what the longer pass costs."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

RATE = 0.25  # weight of the newest round in the running mean
ONCE = 0.125  # the same where drafts that were passed over never come again, so that a few bad rounds decide nothing
RETRY = 1 / 24  # a failed try is forgotten after so many rounds that were passed over
ROWS = {"cpu": 8, "other": 512}  # tokens in a pass that double its time, until it has been measured
RANGE = (1.02, 8.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gate:
    """`gain [K]`: accepted drafts per round and row so far, by kind of draft; `cost`: one tree in plain steps;
    `rate`: the newest round's weight in the gain."""

    gain: Float[Array, "K"]
    cost: Float[Array, ""]
    rate: float = dataclasses.field(default=RATE, metadata={"static": True})


def first_cost(rows: int, nodes: int) -> float:
    """What a pass of so many rows with so many tokens each should cost, in plain steps of as many rows."""
    doubling = ROWS["cpu" if jax.default_backend() == "cpu" else "other"]
    return (1 + rows * nodes / doubling) / (1 + rows / doubling)


def opened(classes: int, cost: float) -> Gate:
    """A gate that has seen nothing, and expects a little more of every longer match."""
    return Gate((0.5 + 0.25 * jnp.arange(classes, dtype=jnp.float32)).at[0].set(0.0), jnp.float32(cost))


def hopeful(depth: int, cost: float) -> Gate:
    """A gate for the one kind of drafts of a model, which are tried before they are judged: it expects all of them."""
    return Gate(jnp.array([0.0, depth], jnp.float32), jnp.float32(cost), ONCE)


def pays(gate: Gate, kinds: Int[Array, "B"], running: Bool[Array, "B"]) -> Bool[Array, ""]:
    """Whether the drafts expected of this round's kinds are worth the cost: 1 + mean gain > cost."""
    gain = jnp.sum(jnp.where(running, gate.gain[kinds], 0.0)) / jnp.maximum(jnp.sum(running, dtype=jnp.float32), 1.0)
    return 1 + gain > gate.cost


def learned(gate: Gate, kinds: Int[Array, "B"], accepted: Int[Array, "B"], running: Bool[Array, "B"]) -> Gate:
    """After a tree: the running means of the kinds that occurred move towards what was accepted."""
    member = (kinds[:, None] == jnp.arange(gate.gain.size)) & running[:, None]
    count = jnp.sum(member, axis=0, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(member, accepted[:, None], 0), axis=0, dtype=jnp.float32) / jnp.maximum(count, 1.0)
    gain = jnp.where(count > 0, gate.gain + gate.rate * (mean - gate.gain), gate.gain)
    return dataclasses.replace(gate, gain=gain.at[0].set(0.0))


def waited(gate: Gate, kinds: Int[Array, "B"], running: Bool[Array, "B"]) -> Gate:
    """After a plain step: the kinds that were passed over come a little closer to another try."""
    member = jnp.any((kinds[:, None] == jnp.arange(gate.gain.size)) & running[:, None], axis=0)
    gain = jnp.where(member, gate.gain + gate.rate * RETRY * (gate.cost - 1), gate.gain)
    return dataclasses.replace(gate, gain=gain.at[0].set(0.0))


def measured(trees: list[int], steps: list[int], seconds: list[float], expected: float) -> float:
    """One tree's pass in plain steps, from chunks that mixed them: least squares, drawn weakly to what is expected."""
    total = sum(steps) + expected * sum(trees)
    if not total:
        return expected
    unit = sum(seconds) / total
    a, b, c = 4.0, 0.0, 4.0  # as if a chunk of two steps and one of two trees had taken what they should
    x, y = 4.0 * unit, 4.0 * expected * unit
    for tree, step, second in zip(trees, steps, seconds, strict=True):
        a, b, c = a + step * step, b + step * tree, c + tree * tree
        x, y = x + step * second, y + tree * second
    step, tree = (c * x - b * y) / (a * c - b * b), (a * y - b * x) / (a * c - b * b)
    return float(min(max(tree / step, RANGE[0]), RANGE[1])) if step > 0 else expected
