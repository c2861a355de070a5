"""Published data sets by name: LongBench, GSM8K and RULER, from the user's files, the hub, or made here."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jaxkv.evaluation import gsm8k, longbench, ruler
from jaxkv.evaluation.example import Example

READ = (*(f"longbench/{task}" for task in longbench.tasks()), *gsm8k.SHOTS)  # the others are made
NAMES = (*READ, *(f"ruler/{task}" for task in ruler.NAMES))


def read(
    name: str,
    size: Callable[[Example], int],
    *,
    folder: str = "",
    lengths: tuple[int, ...] = (),
    examples: int = 1,
    haystacks: tuple[str, ...] = (),
    limit: int | None = None,
    max_new_tokens: int | None = None,
    chat: bool = True,
    seed: int = 0,
) -> list[Example]:
    """The examples of the data set `name`: of one that is read, at most `limit` from the folder or the hub; of one that
    is made, `examples` at each of the `lengths`."""
    where = Path(folder).expanduser() if folder else None
    family, _, task = name.partition("/")
    if family == "longbench":
        found = longbench.read(task, where, limit)
    elif family == "ruler":
        found = [
            example
            for length in lengths
            for example in ruler.make(
                task, size, length=length, examples=examples, seed=seed, folder=where, prose=haystacks == ("prose",),
                chat=chat,
            )
        ]  # fmt: skip
    else:
        found = gsm8k.read(name, where, limit)
    return [
        dataclasses.replace(each, max_new_tokens=max_new_tokens or each.max_new_tokens, chat=each.chat and chat)
        for each in found
    ]
