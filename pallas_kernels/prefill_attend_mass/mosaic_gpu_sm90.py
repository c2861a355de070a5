"""prefill_attend_mass for Hopper GPUs: two passes over queries and keys, and no array of one by the other.

The first gives every query's log-sum-exp: a program takes `QUERIES` queries of one head and walks over the keys. The
second gives every key's mass: a program takes `KEYS` keys and walks over the head's queries, whose weights it now knows
to the end. Both compute scores [S, N] = K q in blocks.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import gpu_blocks as blocks_of
from pallas_kernels.codes import Codes, refuse_codes
from pallas_kernels.gpu_blocks import per_query
from pallas_kernels.masking import MASKED, averaged

QUERIES = 64  # a program's in the first pass, at a time in the second
KEYS = 64  # at a time in the first pass, a program's in the second
STAGES = 3


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The numbers that the kernels are compiled for."""

    group: int  # query heads to a KV head
    dim: int  # D, filled up to a multiple of 64 with zeros that the copy engine makes
    query_blocks: int
    key_blocks: int
    scale: float
    window: int | None
    softcap: float | None
    reduce: str

    def scores(self, keys, queries, at, now):
        """Scores of a block and where queries see keys."""
        return blocks_of.scores_of(keys, queries, at, now, self.scale, self.window, self.softcap)


def prefill_attend_mass(
    queries: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"] | Codes,
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    reduce: str = "sum",
    own_keys_last: bool = False,
    weights: Float[Array, "B T"] | None = None,
    bias: Float[Array, "B Hk S"] | None = None,
    lse: Float[Array, "B Hq T"] | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> Float[Array, "B Hq S"]:
    """`reference.prefill_attend_mass` without an array of queries by keys.

    Raises `NotImplementedError` on GPUs other than Hopper, for dtypes other than bfloat16 and float16, and for D that
    is no multiple of 16 or above 256.
    """
    if bias is not None:
        raise NotImplementedError("keys whose logits have a bias need the reference")
    del own_keys_last, lse  # hints, which the blocks here do not need: they look at positions, and find their own
    (floats,) = refuse_codes(keys)
    batch, heads, length, dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    blocks_of.check(dim, keys.dtype)
    wide = blocks_of.round_up(dim, 64)
    plan = _Plan(
        heads // kv_heads, wide, -(-length // QUERIES), -(-slots // KEYS), scale, window, softcap, reduce
    )  # fmt: skip
    rows, width = plan.query_blocks * QUERIES, plan.key_blocks * KEYS
    arguments = (
        jnp.pad(queries, ((0, 0), (0, 0), (0, rows - length), (0, 0))).reshape(-1, rows, dim).astype(keys.dtype),
        jnp.pad(floats, ((0, 0), (0, 0), (0, -slots % 8), (0, 0))).reshape(batch * kv_heads, -1, dim),
        jnp.repeat(jnp.pad(query_positions, ((0, 0), (0, rows - length)), constant_values=-1), heads, axis=0),
        jnp.pad(key_positions, ((0, 0), (0, 0), (0, width - slots)), constant_values=-1).reshape(-1, width),
    )
    operand = blocks_of.operand(blocks_of.tile_width(dim), keys.dtype)
    kernel = functools.partial(plgpu.kernel, grid_names=("head", "block"), interpret=interpret or None)
    lses = kernel(
        functools.partial(_sum_weights, plan),
        out_type=jax.ShapeDtypeStruct((batch * heads, rows), jnp.float32),
        scratch_types={
            "q_mem": operand(QUERIES, wide),
            "k_mem": operand(STAGES, KEYS, wide),
            "now_mem": plgpu.SMEM((QUERIES,), jnp.int32),
            "at_mem": plgpu.SMEM((STAGES, KEYS), jnp.int32),
            "lse_mem": plgpu.SMEM((QUERIES,), jnp.float32),
            "q_here": plgpu.Barrier(num_arrivals=2),
            "k_here": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        },
        grid=(batch * heads, plan.query_blocks),
        kernel_name="prefill_log_sum_exp",
    )(*arguments)
    if weights is not None:  # w exp(x - lse) = exp(x - (lse - log w))
        lses = lses - jnp.repeat(jnp.pad(jnp.log(weights), ((0, 0), (0, rows - length))), heads, axis=0)
    mass = kernel(
        functools.partial(_sum_columns, plan),
        out_type=jax.ShapeDtypeStruct((batch * heads, width), jnp.float32),
        scratch_types={
            "q_mem": operand(STAGES, QUERIES, wide),
            "k_mem": operand(KEYS, wide),
            "now_mem": plgpu.SMEM((STAGES, QUERIES), jnp.int32),
            "at_mem": plgpu.SMEM((KEYS,), jnp.int32),
            "lse_mem": plgpu.SMEM((STAGES, QUERIES), jnp.float32),
            "mass_mem": plgpu.SMEM((KEYS,), jnp.float32),
            "q_here": plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
            "k_here": plgpu.Barrier(num_arrivals=2),
        },
        grid=(batch * heads, plan.key_blocks),
        kernel_name="prefill_attend_mass",
    )(*arguments, lses)
    mass = mass[:, :slots].reshape(batch, heads, slots)
    return averaged(mass, query_positions) if reduce == "mean" else mass


def _sum_weights(
    plan: _Plan, queries, keys, query_positions, key_positions, lse,
    *, q_mem, k_mem, now_mem, at_mem, lse_mem, q_here, k_here,
) -> None:  # fmt: skip
    """One program of the first pass: the log-sum-exp of some queries of one head (-inf where a query sees nothing)."""
    head = lax.axis_index("head")
    kv_head = lax.div(head, plan.group)
    mine = pl.ds(lax.axis_index("block") * QUERIES, QUERIES)
    all_dims = pl.ds(head * 0, plan.dim)  # from a traced 0, so that it may reach past the array, where it reads zeros

    def fetch(index):
        stage, some = lax.rem(index, STAGES), pl.ds(index * KEYS, KEYS)
        plgpu.copy_gmem_to_smem(key_positions.at[kv_head, some], at_mem.at[stage], k_here.at[stage])
        plgpu.copy_gmem_to_smem(keys.at[kv_head, some, all_dims], k_mem.at[stage], k_here.at[stage])

    for index in range(min(STAGES, plan.key_blocks)):
        fetch(jnp.int32(index))
    plgpu.copy_gmem_to_smem(queries.at[head, mine, all_dims], q_mem, q_here)
    plgpu.copy_gmem_to_smem(query_positions.at[head, mine], now_mem, q_here)
    plgpu.barrier_wait(q_here)
    now = plgpu.layout_cast(now_mem[...], blocks_of.QUERIES)

    def step(index, carry):
        top, total = carry
        stage = lax.rem(index, STAGES)
        plgpu.barrier_wait(k_here.at[stage])
        at = plgpu.layout_cast(at_mem[stage], blocks_of.KEYS)
        scores, seen = plan.scores(k_mem.at[stage], q_mem, at, now)
        plgpu.commit_smem()  # everyone has done with this stage
        coming = index + STAGES
        pl.when(coming < plan.key_blocks)(functools.partial(fetch, coming))
        higher = jnp.maximum(top, jnp.max(scores, axis=0))
        weights = jnp.where(seen, jnp.exp(scores - per_query(higher, scores.shape)), 0.0)
        return higher, total * jnp.exp(top - higher) + jnp.sum(weights, axis=0)

    start = (
        plgpu.layout_cast(jnp.full((QUERIES,), MASKED, jnp.float32), blocks_of.QUERIES),
        plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), blocks_of.QUERIES),
    )
    top, total = lax.fori_loop(0, plan.key_blocks, step, start)
    lse_mem[...] = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(lse_mem, lse.at[head, mine])
    plgpu.wait_smem_to_gmem(0)


def _sum_columns(
    plan: _Plan, queries, keys, query_positions, key_positions, lse, mass,
    *, q_mem, k_mem, now_mem, at_mem, lse_mem, mass_mem, q_here, k_here,
) -> None:  # fmt: skip
    """One program of the second pass: the mass of some keys from all queries of one head."""
    head = lax.axis_index("head")
    kv_head = lax.div(head, plan.group)
    mine = pl.ds(lax.axis_index("block") * KEYS, KEYS)
    all_dims = pl.ds(head * 0, plan.dim)

    def fetch(index):
        stage, some = lax.rem(index, STAGES), pl.ds(index * QUERIES, QUERIES)
        plgpu.copy_gmem_to_smem(query_positions.at[head, some], now_mem.at[stage], q_here.at[stage])
        plgpu.copy_gmem_to_smem(lse.at[head, some], lse_mem.at[stage], q_here.at[stage])
        plgpu.copy_gmem_to_smem(queries.at[head, some, all_dims], q_mem.at[stage], q_here.at[stage])

    for index in range(min(STAGES, plan.query_blocks)):
        fetch(jnp.int32(index))
    plgpu.copy_gmem_to_smem(keys.at[kv_head, mine, all_dims], k_mem, k_here)
    plgpu.copy_gmem_to_smem(key_positions.at[kv_head, mine], at_mem, k_here)
    plgpu.barrier_wait(k_here)
    at = plgpu.layout_cast(at_mem[...], blocks_of.KEYS)
    join = jnp.maximum if plan.reduce == "max" else jnp.add

    def step(index, so_far):
        stage = lax.rem(index, STAGES)
        plgpu.barrier_wait(q_here.at[stage])
        now = plgpu.layout_cast(now_mem[stage], blocks_of.QUERIES)
        total = plgpu.layout_cast(lse_mem[stage], blocks_of.QUERIES)
        scores, seen = plan.scores(k_mem, q_mem.at[stage], at, now)
        plgpu.commit_smem()  # everyone has done with this stage
        coming = index + STAGES
        pl.when(coming < plan.query_blocks)(functools.partial(fetch, coming))
        return join(so_far, jnp.where(seen, jnp.exp(scores - per_query(total, scores.shape)), 0.0))

    start = plgpu.layout_cast(jnp.zeros((KEYS, QUERIES), jnp.float32), blocks_of.SQUARE)
    result = lax.fori_loop(0, plan.query_blocks, step, start)
    mass_mem[...] = jnp.max(result, axis=1) if plan.reduce == "max" else jnp.sum(result, axis=1)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mass_mem, mass.at[head, mine])
    plgpu.wait_smem_to_gmem(0)
