"""The line: the slots of a whole model when its layers share a budget, a segment per layer and KV head.

The line is a `Pool` with layers x KV heads segments, so the bytes held are the budget whatever each layer gets. A layer
reads it through a `View`: `reach` slots from its first border on, a static number, of which those of other layers count
as empty; a kernel that can reads them where they lie. A decode step writes one slot per segment, all at its end.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxkv.sharding.attention import RotateAtRead
from jaxkv.sharding.layout import Layout, on_host
from jaxkv.store.entries import Change, Entries, put_all
from jaxkv.store.pool import Pool, on_average
from jaxkv.store.store import taken_up
from pallas_kernels.arguments import Judge, Segments, Token
from pallas_kernels.arguments import Line as Lying
from pallas_kernels.partial import Partial
from pallas_kernels.ragged_decode.reference import written as overwritten


class Written(NamedTuple):
    """The key and value that a decode step has for a layer's next slots."""

    key: Float[Array, "B Hk D"]
    value: Float[Array, "B Hk D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View(Pool):
    """A layer's segments of the line as a pool of `reach` slots: `lies` says where in the line, `new` what a decode
    step has to write there."""

    lies: Lying | None = None
    new: Written | None = None

    def step(
        self, layout: Layout, token: Token, judge: Judge, rotate: RotateAtRead | None, **softmax: Any
    ) -> tuple[Partial, "View"]:
        """As a pool's; K and V of all layers are divided over no devices, and are written when the step ends."""
        assert rotate is None, "heads that share a pool have no places in common"
        part, after = self._ragged(layout, token, judge, whole=True, line=self.lies, **softmax)
        return part, dataclasses.replace(after, lies=None, new=Written(token.key, token.value))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Place:
    """A layer's place in the line; the first one's holds the line of all.

    `number` counts the layers that share, from 0; each reads `reach` slots, and has `heads` KV heads. `beside` is what
    the policy's rules hold beside the layer's slots.
    """

    line: Pool | None
    number: int = dataclasses.field(metadata={"static": True})
    reach: int = dataclasses.field(metadata={"static": True})
    heads: int = dataclasses.field(metadata={"static": True})
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)
    equal: ClassVar[bool] = False  # heads have segments of any length

    @property
    def slots(self) -> int:
        """Slots that the layer reads, per KV head on average."""
        return self.reach // self.heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values: of all layers at the first one's place."""
        held = 0 if self.line is None else self.line.kv_bytes
        return held + sum(state.kv_bytes for state in self.beside.values())

    def view(self, line: Pool) -> View:
        """The layer's segments as a pool of `reach` slots."""
        first, start = self.number * self.heads, self.start(line)
        offsets = line.offsets[:, first : first + self.heads + 1] - start[:, None]
        cut = jax.vmap(lambda x, at: lax.dynamic_slice_in_dim(x, at, self.reach))
        place = jnp.arange(self.reach)
        own = (place >= offsets[:, :1]) & (place < offsets[:, -1:])
        entries = jax.tree.map(lambda x: cut(x, start), line.entries).masked(own)
        own_next = self.own(line.next_slot) - start[:, None]
        return View(entries, offsets, own_next, self.beside, line.codecs, self.lying(line, start))

    def own(self, x: Shaped[Array, "B LHk"]) -> Shaped[Array, "B Hk"]:
        """Of what the line's segments have, the layer's heads' part."""
        return x[:, self.number * self.heads : (self.number + 1) * self.heads]

    def lying(self, line: Pool, start: Int[Array, "B"]) -> Lying | None:
        """Plain keys and values of all layers, and where this one's view of them begins."""
        return Lying(line.entries.keys, line.entries.values, start) if line.codecs.plain else None

    def start(self, line: Pool) -> Int[Array, "B"]:
        """Where the view begins: at the layer's first border, or earlier where the line ends."""
        return jnp.minimum(line.offsets[:, self.number * self.heads], line.total - self.reach)

    def each(self, place: Any) -> "Place":
        """As a store's; layers read the line at places that are data, so it is divided by rows only."""
        line = None if self.line is None else self.line._each(place, "line")
        beside = put_all(place, self.beside, "rows")
        return dataclasses.replace(self, line=line, beside=beside)

    def keeping(self, names: tuple[str, ...]) -> "Place":
        """The place with these statistics alone in its line."""
        return self.holding(self.line and self.line.keeping(names))

    def in_time_order(self) -> "Place":
        """Every segment of the line in time order behind its empty slots."""
        return self.holding(self.line and self.line.in_time_order())

    def holding(self, line: Pool | None) -> "Place":
        """The place with another line, where it holds one."""
        return self if self.line is None else dataclasses.replace(self, line=line)

    def needed(self, held: Any) -> int:
        """Slots per KV head, on average over the heads, that hold the `held [B, Hk]` entries."""
        return on_average(held)

    def grown(self, held: int, tokens: int, window: int | None, lacking: int = 0) -> "Place":
        """The place with the `lacking` slots added behind those of every segment of its line."""
        line = self.line and (self.line.widened(lacking) if lacking else self.line)
        return dataclasses.replace(self, line=line, reach=self.reach + lacking * self.heads)

    def divisible(self, parts: int) -> "Place":
        """The place as it is."""
        return self


def line_of(layers: tuple[Any, ...]) -> Pool | None:
    """The line of the layers that share one; None where none does."""
    return next((layer.line for layer in layers if isinstance(layer, Place) and layer.line is not None), None)


def shared(layers: tuple[Any, ...], each: Sequence[Any]) -> list[Any]:
    """Of what each layer has, that of the layers that share a line."""
    return [x for layer, x in zip(layers, each, strict=True) if isinstance(layer, Place)]


def opened(layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """The layers, those that share a line as their views of it."""
    line: Any = line_of(layers)
    return tuple(layer.view(line) if isinstance(layer, Place) else layer for layer in layers)


def held_by(layers: tuple[Any, ...]) -> Int[Array, "L B Hk"]:
    """Entries held per layer, row and KV head; a line's are counted at once."""
    line = line_of(layers)
    of_line: Any = None if line is None else line.held()
    return jnp.stack([layer.own(of_line) if isinstance(layer, Place) else layer.held() for layer in layers])


def joined(pools: list[Pool]) -> Pool:
    """Pools of equal size in one line, one behind the other; what a pool leaves over is its last head's."""
    size = pools[0].total
    entries = jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), *[pool.entries for pool in pools])
    starts = [pool.offsets[:, :-1] + number * size for number, pool in enumerate(pools)]
    end = jnp.full_like(starts[0][:, :1], len(pools) * size)
    offsets = jnp.concatenate([*starts, end], axis=1)
    next_slot = jnp.concatenate([pool.next_slot + number * size for number, pool in enumerate(pools)], axis=1)
    return Pool(entries, offsets, next_slot, {}, pools[0].codecs)


def placed(line: Pool, beside: list[dict[str, Any]], reach: int) -> tuple[Place, ...]:
    """The layers' places in a line that they share, with what is beside each."""
    heads, reach = line.heads // len(beside), min(reach, line.total)
    return tuple(Place(line if i == 0 else None, i, reach, heads, state) for i, state in enumerate(beside))


def narrowed(layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """The layers after a prompt, those that share a line with no more slots to read than the widest of them has.

    Twice, four times, eight times an even share and so on, so that few programs are compiled.
    """
    line: Any = line_of(layers)
    if line is None:
        return layers
    heads = next(layer.heads for layer in layers if isinstance(layer, Place))
    borders = on_host(line.offsets)[:, ::heads]
    widest, reach = int((borders[:, 1:] - borders[:, :-1]).max()), 2 * line.slots * heads
    while reach < widest:
        reach *= 2
    return tuple(
        dataclasses.replace(layer, reach=min(layer.reach, reach + heads)) if isinstance(layer, Place) else layer
        for layer in layers
    )


def taking(layers: tuple[Any, ...], changes: tuple[Change | None, ...]) -> tuple[Any, ...]:
    """The layers after survivors took up what a token overwrites; of those that share a line, in the line at once."""
    shares = [
        (layer, change)
        for layer, change in zip(layers, changes, strict=True)
        if isinstance(layer, Place) and change is not None
    ]
    line: Any = line_of(layers)
    before = {place.number: place.view(line).positions for place, _ in shares if place.beside}
    if shares:
        starts = [place.start(line)[:, None] for place, _ in shares]
        moved = [
            dataclasses.replace(change, slot=jnp.where(change.slot < place.reach, change.slot + start, line.total))
            for (place, change), start in zip(shares, starts, strict=True)
        ]
        # Read before it is written, or it would be copied
        moved, lies = lax.optimization_barrier((moved, line.entries))
        every = jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), *moved)
        line = dataclasses.replace(line, entries=lies).taking(every)

    def after(layer: Any, change: Change | None) -> Any:
        if not isinstance(layer, Place):
            return layer if change is None else layer.taking(change)
        if change is not None and layer.beside:
            layer = dataclasses.replace(layer, beside=taken_up(layer.beside, before[layer.number], change))
        return layer.holding(line)

    return tuple(after(layer, change) for layer, change in zip(layers, changes, strict=True))


def written(layers: tuple[Any, ...], after: tuple[Any, ...], position: Int[Array, "B"]) -> tuple[Any, ...]:
    """The layers after a decode step: of those that share, each segment's token at `position [B]` goes into the line.

    `after` are the stores that the step left, views of the line among them. A row whose position is -1 has finished:
    nothing of it is written.
    """
    shares = [(place, view) for place, view in zip(layers, after, strict=True) if isinstance(place, Place)]
    line: Any = line_of(layers)
    if line is None:
        return after
    # Read before it is written, or it would be copied
    (old_keys, old_values), following = lax.optimization_barrier(
        ((line.entries.keys, line.entries.values), [view.next_slot for _, view in shares])
    )
    starts = [place.start(line)[:, None] for place, _ in shares]
    new_keys, new_values = (jnp.concatenate(new, axis=1) for new in zip(*(view.new for _, view in shares), strict=True))
    owner, reach = line.owner, shares[0][0].reach
    layer = jnp.minimum(owner // shares[0][0].heads, len(shares) - 1)
    back = jnp.arange(line.total) - jnp.take_along_axis(jnp.concatenate(starts, axis=1), layer, axis=1)
    back = jnp.clip(back, 0, reach - 1)

    def whole(name: str) -> Array:
        """A statistic of all slots: a step may change each."""
        each = jnp.concatenate([view.stats[name] for _, view in shares], axis=1)
        stat = jnp.take_along_axis(each, layer * reach + back, axis=1)
        return jnp.where(owner < line.heads, stat, line.stats[name])

    if line.codecs.plain:
        held = Segments(old_keys, old_values, line.positions, line.offsets)
        keys, values, positions, *_ = overwritten(held, new_keys, new_values, position, line.next_slot)
    else:
        active = position >= 0
        new = line.codecs.keys.encode(new_keys), line.codecs.values.encode(new_values)
        put = lambda x, new: line.put(x, new, active)  # noqa: E731
        keys, values = jax.tree.map(put, (old_keys, old_values), new)
        positions = line.put(line.positions, jnp.broadcast_to(position[:, None], line.next_slot.shape), active)
    stats, weight = {name: whole(name) for name in line.stats}, line.single(position >= 0).entries.weight
    entries = Entries(keys, values, positions, stats, weight)
    next_slot = jnp.concatenate([slots + start for slots, start in zip(following, starts, strict=True)], axis=1)
    line = dataclasses.replace(line, entries=entries, next_slot=next_slot)
    return tuple(
        dataclasses.replace(place.holding(line), beside=view.beside) if isinstance(place, Place) else view
        for place, view in zip(layers, after, strict=True)
    )
