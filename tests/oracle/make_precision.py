"""Keys and values by ThinK's, RotateKV's, GEAR's, SQuat's and FreqKV's own functions in plain torch, and by kvpress.

    python tests/oracle/make_precision.py PATH/TO/ThinK PATH/TO/RotateKV PATH/TO/GEAR PATH/TO/SQuat PATH/TO/FreqKV

The paths are checkouts of SalesforceAIResearch/ThinK (d200577), ZunhaiSu/RotateKV (3055e2b), opengear-project/GEAR
(efe0bfe), Red-Hat-AI-Innovation-Team/SQuat (ff91f13) and LUMIA-Group/FreqKV (8783a2d), of which these functions run
unchanged: `key_pruner_query_driven`, `fake_quant`, `fake_groupwise_*` and `fake_poweriteration_group`,
`generate_At_inv` and `new_quant` (its triton kernel, which quantises and packs, is stood in for by the same in torch),
`dct_compress`. kvpress' ThinKPress prunes the tiny llama3's prompt.
"""

import sys
from pathlib import Path

import kvpress
import numpy as np
import torch
from common import GOLDENS, save
from released import function, released, stand_in
from transformers import AutoModelForCausalLM, DynamicCache

RATIO, WINDOW, LENGTH = 0.4, 8, 40


def halves(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers that every float holds exactly."""
    return (np.round(rng.standard_normal(shape) * 256) / 64).astype(np.float32)


def think(folder: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Keys [1, H, S, D] and queries; the channels dropped, and the keys that are left of all but the last 8."""
    prune = released(folder, "ThinK_eager.src.kv_pruning_utils").key_pruner_query_driven
    keys = halves(rng, 1, 3, LENGTH, 16) * rng.uniform(0.2, 3, (1, 3, 1, 16)).astype(np.float32)
    queries = halves(rng, 1, 3, LENGTH, 16)
    pruned, recent, kept = prune(torch.from_numpy(keys), torch.from_numpy(queries), WINDOW, RATIO)
    assert torch.equal(recent, torch.from_numpy(keys[:, :, -WINDOW:]))
    return {
        "think/keys": keys, "think/queries": queries, "think/pruned": pruned.numpy(), "think/kept": kept.numpy(),
    }  # fmt: skip


def pressed(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Which channels of every layer and head kvpress leaves of a prompt of the tiny llama3, [L, Hk, D]."""
    model = AutoModelForCausalLM.from_pretrained(GOLDENS / "tiny" / "llama3", dtype=torch.float32).eval()
    ids = torch.from_numpy(rng.integers(0, 100, (1, LENGTH)))
    cache = DynamicCache()
    with torch.no_grad(), kvpress.ThinKPress(RATIO, window_size=WINDOW)(model):
        model(ids, past_key_values=cache)
    kept = [(layer.keys[0] != 0).any(dim=1).numpy() for layer in cache.layers]
    return {"kvpress/ids": ids.numpy().astype(np.int32), "kvpress/kept": np.stack(kept)}


def rotated(folder: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Numbers [1, S, 128] and what is left of them in 2 and 4 bits, clipped as the release's runs are."""
    fake = released(f"{folder}/RotateKV_fake_quant", "fake_quant").fake_quant
    x, out = halves(rng, 1, 9, 128), {}
    for bits, clip in ((2, 0.8), (4, 1.0)):
        out[f"rotatekv/{bits}"] = fake(torch.from_numpy(x), clip, bits, 64).numpy()
    return {"rotatekv/x": x, **out}


def geared(folder: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A block [1, 1, 64, 64]: its integers' values by channel and by token, the same with outliers, and the best
    approximation of low rank that its power iteration finds of what is left."""
    gear = released(f"{folder}/GenerationBench/GenerationTest/GEARLM/Simulated", "compress_function")
    x, out = halves(rng, 1, 1, 64, 64), {}
    x += (halves(rng, 1, 1, 64, 2) @ halves(rng, 1, 1, 2, 64)).round()
    for axis, quantise, spared in (
        ("channel", gear.fake_groupwise_channel_asymmetric_quantization_new, gear.gears_channelQ),
        ("token", gear.fake_groupwise_token_asymmetric_quantization, gear.gears_tokenQ),
    ):
        for bits in (2, 4):
            back = quantise(torch.from_numpy(x), bits, 64)
            torch.manual_seed(0)
            error = torch.from_numpy(x) - back
            near = gear.fake_poweriteration_group(error, 3, 2, "cpu", None, None)
            out |= {f"gear/{axis}/{bits}/back": back.numpy(), f"gear/{axis}/{bits}/near": near.numpy()}
            out[f"gear/{axis}/{bits}/spared"] = spared(torch.from_numpy(x), bits, 64, 0.04).numpy()  # one at each end
    return {"gear/x": x, **out}


def squatted(folder: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Keys [1, 2, 32, 16] of a block, queries [1, 2, 24, 16] that see few directions, and what the keys become in 2 and
    4 bits, in runs of 4 channels, with the 3 strongest directions."""
    stand_in("triton.language", constexpr=int)
    stand_in("triton", jit=lambda f: f, language=sys.modules["triton.language"])
    release = released(folder, "quant.new_pack")
    back: list[torch.Tensor] = []

    def quantised(data: torch.Tensor, group_size: int, bit: int) -> tuple[torch.Tensor, ...]:
        groups = data.view(*data.shape[:-1], -1, group_size)
        low, high = groups.min(dim=-1, keepdim=True)[0], groups.max(dim=-1, keepdim=True)[0]
        scale = (high - low) / (2**bit - 1)
        near = (((groups - low) / scale).clamp(0, 2**bit - 1).round() * scale + low).view(data.shape)
        back.append(near.transpose(2, 3))
        return data, scale, low, near

    release.triton_quantize_and_pack_along_last_dim_with_dequant = quantised
    keys = halves(rng, 1, 2, 32, 16)
    queries = (halves(rng, 1, 2, 24, 3) @ halves(rng, 1, 2, 3, 16) * 4 + halves(rng, 1, 2, 24, 16)).round() / 4
    _, sizes, turned = torch.linalg.svd(torch.from_numpy(queries), full_matrices=False)
    few, out = torch.diag_embed(sizes[..., :3]) @ turned[..., :3, :], {}
    for bits in (2, 4):
        back.clear()
        steps = release.generate_At_inv(4, few, lamb=0.01)
        release.new_quant(torch.from_numpy(keys.copy()), 4, 32, bits, steps, torch.inverse(steps[-1]))
        out[f"squat/{bits}"] = torch.cat(back, dim=-1).numpy()
    return {"squat/keys": keys, "squat/queries": queries, **out}


def slowed(folder: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Keys [1, 2, 12, 8] and what they become in 6 and 9 slots."""
    file, given = Path(folder) / "llama_attn_replace_dct_mempe.py", {"torch": torch, "np": np}
    for name in ("dct", "idct", "dct_compress"):
        given[name] = function(file, name, **given)
    x = halves(rng, 1, 2, 12, 8)
    return {"freqkv/x": x} | {f"freqkv/{m}": given["dct_compress"](torch.from_numpy(x), m).numpy() for m in (6, 9)}


def main(think_at: str, rotatekv_at: str, gear_at: str, squat_at: str, freqkv_at: str) -> None:
    """Write the goldens."""
    rng = np.random.default_rng(0)
    out = think(think_at, rng) | pressed(rng) | rotated(rotatekv_at, rng) | geared(gear_at, rng)
    out |= squatted(squat_at, rng) | slowed(freqkv_at, rng)
    save(GOLDENS / "policies" / "precision.npz", out)


if __name__ == "__main__":
    main(*sys.argv[1:])
