"""Memory is bounded for real: bytes of the compiled programs by prompt length, on two layers of SmolLM2's shape."""

import dataclasses
import math
import re

import pytest
from measured import measured

import jaxkv
from jaxkv.lowering import held, lower
from jaxkv.models import ModelConfig
from jaxkv.models.rope import Rope
from jaxkv.policies import catalogue

pytestmark = pytest.mark.usefixtures("unchecked")
BUDGET, BLOCK = 256, 512
EACH_WAY = ("streaming-llm", "h2o", "dapq-longflow", "adakv-h2o")  # through prefill and decode
UNSPARED = {"d2o": {"spare": 0, "spare_last": 0}, "knorm": {"spare": 0}}  # layers that are spared hold the text
BOUNDED = [
    pytest.param(name, marks=() if name in EACH_WAY else pytest.mark.slow)
    for name, policy in catalogue().items()
    if policy.evicts
]


def programs_of(config, policy, tokens):
    """Prefill, and decode after it."""
    made_up = measured(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    learned = {name: made_up[name] for name in policy.learns}
    return lower(config, policy, batch=1, tokens=tokens, room=0 if policy.decode else 64, steps=4, learned=learned)


def bytes_needed(programs):
    """Without the weights: temporary + argument bytes of prefill, and of decode after it."""
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


@pytest.mark.some(1)
@pytest.mark.parametrize("name", BOUNDED)
def test_programs_do_not_depend_on_the_prompt(config, name):
    """A prompt four times as long runs the same two programs, so in the same bytes."""
    policy = jaxkv.policy(name, budget=BUDGET, block=BLOCK, **UNSPARED.get(name, {}))
    short, long = (programs_of(config, policy, tokens) for tokens in (2048, 8192))
    assert short.prefill.as_text() == long.prefill.as_text()
    assert short.decode.as_text() == long.decode.as_text()


@pytest.mark.long
def test_the_bytes_are_those_of_the_budget(config):
    """And not of the prompt, for which the full cache's programs need more and more."""
    sizes = {
        (name, tokens): bytes_needed(programs_of(config, jaxkv.policy(name, block=BLOCK, **size), tokens))
        for name, size in (("full", {}), ("h2o", {"budget": BUDGET}))
        for tokens in ((2048, 8192) if name == "full" else (8192,))
    }
    (short_prefill, short_decode), (long_prefill, long_decode) = sizes["full", 2048], sizes["full", 8192]
    assert long_prefill > 2 * short_prefill and long_decode > 2 * short_decode
    prefill, decode = sizes["h2o", 8192]
    assert prefill < short_prefill and decode < short_decode / 2


@pytest.mark.long
def test_layers_that_share_are_cut_as_they_come(config):
    """While a prompt of one block runs, the model holds its budget and the candidates of one layer, not of each."""
    layers, tokens = 12, 1024
    config = dataclasses.replace(config, num_layers=layers, layer_types=("full",) * layers)
    policy = jaxkv.policy("cake", budget=BUDGET, block=tokens)
    at_once = type("AtOnce", (type(policy.allocate),), {"cascades": False})()
    needed = []
    for share in (policy.allocate, at_once):
        programs = lower(config, dataclasses.replace(policy, allocate=share), batch=1, tokens=tokens, scan_layers=True)
        memory = programs.prefill.compile().memory_analysis()
        needed.append(memory.temp_size_in_bytes)
    candidates = 2 * config.num_kv_heads * tokens * config.head_dim * 4  # bytes of a layer's
    assert needed[1] - needed[0] > (layers - 4) * candidates


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {}) for name in ("h2o", "adakv-h2o", "global-h2o", "zsmerge", "weightedkv", "lacache")),
        ("keydiff", {"every": 64}),
        ("h2o", {"evicted": {"kind": "merge"}}),
        ("d2o", UNSPARED["d2o"]),
    ],
)
def test_a_decode_step_copies_no_keys(config, name, options):
    """Slots are overwritten in place: the program has no copy of keys or values, of a layer or of the model's line;
    nor where what they hold is merged first.

    A step on pools calls the CPU's kernel once per layer.
    """
    pytest.importorskip("numba")
    policy = jaxkv.policy(name, budget=BUDGET, block=BLOCK, **options)
    text = lower(config, policy, batch=2, tokens=2048, steps=4).decode.compile().as_text()
    parts = text.split("\n\n")  # the step's, which has the weights, not that of a cut or of borders that move
    step = max(parts, key=lambda part: part.count("get-tuple-element("))
    copied = {tuple(map(int, shape.split(","))) for shape in re.findall(r"= f32\[([\d,]+)\]\S* copy\(", step)}
    keys = 2 * config.num_kv_heads * BUDGET * config.head_dim  # numbers in one layer's keys
    assert all(math.prod(shape) < keys for shape in copied), copied
    assert len(re.findall(r"custom-call\(.*jaxkv_decode", step)) == (config.num_layers if policy.allocate.pooled else 0)


@pytest.mark.parametrize("name", ["mustafar", "kivi"])
def test_codes_are_decoded_a_layer_at_a_time(name):
    """Of what no kernel reads while decoding, and of any code between two blocks of a prompt: XLA would decode all
    layers before the first, which is the memory that codes save."""
    tokens, heads, dim, phase = 1024, 2, 64, "decode" if name == "mustafar" else "prefill"

    def temporary(layers: int) -> int:
        config = ModelConfig(
            "llama", 64, 128, 256, layers, 2 * heads, heads, dim, 2048, Rope(1e4), 1e-6, ("full",) * layers
        )
        programs = lower(config, jaxkv.policy(name, block=256), batch=1, tokens=tokens)
        return getattr(programs, phase).compile().memory_analysis().temp_size_in_bytes

    decoded = 2 * tokens * heads * dim * 4  # bytes of a layer's keys and values in float32
    assert temporary(6) - temporary(2) < 4 * decoded / 2
