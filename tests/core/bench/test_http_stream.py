"""The figure of the front end is measured with a server that starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "http_stream.py"


@pytest.mark.slow
def test_the_benchmark_of_the_front_end_runs():
    flags = ("--streams", "2", "--tokens", "16", "--rate", "400", "--rounds", "1", "--no-record")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 streams x 16 tokens in .* us of CPU per token", done.stdout)
