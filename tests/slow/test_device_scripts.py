"""The scripts that measure an accelerator run on this machine, too: they reach into the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_runtime.checkpoint.hub import resolve_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.slow
SHORT = ["--set", "kv_memory=60000000", "max_running_requests=4"]


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("device_decode.py", ["--batch", "2", "--prompts", "32"], "'batch': 2, 'step_ms'"),
        (
            "device_long.py",
            ["--batch", "2", "--short", "64", "--long", "600", "--prefill", "128"],
            "'filled': True, 'step_ms'",
        ),
        ("device_speculative.py", ["--batch", "2", "--steps", "2", "--runs", "1"], '"cycle_ms"'),
    ],
)
def test_it_measures(script, flags, said, tmp_path):
    command = [sys.executable, str(BENCHMARKS / script), str(resolve_model("demo")), *flags]
    out = tmp_path / "out.jsonl"
    done = subprocess.run(
        [*command, *SHORT, "--out", str(out)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout and out.read_text().count("\n") == 1


def test_sums_over_ranks_are_timed(tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--rows", "1", "4", "--width", "64", "--replays", "2", "--out", str(out)]
    command = [sys.executable, str(BENCHMARKS / "device_sums.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["rows"] for line in lines] == [1, 4]
    assert all(line["library, us"] > 0 and line["gathered, us"] > 0 for line in lines)
