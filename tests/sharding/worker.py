"""One of several processes that generate together: `python worker.py JOB.json PROCESS_ID`.

Process 0 prints one line of JSON per policy of the job, and every process how many bytes of weights it read.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax

job, process_id = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", job["devices"])
jax.config.update("jax_numpy_dtype_promotion", "strict")

import jaxkv  # noqa: E402
from jaxkv.sharding import start  # noqa: E402
from jaxkv.sharding.hosts import failed_elsewhere, speaks  # noqa: E402
from jaxkv.weights import safetensors_files  # noqa: E402

read, count = safetensors_files.SafeTensor.read, [0]


def counted(self, *index):
    value = read(self, *index)
    count[0] += value.nbytes
    return value


safetensors_files.SafeTensor.read = counted


def main() -> None:
    start(job["coordinator"], job["processes"], process_id, timeout=job["timeout"])
    params = jaxkv.load(job["folder"], mesh=jaxkv.mesh(**job["mesh"]))
    print(json.dumps({"process": process_id, "read": count[0]}), flush=True)

    def progress(kind, done, of):
        if kind == "decode" and job.get("dies") == process_id and done > 30:
            os.kill(os.getpid(), signal.SIGKILL)

    drafts = jaxkv.speculative.AASD() if job.get("drafts") else None
    for name, options in job["policies"].items():
        policy = jaxkv.policy(name, **options)
        out = jaxkv.generate(
            params, job["prompts"], policy=policy, max_new_tokens=job["tokens"], stop_tokens=(), progress=progress,
            speculative=drafts,
        )  # fmt: skip
        if job.get("save"):
            jaxkv.save(out.cache, Path(job["save"]) / name)
        if speaks():
            print(json.dumps({"policy": name, "tokens": out.tokens.tolist()}), flush=True)


try:
    main()
except RuntimeError as error:
    message = failed_elsewhere(error)
    if message is None:
        raise
    print(message, file=sys.stderr, flush=True)
    os._exit(3)
