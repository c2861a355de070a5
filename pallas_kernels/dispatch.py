"""Choosing an implementation: the first one that takes the arguments, or the one that is asked for."""

from collections.abc import Callable, Mapping


def dispatch(implementations: Mapping[str, Callable], implementation: str | None, *args, **kwargs):
    """The result of the named implementation, or of the first that does not raise `NotImplementedError`.

    Raises `ValueError` for a name that is not among them.
    """
    if implementation is not None:
        if implementation not in implementations:
            raise ValueError(f"implementation {implementation!r} is not one of {', '.join(implementations)}")
        return implementations[implementation](*args, **kwargs)
    *faster, last = implementations.values()
    for candidate in faster:
        try:
            return candidate(*args, **kwargs)
        except NotImplementedError:
            continue
    return last(*args, **kwargs)
