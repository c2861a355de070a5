"""The one exception family of jaxkv: every message names the value, what was expected, and the remedy."""

from difflib import get_close_matches


class JaxkvError(Exception):
    """Base of every error that jaxkv raises on purpose."""


class UnknownName(JaxkvError, KeyError):
    """A policy, model, part or option name that is not registered."""

    def __str__(self) -> str:
        return str(self.args[0])


class BadValue(JaxkvError, ValueError):
    """An argument outside what the call can work with."""


class BadWeights(JaxkvError, ValueError):
    """A weight file that is truncated, incomplete, of the wrong shape, or holds NaN."""


class BadCheckpoint(JaxkvError, ValueError):
    """A saved cache that is corrupt, or belongs to another model or policy."""


class MissingModel(JaxkvError, FileNotFoundError):
    """A model that is not installed or not on disk."""


class HostFailure(JaxkvError, RuntimeError):
    """Another host of a run over many that failed, or never came."""


class Busy(JaxkvError, RuntimeError):
    """An engine that takes no request now: its queue is full, or it stops."""


def unknown(kind: str, name: object, known) -> UnknownName:
    """`UnknownName` that lists the nearest of the `known` names."""
    name, known = str(name), sorted(map(str, known))
    small = {each.lower(): each for each in known}
    near = [small[each] for each in get_close_matches(name.lower(), small, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known: {', '.join(known) or 'none'}"
    return UnknownName(f"unknown {kind} {name[:80]!r}; {hint}")


def first_line(error: BaseException) -> str:
    """An error's first line, at most 200 characters."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
