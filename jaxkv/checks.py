"""The one place where values are checked: fields by their declared type, arguments by one table of types and ranges."""

import contextlib
import dataclasses
import functools
import math
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.errors import BadValue, JaxkvError, first_line

MOST = 2**31 - 1  # the largest whole number that programs hold; seeds are larger
LARGEST = float(np.finfo(np.float32).max)
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "None",
    Mapping: "a table",
}


def fits(value: Any, hint: Any) -> bool:
    """Whether the value is of the declared type: truth values are no numbers, NaN is none, text can be written."""
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    if hint is int:
        return isinstance(value, int | np.integer) and not isinstance(value, bool)
    if hint is float:
        kinds = float | int | np.floating | np.integer
        return isinstance(value, kinds) and not isinstance(value, bool) and _is_number(value)
    if hint is str:
        return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        each = [inner[0]] * len(value) if len(inner) == 2 and inner[1] is ... else list(inner)
        return len(each) == len(value) and all(map(fits, value, each))
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) else True


def words(hint: Any) -> str:
    """The declared type in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        told = [words(each) for each in inner if not (each is float and int in inner)]
        return " or ".join(dict.fromkeys(told))
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        return "a list" if inner[0] is Any else f"a list, each {words(inner[0])}"
    return WORDS.get(hint, getattr(origin or hint, "__name__", str(hint)))


def shown(value: Any) -> str:
    """The value as an error names it, at most 80 characters; of what is large, or no plain value, its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    plain = value is None or isinstance(value, bool | int | float | str | bytes | list | tuple | dict | set | PathLike)
    text = f"an object of type {type(value).__name__}"
    if plain:
        with contextlib.suppress(ValueError, RecursionError):  # a number of too many digits; what contains itself
            text = ascii(value) if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."


@functools.cache
def hints(cls: type) -> Mapping[str, Any]:
    """The declared types of a class' fields; of those that cannot be resolved, Any."""
    try:
        found = typing.get_type_hints(cls)
    except Exception:  # a part of one's own that names types which its module does not have
        found = {}
    return {field.name: found.get(field.name, Any) for field in dataclasses.fields(cls)}


def foreign(part: Any) -> bool:
    """Whether a part is not jaxkv's own."""
    return not type(part).__module__.startswith("jaxkv.")


def plain_field(part: Any, name: str, hint: Any = Any) -> Any:
    """The value of a frozen dataclass' field; a number of NumPy becomes Python's there, to be written down, and a list
    a tuple where the declared type is one."""
    value = plain = getattr(part, name)
    if isinstance(value, np.generic):
        plain = value.item()
    elif isinstance(value, list) and typing.get_origin(hint) is tuple:
        plain = tuple(value)
    if plain is not value:
        object.__setattr__(part, name, plain)
    return plain


def check_fields(part: Any) -> None:
    """Raises `BadValue` for a field whose value is not of its declared type, a whole number beyond 31 bits (a seed or
    bytes: 63), in jaxkv's own classes for infinity, and in others for what can't be hashed. Numbers of NumPy become
    Python's, so that they can be written down, and lists tuples.
    """
    own = not foreign(part)
    for name, hint in hints(type(part)).items():
        value = plain_field(part, name, hint)
        where = _called(part)
        if not fits(value, hint):
            raise BadValue(f"{name}={shown(value)} of {where}: expected {words(hint)}")
        if not own and not _hashes(value):
            raise BadValue(
                f"{name}={shown(value)} of {where}: expected what can be hashed, for programs are kept by it: a tuple "
                "in place of a list or an array, and a frozen dataclass in place of a table"
            )
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and own and math.isinf(number):
                raise BadValue(f"{name}={number} of {where}: expected a finite number")
            most = 2**63 - 1 if name in ("seed", "bytes") else MOST
            if isinstance(number, int) and not -most <= number <= most:
                raise BadValue(f"{name}={shown(number)} of {where}: expected a number of at most {most}")


def _called(part: Any) -> str:
    return getattr(part, "kind", None) or type(part).__name__.lower()


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class Checked:
    """A frozen dataclass whose fields are checked by their declared types before its own `__post_init__` runs. A
    ValueError of that is a `BadValue`, which names the part; of a part of one's own so is any other error."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        own = cls.__dict__.get("__post_init__")
        if own is not None:

            @functools.wraps(own)
            def checked(self: Any) -> None:
                check_fields(self)
                try:
                    own(self)
                except JaxkvError:
                    raise
                except Exception as error:
                    if not isinstance(error, ValueError) and not foreign(self):
                        raise
                    raise BadValue(f"{_called(self)}: {_told(error)}") from error

            cls.__post_init__ = checked  # pyright: ignore[reportAttributeAccessIssue]

    def __post_init__(self) -> None:
        check_fields(self)


def _told(error: Exception) -> str:
    """What a `__post_init__` has said; where it was not written for whoever chose the value, the error and its line."""
    if isinstance(error, ValueError | AssertionError) and str(error):
        return str(error) if isinstance(error, ValueError) else first_line(error)
    steps = traceback.extract_tb(error.__traceback__)[1:]  # the first is in this file
    own = [step for step in steps if step.filename == steps[0].filename]
    line = f" (line {own[-1].lineno} of {Path(own[-1].filename).name})" if own else ""
    said = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
    return f"{said}{line}; expected values that it takes: give others, or correct the part"


def _is_number(value: Any) -> bool:
    try:
        return not math.isnan(value)
    except OverflowError:  # a whole number that no float holds
        return False


def finite(value: Any) -> bool:
    """Whether float32 holds the number."""
    return abs(value) <= LARGEST


def _any(value: Any) -> bool:
    return True


Rule = tuple[Any, Callable[[Any], bool], str]  # type, range, and both in words
COUNT: Rule = (int, lambda x: 1 <= x <= MOST, f"a whole number from 1 to {MOST}")
SWITCH: Rule = (bool, _any, "True or False")
HEARD: Rule = (Any, lambda x: x is None or callable(x), "a function of (what, done, of), or None")
ARGUMENTS: dict[str, Rule] = {
    "temperature": (float, lambda x: x >= 0 and finite(x), "0 (greedy) or more, and finite"),
    "top_k": (int | None, lambda x: x is None or x >= 1, "at least 1, or None"),
    "top_p": (float | None, lambda x: x is None or 0 < x <= 1, "in (0, 1], or None"),
    "min_p": (float | None, lambda x: x is None or 0 <= x <= 1, "in [0, 1], or None"),
    "repetition_penalty": (
        float | None,
        lambda x: x is None or 1e-6 <= x <= 1e6,
        "above 0, or None (from 1e-6 to 1e6; 1 changes nothing)",
    ),
    "max_new_tokens": COUNT,
    "samples": COUNT,
    "sizes": (int, lambda x: 1 <= x <= MOST, f"a whole number of sizes per doubling, from 1 to {MOST}"),
    "seed": (int, lambda x: -(2**63) <= x < 2**63, "a whole number of 64 bits"),
    "room": (int, lambda x: 0 <= x <= MOST, f"a whole number of tokens, from 0 to {MOST}"),
    "implementation": (
        str | None,
        lambda x: x in (None, "reference", "mosaic_tpu", "mosaic_gpu_sm90"),
        "'reference', 'mosaic_tpu', 'mosaic_gpu_sm90', or None for the device's own",
    ),
    "scan_layers": SWITCH,
    "predictors": SWITCH,
    "progress": HEARD,
    "batch": COUNT,
    "rows": COUNT,
    "longest": COUNT,
    "steps": COUNT,
    "blocks": COUNT,
    "queue": COUNT,
    "budget": COUNT,
    "tokens": COUNT,
    "count": (int, lambda x: 1 <= x <= MOST, f"a whole number of topics, from 1 to {MOST}"),
    "length": COUNT,
    "windows": COUNT,
    "utterances": COUNT,
    "instruction": (str, _any, "text, or '' for none"),
    "needles": COUNT,
    "text": (str | None, _any, "text, or None for the one that jaxkv carries"),
}


def check_arguments(**given: Any) -> None:
    """Raises `BadValue` for an argument outside what `ARGUMENTS` says of its name."""
    for name, value in given.items():
        hint, good, expected = ARGUMENTS[name]
        if not fits(value, hint) or not good(value):
            raise BadValue(f"{name}={shown(value)}: expected {expected}")
