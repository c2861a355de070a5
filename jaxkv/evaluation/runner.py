"""A run: settings -> records. Every policy and budget answers the same questions and reads the same continuations.

Every cell compiles programs of its own and calls them a few times: so prefill scans the layers.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import BadValue, first_line
from jaxkv.evaluation import asking, datasets, tasks, texts
from jaxkv.evaluation.example import Example
from jaxkv.evaluation.fidelity import fidelity, reference
from jaxkv.evaluation.forced import follow
from jaxkv.evaluation.results import Record, Store
from jaxkv.evaluation.retention import retained, story
from jaxkv.evaluation.scorers import score
from jaxkv.evaluation.settings import Cell, Settings, to_dict
from jaxkv.generate import Generation, generate, prefill
from jaxkv.policies.catalogue import catalogue
from jaxkv.policies.policy import Policy
from jaxkv.weights.params import Params

Progress = Callable[[str, int, int, int | float | None], None]  # (what, jobs done, of, seconds left or None)


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

    @property
    def title(self) -> str:
        """What the progress line shows."""
        size = self.cell.budget if self.cell.ratio is None else self.cell.ratio
        names = ", ".join(sorted({example.task for example, _ in self.rows}))
        return f"{self.cell.label}{'' if size is None else f' at {size}'}, {self.mode}: {names}"


@dataclasses.dataclass(frozen=True)
class Step:
    """What is done between two writes to the store."""

    cell: Cell
    title: str
    keys: tuple[str, ...]  # of the records that it gives
    records: Callable[[], list[Record]]


def key_of(cell: Cell, mode: str, what: str) -> str:
    """16 hexadecimal digits that name a record: the policy with all its parts and numbers, the mode, the example."""
    return hashlib.sha256(f"{cell.label}|{cell.policy!r}|{mode}|{what}".encode()).hexdigest()[:16]


def examples_of(settings: Settings, tokenizer: Any) -> list[Example]:
    """The examples of every [[tasks]] table."""
    out = []
    for each in settings.tasks:
        if each.file:
            tokens = each.max_new_tokens or 64
            found = datasets.read(
                each.file, scorer=each.scorer, max_new_tokens=tokens, limit=each.limit, chat=each.chat
            )
            out += [asking.shortened(tokenizer, example, each.longest) for example in found]
        else:
            out += tasks.generate(
                each.name, lambda example: asking.size(tokenizer, example), lengths=each.lengths, depths=each.depths,
                haystacks=each.haystacks, examples=each.examples, questions=each.questions,
                max_new_tokens=each.max_new_tokens, seed=settings.seed,
            )  # fmt: skip
    return out


def evaluate(
    params: Params, settings: Settings, folder: str | Path, *, progress: Progress | None = None, model: str = ""
) -> Store:
    """Run what the folder doesn't hold yet, a batch at a time, and give the store back.

    A record is known by its policy and by the text that it was measured on: where a file of data has changed since, its
    old records are left out (`Store.leave_out`), and `progress` says so.
    """
    if params.tokenizer is None:
        raise BadValue("an evaluation asks questions in text, and these params have no tokenizer: load them with one")
    store = Store(folder)
    done = store.open(to_dict(settings), model or params.fingerprint)
    examples = examples_of(settings, params.tokenizer)
    steps = [
        Step(job.cell, job.title, tuple(job.keys), lambda job=job: _answers(params, settings, job))
        for job in jobs(settings, examples, params.tokenizer)
    ]
    steps += _fidelity_steps(params, settings)
    order = {(cell.label, cell.budget, cell.ratio): place for place, cell in enumerate(settings.cells())}
    steps.sort(key=lambda step: order[step.cell.label, step.cell.budget, step.cell.ratio])  # stable: cell by cell
    steps += _retention_steps(params, settings)
    stale = store.leave_out({key for step in steps for key in step.keys})
    steps = [step for step in steps if not done.issuperset(step.keys)]
    if stale and progress is not None:
        progress(f"{stale} records of data that has changed since are left out (stale.jsonl)", 0, len(steps), None)
    started, times = time.perf_counter(), []
    for number, step in enumerate(steps):
        if progress is not None:
            left = None if not times else (time.perf_counter() - started) / number * (len(steps) - number)
            progress(step.title, number, len(steps), left)
        store.add(record for record in step.records() if record["key"] not in done)
        times.append(time.perf_counter() - started)
    if progress is not None:
        progress("done", len(steps), len(steps), 0.0)
    return store


def jobs(settings: Settings, examples: list[Example], tokenizer: Any) -> Iterator[Job]:
    """Batches of rows of alike length and equal output, so that few programs are compiled; cell by cell."""
    for mode in settings.modes:
        rows = []
        for example in examples:
            if mode == "agnostic" and example.output:
                continue  # its text is the output, which comes after the question
            if mode == "agnostic" and not example.context:
                raise BadValue(f"task {example.task!r} has no context to compress first: use modes = ['aware']")
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
        for cell in settings.cells():
            for batch in batches:
                yield Job(cell, mode, tuple(batch))


def _contexts(rows: list[tuple[Example, int]], row: tuple[Example, int]) -> int:
    """How many contexts other than the row's the rows are about."""
    return len({id(example) for example, _ in rows} - {id(row[0])})


def _answers(params: Params, settings: Settings, job: Job) -> list[Record]:
    """The records of one batch."""
    if job.cell.policy is None:
        return [{**about(job, row), "score": None, "skipped": job.cell.reason, "answer": None} for row in job.rows]
    if job.mode == "agnostic":
        return _compressed_first(params, settings, job, job.cell.policy)
    rows = list(job.rows)
    filled = [*rows, *[rows[-1]] * (settings.batch - len(rows))]  # one batch size, one compilation
    parts = [asking.asked(params.tokenizer, example, example.questions[number]) for example, number in filled]
    prompts, new = [np.concatenate(part) for part in parts], filled[0][0].max_new_tokens
    if filled[0][0].output:
        out, waited = _after_output(params, job.cell.policy, [example for example, _ in filled], prompts, new)
    else:
        # Stop at nothing, so that every policy decodes as many steps; the answer ends at the model's stop token.
        out = generate(
            params, prompts, policy=job.cell.policy, max_new_tokens=new, stop_tokens=(), scan_layers=True
        )  # fmt: skip
        waited = out.stats.prefill_seconds
    return _records(params, job, rows, [len(prompt) for prompt in prompts], out, waited)


def _compressed_first(params: Params, settings: Settings, job: Job, policy: Policy) -> list[Record]:
    """The records of a batch whose contexts are compressed once, then asked each of their questions."""
    contexts = list({id(example): example for example, _ in job.rows}.values())
    filled = [*contexts, *[contexts[-1]] * (settings.batch - len(contexts))]
    started = time.perf_counter()
    heads = [asking.asked(params.tokenizer, example, example.questions[0])[0] for example in filled]
    cache = prefill(params, heads, policy=policy, scan_layers=True)
    jax.block_until_ready(cache.lengths)
    waited = time.perf_counter() - started
    records = []
    for turn in range(max(len(example.questions) for example in contexts)):
        rows = [(example, min(turn, len(example.questions) - 1)) for example in filled]
        tails = [asking.asked(params.tokenizer, example, example.questions[number])[1] for example, number in rows]
        after = catalogue()["full"] if settings.after == "full" else None
        out = generate(
            params, tails, policy=after, cache=cache, max_new_tokens=contexts[0].max_new_tokens, stop_tokens=(),
            scan_layers=True,
        )  # fmt: skip
        sizes = [len(head) + len(tail) for head, tail in zip(heads, tails, strict=True)]
        found = _records(params, job, rows[: len(contexts)], sizes, out, waited)
        records += [record for record, (example, _) in zip(found, rows, strict=False) if turn < len(example.questions)]
    return records


def _after_output(
    params: Params, policy: Policy, examples: list[Example], prompts: list[np.ndarray], new: int
) -> tuple[Generation, float]:
    """The answers behind an output that is forced through decode, and the seconds of the prefill."""
    started = time.perf_counter()
    cache = prefill(params, prompts, policy=policy, scan_layers=True)
    jax.block_until_ready(cache.lengths)
    waited = time.perf_counter() - started
    said = [asking.ids(params.tokenizer, example.output) for example in examples]
    written = np.full((len(said), max(map(len, said)) - 1), -1, np.int32)
    for row, tokens in enumerate(said):
        written[row, : len(tokens) - 1] = tokens[:-1]
    cache, _ = follow(params, cache, written, logits=False)
    cache = dataclasses.replace(cache, pending=jnp.asarray([tokens[-1] for tokens in said], jnp.int32))
    return generate(params, None, cache=cache, max_new_tokens=new, stop_tokens=()), waited


def _records(
    params: Params,
    job: Job,
    rows: list[tuple[Example, int]],
    sizes: list[int],
    out: Generation,
    waited: float,
) -> list[Record]:
    """A record per row of the generation; rows that only fill the batch have none."""
    seconds, records = out.stats.decode_seconds, []
    for place, (example, number) in enumerate(rows):
        answer = answer_of(params, out.tokens[place].tolist())
        question = example.questions[number]
        records.append(
            {
                **about(job, rows[place]),
                "score": score(example.scorer, answer, question.answers),
                "answer": answer,
                "answers": list(question.answers),
                "prompt_tokens": sizes[place],
                "kept": out.stats.kept[place],
                "cache_bytes": out.stats.cache_bytes // len(out.tokens),
                "prefill_seconds": waited,
                "decode_seconds": seconds,
                "tokens_per_second": len(out.tokens) * (out.tokens.shape[1] - 1) / seconds if seconds else None,
                "batch": len(out.tokens),
            }
        )
    return records


def answer_of(params: Params, tokens: list[int]) -> str:
    """The text of the tokens up to the model's first stop token."""
    ends = [at for at, token in enumerate(tokens) if token in params.config.stop_tokens]
    tokens = tokens[: ends[0]] if ends else tokens
    return params.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def about(job: Job, row: tuple[Example, int]) -> Record:
    """What a record says of its cell and example."""
    example, number = row
    depth = example.questions[number].depth
    return {
        "kind": "answer",
        "key": key_of(job.cell, job.mode, f"{example.digest}-{number}"),
        "source": "jaxkv",
        **_cell(job.cell),
        "mode": job.mode,
        "task": example.task,
        "haystack": example.haystack,
        "length": example.length,
        "depth": example.depth if depth is None else depth,
        "example": example.digest,
        "question": number,
    }


def _cell(cell: Cell) -> Record:
    said = {"policy": cell.label, "budget": cell.budget, "ratio": cell.ratio}
    return said if cell.policy is None else {**said, "fidelity": cell.policy.fidelity, "bounded": cell.policy.bounded}


def prose_rows(settings: Settings, tokenizer: Any, count: int, tokens: int, file: str = "") -> np.ndarray:
    """`count` rows of `tokens` ids of the prose (or of a text file), from different places on, repeated as needed."""
    text = text_of(file)
    ids = asking.ids(tokenizer, text)
    if len(ids) < 2:
        raise BadValue(f"fidelity file {file!r} has {len(ids)} tokens: expected a text")
    start = [row * len(ids) // count for row in range(count)]
    return np.stack([np.resize(np.roll(ids, -at), tokens) for at in start]).astype(np.int32)


def text_of(file: str) -> str:
    """The text of a file, or the prose. Raises `BadValue` where it cannot be read."""
    if not file:
        return texts.prose()
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadValue(
            f"fidelity file {file!r} cannot be read ({first_line(error)}): expected text in UTF-8"
        ) from error


def _fidelity_steps(params: Params, settings: Settings) -> list[Step]:
    """One step per cell; the full cache is asked once, by the first."""
    wanted = settings.fidelity
    if wanted is None:
        return []
    rows = prose_rows(settings, params.tokenizer, wanted.texts, wanted.prompt + wanted.continuation, wanted.file)
    prompt, continuation = rows[:, : wanted.prompt], rows[:, wanted.prompt :]
    what = repr(wanted)
    if wanted.file:  # known by what stands in it
        what += hashlib.sha256(text_of(wanted.file).encode()).hexdigest()
    known: list[Any] = []

    def step(cell: Cell, key: str) -> list[Record]:
        about = {"kind": "fidelity", "key": key, "source": "jaxkv", **_cell(cell), "length": wanted.prompt}
        if cell.policy is None:
            return [{**about, "skipped": cell.reason}]
        if not known:
            known.append(reference(params, prompt, continuation))
        found = fidelity(params, cell.policy, known[0])
        measured = {field.name: getattr(found, field.name).tolist() for field in dataclasses.fields(found)}
        return [{**about, **measured}]

    out = []
    for cell in settings.cells():
        key = key_of(cell, "fidelity", what)
        left_out = wanted.budgets and cell.budget is not None and cell.budget not in wanted.budgets
        if not left_out:
            size = cell.budget if cell.ratio is None else cell.ratio
            title = f"{cell.label}{'' if size is None else f' at {size}'}: fidelity"
            out.append(Step(cell, title, (key,), lambda cell=cell, key=key: step(cell, key)))
    return out


def _retention_steps(params: Params, settings: Settings) -> list[Step]:
    """One step per policy of the [retention] table."""
    wanted, out = settings.retention, []
    if wanted is None:
        return out
    prompt = story(params.tokenizer, wanted.prompt)

    def step(cell: Cell, key: str) -> list[Record]:
        assert cell.policy is not None
        picture = retained(params, prompt, cell.policy, steps=wanted.steps, every=wanted.every)
        return [{"kind": "retention", "key": key, "source": "jaxkv", **_cell(cell), **picture.to_dict()}]

    chosen = dataclasses.replace(settings, policies=wanted.policies, budgets=(wanted.budget,), ratios=())
    for cell in chosen.cells():
        key = key_of(cell, "retention", f"story, {wanted!r}")
        title = f"{cell.label} at {wanted.budget}: retention"
        out.append(Step(cell, title, (key,), lambda cell=cell, key=key: step(cell, key)))
    return out
