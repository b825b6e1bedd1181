"""A pytest plugin: how long each file took, and whether the tests that must run have run.

Beside the seconds of a file stand those of the processor, of this process and of those that its
tests started and waited for: a file that has few of them waits, and its worker's core is idle.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

LONGEST = 12  # files in the table
NOT_RUN = 9  # exit status: unlike a failure, it is not worth another try
LIMIT = 60.0  # seconds above which a file is reported as too long


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--must-run",
        type=Path,
        metavar="FILE",
        help=f"exit {NOT_RUN} unless every test that FILE names has run, passed or failed",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config.option.must_run), "report-of-files")


def named(path: Path) -> list[str]:
    """The tests that a list names: `file::test`, without parameters."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


_spent = [sum(os.times()[:4])]  # processor seconds when the last phase of a test ended


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what a phase cost, where a worker's reports can carry it."""
    report = yield
    now = sum(os.times()[:4])
    report.processor = now - _spent[0]  # type: ignore[attr-defined]
    _spent[0] = now
    return report


class Report:
    """Adds up the phases of each file's tests."""

    def __init__(self, must_run: Path | None) -> None:
        self.seconds, self.count = Counter[str](), Counter[str]()
        self.processor = Counter[str]()
        self.wanted = named(must_run) if must_run is not None else []
        self.ran = set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, _ = report.nodeid.partition("::")
        self.seconds[file] += report.duration
        self.processor[file] += getattr(report, "processor", 0.0)
        if report.when == "call" and not report.skipped:
            self.count[file] += report.passed
            self.ran.add(report.nodeid.partition("[")[0])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if set(self.wanted) - self.ran:
            session.exitstatus = NOT_RUN

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        if sum(self.seconds.values()) > LIMIT:
            write("seconds  processor  passed  file")
            for file, seconds in self.seconds.most_common(LONGEST):
                late = f"  above {LIMIT:.0f} s" if seconds > LIMIT else ""
                spent = self.processor[file]
                write(f"{seconds:7.1f}  {spent:9.1f}  {self.count[file]:6}  {file}{late}")
            write(f"{sum(self.seconds.values()):7.1f}  {sum(self.processor.values()):9.1f}  all")
        for test in self.wanted:
            if test not in self.ran:
                write(f"{test} must run in every run, and has not in this one", red=True)
