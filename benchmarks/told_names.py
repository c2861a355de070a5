"""What codes cost a chat: of twenty people who say their name and what they do, how often the model gives the name in
the next turn, when it goes on from the cache that the first turn left. Nothing is evicted.

    python -m benchmarks.told_names

Such a text is short, so what codecs fit is fitted to some forty tokens.
"""

import argparse
import itertools
from typing import Any

import jax.numpy as jnp

import jaxkv
from benchmarks.all_policies import ends
from benchmarks.real_work import percents
from benchmarks.report import named, table, write
from jaxkv.evaluation.summary import wilson

NAMES = (
    "Margaret", "John", "Elena", "Omar", "Priya", "Lucas", "Hannah", "Victor", "Amelia", "Diego", "Sofia", "Peter",
    "Nadia", "Oliver", "Grace", "Samuel", "Ingrid", "Felix", "Carmen", "Hugo",
)  # fmt: skip
DOES = (
    "keep bees", "play the cello", "repair clocks", "grow roses", "teach chemistry", "bake bread", "collect stamps",
    "run marathons", "paint boats", "write songs",
)  # fmt: skip
ASKS = "What is my name?"


def codes(bits: int, channels: int, keys: str = "int", **more: Any) -> dict[str, Any]:
    """A store of keys and values in so many bits."""
    values = {"kind": "int", "bits": bits, "channels": channels}
    return {"keys": {"kind": keys, "bits": bits, "channels": channels, **more}, "values": values}


STORES = {
    "as they are": {},
    "8 bits": codes(8, 0),
    "4 bits, balanced, a scale for 32 channels": codes(4, 32, "int-balanced"),
    "4 bits, balanced, a scale per token": codes(4, 0, "int-balanced"),
    "4 bits, a scale for 32 channels": codes(4, 32),
    "4 bits, turned, a scale per token": codes(4, 0, hadamard=True),
}


def asked(tokenizer: Any) -> list[int]:
    """The tokens of the second turn, from the end of the first answer on."""
    turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "@"}, {"role": "user", "content": ASKS}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return tokenizer(text.partition("@")[2], add_special_tokens=False)["input_ids"]


def right(params: Any, store: dict[str, Any], tokens: int) -> list[bool]:
    """Which names are given."""
    policy = jaxkv.policy("full", store=store)
    told = itertools.starmap("My name is {} and I {}.".format, zip(NAMES, DOES * 2, strict=True))
    first = [[{"role": "user", "content": text}] for text in told]
    cache = jaxkv.generate(params, first, policy=policy, max_new_tokens=tokens, stop_tokens=()).cache
    second = [asked(params.tokenizer)] * len(NAMES)
    said = jaxkv.generate(params, second, cache=cache, max_new_tokens=24).text
    return [name in text for name, text in zip(NAMES, said, strict=True)]


def main() -> None:
    """Print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    params = jaxkv.load(options.model, dtype=jnp.float32)
    answers = (4, 8, 12, 16)  # tokens of the first answer: other texts in between
    given = {
        name: [one for tokens in answers for one in right(params, store, tokens)] for name, store in STORES.items()
    }
    many = len(NAMES) * len(answers)
    rows = [(name, percents(ends(wilson(some)))) for name, some in given.items()]
    print(table(f"{options.model}: names given, per cent of {many}", ("entries", "right"), rows))
    found = {"questions": many, "right": {name: sum(some) for name, some in given.items()}}
    print("written to", write(named("told-names", options.model), {**vars(options), **found}))


if __name__ == "__main__":
    main()
