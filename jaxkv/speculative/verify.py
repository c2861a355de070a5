"""Which token follows every node of the tree: the model's own (exact), or a draft that is likely enough."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxkv.checks import Checked
from jaxkv.errors import BadValue
from jaxkv.sampling import RowSampler, Sampler
from jaxkv.speculative.tree import Shape, Tree

ACCEPT, AGAIN, SIBLING = 1, 2, 3  # folded into a position's key: never the draw that plain decoding makes there


@dataclasses.dataclass(frozen=True)
class Conditional(Checked):
    """Accept a draft of probability p(draft) >= min(max(beta - alpha * H(p), floor), max p); not exact.

    H is the entropy in nats of the model's distribution p there, so that an unsure model accepts more, and its best
    token always passes. The rule is AASD's (arXiv 2505.13204) as far as it is known: alpha and beta come at second
    hand, and the floor is ours, without which every draft passes where H > beta / alpha. Of several drafts that pass,
    the one that exact verification would take, else the most likely (ours).
    """

    alpha: float = 0.1
    beta: float = 0.1
    floor: float = 0.05

    def __post_init__(self):
        if self.alpha < 0 or not 0 <= self.floor <= 1:
            raise BadValue(f"alpha={self.alpha}, floor={self.floor}: expected alpha >= 0 and a floor in [0, 1]")


Verify = Conditional | None  # None: exact


def parse(verify: "str | Conditional") -> Verify:
    """What `verify=` means. Raises `BadValue` for anything but "exact", "conditional" or a `Conditional`."""
    if isinstance(verify, Conditional):
        return verify
    if verify not in ("exact", "conditional"):
        raise BadValue(f"verify={verify!r}: expected 'exact', 'conditional', or a Conditional with its numbers")
    return Conditional() if verify == "conditional" else None


def seen_by(shape: Shape, tree: Tree, paths: Int[Array, "B N levels"], seen: Bool[Array, "B V"]) -> Array:
    """The tokens seen at every node, `[B, N, V]`: the row's, and those of the path below the root."""
    rows = jnp.arange(tree.tokens.shape[0])[:, None, None]
    tokens = jnp.where(paths > 0, tree.tokens[rows, jnp.maximum(paths, 0)], seen.shape[1])  # else out of range
    nodes = jnp.arange(shape.nodes)[None, :, None]
    wide = jnp.broadcast_to(seen[:, None], (seen.shape[0], shape.nodes, seen.shape[1]))
    return wide.at[rows, nodes, jnp.where(tokens < 0, seen.shape[1], tokens)].set(True, mode="drop")


def follows(
    shape: Shape,
    tree: Tree,
    logits: Float[Array, "B N V"],
    sampler: Sampler | RowSampler,
    verify: Verify,
    seen: Bool[Array, "B N V"] | None,
    keys: Key[Array, "B"],
    at: Int[Array, "B N"],
    chances: Float[Array, "B depth V"] | None = None,
) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:
    """The token after every node, and where it departs from exact verification; `at` is that token's position.

    Drafts are accepted where they are that token. For drafts that were not drawn at random this is tree rejection
    sampling: the chance to accept a child is its probability, and what is drawn otherwise follows the rest. The draw
    is plain decoding's own, so that a seed gives the same text. Drafts of a chain that were drawn from `chances` are
    accepted by standard speculative sampling (arXiv 2211.17192): p / q, else a draw from max(p - q, 0).
    """
    batch, nodes, vocabulary = logits.shape
    sampler = sampler.repeated(nodes)
    flat, flat_seen = logits.reshape(-1, vocabulary), None if seen is None else seen.reshape(-1, vocabulary)

    def chance() -> Float[Array, "B N V"]:
        return jax.nn.softmax(sampler.warped(flat, flat_seen), axis=-1).reshape(logits.shape)

    if chances is None:
        each = keys[jnp.repeat(jnp.arange(batch), nodes)]
        token = sampler.sample(flat, flat_seen, each, at.reshape(-1)).reshape(batch, nodes)
    else:
        token = _rejected(shape, tree, chance(), keys, at, chances)
    if verify is None:
        return token, jnp.zeros(token.shape, bool)
    return _conditional(tree, verify, chance(), token)


def _rejected(
    shape: Shape,
    tree: Tree,
    chance: Float[Array, "B N V"],
    keys: Key[Array, "B"],
    at: Int[Array, "B N"],
    drawn: Float[Array, "B depth V"],
) -> Int[Array, "B N"]:
    """Standard speculative sampling at every node of a chain; with no draft below, a draw from the model's chances."""
    batch = chance.shape[0]
    drafts = jnp.pad(tree.tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    there = drafts >= 0
    drawn = jnp.where(there[..., None], jnp.pad(drawn, ((0, 0), (0, 1), (0, 0))), 0.0)
    of = lambda x: jnp.take_along_axis(x, jnp.maximum(drafts, 0)[..., None], axis=-1)[..., 0]  # noqa: E731
    own = jax.vmap(lambda key, places: jax.vmap(lambda place: jax.random.fold_in(key, place))(places))(keys, at)
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))
    coin = jax.vmap(jax.vmap(jax.random.uniform))(fold(own, ACCEPT))
    accepted = there & (coin * of(drawn) < of(chance))
    rest = jnp.maximum(chance - drawn, 0.0)
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, chance)  # equal up to rounding
    again = jax.vmap(jax.vmap(jax.random.categorical))(fold(own, AGAIN), jnp.log(rest))
    assert again.shape == (batch, shape.nodes)
    return jnp.where(accepted, drafts, again.astype(jnp.int32))


def _conditional(
    tree: Tree, verify: Conditional, chance: Float[Array, "B N V"], exact: Int[Array, "B N"]
) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:
    """The exact token where it was drafted, else the likeliest draft that passes the threshold, else the exact one."""
    nodes = exact.shape[1]
    entropy = -jnp.sum(jnp.where(chance > 0, chance * jnp.log(jnp.maximum(chance, 1e-38)), 0.0), axis=-1)
    bar = jnp.minimum(jnp.maximum(verify.beta - verify.alpha * entropy, verify.floor), jnp.max(chance, axis=-1))
    rows = jnp.arange(exact.shape[0])[:, None]
    likely = chance[rows, tree.parents, jnp.maximum(tree.tokens, 0)]  # [B, N] of each node under its parent
    drafted = (tree.tokens >= 0) & (jnp.arange(nodes) > 0)
    child = drafted[:, None] & (tree.parents[:, None] == jnp.arange(nodes)[:, None])  # [B, parent, node]
    kept = jnp.any(child & (tree.tokens[:, None] == exact[..., None]), axis=-1)
    worth = jnp.where(child & (likely[:, None] >= bar[..., None]), likely[:, None], -1.0)
    best = jnp.argmax(worth, axis=-1)
    passes = ~kept & (jnp.max(worth, axis=-1) > 0)
    token = jnp.where(passes, jnp.take_along_axis(tree.tokens, best, axis=1), exact)
    return token, passes & (token != exact)
