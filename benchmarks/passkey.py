"""The passkey of 5 digits, hidden at several depths of noise and of prose: accuracy of every policy at every budget.

python -m benchmarks.passkey
"""

import argparse
import ast
import itertools
import random
import time
from typing import Any

import numpy as np

import jaxkv
from benchmarks.arguments import place, policy_name, positive, result_name
from benchmarks.report import prose, table, write
from jaxkv.errors import BadValue, UnknownName
from jaxkv.evaluation.texts import NOISE
from jaxkv.policies.catalogue import catalogue

HIDDEN = "The pass key is {key}. Remember it. {key} is the pass key."
OPENING = "There is an important pass key hidden inside a lot of irrelevant text. Find it and memorize it."
QUESTION = "What is the pass key? Answer with the number only."
KINDS = ("noise", "prose")


def sentences(kind: str) -> list[str]:
    """The text to hide in, sentence by sentence."""
    text = NOISE if kind == "noise" else " ".join(prose().split())
    return [part.strip() + "." for part in text.rstrip(".").split(". ")]


def prompt(tokenizer: Any, kind: str, tokens: int, depth: float, key: str) -> str:
    """A chat prompt of just under `tokens` tokens with the key at `depth` (0: first, 1: last) of the text."""
    around = len(ids(tokenizer, chat(tokenizer, [HIDDEN.format(key=key)])))
    stock, text, room = sentences(kind), [], tokens - around
    for turn in range(tokens):
        sentence = stock[turn % len(stock)]
        cost = len(ids(tokenizer, " " + sentence))
        if cost > room:
            break
        text.append(sentence)
        room -= cost
    at = round(depth * len(text))
    return chat(tokenizer, [*text[:at], HIDDEN.format(key=key), *text[at:]])


def chat(tokenizer: Any, text: list[str]) -> str:
    """The text between the opening and the question, as one turn of the model's chat format."""
    content = f"{OPENING}\n\n{' '.join(text)}\n\n{QUESTION}"
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )


def ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of text that may hold the chat format's special tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def examples(tokenizer: Any, tokens: int, depths: list[float], seed: int) -> list[dict]:
    """One example per kind and depth, each with its own key."""
    rng = random.Random(seed * 100_003 + tokens)
    out = []
    for kind in KINDS:
        for depth in depths:
            key = f"{rng.randrange(10_000, 100_000)}"
            out.append({"kind": kind, "depth": depth, "key": key})
            out[-1]["ids"] = ids(tokenizer, prompt(tokenizer, kind, tokens, depth, key))
    return out


def hits(params: Any, policy: jaxkv.Policy | None, asked: list[dict], batch: int) -> np.ndarray:
    """Whether each answer holds its key."""
    found = []
    for start in range(0, len(asked), batch):
        some = asked[start : start + batch]
        out = jaxkv.generate(params, [each["ids"] for each in some], policy=policy, max_new_tokens=12)
        found += [each["key"] in text for each, text in zip(some, out.text, strict=True)]
    return np.array(found)


def main() -> None:
    """Ask, print one table per length, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--policies", type=policy_name, nargs="+", default=None, help="default: every one in the catalogue"
    )
    parser.add_argument("--budgets", type=positive, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1000, 2000])
    parser.add_argument("--depths", type=place, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--batch", type=positive, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", type=result_name, default="passkey", help="of the JSON file in benchmarks/results")
    parser.add_argument(
        "--options", nargs="+", default=[], metavar="NAME=VALUE", help="of the policies: content=random"
    )
    options = parser.parse_args()
    chosen = {name: _value(text) for name, _, text in (each.partition("=") for each in options.options)}
    names = options.policies or [name for name, policy in catalogue().items() if policy.evicts]
    policies: dict[tuple[str, int], jaxkv.Policy] = {}
    for name, budget in itertools.product(names, options.budgets):
        try:
            policies[name, budget] = jaxkv.policy(name, budget=budget, **chosen)
        except UnknownName as error:
            parser.error(str(error))
        except BadValue as error:  # the budget cannot hold what the policy protects
            print(f"{name} at {budget}: {error}", flush=True)
    params = jaxkv.load(options.model)

    results = []
    for tokens in options.tokens:
        asked = examples(params.tokenizer, tokens, options.depths, options.seed)
        columns = [("full", None)] + [(name, budget) for name in names for budget in options.budgets]
        scores: dict[tuple[str, int | None], np.ndarray | None] = {}
        for name, budget in columns:
            policy = None if budget is None else policies.get((name, budget))
            if budget is not None and policy is None:
                scores[name, budget] = None
                continue
            started = time.perf_counter()
            right = hits(params, policy, asked, options.batch)
            scores[name, budget] = right
            took = time.perf_counter() - started
            print(f"{tokens} tokens, {name} at {budget}: {right.sum()} of {len(right)} ({took:.0f} s)", flush=True)
            answers = [
                {"kind": each["kind"], "depth": each["depth"], "right": bool(hit)}
                for each, hit in zip(asked, right, strict=True)
            ]
            results.append({"tokens": tokens, "policy": name, "budget": budget, "answers": answers})
        print()
        for kind in KINDS:
            mine = np.array([each["kind"] == kind for each in asked])
            rows = [("full cache", *[_share(scores["full", None], mine)] * len(options.budgets))]
            rows += [(name, *(_share(scores[name, budget], mine) for budget in options.budgets)) for name in names]
            title = f"passkey in {kind}, about {tokens} tokens, depths {options.depths}: right answers by budget"
            print(table(title, ("policy", *map(str, options.budgets)), rows), end="\n\n")
    print("written to", write(options.name, {**vars(options), "results": results}))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _share(right: np.ndarray | None, mine: np.ndarray) -> str:
    return "-" if right is None else f"{right[mine].sum()}/{mine.sum()}"


if __name__ == "__main__":
    main()
