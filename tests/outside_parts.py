"""Four parts that know jaxkv from outside: a score, an evicted rule, an allocator and a codec."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxkv.policies import Allocate, Codec, Evicted, Score, register, register_state


@register
@dataclasses.dataclass(frozen=True)
class Balance(Score):
    """score = ||v||_2 / ||k||_2 of the entry as it came, no attention needed."""

    kind: ClassVar[str] = "balance"
    stats: ClassVar[tuple[str, ...]] = ("balance",)

    def enter(self, new):
        size = lambda x: jnp.linalg.norm(x.astype(jnp.float32), axis=-1)  # noqa: E731
        return {"balance": size(new.values) / jnp.maximum(size(new.keys), 1e-6)}

    def factors(self, stats, positions, now):
        return 0.0, stats["balance"]


@register
@dataclasses.dataclass(frozen=True)
class Fold(Evicted):
    """What leaves is added to the value of the survivor next to it in the text, with the weight `share`."""

    share: float = 0.1
    kind: ClassVar[str] = "fold"
    state: ClassVar[str] = "folded"
    moves: ClassVar[bool] = True

    def begin(self, batch, heads, head_dim, dtype):
        return Folded(jnp.zeros((batch, heads), jnp.int32))

    def absorb(self, beside, kept, lost, facts):
        far = jnp.abs(kept.positions[:, :, None] - lost.positions[..., None])
        near = jnp.argmin(jnp.where(kept.filled[:, :, None], far, 2**30), axis=-1)
        gone = jnp.where(lost.filled[..., None], lost.values, jnp.zeros((), lost.values.dtype))
        add = jax.vmap(jax.vmap(lambda x, at, new: x.at[at].add(jnp.asarray(self.share, x.dtype) * new)))
        values = add(kept.values, near, gone)
        count = beside.count + jnp.sum(lost.filled, axis=-1, dtype=jnp.int32)
        return dataclasses.replace(kept, values=values), Folded(count)


@register_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Folded:
    """How many entries each head has folded away."""

    count: jax.Array
    attends: ClassVar[bool] = False
    kv_bytes: ClassVar[int] = 0


@register
@dataclasses.dataclass(frozen=True)
class Seesaw(Allocate):
    """Layers get the budget plus and minus `swing` tokens, turn about."""

    swing: int = 2
    kind: ClassVar[str] = "seesaw"

    def budgets(self, budget, layers, tokens, window, learned):
        swing = self.swing if layers % 2 == 0 else 0
        return tuple(budget + (swing if layer % 2 else -swing) for layer in range(layers))


@register
@dataclasses.dataclass(frozen=True)
class Half(Codec):
    """Two bytes a channel, whatever the model's dtype."""

    kind: ClassVar[str] = "half"

    def encode(self, x):
        return x.astype(jnp.bfloat16)

    def decode(self, code):
        return code.astype(jnp.float32)
