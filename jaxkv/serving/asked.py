"""A request, made ready on the host by whoever asks: everything that the engine's thread will only hand to programs."""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxkv.checks import shown
from jaxkv.errors import BadValue
from jaxkv.plan import ROUND, Plan, PromptBlocks, planned, rounded, slots_filled
from jaxkv.policies.policy import Learned, Policy
from jaxkv.prompts import fronts, left_padded, rows_of
from jaxkv.pseudo import behind
from jaxkv.request import Request
from jaxkv.run import Layers
from jaxkv.sampling import RowSampler
from jaxkv.serving.answer import Answer
from jaxkv.sharding.layout import ROWS
from jaxkv.store import KVCache
from jaxkv.weights.params import Params

STOPS = 16  # the most stop tokens of a request, and the most stop strings
LONGEST = 2048  # prompt tokens that an engine's rows have slots for by default
EACH = 4096  # lengths that are tried where slots may be most at any of them
FEW = 4  # a prompt that is scored is longer than a budget: its first block is padded to a quarter of a block, or more


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A stored text that requests branch from: the layers of its cache, of one row, and what the host knows of it."""

    layers: Layers
    seen: int
    filled: np.ndarray  # slots per KV head of each layer
    pending: int
    text: np.ndarray | None
    draws: int  # by which random numbers its samples draw first

    @classmethod
    def of(cls, cache: KVCache) -> "Prefix":
        """The prefix that a cache of one row is."""
        text = cache.texts()
        return cls(
            cache.layers, int(np.asarray(cache.lengths)[0]), slots_filled(cache), int(np.asarray(cache.pending)[0]),
            None if text is None else text[0], 0 if cache.draws is None else int(cache.draws[0]),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What an engine's programs are compiled for: slots per layer, the sizes of a prompt's first block (`whole` of
    prompts that are kept whole, `scored` of those that are scored, `every` of those that are scored behind a prefix),
    the size of the blocks behind it, and whether these are scored (`later_looks`)."""

    slots: tuple[int, ...]
    whole: tuple[int, ...]
    scored: tuple[int, ...]
    every: tuple[int, ...]
    block: int
    later_looks: tuple[bool, ...]

    def firsts(self, look: bool, prefix: bool) -> tuple[int, ...]:
        """The sizes of a first block, of a prompt that is scored or not, behind a prefix or not."""
        return self.whole if not look else self.every if prefix else self.scored

    def look(self, needed: bool, blocks: PromptBlocks) -> bool:
        """Whether a prompt in such blocks is scored: where that is needed, or no program keeps it whole."""
        long = bool(blocks.count) and False not in self.later_looks
        return needed or long or blocks.first > max(self.whole, default=0)

    def plan(self, look: bool) -> Plan:
        """The plan of every prompt of the engine."""
        return Plan(self.slots, look)


@dataclasses.dataclass(frozen=True)
class Asked:
    """One prompt and its answers, one for each sample: what was asked, and the arrays that the programs take."""

    request: Request
    prompt: np.ndarray  # its own tokens
    budget: int | None
    named: str | None  # its prefix
    answers: tuple[Answer, ...]
    prefix: Prefix | None
    look: bool
    blocks: PromptBlocks
    tokens: np.ndarray
    positions: np.ndarray
    pseudo: np.ndarray
    lengths: np.ndarray
    limits: np.ndarray
    left: int
    seed: int
    sampler: RowSampler
    seen: np.ndarray | None  # [1, V], where a repetition penalty counts them
    stop: np.ndarray
    told: bool
    draw: int  # by which random numbers its first sample draws; the others follow
    text: np.ndarray  # prefix and prompt, as far as they are known
    first: "Asked | None" = None  # its first pass, whose tokens look: where the policy has one, and it has not run

    @property
    def ends(self) -> np.ndarray:
        """Tokens seen with the prompt."""
        return self.lengths + np.sum(self.positions >= 0, axis=1, dtype=np.int32)

    @property
    def waiting(self) -> bool:
        """Whether somebody still waits for it."""
        return not all(answer.ended for answer in self.answers)


def most_asked(params: Params, policy: Policy, room: int) -> int:
    """The prompt tokens that rows have slots for where nobody says how many: LONGEST, or what the model's context
    leaves beside `room` new ones."""
    return max(min(LONGEST, _left(params, policy, room)), 1)


def _left(params: Params, policy: Policy, room: int) -> int:
    """The most tokens of a prompt that the model's context leaves beside `room` new ones."""
    return params.config.max_position - room if policy.bound_to_text else sys.maxsize


def check_mesh(mesh: Mesh | None) -> None:
    """Raises `BadValue` for a mesh that divides the rows."""
    parts = 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in ROWS)
    if parts > 1:
        raise BadValue(
            f"an engine on a mesh that divides rows by {parts}: its rows come and go one at a time, so expected a mesh "
            "of the axes model and context alone"
        )


def shapes_of(params: Params, policy: Policy, learned: Learned, longest: int, room: int, sizes: int) -> Shapes:
    """The shapes for prompts of up to `longest` tokens with up to `room` new ones. Raises `BadValue` for a policy whose
    rows cannot come and go, and for a mesh."""
    check_mesh(params.layout.mesh)
    if policy.allocate.divides:
        raise BadValue(
            f"policy {policy.name!r} divides one budget over all layers, by a border of each row's own that programs "
            "are compiled for: an engine takes policies whose layers have budgets of their own, such as 'adakv-h2o'"
        )

    most = _left(params, policy, room)
    if longest > most:
        raise BadValue(
            f"longest={longest} and max_new_tokens={room}: expected at most {params.config.max_position} together, the "
            "model's context; give less, or a policy with positions in the cache, such as policy('streaming-llm')"
        )

    def at(tokens: int) -> tuple[Plan, PromptBlocks, np.ndarray]:
        shape = np.zeros(1, int), np.zeros(params.config.num_layers, np.int64), np.array([tokens])
        return planned(policy, params.config, *shape, room, parts=params.layout.parts, learned=learned)

    # some budgets depend on the text's length, and slots are rounded up behind multiples of 16; what a window can't
    # hold goes to other layers, whose slots may be most at any length
    windows = any(spec.window is not None for spec in params.config.specs)
    step = max(longest // EACH, 1) if windows else max(ROUND, longest // 256)
    lengths = {1, longest, min(policy.budget or 1, longest), *range(1, longest, step)}
    plans = {tokens: at(tokens)[0] for tokens in lengths}
    slots = np.max([plan.slots for plan in plans.values()], axis=0)
    block = at(longest)[1].size
    every = sorted({min(rounded(count, sizes), block) for count in range(1, block + 1)})
    several = block + 1 <= most  # blocks in a prompt
    later = _looks(policy, at(block + 1)[0].look) if several else ()
    whole = max((tokens for tokens, plan in plans.items() if not plan.look), default=0)  # the longest that is kept so
    while 0 < whole < longest and not at(whole + 1)[0].look:
        whole += 1
    # the shortest that is scored
    least = min((tokens for tokens, plan in plans.items() if plan.look), default=min(block, most))
    while least > 1 and at(least - 1)[0].look:
        least -= 1
    if whole == longest or False in later:
        whole = block
    least = min(rounded(least, sizes), block // FEW)
    scores = policy.prefill is not None
    return Shapes(
        slots=tuple(map(int, slots)),
        whole=tuple(size for size in every if size <= rounded(whole, sizes)) if whole else (),
        scored=tuple(size for size in every if scores and size >= least),
        every=tuple(every) if scores else (),
        block=block,
        later_looks=later,
    )


def _looks(policy: Policy, shortest: bool) -> tuple[bool, ...]:
    """Whether prompts are scored, of all lengths from that on for which this is known."""
    return (False,) if policy.prefill is None else (True,) if shortest else (False, True)


def asked(
    params: Params,
    policy: Policy,
    learned: Learned,
    shapes: Shapes,
    sizes: int,
    prompt: Any,
    request: Request,
    answers: Any,
    *,
    fewer: bool = False,
    budget: int | None,
    named: str | None,
    prefix: Prefix | None,
    told: bool,
    draw: int,
    front: Sequence[int] | None = None,
) -> Asked:
    """The request as arrays; `answers(request, prompt tokens, seen with them, front)` makes its answers, behind the
    `front` that is given, or the prompt's. Raises `BadValue` for what the engine's rows cannot hold; with `fewer` they
    get as many of the new tokens as they can."""
    goes_on = prefix if isinstance(prompt, str) else None  # messages are rendered whole behind a prefix
    pending = None if goes_on is None else np.asarray([goes_on.pending])
    rows, single = rows_of(prompt, params.tokenizer, params.config.vocab_size, pending)
    if not single:
        raise BadValue(
            f"prompt={shown(prompt)}, a list of prompts: expected one, as text, chat messages or token ids; give the "
            "list to submit_each"
        )
    if budget is not None:
        policy = _with_budget(policy, budget)
    if len(request.stop_tokens) > STOPS:
        raise BadValue(
            f"stop_tokens={shown(request.stop_tokens)}: expected at most {STOPS}, the model's own among them, and "
            f"these are {len(request.stop_tokens)}"
        )
    if len(request.stop) > STOPS:
        raise BadValue(
            f"stop={shown(request.stop)}: expected at most {STOPS} texts, which are looked for after each chunk, and "
            f"these are {len(request.stop)}; leave some out"
        )
    fresh = rows[0]
    before = np.zeros(0, np.int32)
    seen, filled = 0, np.zeros(params.config.num_layers, np.int64)
    if prefix is not None:
        seen, filled = prefix.seen, prefix.filled
        if prefix.text is None and request.sampler.repetition_penalty is not None:
            raise BadValue(
                "repetition_penalty counts the whole text, but the tokens of the prefix are not known: store a cache "
                "with its `tokens`"
            )
        before = before if prefix.text is None else prefix.text
        if prefix.pending >= 0:
            rows = [np.append(np.int32(prefix.pending), rows[0]).astype(np.int32)]
    lengths = np.array([seen], np.int32)

    def held(new: int) -> tuple[Plan, PromptBlocks, np.ndarray]:  # the last of the new tokens is not run
        plan, blocks, limits = planned(
            policy, params.config, lengths, filled, np.array([len(rows[0])]), new - 1,
            parts=params.layout.parts, learned=learned, sizes=sizes,
        )  # fmt: skip
        _check_slots(policy, shapes, plan, len(rows[0]) + seen, new)
        return plan, blocks, limits

    if fewer:
        request = dataclasses.replace(request, max_new_tokens=_most(held, request.max_new_tokens))
    plan, blocks, limits = held(request.max_new_tokens)
    look = shapes.look(plan.look, blocks)
    _check_blocks(policy, shapes, blocks, len(rows[0]) + seen, look, prefix is not None)
    tokens, positions = left_padded(rows, blocks.length, lengths)
    pseudo = np.zeros((1, 0), np.int32)
    if policy.prefill is not None and look:
        observe = policy.prefill.observe
        drafted = observe.drafts  # by the first pass
        pseudo = np.full((1, observe.extra), -1, np.int32) if drafted else behind(params, rows, observe, blocks)
    text = np.append(before, rows[0]).astype(np.int32)
    behind_what = fronts(prompt, [text])[0] if front is None else tuple(front)
    made = answers(request, len(fresh), seen + len(rows[0]), behind_what)
    return Asked(
        request, fresh, budget, named, made, prefix, look, blocks, tokens, positions, pseudo, lengths, limits,
        left=request.max_new_tokens,
        seed=request.seed,
        sampler=RowSampler.of([request.sampler]),
        seen=_seen(request, text, params.config.vocab_size),
        stop=np.array([[*request.stop_tokens, *[-1] * (STOPS - len(request.stop_tokens))]], np.int32),
        told=told,
        draw=draw,
        text=text,
    )  # fmt: skip


def _most(held: Callable[[int], Any], most: int) -> int:
    """The most new tokens that are held without an error, from 1 to `most`."""
    fits, beyond = 1, most + 1
    while beyond - fits > 1:
        new = most if beyond > most else (fits + beyond) // 2
        try:
            held(new)
            fits = new
        except BadValue:
            beyond = new
    return fits


def pseudo_width(params: Params, policy: Policy) -> int:
    """How many tokens look from behind a prompt."""
    if policy.prefill is None:
        return 0
    if policy.prefill.observe.drafts:
        return policy.prefill.observe.extra
    return behind(params, [np.zeros(1, np.int32)], policy.prefill.observe, PromptBlocks(1, 0, 1)).shape[-1]


def _with_budget(policy: Policy, budget: int) -> Policy:
    """The policy with a budget of the request's own. Raises `BadValue` where it cannot have one."""
    if not policy.evicts or policy.budget is None or policy.rope != "text":
        raise BadValue(
            f"budget={shown(budget)} of a request under policy {policy.name!r}: expected none; only rows of a policy "
            "with a budget, and with text positions, have room to share out"
        )
    if budget > policy.budget:
        raise BadValue(
            f"budget={budget} of a request: expected at most {policy.budget}, which this engine's rows have under "
            f"policy {policy.name!r}; ask for less, or leave it out"
        )
    own = dataclasses.replace(policy, budget=budget)  # which checks it
    if own.sized.rules != policy.sized.rules:
        raise BadValue(
            f"budget={budget} of a request under policy {policy.name!r}: expected {policy.budget}, or none, for the "
            "second tier of this engine's rows is compiled at that size; leave it out, or start an engine with it"
        )
    return own


def _check_slots(policy: Policy, shapes: Shapes, plan: Plan, text: int, new: int) -> None:
    """Raises `BadValue` where the engine's rows have fewer slots."""
    short = [(have, want) for have, want in zip(shapes.slots, plan.slots, strict=True) if want > have]
    if short:
        have, want = max(short, key=lambda pair: pair[1] - pair[0])
        raise BadValue(
            f"{text} tokens and {new} new ones need {want} slots in a layer under policy {policy.name!r}, and this "
            f"engine's rows have {have}: ask for less, or start it with a larger longest=, max_new_tokens= or budget"
        )


def _check_blocks(policy: Policy, shapes: Shapes, blocks: PromptBlocks, text: int, look: bool, prefix: bool) -> None:
    """Raises `BadValue` where the engine has no programs for such blocks."""
    largest = max(shapes.firsts(look, prefix), default=0)
    if blocks.first > largest or blocks.size != shapes.block or (blocks.count and look not in shapes.later_looks):
        raise BadValue(
            f"{text} tokens under policy {policy.name!r} need blocks of {blocks.size} that this engine has no program "
            f"for (it runs {shapes.block}): ask with its own budget"
        )


def _seen(request: Request, text: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray | None:
    if request.sampler.repetition_penalty is None:
        return None
    seen = np.zeros((1, vocab_size), bool)
    seen[0, np.asarray(text, np.int64)] = True
    return seen
