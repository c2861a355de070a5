"""A tiny Llama in plain NumPy (float64) that holds few entries, and the rules of some policies a second time.

`run` is a prompt, its cut and greedy steps. A rule says what entries are worth: `prompt` of a prompt, `step` after a
token has looked; the lowest leaves, and protected entries are worth infinity. Of equals the older stays; `run` says how
near a choice came to a tie that rounding could turn.
"""

import dataclasses
import json
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from safetensors.numpy import load_file


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


class Tiny:
    """A Hugging Face folder of a Llama (untied, no RoPE scaling)."""

    def __init__(self, folder: Path):
        facts = json.loads((folder / "config.json").read_text())
        assert facts["rope_scaling"] is None and not facts["tie_word_embeddings"]
        self.weights = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}
        self.layers, self.eps, self.theta = facts["num_hidden_layers"], facts["rms_norm_eps"], facts["rope_theta"]
        self.heads, self.kv_heads = facts["num_attention_heads"], facts["num_key_value_heads"]
        self.dim, self.group = facts["hidden_size"] // self.heads, self.heads // self.kv_heads

    def norm(self, x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * self.weights[name]

    def rope(self, x, at):
        """x [H, T, D] turned by its places [T]."""
        half = self.dim // 2
        angle = np.asarray(at)[:, None] * self.theta ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    def __call__(self, ids, at, attend):
        """Logits of the last token; `attend(layer, query, key, value)` of [H, T, D] gives the context [Hq, T, D]."""
        x = self.weights["model.embed_tokens.weight"][np.asarray(ids)]
        for layer in range(self.layers):
            front = f"model.layers.{layer}."
            h = self.norm(x, front + "input_layernorm.weight")
            parts = [h @ self.weights[f"{front}self_attn.{name}_proj.weight"].T for name in "qkv"]
            query, key, value = (part.reshape(len(h), -1, self.dim).swapaxes(0, 1) for part in parts)
            context = attend(layer, self.rope(query, at), self.rope(key, at), value)
            x = x + context.swapaxes(0, 1).reshape(len(x), -1) @ self.weights[front + "self_attn.o_proj.weight"].T
            h = self.norm(x, front + "post_attention_layernorm.weight")
            gate, up = (h @ self.weights[f"{front}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weights[front + "mlp.down_proj.weight"].T
        return self.norm(x[-1], "model.norm.weight") @ self.weights["lm_head.weight"].T

    def prompt(self, ids):
        """Logits, and every layer's `Prompt`."""
        seen, later = [], np.triu(np.ones((len(ids), len(ids)), bool), 1)

        def attend(layer, query, key, value):
            logits = query @ key.repeat(self.group, 0).swapaxes(1, 2) / self.dim**0.5
            weights = softmax(np.where(later, -np.inf, logits))
            seen.append(Prompt(layer, self.group, query, key, value, weights))
            return weights @ value.repeat(self.group, 0)

        return self(ids, np.arange(len(ids)), attend), seen


@dataclasses.dataclass
class Prompt:
    """One layer's queries [Hq, T, D], keys and values [Hk, T, D], and weights [Hq, T, T]."""

    layer: int
    group: int
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    weights: np.ndarray

    def by_group(self, mass):
        """[Hq, ...] as [Hk, G, ...]."""
        return mass.reshape(len(self.key), self.group, *mass.shape[1:])


@dataclasses.dataclass
class Head:
    """One KV head's entries in time order, and what the rule remembers of them."""

    layer: int
    number: int
    at: np.ndarray
    key: np.ndarray
    value: np.ndarray
    stats: dict[str, np.ndarray]

    def only(self, index):
        stats = {name: x[index] for name, x in self.stats.items()}
        return Head(self.layer, self.number, self.at[index], self.key[index], self.value[index], stats)


class Rule:
    """What entries are worth. `fresh` are the statistics of a new entry."""

    every = 1  # entries over the budget at which a cut comes; 1: the lowest leaves at every step
    reserve = 1  # of the budget, for the first new tokens
    near = np.inf  # how near a choice of its own came to a tie
    close = 2e-4  # how far off keys and values may be
    together = False  # whether all heads let the same of their entries go, by the sum
    fresh: ClassVar[dict[str, float]] = {}

    def __init__(self, budget: int):
        self.budget = budget

    def prepare(self, tiny: Tiny, ids: np.ndarray) -> None:
        """What it looks at before the prompt."""

    def reads(self, head: Head, query: np.ndarray) -> np.ndarray:
        """Which entries [G, n] each of the queries [G, D] of a step attends to."""
        return np.ones((len(query), len(head.at)), bool)

    def prompt(self, seen: Prompt) -> np.ndarray:
        """[Hk, T], infinity for what is protected."""
        raise NotImplementedError

    def stats(self, seen: Prompt) -> dict[str, np.ndarray]:
        """The statistics [Hk, T] after the prompt."""
        return {}

    def step(self, head: Head, mass: np.ndarray, now: int) -> np.ndarray:
        """[n] after a token at `now` - 1 whose attention by query head was `mass` [G, n]; carries the statistics on."""
        return np.zeros(len(head.at))

    def leave(self, head: Head, stay: np.ndarray, now: int, prompt: bool) -> Head:
        """The head with the entries at these places; the others have left."""
        return head.only(stay)

    def beside(self, head: Head) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Keys and values [m, D] that a step attends to beside the entries, and what is added to their logits [m]."""
        return None

    def stands(self, head: Head) -> np.ndarray:
        """For how many tokens each entry stands."""
        return np.ones(len(head.at))

    def most(self, held: int, now: int) -> int:
        """How many entries a head that held so many after the prompt may hold, with the token at `now` - 1."""
        return held

    def kept(self, worth: np.ndarray, count: int, layer: int) -> list[np.ndarray]:
        """The entries that each head keeps of a prompt, in time order."""
        return [np.sort(np.lexsort((np.arange(len(row)), -row))[:count]) for row in worth]


def ends(at, sinks, newest_from):
    """True for the first tokens of a text and for those from a position on."""
    return (at < sinks) | (at >= newest_from)


def competing(worth: np.ndarray, count: int, guard: int) -> list[np.ndarray]:
    """`count` per head on average, the best of all heads together; of each head its best `guard`."""
    heads, length = worth.shape
    order = np.argsort(-worth, axis=1, kind="stable")
    safe = np.zeros(worth.shape, bool)
    np.put_along_axis(safe, order[:, :guard], True, axis=1)
    rest = np.where(safe, -np.inf, worth).ravel()
    places = np.tile(np.arange(length), heads)
    best = np.lexsort((places, -rest))[: heads * count - int(safe.sum())]
    safe.ravel()[best] = True
    return [np.flatnonzero(head) for head in safe]


class Ran(NamedTuple):
    """The result of `run`."""

    tokens: list[int]
    looked: list[list[list[int]]]
    left: list[list[list[int]]]
    token_gap: float
    near: float
    heads: list[list[Head]]  # as the last step looked; after it, where a cut comes but every few tokens


def run(tiny: Tiny, rule: Rule, ids, steps: int, reserve: int = 1) -> Ran:
    """Tokens [steps + 1], what every head of every layer holds as the last step looks, and keeps, the smallest gaps.

    The gaps: between the two best logits of a token, and, relative, between what leaves and what is worth least of
    what stays.
    """
    rule.prepare(tiny, ids)
    logits, seen = tiny.prompt(ids)
    held, looked, near = [], [], [np.inf]
    for each in seen:
        worth, stats = rule.prompt(each), rule.stats(each)
        parts = rule.kept(worth, rule.budget - reserve, each.layer)
        for row, own in zip(worth, parts, strict=True):
            lost = np.setdiff1d(np.arange(len(ids)), own)
            near.append(_gap(row[own].min(), row[lost].max() if len(lost) else -np.inf))
        whole = [
            Head(each.layer, h, np.arange(len(ids)), each.key[h], each.value[h], {n: x[h] for n, x in stats.items()})
            for h in range(tiny.kv_heads)
        ]
        held.append([rule.leave(head, own, len(ids), True) for head, own in zip(whole, parts, strict=True)])
    sizes = [[len(head.at) + reserve for head in heads] for heads in held]

    def attend(layer, query, key, value):
        out, worths = [], []
        for number, head in enumerate(held[layer]):
            stats = {name: np.append(x, rule.fresh.get(name, now - 1)) for name, x in head.stats.items()}
            head = Head(
                layer, number, np.append(head.at, now - 1), np.append(head.key, key[number], 0),
                np.append(head.value, value[number], 0), stats,
            )  # fmt: skip
            own = query[number * tiny.group : (number + 1) * tiny.group, 0]
            logits = own @ head.key.T / tiny.dim**0.5 + np.log(rule.stands(head))
            logits = np.where(rule.reads(head, own), logits, -np.inf)
            mass = softmax(logits)
            out.append(mass @ head.value)
            if (beside := rule.beside(head)) is not None:
                more, values, bias = beside
                weights = softmax(np.concatenate([logits, own @ more.T / tiny.dim**0.5 + bias], 1))
                out[-1] = weights @ np.concatenate([head.value, values])
            worths.append(rule.step(head, mass, now))
            held[layer][number] = head
        looked.append([head.at.tolist() for head in held[layer]])
        last.append([head.only(np.arange(len(head.at))) for head in held[layer]])
        if rule.together:
            worths = [sum(worths)] * len(worths)
        for number, (head, worth) in enumerate(zip(held[layer], worths, strict=True)):
            most = rule.most(sizes[layer][number], now)
            least = most - 1
            if rule.every > 1:
                most, least = most + rule.every, most
            if len(head.at) >= most:
                order = np.lexsort((head.at, -worth))
                near.append(_gap(worth[order[least - 1]], worth[order[least]]))
                held[layer][number] = rule.leave(head, np.sort(order[:least]), now, False)
        return np.concatenate(out)[:, None]

    tokens, gaps = [int(logits.argmax())], [np.ptp(np.sort(logits)[-2:])]
    for step in range(steps):
        now, looked, last = len(ids) + step + 1, [], []
        logits = tiny([tokens[-1]], [now - 1], attend)
        tokens.append(int(logits.argmax()))
        gaps.append(np.ptp(np.sort(logits)[-2:]))
    left = [[head.at.tolist() for head in heads] for heads in held]
    return Ran(tokens, looked, left, float(min(gaps)), float(min(near)), held if rule.every > 1 else last)


def _gap(stays: float, leaves: float) -> float:
    if np.isinf(stays) or np.isinf(leaves) or stays == leaves:
        return np.inf
    return (stays - leaves) / max(abs(stays), abs(leaves), 1e-30)
