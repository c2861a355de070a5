"""`jaxkv` on the command line: generate, chat, serve, warmup, policies, info, calibrate, eval, report, cache."""

import dataclasses
import functools
import gc
import itertools
import json
import os
import re
import sys
import threading
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, subcommand

from jaxkv.errors import BadValue, JaxkvError, unknown

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_POLICY = "laq32-h2o-int4"  # what docs/choosing.md recommends where all must stay in the budget
SERVED_BLOCK = 256  # tokens of a prompt between two steps of the rows that run
DEFAULT_BUDGET = 1024  # under the default policy the bytes of less than 300 entries in bfloat16


@dataclasses.dataclass(frozen=True)
class Cut:
    """The cache's policy and size."""

    policy: str = DEFAULT_POLICY
    """A name from `jaxkv policies`, or a .toml file of your own; "full" keeps everything."""
    budget: int | None = None
    """Tokens kept per KV head and layer (1024 when neither this nor --ratio nor the policy's file says)."""
    ratio: float | None = None
    """Fraction of the prompt removed, instead of a budget."""
    bytes: int | None = None
    """Bytes that the keys and values of one row may take, instead of a budget."""
    option: tuple[str, ...] = ()
    """Options of the policy's parts, as name=value: --option window=32 sinks=4; a part's table in JSON."""
    parts: tuple[str, ...] = ()
    """Python files or modules that register parts of your own."""

    def build(self) -> Any:
        """The policy. Raises `BadValue` for an option that is not name=value."""
        from jaxkv.policies.catalogue import SIZES, named, sized

        _register(self.parts)
        options = {}
        for item in self.option:
            name, equals, value = item.partition("=")
            if not equals:
                raise BadValue(f"option {item!r}: expected name=value, such as window=32")
            if name in SIZES:
                raise BadValue(f"option {item!r}: a size is no option of a part, give --{name} {value}")
            options[name] = _value(value)
        chosen, budget = named(self.policy), self.budget
        sizes = (budget, self.ratio, self.bytes, chosen.budget, chosen.ratio, chosen.bytes)
        if chosen.evicts and all(size is None for size in sizes):
            budget = DEFAULT_BUDGET
        return sized(chosen, budget=budget, ratio=self.ratio, bytes=self.bytes, **options)


@dataclasses.dataclass(frozen=True)
class Draw:
    """How the next token is chosen."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy: top-k, top-p, min-p and seed then change nothing."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end the text."""


@dataclasses.dataclass(frozen=True)
class Drafting:
    """Several tokens in one pass of the model."""

    speculative: Literal["aasd", "lookup"] | None = None
    """Draft from the text: "lookup" what followed before, "aasd" also what the model held likely there."""
    verify: Literal["exact", "conditional"] = "exact"
    """exact: the same text as without; conditional: likely drafts pass as well."""

    def build(self) -> Any:
        """The method, or None. Raises `BadValue` for a verification without a method."""
        from jaxkv.speculative import AASD, PromptLookup

        if self.speculative is None:
            if self.verify != "exact":
                raise BadValue(f"--verify {self.verify} without drafts: give --speculative aasd or lookup")
            return None
        return {"aasd": AASD, "lookup": PromptLookup}[self.speculative](verify=self.verify)


@dataclasses.dataclass(frozen=True)
class Spread:
    """More than one device, and more than one host."""

    mesh: str | None = None
    """Axes such as data=2,model=4 (also context and fsdp), or a name of configs/meshes."""
    coordinator: str | None = None
    """host:port of process 0; on a TPU pod this and the next two are found."""
    num_processes: int | None = None
    process_id: int | None = None
    host_timeout: int | None = None
    """Seconds after which a missing or silent host ends all of them (60)."""

    def build(self) -> Any:
        """The mesh, or None for one device; joins the hosts first."""
        if self.mesh is None:
            hosts = {
                "coordinator": self.coordinator, "num-processes": self.num_processes, "process-id": self.process_id,
                "host-timeout": self.host_timeout,
            }  # fmt: skip
            for name, value in hosts.items():
                if value is not None:
                    raise BadValue(f"--{name} without --mesh: say how the hosts' devices share the work, as data=2")
            return None
        import jaxkv
        from jaxkv.sharding import start
        from jaxkv.sharding.mesh import parsed

        patience = {} if self.host_timeout is None else {"timeout": self.host_timeout}
        start(self.coordinator, self.num_processes, self.process_id, **patience)
        return jaxkv.mesh(**parsed(self.mesh))


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a prompt under a KV budget."""

    prompt: Positional[str]
    """The text; "-" reads it from standard input."""
    model: str = DEFAULT_MODEL
    """A known name, a Hugging Face folder, a .gguf file, or a hub name."""
    dtype: str | None = None
    """float32, bfloat16 or float16 (by default float32 on CPU, bfloat16 elsewhere)."""
    weights: Literal["floats", "int8", "int8-g16", "int4", "file"] | None = None
    """How matrices are held; file: in a GGUF file's own blocks, the default on one CPU (elsewhere floats)."""
    cut: Cut = Cut()
    draw: Draw = Draw()
    drafting: Drafting = Drafting()
    spread: Spread = Spread()
    chat: bool = False
    """Wrap the prompt in the model's chat template."""
    json: bool = False
    """One JSON object with text, token ids and statistics."""


@dataclasses.dataclass(frozen=True)
class Chat:
    """Talk with a model; the bounded cache is kept over the turns. An empty line or end of input leaves."""

    model: str = DEFAULT_MODEL
    dtype: str | None = None
    weights: Literal["floats", "int8", "int8-g16", "int4", "file"] | None = None
    cut: Cut = Cut()
    draw: Draw = Draw(max_new_tokens=256)
    drafting: Drafting = Drafting()
    mesh: str | None = None
    """This host's devices share the work: axes such as data=1,model=4, or a name of configs/meshes."""
    system: str | None = None
    """A system message in front."""
    json: bool = False
    """One JSON object per answer."""


@dataclasses.dataclass(frozen=True)
class Warmup:
    """Compile ahead what `generate` and `chat` will need; the programs are kept for later."""

    lengths: Positional[tuple[int, ...]] = (64, 256, 1024)
    """Prompt lengths in tokens; near ones share programs."""
    model: str = DEFAULT_MODEL
    dtype: str | None = None
    weights: Literal["floats", "int8", "int8-g16", "int4", "file"] | None = None
    batch: int = 1
    cut: Cut = Cut()
    draw: Draw = Draw()
    drafting: Drafting = Drafting()


@dataclasses.dataclass(frozen=True)
class Cache:
    """The compiled programs that are kept in jaxkv's cache folder."""

    clear: bool = False
    """Remove them."""
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Serve:
    """Answer requests over HTTP (the OpenAI API, and a page at /), many side by side; needs jaxkv[serve].

    On many hosts each of them runs the same command, and process 0 answers.
    """

    model: str = DEFAULT_MODEL
    dtype: str | None = None
    weights: Literal["floats", "int8", "int8-g16", "int4", "file"] | None = None
    cut: Cut = Cut()
    drafting: Drafting = Drafting()
    spread: Spread = Spread()
    rows: int = 8
    """Requests that run at a time."""
    longest: int | None = None
    """Prompt tokens that rows have slots for, where the policy keeps them all while decoding: 2048, or what the model's
    context leaves beside the new ones."""
    max_new_tokens: int = 512
    """New tokens, likewise."""
    block: int | None = None
    """Prompt tokens run at a time, between steps of the rows that run: 256 where the policy has no block of its own."""
    queue: int = 256
    """Requests that may wait."""
    prefix: tuple[str, ...] = ()
    """Texts to branch from, as name=file."""
    host: str = "127.0.0.1"
    """0.0.0.0 answers other machines as well: give a token then."""
    host_names: tuple[str, ...] = ()
    """Names to answer to besides the loopback's, such as a proxy's; with another --host any, unless some are given."""
    port: int = 8000
    token: str | None = None
    """Who asks must send it as bearer token; by default what $JAXKV_TOKEN says, if anything."""
    name: str | None = None
    """What requests call the model (its own name by default)."""
    body: int = 2**20
    """The most bytes of a request."""
    seconds: float = 600.0
    """The most seconds of a request, its time in the queue among them."""
    grace: float = 60.0
    """Seconds to finish what runs when told to stop."""


@dataclasses.dataclass(frozen=True)
class Policies:
    """The catalogue of methods, or the parts of one."""

    name: Positional[str | None] = None
    """A name, or a .toml file."""
    parts: tuple[str, ...] = ()
    """Python files or modules that register parts of your own."""
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Info:
    """A model's shape, and the bytes of a bounded cache against the full one."""

    model: Positional[str] = DEFAULT_MODEL
    budget: int | None = None
    """Tokens kept per KV head and layer (1024 when neither this nor the policy's file says)."""
    tokens: int = 8192
    """Length of the text that the full cache is reckoned for."""
    policy: str | None = None
    """A name from `jaxkv policies`, or a .toml file: what its cache takes, with statistics and what lies beside it."""
    option: tuple[str, ...] = ()
    """Options of the policy's parts, as of `jaxkv generate`."""
    parts: tuple[str, ...] = ()
    """Python files or modules that register parts of your own."""
    kernels: bool = False
    """Which implementation of each attention operation runs here, and why not a faster one."""
    batch: int = 1
    dtype: str = "float32"
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Calibrate:
    """Measure on a model what some policies need to know of it, and save it where `load` finds it."""

    model: Positional[str] = DEFAULT_MODEL
    dtype: str | None = None
    length: int = 512
    """Tokens of each stretch of text."""
    windows: int = 12
    """Stretches of text."""
    needles: int = 8
    """Hidden facts, to tell which heads retrieve."""
    seed: int = 0
    predictors: bool = False
    """Also what predicts a layer's keys and values from the layer below (aquakv): 3 matrices a layer, as wide as all of
    its KV heads."""
    text: str | None = None
    """File with the text that is measured on, instead of the one that jaxkv carries."""
    out: str | None = None
    """Folder of the file: by default the model's own, or jaxkv's cache folder for a model known by name."""


@dataclasses.dataclass(frozen=True)
class Eval:
    """Measure what policies cost on text: tasks, fidelity, memory, speed. Goes on where it was stopped."""

    run: Positional[str] = "default"
    """A TOML file, or a shipped run: ahead, ahead-int4, ahead-long, allocators, bytes, bytes-code, bytes-long,
    bytes-qwen, catalogue, dapq, default, flagship, gsm8k, heads, long-output, long-output-1000, long-values,
    longbench, longbench-code, longbench-few, merging, needles, retrieval, ruler, ruler-few, text."""
    model: str | None = None
    """Instead of the run's model."""
    dtype: str | None = None
    """Instead of the run's dtype."""
    policies: tuple[str, ...] = ()
    """Instead of the run's policies: names, .toml files, or "all" of the catalogue."""
    budgets: tuple[int, ...] = ()
    """Tokens kept per KV head, instead of the run's sizes and those of its single policies."""
    ratios: tuple[float, ...] = ()
    """Fractions removed, instead of these."""
    bytes: tuple[int, ...] = ()
    """What the keys and values of a row may take, instead of these."""
    weights: Literal["floats", "int8", "int8-g16", "int4", "file"] | None = None
    """How the model's matrices are held, instead of the run's: in blocks of 8 or 4 bits, as a GGUF file has them, or as
    floats."""
    data: str | None = None
    """Folder of published data sets, such as LongBench's files (by default they come from the hub)."""
    tasks: tuple[str, ...] = ()
    """Only these of the run's tasks: lcc, or longbench/lcc."""
    limit: int | None = None
    """Rows of each file of data."""
    longest: int | None = None
    """Cut longer prompts of data to so many tokens, in the middle."""
    lengths: tuple[int, ...] = ()
    """Tokens of the prompts that are made, instead of the run's."""
    batch: int | None = None
    """Instead of the run's batch."""
    block: int | None = None
    """Prompt tokens that run at a time, instead of 2048."""
    share_prefill: FlagCreatePairsOff[bool] = False
    """Run a prompt once for all policies that can share that, also where the run does not say so."""
    plan: bool = False
    """Say what the run will cost, and run nothing."""
    parts: tuple[str, ...] = ()
    """Python files or modules that register parts of your own, besides the run's."""
    out: str | None = None
    """Folder of the results (results/NAME by default)."""
    report: bool = True
    """Draw the report when the run has ended."""
    json: bool = False
    """The mean scores as JSON."""


@dataclasses.dataclass(frozen=True)
class Report:
    """A page, pictures and tables from the results of one or more runs."""

    folders: Positional[tuple[str, ...]]
    """Folders that `jaxkv eval` wrote; several are drawn together."""
    out: str | None = None
    """Where to write (the first folder by default)."""


Command = (
    Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Warmup, subcommand("warmup")]
    | Annotated[Serve, subcommand("serve")]
    | Annotated[Policies, subcommand("policies")]
    | Annotated[Info, subcommand("info")]
    | Annotated[Calibrate, subcommand("calibrate")]
    | Annotated[Eval, subcommand("eval")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Cache, subcommand("cache")]
)
RUNS = (Generate, Chat, Warmup, Serve, Calibrate, Eval)  # the commands that run a model


def main(args: list[str] | None = None) -> int:
    """Run one command; 0, or 2 for a `JaxkvError`, whose message goes to standard error.

    When another host of a run over many fails, the process ends at once with 3.
    """
    _quieten()
    # imports and tracing make many objects that stay: looking for garbage among them is half a second of a first answer
    gc.set_threshold(100_000, 50, 50)
    try:
        _check_names(sys.argv[1:] if args is None else args)
    except JaxkvError as error:
        print(f"jaxkv: {error}", file=sys.stderr)
        return 2
    command = tyro.cli(Command, prog="jaxkv", args=args, config=(OmitArgPrefixes,))
    try:
        if isinstance(command, RUNS):
            _keep_programs()
        return {
            Generate: _generate, Chat: _chat, Warmup: _warmup, Policies: _policies, Info: _info, Calibrate: _calibrate,
            Eval: _eval, Report: _report, Cache: _cache, Serve: _serve,
        }[type(command)](command)  # fmt: skip
    except JaxkvError as error:
        print(f"jaxkv: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        from jaxkv.sharding.hosts import failed_elsewhere

        message = failed_elsewhere(error)
        if message is None:
            raise
        print(f"jaxkv: {message}", file=sys.stderr, flush=True)
        os._exit(3)  # leaving in order would wait for the host that is gone
    except KeyboardInterrupt:
        print(f"jaxkv: stopped; nothing was kept of {type(command).__name__.lower()}, start it again", file=sys.stderr)
        return 130


def _check_names(args: list[str]) -> None:
    """Raises `UnknownName` for an option that the command has not: in front of a prompt the parser says only that the
    prompt is missing."""
    of = {str(each.__metadata__[0].name): each.__origin__ for each in typing.get_args(Command)}
    if not args or args[0] not in of:
        return
    known = {"help", *_options_of(of[args[0]])}
    for arg in args[1:]:
        name = re.fullmatch(r"--([a-z][a-z0-9_-]*)(=.*)?", arg, re.DOTALL)
        if name is not None and name[1].replace("_", "-") not in known:
            raise unknown(f"option of jaxkv {args[0]}", f"--{name[1]}", {f"--{each}" for each in known})


def _options_of(cls: Any) -> Iterator[str]:
    """The names of a command's options, those of its parts too."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default) and not isinstance(field.default, type):
            yield from _options_of(type(field.default))
        else:
            name = field.name.replace("_", "-")
            yield from (name, f"no-{name}") if isinstance(field.default, bool) else (name,)


def _quieten() -> None:
    """Libraries keep to themselves what is of no use here: that there is no TPU, or no torch."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    if not any(path.exists() for path in (Path("/dev/accel0"), Path("/dev/vfio"))):
        # libtpu, where it is installed for its compiler, would look for a TPU at length and complain
        facts = {"SKIP_MDS_QUERY": "1", "ACCELERATOR_TYPE": "v5litepod-4", "WORKER_HOSTNAMES": "localhost"}
        for name, value in facts.items():
            os.environ.setdefault(f"TPU_{name}", value)


def _generate(command: Generate) -> int:
    import jaxkv
    from jaxkv.sharding.hosts import speaks

    chosen, method = command.cut.build(), command.drafting.build()
    text = _piped() if command.prompt == "-" else command.prompt
    params = _loaded(command, command.spread.build())
    prompt = [{"role": "user", "content": text}] if command.chat else text
    with _Meter(command.json or not speaks()) as meter:
        out = jaxkv.generate(
            params, prompt, policy=chosen, speculative=method, scan_layers=True, progress=meter.update,
            **_drawn(command.draw),
        )  # fmt: skip
    if not speaks():
        return 0
    if command.json:
        ids = out.tokens[0, : out.lengths[0]].tolist()
        print(json.dumps({"text": out.text, "tokens": ids, "stats": _facts(out.stats)}))
    else:
        print(out.text)
        _note(_summary(chosen, out.stats))
    return 0


def _loaded(command: Generate | Chat | Warmup | Serve, mesh: Any = None) -> Any:
    """The model. On one CPU a GGUF file stays in its own blocks: loaded sooner, smaller, and faster to decode from."""
    import jax

    import jaxkv
    from jaxkv.weights.source import locate

    path, weights = locate(command.model), command.weights
    if weights is None and command.dtype is None and mesh is None and jax.default_backend() == "cpu":
        weights = "file" if path.suffix == ".gguf" else None
    return jaxkv.load(path, dtype=command.dtype, weights=None if weights == "floats" else weights, mesh=mesh)


def _piped() -> str:
    """The text on standard input. Raises `BadValue` where it is none."""
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise BadValue(f"standard input is not {error.encoding} ({error.reason}): pipe text in") from None


def _keep_programs() -> None:
    """Compiled programs stay, unless the folder cannot be written: then everything works but the next start is slow."""
    from jaxkv.programs import keep_programs

    try:
        keep_programs()
    except BadValue as error:
        _note(f"compiled programs are not kept: {error}")


def _warmup(command: Warmup) -> int:
    import jaxkv

    chosen, method = command.cut.build(), command.drafting.build()
    params = _loaded(command)
    options = {"policy": chosen, "speculative": method, "scan_layers": True, **_drawn(command.draw)}
    for length in command.lengths:
        (seconds,) = jaxkv.warmup(params, (length,), batch=command.batch, **options).values()
        print(f"{length} tokens: {seconds:.1f} s", flush=True)
    return 0


def _serve(command: Serve) -> int:
    import importlib.util

    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("starlette") is None:
        raise BadValue("jaxkv serve needs the libraries of an extra: pip install 'jaxkv[serve]'")
    import jaxkv
    from jaxkv.serving import Engine
    from jaxkv.serving.http import Limits
    from jaxkv.serving.serve import check, check_free, serve

    token = os.environ.get("JAXKV_TOKEN") if command.token is None else command.token
    check(port=command.port, token=token, grace=command.grace)
    if not command.spread.process_id:
        check_free(command.host, command.port)
    limits = Limits(body=command.body, seconds=command.seconds)
    chosen, method = command.cut.build(), command.drafting.build()
    own = command.block is not None
    chosen = dataclasses.replace(chosen, block=command.block) if own else chosen.in_blocks(SERVED_BLOCK)
    prefixes = [(name, Path(file)) for name, _, file in (each.partition("=") for each in command.prefix)]
    for each, (name, file) in zip(command.prefix, prefixes, strict=True):
        if not name or not file.is_file():
            raise BadValue(f"prefix {each!r}: expected name=file, of a text file that is there")
    params = _loaded(command, command.spread.build())
    engine = Engine(
        params, chosen, rows=command.rows, longest=command.longest, max_new_tokens=command.max_new_tokens,
        queue=command.queue, speculative=method, scan_layers=True,
    )  # fmt: skip
    for name, file in prefixes:
        engine.store(name, jaxkv.prefill(params, file.read_text(encoding="utf-8-sig"), policy=chosen))
    if engine.leads:
        _note(f"{command.model} under {_size(chosen)}, {command.rows} rows: http://{command.host}:{command.port}")
    serve(
        engine, command.name or command.model, host=command.host, host_names=command.host_names, port=command.port,
        token=token, grace=command.grace,
        limits=dataclasses.replace(limits, max_tokens=min(limits.max_tokens, command.max_new_tokens)),
    )  # fmt: skip
    return 0


def _cache(command: Cache) -> int:
    from jaxkv import programs

    if command.clear:
        programs.forget_programs()
    found = programs.kept()
    if command.json:
        print(json.dumps([{**dataclasses.asdict(each), "folder": str(each.folder)} for each in found]))
        return 0
    print(f"at most {programs.LIMIT / 2**20:.0f} MiB of compiled programs stay at a start, for each jaxlib and CPU")
    for each in found:
        print(f"{each.folder}  {each.programs} programs, {each.bytes / 2**20:.1f} MiB")
    if not found:
        print(f"none in {programs.own_folder()}")
    return 0


def _chat(command: Chat) -> int:
    import jax

    import jaxkv

    chosen, method = command.cut.build(), command.drafting.build()
    params = _loaded(command, Spread(mesh=command.mesh).build())
    if jax.process_count() > 1:
        raise BadValue("chat on many hosts, of which only one hears the person: use jaxkv generate there")
    if not getattr(params.tokenizer, "chat_template", None):
        raise BadValue(f"model {command.model!r} has no chat template: use jaxkv generate")
    messages = [{"role": "system", "content": command.system}] if command.system else []
    cache = None
    _note(f"{command.model} under {_size(chosen)}; an empty line ends")
    while line := _ask():
        messages.append({"role": "user", "content": line})
        with _Meter(command.json) as meter:  # until the first words come
            pieces = jaxkv.stream(
                params, messages, policy=None if cache is not None else chosen, cache=cache, speculative=method,
                scan_layers=True, progress=meter.update, **_drawn(command.draw),
            )  # fmt: skip
            coming = iter(pieces)
            first = next(coming, "")
        for piece in itertools.chain((first,), coming):
            if not command.json:
                print(piece, end="", flush=True)
        out = pieces.generation
        cache = out.cache
        messages.append({"role": "assistant", "content": out.text})
        if command.json:
            print(json.dumps({"text": out.text, "stats": _facts(out.stats)}), flush=True)
        else:
            print()
            _note(_summary(chosen, out.stats))
    return 0


def _ask() -> str:
    """One line from the person; empty at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _policies(command: Policies) -> int:
    from jaxkv.policies.catalogue import catalogue, named
    from jaxkv.policies.policy import to_dict

    _register(command.parts)
    known = [*catalogue().values()] if command.name is None else [named(command.name)]
    if command.json:
        print(json.dumps({policy.name: to_dict(policy) for policy in known}))
        return 0
    if command.name is not None:
        (policy,) = known
        print("\n".join(filter(None, (": ".join(filter(None, (policy.name, policy.title))), policy.paper))) + "\n")
        print(f"{'fidelity':8} {': '.join(filter(None, (policy.fidelity or 'not said', policy.differs)))}")
        for phase, text in _parts(policy).items():
            print(f"{phase:8} {text}")
        plain = {"allocate": "uniform", "flow": "straight", "read": "all", "store": "plain"}
        for part, otherwise in plain.items():
            print(f"{part:8} {_phrase(to_dict(policy).get(part, otherwise))}")
        print(f"{'rope':8} {policy.rope}\n{'block':8} {policy.block}\n{'floor':8} {policy.floor} tokens at least")
        print(f"{'bounded':8} {_bounds(policy)}")
        print(f"{'question':8} {'steers' if policy.query_aware else 'does not steer'} what is kept of the prompt")
        print(f"{'needs':8} {'calibration' if policy.calibrated else 'nothing measured before'}")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "paper", "fidelity", "prefill", "decode", "bounded", "query-aware", "calibration")
    for policy in known:
        parts = _parts(policy)
        bounded, aware = ("yes" if said else "no" for said in (policy.bounded, policy.query_aware))
        before = "yes" if policy.calibrated else "none"
        facts = policy.name, policy.paper, policy.fidelity, parts["prefill"], parts["decode"]
        table.add_row(*facts, bounded, aware, before)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


def _register(sources: tuple[str, ...]) -> None:
    """Runs the files and modules of --parts."""
    from jaxkv.policies import load_parts

    for source in sources:
        load_parts(source)


def _parts(policy: Any) -> dict[str, str]:
    """The parts of each phase in words: its kinds, and what differs from the part's defaults."""
    from jaxkv.policies.policy import to_dict

    words = {"prefill": "keeps all", "decode": "adds, evicts nothing"}
    for phase in ("prefill", "decode"):
        table = to_dict(policy).get(phase)
        if table is not None:
            words[phase] = "; ".join(f"{part}: {_phrase(value)}" for part, value in table.items())
    if "read" in to_dict(policy):
        words["decode"] += f"; reads {_phrase(to_dict(policy)['read'])}"
    return words


def _bounds(policy: Any) -> str:
    """Whether the policy bounds the cache while decoding, and what would."""
    from jaxkv.policies.catalogue import named

    if policy.bounded:
        return "while decoding too"
    if not policy.evicts:
        return "no: it keeps all tokens"
    other = policy.decode is None and dataclasses.replace(policy, decode=named("h2o").decode).bounded
    return "not while decoding" + "; --option decode=h2o bounds that" * other


def _phrase(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    inner = {k: f"({_phrase(v)})" if isinstance(v, dict) else v for k, v in value.items() if k != "kind"}
    return " ".join([value.get("kind", ""), *(f"{k}={v}" for k, v in inner.items())]).strip()


def _info(command: Info) -> int:
    import jax.numpy as jnp

    from jaxkv.checks import check_arguments
    from jaxkv.models import ModelConfig
    from jaxkv.weights import load
    from jaxkv.weights.load import config_of
    from jaxkv.weights.source import locate

    if command.dtype not in ("float32", "bfloat16", "float16"):
        raise BadValue(f"dtype {command.dtype!r}: expected float32, bfloat16 or float16")
    budget = DEFAULT_BUDGET if command.budget is None else command.budget
    check_arguments(budget=budget, tokens=command.tokens, batch=command.batch)
    shape = _shape_table(command.model)
    if shape is not None:
        config = ModelConfig.from_hf(shape)
    else:
        path = locate(command.model)
        config = config_of(path) if path.is_dir() else load(path).config
    policy = _policy_of(command, config)
    if policy is not None and policy.evicts:
        budget = policy.mean_budget(command.tokens)
    size = jnp.dtype(command.dtype).itemsize
    bytes_per_token = [2 * s.num_kv_heads * s.head_dim * size for s in config.specs]

    def held(tokens: int) -> int:
        windows = [min(tokens, s.window or tokens) for s in config.specs]
        return command.batch * sum(b * n for b, n in zip(bytes_per_token, windows, strict=True))

    facts = {
        "model": command.model,
        "family": config.family,
        "layers": config.num_layers,
        "query_heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "context": config.max_position,
        "dtype": command.dtype,
        "cache_bytes_per_token": command.batch * sum(bytes_per_token),
        f"full_cache_bytes_at_{command.tokens}_tokens": held(command.tokens),
        f"cache_bytes_at_budget_{budget}": held(min(budget, command.tokens)),
    }
    if policy is not None:
        facts |= _cache_under(policy, budget, command, config)
    if command.kernels:
        facts |= _kernels_for(policy, budget, command, config)
    if command.json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            print(f"{name.replace('_', ' '):34} {f'{value:,}' if isinstance(value, int) else value}")
    return 0


def _policy_of(command: Info, config: Any) -> Any:
    """The policy that is asked about, its bytes as the budget that they hold; None where none is."""
    from jaxkv.sizes import fitted

    if command.policy is None:
        if command.option:
            raise BadValue(f"option {command.option[0]!r} without --policy: say of which policy")
        _register(command.parts)
        return None
    cut = Cut(policy=command.policy, budget=command.budget, option=command.option, parts=command.parts)
    policy = cut.build()
    if policy.bytes is not None and policy.learns:
        raise BadValue(
            f"bytes of policy {policy.name!r}, whose layers' budgets were measured on a model: give --budget, or see "
            "out.cache.nbytes"
        )
    return fitted(policy, config, command.dtype)


def _cache_under(policy: Any, budget: int, command: Info, config: Any) -> dict[str, int]:
    """Bytes of the cache that a policy holds while it decodes, or leaves of a prompt where it adds every new token: all
    of it, and of it keys and values."""
    from jaxkv.sizes import least, size_of, slots_at
    from jaxkv.store.entries import in_pieces

    count, at = (budget, f"budget_{budget}") if policy.evicts else (command.tokens, f"{command.tokens}_tokens")
    if policy.evicts and not policy.learns and count >= least(policy):
        slots = slots_at(policy, config, count)
    else:  # what was measured of the layers is not at hand: as if they had equally many; or a ratio keeps a text whole
        slots = [in_pieces(min(count, spec.window or count)) for spec in config.specs]
    at += "_behind_the_prompt" * (policy.evicts and not policy.bounded)
    size = size_of(policy, config, command.dtype, slots)
    what = {"cache_bytes": size.all, "keys_and_values_bytes": size.keys_values}
    return {f"{key}_under_{policy.name}_at_{at}": command.batch * value for key, value in what.items()}


def _kernels_for(policy: Any, budget: int, command: Info, config: Any) -> dict[str, str]:
    """What runs of each attention operation in the model's first layer, as the policy holds its entries, and why others
    do not."""
    from jaxkv.store.reading import reading
    from pallas_kernels.choices import choices

    codes, spec = None, config.specs[0]
    if policy is not None:
        store = policy.store
        fitted = store.fitted(store.unfit(1, spec.num_kv_heads, spec.head_dim))
        how = reading(
            fitted, windows=store.windows, rotates=policy.rope != "text", capped=spec.softcap is not None,
            at_once=policy.weighs_at_decode and policy.allocate.pooled,
        )  # fmt: skip

        def form(codec: Any, x: Any) -> Any:
            return how.form(codec.fitted(codec.unfit(*x.shape[:2], x.shape[-1])), x)

        codes = functools.partial(form, store.keys), functools.partial(form, store.values)
    found = choices(
        heads=config.num_heads, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, slots=budget,
        dtype=command.dtype, batch=command.batch, codes=codes, rotate=policy is not None and policy.rope == "cache",
    )  # fmt: skip
    return {name: "; ".join((chosen.implementation, *chosen.reasons)) for name, chosen in found.items()}


def _calibrate(command: Calibrate) -> int:
    import jaxkv
    from jaxkv.configs import config_files
    from jaxkv.evaluation.runner import text_of
    from jaxkv.folders import cache_folder, check_place
    from jaxkv.weights import learned

    text = None if command.text is None else text_of(command.text)
    params = jaxkv.load(command.model, dtype=command.dtype)
    own = Path(command.model).expanduser()
    known = command.model in config_files("models") or not own.exists()
    beside = cache_folder() if known else own if own.is_dir() else own.parent
    path = Path(command.out or beside) / learned.file_name(params.fingerprint)
    check_place(path)  # measuring takes minutes
    there = learned.checked(learned.read(path), params.config, path) if path.exists() else {}
    with _Meter(quiet=False) as meter:
        measured = jaxkv.calibrate(
            params, length=command.length, windows=command.windows, needles=command.needles, seed=command.seed,
            predictors=command.predictors, text=text, progress=meter.update,
        )  # fmt: skip
    learned.write({name: there[name] for name in learned.ASKED_FOR if name in there} | measured, path)
    print(path)
    return 0


def _shape_table(model: str) -> dict[str, Any] | None:
    """The [config] table of a model that ships as a shape alone."""
    from jaxkv.configs import config_files

    file = config_files("models").get(model)
    return None if file is None else tomllib.loads(file.read_text(encoding="utf-8")).get("config")


def _eval(command: Eval) -> int:
    import jaxkv
    from jaxkv import evaluation
    from jaxkv.evaluation import summary
    from jaxkv.evaluation.results import Store

    _register(command.parts)
    given = ("model", "dtype", "weights", "policies", "data", "batch", "block", "share_prefill")
    asked = {name: getattr(command, name) for name in given}
    changes = {name: value for name, value in asked.items() if value not in (None, ()) and value is not False}
    if command.weights == "floats":
        changes["weights"] = None
    if command.budgets or command.ratios or command.bytes:  # the run's own sizes, of all kinds, go
        changes |= {"budgets": command.budgets, "ratios": command.ratios, "bytes": command.bytes}
    each = {
        name: value for name in ("limit", "longest", "lengths") if (value := getattr(command, name)) not in (None, ())
    }
    settings = evaluation.changed(evaluation.load(command.run), changes, command.tasks, each, command.parts)
    out = command.out or os.path.join("results", settings.name)
    try:
        params = jaxkv.load(settings.model, dtype=settings.dtype, weights=settings.weights)
        if command.plan:
            print(evaluation.cost(params, settings))
            return 0
        store = evaluation.evaluate(params, settings, out, progress=_Jobs())
    except KeyboardInterrupt:
        kept = len(list(Store(out).records()))
        print(f"jaxkv: stopped; {kept} records are kept in {out}, and the same command goes on there", file=sys.stderr)
        return 130
    records = list(store.records())
    rows, found = summary.quality(records), summary.fidelities(records)
    if command.json:
        means = [{**row, "tasks": {task: mean.value for task, mean in row["tasks"].items()}} for row in rows]
        print(json.dumps([{**row, "score": row["score"].value} for row in means]))
    else:
        print(summary.text_table(rows, found))
    for each in summary.not_run(records):
        print(f"not run: {each}", file=sys.stderr)
    if command.report:
        from jaxkv.evaluation.report import report

        print(f"written to {report([out])}", file=sys.stderr)
    return 0


def _report(command: Report) -> int:
    from jaxkv.evaluation.report import report

    print(report(command.folders, command.out))
    return 0


class _Jobs:
    """A line on standard error per batch of an evaluation: how far it is, and the time left."""

    def __call__(self, what: str, done: int, of: int, left: float | None) -> None:
        time = "" if left is None else f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left"
        print(f"[{done}/{of}{time}] {what}", file=sys.stderr, flush=True)


def _drawn(draw: Draw) -> dict[str, Any]:
    """The keyword arguments of `generate`."""
    return {field.name: getattr(draw, field.name) for field in dataclasses.fields(draw)}


def _value(text: str) -> Any:
    """A number, a truth value, or a table in JSON, where the text is one."""
    if text.startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise BadValue(
                f'option {text!r} is no table in JSON ({error}): expected such as {{"kind": "int"}}'
            ) from error
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _facts(stats: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(stats), "evicted": stats.evicted}


def _size(policy: Any) -> str:
    if policy.ratio is not None:
        return f"{policy.name}, ratio {policy.ratio}"
    return policy.name if policy.budget is None else f"{policy.name}, budget {policy.budget}"


def _summary(policy: Any, stats: Any) -> str:
    told = stats.speculation
    drafts = "" if told is None else f", {told.tokens_per_pass:.2f} tokens per pass"
    growing = "" if stats.bounded else ", growing"
    return (
        f"[{_size(policy)}: {stats.seen[0]} tokens seen, {stats.kept[0]:.0f} kept, {stats.evicted[0]:.0f} evicted, "
        f"cache {stats.cache_bytes / 1e6:.1f} MB{growing}; {stats.tokens_per_second:.1f} tokens/s{drafts}]"
    )


def _note(text: str) -> None:
    """A line for the person, not for the pipe."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


class _Meter:
    """A progress bar on a terminal, nothing elsewhere; it says when a program is being compiled for the first time."""

    NEXT: ClassVar[dict[str, str]] = {"calibrate": "the next measurement", "prefill": "decoding"}
    PATIENCE = 1.0  # seconds after which a program is not read from those that are kept, but compiled

    def __init__(self, quiet: bool):
        self._quiet = quiet or not sys.stderr.isatty()
        self._tasks: dict[str, Any] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "_Meter":
        if not self._quiet:
            import jax
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            jax.monitoring.register_event_listener(self._event)
            jax.monitoring.register_event_duration_secs_listener(self._ended)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._quiet:
            import jax

            self._compiled()
            self._bar.stop()
            self._quiet = True
            jax.monitoring.unregister_event_listener(self._event)
            jax.monitoring.unregister_event_duration_listener(self._ended)

    def update(self, kind: str, done: Any, of: Any) -> None:
        """`generate`'s progress callback."""
        if self._quiet:
            return
        if kind not in self._tasks:
            self._tasks[kind] = self._bar.add_task(kind, total=int(of))
        self._bar.update(self._tasks[kind], completed=int(done))

    def _event(self, event: str, **_: Any) -> None:
        if not self._quiet and event.endswith("/compile_requests_use_cache"):
            self._compiled()
            self._timer = threading.Timer(self.PATIENCE, self._compiling)
            self._timer.daemon = True
            self._timer.start()

    def _ended(self, event: str, duration_secs: float, **_: Any) -> None:
        if not self._quiet and event.endswith("/backend_compile_duration"):
            self._compiled()

    def _compiling(self) -> None:
        what = next((what for kind, what in self.NEXT.items() if kind in self._tasks), "the prompt")
        text = f"compiling for {what}: the first time with this model, policy and size; kept for later"
        self._tasks["compiling"] = self._bar.add_task(text, total=None)

    def _compiled(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        task = self._tasks.pop("compiling", None)
        if task is not None:
            self._bar.remove_task(task)


if __name__ == "__main__":
    sys.exit(main())
