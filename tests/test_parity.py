"""Policies, tokens and generated text against what others computed (goldens of tests/oracle)."""

import dataclasses
import json

import numpy as np
import pytest
from archives import arrays
from ordered import in_text_order

import jaxkv
from jaxkv.policies.observe import PseudoQueries
from jaxkv.prompts import rows_of
from jaxkv.store import EMPTY

RTOL = 1e-4  # of scores
CLEAR = 2e-5  # smallest margin at which rounding can't change what is kept; all tiny models' margins are above

# kvpress' method -> our policy. Its TOVA protects the last token; its observed attention is H2O's score as a mean over
# the queries that could see an entry, with nothing protected.
KVPRESS = {
    "tova": ("tova", {"recent": 1}),
    "knorm": ("knorm", {"spare": 0}),
    "streaming-s4": ("streaming-llm", {"sinks": 4, "rope": "text"}),
    "observed": ("h2o", {"average": True, "recent": 0}),
    "snapkv-w8-k5": ("snapkv", {"window": 8, "kernel": 5}),
    "snapkv-w16-k7": ("snapkv", {"window": 16, "kernel": 7}),
    "snapkv-w64-k5": ("snapkv", {"window": 64, "kernel": 5}),
}
TINY_METHODS = [method for method in KVPRESS if method != "snapkv-w64-k5"]
SMOLLM2_METHODS = ["tova", "knorm", "streaming-s4", "observed", "snapkv-w64-k5"]
FAMILIES = ["llama2", "llama3", "qwen2", "qwen3", "mistral", "gemma3_text"]


def _held(layer) -> np.ndarray:
    """Sorted positions [Hk, N] of row 0, -1 behind those of heads that hold fewer, as the goldens have them."""
    positions = np.asarray(layer.positions[0])
    big = np.iinfo(positions.dtype).max
    line = np.sort(np.where(positions < 0, big, positions), axis=-1)
    return _filled(np.where(line == big, EMPTY, line))


def _filled(line) -> np.ndarray:
    """The columns of `line [Hk, N]` in which any head holds something: slots beyond the budget are padding alone."""
    return line[:, np.any(line != EMPTY, axis=0)]


def _layers(golden, case) -> list[int]:
    return sorted({int(key.split("/")[2].removeprefix("layer")) for key in golden if key.startswith(case + "/")})


def _same_scores(method, ours, theirs):
    """Scores within RTOL; what is protected is +inf here and the maximum + 1 there, the same entries."""
    if method.startswith("streaming"):  # theirs are 1 for what stays, else 0; ours count positions: the order must hold
        for mine, other in zip(ours, theirs, strict=True):
            assert mine[other == 1].min() > mine[other == 0].max()
        return
    protected = np.isposinf(ours)
    if protected.any():
        assert np.array_equal(protected, theirs == theirs.max()) and theirs.max() > 1
        assert theirs[~protected].max() < theirs.max() - 0.9
    np.testing.assert_allclose(ours[~protected], theirs[~protected], rtol=RTOL, atol=0)


@pytest.mark.some(1)
@pytest.mark.parametrize("method", TINY_METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_kvpress_on_tiny_models(goldens, as_in_kvpress, scored, family, method):
    """Scores and kept positions of every layer that kvpress compresses (Gemma: the full ones), at every ratio."""
    golden = arrays(goldens / "kvpress" / f"{family}.npz")
    params, ids = as_in_kvpress(family), golden["ids"][0]
    name, options = KVPRESS[method]
    for ratio in ("0.3", "0.5", "0.75"):
        case = f"{method}/r{ratio}"
        layers = _layers(golden, case)
        assert layers == ([1, 3] if family == "gemma3_text" else list(range(params.config.num_layers)))
        budget = int(len(ids) * (1 - float(ratio)))
        cache, worths = scored(params, ids, jaxkv.policy(name, budget=budget, **options))
        for layer in layers:
            theirs = {key: golden[f"{case}/layer{layer}/{key}"] for key in ("scores", "kept", "margin")}
            assert theirs["margin"].min() > CLEAR
            _same_scores(method, worths[layer], theirs["scores"])
            np.testing.assert_array_equal(_held(cache.layers[layer]), theirs["kept"], err_msg=f"{case} layer {layer}")


@pytest.mark.some(2)
@pytest.mark.parametrize("method", TINY_METHODS)
def test_kvpress_when_compiled(goldens, tiny, method):
    """The same kept positions through the compiled prefill, which is what everybody runs."""
    golden = arrays(goldens / "kvpress" / "llama3.npz")
    name, options = KVPRESS[method]
    ids = golden["ids"][0]
    cache = jaxkv.prefill(tiny("llama3"), ids, policy=jaxkv.policy(name, budget=len(ids) // 2, **options))
    for layer, held in enumerate(cache.layers):
        np.testing.assert_array_equal(_held(held), golden[f"{method}/r0.5/layer{layer}/kept"])


@pytest.mark.slow
@pytest.mark.parametrize("ratio", ["0.5", "0.75"])
@pytest.mark.parametrize("method", SMOLLM2_METHODS)
def test_kvpress_on_smollm2(goldens, smollm2, scored, method, ratio):
    """Scores of four layers, kept positions of all.

    The text repeats words, so that some heads' cut runs through a tie (key norms in layer 0, where the same token has
    the same key) or a near tie: where the margin is not clear, the entries that kvpress keeps must be worth, one by
    one, what ours are worth.
    """
    golden = arrays(goldens / "kvpress" / "smollm2.npz")
    ids, case = golden["ids"][0], f"{method}/r{ratio}"
    name, options = KVPRESS[method]
    policy = jaxkv.policy(name, budget=int(len(ids) * (1 - float(ratio))), **options)
    cache, worths = scored(smollm2, ids, policy)
    assert _layers(golden, case) == list(range(30))
    clear, compared = 0, []
    for layer in range(30):
        where = f"{case}/layer{layer}"
        if f"{where}/scores" in golden:
            _same_scores(method, worths[layer], golden[f"{where}/scores"])
            compared.append(layer)
        ours, theirs, margin = _held(cache.layers[layer]), golden[f"{where}/kept"], golden[f"{where}/margin"]
        for head in range(len(ours)):
            if margin[head] > CLEAR:
                clear += 1
                np.testing.assert_array_equal(ours[head], theirs[head], err_msg=f"{where} head {head}")
            else:
                assert len(set(theirs[head])) == len(ours[head])
                worth = worths[layer][head]
                np.testing.assert_allclose(np.sort(worth[theirs[head]]), np.sort(worth[ours[head]]), rtol=RTOL)
    assert clear >= 80, "nearly all of the 90 heads must be comparable"
    assert compared == [0, 7, 15, 29]


def _decode_policy(method, case):
    """Our policy of a golden case `p<prompt>-b<budget>[-w<window>]`, its prompt cut to budget - 1."""
    numbers = {part[0]: int(part[1:]) for part in case.split("-")}
    window = {"window": numbers.get("w", 8)} if method == "longflow" else {}
    policy = jaxkv.policy(method, budget=numbers["b"], **window)
    return dataclasses.replace(policy, prefill=dataclasses.replace(policy.prefill, reserve=1))


DECODE_CASES = {
    "longflow": ["p12-b16", "p20-b16-w8", "p60-b48-w32"],
    "tova": ["p12-b16", "p20-b16", "p60-b48"],
    "h2o": ["p12-b16", "p20-b16", "p60-b48"],
}


@pytest.mark.some(1)
@pytest.mark.parametrize(("method", "case"), [(m, case) for m, cases in DECODE_CASES.items() for case in cases])
def test_decode_step_by_step(goldens, tiny, method, case):
    """Tokens, positions held and the next victim at each of 40 steps, and the same from one scan."""
    golden = arrays(goldens / "policies" / f"{method}.npz")
    ids, tokens, held, victims = (golden[f"{case}/{key}"] for key in ("ids", "tokens", "held", "victims"))
    params, policy = tiny("llama2"), _decode_policy(method, case)
    once = {"max_new_tokens": 1, "stop_tokens": ()}

    out = jaxkv.generate(params, ids, policy=policy, **once)
    assert out.tokens[0, 0] == tokens[0]
    for layer, kept in zip(out.cache.layers, golden[f"{case}/prompt_kept"], strict=True):
        np.testing.assert_array_equal(_held(layer), _filled(kept))
    for step in range(len(held)):
        out = jaxkv.generate(params, None, cache=out.cache, **once)
        assert out.tokens[0, 0] == tokens[step + 1], f"token of step {step}"
        for index, layer in enumerate(out.cache.layers):
            where = f"step {step}, layer {index}"
            np.testing.assert_array_equal(_held(layer), _filled(held[step, index]), err_msg=where)
            next_slot = np.asarray(layer.next_slot[0])[:, None]
            victim = np.take_along_axis(np.asarray(layer.positions[0]), next_slot, axis=-1)[:, 0]
            np.testing.assert_array_equal(victim, victims[step, index], err_msg=where)
            if method == "h2o":
                _same_totals(layer, golden[f"{case}/held"][step, index], golden[f"{case}/values"][step, index])

    whole = jaxkv.generate(params, ids, policy=policy, max_new_tokens=len(tokens), stop_tokens=())
    np.testing.assert_array_equal(whole.tokens[0], tokens)
    for layer, last in zip(whole.cache.layers, held[-1], strict=True):
        np.testing.assert_array_equal(_held(layer), _filled(last))


def _same_totals(layer, held, values):
    """H2O's accumulated attention of the entries that it does not protect (3.4e38 in the golden)."""
    totals = in_text_order(layer.stats["attention"][0], layer.positions[0])
    for ours, theirs in zip(totals, [v[p >= 0] for v, p in zip(values, held, strict=True)], strict=True):
        open_to_all = theirs < 1e38
        np.testing.assert_allclose(ours[open_to_all], theirs[open_to_all], rtol=RTOL)


@pytest.mark.some(1)
@pytest.mark.parametrize("budget", [8, 16])
@pytest.mark.parametrize("content", ["prompt", "random"])
def test_dapq(goldens, tiny, scored, monkeypatch, content, budget):
    """Scores from 8 pseudo tokens and what they keep; the random ones are the golden's, as no generator is shared."""
    golden = arrays(goldens / "policies" / "dapq.npz")
    params, ids, pseudo = tiny("llama2"), golden["ids"], golden[f"{content}/pseudo"]
    policy = jaxkv.policy("dapq", budget=budget, count=8, prefix=4, content=content, pool="none")
    if content == "random":
        monkeypatch.setattr(PseudoQueries, "behind", lambda self, prompt, vocab_size, encode: pseudo)
    np.testing.assert_array_equal(policy.prefill.observe.behind(ids, params.config.vocab_size, None), pseudo)
    cache, worths = scored(params, ids, policy)
    compiled = jaxkv.prefill(params, ids, policy=policy)
    for layer, worth in enumerate(worths):
        np.testing.assert_allclose(worth, golden[f"{content}/scores"][layer], rtol=RTOL, atol=0)
        np.testing.assert_array_equal(_held(cache.layers[layer]), golden[f"{content}/kept{budget}"][layer])
        np.testing.assert_array_equal(_held(compiled.layers[layer]), golden[f"{content}/kept{budget}"][layer])


def test_smollm2_tokens(goldens, smollm2):
    """Token ids of every text and chat, and the texts back from them."""
    facts = json.loads((goldens / "smollm2" / "tokens.json").read_text(encoding="utf-8"))
    tokenizer, size = smollm2.tokenizer, smollm2.config.vocab_size
    assert len(facts["texts"]) > 20 and len(facts["chats"]) >= 2
    assert (size, smollm2.config.bos_token) == (facts["vocab_size"], facts["special"]["bos"])
    for entry in facts["texts"]:
        assert tokenizer(entry["text"])["input_ids"] == entry["ids"], entry["text"]
        assert tokenizer.decode(entry["ids"]) == entry["text"]
        if entry["ids"]:  # an empty prompt is refused
            assert rows_of(entry["text"], tokenizer, size)[0][0].tolist() == entry["ids"]
    for entry in facts["chats"]:
        last = {"tokenize": False, "add_generation_prompt": entry["add_generation_prompt"]}
        assert tokenizer.apply_chat_template(entry["messages"], **last) == entry["text"]
        assert tokenizer(entry["text"])["input_ids"] == entry["ids"]
        if entry["add_generation_prompt"]:
            assert rows_of(entry["messages"], tokenizer, size)[0][0].tolist() == entry["ids"]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["short", "code", "chat", "medium", "long"])
def test_smollm2_greedy(goldens, smollm2, prompt):
    """64 greedy tokens, as transformers' float32 model gives them."""
    golden = arrays(goldens / "smollm2" / "logits.npz")
    out = jaxkv.generate(smollm2, golden[f"{prompt}/ids"], max_new_tokens=64, stop_tokens=())
    np.testing.assert_array_equal(out.tokens[0], golden[f"{prompt}/greedy"])
