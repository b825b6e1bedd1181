"""A minute of the soak, and a tenth of the load under which every text must be right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.slow


def run(script: str, *flags: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_minute_of_mixed_load_leaves_memory_flat_and_every_page_free() -> None:
    assert "flat, and every page free" in run("soak.py", "--seconds", "60")


def test_under_load_every_text_is_right_and_complete() -> None:
    report = json.loads(run("under_load.py", "--requests", "300"))
    assert (report["completed"], report["max_concurrent_requests"]) == (300, 256)
    assert report["health_failed"] == 0
