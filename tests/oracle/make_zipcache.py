"""ZipCache as released: which tokens are salient, and values in 2 bits with their channels apart.

    python tests/oracle/make_zipcache.py PATH/TO/ZipCache

PATH is a checkout of https://github.com/ThisisBillhe/ZipCache (commit b6932b9). The lines of its attention that find
the tokens that are not salient run unchanged on given queries and keys (`modeling_llama.py`, the branch of a prompt in
the class for FlashAttention); `compress_function.py` is imported as it is. One KV head for the values: the release has
one scale for all heads of a layer.
"""

import ast
import math
import sys
import types
from pathlib import Path

import torch
from common import GOLDENS, save

HEADS, GROUP, DIM = 4, 2, 16


def finding(file: Path) -> ast.Module:
    """The branch that looks with some of the prompt's queries."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        if isinstance(node, ast.If) and ast.unparse(node.test) == "q_len > 1" and "probe_ids" in names:
            return ast.fix_missing_locations(ast.Module(node.body, []))
    raise SystemExit(f"{file}: no branch with probe_ids")


def salient(folder: Path, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Queries and keys, the probes, what every token was worth, and the ids of the release."""
    torch.manual_seed(seed)
    query, key = torch.randn(1, HEADS, length, DIM), torch.randn(1, HEADS // GROUP, length, DIM)
    key = key.repeat_interleave(GROUP, 1)
    layer = types.SimpleNamespace(
        head_dim=DIM, num_heads=HEADS, num_key_value_groups=GROUP, compress_config={"k_unimportant_ratio": 0.4}
    )
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    names = {
        "torch": torch, "math": math, "nn": torch.nn, "self": layer, "q_len": length, "kv_seq_len": length, "bsz": 1,
        "query_states": query, "key_states": key, "attention_mask": mask,
    }  # fmt: skip
    exec(compile(finding(folder / "zipcache/models/modeling_llama.py"), "modeling_llama.py", "exec"), names)
    return {
        "query": query[0], "key": key[0, ::GROUP], "probes": names["probe_ids"], "worth": names["token_attn_sum"][0],
        "others": layer.unimportant_ids_k[0].sort(-1).values,
    }  # fmt: skip


def main(folder: Path) -> None:
    sys.path.insert(0, str(folder / "zipcache/models/CompressUtils"))
    import compress_function as release

    found = {}
    for length in (40, 100):
        found |= {f"t{length}/{name}": x.numpy() for name, x in salient(folder, length, length).items()}
    torch.manual_seed(7)
    values = torch.randn(1, 1, 40, DIM) * torch.logspace(-1, 1, DIM)
    ids = torch.randperm(40)
    classes = ids[None, :24].sort(-1).values, ids[None, 24:].sort(-1).values
    given = release.true_channel_separate_mixedprec_tokenwise_compress(values, *classes, 4, 2)
    parts = given[:3], given[3:6]
    decoded = release.true_channel_separate_mixedprec_tokenwise_decompress(
        *parts[0], 4, *parts[1], 2, given[6], *classes, values.dtype, values.shape
    )
    found |= {"values": values[0, 0].numpy(), "others": classes[1][0].numpy(), "decoded": decoded[0, 0].numpy()}
    save(GOLDENS / "policies" / "zipcache.npz", found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
