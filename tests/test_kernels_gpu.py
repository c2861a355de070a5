"""The GPU kernels against the reference: natively on a Hopper GPU, under the interpreter (with its race detection, and
uninitialised memory full of NaN) elsewhere, and lowered for CUDA everywhere."""

import contextlib
import dataclasses
import functools
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from ordered import pooled
from test_coded_kernels import NONSENSE

import jaxkv
from jaxkv import run as programs
from jaxkv.configs import config_files
from jaxkv.models import ModelConfig, abstract_weights
from jaxkv.plan import Plan
from jaxkv.sampling import Sampler
from jaxkv.store import KVCache
from jaxkv.store import empty as empty_store
from jaxkv.store import slots as stores
from jaxkv.store.by_channel import IntByChannel
from jaxkv.store.codec import Plain
from jaxkv.store.floats import Fp8
from jaxkv.store.integers import Int
from pallas_kernels.arguments import Held, Judge, Rule, Segments, Token
from pallas_kernels.codes import Codes, Lying
from pallas_kernels.decode_attend_score import reference
from pallas_kernels.gpu_codes import Side
from pallas_kernels.prefill_attend import reference as attend_reference
from pallas_kernels.prefill_attend_mass import reference as mass_reference
from pallas_kernels.ragged_decode import api as ragged_api
from pallas_kernels.ragged_decode import reference as ragged_reference

gpu = pytest.importorskip(
    "pallas_kernels.decode_attend_score.mosaic_gpu_sm90", reason="this jaxlib carries no Mosaic GPU"
)
attend_gpu = pytest.importorskip("pallas_kernels.prefill_attend.mosaic_gpu_sm90")
ragged_gpu = pytest.importorskip("pallas_kernels.ragged_decode.mosaic_gpu_sm90")
mass_gpu = pytest.importorskip("pallas_kernels.prefill_attend_mass.mosaic_gpu_sm90")
plgpu = gpu.plgpu

NATIVE = jax.default_backend() == "gpu"
EXACTLY = jax.default_matmul_precision("highest")  # a GPU rounds the reference's float32 otherwise
CLOSE = {"output": 8e-3, "lse": 1e-5, "mass": 2e-6}  # the output is rounded to 16 bits, the scores never

RULES = {  # rule, is there a weight, is there a bias, limit as a share of the slots, recents
    "longflow": (Rule("sum"), True, False, 1.0, 0),
    "longflow, each head": (Rule("each", sinks=4), True, False, 1.0, 3),
    "h2o": (Rule("each"), False, True, 1.0, 9),
    "tova, room left": (Rule("mean"), False, False, 2.0, 1),
    "adds": (None, False, False, 1.0, 0),
}


def inputs(batch, kv_heads, group, slots, dim, dtype="bfloat16", rule="longflow", seed=0, counts=False):
    """Random arguments: three in ten slots empty and full of NaN, one row finished, the last one with nothing held: a
    row like any other takes a batch of three. With `counts` entries stand for several tokens."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    held = np.stack([rng.permutation(slots * 2)[:slots] for _ in range(batch * kv_heads)])
    held = held.reshape(batch, kv_heads, slots)
    held = np.where(rng.random(held.shape) < 0.3, -1, held)
    held[-1] = -1
    hollow = jnp.asarray(np.where(held < 0, np.nan, 1.0)[..., None], dtype)
    position = rng.integers(slots, 2 * slots, batch)
    position[0] = -1 if batch > 1 else position[0]
    chosen, *parts, share, recents = RULES[rule]
    parts = [
        jnp.asarray(rng.random(held.shape), jnp.float32) if part else float(i == 0) for i, part in enumerate(parts)
    ]
    news = draw(batch, kv_heads * group, dim), draw(batch, kv_heads, dim), draw(batch, kv_heads, dim)
    slot = jnp.asarray(rng.integers(0, slots, (batch, kv_heads)), jnp.int32)
    cache = draw(batch, kv_heads, slots, dim) * hollow, draw(batch, kv_heads, slots, dim) * hollow
    bundles = (
        Token(*news, jnp.asarray(position, jnp.int32)),
        Held(*cache, jnp.asarray(held, jnp.int32), counted(rng, held, np.asarray(slot)) if counts else None),
        slot,
        Judge(jnp.full(batch, int(slots * share), jnp.int32), jnp.full(batch, recents, jnp.int32), *parts, chosen),
    )
    return bundles, dim**-0.5


def counted(rng, held, slot):
    """log n of entries that stand for n tokens, NaN where nothing is; 0 in the new tokens' slots."""
    bias = np.where(held < 0, np.nan, np.log(rng.integers(1, 9, held.shape))).astype(np.float32)
    np.put_along_axis(bias, slot.reshape(*held.shape[:-1], -1), 0.0, axis=-1)
    return jnp.asarray(bias)


def native_or_not(races=True):
    return {} if NATIVE else {"interpret": plgpu.InterpretGPUParams(detect_races=races)}


def run(implementation, bundles, **options):
    if implementation is gpu:
        # Where heads do not begin at a multiple of 8, what lies beside a head is read and thrown away, written or not.
        races = bundles[1].keys.shape[2] % 8 == 0
        options |= native_or_not(races)
    with EXACTLY:
        return jax.jit(functools.partial(implementation.decode_attend_score, **options))(*bundles)


def check(got, want):
    assert (got.mass is None) == (want.mass is None)
    for name, tolerance in CLOSE.items():
        if getattr(want, name) is None:
            continue
        ours, theirs = (np.asarray(getattr(x, name), np.float32) for x in (got, want))
        np.testing.assert_allclose(ours, theirs, atol=tolerance, rtol=tolerance, err_msg=name)
    for name in ("keys", "values", "positions", "next_slot"):
        np.testing.assert_array_equal(*(np.asarray(getattr(x, name), np.float32) for x in (got, want)), err_msg=name)


CASES = {  # G, C, D, dtype, rule, more
    "one query head": (1, 64, 64, "bfloat16", "longflow, each head", {}),
    "D 80, window": (2, 200, 80, "float16", "h2o", {"window": 150}),
    "D 96, soft cap, odd slots, counts": (
        5, 98, 96, "bfloat16", "tova, room left", {"softcap": 20.0, "group": "mean", "counts": True},
    ),
    "sixteen query heads, odd slots": (16, 134, 128, "bfloat16", "longflow", {"group": "max"}),
    "D 256, counts": (9, 72, 256, "bfloat16", "adds", {"counts": True}),
    "one score for all heads, several times 256 slots": (2, 528, 64, "bfloat16", "longflow", {"window": 700}),
    "no mass": (4, 64, 64, "bfloat16", "adds", {"with_mass": False}),
}  # fmt: skip


@pytest.mark.some(1)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    group, slots, dim, dtype, rule, more = CASES[name]
    counts = more.get("counts", False)
    (*bundles, judge), scale = inputs(4, 2, group, slots, dim, dtype, rule, counts=counts)
    more = {"scale": scale} | {name: x for name, x in more.items() if name != "counts"}
    bundles = *bundles, judge._replace(group=more.pop("group", "sum"))
    check(run(gpu, bundles, **more), run(reference, bundles, **more))


@pytest.mark.long
def test_splits_where_one_sees_nothing():
    """A head's slots on several programs, all the held ones on the first."""
    (token, _, _, judge), scale = inputs(1, 1, 4, 600, 128)
    plan = gpu._plan(1, 600, 128, 4, jnp.bfloat16, 1.0, None, None, True)
    assert plan.splits > 1
    *cache, positions = (x[:1] for x in inputs(2, 1, 4, 600, 128)[0][1] if x is not None)
    hollow = (jnp.arange(600) >= plan.each * plan.block)[None, None]
    held = Held(
        *(jnp.where(hollow[..., None], jnp.bfloat16(jnp.nan), x) for x in cache), jnp.where(hollow, -1, positions)
    )
    token = token._replace(position=jnp.full(1, 1300, jnp.int32))
    bundles = token, held, jnp.zeros((1, 1), jnp.int32), judge
    one = run(gpu, bundles, scale=scale)
    check(one, run(reference, bundles, scale=scale))
    again = run(gpu, bundles, scale=scale)
    for ours, theirs in zip(one, again, strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_ties_go_to_the_older_token():
    """Equal keys get equal mass to the last bit, wherever their slots lie, so the oldest of them goes."""
    (token, held, _, judge), scale = inputs(1, 1, 4, 152, 64)
    full = jnp.full(1, 152, jnp.int32)
    token = token._replace(key=jnp.ones_like(token.key), position=full)
    positions = jnp.asarray(np.random.default_rng(3).permutation(152)[None, None], jnp.int32)
    held = Held(jnp.ones_like(held.keys), jnp.ones_like(held.values), positions)
    judge = judge._replace(limits=full, weight=1.0, bias=0.0)
    got = run(gpu, (token, held, jnp.full((1, 1), 7, jnp.int32), judge), scale=scale)
    assert len(np.unique(np.asarray(got.mass))) == 1
    assert int(got.positions[0, 0, got.next_slot[0, 0]]) == int(np.min(np.asarray(got.positions)))


@pytest.mark.some(1)
@pytest.mark.parametrize("slots", [8, 12])
def test_a_token_whose_slot_is_another_devices(slots):
    """It is neither written nor attended to; the head beside it begins where that slot would be."""
    (token, held, _, judge), scale = inputs(1, 2, 1, slots, 64, rule="adds")
    positions = jnp.arange(2 * slots, dtype=jnp.int32).reshape(1, 2, slots)
    held = Held(*(jnp.nan_to_num(x) for x in held[:2]), positions)
    token = token._replace(position=jnp.full(1, 2 * slots, jnp.int32))
    bundles = token, held, jnp.asarray([[slots, 3]], jnp.int32), judge
    check(*(run(which, bundles, scale=scale, with_mass=False) for which in (gpu, reference)))


@pytest.mark.some(2)
@pytest.mark.parametrize("slots", [997, 1000])
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (80, 1), (96, 7), (128, 12), (128, 16), (256, 16)])
@pytest.mark.parametrize("counts", [False, True])
def test_lowers_for_cuda(dim, group, slots, counts):
    """As far as a machine without a GPU goes: layouts are inferred and the kernels' modules are built and verified.

    There is nothing beside the three kernels, except where slots are no multiple of 8."""
    bundles, scale = inputs(2, 4, group, slots, dim, counts=counts)
    step = functools.partial(gpu.decode_attend_score, scale=scale, window=500, softcap=30.0)
    traced = jax.jit(step, donate_argnums=1).trace(*bundles)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    attends, _, chooses = (line for line in text.splitlines() if "@mosaic_gpu" in line)
    for output, operand in ((3, 4), (4, 5)):  # K and V go in and out as the same buffers
        assert f"output_tuple_indices = [{output}], operand_index = {operand}" in attends
    assert chooses.count("output_tuple_indices") == 1  # and so do the positions
    assert slots % 8 or operations(text) == {"custom_call"} | filled_up(group)


@pytest.mark.parametrize(("batch", "kv_heads", "slots"), [(1, 2, 1536), (1, 8, 2304), (1, 2, 1096)])
def test_lowers_for_cuda_with_any_number_of_parts(batch, kv_heads, slots):
    """Their sums are copied by many, which the copy takes by eights."""
    bundles, scale = inputs(batch, kv_heads, 4, slots, 128)
    traced = jax.jit(functools.partial(gpu.decode_attend_score, scale=scale)).trace(*bundles)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 3


@pytest.mark.some(1)
def test_a_row_whose_keys_all_count_for_nothing():
    """It gives no mass, and no NaN: of equal heads, where each part's logits are weighed by the whole."""
    (token, held, slot, judge), scale = inputs(1, 1, 4, 64, 64, rule="adds")
    held = Held(*(jnp.nan_to_num(x) for x in held[:2]), jnp.arange(64, dtype=jnp.int32)[None, None])
    held = held._replace(bias=jnp.full((1, 1, 64), -jnp.inf))
    token = token._replace(position=jnp.full(1, 64, jnp.int32))
    out = run(gpu, (token, held, slot, judge), scale=scale)
    assert not np.asarray(out.mass).any() and not np.asarray(out.output, np.float32).any()


def filled_up(group: int) -> set[str]:
    """What it takes to bring the query heads of a KV head to 16, and the output back."""
    return {"convert", "pad", "slice"} if 8 < group < 16 else set()


def operations(text: str) -> set[str]:
    """What a lowered program does, but for other names of the same numbers."""
    return set(re.findall(r"= \"?stablehlo\.(\w+)", text)) - {"reshape", "constant"}


@pytest.mark.parametrize("rows", [1, 2, 8, 60, 512, 2048])
@pytest.mark.parametrize("slots", [8, 64, 264, 2048, 32768])
def test_every_block_is_read_once(rows, slots):
    plan = gpu._plan(rows, slots, 128, 4, jnp.bfloat16, 1.0, None, None, True)
    starts = [split * plan.each for split in range(plan.splits)]
    counts = [min(plan.each, plan.blocks - start) for start in starts]
    assert sum(counts) == plan.blocks == -(-slots // plan.block)
    assert min(counts) > 0
    assert rows * plan.splits >= min(2 * gpu.blocks_of.multiprocessors() * 0.85, rows * max(1, plan.blocks // 8))


CODED = {  # keys, values, slots, D, dtype, rule
    "int8": (Int(8), Int(8), 72, 80, "float16", "longflow, each head"),
    "symmetric int8, floats of 8 bits": (Int(8, symmetric=True), Fp8(), 72, 64, "bfloat16", "longflow"),
    "int4": (Int(4), Int(4), 72, 64, "bfloat16", "h2o"),
    "floats of 8 bits without a scale, int4": (Fp8("e5m2", scaled=False), Int(4), 264, 128, "bfloat16", "h2o"),
    "keys as they are": (Plain(), Int(8), 72, 64, "bfloat16", "tova, room left"),
    "values as they are": (Int(4, symmetric=True), Plain(), 72, 128, "float16", "adds"),
    "int2, 4 scales": (Int(2, channels=16), Int(2, channels=32), 72, 64, "bfloat16", "h2o"),
    "int8, 5 scales": (Int(8, channels=16), Int(8, channels=16, symmetric=True), 72, 80, "bfloat16", "longflow"),
    "int2 by channel": (IntByChannel(2, 32), Int(2, channels=32), 136, 128, "bfloat16", "adds"),
    "int4 by channel": (IntByChannel(4, 16), IntByChannel(4, 128), 200, 64, "bfloat16", "h2o"),
    "int8 by channel": (Plain(), IntByChannel(8, 64), 72, 80, "float16", "tova, room left"),
}


def coded(codecs, bundles):
    """The same, with keys and values as codes; scales of empty slots are NaN, and codes of all bits."""
    token, held, slot, judge = bundles
    hollow = (held.positions < 0)[..., None]

    def lies(codec, x):
        return codec.as_codes(codec.encode(jnp.where(jnp.isnan(x), 0, x)))

    def poisoned(x):
        return jnp.where(hollow, NONSENSE.get(str(x.dtype), jnp.nan), x)

    def all_of(codec, x):
        if codec.apart:
            return jax.tree.map(poisoned, lies(codec, x))
        x = codec.as_codes(codec.encode_all(jnp.where(jnp.isnan(x), 0, x), held.positions))
        return dataclasses.replace(x, codes=poisoned(x.codes))

    keys, values = (all_of(codec, x) for codec, x in zip(codecs, held[:2], strict=True))
    news = (lies(codec, x) if codec.apart else None for codec, x in zip(codecs, token[1:3], strict=True))
    codes = (code if isinstance(code, Codes) else None for code in news)
    return Token(*token[:4], *codes), held._replace(keys=keys, values=values), slot, judge


def flat(step, bundles) -> str:
    """A step lowered for CUDA; by its leaves, as a tree that tells shapes would not pass for codes."""
    leaves, tree = jax.tree.flatten(bundles)
    return (
        jax.jit(lambda *leaves: step(*tree.unflatten(leaves)))
        .trace(*leaves)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


def exactly(bundles):
    """The same numbers in float32, so that the reference rounds none of those that are codes."""
    token, held, *others = bundles

    def wide(x):
        if isinstance(x, Codes):
            return dataclasses.replace(x, dtype="float32")
        return None if x is None else x.astype(jnp.float32)

    return (token._replace(**{name: wide(getattr(token, name)) for name in token._fields if name != "position"}),
            held._replace(keys=wide(held.keys), values=wide(held.values)), *others)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CODED)
def test_codes_count_as_what_they_stand_for(name):
    keys, values, slots, dim, dtype, rule = CODED[name]
    bundles, scale = inputs(3, 2, 4, slots, dim, dtype, rule)
    bundles = coded((keys, values), bundles)
    alike(run(gpu, bundles, scale=scale), run(reference, expected(bundles), scale=scale))


def expected(bundles):
    """What the reference is to read: `exactly`, but where the kernel rounds numbers as it does, once."""
    lies = [x for x in bundles[1][:2] if isinstance(x, Lying)]
    return exactly(bundles) if all(isinstance(x, Codes) and x.groups == 1 for x in lies) else bundles


def alike(got, want):
    """What codes give, and what the reference gives without rounding: what lies in the slots to the bit."""
    for name, tolerance in {"output": 8e-3, "lse": 1e-4, "mass": 1e-4}.items():
        ours, theirs = (np.asarray(getattr(x, name), np.float32) for x in (got, want))
        np.testing.assert_allclose(ours, theirs, atol=tolerance, rtol=tolerance, err_msg=name)
    for name in ("positions", "next_slot", "keys", "values"):
        for ours, theirs in zip(*(jax.tree.leaves(getattr(x, name)) for x in (got, want)), strict=True):
            ours, theirs = (np.asarray(x.astype(jnp.float32)) for x in (ours, theirs))
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("group", [1, 16])
def test_codes_lower_for_cuda(name, group):
    """Beside the kernels there is only the order of channels of codes of 4 and 2 bits, and of several scales."""
    keys, values, slots, dim, dtype, rule = CODED[name]
    bundles, scale = inputs(2, 2, group, slots, dim, dtype, rule)
    bundles = coded((keys, values), bundles)
    text = flat(functools.partial(gpu.decode_attend_score, scale=scale), bundles)
    assert len([line for line in text.splitlines() if "@mosaic_gpu" in line]) == 3
    codes = [x for x in bundles[1][:2] if isinstance(x, Lying)]
    moved = any(x.bits < 8 or getattr(x, "groups", 1) > 1 for x in codes)
    assert operations(text) == {"custom_call", *(["transpose"] if moved else [])}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("said", "codec", "slots"),
    [
        ("3 bits", Int(3), 64),
        ("codes of 76 slots", Int(8), 76),
        ("4 bits with head dim 80", Int(4), 64),
        ("by channel of 12 slots", IntByChannel(8, 12), 64),
        ("by channel of 8 slots", IntByChannel(8, 8), 64),
    ],
)
def test_refuses_codes_that_it_does_not_read(said, codec, slots):
    bundles, scale = inputs(2, 2, 2, slots, 80 if "80" in said else 64)
    with pytest.raises(NotImplementedError, match=said):
        run(gpu, coded((codec, codec), bundles), scale=scale)


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("float32", {"dtype": "float32"}),
        ("head dim 100", {"dim": 100}),
        ("1 x 63 slots", {"slots": 63}),
        ("head dim 320", {"dim": 320}),
        ("17 query heads", {"group": 17}),
    ],
)
def test_refuses_what_it_cannot_do(said, change):
    shape = {"batch": 1, "kv_heads": 1, "group": 2, "slots": 64, "dim": 64} | change
    bundles, scale = inputs(**shape)
    with pytest.raises(NotImplementedError, match=said):
        run(gpu, bundles, scale=scale)


def test_refuses_keys_turned_at_read_time():
    bundles, scale = inputs(1, 1, 1, 64, 64)
    with pytest.raises(NotImplementedError, match="rotate"):
        run(gpu, bundles, scale=scale, rotate=lambda q, k, p: (q, k))


RAGGED_RULES = {  # rule, is there a weight, is there a bias, recents
    "longflow": (Rule("each", sinks=4), True, False, 3),
    "h2o": (Rule("each"), False, True, 9),
    "adds": (None, False, False, 0),
}


def pool(sizes, slots, group, dim, dtype="bfloat16", rule="longflow", begin=0, seed=0, counts=False):
    """Random arguments for heads with segments of these sizes [B, Hk], from slot `begin` on.

    Three in ten slots empty and full of NaN; of three rows and more the first has finished; in the second the last head
    holds nothing. What nobody owns looks like an entry.
    """
    rng, sizes = np.random.default_rng(seed), np.array(sizes)
    batch, kv_heads = sizes.shape
    offsets = begin + np.concatenate([np.zeros((batch, 1), int), np.cumsum(sizes, axis=1)], axis=1)
    place = np.arange(slots)
    held = np.stack([rng.permutation(2 * slots)[:slots] for _ in range(batch)])
    mine = (place >= offsets[:, :1]) & (place < offsets[:, -1:])
    held = np.where(mine & (rng.random(held.shape) < 0.3), -1, held)
    if batch > 1:
        held[1, offsets[1, -2] : offsets[1, -1]] = -1
    hollow = np.where(held < 0, np.nan, 1.0)[..., None]
    position = rng.integers(slots, 2 * slots, batch)
    position[0] = -1 if batch > 2 else position[0]
    slot = offsets[:, :-1] + (rng.random(sizes.shape) * sizes).astype(int)
    chosen, *parts, recents = RAGGED_RULES[rule]
    parts = [rng.random(held.shape) if part else float(i == 0) for i, part in enumerate(parts)]

    def draw(*shape):
        return rng.normal(size=shape)

    floats = draw(batch, kv_heads * group, dim), draw(batch, kv_heads, dim), draw(batch, kv_heads, dim)
    cache = draw(batch, slots, dim) * hollow, draw(batch, slots, dim) * hollow
    whole = functools.partial(jnp.asarray, dtype=jnp.int32)
    factors = (x if isinstance(x, float) else jnp.asarray(x, jnp.float32) for x in parts)
    bundles = (
        Token(*(jnp.asarray(x, dtype) for x in floats), whole(position)),
        Segments(
            *(jnp.asarray(x, dtype) for x in cache), whole(held), whole(offsets),
            bias=counted(rng, held, slot) if counts else None,
        ),
        whole(slot),
        Judge(whole(np.full(batch, slots)), whole(np.full(batch, recents)), *factors, chosen),
    )  # fmt: skip
    return bundles, dim**-0.5


def ragged(implementation, bundles, **options):
    if implementation is ragged_gpu:
        options |= native_or_not()
    with EXACTLY:
        return jax.jit(functools.partial(implementation.ragged_decode, **options))(*bundles)


RAGGED = {  # sizes per row, P, G, D, dtype, rule, more
    "even": ([[64] * 4] * 3, 256, 1, 64, "bfloat16", "longflow", {}),
    "one head has nearly all, soft cap": (
        [[597, 1, 1, 1], [1, 1, 590, 8], [1, 1, 1, 597]], 600, 4, 128, "bfloat16", "h2o",
        {"softcap": 20.0, "group": "mean", "counts": True},
    ),
    "several borders in a block, somebody else's around": (
        [[1, 7, 1, 40, 1], [64, 64, 3, 5, 9]], 208, 3, 128, "float16", "longflow",
        {"group": "max", "begin": 11, "counts": True},
    ),
    "borders where runs of 5 blocks meet, D 80": ([[320, 1, 639, 7]], 1040, 8, 80, "bfloat16", "adds", {}),
    "sixteen query heads, D 256": ([[1, 63, 1, 9, 1, 3]], 80, 16, 256, "bfloat16", "longflow", {}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_equals_the_reference(name):
    *shape, more = RAGGED[name]
    more = dict(more)
    (*bundles, judge), scale = pool(*shape, begin=more.pop("begin", 0), counts=more.pop("counts", False))
    more["scale"] = scale
    bundles = *bundles, judge._replace(group=more.pop("group", "sum"))
    check(ragged(ragged_gpu, bundles, **more), ragged(ragged_reference, bundles, **more))


@pytest.mark.long
@pytest.mark.parametrize(
    "codecs", [(Int(8), Int(8)), (Int(4), Fp8()), (Fp8(), Plain()), (Int(2, channels=16),) * 2], ids=str
)
def test_ragged_codes_count_as_what_they_stand_for(codecs):
    """With borders in a block, new tokens of several heads in one, and a row that has finished."""
    bundles, scale = pool([[1, 39, 1, 31], [5, 3, 57, 7], [64, 5, 2, 1]], 80, 3, 64)
    bundles = coded(codecs, bundles)
    got, want = ragged(ragged_gpu, bundles, scale=scale), ragged(ragged_reference, expected(bundles), scale=scale)
    alike(got, want)


@pytest.mark.long
def test_ragged_codes_lower_for_cuda():
    bundles, scale = pool([[250] * 4] * 2, 1000, 4, 128)
    for codecs, beside in (((Int(8), Fp8()), set()), ((Int(2, channels=32), Int(8, channels=64)), {"transpose"})):
        text = flat(functools.partial(ragged_gpu.ragged_decode, scale=scale), coded(codecs, bundles))
        assert operations(text) == {"custom_call", *beside}


@pytest.mark.long
def test_ragged_ties_go_to_the_older_token():
    """Equal keys get equal mass to the last bit in whatever part of a head they lie."""
    (token, held, slot, judge), scale = pool([[9, 520, 71]], 600, 4, 128)
    ones = lambda bundle, *names: {name: jnp.ones_like(getattr(bundle, name)) for name in names}  # noqa: E731
    token = token._replace(**ones(token, "key", "value"), position=jnp.full(1, 600, jnp.int32))
    positions = jnp.asarray(np.random.default_rng(3).permutation(600)[None], jnp.int32)
    held = held._replace(**ones(held, "keys", "values"), positions=positions)
    judge = judge._replace(weight=1.0, bias=0.0, rule=Rule("each"))
    got = ragged(ragged_gpu, (token, held, slot, judge), scale=scale)
    assert ragged_gpu.blocks_of.Decode.of(1, 600, 0, 128, 4, jnp.bfloat16, scale=1.0, softcap=None).splits > 1
    for begin, end, slot in zip((0, 9, 529), (9, 529, 600), got.next_slot[0], strict=True):
        assert len(np.unique(np.asarray(got.mass[0, begin:end]))) == 1
        assert int(got.positions[0, slot]) == int(np.min(np.asarray(got.positions[0, begin:end])))


@pytest.mark.long
@pytest.mark.skipif(NATIVE, reason="copies are counted under the interpreter")
@pytest.mark.parametrize("sizes", [[150, 150, 150], [1, 448, 1], [447, 1, 2], [64, 128, 258], [5, 3, 120]])
def test_ragged_reads_each_block_once(monkeypatch, sizes):
    """Blocks of K and V that somebody owns, whatever the borders; none behind the last one, none of finished rows."""
    bundles, scale = pool([sizes] * 3, 576, 4, 128)
    copy, fetched = plgpu.copy_gmem_to_smem, []

    def counted(source, *more):
        if source.ref.shape == (3, 576, 128):
            row, some, _ = source.transforms[0].indices
            jax.debug.callback(lambda *at: fetched.append(tuple(map(int, at))), row, some.start)
        copy(source, *more)

    monkeypatch.setattr(plgpu, "copy_gmem_to_smem", counted)
    jax.block_until_ready(ragged(ragged_gpu, bundles, scale=scale))
    jax.effects_barrier()
    assert sorted(fetched) == [(row, at) for row in (1, 2) for at in range(0, sum(sizes), 64) for _ in "kv"]


@pytest.mark.some(1)
@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (80, 1), (96, 7), (128, 8), (256, 16), (256, 9)])
@pytest.mark.parametrize("counts", [False, True])
def test_ragged_lowers_for_cuda(dim, group, kv_heads, counts):
    """By the operation's own choice of kernels; K and V go in and out as the same buffers."""
    (token, held, *others), scale = pool([[1000 // kv_heads] * kv_heads] * 2, 1000, group, dim, counts=counts)
    step = functools.partial(ragged_api.ragged_decode, scale=scale, softcap=30.0, implementation="mosaic_gpu_sm90")

    def apart(cache, offsets, token, *others):  # offsets go nowhere, and so are not donated
        return step(token, Segments(*cache, offsets, bias=held.bias), *others)

    traced = jax.jit(apart, donate_argnums=0).trace(held[:3], held.offsets, token, *others)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    attends, *_ = (line for line in text.splitlines() if "@mosaic_gpu" in line)
    for output, operand in ((3, 4), (4, 5), (5, 8)):
        assert f"output_tuple_indices = [{output}], operand_index = {operand}" in attends
    assert operations(text) == {"custom_call"} | filled_up(group)


@pytest.mark.parametrize("batch", [1, 2, 8, 60, 512])
@pytest.mark.parametrize("slots", [8, 1024, 16384, 262144])
def test_ragged_runs_fill_the_chip(batch, slots):
    """Programs depend on P alone, all as long but a row's last, so that no split of the heads leaves one behind."""
    plan = ragged_gpu.blocks_of.Decode.of(batch, slots, 0, 128, 4, jnp.bfloat16, scale=1.0, softcap=None)
    assert plan.each * (plan.splits - 1) < plan.blocks <= plan.each * plan.splits
    chip = 2 * ragged_gpu.blocks_of.multiprocessors()
    assert batch * plan.splits >= min(0.85 * chip, batch * max(1, plan.blocks // 8))


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("float32", {"dtype": "float32"}),
        ("head dim 100", {"dim": 100}),
        ("63 slots", {"slots": 63}),
        ("17 query heads", {"group": 17}),
    ],
)
def test_ragged_refuses_what_it_cannot_do(said, change):
    bundles, scale = pool(**{"sizes": [[20, 40]], "slots": 64, "group": 2, "dim": 64} | change)
    with pytest.raises(NotImplementedError, match=said):
        ragged(ragged_gpu, bundles, scale=scale)


def test_ragged_refuses_a_mass_of_each_query_head():
    (*bundles, judge), scale = pool([[20, 40]], 64, 2, 64)
    with pytest.raises(NotImplementedError, match="group='each', which parts of a pool on a mesh have"):
        ragged(ragged_gpu, (*bundles, judge._replace(rule=None, group="each")), scale=scale)


def prompt(heads, kv_heads, length, past, dim, dtype="bfloat16"):
    """Arguments of prefill: `past` slots in no order, three in ten empty and full of NaN, and the block's own keys.

    The first row's first tokens are padding.
    """
    rng, batch = np.random.default_rng(1), 2
    held = np.stack([rng.permutation(2 * past)[:past] for _ in range(batch * kv_heads)]).reshape(batch, kv_heads, past)
    held = np.where(rng.random(held.shape) < 0.3, -1, held)
    asking = np.broadcast_to(np.arange(length) + 2 * past, (batch, length)).copy()
    asking[0, :5] = -1
    held = np.concatenate([held, np.broadcast_to(asking[:, None], (batch, kv_heads, length))], axis=-1)
    hollow = np.where(held < 0, np.nan, 1.0)[..., None]

    def draw(heads, tokens):
        return rng.normal(size=(batch, heads, tokens, dim))

    queries, *cache = draw(heads, length), *(draw(kv_heads, past + length) * hollow for _ in range(2))
    queries, keys, values = (jnp.asarray(x, dtype) for x in (queries, *cache))
    return queries, keys, values, jnp.asarray(asking, jnp.int32), jnp.asarray(held, jnp.int32)


PROMPTS = {  # Hq, Hk, T, past, D, dtype, options
    "two heads to one, several blocks": (2, 1, 70, 90, 64, "bfloat16", {"own_keys_last": True}),
    "D 80, window, soft cap": (1, 1, 20, 77, 80, "float16", {"window": 40, "softcap": 10.0}),
    "D 256": (1, 1, 64, 0, 256, "bfloat16", {"own_keys_last": True}),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", PROMPTS)
def test_prefill_equals_the_reference(name):
    *shape, options = PROMPTS[name]
    arrays, options = prompt(*shape), options | {"scale": shape[4] ** -0.5}
    got = jax.jit(lambda *args: attend_gpu.prefill_attend(*args, **options, **native_or_not()))(*arrays)
    want = jax.jit(lambda *args: attend_reference.prefill_attend(*args, **options))(*arrays)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=1.6e-2)


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "reduce"), list(zip(PROMPTS, ("sum", "max", "mean"), strict=True)))
def test_mass_equals_the_reference(name, reduce):
    *shape, options = PROMPTS[name]
    queries, keys, _, asking, held = prompt(*shape)
    options = {"scale": shape[4] ** -0.5, "reduce": reduce} | options
    options.pop("own_keys_last", None)
    arrays = queries[:, :, -32:], keys, asking[:, -32:], held
    options["lse"] = jnp.zeros(arrays[0].shape[:3])  # a hint, of which neither makes use
    got = jax.jit(lambda *args: mass_gpu.prefill_attend_mass(*args, **options, **native_or_not()))(*arrays)
    want = jax.jit(lambda *args: mass_reference.prefill_attend_mass(*args, **options))(*arrays)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_mass_of_all_queries_some_of_which_weigh_more():
    queries, keys, _, asking, held = prompt(2, 1, 70, 90, 64)
    weights = jnp.linspace(0.1, 10.0, asking.size).reshape(asking.shape)
    options = {"scale": 0.125, "weights": weights}
    got = mass_gpu.prefill_attend_mass(queries, keys, asking, held, **options, **native_or_not())
    want = mass_reference.prefill_attend_mass(queries, keys, asking, held, **options)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.some(2)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_prefill_lowers_for_cuda(dim):
    queries, keys, values, asking, held = prompt(4, 2, 100, 57, dim)
    more = {"scale": 0.1, "window": 50, "softcap": 30.0}
    for step, arrays in (
        (attend_gpu.prefill_attend, (queries, keys, values, asking, held)),
        (mass_gpu.prefill_attend_mass, (queries, keys, asking, held)),
    ):
        traced = jax.jit(functools.partial(step, **more)).trace(*arrays)
        assert "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str, target: str) -> int:
    """How often a lowered program calls what begins with `target`: layers that are alike share one function."""
    functions = {re.search(r"@([\w.]+)", part)[1]: part for part in text.split("func.func ")[1:]}

    @functools.cache
    def of(name: str) -> int:
        called = re.findall(r"call @([\w.]+)", functions[name])
        return sum(of(inner) if inner in functions else inner.startswith(target) for inner in called)

    return of("main")


def llama() -> ModelConfig:
    """Two layers with the attention of Llama 3 8B, and little else."""
    config = ModelConfig.from_hf(tomllib.loads(config_files("models")["llama-3-8b"].read_text())["config"])
    return dataclasses.replace(
        config, num_layers=2, layer_types=config.layer_types[:2], vocab_size=512, hidden_size=64, intermediate_size=64
    )


def begun(config, policy, batch, size) -> programs.DecodeState:
    """The state of a decode loop over an empty cache, whose heads share pools where the policy's do."""
    rows = jnp.zeros(batch, jnp.int32)

    def layer(heads, dim):
        none = stores.empty(batch, heads, size, dim, jnp.bfloat16, policy.stats).by_head()
        store = empty_store(policy.allocate.store, batch, heads, dim, jnp.bfloat16, policy.stats, policy.store, {})
        return store.rebuilt(none, none.filled, size, rows + heads * size, {})

    layers = tuple(layer(spec.num_kv_heads, spec.head_dim) for spec in config.specs)
    cache = KVCache(layers, rows, jnp.zeros((2, batch), jnp.int32), rows)
    return programs.DecodeState(cache, jnp.zeros(batch, bool), rows, None, jax.vmap(jax.random.key)(rows))


def lowered(program, config, policy, *args, **more) -> str:
    """A program of the model, for CUDA, with the GPU kernels."""
    zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype)  # noqa: E731
    weights = jax.tree.map(zeros, abstract_weights(config, jnp.bfloat16, panels=False))
    static = {"config": config, "policy": policy, "implementation": "mosaic_gpu_sm90"}
    leaves, tree = jax.tree.flatten(args)  # a tree that tells shapes would not pass for a cache
    flat = jax.jit(lambda *leaves: program(weights, *tree.unflatten(leaves), **static, **more))
    return flat.trace(*leaves).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["dapq-longflow", "adakv-h2o", "adakv"])
def test_decode_of_a_model_lowers_for_cuda(name):
    """Three kernels a layer, whether its heads share a pool or not; two where decoding weighs nothing."""
    config, policy = llama(), jaxkv.policy(name, budget=512)
    state = begun(config, policy, 2, 512)
    assert all(pooled(layer) == policy.allocate.pooled for layer in state.cache.layers)
    text = lowered(programs.decode, config, policy, state, jnp.int32(4), room=4, sampler=Sampler(), stop=())
    assert calls(text, "mosaic_gpu") == 2 * (2 if name == "adakv" else 3)


def test_prefill_of_a_model_lowers_for_cuda():
    batch, slots, config, policy = 2, 512, llama(), jaxkv.policy("dapq-longflow", budget=512)

    plan = Plan((slots,) * 2, True)
    layers = programs.empty_layers(config, policy, batch, jnp.bfloat16)
    tokens, rows = jnp.zeros((batch, 256), jnp.int32), jnp.zeros(batch, jnp.int32)
    pseudo, limits = jnp.zeros((batch, policy.extra), jnp.int32), jnp.zeros((2, batch), jnp.int32)
    given = (layers, tokens, tokens, pseudo, rows, rows, limits, jnp.bool_(False))
    text = lowered(programs.first_block, config, policy, *given, plan=plan)
    assert calls(text, "mosaic_gpu") == 2 * 3  # a layer's attention and two passes of mass


@pytest.fixture(params=[(False, 264, 64, 4), (False, 528, 128, 16), (True, 264, 64, 4), (True, 528, 80, 2)])
def traced_step(request):
    """A decode step, of equal heads or of a pool, with so many slots, numbers and query heads."""
    pooled, slots, dim, group = request.param
    if pooled:
        bundles, scale = pool([[slots - 9, 9]] * 2, slots, group, dim)
        return lambda: jax.block_until_ready(ragged(ragged_gpu, bundles, scale=scale))
    bundles, scale = inputs(2, 2, group, slots, dim)
    return lambda: jax.block_until_ready(run(gpu, bundles, scale=scale))


@pytest.mark.long
@pytest.mark.skipif(NATIVE, reason="copies are looked at under the interpreter")
def test_what_is_sent_ends_within_its_line(monkeypatch, traced_step):
    """Neighbouring bytes out of shared memory run on into the next line on a GPU; the interpreter cuts them off."""
    copy, reached = plgpu.copy_smem_to_gmem, []

    def watched(source, target, **more):
        index = target.transforms[0].indices[-1]
        if isinstance(index, pl.Slice) and len(source.shape) == 1:
            width = target.ref.shape[-1]
            jax.debug.callback(lambda start: reached.append(int(start) + index.size <= width), index.start)
        copy(source, target, **more)

    monkeypatch.setattr(plgpu, "copy_smem_to_gmem", watched)
    traced_step()
    jax.effects_barrier()
    assert reached
    assert all(reached)


@pytest.mark.long
@pytest.mark.skipif(NATIVE, reason="copies are looked at under the interpreter")
def test_copies_go_to_whole_lines_of_shared_memory(monkeypatch, traced_step):
    """The copy engine wants every place in shared memory to be a multiple of 128 bytes; the interpreter takes any."""
    copy, looked_at = plgpu.copy_gmem_to_smem, []

    def watched(source, target, barrier, **more):
        if hasattr(target, "ref") and hasattr(target.transforms[0], "indices"):  # operands lie in whole tiles
            shape = target.ref.shape
            strides = np.cumprod((1, *shape[:0:-1]))[::-1] * jnp.dtype(target.ref.dtype).itemsize
            for index, stride in zip(target.transforms[0].indices, strides, strict=True):
                begin = index.start if isinstance(index, pl.Slice) else index
                looked_at.append(((stride if isinstance(begin, jax.Array) else stride * int(begin)) % 128, shape))
        copy(source, target, barrier, **more)

    monkeypatch.setattr(plgpu, "copy_gmem_to_smem", watched)
    traced_step()
    assert looked_at
    assert {shape for rest, shape in looked_at if rest} == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapq-longflow", "adakv-h2o"])
def test_generates_what_the_reference_does(name, monkeypatch):
    """A prompt in two blocks, cut to its budget, and decode steps that evict, with every kernel in its place."""
    params = jaxkv.load(Path(__file__).parent / "goldens" / "tiny" / "llama3", dtype=jnp.bfloat16)
    prompt = np.random.default_rng(0).integers(3, 160, 60)
    if not NATIVE:  # where the interpreter runs it
        monkeypatch.setattr("jaxkv.request.check_platform", lambda implementation: None)
    options = {"policy": jaxkv.policy(name, budget=24, block=32), "max_new_tokens": 4, "stop_tokens": ()}
    want = jaxkv.generate(params, [prompt], **options, implementation="reference")
    with contextlib.nullcontext() if NATIVE else plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jaxkv.generate(params, [prompt], **options, implementation="mosaic_gpu_sm90")
    np.testing.assert_array_equal(got.tokens, want.tokens)
    pairs = [(x.positions, y.positions) for x, y in zip(got.cache.layers, want.cache.layers, strict=True)]
    same = np.mean([np.mean(ours == theirs) for ours, theirs in pairs])
    assert same == 1 or (NATIVE and same > 0.9)  # in bfloat16 the tensor cores decide between entries that lie near


def test_codes_of_heads_that_no_copy_takes():
    """Beyond 128 channels codes come in pieces of 64; up to 128 those of 8 bits come as they are."""
    for dim, refused in ((144, True), (208, True), (192, False), (112, False)):
        codec = Int(8, symmetric=True)
        codes = codec.as_codes(codec.encode(jnp.zeros((1, 1, 64, dim), jnp.bfloat16)))
        if refused:
            with pytest.raises(NotImplementedError, match=f"codes of 8 bits with head dim {dim}: a multiple of 64"):
                Side.of(codes, dim, 64)
        else:
            assert Side.of(codes, dim, 64).bits == 8
