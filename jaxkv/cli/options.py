"""Options that several commands share, in groups, and what each group stands for."""

import dataclasses
import json
from typing import Any, Literal

from jaxkv.errors import BadValue

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_POLICY = "laq32-h2o-int4"  # what docs/choosing.md recommends where all must stay in the budget
DEFAULT_BUDGET = 1024  # under the default policy the bytes of less than 300 entries in bfloat16

Weights = Literal["floats", "int8", "int8-g16", "int4", "file"]


@dataclasses.dataclass(frozen=True)
class Load:
    """The model, and how its weights are held."""

    model: str = DEFAULT_MODEL
    """A known name, a Hugging Face folder, a .gguf file, or a hub name."""
    dtype: str | None = None
    """float32, bfloat16 or float16 (by default float32 on CPU, bfloat16 elsewhere)."""
    weights: Weights | None = None
    """How matrices are held; file: in a GGUF file's own blocks, the default on one CPU (elsewhere floats)."""

    def build(self, mesh: Any = None) -> Any:
        """The model. On one CPU a GGUF file stays in its own blocks: loaded sooner, smaller, faster to decode from."""
        import jax

        import jaxkv
        from jaxkv.weights.source import locate

        path, weights = locate(self.model), self.weights
        if weights is None and self.dtype is None and mesh is None and jax.default_backend() == "cpu":
            weights = "file" if path.suffix == ".gguf" else None
        return jaxkv.load(path, dtype=self.dtype, weights=None if weights == "floats" else weights, mesh=mesh)


@dataclasses.dataclass(frozen=True)
class Cut:
    """The cache's policy and size."""

    policy: str = DEFAULT_POLICY
    """A name from `jaxkv policies`, or a .toml file of your own; "full" keeps everything."""
    budget: int | None = None
    """Tokens kept per KV head and layer (1024 when neither this nor --ratio nor --bytes nor the policy's file says)."""
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

        register(self.parts)
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

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `generate`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


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

    def join(self) -> None:
        """Joins the hosts, before anything else of jax runs. Raises `BadValue` for what says nothing without a mesh."""
        if self.mesh is None:
            hosts = {
                "coordinator": self.coordinator, "num-processes": self.num_processes, "process-id": self.process_id,
                "host-timeout": self.host_timeout,
            }  # fmt: skip
            for name, value in hosts.items():
                if value is not None:
                    raise BadValue(f"--{name} without --mesh: say how the hosts' devices share the work, as data=2")
            return
        from jaxkv.sharding import start
        from jaxkv.sharding.mesh import parsed

        parsed(self.mesh)
        patience = {} if self.host_timeout is None else {"timeout": self.host_timeout}
        start(self.coordinator, self.num_processes, self.process_id, **patience)

    def build(self) -> Any:
        """The mesh, or None for one device. `join` comes first, and between them the files of --parts, which may run
        jax."""
        if self.mesh is None:
            return None
        import jaxkv
        from jaxkv.sharding.mesh import parsed

        return jaxkv.mesh(**parsed(self.mesh))


def register(sources: tuple[str, ...]) -> None:
    """Runs the files and modules of --parts."""
    from jaxkv.policies import load_parts

    for source in sources:
        load_parts(source)


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
