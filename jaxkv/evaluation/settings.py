"""What an evaluation runs, as a TOML says it: model, policies, budgets, tasks, fidelity, retention."""

import dataclasses
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxkv.checks import Checked, shown
from jaxkv.configs import config_files, read_toml
from jaxkv.errors import BadValue, unknown
from jaxkv.evaluation.published import NAMES
from jaxkv.evaluation.scorers import SCORERS
from jaxkv.evaluation.summary import in_words
from jaxkv.evaluation.tasks import TASKS
from jaxkv.evaluation.texts import HAYSTACKS
from jaxkv.policies.catalogue import catalogue, is_file, named, sized
from jaxkv.policies.parts import digest, load_parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.policy import from_dict as made_of
from jaxkv.policies.policy import to_dict as table_of

MODES = ("aware", "agnostic")
SIZES = {"budgets": "budget", "ratios": "ratio", "bytes": "bytes"}  # of a run -> of a policy
OF_A_POLICY = tuple(field.name for field in dataclasses.fields(Policy))


@dataclasses.dataclass(frozen=True)
class Tasks(Checked):
    """One [[tasks]] table: a task's name or a published data set's, or a JSONL `file`, with what `tasks.generate`,
    `published.read` or `datasets.read` takes.

    Of a file's texts with more than `longest` tokens the middle is left out, as LongBench does; without `chat` they go
    to the model as they stand. `reads` are the fields that mean something for its kind.
    """

    name: str = ""
    file: str = ""
    lengths: tuple[int, ...] = (512,)
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    haystacks: tuple[str, ...] = ("noise", "prose")
    examples: int = 1
    questions: int = 1
    max_new_tokens: int | None = None
    scorer: str = "any"
    limit: int | None = None
    longest: int | None = None
    chat: bool = True

    def __post_init__(self):
        if bool(self.name) == bool(self.file):
            raise BadValue(f"a [[tasks]] table with name={self.name!r} and file={self.file!r}: expected one of the two")
        if self.name and self.name not in TASKS and self.name not in NAMES:
            raise unknown("task", self.name, (*TASKS, *NAMES))
        if self.scorer not in SCORERS:
            raise unknown("scorer", self.scorer, SCORERS)
        for haystack in self.haystacks:
            if haystack not in HAYSTACKS:
                raise unknown("haystack", haystack, HAYSTACKS)
        if self.name.startswith("ruler/") and self.haystacks == ("noise",):
            raise BadValue(f"haystacks=('noise',) of {self.name}: expected ('prose',), or none for RULER's own texts")
        at_least_one(self, "lengths", "examples", "questions", "max_new_tokens", "limit", "longest")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise BadValue(f"depths={self.depths}: expected 0 (the text's beginning) to 1 (its end)")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("name", "file", *self.reads) and value != field.default:
                raise BadValue(
                    f"{field.name}={shown(value)} of the task {self.name or self.file!r}, which would not read it: "
                    f"expected some of {', '.join(self.reads)}"
                )

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields that a file, a published data set that is made or read, or a task that is made up takes."""
        if self.file:
            return ("scorer", "max_new_tokens", "limit", "longest", "chat")
        if self.name.startswith("ruler/"):
            return ("lengths", "haystacks", "examples", "max_new_tokens", "chat")
        if self.name in NAMES:
            return ("max_new_tokens", "limit", "longest", "chat")
        made = TASKS[self.name]
        asks = {"depths": made.depth, "haystacks": made.haystack, "questions": made.questions}
        return ("lengths", *(name for name, reads in asks.items() if reads), "examples", "max_new_tokens")


@dataclasses.dataclass(frozen=True)
class Fidelity(Checked):
    """The [fidelity] table: `texts` stretches of prose (or of `file`), `prompt` tokens each, and the `continuation`
    tokens after it that are run through decode under every policy. `budgets` restricts it to some of the run's.
    """

    texts: int = 4
    prompt: int = 512
    continuation: int = 32
    file: str = ""
    budgets: tuple[int, ...] = ()

    def __post_init__(self):
        if self.texts < 1 or self.prompt < 1 or self.continuation < 2:
            raise BadValue(
                f"fidelity texts={self.texts}, prompt={self.prompt}, continuation={self.continuation}: expected at "
                "least 1 text, 1 prompt token and 2 continuation tokens"
            )


@dataclasses.dataclass(frozen=True)
class Retention(Checked):
    """The [retention] table: a story of about `prompt` tokens with a question, and the answer, looked at every `every`
    steps, of `steps` at most."""

    policies: tuple[Any, ...] = ()
    budget: int = 128
    prompt: int = 256
    steps: int = 64
    every: int = 16

    def __post_init__(self):
        at_least_one(self, "budget", "prompt", "steps", "every")
        object.__setattr__(self, "policies", tuple(map(_read, self.policies)))


def at_least_one(table: Any, *names: str) -> None:
    """Raises `BadValue` for a number, or one in a list, below 1."""
    for name in names:
        value = getattr(table, name)
        if any(each is not None and each < 1 for each in (value if isinstance(value, tuple) else (value,))):
            raise BadValue(f"{name}={shown(value)}: expected at least 1")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One policy at one budget: a column of the results. Under `bytes` the budget is what a model can have for them."""

    label: str
    policy: Policy | None  # None: the budget cannot hold what the policy protects
    budget: int | None
    ratio: int | float | None
    reason: str = ""
    bytes: int | None = None
    learned: str = ""  # a digest of what the policy knows of the model

    @property
    def size(self) -> int | float | None:
        """What was asked for: bytes of a row, the ratio, or the budget; None where nothing is evicted."""
        return next((each for each in (self.bytes, self.ratio, self.budget) if each is not None), None)

    @property
    def title(self) -> str:
        """The label, and the size where there is one."""
        return self.label if self.size is None else f"{self.label}, {in_words(self.size, [{'bytes': self.bytes}])}"


@dataclasses.dataclass(frozen=True)
class Settings(Checked):
    """A whole run. `policies` are names, .toml files, or tables of one of these and options; "all" is the whole
    catalogue. What stands in such a file is read at once and becomes part of the settings, as the `table` of its name.
    `budgets` are tokens per KV head, `ratios` the shares of a prompt that go, and `bytes` what the keys and values of a
    row may take (as `jaxkv.policy(bytes=)`), with no other size beside them; a table's own stand in place of the run's.
    `parts` are Python files or modules that register parts of one's own.
    `modes`: "aware" runs context and question as one prompt; "agnostic" compresses the context first and runs the
    question on that cache, under the policy too or, with `after="full"`, with nothing evicted any more (as kvpress
    measures).
    With `share_prefill` a prompt runs once for all policies that can share that, and their answers are decoded side by
    side, `batch` at a time; nothing is timed then. `block` is the prompt tokens that run at a time, in place of the
    usual 2048: give the longest prompt's, so that all share; a policy whose blocks are part of the method keeps them.
    `weights` keeps the model's matrices in blocks, as `jaxkv.load` does. `data` is the folder of published data sets
    and of files that are not found otherwise; without it such sets come from the hub.
    """

    name: str = "evaluation"
    model: str = "smollm2-135m"
    dtype: str | None = None
    weights: str | None = None
    policies: tuple[Any, ...] = ("full", "snapkv")
    budgets: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    bytes: tuple[int, ...] = ()
    modes: tuple[str, ...] = ("aware",)
    after: str = "policy"
    batch: int = 8
    share_prefill: bool = False
    block: int | None = None
    seed: int = 0
    data: str = ""
    tasks: tuple[Tasks, ...] = ()
    fidelity: Fidelity | None = None
    retention: Retention | None = None
    parts: tuple[str, ...] = ()

    def __post_init__(self):
        for source in self.parts:
            load_parts(source)
        object.__setattr__(self, "policies", tuple(map(_read, self.policies)))
        for mode in self.modes:
            if mode not in MODES:
                raise unknown("mode", mode, MODES)
        if self.after not in ("policy", "full"):
            raise BadValue(f"after={self.after!r}: expected 'policy' or 'full'")
        at_least_one(self, "batch", "budgets", "block", "bytes")
        for name in ("policies", "modes"):
            if not getattr(self, name):
                raise BadValue(f"{name} is empty: expected at least one, or there is nothing to measure")
        if self.retention is not None and not self.retention.policies:
            raise BadValue("[retention] names no policies: expected at least one, whose entries are to be looked at")
        scorers: dict[str, set[str]] = {}
        for task in self.tasks:
            scorers.setdefault(task.file or task.name, set()).add(task.scorer)
        for what, several in scorers.items():
            if len(several) > 1:
                raise BadValue(
                    f"tasks has {what!r} with scorer {' and '.join(map(repr, sorted(several)))}: their scores would be "
                    "one mean; give each a file of its own, or make two runs"
                )
        budgets = {cell.budget for cell in self.cells() if cell.budget is not None}
        beyond = [] if self.fidelity is None else [each for each in self.fidelity.budgets if each not in budgets]
        if beyond:
            raise BadValue(f"[fidelity] budgets={beyond}: expected some of the run's, {sorted(budgets)}")

    def cells(self) -> list[Cell]:
        """Every policy at every budget and ratio; policies that evict nothing once, in front of the others."""
        out = []
        entries = [each for entry in self.policies for each in (catalogue() if entry == "all" else [entry])]
        for entry in entries:
            options: dict[str, Any] = {"name": entry} if isinstance(entry, str) else dict(entry)
            name, label = options.pop("name", ""), options.pop("label", "")
            own = {size: options.pop(size) for size in SIZES if size in options}
            chosen = made_of(options.pop("table")) if "table" in options else named(name)
            chosen = chosen if self.block is None else chosen.in_blocks(self.block)
            label = label or " ".join([name, *(f"{key}={value}" for key, value in options.items())])
            if not chosen.evicts:
                out.append(Cell(label, sized(chosen, **options), None, None))
                continue
            given = own or {size: getattr(self, size) for size in SIZES}
            sizes = [{kind: each} for many, kind in SIZES.items() for each in given.get(many, ())]
            if not sizes:
                sizes = [{kind: its} for kind in SIZES.values() if (its := getattr(chosen, kind)) is not None]
            if not sizes:
                raise BadValue(
                    f"policy {name!r} needs budgets, ratios or bytes, and the run has none: give budgets = [...]"
                )
            for size in sizes:
                cell = Cell(label, None, size.get("budget"), size.get("ratio"), bytes=size.get("bytes"))
                try:
                    out.append(dataclasses.replace(cell, policy=sized(chosen, **size, **options)))
                except BadValue as error:
                    if cell.budget is None or cell.budget >= sized(chosen, ratio=0.5, **options).floor:
                        raise
                    out.append(dataclasses.replace(cell, reason=str(error)))
        other = next((cell for cell in out if cell.size != cell.bytes), None)
        if other is not None and any(cell.bytes is not None for cell in out):
            raise BadValue(
                f"policy {other.label!r} at {other.size} beside others in bytes: expected one kind of size in a run, "
                "or its results say nothing of each other; give all of them bytes = [...]"
            )
        labels = [(cell.label, cell.size) for cell in out]
        for label in labels:
            if labels.count(label) > 1:
                raise BadValue(f"two policies named {label[0]!r}: give one of them another label=")
        return sorted(out, key=lambda cell: cell.policy is None or cell.policy.evicts)


def load(source: str | Path) -> Settings:
    """The settings of a TOML file, or of a named one of configs/evals.

    Files that it names as policies or parts are looked for beside it first, then in the working folder. Raises
    `UnknownName` for unknown fields.
    """
    shipped = config_files("evals")
    if str(source) in shipped:
        return from_dict(tomllib.loads(shipped[str(source)].read_text(encoding="utf-8")))
    path = Path(source).expanduser()
    if not path.is_file():
        raise unknown("evaluation (neither a shipped one nor a file)", str(source), shipped)
    return from_dict(read_toml(path), path.parent)


def changed(
    settings: Settings,
    fields: Mapping[str, Any],
    tasks: Sequence[str] = (),
    each: Mapping[str, Any] | None = None,
    parts: Sequence[str] = (),
) -> Settings:
    """The run with other `fields` (sizes among them stand in place of single policies' own, too), only those of its
    `tasks` (by name, the last part of it, or a file's), with what is said of `each` of them that reads it, and more
    `parts`. Raises `UnknownName` for a task that it does not have, and `BadValue` for what none of them reads."""

    def called(task: Tasks) -> set[str]:
        file = Path(task.file)
        return {task.name, task.name.rpartition("/")[2], task.file, file.name, file.stem} - {""}

    for name in tasks:
        if not any(name in called(task) for task in settings.tasks):
            raise unknown("task of this run", name, sorted(set().union(*map(called, settings.tasks))))
    chosen = [task for task in settings.tasks if not tasks or called(task).intersection(tasks)]
    for name, value in (each or {}).items():
        if not any(name in task.reads for task in chosen):
            raise BadValue(f"{name}={shown(value)}: none of the run's tasks reads it; leave it out")
    chosen = tuple(
        dataclasses.replace(task, **{name: value for name, value in (each or {}).items() if name in task.reads})
        for task in chosen
    )
    policies = fields.get("policies", settings.policies)
    if any(fields.get(size) for size in SIZES):
        policies = tuple(map(_without_sizes, policies))
    found = {**fields, "policies": policies, "tasks": chosen, "parts": (*settings.parts, *parts)}
    return dataclasses.replace(settings, **found)


def _without_sizes(entry: Any) -> Any:
    """An entry of `policies` without budgets, ratios or bytes of its own."""
    return {name: value for name, value in entry.items() if name not in SIZES} if isinstance(entry, dict) else entry


def from_dict(table: dict[str, Any], folder: Path | None = None) -> Settings:
    """The settings that the tables describe; files of policies, parts and questions may lie in the `folder`."""
    if not isinstance(table, Mapping):
        raise BadValue(f"an evaluation {shown(table)}: expected a table")
    table = {name: dict(value) if isinstance(value, dict) else value for name, value in table.items()}
    for owner in (table, table.get("retention")):
        for name in ("policies", "parts"):
            if folder is not None and isinstance(owner, dict) and isinstance(owner.get(name), list):
                owner[name] = [_beside(entry, folder) for entry in owner[name]]
    if folder is not None:
        if isinstance(table.get("tasks"), list):
            table["tasks"] = [_with_file(each, folder) for each in table["tasks"]]
        if "fidelity" in table:
            table["fidelity"] = _with_file(table["fidelity"], folder)
    parts = table.get("parts", ())
    for source in parts if isinstance(parts, list | tuple) else ():
        if isinstance(source, str):
            load_parts(source)
    if "tasks" in table:
        tasks = table["tasks"]
        if not isinstance(tasks, list | tuple) or not all(isinstance(each, Mapping) for each in tasks):
            raise BadValue(f"tasks={shown(tasks)}: expected a list of tables; write [[tasks]] above each, not [tasks]")
        table["tasks"] = tuple(_build(Tasks, each, "[[tasks]]") for each in tasks)
    for name, cls in (("fidelity", Fidelity), ("retention", Retention)):
        if isinstance(table.get(name), dict):
            table[name] = _build(cls, table[name], f"[{name}]")
        elif table.get(name) is not None:
            raise BadValue(f"{name}={shown(table[name])}: expected one table; write [{name}] above it")
    return _build(Settings, table, "an evaluation")


def to_dict(settings: Settings) -> dict[str, Any]:
    """The settings as plain tables, everything written out, as JSON can hold them; of `parts` names and digests, and no
    `parts` or `bytes` where there are none."""
    out = _plain(dataclasses.asdict(settings)) | {"parts": dict(map(digest, settings.parts))}
    for table in (out, *out["tasks"], *([out["fidelity"]] if out["fidelity"] else ())):
        for name in ("file", "data"):
            if table.get(name) and os.path.exists(table[name]):  # the same wherever the run is gone on with
                table[name] = os.path.abspath(table[name])
    return {name: value for name, value in out.items() if value or name not in ("parts", "bytes")}


def _read(entry: Any) -> Any:
    """An entry of `policies`, with what a file, a `Policy` or a policy's own tables say as its `table`."""
    if isinstance(entry, Policy):
        return {"name": entry.name, "table": table_of(entry)}
    if not isinstance(entry, str | os.PathLike | dict):
        raise BadValue(f"policies has {shown(entry)}: expected names, files, or tables of a name and options")
    options = dict(entry) if isinstance(entry, dict) else {"name": entry}
    if not isinstance(options.get("name"), str | os.PathLike) or not isinstance(options.get("label", ""), str):
        raise BadValue(f"policies has {shown(entry)}: expected a table with a name, such as {{ name = 'snapkv' }}")
    if "table" in options and not isinstance(options["table"], dict):
        raise BadValue(f"policies has table={shown(options['table'])}: expected the tables of a policy")
    if isinstance(options.get("prefill"), dict) and options["name"] not in catalogue():  # a whole policy
        whole = {name: options.pop(name) for name in list(options) if name in OF_A_POLICY}
        return {**options, "name": whole["name"], "table": table_of(made_of(whole))}
    for name in ("budget", "ratio", "chosen"):
        if name in options:
            raise BadValue(
                f"policies has {name}={shown(options[name])}: sizes stand in budgets = [...], ratios = [...] or "
                "bytes = [...]"
            )
    for name in SIZES:
        if not isinstance(options.get(name, ()), list | tuple):
            raise BadValue(f"policies has {name}={shown(options[name])}: expected a list of sizes")
    if not is_file(options["name"]):
        return entry
    chosen = named(options["name"])
    return {**options, "name": chosen.name, "table": table_of(chosen)}


def _beside(entry: Any, folder: Path) -> Any:
    """An entry of `policies` or `parts`, with the path of the file in the folder where it is one."""
    if isinstance(entry, dict) and "name" in entry:
        return {**entry, "name": _beside(entry["name"], folder)}
    if isinstance(entry, str) and entry.endswith((".toml", ".py")) and (folder / entry).is_file():
        return str(folder / entry)
    return entry


def _with_file(table: Any, folder: Path) -> Any:
    """A table, with the path of its `file` in the folder where it lies there."""
    file = table.get("file") if isinstance(table, dict) else None
    return (
        {**table, "file": str(folder / file)} if isinstance(file, str) and file and (folder / file).is_file() else table
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _build(cls: Any, table: dict[str, Any], where: str) -> Any:
    known = {field.name for field in dataclasses.fields(cls)}
    for name in map(str, table):
        if name not in known:
            raise unknown(f"field of {where}", name, known)
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in table.items()})
