"""What a step is made of is written once, however it runs: its batch, its verdict, its drafts."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# A kernel declares the phases that it serves.
PHASES_OF_KERNELS = ('_DECODE = frozenset({"any", "decode", "verify", "tree"})',)
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
    assert files("front.keep") == {"speculate/acceptance.py"}  # chains' here, trees' in their room
    assert files("settle") == {"device/parts.py", "speculate/verdict.py"}  # called, and recorded


def test_one_place_drafts_chains_and_one_trees() -> None:
    drafting = {file for file, _, called in CALLS if called.endswith("draft.forward")}
    assert drafting == {"speculate/follow.py", "speculate/chain.py", "trees/drafting.py"}
    assert {
        (file, function)
        for file, function, called in CALLS
        if called.endswith("draft.forward") and file != "trees/drafting.py"
    } == {("speculate/follow.py", "follow"), ("speculate/chain.py", "_phase")}


def test_one_line_names_the_room_of_trees() -> None:
    """Outside it the engine says no more of trees than the phase that kernels declare."""
    said = re.compile(r"(?<!rm)trees?(?![a-z])", re.I)
    for path in sorted(ENGINE.rglob("*.py")):
        file = path.relative_to(ENGINE).as_posix()
        if file.startswith("trees/"):
            continue
        lines = [line for line in path.read_text().splitlines() if said.search(line)]
        code = [line for line in lines if "ds_runtime.engine.trees" in line]
        if file == "speculate/branching.py":
            assert len(code) == 1
        else:
            assert not [line for line in lines if line not in PHASES_OF_KERNELS], (file, lines)


WITHOUT_TREES = """
import sys

sys.modules["ds_runtime.engine.trees"] = None  # as if the folder were not there
from ds_runtime import LLM, SamplingParams
from ds_runtime.errors import DsRuntimeError

given = {"platform": "cpu", "threads": 1, "kv_memory": 40_000_000, "context_length": 256}
params = SamplingParams(max_tokens=12, temperature=0.0)
told = []
for drafts in ({}, {"speculative_algorithm": "NEXTN"}):
    with LLM("demo", **given, **drafts) as llm:
        told.append(llm.generate(["12 + 30 = "], params)[0].text)
assert told[0] == told[1], told
try:
    LLM("demo", **given, **drafts, speculative_eagle_topk=2)
except ImportError as e:
    assert "ds_runtime.engine.trees" in str(e), e
    print("served")
"""


def test_without_the_room_of_trees_chains_are_served() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TREES], capture_output=True, text=True, timeout=300
    )
    assert ran.stdout.endswith("served\n"), ran.stderr[-2000:]


@pytest.mark.parametrize("name", ["graph_backend", "self._backend.capture"])
def test_one_place_records(name: str) -> None:
    found = {file for file, _, called in CALLS if called.endswith(name)}
    assert found == {"device/programs.py" if name == "graph_backend" else "capture/recorder.py"}
