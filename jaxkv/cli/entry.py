"""The commands by name, and what every one of them has: errors in a line, a number for the shell."""

import dataclasses
import gc
import io
import itertools
import os
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, subcommand

from jaxkv.cli.calibrate import Calibrate
from jaxkv.cli.chat import Chat
from jaxkv.cli.evaluate import Eval, Report
from jaxkv.cli.generate import Generate
from jaxkv.cli.info import Info
from jaxkv.cli.policies import Policies
from jaxkv.cli.programs import Cache, Warmup, keep_programs
from jaxkv.cli.serve import Serve
from jaxkv.cli.terminal import hush
from jaxkv.errors import BadValue, JaxkvError, unknown

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

    When another host of a run over many fails, the process ends at once with 3; with 141, when whoever read it has
    gone.
    """
    try:
        try:
            return _run(args)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # what the other still holds goes out
            try:
                stream.flush()
            except BrokenPipeError:
                hush(stream)
        return 141


def _run(args: list[str] | None) -> int:
    _quieten()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal's encoding lacks
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
            keep_programs()
        return command()
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
    known, given = {"help": False, **dict(_options_of(of[args[0]]))}, set()
    for arg in itertools.takewhile(lambda arg: arg != "--", args[1:]):  # behind "--" stands what is no option
        name = re.fullmatch(r"--([a-z][a-z0-9_-]*)(=.*)?", arg, re.DOTALL)
        if name is None:
            continue
        option = name[1].replace("_", "-")
        if option not in known:
            raise unknown(f"option of jaxkv {args[0]}", f"--{name[1]}", {f"--{each}" for each in known})
        if known[option] and option in given and "--help" not in args:
            raise BadValue(
                f"--{option} is given twice, and only the last would count: expected it once, with all values behind "
                f"it: --{option} ONE TWO"
            )
        given.add(option)


def _options_of(cls: Any) -> Iterator[tuple[str, bool]]:
    """The names of a command's options, those of its parts too, and whether they take several values."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default) and not isinstance(field.default, type):
            yield from _options_of(type(field.default))
        else:
            name = field.name.replace("_", "-")
            many = isinstance(field.default, tuple)
            yield from ((each, many) for each in ((name, f"no-{name}") if isinstance(field.default, bool) else (name,)))


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
