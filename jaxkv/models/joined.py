"""How matrices that share an input are joined, and what their product is split into.

Columns that belong together lie together: a KV head's queries, its key and its value; a strip of the gate and the same
strip of the up matrix. So any equal share of the columns is whole heads and matching strips, and a mesh can divide the
joined matrix as it divides the heads.
"""

import math
from collections.abc import Iterable

from jax import lax
from jaxtyping import Array, Float

from jaxkv.models.config import ModelConfig

Segment = tuple[str, int, int]  # outputs start..stop of one part


def order(target: str, config: ModelConfig) -> list[Segment]:
    """The parts' outputs in the order in which the joined matrix or bias of that name holds them; [] if not joined."""
    if target in ("qkv", "qkv_bias"):
        return list(_heads(config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim))
    if target == "gate_up":
        width = strip(config.intermediate_size)
        starts = range(0, config.intermediate_size, width)
        return [(part, start, start + width) for start in starts for part in ("gate", "up")]
    return []


def _heads(kv_heads: int, group: int, dims: int) -> Iterable[Segment]:
    for head in range(kv_heads):
        yield "q", head * group * dims, (head + 1) * group * dims
        yield "k", head * dims, (head + 1) * dims
        yield "v", head * dims, (head + 1) * dims


def strip(size: int) -> int:
    """Columns of gate, and then of up, that lie together: at most 128, and 8 strips or more where `size` allows.

    128 are the lanes of a TPU's register: narrower strips are laid out anew when they are split.
    """
    return math.gcd(size // 8, 128) if size % 8 == 0 else 1


def split_heads(
    mixed: Float[Array, "*lead O"], kv_heads: int, dims: int
) -> tuple[Float[Array, "*lead Hq D"], Float[Array, "*lead Hk D"], Float[Array, "*lead Hk D"]]:
    """Query, key and value of the joined product; query heads in the model's order, G to each KV head."""
    lead = mixed.shape[:-1]
    mixed = mixed.reshape(*lead, kv_heads, -1, dims)
    return mixed[..., :-2, :].reshape(*lead, -1, dims), mixed[..., -2, :], mixed[..., -1, :]


def split_strips(mixed: Float[Array, "*lead O"]) -> tuple[Float[Array, "*lead F"], Float[Array, "*lead F"]]:
    """Gate and up of the joined product.

    The barrier has the product split; without it XLA for TPU splits the matrix, by a copy of it.
    """
    lead, size = mixed.shape[:-1], mixed.shape[-1] // 2
    mixed = lax.optimization_barrier(mixed).reshape(*lead, -1, 2, strip(size))
    return mixed[..., 0, :].reshape(*lead, size), mixed[..., 1, :].reshape(*lead, size)
