"""SubGen: the newest tokens are attended to exactly, all others by an estimate from clusters and a sample."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ordered import heads_of

import jaxkv
from jaxkv.attend import Ask, Facts, LayerIn, decode_layer, overwritten, prefill_layer
from jaxkv.errors import BadValue
from jaxkv.models import AttentionSpec
from jaxkv.models.rope import Rope, rotate
from jaxkv.policies import Estimate
from jaxkv.policies.score import draws
from jaxkv.sharding.layout import ONE_DEVICE
from jaxkv.store import empty as empty_store
from jaxkv.store import sketch
from jaxkv.store.entries import Entries

HEADS, GROUP, DIM = 2, 2, 8
SPEC = AttentionSpec(HEADS * GROUP, HEADS, DIM, DIM**-0.5, None, None, Rope(100.0))
RULE = Estimate(clusters=4, members=3, sample=6, seed=5)
BUDGET = 8


class Sketch:
    """The paper's sketch of one head, built cut by cut in plain NumPy."""

    def __init__(self, head):
        self.head, self.lost, self.centres, self.cluster = head, [], [], {}

    def add(self, keys, values, gone):
        """Some more positions have left: clusters open farthest first, then each joins the nearest."""
        self.keys, self.values = keys, values
        while len(self.centres) < RULE.clusters and gone:
            gaps = [min([np.linalg.norm(keys[at] - keys[c]) for c in self.centres], default=np.inf) for at in gone]
            if max(gaps) <= RULE.radius:
                break
            self.centres.append(gone[int(np.argmax(gaps))])
        for at in gone:
            self.cluster[at] = int(np.argmin([np.linalg.norm(keys[at] - keys[c]) for c in self.centres]))
        self.lost += gone

    def parts(self, query):
        """Denominator and numerator of what has left, as estimated."""
        if not self.lost:
            return 0.0, 0.0
        at = jnp.asarray(np.broadcast_to(self.lost, (1, HEADS, len(self.lost))), jnp.int32)
        even = np.asarray(draws(at, RULE.seed, RULE.members))[0, self.head]
        u = np.asarray(draws(at, RULE.seed + RULE.members, RULE.sample), np.float64)[0, self.head]
        below = 0.0
        for cluster in range(len(self.centres)):
            own = [number for number, each in enumerate(self.lost) if self.cluster[each] == cluster]
            for draw in range(RULE.members):
                key = self.keys[self.lost[own[int(np.argmax(even[own, draw]))]]]
                below += len(own) / RULE.members * np.exp(key @ query * SPEC.scale)
        sizes = (self.values[self.lost] ** 2).sum(1)
        above = 0.0
        for draw in range(RULE.sample):
            best = int(np.argmax(np.log(u[:, draw]) / sizes))
            key, value = self.keys[self.lost[best]], self.values[self.lost[best]]
            above += sizes.sum() / (RULE.sample * sizes[best]) * np.exp(key @ query * SPEC.scale) * value
        return below, above


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(40,), (16, 12, 12)], ids=str)
def test_what_is_estimated(sizes):
    """A prompt in one block or three and 8 tokens that overwrite, of two rows, one of them padded: outputs by the
    paper's formulas, with the newest tokens exact."""
    rng, lengths, steps = np.random.default_rng(3), (40, 33), 8
    total = 40 + steps
    normal = lambda count: rng.standard_normal((2, total, count, DIM)).astype(np.float32)  # noqa: E731
    query, key, value = normal(HEADS * GROUP), normal(HEADS) + 0.5, normal(HEADS) + 1.0
    at = np.array([np.maximum(np.arange(total) - (40 - length), -1) for length in lengths], np.int32)
    policy = jaxkv.policy("subgen", budget=BUDGET, evicted=RULE)
    turned = [np.asarray(rotate(jnp.asarray(x), jnp.asarray(at)[:, :, None], SPEC.rope)) for x in (query, key)]
    sketches = [[Sketch(head) for head in range(HEADS)] for _ in range(2)]

    def check(output, held, tokens):
        """Each output from what its head held before (positions), the tokens of its block up to it, and the sketch."""
        for row, token, head in np.ndindex(2, output.shape[1], HEADS * GROUP):
            position, of = at[row, tokens][token], head // GROUP
            if position < 0:
                continue
            real = slice(40 - lengths[row], None)
            q, k, v = turned[0][row, tokens][token, head], turned[1][row, real, of], value[row, real, of]
            first = max(at[row, tokens][0], 0)
            seen = [*held[row][of], *range(first, position + 1)]
            weights = np.exp(k[seen] @ q * SPEC.scale)
            below, above = sketches[row][of].parts(q)
            want = (weights @ v[seen] + above) / (weights.sum() + below)
            np.testing.assert_allclose(output[row, token, head], want, rtol=2e-4, atol=2e-4)

    def left(layer, before, seen):
        """What every head holds now; what it lacks of before and the tokens since goes into its sketch."""
        after = [heads_of(layer, row) for row in range(2)]
        after = [[sorted(line[line >= 0].tolist()) for line in row] for row in after]
        for row, head in np.ndindex(2, HEADS):
            real = slice(40 - lengths[row], None)
            gone = sorted(set(before[row][head]) | set(seen[row]))
            gone = [each for each in gone if each not in after[row][head]]
            sketches[row][head].add(turned[1][row, real, head], value[row, real, head], gone)
            assert after[row][head] == list(range(seen[row][-1] + 1))[-BUDGET:]
        return after

    beside = policy.beside(2, HEADS, DIM, jnp.float32)
    layer = empty_store("slots", 2, HEADS, DIM, jnp.float32, policy.stats, policy.store, beside)
    limits, call = jnp.full((2,), BUDGET, jnp.int32), (ONE_DEVICE, None, SPEC)
    held, start = [[[]] * HEADS] * 2, 0
    for size in sizes:
        tokens = slice(start, start + size)
        args = (jnp.asarray(x[:, tokens]) for x in (query, key, value))
        given = LayerIn(layer, limits, Facts(), Ask(slots=BUDGET))
        now = jnp.asarray(np.maximum(at[:, tokens][:, -1] + 1, 0))
        output, out = prefill_layer(policy, jnp.asarray(at[:, tokens]), now, *call, *args, given)
        check(np.asarray(output), held, tokens)
        layer, start = out.cache, start + size
        held = left(layer, held, [[p for p in at[row, tokens] if p >= 0] for row in range(2)])

    @jax.jit
    def step(position, query, key, value, given):
        (after,) = overwritten(policy, (given.cache,), (given,), (SPEC,), position)
        return decode_layer(policy, position, *call, query, key, value, dataclasses.replace(given, cache=after))

    for token in range(40, total):
        tokens = slice(token, token + 1)
        args = (jnp.asarray(x[:, tokens]) for x in (query, key, value))
        output, out = step(jnp.asarray(at[:, token]), *args, LayerIn(layer, limits, Facts()))
        layer = out.cache
        held = left(layer, held, [at[row, tokens].tolist() for row in range(2)])
        for row in range(2):  # the token overwrites before it attends
            held_before = [[p for p in head if p != at[row, token]] for head in held[row]]
            check_row(np.asarray(output), row, held_before, at, token, lengths, turned, value, sketches)


def check_row(output, row, held, at, token, lengths, turned, value, sketches):
    """A decode step's outputs of a row: the token itself, what else is held, and the sketch with what it pushed out."""
    real = slice(40 - lengths[row], None)
    for head in range(HEADS * GROUP):
        of, position = head // GROUP, at[row, token]
        q, k, v = turned[0][row, token, head], turned[1][row, real, of], value[row, real, of]
        seen = [*held[of], position]
        weights = np.exp(k[seen] @ q * SPEC.scale)
        below, above = sketches[row][of].parts(q)
        want = (weights @ v[seen] + above) / (weights.sum() + below)
        np.testing.assert_allclose(output[row, 0, head], want, rtol=2e-4, atol=2e-4)


def entries(rng, many):
    keys, values = (rng.standard_normal((1, 1, many, DIM)).astype(np.float32) for _ in range(2))
    return keys, values, jnp.arange(many, dtype=jnp.int32)[None, None]


def sketched(rule, keys, values, at, cuts=1):
    state = rule.begin(1, 1, DIM, jnp.float32)
    for part in np.array_split(np.arange(at.shape[-1]), cuts):
        lost = Entries(jnp.asarray(keys[:, :, part]), jnp.asarray(values[:, :, part]), at[:, :, part], {})
        state = rule.absorb(state, None, lost, None)[1]
    return state


@pytest.mark.long
def test_estimates_are_right_on_average():
    """Over 300 seeds numerator and denominator come near to the sums over all entries; one sketch alone does not."""
    rng = np.random.default_rng(0)
    keys, values, at = entries(rng, 30)
    query = rng.standard_normal((1, 1, 1, DIM)).astype(np.float32)
    weights = np.exp(keys[0, 0] @ query[0, 0, 0] * SPEC.scale)
    below, above = [], []
    at_once = {"scale": SPEC.scale, "softcap": None}
    one = jax.jit(lambda state: state.attend(jnp.asarray(query), jnp.zeros((1, 1), jnp.int32), **at_once))
    for seed in range(300):
        part = one(sketched(dataclasses.replace(RULE, seed=1000 * seed), keys, values, at))
        below.append(np.exp(np.asarray(part.lse)[0, 0, 0]))
        above.append(np.asarray(part.output)[0, 0, 0] * below[-1])
    want = weights @ values[0, 0]
    assert np.std(below) > 0.01 * weights.sum()
    error = np.std(above, axis=0) / np.sqrt(len(above))
    np.testing.assert_allclose(np.mean(below), weights.sum(), atol=4 * np.std(below) / np.sqrt(len(below)))
    assert (np.abs(np.mean(above, axis=0) - want) < 4 * error).all()


@pytest.mark.long
def test_cuts_change_no_sample():
    """The sample is that of the text, in however many cuts it left; the clusters hold all of it."""
    keys, values, at = entries(np.random.default_rng(1), 24)
    one, three = (sketched(RULE, keys, values, at, cuts) for cuts in (1, 3))
    for name in ("keys", "values", "draws", "mass"):
        np.testing.assert_allclose(getattr(one, name), getattr(three, name), rtol=1e-6)
    assert np.asarray(one.counts).sum() == np.asarray(three.counts).sum() == 24
    wide = sketched(dataclasses.replace(RULE, radius=1e3), keys, values, at)
    assert np.asarray(wide.counts)[0, 0].tolist() == [24, 0, 0, 0]


def test_nothing_has_left():
    """A sketch of nothing takes no part."""
    query, at = jnp.ones((1, 1, 1, DIM)), jnp.zeros((1, 1), jnp.int32)
    part = sketch.empty(1, 1, 2, 2, 3, DIM).attend(query, at, scale=1.0, softcap=None)
    assert np.asarray(part.lse)[0, 0, 0] == -np.inf and not np.asarray(part.output).any()


@pytest.mark.parametrize("options", [{"clusters": 0}, {"members": 0}, {"sample": 0}, {"radius": -1.0}])
def test_refusals(options):
    with pytest.raises(BadValue, match=next(iter(options))):
        jaxkv.policy("subgen", budget=16, **options)
