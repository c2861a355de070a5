"""The read bandwidth of this machine: what a decode step, which must read all weights once, cannot beat."""

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import cores, table

SIZE = 2**30  # bytes, far more than any cache level, the last one of a large server included


class ReadBandwidth:
    """Bytes per second that this machine reads from memory: the fastest of several plain reductions of a large array.

    The arrays are made once: memory taken and given back between two timed runs would be paid for by those.
    """

    def __init__(self, threads: int | None = None):
        host = np.ones(SIZE // 4, np.float32)
        parts = np.array_split(host, threads or cores())
        device = jnp.asarray(host)
        matrix = device.reshape(-1, 1024)
        one = jnp.ones((1, matrix.shape[0]), jnp.float32)
        total = jax.jit(jnp.sum)
        product = jax.jit(jnp.matmul)
        self.ways: dict[str, Callable[[], object]] = {
            "numpy max, all threads": lambda: _together(np.max, parts),
            "numpy sum, all threads": lambda: _together(np.sum, parts),
            "jax sum": lambda: total(device).block_until_ready(),
            "jax vector times matrix": lambda: product(one, matrix).block_until_ready(),
        }

    def __call__(self, repeats: int = 5) -> float:
        """The fastest way, every way by its median: a moment of quiet neighbours says little of a run of seconds."""
        return max(self.each(repeats).values())

    def each(self, repeats: int = 5) -> dict[str, float]:
        """Bytes per second of each way to read a large float32 array once; every figure is the median of `repeats`."""
        return {name: SIZE / _median(way, repeats) for name, way in self.ways.items()}


def _together(function: Callable, parts: list[np.ndarray]) -> None:
    workers = [threading.Thread(target=function, args=(part,)) for part in parts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _median(function: Callable[[], object], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    ways = ReadBandwidth().each()
    rows = [(name, value / 1e9) for name, value in ways.items()]
    print(table(f"read bandwidth, {cores()} cores", ("way", "GB/s"), [*rows, ("fastest", max(ways.values()) / 1e9)]))


if __name__ == "__main__":
    main()
