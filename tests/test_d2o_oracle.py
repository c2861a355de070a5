"""D2O against its release: the NumPy form, and the policy's own steps and shares of the layers."""

import dataclasses

import d2o_numpy as d2o
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays

import jaxkv
from jaxkv.attend import LayerIn, decode_layer, overwritten
from jaxkv.models import AttentionSpec
from jaxkv.models.rope import Rope
from jaxkv.policies import Density
from jaxkv.policies.score import ScoreInputs
from jaxkv.sharding.layout import ONE_DEVICE
from jaxkv.store import Entries, Pool, Slots
from jaxkv.store.entries import flattened
from jaxkv.store.line import joined, opened, placed, written
from jaxkv.store.threshold import Threshold

CASES = ("two", "two-again", "four", "grouped")
UNIT = 16  # inputs are stored as multiples of 1 / 16


@pytest.fixture(scope="module")
def golden(goldens):
    return arrays(goldens / "policies" / "d2o.npz")


def close(mine, theirs):
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def inputs(golden, case):
    """Queries, keys and values [L, Hq, S, D]; values are those of layers 2 to L - 2."""
    arrays = [golden[f"{case}/{name}"] / UNIT for name in "qkv"]
    group = arrays[0].shape[1] // arrays[1].shape[1]
    return arrays[0], *(array.repeat(group, 1) for array in arrays[1:])


def same(cache, lost, context, golden, layer, number, which, row):
    """One cut: what the release held after it, and what it took away."""
    np.testing.assert_array_equal(cache.positions, golden[f"{layer}/positions"][number])
    close(cache.keys, golden[f"{layer}/keys"][number])
    close(cache.values, golden[f"{layer}/values"][number])
    close(cache.tau, golden[f"{layer}/tau"][number])
    assert np.isinf(cache.scores[:, :4]).all() and np.isfinite(cache.scores[:, 4:]).all()
    close(np.minimum(cache.scores, np.finfo(np.float32).max), golden[f"{layer}/scores"][number])
    close(context, golden[f"{layer}/context"][number])
    np.testing.assert_array_equal(lost.positions, golden[f"{layer}/{which}_evicted"][:, row])
    np.testing.assert_array_equal(lost.targets, golden[f"{layer}/{which}_targets"][:, row])
    np.testing.assert_array_equal(lost.merged, golden[f"{layer}/{which}_merged"][row])
    close(lost.similarity, golden[f"{layer}/{which}_similarity"][:, row])


@pytest.mark.parametrize("layer", (2, 3))
@pytest.mark.parametrize("case", CASES)
def test_cuts_and_merges(golden, case, layer):
    queries, keys, values = inputs(golden, case)
    queries, keys, values = queries[layer], keys[layer], values[layer - 2]
    name = f"{case}/layer{layer}"
    heavy, recent = golden[f"{name}/sizes"]
    alpha, beta = golden[f"{case}/average"]
    count = len(golden[f"{name}/tau"])
    start = keys.shape[1] - count
    tau = golden.get(f"{name}/tau_before")
    assert (tau is not None) == (case == "two-again")
    first = slice(start + 1)
    cache, lost, context = d2o.first_cut(
        queries[:, first], keys[:, first], values[:, first], heavy, recent, alpha=alpha, beta=beta, tau=tau
    )
    same(cache, lost, context, golden, name, 0, "cut", slice(None))
    for number in range(1, count):
        at = start + number
        new = queries[:, at], keys[:, at], values[:, at]
        cache, lost, context = d2o.step(cache, *new, at, heavy, recent, alpha=alpha, beta=beta)
        same(cache, lost, context, golden, name, number, "step", slice(number - 1, number))


@pytest.mark.parametrize("case", CASES)
def test_layer_sizes(golden, case):
    queries, keys, _ = inputs(golden, case)
    prompt = keys.shape[2] - len(golden[f"{case}/layer2/tau"])
    scores = [d2o.attention(q[:, :prompt], k[:, :prompt]).sum(1) for q, k in zip(queries, keys, strict=True)]
    spreads = np.array([d2o.spread(layer) for layer in scores])
    close(spreads, golden[f"{case}/spread"])
    ratios = d2o.layer_ratios(spreads, *golden[f"{case}/ratio"])
    close(ratios, golden[f"{case}/ratios"])
    for layer in range(d2o.EXEMPT_FIRST, len(keys) - d2o.EXEMPT_LAST):
        np.testing.assert_array_equal(d2o.sizes(ratios, prompt)[:, layer], golden[f"{case}/layer{layer}/sizes"])


def test_layer_ratios(golden):
    queries, keys, spreads = (golden[f"ratios/{name}"] for name in ("q", "k", "spread"))
    scores = [d2o.attention(q / UNIT, k / UNIT).sum(1) for q, k in zip(queries, keys, strict=True)]
    close([d2o.spread(layer) for layer in scores], spreads)
    for pair, ratios in zip(golden["ratios/pairs"], golden["ratios/ratios"], strict=True):
        close(d2o.layer_ratios(spreads, *pair), ratios)


# ---- the policy's own parts against the release


@pytest.mark.parametrize("case", ("two", "four", "grouped"))
def test_what_a_layer_says_of_itself(golden, case):
    """Density's profile is the release's, by query head; its shares are in proportion."""
    queries, keys, _ = inputs(golden, case)
    prompt = keys.shape[2] - len(golden[f"{case}/layer2/tau"])
    at = jnp.broadcast_to(jnp.arange(prompt), keys[:, :, :prompt].shape[:3])
    mass = [d2o.attention(q[:, :prompt], k[:, :prompt]).sum(1) for q, k in zip(queries, keys, strict=True)]
    part = Density(spare=2, spare_last=1)
    at = at[:, :: keys.shape[1] // golden[f"{case}/k"].shape[1]]  # of the KV heads
    seen = ScoreInputs(positions=at, by_query=jnp.asarray(np.stack(mass), jnp.float32))  # the layers as rows
    profiles = part.profile(seen, jnp.zeros(at.shape), 0)
    close(profiles[:, 0], golden[f"{case}/spread"])
    assert [part.shares(layer, len(keys)) for layer in range(len(keys))] == [False, False, True, True, False]
    each, held = jnp.array([prompt // 2]), jnp.full((len(keys), 1), prompt)
    quotas = np.asarray(part.quotas(profiles[:, None], each, each * 0, held, held))[:, 0]
    assert quotas.sum() == len(keys) * (prompt // 2)
    shares = golden[f"{case}/ratios"].sum(0) / golden[f"{case}/ratios"].sum()
    np.testing.assert_allclose(quotas, shares * quotas.sum(), atol=1)


def state_of(golden, name, number):
    """Entries and threshold that the release held after a cut, the sinks' scores as any other."""
    row = lambda x: jnp.asarray(golden[f"{name}/{x}"][number][None])  # noqa: E731
    stats = {"attention": jnp.where(row("scores") > 1e30, 0.0, row("scores"))}
    entries = Entries(row("keys"), row("values"), row("positions").astype(jnp.int32), stats)
    return entries, Threshold(jnp.asarray(golden[f"{name}/tau"][number])[None], jnp.array([True]))


def one_free(entries):
    """The entries with an empty slot behind those of every head."""
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0))[: x.ndim], constant_values=-1), entries)


def in_slots(golden, case):
    """The two layers that the release cuts, each in slots of its own."""
    made = []
    for layer in (2, 3):
        entries, tau = state_of(golden, f"{case}/layer{layer}", 0)
        wide = one_free(entries)
        free = jnp.full(wide.positions.shape[:2], wide.positions.shape[2] - 1, jnp.int32)
        made.append(Slots(wide, free, {"threshold": tau}))
    return tuple(made)


def in_a_line(golden, case):
    """The same in one line, whose layers have unequally many."""
    pools, kept, beside = [], [], []
    states = [state_of(golden, f"{case}/layer{layer}", 0) for layer in (2, 3)]
    heads, most = states[0][0].positions.shape[1], max(e.positions.shape[2] for e, _ in states)
    for entries, tau in states:
        more = most - entries.positions.shape[2]
        wide = jax.tree.map(
            lambda x, n=more: jnp.pad(x, ((0, 0), (0, 0), (0, n), (0, 0))[: x.ndim], constant_values=-1), entries
        )
        flat = flattened(wide)
        borders = jnp.arange(heads + 1, dtype=jnp.int32)[None] * most
        pools.append(Pool(flat, borders, borders[:, :-1]))
        kept.append(flat.positions >= 0)
        beside.append({"threshold": tau})
    kept = jnp.concatenate(kept, axis=1)
    room = jnp.sum(kept, axis=1, dtype=jnp.int32) + 2 * heads  # one free slot for every head
    line = joined(pools).arranged(kept, room, {}, int(room[0]))
    return placed(line.aimed(line.empty_slot(room, None)), beside, heads * (most + 1))


@pytest.mark.long
@pytest.mark.parametrize("lie", (in_slots, in_a_line), ids=("slots", "line"))
@pytest.mark.parametrize("case", ("two", "four", "grouped"))
def test_steps_as_released(golden, case, lie):
    """From the release's first cut on, step by step: what is held, merged and dropped, the threshold, the output.

    Query heads choose, as there: each has keys of its own here.
    """
    queries, keys, values = inputs(golden, case)
    count = len(golden[f"{case}/layer2/tau"])
    start, heads = keys.shape[2] - count, keys.shape[1]
    spec = AttentionSpec(heads, heads, 8, 8**-0.5, None, None, Rope(1e4, "factors", factors=(1e30,) * 4))
    alpha, beta = map(float, golden[f"{case}/average"])
    policies = [
        jaxkv.policy(
            "d2o", budget=64, alpha=alpha, beta=beta, sinks=4, recent=int(golden[f"{case}/layer{layer}/sizes"][1])
        )
        for layer in (2, 3)
    ]
    layers = lie(golden, case)
    limits = jnp.array([64], jnp.int32)  # the slots are the bound
    shape = lambda x, layer, at: jnp.asarray(x[layer][:, at][None, None], jnp.float32)  # noqa: E731
    for number in range(1, count + 1):
        position = jnp.array([start + number], jnp.int32)
        given = tuple(
            LayerIn(store, jnp.minimum(limits, store.slots) if store.equal else limits) for store in opened(layers)
        )
        layers = overwritten(policies[0], layers, given, (spec, spec), position)
        stores = opened(layers)
        for layer, store in zip((2, 3), stores, strict=True):
            if number == 1:
                continue  # the token goes to the empty slot
            name = f"{case}/layer{layer}"
            wide = store.by_head()
            leaves = store.seen_by_head(
                store.put(jnp.zeros(store.positions.shape, bool), jnp.ones((1, heads), bool), position >= 0)
            )
            at = np.asarray(jnp.where(wide.filled & ~store_wide(store, leaves), wide.positions, 2**30))[0]
            order = np.argsort(at, axis=-1)[:, : golden[f"{name}/positions"].shape[2]]
            np.testing.assert_array_equal(
                np.take_along_axis(at, order, -1), golden[f"{name}/positions"][number - 1], err_msg=f"{number}"
            )
            for field in ("keys", "values"):
                got = np.take_along_axis(np.asarray(getattr(wide, field))[0], order[..., None], 1)
                np.testing.assert_allclose(got, golden[f"{name}/{field}"][number - 1], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(
                store.beside["threshold"].tau[0], golden[f"{name}/tau"][number - 1], rtol=1e-4, atol=1e-6
            )
        if number == count:
            return
        outs = []
        for layer, policy, each, store in zip((2, 3), policies, given, stores, strict=True):
            new = [shape(x, at, start + number) for x, at in ((queries, layer), (keys, layer), (values, layer - 2))]
            context, out = decode_layer(
                policy, position, ONE_DEVICE, None, spec, *new, dataclasses.replace(each, cache=store)
            )
            np.testing.assert_allclose(
                context[0, 0], golden[f"{case}/layer{layer}/context"][number], rtol=1e-4, atol=1e-5
            )
            outs.append(out.cache)
        layers = written(layers, tuple(outs), position)


def store_wide(store, x):
    """What is known of every slot for each head, by KV head as in `by_head`."""
    return x if store.equal else store.compared(jnp.any(x, axis=1))
