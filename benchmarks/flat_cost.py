"""What a decoded token costs: after a long prompt against a short one, and with a policy against none.

Both comparisons run in turns in one process, so that they can be read as ratios: bounded memory means that the first
is about 1, and a cheap policy that the second is.

    python -m benchmarks.flat_cost
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import jaxkv
from benchmarks.arguments import at_least, policies_at, policy_name, positive
from benchmarks.report import prose_rows, table, write
from jaxkv.plan import SLOT_SIZES, rounded
from jaxkv.sizes import slots_at

Run = Callable[[], float]  # one measurement: seconds per decoded token


def continued(params: Any, policy: jaxkv.Policy, batch: int, length: int, new_tokens: int) -> Run:
    """Decoding on from a prompt of `length` tokens under the policy; the prefill is done once, outside the timing."""
    rows = prose_rows(params.tokenizer, batch, length)
    cache = jaxkv.generate(params, rows, policy=policy, max_new_tokens=2, stop_tokens=()).cache

    def run() -> float:
        out = jaxkv.generate(params, cache=cache, max_new_tokens=new_tokens, stop_tokens=())
        return out.stats.decode_seconds / new_tokens

    return run


def prompt_for(slots: int, new_tokens: int) -> int | None:
    """The longest prompt that leaves the full cache so many slots for it and the new tokens; None: there is none."""
    length = slots - rounded(new_tokens - 1, SLOT_SIZES)
    return length if length > 0 and rounded(length, SLOT_SIZES) == length else None


def slots_with(params: Any, policy: jaxkv.Policy, budget: int) -> int | None:
    """Slots of each layer under the policy at this budget; None where they differ, or it adds what it decodes."""
    each = set(slots_at(policy, params.config, budget, budget, params.learned))
    return each.pop() if policy.bounded and len(each) == 1 else None


def without_policy(params: Any, slots: int, batch: int, new_tokens: int) -> Run:
    """The full cache with the same number of slots: a prompt that leaves room for just the new tokens."""
    length = prompt_for(slots, new_tokens)
    assert length is not None  # checked before
    rows = prose_rows(params.tokenizer, batch, length)

    def run() -> float:
        out = jaxkv.generate(params, rows, max_new_tokens=new_tokens, stop_tokens=())
        held = {layer.slots for layer in out.cache.layers}
        if held != {slots}:
            raise RuntimeError(f"the loop without a policy has {held} slots: expected {slots}, as with the policy")
        return out.stats.decode_seconds / (new_tokens - 1)

    return run


def in_turns(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Every run `rounds` times in turns, after one time each to compile."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs) if turn % 2 == 0 else reversed(list(runs)):
            times[name].append(runs[name]())
    return times


TURNS = "turn by turn"  # of `ratios`, what drifts least with the machine's speed


def ratios(times: list[float], others: list[float]) -> dict[str, float]:
    """How the times compare: the best, the medians, and the median of the ratios turn by turn."""
    return {
        "best": min(times) / min(others),
        "medians": statistics.median(times) / statistics.median(others),
        TURNS: statistics.median(mine / other for mine, other in zip(times, others, strict=True)),
    }


def main() -> None:
    """Measure, print the tables, store the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policy", type=policy_name, default="dapq-longflow")
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--short", type=positive, default=512)
    parser.add_argument("--long", type=positive, default=8000)
    parser.add_argument("--new-tokens", type=at_least(2), default=64)
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=positive, default=8)
    options = parser.parse_args()
    policy = policies_at(parser, [options.policy], options.budget)[options.policy]
    params = jaxkv.load(options.model)
    slots = slots_with(params, policy, options.budget)
    if slots is None:
        parser.error(
            f"--policy {options.policy}: expected one whose layers all have the same number of slots, and keep it"
        )
    if prompt_for(slots, options.new_tokens) is None:
        budgets = [n for n in range(policy.floor, 2 * options.budget + 1024) if slots_with(params, policy, n) == n]
        good = [budget for budget in budgets if prompt_for(budget, options.new_tokens)]
        near = sorted(sorted(good, key=lambda budget: abs(budget - options.budget))[:2])
        parser.error(
            f"--budget {options.budget} with --new-tokens {options.new_tokens}: the loop without a policy can't have "
            f"its {slots} slots; expected a budget such as {' or '.join(map(str, near))}"
        )

    results = []
    for batch in options.batch:
        short, long, none = f"after {options.short} tokens", f"after {options.long} tokens", "no policy, same slots"
        runs = {
            short: continued(params, policy, batch, options.short, options.new_tokens),
            none: without_policy(params, slots, batch, options.new_tokens),
        }
        if batch == options.batch[0]:  # the long prompt is the same question at every batch size: ask it once
            runs[long] = continued(params, policy, batch, options.long, options.new_tokens)
        times = in_turns(runs, options.rounds)
        found = {"batch": batch, "seconds_per_token": times, "policy_over_none": ratios(times[short], times[none])}
        if long in times:
            found["long_over_short"] = ratios(times[long], times[short])
        title = f"one decoded token, batch {batch}, {policy.name} at {policy.budget}"
        rows = [(name, min(each) * 1e3, statistics.median(each) * 1e3) for name, each in times.items()]
        print(table(title, ("", "ms: best", "median"), rows))
        for name in ("long_over_short", "policy_over_none"):
            if name in found:
                shown = ", ".join(f"{how} {value:.3f}" for how, value in found[name].items())
                print(f"{name.replace('_', ' ')}: {shown}")
        print()
        results.append(found)
    print("written to", write("flat_cost", {"policy": policy.name, "budget": policy.budget, "runs": results}))


if __name__ == "__main__":
    main()
