"""The sampler whose settings are data draws what each row's own `Sampler` draws."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.sampling import RowSampler, Sampler, row_keys

SAMPLERS = [
    Sampler(),
    Sampler(temperature=1e-40),
    Sampler(repetition_penalty=1.3),
    Sampler(1.0),
    Sampler(0.7, top_k=5),
    Sampler(0.7, top_k=2**31 + 5),
    Sampler(1.3, top_p=0.6),
    Sampler(1.3, top_p=1.0),
    Sampler(0.9, min_p=0.1),
    Sampler(0.9, min_p=0.0),
    Sampler(1.1, top_k=20, top_p=0.8, min_p=0.02, repetition_penalty=0.8),
]


@pytest.fixture(scope="module")
def both():
    """`both(samplers, logits, seen, seed)`: the tokens that one program gives all rows, and each sampler its own."""
    drawn = jax.jit(lambda sampler, *rest: sampler.sample(*rest))
    alone = jax.jit(lambda sampler, *rest: sampler.sample(*rest), static_argnums=0)

    def draw(samplers, logits, seen, seed):
        keys = row_keys(seed, np.zeros(len(samplers), np.int32))
        at = jnp.arange(len(samplers), dtype=jnp.int32) + seed
        every = drawn(RowSampler.of(samplers), logits, seen, keys, at)
        own = [
            alone(sampler, *(x[n : n + 1] for x in (logits, seen, keys, at)))[0] for n, sampler in enumerate(samplers)
        ]
        return np.asarray(every).tolist(), np.asarray(own).tolist()

    return draw


@pytest.mark.long
@pytest.mark.parametrize("size", [7, 3001])
def test_rows_draw_as_alone(both, size):
    for seed, spread in itertools.product(range(6), (0.1, 5.0)):
        draw = np.random.default_rng(seed)
        logits = jnp.asarray(draw.normal(0, spread, (len(SAMPLERS), size)), jnp.float32)
        seen = jnp.asarray(draw.random((len(SAMPLERS), size)) < 0.3)
        every, own = both(SAMPLERS, logits, seen, seed)
        assert every == own


def test_equal_logits_go_to_the_first_and_filters_keep_all_of_them(both):
    logits = jnp.zeros((len(SAMPLERS), 9), jnp.float32)
    every, own = both(SAMPLERS, logits, jnp.zeros(logits.shape, bool), 3)
    assert every == own and every[0] == 0
