"""Several real processes that are one mesh, on this machine, through jax.distributed and gloo."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import jaxkv
from jaxkv.errors import BadValue
from jaxkv.sharding import start

WORKER = Path(__file__).parent / "sharding" / "worker.py"
SERVING = Path(__file__).parent / "sharding" / "serving_worker.py"
FOLDER = Path(__file__).parent / "goldens" / "tiny" / "smollm2"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
POLICIES = {"dapq-longflow": {"budget": 16, "block": 16, "count": 6}, "h2o": {"budget": 16, "block": 16}}
PROMPTS = [np.random.default_rng(i).integers(3, 100, n).tolist() for i, n in enumerate((45, 9, 30, 17))]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(tmp_path, processes, worker=WORKER, **job):
    """Starts the processes; what each has printed, its exit code, and the seconds that all of them took."""
    job = {
        "coordinator": f"127.0.0.1:{free_port()}",
        "processes": processes,
        "timeout": 60,
        "folder": str(FOLDER),
        "policies": POLICIES,
        "prompts": PROMPTS,
        "tokens": 12,
        **job,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, str(worker), str(tmp_path / "job.json")]
    files = [(tmp_path / f"out{index}", tmp_path / f"err{index}") for index in range(processes)]
    began, running = time.monotonic(), []
    try:
        for index, (out, err) in enumerate(files[: job.get("started", processes)]):
            with out.open("w") as stdout, err.open("w") as stderr:
                running.append(subprocess.Popen([*command, str(index)], stdout=stdout, stderr=stderr, env=ENVIRONMENT))
        codes = [each.wait(timeout=240) for each in running]
    finally:
        for each in running:
            each.kill()
    return codes, [(out.read_text(), err.read_text()) for out, err in files[: len(codes)]], time.monotonic() - began


@functools.cache
def alone(name, tokens=12):
    """What one process with one device gives."""
    params = jaxkv.load(FOLDER)
    out = jaxkv.generate(
        params, PROMPTS, policy=jaxkv.policy(name, **POLICIES[name]), max_new_tokens=tokens, stop_tokens=()
    )
    return out.tokens.tolist()


@pytest.mark.long
@pytest.mark.parametrize(
    "processes, devices, mesh, names",
    [(2, 2, {"data": 2, "model": 2}, ("dapq-longflow", "h2o")), (4, 1, {"model": 2, "context": 2}, ("dapq-longflow",))],
    ids=["two processes", "four processes"],
)
def test_processes_together_give_what_one_gives(tmp_path, processes, devices, mesh, names):
    policies = {name: POLICIES[name] for name in names}
    codes, texts, _ = run(tmp_path, processes, devices=devices, mesh=mesh, policies=policies, save=str(tmp_path))
    assert codes == [0] * processes, texts
    lines = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in texts]  # gloo prints
    found = {line["policy"]: line["tokens"] for line in lines[0][1:]}
    assert found == {name: alone(name) for name in names}
    assert all(len(each) == 1 for each in lines[1:]), "only process 0 prints what came out"

    whole = (FOLDER / "model.safetensors").stat().st_size
    for line, *_ in lines:  # with data=2 a process of two devices holds both halves of the model axis
        assert line["read"] < whole * (1.01 if mesh.get("data") else 0.7)
    params = jaxkv.load(FOLDER)
    for name in names:
        cache = jaxkv.restore(tmp_path / name, params)
        assert [text.tolist() for text in cache.texts()] == [
            prompt + row[:-1] for prompt, row in zip(PROMPTS, found[name], strict=True)
        ]
        more = jaxkv.generate(params, cache=cache, max_new_tokens=5, stop_tokens=())
        assert [a + b for a, b in zip(found[name], more.tokens.tolist(), strict=True)] == alone(name, 17)


@pytest.mark.long
def test_processes_draft_alike(tmp_path):
    """Whatever time each of them takes for a pass over a tree, they run the same programs."""
    policies = {"dapq-longflow": POLICIES["dapq-longflow"]}
    shared = {"devices": 2, "mesh": {"data": 2, "model": 2}, "policies": policies, "drafts": True, "tokens": 60}
    codes, texts, _ = run(tmp_path, 2, **shared)
    assert codes == [0, 0], texts
    (out,) = (json.loads(line) for line in texts[0][0].splitlines() if line.startswith('{"policy"'))
    assert out["tokens"] == alone("dapq-longflow", 60)


@pytest.mark.long
@pytest.mark.parametrize("dies", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_process_killed_ends_the_other(tmp_path, dies):
    codes, texts, seconds = run(
        tmp_path, 2, devices=1, mesh={"model": 2}, policies={"h2o": POLICIES["h2o"]}, tokens=400, dies=dies, timeout=10
    )
    assert codes[dies] == -signal.SIGKILL
    assert codes[1 - dies] not in (0, -signal.SIGKILL), "it ends by itself, and not as if all were well"
    assert (
        "another one failed" in texts[1 - dies][1] or "distributed service detected fatal errors" in texts[1 - dies][1]
    )
    assert '"policy"' not in texts[0][0] and seconds < 120


SERVED = {"name": "dapq-longflow", "budget": 16, "block": 16, "count": 6}
DRAWS = (
    {},
    {"temperature": 1.2, "top_p": 0.7, "seed": -(2**40)},
    {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.2, "stop_tokens": [*range(0, 190, 14)]},
)
REQUESTS = [
    (
        np.random.default_rng(n).integers(3, 100, length).tolist(),
        {"stop_tokens": [], **DRAWS[n % 3], "max_new_tokens": 5 + n % 9},
    )
    for n, length in enumerate((45, 9, 30, 17, 1, 60, 33))
]


def served(tmp_path, requests, **job):
    """Two processes with one front; the exit codes, the lines of each, their errors, and the text of the prefix."""
    prefix = np.random.default_rng(99).integers(3, 100, 21).tolist()
    job = {"cancelled": [], "timeout": 10, **job, "requests": requests, "prefix": prefix, "policy": SERVED}
    codes, texts, _ = run(tmp_path, 2, SERVING, devices=1, mesh={"model": 2}, **job)
    lines = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in texts]
    return codes, lines, [error for _, error in texts], prefix


@pytest.mark.long
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_one_front_serves_for_all(tmp_path, drafts):
    """Requests at random times over two processes get what each gets alone; then both end as if all were well."""
    more = ([7, 8, 9], {"max_new_tokens": 9, "stop_tokens": [], "prefix": "manual"})
    work = [*REQUESTS, more, *REQUESTS[:5]]
    cancelled = range(len(REQUESTS) + 1, len(work))
    codes, (front, other), errors, prefix = served(tmp_path, work, cancelled=[*cancelled], idle=3, drafts=drafts)
    assert codes == [0, 0], errors
    assert "process 0 of this mesh takes the requests" in other[0]["refused"] and other[1] == {"followed": 1}
    (found,) = front
    params, policy = jaxkv.load(FOLDER), jaxkv.policy(**SERVED)
    cache = jaxkv.prefill(params, np.array(prefix, np.int32), policy=policy)
    for number, ((prompt, asked), answer) in enumerate(zip(work, found["answers"], strict=True)):
        asked = dict(asked)
        begin = {"cache": cache} if asked.pop("prefix", None) else {"policy": policy}
        out = jaxkv.generate(params, np.array(prompt, np.int32), **begin, **asked)
        expected = out.tokens[0, : out.lengths[0]].tolist()
        if answer["finish"] == "cancelled":
            assert number in cancelled and answer["tokens"] == expected[: len(answer["tokens"])]
        else:
            assert answer["tokens"] == expected, asked
    assert found["compiles"] == 0


@pytest.mark.long
@pytest.mark.parametrize("job, words", [({"dies": 3}, ""), ({"fails": True}, "HostFailure: the front failed")], ids=str)
def test_a_front_that_is_gone_ends_the_others(tmp_path, job, words):
    codes, lines, errors, _ = served(tmp_path, REQUESTS[:5], **job)
    assert codes[1] not in (0, -signal.SIGKILL) and {"followed": 1} not in lines[1]
    assert words in errors[1], errors[1]


@pytest.mark.long
def test_a_host_that_never_comes_ends_the_wait(tmp_path):
    codes, texts, seconds = run(tmp_path, 2, devices=1, mesh={"model": 2}, timeout=5, started=1)
    assert codes[0] != 0 and seconds < 60
    assert "did not come together within 5 s" in texts[0][1] or "fatal" in texts[0][1].lower(), texts[0][1]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"coordinator": "a:1"}, "num_processes and process_id not given"),
        ({"coordinator": "a", "num_processes": 2, "process_id": 0}, "host:port"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "from 0 to"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": "9"}, "timeout='9'"),
        ({"coordinator": "a:1", "num_processes": "2", "process_id": 0}, "num_processes='2'"),
    ],
)
def test_hosts_that_cannot_be_joined(unchecked, options, words):
    with pytest.raises(BadValue, match=words):
        start(**options)


SLURM = {"SLURM_JOB_ID": "7777", "SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
RUN = "import jax; jax.numpy.zeros(1); from jaxkv.sharding import start; start(timeout=5)"
TWICE = "from jaxkv.sharding import start; start('{0}', 1, 0); start(); start('{0}', 1, 0)"


@pytest.mark.long
@pytest.mark.parametrize(
    "around, program, says",
    [
        ({}, RUN, ""),
        (SLURM | {"SLURM_NTASKS": "1"}, RUN, ""),
        (SLURM | {"SLURM_NTASKS": "2"}, RUN, "BadValue: hosts must be joined before anything else of jax runs"),
        (MPI, "from jaxkv.sharding import start; start(timeout=5)", "BadValue: Open MPI 5 or newer requires mpi4py"),
        ({}, TWICE, "BadValue: the hosts have been joined already"),
    ],
)
def test_what_is_found_around(around, program, says):
    environment = {**ENVIRONMENT, **around}
    program = program.format(f"127.0.0.1:{free_port()}")
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert says in done.stderr and (done.returncode == 0) == (not says), done.stderr


@pytest.mark.long
def test_files_of_parts_may_run_jax(tmp_path):
    """The command joins the hosts before it runs them."""
    (tmp_path / "parts.py").write_text("import jax.numpy as jnp\nDECAY = jnp.float32(0.9)\n")
    hosts = f"--mesh data=1 --coordinator 127.0.0.1:{free_port()} --num-processes 1 --process-id 0".split()
    command = [sys.executable, "-m", "jaxkv.cli", "generate", "--parts", str(tmp_path / "parts.py"), *hosts]
    done = subprocess.run(
        [*command, "--model", str(FOLDER), "hi"], env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert "these params have no tokenizer" in done.stderr, done.stderr  # so far it comes


def test_what_lies_on_one_host_is_not_saved_on_many(tiny, tmp_path, monkeypatch):
    params = tiny("llama3")
    cache = jaxkv.prefill(params, np.arange(3, 9), policy=jaxkv.policy("h2o", budget=8))
    monkeypatch.setattr("jax.process_count", lambda: 2)
    for save, what in ((jaxkv.save, cache), (jaxkv.save_weights, params)):
        with pytest.raises(BadValue, match="of this host's devices, where 2 processes run"):
            save(what, tmp_path / "folder")
