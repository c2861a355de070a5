"""How long a first answer takes: fresh processes of the command line, a server, and prompts of new lengths in a running
one.

    python -m benchmarks.start_up

Everything runs `--rounds` times; medians in seconds. "first" has an empty folder of compiled programs, "again" what the
first left there; "beside others" a folder in which as many programs lie as `--others` says, none of which it can use.
"""

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
import urllib.request
from pathlib import Path

from benchmarks.arguments import positive
from benchmarks.report import table, write

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "How many days has a week, and which is the first?",
)
OTHER = 10_000  # bytes of a program that lies there for another use
NEW_LENGTH = """
import time, numpy as np, jaxkv
jaxkv.keep_programs()
params, policy = jaxkv.load("smollm2-135m"), jaxkv.policy("dapq-longflow", budget=256)
def seconds(length):
    started = time.perf_counter()
    jaxkv.generate(params, np.arange(length) + 100, policy=policy, max_new_tokens=1, stop_tokens=())
    return time.perf_counter() - started
seconds(300), seconds(300)
known, new = min(seconds(300) for _ in range(3)), [seconds(length) for length in (270, 290, 310, 320)]
print(max(new) - known)
"""


def took(command: list[str], cache: Path) -> tuple[float, str]:
    """Seconds that a process takes, and what it prints."""
    started = time.perf_counter()
    environment = {**os.environ, "JAXKV_CACHE": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return time.perf_counter() - started, done.stdout


def fill(cache: Path, count: int) -> None:
    """Put files of a program's usual size into the folder of compiled programs, that JAX finds no use for."""
    from jaxkv.programs import own_folder

    with unittest.mock.patch.dict(os.environ, JAXKV_CACHE=str(cache)):
        folder = own_folder()
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"jit_other-{number:064x}-cache").write_bytes(bytes(OTHER))


def until_ready(cache: Path) -> float:
    """Seconds until a server answers; it is ended then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.perf_counter()
    command = [sys.executable, "-m", "jaxkv.cli", "serve", "--port", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env={**os.environ, "JAXKV_CACHE": str(cache)}, **quiet) as server:
        try:
            while server.poll() is None:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    return time.perf_counter() - started
                time.sleep(0.1)
            raise SystemExit("jaxkv serve has ended before it answered")
        finally:
            server.terminate()


def main() -> None:
    """Measure, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--others", type=int, default=3000)
    options = parser.parse_args()
    python, found = [sys.executable], {}

    def add(name: str, *seconds: float) -> None:
        found.setdefault(name, []).extend(seconds)

    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)

        def generated(question: str) -> float:
            return took([*python, "-m", "jaxkv.cli", "generate", question, "--chat"], cache)[0]

        def forget() -> None:
            shutil.rmtree(cache / "programs", ignore_errors=True)

        for _ in range(options.rounds):
            add("import jax", took([*python, "-c", "import jax"], cache)[0])
            add("import jaxkv", took([*python, "-c", "import jaxkv"], cache)[0])
            add("jaxkv policies", took([*python, "-m", "jaxkv.cli", "policies"], cache)[0])
            forget()
            for question in QUESTIONS:
                first = "first" if question == QUESTIONS[0] else "another question"
                add(f"jaxkv generate, {first}", generated(question))
            add("jaxkv generate, again", generated(QUESTIONS[0]))
            forget()
            fill(cache, options.others)
            add(f"jaxkv generate, first, beside {options.others} others", generated(QUESTIONS[0]))
            forget()
            add("jaxkv serve, first", until_ready(cache))
            add("jaxkv serve, again", until_ready(cache))
            longer = float(took([*python, "-c", NEW_LENGTH], cache)[1])
            add("a new length in a known bucket, more than a known one", longer)
    rows = [
        (name, f"{statistics.median(each):.2f}", f"{min(each):.2f}", f"{max(each):.2f}") for name, each in found.items()
    ]
    print(table("seconds", ("what", "median", "least", "most"), rows))
    ratio = statistics.median(found["import jaxkv"]) / statistics.median(found["import jax"])
    print(f"import jaxkv over import jax: {ratio:.2f}")
    print("written to", write("start_up", {"rounds": options.rounds, "seconds": found, "import_ratio": ratio}))


if __name__ == "__main__":
    main()
