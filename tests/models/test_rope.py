"""Rotary positions."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.models.rope import Rope, frequencies, rotate

LLAMA3 = Rope(10000.0, "llama3", 8.0, 1.0, 4.0, 32)


def test_llama3_keeps_fast_slows_slow_and_blends_between():
    """Turns over 32 positions at D = 16: 5.09, 1.61, 0.51, ...; kept above 4, divided by 8 below 1."""
    speed = frequencies(LLAMA3, 16)
    plain = 10000.0 ** -(np.arange(8) / 8)
    turns = 32 * plain[1] / (2 * np.pi)
    share = (turns - 1.0) / 3.0
    np.testing.assert_allclose(speed[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(speed[1], plain[1] * (share + (1 - share) / 8), rtol=1e-6)
    np.testing.assert_allclose(speed[2:], plain[2:] / 8, rtol=1e-6)
    assert 0 < share < 1


def test_llama3_numbers_of_the_release():
    """Llama 3.1's own numbers: wave lengths under 2048 kept, over 8192 divided by 8."""
    speed = frequencies(Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192), 128)
    plain = 500000.0 ** -(np.arange(64) / 64)
    wave = 2 * np.pi / plain
    np.testing.assert_allclose(speed[wave < 2048], plain[wave < 2048], rtol=1e-6)
    np.testing.assert_allclose(speed[wave > 8192], plain[wave > 8192] / 8, rtol=1e-6)
    between = (wave > 2048) & (wave < 8192)
    assert np.all(speed[between] < plain[between]) and np.all(speed[between] > plain[between] / 8)


def test_linear_and_given_factors():
    plain = frequencies(Rope(10000.0), 8)
    np.testing.assert_allclose(frequencies(Rope(10000.0, "linear", 4.0), 8), plain / 4)
    factors = (1.0, 2.0, 3.0, 4.0)
    np.testing.assert_allclose(frequencies(Rope(10000.0, "factors", factors=factors), 8), plain / np.array(factors))


@settings(deadline=None)
@given(st.integers(0, 8000), st.integers(0, 8000), st.integers(0, 2**31 - 1))
def test_products_depend_on_distance_alone(first, shift, seed):
    query, key = np.random.default_rng(seed).normal(size=(2, 1, 16)).astype(np.float32)

    def product(query_at, key_at):
        turned = [rotate(jnp.asarray(x), jnp.array([at]), LLAMA3) for x, at in ((query, query_at), (key, key_at))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert product(first + 5, first) == pytest.approx(product(first + shift + 5, first + shift), abs=1e-2)


def test_halves_turn_together_and_positions_broadcast():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 8)), jnp.float32)
    positions = jnp.array([[0, 1, 2, 3], [7, 8, 9, -1]])
    turned = np.asarray(rotate(x, positions[:, None], Rope(10000.0)))
    angle = 2.0 * 10000.0 ** (-1 / 4)  # batch 0, token 2, pair 1
    a, b = float(x[0, 1, 2, 1]), float(x[0, 1, 2, 5])
    np.testing.assert_allclose(turned[0, 1, 2, 1], a * np.cos(angle) - b * np.sin(angle), rtol=1e-5)
    np.testing.assert_allclose(turned[0, 1, 2, 5], b * np.cos(angle) + a * np.sin(angle), rtol=1e-5)
    np.testing.assert_array_equal(turned[0, :, 0], x[0, :, 0])
    assert np.isfinite(turned).all()  # the empty slot too
    np.testing.assert_array_equal(turned[1], rotate(x[1], positions[1], Rope(10000.0)))


def test_low_precision_input_is_turned_in_float32():
    x = jnp.ones((1, 8), jnp.bfloat16)
    turned = rotate(x, jnp.array([7001]), Rope(10000.0))
    exact = rotate(x.astype(jnp.float32), jnp.array([7001]), Rope(10000.0))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned, exact.astype(jnp.bfloat16))


def test_angles_that_are_looked_up():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 40, 16)), jnp.float32)
    positions = jnp.asarray(rng.integers(-1, 40, (2, 3, 40)), jnp.int32)
    rope = Rope(10_000.0, scaling="llama3", factor=8.0)
    np.testing.assert_array_equal(rotate(x, positions, rope, below=40), rotate(x, positions, rope))
