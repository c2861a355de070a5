"""What follows the attention of a decode step on a GPU: join the parts of the softmax, weigh the slots, choose one.

The programs of an attention kernel leave their parts of the output, the maxima and sums of those, and the logits. The
first launch here joins them: one program per head to its output and log-sum-exp, and many more turn runs of logits
into mass, and into the score that all heads of a row go by where they share one. The second has one program per head:
it walks over what its slots are worth, keeps the lowest in registers, lane by lane, and reduces once at the end. Where
nothing is weighed both are one launch.

A line is one row of logits and positions: a KV head of a row of the batch, or a row's pool. Numbers have the
names of `gpu_blocks.Decode`; logits are looked at N slots at a time, what slots are worth M at a time.
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

SLOTS = 256  # N: as many as one copy takes
WORTHS = 1024  # M
PARTS = 64  # whose maxima and sums are looked at together
STAGES = 3  # of each in shared memory
ALIGNED = 128  # bytes: the copy engine takes shared memory that begins at a multiple
OUTPUTS = 32 * 1024  # bytes of parts of the output in shared memory, at most
PROGRAMS = 6  # that weigh, for each multiprocessor; more take several runs of N slots each
LAST = jnp.iinfo(jnp.int32).max
GROUP = {"sum": jnp.sum, "mean": jnp.sum, "max": jnp.max}
LANES = plgpu.Layout.WG_STRIDED((WORTHS,), vec_size=4)  # how what M slots are worth lies in registers


@dataclasses.dataclass(frozen=True)
class Finish:
    """The numbers that the kernels are compiled for."""

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
    each: int  # runs of N slots of a program that weighs

    @property
    def shared(self) -> bool:
        """Whether all heads go by one score."""
        return self.rule is not None and self.rule.heads != "each"

    @property
    def weighs(self) -> bool:
        """Whether something must be known of all slots before any is chosen."""
        return self.massive or self.shared

    @property
    def lines(self) -> int:
        """Heads whose slots are weighed apart."""
        return 1 if self.shared or self.pooled else self.kv_heads

    @property
    def runs(self) -> int:
        """Of N slots, over a line."""
        return pl.cdiv(self.width, SLOTS)

    @property
    def rest(self) -> int:
        """Slots of a line's last run, if they are fewer."""
        return self.width % SLOTS

    @property
    def outputs(self) -> int:
        """Parts of the output in shared memory."""
        return max(2, min(8, OUTPUTS // (4 * self.decode.dim * self.decode.columns)))

    @property
    def factors(self) -> list[str]:
        """Arrays among the judge's factors."""
        names = ("weight", "bias") if self.massive else ("bias",)
        return [name for name in names if self.rule is not None and getattr(self, name) is None]

    @property
    def worths(self) -> list[str]:
        """Arrays that say what a slot is worth."""
        if self.shared or self.rule is None:
            return ["shared"] if self.shared else []
        return [*(["mass"] if self.massive and self.weight != 0 else []), *self.factors]

    def programs(self, what: str) -> int:
        """Of a row of the batch."""
        return pl.cdiv(self.runs, self.each) * self.lines if what == "weigh" else self.kv_heads


def finish(
    plan: blocks_of.Decode,
    parts: Float[Array, "L parts Dw N"],
    sums: Float[Array, "L in_eights 2 N"],
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
    Slots are counted along the line. There is room for the sums of a multiple of 8 parts: they are copied by eights.
    """
    batch, kv_heads = slot.shape
    pooled, width = offsets is not None, positions.shape[1]
    weight, bias = (x if isinstance(x, float) else None for x in (judge.weight, judge.bias))
    how = Finish(
        plan, heads, kv_heads, dim, parts.shape[1], width, window, judge.rule, judge.group, weight, bias,
        logits is not None, pooled, 1,
    )  # fmt: skip
    busy = PROGRAMS * blocks_of.multiprocessors()
    how = dataclasses.replace(how, each=max(1, batch * how.programs("weigh") // busy))
    total = batch * kv_heads
    joined = {
        "output": jax.ShapeDtypeStruct((total, blocks_of.columns_of(heads), dim), dtype),
        "lse": jax.ShapeDtypeStruct((total * heads,), jnp.float32),
    }
    if how.massive:
        joined["mass"] = jax.ShapeDtypeStruct((positions.shape[0], width), jnp.float32)
    if how.shared:
        joined["shared"] = jax.ShapeDtypeStruct((batch, how.runs * SLOTS), jnp.float32)
    chosen = {"chosen": jax.ShapeDtypeStruct((total,), jnp.int32)}
    token: dict[str, Any] = {"position": position, "slot": slot.reshape(total)}
    token |= {} if offsets is None else {"offsets": offsets}
    inputs = token | {"parts": parts, "sums": sums} | ({} if logits is None else {"logits": logits})
    arrays = {name: getattr(judge, name) for name in how.factors}
    placed: Any = positions if pooled else jax.new_ref(positions)
    choice = token | {"limits": judge.limits, "recents": judge.recents}
    launch = functools.partial(_launch, how, batch, dtype, interpret)
    if how.weighs:
        more = arrays if how.shared else {}
        found = launch("decode_weigh", ["join", "weigh"], inputs | more | {"positions": positions}, joined)
        worths = {name: (arrays | found)[name] for name in how.worths}
        found |= launch("decode_choose", ["choose"], choice | worths | {"positions": placed}, chosen)
    else:
        found = launch(
            "decode_finish", ["join", "choose"], inputs | choice | arrays | {"positions": placed}, joined | chosen
        )
    return (
        found["output"][:, :heads].reshape(batch, kv_heads * heads, dim),
        found["lse"].reshape(batch, kv_heads * heads),
        found.get("mass"),
        placed if pooled else jax.freeze(placed),
        found["chosen"].reshape(slot.shape),
    )


def _launch(
    how: Finish, batch: int, dtype: Any, interpret: Any, name: str, does: list[str], inputs: dict, outputs: dict
) -> dict[str, jax.Array]:
    """One kernel, whose programs do these things, by their numbers."""
    names = (*inputs, *outputs)

    def body(*refs: Any, **memory: Any) -> None:
        ref = dict(zip(names, refs, strict=True))
        row, program = lax.axis_index("row"), lax.axis_index("program")
        begin = 0
        for what in does:
            count = how.programs(what)
            does_it = functools.partial(DOES[what], how, ref, memory, row, program - begin)
            pl.when((program >= begin) & (program < begin + count))(does_it)
            begin += count

    results = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types={name: x for what in does for name, x in _scratch(how, dtype, what).items()},
        grid=(batch, sum(how.programs(what) for what in does)),
        grid_names=("row", "program"),
        interpret=interpret or None,
        kernel_name=name,
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def _scratch(how: Finish, dtype: Any, what: str) -> dict[str, Any]:
    """Shared memory and barriers of programs that do this."""
    columns = how.decode.columns
    if what == "choose":
        memory: dict[str, Any] = {f"{name}_worth": plgpu.SMEM((STAGES, WORTHS), jnp.float32) for name in how.worths}
        arrivals = (1 + len(how.worths)) * (WORTHS // SLOTS)
        memory["places"] = plgpu.SMEM((STAGES, WORTHS), jnp.int32)
        return memory | {"worth_here": plgpu.Barrier(num_arrivals=arrivals, num_barriers=STAGES)}
    sums = {
        "top_mem": plgpu.SMEM((STAGES, PARTS, columns), jnp.float32),
        "total_mem": plgpu.SMEM((STAGES, PARTS, columns), jnp.float32),
        "lse_mem": plgpu.SMEM((how.kv_heads, columns), jnp.float32),
        "sums_here": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    }
    if what == "join":
        stages = how.outputs
        tile = blocks_of.tile_width(how.dim) * 2 // jnp.dtype(dtype).itemsize
        return sums | {
            "part_mem": plgpu.SMEM((stages, how.decode.dim, columns), jnp.float32),
            "part_top": plgpu.SMEM((stages, 1, ALIGNED // 4), jnp.float32),
            "out_mem": blocks_of.operand(tile, dtype)(columns, how.decode.dim),
            "part_here": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        }
    line = functools.partial(plgpu.SMEM, (STAGES, SLOTS))
    memory = {"p_mem": line(jnp.int32), "mass_mem": plgpu.SMEM((SLOTS,), jnp.float32)}
    if how.massive:
        memory["l_mem"] = plgpu.SMEM((STAGES, SLOTS, columns), jnp.float32)
    arrivals = 1 + how.massive
    if how.shared:
        memory |= {f"{name}_mem": line(jnp.float32) for name in how.factors}
        memory["shared_mem"] = plgpu.SMEM((SLOTS,), jnp.float32)
        arrivals += len(how.factors)
    return sums | memory | {"here": plgpu.Barrier(num_arrivals=arrivals, num_barriers=STAGES)}


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


def _walk(count, fetch: Callable, step: Callable, carry: Any, here, stages: int = STAGES) -> Any:
    """The carry after `step(index, stage, carry)` for each index, with what `fetch(index, stage)` copied."""

    def ahead(index):
        pl.when(index < count)(lambda: fetch(index, lax.rem(index, stages)))

    def body(index, carry):
        stage = lax.rem(index, stages)
        plgpu.barrier_wait(here.at[stage])
        carry = step(index, stage, carry)
        plgpu.commit_smem()  # everyone has done with the stage
        ahead(index + stages)
        return carry

    for index in range(stages):
        ahead(jnp.int32(index))
    return lax.fori_loop(0, count, body, carry)


def _totals(how: Finish, ref, mem, row, head, heads: int = 1) -> None:
    """The log-sum-exp [N] of some KV heads over their parts, to `lse_mem`: -inf where nothing is seen, and inf for a
    column that is no query, which so weighs nothing."""
    first, count = _met(how, ref, row, head)
    windows = pl.cdiv(count, PARTS)
    zero = row * 0
    query = plgpu.layout_cast(lax.iota(jnp.int32, how.decode.columns), QUERIES)
    part = plgpu.layout_cast(lax.iota(jnp.int32, PARTS), KEYS)
    nothing = jnp.full((how.decode.columns,), MASKED, jnp.float32), jnp.zeros((how.decode.columns,), jnp.float32)
    nothing = tuple(plgpu.layout_cast(x, QUERIES) for x in nothing)

    def keep(other, lse):
        mem["lse_mem"].at[other][...] = jnp.where(query < how.heads, lse, jnp.inf)
        plgpu.commit_smem()

    if how.pooled:  # a row that has finished has no parts
        keep(head, jnp.where(nothing[1] > 0, 0.0, -jnp.inf))

    def fetch(index, stage):
        line, some = _line(how, row, head + lax.div(index, windows)), first + lax.rem(index, windows) * PARTS
        for which, name in enumerate(("top_mem", "total_mem")):
            there = ref["sums"].at[line, pl.ds(some, PARTS), which, pl.ds(zero, how.decode.columns)]
            plgpu.copy_gmem_to_smem(there, mem[name].at[stage], mem["sums_here"].at[stage])

    def step(index, stage, carry):
        window = lax.rem(index, windows)
        top, total = (
            jnp.where(jnp.full(start.shape, window) == 0, start, so_far)
            for start, so_far in zip(nothing, carry, strict=True)
        )
        new, more = (plgpu.layout_cast(mem[name][stage], SQUARE) for name in ("top_mem", "total_mem"))
        there = per_key(part + window * PARTS < count, new.shape)
        new, more = jnp.where(there, new, MASKED), jnp.where(there, more, 0.0)
        higher = jnp.maximum(top, jnp.max(new, axis=0))
        total = total * jnp.exp(top - higher) + jnp.sum(more * jnp.exp(new - per_query(higher, new.shape)), axis=0)

        @pl.when(window == windows - 1)
        def _last():
            lse = higher + jnp.log(jnp.where(total > 0, total, 1.0))
            keep(head + lax.div(index, windows), jnp.where(total > 0, lse, -jnp.inf))

        return higher, total

    _walk(windows * heads, fetch, step, nothing, mem["sums_here"])


def _join(how: Finish, ref, mem, row, head) -> None:
    """The output and the lse of a head."""
    line, index = _line(how, row, head), row * how.kv_heads + head
    zero = row * 0
    all_dims, all_heads = pl.ds(zero, how.decode.dim), pl.ds(zero, how.decode.columns)
    _totals(how, ref, mem, row, head)
    lse = plgpu.layout_cast(mem["lse_mem"][head], QUERIES)
    lse = jnp.where(lse > -jnp.inf, lse, jnp.inf)  # where nothing is seen parts are nothing
    first, count = _met(how, ref, row, head)
    some = pl.ds(0, how.decode.columns)

    def fetch(part, stage):
        here = mem["part_here"].at[stage]
        plgpu.copy_gmem_to_smem(ref["parts"].at[line, first + part], mem["part_mem"].at[stage], here)
        plgpu.copy_gmem_to_smem(ref["sums"].at[line, first + part, 0], mem["part_top"].at[stage, 0, some], here)

    def step(part, stage, output):
        share = jnp.exp(plgpu.layout_cast(mem["part_top"][stage, 0, some], QUERIES) - lse)
        new = plgpu.layout_cast(mem["part_mem"][stage], SQUARE)
        return output + new * per_query(share, new.shape)

    start = plgpu.layout_cast(jnp.zeros((how.decode.dim, how.decode.columns), jnp.float32), SQUARE)
    output = _walk(count, fetch, step, start, mem["part_here"], how.outputs)
    mem["out_mem"].transpose((1, 0))[...] = output.astype(mem["out_mem"].dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mem["out_mem"], ref["output"].at[index, all_heads, all_dims])
    for query in range(how.heads):
        ref["lse"][index * how.heads + query] = mem["lse_mem"][head, query]
    plgpu.wait_smem_to_gmem(0)


def _slots(how: Finish, ref, row, head, held, start) -> tuple:
    """Of slots from `start` on, held as memory has it: their places, positions (-1 if empty), and whether they are the
    head's."""
    low, high = _segment(how, ref, row, head)
    now, target = ref["position"][row], ref["slot"][row * how.kv_heads + head]
    layout = KEYS if held.shape == (SLOTS,) else LANES
    place = plgpu.layout_cast(lax.iota(jnp.int32, held.shape[0]), layout) + start
    own = (place >= low) & (place < high)
    held = jnp.where(own & (place == target) & (now >= 0), now, plgpu.layout_cast(held, layout))
    return place, jnp.where(own, held, -1), own


def _mass(how: Finish, mem, head, stage, held, now):
    """The mass of N slots of a head, 0 where they are not seen."""
    seen = (held >= 0) & (held <= now)
    if how.window is not None:
        seen = seen & (now - held < how.window)
    logits = plgpu.layout_cast(mem["l_mem"][stage], SQUARE)
    lse = plgpu.layout_cast(mem["lse_mem"][head], QUERIES)
    lse = jnp.where(lse > -jnp.inf, lse, jnp.inf)  # of a row whose keys all count for nothing
    given = jnp.exp(logits - per_query(lse, logits.shape))
    given = jnp.where(per_key(seen, logits.shape), given, 0.0)
    mass = GROUP[how.group](given, axis=1)
    return mass / how.heads if how.group == "mean" else mass


def _fetch(how: Finish, ref, mem, line, start, stage, names) -> None:
    """Copy N slots of what lies along a line."""
    some, here = pl.ds(start, SLOTS), mem["here"].at[stage]
    for name, memory in names.items():
        if name == "logits":
            there = ref[name].at[line, some, pl.ds(line * 0, how.decode.columns)]
        else:
            there = ref[name].at[line, some]
        plgpu.copy_gmem_to_smem(there, mem[memory].at[stage], here)


def _keep(mem, name, x) -> None:
    """Lay N numbers out to be sent, when those before are gone."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    mem[name][...] = x
    plgpu.commit_smem()


def _send_mass(how: Finish, ref, mem, line, start) -> None:
    """Copy the mass of N slots to its line, and no more than the line has: what goes out is bytes, which would run on
    into the next line."""
    whole = start + SLOTS <= how.width

    @pl.when(whole)
    def _all():
        plgpu.copy_smem_to_gmem(mem["mass_mem"], ref["mass"].at[line, pl.ds(start, SLOTS)])

    if how.rest:
        some = pl.ds(0, how.rest)

        @pl.when(jnp.logical_not(whole))
        def _some():
            plgpu.copy_smem_to_gmem(mem["mass_mem"].at[some], ref["mass"].at[line, pl.ds(start, how.rest)])


def _weigh(how: Finish, ref, mem, row, program) -> None:
    """Write the mass of some runs of N slots, of one head; or of all of a row, and the score that they go by."""
    heads = how.kv_heads if how.shared else 1
    pieces = pl.cdiv(how.runs, how.each)
    head, first = lax.div(program, pieces), lax.rem(program, pieces) * how.each
    count = jnp.minimum(how.each, how.runs - first)
    names = {"positions": "p_mem"} | ({"logits": "l_mem"} if how.massive else {})
    names |= {name: f"{name}_mem" for name in how.factors} if how.shared else {}
    now = ref["position"][row]
    if how.massive:
        _totals(how, ref, mem, row, head, heads)

    def split(index):
        return head + lax.rem(index, heads), (first + lax.div(index, heads)) * SLOTS

    def fetch(index, stage):
        other, start = split(index)
        _fetch(how, ref, mem, _line(how, row, other), start, stage, names)

    def step(index, stage, so_far):
        other, start = split(index)
        _, held, _ = _slots(how, ref, row, other, mem["p_mem"][stage], start)
        mass = None
        if how.massive:
            mass = _mass(how, mem, other, stage, held, now)
            _keep(mem, "mass_mem", mass)
            _send_mass(how, ref, mem, _line(how, row, other), start)
        if not how.shared:
            return so_far
        factors = {name: plgpu.layout_cast(mem[f"{name}_mem"][stage], KEYS) for name in how.factors}
        before = jnp.where(jnp.full((SLOTS,), other) == 0, 0.0, so_far)
        total = before + _score(how, mass, factors, nothing)

        @pl.when(other == heads - 1)
        def _whole():
            mean = how.rule is not None and how.rule.heads == "mean"
            _keep(mem, "shared_mem", total / heads if mean else total)
            plgpu.copy_smem_to_gmem(mem["shared_mem"], ref["shared"].at[row, pl.ds(start, SLOTS)])

        return total

    nothing = plgpu.layout_cast(jnp.zeros((SLOTS,), jnp.float32), KEYS)
    _walk(count * heads, fetch, step, nothing, mem["here"])
    plgpu.wait_smem_to_gmem(0)


def _weigh_pool(how: Finish, ref, mem, row, program) -> None:
    """Write the mass of some runs of N slots of a pool, under all heads that have some of them."""
    first = program * how.each
    count = jnp.minimum(how.each, how.runs - first)
    begin, end = first * SLOTS, (first + count) * SLOTS
    now = ref["position"][row]

    def meets(head, begin, end):
        low, high = _segment(how, ref, row, head)
        return (low < end) & (high > begin)

    def ready(head, _):
        pl.when(meets(head, begin, end))(lambda: _totals(how, ref, mem, row, head))

    lax.fori_loop(0, how.kv_heads, ready, None)

    def fetch(index, stage):
        _fetch(how, ref, mem, row, (first + index) * SLOTS, stage, {"positions": "p_mem", "logits": "l_mem"})

    def step(index, stage, _):
        start = (first + index) * SLOTS

        def add(head, total):
            def own(total):
                _, held, _ = _slots(how, ref, row, head, mem["p_mem"][stage], start)
                return total + _mass(how, mem, head, stage, held, now)

            return lax.cond(meets(head, start, start + SLOTS), own, lambda total: total, total)

        nothing = plgpu.layout_cast(jnp.zeros((SLOTS,), jnp.float32), KEYS)
        _keep(mem, "mass_mem", lax.fori_loop(0, how.kv_heads, add, nothing))
        _send_mass(how, ref, mem, row, start)

    _walk(count, fetch, step, None, mem["here"])
    plgpu.wait_smem_to_gmem(0)


def _score(how: Finish, mass, factors: dict[str, Any], nothing):
    """weight * mass + bias of some slots; `nothing` is 0 for each."""
    weight, bias = (factors.get(name, getattr(how, name)) for name in ("weight", "bias"))
    return (nothing if mass is None or how.weight == 0 else mass * weight) + bias


def _lowest() -> tuple:
    """Nothing found, lane by lane: lowest score, position and place of an entry; those of an empty slot; entries."""
    worst = jnp.full((WORTHS,), jnp.inf, jnp.float32)
    last = jnp.full((WORTHS,), LAST, jnp.int32)
    start = worst, last, last, last, last, jnp.zeros((WORTHS,), jnp.int32)
    return tuple(plgpu.layout_cast(x, LANES) for x in start)


def _lower(how: Finish, ref, row, best, place, held, own, score) -> tuple:
    """The lowest so far and of M slots more: entries that the next query sees by score and age, others by age."""
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
        low, high = _segment(how, ref, row, head)  # a slot beyond it is nobody's, or another device's

        @pl.when((now >= 0) & (target >= low) & (target < high))
        def _place():
            ref["positions"][_line(how, row, head), target] = now


def _choose(how: Finish, ref, mem, row, head) -> None:
    """Find a head's next slot."""
    low, high = _segment(how, ref, row, head)
    begin = lax.div(low, 8) * 8 if how.pooled else jnp.int32(0)
    names = {"positions": "places"} | {name: f"{name}_worth" for name in how.worths}

    def fetch(index, stage):
        here = mem["worth_here"].at[stage]
        for name, memory in names.items():
            line = row if name == "shared" else _line(how, row, head)
            for some in range(0, WORTHS, SLOTS):
                start = begin + index * WORTHS + some
                there = mem[memory].at[stage, pl.ds(some, SLOTS)]
                plgpu.copy_gmem_to_smem(ref[name].at[line, pl.ds(start, SLOTS)], there, here)

    def step(index, stage, best):
        place, held, own = _slots(how, ref, row, head, mem["places"][stage], begin + index * WORTHS)
        worths = {name: plgpu.layout_cast(mem[f"{name}_worth"][stage], LANES) for name in how.worths}
        score = nothing
        if how.rule is not None:
            score = worths["shared"] if how.shared else _score(how, worths.pop("mass", None), worths, nothing)
        return _lower(how, ref, row, best, place, held, own, score)

    nothing = plgpu.layout_cast(jnp.zeros((WORTHS,), jnp.float32), LANES)
    count = pl.cdiv(high - begin, WORTHS) if how.pooled else pl.cdiv(how.width, WORTHS)
    _aim(how, ref, row, head, _walk(count, fetch, step, _lowest(), mem["worth_here"]))


DOES = {
    "join": _join,
    "weigh": lambda how, *more: (_weigh_pool if how.pooled else _weigh)(how, *more),
    "choose": _choose,
}
