"""The attention of a tree of drafts over a bounded cache, for one layer, and the writing of what was accepted.

Every node sees the cache as it would be had its ancestors come one by one: with their tokens, and without what those
tokens evicted. The cache itself is only read; `commit` writes the accepted nodes, and the others leave no trace.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attend import LayerIn
from jaxkv.errors import BadValue
from jaxkv.models import AttentionSpec, ModelConfig
from jaxkv.models.rope import rotate
from jaxkv.policies.needs import learned_names
from jaxkv.policies.policy import Policy
from jaxkv.sharding.attention import held_attend
from jaxkv.sharding.layout import Layout
from jaxkv.speculative.slots import put
from jaxkv.speculative.tree import Placed
from jaxkv.store import EMPTY, Entries, KVCache, Slots
from jaxkv.store.codecs import Codecs
from jaxkv.store.entries import ranks
from jaxkv.store.fit import FIT
from jaxkv.store.sinks import TurnSinks
from jaxkv.store.window import WINDOWS
from pallas_kernels.arguments import Token
from pallas_kernels.decode_attend_score.reference import GROUP
from pallas_kernels.decode_attend_score.victim import alive, linear, over_heads, protected, victim
from pallas_kernels.masking import biased, filled, masked_softmax, soft_cap, visible
from pallas_kernels.partial import attend_few, merge

DEEPEST = 512  # more layers than a model has
BESIDE = (  # why a token that takes another's slot is too much where slots share their codes
    "a token that takes another's slot changes the code of those beside it, which a tree of drafts does not know; "
    "expected a codec with a scale per token, such as {'kind': 'int', 'bits': 4}"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Branches:
    """What each node of the tree would write: its key, value and own statistics, into which slot; the slot after it.

    Keys and values are as they lie in a slot, `[B, Hk, N, ...]`, unless slots share their codes; as `own` they are as
    the model made them, where some are read so. `stats` holds the statistics of all slots after the node, for those
    that change with every observation.
    """

    keys: Any
    values: Any
    own: tuple[Float[Array, "B Hk N D"], ...]
    slots: Int[Array, "B Hk N"]
    next_slots: Int[Array, "B Hk N"]
    entered: dict[str, Float[Array, "B Hk N"]]
    stats: dict[str, Float[Array, "B Hk N C"]]


def check(policy: Policy, cache: KVCache | None = None) -> None:
    """Raises `BadValue` for a policy, or a cache to go on from, under which a tree cannot equal plain decoding."""
    stores = () if cache is None else cache.layers
    if policy.allocate.pooled or not all(store.equal for store in stores):
        raise BadValue(
            f"policy {policy.name!r} with speculative=: its heads share a pool, which drafts do not know so far; leave "
            "speculative= out, or set allocate kind 'uniform'"
        )
    attended = any(phase.evicted.attended for phase in policy.phases)
    rules = attended or (policy.decode is not None and policy.decode.evicted.acts)  # a prompt's may have merged
    idle = {FIT, *WINDOWS} if policy.prefill is None else {FIT, *WINDOWS, policy.prefill.evicted.state}
    whole = all(policy.read.everything(layer) for layer in range(DEEPEST))
    if rules or not whole or any(set(store.beside) - idle for store in stores):
        raise BadValue(
            f"policy {policy.name!r} with speculative=: a tree of drafts reads the slots alone so far; expected "
            "evicted kind 'drop' while decoding and read kind 'all', or leave speculative= out"
        )
    if policy.store.pairs:
        raise BadValue(
            f"policy {policy.name!r} with speculative=: drafts read keys and values that every layer holds for itself; "
            "leave speculative= out"
        )
    if not policy.store.apart and policy.evicts:
        raise BadValue(
            f"policy {policy.name!r} with speculative=: {BESIDE}, or a policy that evicts nothing, or leave "
            "speculative= out"
        )
    if policy.decode is not None and policy.decode.every > 1:
        raise BadValue(
            f"policy {policy.name!r} cuts its cache every {policy.decode.every} tokens, which cannot be done inside a "
            "tree of drafts: use every=1, or leave speculative= out"
        )
    if policy.decode is not None and policy.decode.score.grows:
        raise BadValue(
            f"policy {policy.name!r} lets the part of the new tokens grow while decoding, which drafts do not know: "
            "set grow=0, or leave speculative= out"
        )
    scores = [(phase, leaf) for phase in policy.phases for leaf in phase.score.leaves() if learned_names(leaf.needs)]
    if any(leaf.stats or phase is policy.decode for phase, leaf in scores):  # as a token enters, or while decoding
        raise BadValue(
            f"policy {policy.name!r} scores with what was measured on the model, which drafts are not given: leave "
            "speculative= out"
        )
    if policy.decode is not None and not policy.decode.linear:
        raise BadValue(
            f"policy {policy.name!r} scores with {policy.decode.score.kind!r}, which looks at all entries after each "
            "token and cannot do so inside a tree of drafts: leave speculative= out"
        )


def check_model(policy: Policy, config: ModelConfig) -> None:
    """Raises `BadValue` for a model whose layers forget tokens that share their code with others."""
    if not policy.store.apart and any(spec.window for spec in config.specs):
        raise BadValue(
            f"policy {policy.name!r} with speculative= on a model with sliding windows: {BESIDE}, or leave "
            "speculative= out"
        )


def steady(policy: Policy, lengths: Int[Array, "B"], left: Int[Array, "B"]) -> Int[Array, "B"]:
    """How many of the tokens that are `left` read the same entries as codes: where some share a code, all of a window
    become codes at once, and a tree of drafts ends before."""
    residual = policy.store.residual
    return left if policy.store.apart else jnp.minimum(left, residual - lengths % residual)


def check_expected(policy: Policy, top: int) -> None:
    """Raises `BadValue` where drafts want the `top` likeliest tokens after each of the prompt's, and not all of it
    runs through the last layer."""
    if top and policy.flow.going_on:
        raise BadValue(
            f"policy {policy.name!r} runs only some of the prompt through the last layers, and these drafts need what "
            "the model held likely after each token: use PromptLookup, or leave speculative= out"
        )


def tree_layer(
    policy: Policy,
    tree: Placed,
    layout: Layout,
    implementation: str | None,
    spec: AttentionSpec,
    query: Float[Array, "B N Hq D"],
    key: Float[Array, "B N Hk D"],
    value: Float[Array, "B N Hk D"],
    state: LayerIn,
) -> tuple[Float[Array, "B N Hq D"], Branches]:
    """Attend from every node over the cache as its ancestors leave it; what each node would write."""
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))  # [B, H, N, D]
    entered = policy.enter(
        key, value, positions=tree.positions, rotate=functools.partial(rotate, rope=spec.rope), prompt=False,
        out=state.facts.out,
    )  # fmt: skip
    if policy.rope != "cache":
        query, key = (rotate(x, tree.positions[:, None], spec.rope) for x in (query, key))
    keys, values = (Nodes.of(state.cache, name, x, tree) for name, x in (("keys", key), ("values", value)))
    if policy.decode is None and policy.rope == "text" and not policy.store.windows:
        context, branches = _at_once(tree, layout, spec, query, keys, values, state.cache, implementation)
    else:
        context, branches = _by_depth(policy, tree, spec, query, keys, values, entered, state)
    own = (keys.own, values.own) if policy.store.windows else ()
    return jnp.swapaxes(context, 1, 2), dataclasses.replace(branches, own=own, entered=entered)


class Nodes(NamedTuple):
    """The keys or the values of all nodes: as each attends to its `own`, as those below it `read` them once they are
    codes, and the `code` that would lie in a slot. All are one where slots hold them as the model makes them."""

    own: Float[Array, "B Hk N D"]
    read: Float[Array, "B Hk N D"]
    code: Any
    codecs: Codecs
    positions: Int[Array, "B N"]

    @classmethod
    def of(cls, layer: Slots, name: str, x: Float[Array, "B Hk N D"], tree: Placed) -> "Nodes":
        """What the layer's codec makes of the "keys" or "values". What shares its code is in a window as long as the
        tree is, and read as it is."""
        codec = layer.codec(name)
        if not codec.apart:
            return cls(x, x, x, layer.codecs, tree.positions)
        code = codec.encode(x)
        return cls(x, x if codec.plain else codec.decode(code).astype(x.dtype), code, layer.codecs, tree.positions)

    @property
    def coded(self) -> bool:
        """Whether a node is read by those below it as something else than it was."""
        return self.read is not self.own

    @property
    def exact(self) -> Bool[Array, "B N N"]:
        """Whether the first node reads the second one above it as it was."""
        return self.codecs.exact(self.positions[:, None], self.positions[:, :, None])

    def along(self, paths: Int[Array, "B *n levels"], node: Int[Array, "*n"]) -> Float[Array, "B Hk *n levels D"]:
        """What each node attends to of its path, which ends with itself."""
        of_rows = jax.vmap(lambda x, index: x[:, index])
        read = of_rows(self.read, paths)
        if not self.coded:
            return read
        above = jax.vmap(lambda x, index: x[index])(self.positions, paths)
        exact = self.codecs.exact(above, self.positions[:, node, None])
        return jnp.where(exact[:, None, ..., None], of_rows(self.own, paths), read)


def _at_once(
    tree: Placed,
    layout: Layout,
    spec: AttentionSpec,
    query: Float[Array, "B Hq N D"],
    keys: Nodes,
    values: Nodes,
    layer: Slots,
    implementation: str | None,
) -> tuple[Float[Array, "B Hq N D"], Branches]:
    """Where tokens are only added: the tree is one more part beside the cache, which is read once for all nodes (what
    expires is out of every later inputs)."""
    positions, slots = tree.positions, layer.positions.shape[-1]
    softmax = {"scale": spec.scale, "softcap": spec.softcap}
    held = held_attend(
        layout, query, layer.keys, layer.values, positions, layer.positions, window=spec.window,
        bias=layer.entries.bias, implementation=implementation, **softmax,
    )  # fmt: skip
    looks = tree.looks[:, None] & visible(positions[:, None], positions[:, None], spec.window)
    own = (keys.read, values.read, looks)
    if keys.coded or values.coded:
        exact = keys.exact[:, None]
        seen = jnp.concatenate([looks & ~exact, looks & exact], axis=-1)
        own = (*(jnp.concatenate([x.read, x.own], axis=2) for x in (keys, values)), seen)
    context = merge(held, attend_few(query, *own, **softmax)).output

    def step(carry, depth):
        held, slot = carry
        here = jnp.arange(slots) == slot[..., None]
        held = jnp.where(here, (positions[:, 0] + depth)[:, None, None], held)
        after = jnp.argmin(alive(held, positions[:, 0] + depth + 1, spec.window), axis=-1).astype(jnp.int32)
        return (held, after), (slot, after)

    start = (layer.positions, layer.next_slot)
    _, (slot, after) = lax.scan(step, start, jnp.arange(tree.shape.depth + 1, dtype=jnp.int32))
    slot, after = (jnp.moveaxis(x, 0, -1)[:, :, tree.shape.depths] for x in (slot, after))
    return context, Branches(keys.code, values.code, (), slot, after, {}, {})


def _by_depth(
    policy: Policy,
    tree: Placed,
    spec: AttentionSpec,
    query: Float[Array, "B Hq N D"],
    keys: Nodes,
    values: Nodes,
    entered: dict[str, Float[Array, "B Hk N"]],
    state: LayerIn,
) -> tuple[Float[Array, "B Hq N D"], Branches]:
    """Depth by depth, each node from its parent's slots: write, attend, score, choose the slot that its child fills.

    A slot's entry is the cache's, or that of the node at depth `owner` of the path. The products with all keys are
    computed before, those with the values after the scan; inside, only the softmax and the choice (with positions in
    the cache the products too, for what is evicted turns the keys behind it).
    """
    layer, limits, shape, positions, paths = state.cache, state.limits, tree.shape, tree.positions, tree.paths
    batch, heads, nodes, dim = query.shape
    kv_heads, slots = layer.positions.shape[1:]
    group, width, levels = heads // kv_heads, shape.width, shape.depth + 1
    fold = lambda x: x.reshape(batch * width, *x.shape[2:])  # noqa: E731  rows of the batch, as policies know them
    split = lambda x: x.reshape(batch, width, *x.shape[1:])  # noqa: E731

    grid = jnp.maximum(shape.grid, 0)
    grid_paths = jnp.maximum(paths[:, grid], 0)  # [B, levels, W, levels]
    at = jnp.where(shape.grid >= 0, positions[:, grid], -1)
    start = jnp.asarray([shape.first(max(depth - 1, 0)) for depth in shape.depths.tolist()])
    parents = jnp.clip(tree.parents - start, 0, width - 1)[:, grid]  # as columns of the depth above
    rows = query.reshape(batch, kv_heads, group * nodes, dim)

    def by_level(x: Array) -> Array:
        """[B, Hk, (G,) N, ...] -> [levels, B, W, Hk, (G,) ...]"""
        axis = x.ndim - 2
        x = jnp.take(x, grid, axis=axis)
        return jnp.moveaxis(x, (axis, 0, axis + 1), (0, 1, 2))

    held_keys, held_values = layer.keys, layer.values
    mixed = layer.codecs.windows and keys.coded  # which of the keys are read as they were changes from depth to depth
    coded_keys = layer.by_codes("keys") if mixed else held_keys
    if policy.rope == "text":
        base = lambda x: by_level(_held_logits(rows, x, layer, spec).reshape(batch, kv_heads, group, nodes, slots))  # noqa: E731
        among = lambda x: _logits(rows, x, spec).reshape(batch, kv_heads, group, nodes, nodes)  # noqa: E731
        own = among(keys.read)
        if keys.coded:
            own = jnp.where(keys.exact[:, None, None], among(keys.own), own)
        own = jnp.take_along_axis(own, jnp.maximum(paths, 0)[:, None, None], axis=-1)
        turning = {"base": base(held_keys), "own": by_level(own)}
        if mixed:
            turning["coded"] = base(coded_keys)
    else:
        along = jnp.moveaxis(keys.along(grid_paths, grid), (2, 0, 3), (0, 1, 2))  # [levels, B, W, Hk, levels, D]
        turning = {"query": by_level(query.reshape(batch, kv_heads, group, nodes, dim)), "keys": along}
    turned = _turned
    if policy.rope == "sinks":
        sinks = TurnSinks(policy.sinks, functools.partial(rotate, rope=spec.rope), spec.window)
        turned = functools.partial(_sinks_turned, sinks)

    phase = policy.decode
    changing: set[str] = set()

    def level(carry, turn):
        depth, at, parent, given, written = turn
        held, owner, slot, homes, stats = _of_parent(carry, parent)
        active = at[..., None] >= 0
        here = (jnp.arange(slots) == slot[..., None]) & active[..., None]
        held = jnp.where(here, at[..., None, None], held)
        owner = jnp.where(here, depth, owner)
        homes = jnp.where((jnp.arange(levels) == depth) & active[..., None], slot[..., None], homes)
        stats = {name: jnp.where(here, written[name][..., None], stat) for name, stat in stats.items()}
        alone = jnp.take_along_axis(owner, jnp.maximum(homes, 0), axis=-1) == jnp.arange(levels)
        alone &= homes >= 0  # path entries that no later one has overwritten

        if mixed:
            exact = layer.codecs.exact(layer.positions[:, None], at[:, :, None, None])  # [B, W, Hk, C]
        if policy.rope == "text":
            logits, own = given["base"], given["own"]
            if mixed:
                logits = jnp.where(exact[..., None, :], logits, given["coded"])
        else:
            here = held_keys[:, None]
            if mixed:
                here = jnp.where(exact[..., None], here, coded_keys[:, None])
            logits, own = turned(spec, layer, here, given, held, homes, fold, split)
        for number in range(levels):
            logits = jnp.where((owner == number)[..., None, :], own[..., number, None], logits)
        seen = visible(at[..., None, None], held, spec.window)  # [B, W, Hk, 1, C]
        weights, _ = masked_softmax(logits, seen)

        now = fold(at) + 1
        live = alive(fold(held), now, spec.window)
        if phase is None:
            after = split(jnp.argmin(live, axis=-1).astype(jnp.int32))
        else:
            limit = jnp.repeat(limits, width)
            mass = GROUP[phase.aggregate.group](weights, axis=3)
            past = {name: fold(stat) for name, stat in stats.items()}
            score = over_heads(linear(fold(mass), *phase.score.line(past, fold(held), now)), phase.aggregate.heads)
            spared = protected(fold(held), now, phase.protects.sinks, phase.protects.recents(limit))
            after = split(victim(jnp.where(spared, jnp.inf, score), fold(held), live, limit))
            new = policy.observe(phase, past, fold(mass), now)
            changing.update(name for name in past if new[name] is not past[name])
            stats = {name: split(new[name]) if name in changing else stats[name] for name in stats}

        of_path = jnp.take_along_axis(weights, jnp.maximum(homes, 0)[:, :, :, None], axis=-1)
        of_path = jnp.where(alone[:, :, :, None], of_path, 0.0)
        weights = jnp.where((owner < 0)[..., None, :], weights, 0.0)
        carry = (held, owner, after, homes, stats)
        return carry, (weights, of_path, slot, after, {name: stats[name] for name in changing})

    wide = lambda x: jnp.broadcast_to(x[:, None], (batch, width, *x.shape[1:]))  # noqa: E731
    begin = (
        wide(layer.positions),
        jnp.full((batch, width, kv_heads, slots), -1, jnp.int32),
        wide(layer.next_slot),
        jnp.full((batch, width, kv_heads, levels), -1, jnp.int32),
        {name: wide(stat) for name, stat in layer.stats.items()},
    )
    written = {name: by_level(stat[..., None])[..., 0] for name, stat in entered.items()}
    turns = (jnp.arange(levels, dtype=jnp.int32), jnp.moveaxis(at, 1, 0), jnp.moveaxis(parents, 1, 0), turning, written)
    _, (weights, of_path, slot, after, stats) = lax.scan(level, begin, turns)

    place = [(int(depth), node - shape.first(int(depth))) for node, depth in enumerate(shape.depths)]
    depths, columns = (jnp.asarray(side) for side in zip(*place, strict=True))
    by_node = lambda x: jnp.moveaxis(x[depths, :, columns], 0, -2)  # noqa: E731  [levels, B, W, ..., X] -> [B, ..., N, X]
    dtype = values.own.dtype
    weights, parts = by_node(weights).astype(dtype), []
    if layer.codecs.windows and values.coded:
        exact = layer.codecs.exact(layer.positions[:, :, None], positions[:, None, :, None])[:, :, None]
        parts = [(jnp.where(exact, 0, weights), layer.by_codes("values"))]
        weights = jnp.where(exact, weights, 0)
    parts = [(weights, held_values), *parts]
    flat = (batch, kv_heads, group * nodes, slots)
    context = sum(_mixed(some.reshape(flat), filled(held, layer.positions)) for some, held in parts)
    context = jnp.asarray(context).reshape(batch, kv_heads, group, nodes, dim)
    of_path = by_node(of_path).astype(dtype)
    path_values = values.along(jnp.maximum(paths, 0), jnp.arange(nodes))
    context = context + jnp.einsum("bhgnl,bhnld->bhgnd", of_path, path_values, preferred_element_type=jnp.float32)
    slot, after = (by_node(x[..., None])[..., 0] for x in (slot, after))
    context = context.astype(query.dtype).reshape(batch, heads, nodes, dim)
    stats = {name: by_node(stat) for name, stat in stats.items()}
    return context, Branches(keys.code, values.code, (), slot, after, {}, stats)


def _of_parent(carry, parent: Int[Array, "B W"]):
    """Each node's copy of its parent's state; a select per column, which is faster than a gather."""
    width = parent.shape[1]
    if width == 1:
        return carry

    def chosen(x):
        shape = parent.shape + (1,) * (x.ndim - 2)
        out = jnp.broadcast_to(x[:, :1], x.shape)
        for column in range(1, width):
            out = jnp.where((parent == column).reshape(shape), x[:, column : column + 1], out)
        return out

    return jax.tree.map(chosen, carry)


def _turned(spec: AttentionSpec, layer: Slots, keys: Array, given: dict, held, homes, fold, split):
    """The logits of cache and path, query and keys turned to their places in the cache as this depth finds it."""
    place = split(ranks(fold(held)))  # [B, W, Hk, C]
    of_path = jnp.take_along_axis(place, jnp.maximum(homes, 0), axis=-1)
    newest = jnp.max(jnp.where(homes >= 0, of_path, 0), axis=-1)
    query = rotate(given["query"], newest[..., None], spec.rope)
    keys = rotate(jnp.broadcast_to(keys, (*place.shape, keys.shape[-1])), place, spec.rope)
    own = rotate(given["keys"], of_path, spec.rope)
    return _all_logits(spec, layer, query, keys, own)


def _sinks_turned(
    sinks: TurnSinks, spec: AttentionSpec, layer: Slots, keys: Array, given: dict, held, homes, fold, split
):
    """The same where all but the sinks lie as they are read; in a short text a path may hold some of these, too."""
    how_far = split(sinks.how_far(fold(held)))  # [B, W, Hk, C]
    of_path = jnp.take_along_axis(how_far, jnp.maximum(homes, 0), axis=-1)
    keys = sinks.turned(jnp.broadcast_to(keys, (*how_far.shape, keys.shape[-1])), how_far)
    return _all_logits(spec, layer, given["query"], keys, sinks.turned(given["keys"], of_path))


def _all_logits(spec: AttentionSpec, layer: Slots, query: Array, keys: Array, own: Array):
    """Those of the cache and of the path, from queries and keys that are turned."""
    bias = None if layer.entries.bias is None else layer.entries.bias[:, None, :, None]
    return biased(_logits(query, keys, spec), bias), _logits(query, own, spec)


def _held_logits(
    rows: Float[Array, "B Hk Q D"], keys: Float[Array, "B Hk C D"], layer: Slots, spec: AttentionSpec
) -> Float[Array, "B Hk Q C"]:
    """Of the entries held, each with the logarithm of what it stands for."""
    bias = layer.entries.bias
    return biased(_logits(rows, keys, spec), None if bias is None else bias[:, :, None])


def _logits(query: Float[Array, "*B Q D"], keys: Float[Array, "*B S D"], spec: AttentionSpec):
    """scale * q . k, soft-capped, float32."""
    product = jnp.einsum("...qd,...sd->...qs", query, keys, preferred_element_type=jnp.float32)
    return soft_cap(product * spec.scale, spec.softcap)


def _mixed(weights: Float[Array, "*B Q S"], values: Float[Array, "*B S D"]):
    return jnp.einsum("...qs,...sd->...qd", weights, values, preferred_element_type=jnp.float32)


def commit(
    layer: Slots,
    branches: Branches,
    nodes: Int[Array, "B levels"],
    count: Int[Array, "B"],
    first: Int[Array, "B"],
) -> Slots:
    """The layer after the first `count [B]` of the nodes, which stand one below the other, came one by one.

    `first [B]` is the root's position. An entry that a later one overwrote is not written at all.
    """
    batch, _, slots = layer.positions.shape
    levels = nodes.shape[1]
    safe = jnp.maximum(nodes, 0)[:, None]
    take = lambda x: jnp.take_along_axis(x, safe.reshape(batch, 1, levels, *(1,) * (x.ndim - 3)), axis=2)  # noqa: E731
    written = jnp.arange(levels) < count[:, None, None]
    home = jnp.where(written, take(branches.slots), slots)
    again = (home[..., None, :] == home[..., :, None]) & (jnp.arange(levels) > jnp.arange(levels)[:, None])
    home = jnp.where(jnp.any(again, axis=-1), slots, home)  # out of range, so dropped
    write = lambda held, new: put(held, home, new)  # noqa: E731

    positions = jnp.broadcast_to(first[:, None, None] + jnp.arange(levels, dtype=jnp.int32), home.shape)
    last = jnp.take_along_axis(safe, jnp.maximum(count - 1, 0)[:, None, None], axis=2)
    some = count > 0
    stats = {}
    for name, stat in layer.stats.items():
        if name in branches.stats:
            after = jnp.take_along_axis(branches.stats[name], last[..., None], axis=2)[:, :, 0]
            stats[name] = jnp.where(some[:, None, None], after, stat)
        else:
            stats[name] = write(stat, take(branches.entered[name]))
    after = jnp.take_along_axis(branches.next_slots, last, axis=2)[..., 0]
    old = layer.entries
    keys, values, held = old.keys, old.values, old.positions
    if layer.codecs.apart:
        new = branches.keys, branches.values
        keys, values = jax.tree.map(lambda held, new: write(held, take(new)), (keys, values), new)
        held = write(held, positions)
    weight = None if old.weight is None else write(old.weight, jnp.ones(home.shape, old.weight.dtype))
    grown = layer.replaced(entries=Entries(keys, values, held, stats, weight))
    if branches.own:
        own, slot = [take(x) for x in branches.own], take(branches.slots)

        def one(level, grown: Slots) -> Slots:
            key, value = (x[:, :, level] for x in own)
            position = jnp.where(level < count, first + level, EMPTY)
            if layer.codecs.apart:
                return grown.seeing(key, value, position)
            return grown.aimed(slot[..., level]).with_token(Token(key, key, value, position))

        grown = lax.fori_loop(0, levels, one, grown)  # a program of its size, however deep trees are
    return grown.aimed(after, some)
