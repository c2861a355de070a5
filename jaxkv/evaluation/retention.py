"""Retention: which tokens of a text every layer and KV head holds, over the steps of decoding."""

import base64
import dataclasses
from typing import Any

import numpy as np

from jaxkv.errors import BadValue
from jaxkv.evaluation.asking import asked
from jaxkv.evaluation.example import Example, Question, fitted
from jaxkv.evaluation.texts import hide
from jaxkv.generate import generate
from jaxkv.policies.policy import Policy
from jaxkv.store import KVCache
from jaxkv.weights.params import Params


@dataclasses.dataclass(frozen=True)
class Retention:
    """`kept [S, L, Hk, T]` (bool): at snapshot s, taken when `steps[s]` tokens had been decoded, whether the layer's KV
    head holds token t. `tokens [T]` are the texts of the prompt's tokens and then of the new ones; `prompt` of them are
    the prompt's.
    """

    kept: np.ndarray
    steps: tuple[int, ...]
    tokens: tuple[str, ...]
    prompt: int

    def to_dict(self) -> dict[str, Any]:
        """As plain values, `kept` as packed bits in base64."""
        bits = base64.b64encode(np.packbits(self.kept)).decode()
        return {
            "bits": bits, "shape": list(self.kept.shape), "steps": list(self.steps), "tokens": list(self.tokens),
            "prompt": self.prompt,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> "Retention":
        """What `to_dict` gave."""
        shape = tuple(table["shape"])
        bits = np.unpackbits(np.frombuffer(base64.b64decode(table["bits"]), np.uint8), count=int(np.prod(shape)))
        return cls(bits.astype(bool).reshape(shape), tuple(table["steps"]), tuple(table["tokens"]), table["prompt"])


FACT = "The name of the lighthouse keeper is Margaret Holm."
QUESTION = "What is the name of the lighthouse keeper?"


def story(tokenizer: Any, tokens: int) -> np.ndarray:
    """The ids of a prompt of about so many tokens: prose with a fact in its middle, and a question about it.

    Raises `BadValue` for a length in which the fact and its question do not fit.
    """
    asking_ids = lambda example: np.concatenate(asked(tokenizer, example, example.questions[0]))  # noqa: E731

    def build(words: int) -> Example:
        context = hide("prose", words, 0, [(0.5, FACT)])
        return Example("retention", context, (Question(QUESTION, ("Margaret Holm",)),), "any", 1)

    example = fitted(build, lambda example: len(asking_ids(example)), tokens)
    if example is None:
        raise BadValue(f"retention prompt={tokens}: not even the question fits; make it longer")
    return asking_ids(example)


def retained(params: Params, prompt: Any, policy: Policy, *, steps: int = 64, every: int = 16) -> Retention:
    """Continue the prompt (text or token ids) greedily by `steps` tokens, looking at the cache after every `every`.

    Ends sooner where the model does. Snapshot 0 is the cache as prefill left it. Raises `BadValue` for several prompts
    and counts below 1.
    """
    if steps < 1 or every < 1:
        raise BadValue(f"steps={steps}, every={every}: expected at least 1 of each")
    out = generate(params, prompt, policy=policy, max_new_tokens=1, stop_tokens=(), scan_layers=True)
    if out.cache.batch != 1:
        raise BadValue(f"{out.cache.batch} prompts: expected one, as the picture shows one text")
    length, new = int(out.cache.lengths[0]), out.tokens[0].tolist()  # the first token is not in the cache yet
    pictures, at = [out.cache], [0]
    while at[-1] < steps:
        if new[-1] in params.config.stop_tokens:
            break
        count = min(every, steps - at[-1])
        out = generate(params, None, cache=out.cache, max_new_tokens=count)
        count = int(out.lengths[0])
        new += out.tokens[0, :count].tolist()
        pictures.append(out.cache)
        at.append(at[-1] + count)
    kept = np.stack([_held(picture, length + len(new)) for picture in pictures])
    ids = [*_ids(params, prompt), *new]
    return Retention(kept, tuple(at), tuple(_words(params, ids)), length)


def _held(cache: KVCache, tokens: int) -> np.ndarray:
    """bool `[L, Hk, tokens]` of row 0."""
    views = cache.views
    out = np.zeros((len(views), views[0].next_slot.shape[1], tokens), bool)
    for index, layer in enumerate(views):
        positions = np.asarray(layer.by_head().positions[0])
        head, slot = np.nonzero(positions >= 0)
        out[index, head, positions[head, slot]] = True
    return out


def _ids(params: Params, prompt: Any) -> list[int]:
    from jaxkv.prompts import rows_of

    return rows_of(prompt, params.tokenizer, params.config.vocab_size)[0][0].tolist()


def _words(params: Params, ids: list[int]) -> list[str]:
    """Each token's own text, or its number without a tokenizer."""
    if params.tokenizer is None:
        return [str(each) for each in ids]
    return [params.tokenizer.decode([each], clean_up_tokenization_spaces=False) for each in ids]
