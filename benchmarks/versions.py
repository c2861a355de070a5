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
OPTIONS: dict[str, dict[str, Any]] = {"duo": {"sinks": 16, "recent": 32}}


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
            policy = jaxkv.policy(name, **size, **OPTIONS.get(name, {}))
            steps = options.new_tokens
            run = prefilled(params, policy, rows) if what == "prefill" else decoded(params, policy, rows, steps)
            run()  # compiles
            runs[name, what] = run
        print(json.dumps(runs[name, what]()), flush=True)


class Version:
    """A version in a process of its own."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", json.dumps(settings)]
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
    if sys.argv[1:2] == ["--serve"]:
        serve(argparse.Namespace(**json.loads(sys.argv[2])))
        return
    from benchmarks.arguments import policies_at, policy_name, positive  # not above: another version may lack them

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="the folder of another checkout")
    parser.add_argument("--model", default="smollm2-135m")
    every = [name for names in KINDS.values() for name in names]
    parser.add_argument("--policies", type=policy_name, nargs="+", default=every)
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=1024)
    parser.add_argument("--new-tokens", type=positive, default=48)
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--rounds", type=positive, default=7)
    options = parser.parse_args()
    if not (options.other / "jaxkv").is_dir():
        parser.error(f"--other {str(options.other)!r}: expected the folder of another checkout")
    for name in options.policies:
        policies_at(parser, [name], options.budget, **OPTIONS.get(name, {}))
    shared = ("model", "budget", "tokens", "new_tokens", "batch", "layers")
    settings = {name: getattr(options, name) for name in shared}
    versions = [Version(path, settings) for path in (Path(__file__).resolve().parent.parent, options.other.resolve())]
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
    facts = {name: value for name, value in vars(options).items() if name != "other"}
    print("written to", write("versions", {**facts, "results": results}))
    for version in versions:
        version.process.terminate()


if __name__ == "__main__":
    main()
