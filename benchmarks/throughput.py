"""Tokens per second at the end of a long output: the full cache beside a budget of a fifth, each at its largest batch.

Random weights in the shape of a real model, and a cache that holds what it would hold there: with the full cache every
token of prompt and output, with a policy its budget. The decode step is that of `jaxkv.generate`; since its cost does
not depend on the values, some steps measure it. The batch is as large as memory allows (an estimate, then 10 % fewer
rows until it runs), which is what bounds throughput: a smaller cache reads fewer bytes per token and leaves room for
more rows to share the weights.

    python -m benchmarks.throughput                       # JSON to benchmarks/results/throughput.json
    python -m benchmarks.throughput --model llama-3-8b
    python -m benchmarks.throughput --quick               # a smoke run on a tiny shape; stores nothing
"""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv
from benchmarks.arguments import policy_name, positive, share
from benchmarks.report import table, write
from jaxkv import run
from jaxkv.models import ModelConfig, abstract_weights
from jaxkv.sampling import Sampler
from jaxkv.store import Entries, KVCache, Slots
from jaxkv.weights.params import Params
from jaxkv.weights.source import named

IMPLEMENTATIONS = ("mosaic_tpu", "mosaic_gpu_sm90", "reference")  # of a step over keys as they are


def tiny(config: ModelConfig) -> ModelConfig:
    """The config with two narrow layers."""
    return dataclasses.replace(
        config, num_layers=2, layer_types=config.layer_types[:2], hidden_size=128, intermediate_size=256, num_heads=4,
        num_kv_heads=2, head_dim=64, vocab_size=512, stop_tokens=(),
    )  # fmt: skip


def random_params(config: ModelConfig, dtype: Any) -> Params:
    """Weights as small random numbers (norms as ones), made where they shall lie."""

    def draw(path, leaf):
        if leaf.ndim < 2:
            return jnp.ones(leaf.shape, leaf.dtype)
        key = jax.random.key(hash(str(path)) % 2**31)
        return jax.jit(lambda key: 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype))(key)

    return Params(jax.tree_util.tree_map_with_path(draw, abstract_weights(config, dtype)), config)


def late_state(
    params: Params, policy: jaxkv.Policy, batch: int, slots: int, length: int, steps: int
) -> run.DecodeState:
    """The state when `length` tokens were seen: slots full, but for those that `steps` more tokens need."""
    config = params.config
    held = slots if policy.evicts else slots - steps

    def layer(index: int) -> Slots:
        spec = config.attention_spec(index)
        shape = (batch, spec.num_kv_heads, slots)
        draw = lambda number: jax.random.normal(jax.random.key(number), (*shape, spec.head_dim), params.dtype)  # noqa: E731
        place = jnp.arange(slots, dtype=jnp.int32)
        place = jnp.where(place < held, place + (length - held), -1)
        entries = Entries(
            keys=draw(2 * index),
            values=draw(2 * index + 1),
            positions=jnp.broadcast_to(place, shape),
            stats={name: jnp.ones(shape, jnp.float32) for name in policy.stats},
        )
        return Slots(entries, jnp.full(shape[:2], held % slots, jnp.int32))

    layers = jax.jit(lambda: tuple(layer(index) for index in range(config.num_layers)))()
    budget = slots if policy.evicts else jnp.iinfo(jnp.int32).max
    cache = KVCache(
        layers=layers,
        lengths=jnp.full(batch, length, jnp.int32),
        limits=jnp.full((config.num_layers, batch), budget, jnp.int32),
        pending=jnp.ones(batch, jnp.int32),
        policy=policy,
        model="random",
    )
    return run.DecodeState(
        cache=cache,
        done=jnp.zeros(batch, bool),
        left=jnp.full(batch, 2**30, jnp.int32),
        seen=None,
        keys=jax.random.split(jax.random.key(0), batch),
    )


def row_bytes(params: Params, policy: jaxkv.Policy, slots: int) -> int:
    """Bytes that one more row needs: its cache, its logits in float32 twice, and the widest activations."""
    config, size = params.config, params.dtype.itemsize
    per_slot = 2 * config.head_dim * size + 4 + 4 * len(policy.stats)
    # Of a kernel's logits there is one layer's at a time.
    cache = slots * config.num_kv_heads * (per_slot * config.num_layers + 8 * config.num_heads // config.num_kv_heads)
    return cache + 8 * config.vocab_size + 16 * config.intermediate_size


def seconds_per_step(
    params: Params, policy: jaxkv.Policy, batch: int, slots: int, length: int, options: argparse.Namespace
) -> float:
    """Median seconds of a decode step, over some runs of `steps` steps, after one to compile."""
    steps, rounds = options.steps, options.rounds
    state = late_state(params, policy, batch, slots, length, steps * (rounds + 1))
    times = []
    for turn in range(rounds + 1):
        started = time.perf_counter()
        state, _ = run.decode(
            params.weights, state, jnp.int32(steps), room=steps, config=params.config, policy=policy,
            sampler=Sampler(), stop=(), implementation=options.implementation,
        )  # fmt: skip
        jax.block_until_ready(state)
        if turn:
            times.append((time.perf_counter() - started) / steps)
    return statistics.median(times)


def largest(
    params: Params, policy: jaxkv.Policy, slots: int, length: int, options: argparse.Namespace
) -> dict[str, Any]:
    """The largest batch that runs, and its speed."""
    stats = jax.devices()[0].memory_stats() or {}
    free = options.fill * stats.get("bytes_limit", 2**31) - sum(x.nbytes for x in jax.tree.leaves(params.weights))
    batch = min(options.most, int(free // row_bytes(params, policy, slots)))
    while batch >= 1:
        try:
            seconds = seconds_per_step(params, policy, batch, slots, length, options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            batch = int(batch * 0.9)
            continue
        return {"policy": policy.name, "slots": slots, "batch": batch, "step": seconds, "speed": batch / seconds}
    raise RuntimeError(f"not even one row of {slots} slots fits beside the weights: choose a shorter output")


def main() -> None:
    """Measure, print the table, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-1.7b", help="a shape of configs/models")
    parser.add_argument("--policy", type=policy_name, default="longflow")
    parser.add_argument("--prompt", type=positive, default=1024)
    parser.add_argument("--output", type=positive, default=15360)
    parser.add_argument("--share", type=share, default=0.2, help="the budget as a share of prompt and output")
    parser.add_argument("--fill", type=share, default=0.92, help="share of the device's memory that is tried first")
    parser.add_argument("--most", type=positive, default=2048, help="rows at most")
    parser.add_argument("--steps", type=positive, default=32)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="of the kernels; by default what is fastest")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, two rows, nothing stored")
    options = parser.parse_args()
    config, dtype = ModelConfig.from_hf(named(options.model).config), jnp.dtype(jnp.bfloat16)
    if options.quick:
        config, dtype = tiny(config), jnp.dtype(jnp.float32)
        options.prompt, options.output, options.most, options.steps, options.rounds = 32, 288, 2, 4, 2

    params = random_params(config, dtype)
    length = options.prompt + options.output
    budget = int(length * options.share) // 8 * 8
    full, bounded = jaxkv.policy("full"), jaxkv.policy(options.policy, budget=budget)
    results = [largest(params, full, length, length, options), largest(params, bounded, budget, length, options)]
    rows = [
        (
            each["policy"],
            each["slots"],
            each["batch"],
            each["step"] * 1e3,
            each["speed"],
            each["speed"] / results[0]["speed"],
        )
        for each in results
    ]
    title = f"{options.model} shape, {dtype.name}, {length} tokens, on {jax.devices()[0].device_kind}"
    print(table(title, ("policy", "slots", "batch", "ms per step", "tokens/s", "against full"), rows))
    if not options.quick:
        shape = {"model": options.model, "prompt": options.prompt, "output": options.output, "share": options.share}
        print(write("throughput", {**shape, "implementation": options.implementation, "results": results}))


if __name__ == "__main__":
    main()
