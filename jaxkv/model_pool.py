"""The pool of a whole model: one line of slots that its layers share, a segment per layer and KV head.

The line is a `Pool` with layers x KV heads segments, so the bytes held are the budget whatever each layer gets. A layer
reads it through a `view`: `reach` slots from its first border on, a static number, of which those of other layers count
as empty; or where its slots lie, by a kernel that can (`place`). A decode step writes one slot per segment, all at its
end.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxkv.cache import EMPTY, line_of
from jaxkv.pool import Pool, widened
from pallas_kernels.ragged_decode.reference import Line
from pallas_kernels.ragged_decode.reference import written as overwritten

Token = tuple[Float[Array, "B Hk D"], Float[Array, "B Hk D"]]  # a decode step's key and value in one layer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Share:
    """A layer's place in the model's pool; the first one's holds the line of all.

    `number` counts the layers that share, from 0; each reads `reach` slots, and has `heads` KV heads.
    """

    line: Pool | None
    number: int = dataclasses.field(metadata={"static": True})
    reach: int = dataclasses.field(metadata={"static": True})
    heads: int = dataclasses.field(metadata={"static": True})

    def view(self, line: Pool) -> Pool:
        """The layer's segments as a pool of `reach` slots."""
        first, start = self.number * self.heads, self.start(line)
        offsets = line.offsets[:, first : first + self.heads + 1] - start[:, None]
        cut = jax.vmap(lambda x, at: lax.dynamic_slice_in_dim(x, at, self.reach))
        place = jnp.arange(self.reach)
        own = (place >= offsets[:, :1]) & (place < offsets[:, -1:])
        return Pool(
            keys=cut(line.keys, start),
            values=cut(line.values, start),
            positions=jnp.where(own, cut(line.positions, start), EMPTY),
            offsets=offsets,
            next_slot=self.own(line.next_slot) - start[:, None],
            stats={name: cut(stat, start) for name, stat in line.stats.items()},
        )

    def own(self, x: Shaped[Array, "B LHk"]) -> Shaped[Array, "B Hk"]:
        """Of what the line's segments have, the layer's heads' part."""
        return x[:, self.number * self.heads : (self.number + 1) * self.heads]

    def place(self, line: Pool) -> Line:
        """Keys and values of all layers, and where this one's `view` of them begins."""
        return line.keys, line.values, self.start(line)

    def start(self, line: Pool) -> Int[Array, "B"]:
        """Where the view begins: at the layer's first border, or earlier where the line ends."""
        return jnp.minimum(line.offsets[:, self.number * self.heads], line.total - self.reach)


def shared(line: Pool, layers: int, reach: int) -> tuple[Share, ...]:
    """The layers' places in a line that they share."""
    heads, reach = line.heads // layers, min(reach, line.total)
    return tuple(Share(line if number == 0 else None, number, reach, heads) for number in range(layers))


def joined(pools: list[Pool]) -> Pool:
    """Pools of equal size in one line, one behind the other; what a pool leaves over is its last head's."""
    size = pools[0].total
    line = lambda name: jnp.concatenate([getattr(pool, name) for pool in pools], axis=1)  # noqa: E731
    starts = [pool.offsets[:, :-1] + number * size for number, pool in enumerate(pools)]
    end = jnp.full_like(starts[0][:, :1], len(pools) * size)
    return Pool(
        keys=line("keys"),
        values=line("values"),
        positions=line("positions"),
        offsets=jnp.concatenate([*starts, end], axis=1),
        next_slot=jnp.concatenate([pool.next_slot + number * size for number, pool in enumerate(pools)], axis=1),
        stats={
            name: jnp.concatenate([pool.stats[name] for pool in pools], axis=1) for name in pools[0].stats
        },
    )  # fmt: skip


def places(layers: tuple[Any, ...]) -> tuple[Line | None, ...]:
    """Where each layer that shares lies in the line; None for any other."""
    line = line_of(layers)
    return tuple(layer.place(line) if line is not None and isinstance(layer, Share) else None for layer in layers)


def written(
    layers: tuple[Any, ...], views: tuple[Any, ...], tokens: tuple[Token | None, ...], position: Int[Array, "B"]
) -> tuple[Any, ...]:
    """The layers after a decode step on their views: each segment's token, at `position [B]`, goes into the line.

    `tokens` are the keys and values of the layers that share. A row whose position is -1 has finished: nothing does.
    """
    shares = [(layer, view) for layer, view in zip(layers, views, strict=True) if isinstance(layer, Share)]
    if not shares:
        return views
    line = line_of(layers)
    # Read before it is written, or it would be copied
    (old_keys, old_values), following = lax.optimization_barrier(
        ((line.keys, line.values), [view.next_slot for _, view in shares])
    )
    starts = [share.start(line)[:, None] for share, _ in shares]
    given = [token for token in tokens if token is not None]
    new_keys, new_values = (jnp.concatenate(new, axis=1) for new in zip(*given, strict=True))
    keys, values, positions = overwritten(
        old_keys, old_values, line.positions, new_keys, new_values, position, line.next_slot
    )  # fmt: skip
    owner = line.owner
    layer = jnp.minimum(owner // shares[0][0].heads, len(shares) - 1)
    back = jnp.arange(line.total) - jnp.take_along_axis(jnp.concatenate(starts, axis=1), layer, axis=1)
    back = jnp.clip(back, 0, shares[0][0].reach - 1)

    heads, before = line.heads, line.stats

    def whole(name: str) -> Array:
        """A statistic of all slots: a step may change each."""
        each = jnp.concatenate([view.stats[name] for _, view in shares], axis=1)
        stat = jnp.take_along_axis(each, layer * shares[0][0].reach + back, axis=1)
        return jnp.where(owner < heads, stat, before[name])

    line = Pool(
        keys=keys,
        values=values,
        positions=positions,
        offsets=line.offsets,
        next_slot=jnp.concatenate([slots + start for slots, start in zip(following, starts, strict=True)], axis=1),
        stats={name: whole(name) for name in line.stats},
    )
    return tuple(
        _holding(layer, line) if isinstance(layer, Share) else view
        for layer, view in zip(layers, views, strict=True)
    )  # fmt: skip


def changed(layers: tuple[Any, ...], change: Any) -> tuple[Any, ...]:
    """Every array holder of the layers changed: the line of those that share, any other layer itself."""
    return tuple(
        (layer if layer.line is None else dataclasses.replace(layer, line=change(layer.line)))
        if isinstance(layer, Share)
        else change(layer)
        for layer in layers
    )


def room_for(layers: tuple[Any, ...], more: int) -> tuple[Any, ...]:
    """The layers with `more` empty slots behind those of every segment of their line."""
    wider = lambda share: share.reach + more * share.heads  # noqa: E731
    return tuple(
        dataclasses.replace(
            layer, line=None if layer.line is None else widened(layer.line, more), reach=wider(layer)
        )
        if isinstance(layer, Share)
        else layer
        for layer in layers
    )  # fmt: skip


def _holding(share: Share, line: Pool) -> Share:
    return share if share.line is None else dataclasses.replace(share, line=line)
