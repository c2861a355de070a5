"""A policy: the parts that decide which entries of the cache stay, at prefill and at decode."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.checks import Checked, foreign, shown
from jaxkv.errors import BadValue, UnknownName, unknown
from jaxkv.policies.aggregate import Aggregate
from jaxkv.policies.allocator import UNLIMITED, Allocate, Learned
from jaxkv.policies.evicted import Drop, Evicted, begin_by
from jaxkv.policies.flow import Flow, Straight
from jaxkv.policies.layers import Uniform
from jaxkv.policies.needs import HIDDEN, MASS, QUERIES, learned_names
from jaxkv.policies.observe import NoQueries, Observer
from jaxkv.policies.parts import PARTS
from jaxkv.policies.read import All, Read
from jaxkv.policies.score import Entering, Recency, Score, ScoreInputs, Stats
from jaxkv.policies.select import Select
from jaxkv.store.codecs import Codecs
from jaxkv.store.entries import WORTH, Entries

MOST_SHARED = 0.999  # of a budget, by what is protected and reserved: a thousandth can be evicted
NOTHING: Learned = {}
FIDELITIES = ("", "faithful", "simplified", "ours")


@dataclasses.dataclass(frozen=True)
class Phase(Checked):
    """Who looks, what that says, how it is summed up, what is protected, and what becomes of what leaves: for
    prefill or for decode.

    `reserve` (prefill) leaves that many slots of the budget free for the first new tokens, or that fraction of it when
    it lies between 0 and 1; `every` (decode) lets the cache run that many tokens over the budget before it is cut back:
    1 overwrites one slot per token.
    """

    observe: Observer = NoQueries()
    score: Score = Recency()
    aggregate: Aggregate = Aggregate()
    select: Select = Select()
    reserve: int | float = 0
    every: int = 1
    evicted: Evicted = Drop()

    def __post_init__(self):
        if MASS in self.score.needs and not self.observe.looks:
            raise BadValue(f"score {self.score.kind!r} needs attention: give the phase queries that look (observe=)")
        if self.select.recent == "window" and not self.observe.window:
            raise BadValue(
                f"recent='window' under observe kind {self.observe.kind!r}, which has no window: expected a number of "
                "tokens, or a fraction of the budget"
            )
        aggregate, behind = self.aggregate, self.observe.extra or self.observe.replays
        if behind and (aggregate.decay < 1 or aggregate.probes):
            raise BadValue(
                f"aggregate decay={aggregate.decay}, probes={aggregate.probes}: they weigh a prompt's own queries, and "
                f"those of observe kind {self.observe.kind!r} stand behind them; expected decay=1 and probes=0, or "
                "observe kind 'last-queries' or 'all-queries'"
            )
        if self.reserve < 0 or (self.reserve > 1 and self.reserve != int(self.reserve)) or self.every < 1:
            raise BadValue(
                f"reserve={self.reserve}, every={self.every}: expected reserve >= 0 (tokens, or a fraction of the "
                "budget) and every >= 1"
            )
        shares = [float(x) for x in (self.select.recent, self.reserve) if not isinstance(x, str) and 0 < x < 1]
        if sum(shares) > MOST_SHARED:
            raise BadValue(
                f"recent={self.select.recent} and reserve={self.reserve} of the budget: expected at most {MOST_SHARED} "
                "of it together, so that something can be evicted"
            )
        holds: dict[str, Score] = {}
        for leaf in self.score.leaves():
            for name in leaf.stats:
                if (leaf.remembers or leaf.particular) and holds.setdefault(name, leaf) != leaf:
                    raise BadValue(f"scores {holds[name]} and {leaf} keep the same statistic {name!r} in one phase")

    @property
    def protects(self) -> Select:
        """What stays whatever its score, in numbers."""
        return self.select.resolved(self.observe.window)

    @property
    def linear(self) -> bool:
        """Whether the attention kernel can score and choose: the score is linear in the mass."""
        return self.score.linear and self.select.plain

    @property
    def keyless(self) -> bool:
        """Whether it reads attention and positions alone, and no keys or values."""

        def keyless(score: Score) -> bool:
            return score.linear or (score.keyless and all(map(keyless, score.parts)))

        return self.select.plain and keyless(self.score)

    @property
    def needs(self) -> frozenset[str]:
        """What its parts read, by the names of `needs.py`."""
        return self.score.needs | self.aggregate.needs | self.evicted.needs

    def reserved(self, limits: Any) -> Any:
        """Slots left free for new tokens, of each of the `limits` (an array of NumPy or JAX, or a number)."""
        share = 0 < self.reserve < 1
        return (limits.astype("float32") * np.float32(self.reserve)).astype("int32") if share else int(self.reserve)


@dataclasses.dataclass(frozen=True)
class Policy(Checked):
    """Parts and numbers. `budget` is tokens kept per KV head and layer on average; `ratio` the fraction removed;
    `bytes` what the keys and values of one row may take, in all layers and heads together, with what the rules hold
    beside them: the model's shape turns it into a budget.

    Without `prefill` nothing is ever evicted; without `decode` new tokens are added to what the prompt left.
    `rope="text"` keeps keys at their positions in the text; `rope="cache"` rotates them by their place in the cache,
    so that a text may go on for ever; `rope="sinks"` is the same where only sinks and the newest tokens stay
    (StreamingLLM): keys lie at their positions in the text, and a step turns those of the sinks alone.

    `flow` is what happens between layers. `read` is what a decode step reads of what is held, `store` the codecs of the
    keys and values. `block` is the prompt tokens run at a time; with `grows` the budget grows with the text that the
    blocks so far have brought, and is whole behind the last one.
    `fidelity` says how far it is what its paper describes, `differs` in one line what is not.
    Raises `BadValue` for parts that do not fit together and for a budget below sinks + recent + 1.
    """

    name: str
    prefill: Phase | None = None
    decode: Phase | None = None
    allocate: Allocate = Uniform()
    budget: int | None = None
    ratio: float | None = None
    bytes: int | None = None
    rope: str = "text"
    flow: Flow = Straight()
    read: Read = All()
    store: Codecs = Codecs()
    block: int = 2048
    grows: bool = False
    title: str = ""
    paper: str = ""
    fidelity: str = ""
    differs: str = ""

    def __post_init__(self):
        if self.rope not in ("text", "cache", "sinks"):
            raise BadValue(f"rope={self.rope!r}: expected 'text', 'cache' or 'sinks'")
        if self.block < 1:
            raise BadValue(f"block={self.block}: expected at least 1 token")
        if self.prefill is None and self.decode is not None:
            raise BadValue(
                f"policy {self.name!r} evicts at decode but not at prefill: its cache would not be bounded; add a "
                "prefill phase, such as that of another policy: prefill='snapkv'"
            )
        if self.grows and self.prefill is None:
            raise BadValue(f"grows=True of policy {self.name!r}, which evicts nothing: leave it out, or add prefill=")
        if self.prefill is not None and self.prefill.every > 1 and (self.decode is None or self.decode.every == 1):
            raise BadValue(
                f"every={self.prefill.every} of policy {self.name!r} at prefill: a cache is cut after so many tokens "
                "while decoding; give decode_every=, and a decode phase where there is none"
            )
        if self.decode is not None and (self.decode.observe.extra or self.decode.observe.replays):
            raise BadValue("pseudo queries stand in for decode queries: use observe kind 'current-query' at decode")
        if self.decode is not None and QUERIES in self.decode.score.needs:
            raise BadValue(f"score {self.decode.score.kind!r} needs the prompt's queries: it scores at prefill only")
        if self.decode is not None and self.decode.aggregate.best:
            raise BadValue("aggregate best= picks heads at prefill only: leave it out of the decode phase")
        if self.decode is not None and HIDDEN in self.decode.aggregate.needs:
            raise BadValue("aggregate weigh='output' reads the hidden states of a prompt: leave it out at decode")
        if self.decode is not None and self.decode.aggregate.common:
            raise BadValue("aggregate common= is of a prompt, whose heads hold the same tokens: leave it out at decode")
        if self.fidelity not in FIDELITIES or (self.fidelity == "simplified") != bool(self.differs):
            raise BadValue(
                f"fidelity={self.fidelity!r}, differs={self.differs!r}: expected 'faithful', 'ours', '' (not said) or "
                "'simplified' with differs= in one line"
            )
        kept: dict[str, Score] = {}
        for leaf in (leaf for phase in self.phases for leaf in phase.score.leaves()):
            for name in leaf.stats if leaf.remembers or leaf.particular else ():
                other = kept.setdefault(name, leaf)
                if other.forgets != leaf.forgets or ((other.particular or leaf.particular) and other != leaf):
                    raise BadValue(
                        f"scores {other} at prefill and {leaf} at decode keep the same statistic {name!r} in two ways: "
                        "expected the same numbers in both phases"
                    )
        rules: dict[str, Evicted] = {}
        for rule in (phase.evicted for phase in self.phases if phase.evicted.state):
            if rules.setdefault(rule.state, rule) != rule:
                raise BadValue(f"evicted {rules[rule.state]} at prefill and {rule} at decode keep the same state")
        if self.rope != "text" and any(rule.attended for rule in rules.values()):
            raise BadValue(
                f"policy {self.name!r} attends to what has left (evicted kind {next(iter(rules.values())).kind!r}), "
                "which has no place in the cache: expected rope='text'"
            )
        if self.rope != "text" and self.looks:
            raise BadValue(
                f"policy {self.name!r} looks with its last {self.looks} queries, which were turned to their places in "
                "the text: expected rope='text'"
            )
        for part in (self.allocate, self.flow, self.read, *(phase.evicted for phase in self.phases)):
            part.check(self)
        if self.rope == "sinks" and not self._streams:
            raise BadValue(
                f"policy {self.name!r} with rope='sinks': expected sinks and the newest tokens to be all that stays "
                "(score kind 'recency', as many sinks in both phases, flow kind 'straight'), no queries from behind "
                "the prompt, and evicted kind 'drop' or 'spread'; or rope='cache'"
            )
        self.store.suits(self)
        if self.budget is not None and self.budget < self.floor:
            raise BadValue(
                f"budget={self.budget} of policy {self.name!r}: expected at least {self.floor} "
                "(sinks + recent + 1, and 2 where a first pass drafts); raise budget= or lower sinks=, recent= or "
                "window="
            )
        exact = self.store.residual + self.store.initial
        if self.budget is not None and self.budget < exact:
            raise BadValue(
                f"budget={self.budget} of policy {self.name!r} beside residual={self.store.residual} and "
                f"initial={self.store.initial} tokens in full precision, which would take more memory than what is "
                f"held: expected at least {exact}; raise budget= or lower residual= and initial= of its store"
            )
        if self.budget is not None and self.budget > UNLIMITED:
            raise BadValue(f"budget={self.budget}: expected at most 2**30; policy 'full' keeps everything")
        if self.bytes is not None and self.bytes < 1:
            raise BadValue(f"bytes={self.bytes}: expected how many the keys and values of a row may take, at least 1")
        if self.ratio is not None and not 0 <= self.ratio < 1:
            raise BadValue(f"ratio={self.ratio}: expected a fraction removed, from 0 up to but not including 1")

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases there are."""
        return tuple(phase for phase in (self.prefill, self.decode) if phase is not None)

    @property
    def _streams(self) -> bool:
        """Whether all that stays are the first tokens, as many in both phases, and the newest; keys are as they came,
        and nobody looks from elsewhere in the text."""
        sinks = {phase.select.sinks for phase in self.phases}
        newest = all(phase.score.newest and not _foreign(phase.score) and phase.select.plain for phase in self.phases)
        keyless = not any(phase.evicted.reads_keys for phase in self.phases)
        return newest and len(sinks) < 2 and keyless and self.flow == Straight() and not self.extra

    @property
    def sinks(self) -> int | None:
        """The first tokens that stay whatever comes, in every phase; None where no phase says so."""
        return min((phase.select.sinks for phase in self.phases), default=None)

    @property
    def evicts(self) -> bool:
        """Whether a prompt is cut to a budget."""
        return self.prefill is not None

    @property
    def bounded(self) -> bool:
        """Whether the cache stays within its budget while it decodes: tokens push others out there, in every layer."""
        return self.decode is not None and self.allocate.bounded

    @property
    def decoding(self) -> "Policy":
        """The policy as decode steps see it, whatever it is called, however large and however it looked at the prompt:
        those with equal ones run the same steps, so that their caches may be rows of one batch."""
        phases: dict[str, Any] = {"prefill": None, "allocate": Uniform()}  # nothing is evicted any more
        if self.prefill is not None and self.decode is not None:
            phases = {"prefill": self.prefill, "allocate": self.allocate, "decode": self.decode}
            acts = any(phase.evicted.acts for phase in self.phases)
            if self.allocate == Uniform() and not acts and self.rope != "sinks":  # nobody asks what its score was
                phases["prefill"] = Phase(reserve=self.prefill.reserve)
        return Policy("decode steps", **phases, rope=self.rope, read=self.read, store=self.store)

    @property
    def extra(self) -> int:
        """Pseudo tokens run behind each block of the prompt."""
        return 0 if self.prefill is None else self.prefill.observe.extra

    @property
    def floor(self) -> int:
        """The smallest budget that holds what is protected and one entry that can be evicted."""
        looks = 1 if self.prefill is None else self.prefill.observe.least
        return max(looks, *(_floor(phase) for phase in self.phases), 1)

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the per-slot statistics that the scores keep."""
        names = {name for phase in self.phases for name in phase.score.stats}
        return tuple(sorted(names | {WORTH} if self.ranks else names))

    @property
    def ranks(self) -> bool:
        """Whether entries remember what the phase's score last said of them, for a rule of what leaves that asks."""
        return any(phase.evicted.ranks for phase in self.phases)

    @property
    def query_aware(self) -> bool:
        """Whether a question at the end of the prompt steers what is kept of it."""
        if self.prefill is None:
            return False
        steered, scored = self.prefill.observe.at_end, self.prefill.score
        return (steered and MASS in scored.needs) or any(leaf.aware for leaf in scored.leaves())

    @property
    def needs(self) -> frozenset[str]:
        """What its parts read, by the names of `needs.py`."""
        return self.allocate.needs.union(*(phase.needs for phase in self.phases))

    @property
    def weighs_at_decode(self) -> bool:
        """Whether a decode step needs the attention mass: the decode phase reads it, or a statistic remembers it."""
        if self.decode is None:
            return False
        leaves = [leaf for phase in self.phases for leaf in phase.score.leaves()]
        return MASS in self.decode.needs or any(leaf.remembers for leaf in leaves)

    @property
    def bound_to_text(self) -> bool:
        """Whether its text is no longer than the model's context: places in the cache are those in the text where
        nothing is evicted."""
        return self.rope == "text" or not self.evicts

    @property
    def calibrated(self) -> bool:
        """Whether it needs numbers measured on the model before."""
        return bool(self.learns)

    @property
    def learns(self) -> tuple[str, ...]:
        """Names of what it needs of `jaxkv calibrate`."""
        return tuple(sorted({*learned_names(self.needs), *self.store.learns}))

    def beside(self, batch: int, heads: int, head_dim: int, dtype: Any) -> dict[str, Any]:
        """What lies beside a layer's slots before anything has left them, by the name of the rule's state."""
        return {name: begin_by(rule, batch, heads, head_dim, dtype) for name, rule in self.sized.rules.items()}

    def begun(self, beside: dict[str, Any], entries: Entries, block: ScoreInputs) -> dict[str, Any]:
        """The same with what the rules take from a block of the prompt and the `entries` held with it."""
        return {**beside, **{name: rule.begun(beside[name], entries, block) for name, rule in self.rules.items()}}

    @property
    def rules(self) -> dict[str, Evicted]:
        """The rules that remember what left, by the name of their state."""
        return {phase.evicted.state: phase.evicted for phase in self.phases if phase.evicted.state}

    @property
    def sized(self) -> "Policy":
        """The policy with rules whose state is as large as its budget asks."""
        if self.budget is None or all(phase.evicted.sized(self.budget) == phase.evicted for phase in self.phases):
            return self
        sized = {
            name: phase and dataclasses.replace(phase, evicted=phase.evicted.sized(self.budget))
            for name, phase in (("prefill", self.prefill), ("decode", self.decode))
        }
        return dataclasses.replace(self, **sized)

    @property
    def weighs(self) -> bool:
        """Whether entries may stand for several tokens."""
        return any(phase.evicted.weighs for phase in self.phases)

    @property
    def looks(self) -> int:
        """How many of a layer's last queries its scores look with."""
        leaves = [leaf for phase in self.phases for leaf in phase.score.leaves()]
        return max((leaf.looks for leaf in (*leaves, *self.allocate.leaves)), default=0)

    def in_blocks(self, block: int) -> "Policy":
        """The policy with prompts in blocks of so many tokens, unless it says its own."""
        return dataclasses.replace(self, block=block) if self.block == Policy.block else self

    def mean_budget(self, tokens: int) -> int:
        """Tokens per KV head for a text of `tokens` tokens, on average over the layers, where something is evicted."""
        if self.budget is not None:
            return self.budget
        if self.ratio is None:
            raise BadValue(f"policy {self.name!r} has neither budget nor ratio: give one of them, or bytes and a model")
        least = self.floor if self.decode is not None else min(self.floor, tokens)  # new tokens need a place to go
        return max(int(tokens * (1 - self.ratio)), least, 1)

    def budgets(self, tokens: int, layers: int, learned: Learned = NOTHING) -> tuple[int, ...]:
        """Tokens per KV head of every layer for a text of `tokens` tokens; a ratio never goes below `floor`.

        Where a layer's would, so that nothing in it could be evicted while decoding, all get the same. `learned` is
        what was measured of the layers beforehand, where the policy `learns` something.
        """
        if not self.evicts:
            return (UNLIMITED,) * layers
        budget = self.mean_budget(tokens)
        window = self.prefill.observe.window if self.prefill else 0
        each = self.allocate.budgets(int(budget), layers, tokens, window, learned)
        if len(each) != layers or not all(isinstance(one, int | np.integer) for one in each):
            raise BadValue(
                f"allocate kind {self.allocate.kind!r} gives the budgets {shown(tuple(each))}: expected {layers} whole "
                "numbers, one for each layer"
            )
        least = self.floor if self.decode is not None else self.floor - 1  # a prompt may be cut to what is protected
        least = min(least, budget)
        if foreign(self.allocate) and (min(each) < max(least, 1) or sum(each) > budget * layers):
            raise BadValue(
                f"allocate kind {self.allocate.kind!r} gives the budgets {shown(tuple(each))}: expected at least "
                f"{max(least, 1)} for each layer, as the policy protects its sinks and recent tokens, and at most "
                f"{budget * layers} together, so that the mean is the budget of {budget}"
            )
        return each if min(each) >= least else (int(budget),) * layers

    def so_far(self, limits: Int[Array, "*L B"], now: Int[Array, "B"], ends: Int[Array, "B"]) -> Int[Array, "*L B"]:
        """The limits behind a block that ends at `now`, of a text of `ends` tokens. Where they grow: what is protected
        and reserved, and of the rest the part that has come of the text's other tokens, rounded up."""
        if not self.grows or self.prefill is None:
            return limits
        always = self.prefill.protects.sinks + self.prefill.protects.recents(limits)
        begun = always + self.prefill.reserved(limits)
        text = jnp.maximum(ends - always, 1)
        exact = jnp.maximum(limits - begun, 0).astype(jnp.float32) * jnp.minimum(now, text).astype(jnp.float32)
        return jnp.minimum(begun + jnp.ceil(exact / text.astype(jnp.float32)).astype(jnp.int32), limits)

    def enter(self, keys: Float[Array, "B Hk T D"], values: Float[Array, "B Hk T D"], **more: Any) -> Stats:
        """The statistics of tokens as they enter the cache; `more` are the other fields of `Entering`."""
        stats = {WORTH: jnp.zeros(keys.shape[:-1], jnp.float32)} if self.ranks else {}
        for phase in self.phases:
            sinks, recent = phase.protects.sinks, int(phase.protects.recents(np.int64(0)))
            stats |= phase.score.entered(Entering(keys, values, sinks=sinks, recent=recent, **more))
        return stats

    def allowed(
        self, stats: Stats, positions: Int[Array, "B Hk S"], now: Int[Array, "B"], limits: Int[Array, "B"]
    ) -> Int[Array, "B"]:
        """How many entries per head rows may hold at decode, where the token being run has position `now`: their
        limits, or less under a score that `grows`; one more where a token overwrites what it pushes out."""
        prefill, decode = self.prefill, self.decode
        if prefill is None or decode is None or not decode.score.grows:
            return limits
        prompt = limits - prefill.reserved(limits)
        new = decode.score.grown(stats, positions, now, decode.protects.recents(limits), prompt)
        return jnp.minimum(prompt + new + (1 if decode.every == 1 else 0), limits)

    def left(self, store: Any, now: Int[Array, "B"]) -> Stats:
        """The statistics, by head, that say of the entries of a store where a prompt's cut has left them."""
        leaves = [leaf for each in self.phases for leaf in each.score.leaves() if leaf.placed]
        if not leaves:
            return {}
        positions = store.by_head().positions
        return {name: stat for leaf in leaves for name, stat in leaf.left(positions, now).items()}

    def observe(
        self, phase: Phase, stats: Stats, mass: Float[Array, "B Hk S"] | None, now: Int[Array, "B"] | None = None
    ) -> Stats:
        """The statistics after the phase's queries gave each entry this mass; one that several scores keep counts
        once."""
        found: Stats = {}
        for leaf in (leaf for each in (phase, *self.phases) for leaf in each.score.leaves()):
            found = {**leaf.observed(stats, mass, now), **found}
        return {**stats, **found}


def _floor(phase: Phase) -> int:
    """The smallest budget that leaves one entry that can be evicted besides what is protected and reserved."""
    none = np.int64(0)  # what is a number of tokens counts at once, what is a fraction as the budget grows
    budget = none + phase.protects.sinks + phase.protects.recents(none) + phase.reserved(none) + 1
    protects = phase.protects
    shares = float(protects.recent if protects.is_fraction else 0) + (phase.reserve if 0 < phase.reserve < 1 else 0)
    if shares:  # begin where it can be at the earliest: each share is rounded down by less than a token, in float32
        budget = max(budget, np.int64((protects.sinks - 2) / (1 - shares)) - protects.sinks // 1000)
    while budget < UNLIMITED and budget - protects.recents(budget) - phase.reserved(budget) <= protects.sinks:
        budget += 1
    return int(budget)


def priority(
    phase: Phase,
    stats: Stats,
    positions: Int[Array, "B Hk S"],
    mass: Float[Array, "B Hk S"] | None,
    now: Int[Array, "B"],
    limits: Int[Array, "B"],
    inputs: ScoreInputs | None = None,
    kept: Int[Array, "B *Hk"] | None = None,
) -> Float[Array, "B Hk S"]:
    """The phase's score over the heads, from the statistics before this mass; +inf for what it protects.

    `inputs` is what a score that is not linear looks at, `kept` how many entries are to stay (the limits).
    """
    protected = phase.protects.protected(positions, now, limits)
    inputs = dataclasses.replace(
        inputs or ScoreInputs(),
        positions=positions,
        mass=mass,
        now=now,
        limits=limits if kept is None else kept,
        protected=protected,
        sinks=phase.protects.sinks,
    )
    value = phase.aggregate.over_heads(sound(phase.score, phase.score.each(stats, inputs), positions))
    if not phase.select.plain:
        value = phase.select.by_chunks(value, positions, protected)
    return jnp.where(protected, jnp.inf, value)


def sound(score: Score, value: Any, positions: Int[Array, "B Hk S"]) -> Any:
    """What a score said of each entry; of a score that is not jaxkv's own, NaN is told to the host (`check_scores`)."""
    if _foreign(score):
        jax.debug.callback(functools.partial(_told, score.kind), jnp.any(jnp.isnan(value) & (positions >= 0)))
    return value


def _foreign(score: Score) -> bool:
    """Whether the score, or one that it is made of, is not jaxkv's own."""
    return any(foreign(each) for each in (score, *score.leaves()))


_NO_NUMBERS: set[str] = set()  # kinds of scores that have given NaN since the host last looked


def _told(kind: str, bad: Any) -> None:
    if bad:
        _NO_NUMBERS.add(kind)


def check_scores(policy: Policy) -> None:
    """Raises `BadValue` where a score of one's own has given NaN for an entry; waits for the programs that ran."""
    if not any(_foreign(phase.score) for phase in policy.phases):
        return
    jax.effects_barrier()
    if _NO_NUMBERS:
        kinds = ", ".join(map(repr, sorted(_NO_NUMBERS)))
        _NO_NUMBERS.clear()
        raise BadValue(f"score {kinds} gave NaN for an entry of the cache: expected a number for each that is held")


PLAIN = {"aggregate": Aggregate, "select": Select, "store": Codecs, "prefill": Phase, "decode": Phase}


def to_dict(policy: Policy) -> dict[str, Any]:
    """The policy as plain tables, as they stand in a TOML file (without what has its default)."""

    def table(value: Any) -> dict[str, Any]:
        out = {"kind": value.kind} if hasattr(value, "kind") else {}
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            if inner is None or (inner == field.default and field.name != "name"):
                continue
            out[field.name] = table(inner) if dataclasses.is_dataclass(inner) else inner
        return out

    return table(policy)


def from_dict(table: dict[str, Any]) -> Policy:
    """The policy that the tables describe.

    Raises `UnknownName` for a field or kind that there is not, and `BadValue` for values that don't fit together.
    """
    try:
        return _built(Policy, table, "policy")
    except RecursionError:
        raise BadValue("the tables of a policy contain themselves, or are nested too deep: expected a few") from None


def part(name: str, table: Any) -> Any:
    """The part of a policy, such as "allocate" or "score", that a table with its `kind` describes."""
    known = PARTS[name].parts
    kind = table.get("kind", "") if isinstance(table, dict) else None
    if not isinstance(kind, str):
        raise BadValue(f"{name}={shown(table)}: expected a table with its kind, such as {{ kind = {min(known)!r} }}")
    if kind not in known:
        raise UnknownName(
            f"{unknown(f'{name} kind', kind, known)} (a kind of your own: register it first, with "
            "jaxkv.policies.register, or --parts on the command line)"
        )
    return _built(known[kind], {field: value for field, value in table.items() if field != "kind"}, f"{name} {kind!r}")


def made(name: str, value: Any) -> Any:
    """A part of a policy of this name, given itself or as its table."""
    if isinstance(value, str):
        table = {"keys": {"kind": "int", "bits": 4}} if name == "store" else {"kind": value}
        raise BadValue(f"{name}={value!r}: expected the part itself, or its table, such as {name}={table}")
    if not isinstance(value, dict):
        return value
    return _built(PLAIN[name], value, name) if name in PLAIN else part(name, value)


def _built(cls: Any, table: Any, where: str) -> Any:
    if not isinstance(table, dict):
        raise BadValue(f"{where}={shown(table)}: expected a table")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    out = {}
    for name, value in table.items():
        if name not in fields:
            raise unknown(f"field of {where}", str(name), fields)
        if name in PARTS:
            value = part(name, value)
        elif name in PLAIN:
            value = _built(PLAIN[name], value, name)
        elif isinstance(value, dict):
            raise BadValue(f"{name} of {where} is a table: parts in it stand in fields named {', '.join(PARTS)}")
        out[name] = _tuple(value)
    missing = [field.name for field in fields.values() if field.name not in out and _needed(field)]
    if missing:
        raise BadValue(f"{where} without {', '.join(missing)}: expected a value for each, they have no default")
    try:
        return cls(**out)
    except TypeError as error:
        raise BadValue(f"{where} with {shown(table)}: expected values of its fields' types ({error})") from error


def _needed(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _tuple(value: Any) -> Any:
    """A list of a file as a tuple: the parts of a policy are compared and hashed."""
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
