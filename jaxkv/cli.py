"""`jaxkv` on the command line: generate, chat, policies, info."""

import dataclasses
import json
import os
import sys
import time
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg, configure, subcommand

from jaxkv.errors import BadValue, JaxkvError

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_POLICY = "dapq-longflow"
DEFAULT_BUDGET = 256


@dataclasses.dataclass(frozen=True)
class Cut:
    """The cache's policy and size."""

    policy: str = DEFAULT_POLICY
    """A name from `jaxkv policies`; "full" keeps everything."""
    budget: int | None = None
    """Tokens kept per KV head and layer (256 when neither this nor --ratio is given)."""
    ratio: float | None = None
    """Fraction of the prompt removed, instead of a budget."""
    option: tuple[str, ...] = ()
    """Options of the policy's parts, as name=value: --option window=32 sinks=4."""

    def build(self) -> Any:
        """The policy. Raises `BadValue` for an option that is not name=value."""
        from jaxkv.policies import catalogue, policy

        options = {}
        for item in self.option:
            name, equals, value = item.partition("=")
            if not equals:
                raise BadValue(f"option {item!r}: expected name=value, such as window=32")
            options[name] = _value(value)
        known = catalogue().get(self.policy)
        budget = self.budget
        if budget is None and self.ratio is None and (known is None or known.evicts):
            budget = DEFAULT_BUDGET
        return policy(self.policy, budget=budget, ratio=self.ratio, **options)


@dataclasses.dataclass(frozen=True)
class Draw:
    """How the next token is chosen."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end the text."""


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a prompt under a KV budget."""

    prompt: Positional[str]
    """The text; "-" reads it from standard input."""
    model: str = DEFAULT_MODEL
    """A known name, a Hugging Face folder, a .gguf file, or a hub name."""
    dtype: str | None = None
    """float32 or bfloat16 (by default float32 on CPU, bfloat16 elsewhere)."""
    cut: Annotated[Cut, arg(name="")] = Cut()
    draw: Annotated[Draw, arg(name="")] = Draw()
    chat: bool = False
    """Wrap the prompt in the model's chat template."""
    json: bool = False
    """One JSON object with text, token ids and statistics."""


@dataclasses.dataclass(frozen=True)
class Chat:
    """Talk with a model; the bounded cache is kept over the turns. An empty line or end of input leaves."""

    model: str = DEFAULT_MODEL
    dtype: str | None = None
    cut: Annotated[Cut, arg(name="")] = Cut()
    draw: Annotated[Draw, arg(name="")] = Draw(max_new_tokens=256)
    system: str | None = None
    """A system message in front."""
    json: bool = False
    """One JSON object per answer."""


@dataclasses.dataclass(frozen=True)
class Policies:
    """The catalogue of methods, or the parts of one."""

    name: Positional[str | None] = None
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Info:
    """A model's shape, and the bytes of a bounded cache against the full one."""

    model: Positional[str] = DEFAULT_MODEL
    budget: int = DEFAULT_BUDGET
    tokens: int = 8192
    """Length of the text that the full cache is reckoned for."""
    batch: int = 1
    dtype: str = "float32"
    json: bool = False


Command = (
    Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Policies, subcommand("policies")]
    | Annotated[Info, subcommand("info")]
)


def main(args: list[str] | None = None) -> int:
    """Run one command; 0, or 2 for a `JaxkvError`, whose message goes to standard error."""
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")  # libtpu without a TPU warns about worker hostnames
    command = tyro.cli(Command, prog="jaxkv", args=args, config=(configure.OmitArgPrefixes,) if False else ())
    try:
        return {Generate: _generate, Chat: _chat, Policies: _policies, Info: _info}[type(command)](command)
    except JaxkvError as error:
        print(f"jaxkv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
