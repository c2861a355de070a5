"""How releases merge what leaves: one cut, or one step, of each, with what stayed and what left given to the tests.

    python tests/oracle/make_merging.py FOLDER

FOLDER holds checkouts, each under its repository's name, of https://github.com/SUSTechBruce/LOOK-M (ecf0f51),
kkvcache/KeepKV (a25a2b5), SusCom-Lab/ZSMerge (4bab127), zyxxmu/cam (fc80e64) and liuzuyan/ElasticCache (3138e03). Their
functions and classes run unchanged, on random keys and values; kvpress 0.5.5 gives `MergingPress.merge`.

Elastic Cache runs without sinks: with them it shifts what it throws away by as many tokens. KeepKV computes cosines
and what it leaves in float16, so its cases are those where no cosine is near its threshold.
"""

import ast
import math
import sys
import types
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import GOLDENS, save
from released import function

TOKENS, HEADS, KEPT = 24, 2, 10


def class_of(file: Path, name: str, **given):
    """One class of a file whose other statements do not run; `given` are the names that it uses."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    exec(compile(tree, str(file), "exec"), given)
    return given[name]


def drawn(seed: int, dim: int, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with much in common, so that cosines are large, and values [1, H, S, D]."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 1, HEADS, tokens, dim, generator=generator)
    few = torch.randn(1, HEADS, 4, dim, generator=generator)
    return keys * 0.45 + few[:, :, torch.arange(tokens) % 4], values


def attention(seed: int, rows: int, tokens: int = TOKENS) -> torch.Tensor:
    """Causal weights [1, H, rows, S] of the last rows."""
    generator = torch.Generator().manual_seed(1000 + seed)
    logits = torch.randn(1, HEADS, rows, tokens, generator=generator)
    later = torch.arange(tokens) > torch.arange(tokens)[-rows:, None]
    return logits.masked_fill(later, -math.inf).softmax(-1)


def case(name, keys, values, stays, new_keys, new_values, **more) -> dict[str, np.ndarray]:
    """A cut as the tests read it: float32 inputs, which stay, and the survivors in time order after it."""
    arrays = {"keys": keys, "values": values, "stays": stays, "new_keys": new_keys, "new_values": new_values, **more}
    out = {}
    for key, x in arrays.items():
        x = x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
        out[f"{name}/{key}"] = x.astype(np.float32) if x.dtype.kind == "f" else x
    return out


def stay(index: torch.Tensor, tokens: int = TOKENS) -> torch.Tensor:
    return torch.zeros(index.shape[0], tokens, dtype=torch.bool).scatter(-1, index, True)


def look_m(folder: Path) -> dict[str, np.ndarray]:
    """`PivotKVCache_LayerWise`; its width of 128 channels is written in it."""
    file = folder / "LOOK-M/LLaVA-mix_merge_v1/llava/model/kv_token_merge/modify_llama.py"
    cache = class_of(file, "PivotKVCache_LayerWise", torch=torch, nn=torch.nn)
    keys, values = drawn(0, 128)
    weights = attention(0, TOKENS)
    running = cache(hh_size=6, recent_size=4)
    new_keys, new_values = running((keys.clone(), values.clone()), weights.clone())
    scores = weights.sum(0).sum(1)[:, : TOKENS - 4].clone()
    scores[:, :4] = math.inf
    best = scores.argsort(dim=-1, descending=True)[:, :6]
    recent = torch.arange(TOKENS - 4, TOKENS).repeat(HEADS, 1)
    return case("look-m", keys[0], values[0], stay(torch.cat([best, recent], -1)), new_keys[0], new_values[0])


def keepkv(folder: Path) -> dict[str, np.ndarray]:
    """`KV_update`, a prompt's cut and a step's, with the weights W = n s that it merges by."""
    file = folder / "KeepKV/utils_hh/modify_llama_oursk.py"
    given = {"torch": torch, "nn": torch.nn, "math": math, "F": F, "Optional": object, "Tuple": object, "np": np}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (owner,) = [n for n in tree.body if isinstance(n, ast.ClassDef)]
    (update,) = [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == "KV_update"]
    update.args = ast.parse("def f(self, past_key_value=None, attn_weights=None): pass").body[0].args
    update.returns = None
    exec(compile(ast.Module([update], []), str(file), "exec"), given)
    heavy, recent = 7, 3
    state = types.SimpleNamespace(
        epsilon=1e-7, sink_len=2, num_heads=HEADS,
        heavy_budget=heavy, recent_budget=recent, cache_budget=heavy + recent,
        distance_weight=1.2, similarity_threshold=0.8, prefill_similarity_threshold=0.8,
        previous_recent_scores=None, cluster_cnt=None,
    )  # fmt: skip
    found, (keys, values) = {}, drawn(3, 32, TOKENS + 2)
    held, at = (keys[:, :, :TOKENS], values[:, :, :TOKENS]), torch.arange(TOKENS).repeat(HEADS, 1)
    for number in range(3):
        length = held[0].shape[2]
        rows = length if number == 0 else 1
        generator = torch.Generator().manual_seed(50 + number)
        logits = torch.randn(1, HEADS, rows, length, generator=generator)
        later = torch.arange(length) > torch.arange(length)[-rows:, None]
        raised = torch.exp(logits.masked_fill(later, -math.inf))
        kept_before = None if state.previous_recent_scores is None else state.previous_recent_scores.clone()
        count = torch.ones(HEADS, length)
        if number:
            count[:, :-1] = state.cluster_cnt
            scores = torch.cat([F.pad(kept_before, (0, 1)), raised[0]], -2)[:, -recent:]
        else:
            scores = raised[0][:, -recent:].clone()
        chosen = (scores * torch.linspace(1.0, 1.2, scores.shape[-2])[None, :, None]).sum(1)[:, 2:-recent]
        best = chosen.topk(heavy - 2, dim=-1).indices + 2
        ends = torch.cat([torch.arange(2), torch.arange(length - recent, length)]).repeat(HEADS, 1)
        stays = stay(torch.cat([best, ends], -1), length)
        mean = scores.mean(1)
        seen = mean.clone()
        seen[:, -recent:] *= recent / torch.arange(recent, 0, -1)
        new_keys, new_values = given["KV_update"](state, held, raised)
        found |= case(
            f"keepkv/{number}", held[0][0], held[1][0], stays, new_keys[0], new_values[0],
            count=count, weight=count * (seen + 1e-7), new_count=state.cluster_cnt, at=at,
        )  # fmt: skip
        at = torch.cat([at[stays].view(HEADS, -1), torch.full((HEADS, 1), TOKENS + number)], -1)
        behind = lambda old, new, n=number: torch.cat([old.float(), new[:, :, TOKENS + n : TOKENS + n + 1]], 2)  # noqa: E731
        held = behind(new_keys, keys), behind(new_values, values)
    return found


def zsmerge(folder: Path) -> dict[str, np.ndarray]:
    """A prompt's cut (`cache_init`), steps after it (`cache_merge`), and attention over what they leave
    (`score_scaled_dot_product_attention`), with 3 residual slots: those, after the cut and after every step."""
    file = folder / "ZSMerge/mergekv/mergekv.py"
    split = function(file, "topk_split", torch=torch)
    init = function(file, "cache_init", torch=torch, topk_split=split)
    merge = function(file, "cache_merge", torch=torch)
    attend = function(file, "score_scaled_dot_product_attention", torch=torch, F=F, Tuple=tuple)
    dense, tail, steps = 3, 4, 3
    keys, values = drawn(5, 16)
    weights = attention(5, TOKENS)
    faded = (weights * 0.98 ** torch.arange(TOKENS - 1, -1, -1)[:, None]).sum(2)
    given = {"cache_budget": KEPT + dense, "cache_tail": tail, "cache_dense": dense, "score_update": "max"}
    held = list(init(keys.clone(), values.clone(), **given, scores=faded.clone()))
    best = faded[0, :, : TOKENS - tail].topk(KEPT - tail, -1).indices
    stays = stay(torch.cat([best, torch.arange(TOKENS - tail, TOKENS).repeat(HEADS, 1)], -1))
    residue = lambda x: x[0, :, :dense].clone()  # noqa: E731
    found = {name: [residue(held[number])] for number, name in enumerate(("new_keys", "new_values", "new_count"))}
    lost_keys, lost_values = [], []
    for number in range(steps):  # into which residual slot the lowest of the others goes
        lost = (held[3][..., dense:].argmin(-1) + dense)[..., None, None].expand(-1, -1, -1, 16)
        lost_keys.append(held[0].gather(2, lost)[0])
        lost_values.append(held[1].gather(2, lost)[0])
        new = drawn(60 + number, 16, 1)
        held = list(
            merge(*new, torch.ones(1, HEADS, 1), torch.full((1, HEADS, 1), 9.0), *held, metric="dot_product", **given)
        )
        for place, name in enumerate(("new_keys", "new_values", "new_count")):
            found[name].append(residue(held[place]))
    query = torch.randn(1, HEADS, 1, 16, generator=torch.Generator().manual_seed(61))
    output, _ = attend(query, held[0], held[1], pos_weight=held[2], scale_factor=0.6, shrink_factor=0.98)
    stacked = {name: torch.stack(each) for name, each in found.items()}
    return case(
        "zsmerge", keys[0], values[0], stays, stacked["new_keys"], stacked["new_values"],
        new_count=stacked["new_count"], lost_keys=torch.stack(lost_keys), lost_values=torch.stack(lost_values),
        rest_keys=held[0][0, :, dense:], rest_values=held[1][0, :, dense:], query=query[0], output=output[0],
    )  # fmt: skip


def elastic(folder: Path) -> dict[str, np.ndarray]:
    """`ElasticCache` without sinks, one layer."""
    torch.Tensor.cuda = lambda self, *_: self  # it names the device
    file = folder / "ElasticCache/kv_cache.py"
    given = {2: function(file, "slice2d")}
    cache = class_of(file, "ElasticCache", torch=torch, DIM_TO_SLICE=given)
    keys, values = drawn(7, 16)
    weights = attention(7, TOKENS)
    running = cache(start_size=0, recent_size=64, ratio=0.6, layer_num=1)
    ((new_keys, new_values),) = running([(keys.clone(), values.clone())], TOKENS, [weights])
    score = weights.mean(1)[0].sum(0)
    forget = int(TOKENS - TOKENS * (1 - 0.6))
    stays = torch.ones(TOKENS, dtype=torch.bool)
    stays[:-1] = score[:-1].argsort() > forget  # its mistake: no rank
    cut = case("elastic-cache", keys[0], values[0], stays.repeat(HEADS, 1), new_keys[0], new_values[0])
    return cut | {"elastic-cache/steps": held_by_elastic(cache)}


def held_by_elastic(cache) -> np.ndarray:
    """Which of 60 tokens it holds after each of 35 steps behind a prompt of 25, of which every third and the last stay
    as by a cut without its mistake, where the place that is freed lies 4 before the end."""
    running = cache(start_size=0, recent_size=64, ratio=0.6, distance=-4, layer_num=1)
    held = torch.tensor([0, 2, 5, 8, 11, 14, 17, 20, 23, 24])
    running.flag, running.selected_idx = False, len(held) - 4
    after = torch.zeros(35, 60, dtype=torch.bool)
    for step, at in enumerate(range(25, 60)):
        held = torch.cat([held, torch.tensor([at])])
        lies = held.double()[None, None, :, None]
        ((new, _),) = running([(lies, lies)], at + 1, [torch.zeros(1, 1, 1, len(held))])
        held = new.long().flatten()
        after[step, held] = True
    return after.numpy()


def cam(folder: Path) -> dict[str, np.ndarray]:
    """`slicev` at a step: the value before the window of 20 is spread over its first 16; the draws are written down."""
    generator = torch.Generator().manual_seed(9)
    found = {}
    for number, (low, high) in enumerate(((0.2, 0.99), (0.0, 0.3))):
        draws = torch.tensor([low, high])[None, :, None]  # of the two heads

        def bernoulli(chance, draws=draws):
            return (draws < chance).to(chance.dtype)

        patched = types.SimpleNamespace(**{n: getattr(torch, n) for n in ("cat", "mean", "isnan")}, bernoulli=bernoulli)
        slicev = function(folder / "cam/generate_task/streaming_llm/kv_cache_cam.py", "slicev", torch=patched)
        keys, values = drawn(10 + number, 16)
        weights = torch.rand(1, HEADS, 1, TOKENS, generator=generator)
        new, _ = slicev(values.clone(), TOKENS - 20, TOKENS, pos="recent", attn_weights=weights, merge=True)
        stays = torch.ones(HEADS, TOKENS, dtype=torch.bool)
        stays[:, TOKENS - 21] = False
        new_values = torch.cat([values[:, :, : TOKENS - 21], new], 2)
        new_keys = keys[0][stays].view(HEADS, -1, 16)
        found |= case(
            f"cam/{number}", keys[0], values[0], stays, new_keys, new_values[0], weight=weights[0, :, 0],
            draws=draws[0, :, 0],
        )  # fmt: skip
    return found


def kvpress() -> dict[str, np.ndarray]:
    """`MergingPress.merge` of kvpress."""
    from kvpress import KnormPress, MergingPress

    keys, values = drawn(11, 16)
    index = torch.rand(1, HEADS, TOKENS, generator=torch.Generator().manual_seed(12)).topk(KEPT, -1).indices
    _, after = MergingPress(KnormPress(0.5)).merge(keys, values, index)
    stays = stay(index[0])
    rest = lambda x: x[0][stays].view(HEADS, KEPT, -1)  # noqa: E731
    return case("value-merging", keys[0], values[0], stays, rest(keys), rest(after))


def main() -> None:
    folder = Path(sys.argv[1])
    arrays = {}
    for method in (look_m, keepkv, zsmerge, elastic, cam):
        arrays |= method(folder)
    save(GOLDENS / "policies" / "merging.npz", arrays | kvpress())


if __name__ == "__main__":
    main()
