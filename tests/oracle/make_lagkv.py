"""LagKV as released: what is kept of a prompt.

    python tests/oracle/make_lagkv.py PATH/TO/LagKV

PATH is a checkout of https://github.com/AI-Lab-China-Merchants-Bank/LagKV (commit 2a9d19e). Its cache runs unchanged on
the queries, keys and values of the tiny llama2; transformers' `DynamicCache`, on whose older lists it builds, is stood
in for by those lists. It is asked once, with the whole prompt.
"""

import sys

import numpy as np
import transformers.cache_utils
from common import GOLDENS, save
from llama import Seen
from released import batch, clear_prompt, model, places, released, under

CASES = {"p100-l16": (100, 4, 16, 0.5), "p84-l8": (84, 2, 8, 0.25)}  # tokens, sinks, lag, share of a lag that stays


class Lists:
    """The lists that transformers' DynamicCache was when LagKV was released."""

    def __init__(self, _):
        self.key_cache, self.value_cache, self._seen_tokens = [], [], 0


def keeps(cache, sinks: int, lag: int, share: float):
    """What its cache keeps of every layer."""

    def kept(every: list[Seen]) -> dict[str, np.ndarray]:
        own, out = cache(ratio=share, sink_size=sinks, lag_size=lag), {}
        for layer, seen in enumerate(every):
            _, key, value = batch(seen)
            own.update(key, value, layer)
            out[f"layer{layer}/kept"] = places(own.key_cache[layer][0], seen.key)
        return out

    return kept


def main() -> None:
    transformers.cache_utils.DynamicCache = Lists
    cache, tiny, arrays = released(sys.argv[1], "lag_kv").LagKV, model(), {}
    for name, (length, sinks, lag, share) in CASES.items():
        print(name, end=": ")
        arrays |= under(f"lagkv/{name}", clear_prompt(tiny, length, keeps(cache, sinks, lag, share)))
    save(GOLDENS / "policies" / "lagkv.npz", arrays)


if __name__ == "__main__":
    main()
