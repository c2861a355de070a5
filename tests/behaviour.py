"""What every policy keeps and generates on two small models: one run, as `record_behaviour.py` stores it.

The runs are made so that rounding decides nothing: no token comes twice while decoding (equal keys tie but for
rounding), nor in the tiny model's prompts; and of several prompts those are taken on which results agree.
"""

import dataclasses
import functools
from pathlib import Path

import numpy as np
from archives import arrays
from measured import calibrated
from ordered import heads_of
from small import SMALL

import jaxkv
from jaxkv.policies import catalogue
from jaxkv.policies.catalogue import named

GOLDENS = Path(__file__).parent / "goldens"
STORED = GOLDENS / "behaviour"
STEPS = 40  # decode steps, each of which runs a token
CHUNK = 8  # of them in one compiled scan, so that shorter runs need no other
TRIES = 8  # seeds of prompts
SEEN_ONCE = 4  # from this seed on no token comes twice in prompts of real text either
SAMPLING = {"stop_tokens": (), "repetition_penalty": 1e6}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a model's policies run: rows of these lengths, under `budget` unless `options` say otherwise."""

    lengths: tuple[int, ...]
    blocks: tuple[int, ...]
    budget: int
    options: dict[str, dict]


SETTINGS = {
    "tiny": Setting((45, 3, 30), (20, 2048), 16, SMALL),
    # published options, but for policies that protect more than the budget
    "smollm2": Setting(
        (300, 120),
        (128, 2048),
        128,
        {
            "duo": {"sinks": 16, "recent": 32},
            **{name: {"window": 16} for name in ("scope", "scope-adaptive", "scope-discontinuous")},
        },
    ),
}
CASES = [(model, name, block) for model in SETTINGS for name in sorted(catalogue()) for block in SETTINGS[model].blocks]


@functools.cache
def loaded(model: str):
    """The tiny random Llama 3 with grouped heads and a made-up calibration, or SmolLM2's first four layers, where what
    does not come with it is made up."""
    if model == "tiny":
        return calibrated(jaxkv.load(GOLDENS / "tiny" / "llama3"))
    import jax.numpy as jnp

    from benchmarks.family_cost import first_layers

    params = first_layers(jaxkv.load("smollm2-135m", dtype=jnp.float32), 4)
    made_up = calibrated(params).learned
    return dataclasses.replace(params, learned={**made_up, **params.learned})


def policy(model: str, name: str, block: int):
    """The named policy as it is recorded."""
    setting = SETTINGS[model]
    size = {"budget": setting.budget} if named(name).evicts else {}
    return jaxkv.policy(name, **{**size, "block": block, **setting.options.get(name, {})})


def prompts(model: str, seed: int) -> list[np.ndarray]:
    """The rows that a seed gives."""
    lengths = SETTINGS[model].lengths
    if model == "tiny":
        size = loaded(model).config.vocab_size
        return [
            np.random.default_rng((seed, row)).permutation(size)[:length].astype(np.int32)
            for row, length in enumerate(lengths)
        ]
    text = _prose()
    starts = np.random.default_rng(seed).integers(0, len(text), len(lengths))
    turned = [np.roll(text, -start) for start in starts.tolist()]
    if seed >= SEEN_ONCE:
        turned = [row[np.sort(np.unique(row, return_index=True)[1])] for row in turned]
    return [row[:length] for row, length in zip(turned, lengths, strict=True)]


@functools.cache
def _prose() -> np.ndarray:
    from jaxkv.evaluation.texts import prose

    return np.array(loaded("smollm2").tokenizer(prose())["input_ids"], np.int32)


def generated(params, rows, chosen, steps=STEPS, **options):
    """A run of so many decode steps behind the prompts' first token; going on from a cache, of so many tokens."""
    tokens = steps + (rows is not None)
    return jaxkv.generate(params, rows, policy=chosen, max_new_tokens=tokens, **SAMPLING, **options)


def held(cache) -> list[np.ndarray]:
    """The positions that each head holds, sorted, by layer, row and head."""
    heads = [heads_of(layer, row) for layer in cache.views for row in range(cache.batch)]
    return [np.sort(head[head >= 0]) for row in heads for head in row]


def observed(params, rows, chosen) -> dict[str, np.ndarray]:
    """What the run of a case leaves."""
    return seen(jaxkv.prefill(params, rows, policy=chosen, room=STEPS + 1), generated(params, rows, chosen))


def seen(first, out) -> dict[str, np.ndarray]:
    """Of the cache after prefill and the generation: `tokens [B, STEPS + 1]`; and of both caches, the number of entries
    that each head holds, `counts [2, L * B * Hk]`, their positions `held`, and `bytes [2]` of keys and values.
    """
    each = [held(first), held(out.cache)]
    return {
        "tokens": out.tokens.astype(np.int32),
        "counts": np.array([[len(head) for head in heads] for heads in each], np.int16),
        "held": np.concatenate([head for heads in each for head in heads]).astype(np.int16),
        "bytes": np.array([first.kv_bytes, out.cache.kv_bytes], np.int64),
    }


def same(one: dict, other: dict) -> bool:
    """Whether two runs agree."""
    return all(np.array_equal(one[key], other[key]) for key in one)


@functools.cache
def stored(model: str) -> dict[str, np.ndarray]:
    """All that is recorded of a model, by `<policy>/<block>/<what>`."""
    file = STORED / f"{model}.npz"
    if not file.exists():
        return {}
    return arrays(file)


def record(model: str, name: str, block: int) -> tuple[int, dict[str, np.ndarray]] | None:
    """The seed of a case's prompts and what was seen; None where nothing is recorded."""
    front = f"{name}/{block}/"
    found = {key.removeprefix(front): value for key, value in stored(model).items() if key.startswith(front)}
    return (int(found.pop("seed")), found) if found else None


def assert_same(now: dict[str, np.ndarray], before: dict[str, np.ndarray]) -> None:
    """That a run gives what was recorded."""
    for index, when in enumerate(("after prefill", "after decoding")):
        assert now["counts"][index].tolist() == before["counts"][index].tolist(), f"entries per head {when}"
        ours, theirs = (_split(each)[index] for each in (now, before))
        for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert mine.tolist() == other.tolist(), f"positions {when}, head {place} of all layers and rows"
        assert now["bytes"][index] == before["bytes"][index], f"bytes of keys and values {when}"
    assert now["tokens"].tolist() == before["tokens"].tolist()


def _split(run: dict[str, np.ndarray]) -> list[list[np.ndarray]]:
    """The positions of each head, after prefill and after decoding."""
    heads = np.split(run["held"], np.cumsum(run["counts"].ravel().astype(int))[:-1])
    return [heads[: len(heads) // 2], heads[len(heads) // 2 :]]
