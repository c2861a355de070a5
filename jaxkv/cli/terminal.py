"""What a command says to the person at a terminal, beside what it prints for the pipe."""

import os
import sys
import threading
from typing import Any, TextIO


def note(text: str) -> None:
    """A line for the person, not for the pipe."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def tell(text: str) -> None:
    """A line for the pipe, of a command that goes on also where whoever read it has gone."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        hush(sys.stdout)


def hush(stream: TextIO) -> None:
    """What the stream still holds, and all that follows, goes nowhere: its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Meter:
    """A progress bar on a terminal, nothing elsewhere; it says while programs are being compiled for the first time."""

    COMPILING = "compiling: the first time with this model, policy and size; kept for later"
    PATIENCE = 1.0  # seconds after which a program is not read from those that are kept, but compiled

    def __init__(self, quiet: bool):
        self._quiet = quiet or not sys.stderr.isatty()
        self._tasks: dict[str, Any] = {}
        self._lock = threading.Lock()  # programs are compiled in threads
        self._going = 0  # programs that are being compiled, or read
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "Meter":
        if not self._quiet:
            import jax
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            jax.monitoring.register_event_listener(self._begun)
            jax.monitoring.register_event_duration_secs_listener(self._ended)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._quiet:
            import jax

            jax.monitoring.unregister_event_listener(self._begun)
            jax.monitoring.unregister_event_duration_listener(self._ended)
            with self._lock:
                self._hide()
                self._quiet = True
            self._bar.stop()

    def update(self, kind: str, done: Any, of: Any) -> None:
        """`generate`'s progress callback."""
        if self._quiet:
            return
        if kind not in self._tasks:
            self._tasks[kind] = self._bar.add_task(kind, total=int(of))
        self._bar.update(self._tasks[kind], completed=int(done))

    def _begun(self, event: str, **_: Any) -> None:
        if not event.endswith("/compile_requests_use_cache"):
            return
        with self._lock:
            self._going += 1
            if self._going == 1 and not self._quiet:
                self._timer = threading.Timer(self.PATIENCE, self._show)
                self._timer.daemon = True
                self._timer.start()

    def _ended(self, event: str, duration_secs: float, **_: Any) -> None:
        if not event.endswith("/backend_compile_duration"):
            return
        with self._lock:
            self._going = max(self._going - 1, 0)
            if not self._going:
                self._hide()

    def _show(self) -> None:
        with self._lock:
            if self._going and not self._quiet and "compiling" not in self._tasks:
                self._tasks["compiling"] = self._bar.add_task(self.COMPILING, total=None)

    def _hide(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        task = self._tasks.pop("compiling", None)
        if task is not None:
            self._bar.remove_task(task)
