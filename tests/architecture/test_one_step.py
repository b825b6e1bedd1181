"""What a step is made of is written once, however it runs: its batch, its verdict, its drafts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[2] / "core" / "ds_runtime" / "engine"


def calls() -> Iterator[tuple[str, str, str]]:
    """(file, function, what it calls) of everything in the engine; methods by their last name."""
    for path in sorted(ENGINE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for owner in ast.walk(tree):
            if isinstance(owner, ast.FunctionDef):
                for node in ast.walk(owner):
                    if isinstance(node, ast.Call):
                        called = ast.unparse(node.func)
                        yield path.relative_to(ENGINE).as_posix(), owner.name, called


CALLS = frozenset(calls())


def files(*names: str) -> set[str]:
    """Files that call any of these."""
    return {file for file, _, called in CALLS if called in names}


def test_one_place_makes_batches() -> None:
    assert files("Batch", "DecodePart") == {"step/inputs.py"}
    assert files("PrefillPart", "PrefixChunk") == {"step/prompts.py"}  # and asks no other
    assert files("np.divmod") == {"step/inputs.py"}  # of a position into page and place


def test_one_place_judges_drafts() -> None:
    assert files("judge", "verify", "right.cumprod") == {"speculate/acceptance.py"}
    assert files("settle") == {"device/parts.py", "speculate/verdict.py"}  # called, and recorded


def test_one_place_drafts_chains_and_one_trees() -> None:
    drafting = {file for file, _, called in CALLS if called.endswith("draft.forward")}
    assert drafting == {"speculate/follow.py", "speculate/chain.py", "speculate/tree.py"}
    assert {
        (file, function)
        for file, function, called in CALLS
        if called.endswith("draft.forward") and file != "speculate/tree.py"
    } == {("speculate/follow.py", "follow"), ("speculate/chain.py", "_phase")}


@pytest.mark.parametrize("name", ["graph_backend", "self._backend.capture"])
def test_one_place_records(name: str) -> None:
    found = {file for file, _, called in CALLS if called.endswith(name)}
    assert found == {"device/programs.py" if name == "graph_backend" else "capture/recorder.py"}
