"""Policies against their rules written a second time, in plain NumPy: a prompt, its cut, and 24 greedy steps."""

import dataclasses
import itertools
import math
from typing import ClassVar

import merging_numpy
import numpy as np
import pytest
from forms import Prompt, Rule, Tiny, competing, ends, run, softmax
from measured import measured
from ordered import heads_of
from shares import headkv_budgets
from test_outliers import apart, quantised
from tiers_numpy import Tiered, in_bits, outwards, small_floats

import jaxkv
from jaxkv.policies import StretchLeverage
from jaxkv.policies.catalogue import named

NEVER = 10**6  # entries over the budget: everything new is added
FAMILY, BUDGET, TOKENS, STEPS = "llama2", 16, 40, 24
TOKEN_GAP, CLEAR = 1e-3, 2e-5


@pytest.fixture(scope="module")
def numpy_model(goldens):
    return Tiny(goldens / "tiny" / FAMILY)


def ids(seed):
    """A prompt in which no token comes twice."""
    return 3 + np.random.default_rng(seed).permutation(120)[:TOKENS].astype(np.int32)


class Summed(Rule):
    """What remembers the attention so far: `attention` forgets by `decay`, the newest half is protected."""

    fresh: ClassVar[dict[str, float]] = {"attention": 0.0}
    decay, sinks = 1.0, 0

    @property
    def recent(self):
        return self.budget // 2

    def looked(self, seen):
        return seen.weights.sum(1)

    def size(self, value):
        return 1.0

    def prompt(self, seen: Prompt):
        worth = seen.by_group(self.looked(seen)).mean(1) * self.size(seen.value)
        return np.where(ends(np.arange(worth.shape[1]), self.sinks, worth.shape[1] - self.recent), np.inf, worth)

    def stats(self, seen: Prompt):
        return {"attention": seen.by_group(self.looked(seen)).mean(1)}

    def step(self, head, mass, now):
        head.stats["attention"] = head.stats["attention"] * self.decay + mass.mean(0)
        worth = head.stats["attention"] * self.size(head.value)
        return np.where(ends(head.at, self.sinks, now - self.recent), np.inf, worth)


class Merging:
    """What leaves is merged; `merges` are the choices at a prompt, `steps` those while decoding (None: dropped)."""

    merges: ClassVar[dict] = {}
    steps: ClassVar[dict | None] = None
    protects = (0, 0)  # sinks and recents

    def leave(self, head, stay, now, prompt):
        options = self.merges if prompt else self.steps
        if options is None:
            return head.only(stay)
        some = np.isin(np.arange(len(head.at)), stay)[None]
        attention = head.stats.get("attention", np.ones(len(head.at)))
        count = self.stands(head)
        layer = merging_numpy.Layer(*(x[None] for x in (head.key, head.value, head.at, count, attention)))
        sinks, recents = self.protects
        spared = ends(head.at, sinks, now - recents)[None]
        after, _ = merging_numpy.merge(layer, some, spared, now, merging_numpy.part(**options))
        head = dataclasses.replace(head, key=after.keys[0], value=after.values[0])
        if "count" in head.stats:
            head.stats["count"] = after.count[0]
        return head.only(stay)


class MiKv(Tiered, Summed):
    """H2O, and a tier of 2 bits in groups of half a head, its keys balanced by the prompt's queries."""

    codes = (in_bits(2, 8), in_bits(2, 8))
    balance = "queries"


class Vatp(Summed):
    sinks = 2

    def size(self, value):
        return np.abs(value).sum(-1)


class Alisa(Summed):
    decay = 0.9375

    def looked(self, seen):
        return seen.weights[:, -16:].sum(1)


class Ems(Merging, Summed):
    """At the prompt both sides from 0 to 1 over what is not protected; the question's queries count what they see. Its
    directions of keys are merged, by attention."""

    recent = 4
    merges: ClassVar[dict] = {"into": "nearest", "alike": 0.5, "by": "attention", "direction": True}

    def prompt(self, seen: Prompt):
        length, question = seen.weights.shape[1], 4
        far = seen.by_group(seen.weights.sum(1)).mean(1)[:, : length - self.recent]
        weights = seen.weights[:, -question:, : length - question] * np.arange(length - question, length)[:, None]
        near = seen.by_group(weights.sum(1) / question).mean(1)
        unit = [(x - x.min(1, keepdims=True)) / np.ptp(x, axis=1, keepdims=True) for x in (far, near)]
        return np.append(sum(unit) / 2, np.full((len(far), self.recent), np.inf), 1)

    def step(self, head, mass, now):
        head.stats["attention"] = head.stats["attention"] + mass.mean(0)
        worth = 0.03 * head.stats["attention"] + 0.97 * mass.mean(0)
        return np.where(head.at >= now - self.recent, np.inf, worth)


class TreeKv(Rule):
    """Algorithm 1: `at` moves round the entries between sinks and recents, and the lower of the two there leaves. A
    prompt comes in blocks of 4, worth the mean attention of its last 4 queries."""

    sinks, recent, block = 4, 6, 4
    fresh: ClassVar[dict[str, float]] = {"attention": 0.0, "seen": 0.0}

    def looked(self, seen):
        return seen.by_group(seen.weights[:, -self.block :].mean(1)).mean(1)

    def prompt(self, seen: Prompt):
        worth = []
        for row in self.looked(seen):
            free = np.arange(self.sinks, len(row) - self.recent)
            blocks = [free[at : at + self.block] for at in range(0, len(free), self.block)]
            most, held, when, at = (self.budget - 1 - self.sinks - self.recent) // self.block, [], {}, 0
            for number in range(len(blocks)):
                held.append(number)
                if len(held) > most:
                    one, two = (row[blocks[held[at + turn]]].mean() for turn in (0, 1))
                    self.near = min(self.near, abs(one - two) / max(one, two))
                    when[held.pop(at + 1 if one > two else at)] = number
                    at = (at + 1) % most
            each = np.full(len(row), np.inf)
            for number, tokens in enumerate(blocks):
                each[tokens] = when.get(number, len(row)) * self.block + np.arange(len(tokens))
            worth.append(each)
        return np.stack(worth)

    def stats(self, seen: Prompt):
        return {"attention": self.looked(seen), "seen": np.ones(seen.key.shape[:2])}

    def step(self, head, mass, now):
        head.stats["attention"] = head.stats["attention"] + mass.mean(0)
        head.stats["seen"] = head.stats["seen"] + 1
        share, apart = head.stats["attention"] / head.stats["seen"], ends(head.at, self.sinks, now - self.recent)
        at = self.sinks + now % ((~apart).sum() - 1)
        self.near = min(self.near, abs(share[at] - share[at + 1]) / max(share[at], share[at + 1]))
        worth = np.where(apart, np.inf, 1.0)
        worth[at + 1 if share[at] > share[at + 1] else at] = 0.0
        return worth


class LazyEviction(Rule):
    """Cuts every 4 tokens; what comes back soon and is due stays. Every step counts from the end of the prompt on."""

    every, window, threshold = 4, 4, 0.05
    fresh: ClassVar[dict[str, float]] = {"gap": 0.0}

    def prompt(self, seen: Prompt):
        worth = seen.by_group(seen.weights[:, -self.window :].mean(1)).mean(1)
        worth[:, -self.window :] = np.inf
        return worth

    def stats(self, seen: Prompt):
        last = np.full(seen.key.shape[:2], seen.key.shape[1] - 1.0)
        return {"last": last, "gap": np.zeros_like(last)}

    def step(self, head, mass, now):
        head.stats["last"][-1] = now - 2  # the step before it came
        hit = mass.max(0) >= self.threshold
        gap, last = head.stats["gap"], head.stats["last"]
        head.stats["gap"] = gap = np.where(hit, np.maximum(gap, now - 1 - last), gap)
        head.stats["last"] = last = np.where(hit, now - 1, last)
        sigmoid = lambda x: 1 / (1 + np.exp(np.minimum(-x, 700)))  # noqa: E731
        worth = 2 * sigmoid(-1 - (now - 1 - last) / (gap + 1e-5)) + np.where(gap > 0, 2 * sigmoid(1 - gap), 0)
        return np.where(head.at >= now - self.window, np.inf, worth)


class ElasticCache(Merging, Rule):
    """All heads of a layer by the attention that all queries gave, what leaves into the nearest by place. Then what is
    behind all but the last 9 of the prompt's goes, and the cache grows with the text, up to the budget."""

    merges: ClassVar[dict] = {"into": "neighbour", "spares": True}
    protects, reserve = (1, 1), 5

    def prompt(self, seen: Prompt):
        self.length = seen.weights.shape[1]
        worth = np.tile(seen.weights.sum(1).mean(0), (len(seen.key), 1))
        worth[:, 0] = worth[:, -1] = np.inf
        return worth

    @property
    def left(self):
        return self.budget - self.reserve

    def most(self, held, now):
        return min(self.left + math.ceil(self.left * (now - self.length) / self.length) + 1, held)

    def step(self, head, mass, now):
        place = np.arange(len(head.at))  # in time order
        return np.where(place < self.left - 9, np.inf, head.at + 0.0)


class WeightedKv(Merging, Summed):
    """The lowest mean attention goes, and its value into the next one's, by the two means."""

    merges: ClassVar[dict] = {"into": "next", "by": "mean-attention", "what": "values"}
    steps: ClassVar[dict | None] = merges
    sinks = 2

    def prompt(self, seen: Prompt):
        share = super().prompt(seen)
        return share / np.arange(share.shape[1], 0, -1)

    def step(self, head, mass, now):
        return super().step(head, mass, now) / (now - head.at)


class KeepKv(Merging, Summed):
    """Every 4 tokens what leaves goes into the nearest key, by mean attention, and counts there; of a cosine of 0.3."""

    every, sinks = 4, 2
    fresh: ClassVar[dict[str, float]] = {"attention": 0.0, "count": 1.0}
    merges: ClassVar[dict] = {"into": "nearest", "alike": 0.3, "by": "mean-attention", "counts": True}
    steps: ClassVar[dict | None] = merges

    def stands(self, head):
        return head.stats["count"]

    def stats(self, seen: Prompt):
        return super().stats(seen) | {"count": np.ones(seen.key.shape[:2])}


class ZsMerge(Summed):
    """What leaves goes into two means per head, at the cut the older half and the younger; later by the larger product.
    They have 0.6 log n added to their logits; attention fades, and is counted among the others alone."""

    decay, sinks = 0.98, 0

    def __init__(self, budget):
        super().__init__(budget)
        self.residue = {}

    @property
    def recent(self):
        return int(np.float32(0.4) * self.budget)

    def looked(self, seen):
        length = seen.weights.shape[1]
        return (seen.weights * self.decay ** np.arange(length - 1, -1, -1)[:, None]).sum(1)

    def leave(self, head, stay, now, prompt):
        lost = np.setdiff1d(np.arange(len(head.at)), stay)
        if prompt:
            means = [(head.key[r].mean(0), head.value[r].mean(0), len(r)) for r in np.array_split(lost, 2)]
        else:
            means = self.residue[head.layer, head.number]
            for e in lost:
                best = int(np.argmax([head.key[e] @ key for key, _, _ in means]))
                key, value, n = means[best]
                means[best] = (key * n + head.key[e]) / (n + 1), (value * n + head.value[e]) / (n + 1), n + 1
        self.residue[head.layer, head.number] = means
        return head.only(stay)

    def beside(self, head):
        keys, values, counts = map(np.array, zip(*self.residue[head.layer, head.number], strict=True))
        return keys, values, 0.6 * np.log(counts)


class LookM(Merging, Summed):
    """Every 4 tokens what leaves goes into the nearest key, half of it and half of that one."""

    every, sinks = 4, 2
    merges: ClassVar[dict] = {"into": "nearest", "by": "pivot"}
    steps: ClassVar[dict | None] = merges


class KvMerger(Merging, Rule):
    """Runs of alike neighbours, cut where adjacent keys are least alike; the ones of most attention stay apart."""

    merges: ClassVar[dict] = {"into": "chain", "by": "gaussian", "spares": True}
    every = NEVER

    @property
    def protects(self):
        return 0, int(np.float32(0.34) * self.budget)

    def prompt(self, seen: Prompt):
        share = seen.by_group(seen.weights.sum(1)).mean(1)
        length, recent = share.shape[1], self.protects[1]
        worth = share / (1 + share)
        for row, attention, key in zip(worth, share, seen.key, strict=True):
            old = np.arange(length - recent)
            heavy = old[np.argsort(-attention[old], kind="stable")][: int(np.float32(0.24) * self.budget)]
            rest = np.setdiff1d(old, heavy)
            links = [
                merging_numpy.cosine(key[i], key[i - 1]) if i and i - 1 in rest else -np.inf for i in rest.tolist()
            ]
            runs = self.budget - recent - len(heavy)
            begins = np.sort(rest[np.lexsort((rest, links))][:runs])
            for first, last in itertools.pairwise([*begins.tolist(), length]):
                run = rest[(rest >= first) & (rest < last)]
                row[run[np.argmax(attention[run])]] += 2
            row[heavy] += 4
            row[length - recent :] = np.inf
        return worth

    def step(self, head, mass, now):
        return np.zeros(len(head.at))


class Cam(Rule):
    """Sinks and the newest; a value that leaves while decoding is spread over the next 16, by chance."""

    fresh: ClassVar[dict[str, float]] = {"attention": 0.0}

    def stats(self, seen: Prompt):
        return {"attention": seen.by_group(seen.weights.sum(1)).mean(1)}

    def prompt(self, seen: Prompt):
        return np.tile(
            np.where(np.arange(seen.key.shape[1]) < 4, np.inf, np.arange(seen.key.shape[1])), (len(seen.key), 1)
        )

    def step(self, head, mass, now):
        head.stats["attention"] = head.stats["attention"] + mass.mean(0)
        return np.where(head.at < 4, np.inf, head.at + 0.0)

    def leave(self, head, stay, now, prompt):
        if not prompt:
            some = np.isin(np.arange(len(head.at)), stay)[None]
            layer = merging_numpy.Layer(
                *(x[None] for x in (head.key, head.value, head.at, head.at, head.stats["attention"]))
            )
            draw = lambda _, at: Drawn.draw(self, np.array([at]), head.number)[0]  # noqa: E731
            head = dataclasses.replace(head, value=merging_numpy.spread(layer, some, 16, draw)[0])
        return head.only(stay)


class Drawn(Rule):
    """A number of the place and the head, by a mixer of 32 bits."""

    def draw(self, at, head):
        word = (1 << 32) - 1
        out = []
        for place in at.tolist():
            x = (place * 0x9E3779B1 + head * 0x85EBCA77) & word
            for shift, times in ((16, 0x7FEB352D), (15, 0x846CA68B)):
                x = (x ^ (x >> shift)) * times & word
            out.append(((x ^ (x >> 16)) >> 8) / 2**24)
        return np.array(out)

    def prompt(self, seen: Prompt):
        return np.stack([self.draw(np.arange(seen.key.shape[1]), head) for head in range(len(seen.key))])

    def step(self, head, mass, now):
        return self.draw(head.at, head.number)


def pooled(mass, kernel, kind):
    """The mean over `kernel` neighbours (the text's ends count 0), or the largest of them."""
    half = kernel // 2
    if kind == "avg":
        return np.stack([np.convolve(row, np.ones(kernel) / kernel, mode="same") for row in mass])
    wide = np.pad(mass, ((0, 0), (half, half)), constant_values=-np.inf)
    return np.max([wide[:, shift : shift + mass.shape[1]] for shift in range(kernel)], axis=0)


class SnapKv(Rule):
    """The window's attention to what is before it; new tokens are added."""

    every, window, kernel, pool = NEVER, 6, 5, "avg"

    def prompt(self, seen: Prompt):
        before = seen.weights.shape[1] - self.window
        mass = pooled(seen.weights[:, -self.window :, :before].mean(1), self.kernel, self.pool)
        return np.append(seen.by_group(mass).mean(1), np.full((len(seen.key), self.window), np.inf), 1)


class SnapKvMost(SnapKv):
    """With the pool of its runs on LongBench."""

    kernel, pool = 7, "max"


class Lookahead(Rule):
    """SnapKV drafts, and what the drafted tokens attend to behind the whole prompt stays (the second stage of the
    release: `update_kv_LAQ`, `pyramidkv_utils.py` line 598, without the mask that it takes over from SnapKV)."""

    every, count, drafts, times = NEVER, 8, SnapKv, 1

    def prepare(self, tiny, ids):
        draft = run(tiny, self.drafts(self.times * self.budget), ids, self.count, reserve=0).tokens[: self.count]
        self.length = len(ids)
        _, self.ahead = tiny.prompt([*ids, *draft])

    def looked(self, seen: Prompt):
        """By query head; the tokens' own keys stay out."""
        keys = seen.key[:, : self.length].repeat(seen.group, 0)
        logits = seen.query[:, self.length :] @ keys.swapaxes(1, 2) / seen.key.shape[-1] ** 0.5
        return pooled(self.of_all(softmax(logits)), 7, "max")

    def of_all(self, weights):
        return weights.sum(1)

    def prompt(self, seen: Prompt):
        return seen.by_group(self.looked(self.ahead[seen.layer])).mean(1)


class LookaheadReleased(Lookahead):
    """The first stage as in the release (`select_KV_lookahead_stage`)."""

    drafts = SnapKvMost


class LookaheadLocal(LookaheadReleased):
    """LAQ++: the prompt's last 8 tokens look too, and stay."""

    local = 8

    def looked(self, seen: Prompt):
        keys = seen.key[:, : self.length].repeat(seen.group, 0)
        logits = seen.query[:, self.length - self.local :] @ keys.swapaxes(1, 2) / seen.key.shape[-1] ** 0.5
        place = np.arange(self.length)
        hidden = place > np.minimum(place[-self.local :, None], self.length)
        logits[:, : self.local] = np.where(hidden, -np.inf, logits[:, : self.local])
        before = softmax(logits).sum(1)[:, : -self.local]
        return np.pad(pooled(before, 7, "max"), ((0, 0), (0, self.local)), constant_values=np.inf)


class LookaheadLongFlow(Lookahead):
    """Ours: own keys in the softmax and a mean over neighbours; then LongFlow, one slot for all heads."""

    every, together = 1, True

    def looked(self, seen: Prompt):
        return pooled(seen.weights[:, self.length :, : self.length].mean(1), 5, "avg")

    def step(self, head, mass, now):
        return mass.sum(0) * np.abs(head.value).sum(-1)


class Probed(Rule):
    """What the last 5 % of the queries look at, and about as many drawn before, over those that could."""

    every = NEVER

    def prompt(self, seen: Prompt):
        length = seen.weights.shape[1]
        place = np.arange(length)
        probes = (place >= int(length * 0.95)) | (Drawn(self.budget).draw(place, 0) < 0.05 / 0.95)
        return seen.by_group(seen.weights[:, probes].sum(1)).sum(1) / (length - place)


class ZipCache(Tiered, Probed):
    """What is not salient in 2 bits, channels divided by the root of their largest number."""

    codes, balance = (in_bits(2), in_bits(2)), "channels"


class Needed(Rule):
    """The bits that key and value need together: of the last 5 queries' largest attention, without outliers."""

    every = NEVER

    def prompt(self, seen: Prompt):
        many = seen.weights.shape[1]
        mass = seen.by_group(seen.weights[:, -5:].max(1)).max(1)
        of_key = np.sqrt(12 / 300 * np.log(many**3 / (many - 1) * 9 + 1))
        of_value = np.sqrt(12 / many) * 3 / mass
        width = lambda x: np.array([[np.ptp(apart(row, 0.01)[0]) for row in head] for head in x])  # noqa: E731
        worth = np.log2(width(seen.key) / (2 * of_key) + 1) + np.log2(width(seen.value) / (2 * of_value) + 1)
        worth[:, -4:] = np.inf
        return worth


def beside_outliers(x):
    """Rows in 2 bits beside their outliers."""
    return np.array([quantised(row, 2, 0.01)[0] for row in x]).reshape(x.shape)


class Qaq(Tiered, Needed):
    """What needs fewer bits in 2 of them, outliers apart."""

    codes = (beside_outliers, beside_outliers)


class Restless(Rule):
    """Mean and variance of the window's attention, 5 neighbours together; at decode the current query's attention."""

    every, window, gamma = 4, 4, 263.8

    def prompt(self, seen: Prompt):
        mass = seen.weights[:, -self.window :]
        apart = np.arange(mass.shape[2]) >= mass.shape[2] - self.window
        worth = np.where(apart, 0.0, mass.mean(1) + self.gamma * mass.var(1, ddof=1))
        worth = seen.by_group(pooled(worth, 5, "avg")).mean(1)
        return np.where(apart, np.inf, worth)

    def step(self, head, mass, now):
        apart = head.at >= now - self.window
        return np.where(apart, np.inf, pooled(np.where(apart, 0.0, mass.mean(0))[None], 5, "avg")[0])


class Arkv(Tiered, Restless):
    """What leaves is in 8 bits first."""

    codes = (small_floats, small_floats)


class TieredSnapKv(Tiered, SnapKv):
    """What drafts for the next."""

    codes, balance = (in_bits(4), in_bits(4)), "ranges"


class TieredLaq(Tiered, Lookahead):
    """Ours: what leaves stays in 4 bits, key channels brought to one range; at decode what got least attention leaves,
    the newest aside."""

    every, recent, drafts = 1, BUDGET // 4, TieredSnapKv
    codes, balance = (in_bits(4), in_bits(4)), "ranges"
    fresh: ClassVar[dict[str, float]] = {"attention": 0.0}

    def stats(self, seen: Prompt):
        return {"attention": super(Tiered, self).prompt(seen)}

    def step(self, head, mass, now):
        head.stats["attention"] = worth = head.stats["attention"] + mass.mean(0)
        self.said[head.layer, head.number] = worth = np.where(head.at >= now - self.recent, np.inf, worth)
        return worth


class LookaheadSums(Lookahead):
    """Ours: what has had least attention leaves, first that of the looked-ahead tokens; a quarter of recents stays."""

    every, recent = 1, 0.25
    fresh: ClassVar[dict[str, float]] = {"attention": 0.0}

    def stats(self, seen: Prompt):
        return {"attention": self.prompt(seen)}

    def step(self, head, mass, now):
        recent = int(self.recent * self.budget) if self.recent < 1 else self.recent
        head.stats["attention"] = head.stats["attention"] + mass.mean(0)
        return np.where(head.at >= now - recent, np.inf, head.stats["attention"])


class Coded:
    """A rule whose entries are in 4 bits from the step after their own on, key channels brought to one range."""

    close = 4e-3  # a scale of float32 may round to another float16

    def __init__(self, budget: int):
        super().__init__(budget)
        self.ranges = {}

    def codes(self, head, key, value):
        centre, reach = self.ranges[head.layer, head.number]
        return in_bits(4)((key - centre) / reach) * reach + centre, in_bits(4)(value)

    def leave(self, head, stay, now, prompt):
        head = super().leave(head, stay, now, prompt)
        if not prompt:
            return head
        centre = ((head.key.min(0) + head.key.max(0)) / 2).astype(np.float16).astype(np.float64)
        far = np.abs(head.key - centre).max(0)
        far = outwards(np.maximum(far, 2 / len(head.key) * far.mean()), up=True)
        self.ranges[head.layer, head.number] = centre, far
        key, value = self.codes(head, head.key, head.value)
        return dataclasses.replace(head, key=key, value=value)

    def step(self, head, mass, now):
        worth = super().step(head, mass, now)
        head.key[-1], head.value[-1] = self.codes(head, head.key[-1], head.value[-1])
        return worth


class CodedSnapKv(Coded, SnapKv):
    """What drafts for the next."""


class CodedSums(Coded, LookaheadSums):
    """Ours: the same with all entries in codes, while it drafts too."""

    drafts = CodedSnapKv


class CodedFar(CodedSums):
    """Ours: 32 tokens drafted from a larger cache, of which the one counts that attends most to an entry."""

    count, times = 32, 2

    def of_all(self, weights):
        return weights.max(1)


class LookaheadHeads(LookaheadSums):
    """Ours: heads keep by HeadKV's shares; 4 recents."""

    recent = 4

    def kept(self, worth, count, layer):
        layers, heads = len(self.ahead), len(worth)
        group, width = self.ahead[0].group, self.ahead[0].key.shape[-1]
        scores = measured(layers, heads * group, heads, width)["reasoning"]
        budgets = headkv_budgets(
            scores.reshape(layers, heads, -1).mean(2), count + 1, 0, 4.0, worth.shape[1], 1, self.recent
        )
        order = np.argsort(-worth, axis=1, kind="stable")
        return [np.sort(row[:size]) for row, size in zip(order, budgets[layer], strict=True)]


class DapQ(Rule):
    """Tokens of the prompt's ends, again at the next positions, attend to the prompt and to those before them."""

    every, first, last = NEVER, 4, 28

    def prepare(self, tiny, ids):
        self.length = len(ids)
        _, self.behind = tiny.prompt([*ids, *ids[: self.first], *ids[len(ids) - self.last :]])

    def prompt(self, seen: Prompt):
        mass = self.behind[seen.layer].weights[:, self.length :, : self.length].mean(1)
        return seen.by_group(self.spread(mass)).mean(1)

    def spread(self, mass):
        return mass


class DapQLongFlow(DapQ):
    every, together = 1, True

    def step(self, head, mass, now):
        return mass.sum(0) * np.abs(head.value).sum(-1)


class Spans(DapQ):
    """The last token again, and the largest of 15 neighbours."""

    first, last = 0, 1

    def spread(self, mass):
        return pooled(mass, 15, "max")


class SpansLongFlow(Spans, DapQLongFlow):
    every, together = 1, True


class AdaKvH2o(Summed):
    """Heads share the prompt's cut: each its safeguard, at decode what is protected and one more."""

    @property
    def recent(self):
        return self.budget // 4

    def kept(self, worth, count, layer):
        return competing(worth, count, self.recent + 1)


class AdaPyramidKv(SnapKv):
    """24, 16 and 8 entries in the three layers: the window of 6 and 18, 10 and 2; in each the heads compete, and move a
    fifth of the way back to an even share."""

    def kept(self, worth, count, layer):
        budget, window = count + (1 - layer) * 8, 6
        won = np.array([len(own) for own in competing(worth, budget, 1)]) - window
        exact = 0.8 * won + 0.2 * (budget - window)
        sizes = np.floor(exact + 1e-6).astype(int)
        sizes[np.argsort(sizes - exact, kind="stable")[: won.sum() - sizes.sum()]] += 1
        order = np.argsort(-worth, axis=1, kind="stable")
        return [np.sort(row[: window + size]) for row, size in zip(order, sizes, strict=True)]


class Quest(Rule):
    """Query heads of layers but the first read 4 pages of 4 tokens: the token's own, and those whose keys may give it
    the most."""

    every, page, count = NEVER, 4, 4

    def prompt(self, seen: Prompt):
        return np.full((len(seen.key), seen.key.shape[1]), np.inf)

    def kept(self, worth, count, layer):
        return [np.arange(worth.shape[1])] * len(worth)

    def reads(self, head, query):
        number = head.at // self.page
        if head.layer == 0:
            return np.ones((len(query), len(number)), bool)
        read = []
        for one in query:
            bounds = []
            for page in range(number[-1] + 1):
                low, high = (end(head.key[number == page], axis=0) for end in (np.min, np.max))
                bounds.append(np.maximum(one * low, one * high).sum())
            bounds[-1] = np.inf
            order = np.argsort(bounds)[::-1]
            self.near = min(self.near, bounds[order[self.count - 1]] - bounds[order[self.count]])
            read.append(np.isin(number, order[: self.count]))
        return np.array(read)


class Leverages(Rule):
    """The leverage of the keys before RoPE, centred and sketched, by stretches of 16 as z-scores; the heads compete for
    what the first and last two tokens leave."""

    every, stretch = NEVER, 16

    def prepare(self, tiny, ids):
        self.unrotated = [tiny.rope(seen.key, -np.arange(len(ids))) for seen in tiny.prompt(ids)[1]]

    def kept(self, worth, count, layer):
        return competing(worth, count, 1)

    def leverages(self, seen):
        keys, out = self.unrotated[seen.layer], []
        for start in range(0, keys.shape[1], self.stretch):
            x = keys[:, start : start + self.stretch]
            x = (x - x.mean(1, keepdims=True)) @ np.asarray(StretchLeverage().gaussian(x.shape[-1]), np.float64)
            inverse = np.linalg.inv(x.swapaxes(1, 2) @ x + 0.005 * np.eye(x.shape[-1]))
            hat = np.einsum("hsd,hde,hse->hs", x, inverse, x)
            out.append((hat - hat.mean()) / hat.std())
        return np.concatenate(out, axis=1)

    def worth(self, seen):
        return self.leverages(seen)

    def prompt(self, seen: Prompt):
        worth = self.worth(seen)
        return np.where(ends(np.arange(worth.shape[1]), 2, worth.shape[1] - 2), np.inf, worth)


class NonCausals(Leverages):
    """What the keys of each chunk of 16 get of its queries, without order or scale, as z-scores; a short chunk's get a
    sixteenth for each query that it lacks."""

    chunk = 16

    def around(self, seen):
        sums = np.zeros(seen.query.shape[:2])
        for start in range(0, sums.shape[1], self.chunk):
            part = slice(start, start + self.chunk)
            weights = softmax(seen.query[:, part] @ seen.key[:, part].repeat(seen.group, 0).swapaxes(1, 2))
            sums[:, part] = weights.sum(1) + (self.chunk - weights.shape[1]) / self.chunk
        sums = seen.by_group(sums).mean(1)
        return (sums - sums.mean()) / sums.std()

    def worth(self, seen):
        return self.around(seen)


class Compactor(NonCausals):
    """Half of the leverage and all of the attention."""

    def worth(self, seen):
        return 0.5 * self.leverages(seen) + self.around(seen)


class Finch(Rule):
    """What the last four tokens, the question, see of the others, summed over all heads, which keep the same."""

    every = NEVER

    def prompt(self, seen: Prompt):
        worth = seen.weights[:, -4:].sum((0, 1))
        worth[-4:] = np.inf
        return np.tile(worth, (len(seen.key), 1))


class KeyDiff(Rule):
    """Keys that differ from the mean direction stay, while decoding too."""

    def worth(self, key):
        unit = key / np.linalg.norm(key, axis=-1, keepdims=True)
        return -unit @ unit.mean(0) / np.linalg.norm(unit.mean(0))

    def prompt(self, seen: Prompt):
        return np.stack([self.worth(key) for key in seen.key])

    def step(self, head, mass, now):
        return self.worth(head.key)


class LagKv(Rule):
    """Each whole lag but the last by how its tokens lie in the range of the next lag; of equals by place."""

    every, lag, sinks = 4, 4, 4

    def gap(self, x, following):
        low, high = following.min(0), following.max(0)
        return softmax(((x - low) / (high - low)).std(-1, ddof=1))

    def worth(self, key, value):
        length, lag = len(key), self.lag
        out = 1 + np.arange(length) / length
        out[: self.sinks] = np.inf
        for start in range(self.sinks, length - 2 * lag + 1, lag):
            one, two = slice(start, start + lag), slice(start + lag, start + 2 * lag)
            out[one] = (self.gap(key[one], key[two]) + self.gap(value[one], value[two])).argsort().argsort() / lag
        return out

    def prompt(self, seen: Prompt):
        return np.stack([self.worth(*pair) for pair in zip(seen.key, seen.value, strict=True)])

    def step(self, head, mass, now):
        return self.worth(head.key, head.value)


class Cur(Rule):
    """The squared norms of key and value, each as its share of its window of 4 entries, multiplied."""

    every, local, sinks = 4, 4, 4

    def worth(self, key, value):
        out = np.ones(len(key))
        for x in (key, value):
            size = (x**2).sum(-1)
            for start in range(0, len(size), self.local):
                window = slice(start, start + self.local)
                out[window] *= size[window] / size[window].sum()
        out[: self.sinks] = np.inf
        return out

    def prompt(self, seen: Prompt):
        return np.stack([self.worth(*pair) for pair in zip(seen.key, seen.value, strict=True)])

    def step(self, head, mass, now):
        return self.worth(head.key, head.value)


class CriticalKv(SnapKv):
    """Half of a prompt's budget by the window's attention, half by that times what a value gives to the output; then
    the attention times the value's size."""

    every = 1

    def prepare(self, tiny, ids):
        name, width = "model.layers.{}.self_attn.o_proj.weight", tiny.dim
        outs = [tiny.weights[name.format(layer)].T.reshape(tiny.heads, width, -1) for layer in range(tiny.layers)]
        self.out = outs

    def prompt(self, seen: Prompt):
        first = super().prompt(seen)
        size = np.abs(seen.value.repeat(seen.group, 0) @ self.out[seen.layer]).sum(-1)
        second = (first + 1e-4) * seen.by_group(size).mean(1)
        lead = np.argsort(-first, axis=1, kind="stable")[:, : (self.budget - 1) // 2]
        np.put_along_axis(second, lead, np.inf, axis=1)
        return second

    def step(self, head, mass, now):
        return mass.mean(0) * np.abs(head.value).sum(-1)


SMALL_MERGING = {"sinks": 2, "every": 4}
VALUES = {"observe": {"kind": "current-query"}, "score": {"kind": "attention-value"}, "aggregate": {"group": "mean"}}
CASES = {  # the rule, our options, the seed of a prompt without near ties
    "mikv": (MiKv, {"times": 0.5, "channels": 8}, 0),
    "vatp": (Vatp, {"sinks": 2}, 0),
    "alisa": (Alisa, {}, 0),
    "ems": (Ems, {"question": 4, "prefill_recent": 4, "decode_recent": 4}, 0),
    "treekv": (TreeKv, {"recent": 6, "tokens": 4, "window": 4, "rope": "text"}, 0),
    "lazyeviction": (LazyEviction, {"window": 4, "decode_recent": 4, "every": 4, "threshold": 0.05}, 8),
    "elastic-cache": (ElasticCache, {"offset": 9}, 1),
    "weightedkv": (WeightedKv, {"sinks": 2, "recent": 0.5}, 0),
    "keepkv": (KeepKv, {**SMALL_MERGING, "alike": 0.3}, 0),
    "zsmerge": (ZsMerge, {"slots": 2}, 0),
    "look-m": (LookM, SMALL_MERGING, 0),
    "kvmerger": (KvMerger, {}, 0),
    "cam": (Cam, {"rope": "text"}, 0),
    "random": (Drawn, {}, 0),
    "laq": (LookaheadReleased, {"draft_window": 6}, 75),
    "laq-h2o": (LookaheadSums, {"draft_window": 6}, 0),
    "laq-h2o-int4": (CodedSums, {"draft_window": 6}, 0),
    "laq32-h2o-int4": (CodedFar, {"draft_window": 6, "draft_times": 2.0}, 0),
    "laq-heads": (LookaheadHeads, {"draft_window": 6}, 0),
    "laq-plus-plus": (LookaheadLocal, {"draft_window": 6}, 0),
    "laq-longflow": (LookaheadLongFlow, {"draft_window": 6}, 0),
    "qaq": (Qaq, {"times": 0.5, "store": {}}, 0),
    "zipcache": (ZipCache, {"times": 0.5, "store": {}}, 0),
    "arkv": (Arkv, {"times": 0.5, "window": 4, "decode_recent": 4, "every": 4}, 0),
    "tiered-laq": (TieredLaq, {"times": 0.5, "draft_window": 6}, 0),
    "dapq": (DapQ, {}, 0),
    "dapq-longflow": (DapQLongFlow, {}, 0),
    "spans": (Spans, {}, 0),
    "spans-longflow": (SpansLongFlow, {}, 0),
    "adakv-h2o": (AdaKvH2o, {"interval": 1000}, 0),  # borders do not move
    "ada-pyramidkv": (AdaPyramidKv, {"window": 6, "beta": 5.0, "pool": "avg", "kernel": 5}, 0),
    "quest": (Quest, {"count": 16, "page": 4, "dense": 1}, 0),
    "keydiff": (KeyDiff, {}, 0),
    "leverage": (Leverages, {"sinks": 2, "recent": 2, "stretch": 16}, 0),
    "non-causal": (NonCausals, {"sinks": 2, "recent": 2, "mutual": 16}, 0),
    "lagkv": (LagKv, {"sinks": 4, "lag": 4, "every": 4}, 0),
    "cur": (Cur, {"decode": {"score": {"kind": "cur"}, "select": {"sinks": 4}, "every": 4}, "local": 4}, 0),
    "criticalkv": (CriticalKv, {"window": 6, "decode": VALUES}, 0),
    "finch": (Finch, {"count": 4, "recent": 4, "rope": "text"}, 0),
    "compactor": (Compactor, {"sinks": 2, "recent": 2, "stretch": 16, "mutual": 16}, 0),
}


def entries(layer):
    return [np.sort(head[head >= 0]).tolist() for head in heads_of(layer)]


def in_time(layer):
    """A layer's entries by head, the oldest first behind the empty ones."""
    from jaxkv.store.entries import in_time_order

    return in_time_order(layer.by_head())


@pytest.mark.some(1)
@pytest.mark.parametrize("name", CASES)
def test_prompt_and_steps(numpy_model, tiny, name):
    """The same tokens, and the same entries in every head at the end."""
    kind, options, seed = CASES[name]
    rule = kind(BUDGET)
    reserve = 0 if rule.every > 1 else rule.reserve
    theirs = run(numpy_model, rule, ids(seed), STEPS, reserve)
    assert theirs.token_gap > TOKEN_GAP and min(theirs.near, rule.near) > CLEAR, "a near tie: another seed"
    policy = jaxkv.policy(name, **({"budget": BUDGET} if named(name).evicts else {}), **options)
    if policy.prefill is not None:
        policy = dataclasses.replace(policy, prefill=dataclasses.replace(policy.prefill, reserve=reserve))
    ours = jaxkv.generate(tiny(FAMILY), ids(seed), policy=policy, max_new_tokens=STEPS + 1, stop_tokens=())
    assert ours.tokens[0].tolist() == theirs.tokens
    held = [entries(layer) for layer in ours.cache.views]
    assert held == (theirs.left if rule.every > 1 else theirs.looked)
    for layer, heads in zip(ours.cache.views, theirs.heads, strict=True):
        mine = in_time(layer)
        for number, head in enumerate(heads):
            there = np.asarray(mine.positions)[0, number] >= 0
            for name, its in (("keys", head.key), ("values", head.value)):
                np.testing.assert_allclose(np.asarray(getattr(mine, name))[0, number][there], its, atol=rule.close)
    for (layer, number), held in getattr(rule, "looked_at", {}).items():
        tier = ours.cache.layers[layer].beside["tier"]
        at, (keys, values) = np.asarray(tier.entries.positions)[0, number], tier.decoded()
        order = np.argsort(held.at)
        mine = [int(slot) for slot in np.argsort(at) if at[slot] >= 0]
        assert at[mine].tolist() == held.at[order].tolist()
        np.testing.assert_allclose(np.asarray(keys)[0, number][mine], held.key[order], atol=rule.close)
        np.testing.assert_allclose(np.asarray(values)[0, number][mine], held.value[order], atol=rule.close)
