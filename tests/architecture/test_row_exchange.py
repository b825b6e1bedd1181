"""How rows reach other ranks is known in one place: nobody else asks which exchange it is."""

from __future__ import annotations

import re
from pathlib import Path

import ds_runtime

CORE = Path(ds_runtime.__file__).parent
ASKS = re.compile(
    r"attention_ranks|\.spread\b|\bGatherScatter\b|\bSum\(|exchange\.groups [=!<>]|batch\.order is"
    r"|batch\.order\.|isinstance\([^)]*exchange"
)


def test_only_parallel_and_config_know_how_rows_are_exchanged() -> None:
    found = []
    for path in sorted(CORE.rglob("*.py")):
        name = path.relative_to(CORE).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not name.startswith(("parallel/", "config/")) and ASKS.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
