"""Kill -9 at random moments: what was reported as written is there, and nothing half-written is read."""

import json
import multiprocessing
import random
import time

import interrupted
import numpy as np
import pytest

import jaxkv
from jaxkv.evaluation.results import Store
from jaxkv.weights import learned

# one process imports everything, without running anything of jax; those that are killed are forked from it
PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def killed(goldens):
    """`killed(work, folder, after, reports)`: what the work said until it was killed so many seconds after it was ready
    and had said that much, however slow the machine is; with None, until it ended."""
    PROCESSES.set_forkserver_preload(["interrupted"])

    def run(work, folder, after: float | None, reports: int = 0) -> list:
        here, there = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=work, args=(there.send, folder, goldens))
        process.start()
        there.close()
        said = []
        with here:
            assert here.poll(120), "it never began"
            assert here.recv() == "ready"
            for _ in range(reports):
                assert here.poll(120), "it does not go on"
                said.append(here.recv())
            if after is None:
                process.join(120)
            else:
                time.sleep(after)
            process.kill()
            process.join()
            while here.poll():
                try:
                    said.append(here.recv())
                except EOFError:
                    break
        return said

    return run


def moments(seed: int, kills: int, most: float) -> list[float]:
    """When to kill, in seconds."""
    draw = random.Random(seed)
    return [draw.uniform(0, most) for _ in range(kills)]


def saves(killed, tiny, tmp_path, kills):
    params = tiny(interrupted.FAMILY)
    cache = jaxkv.prefill(params, interrupted.prompt(), policy=jaxkv.policy(**interrupted.POLICY))
    whole = 0
    for number, after in enumerate(moments(0, kills, 0.5)):
        folder = tmp_path / str(number)
        folder.mkdir()
        said = killed(interrupted.saving, folder, after, number % 4)
        names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
        assert {*map(str, said)} <= {*names}, "what was reported is there"
        assert len(names) <= len(said) + 1
        for name in names:  # also the one that was named, but not reported any more
            found = jaxkv.restore(folder / name, params)
            assert np.array_equal(found.layers[0].positions, cache.layers[0].positions)
            assert np.array_equal(found.layers[0].keys, cache.layers[0].keys)
        drafts = [path for path in folder.iterdir() if path.name.startswith(".")]
        assert len(drafts) <= 1 and all(path.name.endswith(".part") for path in drafts)
        jaxkv.save(cache, folder / str(len(names)))  # what was left behind is in nobody's way
        whole += len(names)
    return whole


def calibrations(killed, tmp_path, kills):
    file, last = tmp_path / "calibration.safetensors", -1
    for number, after in enumerate(moments(1, kills, 0.2)):
        said = killed(interrupted.calibrating, tmp_path, after, number % 2)
        last = said[-1] if said else last
        if not file.exists():
            assert last == -1
            continue
        found = learned.read(file)["retrieval"]
        might = [interrupted.measured(number)["retrieval"] for number in (last, last + 1, 0)]
        assert any(np.array_equal(found, each) for each in might), "a whole file, of the last report or the next"
    return last


def evaluations(killed, tmp_path, kills):
    (tmp_path / "data.jsonl").write_text(
        "".join(
            json.dumps({"context": f"context {row}", "question": "q", "answers": ["x"]}) + "\n"
            for row in range(interrupted.ROWS)
        )
    )
    before: dict = {}
    resumed = 0
    for after in moments(2, kills, 0.15):
        said = killed(interrupted.evaluating, tmp_path, after)
        records = {record["key"]: record for record in Store(tmp_path / "out").records()}
        assert before.items() <= records.items(), "nothing is lost that was there"
        if said and said[-1] != "done":
            assert len(records) >= 4 * said[-1] + len(before) - 3
        assert all(record["answer"] == interrupted.LONG for record in records.values())
        resumed += len(records) > len(before) > 0
        before = records
    assert killed(interrupted.evaluating, tmp_path, None)[-1] == "done"
    lines = (tmp_path / "out" / "results.jsonl").read_bytes().splitlines()
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) == interrupted.ROWS
    return resumed


@pytest.mark.long
def test_saving(killed, tiny, tmp_path):
    assert saves(killed, tiny, tmp_path, 2) > 0


@pytest.mark.long
def test_calibrating(killed, tmp_path):
    assert calibrations(killed, tmp_path, 2) >= 0


@pytest.mark.long
def test_evaluating(killed, tmp_path):
    evaluations(killed, tmp_path, 2)


@pytest.mark.slow
def test_fifty_times(killed, tiny, tmp_path):
    for name in ("saves", "calibrations", "evaluations"):
        (tmp_path / name).mkdir()
    assert saves(killed, tiny, tmp_path / "saves", 20) > 20
    assert calibrations(killed, tmp_path / "calibrations", 15) > 0
    assert evaluations(killed, tmp_path / "evaluations", 15) > 0
