"""Prefill and decode of policies in turns with another version of jaxkv, each in a process of its own.

    python -m benchmarks.versions --other PATH-OF-ANOTHER-CHECKOUT

Both load the same model, run the same prompt and take turns; the ratio of a round is this version's time over the
other's right beside it.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import table, write

KINDS = {  # six policies of each kind of store
    "slots": ("streaming-llm", "snapkv", "h2o", "tova", "dapq-longflow", "lagkv"),
    "pool": ("adakv", "adakv-h2o", "critical-adakv", "headkv", "duo", "razorattention"),
    "line": ("global-h2o", "cake", "prefixkv", "simlayerkv", "layer-defensivekv", "full"),
}


def serve(options: argparse.Namespace) -> None:
    """A version's side: measures what it is asked, line by line."""
    import jaxkv
    from benchmarks.family_cost import decoded, first_layers, prefilled
    from benchmarks.report import prose_rows

    params = first_layers(jaxkv.load(options.model), options.layers)
    rows = prose_rows(params.tokenizer, options.batch, options.tokens)
    runs: dict[str, Any] = {}
    for line in sys.stdin:
        name, what = json.loads(line)
        if (name, what) not in runs:
            runs.clear()  # one policy's programs at a time
            size = {"budget": options.budget} if jaxkv.policies.catalogue()[name].evicts else {}
            policy = jaxkv.policy(name, **size, **({"sinks": 16, "recent": 32} if name == "duo" else {}))
            steps = options.new_tokens
            run = prefilled(params, policy, rows) if what == "prefill" else decoded(params, policy, rows, steps)
            run()  # compiles
            runs[name, what] = run
        print(json.dumps(runs[name, what]()), flush=True)


class Version:
    """A version in a process of its own."""

    def __init__(self, path: Path, arguments: list[str]):
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(path)}
        self.process = subprocess.Popen(
            command, cwd=path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def took(self, name: str, what: str) -> float:
        """Seconds of one run."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, what]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.strip() and line[0].isdigit():
                return json.loads(line)
        raise RuntimeError(f"{name} {what}: the other process ended")


def main() -> None:
    """Measure, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, default=None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policies", nargs="+", default=[name for names in KINDS.values() for name in names])
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    if options.other is None:
        parser.error("--other: expected the folder of another checkout")
    shared = ("model", "budget", "tokens", "new_tokens", "batch", "layers")
    arguments = [word for name in shared for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    versions = [Version(path, arguments) for path in (Path(__file__).resolve().parent.parent, options.other.resolve())]
    results = []
    for name in options.policies:
        row: dict[str, Any] = {"policy": name}
        for what in ("prefill", "decode"):
            rounds = []
            for number in range(options.rounds):
                turn = versions if number % 2 else versions[::-1]
                took = {id(version): version.took(name, what) for version in turn}
                rounds.append(took[id(versions[0])] / took[id(versions[1])])
            row[what] = sorted(rounds)[len(rounds) // 2]
            row[f"{what}_rounds"] = rounds
        results.append(row)
        print(name, f"prefill {row['prefill']:.3f} decode {row['decode']:.3f}", flush=True)
    for what in ("prefill", "decode"):
        each = sorted(row[what] for row in results)
        print(f"median of the policies' medians, {what}: {each[len(each) // 2]:.3f}")
    shown = [(row["policy"], row["prefill"], row["decode"]) for row in results]
    print(table("time over the other version's (median of the rounds)", ("policy", "prefill", "decode"), shown))
    facts = {name: value for name, value in vars(options).items() if name not in ("other", "serve")}
    print("written to", write("versions", {**facts, "results": results}))
    for version in versions:
        version.process.terminate()


if __name__ == "__main__":
    main()
