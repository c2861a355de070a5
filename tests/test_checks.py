"""The table of what each policy is checked against: complete, and about tests that there are."""

import ast
import functools
from pathlib import Path

import pytest
from checks import CHECKS, KINDS, checks

from jaxkv.policies import catalogue

TESTS = Path(__file__).parent


@functools.cache
def parsed(file: str) -> dict[str, list[ast.AST]]:
    """What stands at the top of a test file, by name; a constant that is added to has several statements."""
    found: dict[str, list[ast.AST]] = {}
    for node in ast.parse((TESTS / file).read_text(encoding="utf-8")).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            names += [each.id for each in ast.walk(target) if isinstance(each, ast.Name)] if target else []
        for name in names:
            found.setdefault(name, []).append(node)
    return found


def words(file: str, name: str, seen: set[str]) -> set[str]:
    """All strings in a function or a constant, its decorators and what it uses of its file included."""
    if name in seen:
        return set()
    seen.add(name)
    here = [each for node in parsed(file).get(name, []) for each in ast.walk(node)]
    found = {node.value for node in here if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found.union(*(words(file, node.id, seen) for node in here if isinstance(node, ast.Name)))


def test_every_policy_has_its_line():
    assert list(CHECKS) == sorted(catalogue())
    assert {check.against for name in CHECKS for check in checks(name)} <= set(KINDS)


@pytest.mark.parametrize("name", CHECKS)
def test_the_test_is_there_and_about_the_policy(name):
    """It has the name among its parameters or in its code, or runs over the whole catalogue."""
    for check in checks(name):
        file, function = check.test.split("::")
        (found,) = parsed(file)[function]
        assert isinstance(found, ast.FunctionDef) and function[:5] == Path(file).name[:5] == "test_"
        everyone = any("catalogue" in ast.dump(each) for each in found.decorator_list)
        assert everyone or name in words(file, function, set()), f"{check.test} says nothing of {name}"
