"""`ds-runtime warm` fills caches of compiled kernels, and says where there is nothing to fill."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_runtime.cli import main

HERE = Path(__file__).parent


def test_the_second_time_nothing_is_left(tmp_path):
    """Of the model there is config.json alone."""
    pytest.importorskip("triton")
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(HERE / "warming.py"), str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = done.stdout.splitlines()
    assert re.fullmatch(r"compiled [1-9]\d+ by triton in \d+\.\d s", first)
    assert re.fullmatch(r"nothing was left to compile \(\d+\.\d s\)", second)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_device_whose_kernels_are_not_compiled_is_a_sentence(tiny, capsys):
    assert main(["warm", "--model", str(tiny), "--platform", "cpu", "--port", "8080"]) == 1
    said = capsys.readouterr().err
    assert "warm: no kernel that serves this model on" in said and "(platform cpu)" in said
    assert said.rstrip().endswith("run this where the accelerator is, or leave it out")


def test_a_missing_device_is_named(tiny, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["warm", str(tiny), "--platform", "cuda"]) == 1
    assert "cuda" in capsys.readouterr().err
