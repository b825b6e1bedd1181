"""Every number of rows launches what one of `Compiles.variant`'s representatives had compiled."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from ds_runtime.engine.device import first_steps

pytest.importorskip("triton")

PROGRAM = Path(__file__).with_name("launch_variants.py")
SEED = random.SystemRandom().randrange(1 << 30)


def run(program: Path, *given: str, timeout: float) -> str:
    """What a program printed in whose process Triton compiles. It must succeed."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(program), *given]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, (given, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


@pytest.mark.parametrize(
    "rows", [pytest.param(SEED, id="sample"), pytest.param("all", marks=pytest.mark.slow)]
)
def test_representatives_of_variants_compile_all_that_any_call_launches(rows):
    said = run(PROGRAM, str(rows), timeout=1500)
    assert said.count(" variants, ") == 60, "a place without a line"
    assert "v3 experts:experts_fp8 (257, 2048, 7168): " in said


def test_a_long_sequence_of_a_rehearsal_is_long_for_every_configuration():
    """Rows of more tokens than one program keeps have launches of their own."""
    folder = files("ds_runtime_triton") / "configs"
    found = [json.loads(file.read_text()) for file in Path(str(folder)).glob("*/index_topk.json")]
    kept = [c["ALONE"] for held in found for s in held["shapes"].values() for c in s.values()]
    assert kept and max(kept) < first_steps._LONG
