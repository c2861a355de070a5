"""CAKE and PrefixKV as released, on the tiny llama2 with layers that look more or less sharply: kept positions.

    python tests/oracle/make_layers.py PATH/TO/cakekv PATH/TO/PrefixKV

PATHs are checkouts of https://github.com/antgroup/cakekv (commit c4675ce) and https://github.com/THU-MIG/PrefixKV
(commit 39b7265).

CAKE: its attention (`llama_attn_forward_cake`) and both of its caches run unchanged inside a plain loop over the
layers, with a plain causal attention in FlashAttention's place. Cascading is on. Between two decode steps the entries
of every layer are put back into time order: the release leaves them in the order of its last choice and pools there.

PrefixKV: `PrefixKV.__call__` runs unchanged on the attention weights that transformers gives, with `profile=True`, so
that the layers' sizes come from the text at hand. While decoding it is told that the text does not grow, so that every
layer keeps its size.
"""

import contextlib
import importlib.util
import io
import os
import sys
import tempfile
import types
import typing
from pathlib import Path

import numpy as np
import torch
import transformers
from common import GOLDENS, save
from transformers.models.llama import modeling_llama

TOKENS, STEPS, SHARPER = 70, 8, (1.0, 1.5, 1.25)
WINDOW, CAKE_SIZES = 8, (16, 28)
MARGIN = 2e-5  # smallest relative distance of the last score that stays from the next
PREFIX_RATIOS = (0.53, 0.75)  # removed; what stays divides by the layers, so that nobody rounds


def model():
    """The tiny llama2, whose layers' query, key and value are scaled."""
    out = transformers.AutoModelForCausalLM.from_pretrained(
        GOLDENS / "tiny" / "llama2", attn_implementation="eager", dtype=torch.float32
    ).eval()
    for layer, times in zip(out.model.layers, SHARPER, strict=True):
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).weight.data *= times
    return out


def cake(checkout: str):
    """Its modules. Names that newer transformers have no more, or do not export, are put back."""
    import transformers.cache_utils

    transformers.cache_utils.HybridCache = transformers.cache_utils.DynamicCache
    for name in ("Union", "List"):
        setattr(modeling_llama, name, getattr(typing, name))
    del modeling_llama.__all__  # all of its names are imported from it
    sys.path.insert(0, checkout)
    from cake import cake_cache
    from cake.model import modify_llama

    modify_llama._flash_attention_forward = plain_attention
    prompt, layerwise = cake_cache.CakeprefillKVCache, cake_cache.CakeDecodingKVCache_LayerWise
    before, decoding = prompt.evcit_layer_kvcache, layerwise.__call__

    def cut(self, cache, layer, budget):
        if len(cache.pref_scores) == self.num_layers:  # the last layer's cut
            clear(cache.evict_scores[layer][0], budget)
        return before(self, cache, layer, budget)

    def step(self, cache, weights, layer):
        pooled = torch.nn.functional.avg_pool1d(weights[0, :, 0, : -self.window_size], 5, padding=2, stride=1)
        clear(pooled.view(cache.key_cache[layer].shape[1], -1, pooled.shape[-1]).mean(1), self.hh_size)
        return decoding(self, cache, weights, layer)

    prompt.evcit_layer_kvcache, layerwise.__call__ = cut, step
    return cake_cache, modify_llama


def clear(scores: torch.Tensor, count: int) -> None:
    """Raises `Unclear` where rounding could change which `count` scores of a head [Hk, S] are its highest."""
    line = scores.sort(-1, descending=True).values
    if 0 < count < line.shape[-1] and (1 - line[:, count] / line[:, count - 1]).min() < MARGIN:
        raise Unclear("a near tie")


def plain_attention(query, key, value, *_, **__):
    """softmax(q k / sqrt d) v over [B, T, H, D], causal, the queries being the last of the keys."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    logits = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1 + key.shape[2] - query.shape[2])
    return (logits.masked_fill(later, float("-inf")).softmax(-1) @ value).transpose(1, 2)


class Unclear(Exception):
    """A choice that rounding could change."""


class Run:
    """The model's loop over its layers, with the release's attention in each."""

    def __init__(self, net, cake_cache, modify_llama, size: int):
        config, self.net, self.forward = net.config, net, modify_llama.llama_attn_forward_cake
        layers, self.cache = config.num_hidden_layers, cake_cache.CakeCache()
        shared = types.SimpleNamespace(
            key_size=[size - WINDOW] * layers, window_size=[WINDOW] * layers, prefill=[True] * layers,
            decoding_evict=[None] * layers, tau1=1.6, tau2=0.6, gamma=200.0,
        )  # fmt: skip
        shared.prefill_cake_evict = [
            cake_cache.CakeprefillKVCache(
                cache_size=size, window_size=WINDOW, num_heads=config.num_attention_heads, num_layers=layers,
                use_cascading=True,
            )
        ] * layers  # fmt: skip
        self.attentions, self.keys = [], [torch.zeros(config.num_key_value_heads, 0, 0)] * layers
        for number, layer in enumerate(net.model.layers):
            own = layer.self_attn
            kv_heads = config.num_key_value_heads
            self.attentions.append(
                types.SimpleNamespace(
                    config=shared, layer_idx=number, num_heads=config.num_attention_heads, head_dim=own.head_dim,
                    num_key_value_heads=kv_heads, num_key_value_groups=config.num_attention_heads // kv_heads,
                    training=False, attention_dropout=0.0, is_causal=True, _flash_attn_uses_top_left_mask=False,
                    q_proj=own.q_proj, k_proj=own.k_proj, v_proj=own.v_proj, o_proj=own.o_proj,
                )
            )  # fmt: skip

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor, first: int) -> np.ndarray:
        """Run the tokens from position `first` on; the last one's logits."""
        at = torch.arange(first, first + ids.shape[1])[None]
        x = self.net.model.embed_tokens(ids)
        turn = self.net.model.rotary_emb(x, at)
        for layer, own in zip(self.net.model.layers, self.attentions, strict=True):
            seen = layer.input_layernorm(x)
            with contextlib.redirect_stdout(io.StringIO()):
                mixed, _, self.cache = self.forward(own, seen, past_key_value=self.cache, position_embeddings=turn)
            x = x + mixed
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            key = own.k_proj(seen).view(1, ids.shape[1], own.num_key_value_heads, own.head_dim).transpose(1, 2)
            _, key = modeling_llama.apply_rotary_pos_emb(key, key, *turn)
            number = own.layer_idx
            self.keys[number] = torch.cat([self.keys[number], key[0]], 1) if first else key[0]
        return self.net.lm_head(self.net.model.norm(x))[0, -1].numpy()

    def ordered(self) -> list[np.ndarray]:
        """Every layer's positions [Hk, n], after its entries have been put in time order."""
        held = []
        for number, every in enumerate(self.keys):
            mine = self.cache.key_cache[number][0]
            at = torch.cdist(mine, every).argmin(-1)
            assert torch.equal(every.gather(1, at[..., None].expand_as(mine)), mine)
            at, order = at.sort(-1)
            order = order[None, ..., None].expand_as(self.cache.key_cache[number])
            for part in (self.cache.key_cache, self.cache.value_cache):
                part[number] = part[number].gather(2, order)
            held.append(at.numpy().astype(np.int16))
        return held


def cake_run(modules, net, ids: torch.Tensor, size: int) -> dict[str, np.ndarray]:
    """Kept positions after the prompt and after every step, and the layers' budgets beside the window.

    Raises `Unclear` for a choice that rounding could change.
    """
    run = Run(net, *modules, size)
    run(ids[:, :TOKENS], 0)
    out = {f"cake/{size}/budgets": np.array(run.cache.layer_budget, np.int16)}
    weights = np.array(run.cache.pref_scores)
    exact = weights / weights.sum() * (size - WINDOW) * len(weights)
    if np.abs(exact - run.cache.layer_budget).max() > 0.5:  # it rounds down, and then up from the bottom layer on
        raise Unclear(f"{size}: {exact}")
    for step in range(STEPS + 1):
        for number, held in enumerate(run.ordered()):
            out[f"cake/{size}/step{step}/layer{number}"] = held
        if step < STEPS:
            run(ids[:, TOKENS + step : TOKENS + step + 1], TOKENS + step)
    return out


def prefix_goldens(checkout: str, net, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """Kept positions after the prompt and after every step, and what the tokens were worth."""
    spec = importlib.util.spec_from_file_location("prefixkv", Path(checkout) / "prefixkv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.no_grad():
        attentions = net(ids[:, :TOKENS], output_attentions=True).attentions
    layers, out = len(attentions), {}
    out["prefix/scores"] = torch.stack([each[0].mean(0).sum(0) for each in attentions]).numpy()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("samples").mkdir()
        for ratio in PREFIX_RATIOS:
            policy = module.PrefixKV(model_name="tiny", ratio=ratio, layer_num=layers, profile=True)
            at = torch.arange(TOKENS)[None, None, :, None]
            cache = policy([[at, at] for _ in range(layers)], TOKENS, attentions)
            for step in range(STEPS + 1):
                for number, (key, _) in enumerate(cache):
                    out[f"prefix/{ratio}/step{step}/layer{number}"] = key[0, 0, :, 0].numpy().astype(np.int16)
                new = torch.tensor(TOKENS + step)[None, None, None, None]
                cache = [[torch.cat([key, new], 2), torch.cat([value, new], 2)] for key, value in cache]
                nobody = [torch.zeros(1, 1, 1, key.shape[2]) for key, _ in cache]
                cache = policy(cache, TOKENS - 1e-6, nobody)  # or rounding would make 1 entry too many 0.9999
    return out


def main() -> None:
    where = [str(Path(path).resolve()) for path in sys.argv[1:3]]
    net, here, modules = model(), os.getcwd(), cake(where[0])
    out = {"sharper": np.array(SHARPER, np.float32)}
    for size in CAKE_SIZES:
        for seed in range(200):
            ids = torch.from_numpy(np.random.default_rng(seed).permutation(100)[: TOKENS + STEPS])[None]
            try:
                out |= cake_run(modules, net, ids, size) | {f"cake/{size}/ids": ids[0].numpy().astype(np.int32)}
                break
            except Unclear:
                continue
        else:
            raise Unclear(f"every seed at size {size}")
    out |= {"prefix/ids": ids[0].numpy().astype(np.int32)} | prefix_goldens(where[1], net, ids)
    os.chdir(here)
    save(GOLDENS / "policies" / "layers.npz", out)


if __name__ == "__main__":
    main()
