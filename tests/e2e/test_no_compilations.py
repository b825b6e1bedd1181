"""Nothing is compiled once an engine has warmed up, whatever requests come: random_requests.py.

Where no accelerator is, launches are recorded. On one, the engine's own count is held.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from parts import mostly_slow

pytest.importorskip("triton")

PROGRAM = Path(__file__).with_name("random_requests.py")
CASES = ("dense", "lora", "expanded", "op by op", "fp8", "chain", "tree", "sparse")
SEED = random.SystemRandom().randrange(1 << 30)


def served(folder: Path, case: str, *given: str, timeout: float = 280) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(PROGRAM), str(folder), "--case", case, *given]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, (given, done.stdout[-3000:], done.stderr[-3000:])
    assert "new: 0" in done.stdout
    print(done.stdout)


@pytest.mark.parametrize("case", mostly_slow(["chain", "lora"], 1))
def test_a_few_random_requests_compile_nothing(tmp_path, case):
    few = ("--running", "24", "--longest", "700")
    served(tmp_path, case, "--requests", "24", *few, "--seed", str(SEED))


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted({*CASES} - {"lora", "chain"}))
def test_random_requests_compile_nothing(tmp_path, case):
    """More of them: `python tests/e2e/random_requests.py FOLDER --requests N`."""
    served(tmp_path, case, "--requests", "60", "--seed", str(SEED))


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "requests"), [("lora", 6000), ("chain", 2000), ("sparse", 2000)])
def test_random_requests_compile_nothing_on_the_accelerator(tmp_path, case, requests):
    served(tmp_path, case, "--real", "--requests", str(requests), "--seed", str(SEED))
