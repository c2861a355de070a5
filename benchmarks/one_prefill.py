"""`jaxkv eval`, for what policies keep of a prompt, with one prefill per prompt for all policies and budgets.

A prompt that runs as one block attends to itself whole, whatever is evicted behind it: queries, keys and values are the
same for every policy. So they are computed once, and scored and cut by each policy (by the code that `jaxkv.prefill`
runs); then the answers are decoded side by side, and there nothing is evicted: every policy is measured by its
prefill, at the positions of the text. Results are records like those of `jaxkv eval`, for `jaxkv report`.

    python -m benchmarks.one_prefill needles --out DIR          # a TOML of configs/evals, or your own
    python -m benchmarks.one_prefill needles --out DIR --model qwen2.5-coder-1.5b --lengths 1024 4096
    python -m benchmarks.one_prefill code --out DIR --data FOLDER    # LongBench's lcc.jsonl stands in the folder
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import jaxkv
from benchmarks.report import write
from jaxkv import run
from jaxkv.attend import Ask, Facts, LayerIn, prefill_layer
from jaxkv.errors import BadValue
from jaxkv.evaluation import asking, settings, summary
from jaxkv.evaluation.example import Example
from jaxkv.evaluation.results import Record, Store, table
from jaxkv.evaluation.runner import Job, about, answer_of, examples_of
from jaxkv.evaluation.scorers import score
from jaxkv.generate import first_pass
from jaxkv.models import AttentionSpec, ModelConfig
from jaxkv.models.rope import rotate
from jaxkv.plan import plan
from jaxkv.policies.catalogue import catalogue
from jaxkv.policies.needs import HIDDEN, OUTPUT
from jaxkv.policies.policy import Policy
from jaxkv.prompts import left_padded
from jaxkv.sampling import Sampler
from jaxkv.sharding.layout import ONE_DEVICE
from jaxkv.store import EMPTY, Entries, KVCache, Slots
from jaxkv.store import slots as stores
from jaxkv.weights.params import Params
from pallas_kernels.prefill_attend.api import prefill_attend

FULL = catalogue()["full"]
Seen = tuple[Float[Array, "1 T Hq D"], Float[Array, "1 T Hk D"], Float[Array, "1 T Hk D"]]  # before RoPE


@functools.partial(jax.jit, static_argnames="config")
def look(
    weights, tokens: Int[Array, "1 T"], positions: Int[Array, "1 T"], before: list[Seen], past: Int[Array, "1 P"],
    *, config: ModelConfig,
) -> tuple[Float[Array, "1 V"], list[Seen]]:  # fmt: skip
    """Run tokens behind those seen `before` at positions `past`: the last logits, and each layer's queries, keys and
    values before RoPE."""

    def attend(spec: AttentionSpec, query, key, value, state):
        keys, values = (jnp.concatenate([old, new], axis=1) for old, new in zip(state[1:], (key, value), strict=True))
        places = jnp.concatenate([past, positions], axis=1)
        turned = rotate(jnp.swapaxes(query, 1, 2), positions[:, None], spec.rope)
        read = rotate(jnp.swapaxes(keys, 1, 2), places[:, None], spec.rope)
        each_head = jnp.broadcast_to(places[:, None], read.shape[:3])
        context = prefill_attend(
            turned, read, jnp.swapaxes(values, 1, 2), positions, each_head,
            scale=spec.scale, window=spec.window, softcap=spec.softcap,
        )  # fmt: skip
        return jnp.swapaxes(context, 1, 2), (query, key, value)

    model = run.model_of(config, weights)
    hidden, seen = model(tokens, before, attend, behind=0)
    return model.logits(hidden[:, -1]), list(seen)


def nothing(config: ModelConfig, dtype: Any) -> list[Seen]:
    """What was seen before the first token."""
    empty = lambda heads, spec: jnp.zeros((1, 0, heads, spec.head_dim), dtype)  # noqa: E731
    return [
        (empty(config.num_heads, spec), empty(spec.num_kv_heads, spec), empty(spec.num_kv_heads, spec))
        for spec in config.specs
    ]


@functools.partial(jax.jit, static_argnames=("policy", "spec", "slots", "wide"))
def cut(
    seen: Seen, behind: Seen, positions: Int[Array, "1 T"], limits: Int[Array, "1"], layer: Int[Array, ""],
    out, learned, *, policy: Policy, spec: AttentionSpec, slots: int, wide: int,
) -> Slots:  # fmt: skip
    """What the policy keeps of one layer, `behind` looking too, in `slots` slots, then in `wide` with empty ones."""
    query, key, value = (jnp.concatenate(pair, axis=1) for pair in zip(seen, behind, strict=True))
    now, extra = positions[:, -1] + 1, behind[0].shape[1]
    places = jnp.concatenate([positions, now[:, None] + jnp.arange(extra)], axis=1)
    empty = stores.empty(1, spec.num_kv_heads, 0, spec.head_dim, key.dtype, policy.stats)
    given = LayerIn(empty, limits, Facts(layer, out, learned), Ask(slots, policy.prefill is not None, extra))
    kept = prefill_layer(policy, places, now, ONE_DEVICE, None, spec, query, key, value, given)[1].cache
    keys = kept.keys
    if policy.rope == "cache":  # kept unturned: decoding here turns by the text
        keys = rotate(keys, kept.positions, spec.rope)
    front = ((0, 0), (0, 0), (wide - kept.slots, 0), (0, 0))
    entries = Entries(
        jnp.pad(keys, front), jnp.pad(kept.values, front), jnp.pad(kept.positions, front[:3], constant_values=EMPTY), {}
    )
    return Slots(entries, jnp.zeros_like(kept.next_slot))


def in_one_block(policy: Policy, tokens: int) -> Policy:
    """The policy with the prompt as one block, as papers run it, unless shorter blocks are part of the method."""
    usual = FULL.block
    return dataclasses.replace(policy, block=max(tokens, usual)) if policy.block == usual else policy


def measurable(policy: Policy, tokens: int) -> str:
    """Why what a policy keeps of a prompt can't be told from one prefill, or nothing."""
    if policy.allocate.pooled:
        return "its heads share a pool"
    if policy.prefill is not None and policy.prefill.observe.replays:
        return "it replays the prompt"
    if not policy.flow.straight:
        return "its layers depend on each other"
    if policy.prefill is not None and policy.prefill.evicted.state:
        return "it does more with what leaves than drop it"
    if not policy.store.plain:
        return "its keys and values are coded"
    if HIDDEN in policy.needs:
        return "it needs the sizes of hidden states"
    return f"it runs blocks of {policy.block} tokens" if tokens > policy.block else ""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt run whole: its tokens, left-padded, with what every layer made of them, and the first new token."""

    params: Params
    tokens: np.ndarray
    positions: np.ndarray
    seen: list[Seen]
    first: int
    steps: int
    looks: dict[tuple[int, ...], list[Seen]] = dataclasses.field(default_factory=dict)

    @property
    def ids(self) -> np.ndarray:
        """The tokens without padding."""
        return self.tokens[0, self.positions[0] >= 0]

    def behind(self, tokens: Sequence[int]) -> list[Seen]:
        """What tokens that stand behind the prompt make of it."""
        known = tuple(int(token) for token in tokens)
        if known not in self.looks:
            there = jnp.asarray(len(self.ids) + np.arange(len(known))[None], jnp.int32)
            self.looks[known] = look(
                self.params.weights, jnp.asarray([known], jnp.int32), there, self.seen, jnp.asarray(self.positions),
                config=self.params.config,
            )[1]  # fmt: skip
        return self.looks[known]

    def kept(self, policy: Policy, wide: int) -> list[Slots]:
        """Each layer's cache under the policy, in `wide` slots."""
        config = self.params.config
        observe = policy.prefill.observe if policy.prefill else None
        behind = nothing(config, self.params.dtype)
        if observe is not None and observe.drafts:
            behind = self.behind(self.ahead(policy, observe.extra))
        elif observe is not None and observe.extra:
            behind = self.behind(observe.behind(self.ids, config.vocab_size, None))
        learned = self.params.learned_for(policy.learns, policy.name)
        shapes, _, limits = plan(policy, config, None, np.array([len(self.ids)]), 0, learned=learned)
        model = run.model_of(config, self.params.weights) if OUTPUT in policy.needs else None
        return [
            cut(
                self.seen[i], behind[i], jnp.asarray(self.positions), jnp.asarray(limits[i]), jnp.int32(i),
                model.output_matrix(i) if model is not None else None, {k: v[i] for k, v in learned.items()},
                policy=policy, spec=config.attention_spec(i), slots=min(shapes.slots[i], wide), wide=wide,
            )
            for i in range(config.num_layers)
        ]  # fmt: skip

    def ahead(self, policy: Policy, count: int) -> np.ndarray:
        """The `count` tokens that a lookahead policy's own first pass goes on with."""
        assert policy.budget is not None
        kept = self.kept(first_pass(policy), policy.budget + count)
        return self.answers([kept], count - 1)[0]

    def answers(self, caches: Sequence[list[Slots]], steps: int) -> np.ndarray:
        """The first token and `steps` more from each of the caches, int32 `[R, steps + 1]`."""
        rows = len(caches)
        layers = [jax.tree.map(lambda *x: jnp.concatenate(x), *each) for each in zip(*caches, strict=True)]
        width = layers[0].slots
        same = lambda value: jnp.full(rows, value, jnp.int32)  # noqa: E731
        cache = KVCache(
            tuple(layers), same(len(self.ids)), jnp.full((len(layers), rows), width, jnp.int32), same(self.first)
        )
        keys = jax.vmap(jax.random.key)(same(0))
        state = run.DecodeState(cache, jnp.zeros(rows, bool), same(steps + 1), None, keys)
        _, tokens = run.decode(
            self.params.weights, state, jnp.int32(steps), room=steps, config=self.params.config, policy=FULL,
            sampler=Sampler(), stop=(),
        )  # fmt: skip
        return np.concatenate([np.full((rows, 1), self.first), np.asarray(tokens)], axis=1)


def run_whole(params: Params, ids: np.ndarray, length: int, steps: int) -> Prompt:
    """The prompt in one block, left-padded to `length`."""
    tokens, positions = left_padded([ids], length, np.zeros(1, np.int32))
    none = jnp.zeros((1, 0), jnp.int32)
    logits, seen = look(
        params.weights, jnp.asarray(tokens), jnp.asarray(positions), nothing(params.config, params.dtype), none,
        config=params.config,
    )  # fmt: skip
    return Prompt(params, tokens, positions, seen, int(jnp.argmax(logits[0])), steps)


def ask(prompt: Prompt, policies: Sequence[Policy], wide: int, chunk: int) -> np.ndarray:
    """The tokens that the prompt leads to under each policy, `chunk` of them side by side."""
    out = []
    for start in range(0, len(policies), chunk):
        some = [prompt.kept(policy, wide) for policy in policies[start : start + chunk]]
        filled = [*some, *[some[-1]] * (min(chunk, len(policies)) - len(some))]  # one batch size, one compilation
        out.append(prompt.answers(filled, prompt.steps)[: len(some)])
    return np.concatenate(out)


def evaluate(params: Params, asked: settings.Settings, folder: Path, chunk: int) -> Store:
    """Every cell's answer to the first question of every example that the folder does not hold yet."""
    store = Store(folder)
    done = store.open({**settings.to_dict(asked), "decode": "nothing evicted"}, params.fingerprint)
    examples, cells, started = examples_of(asked, params.tokenizer), asked.cells(), time.perf_counter()
    for number, example in enumerate(examples):
        jobs = [Job(cell, "aware", ((example, 0),)) for cell in cells]
        if done.issuperset(key for job in jobs for key in job.keys):
            continue
        ids = np.concatenate(asking.asked(params.tokenizer, example, example.questions[0]))
        length = -(-max(len(ids), example.length or 0) // 16) * 16
        prompt = run_whole(params, ids, length, example.max_new_tokens - 1)
        records: list[Record] = []
        alike: dict[int | None, list[tuple[Job, Policy]]] = {}  # by budget: their caches have one shape
        for job in jobs:
            policy = in_one_block(job.cell.policy, length) if job.cell.policy is not None else None
            reason = job.cell.reason if policy is None else measurable(policy, length)
            if policy is None or reason:
                records.append({**about(job, job.rows[0]), "score": None, "skipped": reason, "answer": None})
            else:
                alike.setdefault(job.cell.budget, []).append((job, policy))
        for budget, some in alike.items():
            kept = min(budget or len(ids), len(ids))
            said = ask(prompt, [policy for _, policy in some], (budget or length) + example.max_new_tokens, chunk)
            records += [
                {**about(job, job.rows[0]), **_graded(params, example, tokens, kept, len(ids))}
                for (job, _), tokens in zip(some, said.tolist(), strict=True)
            ]
        store.add(records)
        took = time.perf_counter() - started
        print(f"[{number + 1}/{len(examples)}] {example.task}, {length} tokens ({took:.0f} s)", flush=True)
    return store


def _graded(params: Params, example: Example, tokens: list[int], kept: int, size: int) -> Record:
    answer, answers = answer_of(params, tokens), example.questions[0].answers
    per_token = sum(2 * spec.num_kv_heads * spec.head_dim for spec in params.config.specs)
    return {
        "score": score(example.scorer, answer, answers), "answer": answer, "answers": list(answers),
        "prompt_tokens": size, "kept": kept, "cache_bytes": kept * per_token * np.dtype(params.dtype).itemsize,
    }  # fmt: skip


def main() -> None:
    """Ask, print the table, store records and CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a TOML of configs/evals, or a path")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--model", default=None)
    parser.add_argument("--policies", nargs="+", default=None, help="instead of the run's")
    parser.add_argument("--budgets", type=int, nargs="+", default=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=None, help="of every task")
    parser.add_argument("--depths", type=float, nargs="+", default=None, help="of every task")
    parser.add_argument("--tasks", nargs="+", default=None, help="only these of the run's")
    parser.add_argument("--data", type=Path, default=None, help="the folder of the run's data files")
    parser.add_argument("--limit", type=int, default=None, help="rows of each data file")
    parser.add_argument("--name", default=None, help="of the JSON file in benchmarks/results")
    parser.add_argument("--chunk", type=int, default=32, help="answers decoded side by side")
    options = parser.parse_args()
    asked = settings.load(options.run)
    given = {name: value for name in ("policies", "budgets", "lengths", "depths") if (value := getattr(options, name))}
    each = {name: tuple(given.pop(name)) for name in ("lengths", "depths") if name in given}
    each |= {} if options.limit is None else {"limit": options.limit}
    chosen = [task for task in asked.tasks if task.name in (options.tasks or (task.name,))]
    if options.data is not None:
        chosen = [
            dataclasses.replace(task, file=str(options.data / task.file)) if task.file else task for task in chosen
        ]
    asked = dataclasses.replace(
        asked,
        model=options.model or asked.model,
        tasks=tuple(dataclasses.replace(task, **each) for task in chosen),
        **{name: tuple(value) for name, value in given.items()},
    )
    if asked.ratios:
        raise BadValue(f"ratios={asked.ratios}: expected budgets, tokens per KV head")
    store = evaluate(jaxkv.load(asked.model), asked, options.out, options.chunk)
    records = list(store.records())
    table(records, store.folder)
    print(summary.text_table(summary.quality(records)))
    print(
        "written to",
        write(options.name or f"one_prefill-{asked.name}", {"model": asked.model, "means": means(records)}),
    )


def means(records: Sequence[dict]) -> list[dict]:
    """The mean score of every policy and budget by length, task and haystack, and of how many answers."""
    names = ("policy", "budget", "length", "task", "haystack")
    found = summary.grouped(summary.answers(records), lambda record: tuple(record[name] for name in names))
    return [
        {
            **dict(zip(names, key, strict=True)),
            "score": statistics.fmean(r["score"] for r in some),
            "answers": len(some),
        }
        for key, some in found.items()
    ]


if __name__ == "__main__":
    main()
