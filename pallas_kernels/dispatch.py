"""Choosing an implementation: the first one that takes the arguments, or the one that is asked for."""

import importlib
from collections.abc import Callable, Mapping

import jax

EVERYWHERE = "reference"  # plain jnp; every other implementation bears the name of the platform that it is for


def imported(module: str, name: str) -> Callable:
    """A kernel that is imported when it is called: Pallas takes a quarter of a second, not every jaxlib carries Mosaic
    GPU, and numba is not everywhere. Where its module cannot be had, the call raises `NotImplementedError`.
    """

    def call(*args, **kwargs):
        try:
            kernel = getattr(importlib.import_module(f"pallas_kernels.{module}"), name)
        except ImportError as error:
            raise NotImplementedError(str(error)) from error
        return kernel(*args, **kwargs)

    return call


def dispatch(implementations: Mapping[str, Callable], implementation: str | None, *args, **kwargs):
    """The result of the named implementation; without a name, of the first that is for the default backend and does
    not raise `NotImplementedError`, the last one being the reference.

    The default backend decides, not the platform that is lowered for: so an ahead-of-time compilation for another one
    names its implementation. Raises `ValueError` for a name that is not among them.
    """
    if implementation is not None:
        if implementation not in implementations:
            raise ValueError(f"implementation {implementation!r} is not one of {', '.join(implementations)}")
        return implementations[implementation](*args, **kwargs)
    for name, candidate in implementations.items():
        if name != jax.default_backend():
            continue
        try:
            return candidate(*args, **kwargs)
        except NotImplementedError:
            continue
    return implementations[EVERYWHERE](*args, **kwargs)
