"""Another library in its own Python, asked over a pipe: one line of JSON for a request, one for its answer.

Imported on both sides, so by Pythons that have neither JAX nor torch: nothing but the standard library here.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Peer:
    """The process of a module of this folder that calls `serve`. Raises `RuntimeError` when it has ended."""

    def __init__(self, python: str, module: str, *arguments: str):
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
            env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
        )  # fmt: skip
        self.about = self._read()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._read()

    @property
    def most_memory(self) -> int:
        """Bytes that the process has held at most."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
        raise RuntimeError("this system tells no process' memory")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code, command = self._process.wait(), self._process.args
            raise RuntimeError(f"{command} ended with exit status {code}: see its output above")
        return json.loads(line)


def serve(begin: Callable[[], tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]]) -> None:
    """Say what `begin` tells about this side, then answer requests with its function until stdin closes."""
    answers = os.fdopen(os.dup(1), "w")  # libraries print to stdout: keep the answers apart from that
    os.dup2(2, 1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    about, answer = begin()
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
