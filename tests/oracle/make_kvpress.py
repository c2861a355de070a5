"""Scores and kept positions of kvpress 0.5.5 on the tiny models and, given its GGUF, on SmolLM2.

    python tests/oracle/make_kvpress.py [path/to/SmolLM2-135M-Instruct.Q4_1.gguf]

`kvpress/<model>.npz` holds the methods that jaxkv has first, `kvpress/<model>-more.npz` those that follow, and
`kvpress/<model>-family.npz`, `-calibrated.npz`, `-pools.npz`, `-replay.npz` and `-compose.npz` (tiny models) the last
ones. The keys:
`ids` int32 [1, S]; `<method>/r<ratio>/layer<i>/scores` float32 [Hk, S], higher = keep; `.../kept` int16 [Hk, n],
sorted; `.../margin` float32 [Hk]: the lowest kept score less the highest dropped one, relative to the larger of the two
(0: a tie, where any choice is right).
AdaKV's and KVzip's heads and KVCompose's layers keep different numbers: `.../kept_mask` bool [Hk, S] in place of
`kept`, and one margin for the layer.
ChunkKV ranks chunks, not tokens: its margin is that of the mean scores of chunks, the same for all heads.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # tests/measured.py

import kvpress
import numpy as np
import torch
import transformers
from common import GOLDENS, save
from measured import measured
from prose import HARBOUR
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

# name -> press for a ratio; "eager" where kvpress needs the model's own attention weights.
FIRST = {
    "tova": (lambda r: kvpress.TOVAPress(r), "sdpa"),
    "knorm": (lambda r: kvpress.KnormPress(r), "sdpa"),
    "streaming-s4": (lambda r: kvpress.StreamingLLMPress(r, n_sink=4), "sdpa"),
    "observed": (lambda r: kvpress.ObservedAttentionPress(r), "eager"),
}
SMALL = FIRST | {
    "snapkv-w8-k5": (lambda r: kvpress.SnapKVPress(r, window_size=8, kernel_size=5), "sdpa"),
    "snapkv-w16-k7": (lambda r: kvpress.SnapKVPress(r, window_size=16, kernel_size=7), "sdpa"),
}
LARGE = FIRST | {"snapkv-w64-k5": (lambda r: kvpress.SnapKVPress(r, window_size=64, kernel_size=5), "sdpa")}

MORE = {
    "keydiff": (lambda r: kvpress.KeyDiffPress(r), "sdpa"),
    "cur": (lambda r: kvpress.CURPress(r), "sdpa"),
    "expected-n512": (lambda r: kvpress.ExpectedAttentionPress(r), "sdpa"),
    "expected-n512-e0.01": (lambda r: kvpress.ExpectedAttentionPress(r, epsilon=1e-2), "sdpa"),
    "cap": (lambda r: kvpress.CapPress(r), "sdpa"),
}
SMALL_MORE = MORE | {
    "lagkv-l16": (lambda r: kvpress.LagKVPress(r, lag_size=16), "sdpa"),
    "pyramidkv-w8-k5-b20": (lambda r: kvpress.PyramidKVPress(r, window_size=8, kernel_size=5), "sdpa"),
    "chunkkv-c10-snapkv-w8-k5": (
        lambda r: kvpress.ChunkKVPress(kvpress.SnapKVPress(r, window_size=8), chunk_length=10),
        "sdpa",
    ),
    "adakv-snapkv-w8-k5": (lambda r: kvpress.AdaKVPress(kvpress.SnapKVPress(r, window_size=8)), "sdpa"),
}
LARGE_MORE = MORE | {
    "lagkv-l128": (lambda r: kvpress.LagKVPress(r, lag_size=128), "sdpa"),
    "pyramidkv-w8-k5-b20": (lambda r: kvpress.PyramidKVPress(r, window_size=8, kernel_size=5), "sdpa"),
    "chunkkv-c20-snapkv-w64-k5": (lambda r: kvpress.ChunkKVPress(kvpress.SnapKVPress(r)), "sdpa"),
    "adakv-snapkv-w64-k5": (lambda r: kvpress.AdaKVPress(kvpress.SnapKVPress(r)), "sdpa"),
}

# Gemma 3: kvpress rescales by 1/sqrt(head_dim) where it recomputes attention, but the model by query_pre_attn_scalar,
# so the model's own weights are taken; and its Expected Attention and CapKV do not run on it under transformers 5.2.
GEMMA = {name: (make, "eager") for name, (make, _) in SMALL.items()}
GEMMA_MORE = {name: SMALL_MORE[name] for name in ("keydiff", "cur", "lagkv-l16")}


class Finch(kvpress.FinchPress):
    """Finch with a window given by hand, without the delimiter token that it looks for in the prompt."""

    __call__ = kvpress.BasePress.__call__


def finch(ratio: float, window: int):
    press = Finch(ratio, rerotate_keys=False)
    press.window_size = window
    return press


def sketched(score):
    """A press' `score`, with the sketch of `sketch_of`, so that another implementation can draw the same."""

    def scored(self, module, hidden_states, keys, *rest):
        randn = torch.randn
        torch.randn = lambda batch, heads, dims, width, **_: torch.tensor(sketch_of(heads, dims, width))[None]
        try:
            return score(self, module, hidden_states, keys, *rest)
        finally:
            torch.randn = randn

    return scored


class Leverage(kvpress.LeverageScorePress):
    """Leverage scores with that sketch."""

    score = sketched(kvpress.LeverageScorePress.score)


def sketch_of(heads: int, dims: int, width: int) -> np.ndarray:
    """Standard normal numbers [heads, dims, width], float32."""
    return np.random.default_rng(0).standard_normal((heads, dims, width)).astype(np.float32)


class Compactor(kvpress.CompactorPress):
    """Compactor with that sketch."""

    score = sketched(kvpress.CompactorPress.score)


# The methods that came last; for the tiny models only. Chunks of 40 divide the 120 tokens, and 36 those that Compactor
# has not cut off: kvpress' non-causal attention lets padding leak into a shorter last chunk.
FAMILY = {
    "criticalkv-snapkv-w8-k5": (lambda r: kvpress.CriticalKVPress(kvpress.SnapKVPress(r, window_size=8)), "sdpa"),
    "leverage-s48": (lambda r: Leverage(r), "sdpa"),
    "noncausal-c40": (lambda r: kvpress.NonCausalAttnPress(r, chunk_size=40), "sdpa"),
    "compactor-c36": (lambda r: Compactor(r, chunk_size=36), "sdpa"),
    "chunk-c40-knorm": (lambda r: kvpress.ChunkPress(kvpress.KnormPress(r), chunk_length=40), "sdpa"),
    "finch-w8": (lambda r: finch(r, 8), "sdpa"),
    "egchunkkv-c10-knorm": (lambda r: kvpress.EntropyGatedChunkKVPress(kvpress.KnormPress(r), chunk_length=10), "sdpa"),
}


class QFilters(kvpress.QFilterPress):
    """Q-Filters whose filters are given by hand; kvpress' own point away from the queries."""

    def post_init_from_model(self, model):
        pass


def calibrated(sizes: tuple[int, int, int, int]) -> dict:
    """The methods that need a calibration, with the made-up one of `tests/measured.py`."""
    given = {name: torch.tensor(value) for name, value in measured(*sizes).items()}

    def filters(ratio: float):
        press = QFilters(ratio)
        press.q_filters = -given["query_direction"]
        return press

    def stats(ratio: float):
        press = kvpress.ExpectedAttentionStatsPress(ratio)
        press.mu, press.cov = given["query_mean"], given["query_covariance"]
        return press

    return {"qfilters": (filters, "sdpa"), "expected-stats-n512": (stats, "sdpa")}


def curved(sizes: tuple[int, int, int, int]) -> dict:
    """LU-KV by the made-up curves of `tests/measured.py`; kvpress' are of what is removed, rows first."""
    removed = 1 - measured(*sizes)["utility_curves"].transpose(1, 0, 2)

    def press(ratio: float):
        press = kvpress.LUKVPress(compression_ratio=ratio)
        press._budget_curves = removed
        return press

    return {"lukv-expected-n512": (press, "sdpa")}


PLAIN_FAMILY = {
    name: FAMILY[name]
    for name in ("leverage-s48", "noncausal-c40", "compactor-c36", "chunk-c40-knorm", "egchunkkv-c10-knorm")
}
CALIBRATED = ("llama2", "llama3")
LAST = {
    "gemma3_text": PLAIN_FAMILY,
    "qwen2": PLAIN_FAMILY | {"finch-w8": FAMILY["finch-w8"]},  # CriticalKV wants a head_dim in the configuration
}

# Heads that compete. CriticalKV wants a head_dim in the configuration, which Qwen2's has not; Gemma as above.
COMPETING = {
    "adakv-knorm": (lambda r: kvpress.AdaKVPress(kvpress.KnormPress(r)), "sdpa"),
    "adakv-keydiff-a0.5": (lambda r: kvpress.AdaKVPress(kvpress.KeyDiffPress(r), alpha_safeguard=0.5), "sdpa"),
}
POOLS = COMPETING | {
    "criticaladakv-snapkv-w8-k5": (lambda r: kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(r, window_size=8)), "sdpa"),
    "adakv-expected-n512-e0.01": (
        lambda r: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(r, epsilon=1e-2)),
        "sdpa",
    ),
}
LAST_POOLS = {"gemma3_text": COMPETING, "qwen2": COMPETING}

# KVzip replays the prompt behind it; every layer keeps as much as the others, and its heads compete.
REPLAY = {
    "kvzip": (lambda r: kvpress.KVzipPress(r, layerwise=True), "sdpa"),
    "kvzip-plus": (lambda r: kvpress.KVzipPress(r, layerwise=True, kvzip_plus_normalization=True), "sdpa"),
}
# KVCompose looks with the prompt behind itself; the layers share one budget.
COMPOSE = {"kvcompose": (lambda r: kvpress.KVComposePress(compression_ratio=r), "sdpa")}
INSTRUCTION = (7, 11, 13)  # stands for the tokens of KVzip's instruction

# family -> (configuration file, methods, more methods)
TINY = {
    "llama2": ("config.json", SMALL, SMALL_MORE),
    "llama3": ("config.json", SMALL, SMALL_MORE),
    "qwen2": ("config.json", SMALL, SMALL_MORE),
    "qwen3": ("config.json", SMALL, SMALL_MORE),
    "mistral": ("config-full.json", SMALL, SMALL_MORE),  # no sliding window: kvpress' scorers know of none
    "gemma3_text": ("config.json", GEMMA, GEMMA_MORE),
}
MARGIN = 2e-5  # the smallest allowed on a tiny model: rounding differences between frameworks stay far below
SMOLLM2_SCORES = (0, 7, 15, 29)  # layers whose scores are stored


def positions_of(rows: torch.Tensor, kept: torch.Tensor) -> np.ndarray:
    """Where each kept key [Hk, n, D] stood among all keys [Hk, S, D], by equality: sorted int16 [Hk, n]."""
    same = (kept[:, :, None] == rows[:, None]).all(-1)
    assert (same.sum(-1) == 1).all(), "a kept key is not one of the keys, or not only one"
    return np.sort(same.int().argmax(-1).numpy(), axis=-1).astype(np.int16)


def margins(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Per row of scores, the lowest kept less the highest dropped, relative to the larger of the two."""
    lowest = np.where(mask, scores, np.inf).min(-1)
    highest = np.where(mask, -np.inf, scores).max(-1)
    size = np.maximum(np.abs(lowest), np.abs(highest))
    return ((lowest - highest) / np.where(size > 0, size, 1)).astype(np.float32)


def gate_margin(scores: np.ndarray, press) -> float:
    """How far apart any two of the tokens' and the chunks' scores and entropies [S] are, at least, relatively."""
    chunks = scores.reshape(-1, press.chunk_length)
    above = chunks - np.minimum(chunks.min(1, keepdims=True), 0)
    share = above / (above.sum(1, keepdims=True) + 1e-8)
    entropy = -(share * np.log(share + 1e-8)).sum(1) / np.log(press.chunk_length)
    smallest = 1.0
    for values in (scores, chunks.mean(1), entropy):
        line = np.sort(values)
        smallest = min(smallest, float((np.diff(line) / np.maximum(np.abs(line[1:]), 1e-12)).min()))
    return smallest


def critical_margin(scores: np.ndarray, safe: np.ndarray, mask: np.ndarray, press, values, module) -> np.ndarray:
    """The smaller of the margins of CriticalAdaKV's two choices inside each head [Hk]."""
    norms = kvpress.CriticalKVPress.vwl1norm(values, module)[0].float().numpy()
    sure = np.where(safe, np.float32(3e38), scores)
    first = np.zeros(mask.shape, bool)
    for head, kept in enumerate(mask.sum(-1)):
        first[head, np.argsort(-sure[head])[: int(kept * press.first_stage_ratio)]] = True
    second = np.where(first | safe, np.float32(3e38), (scores + press.epsilon) * norms)
    return np.minimum(margins(sure, first | safe), margins(second, mask))


def watch(press, seen: dict[int, dict[str, np.ndarray]]):
    """The press, telling `seen` per layer what it scored and kept."""
    scorer = getattr(press, "press", press)
    if isinstance(press, kvpress.CriticalKVPress):
        scorer = press
    score, compress = scorer.score, press.compress

    def scored(module, hidden_states, keys, *rest):
        scores = score(module, hidden_states, keys, *rest)
        assert scores.shape == keys.shape[:3] and len(scores) == 1
        new = scores[0].detach().clone().float().numpy()
        if isinstance(press, kvpress.ChunkPress) and module.layer_idx in seen and "kept" not in seen[module.layer_idx]:
            new = np.concatenate([seen[module.layer_idx]["scores"], new], axis=-1)
        seen[module.layer_idx] = {"scores": new}
        return scores

    def compressed(module, hidden_states, keys, values, attentions, kwargs):
        out = compress(module, hidden_states, keys, values, attentions, kwargs)
        entry = seen[module.layer_idx]
        scores = entry["scores"]
        if isinstance(press, kvpress.AdaKVPress | kvpress.CriticalAdaKVPress):
            _, heads, slots = (x.numpy() for x in module.masked_key_indices)
            mask = np.ones(scores.shape, bool)
            mask[heads, slots] = False
            entry["kept_mask"] = mask
            safe = np.sort(scores, axis=-1)[:, -max(1, int(mask.sum() // len(mask) * press.alpha_safeguard)), None]
            free = np.where(scores >= safe, np.inf, scores)  # the safeguard's entries are kept whatever the others
            free = np.where(np.isinf(free), np.float32(3e38), free)
            chosen = mask
            if isinstance(press, kvpress.CriticalAdaKVPress):  # the shares are those that AdaKV would have given
                chosen = free >= np.sort(free, axis=None)[-mask.sum()]
                assert (chosen.sum(-1) == mask.sum(-1)).all()
                inside = critical_margin(scores, scores >= safe, mask, press, values, module).min()
            entry["margin"] = margins(free.reshape(1, -1), chosen.reshape(1, -1))
            if chosen is not mask:
                entry["margin"] = np.minimum(entry["margin"], inside)
        elif isinstance(press, kvpress.LUKVPress):
            _, heads, slots = (x.numpy() for x in module.masked_key_indices)
            mask = np.ones(scores.shape, bool)
            mask[heads, slots] = False
            entry["kept_mask"] = mask
            free = scores.copy()
            free[:, : press.sink] = free[:, -press.window :] = np.float32(3e38)
            entry["margin"] = np.concatenate([margins(free[[at]], mask[[at]]) for at in range(len(mask))])
        else:
            kept = positions_of(keys[0], out[0][0])
            mask = np.zeros(scores.shape, bool)
            np.put_along_axis(mask, kept.astype(int), True, axis=-1)
            entry["kept"] = kept
            if isinstance(press, kvpress.EntropyGatedChunkKVPress):
                entry["margin"] = np.full(len(scores), gate_margin(scores.sum(0), press), np.float32)
            elif isinstance(press, kvpress.ChunkKVPress):
                starts = np.arange(0, scores.shape[-1], press.chunk_length)
                sizes = np.diff([*starts, scores.shape[-1]])
                means = np.add.reduceat(scores.sum(0), starts) / sizes
                entry["margin"] = np.repeat(margins(means[None], mask[0, starts][None]), len(scores))
            elif isinstance(press, kvpress.ChunkPress):
                ends = range(0, scores.shape[-1], press.chunk_length)
                each = [
                    margins(scores[:, a : a + press.chunk_length], mask[:, a : a + press.chunk_length]) for a in ends
                ]
                entry["margin"] = np.min(each, axis=0)
            else:
                entry["margin"] = margins(scores, mask)
        assert (entry["margin"] >= -1e-6).all(), f"kept positions do not follow the scores: {entry['margin']}"
        return out

    scorer.score, press.compress = scored, compressed
    return press


class NoTokenizer:
    """In place of the tokenizer that KVzip loads: no chat template, and the instruction in tokens."""

    chat_template = None

    @classmethod
    def from_pretrained(cls, name: str) -> "NoTokenizer":
        return cls()

    def encode(self, text: str, **_) -> torch.Tensor:
        return torch.tensor([INSTRUCTION if "Repeat" in text else ()], dtype=torch.long)


def run_prompt(model, ids: torch.Tensor, press) -> None:
    """One prefill under the press. The cache is made without the config, as in kvpress' pipeline: no layer slides."""
    with torch.no_grad(), press(model):
        model(ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)


def replay(model, ids: torch.Tensor, press) -> dict[int, dict[str, np.ndarray]]:
    """What KVzip scored and kept in each layer."""
    seen: dict[int, dict[str, np.ndarray]] = {}
    finish = press.compress_post

    def finished(model):
        finish(model)
        for index, layer in enumerate(model.model.layers):
            scores = press.score_val[index, 0].float().numpy().copy()
            _, heads, slots = (x.numpy() for x in layer.self_attn.masked_key_indices)
            mask = np.ones(scores.shape, bool)
            mask[heads, slots] = False
            layer.self_attn.masked_key_indices = None
            margin = margins(scores.reshape(1, -1), mask.reshape(1, -1))
            seen[index] = {"scores": scores, "kept_mask": mask, "margin": margin}

    press.compress_post = finished
    module = kvpress.presses.kvzip_press
    tokenizer, module.AutoTokenizer = module.AutoTokenizer, NoTokenizer
    try:
        run_prompt(model, ids, press)
    finally:
        module.AutoTokenizer = tokenizer
    return seen


def composed(model, ids: torch.Tensor, press) -> dict[int, dict[str, np.ndarray]]:
    """What KVCompose scored and kept in each layer."""
    seen: dict[int, dict[str, np.ndarray]] = {}

    def told(model):
        line = press.composite_scores_per_layer.float().numpy()
        counts = press.important_per_layer
        between = margins(line.reshape(1, -1), (np.arange(line.shape[1]) < counts[:, None]).reshape(1, -1))
        for index, heads in enumerate(press.important_mask_per_kv_head):
            scores, mask = press.scores[index].float().numpy().copy(), torch.stack(heads).numpy()
            margin = np.minimum(between, margins(scores, mask).min(keepdims=True))
            seen[index] = {"scores": scores, "kept_mask": mask, "margin": margin}

    press.compress_cache = told
    run_prompt(model, ids, press)
    return seen


def prefill(model, ids: torch.Tensor, press) -> dict[int, dict[str, np.ndarray]]:
    """What the press scored and kept in each layer during one prefill."""
    if isinstance(press, kvpress.KVzipPress):
        return replay(model, ids, press)
    if isinstance(press, kvpress.KVComposePress):
        return composed(model, ids, press)
    seen: dict[int, dict[str, np.ndarray]] = {}
    run_prompt(model, ids, watch(press, seen))
    return seen


class NearTie(Exception):
    """Kept positions that rounding could change."""


def run(
    models: dict, ids: torch.Tensor, methods: dict, ratios, score_layers=None, need: float = -1.0
) -> dict[str, np.ndarray]:
    """Every method at every ratio, as the arrays of one npz. Raises `NearTie` for a margin below `need`."""
    arrays = {"ids": ids.numpy().astype(np.int32)}
    for method, (make, attention) in methods.items():
        for ratio in ratios:
            model = models[attention]
            seen = prefill(model, ids, make(ratio))
            smallest = min(float(entry["margin"].min()) for entry in seen.values())
            for layer, entry in seen.items():
                assert np.ptp(entry["scores"]) > 0, "constant scores"
                if score_layers is not None and layer not in score_layers:
                    entry.pop("scores")
                arrays |= {f"{method}/r{ratio}/layer{layer}/{name}": array for name, array in entry.items()}
            if smallest < need:
                raise NearTie(f"{method} r={ratio}: margin {smallest:.1e}")
            print(f"  {method} r={ratio}: layers {sorted(seen)}, smallest margin {smallest:.1e}")
    return arrays


def agree(models: dict, ids: torch.Tensor) -> None:
    """kvpress' recomputed window attention must equal the model's own weights."""
    for make in (SMALL["snapkv-w8-k5"][0], SMALL["tova"][0]):
        recomputed, observed = (prefill(models[name], ids, make(0.5)) for name in ("sdpa", "eager"))
        for layer in recomputed:
            np.testing.assert_allclose(recomputed[layer]["scores"], observed[layer]["scores"], rtol=2e-3, atol=1e-5)


def tiny(family: str, config_file: str) -> dict:
    """The tiny model with both attention implementations; Gemma 3 in the class that kvpress knows."""
    folder = GOLDENS / "tiny" / family
    config = AutoConfig.for_model(**json.loads((folder / config_file).read_text()))
    models = {}
    for attention in ("sdpa", "eager"):
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation=attention
        ).eval()
        if family == "gemma3_text":
            # kvpress leaves sliding layers alone only in the multimodal class: put the text model into one.
            vision = {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            }
            whole = Gemma3ForConditionalGeneration._from_config(
                Gemma3Config(text_config=config.to_dict(), vision_config=vision, mm_tokens_per_image=4),
                attn_implementation=attention,
            ).eval()
            whole.model.language_model.load_state_dict(model.model.state_dict())
            model = whole
        models[attention] = model
    return models


def last_methods(
    family: str, models: dict, name: str, methods: dict, first: int, ratios: tuple[float, ...] = (0.3, 0.5, 0.75)
) -> None:
    """`kvpress/<family>-<name>.npz`: the methods on ids of their own, from a `first` seed on."""
    vocabulary = models["sdpa"].config.get_text_config().vocab_size
    for seed in range(first, first + 500):
        ids = 3 + torch.randperm(vocabulary - 3, generator=torch.Generator().manual_seed(seed))[None, :120]
        try:
            arrays = run(models, ids, methods, ratios, need=MARGIN)
        except NearTie as tie:
            print(f"  seed {seed}: {tie}: trying the next")
        else:
            break
    else:
        raise SystemExit(f"{family}: no seed without near ties")
    save(GOLDENS / "kvpress" / f"{family}-{name}.npz", arrays)


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    for family, (config_file, methods, more) in TINY.items():
        print(family)
        models = tiny(family, config_file)
        vocabulary = models["sdpa"].config.get_text_config().vocab_size
        for seed in range(500):
            # No token twice: the same token has the same key norm in layer 0, a tie.
            ids = 3 + torch.randperm(vocabulary - 3, generator=torch.Generator().manual_seed(seed))[None, :120]
            try:
                results = [run(models, ids, chosen, (0.3, 0.5, 0.75), need=MARGIN) for chosen in (methods, more)]
            except NearTie as tie:
                print(f"  seed {seed}: {tie}: trying the next")
            else:
                break
        else:
            raise SystemExit(f"{family}: no seed without near ties")
        if family != "gemma3_text":
            agree(models, ids)
        for name, arrays in zip((family, f"{family}-more"), results, strict=True):
            save(GOLDENS / "kvpress" / f"{name}.npz", arrays)
        last_methods(family, models, "family", LAST.get(family, FAMILY), 1000)
        last_methods(family, models, "pools", LAST_POOLS.get(family, POOLS), 2000)
        if family != "gemma3_text":  # KVzip refuses it
            last_methods(family, models, "replay", REPLAY, 3000)
            last_methods(family, models, "compose", COMPOSE, 5000, (0.25, 0.5, 0.75))  # whole numbers of three layers
        if family in CALIBRATED:
            config = models["sdpa"].config
            heads = config.num_attention_heads, config.num_key_value_heads
            sizes = (config.num_hidden_layers, *heads, models["sdpa"].model.layers[0].self_attn.head_dim)
            last_methods(family, models, "calibrated", calibrated(sizes), 1000)
            last_methods(family, models, "curves", curved(sizes), 4000)
    if len(sys.argv) == 2:
        print("smollm2")
        path = Path(sys.argv[1])
        load = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        model = AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32).eval()
        ids = AutoTokenizer.from_pretrained(**load)(HARBOUR, add_special_tokens=False, return_tensors="pt").input_ids
        for name, chosen in (("smollm2", LARGE), ("smollm2-more", LARGE_MORE)):
            arrays = {}
            for attention in ("sdpa", "eager"):
                model.set_attn_implementation(attention)
                some = {method: entry for method, entry in chosen.items() if entry[1] == attention}
                arrays |= run({attention: model}, ids, some, (0.5, 0.75), SMOLLM2_SCORES)
            save(GOLDENS / "kvpress" / f"{name}.npz", arrays)


if __name__ == "__main__":
    main()
