"""The same run through kvpress: its questions, seeds, model and kept-token counts; the same records.

    python -m benchmarks.peer_kvpress default --oracle-python PATH
    jaxkv report results/default results/default-kvpress --out results/both

PATH is a Python with torch, transformers and kvpress (`tests/oracle/README.md`). It runs this module as the peer that
answers requests: {"press": ..., "kept": n or null, "context": [ids], "rest": [ids], "compress": "all" or "context",
"new_tokens": n, "stop": [ids]}.

What is compared: kvpress compresses a prompt once and adds every later token, so its caches grow by the answer, where
our decode phases hold the budget. It is asked one prompt at a time, as it is built for; its speed is not recorded.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peer import Peer, serve

# Our policy -> the press that is its twin, or nearest: kvpress' ObservedAttention averages where H2O sums, and protects
# nothing; StreamingLLM keeps text positions there, as our rope="text".
# Presses run with kvpress' own numbers: window=64, kernel=5, pool="avg" here, and spare=0 for key norm.
TWINS = {
    "full": "none",
    "streaming-llm": "StreamingLLMPress",
    "snapkv": "SnapKVPress",
    "h2o": "ObservedAttentionPress",
    "tova": "TOVAPress",
    "knorm": "KnormPress",
    "adakv": "AdaKVPress(SnapKVPress)",
    "critical-adakv": "CriticalAdaKVPress(SnapKVPress)",
}
OTHERS = ("ExpectedAttentionPress", "KeyDiffPress", "PyramidKVPress", "LagKVPress")  # no twin in the default run
EAGER = ("ObservedAttentionPress",)  # needs the attention weights that only the plain implementation gives


def main() -> None:
    """Run what the folder doesn't hold yet; or answer requests, as the oracle's process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="default", help="a TOML file or a shipped run, as of jaxkv eval")
    parser.add_argument("--oracle-python", help="a Python with torch, transformers and kvpress")
    parser.add_argument("--out", default=None, help="results/NAME-kvpress by default")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--model", default=None, help="instead of the run's")
    parser.add_argument("--presses", nargs="*", default=list(OTHERS), help="besides the twins of the run's policies")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        serve(lambda: begin(options.worker, options.threads))
    elif options.oracle_python is None:
        parser.error("--oracle-python is needed: a Python with torch, transformers and kvpress")
    else:
        ask(options)


def ask(options: argparse.Namespace) -> None:
    """Put the run's questions to kvpress and store its answers."""
    import dataclasses

    import jaxkv
    from jaxkv import evaluation
    from jaxkv.evaluation import asking, runner, summary
    from jaxkv.evaluation.results import Store
    from jaxkv.evaluation.scorers import score

    settings = evaluation.load(options.run)
    settings = dataclasses.replace(settings, model=options.model or settings.model, fidelity=None, retention=None)
    params = jaxkv.load(settings.model)
    store = Store(options.out or f"results/{settings.name}-kvpress")
    done = store.open(
        {**evaluation.settings.to_dict(settings), "presses": options.presses}, f"kvpress: {params.fingerprint}"
    )
    peer = started(options.oracle_python, settings.model, options.threads)
    print("kvpress side:", peer.about, file=sys.stderr)
    examples = [each for each in runner.examples_of(settings, params.tokenizer) if not each.output]
    columns = [(press, budget) for press in presses(settings, options.presses) for budget in settings.budgets]
    columns = [("none", None), *((press, budget) for press, budget in columns if press != "none")]
    for number, (press, budget) in enumerate(columns):
        print(f"[{number}/{len(columns)}] {press} {budget or ''}", file=sys.stderr, flush=True)
        for mode in settings.modes:
            for example in examples:
                records = []
                for at, question in enumerate(example.questions):
                    key = hashlib.sha256(f"kvpress|{press}|{budget}|{mode}|{example.digest}-{at}".encode()).hexdigest()[
                        :16
                    ]
                    if key in done:
                        continue
                    context, rest = asking.asked(params.tokenizer, example, question)
                    said = peer.ask(
                        press=press, kept=budget, context=context.tolist(), rest=rest.tolist(),
                        compress="all" if mode == "aware" else "context", new_tokens=example.max_new_tokens,
                        stop=list(params.config.stop_tokens),
                    )  # fmt: skip
                    about = {
                        "kind": "answer", "key": key, "source": "kvpress", "policy": label(press), "budget": budget,
                        "ratio": None, "mode": mode, "task": example.task, "haystack": example.haystack,
                        "length": example.length, "example": example.digest, "question": at,
                        "depth": example.depth if question.depth is None else question.depth,
                        "answers": list(question.answers), "prompt_tokens": len(context) + len(rest), "batch": 1,
                    }  # fmt: skip
                    if "error" in said:
                        records.append({**about, "score": None, "answer": None, "skipped": said["error"]})
                        continue
                    answer = params.tokenizer.decode(
                        said["tokens"], skip_special_tokens=True, clean_up_tokenization_spaces=False
                    )
                    records.append(
                        {
                            **about,
                            "answer": answer,
                            "score": score(example.scorer, answer, question.answers),
                            "kept": said["kept"],
                            "cache_bytes": said["cache_bytes"],
                            "tokens_per_second": None,
                        }
                    )
                store.add(records)
    print(summary.text_table(summary.quality(store.records())))


def started(python: str, model: str, threads: int | None = None) -> Peer:
    """kvpress with the model loaded, on so many threads (None: as many as there are cores)."""
    from jaxkv.weights.source import locate

    threads = threads or len(os.sched_getaffinity(0))
    return Peer(python, "benchmarks.peer_kvpress", "--worker", str(locate(model)), "--threads", str(threads))


def presses(settings: Any, others: list[str]) -> list[str]:
    """The twins of the run's policies, and the others."""
    names = [cell.policy.name for cell in settings.cells() if cell.policy is not None]
    twins = [TWINS[name] for name in dict.fromkeys(names) if name in TWINS]
    return [*twins, *(press for press in others if press not in twins)]


def label(press: str) -> str:
    """Our name of a press that has a twin, so that the report gives both one colour; its own name otherwise."""
    return next((ours for ours, theirs in TWINS.items() if theirs == press), press.replace("Press", ""))


def begin(model: Path, threads: int) -> tuple[dict[str, Any], Callable]:
    """The oracle's versions, and what answers a request."""
    from importlib import metadata

    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    where = {"pretrained_model_name_or_path": str(model)}
    if model.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    loaded: dict[str, Any] = {}

    def model_for(press: str) -> Any:
        how = "eager" if press in EAGER else "sdpa"
        if how not in loaded:
            loaded.clear()  # one at a time: a larger model would not fit twice
            loaded[how] = transformers.AutoModelForCausalLM.from_pretrained(
                **where, dtype=torch.float32, attn_implementation=how
            ).eval()
        return loaded[how]

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            with torch.inference_mode():
                return _answer(model_for(request["press"]), request)
        except AssertionError as error:  # a press that needs a longer prompt or a larger budget
            return {"error": f"{request['press']} at {request['kept']}: {error or 'refused'}"}

    versions = {name: metadata.version(name) for name in ("torch", "transformers", "kvpress")}
    return {**versions, "threads": torch.get_num_threads()}, answer


def _answer(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Compress, then decode greedily."""
    import contextlib

    import kvpress
    import torch
    from transformers import DynamicCache

    context, rest = request["context"], request["rest"]
    first, second = (context + rest, []) if request["compress"] == "all" else (context, rest)
    kept, pressed = request["kept"], contextlib.nullcontext()
    if kept is not None and kept < len(first):
        # kvpress keeps int(T * (1 - ratio)): the half keeps rounding from taking one away
        outer, _, inner = request["press"].rstrip(")").partition("(")
        press = getattr(kvpress, inner or outer)(compression_ratio=1 - (kept + 0.5) / len(first))
        pressed = (getattr(kvpress, outer)(press) if inner else press)(model)
    cache = DynamicCache()
    with pressed:
        out = model(torch.tensor([first]), past_key_values=cache, logits_to_keep=1)
    held = [layer.keys.shape[2] for layer in cache.layers]
    place = len(first)
    if second:
        at = torch.arange(place, place + len(second))[None]
        out = model(torch.tensor([second]), past_key_values=cache, position_ids=at, logits_to_keep=1)
        place += len(second)
    tokens: list[int] = []
    while True:
        token = int(out.logits[0, -1].argmax())
        if token in request["stop"]:
            break
        tokens.append(token)
        if len(tokens) == request["new_tokens"]:
            break
        out = model(torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[place]]))
        place += 1
    bytes_held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    return {"tokens": tokens, "kept": sum(held) / len(held), "cache_bytes": bytes_held}


if __name__ == "__main__":
    main()
