"""The decode operations through XLA's own GPU compiler, on a machine without a GPU: how many launches a step is.

What the Mosaic kernels are compiled to is not seen here: that happens where they run.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from gpu_chips import CHIPS, H100, compiled, device

from pallas_kernels.arguments import Held, Judge, Rule, Segments, Token
from pallas_kernels.choices import choices
from pallas_kernels.decode_attend_score.api import decode_attend_score
from pallas_kernels.ragged_decode.api import ragged_decode

NO_LAUNCH = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant"}


def launches(text: str) -> list[str]:
    """The operations of a compiled program that are launched, of its main computation."""
    main = re.search(r"^ENTRY .*?^}", text, re.M | re.S)[0]
    found = re.findall(r"^ +(?:ROOT )?%\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", main, re.M)
    return [name for name in found if name not in NO_LAUNCH]


def arguments(batch, kv_heads, group, slots, dim, dtype, rule, weighed, pooled):
    """A decode step's, as shapes; with an array of weights, of slots that heads have for themselves or share."""
    shape = jax.ShapeDtypeStruct
    new, row = shape((batch, kv_heads, dim), dtype), shape((batch,), jnp.int32)
    line = (batch, kv_heads * slots) if pooled else (batch, kv_heads, slots)
    cache = shape((*line, dim), dtype)
    at = shape(line, jnp.int32)
    held = Segments(cache, cache, at, shape((batch, kv_heads + 1), jnp.int32)) if pooled else Held(cache, cache, at)
    weight = shape(line, jnp.float32) if weighed else 1.0
    judge = Judge(row, row, weight, 0.0, None if rule is None else Rule(rule))
    token = Token(shape((batch, kv_heads * group, dim), dtype), new, new, row)
    return token, held, shape((batch, kv_heads), jnp.int32), judge


@pytest.mark.parametrize("rule", [None, "each", "sum", "mean"])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("with_mass", [False, True])
def test_few_launches_a_layer(rule, pooled, with_mass):
    """The attention, what joins and weighs, and what chooses; the last two are one where nothing is weighed. Nothing
    beside them, whatever the rule."""
    if pooled and rule in ("sum", "mean"):
        pytest.skip("in a pool every head chooses for itself")
    step = ragged_decode if pooled else decode_attend_score
    step = functools.partial(step, scale=0.1, with_mass=with_mass, implementation="mosaic_gpu_sm90")
    count = 3 if with_mass or rule in ("sum", "mean") else 2
    token, held, *others = arguments(2, 8, 4, 2048, 128, jnp.bfloat16, rule, rule is not None, pooled)
    if not with_mass:
        others[-1] = others[-1]._replace(weight=0.0)

    def apart(cache, rest, token, *others):  # offsets go nowhere, and so are not donated
        return step(token, type(held)(*cache, *rest), *others)

    text = compiled(H100, apart, held[:3], held[3:], token, *others, donate=(0,))
    assert launches(text) == ["custom-call"] * count
    assert text.count('custom_call_target="mosaic_gpu') == count


def test_the_reference_is_many_launches():
    """So that the count above can fail."""
    args = arguments(2, 8, 4, 2048, 128, jnp.bfloat16, "each", True, False)
    step = functools.partial(decode_attend_score, scale=0.1, implementation="reference")
    assert len(launches(compiled(H100, step, *args, donate=(1,)))) > 5


@pytest.mark.parametrize("name", CHIPS)
def test_what_runs_on_a_gpu(name):
    """Hopper has the kernels; others run the reference, which compiles for them, and it is said why."""
    dtype = jnp.float16 if name == "Tesla T4" else jnp.bfloat16
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "slots": 1024, "dtype": dtype}
    with jax.default_device(device(name)):
        found = choices(**shape, platform="gpu")
    for choice in found.values():
        if name == H100:
            assert choice.implementation == "mosaic_gpu_sm90"
        else:
            assert choice.implementation == "reference"
            assert any(name in reason and "Hopper" in reason for reason in choice.reasons)
    args = arguments(2, 8, 4, 1024, 128, dtype, "each", True, False)
    step = functools.partial(decode_attend_score, scale=0.1, implementation="reference")
    assert launches(compiled(name, step, *args, donate=(1,)))
