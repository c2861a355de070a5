"""`jaxkv.calibrate`: what it measures, where it is kept, and the policies that need it."""

import dataclasses
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import calibrated, measured
from small import SMALL
from watched import watched

import jaxkv
from jaxkv import answers, cli
from jaxkv.calibrate import SKIP, _random, _windows
from jaxkv.errors import BadValue, BadWeights
from jaxkv.evaluation.texts import calibration, prose, sentences
from jaxkv.models.rope import rotate
from jaxkv.plan import planned
from jaxkv.policies import Erring, catalogue
from jaxkv.policies.curves import best_split
from jaxkv.run import model_of
from jaxkv.sizes import on_model, size_of
from jaxkv.speculative import PromptLookup
from jaxkv.store.entries import in_pieces
from jaxkv.weights import learned

FAMILY = "llama3"
LENGTH = 320


class Characters:
    """Every character is a token of a small vocabulary, behind a first one."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [2] * add_special_tokens + [3 + ord(letter) % 90 for letter in text]}


@pytest.fixture(scope="module")
def params(tiny):
    return dataclasses.replace(tiny(FAMILY), tokenizer=Characters(), learned={})


@pytest.fixture(scope="module")
def found(params):
    heard = []
    found = jaxkv.calibrate(params, length=LENGTH, windows=3, needles=2, progress=lambda *told: heard.append(told))
    assert heard == [("calibrate", done, 17) for done in range(1, 18)], "four times 3 texts, 2 and 2 facts, and tokens"
    return found


@pytest.mark.long
def test_query_statistics(params, found):
    """Mean and covariance by NumPy's own, and main directions by singular value decompositions, a mean over a group."""
    seen = [watched(params, tokens) for tokens in _windows(params, calibration(), LENGTH, 3)]
    config = params.config
    for layer in range(config.num_layers):
        plain = np.concatenate([each[layer][0][SKIP:] for each in seen])  # [N, Hq, D]
        turned = np.concatenate([each[layer][1][SKIP:] for each in seen])
        for head in range(config.num_heads):
            np.testing.assert_allclose(found["query_mean"][layer, head], plain[:, head].mean(0), rtol=1e-3, atol=1e-4)
            covariance = np.cov(plain[:, head].T)
            np.testing.assert_allclose(
                found["query_covariance"][layer, head], covariance, rtol=1e-3, atol=1e-3 * np.abs(covariance).max()
            )
        for head in range(config.num_kv_heads):
            directions = []
            for queries in np.array_split(turned, config.num_kv_heads, axis=1)[head].swapaxes(0, 1):
                first = np.linalg.svd(queries, full_matrices=False)[2][0]
                directions.append(first * np.sign((queries @ first).sum()))
            np.testing.assert_allclose(found["query_direction"][layer, head], np.mean(directions, 0), atol=1e-2)


@pytest.mark.long
def test_products_of_keys_and_values(params, found):
    """The mean of k k^T after RoPE and of v v^T over the channels of all heads: its upper triangle, row by row."""
    for layer in range(params.config.num_layers):
        rows = []
        for tokens in _windows(params, calibration(), LENGTH, 3):
            held = jaxkv.prefill(params, tokens, policy=None).layers[layer]
            order = np.argsort(np.asarray(held.positions)[0], axis=-1)[:, -LENGTH:, None]
            rows.append([np.take_along_axis(np.asarray(x)[0], order, 1)[:, SKIP:] for x in (held.keys, held.values)])
        for name, each in zip(("key", "value"), zip(*rows, strict=True), strict=True):
            x = np.concatenate(each, axis=1).astype(np.float64)
            x = np.concatenate(list(x), axis=-1)
            want = (x.T @ x / len(x))[np.triu_indices(x.shape[1])]
            np.testing.assert_allclose(
                found[f"{name}_products"][layer], want, rtol=1e-3, atol=1e-4 * np.abs(want).max()
            )


def test_measured_on_a_text_of_its_own(params):
    """No sentence of it is in what evaluations read. Of another text all is taken, over and over where it is short."""
    words = lambda text: " ".join(text.split())  # noqa: E731
    assert not [sentence for sentence in sentences("prose") if words(sentence) in words(calibration())]
    assert _windows(params, prose(), LENGTH, 1)[0][1:].tolist() == Characters()(prose())["input_ids"][1:LENGTH]
    prompt = answers.hidden(params, "zz " * 20, LENGTH, 1, 0)[0][0]
    assert len(prompt.tokens) == LENGTH and np.isin(prompt.tokens, Characters()("zz")["input_ids"]).sum() > 150


@pytest.mark.parametrize("compared", [False, True])
def test_facts_are_hidden(params, compared):
    """The prompt says the answer once, in the right fact, and asks at its end."""
    for prompt in answers.hidden(params, calibration(), LENGTH, 8, 0, compared)[0]:
        assert len(prompt.tokens) == LENGTH and prompt.tokens[0] == 2 and 2 not in prompt.tokens[1:]
        fact = prompt.tokens[prompt.inside].tolist()
        assert answers._within(prompt.answer[0], fact)
        assert not answers._within(prompt.answer[1], prompt.tokens[~prompt.inside].tolist())
        assert prompt.tokens[-7:].tolist() == Characters()("Answer:", add_special_tokens=False)["input_ids"]


def test_right_answers_count(params, monkeypatch):
    """What the model says counts up to the end of its line, if it says the answer; where none does, the right ones."""
    prompts, _ = answers.hidden(params, calibration(), LENGTH - answers.SAID, 3, 0)
    said = [prompts[0].answer[1] + [13, 40], [50, 51], [52, *prompts[2].answer[0]]]
    rows = np.full((3, answers.SAID), -1)
    for row, one in zip(rows, said, strict=True):
        row[: len(one)] = one
    monkeypatch.setattr(answers, "generate", lambda *args, **more: SimpleNamespace(tokens=rows))
    found = answers.answered(params, prompts, LENGTH)
    assert len(found) == 2
    for one, tokens, prompt in zip(found, (prompts[0].answer[1], said[2]), (prompts[0], prompts[2]), strict=True):
        assert one.tokens[LENGTH - answers.SAID :][: len(tokens)].tolist() == tokens
        begin = LENGTH - answers.SAID - 1
        assert np.flatnonzero(one.told).tolist() == list(range(begin, begin + len(tokens)))
        fact = prompt.tokens[prompt.inside].tolist()
        assert one.stands[one.told].tolist() == [fact.count(token) for token in tokens]
        assert not one.stands[~one.told].any()
    rows[:] = 60
    assert len(answers.answered(params, prompts, LENGTH)) == 3


def test_retrieval_heads(params, found):
    """The mass on the sentence with the fact, of the tokens that say its answer, as often as they stand there."""
    want = np.zeros((params.config.num_layers, params.config.num_heads))
    prompts, _ = answers.hidden(params, calibration(), LENGTH - answers.SAID, 2, 0)
    told = answers.answered(params, prompts, LENGTH)
    for tokens, inside, _, stands in told:
        assert len(tokens) == LENGTH and inside.sum() > 20 and stands.sum() >= 5
        for layer, (_, _, weights) in enumerate(watched(params, tokens)):
            want[layer] += (weights[:, :, inside].sum(-1) * stands).sum(-1) / len(told)
    np.testing.assert_allclose(found["retrieval"], want, rtol=1e-3)


def test_reasoning_heads(params, found):
    """HeadKV's release: of each answer token's n largest weights those on the n tokens of the right fact, over n."""
    want = np.zeros((params.config.num_layers, params.config.num_heads))
    prompts, _ = answers.hidden(params, calibration(), LENGTH - answers.SAID, 2, 0, compared=True)
    told = answers.answered(params, prompts, LENGTH)
    for tokens, inside, says, _ in told:
        for layer, (_, _, weights) in enumerate(watched(params, tokens)):
            for head, query in np.ndindex(len(weights), len(tokens)):
                if says[query]:
                    best = np.argsort(-weights[head, query], kind="stable")[: inside.sum()]
                    want[layer, head] += weights[head, query, best[inside[best]]].sum() / inside.sum() / len(told)
    assert (want > 0).any() and np.ptp(want) > 0
    np.testing.assert_allclose(found["reasoning"], want, rtol=1e-3, atol=1e-7)


def test_echo_and_induction_heads(params, found):
    """RazorAttention: random tokens four times, the mass on each earlier same token, and on the one behind it."""
    tokens = _random(params, LENGTH, 0)
    once = (len(tokens) - 1) // 4
    assert tokens[0] == 2, "what the model's texts begin with"
    assert (tokens[1:].reshape(4, once) == tokens[1 : 1 + once]).all() and len(set(tokens[1 : 1 + once])) > once // 2
    for layer, (_, _, weights) in enumerate(watched(params, tokens)):
        weights = weights[:, 1:, 1:]
        for head in range(len(weights)):
            echo = [weights[head, t, t % once : t : once].sum() for t in range(once, 4 * once)]
            behind = [weights[head, t, t % once + 1 : t + 1 : once].sum() for t in range(once, 4 * once)]
            # the place right behind the token itself is not there yet
            np.testing.assert_allclose(found["echo"][layer, head], np.mean(echo), rtol=1e-3)
            np.testing.assert_allclose(found["induction"][layer, head], np.mean(behind), rtol=1e-3)


def test_layers_whose_keys_need_the_whole_text(params, found):
    """EpiCache: cosines of the keys with those made block by block, by a full pass with another mask."""
    place, quarter = np.arange(LENGTH), LENGTH // 4
    mask = (place >= (place // quarter * quarter - quarter // 2)[:, None]) | (place < LENGTH // 128)
    want = np.zeros(params.config.num_layers)
    for tokens in _windows(params, calibration(), LENGTH, 3):
        whole, parted = (keys_of(params, tokens, mask) for mask in (np.ones_like(mask), mask))
        for layer, pair in enumerate(zip(whole, parted, strict=True)):
            one, other = (
                np.concatenate([part.swapaxes(0, 1).reshape(x.shape[1], -1) for part in np.split(x, 16)]) for x in pair
            )
            cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
            want[layer] += cosines.mean() / 3
    np.testing.assert_allclose(want[0], 1, rtol=1e-6)  # the first layer's keys are made of the tokens alone
    assert want[1] < 0.999
    np.testing.assert_allclose(found["key_similarity"], want, rtol=1e-3)


def keys_of(params, tokens, mask):
    """Every layer's keys [T, Hk, D] where a query sees only some keys."""
    seen = jnp.asarray(np.tri(len(tokens), dtype=bool) & mask)

    def attend(spec, query, key, value, _):
        turned, keys = (rotate(x[0], jnp.arange(len(tokens))[:, None], spec.rope) for x in (query, key))
        group = query.shape[2] // key.shape[2]
        logits = jnp.einsum("thd,shd->hts", turned, jnp.repeat(keys, group, axis=1)) * spec.scale
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
        return jnp.einsum("hts,shd->thd", weights, jnp.repeat(value[0], group, axis=1))[None], key[0]

    layers = (None,) * params.config.num_layers
    _, out = model_of(params.config, params.weights)(jnp.asarray(tokens)[None], layers, attend)
    return [np.asarray(each) for each in out]


def test_compresskv_asks_the_best_heads(params, found):
    """What is kept, by the paper's rule in NumPy: four heads' pooled attention of the last queries, one set for all."""
    params = dataclasses.replace(params, learned=found)
    tokens = np.random.default_rng(0).integers(3, 100, 64)
    budget, window, kernel = 24, 4, 5
    cache = jaxkv.prefill(params, tokens, policy=jaxkv.policy("compresskv", budget=budget, window=window))
    for layer, (_, _, weights) in enumerate(watched(params, tokens)):
        best = np.argsort(-found["retrieval"][layer], kind="stable")[:4]
        mass = weights[best, -window:, :-window].sum(1)  # [4, T - w]
        pooled = np.stack([np.convolve(row, np.ones(kernel) / kernel, mode="same") for row in mass]).mean(0)
        want = np.sort(np.argsort(-pooled, kind="stable")[: budget - window])
        for head in np.asarray(cache.layers[layer].positions[0]):
            held = np.sort(head[head >= 0])
            np.testing.assert_array_equal(held[-window:], np.arange(64 - window, 64))
            np.testing.assert_array_equal(held[:-window], want)


def test_eviction_error(params, found):
    """What each layer's output loses where a quarter of the prompt is kept, by the rule in NumPy; then its budget."""
    prompt, window, kernel = LENGTH - LENGTH // 8, 8, 5
    model, want = model_of(params.config, params.weights), []
    group = params.config.num_heads // params.config.num_kv_heads
    for tokens in _windows(params, calibration(), LENGTH, 3):
        layers = jaxkv.prefill(params, tokens).layers
        for layer, (_, _, weights) in enumerate(watched(params, tokens)):
            best = np.argsort(-found["retrieval"][layer], kind="stable")[:4]
            mass = weights[best, prompt - window : prompt, : prompt - window].sum(1)
            pooled = np.stack([np.convolve(row, np.ones(kernel) / kernel, mode="same") for row in mass]).mean(0)
            kept = np.argsort(-pooled, kind="stable")[: prompt // 4 - window]
            kept = np.isin(np.arange(LENGTH), kept) | (np.arange(LENGTH) >= prompt - window)
            values = np.asarray(layers[layer].values)[0, :, -LENGTH:].repeat(group, axis=0)
            out = np.asarray(model.output_matrix(layer))
            full = weights[:, prompt:]
            part = full * kept / (full * kept).sum(-1, keepdims=True)
            full, part = (np.einsum("hqs,hsd,hdm->qm", each, values, out) for each in (full, part))
            want.append(np.linalg.norm(part - full) / np.linalg.norm(full))
    want = np.reshape(want, (3, -1)).mean(0)
    assert (want > 0.01).all()
    np.testing.assert_allclose(found["eviction_error"], want, rtol=1e-3)


@pytest.mark.long
def test_utility_curves(params, found, scored):
    """What the second half of a text reads of the first, by NumPy, in the order of LU-KV's score; then the split."""
    half, model, config = LENGTH // 2, model_of(params.config, params.weights), params.config
    heads, policy = config.num_kv_heads, jaxkv.policy("lu-kv", budget=30)
    want = []
    for tokens in _windows(params, calibration(), LENGTH, 3):
        _, worths = scored(dataclasses.replace(params, learned=found), tokens[:half], policy)
        layers, gains = jaxkv.prefill(params, tokens).layers, []
        for layer, (_, _, weights) in enumerate(watched(params, tokens)):
            values = np.asarray(layers[layer].values)[0, :, -LENGTH:][:, :half].repeat(len(weights) // heads, axis=0)
            written = np.linalg.norm(np.asarray(values @ np.asarray(model.output_matrix(layer))), axis=-1)
            gain = (weights[:, half:, :half].sum(1) * written).reshape(heads, -1, half).sum(1)
            order = np.argsort(-worths[layer], axis=-1, kind="stable")
            gains.append(np.take_along_axis(gain, order, axis=-1) / gain.sum())
        want.append(best_split(np.concatenate(gains)).reshape(99, -1, heads).swapaxes(0, 1))
    curves = found["utility_curves"]
    np.testing.assert_allclose(curves, np.mean(want, axis=0), atol=2 / half)
    np.testing.assert_allclose(curves.mean(axis=(0, 2)), 1 - np.arange(1, 100) / 100, atol=0.01)
    assert np.ptp(curves[:, 74]) > 0.1


@pytest.mark.long
def test_layers_keep_by_their_errors(params, found):
    """32 tokens for each (here 10), the rest by the errors; in each the tokens that CompressKV chooses."""
    errors, budget, window = np.array([0.1, 0.5]), 24, 4
    params = dataclasses.replace(params, learned={**found, "eviction_error": errors})
    options = {"window": window, "allocate": {"kind": "error", "least": 10}}
    cache = jaxkv.prefill(params, ids := np.arange(3, 73), policy=jaxkv.policy("compresskv", budget=budget, **options))
    sizes = [15, 33]  # 10 + 28 / 6, rounded; 10 + 28 * 5 / 6
    assert [layer.slots for layer in cache.layers] == [in_pieces(size) for size in sizes]
    for layer, size in enumerate(sizes):
        alone = jaxkv.prefill(params, ids, policy=jaxkv.policy("compresskv", budget=size, window=window))
        mine, theirs = (np.sort(np.asarray(each.layers[layer].positions)) for each in (cache, alone))
        np.testing.assert_array_equal(mine, theirs)


def test_layers_of_which_none_errs_get_the_same():
    assert Erring(least=6).budgets(40, 3, 100, 4, {"eviction_error": np.zeros(3)}) == (40, 40, 40)


@pytest.mark.long
@pytest.mark.parametrize("name", ["epicache", "layer-compresskv"])
def test_bytes_hold_for_every_length_where_layers_differ_and_some_slide(tiny, name):
    """What a sliding layer cannot use is lost; a text too short for a layer's share gives the rest to others."""
    params = tiny("gemma3_text")
    config = params.config
    nothing = np.zeros(1, int), np.zeros(config.num_layers, int)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        found = {each: rng.random(config.num_layers) for each in ("key_similarity", "eviction_error")}
        found = {**calibrated(params).learned, **found}
        asked = jaxkv.policy(name, bytes=60_000, block=64, **SMALL[name])
        policy = on_model(dataclasses.replace(params, learned=found), asked)
        for tokens in range(policy.budget, 5 * policy.budget, 3):
            shapes, *_ = planned(policy, config, *nothing, np.array([tokens]), 0, learned=found)
            size = size_of(policy, config, params.dtype, shapes.slots).keys_values
            assert size <= 60_000, (seed, tokens)


@given(st.integers(0, 2**16), st.sampled_from([1, 2, 30]), st.integers(1, 400), st.integers(1, 1000))
@settings(max_examples=100, deadline=None)
def test_budgets_by_errors_add_up(seed, layers, budget, tokens):
    errors = np.random.default_rng(seed).random(layers) ** 4
    each = np.array(Erring().budgets(budget, layers, tokens, 8, {"eviction_error": errors}))
    assert each.sum() == layers * budget
    if tokens < budget or budget <= 32:
        assert (each == budget).all()
    else:
        order = np.argsort(errors, kind="stable")
        assert (np.diff(each[order]) >= -1).all() and each.min() >= 32 and each.max() <= min(3 * budget, tokens)


@pytest.mark.parametrize("name", [name for name, policy in catalogue().items() if policy.calibrated])
def test_a_missing_calibration_is_named(params, name):
    size = {"budget": 24} if catalogue()[name].evicts else {}
    with pytest.raises(BadValue, match=r"jaxkv\s+calibrate"):
        jaxkv.generate(params, np.arange(3, 43), policy=jaxkv.policy(name, **size, **SMALL.get(name, {})))


def test_drafts_know_no_calibration(tiny):
    with pytest.raises(BadValue, match="measured on the model"):
        jaxkv.generate(
            tiny(FAMILY),
            np.arange(3, 43),
            policy=jaxkv.policy("q-filters", budget=24),
            speculative=PromptLookup(),
        )


def test_the_file_lies_beside_the_model(goldens, tiny, found, tmp_path, monkeypatch, capsys):
    """The command writes it, `load` finds it, and a broken one is refused."""
    shutil.copytree(goldens / "tiny" / FAMILY, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "weights.safetensors")
    (tmp_path / "text.txt").write_text(calibration())
    load = jaxkv.load
    assert not load(tmp_path / "model").learned
    monkeypatch.setattr(
        jaxkv, "load", lambda *given, **more: dataclasses.replace(load(*given, **more), tokenizer=Characters())
    )
    sizes = ["--length", str(LENGTH), "--windows", "3", "--needles", "2", "--text", str(tmp_path / "text.txt")]
    assert cli.main(["calibrate", str(tmp_path / "model"), *sizes]) == 0
    path = tmp_path / "model" / learned.file_name(tiny(FAMILY).fingerprint)
    assert capsys.readouterr().out.strip() == str(path)
    measured = load(tmp_path / "model").learned
    assert measured.keys() == found.keys()
    for name, value in measured.items():
        np.testing.assert_allclose(value, found[name], rtol=2e-3, atol=2e-3 * np.abs(found[name]).max())
    whole = learned.read(path)
    for name, broken, words in (
        ("query_direction", np.full_like(whole["query_direction"], np.nan), "query_direction holds NaN"),
        ("reasoning", whole["reasoning"][:, 1:], r"reasoning has the shape .* expected \(2, "),
        ("own", np.ones((5, 2)), r"own has the shape \(5, 2\)"),
    ):
        learned.write({**whole, name: broken}, path)
        with pytest.raises(BadWeights, match=f"{words}.*calibrate again"):
            load(tmp_path / "model")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadWeights, match="calibrate again"):
        load(tmp_path / "model")


def test_nothing_to_measure(params):
    with pytest.raises(BadValue, match="length=8"):
        jaxkv.calibrate(params, length=8)
    with pytest.raises(
        BadValue, match=r"length=64: a fact, its question and answer alone need up to \d+; give"
    ) as said:
        jaxkv.calibrate(params, length=64)
    least = int(re.findall(r"\d+", str(said.value))[1])
    fits = [answers.hidden(params, "words", least - answers.SAID, 8, -1, compared) for compared in (False, True)]
    assert all(len(prompts) == 8 for prompts, _ in fits) and max(needed for _, needed in fits) == least - answers.SAID
    with pytest.raises(BadValue, match=r"windows=1000000: the text has .* stretches"):
        jaxkv.calibrate(params, length=LENGTH, windows=10**6)
    with pytest.raises(BadValue, match="tokenizer"):
        jaxkv.calibrate(dataclasses.replace(params, tokenizer=None))


def test_a_place_that_cannot_be_written_is_said_first(goldens, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jaxkv, "calibrate", lambda *given, **more: pytest.fail("measured in vain"))
    file = tmp_path / learned.file_name(tiny(FAMILY).fingerprint)

    def said(out) -> str:
        assert cli.main(["calibrate", str(goldens / "tiny" / FAMILY), "--out", str(out)]) == 2
        return capsys.readouterr().err

    assert "/proc/nowhere" in said("/proc/nowhere")
    file.mkdir()
    assert f"{file} cannot be written (Is a directory)" in said(tmp_path)
    file.rmdir()
    file.write_bytes(b"cut off")
    assert f"{file} can't be read" in said(tmp_path)


def test_what_was_asked_for_once_stays(goldens, tiny, found, tmp_path, monkeypatch):
    file, whole = tmp_path / learned.file_name(tiny(FAMILY).fingerprint), measured(2, 8, 2, 16)
    learned.write(whole, file)
    monkeypatch.setattr(jaxkv, "calibrate", lambda *given, **more: found)
    assert cli.main(["calibrate", str(goldens / "tiny" / FAMILY), "--out", str(tmp_path)]) == 0
    there = learned.read(file)
    assert there.keys() == found.keys() | set(learned.ASKED_FOR)
    np.testing.assert_allclose(there["key_predictor"], whole["key_predictor"], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_shipped_calibration_is_what_the_command_makes(smollm2):
    assert smollm2.learned
    for name, value in jaxkv.calibrate(smollm2).items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(smollm2.learned[name], value, rtol=5e-3, atol=5e-3 * scale, err_msg=name)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(dict(smollm2.learned)))
