"""Every argument, every field of a policy and every key of a config is checked by its type and range, in one place."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import dataclasses
import json
import shutil
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from letters import Letters

import jaxkv
from jaxkv.errors import BadValue, BadWeights, UnknownName
from jaxkv.evaluation import Settings, Tasks
from jaxkv.models import ModelConfig
from jaxkv.plan import plan
from jaxkv.policies import Adaptive, KeyDiff, LastQueries, Phase, Policy, Score, Select
from jaxkv.policies.catalogue import named
from jaxkv.policies.policy import from_dict
from jaxkv.serving import Engine

pytestmark = pytest.mark.usefixtures("unchecked")  # the suite's own type checker would answer first
FAMILY = "llama3"
NAN, INFINITY = float("nan"), float("inf")
IDS = np.arange(3, 12, dtype=np.int32)


@pytest.fixture(scope="module")
def lettered(tiny):
    params = tiny(FAMILY)
    return type(params)(params.weights, params.config, Letters())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temperature": INFINITY}, "temperature=inf"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_p": NAN}, "top_p=nan"),
        ({"min_p": True}, "min_p=True"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty=1e-46"),
        ({"seed": "x"}, "seed='x'"),
        ({"seed": 2**64}, "64 bits"),
        ({"samples": 1.5}, "samples=1.5"),
        ({"max_new_tokens": 2**31}, "max_new_tokens=2147483648"),
        ({"stop": [1]}, "stop=\\[1\\]: expected text"),
        ({"stop_tokens": 5}, r"stop_tokens=5: expected a sequence of token ids, such as \(3,\), \(\) for none"),
        ({"stop_tokens": "ab"}, "stop_tokens='ab'"),
        ({"stop_tokens": [3, 10**6]}, "1000000 is none of the model's: expected token ids from 0 to"),
        ({"stop_tokens": [-1]}, "-1 is none of the model's"),
        ({"implementation": "warp"}, "'reference', 'mosaic_tpu', 'mosaic_gpu_sm90'"),
        ({"implementation": "mosaic_tpu"}, "'mosaic_tpu' is for a tpu, and this runs on a cpu: leave it out"),
        ({"progress": 5}, "progress=5: expected a function"),
        ({"scan_layers": "yes"}, "scan_layers='yes': expected True or False"),
        ({"sizes": 0}, "sizes=0"),
        ({"cache": {}}, "cache={}: expected a KVCache"),
        ({"policy": "h2o"}, "expected a Policy"),
        ({"speculative": "aasd"}, "expected a method"),
    ],
)
def test_arguments_of_generate(lettered, options, words):
    with pytest.raises(BadValue, match=words):
        jaxkv.generate(lettered, IDS, **options)
    if "samples" not in options:
        with pytest.raises(BadValue, match=words):
            jaxkv.stream(lettered, IDS, **options)


@pytest.mark.parametrize(
    "prompt, words",
    [
        ([{"role": "user", "content": "a"}, "b"], "message 1 is 'b'"),
        ([{"role": "user"}], "message 0"),
        ([{"role": 5, "content": "a"}], "message 0"),
        ([{"role": "usr", "content": "a"}], "message 0: unknown role 'usr'; did you mean 'user'"),
        ([{"role": "user", "content": None}], r"message 0 \(user\) has the content None: expected text, or a list"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": 5}], r"message 1 .* content 5: expected"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "content None: expected text"),
        ([{"role": "user", "content": "a\udc00"}], "surrogate"),
        ([{"role": "user", "content": [{"type": "text", "text": "a\udc00"}]}], "surrogate"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}], "message 0 holds the part"),
        ("ab\ud800c", "surrogate pair, '.ud800', at character 2"),
        (["a", 4], "list of text"),
        ([4, "a"], "flat row of integers"),
        ([[1, 2], 5], "5 in a list of prompts"),
        ([[1, [2, 3]]], "flat row of integers"),
        ([10**30], "flat row of integers"),
        ([None], "None in a list of prompts"),
        (b"abc", "type bytes"),
        ({"role": "user", "content": "a"}, "type dict"),
    ],
)
def test_prompts(lettered, prompt, words):
    with pytest.raises(BadValue, match=words):
        jaxkv.generate(lettered, prompt, max_new_tokens=1)


def test_other_calls(lettered):
    for call, words in (
        (lambda: jax.jit(lambda ids: jaxkv.generate(lettered, ids).tokens)(IDS), "prompt is traced: .* outside of jit"),
        (lambda: jaxkv.keep_programs(5), r"folder=5: expected a path"),
        (lambda: jaxkv.calibrate(lettered, text="ab"), "the text has 2 tokens, fewer than length=512"),
        (lambda: jaxkv.generate("smollm2-135m", IDS), "expected what jaxkv.load gives"),
        (lambda: jaxkv.prefill(lettered, IDS, room=-1), "room=-1"),
        (lambda: jaxkv.prefill(None, IDS), "expected what jaxkv.load gives"),
        (lambda: jaxkv.warmup(lettered, "64"), "lengths='64'"),
        (lambda: jaxkv.warmup(lettered, (8,), batch=0), "batch=0"),
        (lambda: jaxkv.episodes(lettered, IDS, policy=None), "policy=None"),
        (lambda: jaxkv.calibrate(lettered, length=2.5), "length=2.5"),
    ):
        with pytest.raises(BadValue, match=words):
            call()


def test_a_temperature_that_float32_cannot_divide_by_is_greedy(lettered):
    greedy = jaxkv.generate(lettered, IDS, max_new_tokens=4, stop_tokens=()).tokens
    cold = jaxkv.generate(lettered, IDS, max_new_tokens=4, stop_tokens=(), temperature=1e-46, seed=3).tokens
    assert cold.tolist() == greedy.tolist()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: jaxkv.policy("cake", budget=64, tau1=NAN), "tau1=nan of cake: expected a number"),
        (lambda: jaxkv.policy("cake", budget=64, tau1=INFINITY), "tau1=inf of cake: expected a finite number"),
        (lambda: jaxkv.policy("streaming-llm", budget=64, sinks=1.5), "sinks=1.5 of select: expected a whole number"),
        (lambda: jaxkv.policy("snapkv", budget=99, own_keys="maybe"), "own_keys='maybe'.*true or false"),
        (lambda: jaxkv.policy("laq", budget=99, draft_times=0.5), "draft_times=0.5: expected 1 or more"),
        (
            lambda: jaxkv.policy("laq", budget=99, draft_pool="sum"),
            "draft_pool='sum'.*: expected 'none', 'avg' or 'max'",
        ),
        (lambda: jaxkv.policy("laq", budget=99, draft_kernel=4), "draft_kernel=4: expected .*an odd number"),
        (lambda: jaxkv.policy("h2o", budget="many"), "budget='many'"),
        (lambda: jaxkv.policy("h2o", ratio="half"), "ratio='half'"),
        (lambda: jaxkv.policy("h2o", ratio=NAN), "ratio=nan"),
        (lambda: jaxkv.policy("h2o", budget=2**30 + 1), "at most 2\\*\\*30"),
        (lambda: jaxkv.policy("h2o", budget=9, store="int"), "store='int'"),
        (lambda: jaxkv.policy("h2o", budget=9, evicted=4), "evicted=4"),
        (lambda: jaxkv.policy("kivi", score="any"), "score= of policy 'kivi', which has no phase: add prefill="),
        (lambda: jaxkv.policy("h2o", budget=9, score=KeyDiff), "score=the class KeyDiff of phase: expected Score"),
        (lambda: jaxkv.policy("h2o", budget=9, decode=Phase), "decode=the class Phase: expected the name"),
        (lambda: jaxkv.policy("snapkv", budget=99, decode=named("h2o")), "decode=.*expected the name of a policy"),
        (lambda: jaxkv.policy("elastic-cache", budget=99, allocate=Adaptive()), "set grow=false"),
        (lambda: jaxkv.policy("scope-adaptive", budget=99, allocate=Adaptive()), "set grow=0"),
        (lambda: jaxkv.policy("h2o", budget=9, decay="x"), "decay='x'"),
        (lambda: jaxkv.policy("h2o", budget=2**30, sinks=2**30, recent=0.9, reserve=0.0989), "expected at least"),
        (lambda: Phase(select=Select(sinks=True)), "sinks=True"),
        (lambda: Policy("p", prefill=LastQueries()), "prefill="),
        (lambda: from_dict({"name": "p", "prefill": {"select": {"sinks": "4"}}}), "sinks='4'"),
        (lambda: from_dict({"name": "p", "prefill": 4}), "expected a table"),
        (lambda: from_dict({"name": "p", "prefill": {"score": {"kind": ["recency"]}}}), "with its kind"),
    ],
)
def test_fields_of_policies(make, words):
    with pytest.raises(BadValue, match=words):
        make()


def test_tables_that_hold_themselves():
    table = {"kind": "scaled"}
    table["of"] = table
    with pytest.raises(BadValue, match="contain themselves"):
        from_dict({"name": "p", "prefill": {"score": table}})
    with pytest.raises(UnknownName, match="'5'"):
        from_dict({"name": "p", 5: 1})


def test_a_list_is_as_good_as_a_tuple():
    settings = {"name": "mine", "tasks": [Tasks(name="passkey", lengths=[256])]}
    made = Settings(policies=["full", "h2o"], budgets=[32], **settings)
    assert made.policies == ("full", "h2o") and made.budgets == (32,) and made.tasks[0].lengths == (256,)
    with pytest.raises(BadValue, match=r"policies='full' of settings: expected a list$"):
        Settings(policies="full", budgets=[32], **settings)


def test_numbers_of_numpy_become_pythons():
    policy = jaxkv.policy("streaming-llm", budget=np.int64(64), sinks=np.int32(2))
    assert type(policy.budget) is int and type(policy.decode.select.sinks) is int
    assert policy == jaxkv.policy("streaming-llm", budget=64, sinks=2)


@dataclasses.dataclass(frozen=True)
class Undefined(Score):
    """NaN for the entry at one position."""

    at: int = 0
    kind: ClassVar[str] = "undefined"

    def factors(self, stats, positions, now):
        return 0.0, jnp.where(positions == self.at, jnp.nan, positions.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Flat(Score):
    """One number too few."""

    kind: ClassVar[str] = "flat"
    linear: ClassVar[bool] = False

    def score(self, stats, inputs):
        return inputs.at[..., 1:].astype(jnp.float32)


@pytest.mark.long
def test_a_score_of_ones_own_gives_a_number_for_each_entry(lettered):
    def said(score):
        policy = Policy("mine", prefill=Phase(score=score), decode=Phase(score=score), budget=6)
        return jaxkv.generate(lettered, IDS, policy=policy, max_new_tokens=4, stop_tokens=()).tokens.shape

    for score, words in (
        (Undefined(0), "'undefined' gave NaN"),  # in the prompt
        (Undefined(len(IDS)), "'undefined' gave NaN"),  # while decoding
        (Flat(), "'flat' gave float32 .1, 2, 15.: expected a float32 for each of the entries, .1, 2, 16."),
    ):
        with pytest.raises(BadValue, match=words):
            said(score)
    assert said(Undefined(99)) == (1, 4), "no entry has that position"


@pytest.mark.long
def test_a_score_without_numbers_in_an_engine(lettered):
    """In the prompt it is the request that fails; while decoding, where all rows are in one program, the engine."""

    def asked(at):
        score = Undefined(at)
        policy = Policy("mine", prefill=Phase(score=score), decode=Phase(score=score), budget=6)
        engine = Engine(lettered, policy, rows=1, longest=32, max_new_tokens=8)
        answer = engine.submit(IDS, max_new_tokens=6, stop_tokens=())
        while engine.turn():
            pass
        return answer

    with pytest.raises(BadValue, match="'undefined' gave NaN"):
        asked(0).wait()
    with pytest.raises(BadValue, match="'undefined' gave NaN"):
        asked(len(IDS) + 1)
    assert len(asked(99).wait().tokens) == 6


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rms_norm_eps": -1}, "norm_eps is -1"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps is nan"),
        ({"rope_parameters": {"rope_theta": -1.0}, "rope_scaling": None}, "theta=-1"),
        ({"rope_parameters": {"rope_theta": NAN}, "rope_scaling": None}, "rope_theta is nan"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"hidden_size": 2.5}, "hidden_size is 2.5"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
        ({"rope_parameters": [1]}, "rope_parameters is \\[1\\]: expected a table"),
        ({"text_config": 5}, "text_config is 5: expected a table"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ],
)
def test_configs(goldens, changes, words):
    facts = json.loads((goldens / "tiny" / FAMILY / "config.json").read_text())
    assert ModelConfig.from_hf(facts).num_layers == 2
    with pytest.raises(BadValue, match=words):
        ModelConfig.from_hf({**facts, **changes})


@pytest.mark.long
def test_slots_are_those_that_the_text_needs(lettered):
    """A budget beyond all bounds runs as the full cache does, in as many slots, and a call that goes on adds some."""
    prompt = np.random.default_rng(0).integers(3, 90, 40).astype(np.int32)
    policy = jaxkv.policy("h2o", budget=2**30)
    begun = jaxkv.generate(lettered, prompt, policy=policy, max_new_tokens=8, stop_tokens=())
    more = jaxkv.generate(lettered, cache=begun.cache, max_new_tokens=24, stop_tokens=())
    full = jaxkv.generate(lettered, prompt, max_new_tokens=32, stop_tokens=())
    assert np.concatenate([begun.tokens, more.tokens], axis=1).tolist() == full.tokens.tolist()
    assert [layer.slots for layer in begun.cache.layers] == [64, 64]
    assert [layer.slots for layer in more.cache.layers] == [128, 128] and more.stats.kept == (71.0,)


@pytest.mark.parametrize("budget, room, slots", [(8192, 8, 8192), (8193, 8, 64), (2**20, 100, 160), (2**30, 100, 160)])
def test_a_large_budget_is_laid_out_as_needed(tiny, budget, room, slots):
    policy = jaxkv.policy("h2o", budget=budget)
    shapes, _, limits = plan(policy, tiny(FAMILY).config, None, np.array([40]), room)
    assert shapes.slots == (slots, slots) and limits.max() == min(budget, 2**21)


def test_a_config_of_more_layers_than_the_weights(goldens, tmp_path):
    shutil.copytree(goldens / "tiny" / FAMILY, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    facts = json.loads(config.read_text())
    for layers, error, words in (
        (10**9, BadValue, "num_hidden_layers is 1000000000"),
        (9999, BadWeights, "9999 layers: the weights have 2 layers; missing"),
    ):
        config.write_text(json.dumps({**facts, "num_hidden_layers": layers}))
        with pytest.raises(error, match=words):
            jaxkv.load(tmp_path / "model")
