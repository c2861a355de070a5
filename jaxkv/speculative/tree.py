"""A tree of drafted tokens, of one static shape: which node follows which, and which of them were right.

Node 0 is the root, the token that decoding would run next; the nodes of each depth lie next to each other.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxkv.errors import BadValue

ABSENT = -1
DEEPEST = 32  # the program of a round has a piece for each depth


def check_depth(depth: int) -> None:
    """Raises `BadValue` for a number of drafts in a row that no round can have."""
    if not 1 <= depth <= DEEPEST:
        raise BadValue(f"depth={depth}: expected 1 to {DEEPEST} drafts in a row")


@dataclasses.dataclass(frozen=True)
class Shape:
    """`widths[d - 1]` nodes at depth d below the root; every tree of a run has this shape, with absent nodes."""

    widths: tuple[int, ...]

    def __post_init__(self):
        if not self.widths or min(self.widths) < 1:
            raise BadValue(f"tree widths {self.widths}: expected at least one depth, and one node at each")

    @property
    def depth(self) -> int:
        """The most tokens that one round can accept."""
        return len(self.widths)

    @property
    def nodes(self) -> int:
        """N, the root included."""
        return 1 + sum(self.widths)

    @property
    def width(self) -> int:
        """The most nodes of one depth."""
        return max(self.widths)

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """The depth of every node, int32 [N]."""
        return np.repeat(np.arange(self.depth + 1, dtype=np.int32), (1, *self.widths))

    @functools.cached_property
    def grid(self) -> np.ndarray:
        """The nodes of every depth, int32 [depth + 1, width]; ABSENT where a depth is narrower than the widest."""
        grid = np.full((self.depth + 1, self.width), ABSENT, np.int32)
        for node, depth in enumerate(self.depths):
            grid[depth, node - int(np.argmax(self.depths == depth))] = node
        return grid

    def first(self, depth: int) -> int:
        """The first node of a depth."""
        return int(np.argmax(self.depths == depth))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """`tokens [B, N]` (ABSENT: no such node) and `parents [B, N]`, each a node of the depth above (the root's: 0).

    Children of one node hold different tokens.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]


def chain(tokens: Int[Array, "B depth"], root: Int[Array, "B"]) -> Tree:
    """The tree whose every node has one child."""
    nodes = jnp.concatenate([root[:, None], tokens], axis=1)
    parents = jnp.broadcast_to(jnp.maximum(jnp.arange(nodes.shape[1]) - 1, 0), nodes.shape)
    return Tree(nodes, parents.astype(jnp.int32))


def pruned(shape: Shape, tree: Tree, left: Int[Array, "B"]) -> Tree:
    """The tree without nodes that can't be used: below an absent one, or so deep that `left` tokens end before."""
    tokens = jnp.where(shape.depths < left[:, None], tree.tokens, ABSENT)
    for depth in range(1, shape.depth + 1):
        at = slice(shape.first(depth), shape.first(depth) + shape.widths[depth - 1])
        above = jnp.take_along_axis(tokens, tree.parents[:, at], axis=1)
        tokens = tokens.at[:, at].set(jnp.where(above < 0, ABSENT, tokens[:, at]))
    return Tree(tokens, tree.parents)


def lineage(shape: Shape, tree: Tree) -> Int[Array, "B N levels"]:
    """The node that stands at each depth on the way from the root to every node; ABSENT below itself."""
    batch = tree.tokens.shape[0]
    levels = np.arange(shape.depth + 1)
    paths = jnp.full((batch, 1, shape.depth + 1), ABSENT, jnp.int32).at[:, :, 0].set(0)
    for depth in range(1, shape.depth + 1):
        first, width = shape.first(depth), shape.widths[depth - 1]
        above = jnp.take_along_axis(paths, tree.parents[:, first : first + width, None], axis=1)
        here = jnp.arange(first, first + width, dtype=jnp.int32)[None, :, None]
        paths = jnp.concatenate([paths, jnp.where(levels == depth, here, above)], axis=1)
    return paths


def sees(shape: Shape, paths: Int[Array, "B N levels"]) -> Bool[Array, "B N N"]:
    """True where the second node is the first one itself or stands above it."""
    return jnp.any(paths[:, :, None, :] == jnp.arange(shape.nodes, dtype=jnp.int32)[:, None], axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placed:
    """A tree in the text: every node's position (-1: absent), its `lineage`, what it `sees`, and its parent."""

    shape: Shape = dataclasses.field(metadata={"static": True})
    positions: Int[Array, "B N"]
    paths: Int[Array, "B N levels"]
    looks: Bool[Array, "B N N"]
    parents: Int[Array, "B N"]


def placed(shape: Shape, tree: Tree, first: Int[Array, "B"]) -> Placed:
    """The tree with its root at position `first [B]` of each row's text (-1: the row has finished)."""
    there = (tree.tokens >= 0) & (first[:, None] >= 0)
    paths = lineage(shape, tree)
    return Placed(
        shape=shape,
        positions=jnp.where(there, first[:, None] + shape.depths, ABSENT),
        paths=paths,
        looks=sees(shape, paths),
        parents=tree.parents,
    )


def walk(shape: Shape, tree: Tree, follows: Int[Array, "B N"]) -> tuple[Int[Array, "B levels"], Int[Array, "B levels"]]:
    """From the root on, always to the child that holds the token which `follows` its parent.

    The nodes on the way (ABSENT after its end), and the tokens that follow them: one more than drafts were right.
    """
    node = jnp.zeros(tree.tokens.shape[0], jnp.int32)
    nodes, tokens = [node], [follows[:, 0]]
    for depth in range(1, shape.depth + 1):
        at = np.arange(shape.first(depth), shape.first(depth) + shape.widths[depth - 1])
        right = (tree.tokens[:, at] == tokens[-1][:, None]) & (tree.parents[:, at] == node[:, None])
        right &= (node[:, None] >= 0) & (tokens[-1][:, None] >= 0)
        found = jnp.any(right, axis=1)
        node = jnp.where(found, jnp.int32(at[0]) + jnp.argmax(right, axis=1).astype(jnp.int32), ABSENT)
        follow = jnp.take_along_axis(follows, jnp.maximum(node, 0)[:, None], axis=1)[:, 0]
        nodes.append(node)
        tokens.append(jnp.where(found, follow, ABSENT))
    return jnp.stack(nodes, axis=1), jnp.stack(tokens, axis=1)
