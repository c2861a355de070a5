"""LazyEviction as released: a prompt, and the steps up to its first eviction.

    python tests/oracle/make_lazyeviction.py PATH/TO/LazyEviction

PATH is a checkout of https://github.com/Halo-949/LazyEviction (as it stands in the folder LazyEviction of
WeianMao/triattention at e7a0eb1). Its cluster (`Window_LAZYKVCluster` of `model/kv_utils.py`) and what it tracks
(`TempCache`) run unchanged beside a plain decode of the tiny llama2, called as its attention calls them. Every query
head chooses there, so each has a copy of its KV head. Many entries are worth exactly as much as others (all that every
step attends to, all that none does), and which of them stays is up to `topk`; so what they are worth is stored.
"""

import sys

import numpy as np
import torch
from common import GOLDENS, save
from llama import Llama, Seen, causal_attention
from make_h2o import apart
from released import GAP, NOISE, TRIES, Unclear, drawn, model, released, same, under

CASES = {"p24-w12": (24, 12, 0.03), "p16-w8": (16, 8, 0.06)}  # tokens and capacity, window, alpha


def run(modules, tiny: Llama, ids: torch.Tensor, window: int, alpha: float, turn: int | None) -> dict[str, np.ndarray]:
    """Greedy tokens, and of every entry before the last `window`: when it was last attended to, at what longest gap,
    and what it was worth; with a turn, under noise."""
    clusters, tracked = modules
    tracked.reset()
    tracked.alpha = alpha
    cluster = clusters.Window_LAZYKVCluster(tiny.layers, window, len(ids), window)
    generator = torch.Generator().manual_seed(turn or 0)
    held: list = [None] * tiny.layers
    count, worths = [0] * tiny.layers, []

    def attend(layer: int, seen: Seen) -> torch.Tensor:
        query, keys, values = seen.query[None], seen.key[None], seen.value[None]
        if held[layer] is None:
            held[layer] = cluster.update_kv(keys, query, values, None, 1)
            return causal_attention(seen.query, seen.key) @ seen.value
        keys, values = (torch.cat([old, new], 2) for old, new in zip(held[layer], (keys, values), strict=True))
        count[layer] += 1
        noise = 1 + NOISE * torch.randn(query.shape, generator=generator) if turn is not None else 1
        *held[layer], _ = cluster.update_kv_in_decoding(
            keys, query * noise, values, None, 1, window, layer, count[layer]
        )
        return ((query @ keys.transpose(2, 3) / tiny.dim**0.5).softmax(-1) @ values)[0]

    def chosen(x: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Tensor.topk`; what it is asked to choose from is what the entries are worth."""
        worths.append(x[0].numpy())
        return torch.topk(x, k, dim=dim)

    positions, tokens, greedy = torch.arange(len(ids)), ids, []
    for step in range(window + 1):
        if step == window:  # the tracked numbers of those that leave go with them
            seen_before = [dict(each) for each in (tracked.layer_last_recurrent, tracked.layer_max_period)]
        torch.Tensor.topk, plain = chosen, torch.Tensor.topk
        try:
            logits, _ = tiny(tokens, positions, attend)
        finally:
            torch.Tensor.topk = plain
        best = logits[-1].topk(2)
        if best.values[0] - best.values[1] < GAP:
            raise Unclear("token")
        greedy.append(int(best.indices[0]))
        tokens, positions = best.indices[:1], torch.tensor([len(ids) + step])
    assert len(worths) == tiny.layers, "one eviction in every layer"
    last, longest = (np.stack([each[layer][0].numpy() for layer in range(tiny.layers)]) for each in seen_before)
    last, longest = (each[..., : len(ids)].astype(np.int16) for each in (last, longest))
    worth = np.stack(worths)
    if min(len(np.unique(head)) for layer in worth for head in layer) < 4:
        raise Unclear("few values")
    return {"last": last, "longest": longest, "worth": worth, "tokens": np.array(greedy, np.int32)}


def main() -> None:
    clusters = released(sys.argv[1], "model.kv_utils")
    modules, tiny, arrays = (clusters, clusters.TempCache), apart(model()), {}
    for name, (length, window, alpha) in CASES.items():
        for seed in range(5000):
            ids = drawn(length, seed)
            try:
                found = run(modules, tiny, ids, window, alpha, None)
                if not all(same(found, run(modules, tiny, ids, window, alpha, turn)) for turn in range(TRIES)):
                    continue
            except Unclear:
                continue
            print(f"{name}: seed {seed}")
            arrays |= under(name, {"ids": ids.numpy().astype(np.int32), **found})
            break
        else:
            raise SystemExit(f"{name}: no prompt that is clear")
    save(GOLDENS / "policies" / "lazyeviction.npz", arrays)


if __name__ == "__main__":
    main()
