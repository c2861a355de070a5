"""ragged_decode in plain jnp: the meaning that every kernel must equal.

What decode_attend_score does, on a pool: P slots of a layer, of which each KV head has its own segment. Every head
multiplies with all P keys here and sees its own, Hk times the arithmetic of a uniform cache on the same bytes: one
matrix product of usual shape per row, where a decode step waits for memory anyway.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attend_score.reference import GROUP, Attended
from pallas_kernels.decode_attend_score.victim import Rule, linear, protected
from pallas_kernels.masking import filled, masked_softmax, soft_cap
from pallas_kernels.ragged_decode.segments import mine, over_slots, per_slot, segments

LAST = jnp.iinfo(jnp.int32).max
Weight = Float[Array, "B P"] | float
Line = tuple[Float[Array, "B T D"], Float[Array, "B T D"], Int[Array, "B"]]  # K and V of many layers; a layer's first


def ragged_decode(
    query: Float[Array, "B Hq D"],
    key: Float[Array, "B Hk D"],
    value: Float[Array, "B Hk D"],
    position: Int[Array, "B"],
    slot: Int[Array, "B Hk"],
    keys: Float[Array, "B P D"],
    values: Float[Array, "B P D"],
    positions: Int[Array, "B P"],
    offsets: Int[Array, "B Hk_1"],
    recents: Int[Array, "B"],
    weight: Weight = 1.0,
    bias: Weight = 0.0,
    *,
    scale: float,
    softcap: float | None = None,
    group: str = "sum",
    rule: Rule | None = None,
) -> Attended:
    """Write each head's (key, value, position) into its `slot`, then softmax(scale * q . k) over the head's segment.

    `mass [B, P]` is each slot's softmax weight, reduced over the G query heads of its own KV head by `group`, float32.
    `next_slot` is each head's first empty slot, else the lowest weight * mass + bias of its segment under the `rule`,
    which spares sinks and the last `recents [B]` tokens; ties go to the older token. With no rule, the first empty
    one (or the segment's first). A row whose position is -1 changes nothing. Every segment has at least one slot.
    """
    keys, values, positions = written(keys, values, positions, key, value, position, slot)
    given, lse, owner = weights(
        query, keys, positions, offsets, position, key.shape[1], scale=scale, softcap=softcap
    )  # fmt: skip
    mass = over_slots(GROUP[group](given, axis=2), owner)
    aimed = aim(mass, positions, position, offsets, recents, weight, bias, rule=rule)
    return Attended(
        output=read(given, values, positions).astype(query.dtype).reshape(query.shape),
        lse=lse.reshape(query.shape[:2]),
        mass=mass,
        keys=keys,
        values=values,
        positions=positions,
        next_slot=jnp.where(position[:, None] < 0, slot, aimed),
    )


def weights(
    query: Float[Array, "B Hq D"],
    keys: Float[Array, "B P D"],
    positions: Int[Array, "B P"],
    offsets: Int[Array, "B Hk_1"],
    position: Int[Array, "B"],
    kv_heads: int,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Float[Array, "B Hk G P"], Float[Array, "B Hk G"], Int[Array, "B P"]]:
    """Each query head's softmax over its KV head's segment, its log-sum-exp, and every slot's head."""
    owner = segments(offsets, keys.shape[1])
    queries = query.reshape(query.shape[0], kv_heads, -1, query.shape[-1])
    logits = jnp.einsum("bhgd,bpd->bhgp", queries, keys, preferred_element_type=jnp.float32) * scale
    seen = mine(owner, kv_heads) & ((positions >= 0) & (positions <= position[:, None]))[:, None]
    return *masked_softmax(soft_cap(logits, softcap), seen[:, :, None]), owner


def read(
    weights: Float[Array, "B Hk G P"], values: Float[Array, "B P D"], positions: Int[Array, "B P"]
) -> Float[Array, "B Hk G D"]:
    """The values by their weights, float32; what lies in empty slots does not count."""
    return jnp.einsum(
        "bhgp,bpd->bhgd", weights.astype(values.dtype), filled(values, positions), preferred_element_type=jnp.float32
    )


def written(
    keys: Float[Array, "B P D"],
    values: Float[Array, "B P D"],
    positions: Int[Array, "B P"],
    key: Float[Array, "B Hk D"],
    value: Float[Array, "B Hk D"],
    position: Int[Array, "B"],
    slot: Int[Array, "B Hk"],
) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"], Int[Array, "B P"]]:
    """Keys, values and positions with the token in every head's slot; a position of -1 writes nothing."""
    at = (jnp.arange(keys.shape[0])[:, None], jnp.where(position[:, None] < 0, keys.shape[1], slot))  # out of range
    return (
        keys.at[at].set(key, mode="drop"),
        values.at[at].set(value, mode="drop"),
        positions.at[at].set(jnp.broadcast_to(position[:, None], slot.shape), mode="drop"),
    )


def aim(
    mass: Float[Array, "B P"],
    positions: Int[Array, "B P"],
    position: Int[Array, "B"],
    offsets: Int[Array, "B Hk_1"],
    recents: Int[Array, "B"],
    weight: Weight,
    bias: Weight,
    *,
    rule: Rule | None,
) -> Int[Array, "B Hk"]:
    """The slot of every head for the token after `position`: `lowest` of weight * mass + bias, under the rule."""
    if rule is None:
        return first_empty(positions, offsets)
    factors = (x[:, None] if isinstance(x, jax.Array) else x for x in (weight, bias))  # as of one long head
    score = linear(mass[:, None], *factors)
    safe = protected(positions[:, None], position + 1, rule.sinks, recents)
    return lowest(jnp.where(safe, jnp.inf, score)[:, 0], positions, offsets)


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
