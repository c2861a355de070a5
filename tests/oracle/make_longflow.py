"""LongFlow, TOVA and H2O at decode, and DapQ's scores, in plain torch from their formulas, on the tiny llama2.

    python tests/oracle/make_longflow.py

Decoding holds at most `budget` tokens per KV head while it attends. After the prompt at most budget - 1 are left; each
step adds its token, attends (float32), and, when the budget is full, drops the least valued entry before the next one:

- longflow: value = sum over all query heads of alpha_i * ||v_i||_1; one choice per layer; nothing is protected.
  A prompt longer than budget - 1 keeps its last `window` tokens and the best of the others by the window's attention
  to them (the softmax leaves the window's own keys out), summed over heads and queries, average-pooled (kernel 5,
  divisor 5), one choice per layer.
- tova: value = mean over all query heads of alpha_i; one choice per layer; nothing is protected; a prompt by its last
  query.
- h2o: value = sum of alpha_i over all queries so far, prompt included, mean over the heads of a group; each KV head
  chooses; the last budget // 2 tokens are protected.

Ties would go against the older token; there are none (see `margins`).
"""

from dataclasses import dataclass

import numpy as np
import torch
import transformers
from common import GOLDENS, save
from llama import Llama, Seen, causal_attention
from transformers import AutoModelForCausalLM

STEPS = 40
GAP = 3e-3  # smallest top-2 logit gap of the tokens
MARGIN = 2e-5  # smallest relative distance of a victim's value from the next


class NearTie(Exception):
    """A choice that rounding could change."""


@dataclass
class Held:
    """One KV head's entries in time order; `total` is what H2O has accumulated."""

    key: torch.Tensor
    value: torch.Tensor
    position: torch.Tensor
    total: torch.Tensor

    def at(self, index: torch.Tensor) -> "Held":
        return Held(self.key[index], self.value[index], self.position[index], self.total[index])


def top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Sorted indices of the `count` largest; raises `NearTie` when the cut is not clear."""
    values, order = scores.sort(descending=True)
    if 0 < count < len(scores) and (values[count - 1] - values[count]) / values[count - 1].abs() < MARGIN:
        raise NearTie("prompt")
    return order[:count].sort().values


def group_mean(mass: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[Hq, S] -> [Hk, S]."""
    return mass.view(kv_heads, -1, mass.shape[-1]).mean(1)


def cut_prompt(method: str, seen: Seen, budget: int, window: int) -> list[torch.Tensor]:
    """Indices that each KV head keeps of the prompt: at most budget - 1."""
    kv_heads, length, _ = seen.key.shape
    room = budget - 1
    if length <= room:
        return [torch.arange(length)] * kv_heads
    if method == "longflow":
        before = length - window
        key = seen.key[:, :before].repeat_interleave(len(seen.query) // kv_heads, 0)
        weights = (seen.query[:, before:] @ key.transpose(1, 2) / seen.query.shape[-1] ** 0.5).softmax(-1)
        mass = weights.sum((0, 1))
        padded = torch.cat([torch.zeros(2), mass, torch.zeros(2)])
        pooled = sum(padded[shift : shift + before] for shift in range(5)) / 5
        return [torch.cat([top(pooled, room - window), torch.arange(before, length)])] * kv_heads
    weights = causal_attention(seen.query, seen.key)
    if method == "tova":
        return [top(weights[:, -1].mean(0), room)] * kv_heads
    recent = budget // 2
    total = group_mean(weights.sum(1), kv_heads)[:, : length - recent]
    return [torch.cat([top(row, room - recent), torch.arange(length - recent, length)]) for row in total]


def values_of(method: str, held: list[Held], weights: list[torch.Tensor], budget: int, now: int) -> list[torch.Tensor]:
    """What each KV head's entries are worth after a step whose attention weights were [G, S] per KV head."""
    if method == "h2o":
        protected = [each.position >= now - budget // 2 for each in held]
        return [each.total.masked_fill(safe, float("inf")) for each, safe in zip(held, protected, strict=True)]
    if method == "tova":
        return [torch.cat(weights).mean(0)] * len(held)
    l1 = [each.value.abs().sum(-1) for each in held]
    return [sum((w * norm).sum(0) for w, norm in zip(weights, l1, strict=True))] * len(held)


def decode(model: Llama, method: str, ids: torch.Tensor, budget: int, window: int) -> dict[str, np.ndarray]:
    """Prompt, cut, and greedy steps under the budget."""
    logits, every = model.prompt(ids)
    layers: list[list[Held]] = []
    for seen in every:
        total = group_mean(causal_attention(seen.query, seen.key).sum(1), model.kv_heads)
        kept = cut_prompt(method, seen, budget, window)
        whole = [Held(k, v, torch.arange(len(ids)), t) for k, v, t in zip(seen.key, seen.value, total, strict=True)]
        layers.append([each.at(index) for each, index in zip(whole, kept, strict=True)])
    prompt_kept = np.stack([np.stack([pad(each.position, budget, -1) for each in heads]) for heads in layers])

    rows, tokens, record = [logits[-1]], [int(logits[-1].argmax())], []
    for step in range(STEPS):
        position = len(ids) + step
        out: list[dict[str, np.ndarray]] = []

        def attend(layer: int, seen: Seen, position=position, out=out) -> torch.Tensor:
            heads, weights, contexts = layers[layer], [], []
            for i, each in enumerate(heads):
                each.key = torch.cat([each.key, seen.key[i]])
                each.value = torch.cat([each.value, seen.value[i]])
                each.position = torch.cat([each.position, torch.tensor([position])])
                group = len(seen.query) // len(heads)
                query = seen.query[i * group : (i + 1) * group, 0]
                alpha = (query @ each.key.T / query.shape[-1] ** 0.5).softmax(-1)
                each.total = torch.cat([each.total, torch.zeros(1)]) + alpha.mean(0)
                weights.append(alpha)
                contexts.append(alpha @ each.value)
            worth = values_of(method, heads, weights, budget, position + 1)
            victims, margins = [], []
            for i, each in enumerate(heads):
                assert len(each.position) <= budget
                low = worth[i].sort().values[:2]
                victims.append(int(each.position[worth[i].argmin()]))
                margins.append(float((low[1] - low[0]) / low[1].abs()) if torch.isfinite(low[1]) else 1.0)
            finite = [w.masked_fill(torch.isinf(w), torch.finfo().max) for w in worth]
            full = len(heads[0].position) == budget
            out.append(
                {
                    "held": np.stack([pad(each.position, budget, -1) for each in heads]),
                    "values": np.stack([pad(w, budget, 0.0) for w in finite]),
                    "victims": np.array(victims if full else [-1] * len(heads), np.int16),
                    "margins": np.array(margins if full else [1.0] * len(heads), np.float32),
                }
            )
            if full:
                for i, each in enumerate(heads):
                    heads[i] = each.at(each.position != victims[i])
            return torch.cat(contexts)[:, None]

        logits, _ = model(torch.tensor([tokens[-1]]), torch.tensor([position]), attend)
        rows.append(logits[0])
        tokens.append(int(logits[0].argmax()))
        record.append({name: np.stack([layer[name] for layer in out]) for name in out[0]})

    logits = torch.stack(rows)
    best = logits.topk(2).values
    result = {name: np.stack([each[name] for each in record]) for name in record[0]}
    return result | {
        "ids": ids.numpy().astype(np.int32),
        "prompt_kept": prompt_kept,
        "tokens": np.array(tokens, np.int32),
        "gaps": (best[:, 0] - best[:, 1]).numpy(),
        "logits": logits.numpy(),
    }


def pad(row: torch.Tensor, length: int, fill) -> np.ndarray:
    """A row filled up to `length`; positions as int16, values as float32."""
    array = row.numpy()
    kind = np.float32 if np.issubdtype(array.dtype, np.floating) else np.int16
    return np.concatenate([array, np.full(length - len(array), fill)]).astype(kind)


CASES = {  # prompt tokens, budget, window of LongFlow's cut
    "longflow": {"p12-b16": (12, 16, 0), "p20-b16-w8": (20, 16, 8), "p60-b48-w32": (60, 48, 32)},
    "tova": {"p12-b16": (12, 16, 0), "p20-b16": (20, 16, 0), "p60-b48": (60, 48, 0)},
    "h2o": {"p12-b16": (12, 16, 0), "p20-b16": (20, 16, 0), "p60-b48": (60, 48, 0)},
}


def clear_case(model: Llama, method: str, length: int, budget: int, window: int) -> dict[str, np.ndarray]:
    """The first random prompt without near ties."""
    for seed in range(5000):
        ids = torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed))
        try:
            result = decode(model, method, ids, budget, window)
        except NearTie:
            continue
        if result["gaps"].min() > GAP and result["margins"].min() > MARGIN and len(set(result["tokens"])) > 7:
            print(f"{method} {length} {budget}: seed {seed}, gap {result['gaps'].min():.3f}", end=", ")
            print(f"margin {result['margins'].min():.1e}, distinct tokens {len(set(result['tokens']))}", end=", ")
            print(f"evictions {(result['victims'] >= 0).sum()}, oldest held {result['held'][-1].min(-1).tolist()}")
            return result
    raise SystemExit(f"{method}: no prompt without near ties")


def dapq(model: Llama, reference) -> dict[str, np.ndarray]:
    """Scores [L, Hk, Lp] of the prompt's tokens by 8 pseudo tokens behind it, and the top 8 and 16 of each KV head.

    Score = attention of the pseudo queries, run through the whole model at positions Lp.. with a causal softmax over
    prompt and pseudo keys, mean over the queries and over the group.
    """
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 128, (60,), generator=generator)
        contents = {
            "random": torch.randint(3, 128, (8,), generator=generator),
            "prompt": torch.cat([ids[:4], ids[-4:]]),  # first 4 and last 4 of the prompt
        }
        arrays = {"ids": ids.numpy().astype(np.int32)}
        try:
            for name, pseudo in contents.items():
                joined = torch.cat([ids, pseudo])
                _, every = model.prompt(joined)
                rows = [causal_attention(seen.query, seen.key)[:, 60:, :60].mean(1) for seen in every]
                scores = torch.stack([group_mean(row, model.kv_heads) for row in rows])
                with torch.no_grad():
                    theirs = reference(joined[None], output_attentions=True).attentions
                for layer, attention in enumerate(theirs):
                    check = group_mean(attention[0, :, 60:, :60].mean(1), model.kv_heads)
                    torch.testing.assert_close(scores[layer], check, rtol=1e-3, atol=1e-6)
                arrays |= {f"{name}/pseudo": pseudo.numpy().astype(np.int32), f"{name}/scores": scores.numpy()}
                for budget in (8, 16):
                    kept = [[top(row, budget).numpy() for row in heads] for heads in scores]
                    arrays[f"{name}/kept{budget}"] = np.array(kept, np.int16)
        except NearTie:
            continue
        print(f"dapq: seed {seed}")
        return arrays
    raise SystemExit("dapq: no prompt without near ties")


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    folder = GOLDENS / "tiny" / "llama2"
    model = Llama(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    # With room for everything this must be the plain model.
    ids = torch.randint(3, 128, (20,), generator=torch.Generator().manual_seed(0))
    full = decode(model, "longflow", ids, 20 + STEPS, 0)
    with torch.no_grad():
        theirs = reference(torch.cat([ids, torch.from_numpy(full["tokens"][:-1]).long()])[None]).logits[0, 19:]
    np.testing.assert_allclose(full["logits"], theirs.numpy(), atol=2e-4)

    for method, cases in CASES.items():
        arrays = {}
        for name, (length, budget, window) in cases.items():
            result = clear_case(model, method, length, budget, window)
            arrays |= {f"{name}/{key}": array for key, array in result.items()}
        save(GOLDENS / "policies" / f"{method}.npz", arrays)
    save(GOLDENS / "policies" / "dapq.npz", dapq(model, reference))


if __name__ == "__main__":
    main()
