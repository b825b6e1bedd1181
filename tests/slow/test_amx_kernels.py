"""The CPU's kernels for matrix units over emulated ones, where the processor has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds_runtime_cpu.isa import missing
from ds_runtime_cpu.machine import processor

pytestmark = pytest.mark.slow
LACKING = missing("avx512bf16", processor().features)


@pytest.mark.skipif(bool(LACKING), reason=f"the library for AMX needs {', '.join(LACKING)}")
def test_kernels_for_amx_conform_under_emulation(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "tools" / "check_native.py"
    command = [sys.executable, script, "amx", "--require", "--build", tmp_path]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
