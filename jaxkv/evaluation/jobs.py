"""What is asked of the model, in batches: of every policy and size alone, or of all that can share one prefill."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.errors import BadValue
from jaxkv.evaluation import asking, one_prefill
from jaxkv.evaluation.example import Example
from jaxkv.evaluation.results import Record
from jaxkv.evaluation.settings import SIZES, Cell, Settings
from jaxkv.policies.policy import Policy
from jaxkv.sizes import on_model
from jaxkv.weights.params import Params

HELD = 8192  # tokens of prompts whose caches wait for each other
TOGETHER = 16  # policies that ask of one prefill, twice those that draft: their programs stay while all prompts run


@dataclasses.dataclass(frozen=True)
class Job:
    """One batch of one cell: `rows` are (example, number of its question)."""

    cell: Cell
    mode: str
    rows: tuple[tuple[Example, int], ...]

    @property
    def keys(self) -> list[str]:
        """The names of its records."""
        return [key_of(self.cell, self.mode, f"{example.digest}-{number}") for example, number in self.rows]

    def without(self, keys: set[str]) -> "Job":
        """The job without the rows that have these keys."""
        rows = tuple(row for row, key in zip(self.rows, self.keys, strict=True) if key not in keys)
        return dataclasses.replace(self, rows=rows)

    @property
    def title(self) -> str:
        """What the progress line shows."""
        names = ", ".join(sorted({example.task for example, _ in self.rows}))
        return f"{self.cell.title}, {self.mode}: {names}"


@dataclasses.dataclass(frozen=True)
class Share:
    """A question that runs once for all its `cells`; `ids` are its whole prompt."""

    row: tuple[Example, int]
    ids: np.ndarray
    cells: tuple[Cell, ...]

    @property
    def jobs(self) -> list[Job]:
        """What each cell would do alone."""
        return [Job(cell, "aware", (self.row,)) for cell in self.cells]

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its records."""
        return tuple(key for job in self.jobs for key in job.keys)


def key_of(cell: Cell, mode: str, what: str) -> str:
    """16 hexadecimal digits that name a record: the policy with all its parts and numbers, what it knows of the model
    by `jaxkv calibrate`, the mode, the example. What is said about the policy is no part of it."""
    policy = cell.policy
    if policy is not None:
        policy = dataclasses.replace(policy, title="", paper="", fidelity="", differs="")
    said = repr(policy) if cell.bytes is None else f"{policy!r} in {cell.bytes} bytes"
    said += cell.learned and f" by {cell.learned}"
    return hashlib.sha256(f"{cell.label}|{said}|{mode}|{what}".encode()).hexdigest()[:16]


def measurable(params: Params, cell: Cell) -> Cell:
    """The cell, with the budget that its bytes allow on this model; without its policy where that needs numbers that
    were not measured on it, or more bytes."""
    if cell.policy is None:
        return cell
    if lost := ", ".join(name for name in cell.policy.learns if name not in params.learned):
        return dataclasses.replace(cell, policy=None, reason=f"{lost}: not measured on this model (jaxkv calibrate)")
    try:
        policy = on_model(params, cell.policy)
    except BadValue as error:
        return dataclasses.replace(cell, policy=None, reason=str(error))
    budget, known = cell.budget if cell.bytes is None else policy.budget, hashlib.sha256()
    for name in policy.learns:
        known.update(np.asarray(params.learned[name]).tobytes())
    learned = known.hexdigest()[:16] if policy.learns else ""
    return dataclasses.replace(cell, policy=policy, budget=budget, learned=learned)


def jobs(settings: Settings, examples: list[Example], cells: Sequence[Cell], tokenizer: Any) -> Iterator[Job]:
    """Batches of rows of alike length and equal output, so that few programs are compiled; cell by cell."""
    for mode in settings.modes:
        rows = []
        for example in examples:
            if mode == "agnostic" and example.output:
                continue  # its text is the output, which comes after the question
            if mode == "agnostic" and not example.context:
                raise BadValue(f"task {example.task!r} has no context to compress first: use modes = ['aware']")
            if mode == "agnostic" and not all(question.text for question in example.questions):
                raise BadValue(
                    f"task {example.task!r} has its question within its context, which would be compressed too: use "
                    "modes = ['aware']"
                )
            rows += [(example, number) for number in range(len(example.questions))]
        size = {id(example): asking.size(tokenizer, example) for example, _ in rows}

        def shape(row: tuple[Example, int]) -> tuple:
            return bool(row[0].output), row[0].max_new_tokens

        rows.sort(key=lambda row: (*shape(row), -size[id(row[0])]))  # stable: an example's questions stay together
        batches: list[list[tuple[Example, int]]] = []
        for row in rows:
            # Asked of a compressed context, a batch is so many contexts with all their questions, else so many rows.
            full = batches and settings.batch == (
                _contexts(batches[-1], row) if mode == "agnostic" else len(batches[-1])
            )
            if batches and not full and shape(batches[-1][0]) == shape(row):
                batches[-1].append(row)
            else:
                batches.append([row])
        for cell in cells:
            for batch in batches:
                yield Job(cell, mode, tuple(batch))


def _contexts(rows: list[tuple[Example, int]], row: tuple[Example, int]) -> int:
    """How many contexts other than the row's the rows are about."""
    return len({id(example) for example, _ in rows} - {id(row[0])})


def shares(
    settings: Settings, examples: list[Example], cells: Sequence[Cell], tokenizer: Any, context: int
) -> list[Share]:
    """The questions that several cells ask of one prefill, from the shortest prompt on: all of them for `TOGETHER`
    policies, those of the same decode steps next to each other, then for as many more. `context`: the model's."""

    def able(cell: Cell, tokens: int) -> bool:
        return cell.policy is not None and not one_prefill.apart(cell.policy, tokens, context)

    found = []
    for example in examples if "aware" in settings.modes else ():
        for number, question in enumerate(() if example.output else example.questions):
            found.append(((example, number), np.concatenate(asking.asked(tokenizer, example, question))))
    found.sort(key=lambda one: len(one[1]))
    out = [
        Share(row, ids, tuple(cell for cell in some if able(cell, len(ids))))
        for some in parts(cells)
        for row, ids in found
    ]
    return [share for share in out if len(share.cells) > 1]


def side_by_side(settings: Settings, found: Sequence[Share]) -> Iterator[list[Share]]:
    """Neighbouring questions whose answers decode together: prompts padded to one length, as many as make the sizes of
    one policy fill a batch, and no more than `HELD` tokens."""
    sizes = max(1, sum(len(getattr(settings, name)) for name in SIZES))
    alike = lambda share: (one_prefill.padded(len(share.ids)), share.row[0].max_new_tokens, share.cells)  # noqa: E731
    for (length, *_), some in itertools.groupby(found, alike):
        yield from map(list, itertools.batched(some, max(1, min(settings.batch // sizes, HELD // length))))


def title_of(some: Sequence[Share]) -> str:
    """What the progress line shows of questions that are asked together."""
    names = ", ".join(dict.fromkeys(share.row[0].task for share in some))
    prompts = f"{len(some)} prompts of at most " if len(some) > 1 else ""
    return f"{names}: {prompts}{max(len(share.ids) for share in some)} tokens, {len(some[0].cells)} policies and sizes"


def parts(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """The cells that can be measured, `TOGETHER` policies at a time or a bit fewer (one that drafts counts as two),
    those of the same decode steps next to each other."""
    steps: dict[Policy, dict[str, list[Cell]]] = {}
    for cell in cells:
        if cell.policy is not None:
            steps.setdefault(cell.policy.decoding, {}).setdefault(cell.label, []).append(cell)
    policies = [sizes for labels in steps.values() for sizes in labels.values()]
    drafting = sum(_drafts(sizes[0].policy) for sizes in policies)
    count = -(-(len(policies) + drafting) // TOGETHER)
    for some in itertools.batched(policies, -(-len(policies) // count) if count else 1):
        yield [cell for sizes in some for cell in sizes]


def _drafts(policy: Policy | None) -> bool:
    """Whether the policy has a first pass, with programs of its own."""
    return policy is not None and policy.prefill is not None and policy.prefill.observe.drafts


def cost(shares: Sequence[Share], own: Sequence[Job], others: Mapping[str, int], tokenizer: Any, context: int) -> str:
    """How many prefills, of how many tokens, for how many answers; who needs a prefill of its own where others share
    one, and why; and the tokens of what is measured beside answers, by its name."""
    said = []
    answers, tokens = sum(len(share.cells) for share in shares), sum(len(share.ids) for share in shares)
    if shares:
        prompts = len({(id(share.row[0]), share.row[1]) for share in shares})
        times = len(shares) // prompts
        once = "once each" if times < 2 else f"{times} times, for as many parts of the policies"
        said.append(f"{prompts} prompts run {once}, {tokens} tokens in all, for {answers} answers side by side")
    prefills, tokens, why = 0, 0, {}
    for job in own:
        if job.cell.policy is None:
            why.setdefault(f"not measured: {job.cell.reason}", {})[job.cell.label] = None
            continue
        sizes = [asking.size(tokenizer, example) for example, _ in job.rows]
        prefills, tokens = prefills + len(sizes), tokens + sum(sizes)
        if shares:
            reason = one_prefill.apart(job.cell.policy, max(sizes), context)
            reason = reason or f"asked in the mode {job.mode!r}, or alone"
            why.setdefault(f"a prefill of its own: {reason}", {})[job.cell.label] = None
    if prefills:
        said.append(f"{prefills} {'more ' * bool(shares)}prefills of {tokens} tokens in all")
    said += [f"{count} tokens for {name}" for name, count in others.items() if count]
    return "; ".join([*said, *(f"{', '.join(labels)}: {reason}" for reason, labels in why.items())])


def about(job: Job, row: tuple[Example, int]) -> Record:
    """What a record says of its cell and example."""
    example, number = row
    return {
        "kind": "answer",
        "key": key_of(job.cell, job.mode, f"{example.digest}-{number}"),
        "source": "jaxkv",
        **cell_said(job.cell),
        "mode": job.mode,
        "task": example.task,
        "haystack": example.haystack,
        "length": example.length,
        "depth": example.questions[number].depth,
        "example": example.digest,
        "question": number,
    }


def cell_said(cell: Cell) -> Record:
    said: Record = {"policy": cell.label, "budget": cell.budget, "ratio": cell.ratio}
    if cell.bytes is not None:
        said["bytes"] = cell.bytes
    return said if cell.policy is None else {**said, "fidelity": cell.policy.fidelity, "bounded": cell.policy.bounded}
