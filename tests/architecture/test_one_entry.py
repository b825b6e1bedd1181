"""A process becomes a rank of a platform in one way, whoever starts it: engine, kit, benchmark."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ds_runtime.engine.process.entry import enter

ROOT = Path(__file__).parents[2]
ENTRY = "core/ds_runtime/engine/process/entry.py"


WORDS = ("init_worker", "local_rank", "process_env", "set_environment")


@cache
def nodes() -> tuple[tuple[str, ast.AST], ...]:
    """(file, node) of all that may start a rank. Of tests those that run where a device is."""
    found = [
        path
        for room in ("core", "kit", "plugins", "benchmarks")
        for path in (ROOT / room).rglob("*.py")
    ]
    made = list[tuple[str, ast.AST]]()
    for path in sorted([*found, *(ROOT / "tests").rglob("test_*on_device.py")]):
        text, file = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        if any(word in text for word in WORDS):
            made += [(file, node) for node in ast.walk(ast.parse(text))]
    return tuple(made)


def enters(node: ast.AST) -> bool:
    """Whether it calls a platform's init_worker, and is not a platform that calls its base's."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return called.endswith(".init_worker") and called != "super().init_worker"


def numbers(node: ast.AST) -> bool:
    """Whether it says which rank a platform is."""
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return any(ast.unparse(t).endswith("platform.local_rank") for t in targets)


def sets_variables(node: ast.AST) -> bool:
    """Whether it goes through a platform's variables by itself, and does not hand them on."""
    return isinstance(node, ast.For) and ".process_env()" in ast.unparse(node.iter)


@pytest.mark.parametrize("does", [enters, numbers])
def test_one_function_enters_a_platform(does: Callable[[ast.AST], bool]) -> None:
    assert {file for file, node in nodes() if does(node)} == {ENTRY}


def test_one_function_sets_what_a_platform_wants_in_the_environment() -> None:
    assert {file for file, node in nodes() if sets_variables(node)} == set()
    setting = {
        file
        for file, node in nodes()
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "set_environment"
    }
    assert {
        "core/ds_runtime/engine/process/worker.py",
        "kit/vendor/ds_runtime_kit/ranks/runs.py",
        "kit/bench/ds_runtime_bench/ops/measure.py",
    } <= setting


@pytest.mark.parametrize(("rank", "size", "threads"), [(0, 1, None), (0, 1, 3), (2, 4, None)])
def test_who_enters_is_known_by_its_number_before_it_is_told(
    rank: int, size: int, threads: int | None
) -> None:
    told = []

    class Noting:
        local_rank: int | None = None

        def init_worker(self, *given: int | None) -> None:
            told.append((self.local_rank, *given))

    enter(Noting(), rank, size, threads)  # type: ignore[arg-type]
    assert told == [(rank, rank, size, threads)]
