"""Choosing an implementation: the first one that takes the arguments, or the one that is asked for."""

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

REFERENCE = "reference"  # plain jnp, on every platform
COMPILERS = ("numba", "llvmlite")  # of the kernels for CPUs
INSTALL = "pip install 'jaxkv[cpu]'"
LOG = logging.getLogger("pallas_kernels")


class Choice(NamedTuple):
    """The implementation of an operation that runs, and why each of those before it does not."""

    implementation: str
    refused: dict[str, str]

    @property
    def reasons(self) -> list[str]:
        """The refusals in words."""
        return [f"{name} does not run here: {why}" for name, why in self.refused.items()]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation: its reference in plain jnp, and its kernels in the order in which they are tried.

    `kernels` says of each the platform that it is for, as jax names it. A kernel's name is that of its module beside
    the reference, and its function is called like the operation.
    """

    name: str
    reference: Callable
    kernels: Mapping[str, str]

    def __call__(self, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        """The result of the named implementation; without a name, of the first that is for the default backend and
        does not raise `NotImplementedError`, the last one being the reference. Which one it was is logged once, with
        the reasons of those that refused.

        The default backend decides, not the platform that is lowered for: so an ahead-of-time compilation for another
        one names its implementation. Raises `ValueError` for a name that is not among them, and `NotImplementedError`
        where the named one does not take the arguments.
        """
        if implementation is not None:
            try:
                return self.called(implementation)(*args, **kwargs)
            except NotImplementedError as why:
                remedy = f"leave implementation= out, or take {REFERENCE!r}"
                raise NotImplementedError(f"{implementation}: {why}: {remedy}") from why
        out, choice = self.first(jax.default_backend(), lambda call: call(*args, **kwargs))
        _say(self.name, choice.implementation, "; ".join(choice.reasons))
        return out

    def own(self, implementation: str | None) -> str | None:
        """The name, where it is one of its kernels' or None; else the reference's, for one beside another operation."""
        return implementation if implementation is None or implementation in self.kernels else REFERENCE

    def first(self, platform: str, way: Callable[[Callable], Any]) -> tuple[Any, Choice]:
        """What `way` gives of the first implementation for a platform under which it does not raise
        `NotImplementedError`, the reference behind the kernels; and which that is.
        """
        refused: dict[str, str] = {}
        for name in (name for name, where in self.kernels.items() if where == platform):
            try:
                return way(self.called(name)), Choice(name, refused)
            except NotImplementedError as why:
                refused[name] = str(why)
        return way(self.reference), Choice(REFERENCE, refused)

    def called(self, name: str) -> Callable:
        """The named implementation. A kernel's module is imported when it is called: Pallas takes a quarter of a
        second, not every jaxlib carries Mosaic GPU, and numba is not everywhere. Where the module cannot be had, the
        call raises `NotImplementedError`.
        """
        if name == REFERENCE:
            return self.reference
        if name not in self.kernels:
            known = ", ".join((*self.kernels, REFERENCE))
            raise ValueError(f"implementation {name!r} is not one of {known}")

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                module = importlib.import_module(f"pallas_kernels.{self.name}.{name}")
            except ImportError as error:
                remedy = f"; {INSTALL}" if error.name in COMPILERS else ""
                raise NotImplementedError(f"{error}{remedy}") from error
            return getattr(module, self.name)(*args, **kwargs)

        return call


@functools.cache
def _say(operation: str, name: str, refused: str) -> None:
    """One line for each choice. A warning where a device has a kernel that was refused, or a CPU one that only lacks
    its compiler: its speed is XLA's then."""
    slower = name == REFERENCE and refused and (jax.default_backend() != "cpu" or INSTALL in refused)
    LOG.log(
        logging.WARNING if slower else logging.INFO, "%s runs as %s%s", operation, name, refused and f" ({refused})"
    )
