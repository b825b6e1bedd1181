r"""A pytest plugin that runs the tests on other native libraries than the installed ones.

    LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
        PYTHONPATH=tests/native pytest -p instrumented --native-libraries BUILD tests/plugins

BUILD is a build folder of CMake, e.g. with DS_SANITIZE=address,undefined. With --emulated-amx it is
of DS_EMULATE_AMX=ON: this processor counts as one with AMX.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_runtime_cpu import machine, native
from ds_runtime_cpu.isa import ISAS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-libraries", type=Path, metavar="FOLDER", required=True)
    parser.addoption("--emulated-amx", action="store_true", help="AMX counts as a feature")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--native-libraries").resolve()
    native.library_folder = lambda: folder
    if config.getoption("--emulated-amx"):
        here = machine.processor()
        emulated = machine.Processor(here.name, here.features | ISAS["amx"].needs)
        machine.processor = native.processor = lambda: emulated
    assert native.runnable(), f"{folder}: no library that runs here"


def pytest_report_header(config: pytest.Config) -> str:
    return f"native libraries: {', '.join(native.runnable())} of {native.library_folder()}"
