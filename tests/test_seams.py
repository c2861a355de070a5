"""The seams between rooms: nobody outside a room asks which kind of a thing it holds, and arrows go one way."""

import ast
import builtins
import dis
from pathlib import Path
from types import CodeType

import pytest

import jaxkv
from jaxkv import store
from jaxkv.policies.parts import PARTS
from jaxkv.store.described import KNOWN

ROOT = Path(jaxkv.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
BASES = {base.__name__ for kinds in PARTS.values() for base in kinds.bases}
PART_NAMES = {part.__name__ for kinds in PARTS.values() for part in kinds.parts.values()} | BASES
STORES = set(KNOWN) | {"View", "Store"} | {name for name in vars(store) if name[0].isupper() and name != "KVCache"}
ROOMS = {"store": STORES, "policies": PART_NAMES - STORES}
GUESSED = ("run.py", "plan.py", "generate.py", "decoding.py", "request.py", "checkpoint.py", "lowering.py")


def room(file: Path) -> str:
    """The folder of a module, or its name."""
    return file.relative_to(ROOT).parts[0]


def calls(file: Path, *names: str):
    """The calls of these functions in a module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node


def unknown_names(code: CodeType, known: frozenset[str]):
    """Names that code and what is in it read and nobody has set: `known` are those of the module, and Python's own."""
    some = list(dis.get_instructions(code))
    set_here = {each.argval for each in some if each.opname == "STORE_NAME"}  # by a class
    yield from (
        each.argval
        for each in some
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval not in known | set_here
    )
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from unknown_names(inner, known)


def imports(file: Path):
    """(module, name) of everything that a module imports from jaxkv and the kernels."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("jaxkv", "pallas_kernels"):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("home", ROOMS)
def test_nobody_outside_a_room_asks_for_a_kind(home):
    asked = []
    for file in FILES:
        if room(file) == home:
            continue
        for call in calls(file, "isinstance", "issubclass"):
            names = {node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)}
            names |= {node.attr for node in ast.walk(call.args[1]) if isinstance(node, ast.Attribute)}
            if names & ROOMS[home]:
                asked.append(f"{file.relative_to(ROOT)}:{call.lineno} {sorted(names & ROOMS[home])}")
    assert not asked, asked


def test_inside_policies_only_their_table_asks():
    """`parts.py` asks which base a new part extends; no part asks for another's kind."""
    asked = [
        f"{file.name}:{call.lineno}"
        for file in FILES
        if room(file) == "policies" and file.name != "parts.py"
        for call in calls(file, "isinstance", "issubclass")
        if {node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)} & PART_NAMES
    ]
    assert not asked, asked


def test_nobody_guesses_what_a_store_or_part_has():
    guesses = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file in FILES
        if room(file) in ("attend", "store", "sharding", "speculative", *GUESSED)
        for call in calls(file, "getattr", "hasattr")
        if call.func.id == "hasattr" or len(call.args) == 3  # a name that may not be there
    ]
    assert not guesses, guesses


@pytest.mark.parametrize("name", ["run.py", *sorted(f"attend/{file.name}" for file in (ROOT / "attend").glob("*.py"))])
def test_programs_and_attention_name_no_kind_of_policy(name):
    """They import the protocols, never a part; and compare no `kind`."""
    file = ROOT / name
    named = {what for module, what in imports(file) if module.startswith("jaxkv.policies")}
    assert not named & (PART_NAMES - BASES), named
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "kind"]


ARROWS = {  # what the modules of a room never import
    "store": ("policies", "attend", "models", "run", "generate", "evaluation", "cli", "speculative", "serving"),
    "policies": ("models", "attend", "run", "generate", "evaluation", "cli", "speculative", "weights", "serving"),
    "attend": ("run", "generate", "evaluation", "cli", "speculative", "weights", "serving"),
    "models": ("policies", "store", "attend", "run", "generate", "evaluation", "cli", "serving"),
    "sharding": ("policies", "store", "attend", "run", "generate", "evaluation", "cli", "serving"),
    "run.py": ("generate", "evaluation", "cli", "serving"),
    "generate.py": ("evaluation", "cli", "serving"),
    "evaluation": ("cli", "serving"),
    "serving": ("evaluation", "cli"),
}


@pytest.mark.parametrize("home", ARROWS)
def test_arrows_go_one_way(home):
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}.{name}"
        for file in FILES
        if room(file) == home
        for module, name in imports(file)
        for target in (f"{module}.{name}".split(".")[1],)
        if module.startswith("jaxkv") and target in ARROWS[home]
    ]
    assert not wrong, wrong


def test_kernels_know_arrays_only():
    kernels = ROOT.parent / "pallas_kernels"
    assert not [file for file in kernels.rglob("*.py") for module, _ in imports(file) if module.startswith("jaxkv")]


@pytest.mark.some(3)
@pytest.mark.parametrize("folder", ["jaxkv", "pallas_kernels", "benchmarks", "tests"])
def test_every_name_that_code_reads_is_set(folder):
    """A missing import, which the linters cannot see beside shapes that are written as names."""
    own = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__path__", "__annotations__"}
    files = sorted((ROOT.parent / folder).rglob("*.py"))
    assert files
    for file in files:
        code = compile(file.read_text(encoding="utf-8"), str(file), "exec")
        known = own | {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME"}
        assert not set(unknown_names(code, known)), file
