"""ARCHITECTURE.md leads whoever has a task to the file that it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
MOST_LINES = 150
CORE = "core/ds_runtime"
TASKS = {  # the heading that a reader would choose: files that the task needs
    "Add a flag": ["config/engine.py", "config/server.py", "cli/known"],
    "Add a kernel for my chip": ["ops/contracts", "ops/binding/bind.py"],
    "Add a platform": ["platform/contract.py"],
    "Add an op": ["ops/contracts", "ops/declare.py", "ops/reference", "description/sites.py"],
    "Read another checkpoint format": ["weights/loaders", "weights/layouts.py"],
    "Serve another family's template or tool calls": [
        "text/formats/families.py",
        "text/parsers/registry.py",
    ],
    "Add a field or a route": ["server/generate/protocol.py", "server/app.py"],
    "Add a metric, or a field of the log": ["server/metrics.py", "server/observe/log.py"],
    "A page leaks": ["engine/schedule/ledger.py", "kv/rank_pages.py", "kv/pages.py"],
    "Memory runs out, or is left unused": ["kv/budget.py", "assembly/room.py"],
    "The wrong kernel is chosen": ["ops/binding/bind.py", "assembly/explain.py"],
    "A shard is cut wrong": ["parallel/layout.py", "weights/loader.py"],
    "A template, tokenizer or schema is refused": ["text/apart.py", "grammar/compile.py"],
    "A rank, an engine or a plugin dies": [
        "engine/process/failure.py",
        "server/engines/supervisor.py",
        "plugins/isolate.py",
    ],
}


def section(heading: str) -> str:
    """The text below a heading, up to the next."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", MAP, re.M | re.S)
    assert found, f"ARCHITECTURE.md has no heading {heading!r}"
    return found[1]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_leads_to_its_files(task: str) -> None:
    linked = set(re.findall(r"\]\(([^)\s]+)\)", section(task)))
    wanted = {f"{CORE}/{path}" for path in TASKS[task]}
    assert wanted <= linked
    assert all((ROOT / path).exists() for path in wanted)


def test_the_map_names_every_room() -> None:
    rooms = {p.parent.name for p in (ROOT / CORE).glob("*/__init__.py")}
    rooms -= {"demo", "demo_v32", "demo_v4", "testing"}  # a checkpoint each, and names of the kit
    linked = set(re.findall(rf"\]\({CORE}/(\w+)\)", section("Where things are")))
    assert rooms == linked


def test_the_map_is_read_in_one_go() -> None:
    assert len(MAP.splitlines()) <= MOST_LINES
