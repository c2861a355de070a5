"""D2O as released, on random queries, keys and values: kept positions, merged tensors, thresholds, layer ratios.

    python tests/oracle/make_d2o.py PATH/TO/D2O

PATH is a checkout of https://github.com/AIoT-MLSys-Lab/D2O (commit 12c99d8). Its own model loop
(`LlamaModel.forward`), attention (`LlamaAttention3_D2O`) and cache (`D2O_LayerKVCache`) run unchanged, under a decoder
layer that is nothing but the attention: the projections hand out given vectors, the rotation is the identity, the
hidden states are idle. So the golden covers the order of things too, and later steps attend to merged keys.

The release works for 32 heads of 128 only (written into it), so a case of H heads of 8 is laid 32 / H times side by
side, with zeros behind the 8 channels and queries times sqrt(128 / 8) = 4. Copies of a head change nothing: cosines are
per head, and everything taken over heads is a mean, a minimum or a maximum.

What the cache decided (its mask, similarities, targets, flags) is read off its own local variables as it returns. Kept
positions are those of its mask; slots into which nothing was merged are then compared with the given vectors, and
merged ones with the formula.
"""

import contextlib
import io
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers  # before the stand-in for accelerate, which it would look into
from common import GOLDENS, save

HEADS, WIDTH = 32, 128  # the release's
DIM = 8
STEPS = 13  # the first holds the cut of the prompt
UNIT = 16  # inputs are multiples of 1 / 16, so that they are stored as int8
MARGIN = 2e-4  # smallest distance in a choice: scores relative, cosines absolute
LOUD = 0.15  # share of keys that lie towards the queries
FRACTION = 0.02  # how far (prompt + 1) * ratio stays from a whole number


class Unclear(Exception):
    """A choice that rounding could change, or a case that shows too little."""


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    prompt: int
    heavy: float  # ratios
    recent: float
    alpha: float = 0.5
    beta: float = 0.5
    layers: int = 5


def released(checkout: str):
    """Its two modules. accelerate is imported there and not used."""
    accelerate = types.ModuleType("accelerate")
    for name in ("Accelerator", "find_executable_batch_size", "DistributedType"):
        setattr(accelerate, name, None)
    sys.modules.setdefault("accelerate", accelerate)
    sys.path.insert(0, str(Path(checkout) / "LLM_merge_new"))
    from LMEval_kv_token_merge import modeling_llama3_7b_13b_d2o, modeling_llama3_new

    return modeling_llama3_7b_13b_d2o, modeling_llama3_new


class Given(torch.nn.Module):
    """A projection or a rotation that returns what was put into it."""

    value = None

    def forward(self, *_, **__):
        return self.value


class Identity(torch.nn.Module):
    def forward(self, hidden):
        return hidden


class Layer:
    """A decoder layer that is nothing but the attention."""

    def __init__(self, attention):
        self.self_attn = attention
        self.context = None

    def __call__(self, hidden, **kwargs):
        self.context, _, past = self.self_attn(hidden, **kwargs)
        return hidden, past


class Run:
    """The release's model loop over given queries, keys and values."""

    def __init__(self, checkout: str, case: Case):
        self.case = case
        theirs, loop = released(checkout)
        self.code, self.forward = theirs.D2O_LayerKVCache.__call__.__code__, loop.LlamaModel.forward
        copies = HEADS // case.heads
        config = types.SimpleNamespace(
            hidden_size=HEADS * WIDTH,
            num_attention_heads=HEADS,
            num_key_value_heads=copies * case.kv_heads,
            max_position_embeddings=8,
            rope_theta=1e4,
            rope_scaling=None,
            num_hidden_layers=case.layers,
            pretraining_tp=1,
            hh_size=0,
            recent_size=0,
            hh_ratio=case.heavy,
            recent_ratio=case.recent,
            alpha=case.alpha,
            belta=case.beta,
            output_attentions=False,
            output_hidden_states=False,
            use_cache=True,
            use_return_dict=True,
        )
        self.layers = []
        for index in range(case.layers):
            with torch.device("meta"), contextlib.redirect_stdout(io.StringIO()):  # its weights are never needed
                attention = theirs.LlamaAttention3_D2O(config, layer_idx=index)
            for name in ("q_proj", "k_proj", "v_proj", "rotary_emb"):
                delattr(attention, name)
                setattr(attention, name, Given())
            del attention.o_proj
            attention.o_proj = Identity()
            self.layers.append(Layer(attention))
        self.model = types.SimpleNamespace(
            config=config,
            layers=self.layers,
            norm=Identity(),
            gradient_checkpointing=False,
            training=False,
            _prepare_decoder_attention_mask=lambda *_: None,  # its attention makes its own
        )

    def clean(self) -> None:
        """What the release's LongBench script does between two samples."""
        for layer in self.layers:
            layer.self_attn._clean_cache()
            layer.self_attn.layer_hh_ratio = layer.self_attn.layer_recent_ratio = 0
            layer.self_attn.multimodal_entropy = layer.self_attn.prfill_size = 0

    def __call__(self, inputs: dict[str, torch.Tensor], start: int, stop: int, past=None):
        """Tokens start..stop-1 of [L, H, S, 8]: the new cache, and the local variables of every cache call."""
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn
            for name, scale in (("q", (WIDTH / DIM) ** 0.5), ("k", 1.0), ("v", 1.0)):
                given = inputs[name][index, :, start:stop] * scale
                given = torch.nn.functional.pad(given, (0, WIDTH - DIM))
                given = given.repeat(HEADS // self.case.heads, 1, 1).transpose(0, 1)
                getattr(attention, f"{name}_proj").value = given.reshape(1, stop - start, -1)
            shape = (1, 1, stop, WIDTH)
            attention.rotary_emb.value = torch.ones(shape), torch.zeros(shape)
        seen = {}

        def watch(frame, event, _):
            if event == "return" and frame.f_code is self.code:
                found = dict(frame.f_locals)
                seen[next(i for i, layer in enumerate(self.layers) if layer.self_attn.kv_cache is found["self"])] = (
                    found
                )

        sys.setprofile(watch)
        try:
            with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
                out = self.forward(
                    self.model,
                    inputs_embeds=torch.zeros(1, stop - start, HEADS * WIDTH),
                    attention_mask=torch.zeros(1),
                    position_ids=torch.arange(start, stop)[None],
                    past_key_values=past,
                )
        finally:
            sys.setprofile(None)
        return out.past_key_values, seen


def first_copy(array: torch.Tensor, heads: int) -> torch.Tensor:
    """[32, ...] -> [H, ...], after checking that the copies agree."""
    copies = array.reshape(-1, heads, *array.shape[1:])
    if array.dtype.is_floating_point:
        torch.testing.assert_close(copies, copies[:1].expand_as(copies), rtol=1e-6, atol=1e-6)
    elif not (copies == copies[:1]).all():
        raise Unclear("copies of a head differ")
    return copies[0].clone()


@dataclass
class Tracked:
    """One layer's slots, followed beside the release."""

    positions: torch.Tensor  # [H, C]
    pure: torch.Tensor  # [H, C]: nothing was merged into it
    keys: torch.Tensor
    values: torch.Tensor
    given: dict[str, torch.Tensor]  # every token's key and value [H, S, 8]
    record: list[dict] = field(default_factory=list)
    twice: bool = False  # two or more tokens went into one slot at once
    again: bool = False  # a merged slot took another token
    spilt: bool = False  # a merged slot was evicted
    upset: bool = False  # a step evicted a heavy token instead of the one that leaves the recent window


def merged(slots: torch.Tensor, gone: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(x + sum w e) / (1 + n) of one head, as loops."""
    out = slots.clone()
    for slot in target.unique():
        into = target == slot
        out[slot] = (slots[slot] + (weight[into, None] * gone[into]).sum(0)) / (1 + into.sum())
    return out


def follow(track: Tracked, found: dict, heads: int, past, layer: Layer, position: int) -> None:
    """One cache call: what it decided, checked, into the record."""
    cache = found["self"]
    new = torch.full((heads, 1), position)
    positions = torch.cat([track.positions, new], 1)
    pure = torch.cat([track.pure, torch.ones(heads, 1, dtype=torch.bool)], 1)
    keys = torch.cat([track.keys, track.given["keys"][:, position, None]], 1)
    values = torch.cat([track.values, track.given["values"][:, position, None]], 1)
    mask = first_copy(found["mask"], heads)
    flags = found["filter_indices"]
    similarity = first_copy(found["similarity"][0], heads)
    weight, target = first_copy(found["max_values"][0], heads), first_copy(found["max_indices"][0], heads)

    # Margins: the heavy choice, the targets of what is merged, the flags.
    scores = first_copy(found["select_hh_scores"], heads).sort(-1, descending=True).values
    last, first = scores[:, cache.hh_size - 1], scores[:, cache.hh_size]
    if ((last - first) / first < MARGIN).any():
        raise Unclear("heavy")
    best = similarity[:, flags].topk(2, -1).values
    if (best[..., 0] - best[..., 1] < MARGIN).any():
        raise Unclear("target")
    if ((weight.mean(0) - cache.threshold).abs() < MARGIN).any():
        raise Unclear("flag")

    def part(array, which):
        return array[which].view(heads, -1, *array.shape[2:])

    out = {
        "keys": first_copy(past[0][0], heads)[..., :DIM],
        "values": first_copy(past[1][0], heads)[..., :DIM],
    }
    assert not past[0][..., DIM:].any()
    kept, gone = part(positions, mask), part(positions, ~mask)
    for name, before in (("keys", keys), ("values", values)):
        stay, leave = part(before, mask), part(before, ~mask)
        for head in range(heads):
            want = merged(stay[head], leave[head][flags], weight[head][flags], target[head][flags])
            torch.testing.assert_close(out[name][head], want, rtol=1e-5, atol=1e-6)
    counts = torch.zeros(heads, cache.cache_size, dtype=torch.long)
    counts.scatter_add_(1, target[:, flags], torch.ones_like(target[:, flags]))
    still = part(pure, mask)
    track.twice |= bool((counts > 1).any())
    track.again |= bool(((counts > 0) & ~still).any())
    track.spilt |= bool((~part(pure, ~mask)).any())
    if track.record:
        track.upset |= bool((gone != position - cache.recent_size).any())
    pure = still & (counts == 0)
    scores = first_copy(cache.hh_score, heads)
    assert kept.shape == scores.shape and (scores[:, :4] == float("inf")).all() and scores[:, 4:].isfinite().all()
    assert (kept.diff(dim=1) > 0).all() and (kept[:, -cache.recent_size :] > position - cache.recent_size).all()
    for name, given in track.given.items():
        at = kept[..., None].expand_as(out[name])
        assert torch.equal(out[name][pure], given.gather(1, at)[pure])
    track.positions, track.pure, track.keys, track.values = kept, pure, out["keys"], out["values"]
    track.record.append(
        out
        | {
            "positions": kept,
            "scores": scores.clamp(max=torch.finfo().max),
            "tau": cache.threshold,
            "context": first_copy(layer.context.view(HEADS, WIDTH), heads)[:, :DIM],
            "evicted": gone,
            "similarity": weight,
            "targets": target,
            "merged": flags,
        }
    )


def draw(case: Case, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Queries, keys, values [L, H, length, 8] as int8. Keys share a direction per head, and so do queries, as real ones
    do; a few keys lie towards the queries, so that a late token can displace what the prompt attended to.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(case.layers, heads, tokens, DIM, generator=generator)

    common, towards = normal(case.kv_heads, 1), normal(case.kv_heads, 1)
    loud = torch.rand(case.layers, case.kv_heads, length, 1, generator=generator) < LOUD
    sharpness = 0.5 + torch.rand(case.layers, case.heads, 1, 1, generator=generator)
    drawn = {
        "q": (normal(case.heads, length) + towards.repeat_interleave(case.heads // case.kv_heads, 1)) * sharpness,
        "k": normal(case.kv_heads, length) + 0.5 * common + 1.5 * loud * towards,
        "v": normal(case.kv_heads, length),
    }
    return {name: (array * UNIT).round().clamp(-127, 127).to(torch.int8) for name, array in drawn.items()}


def floats(drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: array.float() / UNIT for name, array in drawn.items()}


def play(run: Run, seed: int) -> dict[str, np.ndarray]:
    """Prompt and steps of one case."""
    case = run.case
    heads, group = case.heads, case.heads // case.kv_heads
    drawn = draw(case, case.prompt + STEPS, seed)
    inputs = floats(drawn)
    per_query = {name: inputs[name].repeat_interleave(group, 1) for name in ("k", "v")}
    before = [layer.self_attn.kv_cache.threshold for layer in run.layers]
    past, seen = run(inputs, 0, case.prompt)
    assert not seen and past[0][0].shape[2] == case.prompt
    compressed = range(2, case.layers - 1)
    track = {
        index: Tracked(
            torch.arange(case.prompt).repeat(heads, 1),
            torch.ones(heads, case.prompt, dtype=torch.bool),
            *(per_query[name][index, :, : case.prompt] for name in ("k", "v")),
            {"keys": per_query["k"][index], "values": per_query["v"][index]},
        )
        for index in compressed
    }
    for position in range(case.prompt, case.prompt + STEPS):
        past, seen = run(inputs, position, position + 1, past)
        assert list(seen) == list(compressed)
        for index, found in seen.items():
            follow(track[index], found, heads, past[index], run.layers[index], position)
    for index in (0, 1, case.layers - 1):
        assert past[index][0].shape[2] == case.prompt + STEPS and seen.get(index) is None

    arrays = {"q": drawn["q"].numpy(), "k": drawn["k"].numpy(), "v": drawn["v"][2:-1].numpy()}
    arrays |= {
        "ratio": np.array([case.heavy, case.recent]),
        "average": np.array([case.alpha, case.beta]),
        "spread": np.array([float(layer.self_attn.multimodal_entropy) for layer in run.layers], np.float32),
        "ratios": layer_ratios(run),
    }
    whole = arrays["ratios"][:, 2:-1] * (case.prompt + 1)
    if (np.abs(whole - whole.round()) < FRACTION).any():
        raise Unclear("size")
    for index, each in track.items():
        cache, cut, steps = run.layers[index].self_attn.kv_cache, each.record[0], each.record[1:]
        flags = torch.cat([step["merged"] for step in steps])
        if not 0.2 < flags.float().mean() < 0.8 or not 0.2 < cut["merged"].float().mean() < 0.8:
            raise Unclear("all merged or all dropped")
        at = {"sizes": np.array([cache.hh_size, cache.recent_size], np.int16)}
        if before[index] is not None:
            at["tau_before"] = before[index].numpy()
        for name in ("keys", "values", "positions", "scores", "tau", "context"):
            at[name] = torch.stack([one[name] for one in each.record]).numpy()
        for name in ("evicted", "similarity", "targets", "merged"):
            at[f"cut_{name}"] = cut[name].numpy()
            at[f"step_{name}"] = torch.cat([one[name] for one in steps], -1).numpy()
        for name in ("positions", "cut_evicted", "step_evicted", "cut_targets", "step_targets"):
            at[name] = at[name].astype(np.int16)
        arrays |= {f"layer{index}/{name}": array for name, array in at.items()}
    if not all(each.twice and each.again and each.upset for each in track.values()):
        raise Unclear("too little happens")
    if not any(each.spilt for each in track.values()):
        raise Unclear("too little happens")
    return arrays


def layer_ratios(run: Run) -> np.ndarray:
    """[2, L]: heavy and recent, as the model loop set them."""
    attentions = [layer.self_attn for layer in run.layers]
    return np.array([[float(getattr(a, f"layer_{kind}_ratio")) for a in attentions] for kind in ("hh", "recent")], "f4")


def clear(checkout: str, cases: dict[str, Case]) -> dict[str, np.ndarray]:
    """Cases that follow each other in one model, each with its first clear seed."""
    run, arrays = Run(checkout, next(iter(cases.values()))), {}
    caches = [layer.self_attn.kv_cache for layer in run.layers]
    for name, run.case in cases.items():
        before = [cache.threshold for cache in caches]
        for seed in range(5000):
            run.clean()
            for cache, tau in zip(caches, before, strict=True):
                cache.threshold = tau
            try:
                found = play(run, seed)
            except Unclear:
                continue
            break
        else:
            raise SystemExit(f"{name}: no clear seed")
        print(f"{name}: seed {seed}")
        arrays |= {f"{name}/{key}": array for key, array in found.items()}
    return arrays


PAIRS = ((0.1, 0.1), (0.3, 0.1), (0.5, 0.4), (0.005, 0.003))  # the third has shares above 1, the last below 0.01


def ratios_alone(checkout: str) -> dict[str, np.ndarray]:
    """Eight layers' ratios for several requests, from the attention of a prompt of 24."""
    case = Case(heads=4, kv_heads=4, prompt=24, heavy=0.1, recent=0.1, layers=8)
    run, drawn = Run(checkout, case), draw(case, 24, 0)
    run(floats(drawn), 0, 24)
    arrays = {"q": drawn["q"].numpy(), "k": drawn["k"].numpy(), "pairs": np.array(PAIRS), "ratios": []}
    for heavy, recent in PAIRS:
        for layer in run.layers:
            layer.self_attn.uniform_hh_ratio, layer.self_attn.uniform_recent_ratio = heavy, recent
        run(floats(drawn), 0, 24)  # the loop divides when it starts, from the prompt before
        arrays["ratios"].append(layer_ratios(run))
    arrays["ratios"] = np.stack(arrays["ratios"])
    arrays["spread"] = np.array([float(layer.self_attn.multimodal_entropy) for layer in run.layers], np.float32)
    total = arrays["ratios"].sum(1)
    assert (
        (total[2] == 1).any() and (total[2] < 1).any() and np.isclose(total[3], 0.01).any() and np.ptp(total[0]) > 0.02
    )
    return arrays


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    checkout = sys.argv[1]
    two = Case(heads=2, kv_heads=2, prompt=48, heavy=0.2, recent=0.2)
    arrays = clear(checkout, {"two": two, "two-again": Case(2, 2, 40, 0.2, 0.2)})
    arrays |= clear(checkout, {"four": Case(4, 4, 60, 0.3, 0.1, alpha=0.3, beta=0.7)})
    arrays |= clear(checkout, {"grouped": Case(heads=4, kv_heads=2, prompt=44, heavy=0.15, recent=0.25)})
    arrays |= {f"ratios/{name}": array for name, array in ratios_alone(checkout).items()}
    save(GOLDENS / "policies" / "d2o.npz", arrays)


if __name__ == "__main__":
    main()
