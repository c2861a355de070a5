"""Every implementation of every operation against plain NumPy in float64, empty slots poisoned with NaN.

Where there is no TPU its kernels run under the interpreter, which looks for races too. It is slow, so there they run
the diagonal of each product of cases; on a TPU they run all.
"""

import functools
import importlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_decode, tpu_plan
from pallas_kernels.arguments import Held, Judge, Rule, Segments, Token
from pallas_kernels.block_product import api as product_api
from pallas_kernels.choices import choices
from pallas_kernels.decode_attend_score import api as decode_api
from pallas_kernels.partial import Partial, merge, portion
from pallas_kernels.prefill_attend import api as attend_api
from pallas_kernels.prefill_attend_mass import api as mass_api
from pallas_kernels.ragged_decode import api as ragged_api
from pallas_kernels.tpu_walk import Walk

REGISTERS = ((8, 4, 64), (8, 2, 128), (16, 4, 64), (8, 8, 80))  # KV heads whose query heads fill registers on TPU
DTYPES = {"float32": 2e-5, "bfloat16": 2e-2}
ON_TPU = jax.default_backend() == "tpu"
HOW = {"reference": {}, "mosaic_tpu": {} if ON_TPU else {"interpret": pltpu.InterpretParams(detect_races=True)}}
PREFILL = HOW | {"numba_cpu": {}}  # decode's kernel for CPUs has tests of its own


@pytest.fixture(autouse=True)
def blocks_of_any_size(monkeypatch):
    """The kernel for CPUs leaves few queries to XLA, but would do them."""
    monkeypatch.setattr("pallas_kernels.cpu_prefill.FEWEST", 0)


def cases(ways=HOW, **axes):
    """Parameters (how, *values): every implementation by the product of the axes, or by its diagonal (see above)."""
    every = list(itertools.product(*axes.values()))
    longest = max(len(axis) for axis in axes.values())
    diagonal = [tuple(axis[i % len(axis)] for axis in axes.values()) for i in range(longest)]
    chosen = {"reference": every, "mosaic_tpu": every if ON_TPU else diagonal, "numba_cpu": every}
    return pytest.mark.parametrize(
        ["how", *axes],
        [
            pytest.param({"implementation": name, **how}, *case, id="-".join(map(str, (name, *case))))
            for name, how in ways.items()
            for case in chosen[name]
        ],
    )


def softmax_weights(q, keys, q_pos, k_pos, scale, window, cap, bias=0.0):
    """[T, S] weights of queries [T, D] over keys [S, D], with a bias of each; zero rows where a query sees nothing."""
    keys = np.where(k_pos[:, None] >= 0, keys, 0.0)
    logits = q @ keys.T * scale
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    logits = logits + bias
    seen = (k_pos >= 0)[None, :] & (k_pos[None, :] <= q_pos[:, None])
    if window is not None:
        seen &= q_pos[:, None] - k_pos[None, :] < window
    top = np.max(np.where(seen, logits, -np.inf), axis=1, keepdims=True)
    weights = np.where(seen, np.exp(logits - np.where(np.isfinite(top), top, 0)), 0.0)
    total = weights.sum(1, keepdims=True)
    return weights / np.where(total > 0, total, 1), np.where(
        total > 0, top + np.log(np.where(total > 0, total, 1)), -np.inf
    )


def next_slots(position, positions, mass, weight, bias, limit, recent, window, rule):
    """[Hk] slots for the token after `position` of one row [Hk, C], spelled out."""
    now, out = position + 1, []
    score = weight * mass + bias
    if rule is not None and rule.heads != "each":
        score = np.broadcast_to({"sum": score.sum, "mean": score.mean}[rule.heads](axis=0), score.shape)
    for held, worth in zip(positions, score, strict=True):
        live = (held >= 0) & ((held > now - window) if window is not None else True)
        if rule is None:
            out.append(int(np.argmin(live)))
            continue
        if live.sum() < min(limit, len(held)):
            out.append(min((held[c], c) for c in range(len(held)) if not live[c])[1])
            continue
        safe = (held < rule.sinks) | (held >= now - recent)
        order = [(np.inf if safe[c] else worth[c], held[c], c) for c in range(len(held)) if live[c]]
        out.append(min(order)[2])
    return np.array(out)


def inputs(rng, batch, kv_heads, group, slots, dim, length, dtype):
    """Random arrays in `dtype`, with some slots empty (NaN) and one row with none filled."""

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    positions = np.stack([rng.permutation(slots * 2)[:slots] for _ in range(batch * kv_heads)])
    positions = positions.reshape(batch, kv_heads, slots)
    positions = np.where(rng.random(positions.shape) < 0.3, -1, positions)
    positions[-1] = -1
    hollow = jnp.asarray(np.where(positions < 0, np.nan, 1.0)[..., None], dtype)
    keys, values = draw(batch, kv_heads, slots, dim) * hollow, draw(batch, kv_heads, slots, dim) * hollow
    return draw(batch, kv_heads * group, length, dim), keys, values, positions


RULES = {  # rule, weight, bias, limit as a share of the slots, recents
    "longflow": (Rule("sum"), True, False, 1.0, 0),
    "longflow, each head, sinks and recents": (Rule("each", sinks=4), True, False, 1.0, 3),
    "h2o": (Rule("each"), False, True, 1.0, 9),
    "recency, sinks": (Rule("each", sinks=4), 0.0, True, 1.0, 0),
    "tova, room left": (Rule("mean"), False, False, 2.0, 1),
    "half the slots": (Rule("sum", sinks=1), True, True, 0.5, 1),
    "ties": (Rule("each"), 0.0, 0.0, 1.0, 0),
    "adds": (None, False, False, 1.0, 0),
}


@pytest.mark.some(2)
@cases(name=list(RULES), dtype=list(DTYPES), slots=[(40, None, True), (129, 90, True), (64, None, False)])
def test_decode_attend_score_chooses_the_next_slot(how, name, dtype, slots):
    """The victim of the returned mass, by a plain loop."""
    slots, window, full = slots
    rule, weight, bias, share, recent = RULES[name]
    rng = np.random.default_rng(slots)
    batch, kv_heads, group, dim = 3, 2, 4, 64
    query, keys, values, positions = inputs(rng, batch, kv_heads, group, slots, dim, 1, dtype)
    if full:
        positions = np.broadcast_to(rng.permutation(slots), positions.shape)
        keys, values = jnp.nan_to_num(keys), jnp.nan_to_num(values)
    key, value = (jnp.asarray(rng.normal(size=(batch, kv_heads, dim)), dtype) for _ in range(2))
    position = np.array([slots * 2, slots, -1], np.int32)
    slot = rng.integers(0, slots, (batch, kv_heads)).astype(np.int32)
    factor = {True: rng.random((batch, kv_heads, slots)).astype(np.float32), False: None}
    weights = weight if isinstance(weight, float) else (factor[True] + 0.5 if weight else 1.0)
    biases = bias if isinstance(bias, float) else (factor[True][..., ::-1].copy() if bias else 0.0)
    if name == "ties":
        biases = np.zeros((batch, kv_heads, slots), np.float32)
    limit = int(slots * share)
    factors = [x if isinstance(x, float) else jnp.asarray(x) for x in (weights, biases)]
    got = decode_api.decode_attend_score(
        Token(query[:, :, 0], key, value, jnp.asarray(position)),
        Held(keys, values, jnp.asarray(positions, jnp.int32)),
        jnp.asarray(slot),
        Judge(jnp.full(batch, limit, jnp.int32), jnp.full(batch, recent, jnp.int32), *factors, rule),
        scale=dim**-0.5, window=window, **how,
    )  # fmt: skip
    for b in range(batch):
        if position[b] < 0:
            assert np.array_equal(np.asarray(got.next_slot[b]), slot[b])
            continue
        row = (
            weights if isinstance(weights, float) else weights[b],
            biases if isinstance(biases, float) else biases[b],
        )
        mass = np.asarray(got.mass[b])
        expected = next_slots(position[b], np.asarray(got.positions[b]), mass, *row, limit, recent, window, rule)
        assert np.array_equal(np.asarray(got.next_slot[b]), expected), (b, name)


@pytest.mark.some(2)
@cases(
    dtype=list(DTYPES),
    heads=[(3, 3, 64), (1, 16, 80), (2, 1, 96), (2, 4, 128), (1, 8, 256), *REGISTERS],
    slots=[(7, None, None, "sum", True), (130, 60, 20.0, "max", True), (256, None, 5.0, "mean", False)],
)
def test_decode_attend_score(how, dtype, heads, slots):
    """With a bias of each slot's logits, as where entries stand for several tokens, and without."""
    (kv_heads, group, dim), (slots, window, cap, reduce, counts) = heads, slots
    rng = np.random.default_rng(slots + dim)
    batch = 3
    query, keys, values, positions = inputs(rng, batch, kv_heads, group, slots, dim, 1, dtype)
    key, value = (jnp.asarray(rng.normal(size=(batch, kv_heads, dim)), dtype) for _ in range(2))
    position = np.array([slots * 2, -1, slots * 2 + 5], np.int32)  # the second row has finished, the last was empty
    slot = rng.integers(0, slots, (batch, kv_heads)).astype(np.int32)
    scale = dim**-0.5
    bias = np.where(positions < 0, np.nan, np.log(rng.integers(1, 9, positions.shape))).astype(np.float32)
    np.put_along_axis(bias, slot[..., None], 0.0, axis=-1)
    options = dict(scale=scale, window=window, softcap=cap, **how)
    call = jax.jit(lambda *bundles: decode_api.decode_attend_score(*bundles, **options))
    bundles = (
        Token(query[:, :, 0], key, value, jnp.asarray(position)),
        Held(keys, values, jnp.asarray(positions, jnp.int32), jnp.asarray(bias) if counts else None),
        jnp.asarray(slot),
        Judge(*jnp.full((2, batch), slots, jnp.int32), group=reduce),
    )
    got = call(*bundles)

    for b, h in np.ndindex(batch, kv_heads):
        k, v, p = (np.array(x[b, h], np.float64) for x in (keys, values, positions))
        p = p.astype(int)
        if position[b] >= 0:
            k[slot[b, h]], v[slot[b, h]], p[slot[b, h]] = key[b, h], value[b, h], position[b]
        assert np.array_equal(np.asarray(got.positions[b, h]), p)
        assert np.array_equal(np.asarray(got.keys[b, h], np.float64), k, equal_nan=True)
        assert np.array_equal(np.asarray(got.values[b, h], np.float64), v, equal_nan=True)
        heads = slice(h * group, (h + 1) * group)
        q = np.asarray(query[b, heads, 0], np.float64)
        added = np.where(p >= 0, bias[b, h], 0.0) if counts else 0.0
        weights, lse = softmax_weights(q, k, np.full(group, position[b]), p, scale, window, cap, added)
        output = weights @ np.where(p[:, None] >= 0, v, 0.0)
        expected = {"sum": weights.sum, "mean": weights.mean, "max": weights.max}[reduce](axis=0)
        tolerance = DTYPES[dtype]
        np.testing.assert_allclose(np.asarray(got.output[b, heads], np.float64), output, atol=tolerance)
        np.testing.assert_allclose(np.asarray(got.lse[b, heads], np.float64), lse[:, 0], atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(np.asarray(got.mass[b, h], np.float64), expected, atol=1e-4)
    assert got.mass.dtype == jnp.float32
    again = call(*bundles)
    assert all(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True) for a, b in zip(got, again, strict=True))


@pytest.mark.long
@cases(dtype=list(DTYPES), heads=[(3, 3, 64), (2, 4, 128), (1, 8, 256)], slots=[(40, None), (260, 90)])
def test_parts_of_the_slots_are_the_whole(how, dtype, heads, slots):
    """Two devices' slots, each attended to by itself: merged by every query head's mass and log-sum-exp they are the
    whole, and the token is written where its slot is."""
    (kv_heads, group, dim), (slots, window) = heads, slots
    rng, batch = np.random.default_rng(slots), 3
    query, keys, values, positions = inputs(rng, batch, kv_heads, group, slots, dim, 1, dtype)
    key, value = (jnp.asarray(rng.normal(size=(batch, kv_heads, dim)), dtype) for _ in range(2))
    token = Token(query[:, :, 0], key, value, jnp.asarray([slots * 2, -1, slots * 2 + 5], jnp.int32))
    held = Held(keys, values, jnp.asarray(positions, jnp.int32))
    slot = jnp.asarray(rng.integers(0, slots, (batch, kv_heads)), jnp.int32)
    judge = Judge(*jnp.full((2, batch), slots, jnp.int32))
    options = {"scale": dim**-0.5, "window": window}
    whole = decode_api.decode_attend_score(token, held, slot, judge, **options, implementation="reference")
    half, parts = slots // 2, []
    for first in (0, half):
        some = Held(*(None if x is None else x[:, :, first : first + half] for x in held))
        at = jnp.where((slot >= first) & (slot < first + half), slot - first, half + 3 * first)
        parts.append(decode_api.decode_attend_score(token, some, at, judge._replace(group="each"), **options, **how))
    for name in ("keys", "values", "positions"):
        put = np.concatenate([np.asarray(getattr(part, name), np.float32) for part in parts], axis=2)
        assert np.array_equal(put, np.asarray(getattr(whole, name), np.float32), equal_nan=True)
    joined = merge(*(Partial(part.output, part.lse) for part in parts))
    near = {"atol": DTYPES[dtype]}
    np.testing.assert_allclose(*(np.asarray(x.output, np.float32) for x in (joined, whole)), **near)
    np.testing.assert_allclose(joined.lse, whole.lse, atol=1e-4, rtol=1e-4)
    shares = [np.asarray(portion(part.lse, joined.lse)).reshape(batch, kv_heads, group, 1) for part in parts]
    mass = np.concatenate([part.mass * share for part, share in zip(parts, shares, strict=True)], axis=-1)
    np.testing.assert_allclose(mass.sum(axis=2), whole.mass, atol=1e-4)
    with pytest.raises(ValueError, match="a choice needs a mass per KV head"):
        decode_api.decode_attend_score(token, held, slot, judge._replace(group="each", rule=Rule("each")), **options)


@pytest.mark.long
@cases(heads=[(3, 2, 256, 700), (8, 1, 64, 1100)], rule=[("each", 1.0), ("sum", 0.0)])
def test_decode_attend_score_over_many_blocks(how, heads, rule):
    """Slots that fill several blocks, one of them with nothing in it; the oldest of equal scores goes, in whatever
    block it lies.
    """
    (kv_heads, group, dim, slots), (over, weight) = heads, rule
    rng = np.random.default_rng(slots)
    batch = 2
    query, keys, values, _ = inputs(rng, batch, kv_heads, group, slots, dim, 1, "float32")
    positions = np.tile(rng.permutation(slots), (batch, kv_heads, 1))
    positions[0, :, 512:] = -1
    hollow = jnp.asarray(np.where(positions < 0, np.nan, 1.0)[..., None], jnp.float32)
    key, value = (jnp.asarray(rng.normal(size=(batch, kv_heads, dim)), jnp.float32) for _ in range(2))
    position = np.array([slots, slots + 3], np.int32)
    slot = np.array([[600], [300]], np.int32).repeat(kv_heads, axis=1)
    held = np.array([513, slots])
    hollowed = (jnp.nan_to_num(x) * hollow for x in (keys, values))
    got = decode_api.decode_attend_score(
        Token(query[:, :, 0], key, value, jnp.asarray(position)),
        Held(*hollowed, jnp.asarray(positions, jnp.int32)),
        jnp.asarray(slot),
        Judge(jnp.asarray(held, jnp.int32), jnp.full(batch, 2, jnp.int32), weight, 0.0, Rule(over), "mean"),
        scale=dim**-0.5, **how,
    )  # fmt: skip
    for b, h in np.ndindex(batch, kv_heads):
        k, v, p = (np.array(x[b, h], np.float64) for x in (keys, values, positions))
        k[slot[b, h]], v[slot[b, h]], p[slot[b, h]] = key[b, h], value[b, h], position[b]
        hidden = p[:, None] < 0
        assert np.array_equal(np.asarray(got.keys[b, h], np.float64), np.where(hidden, np.nan, np.nan_to_num(k)), True)
        assert np.array_equal(
            np.asarray(got.values[b, h], np.float64), np.where(hidden, np.nan, np.nan_to_num(v)), True
        )
        some = slice(h * group, (h + 1) * group)
        q, k, v = np.asarray(query[b, some, 0], np.float64), np.nan_to_num(k), np.nan_to_num(v)
        weights, _ = softmax_weights(q, k, np.full(group, position[b]), p, dim**-0.5, None, None)
        output = weights @ np.where(hidden, 0.0, v)
        np.testing.assert_allclose(np.asarray(got.output[b, some], np.float64), output, atol=2e-5)
        np.testing.assert_allclose(np.asarray(got.mass[b, h], np.float64), weights.mean(axis=0), atol=1e-5)
    for b in range(batch):
        mass = np.asarray(got.mass[b])
        expected = next_slots(
            position[b], np.asarray(got.positions[b]), mass, weight, 0.0, held[b], 2, None, Rule(over)
        )
        assert np.array_equal(np.asarray(got.next_slot[b]), expected)


@pytest.mark.some(1)
@cases(
    ways=PREFILL,
    dtype=list(DTYPES),
    heads=[(3, 3, 64), (2, 4, 128), (2, 1, 96), (1, 16, 80), (1, 2, 256)],
    slots=[(37, 5, None, None), (600, 40, 50, 20.0), (20, 1030, None, None)],
)
def test_prefill_attend(how, dtype, heads, slots):
    (kv_heads, group, dim), (slots, length, window, cap) = heads, slots
    rng = np.random.default_rng(length)
    query, keys, values, positions = inputs(rng, 2, kv_heads, group, slots, dim, length, dtype)
    at = np.sort(rng.integers(-1, slots * 2, (2, length)), axis=1).astype(np.int32)
    options = dict(scale=dim**-0.5, window=window, softcap=cap)
    got = attend_api.prefill_attend(
        query,
        keys,
        values,
        jnp.asarray(at),
        jnp.asarray(positions, jnp.int32),
        **how,
        **options,
    )
    for b, head in np.ndindex(2, kv_heads * group):
        k, v = (np.asarray(x[b, head // group], np.float64) for x in (keys, values))
        p = positions[b, head // group]
        weights, _ = softmax_weights(np.asarray(query[b, head], np.float64), k, at[b], p, dim**-0.5, window, cap)
        expected = weights @ np.where(p[:, None] >= 0, v, 0.0)
        np.testing.assert_allclose(np.asarray(got[b, head], np.float64), expected, atol=DTYPES[dtype])


@pytest.mark.some(1)
@cases(
    ways=PREFILL,
    dtype=list(DTYPES),
    heads=[(2, 3, 64), (1, 4, 128)],
    slots=[(37, 5, None, None), (600, 40, 50, 20.0), (20, 600, None, None)],
)
def test_prefill_with_a_bias_and_the_log_sum_exp(how, dtype, heads, slots):
    """What entries that stand for several tokens, and attention to something beside the slots, want of the prefill."""
    (kv_heads, group, dim), (slots, length, window, cap) = heads, slots
    rng = np.random.default_rng(length)
    query, keys, values, positions = inputs(rng, 2, kv_heads, group, slots, dim, length, dtype)
    at = np.sort(rng.integers(-1, slots * 2, (2, length)), axis=1).astype(np.int32)
    bias = np.log(rng.integers(1, 9, positions.shape)).astype(np.float32)
    bias[:, :, 1] = -np.inf  # it stands for nothing
    bias[1, 0] = -np.inf  # nor does anything of this head
    bias = np.where(positions < 0, np.nan, bias)
    arrays, places = (query, keys), (jnp.asarray(at), jnp.asarray(positions, jnp.int32))
    options = dict(scale=dim**-0.5, window=window, softcap=cap, bias=jnp.asarray(bias), **how)
    out, lse = attend_api.prefill_attend(*arrays, values, *places, with_lse=True, **options)
    mass = mass_api.prefill_attend_mass(*arrays, *places, **options)
    known = mass_api.prefill_attend_mass(*arrays, *places, lse=lse, **options)
    np.testing.assert_allclose(known, mass, atol=1e-5, rtol=1e-4)
    assert lse.dtype == jnp.float32 and lse.shape == out.shape[:3]
    for b, head in np.ndindex(2, kv_heads * group):
        h = head // group
        q, k, v = (np.asarray(x, np.float64) for x in (query[b, head], keys[b, h], values[b, h]))
        p, added = positions[b, h], np.where(positions[b, h] < 0, 0.0, bias[b, h])
        weights, total = softmax_weights(q, k, at[b], p, dim**-0.5, window, cap, added)
        expected = weights @ np.where(p[:, None] >= 0, v, 0.0)
        np.testing.assert_allclose(np.asarray(out[b, head], np.float64), expected, atol=DTYPES[dtype])
        np.testing.assert_allclose(np.asarray(lse[b, head], np.float64), total[:, 0], atol=1e-3 + DTYPES[dtype] / 10)
        np.testing.assert_allclose(np.asarray(mass[b, head], np.float64), weights.sum(0), atol=2e-5, rtol=1e-3)


@pytest.mark.some(1)
@cases(ways=PREFILL, dtype=list(DTYPES), sizes=[(600, 200, None), (1100, 300, 250)])
def test_prefill_attend_when_the_own_keys_are_last(how, dtype, sizes):
    """Saying so changes nothing, and neither does a second run."""
    slots, length, window = sizes
    rng = np.random.default_rng(length)
    query, keys, values, _ = inputs(rng, 2, 2, 3, slots, 64, length, dtype)
    at = np.tile(np.arange(slots - length, slots, dtype=np.int32), (2, 1))
    at[0, :20] = -1  # padding on the left
    positions = np.tile(np.arange(slots, dtype=np.int32), (2, 2, 1))
    positions[:, :, ::3] = np.where(positions[:, :, ::3] < slots - length, -1, positions[:, :, ::3])
    positions[:, :, slots - length :] = at[:, None]
    hollow = jnp.asarray(np.where(positions < 0, np.nan, 1.0)[..., None], dtype)
    arrays = (query, jnp.nan_to_num(keys) * hollow, jnp.nan_to_num(values) * hollow, jnp.asarray(at))
    options = dict(scale=0.125, window=window, **how)
    runs = [
        attend_api.prefill_attend(*arrays, jnp.asarray(positions), own_keys_last=own, **options)
        for own in (True, True, False)
    ]
    first, second, without = (np.asarray(run, np.float64) for run in runs)
    assert np.array_equal(first, second)
    np.testing.assert_allclose(first, without, atol=DTYPES[dtype])
    assert np.all(first[0, :, :20] == 0) and np.all(np.isfinite(first))


@pytest.mark.some(5)
@cases(
    ways=PREFILL,
    reduce=["sum", "mean", "max"],
    heads=[
        (2, 3, 64, "float32"), (1, 16, 80, "bfloat16"), (2, 1, 96, "float32"), (2, 4, 128, "bfloat16"),
        (1, 2, 256, "bfloat16"),
    ],
    slots=[(37, 5, None, None), (600, 40, 50, 20.0), (20, 600, None, None)],
)  # fmt: skip
def test_prefill_attend_mass(how, reduce, heads, slots):
    (kv_heads, group, dim, dtype), (slots, length, window, cap) = heads, slots
    rng = np.random.default_rng(length)
    query, keys, _, positions = inputs(rng, 2, kv_heads, group, slots, dim, length, dtype)
    at = np.sort(rng.integers(-1, slots * 2, (2, length)), axis=1).astype(np.int32)
    options = dict(scale=dim**-0.5, window=window, softcap=cap, reduce=reduce, **how)
    call = jax.jit(lambda *arrays: mass_api.prefill_attend_mass(*arrays, **options))
    got, again = (call(query, keys, jnp.asarray(at), jnp.asarray(positions, jnp.int32)) for _ in range(2))
    assert got.dtype == jnp.float32 and np.array_equal(got, again)
    for b, head in np.ndindex(2, kv_heads * group):
        k = np.asarray(keys[b, head // group], np.float64)
        p = positions[b, head // group]
        weights, _ = softmax_weights(np.asarray(query[b, head], np.float64), k, at[b], p, dim**-0.5, window, cap)
        count = max((at[b] >= 0).sum(), 1)
        expected = {"sum": weights.sum(0), "mean": weights.sum(0) / count, "max": weights.max(0)}[reduce]
        np.testing.assert_allclose(np.asarray(got[b, head], np.float64), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.some(2)
@cases(ways=PREFILL, reduce=["sum", "max"], heads=[(2, 3, 64, "float32")], slots=[(37, 5, None, None)])
def test_queries_that_weigh_more_than_others(how, reduce, heads, slots):
    (kv_heads, group, dim, dtype), (slots, length, window, cap) = heads, slots
    rng = np.random.default_rng(length)
    query, keys, _, positions = inputs(rng, 2, kv_heads, group, slots, dim, length, dtype)
    at = np.sort(rng.integers(-1, slots * 2, (2, length)), axis=1).astype(np.int32)
    weigh = rng.uniform(0.1, 10.0, (2, length)).astype(np.float32)
    options = dict(scale=dim**-0.5, window=window, softcap=cap, reduce=reduce, weights=jnp.asarray(weigh), **how)
    got = mass_api.prefill_attend_mass(query, keys, jnp.asarray(at), jnp.asarray(positions, jnp.int32), **options)
    for b, head in np.ndindex(2, kv_heads * group):
        k, q = np.asarray(keys[b, head // group], np.float64), np.asarray(query[b, head], np.float64)
        weights, _ = softmax_weights(q, k, at[b], positions[b, head // group], dim**-0.5, window, cap)
        weights = weights * weigh[b][:, None]
        expected = weights.sum(0) if reduce == "sum" else weights.max(0)
        np.testing.assert_allclose(np.asarray(got[b, head], np.float64), expected, atol=2e-5, rtol=1e-4)


def test_attention_and_mass_share_their_softmax():
    """XLA computes the weights once where a program asks for both, or prefill under sums pays for attention twice."""
    arrays = (
        jnp.ones((1, 4, 256, 64)),
        jnp.ones((1, 2, 300, 64)),
        jnp.arange(44, 300)[None],
        jnp.zeros((1, 2, 300), int),
    )
    options = dict(scale=0.125, own_keys_last=True, implementation="reference")

    def both(query, keys, at, positions):
        mass = mass_api.prefill_attend_mass(query, keys, at, positions, **options)
        return attend_api.prefill_attend(query, keys, keys, at, positions, **options), mass

    alone = jax.jit(lambda query, keys, *at: attend_api.prefill_attend(query, keys, keys, *at, **options))
    dots = [jax.jit(call).lower(*arrays).compile().as_text().count(" dot(") for call in (alone, both)]
    assert dots[0] == dots[1] > 0


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_tiles_of_queries_come_one_after_the_other(reduce):
    """Attention and mass of eight tiles need the memory of three: XLA would hold all eight, or one of them for each
    layer until the mass is asked for."""
    shapes = (1, 6, 1024, 32), (1, 2, 2048, 32)
    query, keys = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    at, positions = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1024), (1, 2, 2048)))
    options = {"scale": 0.1, "implementation": "reference"}

    def both(query, keys, at, positions):
        mass = mass_api.prefill_attend_mass(query, keys, at, positions, reduce=reduce, **options)
        return attend_api.prefill_attend(query, keys, keys, at, positions, **options), mass

    temporary = jax.jit(both).lower(query, keys, at, positions).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 4 * 6 * 128 * 2048 * 4  # 6 query heads, 128 queries and 2048 keys in float32


@pytest.mark.some(1)
@cases(
    kind=["equal", "ragged"],
    choice=[(None, False), (Rule("each", sinks=2), True)],
    shape=[(3, 2, 64, "float32", 300), (2, 4, 128, "bfloat16", 1100)],
)
def test_without_the_mass_the_rest_is_the_same(how, kind, choice, shape):
    """Also of rows that have finished, and of blocks in which a row holds nothing, whatever lies there."""
    (rule, biased), (kv_heads, group, dim, dtype, slots) = choice, shape
    rng, batch = np.random.default_rng(slots), 4
    query, keys, values, _ = inputs(rng, batch, kv_heads, group, slots, dim, 1, dtype)
    positions = np.tile(rng.permutation(slots), (batch, kv_heads, 1))
    positions[1, :, : slots // 2] = -1
    positions[2, :, 40:] = -1
    hollow = np.where(positions < 0, np.nan, 1.0)[..., None]
    hollow[0] = np.nan  # the row has finished: nothing of it is read
    keys, values = (jnp.nan_to_num(x) * jnp.asarray(hollow, dtype) for x in (keys, values))
    key, value = (jnp.asarray(rng.normal(size=(batch, kv_heads, dim)), dtype) for _ in range(2))
    position = jnp.array([-1, slots, slots, slots + 7], jnp.int32)
    first = np.arange(kv_heads) * (slots if kind == "ragged" else 0)
    slot = jnp.asarray(first + rng.integers(0, slots, (batch, kv_heads)), jnp.int32)
    bias = jnp.asarray(rng.normal(size=positions.shape), jnp.float32)
    few = jnp.array([slots, slots // 2 + 1, 41, slots], jnp.int32), jnp.full(batch, 2, jnp.int32)
    flat = (lambda x: x.reshape(batch, -1, *x.shape[3:])) if kind == "ragged" else (lambda x: x)
    judge = Judge(*few, 0.0, flat(bias) if biased else 0.0, rule)
    token = Token(query[:, :, 0], key, value, position)
    held = Held(flat(keys), flat(values), flat(jnp.asarray(positions, jnp.int32)))
    call = decode_api.decode_attend_score
    if kind == "ragged":
        offsets = jnp.tile(jnp.arange(kv_heads + 1, dtype=jnp.int32) * slots, (batch, 1))
        held, call = Segments(*held[:3], offsets), ragged_api.ragged_decode
    run = jax.jit(functools.partial(call, scale=0.1), static_argnames=("implementation", "with_mass", "interpret"))
    ours = run(token, held, slot, judge, with_mass=False, **how)
    theirs = run(token, held, slot, judge, implementation="reference")
    assert ours.mass is None
    assert np.array_equal(ours.next_slot, theirs.next_slot)
    np.testing.assert_allclose(ours.lse, theirs.lse, atol=1e-4, rtol=1e-4)
    mine, its = (np.asarray(x.output[1:], np.float64) for x in (ours, theirs))
    np.testing.assert_allclose(mine, its, atol=DTYPES[dtype])
    if how["implementation"] == "mosaic_tpu":
        assert np.all(np.asarray(ours.output[0], np.float64) == 0)
    for x, y in zip(ours[3:6], theirs[3:6], strict=True):
        assert np.array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64), equal_nan=True)
    weighing = judge._replace(rule=Rule("each"), weight=1.0)
    with pytest.raises(ValueError, match="weighs the mass"):
        call(token, held, slot, weighing, scale=0.1, with_mass=False)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("kind", "window", "group", "at_once"),
    [
        ("equal", None, "sum", True), ("ragged", None, "max", True), ("equal", 500, "max", True),
        ("equal", None, "each", True), ("ragged", None, "sum", True), ("equal", None, "sum", False),
        ("ragged", None, "mean", False), ("equal", 600, "each", False),
    ],
)  # fmt: skip
def test_a_last_row_is_looked_back_at_whole(kind, window, group, at_once, monkeypatch):
    """At once, or where the chip has no room for that block by block: either is the reference, with weights and biases
    of each slot, over blocks of which some have nothing, and where one of two cores has a row less."""
    monkeypatch.setattr(tpu_decode, "BLOCK_BYTES", 2**17)
    if not at_once:
        monkeypatch.setattr(tpu_plan, "line_bytes", lambda plan, _: 2**40 * plan.at_once)
    rng, batch, kv_heads, slots, dim = np.random.default_rng(7), 5, 2, 700, 64
    query, keys, values, _ = inputs(rng, batch, kv_heads, 4, slots, dim, 1, "float32")
    positions = np.stack([rng.permutation(slots) for _ in range(batch * kv_heads)]).reshape(batch, kv_heads, slots)
    positions[1, :, 150:] = -1
    hollow = np.where(positions < 0, np.nan, 1.0)[..., None]
    keys, values = (jnp.asarray(np.nan_to_num(x) * hollow, jnp.float32) for x in (keys, values))
    key, value = (jnp.asarray(rng.normal(size=(batch, kv_heads, dim)), jnp.float32) for _ in range(2))
    first = np.arange(kv_heads) * (slots if kind == "ragged" else 0)
    slot = jnp.asarray(first + rng.integers(0, slots, (batch, kv_heads)), jnp.int32)
    flat = (lambda x: x.reshape(batch, -1, *x.shape[3:])) if kind == "ragged" else (lambda x: x)
    weight, bias = (flat(jnp.asarray(rng.random(positions.shape), jnp.float32)) for _ in range(2))
    rule = None if group == "each" else Rule("each", sinks=3)
    judge = Judge(
        *jnp.full((2, batch), slots, jnp.int32), *((1.0, 0.0) if rule is None else (weight, bias)), rule, group
    )
    judge = judge._replace(recents=jnp.full(batch, 5, jnp.int32))
    token = Token(query[:, :, 0], key, value, jnp.asarray([slots, slots + 1, -1, slots, slots + 90], jnp.int32))
    held: Any = Held(flat(keys), flat(values), flat(jnp.asarray(positions, jnp.int32)))
    call = decode_api.decode_attend_score
    if kind == "ragged":
        offsets = jnp.tile(jnp.arange(kv_heads + 1, dtype=jnp.int32) * slots, (batch, 1))
        held, call = Segments(*held[:3], offsets), ragged_api.ragged_decode
    run = functools.partial(call, token, held, slot, judge, scale=0.1, **({} if window is None else {"window": window}))
    ours, theirs = run(implementation="mosaic_tpu", **HOW["mosaic_tpu"]), run(implementation="reference")
    assert np.array_equal(ours.next_slot, theirs.next_slot)
    np.testing.assert_allclose(ours.output, theirs.output, atol=2e-5)
    np.testing.assert_allclose(ours.mass, theirs.mass, atol=1e-5)
    for x, y in zip(ours[3:6], theirs[3:6], strict=True):
        assert np.array_equal(x, y, equal_nan=True)


def test_a_name_that_is_not_there():
    with pytest.raises(
        ValueError, match="implementation 'warp' is not one of mosaic_tpu, mosaic_gpu_sm90, numba_cpu, reference"
    ):
        decode_api.OPERATION("warp")


def test_a_named_kernel_that_does_not_take_the_arguments():
    with pytest.raises(NotImplementedError, match=r"mosaic_tpu: codes .*: leave implementation= out, or take 'refer"):
        whole = jnp.ones((1, 1, 64), jnp.int16)
        product_api.block_product(jnp.ones((1, 1)), whole, whole, implementation="mosaic_tpu")


def test_without_numba(monkeypatch, caplog):
    """The reference runs, and one line says what would be faster."""

    found_module = importlib.import_module

    def absent(module, *more):
        if module.endswith("numba_cpu"):
            raise ModuleNotFoundError("No module named 'numba'", name="numba")
        return found_module(module, *more)

    monkeypatch.setattr("importlib.import_module", absent)
    found = choices(heads=4, kv_heads=2, head_dim=64, slots=64, dtype="float32", platform="cpu")["ragged_decode"]
    assert found.implementation == "reference"
    assert found.reasons == ["numba_cpu does not run here: No module named 'numba'; pip install 'jaxkv[cpu]'"]
    queries, at = jnp.ones((1, 2, 3, 16)), jnp.arange(3, dtype=jnp.int32)[None]
    for _ in range(2):
        attend_api.prefill_attend(queries, queries, queries, at, jnp.stack([at, at], 1), scale=0.25)
    (line,) = (line for line in caplog.records if line.name == "pallas_kernels")
    assert line.levelname == "WARNING" and line.getMessage().endswith("'numba'; pip install 'jaxkv[cpu]')")


def test_a_refusal_is_logged_once(monkeypatch, caplog):
    """Where a device has a kernel that does not take the arguments, one line says which, and why."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    keys, at = jnp.ones((1, 1, 3, 8)), jnp.arange(3, dtype=jnp.int32)[None, None]
    token = Token(jnp.ones((1, 2, 8)), keys[:, :, 0], keys[:, :, 0], at[0, :, 2])
    judge = Judge(limits=at[0, :, 2], recents=at[0, :, 0], rule=Rule("each"))
    attend = functools.partial(decode_api.decode_attend_score, token, Held(keys, keys, at), at[:, :, 0], judge)
    outs = [attend(scale=0.125) for _ in range(2)]
    assert np.array_equal(outs[0].output, outs[1].output)
    lines = [line.getMessage() for line in caplog.records if line.name == "pallas_kernels"]
    assert len(lines) == 1 and caplog.records[0].levelname == "WARNING"
    assert lines[0].startswith("decode_attend_score runs as reference (mosaic_tpu does not run here: 3 slots"), lines


def test_what_runs_where():
    """The first kernel for a platform that takes a layer's shape, and the reasons of those that do not."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "slots": 64}
    for dtype, platform, decode, pool in (
        ("float32", "tpu", "mosaic_tpu", "mosaic_tpu"),
        ("float16", "tpu", "reference", "reference"),  # the chip has no float16
        ("bfloat16", "rocm", "reference", "reference"),
        ("bfloat16", "cpu", "reference", "reference"),
    ):
        found = choices(**shape, dtype=dtype, platform=platform)
        assert (found["decode_attend_score"].implementation, found["ragged_decode"].implementation) == (decode, pool)
        others = {found[name].implementation for name in ("prefill_attend", "prefill_attend_mass")}
        assert others == {"numba_cpu" if platform == "cpu" else decode}
    assert found["ragged_decode"].reasons == ["numba_cpu does not run here: bfloat16: float32"]


@pytest.mark.parametrize(
    "batch, parts, blocks, window", [(1, 1, 1, None), (5, 1, 4, 20), (5, 2, 3, None), (7, 3, 5, 20)]
)
def test_a_block_stays_until_another_is_due(batch, parts, blocks, window):
    """Blocks are due in the order of the steps; before the first of all that one is there. Every block of every row is
    looked back at exactly once."""
    rng, size = np.random.default_rng(blocks), 128
    for filled, at_once in ((0.0, True), (0.003, False), (0.5, True)):
        slots = int(rng.integers((blocks - 1) * size + 1, blocks * size + 1))
        walk = Walk(slots, size, blocks, batch, parts, at_once=at_once)
        places = np.where(rng.random((batch, 2, slots)) < filled, rng.integers(0, 50, (batch, 2, slots)), -1)
        position = np.where(rng.random(batch) < 0.3, -1, 50)
        table = walk.table(jnp.asarray(places, jnp.int32), jnp.asarray(position, jnp.int32), window)
        seen = (places >= 0) & (position >= 0)[:, None, None] & (places > (-1 if window is None else 50 - window))
        cuts = range(size, slots, size)
        due = np.stack([part.any((1, 2)) for part in np.split(seen, cuts, axis=2)], axis=1)
        hollow = np.stack([(part < 0).any((1, 2)) for part in np.split(places, cuts, axis=2)], axis=1)
        hollow[:, -1] |= slots < walk.width
        steps = [(int(row), int(block)) for row, block in np.argwhere(due)]
        looked = []
        for part, step in itertools.product(*map(range, walk.steps)):
            row, block = map(int, walk.place(step))
            if walk.before(part, row)[1]:
                looked += [
                    (int(walk.before(part, row)[0]), each) for each in range(*map(int, walk.looked_at(row, block)))
                ]
            own = min(part * walk.rows + row, min((part + 1) * walk.rows, batch))
            is_own = row < walk.rows and own < batch
            before = [step for step in steps if step <= ((own, block) if is_own else (own, -1))]
            entry = table[walk.at(part, row), block]
            there = int(walk.row_of(entry)), int(walk.block_of(entry))
            assert there == (before[-1] if before else steps[0] if steps else (0, 0))
            if is_own and due[own, block]:
                assert walk.fetched(entry, own, block) and int(entry & 1) == hollow[own, block]
        assert sorted(looked) == list(itertools.product(range(batch), range(blocks)))
