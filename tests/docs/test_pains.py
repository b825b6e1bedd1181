"""docs/pains.md: fifteen pains, each with tests that exist and run by default."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pains.md").read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.M)[1:]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def marks(function: ast.FunctionDef) -> set[str]:
    """The names of the marks on a test: `slow`, `skipif` and so on."""
    names = (n for d in function.decorator_list for n in ast.walk(d))
    return {n.attr for n in names if isinstance(n, ast.Attribute)}


def test_every_pain_has_its_section() -> None:
    assert [int(s.split(".")[0]) for s in SECTIONS] == list(range(1, 16))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.splitlines()[0])
def test_a_pain_is_shown_by_tests(section: str) -> None:
    assert re.findall(r"^\* `tests/[\w/]+\.py::\w+`$", section, re.M)
    assert section.count("\n* ") == section.count("::"), "a line per test, and nothing else"


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_a_named_test_exists_and_is_not_left_out(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    assert not marks(function) & {"slow", "gpu", "skip", "skipif", "xfail"}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            assert not re.search(r"slow|gpu|skip|xfail", ast.unparse(node.value))
