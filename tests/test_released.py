"""What is kept, against the authors' own programs (goldens of tests/oracle), on tiny random models."""

import functools
from pathlib import Path

import numpy as np
import pytest
from archives import arrays
from ordered import heads_of

import jaxkv

FAMILY = "llama2"

# policy -> the golden's file, and of each case budget and options
PROMPTS = {
    "snapkv": ("kvcache_factory", {"p60-b24": (24, {"window": 8}), "p90-b32-k7": (32, {"window": 8, "kernel": 7})}),
    "pyramidkv": (
        "kvcache_factory",
        {
            "p90-b28": (28, {"window": 8}),
            "p90-b48": (48, {"window": 8, "beta": 2.0}),
            "p60-b32": (32, {"window": 8}),
        },
    ),
    "h2o": ("kvcache_factory", {"p60-b16": (16, {"prefill_recent": 8}), "p90-b16": (16, {"prefill_recent": 8})}),
    "fastkv": (
        "fastkv",
        {
            "p60-b16-g24": (16, {"after": 1, "keep": 0.4}),
            "p90-b24-g27": (24, {"after": 0, "keep": 0.3}),
        },
    ),
    "compresskv": ("compresskv", {"p60-b24": (24, {}), "p90-b32": (32, {})}),
    "layer-compresskv": ("compresskv", {"p90-b24": (24, {"least": 10})}),
    # sinks, the share of every lag but the last that stays, and that with what comes behind it
    "lagkv": (
        "lagkv",
        {
            "p100-l16": (4 + 5 * 8 + 16 + 0, {"sinks": 4, "lag": 16}),
            "p84-l8": (2 + 9 * 2 + 8 + 2, {"sinks": 2, "lag": 8}),
        },
    ),
    "streaming-llm": ("kvcache_factory", {"p60-b12": (12, {})}),
}
CASES = [(name, case) for name, (_, cases) in PROMPTS.items() for case in cases]


@functools.cache
def stored(goldens: Path, file: str) -> dict[str, np.ndarray]:
    return arrays(goldens / "policies" / f"{file}.npz")


def golden(goldens, file, front):
    """The arrays of a case, without what stands in front of their names."""
    found = stored(goldens, file)
    return {key.removeprefix(f"{front}/"): array for key, array in found.items() if key.startswith(f"{front}/")}


def assert_kept(cache, case):
    """Every head of every layer holds what the release does."""
    layers = sum(key.endswith("/kept") for key in case)
    assert layers == len(cache.layers)
    for index, layer in enumerate(cache.layers):
        for head, (held, theirs) in enumerate(zip(heads_of(layer), case[f"layer{index}/kept"], strict=True)):
            want = theirs[theirs >= 0].tolist()
            assert np.sort(held[held >= 0]).tolist() == want, f"layer {index} head {head}"


@pytest.mark.parametrize(("name", "case"), CASES)
def test_what_a_prompt_leaves(goldens, tiny, name, case):
    file, cases = PROMPTS[name]
    budget, options = cases[case]
    theirs = golden(goldens, file, f"{name}/{case}")
    assert_kept(jaxkv.prefill(tiny(FAMILY), theirs["ids"], policy=jaxkv.policy(name, budget=budget, **options)), theirs)
