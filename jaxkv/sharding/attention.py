"""The attention operations on a mesh: each device runs the kernel on its rows, heads and slots, then they agree.

On one device these are the kernels themselves. Everything else of a layer (scores, protection, top-k, victims) is
written for whole arrays, and XLA's partitioner divides it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxkv.sharding.layout import GROUP, HEADS, POOL, ROWS, SLOTS, Layout
from pallas_kernels import decode_attend_score as decode_kernel
from pallas_kernels import order
from pallas_kernels import prefill_attend as prefill_kernel
from pallas_kernels import prefill_attend_mass as mass_kernel
from pallas_kernels import ragged_decode as ragged_kernel
from pallas_kernels.arguments import Held, Judge, Segments, Token
from pallas_kernels.decode_attend_score.reference import GROUP as REDUCE
from pallas_kernels.decode_attend_score.reference import Attended
from pallas_kernels.decode_attend_score.victim import aim
from pallas_kernels.partial import Partial, portion
from pallas_kernels.ragged_decode import reference as ragged
from pallas_kernels.ragged_decode.segments import per_slot, segments

ACROSS = {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax}


class RotateAtRead(NamedTuple):
    """How keys are rotated when they are read: the entries' places, or how far they are turned on, and query and keys
    by them."""

    places: Callable[..., jax.Array]  # positions [b, h, C] -> places
    by: Callable[..., tuple[jax.Array, jax.Array]]  # query, keys, places, the new token's place


def awaiting[Tree](layout: Layout, tree: Tree, found: jax.Array) -> Tree:
    """`order.awaiting`; on a mesh the arrays as they are, for each device would have to hear of what was found."""
    return order.awaiting(tree, found) if layout.mesh is None else tree


def prefill_attend(
    layout: Layout,
    query: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"],
    values: Float[Array, "B Hk S D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    bias: Float[Array, "B Hk S"] | None = None,
    with_lse: bool = False,
    **options: Any,
) -> Partial:
    """`prefill_attend` with the queries divided over the text as well; every device has all slots of its heads.

    The cache is bounded, so K and V of cache and block are gathered once per layer: a ring would move the same bytes,
    and the eviction behind it needs the rows anyway, to lay out what stays. `with_lse`: for a merge with other parts;
    else the log-sum-exp is 0. `bias` is added to the logits of each key.
    """
    kernel = functools.partial(prefill_kernel.prefill_attend, own_keys_last=True, with_lse=with_lse, **options)
    more = {} if bias is None else {"bias": bias}
    if layout.mesh is None:
        out = kernel(query, keys, values, query_positions, key_positions, **more)
        return Partial(*out) if with_lse else Partial(out, jnp.zeros(out.shape[:-1], jnp.float32))
    if layout.size(SLOTS) > 1:  # a device's queries lie anywhere in the block
        kernel = functools.partial(kernel, own_keys_last=False)
    grouped = _grouped(query, keys.shape[1])
    q = layout.spec(grouped.shape, (ROWS, HEADS, GROUP, SLOTS, None))
    kv = layout.spec(keys.shape, layout.slot_axes(4, slots=None))

    def local(query, keys, values, query_positions, key_positions, more):
        out = kernel(_flat(query), keys, values, query_positions, key_positions, **more)
        return jax.tree.map(lambda x: x.reshape(*query.shape[:4], *x.shape[3:]), out)

    at = layout.spec(query_positions.shape, (ROWS, SLOTS))
    ins = (q, kv, kv, at, _but_last(kv), dict.fromkeys(more, _but_last(kv)))
    outs: Any = (q, _but_last(q)) if with_lse else q
    out = _mapped(layout, local, ins, outs)(grouped, keys, values, query_positions, key_positions, more)
    if with_lse:
        return Partial(out[0].reshape(query.shape), out[1].reshape(query.shape[:3]))
    return Partial(out.reshape(query.shape), jnp.zeros(query.shape[:3], jnp.float32))


def held_attend(
    layout: Layout,
    query: Float[Array, "B Hq N D"],
    keys: Float[Array, "B Hk C D"],
    values: Float[Array, "B Hk C D"],
    query_positions: Int[Array, "B N"],
    key_positions: Int[Array, "B Hk C"],
    *,
    bias: Float[Array, "B Hk C"] | None = None,
    **options: Any,
) -> Partial:
    """Attention of a few queries over what is held, for a merge with other parts; K and V never leave their device.

    Where slots are divided every device attends to its own, and the parts are merged by their log-sum-exps.
    """
    kernel = functools.partial(prefill_kernel.prefill_attend, with_lse=True, **options)
    more = {} if bias is None else {"bias": bias}
    if layout.mesh is None:
        return Partial(*kernel(query, keys, values, query_positions, key_positions, **more))
    grouped = _grouped(query, keys.shape[1])
    q = layout.spec(grouped.shape, (ROWS, HEADS, GROUP, None, None))
    kv, at = layout.spec(keys.shape, layout.slot_axes(4)), layout.spec(query_positions.shape, (ROWS, None))

    def local(query, keys, values, query_positions, key_positions, more):
        output, lse = kernel(_flat(query), keys, values, query_positions, key_positions, **more)
        output, lse = output.reshape(query.shape), lse.reshape(query.shape[:4])
        if kv[2] is None:
            return output, lse
        everyone, share = _merged(lse, kv[2])
        whole = lax.psum(output.astype(jnp.float32) * share[..., None], kv[2])
        return whole.astype(output.dtype), everyone

    ins = (q, kv, kv, at, _but_last(kv), dict.fromkeys(more, _but_last(kv)))
    out = _mapped(layout, local, ins, (q, _but_last(q)))(grouped, keys, values, query_positions, key_positions, more)
    return Partial(out[0].reshape(query.shape), out[1].reshape(query.shape[:3]))


def prefill_attend_mass(
    layout: Layout,
    query: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    reduce: str,
    weights: Float[Array, "B T"] | None = None,
    bias: Float[Array, "B Hk S"] | None = None,
    lse: Float[Array, "B Hq T"] | None = None,
    **options: Any,
) -> Float[Array, "B Hq S"]:
    """`prefill_attend_mass`; queries that the devices along the text can share equally are shared, and summed up.

    `lse` are their log-sum-exps over these keys, where these are known.
    """
    kernel = functools.partial(mass_kernel.prefill_attend_mass, **options)
    more = {} if bias is None else {"bias": bias}
    if layout.mesh is None:
        more |= {} if lse is None else {"lse": lse}
        options = {"reduce": reduce, "own_keys_last": True, "weights": weights, **more}
        return kernel(query, keys, query_positions, key_positions, **options)
    grouped = _grouped(query, keys.shape[1])
    q = layout.spec(grouped.shape, (ROWS, HEADS, GROUP, SLOTS, None))
    at = layout.spec(query_positions.shape, (ROWS, SLOTS))
    kv = layout.spec(keys.shape, layout.slot_axes(4, slots=None))
    over = at[1]  # context, spare, both or neither: what divides the queries without a rest
    more |= {} if weights is None else {"weights": weights}
    more |= {} if lse is None else {"lse": lse.reshape(grouped.shape[:4])}
    of = {"bias": _but_last(kv), "weights": at, "lse": _but_last(q)}

    def local(query, keys, query_positions, key_positions, more):
        each = "sum" if over and reduce == "mean" else reduce
        if "lse" in more:
            more = {**more, "lse": more["lse"].reshape(_flat(query).shape[:3])}
        mass = kernel(_flat(query), keys, query_positions, key_positions, reduce=each, **more)
        if over:
            mass = (lax.pmax if reduce == "max" else lax.psum)(mass, over)
            if reduce == "mean":
                count = lax.psum(jnp.sum(query_positions >= 0, axis=-1, dtype=jnp.float32), over)
                mass = mass / jnp.maximum(count, 1.0)[:, None, None]
        return mass.reshape(*query.shape[:3], -1)

    out = layout.spec((*grouped.shape[:3], 1), (ROWS, HEADS, GROUP, None))
    ins = (q, kv, at, _but_last(kv), {name: of[name] for name in more})
    mass = _mapped(layout, local, ins, out)(grouped, keys, query_positions, key_positions, more)
    return mass.reshape(*query.shape[:2], -1)


def decode_attend_score(
    layout: Layout,
    token: Token,
    held: Held,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    rotate: RotateAtRead | None,
    window: int | None,
    implementation: str | None,
    with_mass: bool = True,
    **softmax: Any,
) -> Attended:
    """`decode_attend_score` with rows, heads and slots divided; K and V never leave their device.

    Where slots are divided every device attends to its own, and the parts are merged by their log-sum-exps. The next
    slot is the kernel's own choice where one device sees all that the rule compares, else it is chosen from the mass,
    by each device among its slots and then among the devices' candidates.
    `rotate` turns query and keys at read time.
    """
    kernel = functools.partial(
        decode_kernel.decode_attend_score, window=window, implementation=implementation, **softmax
    )
    if layout.mesh is None:
        return kernel(token, held, slot, judge, rotate=_rotation(rotate), with_mass=with_mass)

    query, keys, rule = token.query, held.keys, judge.rule
    grouped = _grouped(query, keys.shape[1])
    rows = layout.spec(token.position.shape, (ROWS,))
    q, kv = layout.spec(grouped.shape, (ROWS, HEADS, GROUP, None)), layout.spec(keys.shape, layout.slot_axes(4))
    heads, flat = layout.spec(slot.shape, (ROWS, HEADS)), _but_last(kv)
    divided = kv[2] is not None
    alone = not divided and layout.size(GROUP) == 1
    own_rule = rule is None or (rule.heads == "each" and alone) or (alone and layout.size(HEADS) == 1)

    def local(token, held, slot, judge):
        if divided:
            return _attend_part(kernel, layout, kv[2], token, held, slot, judge, rotate=rotate, with_mass=with_mass)
        shape = token.query.shape
        token, judge = token._replace(query=_flat(token.query)), judge._replace(rule=rule if own_rule else None)
        out = kernel(token, held, slot, judge, rotate=_rotation(rotate), with_mass=with_mass)
        shared = out.mass is not None and layout.size(GROUP) > 1
        return out._replace(
            output=out.output.reshape(*shape[:-1], -1),
            lse=out.lse.reshape(shape[:3]),
            mass=ACROSS[judge.group](out.mass, GROUP) if shared else out.mass,
        )

    each = _and_whole(heads)
    codes = (None if code is None else each for code in (token.key_code, token.value_code))
    new = Token._make((q, each, each, rows, *codes))
    lies = Held._make((kv, kv, flat, None if held.bias is None else flat))
    ins = (new, lies, heads, _judge_specs(judge, rows, flat))
    outs = Attended._make((q, _but_last(q), flat if with_mass else None, kv, kv, flat, heads))
    out = _mapped(layout, local, ins, outs)(token._replace(query=grouped), held, slot, judge)
    out = out._replace(output=out.output.reshape(*query.shape[:2], -1), lse=out.lse.reshape(query.shape[:2]))
    if own_rule and not divided:
        return out
    return out._replace(next_slot=aim(out.mass, out.positions, token.position, slot, judge, window=window))


def _attend_part(
    kernel: Callable,
    layout: Layout,
    over: str | tuple[str, ...],
    token: Token,
    held: Held,
    slot: Int[Array, "b h"],
    judge: Judge,
    *,
    rotate: RotateAtRead | None,
    with_mass: bool,
) -> Attended:
    """One device's part of a decode step: its own slots, of those divided `over` axes, and the merge with the others'
    by log-sum-exp. A tier may be divided over fewer axes than the slots, and be there several times.

    The query is grouped, `[b, h, g, D]`. The kernel gives the mass of every query head, for each has its own share in
    the softmax over all slots.
    """
    shape, slots = token.query.shape, held.keys.shape[2]
    out = kernel(
        token._replace(query=_flat(token.query)), held, _here(slot, slots, over),
        judge._replace(rule=None, group="each"), rotate=_rotation(rotate, over), with_mass=with_mass,
    )  # fmt: skip
    everyone, share = _merged(out.lse.reshape(shape[:3]), over)
    output = lax.psum(out.output.reshape(*shape[:-1], -1).astype(jnp.float32) * share[..., None], over)
    mass = None
    if out.mass is not None:
        mass = REDUCE[judge.group](out.mass * share[..., None], axis=2)
        mass = ACROSS[judge.group](mass, GROUP) if layout.size(GROUP) > 1 else mass
    return out._replace(output=output.astype(token.query.dtype), lse=everyone, mass=mass, next_slot=slot)


def ragged_decode(
    layout: Layout,
    token: Token,
    held: Segments,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    whole: bool,
    implementation: str | None,
    with_mass: bool = True,
    **softmax: Any,
) -> Attended:
    """`ragged_decode` with rows and slots divided, wherever the heads' borders lie; K and V never leave their device.

    Every device has the queries of all heads. Where slots are divided it attends with those that it holds; the parts
    are merged by their log-sum-exps, and the next slots chosen from the mass of all. `whole`: only rows are divided.
    """
    kernel = functools.partial(ragged_kernel.ragged_decode, implementation=implementation, **softmax)
    if layout.mesh is None:
        return kernel(token, held, slot, judge, with_mass=with_mass)
    kv = layout.spec(held.keys.shape, (ROWS, None if whole else POOL, None))
    rows, flat = layout.spec(token.position.shape, (ROWS,)), _but_last(kv)
    few, tokens = PartitionSpec(*rows, None), PartitionSpec(*rows, None, None)

    def local(token, held, slot, judge):
        if kv[1] is not None:
            return _ragged_part(kernel, kv[1], token, held, slot, judge, with_mass=with_mass)
        return kernel(token, held, slot, judge, with_mass=with_mass)

    held = held._replace(line=None)  # keys and values cut out of it are read
    codes = (None if code is None else tokens for code in (token.key_code, token.value_code))
    new = Token._make((tokens, tokens, tokens, rows, *codes))
    lies = Segments._make((kv, kv, flat, few, None, None if held.bias is None else flat))
    ins = (new, lies, few, _judge_specs(judge, rows, flat))
    outs = Attended._make((tokens, few, flat if with_mass else None, kv, kv, flat, few))
    out = _mapped(layout, local, ins, outs)(token, held, slot, judge)
    if kv[1] is None:
        return out
    return out._replace(next_slot=ragged.aim(out.mass, out.positions, held.offsets, token.position, slot, judge))


def _ragged_part(
    kernel: Callable,
    over: str | tuple[str, ...],
    token: Token,
    held: Segments,
    slot: Int[Array, "b Hk"],
    judge: Judge,
    *,
    with_mass: bool,
) -> Attended:
    """One device's part of a decode step on a pool: its own slots of the line, and the merge with the others', as
    `_attend_part` does it."""
    batch, kv_heads, slots = *slot.shape, held.positions.shape[1]
    mine = jnp.clip(held.offsets - lax.axis_index(over) * slots, 0, slots)
    own = judge._replace(rule=None, group="each")
    out = kernel(token, held._replace(offsets=mine), _here(slot, slots, over), own, with_mass=with_mass)
    everyone, share = _merged(out.lse.reshape(batch, kv_heads, -1), over)
    output = out.output.reshape(batch, kv_heads, -1, out.output.shape[-1]).astype(jnp.float32) * share[..., None]
    mass = None
    if out.mass is not None:
        by_slot = (per_slot(share[:, :, member], segments(mine, slots)) for member in range(share.shape[2]))
        mass = REDUCE[judge.group](out.mass * jnp.stack(list(by_slot), axis=1), axis=1)
    return out._replace(
        output=lax.psum(output, over).astype(token.query.dtype).reshape(out.output.shape),
        lse=everyone.reshape(out.lse.shape), mass=mass, next_slot=slot,
    )  # fmt: skip


def _here(slot: Int[Array, "b h"], held: int, over: str | tuple[str, ...]) -> Int[Array, "b h"]:
    """The slots by their numbers on this device, which holds so many; another device's out of range: not written."""
    at = slot - lax.axis_index(over) * held
    return jnp.where((at >= 0) & (at < held), at, held)


def _merged(
    lse: Float[Array, "b h g *N"], over: str | tuple[str, ...]
) -> tuple[Float[Array, "b h g *N"], Float[Array, "b h g *N"]]:
    """The log-sum-exp over all devices' slots, and this one's share in every softmax."""
    everyone = jax.nn.logsumexp(lax.all_gather(lse, over), axis=0)
    return everyone, portion(lse, everyone)


def _judge_specs(judge: Judge, rows: PartitionSpec, flat: PartitionSpec) -> Any:
    """How the judge's arrays are divided: per row, or over the slots too."""
    return jax.tree.map(lambda x: rows if x.ndim == 1 else flat, judge)


def _rotation(rotate: RotateAtRead | None, over: str | tuple[str, ...] | None = None) -> Callable | None:
    """`rotate` as the kernels call it; the new token is the last of the entries in time. Where slots are divided `over`
    axes an entry's place is among all devices' entries."""
    if rotate is None:
        return None

    def by_places(query, keys, positions):
        slots = positions.shape[2]
        if over is None:
            places = own = rotate.places(positions)
        else:
            places = rotate.places(lax.all_gather(positions, over, axis=2, tiled=True))
            own = lax.dynamic_slice_in_dim(places, lax.axis_index(over) * slots, slots, axis=2)
        return rotate.by(query, keys, own, jnp.max(places, axis=-1))

    return by_places


def _mapped(layout: Layout, local: Callable, ins: Any, outs: Any) -> Callable:
    return jax.shard_map(local, mesh=layout.mesh, in_specs=ins, out_specs=outs, check_vma=False)


def _and_whole(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*spec, None)


def _but_last(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*spec[:-1])


def _grouped(query: jax.Array, kv_heads: int) -> jax.Array:
    """`[B, Hq, ...]` as `[B, Hk, G, ...]`, whose two dimensions of heads are divided by different axes."""
    return query.reshape(query.shape[0], kv_heads, -1, *query.shape[2:])


def _flat(query: jax.Array) -> jax.Array:
    return query.reshape(query.shape[0], -1, *query.shape[3:])
