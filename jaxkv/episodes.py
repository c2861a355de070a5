"""Long conversations in several bounded caches: one per topic, and the question picks one (EpiCache)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv.checks import check_arguments, shown
from jaxkv.errors import BadValue
from jaxkv.generate import Generation, generate, prefill
from jaxkv.models.linear import lookup
from jaxkv.policies.policy import Policy
from jaxkv.prompts import Prompt, are_messages, plain_messages, right_padded, rows_of
from jaxkv.request import check_model
from jaxkv.sampling import generator
from jaxkv.store import KVCache
from jaxkv.store.cache import one_row
from jaxkv.weights.params import Params

ROUNDS = 50  # of k-means, at most
INSTRUCTION = (
    "\n\nWrite down what matters in this part of the conversation: who speaks, what happened and when, what people are "
    "like, what they think, feel and have promised.\n\n"
)


@dataclasses.dataclass(frozen=True)
class Episodes:
    """A history in E caches of one budget each. `centres [E, M]` are the topics' directions, `mean [M]` what all of the
    history has in common, `members [S]` every segment's topic, `nearby` the segments of each topic that have looked.
    """

    params: Params
    cache: KVCache
    centres: np.ndarray
    mean: np.ndarray
    members: np.ndarray
    nearby: tuple[np.ndarray, ...]
    messages: tuple[Mapping[str, Any], ...] = ()  # the history, where it was messages

    def __repr__(self) -> str:
        """One line, and no array."""
        return f"Episodes({len(self.centres)} topics of {len(self.members)} segments, {self.cache})"

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return self.cache.nbytes

    def nearest(self, question: Prompt) -> int:
        """The topic whose direction is nearest to the question's, by cosine; of messages what follows the last answer
        is the question. Raises `BadValue` for several questions."""
        if are_messages(question):
            question = plain_messages(question)
            last = max((n for n, message in enumerate(question) if message["role"] == "assistant"), default=-1)
            question = "\n".join(_said(question[last + 1 :])) or _said(question)[-1]
        pending = np.full(1, -1) if isinstance(question, str) else None
        rows, _ = rows_of(question, self.params.tokenizer, self.params.config.vocab_size, pending)
        if len(rows) != 1:
            raise BadValue(f"{len(rows)} questions: expected one, for each of them has a topic of its own")
        return int(np.argmax(self.centres @ _directions(_means(self.params, rows), self.mean)[0]))

    def ask(self, question: Prompt, **options: Any) -> Generation:
        """`jaxkv.generate` on the cache of the nearest topic, under its own policy unless `policy=` says "full".

        Messages without an answer are what is asked next, where the history was messages.
        """
        topic = self.nearest(question)
        if self.messages and are_messages(question) and all(each["role"] != "assistant" for each in question):
            question = [*self.messages, *question]
        return generate(self.params, question, cache=one_row(self.cache, topic), **options)


def episodes(
    params: Params,
    history: Prompt,
    *,
    policy: Policy,
    count: int = 4,
    windows: int = 8,
    utterances: int = 4,
    instruction: str = INSTRUCTION,
    seed: int = 0,
) -> Episodes:
    """The history (text, messages or ids) in `count` caches under a policy with pseudo queries, such as "epicache".

    Its segments are put in `count` topics by k-means over the directions of their mean token embeddings. A segment is
    `utterances` messages, or lines of a text, side by side; of ids as many as the policy has pseudo queries. Each
    topic's cache is filled block by block with the history, and what the topic's `windows` segments nearest to its
    centre, behind the `instruction` and in time order, attend to stays. Memory is `count` budgets, whatever the
    history's length. Messages end with the assistant's, for one without an answer is part of what is asked. Raises
    `BadValue` for other messages, several histories, another kind of policy, and for fewer segments than topics.
    Source: EpiCache (arXiv 2509.17396), with the numbers of its release's runs; the embedding is ours (the paper's is a
    sentence encoder), and the instruction's words are.
    """
    check_model(params)
    check_arguments(count=count, windows=windows, utterances=utterances, instruction=instruction, seed=seed)
    if not isinstance(policy, Policy):
        raise BadValue(f"policy={shown(policy)}: expected a Policy, such as jaxkv.policy('epicache', budget=256)")
    rows, _ = rows_of(history, params.tokenizer, params.config.vocab_size)
    if len(rows) != 1:
        raise BadValue(f"{len(rows)} histories: expected one")
    if are_messages(history) and history[-1]["role"] != "assistant":
        raise BadValue(
            f"a history that ends with a message of {shown(history[-1]['role'])}: expected an answer of the assistant "
            "to be last; give what has no answer yet to ask()"
        )
    drafts = policy.prefill is not None and policy.prefill.observe.drafts
    if drafts or not policy.extra:
        raise BadValue(
            f"policy {policy.name!r} of episodes: expected one at which tokens look from behind the prompt, and none "
            "are drafted for that, such as jaxkv.policy('epicache', budget=256)"
        )
    segments = _segments(params, history, rows[0], policy.extra, utterances)
    if len(segments) < count:
        each = f"{utterances} messages or lines" if isinstance(history, str) or are_messages(history) else None
        raise BadValue(
            f"count={count} topics of a history of {len(rows[0])} tokens, which has {len(segments)} segments of "
            f"{each or f'{policy.extra} tokens'}: give count= at most {len(segments)}, or a longer history"
        )
    means = _means(params, segments)
    mean = means.mean(axis=0)
    directions = _directions(means, mean)
    centres, members = k_means(directions, count, seed)
    nearby = tuple(_nearby(directions @ centre, members == topic, windows) for topic, centre in enumerate(centres))
    front = [] if params.tokenizer is None else [_encoded(params, instruction)]
    pseudo = right_padded([np.concatenate([*front, *(segments[at] for at in near)]) for near in nearby])
    cache = prefill(params, [rows[0]] * count, policy=policy, pseudo=pseudo)
    messages = tuple(history) if are_messages(history) else ()
    return Episodes(params, cache, centres, mean, members, nearby, messages)


def _segments(params: Params, history: Prompt, ids: np.ndarray, size: int, utterances: int) -> list[np.ndarray]:
    """The history in pieces, each the ids of some utterances, or `size` ids where it has no utterances."""
    if isinstance(history, str):
        said = [line for line in history.splitlines() if line.strip()]
    elif are_messages(history):
        said = _said(plain_messages(history))
    else:
        return [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    together = ["\n".join(said[at : at + utterances]) + "\n\n" for at in range(0, len(said), utterances)]
    return [_encoded(params, text) for text in together]


def _said(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who said what, a line for each message."""
    return [f"{message['role']}: {message['content'] or ''}" for message in messages]


def _encoded(params: Params, text: str) -> np.ndarray:
    assert params.tokenizer is not None  # the history is text
    return np.asarray(params.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _nearby(near: np.ndarray, own: np.ndarray, windows: int) -> np.ndarray:
    """The `windows` nearest of a topic's own segments in time order; the nearest of all where it has none."""
    order = np.argsort(-np.where(own, near, -np.inf) if own.any() else -near, kind="stable")
    return np.sort(order[: min(windows, max(int(own.sum()), 1))])


def k_means(directions: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit centres [E, M] and the nearest one of every direction [S].

    Begins with directions that are far from each other (the first at random), and stops when nothing moves; a topic
    that has lost all of its members keeps its centre.
    """
    chosen = [int(generator(seed).integers(len(directions)))]
    while len(chosen) < count:
        nearness = (directions @ directions[chosen].T).max(axis=1)
        nearness[chosen] = np.inf
        chosen.append(int(np.argmin(nearness)))
    centres, members = directions[chosen], np.full(len(directions), -1)
    for _ in range(ROUNDS):
        nearest = np.argmax(directions @ centres.T, axis=1)
        if (nearest == members).all():
            break
        members = nearest
        for topic in set(members):
            centres[topic] = _unit(directions[members == topic].mean(axis=0))
    return centres, members


def _means(params: Params, rows: list[np.ndarray]) -> np.ndarray:
    """The mean embedding of each row's tokens, float32 [S, M]."""
    embed = params.weights["embed"][...]
    return np.stack([np.asarray(lookup(embed, jnp.asarray(row)).astype(jnp.float32).mean(axis=0)) for row in rows])


def _directions(means: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """What sets each row apart from the whole history, as unit vectors."""
    return _unit(means - mean)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
