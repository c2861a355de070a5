"""Every part by its kind, as TOML names it: those that come with jaxkv, and those that others register."""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from jaxkv.errors import BadValue, JaxkvError, unknown
from jaxkv.policies import across, allocate, evicted, flow, frequency, layers, merging, observe, read, scores
from jaxkv.policies.across import Across
from jaxkv.policies.allocator import Allocate
from jaxkv.policies.evicted import Evicted
from jaxkv.policies.flow import Flow
from jaxkv.policies.layers import Uniform
from jaxkv.policies.needs import CALIBRATED, MASS, OUTPUT, QUERIES
from jaxkv.policies.observe import Observer
from jaxkv.policies.read import Read
from jaxkv.policies.score import Score
from jaxkv.store import codecs
from jaxkv.store.codec import Codec, Fitting
from jaxkv.store.described import register_state

TRAITS = ("kind", "stats", "needs", "remembers", "linear", "signed", "aware", "together", "parts", "store", "state")
TRAITS += ("keyless", "grows", "moves", "weighs", "attended", "plain", "straight", "replays", "drafts", "looks")
TRAITS += ("placed", "single", "ranks", "fits", "learns", "pooled")


@dataclasses.dataclass(frozen=True)
class Kinds:
    """What may stand in a field of a policy: parts by their kind.

    `bases` are the classes that a part of one's own may extend, each with the methods that it has to define; "a|b"
    stands for one of two.
    """

    parts: dict[str, type]
    bases: dict[type, tuple[str, ...]]


_SCORES = Kinds(dict(scores.KINDS), {Score: ("factors|score",)})
_CODECS = Kinds(dict(codecs.KINDS), {Fitting: ("fit", "unfit", "fitted"), Codec: ("encode", "decode")})
PARTS = {  # field -> what may stand in it; a new sort of part is one more line
    "observe": Kinds(dict(observe.KINDS), {Observer: ()}),
    "allocate": Kinds(allocate.KINDS | across.KINDS, {Across: ("profile", "quotas"), Allocate: ("budgets|choose",)}),
    "layers": Kinds(dict(layers.KINDS), {Uniform: ("budgets",)}),
    "evicted": Kinds(evicted.KINDS | merging.KINDS | frequency.KINDS, {Evicted: ("absorb",)}),
    "flow": Kinds(dict(flow.KINDS), {Flow: ("route|going",)}),
    "read": Kinds(dict(read.KINDS), {Read: ("step",)}),
    "keys": _CODECS,
    "values": _CODECS,
} | dict.fromkeys(("score", "of", "first", "second"), _SCORES)


def register[Part: type](part: Part) -> Part:
    """Makes the `kind` of a part known to TOML, options, saved caches and the command line, and gives the part back.

    A part is a frozen dataclass that extends `Score`, `Observer`, `Allocate`, `Evicted`, `Codec`, `Read` or `Flow`:
    write `@register` above `@dataclasses.dataclass(frozen=True)`. The same class may come again, and so may its new
    definition in a notebook. Raises `BadValue` for another class, a kind that is taken, and a method that is missing.
    Source: ours.
    """
    where = f"part {part.__name__}"
    mine = [kinds for kinds in {id(kinds): kinds for kinds in PARTS.values()}.values() if _base(part, kinds)]
    if not mine:
        known = dict.fromkeys(base.__name__ for kinds in PARTS.values() for base in kinds.bases)
        raise BadValue(f"{where}: expected a class that extends one of {', '.join(known)} of jaxkv.policies")
    made = part.__dict__.get("__dataclass_params__")
    if made is None or not (made.frozen and made.eq):
        raise BadValue(
            f"{where}: expected a frozen dataclass that compares by its fields: write @register above "
            "@dataclasses.dataclass(frozen=True)"
        )
    fields = {field.name: field for field in dataclasses.fields(part)}
    if traits := sorted(fields.keys() & set(TRAITS)):
        raise BadValue(f"{where} has {', '.join(traits)} as fields: expected class attributes; annotate with ClassVar")
    kind = getattr(part, "kind", None)
    if not isinstance(kind, str) or not kind:
        raise BadValue(f'{where} has kind={kind!r}: expected a name for TOML, such as kind: ClassVar[str] = "mine"')
    for name in sorted(fields.keys() & PARTS.keys()):
        if isinstance(fields[name].default, int | float | str | tuple) or fields[name].type in (int, float, str, bool):
            raise BadValue(
                f"{where} has a field {name!r}, where a policy has another part: give the field another name"
            )
    for kinds in mine:
        there, base = kinds.parts.get(kind, part), _base(part, kinds)
        assert base is not None
        if (there.__module__, there.__qualname__) != (part.__module__, part.__qualname__):
            raise BadValue(
                f"{where} has kind={kind!r}, which {there.__module__}.{there.__qualname__} has already: expected a "
                "kind of its own"
            )
        for names in kinds.bases[base]:
            if all(getattr(part, name, None) is getattr(base, name, None) for name in names.split("|")):
                raise BadValue(f"{where}: expected a method {' or '.join(names.split('|'))}, as {base.__name__} has it")
        _check_methods(part, base, where)
    _check_needs(part, where)
    if issubclass(part, Score):
        _check_score(part, where)
    if issubclass(part, Observer):
        _check_observer(part, where)
    if issubclass(part, Evicted) and part.state and part.begin is Evicted.begin:
        raise BadValue(f"{where} keeps the state {part.state!r}: expected begin, which makes it, or no state")
    for kinds in mine:
        kinds.parts[kind] = part
    if issubclass(part, Codec):
        register_state(part)  # a saved store names its codecs
    return part


def _base(part: type, kinds: Kinds) -> type | None:
    """The base that the part extends, if it does."""
    return next((base for base in kinds.bases if issubclass(part, base) and part is not base), None)


def _check_methods(part: type, base: type, where: str) -> None:
    """Each method of the base that the part has anew can be called as the base's."""
    for name, asked in inspect.getmembers(base, inspect.isfunction):
        own, expected = getattr(part, name), inspect.signature(asked).parameters.values()
        if own is asked or not inspect.isfunction(own):
            continue
        places = [each.name for each in expected if each.kind is each.POSITIONAL_OR_KEYWORD]
        names = {each.name: None for each in expected if each.kind is each.KEYWORD_ONLY}
        try:
            inspect.signature(own).bind(*places, **names)
        except TypeError as error:
            raise BadValue(
                f"{where}: {name}{inspect.signature(own)} cannot be called as {base.__name__}'s is ({error}): expected "
                f"the arguments {', '.join((*places, *names))}"
            ) from None


def _check_needs(part: type, where: str) -> None:
    needs = getattr(part, "needs", frozenset())
    if isinstance(needs, property):  # of its fields' values
        return
    if not isinstance(needs, frozenset):
        raise BadValue(f"{where} has needs={needs!r}: expected a frozenset, such as frozenset({{MASS}})")
    for need in sorted(needs - {MASS, QUERIES, OUTPUT}):
        if not need.startswith(CALIBRATED):
            raise unknown(f"need of {where}", need, (MASS, QUERIES, OUTPUT, CALIBRATED + "NAME"))


def _check_score(part: type[Score], where: str) -> None:
    if part.linear and part.factors is Score.factors:
        raise BadValue(
            f"{where} defines score and is linear: expected factors, the weight and bias of score = weight * mass + "
            "bias, or linear: ClassVar[bool] = False"
        )
    if not isinstance(part.stats, tuple) or not all(isinstance(name, str) for name in part.stats):
        raise BadValue(f'{where} has stats={part.stats!r}: expected a tuple of names, such as ("seen",)')
    if part.stats and part.enter is Score.enter:
        raise BadValue(f"{where} keeps the statistics {', '.join(part.stats)}: expected enter, which begins them")


def _check_observer(part: type[Observer], where: str) -> None:
    if part.behind is Observer.behind and not part.drafts and not (isinstance(part.extra, int) and part.extra == 0):
        raise BadValue(f"{where} has tokens behind the prompt (extra): expected a method behind, which gives them")


def load_parts(source: str | os.PathLike) -> ModuleType:
    """The module of a .py file, or of a name that can be imported, which registers parts; it runs once per process.

    Raises `BadValue` where there is no such file or module, and for an error in it. Source: ours.
    """
    try:
        if isinstance(source, os.PathLike) or source.endswith(".py"):
            return _run(Path(source).expanduser().resolve())
        return importlib.import_module(source)
    except JaxkvError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{source}.".startswith(f"{error.name}."):
            raise BadValue(
                f"parts {str(source)!r}: expected a .py file, or a module that is installed (on the command line a "
                "name that is none of these stands in front of --parts)"
            ) from None
        raise BadValue(_told(source, error)) from error
    except Exception as error:
        raise BadValue(_told(source, error)) from error


def _run(path: Path) -> ModuleType:
    """The module of this file: the one that stands in `sys.modules`, whoever imported it, else a new one."""
    for module in list(sys.modules.values()):
        there = getattr(module, "__file__", None)
        if there and os.path.basename(there) == path.name and Path(there).resolve() == path:
            return module
    if not path.is_file():
        raise BadValue(f"parts {str(path)!r}: no such file; expected a .py file that calls jaxkv.policies.register")
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"jaxkv_parts_{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _told(source: str | os.PathLike, error: Exception) -> str:
    """What went wrong in a parts file, and where in it."""
    own = [step for step in traceback.extract_tb(error.__traceback__) if step.filename.endswith(Path(source).name)]
    line = f", line {own[-1].lineno}" if own else ""
    return f"parts {str(source)!r}{line}: {type(error).__name__}: {error}; correct the file"


def digest(source: str | os.PathLike) -> tuple[str, str]:
    """Name and digest (16 hexadecimal digits) of loaded parts: what a run of them writes down."""
    file = getattr(load_parts(source), "__file__", None)
    name = Path(source).name if str(source).endswith(".py") else str(source)
    return name, hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()[:16]
