"""The programs of a call, compiled side by side while the first of them is compiled and runs.

XLA compiles a program on little more than one core, and a call needs several, one behind the other. What each of them
takes is known from the forms of what the one before it gives. So all are lowered in that order, and threads compile
them meanwhile. A call that comes to a program waits for it, and finds it in JAX's own caches then.
"""

import functools
import os
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxkv.programs import FORMS

AT_ONCE = min(os.cpu_count() or 1, 4)  # programs


def foreseeable(arrays: Any) -> bool:
    """Whether the forms of what programs give tell what JAX compiles the next ones for: not from arrays that are
    committed to a device, for forms do not say that, nor where nothing is compiled."""
    jits = not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    return jits and not any(getattr(leaf, "committed", False) for leaf in jax.tree.leaves(arrays))


class Ahead:
    """Programs (jitted functions) that are compiled, each for one form of what it takes; those that were asked for
    before are not lowered again."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(AT_ONCE)  # it has no thread before there is something to do
        self._made: dict[Any, tuple[Hashable, Future]] = {}

    def add(self, program: Any, *given: Any, **static: Any) -> Any:
        """Begin to compile the program for these arguments, arrays or their forms, if it is new; the forms of what it
        gives."""
        asked = _asked(program, given, static)
        forms = FORMS.get(asked)  # once: another thread may forget it
        if forms is None:
            lowered = program.lower(*given, **static)
            forms = FORMS[asked] = lowered.out_info
            self._made[program] = asked, self._pool.submit(lowered.compile)
        return forms

    def gives(self, between: Any, *given: Any, **static: Any) -> Any:
        """The forms of what is done between two programs gives (a function that stays, or a jitted one); traced once
        for the forms of what it takes."""
        asked = _asked(between, given, static)
        forms = FORMS.get(asked)
        if forms is None:
            forms = FORMS[asked] = jax.eval_shape(functools.partial(between, **static), *given)
        return forms

    def drop(self) -> None:
        """Compile nothing that has not been begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for asked, made in self._made.values():
            if made.cancelled():
                FORMS.pop(asked, None)

    def wait(self, program: Any) -> None:
        """Wait until the program is there, if it was added. Raises what its compilation raised."""
        if program in self._made:
            _, made = self._made.pop(program)
            made.result()


def _asked(function: Any, given: Any, static: Any) -> Hashable:
    """What a function is asked for: with the forms of arrays, and all else as it is."""
    leaves, form = jax.tree.flatten((given, static))
    return function, form, *map(_told, leaves)


def _told(leaf: Any) -> Hashable:
    """What a program is compiled for of an argument: of an array, its form."""
    return (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) if hasattr(leaf, "dtype") else leaf
