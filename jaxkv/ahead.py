"""The programs of a call, compiled side by side before the first of them runs.

XLA compiles a program on little more than one core, and a call needs several, one behind the other. What each of them
takes is known from the forms of what the one before it gives. So all are lowered in that order, and threads compile
them meanwhile. A call that comes to a program waits for it, and finds it in JAX's own caches then.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

AT_ONCE = min(os.cpu_count() or 1, 4)  # programs


class Ahead:
    """Programs (jitted functions) that are compiled, each for one form of what it takes."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._made: dict[Any, Future] = {}

    def add(self, program: Any, *given: Any, **static: Any) -> Any:
        """Begin to compile the program for these arguments, arrays or their forms; the forms of what it gives."""
        lowered = program.lower(*given, **static)
        self._made[program] = self._pool.submit(lowered.compile)
        return lowered.out_info

    def wait(self, program: Any) -> None:
        """Wait until the program is there, if it was added. Raises what its compilation raised."""
        if program in self._made:
            self._made.pop(program).result()
