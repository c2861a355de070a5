"""The site's made pages agree with the code, and what is declared is what is used."""

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from jaxkv.configs import config_files
from jaxkv.policies import Aggregate, catalogue

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs"))
import api_pages  # noqa: E402
import policy_pages  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES_OF = {"orbax-checkpoint": "orbax", "pytest-xdist": "xdist"}  # the others are called as their modules
UNIMPORTED = {  # extra -> what is used in another way than by an import
    "docs": {"furo": 'html_theme = "furo"', "sphinx-copybutton": '"sphinx_copybutton"'},
    "dev": {
        "ipykernel": "nbclient starts it", "pytest-xdist": "-n auto", "beartype": "beartype.beartype",
        "ruff": "ruff check", "pyright": "pyright", "libtpu": "jax loads it",
    },
}  # fmt: skip
OF_JAX = {"cuda", "tpu"}  # jax's own extras
LIBRARY = ("", *sorted(set(PROJECT["optional-dependencies"]) - {"bench", "docs", "dev"} - OF_JAX))
PLACES = {  # what may be imported where: the extras whose dependencies are there
    "jaxkv": LIBRARY, "pallas_kernels": LIBRARY, "docs": ("", "docs"), "tests": (*LIBRARY, "docs", "dev"),
    "colab": (*LIBRARY, "dev"), "benchmarks": (*LIBRARY, "bench"),
}  # fmt: skip
OTHER_ENVIRONMENTS = ("tests/oracle/", "tests/models/large/", "benchmarks/peer")  # tests/oracle/README.md


@pytest.mark.parametrize("name", catalogue())
def test_a_policys_page_agrees_with_its_file(name):
    file = config_files("policies")[name]
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    page = policy_pages.page(name, catalogue()[name], file.read_text(encoding="utf-8"))
    assert page.startswith(f"# {name}\n") and table["title"] in page
    assert policy_pages.linked(table.get("paper", "")) in page
    assert policy_pages.FIDELITIES[table["fidelity"]] in page and table.get("differs", "") in page
    (shown,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    assert tomllib.loads(shown) == table
    for phase in ("prefill", "decode"):
        for part, value in table.get(phase, {}).items():
            kind = value.get("kind") if isinstance(value, dict) else None
            plain = part == "aggregate" and getattr(catalogue()[name], phase).aggregate == Aggregate()
            assert plain or f"| `{part}` |" in page, (phase, part)
            assert kind is None or f"`{kind}`" in page, (phase, part)
    assert all(f"tests/{check.test}`" in page for check in policy_pages.checks.checks(name))


def test_the_code_of_the_catalogue_can_be_run():
    """Each page's call makes its policy."""
    import jaxkv

    for page in policy_pages.pages().values():
        for code in re.findall(r"```python\n(.*?)```", page, re.S):
            exec(code, {"jaxkv": jaxkv})


def test_the_catalogue_has_every_policy_in_its_table():
    index = policy_pages.index(dict(sorted(catalogue().items())))
    assert re.findall(r"^\| \[`([^`]+)`\]", index, re.M) == sorted(catalogue())
    assert index.split("```{toctree}")[1].split()[1:-1] == sorted(catalogue())


def test_the_readme_counts_the_policies():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    bounded = sum(policy.bounded for policy in catalogue().values())
    assert (
        f"one of {len(catalogue())} methods" in text and f"{bounded} of them bound the cache while the answer" in text
    )


def test_figures_and_notes_are_of_policies_that_there_are():
    for names in (policy_pages.quality(), policy_pages.notes()):
        assert set(names) <= set(catalogue())
    assert len(policy_pages.quality()) > 70
    assert policy_pages.quality()["h2o"]["right"] == [0.0625, 0.0215, 0.1684]  # benchmarks/RESULTS.md has 6 (2-17)


@pytest.mark.parametrize("module", api_pages.MODULES)
def test_every_public_name_has_an_entry(module):
    page, names = api_pages.page(module), api_pages.public(module)
    here = [name for name in names if api_pages.home_of(module, name) == module]
    found = re.findall(rf"^\.\. (?:auto\w+|py:\w+):: {re.escape(module)}\.(\w+)$", page, re.M)
    assert sorted(found) == sorted(names) and set(here) <= set(found)
    for name in here:
        thing = getattr(importlib.import_module(module), name)
        assert not callable(thing) or (thing.__doc__ or "").strip(), f"{module}.{name} has no docstring"


def test_every_public_module_has_a_page():
    """A package with public names of its own is in the reference, or says in its name that it is inside."""
    inside = {"jaxkv.attend", "jaxkv.cli"}
    packages = {f"jaxkv.{file.parent.name}" for file in (ROOT / "jaxkv").glob("*/__init__.py")}
    assert packages - inside <= set(api_pages.MODULES)
    for name in api_pages.operations():
        assert f"## {name}\n" in api_pages.page("pallas_kernels")


def declared(extra: str) -> set[str]:
    """The names of what is declared in an extra; "" for what is always there."""
    listed = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return {re.split(r"[\[<>=; ]", each)[0].lower() for each in listed} - {"jaxkv"}


def imported(folder: str) -> dict[str, set[str]]:
    """Modules of other projects -> the files of the folder that import them."""
    own = {"jaxkv", "pallas_kernels", "benchmarks", "tests", "a_page"}
    own |= {file.stem for place in ("tests", "docs") for file in (ROOT / place).glob("*.py")}
    found: dict[str, set[str]] = {}
    for file in (ROOT / folder).rglob("*.py"):
        path = file.relative_to(ROOT).as_posix()
        if path.startswith(OTHER_ENVIRONMENTS):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_needed":
                names = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]  # asked for by name
            for name in {name.partition(".")[0] for name in names} - own - sys.stdlib_module_names:
                found.setdefault(name, set()).add(path)
    return found


def module_of(dependency: str) -> str:
    return MODULES_OF.get(dependency, dependency.replace("-", "_"))


@pytest.mark.some(3)
@pytest.mark.parametrize("extra", [*LIBRARY, "bench", "docs", "dev"])
def test_declared_is_used(extra):
    """Each dependency is imported in a place that its extra is for, or stands where it is used without an import."""
    places = [place for place, extras in PLACES.items() if extra in extras]
    if extra in LIBRARY:  # what one installs for the library serves the library itself
        places = ["jaxkv", "pallas_kernels"]
    seen = set().union(*(imported(place) for place in places))
    unused = {each for each in declared(extra) if module_of(each) not in seen}
    assert unused == set(UNIMPORTED.get(extra, {}))
    text = "".join((ROOT / file).read_text(encoding="utf-8") for file in ("docs/conf.py", "pyproject.toml", ".ci/run"))
    for said in [said for said in UNIMPORTED.get(extra, {}).values() if '"' in said or "-n" in said]:
        assert said in text


@pytest.mark.parametrize("place", PLACES)
def test_used_is_declared(place):
    """Whoever installs what the place needs has all that it imports."""
    known = {module_of(each) for extra in PLACES[place] for each in declared(extra)}
    missing = {name: files for name, files in imported(place).items() if name not in known}
    assert not missing


def test_everything_that_is_installed_for_tests_is_pinned():
    pins = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().split()}
    assert set().union(*(declared(extra) for extra in (*LIBRARY, "docs", "dev"))) <= pins
