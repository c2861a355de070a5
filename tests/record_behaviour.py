"""Record what every policy keeps and generates, for `test_behaviour.py` to compare.

Every case runs in two processes whose programs are compiled differently, and in each twice, once on weights that are
off by rounding. Where anything differs, other prompts are tried until a case agrees.

    python tests/record_behaviour.py [--model tiny|smollm2] [--policies tova h2o]
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import behaviour
import jax
import numpy as np
from archives import arrays
from behaviour import SETTINGS, TRIES

from jaxkv.policies import catalogue

FLAGS = ("--xla_backend_optimization_level=0", "--xla_cpu_max_isa=AVX")  # before AVX no float16
OFF = 1e-6  # of a weight
BATCH = 8  # policies that two processes run before they are stored


def perturbed(params, seed: int):
    """The params with weights off by about their rounding; but for the last norm, which names the model: another name
    would compile everything again."""
    rng = np.random.default_rng(seed)

    def off(weight):
        noise = 1 + rng.uniform(-OFF, OFF, weight.shape).astype(np.float32)
        return jax.numpy.asarray(np.asarray(weight) * noise)

    weights = jax.tree.map(off, params.weights)
    weights["norm"] = params.weights["norm"]
    return dataclasses.replace(params, weights=weights)


def run(model: str, names: list[str], seeds: list[int], noise: int, into: str) -> None:
    """Run the policies' cases on every seed's prompts and write what was seen, and whether it was steady."""
    params = behaviour.loaded(model)
    near = perturbed(params, noise)
    found = {}
    for name in names:
        started = time.perf_counter()
        for block in SETTINGS[model].blocks:
            chosen = behaviour.policy(model, name, block)
            for seed in seeds:
                rows = behaviour.prompts(model, seed)
                seen = behaviour.observed(params, rows, chosen)
                seen["steady"] = np.bool(behaviour.same(behaviour.observed(near, rows, chosen), seen))
                found |= {f"{name}/{block}/{seed}/{key}": value for key, value in seen.items()}
        print(f"{model} {name} {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    np.savez(into, **found)


def both(model: str, names: list[str], seeds: list[int]) -> list[dict[str, np.ndarray]]:
    """`run` in two processes of different compiler flags, side by side."""
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / f"{number}.npz") for number in range(len(FLAGS))]
        command = [sys.executable, __file__, "--model", model, "--policies", *names, "--seeds", *map(str, seeds)]
        running = [
            subprocess.Popen([*command, "--noise", str(number), "--into", file], env={**os.environ, "XLA_FLAGS": flags})
            for number, (file, flags) in enumerate(zip(files, FLAGS, strict=True))
        ]
        if any([process.wait() for process in running]):
            raise SystemExit(f"{model}: a run failed")
        return [arrays(file) for file in files]


def agreed(runs: list[dict[str, np.ndarray]], front: str) -> dict[str, np.ndarray] | None:
    """What both processes saw of a case and seed; None where they differ, or where it hangs on rounding."""
    one, other = (
        {key.removeprefix(front): value for key, value in each.items() if key.startswith(front)} for each in runs
    )
    return one if one["steady"] and other["steady"] and behaviour.same(one, other) else None


def recorded(model: str, names: list[str]) -> dict[str, np.ndarray]:
    """The record of the policies' cases. Prints which needed other prompts, and which found none."""
    found, left = {}, [(name, block) for name in names for block in SETTINGS[model].blocks]
    for seeds in ([0], list(range(1, TRIES))):
        again = sorted({name for name, _ in left})
        runs = both(model, again, seeds) if again else []
        for name, block in list(left):
            for seed in seeds:
                seen = agreed(runs, f"{name}/{block}/{seed}/")
                if seen is not None:
                    del seen["steady"]
                    seen["seed"] = np.int16(seed)
                    found |= {f"{name}/{block}/{key}": value for key, value in seen.items()}
                    left.remove((name, block))
                    if seed:
                        print(f"{model}: {name} with blocks of {block} needed seed {seed}", flush=True)
                    break
    for name, block in left:
        print(f"{model}: {name} with blocks of {block} hangs on rounding with every seed, nothing recorded", flush=True)
    return found


def store(model: str, names: list[str], found: dict[str, np.ndarray]) -> None:
    """Store these policies' records beside those of the others in the catalogue."""
    others = {*catalogue()} - {*names}
    kept = {key: value for key, value in behaviour.stored(model).items() if key.split("/")[0] in others}
    everything = kept | found
    np.savez_compressed(behaviour.STORED / f"{model}.npz", **{key: everything[key] for key in sorted(everything)})
    behaviour.stored.cache_clear()


def main() -> None:
    """Record and store, keeping what is stored of other policies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SETTINGS, default=None, help="default: both")
    parser.add_argument("--policies", nargs="+", default=sorted(catalogue()), choices=sorted(catalogue()), metavar="P")
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--noise", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--into", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into is not None:
        return run(options.model, options.policies, options.seeds, options.noise, options.into)
    for model in SETTINGS if options.model is None else [options.model]:
        for first in range(0, len(options.policies), BATCH):
            names = options.policies[first : first + BATCH]
            store(model, names, recorded(model, names))


if __name__ == "__main__":
    main()
