"""Summaries of what left, against plain NumPy: RazorAttention's compensation token, a mean weighted by its number."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ordered import heads_of

import jaxkv
from jaxkv.attend import Ask, Facts, LayerIn, decode_layer, overwritten, prefill_layer
from jaxkv.models import AttentionSpec
from jaxkv.models.rope import Rope, rotate
from jaxkv.policies import catalogue
from jaxkv.sharding import ONE_DEVICE
from jaxkv.store import empty as empty_store
from jaxkv.store import summary as summaries
from jaxkv.store.summary import Summary
from pallas_kernels.partial import Partial, merge
from pallas_kernels.prefill_attend import api as attend_api

FAMILY = "smollm2"  # three KV heads of three query heads each
SMALL = {"sinks": 2, "window": 4, "decode_recent": 4}
EXACT = {"float32": 2e-6, "bfloat16": 2e-2}


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)


def capped(logits, cap):
    return logits if cap is None else cap * np.tanh(logits / cap)


# ---- a summary in the softmax


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("queries", [(), (5,)], ids=["decode", "prefill"])
def test_a_summary_counts_as_often_as_it_stands_for(dtype, cap, queries):
    """As a softmax in which it stands n times, however large its logit; and nothing changes where n is 0."""
    rng = np.random.default_rng(0)
    batch, heads, group, dim, slots = 2, 3, 2, 8, 6
    normal = lambda *shape: np.asarray(jnp.asarray(rng.standard_normal(shape), dtype), np.float64)  # noqa: E731
    query = 4 * normal(batch, heads * group, *queries, dim)
    keys, values = normal(batch, heads, slots, dim), normal(batch, heads, slots, dim)
    mean_key, mean_value = normal(batch, heads, dim), normal(batch, heads, dim)
    mean_key[0, 1] *= 40  # far above every slot's logit where no cap bounds it, or far below
    count = np.array([[3, 1, 0], [0, 500, 2]])
    want, output = np.zeros(query.shape), np.zeros(query.shape)
    lse = np.zeros(query.shape[:-1])
    for at in np.ndindex(query.shape[:-1]):
        b, h = at[0], at[1] // group
        logits = capped(keys[b, h] @ query[at] * 0.5, cap)
        top = logits.max()
        lse[at] = top + np.log(np.exp(logits - top).sum())
        output[at] = np.exp(logits - lse[at]) @ values[b, h]
        n = count[b, h]
        logits = np.append(logits, np.repeat(capped(mean_key[b, h] @ query[at] * 0.5, cap), n))
        weights = np.exp(logits - logits.max())
        all_values = np.concatenate([values[b, h], np.repeat(mean_value[b, h][None], n, axis=0)])
        want[at] = weights @ all_values / weights.sum()
    given = jnp.asarray(output, dtype)
    summary = Summary(*(jnp.asarray(x, jnp.float32) for x in (mean_key, mean_value, count)))

    def joined(lse, position):
        looks = jnp.asarray(query, dtype) if queries else jnp.asarray(query, dtype)[:, :, None]
        at = jnp.full((batch, looks.shape[2]), position, jnp.int32)
        part = summary.attend(looks, at, scale=0.5, softcap=cap)
        return merge(Partial(given, jnp.asarray(lse, jnp.float32)), part if queries else part.now()).output

    got = joined(lse, 700)
    assert got.dtype == given.dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=10 * EXACT[dtype])
    none = np.repeat(count == 0, group, axis=1)
    assert np.array_equal(np.asarray(got)[none], np.asarray(given)[none]), "bit for bit"
    assert not np.allclose(np.asarray(got, np.float64)[~none], output[~none], atol=0.05)
    assert not np.asarray(joined(np.full(lse.shape, -np.inf), -1)).any(), "padding, which sees nothing"
    assert np.array_equal(np.asarray(joined(lse, -1)), np.asarray(given)), "nor does it see the summary"


@pytest.mark.long
@pytest.mark.parametrize("cap", [None, 5.0])
def test_prefill_attends_to_it_as_to_so_many_keys(cap):
    """Several tiles of queries; padding stays 0. The kernel for Hopper, which has no log-sum-exp, says so."""
    rng = np.random.default_rng(1)
    batch, heads, group, dim, length, old = 2, 2, 2, 8, 300, 20
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    query, keys, values = (
        normal(batch, heads * group, length, dim),
        *(normal(batch, heads, old + length, dim) for _ in range(2)),
    )
    mean_key, mean_value, times = normal(batch, heads, dim), normal(batch, heads, dim), np.array([[7, 0], [1, 30]])
    at = np.tile(np.arange(50, 50 + length, dtype=np.int32), (batch, 1))
    at[0, :30] = -1
    key_at = np.concatenate([np.tile(np.arange(30, 50), (batch, 1)), at], axis=1)
    key_at = jnp.asarray(np.repeat(key_at[:, None], heads, axis=1), jnp.int32)
    options = {"scale": 0.4, "softcap": cap, "own_keys_last": True}
    both = (query, keys, values, jnp.asarray(at), key_at)

    def joined(count):
        summary = Summary(mean_key, mean_value, jnp.asarray(count, jnp.float32))
        slots = Partial(*attend_api.prefill_attend(*both, with_lse=True, **options))
        return merge(slots, summary.attend(query, jnp.asarray(at), scale=0.4, softcap=cap)).output

    got = joined(times)
    more = int(times.max())
    here = np.arange(more) < times[..., None]
    front = lambda one, x: jnp.concatenate([jnp.repeat(one[:, :, None], more, axis=2), x], axis=2)  # noqa: E731
    longer = jnp.concatenate([jnp.asarray(np.where(here, 0, -1), jnp.int32), key_at], axis=2)
    want = attend_api.prefill_attend(
        query, front(mean_key, keys), front(mean_value, values), jnp.asarray(at), longer, **options
    )
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert (np.asarray(got)[0, :, :30] == 0).all()
    without = attend_api.prefill_attend(*both, **options)
    same = joined(np.zeros_like(times))
    assert np.array_equal(np.asarray(same), np.asarray(without)) and not np.allclose(got, without, atol=0.05)
    with pytest.raises(NotImplementedError, match="log-sum-exp"):
        attend_api.prefill_attend(*both, implementation="mosaic_gpu_sm90", with_lse=True, **options)


def test_the_mean_of_many_parts():
    """In parts of any size, some empty; an entry counts as often as it stands for, and what stays and what lies in
    empty slots is not read."""
    rng = np.random.default_rng(2)
    summary, sums, count = summaries.empty(2, 3, 4), np.zeros((2, 2, 3, 4)), np.zeros((2, 3))
    add = jax.jit(Summary.added)
    for size, share in ((5, 0.5), (64, 0.9), (1, 1.0), (7, 0.0), (40, 0.2)):
        both = 100 + rng.standard_normal((2, 2, 3, size, 4))
        times = np.where(rng.random((2, 3, size)) < share, rng.integers(1, 5, (2, 3, size)), 0)
        times[0, 2] = 0
        dropped = times > 0
        sums += (times[..., None] * both).sum(axis=3)
        count += times.sum(axis=-1)
        keys, values = jnp.asarray(np.where(dropped[..., None], both, np.nan), jnp.float32)
        before, summary = summary, add(summary, keys, values, jnp.asarray(times, jnp.float32))
        still = ~dropped.any(axis=-1)
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(summary), strict=True):
            assert np.array_equal(np.asarray(old)[still], np.asarray(new)[still])
    np.testing.assert_array_equal(summary.count, count)
    means = sums / np.maximum(count, 1)[..., None]
    np.testing.assert_allclose(np.stack([summary.keys, summary.values]), means, rtol=1e-6)
    assert count[0, 2] == 0 and (np.asarray(summary.keys)[0, 2] == 0).all()


# ---- the paper's rule in NumPy, on one layer

SPEC = AttentionSpec(num_heads=6, num_kv_heads=3, head_dim=8, scale=0.5, window=None, softcap=6.0, rope=Rope(100.0))


def razor(query, keys, values, held, seen, position, local):
    """(n exp(q . k) v + sum exp(q . k_i) v_i) / (n exp(q . k) + sum exp(q . k_i)): k, v the means of the dropped.

    Those of the first `seen` tokens that are not `held` have been dropped; the later ones up to `position` are there.
    What a head that is not local drops is gone.
    """
    here = sorted({*held, *range(seen, position + 1)})
    dropped = sorted(set(range(seen)) - set(held)) if local else []
    there = np.exp(capped(keys[here] @ query * SPEC.scale, SPEC.softcap))
    above, below = there @ values[here], there.sum()
    if dropped:
        weight = len(dropped) * np.exp(capped(keys[dropped].mean(0) @ query * SPEC.scale, SPEC.softcap))
        above, below = above + weight * values[dropped].mean(0), below + weight
    return above / below


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(40,), (16, 12, 12)], ids=str)
def test_local_heads_attend_by_the_papers_rule(sizes):
    """The queries of a prompt in one block or three, and of tokens that overwrite; one row is padded and ends early."""
    rng, lengths, steps, ends = np.random.default_rng(3), (40, 27), 14, 9
    heads, group, dim, total = SPEC.num_kv_heads, 2, SPEC.head_dim, 40 + steps
    normal = lambda count: rng.standard_normal((2, total, count, dim)).astype(np.float32)  # noqa: E731
    query, key, value = normal(heads * group), normal(heads) + 0.5, normal(heads) + 1.0
    at = np.array([np.arange(total) - (40 - length) for length in lengths], np.int32)
    at = np.maximum(at, -1)
    at[1, 40 + ends :] = -1
    policy = jaxkv.policy("razorattention", budget=12, **SMALL)
    learned = {"repeats": jnp.arange(heads * group) == 3}  # one query head, and so its group
    local = np.asarray(policy.allocate.local(learned, heads))
    assert local.sum() == 2
    turned = [np.asarray(rotate(jnp.asarray(x), jnp.asarray(at)[:, :, None], SPEC.rope)) for x in (query, key)]

    def check(output, before, tokens):
        """The outputs of some tokens, where each head holds what `before` says of the first so many tokens."""
        for row, token, head in np.ndindex(2, output.shape[1], heads * group):
            position, of = at[row, tokens][token], head // group
            if position < 0:
                continue
            real = slice(40 - lengths[row], None)
            q, k, v = turned[0][row, tokens][token, head], turned[1][row, real, of], value[row, real, of]
            want = razor(q, k, v, *before[row][of], position, local[of])
            np.testing.assert_allclose(output[row, token, head], want, atol=2e-5, err_msg=f"{row} {position} {head}")

    def held_by(layer, seen):
        """Per row and head the positions held, and how many tokens the row has seen."""
        rows = [(heads_of(layer, row), int(seen[row])) for row in range(2)]
        return [[(line[line >= 0].tolist(), count) for line in lines] for lines, count in rows]

    beside = policy.beside(2, heads, dim, jnp.float32)
    layer = empty_store(policy.allocate.store, 2, heads, dim, jnp.float32, policy.stats, policy.store, beside)
    limits, facts = jnp.full((2,), 12, jnp.int32), Facts(learned=learned)
    call = (ONE_DEVICE, None, SPEC)
    before, start = [[([], 0)] * heads] * 2, 0
    for size in sizes:
        tokens = slice(start, start + size)
        now = jnp.asarray(np.maximum(at[:, tokens][:, -1] + 1, 0))
        args = (jnp.asarray(x[:, tokens]) for x in (query, key, value))
        given = LayerIn(layer, limits, facts, Ask(slots=12))
        output, left = prefill_layer(policy, jnp.asarray(at[:, tokens]), now, *call, *args, given)
        check(np.asarray(output), before, tokens)
        layer = left.cache
        before = held_by(layer, now)
        start += size
    assert sum(len(held) for held, _ in before[0]) == 12 * heads

    @jax.jit
    def step(position, query, key, value, given):
        (after,) = overwritten(policy, (given.cache,), (given,), (SPEC,), position)
        return decode_layer(policy, position, *call, query, key, value, dataclasses.replace(given, cache=after))

    for token in range(40, total):
        tokens, position = slice(token, token + 1), jnp.asarray(at[:, token])
        old, args = layer, (jnp.asarray(x[:, tokens]) for x in (query, key, value))
        output, left = step(position, *args, LayerIn(layer, limits, facts))
        layer = left.cache
        after = held_by(layer, at[:, token] + 1)
        check(np.asarray(output), after, tokens)
        for row, head in np.ndindex(2, heads):
            held, seen = after[row][head]
            assert not (local[head] and seen) or sorted(held) == [0, 1, *range(seen + 2 - len(held), seen)]
        if at[1, token] < 0:
            for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(layer), strict=True):
                assert np.array_equal(np.asarray(a)[1], np.asarray(b)[1]), "a row that has finished stays as it is"


# ---- whole runs


def dropped_means(params, tokens, held, local):
    """Mean key and value in the first layer, whose entries are the same under every policy, and the count."""
    layer = jaxkv.prefill(params, tokens).layers[0]
    means = []
    for head, positions in enumerate(held):
        gone = sorted(set(range(len(tokens))) - set(positions.tolist())) if local[head] else []
        both = [np.asarray(x)[0, head, -len(tokens) :][gone] for x in (layer.keys, layer.values)]
        means.append([*(x.mean(0) if gone else np.zeros(x.shape[-1]) for x in both), len(gone)])
    return [np.stack(each) for each in zip(*means, strict=True)]


def assert_summed(params, cache, rows):
    """The first layer's summary is the mean of all that its local heads no longer hold; of every layer the count."""
    share = cache.policy.allocate if cache.policy.evicts else catalogue()["razorattention"].allocate
    learned = share.prepared(params.learned, params.config.num_kv_heads)["repeats"]
    for index, layer in enumerate(cache.layers):
        local = share.local({"repeats": learned[index]}, layer.heads)
        gone = np.asarray(cache.lengths)[:, None] - np.asarray(layer.held())
        np.testing.assert_array_equal(layer.beside["summary"].count, np.where(local, gone, 0))
    layer = cache.layers[0]
    summary = layer.beside["summary"]
    local = np.asarray(share.local({"repeats": learned[0]}, layer.heads))
    for row, tokens in enumerate(rows):
        assert len(tokens) == int(cache.lengths[row])
        wanted = dropped_means(params, tokens, heads_of(layer, row), local)
        for mine, want in zip((summary.keys, summary.values, summary.count), wanted, strict=True):
            np.testing.assert_allclose(np.asarray(mine)[row], want, atol=2e-5)
    assert (np.asarray(summary.count)[:, local] > 0).any()


@pytest.mark.long
@pytest.mark.parametrize("every", [1, pytest.param(4, marks=pytest.mark.slow)], ids=["overwritten", "cut"])
def test_the_summary_is_of_all_that_was_dropped(tiny, tmp_path, every):
    """After a prompt in blocks and decode, after a save, more text, and text under "full", which drops nothing."""
    params = tiny(FAMILY)
    policy = jaxkv.policy("razorattention", budget=16, block=20, **SMALL)
    policy = dataclasses.replace(policy, decode=dataclasses.replace(policy.decode, every=every))
    rows, options = [ids(50), ids(9, 1)], {"stop_tokens": (), "max_new_tokens": 14}
    out = jaxkv.generate(params, rows, policy=policy, **options)
    rows = [np.append(row, new).astype(np.int32) for row, new in zip(rows, out.tokens, strict=True)]
    assert_summed(params, out.cache, [row[:-1] for row in rows])  # the last token has not run yet
    jaxkv.save(out.cache, tmp_path / "cache")
    restored = jaxkv.restore(tmp_path / "cache", params)
    for a, b in zip(jax.tree.leaves(out.cache), jax.tree.leaves(restored), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    more = [ids(30, 2), ids(3, 3)]
    for after in (policy, catalogue()["full"]):
        on = jaxkv.generate(params, more, cache=restored, policy=after, **options)
        both = zip(rows, more, on.tokens, strict=True)
        assert_summed(params, on.cache, [np.concatenate([a, b, c[:-1]]).astype(np.int32) for a, b, c in both])


@pytest.mark.long
def test_only_what_summarises_has_a_summary(tiny):
    """Elsewhere the cache's tree is what it was; and the token costs one key and value in float32 per head."""
    params = tiny(FAMILY)
    policy = jaxkv.policy("razorattention", budget=16, **SMALL)
    cache = jaxkv.prefill(params, ids(60), policy=policy)
    dropping = jaxkv.policy("razorattention", budget=16, evicted={"kind": "drop"}, **SMALL)
    plain = jaxkv.prefill(params, ids(60), policy=dropping)
    duo = jaxkv.prefill(params, ids(60), policy=jaxkv.policy("duo", budget=16, sinks=2, recent=4))
    assert not any(layer.beside for other in (plain, duo) for layer in other.layers)
    pairs = params.config.num_layers * params.config.num_kv_heads
    assert cache.kv_bytes - plain.kv_bytes == 4 * pairs * 2 * params.config.head_dim
    assert cache.nbytes - plain.nbytes == 4 * pairs * (2 * params.config.head_dim + 1)
    assert not any(phase.evicted.state for phase in jaxkv.policy("duo", budget=999).phases)
