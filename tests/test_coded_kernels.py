"""Attention over codes: every implementation against the reference, and the reference against decoded entries in NumPy.

Empty slots are poisoned: codes of all bits (NaN of a float), scales and lows that are NaN.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.sharding import Layout
from jaxkv.store import beside, few, pool, reading, slots, window
from jaxkv.store.balanced import IntBalanced
from jaxkv.store.by_channel import IntByChannel
from jaxkv.store.channels import Channels
from jaxkv.store.codec import Plain
from jaxkv.store.codecs import Codecs
from jaxkv.store.entries import Entries
from jaxkv.store.floats import Fp8
from jaxkv.store.integers import Int
from jaxkv.store.low_rank import LowRank
from pallas_kernels import tpu_blocks, tpu_channels, tpu_decode
from pallas_kernels.arguments import Held, Judge, Rule, Segments, Token
from pallas_kernels.choices import choices
from pallas_kernels.codes import ByChannel, Codes, bits_of
from pallas_kernels.decode_attend_score import api as decode_api
from pallas_kernels.prefill_attend import api as attend_api
from pallas_kernels.prefill_attend_mass import api as mass_api
from pallas_kernels.ragged_decode import api as ragged_api
from pallas_kernels.tpu_codes import Form, by_digits
from tests.test_kernels import HOW, softmax_weights

CODECS = {
    "int8": Int(8),
    "int8 symmetric": Int(8, symmetric=True),
    "int4": Int(4),
    "int4 groups": Int(4, channels=32),
    "int2 groups": Int(2, channels=16),
    "e4m3": Fp8(),
    "e5m2 unscaled": Fp8("e5m2", scaled=False),
    "plain": Plain(),
}
PAIRS = [(name, name) for name in CODECS if name != "plain"] + [("int8", "int4"), ("plain", "int4"), ("e4m3", "plain")]
CODECS["int2"] = Int(2)
NONSENSE = {"uint8": jnp.uint8(255), "int16": bits_of(jnp.float16(np.nan))}  # of codes, and of scales' bits
LIMIT = {"float32": 3e-5, "bfloat16": 5e-2}


def poisoned(x, positions):
    """Codes, or floats, with nonsense in empty slots."""
    empty = (positions < 0)[..., None]

    @jax.jit
    def put(x):
        return jax.tree.map(lambda part: jnp.where(empty, NONSENSE.get(str(part.dtype), np.nan), part), x)

    return put(x)


def entries(rng, codec, shape, dtype):
    """Numbers, and what lies of them."""
    x = jnp.asarray(rng.normal(size=shape) * (1 + np.arange(shape[-1]) % 5), dtype)
    return x, jax.jit(lambda x: codec.as_codes(codec.encode(x)))(x)


def as_floats(x):
    return np.asarray(x.numbers if isinstance(x, Codes) else x, np.float64)


def case(rng, names, dtype, dim, slots, batch=3, kv_heads=2, group=3, pooled=False):
    """A step's arguments: the second row has finished, the last is empty; and as it lies, the token's key and value."""
    of = [CODECS[name] for name in names]
    shape = (batch, kv_heads * slots) if pooled else (batch, kv_heads, slots)
    positions = np.stack([rng.permutation(shape[-1] * 2)[: shape[-1]] for _ in range(int(np.prod(shape[:-1])))])
    positions = positions.reshape(shape)
    positions = np.where(rng.random(shape) < 0.3, -1, positions)
    positions[-1] = -1
    positions[0, ..., -slots // 2 :] = -1  # blocks that nobody is in
    lies = [poisoned(entries(rng, codec, (*shape, dim), dtype)[1], jnp.asarray(positions)) for codec in of]
    news = [entries(rng, codec, (batch, kv_heads, dim), dtype) for codec in of]
    query = jnp.asarray(rng.normal(size=(batch, kv_heads * group, dim)), dtype)
    at = jnp.asarray([shape[-1] * 2, -1, 5], jnp.int32)[:batch]
    codes = (code if isinstance(code, Codes) else None for _, code in news)
    token = Token(query, news[0][0], news[1][0], at, *codes)
    return token, lies, jnp.asarray(positions, jnp.int32)


def same(got, expected, tolerance):
    """Whether two results agree: what lies in the slots to the bit, the rest within rounding."""
    for name in ("keys", "values", "positions"):
        for a, b in zip(*(jax.tree.leaves(getattr(x, name)) for x in (got, expected)), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b), equal_nan=str(a.dtype) not in NONSENSE), name
    for name, limit in (("output", tolerance), ("lse", max(tolerance, 1e-4)), ("mass", max(tolerance, 1e-4))):
        a, b = (np.asarray(getattr(x, name), np.float64) for x in (got, expected))
        np.testing.assert_allclose(a, b, atol=limit, rtol=limit, err_msg=name)


def decoded(got_token, lies, positions, slot, scale, bias=None):
    """Output, log-sum-exp and mass of slots [B, Hk, C] in NumPy, the token exact in its own."""
    query, key, value, at = (np.asarray(x, np.float64) for x in got_token[:4])
    batch, kv_heads, _ = positions.shape
    output, mass = np.zeros(query.shape), np.zeros(positions.shape)
    for b, h in np.ndindex(batch, kv_heads):
        if at[b] < 0:
            continue
        k, v, p = (as_floats(lies[0])[b, h].copy(), as_floats(lies[1])[b, h].copy(), np.array(positions[b, h]))
        k[slot[b, h]], v[slot[b, h]], p[slot[b, h]] = key[b, h], value[b, h], at[b]
        group = query.shape[1] // kv_heads
        mine = slice(h * group, (h + 1) * group)
        weights, _ = softmax_weights(query[b, mine], k, np.full(group, at[b]), p, scale, None, None)
        output[b, mine] = weights @ np.where(p[:, None] >= 0, v, 0.0)
        mass[b, h] = weights.sum(axis=0)
    return output, mass


@pytest.mark.some(1)
@pytest.mark.parametrize("names", PAIRS, ids=lambda names: "-".join(names))
def test_the_reference_reads_codes_as_what_they_stand_for(names):
    rng = np.random.default_rng(len(names[0]))
    token, lies, positions = case(rng, names, "float32", 64, 40)
    slot = jnp.asarray(rng.integers(0, 40, (3, 2)), jnp.int32)
    got = decode_api.decode_attend_score(
        token, Held(*lies, positions), slot, Judge(*jnp.full((2, 3), 40, jnp.int32)), scale=0.1,
        implementation="reference",
    )  # fmt: skip
    output, mass = decoded(token, lies, np.asarray(positions), np.asarray(slot), 0.1)
    np.testing.assert_allclose(np.asarray(got.output), output, atol=2e-5)
    np.testing.assert_allclose(np.asarray(got.mass), mass, atol=1e-5)
    for after, before, new in zip((got.keys, got.values), lies, token.entry, strict=True):
        for a, b, one in zip(*map(jax.tree.leaves, (after, before, new)), strict=True):
            a, b, one = map(np.array, (a, b, one))
            for row, head in ((0, 0), (0, 1), (2, 0), (2, 1)):
                b[row, head, slot[row, head]] = one[row, head]
            assert np.array_equal(a, b, equal_nan=str(a.dtype) not in NONSENSE)


def equal_heads(how, names, dtype, dim, slots, cap=None, window=None, counts=False, **more):
    rng = np.random.default_rng(dim + slots)
    token, lies, positions = case(rng, names, dtype, dim, slots, **more)
    batch, kv_heads, _ = positions.shape
    slot = jnp.asarray(rng.integers(0, slots, (batch, kv_heads)), jnp.int32)
    bias = jnp.asarray(np.log(rng.integers(1, 9, positions.shape)), jnp.float32) if counts else None
    judge = Judge(*jnp.full((2, batch), slots, jnp.int32), rule=Rule("sum"))
    arguments = token, Held(*lies, positions, bias), slot, judge
    options = dict(scale=dim**-0.5, softcap=cap, window=window)
    got, expected = (
        jax.jit(lambda *x, how=how: decode_api.decode_attend_score(*x, **options, **how))(*arguments)
        for how in (how, {"implementation": "reference"})
    )
    same(got, expected, LIMIT[dtype])
    running = np.asarray(token.position) >= 0
    assert np.array_equal(np.asarray(got.next_slot)[~running], np.asarray(slot)[~running])
    if dtype == "float32":
        assert np.array_equal(np.asarray(got.next_slot), np.asarray(expected.next_slot))


KERNEL = HOW["mosaic_tpu"] | {"implementation": "mosaic_tpu"}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "names, dtype, dim, slots",
    [(pair, dtype, dim, slots) for pair, (dtype, dim, slots) in zip(
        PAIRS, itertools.cycle([("bfloat16", 128, 144), ("float32", 64, 40), ("bfloat16", 64, 264)]), strict=False
    )],
    ids=str,
)  # fmt: skip
def test_equal_heads_on_tpu(names, dtype, dim, slots):
    more = {"cap": 20.0, "group": 4} if dim == 128 else {"group": 1} if slots == 264 else {"counts": True}
    equal_heads(KERNEL, names, dtype, dim, slots, **more)


def test_rows_in_digits_of_any_size():
    """Each row to within half of its last digit for each number; rows of next to nothing, and of nothing, are 0."""
    rng = np.random.default_rng(0)
    sizes = np.array([0, 1e-45, 1e-38, 3e-37, 1e-31, 1e-20, 1.0, 1e30])
    x = (rng.normal(size=(1, len(sizes), 64)) * sizes[:, None]).astype(np.float32)
    numbers = rng.integers(-128, 128, (1, 64, 24)).astype(np.int8)
    found, total = by_digits(jnp.asarray(x), jnp.asarray(numbers), 1)
    last = np.abs(x).max(axis=2, keepdims=True).astype(np.float64) / 127 / 128
    exact = x.astype(np.float64) @ numbers.astype(np.float64)
    assert np.isfinite(found).all() and np.isfinite(total()).all()
    assert (np.abs(found - exact) <= 0.51 * 128 * 64 * last + 1e-26).all()
    assert (np.abs(total() - x.sum(axis=2, keepdims=True, dtype=np.float64)) <= 0.51 * 64 * last + 1e-26).all()


@pytest.mark.long
@pytest.mark.parametrize(
    "names", [("int8", "int4"), ("int4 groups", "int8 symmetric")], ids=lambda names: "-".join(names)
)
@pytest.mark.parametrize("group", [3, 2])
def test_codes_are_multiplied_as_bytes_and_by_their_bits(names, group, monkeypatch):
    """Digits of queries and weights come as near as numbers of 16 bits: masses differ by less than a hundredth."""
    rng = np.random.default_rng(group)
    token, lies, positions = case(rng, names, "bfloat16", 128, 70, group=group)
    slot = jnp.asarray(rng.integers(0, 70, (3, 2)), jnp.int32)
    judge, got = Judge(*jnp.full((2, 3), 70, jnp.int32), rule=Rule("sum")), []
    for as_bytes in (True, False):
        monkeypatch.setattr(tpu_blocks, "multiplies_bytes", lambda as_bytes=as_bytes: as_bytes)
        form = Form.of(lies[0], True, "bfloat16", tpu_blocks.multiplies_bytes())
        assert (form.as_bytes, form.by_bits) == (as_bytes, not as_bytes)
        arguments = token, Held(*lies, positions), slot, judge
        got.append(jax.jit(lambda *x: decode_api.decode_attend_score(*x, scale=0.1, **KERNEL))(*arguments))
    same(*got, 1e-2)


BY_NUMBA = {"implementation": "numba_cpu"}
UNREAD_BY_NUMBA = {
    "e4m3": "codes of float8", "e5m2 unscaled": "codes of float8",
    "int2 groups": "a scale for 16 channels in 2 bits: for bytes by 8",
}  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("names", [*PAIRS, ("int2", "int2")], ids=lambda names: "-".join(names))
def test_equal_heads_on_cpu(names):
    refused = [why for name, why in UNREAD_BY_NUMBA.items() if name in names]
    if refused:
        with pytest.raises(NotImplementedError, match=refused[0]):
            equal_heads(BY_NUMBA, names, "float32", 64, 40)
        return
    equal_heads(BY_NUMBA, names, "float32", 64, 40, counts=True, cap=20.0)
    equal_heads(BY_NUMBA, names, "float32", 128, 7, window=9)
    equal_heads(BY_NUMBA, names, "float32", 96, 264, group=1)
    equal_heads(BY_NUMBA, names, "float32", 64, 1)


def by_channel(rng, codec, positions, dim, dtype):
    """Entries around 2 as they lie in blocks of slots; nonsense in empty slots, and in blocks of them."""
    x = jnp.asarray(rng.normal(size=(*positions.shape, dim)) * (1 + np.arange(dim) % 5) + 2, dtype)
    lies = jax.jit(lambda x: codec.as_codes(codec.encode_all(x, positions)))(x)
    block, blocks = np.arange(positions.shape[2]) // codec.tokens, np.arange(lies.scale.shape[2])
    used = jnp.any((block[:, None] == blocks) & (positions >= 0)[..., None], axis=2)[..., None]
    return dataclasses.replace(
        lies,
        codes=jnp.where((positions < 0)[..., None], jnp.uint8(255), lies.codes),
        scale=jnp.where(used, lies.scale, bits_of(jnp.float16(np.nan))),
        low=jnp.where(used, lies.low, bits_of(jnp.float16(np.nan))),
    )


def in_turn(rng, batch, heads, slots, least=0):
    """Positions in time order from some slot on, and empty ones behind them; the last row has none."""
    held = rng.integers(least, slots, (batch, heads, 1))
    positions = np.where(np.arange(slots) < held, np.arange(slots) + 3, -1)
    positions = np.stack([np.roll(row, by, axis=-1) for row, by in zip(positions, (0, 5, 2), strict=True)])
    positions[-1] = -1
    return jnp.asarray(positions, jnp.int32)


def shared_scales(how, keys, values, dim, slots, group=3, dtype="float32", **softmax):
    """A step on keys and values of these codecs against the reference; the second row has finished."""
    rng = np.random.default_rng(dim + slots)
    positions = in_turn(rng, 3, 2, slots)
    new = [jnp.asarray(rng.normal(size=(3, 2, dim)), dtype) for _ in range(2)]
    lies, codes = [], []
    for codec, one in zip((keys, values), new, strict=True):
        if codec.apart:
            lies.append(poisoned(entries(rng, codec, (3, 2, slots, dim), dtype)[1], positions))
            codes.append(None if codec.plain else codec.as_codes(codec.encode(one)))
        else:
            lies.append(by_channel(rng, codec, positions, dim, dtype))
            codes.append(None)
    query = jnp.asarray(rng.normal(size=(3, 2 * group, dim)), dtype)
    token = Token(query, *new, jnp.asarray([slots + 3, -1, slots + 3], jnp.int32), *codes)
    slot = jnp.asarray(rng.integers(0, slots, (3, 2)), jnp.int32)
    judge = Judge(*jnp.full((2, 3), slots, jnp.int32), rule=Rule("sum"))
    arguments, options = (token, Held(*lies, positions), slot, judge), dict(scale=dim**-0.5, **softmax)
    got, expected = (
        jax.jit(lambda *x, how=how: decode_api.decode_attend_score(*x, **options, **how))(*arguments)
        for how in (how, {"implementation": "reference"})
    )
    same(got, expected, LIMIT[dtype])
    for after, before in zip((got.keys, got.values), lies, strict=True):
        if isinstance(before, ByChannel):
            assert np.array_equal(after.codes, before.codes)


SHARED = {
    "keys 2, values 2": (IntByChannel(2, 32), Int(2, channels=32)),
    "keys 4": (IntByChannel(4, 8), Plain()),
    "both 8": (IntByChannel(8, 4), IntByChannel(8, 16)),
    "values 4": (Int(8), IntByChannel(4, 8)),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("codecs", SHARED.values(), ids=SHARED)
def test_scales_by_channel_on_cpu(codecs):
    shared_scales(BY_NUMBA, *codecs, 64, 70)
    shared_scales(BY_NUMBA, *codecs, 128, 33, softcap=20.0, window=20)
    shared_scales(BY_NUMBA, *codecs, 96, 264, group=1)


@pytest.mark.long
def test_scales_by_channel_of_more_query_heads_than_channels_on_cpu():
    shared_scales(BY_NUMBA, *SHARED["both 8"], 8, 33, group=24)


def test_scales_by_channel_mean_what_their_blocks_stand_for():
    """The reference on codes against itself on what the codec gives back."""
    rng, codec = np.random.default_rng(3), IntByChannel(4, 8)
    positions = in_turn(rng, 3, 2, 37, least=9)
    x = jnp.asarray(rng.normal(size=(3, 2, 37, 64)) + 2, jnp.float32)
    code = codec.encode_all(x, positions)
    lies, back = codec.as_codes(code), codec.decode(code)
    filled = np.asarray(positions >= 0)
    assert np.array_equal(np.asarray(lies.numbers)[filled], np.asarray(back)[filled])
    at = jnp.asarray(rng.integers(0, 37, (3, 2, 5)), jnp.int32)
    few = np.take_along_axis(np.asarray(back), np.asarray(at)[..., None], axis=2)
    assert np.array_equal(np.asarray(lies.at(at)), few)


TPU_CASES = [  # head dim, slots, query heads to a KV head, dtype and softmax
    (64, 70, 3, "float32", {}),
    (128, 33, 4, "bfloat16", {"softcap": 20.0, "window": 20}),
    (128, 600, 1, "bfloat16", {}),
    (64, 264, 9, "bfloat16", {}),
]


@pytest.mark.some(1)
@pytest.mark.long
@pytest.mark.parametrize("case", TPU_CASES, ids=str)
@pytest.mark.parametrize("codecs", SHARED.values(), ids=SHARED)
def test_scales_by_channel_on_tpu(codecs, case):
    *shape, dtype, softmax = case
    shared_scales(KERNEL, *codecs, *shape, dtype=dtype, **softmax)


@pytest.mark.some(1)
@pytest.mark.long
@pytest.mark.parametrize("codecs", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize(("dim", "slots", "least"), [(128, 1300, 2**15), (64, 1030, 2**14)])
def test_scales_by_channel_of_many_blocks_on_tpu(codecs, dim, slots, least, monkeypatch):
    """Scales come in pieces that several of the kernel's blocks share, or a block takes some."""
    monkeypatch.setattr(tpu_decode, "BLOCK_BYTES", least)
    shared_scales(KERNEL, *codecs, dim, slots, 2, dtype="bfloat16")


def test_blocks_of_scales_fill_pieces_of_memory():
    """A kernel's block has the scales of whole pieces, or is a part of what one piece has."""
    for tokens, across, size, most in itertools.product(
        (8, 32, 128, 256), (True, False), (1000, 5000, 70000), (300, 4096)
    ):
        form = Form(128, True, "bfloat16", 2, True, tokens=tokens, across=across)
        blocks, block = tpu_channels.even_blocks([form], size, most)
        each, piece = block // tokens, 128 if across else 16
        assert (blocks - 1) * block < size <= blocks * block
        assert blocks == 1 or (block % 128 == 0 and block % tokens == 0 and (each % piece == 0 or piece % each == 0))
        assert tpu_channels.fetched(form, block) * tpu_channels.shares(form, block) >= each


def test_codes_that_fill_no_words_are_not_written():
    with pytest.raises(NotImplementedError, match="codes of 6 bytes a slot: a multiple of 4"):
        equal_heads(KERNEL, ("int2", "int2"), "bfloat16", 24, 128)
    equal_heads(KERNEL, ("int2", "int2"), "bfloat16", 16, 128)


def test_scales_by_channel_that_kernels_do_not_read():
    with pytest.raises(NotImplementedError, match="a scale for 12 slots: a divisor or a multiple of 128"):
        shared_scales(KERNEL, IntByChannel(2, 12), Plain(), 64, 40)
    with pytest.raises(NotImplementedError, match="codes of 3 bits"):
        shared_scales(KERNEL, IntByChannel(3, 8), Plain(), 64, 40)
    with pytest.raises(NotImplementedError, match="by channel of 48 channels in 2 bits"):
        shared_scales(BY_NUMBA, IntByChannel(2, 8), Plain(), 48, 40)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [7, 40, 264])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("names", PAIRS, ids=lambda names: "-".join(names))
def test_equal_heads_on_tpu_of_every_kind(names, dtype, dim, slots):
    equal_heads(KERNEL, names, dtype, dim, slots, window=90 if slots == 264 else None, counts=dim == 64)


@pytest.mark.long
@pytest.mark.parametrize(
    "names, how",
    [(PAIRS[2], KERNEL), (PAIRS[2], BY_NUMBA), (("plain", "int4"), KERNEL), (("e4m3", "plain"), KERNEL)],
    ids=str,
)
def test_a_token_whose_slot_is_another_devices(names, how):
    """It is neither written nor attended to, head by head; the mass is each query head's, for the merge."""
    token, lies, positions = case(np.random.default_rng(1), names, "float32", 64, 40)
    slot = jnp.asarray([[3, 40], [2, 1], [47, 5]], jnp.int32)
    arguments = token, Held(*lies, positions), slot, Judge(*jnp.full((2, 3), 40, jnp.int32), group="each")
    got, expected = (
        decode_api.decode_attend_score(*arguments, scale=0.1, **how) for how in (how, {"implementation": "reference"})
    )
    same(got, expected, LIMIT["float32"])
    assert np.all(np.asarray(got.lse)[2, :3] == -np.inf), "an empty head to which the token does not come"


def ragged(how, names, dtype, dim, slots):
    rng = np.random.default_rng(dim + slots)
    token, lies, positions = case(rng, names, dtype, dim, slots, pooled=True)
    cut = np.array([slots // 3, slots, slots + 5])
    offsets = np.stack([np.zeros(3, int), cut, np.full(3, 2 * slots)], axis=1)
    slot = jnp.asarray(np.stack([rng.integers(0, cut), cut + rng.integers(0, slots // 2, 3)], axis=1), jnp.int32)
    judge = Judge(*jnp.full((2, 3), slots, jnp.int32), rule=Rule("each"))
    arguments = token, Segments(*lies, positions, jnp.asarray(offsets, jnp.int32)), slot, judge
    got, expected = (
        jax.jit(lambda *x, how=how: ragged_api.ragged_decode(*x, scale=dim**-0.5, **how))(*arguments)
        for how in (how, {"implementation": "reference"})
    )
    same(got, expected, LIMIT[dtype])
    if dtype == "float32":
        assert np.array_equal(np.asarray(got.next_slot), np.asarray(expected.next_slot))


@pytest.mark.long
@pytest.mark.parametrize("names", [PAIRS[2], PAIRS[3], PAIRS[5]], ids=lambda names: "-".join(names))
@pytest.mark.parametrize("dtype, dim", [("float32", 64), ("bfloat16", 128)])
def test_a_pool_on_tpu(names, dtype, dim):
    ragged(KERNEL, names, dtype, dim, 72)


@pytest.mark.some(1)
@pytest.mark.parametrize("names", [PAIRS[0], PAIRS[3], PAIRS[8], ("int2", "int2")], ids=lambda names: "-".join(names))
def test_a_pool_on_cpu(names):
    ragged(BY_NUMBA, names, "float32", 64, 40)


def test_three_bits_are_read_by_the_reference():
    codec = dataclasses.replace(CODECS["int4"], bits=3)
    code = codec.as_codes(codec.encode(jnp.ones((1, 2, 16, 64), jnp.bfloat16)))
    new = codec.as_codes(codec.encode(jnp.ones((1, 2, 64), jnp.bfloat16)))
    one = jnp.ones((1, 2, 64), jnp.bfloat16)
    token = Token(one, one, one, jnp.zeros(1, jnp.int32), new, new)
    held = Held(code, code, jnp.zeros((1, 2, 16), jnp.int32))
    with pytest.raises(NotImplementedError, match="3 bits"):
        decode_api.decode_attend_score(
            token, held, jnp.zeros((1, 2), jnp.int32), Judge(*jnp.ones((2, 1), jnp.int32)), scale=1.0, **KERNEL
        )


def prompt_block(how, names, dtype, dim, slots, length=24):
    rng = np.random.default_rng(dim + slots)
    token, lies, positions = case(rng, names, dtype, dim, slots, batch=2)
    query = jnp.asarray(rng.normal(size=(2, token.query.shape[1], length, dim)), dtype)
    at = jnp.asarray(np.where(np.arange(length) < 3, -1, slots + np.arange(length)), jnp.int32)[None].repeat(2, 0)
    bias = jnp.asarray(np.log(rng.integers(1, 9, positions.shape)), jnp.float32)
    softmax = {"scale": dim**-0.5, "softcap": 20.0, "bias": bias}
    for operation, arrays, more in (
        (attend_api.prefill_attend, lies, {"with_lse": True}),
        (mass_api.prefill_attend_mass, lies[:1], {"reduce": "mean"}),
    ):
        got, expected = (
            jax.jit(lambda *x, how=how, call=operation, more=more: call(*x, **softmax, **more, **how))(
                query, *arrays, at, positions
            )
            for how in (how, {"implementation": "reference"})
        )
        padding = np.asarray(at)[:, None] < 0  # of no meaning
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            a, b = (np.asarray(x, np.float64) for x in (a, b))
            if a.shape[2] == length:
                skip = padding if a.ndim == 3 else padding[..., None]
                a, b = (np.where(skip, 0.0, x) for x in (a, b))
            # entries go up to 20, and both sides round a weight to 8 bits: 20 / 2^9 each
            np.testing.assert_allclose(a, b, atol=2 * LIMIT[dtype], rtol=LIMIT[dtype])


@pytest.mark.long
@pytest.mark.parametrize("names", [PAIRS[0], PAIRS[2], PAIRS[3], PAIRS[5], PAIRS[8]], ids=lambda names: "-".join(names))
@pytest.mark.parametrize("dtype, dim", [("float32", 64), ("bfloat16", 128)])
def test_a_block_of_a_prompt_on_tpu(names, dtype, dim):
    prompt_block(KERNEL, names, dtype, dim, 136)


# ---- the stores


def stores(rng, codecs, kind):
    """A layer of 2 rows, as slots or as a pool, with empty slots; a token, and a judge."""
    positions = np.where(np.arange(24) < np.array([20, 9])[:, None, None], np.arange(24), -1)
    positions = jnp.asarray(np.broadcast_to(positions, (2, 2, 24)), jnp.int32)
    x, y = (jnp.asarray(rng.normal(size=(2, 2, 24, 64)) + 3, jnp.float32) for _ in range(2))
    entries = Entries(x, y, positions, {})
    if kind == "slots":
        beside = codecs.beside(2, 2, 64, jnp.float32)
        layer = slots.empty(2, 2, 0, 64, jnp.float32, codecs=codecs, beside=beside)
        layer = layer.rebuilt(entries, entries.filled, 24, jnp.full(2, 24, jnp.int32), layer.beside)
    else:
        layer = pool.empty(2, 2, 64, jnp.float32, codecs=codecs, beside=codecs.beside(2, 2, 64, jnp.float32))
        layer = layer.rebuilt(entries, entries.filled, 24, jnp.full(2, 48, jnp.int32), layer.beside)
    layer = layer.fitted({}, looks=False)
    layer = layer.aimed(layer.empty_slot(jnp.full(2, 30, jnp.int32), None))
    new = (jnp.asarray(rng.normal(size=(2, heads, 64)), jnp.float32) for heads in (6, 2, 2))
    token = Token(*new, jnp.asarray([20, 9], jnp.int32))
    shape = layer.scored(layer.positions).shape
    factors = (jnp.asarray(rng.random(shape), jnp.float32) for _ in range(2))
    return layer, token, Judge(*jnp.full((2, 2), 24, jnp.int32), *factors, Rule("each"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["slots", "pool"])
@pytest.mark.parametrize("codecs", [
    Codecs(Int(4, hadamard=True), Int(8, channels=32, hadamard=True)), Codecs(Fp8(), Plain()), Codecs(Int(3), Int(2)),
    Codecs(Int(4), Int(4), residual=6), Codecs(Int(4), Int(4, symmetric=True), initial=4),
    Codecs(IntBalanced(4, channels=32), IntBalanced(8)), Codecs(IntBalanced(4), Int(4), residual=6, initial=4),
    Codecs(Int(4), Plain(), residual=6), Codecs(Plain(), Int(8), initial=4),
    Codecs(IntByChannel(4, 4), Int(4), residual=8),
    Codecs(IntByChannel(2, 8), Plain(), residual=8), Codecs(Int(8), IntByChannel(4, 4), residual=4),
    Codecs(Channels(0.4), Plain(), residual=6), Codecs(LowRank(0.25), LowRank(0.75)), Codecs(Int(4), Channels(0.5)),
    Codecs(LowRank(0.5), Int(8), residual=6, initial=4), Codecs(LowRank(0.5, heads=2), LowRank(0.5)),
], ids=[
    "turned", "fp8", "3 and 2", "residual", "initial", "balanced", "both", "values whole", "keys whole", "by channel",
    "by channel, values whole", "values by channel", "channels", "low rank", "channels of values", "low rank and codes",
    "low rank together",
])  # fmt: skip
@pytest.mark.parametrize("weighs", [True, False], ids=["with mass", "without"])
def test_a_store_gives_what_it_gave_decoded(weighs, codecs, kind, monkeypatch):
    """Three steps, the second without the last row, and the codes of slots that no token came to. Where nobody asks
    for the mass tokens in full precision are a part of their own; there the first token takes the place of one."""

    if kind == "pool" and not (codecs.apart and codecs.keys.pooled and codecs.values.pooled):
        pytest.skip("heads of a pool share no scale, and have no directions of their own")

    def run():
        layer, token, judge = stores(np.random.default_rng(5), codecs, kind)
        if not weighs:
            judge, newer = Judge(judge.limits, judge.recents), jnp.asarray([17, 5])[:, None, None]
            here = layer.filled_by_head() & (layer.seen_by_head(layer.positions) == newer)
            layer = layer.aimed(jnp.argmax(here, axis=-1).astype(jnp.int32))
        parts, before = [], layer.entries
        for step in range(3):
            at = jnp.where(jnp.arange(2) < (1 if step == 1 else 2), token.position + step, -1)
            part, layer = layer.step(
                Layout(None), token._replace(position=at), judge, None, scale=0.125, window=None, softcap=None,
                implementation="reference", with_mass=weighs,
            )  # fmt: skip
            parts.append(part)
            token = token._replace(query=part.output)
        return parts, before, layer

    parts, before, after = run()
    monkeypatch.setattr("jaxkv.store.store.reading", lambda codecs, **_: reading.Decoded(codecs))
    old_parts, _, old = run()
    for part, other in zip(parts, old_parts, strict=True):
        for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5, rtol=2e-5)
    assert np.array_equal(after.positions, old.positions) and np.array_equal(after.next_slot, old.next_slot)
    for a, b in zip(jax.tree.leaves(after.entries), jax.tree.leaves(old.entries), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    touched = np.asarray(after.positions != before.positions)
    assert touched.sum() == 10
    if not codecs.apart:
        return
    for a, b in zip(jax.tree.leaves((after.entries.keys, after.entries.values)),
                    jax.tree.leaves((before.keys, before.values)), strict=True):  # fmt: skip
        assert np.array_equal(np.asarray(a)[~touched], np.asarray(b)[~touched])


@pytest.mark.some(2)
@pytest.mark.parametrize("codecs", [
    Codecs(Int(4), Int(4), residual=6), Codecs(IntBalanced(4), Int(4, channels=32), residual=6, initial=4),
    Codecs(IntByChannel(2, 4), Int(4), residual=8),
], ids=["residual", "both", "by channel"])  # fmt: skip
@pytest.mark.parametrize("group", ["sum", "mean", "max"])
@pytest.mark.parametrize("heads", ["each", "mean"])
def test_masses_beside_codes_are_joined_and_the_slot_chosen(heads, group, codecs):
    """By the CPU's kernel what the reference gives, step by step; every query head's mass sums to 1."""

    def run(implementation):
        layer, token, judge = stores(np.random.default_rng(5), codecs, "slots")
        judge = judge._replace(group=group, rule=Rule(heads, sinks=2), limits=jnp.asarray([20, 9]))
        found = []
        for step in range(4):
            at = jnp.where(jnp.arange(2) < (1 if step == 1 else 2), token.position + step, -1)
            part, layer = layer.step(
                Layout(None), token._replace(position=at), judge, None, scale=0.125, window=None, softcap=None,
                implementation=implementation, with_mass=True,
            )  # fmt: skip
            token = token._replace(query=part.output)
            found.append((part, layer.next_slot, at))
        return found

    for (part, slot, at), (other, chosen, _) in zip(run("numba_cpu"), run("reference"), strict=True):
        np.testing.assert_allclose(part.mass, other.mass, atol=1e-5)
        np.testing.assert_allclose(part.output, other.output, rtol=5e-5, atol=2e-5)
        assert np.array_equal(slot, chosen)
        total = np.sum(part.mass, axis=-1)[np.asarray(at) >= 0]
        expected = {"sum": 3, "mean": 1}.get(group)
        assert np.allclose(total, expected, atol=1e-5) if expected else np.all(total > 1 - 1e-5)


def test_masses_go_back_to_their_slots():
    rng = np.random.default_rng(3)
    total, mass = rng.random((2, 2, 300), np.float32), rng.random((2, 2, 9), np.float32)
    slots = np.stack([rng.permutation(300)[:9] for _ in range(4)]).reshape(2, 2, 9).astype(np.int32)
    slots[0, 1, 3:] = -1
    expected = total.copy()
    for row, head, n in np.ndindex(*slots.shape):
        if slots[row, head, n] >= 0:
            expected[row, head, slots[row, head, n]] += mass[row, head, n]
    for way in (beside._added, beside._multiplied):
        np.testing.assert_allclose(way(*map(jnp.asarray, (total, mass, slots))), expected, atol=1e-6)


@pytest.mark.parametrize("scattered", [False, True], ids=["newest", "anywhere"])
def test_few_slots_are_read_in_pieces(scattered, monkeypatch):
    """What a gather gives: of slots behind each other out of two pieces, of others by the gather itself."""
    rng, codec, slots = np.random.default_rng(1), IntByChannel(2, 8), 300
    x = jnp.asarray(rng.normal(size=(3, 2, slots, 64)), jnp.float32)
    lies = codec.as_codes(codec.encode_all(x, jnp.zeros(x.shape[:3], jnp.int32)))
    newest = jnp.asarray([[200, 256], [255, 31], [299, 3]], jnp.int32)
    at = newest[..., None] - 1 - jnp.arange(20)
    at = jnp.asarray(rng.permuted(np.maximum(at, -1), axis=-1))
    if scattered:
        at = at.at[0, 0, 3].set(5)
    seen = []

    def watched(*runs, **how):
        seen.append(runs)
        return reads(*runs, **how)

    reads = few.read_runs
    monkeypatch.setattr(few, "by_pieces", lambda _: True)
    monkeypatch.setattr(few, "read_runs", watched)
    got = few.numbers_at(lies, at, newest, None)
    assert seen and {run.size for run in seen[0]} == {128, 16}
    expected = lies.at(jnp.maximum(at, 0))
    assert np.array_equal(np.where(at[..., None] < 0, 0, got), np.where(at[..., None] < 0, 0, expected))


@pytest.mark.parametrize("case", ["in a row", "evicted", "anywhere", "some rows", "none"])
def test_where_the_tokens_of_a_window_lie(case):
    """Each platform's way against a loop: slots in a row, some of the tokens evicted, and slots in any order."""
    rng, many, size, newest = np.random.default_rng(2), 24, 8, 21
    at = np.full((2, 2, many), -2, np.int32)  # a slot that has none of them
    for row, head in np.ndindex(2, 2):
        held = np.arange(newest - size + 1, newest + 1)
        place = (held + 2 + row) % many
        if case == "evicted":
            held, place = held[1:], place[1:]
        if case == "anywhere" or (case == "some rows" and row):
            place = rng.permutation(many)[:size]
        if case != "none":
            at[row, head, place] = held
    positions = np.arange(newest - size + 1, newest + 1)
    positions = positions[np.argsort(positions % size)]
    held_at = np.broadcast_to(positions if case != "none" else np.full(size, -1), (2, 2, size)).astype(np.int32)
    expected = np.full((2, 2, size), -1)
    for row, head, place in np.ndindex(2, 2, size):
        found = np.flatnonzero(at[row, head] == held_at[row, head, place])
        expected[row, head, place] = found[0] if len(found) else -1
    for way in (window._slots_put, window._slots_found, window._slots_in_a_row):
        assert np.array_equal(jax.jit(way)(jnp.asarray(at), jnp.asarray(held_at)), expected), way


def test_which_codes_are_read_as_they_lie():
    """Keys around a centre not where logits are capped: then what these have in common is no summand of them. None that
    are still to be fitted; beside tokens in full precision where no pass must read all entries."""
    way = lambda codecs, **how: type(reading.reading(codecs, **how)) is reading.AsCodes  # noqa: E731
    how = dict(windows=False, rotates=False, at_once=True)
    plain, balanced = Codecs(Int(4), Int(4)), Codecs(IntBalanced(4), Int(4))
    fitted = balanced.fitted(balanced.unfit(1, 2, 64))
    ways = [way(codecs, **how, capped=capped) for codecs in (plain, fitted, balanced) for capped in (False, True)]
    assert ways == [True, True, True, False, False, False]
    beside = dict(windows=True, rotates=False, capped=False)
    shared = Codecs(IntByChannel(2, 8), Int(2), residual=8)
    for codecs in (plain, Codecs(Int(4), Plain()), shared):
        assert [way(codecs, **beside, at_once=at_once) for at_once in (True, False)] == [False, True]
    assert way(plain, **how, capped=False, divided=True)
    assert not way(shared, **beside, at_once=False, divided=True), "blocks lie over devices"


def test_what_runs_of_a_coded_cache(unchecked):
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "slots": 64, "dtype": "bfloat16", "platform": "tpu"}
    of = lambda codec: lambda x: codec.as_codes(codec.encode(x))  # noqa: E731
    for bits, runs in ((4, "mosaic_tpu"), (3, "reference")):
        found = choices(**shape, codes=(of(Int(bits)), of(Int(bits))))
        assert found["decode_attend_score"].implementation == found["ragged_decode"].implementation == runs
        assert found["prefill_attend"].implementation == "mosaic_tpu"
    turned = choices(**shape, rotate=True)["decode_attend_score"]
    assert turned.implementation == "reference" and "rotate= needs the reference" in turned.reasons[0]
