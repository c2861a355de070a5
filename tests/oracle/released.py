"""What the scripts share that run released programs: loading them, prompts without near ties, places of kept keys."""

import ast
import dataclasses
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import GOLDENS
from llama import Llama, Seen

NOISE = 3e-5  # relative change of queries, keys and values under which nothing that is kept may change
TRIES = 3
STEPS, GAP = 24, 3e-3  # decode steps, and the smallest gap between the two best logits of a token


class Unclear(Exception):
    """A case that rounding could change, or that shows too little."""


def stand_in(name: str, **given: Any) -> None:
    """An empty module for one that a release imports and that its cache does not need."""
    module = types.ModuleType(name)
    for key, value in given.items():
        setattr(module, key, value)
    sys.modules[name] = module


def released(folder: str | Path, module: str) -> types.ModuleType:
    """A module of a release, as it stands in the folder."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(str(folder))


def function(file: Path, name: str, **given: Any) -> Callable:
    """One function of a file whose other statements do not run; `given` are the names that it uses."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    exec(compile(tree, str(file), "exec"), given)
    return given[name]


def places(kept: torch.Tensor, given: torch.Tensor) -> np.ndarray:
    """Which of the `given [H, S, D]` vectors the `kept [H, n, D]` are, sorted: int16 [H, n]."""
    same = (kept[:, :, None] == given[:, None]).all(-1)
    assert (same.sum(-1) == 1).all(), "kept vectors are given ones, each of them once"
    return same.int().argmax(-1).sort(-1).values.numpy().astype(np.int16)


def model(family: str = "llama2") -> Llama:
    """A tiny random Llama in plain torch."""
    return Llama(GOLDENS / "tiny" / family)


def drawn(length: int, seed: int) -> torch.Tensor:
    """A prompt in which no token comes twice."""
    return 3 + torch.randperm(125, generator=torch.Generator().manual_seed(seed))[:length]


def shaken(every: Sequence[Seen], seed: int) -> list[Seen]:
    """The same queries, keys and values but for noise."""
    generator = torch.Generator().manual_seed(seed)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + NOISE * torch.randn(x.shape, generator=generator))

    return [dataclasses.replace(seen, **{n: turned(x) for n, x in vars(seen).items()}) for seen in every]


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether two runs kept the same."""
    whole = {name for name, array in one.items() if np.issubdtype(array.dtype, np.integer) or array.dtype == bool}
    return all(np.array_equal(one[name], other[name]) for name in whole)


Kept = Callable[[Sequence[Seen]], dict[str, np.ndarray]]


def clear_prompt(tiny: Llama, length: int, kept: Kept) -> dict[str, np.ndarray]:
    """The first prompt of so many tokens of which noise changes nothing that is kept, and what is.

    `kept` gives from every layer's queries, keys and values what the release keeps; integers and flags are compared.
    """
    for seed in range(2000):
        ids = drawn(length, seed)
        _, every = tiny.prompt(ids)
        try:
            found = kept(every)
            if all(same(found, kept(shaken(every, turn))) for turn in range(TRIES)):
                print(f"seed {seed}")
                return {"ids": ids.numpy().astype(np.int32), **found}
        except Unclear:
            continue
    raise SystemExit("no prompt that is clear")


def stepped(tiny: Llama, ids: torch.Tensor, attend: Callable, kept: Callable, few: int = 0) -> tuple[np.ndarray, ...]:
    """What `kept` tells after the prompt and after every greedy step, and the tokens, of which over `few` differ."""
    positions, tokens, chosen, every = torch.arange(len(ids)), ids, [], []
    for step in range(STEPS + 1):
        logits, _ = tiny(tokens, positions, attend)
        every.append(kept())
        best = logits[-1].topk(2)
        if best.values[0] - best.values[1] < GAP:
            raise Unclear("token")
        chosen.append(int(best.indices[0]))
        tokens, positions = best.indices[:1], torch.tensor([len(ids) + step])
    if len(set(chosen)) <= few:
        raise Unclear("few tokens")
    return np.stack(every), np.array(chosen, np.int32)


def clear_steps(name: str, length: int, run: Callable) -> dict[str, np.ndarray]:
    """The first prompt of so many tokens of which noise changes nothing in `run(ids, turn)` (no turn, no noise), and
    what that gives, by names behind the case's."""
    for seed in range(5000):
        ids = drawn(length, seed)
        try:
            found = run(ids, None)
            if all(same(found, run(ids, turn)) for turn in range(TRIES)):
                print(f"{name}: seed {seed}, distinct tokens {len(set(found['tokens'].tolist()))}")
                return under(name, {"ids": ids.numpy().astype(np.int32), **found})
        except Unclear:
            continue
    raise SystemExit(f"{name}: no prompt that is clear")


def batch(seen: Seen) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as transformers has them, with a batch of one; copies, for releases write into them."""
    return seen.query[None].clone(), seen.key[None].clone(), seen.value[None].clone()


def under(front: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays with a name in front."""
    return {f"{front}/{name}": array for name, array in arrays.items()}
