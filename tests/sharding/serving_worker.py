"""One of several processes that are one engine: `python serving_worker.py JOB.json PROCESS_ID`.

Process 0 asks for the job's requests at random times, cancels some, and prints one line of JSON with what each got; the
others follow it.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np

job, process_id = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", job["devices"])
jax.config.update("jax_numpy_dtype_promotion", "strict")

import jaxkv  # noqa: E402
from jaxkv.errors import BadValue, HostFailure  # noqa: E402
from jaxkv.serving import Engine  # noqa: E402
from jaxkv.sharding import start  # noqa: E402
from jaxkv.sharding.hosts import KEPT, PART, Line, failed_elsewhere, together  # noqa: E402


def speak() -> None:
    """Many messages, short and long, come once and in order; those that all have heard are removed."""
    line, messages = Line(), ["", "x" * (2 * PART + 5), *map(str, range(4 * KEPT))]
    if process_id:
        assert [line.hear() for _ in messages] == messages
        together("heard")
        return
    for message in messages:
        line.say(message)
    together("heard")
    line._forget()
    left = [key for key, _ in line._store.key_value_dir_get(f"{line._name}/said/")]
    assert len(left) < KEPT, left


def main() -> None:
    start(job["coordinator"], job["processes"], process_id, timeout=job["timeout"])
    speak()
    params = jaxkv.load(job["folder"], mesh=jaxkv.mesh(**job["mesh"]))
    policy = jaxkv.policy(**job["policy"])
    drafts = jaxkv.speculative.AASD(fallback=False) if job.get("drafts") else None
    engine = Engine(params, policy, rows=3, longest=64, max_new_tokens=16, steps=4, speculative=drafts)
    engine.store("manual", jaxkv.prefill(params, np.array(job["prefix"], np.int32), policy=policy))
    if engine.leads:
        lead(engine)
        return
    try:
        engine.submit([5])
    except BadValue as error:
        print(json.dumps({"refused": str(error)}), flush=True)
    engine.follow()
    print(json.dumps({"followed": process_id}), flush=True)


def lead(engine: Engine) -> None:
    compiled = []
    with engine:
        jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
        draw, answers = np.random.default_rng(0), []
        for number, (prompt, asked) in enumerate(job["requests"]):
            answers.append(engine.submit(prompt, **asked))
            if number in job["cancelled"]:
                threading.Timer(draw.uniform(0, 0.1), answers[-1].cancel).start()
            time.sleep(draw.uniform(0, 0.05))
            if job.get("dies") == number:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(job.get("idle", 0))
        if job.get("fails"):
            engine._programs.chunk = None
            answers.append(engine.submit([5, 6]))
            threading.excepthook = lambda *_: None
        for answer in answers[:-1] if job.get("fails") else answers:
            answer.wait(120)
    compiles = sum(event == "/jax/core/compile/backend_compile_duration" for event in compiled)
    found = [{"tokens": answer.tokens, "finish": answer.finish} for answer in answers]
    print(json.dumps({"answers": found, "compiles": compiles}), flush=True)


try:
    main()
except HostFailure as error:
    print(f"HostFailure: {error}", file=sys.stderr, flush=True)
    os._exit(3)
except RuntimeError as error:
    message = failed_elsewhere(error)
    if message is None:
        raise
    print(message, file=sys.stderr, flush=True)
    os._exit(3)
