"""What benchmarks take on the command line: checked before anything is loaded, or hours of measuring would be lost.

Also imported by Pythons without JAX: nothing but the standard library here, until a policy is looked up.
"""

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FEW = 6  # names that an error lists


def at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number that is no smaller."""

    def number(text: str) -> int:
        found = _number(int, text)
        if found is None or found < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least {least}")
        return found

    return number


positive = at_least(1)


def above_zero(text: str) -> float:
    """The type of a number above 0."""
    found = _number(float, text)
    if found is None or not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return found


def share(text: str) -> float:
    """The type of a part of something: above 0, and at most 1."""
    found = _number(float, text)
    if found is None or not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share, above 0 and at most 1")
    return found


def place(text: str) -> float:
    """The type of a place in a text: from 0, its beginning, to 1, its end."""
    found = _number(float, text)
    if found is None or not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a place in the text, from 0 to 1")
    return found


def rows_and_slots(text: str) -> tuple[int, int]:
    """The type of "8x4096"."""
    found = [_number(int, each) or 0 for each in text.split("x")]
    if len(found) != 2 or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected rows and slots, such as 8x4096")
    return found[0], found[1]


def policy_name(text: str) -> str:
    """The type of a policy: a name of the catalogue, or a TOML file."""
    from jaxkv.errors import JaxkvError
    from jaxkv.policies.catalogue import named

    try:
        named(text)
    except JaxkvError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def result_name(text: str) -> str:
    """The type of a name in benchmarks/results."""
    if not text or Path(text).name != text:
        raise argparse.ArgumentTypeError(f"{text!r}: expected the name of a file in benchmarks/results, no folder")
    return text


def python(text: str) -> str:
    """The type of another Python."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: no such program; expected a Python, such as ~/oracle/bin/python")
    return text


def policies_at(parser: argparse.ArgumentParser, names: Sequence[str], budget: int, **options: Any) -> dict[str, Any]:
    """The policies by name, each under the budget if it evicts at all. Ends the program where one can't be so."""
    from jaxkv.errors import JaxkvError
    from jaxkv.policies.catalogue import named, sized

    found = {}
    for name in names:
        policy = named(name)
        try:
            found[name] = sized(policy, budget=budget if policy.evicts else None, **options)
        except JaxkvError as error:
            parser.error(str(error))
    return found


def cases_of(parser: argparse.ArgumentParser, cases: Sequence[Any], only: Sequence[str]) -> list[Any]:
    """The cases whose name holds one of these. Ends the program where one is in no name: it would check nothing."""
    names = [case.name for case in cases]
    for part in only:
        if not any(part in name for name in names):
            few = ", ".join(names[:FEW]) + ", ..." * (len(names) > FEW)
            parser.error(f"--only {part!r}: no case has that in its name; expected a part of one, such as of {few}")
    return [case for case, name in zip(cases, names, strict=True) if any(part in name for part in only)]


def _number(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return None
