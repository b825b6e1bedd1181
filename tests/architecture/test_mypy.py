"""mypy checks the tests that need a GPU, which CI never runs, and every package strictly."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from mypy.main import process_options
from mypy.options import Options

ROOT = Path(__file__).parents[2]
STRICT = (
    "disallow_untyped_defs",
    "disallow_incomplete_defs",
    "disallow_untyped_calls",
    "disallow_untyped_decorators",
    "disallow_any_generics",
    "warn_return_any",
)


def needs_gpu(text: str) -> bool:
    """Whether a test file has the mark: as an attribute, or as a name that is added."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "gpu" and "mark" in ast.unparse(node))
        or (isinstance(node, ast.Call) and ast.unparse(node).endswith("add_marker('gpu')"))
        for node in ast.walk(ast.parse(text))
    )


@pytest.mark.parametrize(
    "text",
    [
        "pytestmark = pytest.mark.gpu",
        "pytestmark = [pytest.mark.slow, pytest.mark.gpu]",
        "from pytest import mark\n@mark.gpu\ndef test_a(): ...",
        "case = pytest.param(1, marks=pytest.mark.gpu)",
        "def pytest_collection_modifyitems(items):\n    items[0].add_marker('gpu')",
    ],
)
def test_a_mark_is_found_however_it_is_given(text: str) -> None:
    assert needs_gpu(text)
    assert not needs_gpu(text.replace("gpu", "slow"))


@cache
def checked() -> dict[str, tuple[str, Options]]:
    """file → (module, its options), of every file that `mypy` without arguments reads."""
    sources, options = process_options(["--config-file", str(ROOT / "pyproject.toml")])
    return {
        Path(source.path).resolve().relative_to(ROOT).as_posix(): (
            source.module,
            options.clone_for_module(source.module),
        )
        for source in sources
        if source.path is not None
    }


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of the configuration begin there."""
    monkeypatch.chdir(ROOT)


def test_tests_that_need_a_gpu_are_checked() -> None:
    found = set()
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if needs_gpu(text) and path != Path(__file__):
            assert "# mypy:" not in text, f"{path} has settings of its own"
            found.add(path.relative_to(ROOT).as_posix())
    assert found, "no test needs a GPU"
    missing = sorted(found - checked().keys())
    assert not missing, "add them to `files` of [tool.mypy] in pyproject.toml"
    for file in found:
        module, options = checked()[file]
        assert options.check_untyped_defs and not options.ignore_errors, module


@pytest.mark.parametrize(
    "package",
    sorted(
        path.parent.relative_to(ROOT).as_posix()
        for room in ("core", "kit", "plugins")
        for path in (ROOT / room).rglob("py.typed")
    ),
)
def test_packages_are_checked_strictly(package: str) -> None:
    """A package needs annotations and a test does not: an override tells them apart."""
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
    assert files and not files - checked().keys()
    _, options = checked()[f"{package}/__init__.py"]
    assert [name for name in STRICT if not getattr(options, name)] == []
