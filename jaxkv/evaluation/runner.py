"""A run: settings -> records. Every policy and budget answers the same questions and reads the same continuations.

Every cell compiles programs of its own and calls them a few times: so prefill scans the layers.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import BadValue, first_line
from jaxkv.evaluation import asking, datasets, jobs, one_prefill, published, tasks, texts
from jaxkv.evaluation.example import Example
from jaxkv.evaluation.fidelity import fidelity, reference, together
from jaxkv.evaluation.forced import follow
from jaxkv.evaluation.jobs import Job, Share, about, cell_said, key_of
from jaxkv.evaluation.results import Record, Store
from jaxkv.evaluation.retention import retained, story
from jaxkv.evaluation.scorers import score, settled
from jaxkv.evaluation.settings import Cell, Settings, to_dict
from jaxkv.generate import Generation, generate, prefill
from jaxkv.policies.catalogue import catalogue
from jaxkv.policies.policy import Policy
from jaxkv.stop_strings import decoded
from jaxkv.weights.params import Params

Progress = Callable[[str, int, int, int | float | None], None]  # (what, jobs done, of, seconds left or None)


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of the run. Its records come a batch at a time; those whose keys are done may be left out. `work` is the
    tokens that run through the model in it, by which the time left is told."""

    title: str
    keys: tuple[str, ...]
    work: int
    records: Callable[[set[str]], Iterable[list[Record]]]


@dataclasses.dataclass(frozen=True)
class Work:
    """All steps of a run, and what they cost, in words."""

    steps: list[Step]
    cost: str


def check_data(settings: Settings) -> None:
    """Raises `BadValue` for a folder of data, or a file of a task in it, that is not there, or begins with a broken
    line. No model is needed, and nothing comes from the hub."""
    if settings.data and not Path(settings.data).expanduser().is_dir():
        raise BadValue(f"data={settings.data!r}: no such folder; expected one with the files of the run")
    for each in settings.tasks:
        if each.file:
            datasets.read(_file(each.file, settings.data), scorer=each.scorer, limit=1)
        elif settings.data and each.name in published.READ:
            published.read(each.name, lambda _: 0, folder=settings.data, limit=1)


def examples_of(settings: Settings, tokenizer: Any) -> list[Example]:
    """The examples of every [[tasks]] table, those of data with the middle cut out where they are too long.

    Raises `BadValue` as `check_data` does, and for any line of the data that is broken.
    """
    check_data(settings)
    size, out = lambda example: asking.size(tokenizer, example), []
    for each in settings.tasks:
        if each.file:
            found = datasets.read(
                _file(each.file, settings.data), scorer=each.scorer, max_new_tokens=each.max_new_tokens or 64,
                limit=each.limit, chat=each.chat,
            )  # fmt: skip
        elif each.name in published.NAMES:
            found = published.read(
                each.name, size, folder=settings.data, lengths=each.lengths, examples=each.examples,
                haystacks=each.haystacks, limit=each.limit, max_new_tokens=each.max_new_tokens, chat=each.chat,
                seed=settings.seed,
            )  # fmt: skip
        else:
            out += tasks.generate(
                each.name, size, lengths=each.lengths, depths=each.depths, haystacks=each.haystacks,
                examples=each.examples, questions=each.questions, max_new_tokens=each.max_new_tokens,
                seed=settings.seed,
            )  # fmt: skip
            continue
        out += [asking.shortened(tokenizer, example, each.longest) for example in found]
    return out


def _file(file: str, data: str) -> Path:
    """A file of a run: where it says, or in the folder of the data."""
    path = Path(file).expanduser()
    return path if path.exists() or not data else Path(data).expanduser() / file


def evaluate(
    params: Params, settings: Settings, folder: str | Path, *, progress: Progress | None = None, model: str = ""
) -> Store:
    """Run what the folder doesn't hold yet, a batch at a time, and give the store back.

    A record is known by its policy and by the text that it was measured on: where a file of data has changed since, its
    old records are left out (`Store.leave_out`), and `progress` says so.
    """
    if params.tokenizer is None:
        raise BadValue("an evaluation asks questions in text, and these params have no tokenizer: load them with one")
    store, work = Store(folder), planned(params, settings)  # a run that cannot be planned leaves no folder behind
    held = ", ".join(sorted({str(x.dtype) for x in jax.tree.leaves(params.weights)}))
    done = store.open(to_dict(settings), model or params.fingerprint, held)
    stale = store.leave_out({key for step in work.steps for key in step.keys})
    steps = [step for step in work.steps if not done.issuperset(step.keys)]
    told = progress or (lambda *_: None)
    if stale:
        told(f"{stale} records of data that has changed since are left out (stale.jsonl)", 0, len(steps), None)
    if settings.share_prefill:
        told(work.cost, 0, len(steps), None)
    started, ran, whole = time.perf_counter(), 0, sum(step.work for step in steps)
    for number, step in enumerate(steps):

        def tell(title: str, part: float, before: int = ran, number: int = number, work: int = step.work) -> None:
            worked = before + part * work
            left = (time.perf_counter() - started) / worked * (whole - worked) if before else None
            told(title, number, len(steps), left)

        tell(step.title, 0.0)
        left = set(step.keys) - done
        for some in step.records(done):
            store.add(record for record in some if record["key"] not in done)
            left -= {record["key"] for record in some}
            if left:
                part = 1 - len(left) / len(step.keys)
                tell(f"{step.title}, {len(step.keys) - len(left)} of {len(step.keys)} answers", part)
        ran += step.work
    told("done", len(steps), len(steps), 0.0)
    return store


def planned(params: Params, settings: Settings) -> Work:
    """Everything that a run does: prompts that run once for many cells, from the shortest on; then cell by cell.

    Raises `BadValue` for a run that measures nothing.
    """
    if not settings.tasks and settings.fidelity is None and settings.retention is None:
        raise BadValue(f"the run {settings.name!r} measures nothing: give it [[tasks]], [fidelity] or [retention]")
    tokenizer, cells = params.tokenizer, [jobs.measurable(params, cell) for cell in settings.cells()]
    examples = examples_of(settings, tokenizer)
    for example in {example.scorer: example for example in examples}.values():  # one that fails does so before the run
        score(example.scorer, "", example.questions[0].answers, example.questions[0].classes)
    context = params.config.max_position
    shared = jobs.shares(settings, examples, cells, tokenizer, context) if settings.share_prefill else []
    taken = {key for share in shared for job in share.jobs for key in job.keys}
    alone = dataclasses.replace(settings, batch=1) if shared else settings
    own = [job.without(taken) for job in jobs.jobs(alone, examples, cells, tokenizer)]
    own = [job for job in own if job.rows]
    fidelity_steps, retention_steps = _fidelity_steps(params, settings, cells), _retention_steps(params, settings)
    by_cell = [(job.cell, _step(params, alone, job)) for job in own] + fidelity_steps
    order = {(cell.label, cell.size): place for place, cell in enumerate(cells)}
    by_cell.sort(key=lambda one: order[one[0].label, one[0].size])  # stable
    together = jobs.side_by_side(settings, shared)
    steps = [_shared_step(params, settings, some) for some in together] + [step for _, step in by_cell]
    others = {
        "fidelity": sum(step.work for _, step in fidelity_steps),
        "retention": sum(step.work for step in retention_steps),
    }
    return Work([*steps, *retention_steps], jobs.cost(shared, own, others, tokenizer, context))


def _step(params: Params, settings: Settings, job: Job) -> Step:
    work = sum(asking.size(params.tokenizer, example) + example.max_new_tokens for example, _ in job.rows)
    return Step(job.title, tuple(job.keys), work, lambda _: [_answers(params, settings, job)])


def _shared_step(params: Params, settings: Settings, some: Sequence[Share]) -> Step:
    work = sum(len(share.ids) + len(share.cells) * share.row[0].max_new_tokens for share in some)
    keys = tuple(key for share in some for key in share.keys)
    return Step(jobs.title_of(some), keys, work, lambda done: _shared(params, settings, some, done))


def cost(params: Params, settings: Settings) -> str:
    """What a run will cost, in words, before anything runs."""
    return planned(params, settings).cost


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


def _shared(params: Params, settings: Settings, some: Sequence[Share], done: set[str]) -> Iterator[list[Record]]:
    """The records of a few questions, each asked of one prefill of its own. How long anything took is not said: it is
    nobody's alone."""
    wanted = [[job for job in share.jobs if not done.issuperset(job.keys)] for share in some]
    asked = (
        (one_prefill.hear(params, share.ids), [job.cell.policy for job in jobs if job.cell.policy is not None])
        for share, jobs in zip(some, wanted, strict=True)
        if jobs
    )
    places = [at for at, jobs in enumerate(wanted) if jobs]  # of the prompts that are asked

    def enough(place: one_prefill.Place, tokens: list[int]) -> bool:
        ended = not set(tokens).isdisjoint(params.config.stop_tokens)
        return ended or settled(some[places[place[0]]].row[0].scorer, answer_of(params, tokens))

    def record(place: one_prefill.Place, said: one_prefill.Said) -> Record:
        share = some[places[place[0]]]
        (example, number), answer = share.row, answer_of(params, said.tokens)
        question = example.questions[number]
        return {
            **about(wanted[places[place[0]]][place[1]], share.row),
            "score": score(example.scorer, answer, question.answers, question.classes),
            "answer": answer,
            "answers": list(question.answers),
            "prompt_tokens": len(share.ids),
            "kept": said.kept,
            "cache_bytes": said.cache_bytes,
        }

    count = some[0].row[0].max_new_tokens
    batches = one_prefill.answers(params, asked, count, chunk=settings.batch, enough=enough)
    yield from ([record(*one) for one in batch] for batch in batches)


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
                "score": score(example.scorer, answer, question.answers, question.classes),
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
    return decoded(params.tokenizer, tokens)


def prose_rows(settings: Settings, tokenizer: Any, count: int, tokens: int, file: str = "") -> np.ndarray:
    """`count` rows of `tokens` ids of the prose (or of a text file), from different places on, repeated as needed, each
    behind what the model's texts begin with."""
    text = text_of(file)
    ids, front = asking.ids(tokenizer, text), asking.ids(tokenizer, "", begins=True)
    if len(ids) < 2:
        raise BadValue(f"fidelity file {file!r} has {len(ids)} tokens: expected a text")
    start = [row * len(ids) // count for row in range(count)]
    return np.stack([[*front, *np.resize(np.roll(ids, -at), tokens - len(front))] for at in start]).astype(np.int32)


def text_of(file: str) -> str:
    """The text of a file, or the prose. Raises `BadValue` where it cannot be read."""
    if not file:
        return texts.prose()
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise BadValue(f"text file {file!r} cannot be read ({first_line(error)}): expected text in UTF-8") from error


def _fidelity_steps(params: Params, settings: Settings, cells: Sequence[Cell]) -> list[tuple[Cell, Step]]:
    """One step per cell, or one for all cells of a part that share a prefill of each text; the full cache is asked
    once, by the first."""
    wanted = settings.fidelity
    if wanted is None:
        return []
    rows = prose_rows(settings, params.tokenizer, wanted.texts, wanted.prompt + wanted.continuation, wanted.file)
    prompt, continuation = rows[:, : wanted.prompt], rows[:, wanted.prompt :]
    what = repr(wanted)
    if wanted.file:  # known by what stands in it
        what += hashlib.sha256(text_of(wanted.file).encode()).hexdigest()
    known: list[Any] = []

    def measured(some: Sequence[Cell]) -> list[Any]:
        if not known:
            known.append(reference(params, prompt, continuation))
        policies = [cell.policy for cell in some if cell.policy is not None]
        if len(some) > 1:
            return together(params, policies, known[0], chunk=settings.batch)
        return [fidelity(params, policy, known[0]) for policy in policies]

    def records(some: Sequence[Cell], done: set[str]) -> Iterator[list[Record]]:
        some = [cell for cell in some if key_of(cell, "fidelity", what) not in done]
        if some[0].policy is None:
            yield [{**said(some[0]), "skipped": some[0].reason}]
            return
        for cell, found in zip(some, measured(some), strict=True):
            yield [
                {**said(cell), **{each.name: getattr(found, each.name).tolist() for each in dataclasses.fields(found)}}
            ]

    def said(cell: Cell) -> Record:
        key = key_of(cell, "fidelity", what)
        return {"kind": "fidelity", "key": key, "source": "jaxkv", **cell_said(cell), "length": wanted.prompt}

    def step(*some: Cell) -> tuple[Cell, Step]:
        title = f"{some[0].title if len(some) == 1 else f'{len(some)} policies and sizes'}: fidelity"
        keys = tuple(key_of(cell, "fidelity", what) for cell in some)
        work = len(some) * wanted.texts * (wanted.prompt + wanted.continuation)
        return some[0], Step(title, keys, work, lambda done: records(some, done))

    cells = [cell for cell in cells if not wanted.budgets or cell.budget is None or cell.budget in wanted.budgets]
    sharing: list[list[Cell]] = []
    if settings.share_prefill:
        context = params.config.max_position
        able = [cell for cell in cells if cell.policy and not one_prefill.apart(cell.policy, wanted.prompt, context)]
        sharing = [some for some in jobs.parts(able) if len(some) > 1]
    taken = [cell for some in sharing for cell in some]
    return [step(*some) for some in sharing] + [step(cell) for cell in cells if cell not in taken]


def _retention_steps(params: Params, settings: Settings) -> list[Step]:
    """One step per policy of the [retention] table."""
    wanted, out = settings.retention, []
    if wanted is None:
        return out
    prompt = story(params.tokenizer, wanted.prompt)

    def step(cell: Cell, key: str) -> Iterator[list[Record]]:
        assert cell.policy is not None  # looked at below
        picture = retained(params, prompt, cell.policy, steps=wanted.steps, every=wanted.every)
        yield [{"kind": "retention", "key": key, "source": "jaxkv", **cell_said(cell), **picture.to_dict()}]

    chosen = dataclasses.replace(settings, policies=wanted.policies, budgets=(wanted.budget,), ratios=(), bytes=())
    for cell in (jobs.measurable(params, cell) for cell in chosen.cells()):
        if cell.policy is None:
            raise BadValue(f"[retention] of {cell.title}: {cell.reason}; leave it out, or give another budget")
        key = key_of(cell, "retention", f"story, {wanted!r}")
        title = f"{cell.title}: retention"
        out.append(Step(title, (key,), wanted.prompt + wanted.steps, lambda _, cell=cell, key=key: step(cell, key)))
    return out
