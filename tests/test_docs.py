"""The pages: their Python runs, their commands can be parsed, their files can be read, their links lead somewhere."""

import ast
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import get_args

import outside_parts
import pytest
import tyro
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from tyro.conf import OmitArgPrefixes

import jaxkv
from benchmarks.family_cost import first_layers
from jaxkv.cli.entry import Command
from jaxkv.evaluation import scorers, settings
from jaxkv.policies.parts import PARTS
from jaxkv.policies.policy import from_dict

ROOT = Path(__file__).parent.parent
PAGES = {
    page.relative_to(ROOT).as_posix(): page
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}
SHORT = {"README.md", "docs/index.md", "docs/add-a-method.md", "docs/policies.md", "docs/pools.md"}  # few programs
CODE = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])  # <!--- skip: next -->: what needs a server, say


def blocks(language: str, pages: dict[str, Path] = PAGES) -> list[tuple[str, str]]:
    """(page, text) of every block in the language."""
    found = []
    for name, page in pages.items():
        for text in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M):
            found.append((name, text))
    return found


def with_code() -> list:
    names = dict.fromkeys(name for name, _ in blocks("python"))
    return [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in names]


@pytest.fixture
def alone(monkeypatch):
    """Parts and scorers that a page registers are gone after it, and those of the tests are not there."""
    kinds = [each for each in {id(each): each for each in PARTS.values()}.values()]
    before = [dict(each.parts) for each in kinds]
    for each in kinds:
        for kind in [kind for kind, part in each.parts.items() if not part.__module__.startswith("jaxkv")]:
            del each.parts[kind]
    monkeypatch.setattr(scorers, "SCORERS", scorers.SCORERS)
    known = dict(scorers.SCORERS)
    yield
    for each, parts in zip(kinds, before, strict=True):
        each.parts.clear()
        each.parts.update(parts)
    scorers.SCORERS.clear()
    scorers.SCORERS.update(known)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", with_code())
def test_the_code_of_a_page_runs(name, alone, unchecked, smollm2, monkeypatch, tmp_path):
    """From top to bottom in one namespace, on the first two layers of the model: the code is the same, sooner done."""
    monkeypatch.chdir(tmp_path)
    load, short = jaxkv.load, first_layers(smollm2, 2)

    def loaded(model, **options):
        assert model == "smollm2-135m", "a page whose code runs everywhere"
        return first_layers(load(model, **options), 2) if options else short

    monkeypatch.setattr(jaxkv, "load", loaded)
    document = CODE.parse(PAGES[name])
    document.namespace["__name__"] = "a_page"
    examples = list(document.examples())
    assert examples
    for example in examples:
        example.evaluate()


@pytest.mark.slow
def test_the_readmes_code_on_the_whole_model(alone, capsys):
    for example in CODE.parse(PAGES["README.md"]).examples():
        example.evaluate()
    assert len(capsys.readouterr().out) > 40


@pytest.mark.parametrize("name, text", [block for block in blocks("sh") if "jaxkv " in block[1]])
def test_commands_have_the_options_that_are_shown(name, text):
    commands = re.findall(r"^(?:.*&& )?jaxkv (.*)$", text.replace("\\\n", " "), re.M)
    assert commands
    for command in commands:
        tyro.cli(Command, prog="jaxkv", args=shlex.split(command, comments=True), config=(OmitArgPrefixes,))


def test_a_wrong_option_would_be_found(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(Command, prog="jaxkv", args=["generate", "x", "--budgets", "3"], config=(OmitArgPrefixes,))
    assert "budget" in capsys.readouterr().err


def test_inline_commands_are_there():
    """`jaxkv NAME` in the text is a subcommand."""
    names = {get_args(each)[1].name for each in get_args(Command)}
    assert {"generate", "eval"} <= names
    for page in PAGES.values():
        for command in re.findall(r"`jaxkv ([a-z]+)[^`\n]*`", page.read_text(encoding="utf-8")):
            assert command in names, f"{page.name}: jaxkv {command}"


@pytest.mark.parametrize("name, text", blocks("toml"))
def test_files_can_be_read(name, text, alone, monkeypatch, tmp_path):
    """A policy or a run; the parts and data that it names are the page's own."""
    monkeypatch.chdir(tmp_path)
    page = {name: PAGES[name]}
    table = tomllib.loads(text)
    for part in [part for part in ("mine.py", "metrics.py") if f"`{part}`" in PAGES[name].read_text(encoding="utf-8")]:
        source = [code for _, code in blocks("python", page) if "@register" in code or "SCORERS[" in code]
        Path(part).write_text(source[0], encoding="utf-8")
        jaxkv.policies.load_parts(part)
    for at, (_, lines) in enumerate(blocks("json", page)):
        rows = [json.loads(line) for line in lines.splitlines()]
        Path("mine.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        assert at == 0 and all(row["answers"] for row in rows)
    if "tasks" in table:
        assert settings.from_dict(table).cells()
    else:
        assert from_dict({"name": "mine", **table}).evicts


def test_the_parts_of_the_page_are_those_that_keep_the_contract():
    """`outside_parts.py`, which test_outside.py runs through the whole contract, has them word for word."""
    shown = {node.name: ast.dump(node) for _, code in blocks("python") for node in ast.parse(code).body
             if isinstance(node, ast.ClassDef)}  # fmt: skip
    tested = [node for node in ast.parse(Path(outside_parts.__file__).read_text(encoding="utf-8")).body]
    parts = {node.name: ast.dump(node) for node in tested if isinstance(node, ast.ClassDef)}
    assert len(parts) == 5 and parts.items() <= shown.items()


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    """On GitHub too; the site's build looks at the site's."""
    page = PAGES[name]
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http", "catalogue/", "api/")):  # made by the site's build
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(there), f"{name}: {target}"
    for path in re.findall(r"`((?:docs|tests|benchmarks|configs|colab|jaxkv|pallas_kernels)/[\w./-]+)`", text):
        placeholder = re.search(r"/(NAME|OPERATION)\b", path)
        assert placeholder or (ROOT / path).exists(), f"{name}: {path}"


def test_pictures_have_text_alternatives():
    for page in PAGES.values():
        for words, picture in re.findall(r"!\[(.*?)\]\((.*?)\)", page.read_text(encoding="utf-8"), re.S):
            assert len(words.split()) > 5, f"{page.name}: {picture}"
