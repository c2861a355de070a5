"""Codecs: codes and decoded values in a second form, bounds of the error, windows, any policy under any codec."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from archives import arrays
from held import ONE_HEAD, bytes_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ordered import heads_of

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.policies import Codecs, Fp8, Int, IntByChannel, Merge, Sparse
from jaxkv.sizes import size_of
from jaxkv.store import slots, window
from jaxkv.store.entries import PIECE, Change, Entries
from jaxkv.store.gear import Gear
from jaxkv.store.integers import hadamard_matrix, packed
from jaxkv.store.line import taking
from jaxkv.store.window import WINDOW
from pallas_kernels.arguments import Token
from pallas_kernels.codes import halves, unpacked

FAMILY = "llama3"
INTEGERS = [
    Int(bits, channels, symmetric, hadamard)
    for bits in (8, 4, 3, 2)
    for channels, symmetric, hadamard in ((0, False, False), (8, False, True), (8, True, False))
]
APART = [*INTEGERS, Fp8(), Fp8("e5m2"), Fp8(scaled=False), Sparse(0.5), Sparse(0.7)]
NAMED = [pytest.param(codec, id=repr(codec)) for codec in APART]


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)


# ---- coded once

WORN = {  # codecs that make other codes of decoded numbers
    "clipped": {
        "keys": {"kind": "int", "bits": 2, "hadamard": True, "clip": 0.8},
        "values": {"kind": "int", "bits": 2},
    },
    "higgs": {"keys": {"kind": "higgs", "bits": 2}, "values": {"kind": "higgs", "bits": 2}, "residual": 8},
    "outliers": {"keys": {"kind": "int-outliers", "bits": 4}, "values": {"kind": "int-outliers", "bits": 4}},
    "gear": {
        "keys": {"kind": "gear", "bits": 2, "tokens": 8},
        "values": {"kind": "gear", "bits": 2, "tokens": 8, "by": "token"},
        "residual": 8,
    },
}


def in_text_order(cache):
    """Keys and values of the first layer, which do not depend on what attention read."""
    view = cache.views[0]
    order = np.argsort(np.asarray(view.positions), axis=-1)
    rows = np.asarray(view.positions) >= 0
    assert rows.reshape(rows.shape[0], -1).sum() == 2 * int(cache.lengths[0])  # of both KV heads
    if rows.ndim == 2:  # of a pool
        order = np.lexsort((np.asarray(view.positions), np.asarray(view.owner)), axis=-1)
        order = order[:, : int(rows.sum())]
    else:
        order = order[:, :, -int(cache.lengths[0]) :]
    found = (np.take_along_axis(np.asarray(each), order[..., None], axis=-2) for each in (view.keys, view.values))
    return np.stack([each.reshape(-1, each.shape[-1]) for each in found])


@pytest.mark.parametrize(
    ("name", "sized"),
    [
        ("clipped", {"name": "full"}),
        *(pytest.param(name, {"name": "full"}, marks=pytest.mark.long) for name in ("higgs", "outliers", "gear")),
        *(
            pytest.param(name, {"name": "adakv", "budget": 128}, marks=pytest.mark.long)
            for name in ("clipped", "higgs")
        ),
    ],
)
def test_entries_are_coded_once(tiny, name, sized):
    """However many blocks a prompt has, and however often it goes on."""
    params, text = tiny(FAMILY), ids(96)
    policy = lambda block: jaxkv.policy(**sized, store=WORN[name], block=block)  # noqa: E731
    once = in_text_order(jaxkv.prefill(params, text, policy=policy(128)))
    blocks = in_text_order(jaxkv.prefill(params, text, policy=policy(16)))
    np.testing.assert_allclose(blocks, once, atol=1e-3)
    cache = jaxkv.prefill(params, text[:32], policy=policy(128))
    for at in (32, 64):
        cache = jaxkv.prefill(params, text[at : at + 32], cache=cache)
    np.testing.assert_allclose(in_text_order(cache), once, atol=1e-3)


def test_what_a_survivor_became_is_read_from_the_windows_of_layers_that_share(tiny):
    """Not only written into its code."""
    store = {"keys": {"kind": "int", "bits": 4}, "values": {"kind": "int", "bits": 4}, "residual": 8}
    merge = {"decode": "h2o", "decode_evicted": {"kind": "merge"}}
    cache = jaxkv.prefill(tiny(FAMILY), ids(64), policy=jaxkv.policy("cake", budget=40, store=store, **merge))
    newest = [jnp.argmax(layer_positions(view), axis=-1).astype(jnp.int32) for view in cache.views]
    new = jnp.full((1, 2, 16), 7.0)
    changes = tuple(Change(slot, new, new, None) for slot in newest)
    layers = taking(cache.layers, changes)
    for view, slot in zip(dataclasses.replace(cache, layers=layers).views, newest, strict=True):
        for x in (view.keys, view.values):
            np.testing.assert_array_equal(np.asarray(x)[np.zeros((1, 2), int), np.asarray(slot)], np.asarray(new))


def layer_positions(view):
    """The positions of a pool's slots by KV head, -1 in those of others."""
    return jnp.where(view.owner[:, None] == jnp.arange(2)[:, None], view.positions[:, None], -1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "channels", "by": "calibration"}, "values in the channels by='calibration'.*expected by='queries'"),
        ({"kind": "low-rank", "basis": "keys"}, "values in directions of basis='keys': expected basis='values'"),
        ({"kind": "squat"}, "values in codec 'squat'.*keys only"),
    ],
)
def test_what_is_learned_of_keys_codes_no_values(values, words):
    with pytest.raises(BadValue, match=words):
        jaxkv.policy("full", store={"values": values, "residual": 32})
    assert jaxkv.policy("streaming-llm", budget=64, store={"values": {"kind": "channels"}}).looks == 0


# ---- packing


@pytest.mark.long
@given(bits=st.sampled_from([8, 4, 3, 2]), seed=st.integers(0, 999), width=st.sampled_from([8, 24, 64]))
@settings(max_examples=30, deadline=None)
def test_integers_lie_side_by_side(bits, seed, width):
    """Every bit is used, the first integer in the lowest ones: what NumPy's packbits makes of their bits."""
    codes = np.random.default_rng(seed).integers(0, 2**bits, (2, 3, width)).astype(np.uint8)
    lie = np.asarray(packed(jnp.asarray(codes), bits))
    split = (codes[..., None] >> np.arange(bits)) & 1
    assert np.array_equal(lie, np.packbits(split.reshape(2, 3, -1), axis=-1, bitorder="little"))
    assert lie.shape[-1] == width * bits // 8
    assert np.array_equal(np.asarray(unpacked(jnp.asarray(lie), bits)), codes)


@pytest.mark.parametrize("width", [8, 16, 24, 64, 96])
def test_hadamard_keeps_products(width):
    matrix = hadamard_matrix(width)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-6)


# ---- an independent form of every codec


def integers(x, codec):
    """Codes and decoded values of one vector in float64, from the docstring's formula with float16 scales."""
    x = np.float32(x)
    if codec.hadamard:
        x = x @ hadamard_matrix(len(x))
    width, codes, back = codec.channels or len(x), [], []
    for part in x.reshape(-1, width):
        if codec.symmetric:
            most = 2 ** (codec.bits - 1) - 1
            scale, low, least = up(np.abs(part).max() / np.float32(most), np.abs(part).max(), most), 0.0, -most
        else:
            most = 2**codec.bits - 1
            low = down(part.min())
            reach = np.float32(part.max() - np.float32(low))
            scale, least = up(reach / np.float32(most), reach, most), 0
        number = np.zeros(width) if scale == 0 else np.round((part - np.float32(low)) / np.float32(scale))
        number = np.clip(number, least, most)
        codes.append(number - least)
        back.append(np.float64(low) + np.float64(scale) * number)
    back = np.concatenate(back)
    return np.concatenate(codes), back @ hadamard_matrix(len(x)).T.astype(np.float64) if codec.hadamard else back


def up(scale, reach, steps):
    half = np.float16(scale)
    return half if np.float32(half) * np.float32(steps) >= reach else np.nextafter(half, np.float16(np.inf))


def down(low):
    half = np.float16(low)
    return half if np.float32(half) <= low else np.nextafter(half, np.float16(-np.inf))


@pytest.mark.parametrize("codec", [pytest.param(codec, id=repr(codec)) for codec in INTEGERS])
def test_integers_by_an_independent_form(codec):
    x = np.random.default_rng(3).standard_normal((6, 16)).astype(np.float32) * 5
    x[1] = 3.25
    x[2] = 0.0
    x[3, :8] = [1, 1, 2, 2, 1, 2, 1, 2]  # ties
    code = codec.encode(jnp.asarray(x))
    got, back = np.asarray(unpacked(code.codes, codec.bits)), np.asarray(codec.decode(code))
    for row, its, decoded in zip(x, got, back, strict=True):
        codes, want = integers(row, codec)
        if not codec.hadamard:  # rounding of the product decides a tie
            assert its.tolist() == codes.tolist()
        np.testing.assert_allclose(decoded, want, atol=2e-2 if codec.hadamard else 1e-5, rtol=1e-5)


def test_sparse_by_an_independent_form():
    """The channels of largest magnitude, of equals the first, in their places; the others 0."""
    x = np.round(np.random.default_rng(4).standard_normal((5, 16)).astype(np.float32) * 2)  # many equals
    for sparsity in (0.0, 0.5, 0.7):
        codec = Sparse(sparsity)
        code = codec.encode(jnp.asarray(x))
        kept = 16 - int(sparsity * 16)
        assert code.values.shape == (5, kept) and code.kept.shape == (5, 2)
        for row, back in zip(x, np.asarray(codec.decode(code)), strict=True):
            best = sorted(range(16), key=lambda channel: (-abs(row[channel]), channel))[:kept]
            assert back.tolist() == [row[channel] if channel in best else 0.0 for channel in range(16)]


@pytest.mark.parametrize("form, mantissa, most", [("e4m3", 3, 448.0), ("e5m2", 2, 57344.0)])
def test_floats_by_an_independent_form(form, mantissa, most):
    """Rounded to so many bits behind the point, as NumPy's frexp tells them; what is too large is the largest."""
    x = np.random.default_rng(5).uniform(1, 400, (4, 16)).astype(np.float32)
    part, exponent = np.frexp(x)
    want = np.ldexp(np.round(part * 2 ** (mantissa + 1)) / 2 ** (mantissa + 1), exponent)
    codec = Fp8(form, scaled=False)
    np.testing.assert_array_equal(codec.decode(codec.encode(jnp.asarray(x))), want)
    assert np.asarray(codec.decode(codec.encode(jnp.full((1, 8), 1e30)))).tolist() == [[most] * 8]


@pytest.mark.parametrize("size", [7e4, 1e6, 1e20])
@pytest.mark.parametrize("codec", [Int(8), Int(2, symmetric=True), Int(4, hadamard=True), Fp8(), IntByChannel(4, 4)])
def test_what_float16_cannot_say_is_cut_off(codec, size):
    """One number too large spoils no other: scales and lows stay numbers."""
    x = np.random.default_rng(6).normal(size=(1, 1, 8, 16)).astype(np.float32)
    x[..., 0], x[..., 1] = -size, size
    at = jnp.arange(8, dtype=jnp.int32).reshape(1, 1, 8)
    back = codec.decode(codec.encode(jnp.asarray(x)) if codec.apart else codec.encode_all(jnp.asarray(x), at))
    assert np.isfinite(np.asarray(back)).all()
    if not getattr(codec, "hadamard", False):
        assert (back[..., 0] <= -3e4).all() and (back[..., 1] >= 3e4).all()


# ---- bounds

NUMBERS = st.floats(-60000, 60000, width=32, allow_subnormal=False) | st.sampled_from(
    [0.0, 1e-7, -1e-7, 6e-8, 1.0, 65504.0, -65504.0]
)


@pytest.mark.some(5)
@pytest.mark.parametrize("codec", NAMED)
@given(row=st.lists(NUMBERS, min_size=16, max_size=16), flat=st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_code_is_within_its_bound(codec, row, flat):
    x = jnp.asarray([row[:1] * 16 if flat else row], jnp.float32)
    x = x / 4 if getattr(codec, "hadamard", False) else x  # turned, it is up to sqrt(16) times as large
    code = codec.encode(x)
    off = np.abs(np.asarray(codec.decode(code) - x, np.float64))
    size = float(jnp.max(jnp.abs(x)))
    assert np.isfinite(off).all()
    if isinstance(codec, Int):
        step = np.repeat(np.asarray(halves(code.scale), np.float64), 16 // code.scale.shape[-1], axis=-1)
        if codec.hadamard:  # the turn keeps lengths
            assert np.linalg.norm(off) <= 0.5 * np.linalg.norm(step) * 1.001 + 1e-5 * size + 1e-6
        else:
            assert (off <= 0.5001 * step + 1e-6 * size).all()
    elif isinstance(codec, Fp8):
        least = np.abs(np.asarray(x, np.float64)) * 2.0 ** (-4 if codec.form == "e4m3" else -3)
        scale = 1.0 if code.scale is None else float(halves(code.scale[0]))
        inside = np.abs(np.asarray(x)) <= codec.most * scale
        assert (off[inside] <= least[inside] * 1.001 + scale * 2.0**-9).all()
    else:
        dropped = np.sort(np.abs(np.asarray(x)[0]))[: int(codec.sparsity * 16)]
        np.testing.assert_allclose(np.sort(off[0])[::-1][: len(dropped)], dropped[::-1])


@pytest.mark.some(8)
@pytest.mark.parametrize("codec", NAMED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_coded_codes_to_itself(codec, dtype):
    """Decoded numbers have the dtype of those encoded, and encoding them again changes nothing in float32."""
    x = jnp.asarray(np.random.default_rng(6).standard_normal((2, 3, 16)) * 7, dtype)
    code = codec.encode(x)
    back = codec.decode(code)
    assert back.dtype == x.dtype
    if dtype == "float32" and not getattr(codec, "hadamard", False):
        for a, b in zip(jax.tree.leaves(code), jax.tree.leaves(codec.encode(back)), strict=True):
            assert np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


# ---- a scale per channel of a block


def by_channel(x, positions, tokens, bits):
    """One head's decoded keys by position: blocks of `tokens` in time order from the oldest on."""
    order = [slot for _, slot in sorted((p, slot) for slot, p in enumerate(positions) if p >= 0)]
    found = {}
    for at in range(0, len(order), tokens):
        block = x[order[at : at + tokens]]
        low = np.array([down(v) for v in block.min(axis=0)])
        reach = block.max(axis=0) - low.astype(np.float32)
        most = 2**bits - 1
        scale = np.array([up(r / np.float32(most), r, most) for r in reach])
        step = np.where(scale > 0, scale, 1).astype(np.float32)
        codes = np.clip(np.round((block - low.astype(np.float32)) / step), 0, most)
        found |= {int(positions[slot]): row for slot, row in zip(order[at:], low + scale * codes, strict=False)}
    return found


@pytest.mark.long
@given(seed=st.integers(0, 999), bits=st.sampled_from([8, 4, 3, 2]), held=st.integers(0, 21))
@settings(max_examples=20, deadline=None)
def test_blocks_by_an_independent_form(seed, bits, held):
    """Entries before the empty slots, which hold NaN; the last block may be shorter."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((1, 1, 21, 8)).astype(np.float32)
    positions = np.full(21, -1, np.int32)
    positions[:held] = np.sort(rng.choice(90, held, replace=False))
    x[0, 0, positions < 0] = np.nan
    codec = IntByChannel(bits, 4)
    code = codec.encode_all(jnp.asarray(x), jnp.asarray(positions)[None, None])
    assert code.slots.shape[-1] == bits and code.blocks.scale.shape == (1, 1, 6, 8)
    got, want = np.asarray(codec.decode(code))[0, 0], by_channel(x[0, 0], positions, 4, bits)
    for slot in np.flatnonzero(positions >= 0):
        np.testing.assert_allclose(got[slot], want[int(positions[slot])], atol=1e-5)


@pytest.mark.long
@given(seed=st.integers(0, 999), bits=st.sampled_from([8, 4, 2]))
@example(seed=479, bits=2)  # a number halfway between two codes
@settings(max_examples=8, deadline=None)
def test_blocks_are_encoded_when_the_window_is_full(seed, bits):
    """Tokens that come into any slots, and overwrite others: keys are read as they came until R leave the window
    together; then each block that one of them lies in is encoded, once, from them and from what was read of others."""
    rng, steps, residual, tokens, count = np.random.default_rng(seed), 40, 8, 4, 22
    codecs = Codecs(IntByChannel(bits, tokens), residual=residual)
    store = slots.empty(2, 2, count, 8, jnp.float32, codecs=codecs, beside=codecs.beside(2, 2, 8, jnp.float32))
    came = rng.standard_normal((steps, 2, 2, 8)).astype(np.float32)
    into = rng.integers(0, count, (steps, 2, 2)).astype(np.int32)
    ends = np.array([steps, rng.integers(5, steps)])  # a row that has finished stays as it is
    at, read = np.full((2, 2, count), -1), np.full((2, 2, count, 8), np.nan, np.float32)
    for step in range(steps):
        position = np.where(step < ends, step, -1).astype(np.int32)
        key = jnp.asarray(came[step])
        store = written(store, jnp.asarray(into[step]), Token(key, key, key, jnp.asarray(position)))
        for row, head in np.ndindex(2, 2):
            if position[row] < 0:
                continue
            slot, held, x = into[step, row, head], at[row, head], read[row, head]
            held[slot], x[slot] = step, came[step, row, head]
            if (step + 1) % residual == 0:
                for block in {slot // tokens for slot in np.flatnonzero(held > step - residual)}:
                    some = [slot for slot in range(block * tokens, min((block + 1) * tokens, count)) if held[slot] >= 0]
                    found = by_channel(x[some], np.arange(len(some)), tokens, bits)
                    want = np.array([found[n] for n in range(len(some))])
                    got = np.asarray(store.keys)[row, head, some]
                    as_near = np.abs(np.abs(got - x[some]) - np.abs(want - x[some])) < 1e-5
                    x[some] = np.where(as_near, got, want)  # halfway between two codes it may be either
        assert np.array_equal(np.asarray(store.positions), at)
        np.testing.assert_allclose(np.asarray(store.keys)[at >= 0], read[at >= 0], atol=2e-5)


@pytest.mark.parametrize("codec", [IntByChannel(2, 4), Gear(tokens=4, rank=1, outliers=0.1)], ids=["channel", "gear"])
def test_more_slots_change_no_code(codec):
    """Nor what is read: not of a block that was not full, and whose tokens were encoded at different times."""
    rng, codecs = np.random.default_rng(0), Codecs(codec, residual=8)
    store = slots.empty(1, 2, 10, 8, jnp.float32, codecs=codecs, beside=codecs.beside(1, 2, 8, jnp.float32))
    for step in range(10):
        key = jnp.asarray(rng.standard_normal((1, 2, 8)), jnp.float32)
        store = written(store, jnp.full((1, 2), step), Token(key, key, key, jnp.asarray([step])))
    longer = store.resized(23)
    assert longer.slots == 23 and np.asarray(longer.positions)[..., 10:].max() == -1
    assert np.array_equal(longer.keys[:, :, :10], store.keys)
    for before, after in zip(jax.tree.leaves(store.entries.keys), jax.tree.leaves(longer.entries.keys), strict=True):
        assert np.array_equal(after[:, :, : before.shape[2]], before) and after.shape[2] > before.shape[2]


@jax.jit
def written(store, slot, token):
    return store.aimed(slot).with_token(token)


def exact_of(params, cache):
    """The first layer's keys and values of the text that a cache of one row has seen, by position: they depend on no
    other layer. [2, Hk, T, D]"""
    text = cache.texts()[0]
    layer = jaxkv.prefill(params, text, policy=None).layers[0]
    at = np.argsort(np.asarray(layer.positions)[0], axis=-1)[..., -len(text) :, None]
    return np.stack([np.take_along_axis(np.asarray(x)[0], at, 1) for x in (layer.keys, layer.values)])


@pytest.mark.long
@pytest.mark.parametrize("ends", [13, 16, 23, 24, 29, 34])
def test_blocks_of_a_text_are_those_of_its_tokens(tiny, ends):
    """KIVI's cache after a prompt of 13 tokens and steps: keys are blocks of the exact keys but for what is left of R
    at a time, values codes of the exact values but for the last R."""
    params, tokens, residual = tiny(FAMILY), 4, 8
    chosen = jaxkv.policy("kivi", tokens=tokens, residual=residual)
    cache = jaxkv.generate(params, ids(13), policy=chosen, max_new_tokens=ends - 12, stop_tokens=()).cache
    seen = int(cache.lengths[0])
    assert seen == ends
    exact = exact_of(params, cache)
    layer = cache.layers[0]
    codec, held = Int(2, 32), np.asarray(layer.positions)[0]
    for head in range(2):
        blocks = by_channel(exact[0, head], np.arange(seen), tokens, 2)
        rows = np.asarray(codec.decode(codec.encode(jnp.asarray(exact[1, head]))))
        assert sorted(p for p in held[head].tolist() if p >= 0) == list(range(seen))
        for slot, p in enumerate(held[head].tolist()):
            if p < 0:
                continue
            key = exact[0, head, p] if p >= seen // residual * residual else blocks[p]
            value = exact[1, head, p] if p >= seen - residual else rows[p]
            np.testing.assert_allclose(np.asarray(layer.keys)[0, head, slot], key, atol=2e-5)
            np.testing.assert_allclose(np.asarray(layer.values)[0, head, slot], value, atol=2e-5)


def largest(row, kept):
    best = sorted(range(len(row)), key=lambda channel: (-abs(row[channel]), channel))[:kept]
    return [row[channel] if channel in best else 0.0 for channel in range(len(row))]


FORMS = {
    "kv-adaquant": (lambda row: integers(row, Int(4))[1], lambda row: integers(row, Int(2))[1]),
    "mustafar": (lambda row: largest(row, 16 - int(0.7 * 16)),) * 2,
    "qpruning": (lambda row: integers(row, Int(4))[1],) * 2,
}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", FORMS)
def test_a_method_holds_its_codes(tiny, name):
    """Every entry of the first layer is its own code, but for the newest, which are exact."""
    params, residual = tiny(FAMILY), 8
    small = {"window": 6, "budget": 20} if name == "qpruning" else {}
    chosen = jaxkv.policy(name, residual=residual, **small)
    cache = jaxkv.generate(params, ids(29), policy=chosen, max_new_tokens=12, stop_tokens=()).cache
    seen, exact, layer = int(cache.lengths[0]), exact_of(params, cache), cache.layers[0]
    for head, positions in enumerate(np.asarray(layer.positions)[0].tolist()):
        for slot, p in enumerate(positions):
            for x, rows, form in zip((layer.keys, layer.values), exact[:, head], FORMS[name], strict=True):
                if p >= 0:
                    want = rows[p] if p >= seen - residual else form(rows[p])
                    off = np.abs(np.asarray(x)[0, head, slot] - np.asarray(want))
                    # rounding of the keys may decide a tie between two codes
                    assert (off < 1e-4).mean() > 0.9 and off.max() < 0.5 * np.abs(rows[p]).max()


# ---- the window


def layer_of(codecs, positions, x):
    entries = Entries(jnp.asarray(x), jnp.asarray(-x), jnp.asarray(positions), {})
    batch, heads, _, dim = x.shape
    beside = codecs.beside(batch, heads, dim, jnp.float32)
    empty = slots.empty(batch, heads, 0, dim, jnp.float32, codecs=codecs, beside=beside)
    room = jnp.zeros(positions.shape[0], jnp.int32)
    return empty.rebuilt(entries, entries.filled, positions.shape[-1], room, empty.beside)


@pytest.mark.long
@given(seed=st.integers(0, 999), residual=st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_the_newest_are_read_as_they_came(seed, residual):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 2, 12, 8)).astype(np.float32)
    positions = np.sort(rng.permuted(np.tile(np.arange(-6, 30), (2, 2, 1)), axis=-1)[..., :12], axis=-1)
    positions = np.where(positions < 0, -1, positions).astype(np.int32)
    coded, plain = (layer_of(Codecs(Int(2), Int(2), r), positions, x) for r in (residual, 0))
    newest = positions.max(axis=(1, 2))[:, None, None]
    recent = (positions > newest - residual) & (positions >= 0)
    for name, exact in (("keys", x), ("values", -x)):
        got, codes = np.asarray(getattr(coded, name)), np.asarray(getattr(plain, name))
        np.testing.assert_array_equal(got[recent], exact[recent])
        np.testing.assert_array_equal(got[~recent & (positions >= 0)], codes[~recent & (positions >= 0)])


def test_plain_keys_need_no_window():
    held = Codecs(values=Int(4), residual=4).beside(1, 2, 8, jnp.float32)[WINDOW]
    assert held.keys is None and held.kv_bytes == 2 * 4 * 8 * 4
    both = window.empty(1, 2, 4, 8, jnp.float32)
    assert both.kv_bytes == 2 * held.kv_bytes


@pytest.mark.parametrize(
    "made, says",
    [
        (lambda: Int(5), "bits=5"),
        (lambda: Int(4, -1), "channels=-1"),
        (lambda: Codecs(Int(4)).check(7), "7 channels"),
        (lambda: Codecs(Int(3)).check(12), "12 channels has no code of 3 bits"),
        (lambda: Codecs(Int(4, 48)).check(64), "channels=48"),
        (lambda: Codecs(Sparse()).check(12), "multiple of 8"),
        (lambda: Sparse(1.0), "sparsity=1.0"),
        (lambda: Fp8("e3m4"), "form='e3m4'"),
        (lambda: IntByChannel(bits=7), "bits=7"),
        (lambda: Codecs(IntByChannel(4, 32)), "residual=32"),
        (lambda: Codecs(IntByChannel(4, 32), residual=48), "multiple of 32"),
        (lambda: Codecs(residual=4), "residual=4"),
        (lambda: jaxkv.policy("adakv-h2o", budget=64, store=BY_CHANNEL), "several tokens share"),
        (lambda: jaxkv.policy("quest", store=BY_CHANNEL), "several tokens share"),
        (lambda: jaxkv.policy("qpruning", budget=64), "budget=64 .* residual=128 .* at least 128"),
    ],
)
def test_what_cannot_be_coded_is_refused(made, says):
    with pytest.raises(BadValue, match=says):
        made()


BY_CHANNEL = {"keys": {"kind": "int-by-channel", "tokens": 4}, "values": {"kind": "int", "bits": 4}, "residual": 8}


# ---- any policy under any codec

STORES = {
    "int": {"keys": {"kind": "int", "bits": 8}, "values": {"kind": "int", "bits": 4, "channels": 8}},
    "window": {"keys": {"kind": "int", "bits": 3, "hadamard": True}, "values": {"kind": "fp8"}, "residual": 6},
    "sparse": {"keys": {"kind": "sparse"}, "values": {"kind": "int", "symmetric": True}, "residual": 4},
    "channel": BY_CHANNEL,
}
UNDER = ["h2o", "snapkv", "adakv-h2o", "global-h2o", "keydiff", "weightedkv", "tiered-h2o", "streaming-llm", "quest"]
UNDER += ["keepkv"]
SMALL = {"snapkv": {"window": 6}, "keydiff": {"every": 4}, "weightedkv": {"sinks": 2}, "tiered-h2o": {"slots": 8}}
SMALL |= {"adakv-h2o": {"interval": 4, "shift": 2}, "quest": {"count": 16, "page": 4, "dense": 1}}
SMALL |= {"keepkv": {"sinks": 2, "every": 4, "alike": 0.3}}
LONG = ("h2o", "adakv-h2o", "snapkv", "keepkv")  # the other pairs are slow
PAIRS = [
    pytest.param(name, store, marks=() if name in LONG else pytest.mark.slow) for store in STORES for name in UNDER
    if store != "channel" or name not in ("adakv-h2o", "global-h2o", "quest")
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name, store", PAIRS)
def test_any_policy_under_any_codec(tiny, name, store, tmp_path):
    """Rows don't depend on their neighbours, the bytes are those reckoned, and a saved cache goes on as it would have;
    with room for everything and a window as long as the text, it is the full cache."""
    params, rows = tiny(FAMILY), [ids(45, 1), ids(3, 2)]
    size = {} if name == "quest" else {"budget": 16}
    chosen = jaxkv.policy(name, **size, block=20, store=STORES[store], **SMALL.get(name, {}))
    options = {"stop_tokens": ()}
    whole = jaxkv.generate(params, rows, policy=chosen, max_new_tokens=17, **options)
    turned = jaxkv.generate(params, rows[::-1], policy=chosen, max_new_tokens=17, **options)
    assert whole.tokens.tolist() == turned.tokens[::-1].tolist()
    begun = jaxkv.generate(params, rows, policy=chosen, max_new_tokens=9, **options)
    jaxkv.save(begun.cache, tmp_path / "cache")
    ends = [
        jaxkv.generate(params, cache=cache, max_new_tokens=8, **options).tokens.tolist()
        for cache in (begun.cache, jaxkv.restore(tmp_path / "cache", params))
    ]
    assert ends[0] == ends[1]
    if chosen.bounded:
        assert ends[0] == whole.tokens[:, 9:].tolist()
    last = whole.cache.views[0]
    for head in heads_of(last):
        held = [int(p) for p in head if p >= 0]
        assert len(held) == len(set(held)) and all(0 <= p < 61 for p in held)
    if name in ("quest", "tiered-h2o"):
        return
    wide = dataclasses.replace(chosen, budget=96, store=dataclasses.replace(chosen.store, residual=96))
    if chosen.rope == "text":
        exact = dataclasses.replace(wide, store=Codecs())
        one, two = (jaxkv.generate(params, rows, policy=p, max_new_tokens=9, **options) for p in (wide, exact))
        assert one.tokens.tolist() == two.tokens.tolist()


@pytest.mark.long
@pytest.mark.parametrize("store", ["window", "channel"])
def test_merging_moves_what_the_window_holds(tiny, store):
    """A survivor that something is merged into is read as merged, though the window held it."""
    params = tiny(FAMILY)
    options = {"ratio": 0.64, "block": 20, "evicted": Merge()}  # a budget would be too small beside such a window
    wide = {**STORES[store], "residual": 64}
    both = [jaxkv.policy("h2o", **options, **more) for more in ({"store": wide}, {})]
    views = [jaxkv.prefill(params, ids(45, 1), policy=each).layers[0] for each in both]
    at = [np.argsort(np.asarray(view.positions), axis=-1) for view in views]
    for name in ("positions", "values"):
        one, two = (
            np.take_along_axis(np.asarray(getattr(view, name)), order if name == "positions" else order[..., None], 2)
            for view, order in zip(views, at, strict=True)
        )
        np.testing.assert_allclose(one, two, atol=1e-5)


# ---- bytes


@pytest.mark.parametrize(
    "name, bits, scales",
    [  # bits of keys and values on average, and bits of scales and offsets per number, at 64 channels a head
        ("kivi", 2, (32 / 32 + 2 * 32 / 64) / 2),
        ("kv-adaquant", 3, 32 / 64),
        ("mustafar", 16 * 20 / 64, 1),
        ("qpruning", 4, 32 / 64),
        ("rotatekv", 2, 32 / 64),
        ("squat", 2, (32 / 32 + 2 * 32 / 64) / 2),
    ],
)
def test_bytes_of_a_method_are_its_bits(name, bits, scales):
    """Bytes of 4096 slots without the window, of bfloat16's: within 3 % of bits/16 and scales."""
    store = jaxkv.policies.catalogue()[name].store
    alone = bytes_of(store, 4096) - bytes_of(store, 0)
    assert alone / (4096 * 2 * 64 * 2) == pytest.approx((bits + scales) / 16, rel=0.03)
    assert bytes_of(store, 0) == pytest.approx((store.residual + store.initial) * 2 * 64 * 2, rel=0.03)


@pytest.mark.parametrize(
    "name, upper, lower, times",
    [  # bits of keys and values on average in both tiers, with scales and offsets, and slots of the lower one
        ("mikv", 16, 2 + 32 / 64, 4),
        ("zipcache", 4 + (32 / 32 + 32 / 64) / 2, 2 + 32 / 64, 2 / 3),
        ("arkv", 16, 8 + 16 / 64, 1 / 4),
        ("qaq", 4 + 80 / 64, 2 + 80 / 64, 3),
        ("tiered-laq", 16, 4 + 32 / 64, 10),
    ],
)
def test_bytes_of_two_tiers_are_their_bits(name, upper, lower, times):
    """Bytes of 4096 slots and of the tier below, without the window, of bfloat16's: within 3 %."""
    chosen = jaxkv.policy(name, budget=4096)
    window = chosen.store.residual * 2 * 64 * 2
    alone = size_of(chosen, ONE_HEAD, "bfloat16", [4096]).keys_values - window
    assert alone / (4096 * 2 * 64 * 2) == pytest.approx((upper + times * lower) / 16, rel=0.03)


@pytest.mark.long
@pytest.mark.parametrize("name", ["h2o", "snapkv", "pyramidkv", "adakv-h2o", "global-h2o", "tiered-h2o", "tova"])
def test_a_policy_of_so_many_bytes(tiny, name):
    """The largest budget whose cache takes no more, read off the arrays: one token more would, or as many as are
    rounded away where the layers differ."""
    params, coded = tiny(FAMILY), {"keys": {"kind": "int", "bits": 4}, "values": {"kind": "int", "bits": 2}}
    options = {"store": {**coded, "residual": 4}, "block": 64, **SMALL.get(name, {})}
    chosen = jaxkv.policy(name, bytes=9000, **options)
    cache = jaxkv.prefill(params, [ids(90, 1), ids(80, 2)], policy=chosen)
    assert cache.policy.bytes is None
    even = len(set(cache.policy.budgets(params.config.max_position, len(cache.layers)))) == 1
    for more in (0, 1 if even else PIECE * len(cache.layers)):
        own = jaxkv.policy(name, budget=cache.policy.budget + more, **options)
        its = jaxkv.prefill(params, [ids(90, 1), ids(80, 2)], policy=own).kv_bytes / 2
        assert (its <= 9000) == (not more), (name, cache.policy.budget, its)


def test_too_few_bytes_and_other_sizes(tiny):
    params = tiny(FAMILY)
    with pytest.raises(BadValue, match=r"bytes=100 of policy 'h2o': its smallest budget, 1 tokens .* takes 4096 bytes"):
        jaxkv.prefill(params, ids(9), policy=jaxkv.policy("h2o", bytes=100))
    for name in ("knorm", "d2o"):
        with pytest.raises(
            BadValue, match=r"layers hold the whole text .* context of 2048 tokens: spare fewer .*spare="
        ):
            jaxkv.prefill(params, ids(9), policy=jaxkv.policy(name, bytes=10_000))
    with pytest.raises(BadValue, match="exactly one of"):
        jaxkv.policy("h2o", bytes=100, budget=64)
    with pytest.raises(BadValue, match="bytes=0"):
        jaxkv.policy("h2o", bytes=0)
    with pytest.raises(BadValue, match="takes no bytes=64"):
        jaxkv.policy("full", bytes=64)
    plain = jaxkv.prefill(params, ids(9), policy=jaxkv.policy("h2o", bytes=10**12)).policy
    assert plain.budget == params.config.max_position


@pytest.mark.long
@pytest.mark.parametrize("name", ["h2o", "tiered-h2o", "prefixkv", "laq32-h2o-int4"])
def test_info_and_stats_agree(tiny, goldens, capsys, name):
    """The bytes that info reckons are those that a run holds: in slots, beside them, in one line of all layers."""
    import json

    from jaxkv import cli

    options = small.SMALL.get(name, {})
    out = jaxkv.generate(
        tiny(FAMILY), ids(90), policy=jaxkv.policy(name, budget=24, **options), max_new_tokens=4, stop_tokens=()
    )
    said = ["--option", *(f"{option}={value}" for option, value in options.items())] if options else []
    command = ["info", str(goldens / "tiny" / FAMILY), "--policy", name, "--budget", "24", *said, "--json"]
    assert cli.main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts[f"cache_bytes_under_{name}_at_budget_24"] == out.stats.cache_bytes
    assert facts[f"keys_and_values_bytes_under_{name}_at_budget_24"] == out.cache.kv_bytes


@pytest.mark.parametrize(("name", "options"), [("knorm", {"spare": 1}), ("d2o", {"spare": 1, "spare_last": 0})])
def test_info_counts_the_text_that_it_is_told_of(tiny, goldens, capsys, name, options):
    """Layers that hold the whole text do so up to --tokens, not to the end of the model's context."""
    import json

    from jaxkv import cli

    held = jaxkv.prefill(tiny(FAMILY), ids(96), policy=jaxkv.policy(name, budget=24, **options)).nbytes
    said = ["--option", *(f"{option}={value}" for option, value in options.items())]
    command = ["info", str(goldens / "tiny" / FAMILY), "--policy", name, "--budget", "24", *said, "--tokens", "96"]
    assert cli.main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts[f"cache_bytes_under_{name}_at_budget_24_behind_the_prompt"] == held


# ---- as released


@pytest.mark.some(1)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_as_kivi_packs_them(goldens, bits):
    """Keys by channel in blocks of 32 tokens and values by token in groups of 32 channels, by KIVI's own functions: the
    same integers where its scale is a float16, and everywhere as near to the numbers."""
    golden, store = arrays(goldens / "policies" / "codecs.npz"), jaxkv.policy("kivi", bits=bits).store
    for what, codec in (("k", store.keys), ("v", store.values)):
        for case in ("exact", "normal"):
            name = f"kivi/{case}/{what}{bits}"
            x, codes, back = (golden[f"{name}/{part}"] for part in ("x", "codes", "back"))
            at = jnp.broadcast_to(jnp.arange(x.shape[2], dtype=jnp.int32), x.shape[:3])
            code = codec.encode_all(jnp.asarray(x), at)
            lies = code.slots if what == "k" else code.codes
            mine = np.asarray(unpacked(lies, bits)).astype(int)
            if case == "exact":
                assert np.array_equal(mine, codes)
                np.testing.assert_allclose(codec.decode(code), back, atol=1e-6)
            assert np.abs(mine - codes).max() <= 1 and (mine != codes).mean() < 0.1
            step = np.ptp(x) / (2**bits - 1)
            assert np.abs(np.asarray(codec.decode(code)) - back).max() < 1.01 * step


@pytest.mark.parametrize("bits", [2, 4])
def test_values_as_quanto_decodes_them(goldens, bits):
    """transformers' QuantizedCache with quanto: groups of 64 channels of a token, from the minimum."""
    golden = arrays(goldens / "policies" / "codecs.npz")
    x, back = golden[f"quanto/{bits}/x"], golden[f"quanto/{bits}/back"]
    codec = Int(bits, 64)
    mine = np.asarray(codec.decode(codec.encode(jnp.asarray(x))))
    step = (x.reshape(*x.shape[:-1], -1, 64).max(-1) - x.reshape(*x.shape[:-1], -1, 64).min(-1)) / (2**bits - 1)
    step = np.repeat(step, 64, axis=-1)
    assert (np.abs(mine - back) <= 1.02 * step).all() and (np.abs(mine - back) > 0.1 * step).mean() < 0.05
    assert np.abs(mine - x).mean() <= 1.02 * np.abs(back - x).mean()
