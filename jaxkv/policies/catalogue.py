"""The catalogue: every named method is a TOML file in configs/policies/; others are read from files of one's own."""

import dataclasses
import functools
import os
import tomllib
from pathlib import Path
from typing import Any

from jaxkv.configs import config_files
from jaxkv.errors import BadValue, JaxkvError, unknown
from jaxkv.policies.policy import Policy, from_dict, made

OF_THE_METHOD = ("name", "title", "paper", "fidelity", "differs", "budget", "ratio")  # fields that are no options
PARTS_OF_A_POLICY = ("allocate", "flow", "read", "store")


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
        return from_dict({"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadValue(f"{path}: not TOML ({error}); see docs/policies.md for what stands in it") from None
    except JaxkvError as error:
        raise type(error)(f"{path}: {error}") from error


def policy(name: str | os.PathLike, *, budget: int | None = None, ratio: float | None = None, **options: Any) -> Policy:
    """The named method under a budget (tokens per KV head and layer) or a ratio (fraction removed).

    A path, or a name that ends in ".toml", is read from that file; its own `budget` or `ratio` counts where none is
    given here. Options are fields of its parts (`window=32`, `sinks=4`, `content="random"`), set wherever the policy
    has such a field; `prefill_` or `decode_` in front sets it in that phase alone. `allocate`, `evicted`, `read`,
    `flow` and `store` are whole parts or their tables: `allocate=Global()`, `allocate={"kind": "cake"}`,
    `store={"keys": {"kind": "int", "bits": 8}}`. Raises `UnknownName` with the nearest names, and `BadValue` for both
    or neither of budget and ratio, a budget below sinks + recent + 1, and a file that is not there or not TOML.
    """
    return sized(named(name), budget=budget, ratio=ratio, **options)


def sized(chosen: Policy, *, budget: int | None = None, ratio: float | None = None, **options: Any) -> Policy:
    """The policy under a budget or a ratio (its own, where neither is given), with options, as in `policy`."""
    name = chosen.name
    if budget is None and ratio is None:
        budget, ratio = chosen.budget, chosen.ratio
    given = [f"{key}={value}" for key, value in (("budget", budget), ("ratio", ratio)) if value is not None]
    if chosen.evicts and len(given) != 1:
        raise BadValue(
            f"policy {name!r} got {' and '.join(given) or 'neither budget nor ratio'}: expected exactly one of "
            "budget= (tokens per KV head) and ratio= (fraction removed)"
        )
    if not chosen.evicts and given:
        raise BadValue(f"policy {name!r} keeps everything, so it takes no {given[0]}: leave it out")
    whole = {name: options.pop(name) for name in ("rope", "block") if name in options}
    whole |= {name: made(name, options.pop(name)) for name in PARTS_OF_A_POLICY if name in options}
    chosen = dataclasses.replace(chosen, **whole)
    for name in ("evicted", "prefill_evicted", "decode_evicted"):
        if name in options:
            rule = made("evicted", options.pop(name))
            phases = [each for each in ("prefill", "decode") if name in ("evicted", f"{each}_evicted")]
            there = {each: getattr(chosen, each) for each in phases if getattr(chosen, each) is not None}
            new = {each: dataclasses.replace(phase, evicted=rule) for each, phase in there.items()}
            chosen = dataclasses.replace(chosen, **new)
    for option, value in options.items():
        chosen = _with(chosen, option, value)
    return dataclasses.replace(chosen, budget=budget, ratio=ratio)


def _with(policy: Policy, option: str, value: Any) -> Policy:
    """The policy with one option set, in every part that has a field of that name."""
    phase, _, field = option.partition("_")
    if phase not in ("prefill", "decode") or not field:
        phase, field = None, option
    changed, known = _set(policy, field, value, phase)
    if changed == policy and field not in known:
        raise unknown(f"option of policy {policy.name!r}", field, known)
    return changed


def _set(part: Any, field: str, value: Any, phase: str | None) -> tuple[Any, set[str]]:
    """`part` and what is inside it with `field` set wherever it occurs (in one phase when named), and all names."""
    changes, known = {}, set()
    for each in dataclasses.fields(part):
        inner = getattr(part, each.name)
        if dataclasses.is_dataclass(inner):
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
    return dataclasses.replace(part, **changes), known
