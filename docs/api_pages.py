"""The pages of the API reference: one for each public module, with every public name of it.

    python docs/api_pages.py FOLDER

A module's public names are what its `HOMES` lists, or what it imports `as` the same name.
"""

import ast
import functools
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from generated import put

MODULES = {  # module -> what it is for
    "jaxkv": "Load a model, choose a policy, generate, keep and restore caches",
    "jaxkv.policies": "The parts of a policy, to make one of your own",
    "jaxkv.speculative": "Drafts and their verification",
    "jaxkv.evaluation": "Measure what compression costs, on our tasks or your own texts",
    "jaxkv.store": "What a cache holds",
    "jaxkv.sharding": "Several devices, several hosts",
    "jaxkv.models": "Shapes and facts of models",
    "jaxkv.weights": "Weights from files",
    "jaxkv.errors": "What is raised",
    "jaxkv.serving": "Many requests in one running batch",
    "pallas_kernels": "The attention operations, for any cache",
}
MODULES = {name: what for name, what in MODULES.items() if importlib.util.find_spec(name)}
PARTS = {  # what a part extends -> its heading
    "Policy": "Policies and phases",
    "Observer": "Whose queries look: `observe`",
    "Score": "What an entry is worth: `score`",
    "Aggregate": "How queries and heads are summed up: `aggregate`",
    "Select": "What stays whatever its score: `select`",
    "Allocate": "Who gets how much: `allocate`",
    "Evicted": "What becomes of what leaves: `evicted`",
    "Read": "What a step reads: `read`",
    "Flow": "What happens between layers: `flow`",
    "Codec": "How keys and values lie in a slot: `store`",
}
OTHERS = "Functions and constants"


@functools.cache
def public(module: str) -> list[str]:
    """The public names of a module, in alphabetical order."""
    found = importlib.import_module(module)
    if hasattr(found, "HOMES"):
        return sorted(found.HOMES, key=str.lower)
    tree = ast.parse(inspect.getsource(found))
    names = [
        alias.asname
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]
    own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return sorted({*names, *(name for name in own if not name.startswith("_"))}, key=str.lower)


def operations() -> list[str]:
    """The operations of `pallas_kernels`: its folders with an `api.py`."""
    folder = Path(importlib.import_module("pallas_kernels").__file__).parent
    return sorted(file.parent.name for file in folder.glob("*/api.py"))


def heading(thing: Any) -> str:
    """The heading under which a name of `jaxkv.policies` stands."""
    if inspect.isclass(thing):
        for base in thing.__mro__:
            if base.__name__ in PARTS:
                return PARTS[base.__name__]
        if thing.__name__ in ("Phase", "ScoreInputs", "Entering", "Codecs"):
            return PARTS[{"Phase": "Policy", "Codecs": "Codec"}.get(thing.__name__, "Score")]
    return OTHERS


def entry(module: str, name: str) -> str:
    """The autodoc directive of one name."""
    thing = getattr(importlib.import_module(module), name)
    home = home_of(module, name)
    if home != module:
        return f".. py:data:: {module}.{name}\n   :no-index-entry:\n\n   The same as :doc:`{home}`'s.\n"
    if isinstance(thing, ModuleType):
        return f".. py:module:: {module}.{name}\n\n   {inspect.getdoc(thing)}".replace("\n\n   ", "\n\n", 1)
    if inspect.isclass(thing):
        return f".. autoclass:: {module}.{name}\n   :members:\n"
    if callable(thing):
        return f".. autofunction:: {module}.{name}\n"
    return f".. py:data:: {module}.{name}\n\n   {described(thing)}\n"


def home_of(module: str, name: str) -> str:
    """The first of the modules that has the same object under this name: there it is described."""
    thing = getattr(importlib.import_module(module), name)
    return next(
        each for each in MODULES if name in public(each) and getattr(importlib.import_module(each), name) is thing
    )


def described(thing: Any) -> str:
    """A constant in a line."""
    if isinstance(thing, dict):
        return "A table with the keys " + ", ".join(f"``{key}``" for key in thing) + "."
    return f"``{thing!r}``"


def page(module: str) -> str:
    """The Markdown of a module's page."""
    found = importlib.import_module(module)
    names = public(module)
    parts: dict[str, list[str]] = {}
    if module == "jaxkv.policies":
        parts = {title: [] for title in (*PARTS.values(), OTHERS)}
        for name in names:
            parts[heading(getattr(found, name))].append(name)
    text = [f"# {module}", f"{MODULES[module]}.", summary(found)]
    if module == "pallas_kernels":
        text.append("How an implementation is chosen is told in [Kernels](../kernels.md).")
        for name in operations():
            reference = f"pallas_kernels.{name}.reference"
            text += [f"## {name}", block([f".. autofunction:: {reference}.{name}\n"])]
        return "\n\n".join(text) + "\n"
    for title, some in (parts or {"": names}).items():
        text += [f"## {title}"] if title else []
        text.append(block([entry(module, name) for name in some]))
    return "\n\n".join(text) + "\n"


def summary(module: ModuleType) -> str:
    """What the module's docstring says behind its first line."""
    return (inspect.getdoc(module) or "").partition("\n\n")[2]


def block(directives: list[str]) -> str:
    return "```{eval-rst}\n" + "\n".join(directives) + "```"


def index() -> str:
    rows = "\n".join(f"| [`{name}`]({name}.md) | {what} |" for name, what in MODULES.items())
    tree = "\n".join(MODULES)
    return (
        "# API reference\n\nLook up what a function takes and gives, or what a part computes. A score's docstring is "
        f"its formula.\n\n| module | for |\n|---|---|\n{rows}\n\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"
    )


def write(folder: Path) -> None:
    """All pages of the reference."""
    put(folder, {f"{module}.md": page(module) for module in MODULES} | {"index.md": index()})


if __name__ == "__main__":
    write(Path(sys.argv[1]))
