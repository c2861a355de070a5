"""Memory is bounded for real: bytes of the compiled programs by prompt length, on two layers of SmolLM2's shape."""

import dataclasses
import math
import re

import pytest
from measured import measured

import jaxkv
from jaxkv.lowering import held, lower
from jaxkv.policies import catalogue

pytestmark = pytest.mark.usefixtures("unchecked")
BUDGET, BLOCK = 256, 512
EACH_WAY = ("streaming-llm", "h2o", "dapq-longflow", "adakv-h2o")  # through prefill and decode
BOUNDED = [
    pytest.param(name, marks=() if name in EACH_WAY else pytest.mark.slow)
    for name, policy in catalogue().items()
    if policy.evicts
]


def bytes_needed(config, policy, tokens):
    """Without the weights: temporary + argument bytes of prefill, and of decode after it."""
    made_up = measured(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    learned = {name: made_up[name] for name in policy.learns}
    programs = lower(
        config, policy, batch=1, tokens=tokens, room=0 if policy.decode else 64, steps=4, learned=learned
    )  # fmt: skip
    found = []
    for program in (programs.prefill, programs.decode):
        memory = program.compile().memory_analysis()
        found.append(memory.temp_size_in_bytes + memory.argument_size_in_bytes - held(programs.weights))
    return found


@pytest.fixture(scope="module")
def config(smollm2):
    return dataclasses.replace(
        smollm2.config, num_layers=2, layer_types=("full",) * 2, max_position=16384, vocab_size=1024
    )


@pytest.mark.parametrize("name", BOUNDED)
def test_bytes_do_not_depend_on_the_prompt(config, name):
    policy = jaxkv.policy(name, budget=BUDGET, block=BLOCK)
    (short_prefill, short_decode), (long_prefill, long_decode) = (bytes_needed(config, policy, n) for n in (2048, 8192))
    assert long_prefill <= 1.05 * short_prefill
    assert long_decode == short_decode


def test_the_full_cache_grows(config):
    """Else the test above would show nothing."""
    policy = jaxkv.policy("full", block=BLOCK)
    (short_prefill, short_decode), (long_prefill, long_decode) = (bytes_needed(config, policy, n) for n in (2048, 8192))
    assert long_prefill > 2 * short_prefill
    assert long_decode > 2 * short_decode


@pytest.mark.parametrize("name", ["h2o", "adakv-h2o", "global-h2o"])
def test_a_decode_step_copies_no_keys(config, name):
    """Slots are overwritten in place: the program has no copy of keys or values, of a layer or of the model's line.

    A step on pools calls the CPU's kernel once per layer.
    """
    pytest.importorskip("numba")
    policy = jaxkv.policy(name, budget=BUDGET, block=BLOCK)
    text = lower(config, policy, batch=2, tokens=2048, steps=4).decode.compile().as_text()
    parts = text.split("\n\n")  # the step's, not that of the loop in which borders move, once in 64 steps
    step = max(parts, key=lambda part: (part.count("custom-call("), len(part)))
    copied = {tuple(map(int, shape.split(","))) for shape in re.findall(r"= f32\[([\d,]+)\]\S* copy\(", step)}
    keys = 2 * config.num_kv_heads * BUDGET * config.head_dim  # numbers in one layer's keys
    assert all(math.prod(shape) < keys for shape in copied), copied
    assert len(re.findall(r"custom-call\(.*jaxkv_ragged_decode", step)) == (0 if name == "h2o" else config.num_layers)
