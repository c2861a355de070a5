"""Speculative against plain decoding, in turns in one run: questions over a passage, summaries, code completion.

Stories are there for drafts that fail: little of them stood in the text before.

python -m benchmarks.speculative
taskset -c 0 python -m benchmarks.speculative --clock processor   # where others use the machine as well
"""

import argparse
import contextlib
import importlib
import json
import statistics
import time
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax

import jaxkv
from benchmarks.arguments import at_least, policies_at, policy_name, positive, result_name
from benchmarks.report import DATA, RESULTS, cores, table, write
from jaxkv.evaluation import texts as texts_of
from jaxkv.speculative import AASD, Conditional, PromptLookup, SelfDraft

generation = importlib.import_module("jaxkv.generate")  # the module; the name alone is the function's
TASKS = ("questions", "summaries", "code", "stories")
STORIES = (
    "Write a short story about a glass blower who is afraid of birds.",
    "Write a letter from a mountain guide to her brother in a big city.",
    "Describe a market on another planet, with as many different goods as you can.",
    "Write a poem about the first day of a very long journey.",
)
METHODS = {
    "lookup": PromptLookup(),
    "aasd": AASD(),
    "aasd, no fallback": AASD(fallback=False),
    "aasd, conditional": AASD(verify=Conditional()),
    "self": SelfDraft(jaxkv.policy("streaming-llm", budget=128, rope="text")),
}


def prompts_of(tokenizer: Any, task: str) -> list[list[int]]:
    """The token ids of every prompt of a task."""
    paragraphs = texts_of.paragraphs()
    if task == "code":
        texts = [file.read_text(encoding="utf-8").rstrip("\n") + "\n" for file in sorted((DATA / "code").glob("*.txt"))]
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    if task == "questions":
        asked = json.loads((DATA / "questions.json").read_text(encoding="utf-8"))
        texts = [
            "\n\n".join(paragraphs[each["first"] : each["last"]])
            + f"\n\nAnswer in the words of the text. {each['question']}"
            for each in asked
        ]
    elif task == "stories":
        texts = list(STORIES)
    else:
        parts = [paragraphs[start : start + 5] for start in range(0, len(paragraphs) - 4, 3)]
        texts = ["\n\n".join(part) + "\n\nSummarise the text above in one paragraph." for part in parts]
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in texts
    ]
    return [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]


def clock(name: str) -> Any:
    """Where jaxkv reads the time, for its statistics and for what it learns of a tree's cost.

    On one core processor time is what the wall clock would show if nobody else ran there.
    """
    if name == "wall":
        return contextlib.nullcontext()
    return mock.patch.object(generation, "time", types.SimpleNamespace(perf_counter=time.process_time))


def measure(params: Any, policy: jaxkv.Policy, prompts: list, methods: dict, options: Any) -> dict[str, dict]:
    """Every method over every prompt in turns with plain decoding; the first turn, which compiles, is not counted.

    Of the other turns each prompt's fastest counts, for every method and for plain decoding alike: others may use the
    machine.
    """
    ways = {"plain": None, **methods}
    batches = [prompts[at : at + options.batch] for at in range(0, len(prompts), options.batch)]
    runs: dict[str, list[list]] = {name: [[] for _ in batches] for name in ways}
    equal: dict[str, list[bool]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for number, batch in enumerate(batches):
            texts = {}
            for name, method in ways.items():
                out = jaxkv.generate(
                    params, batch, policy=policy, max_new_tokens=options.new_tokens, stop_tokens=(), speculative=method
                )
                texts[name] = out.tokens.tolist()
                if turn:
                    runs[name][number].append(out.stats)
                    equal[name] += [mine == plain for mine, plain in zip(texts[name], texts["plain"], strict=True)]
    tokens = len(prompts) * (options.new_tokens - 1)

    def fastest(name: str, what: str) -> float:
        return sum(min(getattr(stats, what) for stats in turns) for turns in runs[name])

    result = {}
    for name in ways:
        decode, before = fastest(name, "decode_seconds"), fastest(name, "prefill_seconds")
        plain, plain_before = fastest("plain", "decode_seconds"), fastest("plain", "prefill_seconds")
        result[name] = {
            "tokens_per_second": tokens / decode,
            "over_plain": plain / decode,
            "over_plain_with_prefill": (plain + plain_before) / (decode + before),
            "equal": statistics.mean(equal[name]),
            "decode_seconds": [[stats.decode_seconds for stats in turns] for turns in runs[name]],
            "prefill_seconds": [[stats.prefill_seconds for stats in turns] for turns in runs[name]],
        }
        if name != "plain":
            told = [stats.speculation for turns in runs[name] for stats in turns]
            tried = [each.acceptance_length for each in told if each.trees]
            result[name] |= {
                "acceptance_length": statistics.mean(tried) if tried else 1.0,
                "tokens_per_pass": statistics.mean(each.tokens_per_pass for each in told),
                "trees": sum(each.trees for each in told),
                "steps": sum(each.steps for each in told),
                "departed": sum(each.departed for each in told) / (tokens * options.rounds),
                "cost": statistics.median(each.cost for each in told),
            }
    return result


def shown(task: str, result: dict[str, dict], about: str) -> str:
    """One task as a table."""
    header = ("", "tokens/s", "over plain", "with prefill", "acceptance length", "per pass", "departed", "same text")
    rows = []
    for name, each in result.items():
        drafts = [each.get(key, "-") for key in ("acceptance_length", "tokens_per_pass", "departed")]
        rows.append(
            (name, each["tokens_per_second"], each["over_plain"], each["over_plain_with_prefill"], *drafts,
             f"{each['equal']:.0%}")
        )  # fmt: skip
    return table(f"{task}: {about}", header, rows)


def bars(title: str, groups: Sequence[str], series: dict[str, list[float]], line: float) -> str:
    """A bar chart as SVG: one group per task, one bar per method, and a line across at `line`."""
    colours = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee")
    width, height, left, low = 760, 340, 50, 280
    top = max([line, *(value for values in series.values() for value in values)]) * 1.15
    each = (width - left - 20) / len(groups)
    bar = each * 0.8 / len(series)
    level = lambda value: low - (low - 40) * value / top  # noqa: E731
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/><text x="{left}" y="22">{title}</text>'
    ]
    for column, group in enumerate(groups):
        start = left + column * each
        parts.append(f'<text x="{start + each * 0.4:.0f}" y="{low + 18}" text-anchor="middle">{group}</text>')
        for number, values in enumerate(series.values()):
            x, y = start + number * bar, level(values[column])
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar * 0.9:.1f}" height="{low - y:.1f}" '
                f'fill="{colours[number % len(colours)]}"/>'
                f'<text x="{x + bar * 0.45:.1f}" y="{y - 4:.1f}" text-anchor="middle" font-size="10">'
                f"{values[column]:.2f}</text>"
            )
    parts.append(
        f'<line x1="{left}" x2="{width - 20}" y1="{level(line):.1f}" y2="{level(line):.1f}" stroke="#444" '
        'stroke-dasharray="4 3"/>'
    )
    for number, name in enumerate(series):
        x = left + number * 140
        parts.append(
            f'<rect x="{x}" y="{height - 24}" width="12" height="12" fill="{colours[number % len(colours)]}"/>'
            f'<text x="{x + 17}" y="{height - 14}">{name}</text>'
        )
    return "".join(parts) + "</svg>\n"


def main() -> None:
    """Measure, print one table per task, store JSON and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policy", type=policy_name, default="dapq-longflow")
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--methods", nargs="+", default=["lookup", "aasd", "aasd, conditional"], choices=list(METHODS))
    parser.add_argument("--prompts", type=positive, default=4, help="of each task")
    parser.add_argument("--new-tokens", type=at_least(2), default=128)
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--clock", default="wall", choices=["wall", "processor"], help="processor: on one core only")
    parser.add_argument("--name", type=result_name, default="speculative", help="of the files in benchmarks/results")
    options = parser.parse_args()
    if options.clock == "processor" and cores() > 1:
        parser.error(f"--clock processor on {cores()} cores would add their times: pin the process to one (taskset)")
    policy = policies_at(parser, [options.policy], options.budget)[options.policy]
    bounded = policy.evicts
    params = jaxkv.load(options.model)
    methods = {name: METHODS[name] for name in options.methods}
    about = f"{options.policy}{f' at {options.budget}' if bounded else ''}, batch {options.batch}, "
    about += f"{options.new_tokens} new tokens, float32, {cores()} threads, {options.clock} time"

    results = {}
    for task in options.tasks:
        jax.clear_caches()  # so many programs, each in many pieces, come near the number of mappings a process may have
        prompts = prompts_of(params.tokenizer, task)[: options.prompts]
        with clock(options.clock):
            results[task] = measure(params, policy, prompts, methods, options)
        print(shown(task, results[task], about), end="\n\n", flush=True)
    for what, key, line in (
        ("tokens per second over plain decoding", "over_plain", 1.0),
        ("mean acceptance length", "acceptance_length", 1.5),
    ):
        series = {name: [results[task][name][key] for task in results] for name in methods}
        path = RESULTS / f"{options.name}-{key.replace('_', '-')}.svg"
        path.write_text(bars(f"{what} ({about})", list(results), series, line), encoding="utf-8")
        print("drawn to", path)
    print("written to", write(options.name, {**vars(options), "results": results}))


if __name__ == "__main__":
    main()
