"""prefill_attend for Hopper GPUs: flash attention whose mask is made of positions.

cuDNN and jax's own kernels mask by index, which says nothing about a cache that keeps some of the past in any order.
One program takes 64 queries of one head (32 where D is above 128) and walks over the keys, block by block, with a
running maximum: scores [S, N] = K q, output [D, N] += V^T weights.
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
from pallas_kernels.masking import MASKED

KEYS = 64  # at a time
STAGES = 2


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The numbers that the kernel is compiled for."""

    group: int  # query heads to a KV head
    dim: int  # D, filled up to a multiple of 64 with zeros that the copy engine makes
    queries: int  # a program's
    blocks: int  # of keys
    ahead: int | None  # the keys up to the first query's own, where the last keys are the queries' own
    scale: float
    window: int | None
    softcap: float | None


def prefill_attend(
    queries: Float[Array, "B Hq T D"],
    keys: Float[Array, "B Hk S D"] | Codes,
    values: Float[Array, "B Hk S D"] | Codes,
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B Hk S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    own_keys_last: bool = False,
    with_lse: bool = False,
    bias: Float[Array, "B Hk S"] | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> Float[Array, "B Hq T D"]:
    """`reference.prefill_attend` without an array of queries by keys.

    Raises `NotImplementedError` on GPUs other than Hopper, for dtypes other than bfloat16 and float16, for D that is no
    multiple of 16 or above 256, and for the log-sum-exp.
    """
    if bias is not None:
        raise NotImplementedError("keys whose logits have a bias need the reference")
    if with_lse:
        raise NotImplementedError("prefill_attend for GPUs gives no log-sum-exp")
    floats = refuse_codes(keys, values)
    batch, heads, length, dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    blocks_of.check(dim, keys.dtype)
    ahead = slots - length if own_keys_last else None
    wide = blocks_of.round_up(dim, 64)
    several = 64 if wide <= 128 else 32  # or the output would not fit in registers
    plan = _Plan(heads // kv_heads, wide, several, -(-slots // KEYS), ahead, scale, window, softcap)
    more = plan.blocks * KEYS - slots
    keys, values = (jnp.pad(x, ((0, 0), (0, 0), (0, -slots % 8), (0, 0))) for x in floats)
    rows = blocks_of.round_up(length, plan.queries)
    operand = blocks_of.operand(blocks_of.tile_width(dim), keys.dtype)
    (output,) = plgpu.kernel(
        functools.partial(_attend_queries, plan),
        out_type=[jax.ShapeDtypeStruct((batch * heads, rows, dim), keys.dtype)],
        scratch_types={
            "q_mem": operand(plan.queries, wide),
            "k_mem": operand(STAGES, KEYS, wide),
            "v_mem": operand(STAGES, KEYS, wide),
            "w_mem": operand(plan.queries, KEYS),
            "now_mem": plgpu.SMEM((plan.queries,), jnp.int32),
            "at_mem": plgpu.SMEM((STAGES, KEYS), jnp.int32),
            "q_here": plgpu.Barrier(num_arrivals=2),
            "k_here": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            "v_here": plgpu.Barrier(num_barriers=STAGES),
        },
        grid=(batch * heads, rows // plan.queries),
        grid_names=("head", "queries"),
        interpret=interpret or None,
        kernel_name="prefill_attend",
    )(
        jnp.pad(queries, ((0, 0), (0, 0), (0, rows - length), (0, 0))).reshape(-1, rows, dim).astype(keys.dtype),
        keys.reshape(batch * kv_heads, -1, dim),
        values.reshape(batch * kv_heads, -1, dim),
        jnp.repeat(jnp.pad(query_positions, ((0, 0), (0, rows - length)), constant_values=-1), heads, axis=0),
        jnp.pad(key_positions, ((0, 0), (0, 0), (0, more)), constant_values=-1).reshape(batch * kv_heads, -1),
    )
    return output[:, :length].reshape(queries.shape).astype(queries.dtype)


def _attend_queries(
    plan: _Plan, queries, keys, values, query_positions, key_positions, output,
    *, q_mem, k_mem, v_mem, w_mem, now_mem, at_mem, q_here, k_here, v_here,
) -> None:  # fmt: skip
    """One program: some queries of one head."""
    head = lax.axis_index("head")
    kv_head = lax.div(head, plan.group)
    mine = pl.ds(lax.axis_index("queries") * plan.queries, plan.queries)
    all_dims = pl.ds(head * 0, plan.dim)  # from a traced 0, so that it may reach past the array, where it reads zeros
    count = jnp.int32(plan.blocks)
    if plan.ahead is not None:  # no query looks beyond its own key
        count = jnp.minimum(
            count, lax.div(plan.ahead + (lax.axis_index("queries") + 1) * plan.queries + KEYS - 1, KEYS)
        )

    def fetch(index):
        stage, some = lax.rem(index, STAGES), pl.ds(index * KEYS, KEYS)
        plgpu.copy_gmem_to_smem(key_positions.at[kv_head, some], at_mem.at[stage], k_here.at[stage])
        plgpu.copy_gmem_to_smem(keys.at[kv_head, some, all_dims], k_mem.at[stage], k_here.at[stage])
        plgpu.copy_gmem_to_smem(values.at[kv_head, some, all_dims], v_mem.at[stage], v_here.at[stage])

    for index in range(STAGES):
        pl.when(index < count)(functools.partial(fetch, jnp.int32(index)))
    plgpu.copy_gmem_to_smem(queries.at[head, mine, all_dims], q_mem, q_here)
    plgpu.copy_gmem_to_smem(query_positions.at[head, mine], now_mem, q_here)
    plgpu.barrier_wait(q_here)
    now = plgpu.layout_cast(now_mem[...], blocks_of.QUERIES)

    def step(index, carry):
        top, total, output = carry
        stage = lax.rem(index, STAGES)
        plgpu.barrier_wait(k_here.at[stage])
        at = plgpu.layout_cast(at_mem[stage], blocks_of.KEYS)
        scores, seen = blocks_of.scores_of(k_mem.at[stage], q_mem, at, now, plan.scale, plan.window, plan.softcap)
        higher = jnp.maximum(top, jnp.max(scores, axis=0))
        weights = jnp.where(seen, jnp.exp(scores - per_query(higher, scores.shape)), 0.0)
        shrink = jnp.exp(top - higher)
        w_mem.transpose((1, 0))[...] = weights.astype(w_mem.dtype)
        plgpu.barrier_wait(v_here.at[stage])
        blocks_of.clear_empty(v_mem.at[stage], at)
        plgpu.commit_smem()  # and everyone has done with the stage of the step before
        coming = index - 1 + STAGES
        pl.when((index > 0) & (coming < count))(functools.partial(fetch, coming))
        added = blocks_of.product(v_mem.at[stage].transpose((1, 0)), w_mem.transpose((1, 0)))
        total = total * shrink + jnp.sum(weights, axis=0)
        return higher, total, output * per_query(shrink, output.shape) + added

    start = (
        plgpu.layout_cast(jnp.full((plan.queries,), MASKED, jnp.float32), blocks_of.QUERIES),
        plgpu.layout_cast(jnp.zeros((plan.queries,), jnp.float32), blocks_of.QUERIES),
        plgpu.layout_cast(jnp.zeros((plan.dim, plan.queries), jnp.float32), blocks_of.SQUARE),
    )
    _, total, result = lax.fori_loop(0, count, step, start)
    result = result / per_query(jnp.where(total > 0, total, 1.0), result.shape)
    q_mem.transpose((1, 0))[...] = result.astype(q_mem.dtype)  # the queries are done with
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_mem, output.at[head, mine, all_dims])
    plgpu.wait_smem_to_gmem(0)
