"""Tables of pages that scripts make from records: each lies between `<!-- NAME -->` and
`<!-- /NAME -->`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Rows = Sequence[Mapping[str, Any]]


def read(name: str) -> Rows:
    """A file of records; none where there is no such file."""
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def put(text: str, tables: Mapping[str, str]) -> str:
    """A page with its tables made anew, by NAME. Raises ValueError for a NAME that the page has
    not, or has twice."""
    for name, table in tables.items():
        mark = re.escape(name)
        between = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
        text, found = between.subn(lambda m, table=table: m[1] + table + m[2], text)
        if found != 1:
            raise ValueError(f"<!-- {name} -->: the page has {found} places for it, and needs one")
    return text
