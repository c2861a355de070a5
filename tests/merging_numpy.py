"""The rules of merging a second time, in plain NumPy, entry by entry: what `jaxkv.policies.merging` must equal."""

import dataclasses
import itertools
import types

import numpy as np


@dataclasses.dataclass
class Layer:
    """One row's entries: keys and values [H, S, D], positions (-1: empty), counts and attention [H, S]."""

    keys: np.ndarray
    values: np.ndarray
    at: np.ndarray
    count: np.ndarray
    attention: np.ndarray


def part(**given):
    """The choices of a method, those that it does not name as most have them."""
    usual = {"into": "nearest", "alike": -1.0, "by": "equal", "divide": "sum", "what": "both", "turned": True}
    usual |= {"direction": False, "counts": False, "spares": False, "sigma": 5.0, "alpha": 0.5, "beta": 0.5}
    return types.SimpleNamespace(**(usual | given))


def cosine(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def turned(key, by, theta):
    """A key turned on by so many positions."""
    half = len(key) // 2
    angle = by * theta ** (-np.arange(half) / half)
    a, b = key[:half], key[half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])


def survivor(layer, head, e, takers, into, spared):
    """The slot that takes entry e up; None where there is none."""
    keys, at = layer.keys[head], layer.at[head]
    if not takers:
        return None
    if into in ("nearest", "product"):
        like = [cosine(keys[e], keys[c]) if into == "nearest" else keys[e] @ keys[c] for c in takers]
        return takers[int(np.argmax(like))]
    older = [c for c in takers if at[c] < at[e]]
    younger = [c for c in takers if at[c] > at[e]]
    if not older or not younger:
        return min(younger, key=lambda c: at[c]) if younger else max(older, key=lambda c: at[c])
    before, after = max(older, key=lambda c: at[c]), min(younger, key=lambda c: at[c])
    if into == "next":
        return after
    if into == "neighbour":
        return before if at[e] - at[before] <= at[after] - at[e] else after
    between = [s for s in np.argsort(at, kind="stable") if at[before] <= at[s] <= at[after]]
    pairs = itertools.pairwise(between)
    links = [-2.0 if a in spared or b in spared else cosine(keys[a], keys[b]) for a, b in pairs]
    breaks = int(np.argmin(links))  # the run ends with between[breaks]
    return before if between.index(e) <= breaks else after


def merge(layer, stays, protected, now, part, tau=None, theta=10000.0):
    """The layer after the entries that don't stay have left, and the threshold. `part` has the fields of `Merge`."""
    heads, slots = layer.at.shape
    after = Layer(*(x.copy() for x in (layer.keys, layer.values, layer.at, layer.count, layer.attention)))
    held = [[s for s in range(slots) if layer.at[h, s] >= 0] for h in range(heads)]
    lost = [sorted((s for s in held[h] if not stays[h, s]), key=lambda s: layer.at[h, s]) for h in range(heads)]
    chosen = {}
    for h in range(heads):
        spared = {s for s in held[h] if stays[h, s] and protected[h, s]} if part.spares else set()
        takers = [s for s in held[h] if stays[h, s] and s not in spared]
        for e in lost[h]:
            target = survivor(layer, h, e, takers, part.into, spared)
            if target is not None:
                chosen[h, e] = target, cosine(layer.keys[h, e], layer.keys[h, target])
    if part.alike == "average":
        found = [[chosen[h, e][1] for e in lost[h] if (h, e) in chosen] for h in range(heads)]
        everything = [m for head in found for m in head]
        if everything:
            mean = float(np.mean(everything))
            tau = mean if tau is None else part.alpha * tau + part.beta * mean
            for place in range(max(map(len, found))):
                if np.mean([head[place] for head in found if len(head) > place]) < tau:
                    for h in range(heads):
                        if len(found[h]) > place:
                            del chosen[h, lost[h][place]]
    else:
        chosen = {pair: found for pair, found in chosen.items() if found[1] >= part.alike}
    for h in range(heads):
        for c in {target for (head, _), (target, _) in chosen.items() if head == h}:
            group = [(e, near) for (head, e), (target, near) in chosen.items() if head == h and target == c]
            _into(layer, after, h, c, group, now, part, theta)
    return after, tau


def _into(layer, after, h, c, group, now, part, theta):
    n, many = layer.count[h, c], sum(layer.count[h, e] for e, _ in group)
    weight = {}
    for s, near in [(c, 1.0), *group]:
        value = layer.count[h, s]
        if part.by == "attention":
            value = layer.attention[h, s]
        elif part.by == "mean-attention":
            value = layer.attention[h, s] / max(now - layer.at[h, s], 1)
        elif s == c:
            value = n + 0.5 * many if part.by == "pivot" else n
        elif part.by == "similarity":
            value *= near
        elif part.by == "norm":
            mine, its = np.linalg.norm(layer.values[h, s]), np.linalg.norm(layer.values[h, c])
            value *= max(near, 0) * mine / (mine + its + 1e-6)
        elif part.by == "gaussian":
            value *= np.exp(-np.sum((layer.keys[h, s] - layer.keys[h, c]) ** 2) / (2 * part.sigma**2))
        elif part.by == "pivot":
            value *= 0.5
        weight[s] = value
    whole = n + many if part.divide == "count" else sum(weight.values())
    if part.counts:
        after.count[h, c] = n + many
    if whole <= 0:
        return
    after.values[h, c] = sum(w * layer.values[h, s] for s, w in weight.items()) / whole
    if part.what == "values":
        return
    keys = {}
    for s in weight:
        by = 0 if part.turned else layer.at[h, c] - layer.at[h, s]
        keys[s] = turned(layer.keys[h, s], by, theta)
    if part.direction:
        mean = sum(w * keys[s] / np.linalg.norm(keys[s]) for s, w in weight.items())
        after.keys[h, c] = mean / np.linalg.norm(mean) * np.linalg.norm(layer.keys[h, c])
    else:
        after.keys[h, c] = sum(w * keys[s] for s, w in weight.items()) / whole


def spread(layer, stays, over, draw):
    """The values after those that leave were spread; `draw(head, position)` is a number in [0, 1)."""
    values = layer.values.copy()
    for h in range(len(layer.at)):
        order = [s for s in np.argsort(layer.at[h], kind="stable") if layer.at[h, s] >= 0 and stays[h, s]]
        for e in range(layer.at.shape[1]):
            if layer.at[h, e] < 0 or stays[h, e]:
                continue
            ahead = [s for s in order if layer.at[h, s] > layer.at[h, e]][:over]
            mean = np.mean([layer.attention[h, s] for s in ahead]) if ahead else 0
            chance = layer.attention[h, e] / mean if mean > 0 else 1.0
            if ahead and draw(h, layer.at[h, e]) < chance:
                for s in ahead:
                    values[h, s] = values[h, s] + layer.values[h, e] / len(ahead)
    return values
