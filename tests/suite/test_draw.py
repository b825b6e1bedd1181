"""A draw of slow tests: the same for a seed on every worker, and as many as were asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import draw

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("n", range(200))
def test_slow(n):
    pass

def test_fast():
    pass
"""


def ran(tmp_path, *arguments, file="test_x.py"):
    """(ids of tests that ran, what was printed)."""
    (tmp_path / "test_x.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")
    paths = [str(ROOT / "tests"), str(ROOT / "tools")]
    command = [sys.executable, "-m", "pytest", "-p", "draw", "-p", "xdist", "-rA"]
    done = subprocess.run(
        [*command, *arguments, file],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        check=False,
    )
    return set(re.findall(r"PASSED (?:\S*::)(\S+)", done.stdout)), done.stdout + done.stderr


def test_a_share_is_drawn_and_a_seed_repeats_it(tmp_path):
    first, said = ran(tmp_path, "--draw", "0.25")
    assert 20 < len(first) < 85 and "test_fast" in first, "what is not slow always runs"
    (seed,) = re.findall(r"slow tests: --draw 0.25 --draw-seed (\w+)", said)
    again = ("--draw", "0.25", "--draw-seed", seed)
    assert ran(tmp_path, *again, "-n", "2")[0] == first, "workers collect the same"
    assert ran(tmp_path, *again[:3], seed + "0")[0] != first


def test_what_is_named_runs(tmp_path):
    assert len(ran(tmp_path, "--draw", "0.01", "-k", "test_slow")[0]) == 200
    named = ran(tmp_path, "--draw", "1e-9", file="test_x.py::test_slow")[0]
    assert len(named) == 200


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    config = SimpleNamespace(option=SimpleNamespace(draw=share))
    with pytest.raises(pytest.UsageError, match="give a share above 0, and at most 1"):
        draw.pytest_configure(config)
