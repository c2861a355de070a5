"""What ends a decode step on a GPU, as one launch: join the parts of the softmax, weigh the slots, choose the next one.

The programs of an attention kernel leave their parts of the output, the maxima and sums of those, and the logits. Here
one program per head joins them to the output and its log-sum-exp; another walks over the head's logits, turns them into
mass and score, and keeps the lowest in registers, lane by lane, so that there is one reduction at the end. Where all
heads of a row go by one score, one program per row does that for all of them, and reads the sum of scores a second time
for each head. In a pool, where slots of two heads meet anywhere, the mass is written by programs that have a run of
slots each, and the positions are there already.

A line is one row of logits and positions: a KV head of a row of the batch, or a row's pool. Numbers have the
names of `gpu_blocks.Decode`; N slots are looked at at a time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import gpu_blocks as blocks_of
from pallas_kernels.arguments import Judge, Rule
from pallas_kernels.gpu_blocks import KEYS, QUERIES, SQUARE, per_key, per_query
from pallas_kernels.masking import MASKED

SLOTS = 256  # N
STAGES = 3  # of those in shared memory
PARTS = 128  # whose sums are copied at once
LAST = jnp.iinfo(jnp.int32).max
GROUP = {"sum": jnp.sum, "mean": jnp.sum, "max": jnp.max}


@dataclasses.dataclass(frozen=True)
class Finish:
    """The numbers that the kernel is compiled for."""

    decode: blocks_of.Decode
    heads: int  # G
    kv_heads: int
    dim: int  # D
    parts: int  # a line's
    width: int  # slots of a line, as the arrays have them
    window: int | None
    rule: Rule | None  # the judge's, and its group and factors: None for an array
    group: str
    weight: float | None
    bias: float | None
    massive: bool  # whether logits are there, and mass is asked for
    pooled: bool  # whether the heads of a row share a line

    @property
    def shared(self) -> bool:
        """Whether all heads go by one score."""
        return self.rule is not None and self.rule.heads != "each"

    @property
    def chunks(self) -> int:
        """Of N slots, over a line."""
        return pl.cdiv(self.width, SLOTS)

    @property
    def programs(self) -> tuple[int, int, int]:
        """That join, that choose, and that write the mass of a pool, for each row of the batch."""
        return self.kv_heads, 1 if self.shared else self.kv_heads, self.chunks if self.pooled and self.massive else 0

    @property
    def factors(self) -> list[str]:
        """Arrays among the judge's factors."""
        names = ("weight", "bias") if self.massive else ("bias",)
        return [name for name in names if self.rule is not None and getattr(self, name) is None]


def finish(
    plan: blocks_of.Decode,
    parts: Float[Array, "L parts Dw N"],
    sums: Float[Array, "L parts 2 N"],
    logits: Float[Array, "L blocks Gs"] | None,
    positions: Int[Array, "L W"],
    position: Int[Array, "B"],
    slot: Int[Array, "B Hk"],
    judge: Judge,
    offsets: Int[Array, "B Hk_1"] | None = None,
    *,
    heads: int,
    dim: int,
    dtype: Any,
    window: int | None = None,
    interpret: Any = False,
) -> tuple:
    """Output `[B, Hk G, D]`, lse, mass `[L, W]` (None without logits), positions with the tokens', and the next slots.

    The judge's arrays are lines like the positions. With `offsets` lines are pools, and hold the new tokens' positions.
    Slots are counted along the line.
    """
    batch, kv_heads = slot.shape
    pooled, width = offsets is not None, positions.shape[1]
    weight, bias = (x if isinstance(x, float) else None for x in (judge.weight, judge.bias))
    how = Finish(
        plan, heads, kv_heads, dim, parts.shape[1], width, window, judge.rule, judge.group, weight, bias,
        logits is not None, pooled,
    )  # fmt: skip
    total = batch * kv_heads
    outputs = {
        "output": jax.ShapeDtypeStruct((total, heads, dim), dtype),
        "lse": jax.ShapeDtypeStruct((total * heads,), jnp.float32),
        "chosen": jax.ShapeDtypeStruct((total,), jnp.int32),
    }
    if how.massive:
        outputs["mass"] = jax.ShapeDtypeStruct((positions.shape[0], width), jnp.float32)
    if how.shared:
        outputs["shared"] = jax.ShapeDtypeStruct((batch, how.chunks * SLOTS), jnp.float32)
    inputs: dict[str, Any] = {"parts": parts, "sums": sums, "position": position, "slot": slot.reshape(total)}
    inputs |= {"limits": judge.limits, "recents": judge.recents}
    inputs |= {name: x for name, x in (("logits", logits), ("offsets", offsets)) if x is not None}
    inputs |= {name: getattr(judge, name) for name in how.factors}
    placed: Any = positions if pooled else jax.new_ref(positions)
    inputs["positions"] = placed
    columns = plan.columns
    line = functools.partial(plgpu.SMEM, (STAGES, SLOTS))
    tile = blocks_of.tile_width(dim) * 2 // jnp.dtype(dtype).itemsize
    scratch = {
        "sum_mem": plgpu.SMEM((how.parts, 2, columns), jnp.float32),
        "lse_mem": plgpu.SMEM((kv_heads, columns), jnp.float32),
        "part_mem": plgpu.SMEM((STAGES, plan.dim, columns), jnp.float32),
        "out_mem": blocks_of.operand(tile, dtype)(columns, plan.dim),
        "p_mem": line(jnp.int32),
        "l_mem": plgpu.SMEM((STAGES, SLOTS, columns), jnp.float32),
        "mass_mem": plgpu.SMEM((SLOTS,), jnp.float32),
        "shared_mem": plgpu.SMEM((SLOTS,), jnp.float32),
        "weight_mem": line(jnp.float32),
        "bias_mem": line(jnp.float32),
        "once": plgpu.Barrier(),
        "here": plgpu.Barrier(num_arrivals=1 + how.massive + len(how.factors), num_barriers=STAGES),
        "again": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "part_here": plgpu.Barrier(num_barriers=STAGES),
    }
    names = (*inputs, *outputs)

    def body(*refs: Any, **memory: Any) -> None:
        _finish(how, dict(zip(names, refs, strict=True)), memory)

    results = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch,
        grid=(batch, sum(how.programs)),
        grid_names=("row", "program"),
        interpret=interpret or None,
        kernel_name="decode_finish",
    )(*inputs.values())
    given = dict(zip(outputs, results, strict=True))
    return (
        given["output"].reshape(batch, kv_heads * heads, dim),
        given["lse"].reshape(batch, kv_heads * heads),
        given.get("mass"),
        placed if pooled else jax.freeze(placed),
        given["chosen"].reshape(slot.shape),
    )


def _finish(how: Finish, ref: dict[str, Any], mem: dict[str, Any]) -> None:
    """One program: joins, chooses or weighs, by its number."""
    row, program = lax.axis_index("row"), lax.axis_index("program")
    joins, chooses, weighs = how.programs
    pl.when(program < joins)(lambda: _join(how, ref, mem, row, program))
    pl.when((program >= joins) & (program < joins + chooses))(lambda: _choose(how, ref, mem, row, program - joins))
    if weighs:
        pl.when(program >= joins + chooses)(lambda: _weigh(how, ref, mem, row, program - joins - chooses))


def _met(how: Finish, ref, row, head) -> tuple:
    """The first part of a head, and how many there are."""
    if not how.pooled:
        return jnp.int32(0), jnp.int32(how.parts)
    run = how.decode.each * how.decode.block
    low, high = _segment(how, ref, row, head)
    # Of empty blocks behind the last border there is no part; a row that has finished has none at all.
    first = lax.div(low, run)
    return first + head, jnp.where(ref["position"][row] < 0, 0, pl.cdiv(high, run) - first)


def _segment(how: Finish, ref, row, head) -> tuple:
    """The slots of a head, along its line."""
    if how.pooled:
        return ref["offsets"][row, head], ref["offsets"][row, head + 1]
    shift = lax.rem((row * how.kv_heads + head) * how.decode.slots, 8) if how.decode.slots % 8 else jnp.int32(0)
    return shift, shift + how.decode.slots


def _line(how: Finish, row, head):
    return row if how.pooled else row * how.kv_heads + head


def _sums(how: Finish, ref, mem, row, head) -> None:
    """Bring the maxima and sums of a head's line to `sum_mem`."""
    line = _line(how, row, head)
    for begin in range(0, how.parts, PARTS):
        some = pl.ds(begin, min(PARTS, how.parts - begin))
        plgpu.copy_gmem_to_smem(ref["sums"].at[line, some], mem["sum_mem"].at[some], mem["once"])
        plgpu.barrier_wait(mem["once"])


def _total(how: Finish, ref, mem, row, head) -> tuple:
    """A head's maximum and sum [N] over its parts; its lse is in `lse_mem` then."""
    first, count = _met(how, ref, row, head)

    def add(part, carry):
        top, total = carry
        new, more = (plgpu.layout_cast(mem["sum_mem"][part, which], QUERIES) for which in (0, 1))
        higher = jnp.maximum(top, new)
        return higher, total * jnp.exp(top - higher) + more * jnp.exp(new - higher)

    start = jnp.full((how.decode.columns,), MASKED, jnp.float32), jnp.zeros((how.decode.columns,), jnp.float32)
    start = tuple(plgpu.layout_cast(x, QUERIES) for x in start)
    top, total = lax.fori_loop(first, first + count, add, start)
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)
    # A column that is no query weighs nothing.
    query = plgpu.layout_cast(lax.iota(jnp.int32, how.decode.columns), QUERIES)
    mem["lse_mem"].at[head][...] = jnp.where(query < how.heads, lse, jnp.inf)
    plgpu.commit_smem()
    return top, safe


def _walk(count, fetch: Callable, step: Callable, carry: Any, here) -> Any:
    """The carry after `step(index, stage, carry)` for each index, with what `fetch(index, stage)` copied."""

    def ahead(index):
        pl.when(index < count)(lambda: fetch(index, lax.rem(index, STAGES)))

    def body(index, carry):
        stage = lax.rem(index, STAGES)
        plgpu.barrier_wait(here.at[stage])
        carry = step(index, stage, carry)
        plgpu.commit_smem()  # everyone has done with the stage
        ahead(index + STAGES)
        return carry

    for index in range(STAGES):
        ahead(jnp.int32(index))
    return lax.fori_loop(0, count, body, carry)


def _join(how: Finish, ref, mem, row, head) -> None:
    """The output and the lse of a head."""
    line, index = _line(how, row, head), row * how.kv_heads + head
    zero = row * 0
    all_dims, all_heads = pl.ds(zero, how.decode.dim), pl.ds(zero, how.decode.columns)
    _sums(how, ref, mem, row, head)
    top, total = _total(how, ref, mem, row, head)
    first, count = _met(how, ref, row, head)

    def fetch(part, stage):
        here = mem["part_here"].at[stage]
        plgpu.copy_gmem_to_smem(ref["parts"].at[line, first + part], mem["part_mem"].at[stage], here)

    def step(part, stage, output):
        share = jnp.exp(plgpu.layout_cast(mem["sum_mem"][first + part, 0], QUERIES) - top) / total
        new = plgpu.layout_cast(mem["part_mem"][stage], SQUARE)
        return output + new * per_query(share, new.shape)

    start = plgpu.layout_cast(jnp.zeros((how.decode.dim, how.decode.columns), jnp.float32), SQUARE)
    output = _walk(count, fetch, step, start, mem["part_here"])
    mem["out_mem"].transpose((1, 0))[...] = output.astype(mem["out_mem"].dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mem["out_mem"], ref["output"].at[index, all_heads, all_dims])
    for query in range(how.heads):
        ref["lse"][index * how.heads + query] = mem["lse_mem"][head, query]
    plgpu.wait_smem_to_gmem(0)


def _slots(how: Finish, ref, mem, row, head, start, stage) -> tuple:
    """Of N slots from `start` on: their places, positions (-1 if empty), and whether they are the head's."""
    low, high = _segment(how, ref, row, head)
    now, target = ref["position"][row], ref["slot"][row * how.kv_heads + head]
    place = plgpu.layout_cast(lax.iota(jnp.int32, SLOTS), KEYS) + start
    own = (place >= low) & (place < high)
    held = plgpu.layout_cast(mem["p_mem"][stage], KEYS)
    held = jnp.where(own & (place == target) & (now >= 0), now, held)
    return place, jnp.where(own, held, -1), own


def _mass(how: Finish, mem, head, stage, held, now):
    """The mass of N slots of a head, 0 where they are not seen."""
    seen = (held >= 0) & (held <= now)
    if how.window is not None:
        seen = seen & (now - held < how.window)
    logits = plgpu.layout_cast(mem["l_mem"][stage], SQUARE)
    lse = plgpu.layout_cast(mem["lse_mem"][head], QUERIES)
    given = jnp.exp(logits - per_query(lse, logits.shape))
    given = jnp.where(per_key(seen, logits.shape), given, 0.0)
    mass = GROUP[how.group](given, axis=1)
    return mass / how.heads if how.group == "mean" else mass


def _fetch(how: Finish, ref, mem, line, start, stage, barrier, names) -> None:
    """Copy N slots of what lies along a line."""
    some = pl.ds(start, SLOTS)
    for name, memory in names.items():
        there = mem[memory].at[stage]
        if name == "logits":
            zero = line * 0
            plgpu.copy_gmem_to_smem(ref[name].at[line, some, pl.ds(zero, how.decode.columns)], there, barrier.at[stage])
        else:
            plgpu.copy_gmem_to_smem(ref[name].at[line, some], there, barrier.at[stage])


def _lowest(how: Finish) -> tuple:
    """Nothing found, lane by lane: lowest score, position and place of an entry; those of an empty slot; entries."""
    worst = jnp.full((SLOTS,), jnp.inf, jnp.float32)
    last = jnp.full((SLOTS,), LAST, jnp.int32)
    start = worst, last, last, last, last, jnp.zeros((SLOTS,), jnp.int32)
    return tuple(plgpu.layout_cast(x, KEYS) for x in start)


def _lower(how: Finish, ref, row, best, place, held, own, score) -> tuple:
    """The lowest so far and of N slots more: entries that the next query sees by score and age, others by age."""
    low, old, at, dead_old, dead_at, count = best
    now, rule = ref["position"][row] + 1, how.rule
    fresh = 0 if how.window is None else jnp.maximum(now - how.window + 1, 0)  # the first position that it sees
    live, dead = own & (held >= fresh), own & (held < fresh)
    age = held
    if rule is None:
        age = held * 0
    else:
        safe = (held < rule.sinks) | (held >= now - ref["recents"][row])
        score = jnp.where(safe, jnp.inf, score)
    better = live & ((score < low) | ((score == low) & (age < old)))
    older = dead & (age < dead_old)
    return (
        jnp.where(better, score, low), jnp.where(better, age, old), jnp.where(better, place, at),
        jnp.where(older, age, dead_old), jnp.where(older, place, dead_at), count + live.astype(jnp.int32),
    )  # fmt: skip


def _aim(how: Finish, ref, row, head, best) -> None:
    """Write the next slot of a head, and the position of its new token."""
    low, old, at, dead_old, dead_at, count = best

    def least(*keys):
        """The least of the first key, of the second among those that have it, and so on."""
        found, among = [], None
        for key in keys:
            key = key if among is None else jnp.where(among, key, LAST)
            found.append(jnp.min(key))
            among = (key == found[-1]) if among is None else among & (key == found[-1])
        return found

    low, old, at = least(low, old, at)
    dead_old, dead_at = least(dead_old, dead_at)
    first = dead_at < LAST
    if how.rule is not None:
        room = True if how.pooled else jnp.sum(count) < ref["limits"][row]
        worth = jnp.where(room, -jnp.inf, jnp.inf)
        older = (dead_old < old) | ((dead_old == old) & (dead_at < at))
        first = first & ((worth < low) | ((worth == low) & older))
    index, now = row * how.kv_heads + head, ref["position"][row]
    target = ref["slot"][index]
    ref["chosen"][index] = jnp.where(now < 0, target, jnp.where(first, dead_at, at))

    if not how.pooled:

        @pl.when(now >= 0)
        def _place():
            ref["positions"][_line(how, row, head), target] = now


def _score(how: Finish, mem, stage, mass):
    """weight * mass + bias of N slots."""
    weight, bias = (
        plgpu.layout_cast(mem[f"{name}_mem"][stage], KEYS) if name in how.factors else getattr(how, name)
        for name in ("weight", "bias")
    )
    nothing = plgpu.layout_cast(jnp.zeros((SLOTS,), jnp.float32), KEYS)
    if how.rule is None:
        return nothing
    return (nothing if mass is None or how.weight == 0 else mass * weight) + bias


def _choose(how: Finish, ref, mem, row, head) -> None:
    """Weigh and choose: of one head, or of all of a row by one score."""
    heads = how.kv_heads if how.shared else 1
    names = {"positions": "p_mem"} | ({"logits": "l_mem"} if how.massive else {})
    names |= {name: f"{name}_mem" for name in how.factors}
    now = ref["position"][row]
    if how.massive:
        for other in range(heads):
            _sums(how, ref, mem, row, head + other)
            _total(how, ref, mem, row, head + other)
    low, high = _segment(how, ref, row, head)
    begin = lax.div(low, 8) * 8 if how.pooled else jnp.int32(0)
    chunks = pl.cdiv(high - begin, SLOTS) if how.pooled else how.chunks

    def split(index):
        return head + lax.rem(index, heads), begin + lax.div(index, heads) * SLOTS

    def fetch(index, stage):
        other, start = split(index)
        _fetch(how, ref, mem, _line(how, row, other), start, stage, mem["here"], names)

    def send(memory, x, there):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        mem[memory][...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mem[memory], there)

    def step(index, stage, carry):
        other, start = split(index)
        place, held, own = _slots(how, ref, mem, row, other, start, stage)
        mass = None
        if how.massive:
            mass = _mass(how, mem, other, stage, held, now)
            if not how.pooled:
                send("mass_mem", mass, ref["mass"].at[_line(how, row, other), pl.ds(start, SLOTS)])
        score = _score(how, mem, stage, mass)
        if not how.shared:
            return _lower(how, ref, row, carry, place, held, own, score)
        total = jnp.where(jnp.full((SLOTS,), other) == 0, 0.0, carry) + score

        @pl.when(other == heads - 1)
        def _whole():
            mean = how.rule is not None and how.rule.heads == "mean"
            send("shared_mem", total / heads if mean else total, ref["shared"].at[row, pl.ds(start, SLOTS)])

        return total

    if not how.shared:
        best = _walk(chunks, fetch, step, _lowest(how), mem["here"])
        _aim(how, ref, row, head, best)
        plgpu.wait_smem_to_gmem(0)
        return
    nothing = plgpu.layout_cast(jnp.zeros((SLOTS,), jnp.float32), KEYS)
    _walk(chunks * heads, fetch, step, nothing, mem["here"])
    plgpu.wait_smem_to_gmem(0)  # in memory before it is read

    def refetch(index, stage):
        other, start = lax.div(index, chunks), lax.rem(index, chunks) * SLOTS
        there = {"positions": "p_mem"}
        _fetch(how, ref, mem, _line(how, row, other), start, stage, mem["again"], there)
        _fetch(how, ref, mem, row, start, stage, mem["again"], {"shared": "bias_mem"})

    def review(index, stage, best):
        other, start = lax.div(index, chunks), lax.rem(index, chunks) * SLOTS
        fresh = jnp.full((SLOTS,), start) == 0
        best = tuple(jnp.where(fresh, new, old) for new, old in zip(_lowest(how), best, strict=True))
        place, held, own = _slots(how, ref, mem, row, other, start, stage)
        score = plgpu.layout_cast(mem["bias_mem"][stage], KEYS)
        best = _lower(how, ref, row, best, place, held, own, score)
        pl.when(lax.rem(index, chunks) == chunks - 1)(lambda: _aim(how, ref, row, other, best))
        return best

    _walk(chunks * heads, refetch, review, _lowest(how), mem["again"])


def _weigh(how: Finish, ref, mem, row, chunk) -> None:
    """Write the mass of N slots of a pool, under all heads that have some of them."""
    start, now = chunk * SLOTS, ref["position"][row]
    plgpu.copy_gmem_to_smem(ref["positions"].at[row, pl.ds(start, SLOTS)], mem["p_mem"].at[0], mem["once"])
    plgpu.barrier_wait(mem["once"])
    there = ref["logits"].at[row, pl.ds(start, SLOTS), pl.ds(row * 0, how.decode.columns)]
    plgpu.copy_gmem_to_smem(there, mem["l_mem"].at[0], mem["once"])
    plgpu.barrier_wait(mem["once"])
    _sums(how, ref, mem, row, 0)

    def add(head, total):
        low, high = _segment(how, ref, row, head)

        def own(total):
            _total(how, ref, mem, row, head)
            _, held, _ = _slots(how, ref, mem, row, head, start, 0)
            return total + _mass(how, mem, head, 0, held, now)

        return lax.cond((low < start + SLOTS) & (high > start), own, lambda total: total, total)

    nothing = plgpu.layout_cast(jnp.zeros((SLOTS,), jnp.float32), KEYS)
    mem["mass_mem"][...] = lax.fori_loop(0, how.kv_heads, add, nothing)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mem["mass_mem"], ref["mass"].at[row, pl.ds(start, SLOTS)])
    plgpu.wait_smem_to_gmem(0)
