"""The catalogue: every named method is a TOML file in configs/policies/; others are read from files of one's own."""

import dataclasses
import functools
import os
import tomllib
from pathlib import Path
from typing import Any

from jaxkv.checks import shown
from jaxkv.configs import config_files
from jaxkv.errors import BadValue, JaxkvError, first_line, unknown
from jaxkv.policies.policy import Phase, Policy, from_dict, made

SIZES = ("budget", "ratio", "bytes")
OF_THE_METHOD = ("name", "title", "paper", "fidelity", "differs", *SIZES)  # fields that are no options
PHASES = ("prefill", "decode")
PARTS_OF_A_POLICY = ("allocate", "flow", "read", "store")
PARTS_OF_A_PHASE = ("observe", "score", "aggregate", "select", "evicted")


@functools.cache
def catalogue() -> dict[str, Policy]:
    """Every registered policy by name, without a budget."""
    found = {}
    for name, file in sorted(config_files("policies").items()):
        found[name] = from_dict({"name": name, **tomllib.loads(file.read_text(encoding="utf-8"))})
    return found


def is_file(name: Any) -> bool:
    """Whether a policy's name is a file's: a path, or text that ends in ".toml"."""
    return isinstance(name, os.PathLike) or (isinstance(name, str) and name.endswith(".toml"))


def named(name: str | os.PathLike) -> Policy:
    """The policy of this name or TOML file, as it stands there.

    Raises `UnknownName` for a name, field or kind that there is not, and `BadValue` for a file that is none. Source:
    ours.
    """
    if not isinstance(name, str | os.PathLike):
        raise BadValue(f"policy {shown(name)}: expected a name that jaxkv policies lists, or a TOML file")
    if not is_file(name):
        if name not in catalogue():
            raise unknown("policy", str(name), catalogue())
        return catalogue()[str(name)]
    path = Path(name).expanduser()
    if not path.is_file():
        raise BadValue(
            f"policy {str(name)!r}: no such file; expected a TOML file with a [prefill] table, or a name that jaxkv "
            "policies lists"
        )
    try:
        return from_dict({"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8-sig"))})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadValue(f"{path}: not TOML ({first_line(error)}); see docs/policies.md for what stands in it") from None
    except JaxkvError as error:
        raise type(error)(f"{path}: {error}") from error


def policy(
    name: str | os.PathLike,
    *,
    budget: int | None = None,
    ratio: float | None = None,
    bytes: int | None = None,
    **options: Any,
) -> Policy:
    """The named method under a budget (tokens per KV head and layer), a ratio (fraction removed), or bytes: what the
    keys and values of one row may take in all layers and heads together, with what the method holds beside them.

    A path, or a name that ends in ".toml", is read from that file; its own `budget`, `ratio` or `bytes` counts where
    none is given here. Options are fields of its parts (`window=32`, `sinks=4`, `content="random"`), set wherever the
    policy has such a field; `prefill_` or `decode_` in front sets it in that phase alone. `observe`, `score`,
    `aggregate`, `select`, `evicted`, `allocate`, `read`, `flow` and `store` are whole parts or their tables:
    `score=Attention()`, `allocate={"kind": "cake"}`, `store={"keys": {"kind": "int", "bits": 8}}`. `prefill` and
    `decode` are whole phases, or the name of a policy whose phase it is: `decode="h2o"` bounds what only adds while
    decoding. Raises `UnknownName` with the nearest names, and `BadValue` for none or several of the sizes, a budget
    below sinks + recent + 1, and a file that is not there or not TOML.
    """
    return sized(named(name), budget=budget, ratio=ratio, bytes=bytes, **options)


def sized(
    chosen: Policy,
    /,
    *,
    budget: int | None = None,
    ratio: float | None = None,
    bytes: int | None = None,
    **options: Any,
) -> Policy:
    """The policy under a budget, a ratio or bytes (its own, where none is given), with options, as in `policy`."""
    if budget is None and ratio is None and bytes is None:
        budget, ratio, bytes = chosen.budget, chosen.ratio, chosen.bytes
    name, chosen = chosen.name, _with_options(chosen, options)
    sizes = {"budget": budget, "ratio": ratio, "bytes": bytes}
    given = [f"{key}={value}" for key, value in sizes.items() if value is not None]
    if chosen.evicts and len(given) != 1:
        raise BadValue(
            f"policy {name!r} got {' and '.join(given) or 'neither budget nor ratio'}: expected exactly one of "
            "budget= (tokens per KV head), ratio= (fraction removed) and bytes= (of keys and values, per row)"
        )
    if not chosen.evicts and given:
        raise BadValue(f"policy {name!r} keeps everything, so it takes no {given[0]}: leave it out")
    return dataclasses.replace(chosen, **sizes)


def _with_options(policy: Policy, options: dict[str, Any]) -> Policy:
    """The policy with whole parts and then fields of parts set, and checked after that: some only fit together."""
    if options:  # how faithful a method is, is said of its file as it stands
        policy = dataclasses.replace(policy, fidelity="", differs="", budget=None, ratio=None, bytes=None)
    new = {option: options[option] for option in ("rope", "block", "grows") if option in options}
    new |= {part: made(part, options[part]) for part in PARTS_OF_A_POLICY if part in options}
    new |= {which: _phase(which, options[which]) for which in PHASES if which in options}
    parts = {f"{which}_{part}": (which, part) for which in PHASES for part in PARTS_OF_A_PHASE}
    for which in PHASES:
        phase = new.get(which, getattr(policy, which))
        own = {part: option for option, (of, part) in parts.items() if of == which and option in options}
        if own and phase is None:
            raise BadValue(f"{min(own.values())}= of policy {policy.name!r}, which has no {which} phase: add {which}=")
        given = {part: part for part in PARTS_OF_A_PHASE if part in options} | own
        if phase is not None and given:
            new[which] = _unchecked(phase, {part: made(part, options[at]) for part, at in given.items()})
    policy = _unchecked(policy, new)
    alone = [part for part in PARTS_OF_A_PHASE if part in options]
    if alone and policy.prefill is None and policy.decode is None:
        raise BadValue(f"{alone[0]}= of policy {policy.name!r}, which has no phase: add prefill= or decode=")
    for option, value in options.items():
        if option not in (*new, *parts, *PARTS_OF_A_PHASE):
            policy = _with(policy, option, value)
    return _checked(policy)


def _unchecked(part: Any, changes: dict[str, Any]) -> Any:
    """The part with other fields, whatever they are."""
    out = object.__new__(type(part))
    for field in dataclasses.fields(part):
        object.__setattr__(out, field.name, changes.get(field.name, getattr(part, field.name)))
    return out


def _is_part(value: Any) -> bool:
    """Whether it is a part, and no class of parts."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _checked(part: Any) -> Any:
    """The part made anew, and what is inside it before it. Raises what its checks raise."""
    inside = {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
    again = {name: _checked(inner) for name, inner in inside.items() if _is_part(inner)}
    return dataclasses.replace(part, **again)


def _phase(which: str, value: Any) -> Any:
    """A phase given itself, as its tables, or by the name of a policy that has it."""
    if value is None or isinstance(value, Phase | dict):
        return made(which, value)
    if not isinstance(value, str | os.PathLike):
        raise BadValue(
            f"{which}={shown(value)}: expected the name of a policy that has this phase, such as 'h2o', a Phase, its "
            "table, or None"
        )
    found = getattr(named(value), which)
    if found is None:
        raise BadValue(f"{which}={str(value)!r}: that policy has no {which} phase; expected one that has")
    return found


def _with(policy: Policy, option: str, value: Any) -> Policy:
    """The policy with one option set, in every part that has a field of that name."""
    phase, _, field = option.partition("_")
    if phase not in PHASES or not field:
        phase, field = None, option
    elif getattr(policy, phase) is None:
        raise BadValue(f"{option}= of policy {policy.name!r}, which has no {phase} phase: add {phase}=")
    changed, known = _set(policy, field, value, phase)
    if changed == policy and field not in known:
        raise unknown(f"option of policy {policy.name!r}", field, known)
    return changed


def _set(part: Any, field: str, value: Any, phase: str | None) -> tuple[Any, set[str]]:
    """`part` and what is inside it with `field` set wherever it occurs (in one phase when named), and all names."""
    changes, known = {}, set()
    for each in dataclasses.fields(part):
        inner = getattr(part, each.name)
        if _is_part(inner):
            if phase is not None and each.name in ("prefill", "decode", *PARTS_OF_A_POLICY) and each.name != phase:
                continue
            changed, below = _set(inner, field, value, None)
            known |= below
            if changed != inner:
                changes[each.name] = changed
        elif isinstance(part, Policy) and (phase is not None or each.name in OF_THE_METHOD):
            continue
        else:
            known.add(each.name)
            if each.name == field:
                changes[each.name] = value
    return _unchecked(part, changes), known
