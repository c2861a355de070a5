"""The TPU kernels over codes through the real TPU compiler: what `test_tpu_compile.py` reads, of coded caches."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from benchmarks import tpu_coded_step
from jaxkv.store.by_channel import IntByChannel
from jaxkv.store.codec import Codec
from jaxkv.store.codecs import Codecs
from jaxkv.store.floats import Fp8
from jaxkv.store.integers import Int
from pallas_kernels.arguments import Held, Judge, Rule, Segments, Token
from pallas_kernels.codes import ByChannel
from pallas_kernels.decode_attend_score.mosaic_tpu import decode_attend_score
from pallas_kernels.prefill_attend.mosaic_tpu import prefill_attend
from pallas_kernels.prefill_attend_mass.mosaic_tpu import prefill_attend_mass
from pallas_kernels.ragged_decode.mosaic_tpu import ragged_decode
from tests.test_tpu_compile import NAMES_ONLY, in_place, made_of, on, pallas_calls

pytestmark = pytest.mark.usefixtures("unchecked")  # codes of shapes
CODECS = {"int8": Int(8), "int4": Int(4), "fp8": Fp8()}
SHAPES = [(8, 8, 4, 4096, 128), (8, 3, 3, 1024, 64), (4, 2, 4, 1000, 128)]  # B, Hk, G, C, D


def coded(codec: Codec, *shape: int):
    """What lies in slots of this shape, and how wide its numbers are."""
    return codec.as_codes(codec.encode(jnp.zeros(shape, jnp.bfloat16)))


def step_arrays(codec: Codec, batch: int, kv_heads: int, group: int, slots: int, dim: int, pooled: bool):
    """The arguments of a decode step over codes, as shapes."""

    def arrays():
        lead = (batch, kv_heads * slots) if pooled else (batch, kv_heads, slots)
        new, row = jnp.zeros((batch, kv_heads, dim), jnp.bfloat16), jnp.zeros(batch, jnp.int32)
        code = coded(codec, batch, kv_heads, dim)
        token = Token(jnp.zeros((batch, kv_heads * group, dim), jnp.bfloat16), new, new, row, code, code)
        keys, positions = coded(codec, *lead, dim), jnp.zeros(lead, jnp.int32)
        offsets = jnp.zeros((batch, kv_heads + 1), jnp.int32)
        held = Segments(keys, keys, positions, offsets) if pooled else Held(keys, keys, positions)
        judge = Judge(row, row, jnp.zeros(lead, jnp.float32), rule=Rule("each"))
        return token, held, jnp.zeros((batch, kv_heads), jnp.int32), judge

    return jax.eval_shape(arrays)


CHIPS = ["v5e", pytest.param("v6e", marks=pytest.mark.slow)]


@pytest.mark.some(1)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pooled", [False, True], ids=["equal", "pool"])
@pytest.mark.parametrize("name", CHIPS)
def test_decode_kernels_read_codes_and_write_in_place(name, pooled, shape, codec):
    """Nothing but the kernel has codes or numbers of all slots, and scales go into it as they lie."""
    arrays = on(name, step_arrays(CODECS[codec], *shape, pooled))
    compiled = in_place(functools.partial(ragged_decode if pooled else decode_attend_score, scale=0.1), *arrays)
    keys = arrays[1].keys
    cache_bytes = 2 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(keys))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < max(cache_bytes // 4, 2**20)  # so no copy of the codes, and no numbers of them
    assert made_of(keys.codes.shape, text) <= NAMES_ONLY and made_of(keys.shape, text) <= NAMES_ONLY
    slots = ",".join(map(str, keys.shape[:-1]))
    copied = re.findall(rf"= \w+\[{slots}(?:,1)?\]\S* (?:convert|bitcast-convert)\(", text)
    assert not copied, copied


FEW = {
    "kivi": Codecs(IntByChannel(2, 32), Int(2, channels=32), residual=32),
    "by runs": Codecs(Int(4, channels=32), Int(4, channels=32)),
}


@pytest.mark.some(2)
@pytest.mark.parametrize(("slots", "dim"), [(64, 128), (96, 128), (120, 128), (160, 128), (64, 256), (256, 192)])
@pytest.mark.parametrize("codecs", FEW)
def test_few_slots_and_wide_heads_compile(codecs, slots, dim):
    """Where one piece of memory is the whole array, and where scales by channel fill several registers in a row."""
    found, _ = tpu_coded_step.compiled(FEW[codecs], (2, 8, 4, slots, dim), "v5e", "mosaic_tpu")
    assert "decode_attend_score" in found.as_text()


@pytest.mark.parametrize("pooled", [False, True], ids=["equal", "pool"])
def test_a_step_over_codes_moves_little_more_than_they_are(pooled):
    """What the kernel says that it moves: codes and scales, positions, weights and mass, and 5 % for all else."""
    for codec, (batch, kv_heads, group, slots, dim) in itertools.product(CODECS.values(), SHAPES[:1]):
        arrays = step_arrays(codec, batch, kv_heads, group, slots, dim, pooled)
        kernel = functools.partial(ragged_decode if pooled else decode_attend_score, scale=0.1)
        flat, form = jax.tree.flatten(arrays)
        (call,) = pallas_calls(lambda *x: jax.tree.leaves(kernel(*jax.tree.unflatten(form, x))), *flat)  # noqa: B023
        held = 2 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays[1].keys))
        each = 4 * batch * kv_heads * slots  # bytes of what is known of every slot in a word
        assert held + 2 * each <= call.params["cost_estimate"].bytes_accessed <= 1.05 * (held + 3 * each)


BY_CHANNEL = {
    "kivi": (IntByChannel(2, 32), Int(2, channels=32)),
    "both in 8": (IntByChannel(8, 32), IntByChannel(8, 32)),
    "keys in 4": (IntByChannel(4, 64), Int(4)),
}
LONG = (8, 8, 4, 20480, 64)  # blocks of slots along the lanes


def by_channel_arrays(codecs: tuple[Codec, Codec], batch: int, kv_heads: int, group: int, slots: int, dim: int):
    """`step_arrays` where keys, or both, have scales by channel of a block of slots."""

    def arrays():
        lead, row = (batch, kv_heads, slots), jnp.zeros(batch, jnp.int32)
        new, positions = jnp.zeros((batch, kv_heads, dim), jnp.bfloat16), jnp.zeros(lead, jnp.int32)
        x = jnp.zeros((*lead, dim), jnp.bfloat16)
        held = Held(*(codec.as_codes(codec.encode_all(x, positions)) for codec in codecs), positions)
        codes = (codec.as_codes(codec.encode(new)) if codec.apart else None for codec in codecs)
        token = Token(jnp.zeros((batch, kv_heads * group, dim), jnp.bfloat16), new, new, row, *codes)
        return token, held, jnp.zeros((batch, kv_heads), jnp.int32), Judge(row, row)

    return jax.eval_shape(arrays)


@pytest.mark.some(1)
@pytest.mark.parametrize("codecs", BY_CHANNEL)
@pytest.mark.parametrize("shape", [*SHAPES, LONG], ids=str)
@pytest.mark.parametrize("name", CHIPS)
def test_scales_by_channel_are_read_where_they_lie(name, shape, codecs):
    """Nothing but the kernel has codes or numbers of all slots, or scales of all blocks."""
    arrays = on(name, by_channel_arrays(BY_CHANNEL[codecs], *shape))
    compiled = in_place(functools.partial(decode_attend_score, scale=0.1), *arrays)
    text, moves = compiled.as_text(), NAMES_ONLY | {"copy-start", "copy-done", "slice-start", "slice-done"}
    for x in (arrays[1].keys, arrays[1].values):
        scales = [x.scale.shape] if isinstance(x, ByChannel) else []  # those of each slot take the token's
        for which in (x.codes.shape, x.shape, *scales):
            assert made_of(which, text) <= moves, which
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arrays[1].keys, arrays[1].values)))
    assert compiled.memory_analysis().temp_size_in_bytes < max(held // 4, 2**21)


@pytest.mark.parametrize("codecs", BY_CHANNEL)
def test_a_step_over_scales_by_channel_moves_little_more_than_they_are(codecs):
    shape = SHAPES[0]
    arrays = by_channel_arrays(BY_CHANNEL[codecs], *shape)
    flat, form = jax.tree.flatten(arrays)
    kernel = functools.partial(decode_attend_score, scale=0.1, with_mass=False)
    calls = pallas_calls(lambda *x: jax.tree.leaves(kernel(*jax.tree.unflatten(form, x))), *flat)
    *few, moved = sorted(call.params["cost_estimate"].bytes_accessed for call in calls)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arrays[1].keys, arrays[1].values)))
    each = 4 * math.prod(shape[:2]) * shape[3]  # bytes of what is known of every slot in a word
    assert held + each <= moved <= 1.05 * (held + each)
    assert sum(few) <= 0.06 * held  # pieces of memory with the token's scales


@pytest.mark.long
@pytest.mark.parametrize("weighed", [False, True], ids=["", "weighed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_under_kivi_lays_nothing_out_anew(shape, weighed):
    """The blocks of a full window and the newest tokens' keys are read and written in pieces of memory, and nothing has
    the codes of all slots, or numbers of them, on the way."""
    program, cache = tpu_coded_step.compiled(jaxkv.policy("kivi").store, shape, "v5e", "mosaic_tpu", weighed)
    text, codes, dim = program.as_text(), cache.entries.keys.slots.shape, shape[-1]
    assert made_of(codes, text) <= NAMES_ONLY
    assert not re.findall(rf"= (?:bf16|f32)\[{','.join(map(str, (*codes[:-1], dim)))}\]", text), "numbers of all slots"


@pytest.mark.some(1)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", CHIPS)
def test_prefill_kernels_read_codes(name, codec):
    """Codes go into the kernels as they lie: nothing makes numbers of them, nor lays them out anew."""
    for batch, kv_heads, group, length, slots, dim in ((1, 8, 4, 512, 3072, 128), (2, 3, 3, 40, 304, 64)):

        def arrays(batch=batch, kv_heads=kv_heads, group=group, length=length, slots=slots, dim=dim):
            query = jnp.zeros((batch, kv_heads * group, length, dim), jnp.bfloat16)
            keys, place = (
                coded(CODECS[codec], batch, kv_heads, slots, dim),
                jnp.zeros((batch, kv_heads, slots), jnp.int32),
            )
            return query, keys, jnp.zeros((batch, length), jnp.int32), place

        query, keys, at, place = on(name, jax.eval_shape(arrays))
        attend = functools.partial(prefill_attend, scale=0.1, with_lse=True)
        mass = functools.partial(prefill_attend_mass, scale=0.1)
        moves = NAMES_ONLY | {"copy-start", "copy-done", "slice-start", "slice-done"}  # onto the chip, as they lie
        for call, operands in ((attend, (query, keys, keys, at, place)), (mass, (query, keys, at, place))):
            text = jax.jit(call).lower(*operands).compile().as_text()
            assert made_of(keys.codes.shape, text) <= moves and made_of(keys.shape, text) <= moves


@pytest.mark.long
def test_newest_tokens_in_full_precision_leave_the_others_in_codes(unchecked):
    """They are a part of their own: nothing has the codes decoded."""
    codecs = Codecs(Int(4, channels=64), Int(4, channels=64), residual=96)
    program, cache = tpu_coded_step.compiled(codecs, SHAPES[0], "v5e", "mosaic_tpu")
    text, codes, dim = program.as_text(), cache.entries.keys.codes.shape, SHAPES[0][-1]
    assert program.memory_analysis().temp_size_in_bytes < cache.entries.keys.codes.size // 4
    for shape in (codes, (*codes[:-1], dim)):
        assert made_of(shape, text) <= NAMES_ONLY, shape
