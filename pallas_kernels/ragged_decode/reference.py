"""ragged_decode in plain jnp: the meaning that every kernel must equal.

What decode_attend_score does, on a pool: P slots of a layer, of which each KV head has its own segment. Every head
multiplies with all P keys here and sees its own, Hk times the arithmetic of a uniform cache on the same bytes: one
matrix product of usual shape per row, where a decode step waits for memory anyway.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arguments import Judge, Segments, Token
from pallas_kernels.codes import Codes, coded, numbers, put
from pallas_kernels.decode_attend_score.reference import GROUP, Attended
from pallas_kernels.decode_attend_score.victim import linear, protected
from pallas_kernels.masking import biased, filled, masked_softmax, soft_cap
from pallas_kernels.ragged_decode.segments import mine, over_slots, per_slot, segments

LAST = jnp.iinfo(jnp.int32).max


def ragged_decode(
    token: Token,
    held: Segments,
    slot: Int[Array, "B Hk"],
    judge: Judge,
    *,
    scale: float,
    softcap: float | None = None,
    with_mass: bool = True,
) -> Attended:
    """Write the token into every head's `slot`, then softmax(scale * q . k) over the head's segment.

    Keys and values that are codes count as the numbers that they stand for, the token's own as they are; its codes are
    what is written.
    `mass [B, P]` is each slot's softmax weight, reduced over the G query heads of its own KV head by the judge's
    `group`, float32, `[B, G, P]` with "each"; None without `with_mass`, where the judge weighs none. `next_slot` is
    each head's first empty slot, else the lowest weight * mass + bias of its segment under the rule; ties go to the
    older token. With no rule, the first empty one (or the segment's first). Limits are the segments' sizes. A row whose
    position is -1 changes nothing. Every segment has at least one slot, or there is no rule.
    """
    query = token.query
    lies = written(held, *token.entry, token.position, slot)
    held = exact(token, held, slot) if coded(held.keys, held.values) else lies
    given, lse, owner = weights(token, held, scale=scale, softcap=softcap)
    mass = None
    if with_mass and judge.group == "each":
        mass = jnp.stack([over_slots(given[:, :, member], owner) for member in range(given.shape[2])], axis=1)
    elif with_mass:
        mass = over_slots(GROUP[judge.group](given, axis=2), owner)
    return Attended(
        output=read(given, held.values, held.positions).astype(query.dtype).reshape(*query.shape[:2], -1),
        lse=lse.reshape(query.shape[:2]),
        mass=mass,
        keys=lies.keys,
        values=lies.values,
        positions=held.positions,
        next_slot=aim(mass, held.positions, held.offsets, token.position, slot, judge),
    )


def weights(
    token: Token, held: Segments, *, scale: float, softcap: float | None
) -> tuple[Float[Array, "B Hk G P"], Float[Array, "B Hk G"], Int[Array, "B P"]]:
    """Each query head's softmax over its KV head's segment, its log-sum-exp, and every slot's head."""
    query, keys, positions = token.query, held.keys, held.positions
    kv_heads = token.key.shape[1]
    owner = segments(held.offsets, keys.shape[1])
    queries = query.reshape(query.shape[0], kv_heads, -1, query.shape[-1])
    logits = jnp.einsum("bhgd,bpd->bhgp", queries, keys, preferred_element_type=jnp.float32) * scale
    bias = None if held.bias is None else held.bias[:, None, None]
    seen = mine(owner, kv_heads) & ((positions >= 0) & (positions <= token.position[:, None]))[:, None]
    return *masked_softmax(biased(soft_cap(logits, softcap), bias), seen[:, :, None]), owner


def read(
    weights: Float[Array, "B Hk G P"], values: Float[Array, "B P D"], positions: Int[Array, "B P"]
) -> Float[Array, "B Hk G D"]:
    """The values by their weights, float32; what lies in empty slots does not count."""
    return jnp.einsum(
        "bhgp,bpd->bhgd", weights.astype(values.dtype), filled(values, positions), preferred_element_type=jnp.float32
    )


def written(
    held: Segments,
    key: Float[Array, "B Hk D"] | Codes,
    value: Float[Array, "B Hk N"] | Codes,
    position: Int[Array, "B"],
    slot: Int[Array, "B Hk"],
) -> Segments:
    """The pool with key, value and position in every head's slot; a position of -1 writes nothing."""
    at = _at(held.positions, position, slot)
    return held._replace(
        keys=put(held.keys, at, key),
        values=put(held.values, at, value),
        positions=placed(held.positions, position, slot),
    )


def exact(token: Token, held: Segments, slot: Int[Array, "B Hk"]) -> Segments:
    """What is attended to: the slots as numbers, the token's own as exact as they come."""
    plain = held._replace(keys=numbers(held.keys), values=numbers(held.values))
    return written(plain, token.key, token.value, token.position, slot)


def placed(positions: Int[Array, "B P"], position: Int[Array, "B"], slot: Int[Array, "B Hk"]) -> Int[Array, "B P"]:
    """The positions with the token's in every head's slot."""
    at = _at(positions, position, slot)
    return positions.at[at].set(jnp.broadcast_to(position[:, None], slot.shape), mode="drop")


def _at(positions: Int[Array, "B P"], position: Int[Array, "B"], slot: Int[Array, "B Hk"]) -> tuple:
    """Where the token is written; out of range, so that it is dropped, for a position of -1."""
    batch, slots = positions.shape
    return jnp.arange(batch)[:, None], jnp.where(position[:, None] < 0, slots, slot)


def aim(
    mass: Float[Array, "B *G P"] | None,
    positions: Int[Array, "B P"],
    offsets: Int[Array, "B Hk_1"],
    position: Int[Array, "B"],
    slot: Int[Array, "B Hk"],
    judge: Judge,
) -> Int[Array, "B Hk"]:
    """The slot of every head for the token after `position`: `lowest` of weight * mass + bias, under the rule; without
    one the first empty one. A row at position -1 keeps its `slot`.
    """
    if judge.rule is None:
        chosen = first_empty(positions, offsets)
    else:
        factors = (x[:, None] if isinstance(x, jax.Array) else x for x in (judge.weight, judge.bias))
        mass = jnp.zeros(positions.shape, jnp.float32) if mass is None else mass
        score = linear(mass[:, None], *factors)  # as of one long head
        safe = protected(positions[:, None], position + 1, judge.rule.sinks, judge.recents)
        chosen = lowest(jnp.where(safe, jnp.inf, score)[:, 0], positions, offsets)
    return jnp.where(position[:, None] < 0, slot, chosen)


def first_empty(positions: Int[Array, "B P"], offsets: Int[Array, "B Hk_1"]) -> Int[Array, "B Hk"]:
    """Each head's first empty slot; its first slot where none is empty."""
    total, heads = positions.shape[1], offsets.shape[1] - 1
    own = (positions < 0)[:, None] & mine(segments(offsets, total), heads)
    first = jnp.min(jnp.where(own, jnp.arange(total, dtype=jnp.int32), LAST), axis=-1)
    return jnp.where(first < LAST, first, offsets[:, :-1])


def lowest(
    worth: Float[Array, "B P"], positions: Int[Array, "B P"], offsets: Int[Array, "B Hk_1"]
) -> Int[Array, "B Hk"]:
    """Each head's first empty slot, else the entry of its segment that is worth least; of equals the oldest."""
    owner = segments(offsets, positions.shape[1])
    heads = offsets.shape[1] - 1
    worth = jnp.where(positions < 0, -jnp.inf, worth)

    def least(x, among: Bool[Array, "B P"]):
        """The lowest of each head's own `x` among some of its slots, and which slots have it."""
        own = among[:, None] & mine(owner, heads)
        low = jnp.min(jnp.where(own, x[:, None], jnp.inf if x.dtype == jnp.float32 else LAST), axis=-1)
        return low, among & (x == per_slot(low, owner))

    _, some = least(worth, jnp.ones_like(worth, dtype=bool))
    _, some = least(positions, some)
    place = jnp.broadcast_to(jnp.arange(positions.shape[1], dtype=jnp.int32), positions.shape)
    return jnp.minimum(least(place, some)[0], positions.shape[1] - 1)
