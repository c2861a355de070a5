"""Work that a test kills: each function runs in a process of its own, and says what it has written."""

import itertools
from pathlib import Path

import numpy as np

import jaxkv
from jaxkv.evaluation import runner, settings
from jaxkv.weights import learned

FAMILY = "llama3"
POLICY = {"name": "h2o", "budget": 20}
ROWS = 400  # of the evaluation
LONG = "x" * 50_000  # an answer: writing takes its time


def prompt() -> np.ndarray:
    """The text whose cache is saved."""
    return np.random.default_rng(0).integers(3, 90, 40).astype(np.int32)


def saving(say, folder: Path, goldens: Path) -> None:
    """Saves one cache again and again, each time under another name."""
    cache = jaxkv.prefill(jaxkv.load(goldens / "tiny" / FAMILY), prompt(), policy=jaxkv.policy(**POLICY))
    say("ready")
    for number in itertools.count():
        jaxkv.save(cache, folder / str(number))
        say(number)


def measured(number: int) -> dict[str, np.ndarray]:
    """What the `number`-th calibration would have found."""
    return {"retrieval": np.full((64, 256), number % 1000, np.float32)}


def calibrating(say, folder: Path, goldens: Path) -> None:
    """Writes one file of calibration again and again, each time with other numbers."""
    say("ready")
    for number in itertools.count():
        learned.write(measured(number), folder / "calibration.safetensors")
        say(number)


def run_of(folder: Path) -> settings.Settings:
    """The evaluation, over a file of questions."""
    return settings.from_dict({"policies": ["full"], "batch": 4, "tasks": [{"file": str(folder / "data.jsonl")}]})


def evaluating(say, folder: Path, goldens: Path) -> None:
    """Runs an evaluation whose answers cost nothing, from where it stands; says how many batches it has done."""
    from letters import Letters

    params = jaxkv.load(goldens / "tiny" / FAMILY)
    params = type(params)(params.weights, params.config, Letters())
    runner._answers = lambda params, settings, job: [
        {**runner.about(job, row), "score": 1.0, "answer": LONG} for row in job.rows
    ]
    say("ready")
    runner.evaluate(params, run_of(folder), folder / "out", progress=lambda what, done, of, left: say(done))
    say("done")
