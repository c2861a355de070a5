"""What an evaluation runs, as a TOML says it: model, policies, budgets, tasks, fidelity, retention."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from jaxkv.configs import config_files
from jaxkv.errors import BadValue, unknown
from jaxkv.evaluation.tasks import TASKS
from jaxkv.policies.catalogue import catalogue, policy
from jaxkv.policies.policy import Policy

MODES = ("aware", "agnostic")


@dataclasses.dataclass(frozen=True)
class Tasks:
    """One [[tasks]] table: a task's name, or a JSONL `file`, with what `tasks.generate` or `datasets.read` takes."""

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

    def __post_init__(self):
        if bool(self.name) == bool(self.file):
            raise BadValue(f"a [[tasks]] table with name={self.name!r} and file={self.file!r}: expected one of the two")
        if self.name and self.name not in TASKS:
            raise unknown("task", self.name, TASKS)


@dataclasses.dataclass(frozen=True)
class Fidelity:
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
class Retention:
    """The [retention] table: one text of `prompt` tokens and `steps` decode steps, looked at every `every` steps."""

    policies: tuple[str, ...] = ()
    budget: int = 128
    prompt: int = 256
    steps: int = 64
    every: int = 16


@dataclasses.dataclass(frozen=True)
class Cell:
    """One policy at one budget: a column of the results."""

    label: str
    policy: Policy | None  # None: the budget cannot hold what the policy protects
    budget: int | None
    ratio: int | float | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Settings:
    """A whole run. `policies` are names, or tables of a name and options; "all" is the whole catalogue.
    `modes`: "aware" runs context and question as one prompt; "agnostic" compresses the context first and runs the
    question on that cache, under the policy too or, with `after="full"`, with nothing evicted any more (as kvpress
    measures).
    """

    name: str = "evaluation"
    model: str = "smollm2-135m"
    dtype: str | None = None
    policies: tuple[Any, ...] = ("full", "snapkv")
    budgets: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    modes: tuple[str, ...] = ("aware",)
    after: str = "policy"
    batch: int = 8
    seed: int = 0
    tasks: tuple[Tasks, ...] = ()
    fidelity: Fidelity | None = None
    retention: Retention | None = None

    def __post_init__(self):
        for mode in self.modes:
            if mode not in MODES:
                raise unknown("mode", mode, MODES)
        if self.after not in ("policy", "full"):
            raise BadValue(f"after={self.after!r}: expected 'policy' or 'full'")
        if self.batch < 1:
            raise BadValue(f"batch={self.batch}: expected at least 1")
        self.cells()

    def cells(self) -> list[Cell]:
        """Every policy at every budget and ratio; policies that evict nothing once, in front of the others."""
        out = []
        entries = [each for entry in self.policies for each in (catalogue() if entry == "all" else [entry])]
        for entry in entries:
            options: dict[str, Any] = {"name": entry} if isinstance(entry, str) else dict(entry)
            name, label = options.pop("name", ""), options.pop("label", "")
            if name not in catalogue():
                raise unknown("policy", name, catalogue())
            label = label or " ".join([name, *(f"{key}={value}" for key, value in options.items())])
            if not catalogue()[name].evicts:
                out.append(Cell(label, policy(name, **options), None, None))
                continue
            if not self.budgets and not self.ratios:
                raise BadValue(
                    f"policy {name!r} needs budgets or ratios, and the run has neither: give budgets = [...]"
                )
            sizes: list[tuple[int | None, int | float | None]] = [(budget, None) for budget in self.budgets]
            for budget, ratio in sizes + [(None, ratio) for ratio in self.ratios]:
                try:
                    out.append(Cell(label, policy(name, budget=budget, ratio=ratio, **options), budget, ratio))
                except BadValue as error:
                    if budget is None or budget >= policy(name, ratio=0.5, **options).floor:
                        raise
                    out.append(Cell(label, None, budget, ratio, str(error)))
        labels = [(cell.label, cell.budget, cell.ratio) for cell in out]
        for label in labels:
            if labels.count(label) > 1:
                raise BadValue(f"two policies named {label[0]!r}: give one of them another label=")
        return sorted(out, key=lambda cell: cell.policy is None or cell.policy.evicts)


def load(source: str | Path) -> Settings:
    """The settings of a TOML file, or of a named one of configs/evals. Raises `UnknownName` for unknown fields."""
    shipped = config_files("evals")
    if str(source) in shipped:
        return from_dict(tomllib.loads(shipped[str(source)].read_text(encoding="utf-8")))
    path = Path(source).expanduser()
    if not path.is_file():
        raise unknown("evaluation (neither a shipped one nor a file)", str(source), shipped)
    try:
        return from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise BadValue(f"{path}: not TOML ({error})") from None


def from_dict(table: dict[str, Any]) -> Settings:
    """The settings that the tables describe."""
    table = dict(table)
    if "tasks" in table:
        table["tasks"] = tuple(_build(Tasks, each, "[[tasks]]") for each in table["tasks"])
    for name, cls in (("fidelity", Fidelity), ("retention", Retention)):
        if isinstance(table.get(name), dict):
            table[name] = _build(cls, table[name], f"[{name}]")
    return _build(Settings, table, "an evaluation")


def to_dict(settings: Settings) -> dict[str, Any]:
    """The settings as plain tables, everything written out, as JSON can hold them."""
    return _plain(dataclasses.asdict(settings))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _build(cls: Any, table: dict[str, Any], where: str) -> Any:
    known = {field.name for field in dataclasses.fields(cls)}
    for name in table:
        if name not in known:
            raise unknown(f"field of {where}", name, known)
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in table.items()})
