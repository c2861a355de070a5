"""What is kept, against the authors' own programs (goldens of tests/oracle), on tiny random models."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
from archives import arrays
from measured import calibrated
from ordered import heads_of
from safetensors.numpy import load_file, save_file

import jaxkv
from jaxkv.policies import Lazy, catalogue

FAMILY = "llama2"
STEP = {"max_new_tokens": 1, "stop_tokens": ()}

MEAN = {"window": 8, "pool": "avg", "kernel": 5}  # the release's class alone

# policy -> the golden's file, and of each case budget and options
PROMPTS = {
    "snapkv": ("kvcache_factory", {"p60-b24": (24, {"window": 8}), "p90-b32-k7": (32, {"window": 8, "kernel": 7})}),
    "pyramidkv": (
        "kvcache_factory",
        {
            "p90-b28": (28, MEAN),
            "p90-b48": (48, {**MEAN, "beta": 2.0}),
            "p60-b32": (32, MEAN),
            "p60-b26-k3-max": (26, {"kernel": 3}),
        },
    ),
    "h2o": ("kvcache_factory", {"p60-b16": (16, {"prefill_recent": 8}), "p90-b16": (16, {"prefill_recent": 8})}),
    "fastkv": (
        "fastkv",
        {
            "p60-b16-g24": (16, {"after": 1, "keep": 0.4, "pool": "avg"}),
            "p90-b24-g27": (24, {"after": 0, "keep": 0.3, "pool": "avg"}),
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
    "adakv": ("adakv", {"p60-b18-k3": (18, {"window": 8, "kernel": 3}), "p90-b28-avg": (28, MEAN)}),
    "kvzip": (
        "kvzip",
        {
            "p60-b24": (24, {"sinks": 0}),
            "p90-b20": (20, {"sinks": 0}),
            "p60-b16-uniform": (16, {"sinks": 0, "allocate": {"kind": "uniform"}}),
        },
    ),
    "quickvideo": (
        "quickvideo",
        {"p60-n20-k6": (18, {"chunk": 20, "recent": 0}), "p96-n16-k5": (30, {"chunk": 16, "recent": 0})},
    ),
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
    for index, layer in enumerate(cache.views):
        for head, (held, theirs) in enumerate(zip(heads_of(layer), case[f"layer{index}/kept"], strict=True)):
            want = theirs[theirs >= 0].tolist()
            assert np.sort(held[held >= 0]).tolist() == want, f"layer {index} head {head}"


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "case"), CASES)
def test_what_a_prompt_leaves(goldens, tiny, name, case):
    file, cases = PROMPTS[name]
    budget, options = cases[case]
    theirs = golden(goldens, file, f"{name}/{case}")
    params = dataclasses.replace(tiny(FAMILY), tokenizer=lambda text, **_: {"input_ids": [7, 11, 13]})
    assert_kept(jaxkv.prefill(params, theirs["ids"], policy=jaxkv.policy(name, budget=budget, **options)), theirs)


@pytest.mark.some(1)
@pytest.mark.parametrize("level", ["pair", "pair-uniform"])
@pytest.mark.parametrize(("case", "block", "budget"), [("p60-c20-b16", 20, 16), ("p90-c30-b24", 30, 24)])
def test_epicache_block_by_block(goldens, tiny, case, block, budget, level):
    """What is left when the same tokens have looked at every block, where a layer's heads compete and where they do
    not; tokens behind a row's own do not look."""
    theirs = golden(goldens, "epicache", case if level == "pair-uniform" else f"pair/{case}")
    share = {"kind": "adaptive", "safeguard": 0.0} if level == "pair" else {"kind": "uniform"}
    policy = jaxkv.policy("epicache", budget=budget, block=block, allocate=share)
    pseudo = np.pad(theirs["looking"], (0, 3), constant_values=-1)[None]
    assert_kept(jaxkv.prefill(tiny(FAMILY), theirs["ids"], policy=policy, pseudo=pseudo), theirs)


def test_epicache_layers(goldens):
    """The release's layer budgets, but for what its least ones get on top of the budget."""
    theirs, mean = golden(goldens, "epicache", "layers"), 1000
    layers = catalogue()["epicache"].allocate.layers
    ours = np.array(layers.budgets(mean, 32, 10**6, 0, {"key_similarity": theirs["similarity"]}))
    assert ours.sum() == 32 * mean < theirs["budgets"].sum()
    least = theirs["budgets"] == mean // 4
    assert 0 < least.sum() < 16 and (ours[least] == mean // 4).all()
    np.testing.assert_allclose(ours[~least] / theirs["budgets"][~least], 32 * mean / theirs["budgets"].sum(), rtol=0.03)


@pytest.fixture(scope="module")
def ungrouped(goldens, tmp_path_factory):
    """The same model with a KV head for every query head: some releases know no groups."""
    source, folder = goldens / "tiny" / FAMILY, tmp_path_factory.mktemp("ungrouped")
    facts, weights = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    heads, kv_heads = facts["num_attention_heads"], facts["num_key_value_heads"]
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            split = weight.reshape(kv_heads, -1, weight.shape[1]).repeat(heads // kv_heads, axis=0)
            weights[name] = split.reshape(-1, weight.shape[1])
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**facts, "num_key_value_heads": heads}))
    return calibrated(jaxkv.load(folder))


def stepped(params, policy, case):
    """Prompt and single steps: the cache after each; every token is the release's."""
    out = jaxkv.generate(params, case["ids"], policy=policy, **STEP)
    yield out.cache
    for step, token in enumerate(case["tokens"].tolist()):
        assert out.tokens[0, 0] == token, f"token {step}"
        if step + 1 < len(case["tokens"]):
            out = jaxkv.generate(params, None, cache=out.cache, **STEP)
            yield out.cache


def left(layer):
    """What each head holds without the slot that the next token will overwrite."""
    positions = np.asarray(layer.positions[0])
    slots = np.arange(positions.shape[1]) != np.asarray(layer.next_slot[0]).reshape(-1, 1)
    return [np.sort(head[keep & (head >= 0)]).tolist() for head, keep in zip(positions, slots, strict=True)]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "family", ["llama2", "qwen3", *(pytest.param(each, marks=pytest.mark.long) for each in ("mistral", "gemma3_text"))]
)
def test_the_full_cache_generates_what_transformers_does(goldens, tiny, family):
    theirs = arrays(goldens / "tiny" / family / "logits.npz")
    steps = theirs["greedy"].shape[1]
    options = {"policy": jaxkv.policy("full"), "max_new_tokens": steps, "stop_tokens": ()}
    prompts = list(theirs["ids"][:, :24])
    np.testing.assert_array_equal(jaxkv.generate(tiny(family), prompts, **options).tokens, theirs["greedy"])


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "case", "budget"),
    [
        ("h2o", "p20-b16", 16),
        ("h2o", "p60-b24", 24),
        ("h2o", "p12-b16", 16),
        ("tova", "p20-b16", 16),
        ("tova", "p60-b24", 24),
        ("vatp", "p20-b17", 17),
        ("vatp", "p60-b25", 25),
    ],
)
def test_what_every_step_leaves(goldens, tiny, ungrouped, name, case, budget):
    """The prompt's cut, and what each step leaves; H2O's and VATP's releases know no groups."""
    theirs = golden(goldens, f"{name}_released", case)
    policy = jaxkv.policy(name, budget=budget, **({"sinks": 4} if name == "vatp" else {}))
    policy = dataclasses.replace(policy, prefill=dataclasses.replace(policy.prefill, reserve=1))
    for step, cache in enumerate(stepped(tiny(FAMILY) if name == "tova" else ungrouped, policy, theirs)):
        for layer, kept in zip(cache.layers, theirs["kept"][step], strict=True):
            assert left(layer) == [head[head >= 0].tolist() for head in kept], f"step {step}"


@pytest.mark.some(1)
@pytest.mark.parametrize(("case", "budget"), [("p20-b16", 16), ("p60-b24", 24)])
def test_streaming_llm_step_by_step(goldens, tiny, case, budget):
    """What every step attends to, and by its tokens where in the cache it stands."""
    theirs, policy = golden(goldens, "streaming", case), jaxkv.policy("streaming-llm", budget=budget)
    for step, cache in enumerate(stepped(tiny(FAMILY), policy, theirs)):
        for layer in cache.layers if step else ():
            for head in heads_of(layer):
                assert np.sort(head).tolist() == theirs["held"][step - 1].tolist(), f"step {step}"


@pytest.mark.some(1)
@pytest.mark.parametrize(("case", "budget", "window"), [("p20-b24", 24, 8), ("p60-b48", 48, 32)])
def test_longflow_step_by_step(goldens, tiny, case, budget, window):
    """What the prompt leaves, and what every step attends to; a prompt within the budget needs no window."""
    theirs = golden(goldens, "longflow_released", case)
    policy = jaxkv.policy("longflow", budget=budget, window=window)
    for step, cache in enumerate(stepped(tiny(FAMILY), policy, theirs)):
        for layer, held in zip(cache.layers, theirs["held"][step], strict=True):
            assert _entries(layer) == [held[held >= 0].tolist()] * len(layer.positions[0]), f"step {step}"


@pytest.mark.some(1)
@pytest.mark.parametrize(("case", "budget", "window"), [("p20-b16-w4", 16, 4), ("p60-b24-w8", 24, 8)])
def test_q_filters_step_by_step(goldens, tiny, case, budget, window):
    """What is held after the prompt and after every step. Here the new token takes a slot that was chosen before it
    came, so that one less protects as many."""
    theirs = golden(goldens, "qfilters", case)
    policy = jaxkv.policy("q-filters", budget=budget, prefill_recent=window, decode_recent=window - 1)
    for step, cache in enumerate(stepped(tiny(FAMILY), policy, theirs)):
        for layer, held in zip(cache.layers, theirs["held"][step], strict=True):
            assert _entries(layer) == held.tolist(), f"step {step}"


def _entries(layer):
    return [np.sort(head[head >= 0]).tolist() for head in heads_of(layer)]


@pytest.mark.some(1)
@pytest.mark.parametrize("lazy", [1, 2])
def test_simlayerkv_as_in_kvpress(goldens, tiny, lazy):
    """Which layers are lazy, and what each keeps, with a budget that lets the others keep everything."""
    theirs = golden(goldens, "simlayerkv", f"lazy{lazy}")
    length, newest, layers = len(theirs["ids"]), 15, len(theirs["shares"])  # the last query's 15 newest; 14 stay
    budget = (lazy * (4 + newest - 1) + (layers - lazy) * length) // layers
    share = Lazy((4 + newest - 0.9) / budget, length / budget, float(theirs["threshold"]), 4, newest)
    policy = dataclasses.replace(jaxkv.policy("simlayerkv", budget=budget), allocate=share)
    cache = jaxkv.prefill(tiny(FAMILY), theirs["ids"], policy=policy)
    for layer, kept in zip(cache.views, theirs["kept"], strict=True):
        assert _entries(layer) == [kept[kept >= 0].tolist()] * len(_entries(layer))


@pytest.mark.long
@pytest.mark.parametrize(("case", "window", "threshold"), [("p24-w12", 12, 0.03), ("p16-w8", 8, 0.06)])
def test_lazyeviction_up_to_its_first_eviction(goldens, ungrouped, case, window, threshold):
    """When each entry was last attended to and at what longest gap, and that what stays is worth the most there. Of the
    many that are worth the same the release's `topk` takes any, ours the oldest."""
    theirs = golden(goldens, "lazyeviction", case)
    length = len(theirs["ids"])
    options = {"window": 4, "decode_recent": window, "every": window, "threshold": threshold}
    policy = jaxkv.policy("lazyeviction", budget=length, **options)
    *_, before, after = stepped(ungrouped, policy, theirs)
    for number, (was, now) in enumerate(zip(before.layers, after.layers, strict=True)):
        for head, positions in enumerate(np.asarray(was.positions[0])):
            slots = np.flatnonzero((positions >= 0) & (positions < length))
            slots = slots[np.argsort(positions[slots])]
            last, longest = (np.asarray(was.stats[name])[0, head, slots] for name in ("last_seen", "longest_gap"))
            assert (last - length).tolist() == theirs["last"][number, head].tolist()
            assert longest.tolist() == theirs["longest"][number, head].tolist()
            kept, worth = _entries(now)[head], theirs["worth"][number, head]
            assert kept[-window:] == list(range(length, length + window)) and len(kept) == length
            gone = np.setdiff1d(np.arange(length), kept)
            assert worth[kept[:-window]].min() >= worth[gone].max()
            assert worth[kept[:-window]].max() > worth[gone].min()
