"""SCOPE's forms at decode: one layer against the release, and against its rule in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from archives import arrays
from ordered import heads_of

import jaxkv
from jaxkv.attend import Facts, LayerIn, decode_layer
from jaxkv.errors import BadValue
from jaxkv.models import AttentionSpec
from jaxkv.models.rope import Rope, rotate
from jaxkv.sharding.layout import ONE_DEVICE
from jaxkv.speculative.attend import check
from jaxkv.store.entries import Entries
from jaxkv.store.slots import Slots

HEADS, DIM = 3, 8
SPEC = AttentionSpec(HEADS, HEADS, DIM, scale=DIM**-0.5, window=None, softcap=None, rope=Rope(10_000.0))


@pytest.fixture(scope="module")
def golden(goldens):
    found = arrays(goldens / "policies" / "scope.npz")
    query, key, _ = found["inputs"].astype(np.float32) / found["sizes"][-1]
    at = jnp.arange(key.shape[1])
    query, turned = (np.asarray(rotate(jnp.asarray(x), at, SPEC.rope)) for x in (query, key))
    return found, query, turned


def ruled(golden, window, skipped):
    """What is held after each new token, `window(step)` of the new ones at most, but that for `skipped` tokens over it
    nothing goes. [steps, H, T]"""
    found, query, key = golden
    prompt, _, recent, *_ = found["sizes"].tolist()
    held, out = [list(range(prompt)) for _ in range(HEADS)], []
    for at in range(prompt, key.shape[1]):
        most = prompt + window(at - prompt)
        for head, mine in enumerate(held):
            mine.append(at)
            lost = len(mine) - most
            if lost > 0 and lost >= skipped:
                free = mine[prompt:-recent]
                weights = key[head, free] @ query[head, at]
                gone = {free[place] for place in np.argsort(weights)[:lost]}
                held[head] = [place for place in mine if place not in gone]
        out.append([np.isin(np.arange(key.shape[1]), mine) for mine in held])
    return np.array(out)


def ours(golden, policy):
    """What a layer holds after each new token, when what the next one overwrites is gone. [steps, H, T]"""
    found, _, key = golden
    prompt = int(found["sizes"][0])
    inputs = jnp.asarray(found["inputs"], jnp.float32) / found["sizes"][-1].astype(np.float32)
    limit = prompt + policy.prefill.reserve
    slots = limit + (policy.decode.every if policy.decode.every > 1 else 0)
    lies = lambda x: jnp.zeros((1, HEADS, slots, *x.shape[2:]), x.dtype).at[0, :, :prompt].set(x[:, :prompt])  # noqa: E731
    at = jnp.broadcast_to(jnp.where(jnp.arange(slots) < prompt, jnp.arange(slots), -1), (1, HEADS, slots))
    entries = Entries(lies(jnp.asarray(key)), lies(inputs[2]), at, {"prompt": (at >= 0).astype(jnp.float32)})
    store = Slots(entries, jnp.full((1, HEADS), prompt, jnp.int32))
    limits, out = jnp.array([limit], jnp.int32), []

    @jax.jit
    def step(store, position, token):
        args = (each[None, None] for each in token)
        return decode_layer(policy, position, ONE_DEVICE, None, SPEC, *args, LayerIn(store, limits, Facts()))[1].cache

    for token in range(prompt, key.shape[1]):
        store = step(store, jnp.array([token], jnp.int32), inputs[:, :, token])
        going = np.asarray(store.positions)[0, np.arange(HEADS), np.asarray(store.next_slot)[0]]
        rows = zip(heads_of(store), going, strict=True)
        out.append([np.isin(np.arange(key.shape[1]), head[(head >= 0) & (head != gone)]) for head, gone in rows])
    return np.array(out)


@pytest.mark.parametrize("form", ["slide", "adaptive", "discontinuous"])
def test_the_rule_is_the_releases(golden, form):
    """The NumPy form, with the release's own schedule where it cuts every few tokens."""
    found = golden[0]
    prompt, window, recent, delta, _ = found["sizes"].tolist()
    theirs = found[form]
    if form == "discontinuous":  # what is held after its cuts is what the window allows then
        cut = np.flatnonzero(np.diff(theirs[:, 0].sum(-1)) < 0) + 1
        assert (np.diff(cut) == delta + 1).all() and len(cut) > 4
        assert (theirs[cut].sum(-1) == (prompt + recent + cut // delta)[:, None]).all()
        return
    allowed = (lambda step: window) if form == "slide" else (lambda step: recent + step // delta)
    np.testing.assert_array_equal(ruled(golden, allowed, 1), theirs)


@pytest.mark.parametrize("form", [pytest.param("slide", marks=pytest.mark.long), "adaptive", "discontinuous"])
def test_a_layer_keeps_what_the_rule_says(golden, form):
    found = golden[0]
    _, window, recent, delta, _ = found["sizes"].tolist()
    name = {"slide": "scope", "adaptive": "scope-adaptive", "discontinuous": "scope-discontinuous"}[form]
    options = {"discontinuous": {"grow": delta, "every": delta}, "adaptive": {"grow": delta}}.get(form, {})
    reserve = window + (form != "discontinuous")  # and the token that is there before one goes
    policy = jaxkv.policy(name, budget=200, reserve=reserve, decode_recent=recent, **options)
    allowed = (lambda step: window) if form == "slide" else (lambda step: min(recent + step // delta, window))
    want = ruled(golden, allowed, delta if form == "discontinuous" else 1)
    np.testing.assert_array_equal(ours(golden, policy), want)


def test_what_cannot_grow():
    policy = jaxkv.policy("scope-adaptive", budget=200)
    with pytest.raises(BadValue, match="grow=0"):
        dataclasses.replace(policy, allocate=jaxkv.policies.Adaptive())
    with pytest.raises(BadValue, match="drafts do not know"):
        check(policy)
    with pytest.raises(BadValue, match="grow=-1"):
        jaxkv.policy("scope-adaptive", budget=200, grow=-1)
