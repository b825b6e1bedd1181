"""A report for people, or as one line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def show(report: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], str]) -> int:
    """Print it; the exit code."""
    report["command"] = " ".join(["ds-runtime", *sys.argv[1:]])
    print(json.dumps(report) if as_json else render(report))
    return 0
