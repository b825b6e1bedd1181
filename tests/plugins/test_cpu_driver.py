"""The driver of tests/native against the C header: check_native.py runs it, which takes longer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import ds_runtime_cpu

SOURCES = Path(ds_runtime_cpu.__file__).parents[1] / "csrc"
DRIVER = Path(__file__).parents[1] / "native"
FILES = sorted(DRIVER.glob("*.cpp"))
NAMES = (os.environ.get("CXX", "c++"), "c++", "g++", "clang++")
CXX = next(filter(None, map(shutil.which, NAMES)), None)


def code(path: Path) -> str:
    return re.sub(r"//.*", "", path.read_text())


def exported() -> list[str]:
    return re.findall(r"^DS_EXPORT \w+ ds_cpu_(\w+)\(", code(SOURCES / "ds_cpu.h"), re.MULTILINE)


def test_the_list_is_that_of_the_header():
    listed = re.findall(r"\bX\((\w+)\) *\\?$", code(DRIVER / "driver.h"), re.MULTILINE)
    kernels = [name for name in listed if not name.startswith("slots_")]
    assert sorted(kernels) == sorted(exported()) and "experts" in listed


def test_every_function_is_called():
    text = "".join(map(code, FILES))
    assert [f for f in exported() if not re.search(rf"\blibrary\.{f}\(", text)] == []


@pytest.mark.skipif(CXX is None, reason="no C++ compiler")
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_it_compiles(file):
    """With the header as it is: a changed signature fails here, not after all else."""
    command = [str(CXX), "-std=c++17", "-fsyntax-only", "-I", str(SOURCES), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
