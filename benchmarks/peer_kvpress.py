"""The same run through kvpress: its questions, seeds, model and kept-token counts; the same records.

    python -m benchmarks.peer_kvpress default --oracle-python PATH
    jaxkv report results/default results/default-kvpress --out results/both

Instead of a run's name it takes the folder that `jaxkv eval --out` wrote, for the questions of that run: of published
data sets too, under its model, at its budgets and ratios.

PATH is a Python with torch, transformers and kvpress (`tests/oracle/README.md`). It runs this module as the peer that
answers requests: {"press": ..., "kept": n or null, "context": [ids], "rest": [ids], "compress": "all" or "context",
"new_tokens": n, "stop": [ids], "every": n} with the first tokens, {"more": true} with those that follow.

What is compared: most presses compress a prompt once and add every later token, so their caches grow by the answer,
where our decode phases hold the budget. "SnapKVPress then KnormPress" is kvpress' PrefillDecodingPress: the first cuts
the prompt, the second the cache back to as many tokens after every `--every` new ones. kvpress is asked one prompt at a
time, as it is built for; its speed is not recorded. A press only changes what a prompt leaves behind, so one prefill of
a prompt serves all presses that are no more than a hook behind each layer's attention.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.arguments import positive, python
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
THEN = " then "  # between the press of the prompt and that of decoding
PIECE = 8  # tokens of an answer between two looks at whether what follows would change its score


def main() -> None:
    """Run what the folder doesn't hold yet; or answer requests, as the oracle's process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "run", nargs="?", default="default", help="a TOML file or a shipped run, as of jaxkv eval, or what it wrote"
    )
    parser.add_argument("--oracle-python", type=python, help="a Python with torch, transformers and kvpress")
    parser.add_argument("--out", default=None, help="results/NAME-kvpress by default")
    parser.add_argument(
        "--every", type=positive, default=16, help="new tokens between two cuts of a press that decodes"
    )
    parser.add_argument("--threads", type=positive, default=None)
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
    """Put the run's questions to kvpress, from the shortest prompt on, and store its answers."""
    import dataclasses

    import jaxkv
    from jaxkv import evaluation
    from jaxkv.evaluation import asking, runner, summary
    from jaxkv.evaluation.results import Store

    folder = Path(options.run)
    found = evaluation.settings.from_dict(Store(folder).about()["settings"]) if folder.is_dir() else None
    settings = found or evaluation.load(options.run)
    settings = dataclasses.replace(settings, model=options.model or settings.model, fidelity=None, retention=None)
    params = jaxkv.load(settings.model, weights="file" if settings.weights == "file" else None)
    peer = started(options.oracle_python, settings.model, options.threads)  # first: what is opened is begun
    print("kvpress side:", peer.about, file=sys.stderr)
    store = Store(options.out or f"results/{settings.name}-kvpress")
    done = store.open(
        {**evaluation.settings.to_dict(settings), "presses": options.presses, "every": options.every},
        f"kvpress: {params.fingerprint}",
    )
    examples = [each for each in runner.examples_of(settings, params.tokenizer) if not each.output]
    examples.sort(key=lambda example: asking.size(params.tokenizer, example))
    sizes = [(budget, None) for budget in settings.budgets] + [(None, ratio) for ratio in settings.ratios]
    columns = [(press, *size) for press in presses(settings, options.presses) for size in sizes if press != "none"]
    columns.insert(0, ("none", None, None))
    rows = [(mode, example) for mode in settings.modes for example in examples]
    eager = [column for column in columns if column[0] in EAGER]  # behind the others: they need the model loaded anew
    passes = [(row, some) for some in ([c for c in columns if c not in eager], eager) if some for row in rows]
    for number, ((mode, example), some) in enumerate(passes):
        print(f"[{number}/{len(passes)}] {example.task}, {mode}", file=sys.stderr, flush=True)
        for press, budget, ratio in some:
            size = "" if budget is None and ratio is None else budget if ratio is None else ratio
            records = []
            for at, question in enumerate(example.questions):
                name = f"kvpress|{press}|{size}|{mode}|{example.digest}-{at}"
                key = hashlib.sha256(name.encode()).hexdigest()[:16]
                if key in done:
                    continue
                context, rest = asking.asked(params.tokenizer, example, question)
                tokens = len(context) + len(rest)
                cut = tokens if mode == "aware" else len(context)  # what the press compresses
                about = {
                    "kind": "answer", "key": key, "source": "kvpress", "policy": label(press), "budget": budget,
                    "ratio": ratio, "mode": mode, "task": example.task, "haystack": example.haystack,
                    "length": example.length, "example": example.digest, "question": at,
                    "depth": question.depth,
                    "answers": list(question.answers), "prompt_tokens": tokens, "batch": 1,
                }  # fmt: skip
                said = answered(
                    peer, params, example.scorer, press=press,
                    kept=budget if ratio is None else int(cut * (1 - ratio)), context=context.tolist(),
                    rest=rest.tolist(), compress="all" if mode == "aware" else "context",
                    new_tokens=example.max_new_tokens, stop=list(params.config.stop_tokens), every=options.every,
                )  # fmt: skip
                records.append({**about, **said})
                if said["answer"] is not None:
                    records[-1]["score"] = score_of(example, question, said["answer"])
            store.add(records)
    print(summary.text_table(summary.quality(store.records())))


def answered(peer: Peer, params: Any, scorer: str, **request: Any) -> dict[str, Any]:
    """kvpress' answer to a question, as far as it can change the score, and what it held then."""
    from jaxkv.evaluation.runner import answer_of
    from jaxkv.evaluation.scorers import settled

    said, tokens = peer.ask(**request), []
    while "error" not in said:
        tokens += said["tokens"]
        answer = answer_of(params, tokens)
        if said["done"] or settled(scorer, answer):
            held = {name: said[name] for name in ("kept", "cache_bytes")}
            return {"answer": answer, **held, "tokens_per_second": None}
        said = peer.ask(more=True)
    return {"score": None, "answer": None, "skipped": said["error"]}


def score_of(example: Any, question: Any, answer: str) -> float:
    """The score of an answer to one of an example's questions."""
    from jaxkv.evaluation.scorers import score

    return score(example.scorer, answer, question.answers, question.classes)


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
    read: dict[tuple[int, ...], Prefill] = {}  # of the last prompt

    def model_for(press: str) -> Any:
        how = "eager" if press in EAGER else "sdpa"
        if how not in loaded:
            loaded.clear()  # one at a time: a larger model would not fit twice
            read.clear()
            loaded[how] = transformers.AutoModelForCausalLM.from_pretrained(
                **where, dtype=torch.float32, attn_implementation=how
            ).eval()
            config = loaded[how].config
            if getattr(config, "head_dim", None) is None:  # Qwen2 has none, and CriticalAdaKVPress asks for it
                config.head_dim = config.hidden_size // config.num_attention_heads
        return loaded[how]

    torch.set_grad_enabled(False)
    running: list[Iterator[dict[str, Any]]] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            if "more" not in request:
                while running:
                    running.pop().close()  # type: ignore[attr-defined]
                running.append(_answer(model_for(request["press"]), request, read))
            return next(running[0])
        except AssertionError as error:  # a press that needs a longer prompt or a larger budget
            return {"error": f"{request['press']} at {request['kept']}: {error or 'refused'}"}

    versions = {name: metadata.version(name) for name in ("torch", "transformers", "kvpress")}
    return {**versions, "threads": torch.get_num_threads()}, answer


def _press(name: str, kept: int, tokens: int, every: int) -> Any:
    """The press that leaves so many of a prompt's tokens; None where there are no more, and nothing is cut later."""
    import kvpress

    first, _, second = name.partition(THEN)
    if kept >= tokens and not second:
        return None
    if second:
        decoding = kvpress.DecodingPress(
            getattr(kvpress, second)(), compression_interval=every, target_size=kept, hidden_states_buffer_size=every
        )
        return kvpress.PrefillDecodingPress(_press(first, kept, tokens, every), decoding)
    outer, _, inner = first.rstrip(")").partition("(")
    # kvpress keeps int(T * (1 - ratio)): the half keeps rounding from taking one away
    press = getattr(kvpress, inner or outer)(compression_ratio=1 - (kept + 0.5) / tokens)
    return getattr(kvpress, outer)(press) if inner else press


class Prefill:
    """A prompt read without a press: its last logits, and what each layer's attention was called with and left."""

    def __init__(self, model: Any, ids: list[int]):
        import torch
        from transformers import DynamicCache

        self._calls: list[tuple[Any, dict[str, Any], Any]] = []

        def noted(module: Any, _: Any, given: dict[str, Any], output: Any) -> None:
            self._calls.append((module, given, output[1:]))

        hooks = [layer.self_attn.register_forward_hook(noted, with_kwargs=True) for layer in model.model.layers]
        self._cache = DynamicCache()
        try:
            self.out = model(torch.tensor([ids]), past_key_values=self._cache, logits_to_keep=1)
        finally:
            for hook in hooks:
                hook.remove()

    def pressed(self, model: Any, press: Any) -> Any:
        """The cache that a press makes of it (None: all of it)."""
        from transformers import DynamicCache

        cache = DynamicCache()
        if press is not None:
            press.post_init_from_model(model)
        for number, (module, given, output) in enumerate(self._calls):
            module.masked_key_indices, module.rotary_emb = None, model.model.rotary_emb
            layer = self._cache.layers[number]
            cache.update(layer.keys, layer.values, number)
            if press is not None:
                press.forward_hook(module, [], {**given, "past_key_values": cache}, (None, *output))
        return cache


def _answer(model: Any, request: dict[str, Any], read: dict[tuple[int, ...], Prefill]) -> Iterator[dict[str, Any]]:
    """Compress, then decode greedily, `PIECE` tokens at a time. `read` keeps the prefill of the last prompt, where the
    press is such that it serves it."""
    import contextlib

    import kvpress
    import torch
    from transformers import DynamicCache

    context, rest = request["context"], request["rest"]
    first, second = (context + rest, []) if request["compress"] == "all" else (context, rest)
    kept, of_prompt, of_all = request["kept"], contextlib.nullcontext(), contextlib.nullcontext()
    press = None if kept is None else _press(request["press"], kept, len(first), request.get("every", 1))
    hooks_alone = press is None or type(press).__call__ is kvpress.BasePress.__call__
    shared = hooks_alone and request["press"] not in EAGER
    if press is not None and not shared:
        pressed = press(model)
        of_prompt, of_all = (of_prompt, pressed) if THEN in request["press"] else (pressed, of_all)
    with of_all:
        if shared:
            key = tuple(first)
            if key not in read:
                read.clear()
                read[key] = Prefill(model, first)
            out, cache = read[key].out, read[key].pressed(model, press)
        else:
            cache = DynamicCache()
            with of_prompt:
                out = model(torch.tensor([first]), past_key_values=cache, logits_to_keep=1)
        held = [layer.keys.shape[2] for layer in cache.layers]
        place = len(first)
        if second:
            at = torch.arange(place, place + len(second))[None]
            out = model(torch.tensor([second]), past_key_values=cache, position_ids=at, logits_to_keep=1)
            place += len(second)
        piece: list[int] = []
        for number in range(request["new_tokens"]):
            token = int(out.logits[0, -1].argmax())
            if token in request["stop"]:
                break
            piece.append(token)
            if number + 1 == request["new_tokens"]:
                break
            if len(piece) == PIECE:
                yield {"tokens": piece, "done": False, **_held(cache, held)}
                piece = []
            out = model(torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[place]]))
            place += 1
        yield {"tokens": piece, "done": True, **_held(cache, held)}


def _held(cache: Any, held: list[int]) -> dict[str, Any]:
    """How many tokens a layer held behind the prompt, on average, and the bytes of the cache now."""
    bytes_held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    return {"kept": sum(held) / len(held), "cache_bytes": bytes_held}


if __name__ == "__main__":
    main()
